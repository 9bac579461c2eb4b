package proto_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/bullpen-run/bullpen/proto"
)

func TestParseNetworkRule(t *testing.T) {
	prefix := netip.MustParsePrefix
	for in, want := range map[string]proto.NetworkRule{
		"example.com":           {Name: "example.com"},
		"Example.COM.":          {Name: "example.com"},
		"*.example.com":         {Name: "*.example.com"},
		"localhost":             {Name: "localhost"},
		"_sip._tcp.example.com": {Name: "_sip._tcp.example.com"},
		"xn--bcher-kva.example": {Name: "xn--bcher-kva.example"},
		"example.com:443":       {Name: "example.com", Ports: []uint16{443}},
		"example.com:443,80,80": {Name: "example.com", Ports: []uint16{80, 443}},
		"203.0.113.0/24":        {Prefix: prefix("203.0.113.0/24")},
		"203.0.113.7:8080":      {Prefix: prefix("203.0.113.7/32"), Ports: []uint16{8080}},
		"203.0.113.0/24:1,2":    {Prefix: prefix("203.0.113.0/24"), Ports: []uint16{1, 2}},
		"0.0.0.0/0":             {Prefix: prefix("0.0.0.0/0")},
		"2001:db8::1":           {Prefix: prefix("2001:db8::1/128")},
		"2001:db8::/32":         {Prefix: prefix("2001:db8::/32")},
		"[2001:db8::1]":         {Prefix: prefix("2001:db8::1/128")},
		"[2001:db8::/32]:443":   {Prefix: prefix("2001:db8::/32"), Ports: []uint16{443}},
	} {
		got, err := proto.ParseNetworkRule(in)
		if err != nil {
			t.Errorf("ParseNetworkRule(%q): %v", in, err)
			continue
		}
		if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
			cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("ParseNetworkRule(%q) (-want +got):\n%s", in, diff)
		}
	}
}

func TestParseNetworkRuleRefuses(t *testing.T) {
	for _, in := range []string{
		"", ".", "*", "*.", "a..b", ".a", "*example.com", "a.*.b", "-a.com", "a-.com", "bücher.example", "a b",
		"https://a.com", "a.com/x",
		"a.com:", "a.com:0", "a.com:65536", "a.com:http", "a.com:+1", "a.com:01", "a.com:80,", "a.com:80-90", "user@a.com",
		"a.com:" + strings.TrimSuffix(strings.Repeat("1,", 17), ","),
		"10.1", "127.1", "0x7f.1", "0x7f000001", "2130706433", "010.0.0.1", "256.0.0.1", "1.2.3.4.", "1.2.3.4/33",
		"1.2.3.4/24", "1.2.3.0/24/24",
		"::ffff:10.0.0.1", "::ffff:10.0.0.0/104", "fe80::1%eth0", "[::1", "[1.2.3.4]:80", "[::1]x", "[::1]:", "::1/129",
		"[example.com]:80",
		strings.Repeat("a", 64) + ".com", strings.Repeat("a.", 127) + "com",
	} {
		if rule, err := proto.ParseNetworkRule(in); err == nil {
			t.Errorf("ParseNetworkRule(%q) = %+v, want an error", in, rule)
		}
	}
}

func TestNetworkValidate(t *testing.T) {
	many := strings.Split(strings.TrimSuffix(strings.Repeat("a.com,", proto.MaxNetworkRules), ","), ",")
	for name, tc := range map[string]struct {
		network proto.Network
		want    string
	}{
		"zero":         {proto.Network{}, ""},
		"blocked":      {proto.Network{Policy: proto.NetworkBlocked}, ""},
		"unrestricted": {proto.Network{Policy: proto.NetworkUnrestricted}, ""},
		"allowlist":    {proto.Network{Policy: proto.NetworkAllowlist, Allow: many}, ""},
		"unknown": {
			proto.Network{Policy: "open"},
			"network.policy must be one of blocked, unrestricted, allowlist",
		},
		"list without policy": {proto.Network{Allow: []string{"a.com"}}, "network.allow goes with the policy allowlist only"},
		"empty list":          {proto.Network{Policy: proto.NetworkAllowlist}, "network.allow must have 1 to 100 entries"},
		"long list": {
			proto.Network{Policy: proto.NetworkAllowlist, Allow: append(many, "a.com")},
			"network.allow must have 1 to 100 entries",
		},
		"private with a list": {
			proto.Network{Policy: proto.NetworkAllowlist, Allow: many, Private: []string{"mirror.corp:443"}}, "",
		},
		"private alone": {proto.Network{Policy: proto.NetworkAllowlist, Private: []string{"10.1.2.3:5432"}}, ""},
		"private with the internet": {
			proto.Network{Policy: proto.NetworkUnrestricted, Private: []string{"[fd12::1]:1,2"}}, "",
		},
		"private without a network": {
			proto.Network{Private: []string{"mirror.corp:443"}},
			"network.private goes with the policies unrestricted and allowlist only",
		},
		"limits without a network": {
			proto.Network{Bandwidth: proto.MiB}, "network.bandwidth goes with the policies unrestricted and allowlist only",
		},
		"rate without a network": {
			proto.Network{Policy: proto.NetworkBlocked, ConnectionRate: 1},
			"network.connection_rate goes with the policies unrestricted and allowlist only",
		},
		"limits": {proto.Network{Policy: proto.NetworkUnrestricted, Bandwidth: proto.MiB, ConnectionRate: 5}, ""},
		"long private list": {
			proto.Network{
				Policy:  proto.NetworkUnrestricted,
				Private: slices.Repeat([]string{"mirror.corp:443"}, proto.MaxPrivateRules+1),
			},
			"network.private must have at most 32 entries",
		},
		"bad private rule": {
			proto.Network{Policy: proto.NetworkUnrestricted, Private: []string{"mirror.corp"}},
			`network.private "mirror.corp": a private destination needs ports, as in mirror.example.com:443`,
		},
		"bad rule": {
			proto.Network{Policy: proto.NetworkAllowlist, Allow: []string{"a.com", "a.com:x"}},
			`network.allow "a.com:x": ports are numbers from 1 to 65535, with commas between them`,
		},
	} {
		got := ""
		if err := tc.network.Validate(); err != nil {
			got = err.Error()
		}
		if got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

func TestParsePrivateRule(t *testing.T) {
	for in, want := range map[string]string{
		"Mirror.Corp.:443,80": "", "mirror:3128": "", "db.internal:5432": "", "10.0.0.0:1": "", "172.31.255.255:65535": "",
		"192.168.1.1:52": "", "[fc00::1]:443": "", "[fd00:ec1::254]:80": "",
		"mirror.corp": "needs ports", "10.1.2.3": "needs ports", "mirror.corp:53": "port 53",
		"*.corp:443": "list each name", "10.0.0.0/8:443": "list each address", "[fd00::/8]:443": "list each address",
		"93.184.216.34:443": "not an address in", "[2606::1]:443": "not an address in",
		"169.254.169.254:80": "not an address in",
		"127.0.0.1:4222":     "not an address in", "100.100.100.200:80": "not an address in",
		"172.32.0.0:1":     "not an address in",
		"168.63.129.16:80": "not an address in", "0.0.0.0:80": "not an address in", "[::1]:80": "not an address in",
		"[fe80::1]:80": "not an address in", "[fd00:ec2::254]:80": "not an address in",
		"[fd20:ce::254]:80": "not an address in", "[fd62:756c:6c70::1]:80": "not an address in",
		"[::ffff:10.0.0.1]:80": "not an IPv4", "https://mirror.corp:443": "not a range", "mirror.corp:x": "ports are numbers",
	} {
		rule, err := proto.ParsePrivateRule(in)
		switch {
		case want == "" && (err != nil || len(rule.Ports) == 0):
			t.Errorf("ParsePrivateRule(%q) = %+v, %v", in, rule, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("ParsePrivateRule(%q): %v, want an error with %q", in, err, want)
		}
	}
}

func FuzzParseNetworkRule(f *testing.F) {
	for _, seed := range []string{
		"example.com:80,443", "*.example.com", "203.0.113.0/24:1", "[2001:db8::/32]:443", "::",
		"0x7f.1", strings.Repeat("\xa7", 65),
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		rule, err := proto.ParseNetworkRule(s)
		if err != nil {
			return
		}
		if (rule.Name == "") == !rule.Prefix.IsValid() {
			t.Errorf("%q: neither or both of a name and a range: %+v", s, rule)
		}
	})
}
