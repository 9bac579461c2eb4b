package send_test

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/webhook/guard"
	"github.com/bullpen-run/bullpen/webhook/send"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// authority signs the receivers' certificates.
type authority struct {
	t    *testing.T
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, key: newKey(t)}
	a.cert = a.sign(&x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour),
		IsCA:     true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, nil, a.key)
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func (a *authority) sign(template, parent *x509.Certificate, key *ecdsa.PrivateKey) *x509.Certificate {
	if parent == nil {
		parent = template
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(raw)
	if err != nil {
		a.t.Fatal(err)
	}
	return cert
}

// server returns a TLS configuration with a certificate for addr that is valid until the given
// time.
func (a *authority) server(addr string, until time.Time) *tls.Config {
	key := newKey(a.t)
	cert := a.sign(&x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: until,
		IPAddresses: []net.IP{net.ParseIP(addr)},
		KeyUsage:    x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, a.cert, key)
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}},
		NextProtos:   []string{"http/1.1"},
	}
}

// file writes the authority's certificate to a file.
func (a *authority) file() string {
	path := filepath.Join(a.t.TempDir(), "ca.pem")
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw}),
		0o600); err != nil {
		a.t.Fatal(err)
	}
	return path
}

// world is a sender that may send to loopback addresses on one port, and a listener there.
type world struct {
	t         *testing.T
	authority *authority
	listener  net.Listener
	sender    *send.Sender
	settings  proto.Webhook
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, authority: newAuthority(t), settings: proto.DefaultWebhook()}
	var err error
	if w.listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
	g, err := guard.New(guard.Config{
		AllowCIDRs: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, AllowPorts: []guard.PortRange{
			{First: w.port(), Last: w.port()},
		}, AllowHTTP: true, CAFile: w.authority.file(),
		Resolver: &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
			return nil, errors.New("no nameserver at 10.9.8.7")
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Transport().CloseIdleConnections)
	w.sender = &send.Sender{Guard: g, UserAgent: "bullpen/test"}
	return w
}

func (w *world) port() int { return w.listener.Addr().(*net.TCPAddr).Port }

// valid returns a TLS configuration with a valid certificate.
func (w *world) valid() *tls.Config {
	return w.authority.server("127.0.0.1", time.Now().Add(time.Hour))
}

// url returns the URL of the receiver.
func (w *world) url(scheme string) string {
	return scheme + "://127.0.0.1:" + strconv.Itoa(w.port()) + "/hook?a=b"
}

// serve handles requests over TLS.
func (w *world) serve(config *tls.Config, handler http.HandlerFunc) {
	server := &httptest.Server{
		Listener: w.listener, Config: &http.Server{Handler: handler}, TLS: config,
		EnableHTTP2: config.NextProtos == nil,
	}
	server.StartTLS()
	w.t.Cleanup(server.Close)
}

// accept calls f with each TLS connection after reading one request from it, and closes it when f
// returns.
func (w *world) accept(f func(conn net.Conn)) {
	w.acceptRaw(func(conn net.Conn) {
		secure := tls.Server(conn, w.valid())
		req, err := http.ReadRequest(bufio.NewReader(secure))
		if err == nil {
			_, err = io.Copy(io.Discard, req.Body)
		}
		if err != nil {
			w.t.Error(err)
			return
		}
		f(secure)
	})
}

// acceptRaw calls f with each connection, and closes it when f returns.
func (w *world) acceptRaw(f func(conn net.Conn)) {
	var running sync.WaitGroup
	w.t.Cleanup(func() {
		_ = w.listener.Close()
		w.sender.Guard.Transport().CloseIdleConnections()
		running.Wait()
	})
	running.Go(func() {
		for {
			conn, err := w.listener.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer func() { _ = conn.Close() }()
				f(conn)
			})
		}
	})
}

// send sends a delivery over TLS.
func (w *world) send() send.Outcome {
	w.t.Helper()
	return w.sender.Send(w.t.Context(),
		send.Post{URL: w.url("https"), ID: "msg_1", Body: []byte(`{"a":1}`), Settings: w.settings})
}

// write writes to a connection that the sender may have closed.
func write(conn net.Conn, text string) { _, _ = io.WriteString(conn, text) }

func (w *world) wantError(o send.Outcome, class proto.DeliveryError, detail string) {
	w.t.Helper()
	if o.Error != class || !strings.Contains(o.Detail, detail) {
		w.t.Errorf("got %q: %q, want %q: %q", o.Error, o.Detail, class, detail)
	}
	if o.At.IsZero() || o.At.Location() != time.UTC {
		w.t.Errorf("the attempt began at %s", o.At)
	}
}
