package npm_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/bullpen-run/bullpen/proto/npm"
)

// file returns the header of a file of size bytes.
func file(name string, mode, size int64) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Size: size}
}

// tarball returns a package. The files are of zero bytes.
func tarball(t *testing.T, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	zip := gzip.NewWriter(&b)
	w := tar.NewWriter(zip)
	for _, h := range headers {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(make([]byte, h.Size)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := zip.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func integrity(content []byte) string {
	sum := sha512.Sum512(content)
	return "sha512-" + base64.StdEncoding.EncodeToString(sum[:])
}

// serve starts a registry with one package, @team/parts 1.2.3-x.
func serve(t *testing.T, content []byte, description string) *npm.Registry {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.EscapedPath() {
		case "/npm/@team/parts/-/parts-1.2.3-x.tgz":
			_, _ = w.Write(content)
		case "/npm/@team%2Fparts/1.2.3-x":
			_, _ = w.Write([]byte(description))
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(s.Close)
	return &npm.Registry{URL: s.URL + "/npm/", Limits: npm.Limits{Tarball: 1 << 20, Content: 1 << 20, Files: 2}}
}

func parts(content []byte) npm.Package {
	return npm.Package{Name: "@team/parts", Version: "1.2.3-x", Integrity: integrity(content)}
}

// paths returns the modes and names of everything below dir.
func paths(t *testing.T, dir string) (list []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		info, err := d.Info()
		if err == nil {
			list = append(list, info.Mode().String()+" "+strings.TrimPrefix(path, dir+"/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// The modes of the tarball and the umask do not matter: everybody can read the files, and nobody can
// write to them.
func TestFetch(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	content := tarball(t,
		tar.Header{Name: "comment", Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "x"}},
		tar.Header{Name: "package/bin/", Typeflag: tar.TypeDir, Mode: 0o777},
		file("package/bin/run", 0o6700, 7), file("package/a/b/c.js", 0o026, 3))
	dir := t.TempDir()
	if err := serve(t, content, "").Fetch(t.Context(), parts(content), dir); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"drwxr-xr-x a", "drwxr-xr-x a/b", "-rw-r--r-- a/b/c.js", "drwxr-xr-x bin", "-rwxr-xr-x bin/run",
	}
	if got := paths(t, dir); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestFetchRefuses(t *testing.T) {
	good := tarball(t, file("package/f", 0o644, 100))
	for name, tt := range map[string]struct {
		content   []byte
		integrity string // empty for that of content
		want      string
	}{
		"another file":         {good, integrity([]byte("other")), "not sha512-"},
		"no hash":              {good, "sha512-", "not sha512-"},
		"truncated":            {good[:len(good)-20], "", "unexpected EOF"},
		"truncated on its way": {good[:len(good)-20], integrity(good), "not sha512-"},
		"no tarball":           {[]byte("<html>"), "", "unpack"},
		"a way out":            {tarball(t, file("package/../../f", 0o644, 1)), "", "not in the package"},
		"an absolute path":     {tarball(t, file("package//etc/f", 0o644, 1)), "", "not in the package"},
		"no directory":         {tarball(t, file("f", 0o644, 1)), "", "not in the package"},
		"a link": {
			tarball(t, tar.Header{Name: "package/l", Typeflag: tar.TypeSymlink, Linkname: "/etc"}), "", "links",
		},
		"a hard link": {
			tarball(t, tar.Header{Name: "package/l", Typeflag: tar.TypeLink, Linkname: "package/f"}), "", "links",
		},
		"a device":         {tarball(t, tar.Header{Name: "package/d", Typeflag: tar.TypeChar, Devmajor: 1}), "", "devices"},
		"a file twice":     {tarball(t, file("package/f", 0o644, 1), file("package/f", 0o644, 1)), "", "exists"},
		"a file as a path": {tarball(t, file("package/f", 0o644, 1), file("package/f/g", 0o644, 1)), "", "not a directory"},
		"too much":         {tarball(t, file("package/f", 0o644, 1<<19), file("package/g", 0o644, 1<<19+1)), "", "bytes"},
		"too many": {
			tarball(t, file("package/a", 0o644, 0), file("package/b", 0o644, 0), file("package/c", 0o644, 0)), "", "2 files",
		},
	} {
		t.Run(name, func(t *testing.T) {
			around := t.TempDir()
			dir := filepath.Join(around, "deep", "dir")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			p := parts(tt.content)
			if tt.integrity != "" {
				p.Integrity = tt.integrity
			}
			err := serve(t, tt.content, "").Fetch(t.Context(), p, dir)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
			for _, path := range paths(t, around)[2:] {
				if !strings.Contains(path, " deep/dir/") {
					t.Errorf("outside of the directory: %q", path)
				}
			}
			if tt.integrity != "" && len(paths(t, dir)) > 0 {
				t.Errorf("unpacked all the same: %q", paths(t, dir))
			}
		})
	}
}

func TestFetchRefusesLargeTarball(t *testing.T) {
	content := tarball(t, file("package/f", 0o644, 100))
	r := serve(t, content, "")
	r.Limits.Tarball = int64(len(content)) - 1
	if err := r.Fetch(t.Context(), parts(content), t.TempDir()); err == nil || !strings.Contains(err.Error(), "larger") {
		t.Error(err)
	}
}

func TestIntegrity(t *testing.T) {
	want := integrity([]byte("x"))
	for description, ok := range map[string]bool{
		`{"dist": {"integrity": "` + want + `", "shasum": "0"}}`:      true,
		`{"dist": {"integrity": "sha1-eHg= ` + want + `"}}`:           true,
		`{"dist": {"shasum": "0"}}`:                                   false,
		`{"dist": {"integrity": "sha512-eHg="}}`:                      false,
		`[]`:                                                          false,
		`{"dist": {"integrity": "` + strings.Repeat("x", 1<<20) + `"`: false,
	} {
		got, err := serve(t, nil, description).Integrity(t.Context(), "@team/parts", "1.2.3-x")
		if ok != (err == nil) || ok && got != want {
			t.Errorf("%.100s: got %q, %v", description, got, err)
		}
	}
}

// No message has the password of the registry.
func TestErrorsHideThePassword(t *testing.T) {
	for _, url := range []string{"http://user:hunter2@127.0.0.1:1/", "ftp://user:hunter2@h/", "http://user:hunter2@%zz/"} {
		r := &npm.Registry{URL: url}
		_, err := r.Integrity(t.Context(), "p", "1")
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", url, err)
		}
	}
}
