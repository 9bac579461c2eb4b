package egress

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/bullpen-run/bullpen/proto"
)

// What one link may have at once. A connection takes up to 256 KiB in the worker's stack and 64 KiB on its way, which is 80 MiB of
// the worker for a link that fills all, and as much as four times outsideBuffer in the kernel, which is 256 MiB.
const (
	MaxConnections = 256 // TCP connections, open or being opened, and UDP flows

	copyBuffer = 32 << 10
	udpIdle    = 30 * time.Second // after which a UDP flow is forgotten
	abortEvery = 20 * time.Millisecond
)

// Link is one jail's way out.
type Link struct {
	network  *Network
	number   uint32
	ip4, ip6 netip.Addr
	device   int // index of the gateway's end
	permits  *permits
	tcp      *tcp.Forwarder
	udp      *udp.Forwarder
	queries  *rate.Limiter

	ctx    context.Context //nolint:containedctx // the life of the link, which its connections share
	cancel context.CancelFunc

	in, out     atomic.Int64
	connections atomic.Int32 // and flows
	asking      atomic.Int32 // DNS queries on their way
	dnsConns    atomic.Int32 // TCP connections to the resolver
	used        atomic.Bool  // the stack may have something of the link

	mu      sync.Mutex
	running int           // goroutines of the link
	closing bool          // no more may start
	idle    chan struct{} // closed when closing and none is running
	blocked []proto.BlockedConnection

	once sync.Once
}

// Report is what went over a link.
type Report struct {
	proto.Traffic
	Blocked []proto.BlockedConnection // the first of each refused, at most [proto.MaxBlocked]
}

// Close takes the jail's network away, with every connection, and tells what happened. The interface goes a little
// later. It is best called when the program is dead, and may be called again.
func (l *Link) Close() Report {
	l.once.Do(func() {
		l.network.refusals.drain()
		l.network.unregister(l)
		l.cancel()
		l.finish()
		l.network.discard(l.device)
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	return Report{
		Traffic: proto.Traffic{BytesIn: l.in.Load(), BytesOut: l.out.Load()},
		Blocked: slices.Clone(l.blocked),
	}
}

// finish waits until nothing of the link runs. A connection may be on its way into the stack at any time, so they are
// aborted until there is none.
func (l *Link) finish() {
	l.mu.Lock()
	l.closing = true
	l.idle = make(chan struct{})
	running := l.running
	if running == 0 {
		close(l.idle)
	}
	l.mu.Unlock()
	if running == 0 && !l.used.Load() {
		return
	}
	tick := time.NewTicker(abortEvery)
	defer tick.Stop()
	for {
		abortAll(l.network.uplink.Stack, l.ip4, l.ip6)
		select {
		case <-l.idle:
			abortAll(l.network.uplink.Stack, l.ip4, l.ip6)
			return
		case <-tick.C:
		}
	}
}

// start reports whether a goroutine of the link may start; it then calls done when it ends.
func (l *Link) start() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing {
		return false
	}
	l.running++
	l.network.wg.Add(1)
	return true
}

func (l *Link) done() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running--
	if l.closing && l.running == 0 {
		close(l.idle)
	}
	l.network.wg.Done()
}

// block lists a refusal, unless the like is on the list or the list is full.
func (l *Link) block(b proto.BlockedConnection) {
	l.mu.Lock()
	defer l.mu.Unlock()
	same := func(o proto.BlockedConnection) bool {
		o.At = b.At
		return o == b
	}
	if len(l.blocked) < proto.MaxBlocked && !slices.ContainsFunc(l.blocked, same) {
		l.blocked = append(l.blocked, b)
	}
}

func (l *Link) blockAddr(protocol string, to netip.AddrPort, reason proto.BlockReason) {
	l.block(proto.BlockedConnection{
		Host: l.permits.nameOf(to.Addr()), Address: to.Addr().String(), Port: int(to.Port()),
		Protocol: protocol, Reason: reason, At: time.Now(),
	})
}

// admit takes a place and a permit for a connection. When ok, release gives both back; else the refusal was listed.
func (l *Link) admit(protocol string, to netip.AddrPort) (release func(), ok bool) {
	giveBack, permitted := l.permits.use(to, time.Now())
	if !permitted {
		l.blockAddr(protocol, to, proto.BlockedNotAllowed)
		return nil, false
	}
	if l.connections.Add(1) > MaxConnections {
		l.connections.Add(-1)
		giveBack()
		l.blockAddr(protocol, to, proto.BlockedLimit)
		return nil, false
	}
	return func() {
		l.connections.Add(-1)
		giveBack()
	}, true
}

// dial connects to the outside, and lists what the second wall refuses.
func (l *Link) dial(protocol string, to netip.AddrPort) (net.Conn, error) {
	conn, err := l.network.host.dial(l.ctx, protocol, to)
	if errors.Is(err, errRefusedAddress) {
		l.blockAddr(protocol, to, proto.BlockedAddress)
	}
	return conn, err
}

// acceptTCP is called for each SYN. The program's connection is accepted only when the outside has accepted: what fails
// there, fails here.
func (l *Link) acceptTCP(r *tcp.ForwarderRequest) {
	if !l.start() {
		r.Complete(false)
		return
	}
	defer l.done()
	to := destination(r.ID())
	release, ok := l.admit("tcp", to)
	if !ok {
		r.Complete(true)
		return
	}
	defer release()
	outside, err := l.dial("tcp", to)
	if err != nil {
		r.Complete(true)
		return
	}
	defer func() { _ = outside.Close() }()
	var queue waiter.Queue
	l.used.Store(true)
	ep, failed := r.CreateEndpoint(&queue)
	r.Complete(failed != nil)
	if failed != nil {
		return
	}
	stop := context.AfterFunc(l.ctx, func() { _ = outside.Close() })
	defer stop()
	l.relay(&tcpInside{gonet.NewTCPConn(&queue, ep), ep}, &tcpOutside{outside.(*net.TCPConn)})
}

// tcpEnd is one end of a relayed connection. Reset ends it so that the peer sees that something was lost.
type tcpEnd interface {
	io.ReadWriteCloser
	CloseWrite() error
	Reset()
}

type tcpInside struct {
	*gonet.TCPConn
	ep tcpip.Endpoint
}

func (c *tcpInside) Reset() { c.ep.Abort() }

type tcpOutside struct{ *net.TCPConn }

func (c *tcpOutside) Reset() {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// relay carries bytes both ways until both ends have said that they are done, or one has failed.
func (l *Link) relay(inside, outside tcpEnd) {
	defer func() {
		_ = inside.Close()
		_ = outside.Close()
	}()
	var both sync.WaitGroup
	carry := func(to, from tcpEnd, count *atomic.Int64) {
		if err := copyCounted(to, from, count); err != nil {
			to.Reset()
			from.Reset()
			return
		}
		_ = to.CloseWrite()
	}
	both.Go(func() { carry(inside, outside, &l.in) })
	carry(outside, inside, &l.out)
	both.Wait()
}

// copyCounted copies until the end, counting what was written.
func copyCounted(to io.Writer, from io.Reader, count *atomic.Int64) error {
	buf := make([]byte, copyBuffer)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			written, err := to.Write(buf[:n])
			count.Add(int64(written))
			if err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// acceptUDP is called for the first packet of each flow, and reports whether there is one now.
func (l *Link) acceptUDP(r *udp.ForwarderRequest) bool {
	if !l.start() {
		return true
	}
	to := destination(r.ID())
	release, ok := l.admit("udp", to)
	if !ok {
		l.done()
		return false
	}
	outside, err := l.dial("udp", to)
	if err != nil {
		release()
		l.done()
		return false
	}
	var queue waiter.Queue
	l.used.Store(true)
	ep, failed := r.CreateEndpoint(&queue)
	if failed != nil {
		_ = outside.Close()
		release()
		l.done()
		return true
	}
	ep.SocketOptions().SetReceiveBufferSize(udpBuffer, false)
	go func() {
		defer l.done()
		defer release()
		l.exchange(gonet.NewUDPConn(&queue, ep), outside)
	}()
	return true
}

// exchange carries datagrams both ways until none has come for a while or one side has failed.
func (l *Link) exchange(inside, outside net.Conn) {
	end := sync.OnceFunc(func() {
		_ = inside.Close()
		_ = outside.Close()
	})
	stop := context.AfterFunc(l.ctx, end)
	defer stop()
	idle := time.AfterFunc(udpIdle, end)
	defer idle.Stop()
	carry := func(to io.Writer, from io.Reader, count *atomic.Int64) {
		defer end()
		buf := make([]byte, 64<<10)
		for {
			n, err := from.Read(buf)
			if err != nil {
				return
			}
			idle.Reset(udpIdle)
			if written, err := to.Write(buf[:n]); err == nil {
				count.Add(int64(written))
			}
		}
	}
	var both sync.WaitGroup
	both.Go(func() { carry(inside, outside, &l.in) })
	carry(outside, inside, &l.out)
	both.Wait()
}

func destination(id stack.TransportEndpointID) netip.AddrPort {
	return netip.AddrPortFrom(addrOf(id.LocalAddress), id.LocalPort)
}
