package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/bullpen-run/bullpen/proto/npm"
)

const (
	fetchTimeout  = 2 * time.Minute
	integrityFile = ".integrity" // in the directory of a package
)

// limits bound each package.
var limits = npm.Limits{Tarball: 64 << 20, Content: 512 << 20, Files: 50_000} // read only

// pinned is a package of packages.json.
type pinned struct {
	Version   string `json:"version"`
	Integrity string `json:"integrity"` // as in package-lock.json: sha512-BASE64
}

// fetchPackages fetches and unpacks the packages of a list into dir, except those that are there
// already.
func fetchPackages(list, dir string) error {
	text, err := os.ReadFile(list)
	if err != nil {
		return fmt.Errorf("read the list of packages: %w", err)
	}
	var all map[string]pinned
	if err := json.Unmarshal(text, &all); err != nil {
		return fmt.Errorf("decode %s: %w", list, err)
	}
	for name, p := range all {
		into := filepath.Join(dir, filepath.FromSlash(name))
		if have, err := os.ReadFile(filepath.Join(into, integrityFile)); err == nil && string(have) == p.Integrity {
			continue
		}
		if err := fetchPackage(npm.Package{Name: name, Version: p.Version, Integrity: p.Integrity}, into); err != nil {
			return fmt.Errorf("fetch %s %s: %w", name, p.Version, err)
		}
	}
	return nil
}

func fetchPackage(p npm.Package, into string) error {
	ctx, cancel := context.WithTimeout(context.Background(), fetchTimeout)
	defer cancel()
	if err := os.RemoveAll(into); err != nil {
		return err
	}
	if err := os.MkdirAll(into, 0o755); err != nil { //nolint:gosec // public
		return err
	}
	if err := (&npm.Registry{Limits: limits}).Fetch(ctx, p, into); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(into, integrityFile), []byte(p.Integrity), 0o644) //nolint:gosec // public
}
