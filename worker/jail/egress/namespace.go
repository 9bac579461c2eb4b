package egress

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Addresses of links. The ranges hide nothing, since all of both are refused to every program.
var (
	// ResolverIPv4 and ResolverIPv6 are the addresses of the gateway in every jail. Only the DNS
	// resolver listens there.
	ResolverIPv4 = netip.MustParseAddr("100.64.0.1")
	ResolverIPv6 = netip.MustParseAddr("fd62:756c:6c70::1")
)

const (
	linkMTU = 65535 // datagrams need no fragments, which are rejected
	tunName = "tun0"
	jailEnd = "eth0" // interface name in the jail

	carrierPoll = 100 * time.Microsecond

	removedGroup = 1 // of interfaces to be removed

	firstLink = 2
	lastLink  = 1<<22 - 2 // 100.64.0.0/10 without the gateway and the last address
)

// linkAddrs returns the addresses of a link by its number.
func linkAddrs(number uint32) (ip4, ip6 netip.Addr) {
	raw4, raw6 := ResolverIPv4.As4(), ResolverIPv6.As16()
	for i := range 4 {
		raw6[12+i] = byte(number >> (24 - 8*i))
	}
	raw4[1] |= byte(number >> 16)
	raw4[2], raw4[3] = byte(number>>8), byte(number)
	return netip.AddrFrom4(raw4), netip.AddrFrom16(raw6)
}

// The ends of a link are configured with each other's hardware address. So there is no address
// resolution to wait for, flood or forge.
var gatewayMAC = net.HardwareAddr{0x02, 0xbb, 0, 0, 0, 1}

func linkMAC(number uint32) net.HardwareAddr {
	return net.HardwareAddr{0x02, 0xbc, byte(number >> 24), byte(number >> 16), byte(number >> 8), byte(number)}
}

// sysctls of the egress namespace. ICMP errors report rejections to programs, so they must not be
// rate-limited.
var sysctls = []struct{ name, value string }{
	{"ipv4/conf/all/forwarding", "1"},
	{"ipv4/icmp_ratemask", "0"},
	{"ipv6/conf/all/forwarding", "1"},
	{"ipv6/icmp/ratelimit", "0"},
	{"ipv6/icmp/ratemask", "255"},
	{"ipv6/conf/all/disable_ipv6", "0"},
	{"ipv6/conf/default/disable_ipv6", "0"},
}

// InNamespace runs f on a thread in the network namespace ns, or in a new one if ns is nil. Sockets
// and files below /proc/sys/net that f opens belong to it.
func InNamespace(ns *os.File, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer func() { _ = home.Close() }()
		if ns == nil {
			err = os.NewSyscallError("unshare", unix.Unshare(unix.CLONE_NEWNET))
		} else {
			err = os.NewSyscallError("setns", unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET))
		}
		if err == nil {
			err = f()
		}
		// A thread that cannot return stays locked and ends with this goroutine.
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// namespace is the egress namespace.
type namespace struct {
	ns   *os.File        // /proc/…/ns/net
	tun  int             // the worker's end of the TUN device
	link *netlink.Handle // routes and interfaces

	removals *nl.SocketHandle // separate, so that only removals wait for removals
}

func newNamespace() (s *namespace, err error) {
	s = &namespace{tun: -1}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	err = InNamespace(nil, func() (err error) {
		if s.ns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		for _, ctl := range sysctls {
			if err := os.WriteFile("/proc/sys/net/"+ctl.name, []byte(ctl.value), 0); err != nil {
				return fmt.Errorf("set net/%s of the egress namespace: %w; %s", ctl.name, err, sysctlRemedy(err))
			}
		}
		s.tun, err = openTUN()
		return err
	})
	if errors.Is(err, unix.EPERM) && s.ns == nil {
		return s, fmt.Errorf("create the egress namespace: %w; the worker needs root with CAP_SYS_ADMIN", err)
	}
	if err != nil {
		return s, err
	}
	if s.link, err = netlink.NewHandleAt(netns.NsHandle(s.ns.Fd()), unix.NETLINK_ROUTE); err != nil {
		return s, fmt.Errorf("open a route socket in the egress namespace: %w", err)
	}
	removals, err := nl.GetNetlinkSocketAt(netns.NsHandle(s.ns.Fd()), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return s, fmt.Errorf("open a route socket in the egress namespace: %w", err)
	}
	s.removals = &nl.SocketHandle{Socket: removals}
	return s, s.configure()
}

func sysctlRemedy(err error) string {
	if errors.Is(err, fs.ErrNotExist) {
		return "the kernel was started without IPv6: remove ipv6.disable=1 from its command line"
	}
	return "the worker needs CAP_NET_ADMIN, and in a container a writable /proc/sys (docker: --security-opt " +
		"systempaths=unconfined)"
}

func openTUN() (fd int, err error) {
	const remedy = "load the kernel's module tun, and give the worker's container the device /dev/net/tun"
	if fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return -1, fmt.Errorf("open /dev/net/tun: %w; %s", err, remedy)
	}
	req, err := unix.NewIfreq(tunName)
	if err == nil {
		req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("create the uplink device: %w; %s", err, remedy)
	}
	return fd, nil
}

// configure sets up what all links share: the addresses of the gateway and the default route.
func (s *namespace) configure() error {
	lo, err := s.link.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo in the egress namespace: %w", err)
	}
	tun, err := s.link.LinkByName(tunName)
	if err != nil {
		return fmt.Errorf("find the TUN device: %w", err)
	}
	steps := []struct {
		name string
		do   func() error
	}{
		{"bring lo up", func() error { return s.link.LinkSetUp(lo) }},
		{"IPv4 for the resolver", func() error { return addAddr(s.link, lo, ResolverIPv4) }},
		{"IPv6 for the resolver", func() error { return addAddr(s.link, lo, ResolverIPv6) }},
		{"size of the uplink", func() error { return s.link.LinkSetMTU(tun, linkMTU) }},
		{"no link-local address on the uplink", func() error { return s.link.LinkSetIP6AddrGenMode(tun, nlAddrGenNone) }},
		{"bring the uplink up", func() error { return s.link.LinkSetUp(tun) }},
		{"route to the uplink", func() error {
			return s.link.RouteAdd(route(tun, netip.MustParsePrefix("0.0.0.0/0"), netip.Addr{}))
		}},
		{"IPv6 route to the uplink", func() error {
			return s.link.RouteAdd(route(tun, netip.MustParsePrefix("::/0"), netip.Addr{}))
		}},
	}
	for _, step := range steps {
		if err := step.do(); err != nil {
			return fmt.Errorf("egress namespace: %s: %w", step.name, err)
		}
	}
	return nil
}

func (s *namespace) close() {
	if s.link != nil {
		s.link.Close()
	}
	if s.removals != nil {
		s.removals.Close()
	}
	if s.tun >= 0 {
		_ = unix.Close(s.tun)
	}
	if s.ns != nil {
		_ = s.ns.Close()
	}
}

// connect creates a veth pair with one end in the jail's namespace, ready for use. It returns the
// index of the gateway's end. The class is as in packetClass.
func (s *namespace) connect(ctx context.Context, jail *os.File, number, class uint32) (index int, err error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = linkName(number), linkMTU, gatewayMAC
	attrs.NumTxQueues, attrs.NumRxQueues, attrs.Group = 1, 1, class
	outer := netlink.NewVeth(attrs)
	outer.PeerName, outer.PeerHardwareAddr, outer.PeerNamespace = jailEnd, linkMAC(number), netlink.NsFd(jail.Fd())
	if err := s.link.LinkAdd(outer); err != nil {
		if errors.Is(err, unix.EOPNOTSUPP) {
			return 0, fmt.Errorf("create a veth pair: %w; load the kernel's module veth", err)
		}
		return 0, fmt.Errorf("create a veth pair: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.remove([]int{outer.Attrs().Index}))
		}
	}()
	ip4, ip6 := linkAddrs(number)
	if err := bringUp(s.link, outer); err != nil {
		return 0, err
	}
	for _, addr := range []netip.Addr{ip4, ip6} {
		if err := addPeer(s.link, outer, addr, linkMAC(number), netip.PrefixFrom(addr, addr.BitLen())); err != nil {
			return 0, err
		}
	}
	if err := connectInside(jail, ip4, ip6); err != nil {
		return 0, fmt.Errorf("in the jail: %w", err)
	}
	if err := s.awaitCarrier(ctx, outer.Attrs().Index); err != nil {
		return 0, err
	}
	return outer.Attrs().Index, nil
}

// awaitCarrier waits until an interface can send. The kernel marks it as running with a delay after
// its peer is up and drops packets until then, which would lose the first answers.
func (s *namespace) awaitCarrier(ctx context.Context, index int) error {
	for {
		link, err := s.link.LinkByIndex(index)
		if err != nil {
			return fmt.Errorf("read the state of the gateway's end: %w", err)
		}
		if link.Attrs().OperState == netlink.OperUp {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the gateway's end: %w", context.Cause(ctx))
		case <-time.After(carrierPoll):
		}
	}
}

// connectInside configures the jail's end: addresses, and default routes through the gateway.
func connectInside(jail *os.File, ip4, ip6 netip.Addr) error {
	h, err := netlink.NewHandleAt(netns.NsHandle(jail.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open a route socket: %w", err)
	}
	defer h.Close()
	inner, err := h.LinkByName(jailEnd)
	if err != nil {
		return fmt.Errorf("find %s: %w", jailEnd, err)
	}
	for _, name := range []string{"lo", jailEnd} {
		link := inner
		if name != jailEnd {
			if link, err = h.LinkByName(name); err != nil {
				return fmt.Errorf("find %s: %w", name, err)
			}
		}
		if err := bringUp(h, link); err != nil {
			return err
		}
	}
	for _, way := range []struct {
		own, gateway netip.Addr
		to           string
	}{{ip4, ResolverIPv4, "0.0.0.0/0"}, {ip6, ResolverIPv6, "::/0"}} {
		if err := addAddr(h, inner, way.own); err != nil {
			return err
		}
		if err := addPeer(h, inner, way.gateway, gatewayMAC, netip.MustParsePrefix(way.to)); err != nil {
			return err
		}
	}
	return nil
}

// bringUp sets an interface up, without a link-local address.
func bringUp(h *netlink.Handle, link netlink.Link) error {
	name := link.Attrs().Name
	if name != "lo" {
		if err := h.LinkSetIP6AddrGenMode(link, nlAddrGenNone); err != nil {
			return fmt.Errorf("no link-local address on %s: %w", name, err)
		}
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring %s up: %w", name, err)
	}
	return nil
}

// addPeer configures the peer of an interface: its hardware address, and the route through it.
func addPeer(h *netlink.Handle, link netlink.Link, peer netip.Addr, mac net.HardwareAddr, to netip.Prefix) error {
	neigh := &netlink.Neigh{
		LinkIndex: link.Attrs().Index, IP: peer.AsSlice(), HardwareAddr: mac, State: netlink.NUD_PERMANENT,
		Family: family(peer),
	}
	if err := h.NeighAdd(neigh); err != nil {
		return fmt.Errorf("hardware address of %s: %w", peer, err)
	}
	via := peer
	if to.Addr() == peer {
		via = netip.Addr{}
	}
	if err := h.RouteAdd(route(link, to, via)); err != nil {
		return fmt.Errorf("route by %s: %w", peer, err)
	}
	return nil
}

// remove removes links. The kernel needs some ten milliseconds for any number of them, so they are
// put into a group first. The kernel has already removed those whose jail is gone.
func (s *namespace) remove(devices []int) error {
	var failed error
	for _, index := range devices {
		device := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
		if err := s.link.LinkSetGroup(device, removedGroup); err != nil && !errors.Is(err, unix.ENODEV) {
			failed = errors.Join(failed, err)
		}
	}
	req := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: s.removals}
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(removedGroup)))
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil && !errors.Is(err, unix.ENODEV) {
		failed = errors.Join(failed, err)
	}
	if failed != nil {
		return fmt.Errorf("remove interfaces from the egress namespace: %w", failed)
	}
	return nil
}

func linkName(number uint32) string { return fmt.Sprintf("link%d", number) }

const nlAddrGenNone = 1 // IN6_ADDR_GEN_MODE_NONE

func family(addr netip.Addr) int {
	if addr.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// addAddr adds an address that is usable at once.
func addAddr(h *netlink.Handle, link netlink.Link, addr netip.Addr) error {
	own := netip.PrefixFrom(addr, addr.BitLen())
	// Duplicate address detection would delay it by a second.
	if err := h.AddrAdd(link, &netlink.Addr{IPNet: ipNet(own), Flags: unix.IFA_F_NODAD}); err != nil {
		return fmt.Errorf("address %s: %w", addr, err)
	}
	if addr.Is4() {
		return nil
	}
	// The kernel adds this route later and drops packets to the address until then.
	local := route(link, own, netip.Addr{})
	local.Type, local.Table = unix.RTN_LOCAL, unix.RT_TABLE_LOCAL
	if err := h.RouteAdd(local); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("local route of %s: %w", addr, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func route(link netlink.Link, to netip.Prefix, via netip.Addr) *netlink.Route {
	r := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(to), Scope: netlink.SCOPE_LINK}
	if via.IsValid() {
		r.Gw, r.Flags, r.Scope = via.AsSlice(), int(netlink.FLAG_ONLINK), netlink.SCOPE_UNIVERSE
	}
	return r
}
