package guard_test

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/miekg/dns"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/webhook/guard"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The addresses that tests may and may not send to. Both are loopback, so that a receiver can
// listen on either.
const (
	open   = "127.0.0.1"
	closed = "127.0.0.2"
)

func newGuard(t *testing.T, c guard.Config) *guard.Guard {
	t.Helper()
	g, err := guard.New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Transport().CloseIdleConnections)
	return g
}

// nameserver holds sets of records by type and name. Each query uses up one set, except the last.
type nameserver struct {
	t       *testing.T
	mu      sync.Mutex
	records map[string][][]string
	slow    chan struct{} // queries for "slow.test" block until it is closed
}

// newNameserver starts a server and returns a resolver that uses it alone.
func newNameserver(t *testing.T) (*nameserver, *net.Resolver) {
	n := &nameserver{t: t, records: map[string][][]string{}, slow: make(chan struct{})}
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	started, done := make(chan struct{}), make(chan error, 1)
	server := &dns.Server{PacketConn: conn, Handler: n, NotifyStartedFunc: func() { close(started) }}
	go func() { done <- server.ActivateAndServe() }()
	<-started
	t.Cleanup(func() {
		if err := server.Shutdown(); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return n, &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", conn.LocalAddr().String())
	}}
}

// set replaces the records of a question such as "A hooks.test.".
func (n *nameserver) set(question string, answers ...[]string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.records[question] = answers
}

func (n *nameserver) ServeDNS(w dns.ResponseWriter, r *dns.Msg) {
	if r.Question[0].Name == "slow.test." {
		<-n.slow
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	m := new(dns.Msg)
	m.SetReply(r)
	name, rrtype := r.Question[0].Name, dns.TypeToString[r.Question[0].Qtype]
	found := false
	for range 5 { // along CNAMEs
		found = found || len(n.records["A "+name])+len(n.records["AAAA "+name])+len(n.records["CNAME "+name]) > 0
		if sets := n.records[rrtype+" "+name]; len(sets) > 0 {
			for _, value := range sets[0] {
				n.answer(m, name, rrtype, value)
			}
			if len(sets) > 1 {
				n.records[rrtype+" "+name] = sets[1:]
			}
		}
		alias := n.records["CNAME "+name]
		if len(alias) == 0 {
			break
		}
		n.answer(m, name, "CNAME", alias[0][0])
		name = alias[0][0]
	}
	if !found {
		m.Rcode = dns.RcodeNameError
	}
	if err := w.WriteMsg(m); err != nil {
		n.t.Error(err)
	}
}

func (n *nameserver) answer(m *dns.Msg, name, rrtype, value string) {
	header := dns.RR_Header{Name: name, Rrtype: dns.StringToType[rrtype], Class: dns.ClassINET}
	switch rrtype {
	case "A":
		m.Answer = append(m.Answer, &dns.A{Hdr: header, A: net.ParseIP(value)})
	case "AAAA":
		m.Answer = append(m.Answer, &dns.AAAA{Hdr: header, AAAA: net.ParseIP(value)})
	case "CNAME":
		m.Answer = append(m.Answer, &dns.CNAME{Hdr: header, Target: value})
	}
}

// receiver is an HTTP server that counts connections and requests.
type receiver struct {
	*httptest.Server
	port               int
	connections, posts atomic.Int32
}

// newReceiver listens on addr and port, or on a free port if port is 0.
func newReceiver(t *testing.T, addr string, port int) *receiver {
	r := new(receiver)
	listener, err := net.Listen("tcp", net.JoinHostPort(addr, strconv.Itoa(port)))
	if err != nil {
		t.Fatal(err)
	}
	r.Server = &httptest.Server{Listener: listener, Config: &http.Server{
		Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { r.posts.Add(1) }),
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				r.connections.Add(1)
			}
		},
	}}
	r.Start()
	t.Cleanup(r.Close)
	r.port = listener.Addr().(*net.TCPAddr).Port
	return r
}

// pair returns two receivers on one port, and a guard that allows the address of the first only.
func pair(t *testing.T) (ok, hostile *receiver, g *guard.Guard, names *nameserver) {
	names, resolver := newNameserver(t)
	ok = newReceiver(t, open, 0)
	hostile = newReceiver(t, closed, ok.port)
	g = newGuard(t, guard.Config{
		AllowCIDRs: []netip.Prefix{netip.MustParsePrefix(open + "/32")}, AllowHTTP: true, AllowPorts: []guard.PortRange{
			{First: ok.port, Last: ok.port},
		}, Resolver: resolver,
	})
	return ok, hostile, g, names
}

// post sends a request with the guard's transport.
func post(t *testing.T, g *guard.Guard, host string, port int) error {
	t.Helper()
	target := url.URL{Scheme: "http", Host: net.JoinHostPort(host, strconv.Itoa(port))}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, target.String(), nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := g.Transport().RoundTrip(req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}
