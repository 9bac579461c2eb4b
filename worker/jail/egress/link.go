package egress

import (
	"context"
	"errors"
	"io"
	"maps"
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
	"github.com/bullpen-run/bullpen/worker/jail"
)

// Limits of one link. A connection takes up to 256 KiB in the worker's stack and 64 KiB in transit,
// or 80 MiB of the worker for a full link, and up to four times outsideBuffer in the kernel, or 256
// MiB.
const (
	MaxConnections = 256 // TCP connections, including those being opened, and UDP flows
	// MaxIntercepted is how many of them may be intercepted. One takes up to 300 KiB more.
	MaxIntercepted = 64

	copyBuffer = 32 << 10
	udpIdle    = 30 * time.Second // idle time after which a UDP flow ends
	abortEvery = 20 * time.Millisecond

	// maxPrivate is how many private destinations the firewall admits for a link. So many fit one change
	// of the firewall. Names can resolve to ever new addresses.
	maxPrivate = 2048
)

// errPrivateFull is returned if a link has maxPrivate private destinations.
var errPrivateFull = errors.New("the sandbox has too many private destinations")

// Link is the network connection of one jail.
type Link struct {
	network  *Network
	number   uint32
	ip4, ip6 netip.Addr
	device   int // interface index of the gateway's end
	permits  *permits
	tcp      *tcp.Forwarder
	udp      *udp.Forwarder
	queries  *rate.Limiter

	ctx    context.Context //nolint:containedctx // lifetime of the link, shared by its connections
	cancel context.CancelFunc

	in, out     meter
	opens       *rate.Limiter // connections and UDP flows
	connections atomic.Int32  // including UDP flows
	intercepted atomic.Int32  // those that are intercepted
	interceptor atomic.Pointer[jail.Interception]
	inFlight    atomic.Int32 // DNS queries in flight
	dnsConns    atomic.Int32 // TCP connections to the resolver
	used        atomic.Bool  // the stack may have connections of the link

	mu      sync.Mutex
	running int           // goroutines of the link
	closing bool          // no more goroutines may start
	idle    chan struct{} // closed when closing and no goroutine is running
	blocked []proto.BlockedConnection
	refused int64 // number of rejections, listed or not

	// privateMu is held while the firewall changes. Packets of all links wait for mu, which must not be.
	privateMu sync.Mutex
	private   map[netip.AddrPort]bool // the private destinations that the firewall admits

	once sync.Once
}

// Report describes the traffic of a link.
type Report struct {
	proto.Traffic
	Blocked []proto.BlockedConnection // the first rejection of each kind, at most [proto.MaxBlocked]
	// BlockedTotal is the number of rejections, listed or not. Of packets that the firewall
	// rejects, at most 100 a second are counted for each reason.
	BlockedTotal int64
}

// Close ends all connections of the jail and returns a report. The interface is removed later.
// Close should be called when the program is dead. It is idempotent.
func (l *Link) Close() Report {
	l.once.Do(func() {
		l.network.rejectionLog.drain()
		l.network.unregister(l)
		l.cancel()
		l.finish()
		l.closePrivate()
		l.network.discard(l.device)
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	return Report{
		Traffic: proto.Traffic{BytesIn: l.in.bytes.Load(), BytesOut: l.out.bytes.Load()},
		Blocked: slices.Clone(l.blocked), BlockedTotal: l.refused,
	}
}

// finish waits for all goroutines of the link. It aborts connections repeatedly, because packets in
// transit may open new ones.
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

// start reports whether a goroutine of the link may start. If so, the goroutine must call done.
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

// openPrivate makes the firewall admit private destinations of the link until it is closed, or until
// there are too many and the permit has expired.
func (l *Link) openPrivate(list []netip.AddrPort) error {
	l.privateMu.Lock()
	defer l.privateMu.Unlock()
	list = slices.DeleteFunc(slices.Clone(list), func(to netip.AddrPort) bool { return l.private[to] })
	if len(list) == 0 {
		return nil
	}
	if len(l.private)+len(list) > maxPrivate {
		if err := l.closeExpired(); err != nil {
			return err
		}
		if len(l.private)+len(list) > maxPrivate {
			return errPrivateFull
		}
	}
	if err := l.network.firewall.admitPrivate(l, list); err != nil {
		return err
	}
	for _, to := range list {
		l.private[to] = true
	}
	return nil
}

// closeExpired undoes openPrivate for destinations without a permit. The caller must hold privateMu.
func (l *Link) closeExpired() error {
	var expired []netip.AddrPort
	now := time.Now()
	for to := range l.private {
		if !l.permits.permits(to, now) {
			expired = append(expired, to)
		}
	}
	if err := l.network.firewall.revokePrivate(l, expired); err != nil {
		return err
	}
	for _, to := range expired {
		delete(l.private, to)
	}
	return nil
}

// closePrivate undoes openPrivate. The link's goroutines must have ended.
func (l *Link) closePrivate() {
	if len(l.private) == 0 {
		return
	}
	if err := l.network.firewall.revokePrivate(l, slices.Collect(maps.Keys(l.private))); err != nil {
		l.network.log.Error("private destinations of a closed link not removed", "error", err)
	}
}

// block counts a rejection, and lists it unless it is a duplicate or the list is full.
func (l *Link) block(b proto.BlockedConnection) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refused++
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

// admit counts a connection and acquires a permit. If ok, the caller must wait before it relays
// anything, and call release; otherwise the rejection has been listed.
func (l *Link) admit(protocol string, to netip.AddrPort) (wait time.Duration, release func(), ok bool) {
	giveBack, permitted := l.permits.acquire(to, time.Now())
	if !permitted {
		reason := proto.BlockedNotAllowed
		if refusedRange(to.Addr()) {
			reason = proto.BlockedAddress
		}
		l.blockAddr(protocol, to, reason)
		return 0, nil, false
	}
	release = func() {
		l.connections.Add(-1)
		giveBack()
	}
	if l.connections.Add(1) <= MaxConnections {
		if wait, ok = l.reserveOpen(); ok {
			return wait, release, true
		}
	}
	release()
	l.blockAddr(protocol, to, proto.BlockedLimit)
	return 0, nil, false
}

// dial connects to the outside and lists refused addresses.
func (l *Link) dial(protocol string, to netip.AddrPort) (net.Conn, error) {
	conn, err := l.network.host.dial(l.ctx, protocol, to)
	if errors.Is(err, errRefusedAddress) {
		l.blockAddr(protocol, to, proto.BlockedAddress)
	}
	return conn, err
}

// acceptTCP is called for each SYN. It accepts the program's connection only after the outside has
// accepted, so that the program sees errors.
func (l *Link) acceptTCP(r *tcp.ForwarderRequest) {
	if !l.start() {
		r.Complete(false)
		return
	}
	defer l.done()
	to := destination(r.ID())
	wait, release, ok := l.admit("tcp", to)
	if !ok {
		r.Complete(true)
		return
	}
	defer release()
	if sleep(l.ctx, wait) != nil {
		r.Complete(true)
		return
	}
	hosts := l.permits.interceptedAt(to)
	if len(hosts) > 0 {
		defer l.intercepted.Add(-1)
		if l.intercepted.Add(1) > MaxIntercepted {
			l.blockAddr("tcp", to, proto.BlockedLimit)
			r.Complete(true)
			return
		}
	}
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
	inside := &tcpInside{gonet.NewTCPConn(&queue, ep), ep}
	if len(hosts) == 0 || !l.intercept(inside, outside, to, hosts) {
		l.relay(inside, &tcpOutside{outside.(*net.TCPConn)})
	}
}

// tcpEnd is one end of a relayed connection. Reset closes it so that the peer notices lost data.
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

// relay copies in both directions until both ends have closed or one has failed.
func (l *Link) relay(inside, outside tcpEnd) {
	defer func() {
		_ = inside.Close()
		_ = outside.Close()
	}()
	var both sync.WaitGroup
	carry := func(to, from tcpEnd, m *meter) {
		if err := copyMetered(l.ctx, to, from, m); err != nil {
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

// copyMetered copies until EOF. It reads on only when the bytes have been written, so that the limit
// slows the sender down.
func copyMetered(ctx context.Context, to io.Writer, from io.Reader, m *meter) error {
	buf := make([]byte, copyBuffer)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if err := m.await(ctx, n); err != nil {
				return err
			}
			written, err := to.Write(buf[:n])
			m.bytes.Add(int64(written))
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

// acceptUDP is called for the first packet of a flow. It reports whether the flow was accepted.
func (l *Link) acceptUDP(r *udp.ForwarderRequest) bool {
	if !l.start() {
		return true
	}
	to := destination(r.ID())
	wait, release, ok := l.admit("udp", to)
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
		_ = sleep(l.ctx, wait) // here, because acceptUDP must not block; exchange returns if the link is closed
		l.exchange(gonet.NewUDPConn(&queue, ep), outside)
	}()
	return true
}

// exchange copies datagrams in both directions until the flow is idle or one side has failed.
func (l *Link) exchange(inside, outside net.Conn) {
	end := sync.OnceFunc(func() {
		_ = inside.Close()
		_ = outside.Close()
	})
	stop := context.AfterFunc(l.ctx, end)
	defer stop()
	idle := time.AfterFunc(udpIdle, end)
	defer idle.Stop()
	carry := func(to io.Writer, from io.Reader, m *meter) {
		defer end()
		buf := make([]byte, 64<<10)
		for {
			n, err := from.Read(buf)
			if err != nil {
				return
			}
			wait := m.reserve(n)
			idle.Reset(wait + udpIdle)
			if sleep(l.ctx, wait) != nil {
				return
			}
			if written, err := to.Write(buf[:n]); err == nil {
				m.bytes.Add(int64(written))
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
