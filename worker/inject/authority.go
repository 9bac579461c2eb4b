package inject

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"time"
)

// margin is added to the time for which certificates are valid, at both ends.
const margin = time.Hour

// authority signs the certificates that one program sees. Its keys are in memory only.
type authority struct {
	cert         *x509.Certificate
	key, leafKey *ecdsa.PrivateKey
	pem          []byte // of cert
}

func newAuthority(lifetime time.Duration) (*authority, error) {
	a := new(authority)
	var err error
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err == nil {
		a.leafKey, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	}
	if err != nil {
		return nil, fmt.Errorf("make the keys of a certificate authority: %w", err)
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "bullpen, for one execution"},
		NotBefore: now.Add(-margin), NotAfter: now.Add(lifetime + margin),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err == nil {
		a.cert, err = x509.ParseCertificate(der)
	}
	if err != nil {
		return nil, fmt.Errorf("make a certificate authority: %w", err)
	}
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return a, nil
}

// certificate returns a certificate for a host name.
func (a *authority) certificate(name string) (*tls.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, DNSNames: []string{name}, NotBefore: a.cert.NotBefore, NotAfter: a.cert.NotAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, a.leafKey.Public(), a.key)
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: a.leafKey}, err
}

// Roots are the certificate authorities that the worker's system trusts.
type Roots struct {
	PEM  []byte
	Pool *x509.CertPool
}

// maxRoots limits Roots.PEM in bytes: every jail whose requests get a secret has a copy.
const maxRoots = 2 << 20

// rootFiles are where systems have them. SSL_CERT_FILE of the worker's environment precedes them.
var rootFiles = []string{ // read only
	"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt",
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
	"/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem",
}

// SystemRoots reads the certificate authorities of the system.
func SystemRoots() (Roots, error) {
	files := rootFiles
	if file := os.Getenv("SSL_CERT_FILE"); file != "" {
		files = []string{file}
	}
	for _, file := range files {
		text, err := os.ReadFile(file) //nolint:gosec // the operator names it
		if errors.Is(err, fs.ErrNotExist) && len(files) > 1 {
			continue
		}
		if err != nil {
			return Roots{}, fmt.Errorf("read the certificate authorities of the system: %w", err)
		}
		if len(text) > maxRoots {
			return Roots{}, fmt.Errorf("read the certificate authorities of the system: %s has more than %d bytes",
				file, maxRoots)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(text) {
			return Roots{}, fmt.Errorf("read the certificate authorities of the system: %s has no certificate", file)
		}
		return Roots{text, pool}, nil
	}
	return Roots{}, errors.New(
		"this system has no certificate authorities: install the package ca-certificates, or name their file in " +
			"SSL_CERT_FILE")
}
