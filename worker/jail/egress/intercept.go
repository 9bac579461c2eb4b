package egress

import (
	"errors"
	"net"
	"net/netip"
	"slices"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// Intercept makes i handle the link's connections to its hosts. It must be called before the jail's
// program starts, because the resolver's answers identify the connections.
func (l *Link) Intercept(i *jail.Interception) {
	l.interceptor.Store(i)
	l.permits.intercept(i.Hosts)
}

// intercept passes a connection to the interception of the link. If it returns false, the caller
// must relay the connection.
func (l *Link) intercept(inside *tcpInside, outside net.Conn, to netip.AddrPort, hosts []int) bool {
	open := make(chan net.Conn, 1)
	open <- outside
	dial := func() (net.Conn, error) {
		select {
		case conn := <-open:
			return conn, nil
		default:
			wait, ok := l.reserveOpen()
			if !ok {
				l.blockAddr("tcp", to, proto.BlockedLimit)
				return nil, errOpenRate
			}
			if err := sleep(l.ctx, wait); err != nil {
				return nil, err
			}
			return l.dial("tcp", to)
		}
	}
	read, served := l.interceptor.Load().Serve(l.ctx, &countedConn{inside, l}, hosts, dial)
	if served {
		_ = inside.Close()
		return true
	}
	if _, err := outside.Write(read); err != nil { // relaying fails too, and resets the program's connection
		_ = outside.Close()
	}
	return false
}

// errOpenRate is returned for a connection that would wait too long.
var errOpenRate = errors.New("more connections than the sandbox profile allows per second")

// countedConn is the program's end of an intercepted connection.
type countedConn struct {
	*tcpInside
	link *Link
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.tcpInside.Read(p[:min(len(p), copyBuffer)])
	if closed := c.link.out.await(c.link.ctx, n); closed != nil {
		return 0, closed
	}
	c.link.out.bytes.Add(int64(n))
	return n, err
}

func (c *countedConn) Write(p []byte) (written int, err error) {
	for part := range slices.Chunk(p, copyBuffer) {
		if err := c.link.in.await(c.link.ctx, len(part)); err != nil {
			return written, err
		}
		n, err := c.tcpInside.Write(part)
		c.link.in.bytes.Add(int64(n))
		written += n
		if err != nil {
			return written, err
		}
	}
	return written, nil
}
