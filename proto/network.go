package proto

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The limits of a network policy.
const (
	MaxNetworkRules     = 100
	MaxPrivateRules     = 32
	MaxNetworkRulePorts = 16
	MaxNetworkNameLen   = 253
	MaxBlocked          = 20 // refused connections in the record of an execution
)

// NetworkPolicy decides which addresses a program may reach.
type NetworkPolicy string

// The network policies. Whatever the policy, a program never reaches link-local, loopback, multicast
// or reserved addresses, its own machine, or bullpen's own services. It reaches private addresses
// only as [Network.Private] lists them.
const (
	NetworkBlocked      NetworkPolicy = "blocked"      // nothing
	NetworkUnrestricted NetworkPolicy = "unrestricted" // the public internet
	NetworkAllowlist    NetworkPolicy = "allowlist"    // the part of the public internet that [Network.Allow] names
)

// Network is a network policy with its list. The zero Network is blocked.
type Network struct {
	Policy NetworkPolicy `json:"policy" default:"blocked"`
	// Allow are rules in the form of [ParseNetworkRule], for the allowlist policy only.
	Allow []string `json:"allow,omitempty" maxItems:"100" must:"have 1 to 100 entries" doc:"With the policy allowlist: names, addresses and ranges, each with ports or for all of them."`
	// Private are rules in the form of [ParsePrivateRule], for every policy with a network.
	Private []string `json:"private,omitempty" maxItems:"32" must:"have at most 32 entries" doc:"Destinations in the operator's private network that programs may reach too: a name or an address, with ports."`
	// Bandwidth is in bytes per second, in each direction; 0 is no limit.
	Bandwidth Bytes `json:"bandwidth,omitempty" minimum:"16KiB" maximum:"1024GiB" doc:"Bytes per second that a sandbox may receive, and as many that it may send: 16KiB to 1024GiB. Not limited if absent."`
	// ConnectionRate is in new connections and UDP flows per second; 0 is no limit.
	ConnectionRate int `json:"connection_rate,omitempty" minimum:"1" maximum:"300" doc:"New TCP connections and UDP flows per second of a sandbox. A connection waits up to 10 seconds, and is refused if that is not enough. If absent, the only limit is that of every sandbox, 300 TCP connections."`
}

// Effective returns the policy, NetworkBlocked if it is empty.
func (n *Network) Effective() NetworkPolicy {
	if n.Policy == "" {
		return NetworkBlocked
	}
	return n.Policy
}

// Extended reports whether the network has settings that older workers would ignore.
func (n *Network) Extended() bool {
	return len(n.Private) > 0 || n.Bandwidth > 0 || n.ConnectionRate > 0
}

// Validate checks the policy and the form of every rule. Its error is a [*FieldError] for a field of
// "network".
func (n *Network) Validate() error {
	policy := n.Effective()
	switch policy {
	case NetworkBlocked, NetworkUnrestricted, NetworkAllowlist:
	default:
		return FieldErrorf("network.policy", "must be one of %s, %s, %s", NetworkBlocked, NetworkUnrestricted,
			NetworkAllowlist)
	}
	for _, field := range []struct {
		name string
		set  bool
	}{
		{"private", len(n.Private) > 0},
		{"bandwidth", n.Bandwidth > 0},
		{"connection_rate", n.ConnectionRate > 0},
	} {
		if field.set && policy == NetworkBlocked {
			return FieldErrorf("network."+field.name, "goes with the policies %s and %s only", NetworkUnrestricted,
				NetworkAllowlist)
		}
	}
	switch {
	case len(n.Private) > MaxPrivateRules:
		return FieldErrorf("network.private", "must have at most %d entries", MaxPrivateRules)
	case policy != NetworkAllowlist && len(n.Allow) > 0:
		return FieldErrorf("network.allow", "goes with the policy %s only", NetworkAllowlist)
	case policy == NetworkAllowlist && len(n.Allow)+len(n.Private) == 0, len(n.Allow) > MaxNetworkRules:
		return FieldErrorf("network.allow", "must have 1 to %d entries", MaxNetworkRules)
	}
	for _, s := range n.Private {
		if _, err := ParsePrivateRule(s); err != nil {
			return FieldErrorf("network.private", "%s", err)
		}
	}
	for _, s := range n.Allow {
		if _, err := ParseNetworkRule(s); err != nil {
			return FieldErrorf("network.allow", "%s", err)
		}
	}
	return nil
}

// NetworkRule is one entry of an allowlist: a name or a range of addresses, and ports.
type NetworkRule struct {
	// Name is a host name in lower case without a final dot. A leading "*." matches one or more
	// labels: "*.example.com" matches a.example.com and a.b.example.com, but not example.com. It is
	// empty if Prefix is set.
	Name   string
	Prefix netip.Prefix
	Ports  []uint16 // sorted; of TCP and of UDP; empty for all
}

// ParseNetworkRule parses one entry of an allowlist: "example.com", "*.example.com",
// "example.com:443", "example.com:80,443", "203.0.113.7", "203.0.113.0/24", "203.0.113.7:8080",
// "2001:db8::/32", "[2001:db8::1]:443", "[2001:db8::/32]:443". International names are written in
// their ASCII form (xn--…).
func ParseNetworkRule(s string) (NetworkRule, error) {
	rule, err := parseNetworkRule(s)
	if err != nil {
		return NetworkRule{}, fmt.Errorf("%q: %w", Shorten(s), err)
	}
	return rule, nil
}

func parseNetworkRule(s string) (rule NetworkRule, err error) {
	host, ports, err := splitPorts(s)
	if err != nil {
		return rule, err
	}
	if rule.Ports, err = parsePorts(ports); err != nil {
		return rule, err
	}
	if strings.ContainsAny(host, ":/") || looksLikeIPv4(host) {
		rule.Prefix, err = parsePrefix(host)
		return rule, err
	}
	rule.Name, err = parseHostPattern(host)
	return rule, err
}

// ParsePrivateRule parses a private destination: an exact name or an address of [PrivateAddr], with
// ports: "mirror.example.com:443", "10.1.2.3:5432", "[fd12:3456::1]:80,443".
func ParsePrivateRule(s string) (NetworkRule, error) {
	rule, err := parseNetworkRule(s)
	if err == nil {
		err = rule.checkPrivate()
	}
	if err != nil {
		return NetworkRule{}, fmt.Errorf("%q: %w", Shorten(s), err)
	}
	return rule, nil
}

func (r *NetworkRule) checkPrivate() error {
	switch {
	case len(r.Ports) == 0:
		return errors.New("a private destination needs ports, as in mirror.example.com:443")
	case slices.Contains(r.Ports, 53):
		return errors.New("port 53 is refused everywhere: the sandbox's own resolver answers for listed names")
	case strings.HasPrefix(r.Name, "*."):
		return errors.New("a private destination is one host: list each name")
	case r.Name == "" && !r.Prefix.IsSingleIP():
		return errors.New("a private destination is one host: list each address")
	case r.Name == "" && !PrivateAddr(r.Prefix.Addr()):
		return errors.New("not an address in 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16 or fc00::/7, or one of a " +
			"metadata service: public addresses go to network.allow, and others are refused to every program")
	}
	return nil
}

// reservedPrivate are the ranges of private addresses that no program may reach: metadata services,
// and the links of sandboxes.
var reservedPrivate = []netip.Prefix{ // read only
	netip.MustParsePrefix("fd00:ec2::/32"),          // Amazon
	netip.MustParsePrefix("fd20:ce::254/128"),       // Google
	netip.MustParsePrefix("fd00:c1::a9fe:a9fe/128"), // Oracle
	netip.MustParsePrefix("fd00:42::42/128"),        // Scaleway
	netip.MustParsePrefix("fd62:756c:6c70::/48"),    // links of sandboxes
}

// PrivateAddr reports whether [Network.Private] can open an address: one of 10.0.0.0/8,
// 172.16.0.0/12, 192.168.0.0/16 and fc00::/7, without metadata services.
func PrivateAddr(addr netip.Addr) bool {
	return addr.IsPrivate() && !addr.Is4In6() && addr.Zone() == "" &&
		!slices.ContainsFunc(reservedPrivate, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// splitPorts splits "host", "host:ports", "[v6]" and "[v6]:ports". An IPv6 address without brackets
// has no ports.
func splitPorts(s string) (host, ports string, err error) {
	if rest, ok := strings.CutPrefix(s, "["); ok {
		host, after, ok := strings.Cut(rest, "]")
		if !ok || !strings.Contains(host, ":") {
			return "", "", errors.New("brackets go around an IPv6 address or range, as in [2001:db8::/32]:443")
		}
		if after == "" {
			return host, "", nil
		}
		if ports, ok = strings.CutPrefix(after, ":"); !ok || ports == "" {
			return "", "", errors.New("after the bracket comes nothing or a colon and ports")
		}
		return host, ports, nil
	}
	switch strings.Count(s, ":") {
	case 0:
		return s, "", nil
	case 1:
		if host, ports, _ = strings.Cut(s, ":"); ports == "" {
			return "", "", errors.New("ports are missing after the colon")
		}
		return host, ports, nil
	}
	return s, "", nil
}

func parsePorts(s string) ([]uint16, error) {
	if s == "" {
		return nil, nil
	}
	words := strings.Split(s, ",")
	if len(words) > MaxNetworkRulePorts {
		return nil, fmt.Errorf("at most %d ports", MaxNetworkRulePorts)
	}
	var ports []uint16
	for _, word := range words {
		port, err := strconv.ParseUint(word, 10, 16)
		if err != nil || port == 0 || word[0] == '0' || word[0] == '+' {
			return nil, errors.New("ports are numbers from 1 to 65535, with commas between them")
		}
		ports = append(ports, uint16(port))
	}
	slices.Sort(ports)
	return slices.Compact(ports), nil
}

// looksLikeIPv4 reports whether the last label is a number. No host name ends like this, and a
// resolver may take "10.1", "0x7f.1" or "010.0.0.1" for an address.
func looksLikeIPv4(host string) bool {
	host = strings.TrimSuffix(host, ".")
	last := host[strings.LastIndexByte(host, '.')+1:]
	if last == "" {
		return false
	}
	if _, err := strconv.ParseUint(last, 0, 64); err == nil {
		return true
	}
	return strings.Trim(last, "0123456789") == ""
}

func parsePrefix(s string) (netip.Prefix, error) {
	if !strings.Contains(s, "/") {
		addr, err := netip.ParseAddr(s)
		if err != nil || addr.Zone() != "" || addr.Is4In6() {
			return netip.Prefix{}, errors.New("not an IPv4 or IPv6 address")
		}
		return netip.PrefixFrom(addr, addr.BitLen()), nil
	}
	prefix, err := netip.ParsePrefix(s)
	if err != nil || prefix.Addr().Is4In6() {
		return netip.Prefix{}, errors.New("not a range of IPv4 or IPv6 addresses, as in 203.0.113.0/24")
	}
	if prefix != prefix.Masked() {
		return netip.Prefix{}, fmt.Errorf("the range has bits beyond its length; %s is meant, or a single address",
			prefix.Masked())
	}
	return prefix, nil
}

func parseHostPattern(s string) (string, error) {
	name := strings.ToLower(strings.TrimSuffix(s, "."))
	host, wild := strings.CutPrefix(name, "*.")
	if len(name) > MaxNetworkNameLen || wild && host == "" {
		return "", errHostForm
	}
	for label := range strings.SplitSeq(host, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return "", errHostForm
		}
		for _, c := range []byte(label) {
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
				return "", errHostForm
			}
		}
	}
	return name, nil
}

var errHostForm = errors.New(
	`neither an address nor a host name; a name has labels of A-Z, a-z, 0-9, - and _ (international ones as xn--…), ` +
		`and "*." may stand before it`)

// BlockReason is why a connection was refused.
type BlockReason string

// The reasons. The list may only grow.
const (
	BlockedNotAllowed BlockReason = "not_allowed" // the allowlist does not name it
	BlockedAddress    BlockReason = "address"     // an address that is not public and not in [Network.Private]
	BlockedResolver   BlockReason = "resolver"    // a DNS server other than the sandbox's own
	BlockedName       BlockReason = "name"        // a name outside the public internet
	BlockedProtocol   BlockReason = "protocol"    // neither TCP nor UDP
	BlockedLimit      BlockReason = "limit"       // too many connections or queries
)

// BlockedConnection is a connection or a DNS query that was refused.
type BlockedConnection struct {
	Host     string      `json:"host,omitempty"`    // the name of the query, or the name that resolved to the address
	Address  string      `json:"address,omitempty"` // an IP address
	Port     int         `json:"port,omitempty" minimum:"0" maximum:"65535"`
	Protocol string      `json:"protocol"` // tcp, udp, dns, icmp, or ip/ and the number
	Reason   BlockReason `json:"reason" doc:"not_allowed, address, resolver, name, protocol or limit; more may come."`
	At       time.Time   `json:"at"`
}

// Traffic is the payload in bytes, over TCP and UDP, that a program exchanged with others. DNS queries
// and refused connections are not counted.
type Traffic struct {
	BytesIn  int64 `json:"bytes_in" minimum:"0" doc:"Received by the program."`
	BytesOut int64 `json:"bytes_out" minimum:"0" doc:"Sent by the program."`
}
