package inject

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestAuthority(t *testing.T) {
	a, err := newAuthority(time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	block, rest := pem.Decode(a.pem)
	if block == nil || block.Type != "CERTIFICATE" || len(rest) != 0 || bytes.Contains(a.pem, []byte("PRIVATE")) {
		t.Fatalf("%s", a.pem)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(a.pem)
	chain, err := a.certificate("api.example.com")
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(chain.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name  string
		after time.Duration
		ok    bool
	}{
		{"api.example.com", 0, true}, {"other.example.com", 0, false}, {"api.example.com", 2*time.Minute + margin, false},
	} {
		_, err := leaf.Verify(x509.VerifyOptions{DNSName: tt.name, Roots: roots, CurrentTime: time.Now().Add(tt.after)})
		if (err == nil) != tt.ok {
			t.Errorf("%s after %s: %v", tt.name, tt.after, err)
		}
	}
	if leaf.IsCA || !a.cert.IsCA || !a.cert.MaxPathLenZero {
		t.Error("the authority can make others, or its certificates are authorities")
	}
	other, err := newAuthority(time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	roots = x509.NewCertPool()
	roots.AddCert(other.cert)
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots}); err == nil {
		t.Error("the certificate is trusted in another execution")
	}
}

func TestSystemRoots(t *testing.T) {
	a, err := newAuthority(time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "roots.pem")
	t.Setenv("SSL_CERT_FILE", file)
	for text, want := range map[string]string{
		string(a.pem): "", "none": "has no certificate", strings.Repeat("\n", maxRoots) + string(a.pem): "has more than",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		roots, err := SystemRoots()
		if want == "" && (err != nil || string(roots.PEM) != text) ||
			want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if _, err := SystemRoots(); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("a file that does not exist: %v", err)
	}
}
