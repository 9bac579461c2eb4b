package egress

import (
	"net/netip"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// MinBurst is minBurst.
const MinBurst = minBurst

// MaxPrivate is maxPrivate.
const MaxPrivate = maxPrivate

// DropFirewall removes the firewall, so that the dialer's checks are tested.
func (n *Network) DropFirewall() error {
	n.firewall.conn.DelTable(n.firewall.table)
	return n.firewall.conn.Flush()
}

// PrivateDestinations counts the private destinations that the firewall admits.
func (n *Network) PrivateDestinations() (count int, err error) {
	n.firewall.mu.Lock()
	defer n.firewall.mu.Unlock()
	for _, set := range n.firewall.private {
		elements, err := n.firewall.conn.GetSetElements(set)
		if err != nil {
			return 0, err
		}
		count += len(elements)
	}
	return count, nil
}

// Received returns the number of TCP and UDP packets that passed the firewall.
func (n *Network) Received() uint64 {
	stats := n.uplink.Stats()
	return stats.TCP.ValidSegmentsReceived.Value() + stats.TCP.InvalidSegmentsReceived.Value() +
		stats.UDP.PacketsReceived.Value() + stats.UDP.UnknownPortErrors.Value() + stats.UDP.MalformedPacketsReceived.Value()
}

// Devices counts the interfaces of the egress namespace.
func (n *Network) Devices() (int, error) {
	links, err := n.namespace.link.LinkList()
	return len(links), err
}

// Endpoints counts the connections of the stack.
func (n *Network) Endpoints() int { return len(n.uplink.RegisteredEndpoints()) }

// RefusedRange is refusedRange.
func RefusedRange(addr netip.Addr) bool { return refusedRange(addr) }

// Permits exports permits with an explicit clock.
type Permits struct{ p *permits }

// NewPermits is newPermits.
func NewPermits(network proto.Network) (Permits, error) {
	p, err := newPermits(network)
	return Permits{p}, err
}

// Learn is learn.
func (p Permits) Learn(name string, addr netip.Addr, ttl time.Duration, now time.Time) {
	p.p.learn(name, addr, ttl, now)
}

// Use is use.
func (p Permits) Use(to netip.AddrPort, now time.Time) (release func(), ok bool) {
	return p.p.acquire(to, now)
}

// Known counts the remembered addresses.
func (p Permits) Known() int { return len(p.p.known) }

// BytesIn returns the bytes that the program has received so far.
func (l *Link) BytesIn() int64 { return l.in.bytes.Load() }

// ParseLog calls parseLog and discards the result.
func ParseLog(attrs []byte) bool {
	_, ok := parseLog(attrs)
	return ok
}
