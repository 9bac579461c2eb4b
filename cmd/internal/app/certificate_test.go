package app

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// writeCertificate replaces the certificate in cert and the key in key by new ones for 127.0.0.1.
func writeCertificate(t *testing.T, cert, key string, serial int64) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	text, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	for name, block := range map[string]*pem.Block{
		cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: text},
	} {
		temporary := name + ".new"
		if err := os.WriteFile(temporary, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(temporary, name); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTLS(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	writeCertificate(t, cert, key, 1)
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	cfg := config(t, "--listen", "127.0.0.1:0", "--tls-cert", cert, "--tls-key", key)
	h, err := listen(cfg, log)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- h.run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	h.open(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(w, "%s %t", r.Proto, r.TLS != nil)
	}), nil)
	address := h.listener.Addr().String()
	// serial connects and returns the serial number of the server's certificate.
	serial := func() int64 {
		conn, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	if got := serial(); got != 1 {
		t.Errorf("certificate %d", got)
	}

	roots := x509.NewCertPool()
	content, err := os.ReadFile(cert)
	if err != nil || !roots.AppendCertsFromPEM(content) {
		t.Fatal(err)
	}
	for _, two := range []bool{false, true} {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: two}
		resp, err := (&http.Client{Transport: transport}).Get("https://" + address)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		transport.CloseIdleConnections()
		if want := map[bool]string{false: "HTTP/1.1 true", true: "HTTP/2.0 true"}[two]; err != nil || string(body) != want {
			t.Errorf("%q, want %q: %v", body, want, err)
		}
	}
	if conn, err := tls.Dial(
		"tcp", address, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS11}); err == nil {
		_ = conn.Close()
		t.Error("TLS 1.1 is accepted")
	}

	// Headers of more than 64 KiB are refused.
	conn, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	go func() {
		_, _ = fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: x\r\nA: %s\r\n\r\n", strings.Repeat("a", maxHeaderBytes+8<<10))
	}()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("large headers: %v %v", resp, err)
	}

	// New files are taken into use, and files that do not fit are not.
	reloaded := func(want int64) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); serial() != want; {
			if time.Now().After(deadline) {
				t.Fatalf("certificate %d is not in use", want)
			}
		}
	}
	writeCertificate(t, cert, key, 2)
	reloaded(2)
	writeCertificate(t, cert, filepath.Join(dir, "other.pem"), 3)
	version := func() [2]fileVersion {
		c := h.certificate
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.version
	}
	for before, deadline := version(), time.Now().Add(20*time.Second); version() == before; {
		if got := serial(); got != 2 {
			t.Fatalf("certificate %d without its key is in use", got)
		}
		if time.Now().After(deadline) {
			t.Fatal("the files are not looked at")
		}
	}
	if got := serial(); got != 2 {
		t.Errorf("certificate %d without its key is in use", got)
	}
	writeCertificate(t, cert, key, 4)
	reloaded(4)
}

// Settings that cannot work are errors of the start.
func TestTLSSettings(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for _, args := range [][]string{{"--tls-cert", cert}, {"--tls-key", key}} {
		if _, err := ParseConfig(args); err == nil || !strings.Contains(err.Error(), "--tls-cert and --tls-key go together") {
			t.Errorf("%v: %v", args, err)
		}
	}
	log := slog.New(slog.DiscardHandler)
	if _, err := listen(config(t, "--listen", "127.0.0.1:0", "--tls-cert", cert, "--tls-key", key), log); err == nil ||
		!strings.Contains(err.Error(), "cert.pem") {
		t.Errorf("no files: %v", err)
	}
}

func TestOrigins(t *testing.T) {
	for _, origin := range []string{
		"*", "null", "app.example.com", "https://app.example.com/", "https://a@app.example.com", "https://", "ftp://x",
	} {
		if _, err := ParseConfig([]string{"--cors-origins", origin}); err == nil ||
			!strings.Contains(err.Error(), "must be the origin of a page") {
			t.Errorf("%q: %v", origin, err)
		}
	}
	c, err := ParseConfig([]string{"--cors-origins", "https://app.example.com,http://localhost:3000"})
	if err != nil || len(c.CORSOrigins) != 2 {
		t.Errorf("%v %v", c, err)
	}
}
