package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
)

// tarball returns a package with a file of each name, which contains its name.
func tarball(t *testing.T, names ...string) (content []byte, integrity string) {
	t.Helper()
	var b bytes.Buffer
	zip := gzip.NewWriter(&b)
	w := tar.NewWriter(zip)
	for _, name := range names {
		header := &tar.Header{Name: name, Size: int64(len(name)), Mode: 0o755, Typeflag: tar.TypeReg}
		if err := w.WriteHeader(header); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := zip.Close(); err != nil {
		t.Fatal(err)
	}
	sum := sha512.Sum512(b.Bytes())
	return b.Bytes(), "sha512-" + base64.StdEncoding.EncodeToString(sum[:])
}

func TestFetchPackages(t *testing.T) {
	content, integrity := tarball(t, "package/index.js", "package/lib/a.js")
	bad, badIntegrity := tarball(t, "package/index.js", "package/../../outside")
	asked := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		switch r.URL.Path {
		case "/@team/parts/-/parts-1.2.3.tgz":
			_, _ = w.Write(content)
		case "/@team/parts/-/parts-1.2.5.tgz":
			_, _ = w.Write(bad)
		default:
			http.NotFound(w, r)
		}
	}))
	defer s.Close()
	t.Setenv("npm_config_registry", s.URL+"/")
	root := t.TempDir()
	dir, list := filepath.Join(root, "packages"), filepath.Join(root, "packages.json")
	fetch := func(version, integrity string) error {
		t.Helper()
		text := fmt.Sprintf(`{"@team/parts": {"version": %q, "integrity": %q}}`, version, integrity)
		if err := os.WriteFile(list, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return fetchPackages(list, dir)
	}

	_, other := tarball(t, "package/other")
	if err := fetch("1.2.3", other); err == nil {
		t.Error("a package with another hash was accepted")
	}
	if _, err := os.Stat(filepath.Join(dir, "@team", "parts", "index.js")); !os.IsNotExist(err) {
		t.Errorf("a package with another hash was unpacked: %v", err)
	}
	if err := fetch("1.2.4", integrity); err == nil {
		t.Error("a missing version was no error")
	}
	if err := fetch("1.2.5", badIntegrity); err == nil {
		t.Error("a package with a file outside of it was accepted")
	}
	before := asked
	for range 2 {
		if err := fetch("1.2.3", integrity); err != nil {
			t.Fatal(err)
		}
	}
	if asked != before+1 {
		t.Errorf("a package that is there was fetched %d times", asked-before)
	}
	for _, name := range []string{"index.js", "lib/a.js"} {
		text, err := os.ReadFile(filepath.Join(dir, "@team", "parts", name))
		if err != nil || string(text) != "package/"+name {
			t.Errorf("%s: %q, %v", name, text, err)
		}
	}
	outside, err := filepath.Glob(filepath.Join(root, "*"))
	if err != nil || len(outside) != 2 {
		t.Errorf("files outside the package: %v, %v", outside, err)
	}
}
