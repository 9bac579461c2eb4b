package app

import (
	"context"
	"fmt"
	"net/url"
	"path/filepath"

	"github.com/bullpen-run/bullpen/storage"
	"github.com/bullpen-run/bullpen/storage/blob"
)

// needsStore reports whether this process reads and writes blobs.
func (c *Config) needsStore() bool { return c.Has(RoleGateway) || c.Has(RoleWorker) }

// StoreLocation returns the URL of the blob store: the configured one, or the directory blobs in
// the data directory.
func (c *Config) StoreLocation() (string, error) {
	if c.StoreURL != "" {
		return c.StoreURL, nil
	}
	dir, err := filepath.Abs(filepath.Join(c.Data, "blobs"))
	if err != nil {
		return "", fmt.Errorf("find the data directory: %w", err)
	}
	return directoryURL(dir), nil
}

// directoryURL returns the URL of a store in a directory.
func directoryURL(dir string) string { return (&url.URL{Scheme: "file", Path: dir}).String() }

// tryStore lists objects of the blob store. They need not exist.
func (s *system) tryStore(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, storeTimeout, fmt.Errorf("no answer within %s", storeTimeout))
	defer cancel()
	for _, err := range s.blobs.List(ctx, doctorPrefix) {
		return err
	}
	return nil
}

// openStore opens the blob store, encrypted if a key is configured. It sends no request to a
// server.
func openStore(ctx context.Context, cfg *Config) (*blob.Store, error) {
	location, err := cfg.StoreLocation()
	if err != nil {
		return nil, err
	}
	store, err := storage.Open(ctx, location, cfg.StoreKey)
	if err != nil {
		return nil, fmt.Errorf("open the blob store: %w", err)
	}
	return store, nil
}
