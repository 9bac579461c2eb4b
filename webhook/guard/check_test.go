package guard_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/webhook/guard"
)

// field returns the message of a FieldError for "webhook_url", or "" for no error.
func field(t *testing.T, err error) string {
	t.Helper()
	if err == nil {
		return ""
	}
	var f *proto.FieldError
	if !errors.As(err, &f) || f.Field != "webhook_url" || !strings.HasPrefix(f.Message, "webhook_url ") {
		t.Errorf("got %#v, want a FieldError of webhook_url", err)
	}
	return err.Error()
}

// spellings are spellings of addresses that some resolver or library accepts, or once accepted.
var spellings = []string{
	"127.0.0.1", "127.1", "127.0.1", "127.0.0.1.", "2130706433", "0x7f000001", "0X7F000001", "0x7f.1", "0x7f.0x0.0x0.0x1",
	"017700000001",
	"0177.0.0.1",
	"127.0.0.0x1", "00000127.0.0.1", "1.1.1.1", "8.8.8.8", "256.256.256.256", "1", "0", "0x", "4294967297",
	"169.254.169.254", "0xa9fea9fe",
	"2852039166",
	"foo.1", "foo.0x1f", "１２７.0.0.1", "127。0。0。1", "①②⑦.0.0.1", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
	"[::127.0.0.1]",
	"[0:0:0:0:0:ffff:7f00:1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[fe80::1%25eth0]", "[::1%25lo]", "[fd00:ec2::254]",
	"[2606:4700::1111]",
}

func TestCheckURL(t *testing.T) {
	g := newGuard(t, guard.Config{})
	for _, good := range []string{
		"https://hooks.example.com", "https://hooks.example.com/a/b?c=d#e", "HTTPS://Hooks.Example.COM/",
		"https://hooks.example.com:443/",
		"https://hooks.example.com:8443/",
		"https://a_b.example/", "https://xn--bcher-kva.example/", "https://1password.example/", "https://127.0.0.1.nip.io/",
		"https://0x7f.example/", "https://localhost/",
	} {
		if err := g.CheckURL("webhook_url", good); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	for want, urls := range map[string][]string{
		"must be an https URL": {"http://hooks.example.com/", "http://hooks.example.com:443/"},
		"must be an absolute https URL with a host": {
			"", "/x", "//hooks.example.com/", "https:", "https:hooks.example.com", "https://", "https:///x", "https://:443/",
			"ftp://hooks.example.com/", "file:///etc/passwd",
			"gopher://hooks.example.com/", "javascript:alert(1)", "https://hooks.example.com:x/",
			"https://hooks.example.com:443:80/",
			"https://[::1/",
			"https://127%2e0.0.1/", "https://%6cocalhost/", "https://hooks.example.com\\@127.0.0.1/",
			"https://hooks.example.com\\.evil/",
		},
		"must not contain a user name": {
			"https://user@hooks.example.com/", "https://user:pass@hooks.example.com/",
			"https://hooks.example.com@127.0.0.1/", "https://@hooks.example.com/",
		},
		"must not contain spaces": {
			"https://hooks.example.com/ x", "https://hooks.example.com/\r\nX: y",
			"https://hooks.\x00example.com/", " https://hooks.example.com/",
		},
		"must be at most 2048": {"https://hooks.example.com/" + strings.Repeat("a", 2048)},
		"443 and 8443 are open": {
			"https://hooks.example.com:80/", "https://hooks.example.com:22/", "https://hooks.example.com:0/",
			"https://hooks.example.com:0443/",
			"https://hooks.example.com:65979/",
			"https://hooks.example.com:/", "https://hooks.example.com:99999999999999999999/",
		},
		"must have the name of a host": {
			"https://hooks..example.com/", "https://.example.com/", "https://hooks.example.com./", "https://bücher.example/",
			"https://ⓛocalhost/",
			"https://a*b.example/", "https://" + strings.Repeat("a", 64) + ".example/", "https://" + strings.Repeat("a.", 127) +
				"example/", "https://loc%C0%AElhost/",
		},
	} {
		for _, u := range urls {
			if got := field(t, g.CheckURL("webhook_url", u)); !strings.Contains(got, want) {
				t.Errorf("%q: got %q, want %q", u, got, want)
			}
		}
	}
	for _, host := range spellings {
		if got := field(t, g.CheckURL("webhook_url", "https://"+host+"/")); got == "" {
			t.Errorf("%s is accepted as a name", host)
		}
	}
}

func TestAllowedAddressesHaveOneSpelling(t *testing.T) {
	g := newGuard(t, guard.Config{
		AllowCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::/0")},
	})
	for _, host := range []string{"127.0.0.1", "[::1]", "[fd00::1]"} {
		if err := g.CheckURL("webhook_url", "https://"+host+":8443/"); err != nil {
			t.Errorf("%s is in an allowed range: %v", host, err)
		}
	}
	for _, host := range spellings {
		if host == "127.0.0.1" || host[0] == '[' && !strings.ContainsAny(host, "%") && !strings.Contains(host, "ffff") {
			continue
		}
		if g.CheckURL("webhook_url", "https://"+host+"/") == nil {
			t.Errorf("%s is accepted", host)
		}
	}
}

func TestAllowSettings(t *testing.T) {
	g := newGuard(t, guard.Config{
		AllowHTTP: true, AllowPorts: []guard.PortRange{
			{First: 9000, Last: 9000},
			{First: 443, Last: 443},
			{First: 9100, Last: 9102},
		}, AllowCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")},
	})
	for _, good := range []string{
		"http://hooks.example.com/", "http://hooks.example.com:80/",
		"http://hooks.example.com:9000/", "https://hooks.example.com:9000/", "https://hooks.example.com:9100/",
		"https://hooks.example.com:9102/",
	} {
		if err := g.CheckURL("webhook_url", good); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	if got := field(t, g.CheckURL("webhook_url", "https://hooks.example.com:9001/")); !strings.Contains(
		got, "80, 443, 8443, 9000 and 9100-9102 are open") {
		t.Errorf("got %q", got)
	}
	if warnings := strings.Join(g.Warnings(), "\n"); !strings.Contains(warnings, "127.0.0.0/8") ||
		!strings.Contains(warnings, "plain http") || !strings.Contains(warnings, "9000 443 9100-9102") {
		t.Errorf("warnings are %q", warnings)
	}
	if warnings := newGuard(t, guard.Config{}).Warnings(); len(warnings) > 0 {
		t.Errorf("warnings %q without any allow setting", warnings)
	}
}

func TestNewRejectsInvalidConfiguration(t *testing.T) {
	for want, c := range map[string]guard.Config{
		"port 0 ":           {AllowPorts: []guard.PortRange{{}}},
		"port 65536 ":       {AllowPorts: []guard.PortRange{{First: 65536, Last: 65536}}},
		"invalid Prefix":    {AllowCIDRs: []netip.Prefix{{}}},
		"::ffff:10.0.0.0/1": {AllowCIDRs: []netip.Prefix{netip.MustParsePrefix("::ffff:10.0.0.0/104")}},
		"no such file":      {CAFile: "/nonexistent/ca.pem"},
		"no certificate":    {CAFile: "check_test.go"},
	} {
		if _, err := guard.New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// hostile holds the first and last addresses of every range that is not public.
var hostile = []string{
	"0.0.0.0", "0.255.255.255", "10.0.0.0", "10.255.255.255", "100.64.0.0", "100.127.255.255", "100.100.100.200",
	"127.0.0.1", "127.255.255.255",
	"168.63.129.16", "169.254.0.0",
	"169.254.169.254", "169.254.255.255", "172.16.0.0", "172.31.255.255", "192.0.0.0", "192.0.0.192", "192.0.0.255",
	"192.0.2.0", "192.0.2.255",
	"192.88.99.0", "192.88.99.255",
	"192.168.0.0", "192.168.255.255", "198.18.0.0", "198.19.255.255", "198.51.100.0", "198.51.100.255", "203.0.113.0",
	"203.0.113.255",
	"224.0.0.1", "239.255.255.255", "240.0.0.0",
	"255.255.255.255",
	"::", "::1", "::127.0.0.1", "::8.8.8.8", "::ffff:10.0.0.1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
	"64:ff9b::7f00:1",
	"64:ff9b::a9fe:a9fe", "64:ff9b::808:808",
	"64:ff9b:1::1", "64:ff9b:1:ffff:ffff:ffff:ffff:ffff", "100::", "100::ffff:ffff:ffff:ffff", "2001::1",
	"2001:0:ffff:ffff:ffff:ffff:ffff:ffff",
	"2001:2::1", "2001:10::1", "2001:20::1",
	"2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", "2002::", "2002:7f00:1::1",
	"2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "3fff::",
	"3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff",
	"5f00::1", "5f00:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fc00::", "fd00:ec2::254",
	"fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fe80::1",
	"febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fec0::1",
	"feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ff00::", "ff02::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
}

// public holds the addresses next to those ranges.
var public = []string{
	"1.0.0.0", "1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0",
	"168.63.129.15",
	"168.63.129.17", "169.253.255.255", "169.255.0.0",
	"172.15.255.255", "172.32.0.0", "192.0.1.0", "192.0.3.0", "192.167.255.255", "192.169.0.0", "198.17.255.255",
	"198.20.0.0", "203.0.112.255",
	"223.255.255.255",
	"2001:200::1", "2001:4860:4860::8888", "2001:db7:ffff::1", "2001:db9::1", "2003::1", "2606:4700::1111",
	"2a00:1450::1", "3ffe::1",
}

func recordType(addr string) string {
	if strings.Contains(addr, ":") {
		return "AAAA"
	}
	return "A"
}

func TestNamesOfHostileAddressesAreRejected(t *testing.T) {
	names, resolver := newNameserver(t)
	g := newGuard(t, guard.Config{Resolver: resolver})
	check := func(t *testing.T) string {
		return field(t, g.Check(t.Context(), "webhook_url", "https://hooks.test/"))
	}
	for _, addr := range hostile {
		t.Run(addr, func(t *testing.T) {
			names.set("A hooks.test.")
			names.set("AAAA hooks.test.")
			names.set(recordType(addr)+" hooks.test.", []string{addr})
			if got := check(t); !strings.Contains(got, "leads to an address that is not open") || strings.Contains(got, addr) {
				t.Errorf("got %q", got)
			}
			var refused *guard.RefusedError
			_, err := g.Transport().DialContext(t.Context(), "tcp", "hooks.test:443")
			if !errors.As(err, &refused) && (err == nil || recordType(addr) == "A" || hasIPv6()) {
				t.Errorf("dialling returns %v", err)
			}
		})
	}
	for _, addr := range public {
		t.Run(addr, func(t *testing.T) {
			names.set("A hooks.test.")
			names.set("AAAA hooks.test.")
			names.set(recordType(addr)+" hooks.test.", []string{addr})
			if got := check(t); got != "" {
				t.Error(got)
			}
		})
	}
}

// hasIPv6 reports whether this machine can open IPv6 sockets. If it cannot, dialling fails before
// the check.
func hasIPv6() bool {
	conn, err := net.ListenPacket("udp6", "[::1]:0")
	if err != nil {
		return false
	}
	return conn.Close() == nil
}

func TestEveryAddressOfANameIsChecked(t *testing.T) {
	names, resolver := newNameserver(t)
	g := newGuard(t, guard.Config{Resolver: resolver})
	names.set("A public.test.", []string{"1.1.1.1", "1.0.0.1"})
	names.set("AAAA public.test.", []string{"2606:4700::1111"})
	names.set("A second.test.", []string{"1.1.1.1", "10.0.0.1"})
	names.set("A six.test.", []string{"1.1.1.1"})
	names.set("AAAA six.test.", []string{"fd00::1"})
	names.set("CNAME alias.test.", []string{"private.test."})
	names.set("A private.test.", []string{"10.0.0.1"})
	names.set("CNAME good.test.", []string{"public.test."})
	for name, ok := range map[string]bool{
		"public.test": true, "second.test": false, "six.test": false, "alias.test": false, "good.test": true,
		"private.test": false, "nowhere.test": true, "localhost": false,
	} {
		if got := field(t, g.Check(t.Context(), "webhook_url", "https://"+name+"/")); (got == "") != ok {
			t.Errorf("%s: got %q", name, got)
		}
	}
}

func TestSlowNamesAreAccepted(t *testing.T) {
	names, resolver := newNameserver(t)
	g := newGuard(t, guard.Config{Resolver: resolver})
	defer close(names.slow)
	if err := g.Check(t.Context(), "webhook_url", "https://slow.test/"); err != nil {
		t.Error(err)
	}
	if got := field(t, g.Check(t.Context(), "webhook_url", "http://slow.test/")); got == "" {
		t.Error("the text of the URL is not checked")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	if err := g.Check(ctx, "webhook_url", "https://slow.test/"); err != nil {
		t.Error(err)
	}
}

func FuzzCheckURL(f *testing.F) {
	for _, host := range spellings {
		f.Add("https://" + host + "/")
	}
	for _, s := range []string{
		"https://hooks.example.com:8443/x?y#z", "https://a@b/", "https://a\\@b/",
		"https://[::1]:443", "https://a:/", "https://a:0443/", "http://a", "https://%31/",
	} {
		f.Add(s)
	}
	g, err := guard.New(guard.Config{})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if err := g.CheckURL("webhook_url", s); err != nil {
			field(t, err)
			return
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s, nil)
		if err != nil {
			t.Fatalf("accepts %q, which no request can be sent to: %v", s, err)
		}
		host, port := req.URL.Hostname(), req.URL.Port()
		if req.URL.Scheme != "https" || req.URL.User != nil || port != "" && port != "443" && port != "8443" {
			t.Errorf("accepts %q: scheme %q, port %q", s, req.URL.Scheme, port)
		}
		if _, err := netip.ParseAddr(host); err == nil || host == "" || host != url.PathEscape(host) ||
			host[len(host)-1] == '.' {
			t.Errorf("accepts %q with the host %q", s, host)
		}
		last := host[strings.LastIndexByte(host, '.')+1:]
		if c := last[0]; c >= '0' && c <= '9' && strings.Trim(strings.ToLower(last), "0123456789abcdefx") == "" &&
			strings.Trim(last, "0123456789") == "" {
			t.Errorf("accepts %q, whose host %q may be read as an address", s, host)
		}
	})
}
