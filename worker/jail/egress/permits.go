package egress

import (
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// How long an answer grants its addresses, whatever its TTL says: long enough to connect, not for ever. The answer itself
	// is passed on with the TTL it has.
	minGrant, maxGrant = 30 * time.Second, time.Hour
	maxKnown           = 1024 // addresses that a link remembers
)

// permits is what one link may reach: its policy, and what its DNS answers have granted.
type permits struct {
	open  bool // all of the public internet
	rules []proto.NetworkRule

	mu    sync.Mutex
	known map[netip.Addr]*known
}

// known is an address that was the answer to a question.
type known struct {
	name    string               // that was asked for last
	granted map[uint16]time.Time // until when, by port; port 0 stands for all
	expires time.Time            // the latest of them
	inUse   int                  // open connections
}

func newPermits(network proto.Network) (*permits, error) {
	p := &permits{open: network.Effective() == proto.NetworkUnrestricted, known: map[netip.Addr]*known{}}
	for _, s := range network.Allow {
		rule, err := proto.ParseNetworkRule(s)
		if err != nil {
			return nil, err
		}
		p.rules = append(p.rules, rule)
	}
	return p, nil
}

// use takes a permit to connect. When ok, release gives it back: while a connection is open, its address stays granted.
func (p *permits) use(to netip.AddrPort, now time.Time) (release func(), ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.known[to.Addr()]
	if !p.open && !p.listed(to) && !k.grants(to.Port(), now) {
		return nil, false
	}
	if k == nil {
		return func() {}, true
	}
	k.inUse++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		k.inUse--
	}, true
}

// listed reports whether a range on the list has the address, with its port.
func (p *permits) listed(to netip.AddrPort) bool {
	return slices.ContainsFunc(p.rules, func(r proto.NetworkRule) bool {
		return r.Prefix.IsValid() && r.Prefix.Contains(to.Addr()) && (len(r.Ports) == 0 || slices.Contains(r.Ports, to.Port()))
	})
}

func (k *known) grants(port uint16, now time.Time) bool {
	if k == nil {
		return false
	}
	for _, p := range []uint16{0, port} {
		if until, ok := k.granted[p]; ok && (k.inUse > 0 || now.Before(until)) {
			return true
		}
	}
	return false
}

// resolves reports whether a name may be asked for.
func (p *permits) resolves(name string) bool {
	return p.open || slices.ContainsFunc(p.rules, func(r proto.NetworkRule) bool { return matches(r, name) })
}

// matches reports whether a rule names a name, in lower case without its final dot.
func matches(r proto.NetworkRule, name string) bool {
	if suffix, ok := strings.CutPrefix(r.Name, "*"); ok {
		return strings.HasSuffix(name, suffix) && len(name) > len(suffix)
	}
	return r.Name != "" && r.Name == name
}

// learn remembers the answer to a question. Under an allowlist it grants the addresses, on the ports that the list has for
// the name, as long as the answer lives.
func (p *permits) learn(name string, addr netip.Addr, ttl time.Duration, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.known[addr]
	if k == nil {
		p.makeRoom()
		k = &known{granted: map[uint16]time.Time{}}
		p.known[addr] = k
	}
	k.name = name
	until := now.Add(min(max(ttl, minGrant), maxGrant))
	if until.After(k.expires) {
		k.expires = until
	}
	for _, rule := range p.rules {
		if !matches(rule, name) {
			continue
		}
		ports := rule.Ports
		if len(ports) == 0 {
			ports = []uint16{0}
		}
		for _, port := range ports {
			if until.After(k.granted[port]) {
				k.granted[port] = until
			}
		}
	}
}

// makeRoom forgets the address that expires first, of those not in use. There are fewer connections than there is room.
func (p *permits) makeRoom() {
	if len(p.known) < maxKnown {
		return
	}
	var first netip.Addr
	for addr, k := range p.known {
		if k.inUse == 0 && (!first.IsValid() || k.expires.Before(p.known[first].expires)) {
			first = addr
		}
	}
	delete(p.known, first)
}

// nameOf gives the name that an address was the answer to, if any.
func (p *permits) nameOf(addr netip.Addr) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if k := p.known[addr]; k != nil {
		return k.name
	}
	return ""
}
