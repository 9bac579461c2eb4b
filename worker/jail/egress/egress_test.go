package egress_test

import (
	"net"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/bullpen-run/bullpen/proto"
)

func TestUnrestrictedReachesInternet(t *testing.T) {
	internet.zone.set("reach.example.com", "reach.example.com. 77 IN A "+webIPv4, "reach.example.com. 77 IN AAAA "+webIPv6)
	j, l := attach(t, open(t), unrestricted)
	if a := j.do(order{Do: "interfaces"}); len(a.Found) != 4 || a.Error != "" {
		t.Errorf("the jail has %v %s, want one address each of lo and eth0, IPv4 and IPv6", a.Found, a.Error)
	}
	for _, to := range []string{net.JoinHostPort(webIPv4, "7"), net.JoinHostPort(webIPv6, "7"), "reach.example.com:7"} {
		if a := j.tcp(to, "hello"); a.Data != "hello" || a.Error != "" {
			t.Errorf("tcp %s: %+v", to, a)
		}
		if a := j.udp(to, "hi"); a.Data != "hi" || a.Error != "" {
			t.Errorf("udp %s: %+v", to, a)
		}
	}
	if a := j.get("http://reach.example.com/"); a.Data != "this is "+webIPv4+":80" {
		t.Errorf("get: %+v", a)
	}
	for _, how := range []string{"A", "A tcp", "A udp6", "A tcp6"} {
		if a := j.resolve("Reach.Example.com", how); a.TTL != 77 || !slices.Equal(a.Found, []string{webIPv4}) {
			t.Errorf("resolve %s: %+v", how, a)
		}
	}
	if report := l.Close(); len(report.Blocked) != 0 {
		t.Errorf("refused %+v", report.Blocked)
	}
}

// refusedTargets are addresses that programs may not reach. Each exists and answers.
func refusedTargets() []string {
	targets := []string{hostIPv4, hostIPv6, "10.77.0.2", controlIP}
	for _, a := range internetAddrs {
		if !slices.Contains([]string{
			gatewayIPv4, gatewayIPv6, webIPv4, web2IPv4, webIPv6, nameserver, foreignDNS,
			controlIP,
		}, a) {
			targets = append(targets, a)
		}
	}
	return targets
}

func TestNonPublicAddressesAreRefused(t *testing.T) {
	for _, target := range refusedTargets() {
		conn, err := net.Dial("tcp", net.JoinHostPort(target, "7"))
		if err != nil {
			t.Fatalf("the host itself must reach %s, or the test shows nothing: %v", target, err)
		}
		_ = conn.Close()
	}
	for name, policy := range map[string]proto.Network{
		"unrestricted": unrestricted,
		"allowlist":    allow("0.0.0.0/0", "::/0", "169.254.169.254", "10.0.0.0/8:7", "*.example.com"),
	} {
		t.Run(name, func(t *testing.T) {
			n := open(t, controlIP+":4222")
			for targets := range slices.Chunk(refusedTargets(), proto.MaxBlocked/2) {
				j, l := attach(t, n, policy)
				var want []proto.BlockedConnection
				before := n.Received()
				for _, target := range targets {
					to := net.JoinHostPort(target, "7")
					if a := j.tcp(to, "x"); a.Error != "ECONNREFUSED" {
						t.Errorf("tcp %s: %+v", to, a)
					}
					if a := j.udp(to, "x"); a.Error != "ECONNREFUSED" {
						t.Errorf("udp %s: %+v", to, a)
					}
					for _, protocol := range []string{"tcp", "udp"} {
						want = append(want, proto.BlockedConnection{
							Address: target, Port: 7, Protocol: protocol, Reason: proto.BlockedAddress,
						})
					}
				}
				report := l.Close()
				if diff := cmp.Diff(want, report.Blocked, cmpopts.IgnoreFields(proto.BlockedConnection{}, "At")); diff != "" {
					t.Errorf("refused (-want +got):\n%s", diff)
				}
				if after := n.Received(); after != before {
					t.Errorf("%d packets passed the firewall", after-before)
				}
			}
		})
	}
}

func TestDialerChecksWithoutFirewall(t *testing.T) {
	n := open(t, controlIP+":4222")
	j, l := attach(t, n, unrestricted)
	if err := n.DropFirewall(); err != nil {
		t.Fatal(err)
	}
	targets := refusedTargets()[:proto.MaxBlocked/2]
	targets = append(targets[:proto.MaxBlocked/2-2:proto.MaxBlocked/2-2], "fd00:ec2::254", "64:ff9b::a9fe:a9fe")
	for _, target := range targets {
		to := net.JoinHostPort(target, "7")
		for _, a := range []answer{j.tcp(to, "x"), j.udp(to, "x")} {
			if a.Error != "ECONNREFUSED" {
				t.Errorf("%s: %+v", to, a)
			}
		}
	}
	report := l.Close()
	if len(report.Blocked) != proto.MaxBlocked {
		t.Errorf("%d refused, want %d: %+v", len(report.Blocked), proto.MaxBlocked, report.Blocked)
	}
	for _, b := range report.Blocked {
		if b.Reason != proto.BlockedAddress || b.At.IsZero() {
			t.Errorf("refused %+v", b)
		}
	}
	if report.Traffic != (proto.Traffic{}) {
		t.Errorf("traffic %+v", report.Traffic)
	}
}
