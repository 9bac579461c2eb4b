package egress_test

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

// Hosts of the private network. The tests' internet has them, and each answers at every port.
const (
	mirrorIPv4, mirrorIPv6 = "10.1.2.3", "fd00:1::1"
	databaseIPv4           = "192.168.1.1"
)

// private returns a policy with private destinations, and with an allowlist if there are other rules.
func private(rules []string, allowed ...string) proto.Network {
	policy := unrestricted
	if len(allowed) > 0 {
		policy = allow(allowed...)
	}
	policy.Private = rules
	return policy
}

// serveName makes a name resolve to addresses.
func serveName(name string, addrs ...string) {
	var records []string
	for _, addr := range addrs {
		kind := " 60 IN A "
		if strings.Contains(addr, ":") {
			kind = " 60 IN AAAA "
		}
		records = append(records, name+"."+kind+addr)
	}
	internet.zone.set(name, records...)
}

func TestPrivateDestinations(t *testing.T) {
	serveName("mirror.corp.internal", mirrorIPv4, mirrorIPv6)
	n := open(t)
	onlyPrivate := private([]string{"mirror.corp.internal:80,7", databaseIPv4 + ":7"})
	onlyPrivate.Policy = proto.NetworkAllowlist
	for name, policy := range map[string]proto.Network{
		"unrestricted": private(onlyPrivate.Private),
		"allowlist":    private(onlyPrivate.Private, "example.com", "10.0.0.0/8", "fd00::/8", "mirror.corp.internal"),
		"nothing else": onlyPrivate,
	} {
		t.Run(name, func(t *testing.T) {
			j, l := attach(t, n, policy)
			for _, addr := range []string{mirrorIPv4, mirrorIPv6} {
				if a := j.tcp(net.JoinHostPort(addr, "7"), "x"); a.Error != "ECONNREFUSED" {
					t.Errorf("the number before the name was resolved: %+v", a)
				}
			}
			for _, kind := range []string{"A", "AAAA"} {
				if a := j.resolve("Mirror.corp.internal", kind); a.Error != "" || len(a.Found) != 1 {
					t.Errorf("resolve %s: %+v", kind, a)
				}
			}
			for _, to := range []string{
				"mirror.corp.internal:7", net.JoinHostPort(mirrorIPv6, "7"), databaseIPv4 + ":7",
			} {
				if a := j.tcp(to, "hello"); a.Data != "hello" {
					t.Errorf("tcp %s: %+v", to, a)
				}
				if a := j.udp(to, "hi"); a.Data != "hi" {
					t.Errorf("udp %s: %+v", to, a)
				}
			}
			if a := j.get("http://mirror.corp.internal/"); a.Data != "this is "+mirrorIPv4+":80" {
				t.Errorf("get: %+v", a)
			}
			var want []proto.BlockedConnection
			refused := func(host, addr string, port int) {
				want = append(want, proto.BlockedConnection{
					Host: host, Address: addr, Port: port, Protocol: "tcp", Reason: proto.BlockedAddress,
				})
			}
			refused("", mirrorIPv4, 7)
			refused("", mirrorIPv6, 7)
			for _, to := range []struct {
				host, addr string
				port       string
				number     int
			}{
				{"mirror.corp.internal", mirrorIPv4, "9", 9},
				{"mirror.corp.internal", mirrorIPv6, "9", 9},
				{"", databaseIPv4, "80", 80},
				{"", "172.16.5.4", "7", 7},
				{"", "169.254.169.254", "80", 80},
			} {
				if a := j.tcp(net.JoinHostPort(to.addr, to.port), "x"); a.Error != "ECONNREFUSED" {
					t.Errorf("%s port %s: %+v", to.addr, to.port, a)
				}
				refused(to.host, to.addr, to.number)
			}
			wantBlocked(t, l, want...)
		})
	}
	j, _ := attach(t, n, unrestricted) // links have their own destinations
	for _, to := range []string{databaseIPv4 + ":7", mirrorIPv4 + ":7"} {
		if a := j.tcp(to, "x"); a.Error != "ECONNREFUSED" {
			t.Errorf("from a jail without private destinations: %s: %+v", to, a)
		}
	}
}

// Whatever a listed name resolves to, it opens private addresses only, and none of the worker's machine
// or of the control plane. A name that is not listed opens none.
func TestPrivateNamesOpenNothingElse(t *testing.T) {
	control := "172.16.5.4"
	serveName("listed.corp", "169.254.169.254", "127.0.0.1", "10.77.0.2", hostIPv4, control, "100.100.100.200", "::1",
		"fd00:ec2::254", "fd62:756c:6c70::1", "::ffff:10.1.2.3", "fe80::1", mirrorIPv4)
	serveName("public.example.com", mirrorIPv4)
	internet.zone.set("alias.example.com", "alias.example.com. 60 IN CNAME listed.corp.",
		"listed.corp. 60 IN A "+mirrorIPv4)
	rules := []string{"listed.corp:7,4222"}
	for name, policy := range map[string]proto.Network{
		"unrestricted": private(rules), "allowlist": private(rules, "*.example.com", "0.0.0.0/0", "::/0"),
	} {
		t.Run(name, func(t *testing.T) {
			n := open(t, control+":4222")
			j, _ := attach(t, n, policy)
			for _, unlisted := range []string{"public.example.com", "alias.example.com"} {
				if a := j.resolve(unlisted, "A"); a.Error != "REFUSED" || len(a.Found) != 0 {
					t.Errorf("%s: %+v", unlisted, a)
				}
			}
			if a := j.tcp(mirrorIPv4+":7", "x"); a.Error != "ECONNREFUSED" {
				t.Errorf("an address of names that are not listed: %+v", a)
			}
			if a := j.resolve("listed.corp", "A"); !slices.Equal(a.Found, []string{mirrorIPv4}) {
				t.Errorf("A: %+v", a)
			}
			if a := j.resolve("listed.corp", "AAAA"); a.Error != "REFUSED" || len(a.Found) != 0 {
				t.Errorf("AAAA: %+v", a)
			}
			if a := j.tcp("listed.corp:7", "x"); a.Data != "x" {
				t.Errorf("the private address: %+v", a)
			}
			check := func(layers string) {
				for _, addr := range []string{
					"169.254.169.254", "127.0.0.1", "10.77.0.2", hostIPv4, control, "100.100.100.200", "fd00:ec2::254",
				} {
					for _, port := range []string{"7", "4222"} {
						if a := j.tcp(net.JoinHostPort(addr, port), "x"); a.Error != "ECONNREFUSED" {
							t.Errorf("%s: %s port %s: %+v", layers, addr, port, a)
						}
					}
				}
			}
			check("both layers")
			if err := n.DropFirewall(); err != nil {
				t.Fatal(err)
			}
			check("the dialer alone")
			if a := j.tcp(databaseIPv4+":7", "x"); a.Error != "ECONNREFUSED" {
				t.Errorf("the dialer alone: a private address that is not listed: %+v", a)
			}
		})
	}
}

// The worker's own address and the control plane stay closed even if they are listed by number.
func TestListedHostAddressesAreRefused(t *testing.T) {
	n := open(t, "172.16.5.4:4222")
	j, _ := attach(t, n, private([]string{"10.77.0.2:7,80,4222", "172.16.5.4:4222"}))
	for _, to := range []string{"10.77.0.2:7", "10.77.0.2:80", "10.77.0.2:4222", "172.16.5.4:4222"} {
		if a := j.tcp(to, "x"); a.Error != "ECONNREFUSED" {
			t.Errorf("%s: %+v", to, a)
		}
	}
}

// A closed link leaves no private destination in the firewall.
func TestClosedLinksLeaveNoPrivateDestinations(t *testing.T) {
	serveName("mirror.corp.internal", mirrorIPv4, mirrorIPv6)
	n := open(t)
	j, l := attach(t, n, private([]string{"mirror.corp.internal:7", databaseIPv4 + ":7", "[" + mirrorIPv6 + "]:80"}))
	if a := j.tcp("mirror.corp.internal:7", "x"); a.Data != "x" {
		t.Fatalf("%+v", a)
	}
	if got, err := n.PrivateDestinations(); err != nil || got != 4 { // the mirror has one of each family
		t.Errorf("%d, %v while the link is open, want 4", got, err)
	}
	l.Close()
	if got, err := n.PrivateDestinations(); err != nil || got != 0 {
		t.Errorf("%d, %v after the link has closed", got, err)
	}
}

// As many private destinations as a profile can have are admitted at once.
func TestManyPrivateDestinations(t *testing.T) {
	var rules []string
	for i := range proto.MaxPrivateRules {
		rules = append(rules, net.JoinHostPort("fd00:1::"+string(rune('a'+i%6))+string(rune('0'+i/6)),
			"7,101,102,103,104,105,106,107,108,109,110,111,112,113,114,115"))
	}
	rules[0] = "[" + mirrorIPv6 + "]:115,101,102,103,104,105,106,107,108,109,110,111,112,113,114,7"
	n := open(t)
	j, _ := attach(t, n, private(rules))
	if got, err := n.PrivateDestinations(); err != nil || got != proto.MaxPrivateRules*proto.MaxNetworkRulePorts {
		t.Errorf("%d, %v", got, err)
	}
	if a := j.tcp(net.JoinHostPort(mirrorIPv6, "7"), "x"); a.Data != "x" {
		t.Errorf("%+v", a)
	}
}

// A name that resolves to ever new addresses fills neither the firewall nor the link's memory, and the
// newest address can be reached.
func TestPrivateNameWithEverNewAddresses(t *testing.T) {
	n := open(t)
	j, l := attach(t, n, private([]string{"rotating.corp:7"}))
	const rounds, records = 3 * egress.MaxPrivate / 128, 128
	for round := range rounds {
		var addrs []string
		for i := range records - 1 {
			addrs = append(addrs, fmt.Sprintf("10.9.%d.%d", round, i))
		}
		if round == rounds-1 {
			addrs = append(addrs, mirrorIPv4)
		}
		serveName("rotating.corp", addrs...)
		if a := j.resolve("rotating.corp", "A"); a.Error != "" {
			t.Fatalf("round %d: %s", round, a.Error)
		}
	}
	if got, err := n.PrivateDestinations(); err != nil || got > egress.MaxPrivate {
		t.Errorf("%d, %v while the link is open, want at most %d", got, err, egress.MaxPrivate)
	}
	if a := j.tcp(mirrorIPv4+":7", "x"); a.Data != "x" {
		t.Errorf("the newest address: %+v", a)
	}
	l.Close()
	if got, err := n.PrivateDestinations(); err != nil || got != 0 {
		t.Errorf("%d, %v after the link has closed", got, err)
	}
}

// A name with too many destinations at once is not answered, and stays within the limit.
func TestPrivateNameWithTooManyDestinations(t *testing.T) {
	n := open(t)
	ports := "rotating.corp:7,101,102,103,104,105,106,107,108,109,110,111,112,113,114,115"
	j, l := attach(t, n, private([]string{ports}))
	for round := range 6 {
		var addrs []string
		for i := range 127 {
			addrs = append(addrs, fmt.Sprintf("10.9.%d.%d", round, i))
		}
		serveName("rotating.corp", addrs...)
		if a := j.resolve("rotating.corp", "A"); (a.Error == "") != (round == 0) {
			t.Errorf("round %d: %q", round, a.Error)
		}
	}
	l.Close()
	if got, err := n.PrivateDestinations(); err != nil || got != 0 {
		t.Errorf("%d, %v after the link has closed", got, err)
	}
	wantBlocked(t, l, proto.BlockedConnection{Host: "rotating.corp", Protocol: "dns", Reason: proto.BlockedLimit})
}
