package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/bullpen-run/bullpen/proto"
)

// Config configures a [Network].
type Config struct {
	// Upstreams are the DNS servers that queries are forwarded to; by default those of
	// /etc/resolv.conf.
	Upstreams []netip.AddrPort
	// ControlPlane lists host names and addresses of bullpen, with or without a port. Programs can
	// reach no port of them. The host resolves the names every half minute. [Open] fails if a name
	// cannot be resolved, since its addresses could not be refused.
	ControlPlane []string
	Log          *slog.Logger
}

// Network connects jails. A worker process has one.
type Network struct {
	namespace    *namespace
	firewall     *firewall
	rejectionLog *rejectionLog
	host         *host
	uplink       *uplink
	resolver     *resolver
	log          *slog.Logger
	self         []namespaceID // namespaces that cannot be a jail's

	stop context.CancelFunc
	wg   sync.WaitGroup // all goroutines

	reapable chan struct{} // signals dead interfaces

	mu    sync.RWMutex
	links map[netip.Addr]*Link // by each of their addresses; nil when closed
	last  uint32               // number of the newest link
	dead  []int                // interfaces of closed links
}

// reapPause is how long dead interfaces are collected before they are removed.
const reapPause = 100 * time.Millisecond

type namespaceID struct{ dev, ino uint64 }

// Open creates the egress namespace and starts the resolver. If the kernel or the container lacks
// something, the error names the step and a remedy, and nothing is left behind.
func Open(ctx context.Context, c Config) (n *Network, err error) {
	n = &Network{log: c.Log, reapable: make(chan struct{}, 1), links: map[netip.Addr]*Link{}, last: firstLink - 1}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("open the sandbox network: %w", err), n.Close())
			n = nil
		}
	}()
	if len(c.Upstreams) == 0 {
		if c.Upstreams, err = systemResolvers(); err != nil {
			return n, err
		}
	}
	if n.namespace, err = newNamespace(); err != nil {
		return n, err
	}
	if n.self, err = namespaceIDs("/proc/thread-self/ns/net",
		fmt.Sprintf("/proc/self/fd/%d", n.namespace.ns.Fd())); err != nil {
		return n, err
	}
	if n.firewall, err = loadFirewall(n.namespace); err != nil {
		return n, err
	}
	if n.rejectionLog, err = openRejectionLog(n.namespace, n.handleRejected); err != nil {
		return n, err
	}
	if n.host, err = openHost(ctx, c, n.firewall); err != nil {
		return n, err
	}
	if n.uplink, err = newUplink(n.namespace.tun, n.handleTCP, n.handleUDP); err != nil {
		return n, err
	}
	if n.resolver, err = openResolver(n, c.Upstreams); err != nil {
		return n, err
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	n.stop = stop
	n.wg.Go(func() { n.host.run(run) })
	n.wg.Go(n.rejectionLog.run)
	n.wg.Go(func() { n.reap(run) })
	n.resolver.serve(&n.wg)
	return n, nil
}

// Close closes all links and removes the egress namespace.
func (n *Network) Close() error {
	n.mu.Lock()
	links := n.links
	n.links = nil
	n.mu.Unlock()
	for _, l := range links {
		l.Close()
	}
	if n.stop != nil {
		n.stop()
	}
	if n.resolver != nil {
		n.resolver.close()
	}
	if n.rejectionLog != nil {
		n.rejectionLog.close()
	}
	n.wg.Wait()
	if n.uplink != nil {
		n.uplink.close()
	}
	if n.host != nil {
		n.host.routes.Close()
	}
	var err error
	if n.firewall != nil {
		err = n.firewall.close()
	}
	if n.namespace != nil {
		n.namespace.close()
	}
	return err
}

// Attach connects the jail with the network namespace netns (an open /proc/…/ns/net) under a
// policy, which must not be blocked. When Attach returns, the jail has the interfaces lo and eth0,
// addresses and routes. Its resolver is at [ResolverIPv4]. How many packets the jail may send
// depends on its number of cores.
func (n *Network) Attach(ctx context.Context, netns *os.File, network proto.Network, cpu float64) (*Link, error) {
	if err := network.Validate(); err != nil {
		return nil, fmt.Errorf("attach a jail: %w", err)
	}
	if network.Effective() == proto.NetworkBlocked {
		return nil, errors.New("attach a jail: its network is blocked, so it must not be attached")
	}
	ids, err := namespaceIDs(fmt.Sprintf("/proc/self/fd/%d", netns.Fd()))
	if err != nil {
		return nil, fmt.Errorf("attach a jail: %w", err)
	}
	if slices.Contains(n.self, ids[0]) {
		return nil, errors.New("attach a jail: the namespace is the worker's own")
	}
	permits, err := newPermits(network)
	if err != nil {
		return nil, fmt.Errorf("attach a jail: %w", err)
	}
	l := &Link{
		network: n, permits: permits, private: map[netip.AddrPort]bool{},
		queries: rate.NewLimiter(queryLimit, queryLimitBurst), opens: newOpenRate(network.ConnectionRate),
	}
	l.in.limit, l.out.limit = newBandwidth(network.Bandwidth), newBandwidth(network.Bandwidth)
	l.tcp = tcp.NewForwarder(n.uplink.Stack, tcpBuffer, 2*MaxConnections, l.acceptTCP)
	l.udp = udp.NewForwarder(n.uplink.Stack, l.acceptUDP)
	l.ctx, l.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := n.register(l); err != nil {
		l.cancel()
		return nil, fmt.Errorf("attach a jail: %w", err)
	}
	if err := l.openPrivate(permits.privateAddrs()); err != nil {
		n.unregister(l)
		l.cancel()
		return nil, fmt.Errorf("attach a jail: %w", err)
	}
	if l.device, err = n.namespace.connect(ctx, netns, l.number, packetClass(cpu)); err != nil {
		n.unregister(l)
		l.cancel()
		l.closePrivate()
		return nil, fmt.Errorf("attach a jail: %w", err)
	}
	return l, nil
}

// register assigns a number to a link. It reuses numbers as late as possible.
func (n *Network) register(l *Link) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.links == nil {
		return errors.New("the sandbox network is closed")
	}
	for range lastLink - firstLink + 1 {
		n.last++
		if n.last > lastLink {
			n.last = firstLink
		}
		ip4, ip6 := linkAddrs(n.last)
		if n.links[ip4] == nil {
			l.number, l.ip4, l.ip6 = n.last, ip4, ip6
			n.links[ip4], n.links[ip6] = l, l
			return nil
		}
	}
	return errors.New("no address is free")
}

// discard passes an interface to [Network.reap].
func (n *Network) discard(device int) {
	n.mu.Lock()
	n.dead = append(n.dead, device)
	n.mu.Unlock()
	select {
	case n.reapable <- struct{}{}:
	default:
	}
}

// reap removes interfaces of closed links in batches, because the kernel holds a lock that
// attaching needs too.
func (n *Network) reap(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.reapable:
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(reapPause):
		}
		n.mu.Lock()
		dead := n.dead
		n.dead = nil
		n.mu.Unlock()
		if err := n.namespace.remove(dead); err != nil {
			n.log.Error("interfaces of closed links not removed", "error", err)
		}
	}
}

func (n *Network) unregister(l *Link) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.links, l.ip4)
	delete(n.links, l.ip6)
}

// linkAt returns the link with an address, or nil.
func (n *Network) linkAt(addr netip.Addr) *Link {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.links[addr]
}

// handleTCP handles TCP packets without a connection. The stack answers unhandled ones with a
// reset.
func (n *Network) handleTCP(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	l := n.linkAt(addrOf(id.RemoteAddress))
	return l != nil && l.tcp.HandlePacket(id, pkt)
}

// handleUDP handles UDP packets without a flow. The stack answers unhandled ones with a port
// unreachable.
func (n *Network) handleUDP(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	l := n.linkAt(addrOf(id.RemoteAddress))
	return l != nil && l.udp.HandlePacket(id, pkt)
}

// handleRejected lists a packet that the firewall rejected.
func (n *Network) handleRejected(r rejectedPacket) {
	l := n.linkAt(r.src)
	if l == nil {
		return
	}
	l.block(proto.BlockedConnection{
		Host: l.permits.nameOf(r.dst.Addr()), Address: r.dst.Addr().String(), Port: int(r.dst.Port()),
		Protocol: r.protocol, Reason: r.reason, At: time.Now(),
	})
}

func namespaceIDs(paths ...string) ([]namespaceID, error) {
	var ids []namespaceID
	for _, path := range paths {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return nil, fmt.Errorf("identify a network namespace: %w", err)
		}
		ids = append(ids, namespaceID{uint64(st.Dev), st.Ino}) //nolint:unconvert // narrower on other architectures
	}
	return ids, nil
}
