package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	hostRefresh   = 30 * time.Second // between looks at the host's addresses and the control plane's names, besides changes
	hostKeep      = time.Hour        // for how long an address is refused that a name of the control plane no longer has
	resolveWithin = 10 * time.Second
	dialWithin    = 30 * time.Second

	// What the kernel may hold of a TCP connection for each way, in bytes. It doubles that for its own use. Left to itself it
	// would let one grow to tens of MiB, which count against no program and, together, slow down all TCP of the machine.
	outsideBuffer = 256 << 10
)

// errRefusedAddress is the second wall's answer.
var errRefusedAddress = errors.New("no program may reach this address")

// host knows which addresses are the machine's own and the control plane's, and dials from its namespace.
type host struct {
	control  []string // as in Config.ControlPlane
	firewall *firewall
	log      *slog.Logger
	routes   *netlink.Handle

	mu    sync.RWMutex
	own   []netip.Addr
	plane map[netip.Addr]time.Time // when it was last seen
}

func openHost(ctx context.Context, c Config, f *firewall) (*host, error) {
	h := &host{control: c.ControlPlane, firewall: f, log: c.Log, plane: map[netip.Addr]time.Time{}}
	var err error
	if h.routes, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("open a route socket: %w", err)
	}
	if err := h.refresh(ctx); err != nil {
		h.routes.Close()
		return nil, err
	}
	return h, nil
}

// run keeps the addresses up to date. The dialer asks the kernel besides, so nothing depends on how soon.
func (h *host) run(ctx context.Context) {
	changes := make(chan netlink.AddrUpdate, 64)
	if err := netlink.AddrSubscribe(changes, ctx.Done()); err != nil {
		h.log.Warn("changes of the host's addresses are seen late", "every", hostRefresh, "error", err)
		changes = nil
	}
	tick := time.NewTicker(hostRefresh)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			for changes != nil {
				if _, ok := <-changes; !ok {
					return
				}
			}
			return
		case _, ok := <-changes:
			if !ok {
				changes = nil
			}
		case <-tick.C:
		}
		if err := h.refresh(ctx); err != nil && ctx.Err() == nil {
			h.log.Error("refused addresses are not up to date", "error", err)
		}
	}
}

// refresh reads the host's addresses and resolves the control plane's, and hands them to the firewall.
func (h *host) refresh(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, resolveWithin)
	defer cancel()
	found, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Errorf("list the host's addresses: %w", err)
	}
	var own []netip.Addr
	for _, a := range found {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			own = append(own, p.Addr().Unmap().WithZone(""))
		}
	}
	var plane []netip.Addr
	var failed error
	for _, entry := range h.control {
		addrs, err := resolveEntry(ctx, entry)
		failed = errors.Join(failed, err)
		plane = append(plane, addrs...)
	}
	now := time.Now()
	h.mu.Lock()
	h.own = own
	for _, addr := range plane {
		h.plane[addr] = now
	}
	maps.DeleteFunc(h.plane, func(_ netip.Addr, seen time.Time) bool { return failed == nil && now.Sub(seen) > hostKeep })
	all := slices.AppendSeq(slices.Clone(own), maps.Keys(h.plane))
	h.mu.Unlock()
	slices.SortFunc(all, netip.Addr.Compare)
	return errors.Join(failed, h.firewall.setHosts(slices.Compact(all)))
}

// resolveEntry gives the addresses of an entry of Config.ControlPlane.
func resolveEntry(ctx context.Context, entry string) ([]netip.Addr, error) {
	name := entry
	if host, _, err := net.SplitHostPort(entry); err == nil {
		name = host
	}
	if addr, err := netip.ParseAddr(name); err == nil {
		return []netip.Addr{addr.Unmap().WithZone("")}, nil
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name)
	if err != nil {
		return nil, fmt.Errorf("resolve %q of the control plane, to refuse it to programs: %w", name, err)
	}
	for i, addr := range addrs {
		addrs[i] = addr.Unmap().WithZone("")
	}
	return addrs, nil
}

// knows reports whether addr is known to be one that no program may reach.
func (h *host) knows(addr netip.Addr) bool {
	if refusedRange(addr) {
		return true
	}
	h.mu.RLock()
	defer h.mu.RUnlock()
	_, plane := h.plane[addr]
	return plane || slices.Contains(h.own, addr)
}

// refuses reports whether no program may reach addr, from here and now: besides what is known it asks the kernel whether a
// packet to it would stay on this machine.
func (h *host) refuses(addr netip.Addr) bool {
	if h.knows(addr) {
		return true
	}
	routes, err := h.routes.RouteGet(addr.AsSlice())
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return false // and connecting says so
	case err != nil:
		return true
	}
	return slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Type != unix.RTN_UNICAST })
}

// dial connects from the host's namespace. It refuses what no program may reach with [errRefusedAddress], judging the very
// address that the socket is about to be connected to.
func (h *host) dial(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{Timeout: dialWithin, Control: func(network, address string, conn syscall.RawConn) error {
		actual, err := netip.ParseAddrPort(address)
		if err != nil {
			return fmt.Errorf("read the address to dial: %w", err)
		}
		if h.refuses(actual.Addr()) {
			return errRefusedAddress
		}
		if strings.HasPrefix(network, "tcp") {
			return boundBuffers(conn)
		}
		return nil
	}}
	return d.DialContext(ctx, network, to.String())
}

// boundBuffers fixes the sizes of a socket's buffers. Before it is connected, so that the window is offered accordingly.
func boundBuffers(conn syscall.RawConn) (err error) {
	failed := conn.Control(func(fd uintptr) {
		err = errors.Join(unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, outsideBuffer),
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, outsideBuffer))
	})
	if err = errors.Join(failed, err); err != nil {
		return fmt.Errorf("bound the buffers of a connection: %w", err)
	}
	return nil
}
