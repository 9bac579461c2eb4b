package egress

import (
	"net/netip"
	"slices"
)

// refusedIPv4 is what no program may reach: everything of the special-purpose registry that is not globally reachable, and
// the addresses at which clouds keep what belongs to the machine.
var refusedIPv4 = prefixes(
	"0.0.0.0/8",        // this network
	"10.0.0.0/8",       // private
	"100.64.0.0/10",    // carrier-grade NAT; also where the links themselves are
	"127.0.0.0/8",      // loopback
	"168.63.129.16/32", // Azure's virtual machine services, in the middle of public space
	"169.254.0.0/16",   // link-local, with most metadata services
	"172.16.0.0/12",    // private
	"192.0.0.0/24",     // protocol assignments, with Oracle's metadata service
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

// refusedIPv6 leaves global unicast, 2000::/3, without what stands for other addresses or none. Loopback, IPv4 in its mapped,
// compatible and NAT64 forms, unique local, link-local, site-local and multicast addresses lie outside of it.
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

// refusedRange reports whether addr lies where no program may go. An IPv4 address in an IPv6 form is refused as such.
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

// lastAddr is the highest address of a range.
func lastAddr(p netip.Prefix) netip.Addr {
	raw := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < len(raw)*8; bit++ {
		raw[bit/8] |= 0x80 >> (bit % 8)
	}
	addr, _ := netip.AddrFromSlice(raw)
	return addr
}
