package egress_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/inject"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

// canary is the value of the secret.
const canary = "canary-5e3f9c"

// The names of the tests' servers. All are at webIPv4, except strangerName, which is at web2IPv4.
const (
	apiName      = "api.inject.example"
	wildName     = "a.wild.inject.example"
	neighbour    = "neighbour.inject.example" // shares the address with apiName
	strangerName = "stranger.example.net"
	plainPort    = "8088"
	securePort   = "443"
)

// sites are servers that record what they have received.
type sites struct {
	authority *x509.Certificate
	key       *ecdsa.PrivateKey
	pem       string

	mu   sync.Mutex
	seen []seen
}

// seen is a request as a server has received it.
type seen struct {
	local, name, host, method, uri string
	header                         http.Header
}

func (s seen) String() string {
	return fmt.Sprintf("%s %s of %s at %s, TLS %q: %v", s.method, s.uri, s.host, s.local, s.name, s.header)
}

func newSites(t testing.TB) *sites {
	t.Helper()
	s := &sites{}
	var der []byte
	s.authority, s.key, der = issue(t, nil, nil, "the tests' authority")
	s.pem = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	for name, addr := range map[string]string{
		apiName: webIPv4, wildName: webIPv4, neighbour: webIPv4, strangerName: web2IPv4,
	} {
		internet.zone.set(name, name+". 60 IN A "+addr)
	}
	secured := &tls.Config{GetCertificate: func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
		if h.ServerName == "untrusted.wild.inject.example" {
			_, key, der := issue(t, nil, nil, h.ServerName)
			return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
		}
		_, key, der := issue(t, s.authority, s.key, h.ServerName)
		return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
	}}
	err := within(internet.ns, func() error {
		for _, port := range []string{plainPort, securePort} {
			ln, err := net.Listen("tcp", ":"+port)
			if err != nil {
				return err
			}
			if port == securePort {
				ln = tls.NewListener(ln, secured)
			}
			server := &http.Server{Handler: s, ErrorLog: log.New(io.Discard, "", 0)}
			go func() { _ = server.Serve(ln) }()
			t.Cleanup(func() { _ = server.Close() })
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// issue makes a certificate for a name, self-signed if there is no parent.
func issue(
	t testing.TB, parent *x509.Certificate, parentKey *ecdsa.PrivateKey, name string,
) (*x509.Certificate, *ecdsa.PrivateKey, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{name}, BasicConstraintsValid: true, IsCA: parent == nil,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	if parent == nil {
		parent, parentKey = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), parentKey)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key, der
}

// ServeHTTP sends back what the request has as Authorization, in every way there is.
func (s *sites) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	got := seen{
		local: r.Context().Value(http.LocalAddrContextKey).(net.Addr).String(), host: r.Host, method: r.Method,
		uri: r.RequestURI, header: r.Header.Clone(),
	}
	if r.TLS != nil {
		got.name = r.TLS.ServerName
	}
	s.mu.Lock()
	s.seen = append(s.seen, got)
	s.mu.Unlock()
	auth := r.Header.Get("Authorization")
	if r.URL.Path == "/early" {
		w.Header().Set("Link", "<"+auth+">")
		w.WriteHeader(http.StatusEarlyHints)
	}
	if r.Header.Get("Upgrade") != "" {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer func() { _ = conn.Close() }()
		_, _ = fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\nX-Received: "+
			"%s\r\n\r\nhello", auth)
		return
	}
	w.Header().Set("X-Received", auth)
	if r.URL.Path == "/endless" {
		_, _ = io.Copy(w, endless{})
		return
	}
	w.Header().Set("Trailer", "X-Late")
	body, _ := io.ReadAll(r.Body)
	if r.URL.Path == "/split" { // the value in two pieces
		half := len(auth) / 2
		_, _ = io.WriteString(w, auth[:half])
		_ = http.NewResponseController(w).Flush()
		_, _ = io.WriteString(w, auth[half:]+" and no more")
		return
	}
	_, _ = fmt.Fprintf(w, "%s got %q and %d bytes", r.Host, auth, len(body))
	w.Header().Set("X-Late", auth)
}

// take returns the requests since the last call.
func (s *sites) take() []seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.seen
	s.seen = nil
	return list
}

// injecting attaches a jail whose requests to hosts get the canary. It returns the authority that the
// program trusts.
func (s *sites) injecting(
	t testing.TB, n *egress.Network, policy proto.Network, hosts ...string,
) (*jail, *egress.Link, string) {
	t.Helper()
	return s.injectingAll(t, n, policy, secretOf("authorization", canary, hosts...))
}

func secretOf(header, value string, hosts ...string) inject.Secret {
	return inject.Secret{
		Injection: proto.Injection{Hosts: hosts, Header: header, Template: "Bearer {{value}}"},
		Value:     value,
	}
}

func (s *sites) injectingAll(
	t testing.TB, n *egress.Network, policy proto.Network, secrets ...inject.Secret,
) (*jail, *egress.Link, string) {
	t.Helper()
	j, l := attach(t, n, policy)
	roots := x509.NewCertPool()
	roots.AddCert(s.authority)
	p, err := inject.New(secrets, time.Hour, roots)
	if err != nil {
		t.Fatal(err)
	}
	l.Intercept(p.Interception())
	return j, l, string(p.Certificate())
}

var injectedHosts = []string{apiName, "*.wild.inject.example", "http://" + apiName + ":" + plainPort}

// stars takes the place of the canary in bodies.
var stars = strings.Repeat("*", len(canary))

func TestInjection(t *testing.T) {
	s := newSites(t)
	j, l, ca := s.injecting(t, open(t), allow("*.inject.example"), injectedHosts...)
	for _, url := range []string{"https://" + apiName, "https://" + wildName, "http://" + apiName + ":" + plainPort} {
		a := j.do(order{Do: "fetch", To: url + "/a//b?x=1;y=%2f", Data: "body", CA: ca, N: 3})
		_, host, _ := strings.Cut(url, "://")
		if want := fmt.Sprintf("%s got \"Bearer %s\" and 4 bytes", host, stars); a.Error != "" || a.Data != want {
			t.Errorf("%s: %+v, want %s", url, a, want)
		}
		if a.Found[0] != "Bearer ***" || a.Found[1] != "Bearer ***" {
			t.Errorf("%s: header and trailer %q", url, a.Found)
		}
		requests := s.take()
		if len(requests) != 3 {
			t.Errorf("%s: %d requests", url, len(requests))
		}
		for _, r := range requests {
			if got := r.header["Authorization"]; len(got) != 1 || got[0] != "Bearer "+canary || r.uri != "/a//b?x=1;y=%2f" {
				t.Errorf("the server got %s", r)
			}
		}
	}
	if a := j.do(order{Do: "fetch", To: "https://" + apiName + "/early", CA: ca}); a.Error != "" ||
		a.Found[0] != "103 <Bearer ***>" {
		t.Errorf("early hints: %+v", a)
	}
	if a := j.do(order{Do: "fetch", To: "https://" + apiName + "/split", CA: ca}); a.Error != "" ||
		a.Data != "Bearer "+stars+" and no more" {
		t.Errorf("the value in two pieces: %+v", a)
	}
	body := strings.Repeat("x", 512<<10)
	before := l.BytesIn()
	if a := j.do(order{Do: "fetch", To: "https://" + apiName, Data: body, CA: ca}); !strings.HasSuffix(
		a.Data, fmt.Sprintf("and %d bytes", len(body))) {
		t.Errorf("a large body: %+v", a)
	}
	if l.BytesIn() == before {
		t.Error("what the program received is not counted")
	}
	if report := l.Close(); report.BytesOut < int64(len(body)) || report.BytesOut > int64(len(body))*2 ||
		len(report.Blocked) != 0 {
		t.Errorf("%+v", report)
	}
}

// TestInjectionAttacks sends requests that must not get the secret, or not in the way that the program
// wants.
func TestInjectionAttacks(t *testing.T) {
	s := newSites(t)
	n := open(t)
	j, _, ca := s.injecting(t, n, unrestricted, injectedHosts...)
	trusted := ca + s.pem // as real programs do
	const rest = "\r\nConnection: close\r\n\r\n"
	api, plain, stranger := apiName+":"+securePort, apiName+":"+plainPort, strangerName+":"+securePort
	for _, name := range []string{apiName, wildName, neighbour, strangerName} {
		j.resolve(name, "A")
	}
	for _, attack := range []struct {
		name         string
		to, tls, raw string
		answer       string // part of it
		server       string // what the server receives as Authorization; "nothing" if it is not reached
	}{
		{
			"the host of a secret at another address", stranger, strangerName,
			"GET / HTTP/1.1\r\nHost: " + apiName + rest, "got", "",
		},
		{
			"the host of a secret at another address, in TLS", stranger, apiName,
			"GET / HTTP/1.1\r\nHost: " + apiName + rest, "got", "",
		},
		{
			"the host of a secret at another address, without TLS", strangerName + ":" + plainPort, "",
			"GET / HTTP/1.1\r\nHost: " + plain + rest, "got", "",
		},
		{
			"another host over the connection to the host", api, apiName, "GET / HTTP/1.1\r\nHost: " + strangerName + rest,
			"421 ", "nothing",
		},
		{"another port of the host", api, apiName, "GET / HTTP/1.1\r\nHost: " + apiName + ":8443" + rest, "421 ", "nothing"},
		{"a host with user information", api, apiName, "GET / HTTP/1.1\r\nHost: x@" + apiName + rest, "4", "nothing"},
		{"no host", api, apiName, "GET / HTTP/1.0\r\n\r\n", "421 ", "nothing"},
		{"no host without TLS", plain, "", "GET / HTTP/1.0\r\n\r\n", webIPv4 + ":" + plainPort + " got", ""},
		{
			"two hosts", api, apiName, "GET / HTTP/1.1\r\nHost: " + apiName + "\r\nHost: " + strangerName + rest,
			"400 ", "nothing",
		},
		{"an absolute form for another host", api, apiName, "GET http://" + strangerName + "/ HTTP/1.1\r\nHost: " + apiName +
			rest, "421 ", "nothing"},
		{"an absolute form with user information", api, apiName, "GET https://x:y@" + apiName + "/ HTTP/1.1\r\nHost: " +
			strangerName + rest, apiName + " got", "Bearer " + canary},
		{"an absolute form without TLS for another host", plain, "", "GET http://" + strangerName + "/ HTTP/1.1\r\nHost: " +
			plain + rest, strangerName + " got", ""},
		{"an absolute form without TLS that ends in the host", plain, "", "GET http://" + plain + "@" + strangerName +
			"/ HTTP/1.1\r\nHost: " + plain + rest, strangerName + " got", ""},
		{"another host without TLS", plain, "", "GET / HTTP/1.1\r\nHost: " + strangerName + rest, "got", ""},
		{"a neighbour at the same address", api, neighbour, "GET / HTTP/1.1\r\nHost: " + neighbour + rest, "got", ""},
		{
			"a host in TLS that belongs to no secret, and one that does in the request", api, neighbour,
			"GET / HTTP/1.1\r\nHost: " + apiName + rest, "got", "",
		},
		{"TLS to the port without", plain, apiName, "", "does not look like a TLS", "nothing"},
		{"no TLS to the port with", api, "", "GET / HTTP/1.1\r\nHost: " + apiName + rest, "400 ", "nothing"},
		{"TRACE", api, apiName, "TRACE / HTTP/1.1\r\nHost: " + apiName + rest, "405 ", "nothing"},
		{"TRACE without TLS", plain, "", "TRACE / HTTP/1.1\r\nHost: " + plain + rest, "405 ", "nothing"},
		{
			"CONNECT", api, apiName, "CONNECT " + strangerName + ":443 HTTP/1.1\r\nHost: " + strangerName + ":443" + rest,
			"405 ", "nothing",
		},
		{"a header of its own", api, apiName, "GET / HTTP/1.1\r\nHost: " + apiName +
			"\r\naUTHORIZATION: mine\r\nAuthorization: too" + rest, "got", "Bearer " + canary},
		{
			"a connection header", api, apiName,
			"GET / HTTP/1.1\r\nHost: " + apiName + "\r\nConnection: Authorization, close\r\n\r\n", "got", "Bearer " + canary,
		},
		{
			"a header that is continued", api, apiName,
			"GET / HTTP/1.1\r\nHost: " + apiName + "\r\nX: y\r\n Authorization: mine" + rest, "got", "Bearer " + canary,
		},
		{
			"a space in a header's name", api, apiName, "GET / HTTP/1.1\r\nHost: " + apiName + "\r\nAuthorization : mine" + rest,
			"400 ", "nothing",
		},
		{"two lengths", api, apiName, "POST / HTTP/1.1\r\nHost: " + apiName + "\r\nContent-Length: 4\r\nContent-Length: 5" +
			rest + "GET ", "400 ", "nothing"},
		{
			"compression", api, apiName, "GET / HTTP/1.1\r\nHost: " + apiName + "\r\nAccept-Encoding: gzip" + rest, "got",
			"Bearer " + canary,
		},
		{"another protocol", api, apiName, "GET / HTTP/1.1\r\nHost: " + apiName +
			"\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n", "X-Received: Bearer ***\r\n\r\nhello", "Bearer " + canary},
		{
			"the host in capitals, with a final dot", api, strings.ToUpper(apiName),
			"GET / HTTP/1.1\r\nHost: " + strings.ToUpper(apiName) + ".:443" + rest, "got", "Bearer " + canary,
		},
		{
			"a server whose certificate nobody vouches for", wildName + ":" + securePort, "untrusted.wild.inject.example",
			"GET / HTTP/1.1\r\nHost: untrusted.wild.inject.example" + rest, "502 ", "nothing",
		},
		{"a long header", api, apiName, "GET / HTTP/1.1\r\nHost: " + apiName + "\r\nX: " + strings.Repeat("x", 100<<10) +
			rest, "431 ", "nothing"},
	} {
		t.Run(attack.name, func(t *testing.T) {
			a := j.do(order{Do: "raw", To: attack.to, Name: attack.tls, CA: trusted, Data: attack.raw})
			if !strings.Contains(a.Data+a.Error, attack.answer) {
				t.Errorf("the program got %+v", a)
			}
			if strings.Contains(a.Data+a.Error, canary) {
				t.Errorf("the program got the secret: %+v", a)
			}
			requests := s.take()
			if attack.server == "nothing" {
				if len(requests) != 0 {
					t.Errorf("the server got %s", requests)
				}
				return
			}
			if len(requests) != 1 {
				t.Fatalf("the server got %s", requests)
			}
			r := requests[0]
			if got := strings.Join(r.header["Authorization"], "|"); got != attack.server {
				t.Errorf("the server got %s", r)
			}
			if got := r.header.Get("Accept-Encoding"); attack.server != "" && got != "identity" {
				t.Errorf("the server may send a body in %q", got)
			}
		})
	}
}

// TestInjectionOfOthers has a second jail beside the one with the secret.
func TestInjectionOfOthers(t *testing.T) {
	s := newSites(t)
	n := open(t)
	a, la, ca := s.injecting(t, n, unrestricted, injectedHosts...)
	b, lb := attach(t, n, unrestricted)
	url := "https://" + apiName
	if got := a.do(order{Do: "fetch", To: url, CA: ca}); got.Error != "" {
		t.Errorf("the jail with the secret: %+v", got)
	}
	if got := b.do(order{Do: "fetch", To: url, CA: ca}); !strings.Contains(got.Error, "unknown authority") {
		t.Errorf("the other jail has the certificate of the first one: %+v", got)
	}
	s.take()
	got := b.do(order{Do: "fetch", To: url, CA: s.pem})
	if requests := s.take(); got.Error != "" || len(requests) != 1 || requests[0].header["Authorization"] != nil {
		t.Errorf("the other jail: %+v, %s", got, requests)
	}
	// It cannot reach the address of the first one.
	for _, text := range a.do(order{Do: "interfaces"}).Found {
		addr, _, _ := strings.Cut(text, "/")
		if net.ParseIP(addr).IsLoopback() {
			continue
		}
		for _, port := range []string{securePort, plainPort} {
			if got := b.tcp(net.JoinHostPort(addr, port), "x"); got.Error != "ECONNREFUSED" {
				t.Errorf("%s port %s: %+v", addr, port, got)
			}
		}
	}
	la.Close()
	lb.Close()
	if left := n.Endpoints(); left != 0 {
		t.Errorf("%d connections are left", left)
	}
}

// TestInjectionKeepsPolicy requests hosts of secrets that the network's policy does not admit.
func TestInjectionKeepsPolicy(t *testing.T) {
	s := newSites(t)
	n := open(t)
	j, _, ca := s.injecting(t, n, allow(apiName+":"+plainPort, "rebound.wild.inject.example"), injectedHosts...)
	if a := j.do(order{Do: "fetch", To: "http://" + apiName + ":" + plainPort}); a.Error != "" {
		t.Errorf("what the policy admits: %+v", a)
	}
	for url, want := range map[string]string{
		"https://" + apiName: "ECONNREFUSED", "https://" + wildName: "server misbehaving",
	} {
		if a := j.do(order{Do: "fetch", To: url, CA: ca}); !strings.Contains(a.Error, want) {
			t.Errorf("%s: %+v", url, a)
		}
	}
	for _, addr := range []string{webIPv4, "10.1.2.3"} {
		internet.zone.set("rebound.wild.inject.example", "rebound.wild.inject.example. 0 IN A "+addr)
		a := j.do(order{Do: "fetch", To: "https://rebound.wild.inject.example", CA: ca})
		if refused := strings.Contains(a.Error, "lookup"); refused != (addr != webIPv4) {
			t.Errorf("a name that is bound to %s: %+v", addr, a)
		}
	}
	if a := j.do(order{
		Do: "raw", To: "10.1.2.3:" + securePort, Name: "rebound.wild.inject.example",
		CA: ca,
	}); a.Error != "ECONNREFUSED" {
		t.Errorf("the address that it is rebound to: %+v", a)
	}
}

// TestInjectionsAreSeparate has several secrets in one jail.
func TestInjectionsAreSeparate(t *testing.T) {
	s := newSites(t)
	plain, other := "http://"+apiName+":"+plainPort, "http://"+strangerName+":"+plainPort
	j, _, ca := s.injectingAll(t, open(t), unrestricted,
		secretOf("Authorization", canary, apiName, plain), secretOf("X-Key", "second-canary", apiName),
		secretOf("authorization", "late-canary", "*.inject.example"),
		secretOf("Authorization", "other-canary", other))
	for _, name := range []string{apiName, strangerName} {
		j.resolve(name, "A")
	}
	for _, tt := range []struct{ name, to, tls, host, auth, key string }{
		{
			"two secrets for one host, and one that comes too late", apiName + ":" + securePort, apiName, apiName,
			"Bearer " + canary, "Bearer second-canary",
		},
		{"the third one elsewhere", wildName + ":" + securePort, wildName, wildName, "Bearer late-canary", ""},
		{"another host", strangerName + ":" + plainPort, "", strangerName + ":" + plainPort, "Bearer other-canary", ""},
		{
			"the first host's name at the other host's address", strangerName + ":" + plainPort, "",
			apiName + ":" + plainPort, "", "",
		},
		{
			"the other host's name at the first host's address", apiName + ":" + plainPort, "",
			strangerName + ":" + plainPort, "", "",
		},
	} {
		a := j.do(order{Do: "raw", To: tt.to, Name: tt.tls, CA: ca, Data: "GET / HTTP/1.1\r\nHost: " + tt.host +
			"\r\nConnection: close\r\n\r\n"})
		requests := s.take()
		if len(requests) != 1 {
			t.Errorf("%s: the program got %+v, the server %s", tt.name, a, requests)
			continue
		}
		if h := requests[0].header; h.Get("Authorization") != tt.auth || h.Get("X-Key") != tt.key {
			t.Errorf("%s: the server got %s", tt.name, requests[0])
		}
		if strings.Contains(a.Data, "canary") {
			t.Errorf("%s: the program got %s", tt.name, a.Data)
		}
	}
}

func TestInterceptedConnectionsAreLimited(t *testing.T) {
	s := newSites(t)
	n := open(t)
	j, l, ca := s.injecting(t, n, unrestricted, injectedHosts...)
	const more = 20
	a := j.do(order{Do: "hold", To: apiName + ":" + securePort, N: egress.MaxIntercepted + more})
	if a.Count[""] != egress.MaxIntercepted || a.Count["ECONNREFUSED"] != more {
		t.Errorf("%+v", a.Count)
	}
	if a := j.tcp(webIPv4+":7", "x"); a.Data != "x" {
		t.Errorf("another connection: %+v", a)
	}
	j.do(order{Do: "release"})
	until(t, "a connection again", func() bool {
		return j.do(order{Do: "fetch", To: "https://" + apiName, CA: ca}).Error == ""
	})
	report := l.Close()
	if len(report.Blocked) != 1 || report.Blocked[0].Reason != proto.BlockedLimit || report.Blocked[0].Host != apiName {
		t.Errorf("%+v", report.Blocked)
	}
}

// TestCloseEndsInterceptedConnections closes a link while the server sends without end.
func TestCloseEndsInterceptedConnections(t *testing.T) {
	s := newSites(t)
	n := open(t)
	j, l, _ := s.injecting(t, n, unrestricted, injectedHosts...)
	for _, request := range []string{
		"GET /endless HTTP/1.1\r\nHost: " + apiName + ":" + plainPort + "\r\n\r\n",
		"GET / HTTP/1.1\r\n", "",
	} {
		if a := j.do(order{Do: "begin", To: apiName + ":" + plainPort, Data: request}); a.Error != "" {
			t.Fatalf("%+v", a)
		}
	}
	until(t, "the program receives", func() bool { return l.BytesIn() > 1<<20 })
	l.Close()
	if left := n.Endpoints(); left != 0 {
		t.Errorf("%d connections are left", left)
	}
}
