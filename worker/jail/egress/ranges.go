package egress

import (
	"net/netip"
	"slices"
)

// refusedIPv4 are the ranges of the special-purpose registry that are not globally reachable, and
// addresses of clouds' machine services.
var refusedIPv4 = prefixes(
	"0.0.0.0/8",        // this network
	"10.0.0.0/8",       // private
	"100.64.0.0/10",    // carrier-grade NAT; contains the links themselves
	"127.0.0.0/8",      // loopback
	"168.63.129.16/32", // Azure's virtual machine services, in public address namespace
	"169.254.0.0/16",   // link-local, with most metadata services
	"172.16.0.0/12",    // private
	"192.0.0.0/24",     // protocol assignments, including Oracle's metadata service
	"192.0.2.0/24",     // documentation
	"192.52.193.0/24",  // AMT
	"192.88.99.0/24",   // 6to4 relays
	"192.168.0.0/16",   // private
	"198.18.0.0/15",    // benchmarks
	"198.51.100.0/24",  // documentation
	"203.0.113.0/24",   // documentation
	"224.0.0.0/4",      // multicast
	"240.0.0.0/4",      // reserved, and broadcast
)

// refusedIPv6 are ranges of global unicast, 2000::/3, that embed other addresses or have no hosts.
// Everything outside of 2000::/3 is refused anyway: loopback, mapped, compatible and NAT64
// addresses, unique local, link-local, site-local and multicast.
var refusedIPv6 = prefixes(
	"::/3",
	"2001::/23",     // protocol assignments: Teredo, benchmarks, ORCHID
	"2001:db8::/32", // documentation
	"2002::/16",     // 6to4: any IPv4 address
	"3fff::/20",     // documentation
	"4000::/2",
	"8000::/1",
)

func prefixes(words ...string) []netip.Prefix {
	list := make([]netip.Prefix, len(words))
	for i, word := range words {
		list[i] = netip.MustParsePrefix(word)
	}
	return list
}

// refusedRange reports whether programs may not reach addr. It treats an IPv4 address in IPv6 form
// as IPv4.
func refusedRange(addr netip.Addr) bool {
	contains := func(p netip.Prefix) bool { return p.Contains(addr) }
	switch {
	case !addr.IsValid() || addr.Zone() != "":
		return true
	case addr.Is4():
		return slices.ContainsFunc(refusedIPv4, contains)
	}
	return addr.Is4In6() || slices.ContainsFunc(refusedIPv6, contains)
}

// lastAddr returns the highest address of a range.
func lastAddr(p netip.Prefix) netip.Addr {
	raw := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < len(raw)*8; bit++ {
		raw[bit/8] |= 0x80 >> (bit % 8)
	}
	addr, _ := netip.AddrFromSlice(raw)
	return addr
}
