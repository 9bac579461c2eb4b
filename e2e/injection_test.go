package e2e

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
)

// injected is the value of the secret of testInjections.
const injected = "canary-injected-31b7"

// requests are the Authorization headers that servers have received, by host and path.
type requests struct {
	mu   sync.Mutex
	seen map[string]string
}

// ServeHTTP records a request and answers with what it has received.
func (s *requests) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen[r.Host+r.URL.Path] = strings.Join(r.Header["Authorization"], "|")
	w.Header().Set("X-Received", r.Header.Get("Authorization"))
	_, _ = fmt.Fprintf(w, "%s got %q", r.Host, r.Header.Get("Authorization"))
}

func (s *requests) at(path string) (header string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	header, ok = s.seen[path]
	return header, ok
}

// testInjections runs programs whose requests to www.example.com get a secret.
func testInjections(t *testing.T, p *programs, in topology) {
	with := *p
	with.machine = newMachine(t)
	cert, key := makeCertificate(t, t.TempDir(), "www.example.com", "other.example.com")
	with.env = []string{"SSL_CERT_FILE=" + cert}
	received := &requests{seen: map[string]string{}}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	err = within(with.machine.internet, func() error {
		for _, at := range []string{":443", ":8443"} {
			ln, err := net.Listen("tcp", at)
			if err != nil {
				return err
			}
			server := &http.Server{Handler: received}
			go func() { _ = server.Serve(tls.NewListener(ln, &tls.Config{Certificates: []tls.Certificate{pair}})) }()
			t.Cleanup(func() { _ = server.Close() })
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"--log-level", "debug"}
	if in.separate {
		args = append(args, prewarmed...)
	}
	sys := newSystem(t, with.exportingSpans(), in, 4, args...)
	if r := sys.do(http.MethodPut, "/v1/admin/secrets/API?org=acme", request{"value": injected, "injection": request{
		"hosts": []string{"www.example.com", "http://www.example.com:8080"}, "header": "Authorization",
		"template": "Bearer {{value}}",
	}}); r.status != http.StatusOK {
		t.Fatal(r)
	}
	user := func(name string, network request) *api {
		t.Helper()
		sys.newProfile(name, request{"network": network, "secrets": []string{"API"}})
		r := sys.do(http.MethodPost, "/v1/admin/keys", request{"name": name, "org": "acme", "plan": "pro", "profile": name})
		var made struct{ Key string }
		r.into(t, &made)
		return sys.with(made.Key)
	}
	open := user("open", request{"policy": "unrestricted"})
	listed := user("listed", request{"policy": "allowlist", "allow": []string{"www.example.com:443"}})

	const masked = "www.example.com got \"Bearer ********************\""
	for name, program := range map[string]request{
		"python": python(`
import urllib.request
r = urllib.request.urlopen('https://www.example.com/python')
print(r.read().decode(), r.headers['X-Received'])`),
		"node": {
			"language": "node",
			"code": `fetch('https://www.example.com/node').then(async r => console.log(await r.text(), ` +
				`r.headers.get('x-received')))`,
		},
		"bash": bash(`curl -sS -H 'Authorization: mine' -w ' %header{x-received}\n' https://www.example.com/bash`),
	} {
		for _, b := range []*api{open, listed} {
			b.ended(b.submit(program)).succeeded(t, masked+" Bearer ***\n")
			if got, _ := received.at("www.example.com/" + name); got != "Bearer "+injected {
				t.Errorf("%s: the server got %q", name, got)
			}
		}
	}
	// Other hosts, ports and schemes get nothing, but are reached as before.
	open.ended(open.submit(python(`
import urllib.request
for url in 'https://other.example.com/other', 'https://www.example.com:8443/port', 'http://www.example.com/plain', 'http://www.example.com:8080/':
    print(urllib.request.urlopen(url).read().decode())`))).succeeded(t, `other.example.com got ""
www.example.com:8443 got ""
this is www.example.com
this is www.example.com:8080
`)
	// The policy of the network holds.
	rec := listed.ended(listed.submit(
		python(reachCode + `connect(('www.example.com', 8080), ('www.example.com', 8443), ('other.example.com', 443))`)))
	rec.succeeded(t, "www.example.com 8080 ECONNREFUSED\nwww.example.com 8443 ECONNREFUSED\nother.example.com unknown\n")
	// The program has nothing of the secret, and of the authority only its certificate.
	last := open.submit(bash(`what="` + injected[:6] + `""` + injected[6:] + `" # so that the code does not have it
env -u what | grep -c $what; grep -D skip -rls $what /run /tmp ~ /etc; ls /run/bullpen/job
grep -c 'PRIVATE KEY' $SSL_CERT_FILE; (echo x > $SSL_CERT_FILE) 2> /dev/null || echo read-only`))
	rec = open.ended(last)
	rec.succeeded(t, "0\nca.pem\nmain.sh\n0\nread-only\n")
	// A sandbox without the secret has no proxy and no authority.
	plain := sys.sandboxed("plain", request{"network": request{"policy": "unrestricted"}})
	plain.ended(plain.submit(
		bash(`echo "[$SSL_CERT_FILE]"; ls /run/bullpen/job; curl -ksS https://www.example.com/without`))).
		succeeded(t, "[]\nmain.sh\nwww.example.com got \"\"")
	testLiveInjection(t, open, received)
	dirs := []string{sys.data}
	if in.separate {
		dirs = append(dirs, sys.broker.store)
	}
	for _, dir := range dirs {
		if found := filesWith(t, dir, injected); found != nil {
			t.Errorf("the secret is in %s", found)
		}
	}
	sys.exported(t, last)
	for _, proc := range []*process{sys.front, sys.worker} {
		if strings.Contains(proc.text(t), injected) {
			t.Errorf("the secret is in a log or a span")
		}
	}
}

// testLiveInjection sends requests from a live sandbox, also after a pause. It may be extended for as long as it
// is used, and the proxy's certificates stay valid meanwhile.
func testLiveInjection(t *testing.T, a *api, received *requests) {
	s := a.newSandbox(request{"on_timeout": "pause", "timeout": 60})
	for i, change := range []string{"", "/pause", "/resume"} {
		if change != "" {
			s.change(http.MethodPost, change)
		}
		if i == 1 {
			continue
		}
		for _, user := range []string{"user", "root"} {
			path := fmt.Sprintf("/live/%s/%d", user, i)
			out, exit, err := s.run(user, "curl -sS https://www.example.com"+path)
			want := fmt.Sprintf("www.example.com got %q", "Bearer "+strings.Repeat("*", len(injected)))
			if out != want || exit != 0 || err != nil {
				t.Errorf("%s got %q with exit status %d, %v", user, out, exit, err)
			}
			if got, _ := received.at("www.example.com" + path); got != "Bearer "+injected {
				t.Errorf("the server got %q", got)
			}
		}
	}
	s.check(`python3 -c 'import socket, ssl, time
c = ssl.create_default_context().wrap_socket(socket.create_connection(("www.example.com", 443)), server_hostname="www.example.com")
print(ssl.cert_time_to_seconds(c.getpeercert()["notAfter"]) > time.time() + 30 * 24 * 3600)'`, "True\n")
	s.change(http.MethodDelete, "")
}
