package egress_test

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

func wantBlocked(t *testing.T, l *egress.Link, want ...proto.BlockedConnection) {
	t.Helper()
	if diff := cmp.Diff(want, l.Close().Blocked, cmpopts.IgnoreFields(proto.BlockedConnection{}, "At"),
		cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("refused (-want +got):\n%s", diff)
	}
}

func TestAllowlistNames(t *testing.T) {
	internet.zone.set("listed.example.com", "listed.example.com. 60 IN A "+webIPv4,
		"listed.example.com. 60 IN AAAA "+webIPv6,
		"listed.example.com. 60 IN TXT words")
	internet.zone.set("a.b.wild.example.com", "a.b.wild.example.com. 60 IN CNAME elsewhere.example.net.",
		"elsewhere.example.net. 60 IN A "+web2IPv4)
	internet.zone.set("wild.example.com", "wild.example.com. 60 IN A "+web2IPv4)
	internet.zone.set("secret.unlisted.example.com", "secret.unlisted.example.com. 60 IN A "+web2IPv4)
	j, l := attach(t, open(t), allow("listed.example.com:80,7", "*.wild.example.com"))

	if a := j.tcp(webIPv4+":7", "x"); a.Error != "ECONNREFUSED" {
		t.Errorf("an address that was not resolved yet: %+v", a)
	}
	for _, to := range []string{
		"listed.example.com:7", "LISTED.example.com.:80", net.JoinHostPort(webIPv4, "7"),
		"a.b.wild.example.com:8080",
	} {
		if a := j.tcp(to, "GET / HTTP/1.0\r\n\r\n"); a.Error != "" || a.Data == "" {
			t.Errorf("%s: %+v", to, a)
		}
	}
	if a := j.resolve("listed.example.com", "AAAA"); !slices.Equal(a.Found, []string{webIPv6}) {
		t.Errorf("resolve: %+v", a)
	}
	if a := j.udp(net.JoinHostPort(webIPv6, "7"), "x"); a.Data != "x" {
		t.Errorf("udp: %+v", a)
	}
	if a := j.resolve("listed.example.com", "TXT"); !slices.Equal(a.Found, []string{`"words"`}) {
		t.Errorf("resolve TXT: %+v", a)
	}

	for _, to := range []string{webIPv4 + ":8080", web2IPv4 + ":53", gatewayIPv4 + ":7"} {
		if a := j.tcp(to, "x"); a.Error != "ECONNREFUSED" {
			t.Errorf("%s: %+v", to, a)
		}
	}
	for _, name := range []string{
		"secret.unlisted.example.com", "wild.example.com", "listed.example.com.evil.example.net",
		"example.com", "elsewhere.example.net",
	} {
		for _, kind := range []string{"A", "TXT tcp"} {
			if a := j.resolve(name, kind); a.Error != "REFUSED" || a.Found != nil {
				t.Errorf("resolve %s %s: %+v", name, kind, a)
			}
		}
		if n := internet.zone.count(name); n != 0 {
			t.Errorf("%s was forwarded %d times: names carry messages", name, n)
		}
	}
	dns := func(name string) proto.BlockedConnection {
		return proto.BlockedConnection{Host: name, Protocol: "dns", Reason: proto.BlockedNotAllowed}
	}
	wantBlocked(t, l,
		proto.BlockedConnection{Address: webIPv4, Port: 7, Protocol: "tcp", Reason: proto.BlockedNotAllowed},
		proto.BlockedConnection{
			Host: "listed.example.com", Address: webIPv4, Port: 8080, Protocol: "tcp",
			Reason: proto.BlockedNotAllowed,
		},
		proto.BlockedConnection{
			Host: "a.b.wild.example.com", Address: web2IPv4, Port: 53, Protocol: "tcp",
			Reason: proto.BlockedResolver,
		},
		proto.BlockedConnection{Address: gatewayIPv4, Port: 7, Protocol: "tcp", Reason: proto.BlockedNotAllowed},
		dns("secret.unlisted.example.com"), dns("wild.example.com"), dns("listed.example.com.evil.example.net"),
		dns("example.com"),
		dns("elsewhere.example.net"),
	)
}

// TestDotsWithinLabels queries names that look like listed ones when printed, but belong to other
// domains.
func TestDotsWithinLabels(t *testing.T) {
	internet.zone.set(`evil\.dotted.example`, `evil\.dotted.example. 60 IN A `+web2IPv4)
	j, _ := attach(t, open(t), allow("*.dotted.example"))
	if a := j.resolve(`evil\.dotted.example`, "A"); a.Error != "REFUSED" || a.Found != nil {
		t.Errorf("%+v", a)
	}
	if got := internet.zone.count(`evil\.dotted.example`); got != 0 {
		t.Errorf("it was queried %d times", got)
	}
	if a := j.tcp(web2IPv4+":7", "x"); a.Error != "ECONNREFUSED" {
		t.Errorf("its address: %+v", a)
	}
}

func TestAllowlistRanges(t *testing.T) {
	j, l := attach(t, open(t), allow("93.184.216.34/31:7", "[2606:2800:220::/48]:80", "10.0.0.0/8"))
	for to, want := range map[string]string{
		webIPv4 + ":7": "", web2IPv4 + ":7": "", nameserver + ":7": "ECONNREFUSED", webIPv4 + ":80": "ECONNREFUSED",
		net.JoinHostPort(webIPv6, "80"): "", net.JoinHostPort(webIPv6, "7"): "ECONNREFUSED", "10.1.2.3:7": "ECONNREFUSED",
	} {
		if a := j.tcp(to, "GET / HTTP/1.0\r\n\r\n"); a.Error != want {
			t.Errorf("%s: %+v, want %q", to, a, want)
		}
	}
	if report := l.Close(); len(report.Blocked) != 4 {
		t.Errorf("refused %+v", report.Blocked)
	}
}

func TestRedirectsAreChecked(t *testing.T) {
	internet.zone.set("redirects.example.com", "redirects.example.com. 60 IN A "+webIPv4)
	j, l := attach(t, open(t), allow("redirects.example.com:80"))
	for url, want := range map[string]string{
		"http://" + web2IPv4 + "/":                 "ECONNREFUSED",
		"http://169.254.169.254/latest/meta-data/": "ECONNREFUSED",
		"http://[fd00:ec2::254]/":                  "ECONNREFUSED",
		"http://[::ffff:169.254.169.254]/":         "ECONNREFUSED",
		"http://redirects.example.com/":            "",
	} {
		if a := j.get("http://redirects.example.com/to?url=" + url); a.Error != want {
			t.Errorf("%s: %+v, want %q", url, a, want)
		}
	}
	if report := l.Close(); len(report.Blocked) != 3 { // both forms of the metadata address count as one
		t.Errorf("refused %+v", report.Blocked)
	}
}

func TestRebinding(t *testing.T) {
	const name = "rebind.example.com"
	internet.zone.set(name)
	internet.zone.after(name, name+". 0 IN A 10.1.2.3", name+". 0 IN AAAA ::ffff:169.254.169.254")
	n := open(t)
	for _, policy := range []proto.Network{allow("*.example.com"), unrestricted} {
		internet.zone.set(name, name+". 0 IN A "+webIPv4)
		j, l := attach(t, n, policy)
		if a := j.resolve(name, "A"); a.Error != "" || a.TTL != 0 || !slices.Equal(a.Found, []string{webIPv4}) {
			t.Errorf("first: %+v", a)
		}
		if a := j.tcp(webIPv4+":7", "x"); a.Data != "x" {
			t.Errorf("first: %+v", a)
		}
		if a := j.resolve(name, "A"); a.Error != "REFUSED" || a.Found != nil {
			t.Errorf("then A: %+v", a)
		}
		if a := j.resolve(name, "AAAA"); a.Error != "REFUSED" || a.Found != nil {
			t.Errorf("then AAAA: %+v", a)
		}
		if a := j.tcp("10.1.2.3:7", "x"); a.Error != "ECONNREFUSED" {
			t.Errorf("then directly: %+v", a)
		}
		stripped := func(addr string) proto.BlockedConnection {
			return proto.BlockedConnection{Host: name, Address: addr, Protocol: "dns", Reason: proto.BlockedAddress}
		}
		wantBlocked(t, l, stripped("10.1.2.3"), stripped("::ffff:169.254.169.254"),
			proto.BlockedConnection{Address: "10.1.2.3", Port: 7, Protocol: "tcp", Reason: proto.BlockedAddress})
	}
}

func TestRefusedAddressesAreRemovedFromAnswers(t *testing.T) {
	const name = "mixed.example.com"
	internet.zone.set(name, name+". 60 IN A 192.168.1.1", name+". 60 IN A "+webIPv4, name+". 60 IN A "+controlIP,
		name+". 60 IN A "+hostIPv4,
		"other.example.org. 60 IN A "+web2IPv4)
	j, _ := attach(t, open(t, net.JoinHostPort(controlIP, controlPort)), allow(name))
	if a := j.resolve(name, "A"); !slices.Equal(a.Found, []string{webIPv4}) {
		t.Errorf("resolve: %+v", a)
	}
	if a := j.tcp(web2IPv4+":7", "x"); a.Error != "ECONNREFUSED" {
		t.Errorf("an address that the answer has under another name: %+v", a)
	}
}

func TestPrivateNamesAreHidden(t *testing.T) {
	names := []string{
		"redis", "metadata.google.internal", "printer.local", "db.svc.cluster.local", "nas.home.arpa", "x.localhost",
		"254.169.254.169.in-addr.arpa", "3.2.1.10.in-addr.arpa", "10.in-addr.arpa",
		strings.Repeat("0.", 28) + "0.0.d.f.ip6.arpa",
	}
	j, l := attach(t, open(t), unrestricted)
	var want []proto.BlockedConnection
	for _, name := range names {
		internet.zone.set(name, name+". 60 IN PTR secret.example.com.", name+". 60 IN TXT secret")
		for _, kind := range []string{"PTR", "TXT"} {
			if a := j.resolve(name, kind); a.Error != "REFUSED" || a.Found != nil {
				t.Errorf("%s %s: %+v", name, kind, a)
			}
		}
		want = append(want, proto.BlockedConnection{Host: name, Protocol: "dns", Reason: proto.BlockedName})
	}
	reverse := "34.216.184.93.in-addr.arpa"
	internet.zone.set(reverse, reverse+". 60 IN PTR web.example.com.")
	if a := j.resolve(reverse, "PTR"); !slices.Equal(a.Found, []string{"web.example.com."}) {
		t.Errorf("a public address: %+v", a)
	}
	wantBlocked(t, l, want...)
}

func TestInvalidAnswers(t *testing.T) {
	j, l := attach(t, open(t), unrestricted)
	if a := j.resolve("nowhere.example.com", "A"); a.Error != "NXDOMAIN" {
		t.Errorf("unknown name: %+v", a)
	}
	for _, kind := range []string{"ANY", "NULL", "AXFR"} {
		if a := j.resolve("nowhere.example.com", kind); a.Error != "NOTIMP" {
			t.Errorf("%s: %+v", kind, a)
		}
	}
	internet.zone.set("empty.example.com", "empty.example.com. 60 IN A "+webIPv4)
	if a := j.resolve("empty.example.com", "AAAA"); a.Error != "" || a.Found != nil {
		t.Errorf("no address of this kind: %+v", a)
	}
	var long []string
	for i := range 60 {
		long = append(long, fmt.Sprintf("long.example.com. 60 IN A 93.184.218.%d", i))
	}
	internet.zone.set("long.example.com", long...)
	if a := j.resolve("long.example.com", "A tcp"); len(a.Found) != 60 {
		t.Errorf("long answer: %+v", a)
	}
	wantBlocked(t, l)
}

func TestOtherResolversAreRejected(t *testing.T) {
	for name, policy := range map[string]proto.Network{
		"unrestricted": unrestricted, "allowlist": allow(foreignDNS + ":53"),
	} {
		t.Run(name, func(t *testing.T) {
			j, l := attach(t, open(t), policy)
			if a := j.udp(foreignDNS+":53", "a message for "+name); a.Error != "ECONNREFUSED" {
				t.Errorf("udp: %+v", a)
			}
			if a := j.tcp(foreignDNS+":53", "x"); a.Error != "ECONNREFUSED" {
				t.Errorf("tcp: %+v", a)
			}
			if internet.received.has("a message for " + name) {
				t.Error("the message has arrived")
			}
			refused := func(protocol string) proto.BlockedConnection {
				return proto.BlockedConnection{Address: foreignDNS, Port: 53, Protocol: protocol, Reason: proto.BlockedResolver}
			}
			wantBlocked(t, l, refused("udp"), refused("tcp"))
		})
	}
}

func TestGrantsExpire(t *testing.T) {
	addr := netip.MustParseAddr(webIPv4)
	to := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(addr, port) }
	now := time.Now()
	p, err := egress.NewPermits(allow("a.example.com:443", "b.example.com"))
	if err != nil {
		t.Fatal(err)
	}
	allowed := func(port uint16, at time.Duration) bool {
		release, ok := p.Use(to(port), now.Add(at))
		if ok {
			release()
		}
		return ok
	}
	check := func(what string, port uint16, at time.Duration, want bool) {
		t.Helper()
		if got := allowed(port, at); got != want {
			t.Errorf("%s: port %d after %s: %v, want %v", what, port, at, got, want)
		}
	}
	check("never asked", 443, 0, false)
	p.Learn("a.example.com", addr, time.Minute, now)
	check("asked", 443, time.Minute-1, true)
	check("another port", 80, 0, false)
	check("expired", 443, time.Minute, false)
	p.Learn("b.example.com", addr, 0, now)
	check("TTL 0 is enough to connect", 80, 29*time.Second, true)
	check("and no more", 80, 30*time.Second, false)
	check("the longer grant stays", 443, time.Minute-1, true)
	p.Learn("b.example.com", addr, 1000*time.Hour, now)
	check("no TTL is for ever", 80, time.Hour, false)

	release, ok := p.Use(to(443), now)
	if !ok {
		t.Fatal("refused")
	}
	check("while a connection is open", 443, 2*time.Hour, true)
	release()
	check("when it is closed", 443, 2*time.Hour, false)

	held, _ := p.Use(to(443), now)
	for i := range 5000 {
		p.Learn("b.example.com", netip.AddrFrom4([4]byte{93, 185, byte(i >> 8), byte(i)}), time.Minute, now)
	}
	if p.Known() != 1024 {
		t.Errorf("%d addresses are remembered, want 1024", p.Known())
	}
	check("what is in use is not forgotten", 443, 0, true)
	held()
}

func TestRefusedRanges(t *testing.T) {
	for addr, want := range map[string]bool{
		"0.0.0.0": true, "0.255.255.255": true, "1.0.0.0": false, "9.255.255.255": false, "10.0.0.0": true,
		"10.255.255.255": true, "11.0.0.0": false,
		"100.63.255.255": false, "100.64.0.0": true, "100.127.255.255": true, "100.128.0.0": false, "127.0.0.1": true,
		"128.0.0.0":       false,
		"169.253.255.255": false, "169.254.169.254": true, "172.15.255.255": false, "172.16.0.0": true,
		"172.31.255.255": true, "172.32.0.0": false,
		"192.0.0.192": true, "192.0.1.0": false, "192.0.2.1": true, "192.167.255.255": false, "192.168.0.0": true,
		"192.169.0.0":    false,
		"198.17.255.255": false, "198.18.0.0": true, "198.19.255.255": true, "198.20.0.0": false, "198.51.100.7": true,
		"203.0.113.255": true,
		"203.0.114.0":   false, "223.255.255.255": false, "224.0.0.1": true, "255.255.255.255": true, "168.63.129.16": true,
		"168.63.129.17": false,
		"::":            true, "::1": true, "::ffff:8.8.8.8": true, "::8.8.8.8": true, "64:ff9b::808:808": true,
		"64:ff9b:1::1": true,
		"100::1":       true,
		"1fff:ffff::1": true, "2000::1": false, "2001::1": true, "2001:1ff:ffff::1": true, "2001:200::1": false,
		"2001:db8::1": true,
		"2001:db9::1": false, "2002::1": true, "2003::1": false, "2606:4700::1111": false, "3ffe::1": false,
		"3fff:fff::1": true, "3fff:1000::1": false,
		"3fff:ffff::1": false, "4000::1": true, "5f00::1": true, "7fff::1": true, "8000::1": true, "fc00::1": true,
		"fd00:ec2::254": true,
		"fe80::1":       true, "fec0::1": true, "ff02::1": true, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff": true,
	} {
		if got := egress.RefusedRange(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s: refused %v, want %v", addr, got, want)
		}
	}
}
