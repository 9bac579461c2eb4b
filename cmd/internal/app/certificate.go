package app

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// certificateCheck is the maximum age of the last check of a certificate's files when a client
// connects.
const certificateCheck = time.Second

// certificate is a TLS certificate that is reloaded when its files change. It is safe for
// concurrent use.
type certificate struct {
	cert, key string // files, PEM
	log       *slog.Logger

	mu      sync.Mutex
	loaded  *tls.Certificate
	version [2]fileVersion // of the files, when they were last loaded or could not be
	checked time.Time
}

// fileVersion changes when a file is replaced or written.
type fileVersion struct {
	modified time.Time
	size     int64
}

// loadCertificate loads a certificate and its key.
func loadCertificate(cert, key string, log *slog.Logger) (*certificate, error) {
	c := &certificate{cert: cert, key: key, log: log}
	version, err := c.stat()
	if err == nil {
		err = c.load(version)
	}
	if err != nil {
		return nil, fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	return c, nil
}

func (c *certificate) stat() (version [2]fileVersion, err error) {
	for i, name := range []string{c.cert, c.key} {
		info, err := os.Stat(name)
		if err != nil {
			return version, err
		}
		version[i] = fileVersion{info.ModTime(), info.Size()}
	}
	return version, nil
}

// load loads the files of that version. It is called with the lock, or before c is shared.
func (c *certificate) load(version [2]fileVersion) error {
	c.version, c.checked = version, time.Now()
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		return err
	}
	c.loaded = &pair
	return nil
}

// get implements [tls.Config.GetCertificate]. Files that cannot be loaded change nothing: they may
// be half replaced.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.checked) < certificateCheck {
		return c.loaded, nil
	}
	c.checked = time.Now()
	version, err := c.stat()
	if err == nil && version == c.version {
		return c.loaded, nil
	}
	if err == nil {
		err = c.load(version)
	}
	if err != nil {
		c.log.Warn("TLS certificate not loaded, the earlier one stays in use", "error", err)
		return c.loaded, nil
	}
	c.log.Info("TLS certificate loaded", "expires_at", c.loaded.Leaf.NotAfter)
	return c.loaded, nil
}
