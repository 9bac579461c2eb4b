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

	"github.com/bullpen-run/bullpen/proto"
)

const (
	hostRefresh   = 30 * time.Second // interval of reading the host's addresses and resolving the control plane's names
	hostKeep      = time.Hour        // how long an address is refused after a name of the control plane has lost it
	resolveWithin = 10 * time.Second
	dialWithin    = 30 * time.Second

	// Kernel buffer of a TCP connection in each direction, in bytes, which the kernel doubles.
	// Autotuning would let it grow to tens of MiB, which are uncharged and slow down all TCP of the
	// machine.
	outsideBuffer = 256 << 10
)

// errRefusedAddress is returned by dial.
var errRefusedAddress = errors.New("address refused to programs")

// host knows the addresses of the machine and the control plane, and dials from the host's
// namespace.
type host struct {
	control  []string // as in Config.ControlPlane
	firewall *firewall
	log      *slog.Logger
	routes   *netlink.Handle

	mu    sync.RWMutex
	own   []netip.Addr
	plane map[netip.Addr]time.Time // time of the last answer with the address
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

// run keeps the addresses up to date. Nothing depends on its delay, since the dialer also asks the
// kernel.
func (h *host) run(ctx context.Context) {
	changes := make(chan netlink.AddrUpdate, 64)
	if err := netlink.AddrSubscribe(changes, ctx.Done()); err != nil {
		h.log.Warn("host addresses are polled only", "every", hostRefresh, "error", err)
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
			h.log.Error("refresh of refused addresses failed", "error", err)
		}
	}
}

// refresh reads the host's addresses, resolves the control plane's names, and updates the firewall.
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

// resolveEntry returns the addresses of an entry of Config.ControlPlane.
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
		return nil, fmt.Errorf("resolve %q of the control plane: %w", name, err)
	}
	for i, addr := range addrs {
		addrs[i] = addr.Unmap().WithZone("")
	}
	return addrs, nil
}

// isKnown reports whether addr is a known address of the host or the control plane.
func (h *host) isKnown(addr netip.Addr) bool {
	h.mu.RLock()
	defer h.mu.RUnlock()
	_, plane := h.plane[addr]
	return plane || slices.Contains(h.own, addr)
}

// isRefused reports whether programs may not reach addr, also if it is a private address that their
// policy lists. It asks the kernel whether a packet to addr would stay on this machine.
func (h *host) isRefused(addr netip.Addr) bool {
	if refusedRange(addr) && !proto.PrivateAddr(addr) || h.isKnown(addr) {
		return true
	}
	routes, err := h.routes.RouteGet(addr.AsSlice())
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH):
		return false // connecting fails too
	case err != nil:
		return true
	}
	return slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Type != unix.RTN_UNICAST })
}

// dial connects from the host's namespace. It checks the address that the socket is about to
// connect to, and returns [errRefusedAddress] if programs may not reach it. The caller has checked
// that the policy lists a private address.
func (h *host) dial(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{Timeout: dialWithin, Control: func(network, address string, conn syscall.RawConn) error {
		actual, err := netip.ParseAddrPort(address)
		if err != nil {
			return fmt.Errorf("read the address to dial: %w", err)
		}
		if h.isRefused(actual.Addr()) {
			return errRefusedAddress
		}
		if strings.HasPrefix(network, "tcp") {
			return limitBuffers(conn)
		}
		return nil
	}}
	return d.DialContext(ctx, network, to.String())
}

// limitBuffers sets the buffer sizes of a socket. It must be called before connecting, when the
// window is negotiated.
func limitBuffers(conn syscall.RawConn) (err error) {
	failed := conn.Control(func(fd uintptr) {
		err = errors.Join(unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, outsideBuffer),
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, outsideBuffer))
	})
	if err = errors.Join(failed, err); err != nil {
		return fmt.Errorf("limit the buffers of a connection: %w", err)
	}
	return nil
}
