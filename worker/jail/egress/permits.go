package egress

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// Bounds of how long an answer grants its addresses, whatever its TTL: long enough to connect, not
	// for ever. The TTL of the answer is not changed.
	minGrant, maxGrant = 30 * time.Second, time.Hour
	maxKnown           = 1024 // remembered addresses of a link
)

// permits are the addresses that one link may reach: those of its policy, and those granted by DNS
// answers.
type permits struct {
	open    bool // the whole public internet
	rules   []proto.NetworkRule
	private []proto.NetworkRule // the only rules for private addresses

	mu          sync.Mutex
	intercepted []proto.NetworkRule // hosts whose connections are intercepted
	known       map[netip.Addr]*knownAddr
}

// knownAddr is an address from a DNS answer.
type knownAddr struct {
	name    string               // of the latest query
	granted map[uint16]time.Time // expiry by port; port 0 stands for all
	expires time.Time            // the latest expiry
	inUse   int                  // open connections
	hosts   []int                // the intercepted hosts that resolved to the address
}

func newPermits(network proto.Network) (*permits, error) {
	p := &permits{open: network.Effective() == proto.NetworkUnrestricted, known: map[netip.Addr]*knownAddr{}}
	for _, s := range network.Allow {
		rule, err := proto.ParseNetworkRule(s)
		if err != nil {
			return nil, err
		}
		p.rules = append(p.rules, rule)
	}
	for _, s := range network.Private {
		rule, err := proto.ParsePrivateRule(s)
		if err != nil {
			return nil, err
		}
		p.private = append(p.private, rule)
	}
	return p, nil
}

// rulesFor returns the rules that can admit an address.
func (p *permits) rulesFor(addr netip.Addr) []proto.NetworkRule {
	if proto.PrivateAddr(addr) {
		return p.private
	}
	return p.rules
}

// acquire acquires a permit to connect. If ok, the caller must call release; until then the address
// stays granted.
func (p *permits) acquire(to netip.AddrPort, now time.Time) (release func(), ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.known[to.Addr()]
	open := p.open && !proto.PrivateAddr(to.Addr())
	if !open && !p.listed(to) && !k.grants(to.Port(), now) {
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

// permits reports whether a permit to connect could be acquired.
func (p *permits) permits(to netip.AddrPort, now time.Time) bool {
	release, ok := p.acquire(to, now)
	if ok {
		release()
	}
	return ok
}

// listed reports whether the list has a range with the address and port.
func (p *permits) listed(to netip.AddrPort) bool {
	return slices.ContainsFunc(p.rulesFor(to.Addr()), func(r proto.NetworkRule) bool {
		return r.Prefix.IsValid() && r.Prefix.Contains(to.Addr()) &&
			(len(r.Ports) == 0 || slices.Contains(r.Ports, to.Port()))
	})
}

func (k *knownAddr) grants(port uint16, now time.Time) bool {
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

// mayResolve reports whether a name may be queried.
func (p *permits) mayResolve(name string) bool {
	return p.open || matches(p.rules, name) || p.listsPrivate(name)
}

// listsPrivate reports whether a name is a private destination. Only these may belong to private
// networks, and have private addresses.
func (p *permits) listsPrivate(name string) bool { return matches(p.private, name) }

func matches(rules []proto.NetworkRule, name string) bool {
	return slices.ContainsFunc(rules, func(r proto.NetworkRule) bool { return r.Matches(name) })
}

// privateAddrs returns the private destinations that are listed by address.
func (p *permits) privateAddrs() (list []netip.AddrPort) {
	for _, rule := range p.private {
		for _, port := range rule.Ports {
			if rule.Prefix.IsValid() {
				list = append(list, netip.AddrPortFrom(rule.Prefix.Addr(), port))
			}
		}
	}
	return list
}

// privateAt returns the private destinations at an address to which a name resolves.
func (p *permits) privateAt(name string, addr netip.Addr) (list []netip.AddrPort) {
	for _, rule := range p.private {
		if !proto.PrivateAddr(addr) || !rule.Matches(name) {
			continue
		}
		for _, port := range rule.Ports {
			list = append(list, netip.AddrPortFrom(addr, port))
		}
	}
	return list
}

// learn remembers an answer. It grants the addresses until the answer expires, on the ports that the
// list has for the name.
func (p *permits) learn(name string, addr netip.Addr, ttl time.Duration, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.known[addr]
	if k == nil {
		p.evict()
		k = &knownAddr{granted: map[uint16]time.Time{}}
		p.known[addr] = k
	}
	k.name = name
	for i := range p.intercepted {
		if p.intercepted[i].Matches(name) && !slices.Contains(k.hosts, i) {
			k.hosts = append(k.hosts, i)
		}
	}
	until := now.Add(min(max(ttl, minGrant), maxGrant))
	if until.After(k.expires) {
		k.expires = until
	}
	for _, rule := range p.rulesFor(addr) {
		if !rule.Matches(name) {
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

// intercept sets the names of hosts whose connections are intercepted.
func (p *permits) intercept(hosts []proto.NetworkRule) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.intercepted = hosts
}

// interceptedAt returns a connection's intercepted hosts, as indices of intercepted.
func (p *permits) interceptedAt(to netip.AddrPort) (hosts []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.known[to.Addr()]
	if k == nil {
		return nil
	}
	for _, i := range k.hosts {
		if slices.Contains(p.intercepted[i].Ports, to.Port()) {
			hosts = append(hosts, i)
		}
	}
	return hosts
}

// evict forgets the unused address that expires first. There is one, since a link has fewer
// connections than remembered addresses.
func (p *permits) evict() {
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

// nameOf returns the name whose answer contained an address, if any.
func (p *permits) nameOf(addr netip.Addr) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if k := p.known[addr]; k != nil {
		return k.name
	}
	return ""
}
