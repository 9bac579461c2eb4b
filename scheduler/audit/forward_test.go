package audit_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/audit"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// collector is an HTTP endpoint that refuses some requests.
type collector struct {
	*httptest.Server
	lines  chan string
	mu     sync.Mutex
	refuse int // the number of requests that are refused after their records were read
}

func newCollector(t *testing.T) *collector {
	c := &collector{lines: make(chan string, 1000)}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if user, password, _ := r.BasicAuth(); err != nil || r.Header.Get("Content-Type") != "application/x-ndjson" ||
			user != "u" || password != "p" {
			t.Errorf("request %v, %v", r.Header, err)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.refuse > 0 {
			c.refuse--
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
			return
		}
		for line := range strings.Lines(string(body)) {
			c.lines <- strings.TrimSpace(line)
		}
	}))
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		c.Close()
	})
	return c
}

// run runs a forwarder until stop is called.
func run(t *testing.T, f *audit.Forwarder) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(storetest.Context(t))
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	stopped := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stopped)
	return stopped
}

// receive returns the next n lines, checked with c.
func receive(t *testing.T, lines <-chan string, c *api.AuditChain, n int) {
	t.Helper()
	for range n {
		select {
		case line := <-lines:
			if _, err := c.Add([]byte(line)); err != nil {
				t.Fatal(err)
			}
		case <-time.After(time.Minute):
			t.Fatalf("no record after %d", c.Last)
		}
	}
}

// Each record arrives, in order, also if the endpoint fails, and another process goes on where the
// first one stopped.
func TestRecordsAreSentToAnEndpoint(t *testing.T) {
	server, endpoint := storetest.Server(t), newCollector(t)
	forwarder := func(instance string) *audit.Forwarder {
		return &audit.Forwarder{
			Log: &audit.Log{Store: storetest.Open(t, server)}, Name: "audit-http", Instance: instance, Logger: storetest.Log(t),
			Sink: &audit.HTTPSink{URL: strings.Replace(endpoint.URL, "http://", "http://u:p@", 1), UserAgent: "bullpen/test"},
		}
	}
	l := &audit.Log{Store: storetest.Open(t, server)}
	for i := range 70 { // more than a batch
		add(t, l, record("acme", fmt.Sprintf("key.a%d", i)))
	}
	endpoint.refuse = 2
	stop := run(t, forwarder("a"))
	var c api.AuditChain
	receive(t, endpoint.lines, &c, 70)
	add(t, l, record("acme", "key.b"))
	receive(t, endpoint.lines, &c, 1)
	stop()
	add(t, l, record("acme", "key.c"))
	run(t, forwarder("b"))
	for line := ""; !strings.Contains(line, "key.c"); { // the last batch is sent again if its position was not stored
		select {
		case line = <-endpoint.lines:
		case <-time.After(time.Minute):
			t.Fatal("the record after the change of process was not sent")
		}
		if strings.Contains(line, "key.a1\"") {
			t.Error("the log is sent from its beginning")
		}
	}
}

var syslogForm = regexp.MustCompile(
	`^<109>1 \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \S+ bullpen - key\.[a-z0-9]+ - (\{.*\})$`)

// text returns the record in a message of RFC 5424.
func text(t *testing.T, message string) string {
	t.Helper()
	m := syslogForm.FindStringSubmatch(message)
	if m == nil {
		t.Fatalf("the message is %q", message)
	}
	return m[1]
}

// serveSyslog passes the messages of all connections on.
func serveSyslog(t *testing.T, listener net.Listener) <-chan string {
	messages := make(chan string, 1000)
	var group sync.WaitGroup
	t.Cleanup(func() {
		_ = listener.Close()
		group.Wait()
	})
	group.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			group.Go(func() {
				defer conn.Close() //nolint:errcheck // only read
				for r := bufio.NewReader(conn); ; {
					length, err := r.ReadString(' ')
					if err != nil {
						return
					}
					n, err := strconv.Atoi(strings.TrimSpace(length))
					message := make([]byte, n)
					if _, errRead := io.ReadFull(r, message); err != nil || errRead != nil {
						t.Errorf("message of length %q: %v, %v", length, err, errRead)
						return
					}
					messages <- string(message)
				}
			})
		}
	})
	return messages
}

func syslogSink(t *testing.T, network, address string) *audit.SyslogSink {
	t.Helper()
	sink, err := audit.NewSyslogSink(network + "://" + address)
	if err != nil {
		t.Fatal(err)
	}
	return sink
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return listener
}

func TestRecordsAreSentToSyslog(t *testing.T) {
	l := &audit.Log{Store: storetest.Open(t, storetest.Server(t))}
	add(t, l, record("acme", "key.a"), record("acme", "key.b"))
	forwarder := func(name string, sink audit.Sink) *audit.Forwarder {
		return &audit.Forwarder{Log: l, Name: name, Instance: "a", Logger: storetest.Log(t), Sink: sink}
	}
	check := func(t *testing.T, messages <-chan string) {
		t.Helper()
		lines, c := make(chan string, 2), api.AuditChain{}
		for range 2 {
			select {
			case m := <-messages:
				lines <- text(t, m)
			case <-time.After(time.Minute):
				t.Fatal("no message")
			}
		}
		receive(t, lines, &c, 2)
	}
	t.Run("tcp", func(t *testing.T) {
		listener := listen(t)
		messages := serveSyslog(t, listener)
		run(t, forwarder("audit-tcp", syslogSink(t, "tcp", listener.Addr().String())))
		check(t, messages)
	})
	t.Run("tls", func(t *testing.T) {
		listener := tls.NewListener(
			listen(t), &tls.Config{Certificates: []tls.Certificate{certificate(t)}, MinVersion: tls.VersionTLS12})
		messages := serveSyslog(t, listener)
		run(t, forwarder("audit-tls", syslogSink(t, "tls", listener.Addr().String())))
		check(t, messages)
	})
	t.Run("udp", func(t *testing.T) {
		conn, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		run(t, forwarder("audit-udp", syslogSink(t, "udp", conn.LocalAddr().String())))
		messages := make(chan string, 2)
		for range 2 {
			if err := conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
				t.Fatal(err)
			}
			buffer := make([]byte, 64<<10)
			n, _, err := conn.ReadFrom(buffer)
			if err != nil {
				t.Fatal(err)
			}
			messages <- string(buffer[:n])
		}
		check(t, messages)
	})
}

// certificate returns a certificate for 127.0.0.1 that this process trusts.
func certificate(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "ca.pem")
	var text bytes.Buffer
	if err := pem.Encode(&text, &pem.Block{Type: "CERTIFICATE", Bytes: der}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SSL_CERT_FILE", file) // the system's certificates are read once, by this test
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func TestSyslogURLs(t *testing.T) {
	for _, text := range []string{
		"", "localhost", "tcp://localhost", "http://localhost:1", "tcp://localhost:1/path",
		"tcp://u@localhost:1", "tls://:1", "tcp://h:1?x",
	} {
		if _, err := audit.NewSyslogSink(text); err == nil {
			t.Errorf("%q is accepted", text)
		}
	}
}
