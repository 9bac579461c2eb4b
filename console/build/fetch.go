package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"
)

const (
	// defaultRegistry is used unless npm_config_registry is set, which npm reads too.
	defaultRegistry = "https://registry.npmjs.org/"
	fetchTimeout    = 2 * time.Minute
	maxTarball      = 64 << 20
	integrityFile   = ".integrity" // in the directory of a package
)

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
		if err := fetchPackage(name, p, into); err != nil {
			return fmt.Errorf("fetch %s %s: %w", name, p.Version, err)
		}
	}
	return nil
}

func fetchPackage(name string, p pinned, into string) error {
	registry := strings.TrimSuffix(cmp.Or(os.Getenv("npm_config_registry"), defaultRegistry), "/")
	address := fmt.Sprintf("%s/%s/-/%s-%s.tgz", registry, name, path.Base(name), p.Version)
	client := http.Client{Timeout: fetchTimeout}
	answer, err := client.Get(address) //nolint:gosec // the registry is chosen by who builds
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }() // it was only read
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", address, answer.Status)
	}
	tarball, err := io.ReadAll(io.LimitReader(answer.Body, maxTarball))
	if err != nil {
		return fmt.Errorf("GET %s: %w", address, err)
	}
	sum := sha512.Sum512(tarball)
	if got := "sha512-" + base64.StdEncoding.EncodeToString(sum[:]); got != p.Integrity {
		return fmt.Errorf("GET %s: the file's hash is %s, not the pinned %s", address, got, p.Integrity)
	}
	if err := os.RemoveAll(into); err != nil {
		return err
	}
	if err := unpack(tarball, into); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(into, integrityFile), []byte(p.Integrity), 0o644) //nolint:gosec // public
}

// unpack writes the files of a package, which lie in one directory of the tarball.
func unpack(tarball []byte, into string) error {
	unzipped, err := gzip.NewReader(bytes.NewReader(tarball))
	if err != nil {
		return fmt.Errorf("read the tarball: %w", err)
	}
	files := tar.NewReader(unzipped)
	for {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the tarball: %w", err)
		}
		_, name, _ := strings.Cut(header.Name, "/")
		if header.Typeflag != tar.TypeReg || !filepath.IsLocal(name) {
			continue
		}
		text, err := io.ReadAll(files)
		if err != nil {
			return fmt.Errorf("read %s in the tarball: %w", name, err)
		}
		file := filepath.Join(into, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil { //nolint:gosec // public
			return err
		}
		if err := os.WriteFile(file, text, 0o644); err != nil { //nolint:gosec // public
			return err
		}
	}
}
