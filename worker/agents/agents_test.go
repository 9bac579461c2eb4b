package agents_test

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
	"reflect"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/bullpen-run/bullpen/worker/agents"
)

// tarball returns a package with files by their names.
func tarball(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var b bytes.Buffer
	zip := gzip.NewWriter(&b)
	w := tar.NewWriter(zip)
	for name, content := range files {
		h := tar.Header{Name: "package/" + name, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(content))}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(content)); err != nil {
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

// registry serves one package, whatever its name and version, and counts the requests.
type registry struct {
	url      string
	requests atomic.Int64
}

func newRegistry(t *testing.T, content []byte) *registry {
	t.Helper()
	r := new(registry)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		r.requests.Add(1)
		if strings.HasSuffix(q.URL.Path, ".tgz") {
			_, _ = w.Write(content)
			return
		}
		_, _ = fmt.Fprintf(w, `{"dist": {"integrity": %q}}`, integrity(content))
	}))
	t.Cleanup(s.Close)
	r.url = s.URL
	return r
}

func install(t *testing.T, r *registry, dir string, request agents.Request) (*agents.Installed, error) {
	t.Helper()
	request.Registry = r.url
	return agents.Install(t.Context(), dir, request)
}

func TestInstall(t *testing.T) {
	content := tarball(t, map[string]string{"cli.js": "a", "vendor/rg": "b", ".bullpen.json": "{}"})
	r, dir := newRegistry(t, content), filepath.Join(t.TempDir(), "deep", "agents")
	first, err := install(t, r, dir, agents.Request{Agent: "claude", Version: "2.1.9"})
	if err != nil {
		t.Fatal(err)
	}
	if first.Existed || !first.Unpinned || first.Integrity != integrity(content) ||
		first.Dir != filepath.Join(dir, "claude", "2.1.9") {
		t.Errorf("got %+v", first)
	}
	pinned := agents.Request{Agent: "claude", Version: "2.1.10", Integrity: integrity(content)}
	if x, err := install(t, r, dir, pinned); err != nil || x.Unpinned || x.Existed {
		t.Errorf("got %+v, %v", x, err)
	}
	d, problems, err := agents.Open(dir)
	if err != nil || len(problems) > 0 {
		t.Fatal(problems, err)
	}
	if got, want := d.Versions(), map[string][]string{"claude": {"2.1.10", "2.1.9"}}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	for version, want := range map[string]string{"": "2.1.10", "2.1.9": "2.1.9"} {
		if got, err := d.Find("claude", version); err != nil || got != filepath.Join(dir, "claude", want) {
			t.Errorf("%q: got %q, %v", version, got, err)
		}
	}
	for agent, version := range map[string]string{"codex": "", "claude": "2.1.11", "../claude": "2.1.9"} {
		if got, err := d.Find(agent, version); err == nil {
			t.Errorf("found %s %s in %s", agent, version, got)
		}
	}

	// What is there is not fetched again, even without a registry.
	before := r.requests.Load()
	for _, request := range []agents.Request{pinned, {Agent: "claude", Version: "2.1.9"}} {
		if x, err := install(t, r, dir, request); err != nil || !x.Existed || x.Integrity != integrity(content) {
			t.Errorf("got %+v, %v", x, err)
		}
	}
	if r.requests.Load() != before {
		t.Error("it was fetched again")
	}
	pinned.Integrity = integrity([]byte("other"))
	if _, err := install(t, r, dir, pinned); err == nil || !strings.Contains(err.Error(), "remove it first") {
		t.Errorf("another package in the place of one that is there: %v", err)
	}
}

// An installation that fails leaves nothing behind.
func TestInstallFails(t *testing.T) {
	good := tarball(t, map[string]string{"cli.js": "a"})
	for name, tt := range map[string]struct {
		content []byte
		request agents.Request
		want    string
	}{
		"unknown agent":      {good, agents.Request{Agent: "mock"}, "no agent"},
		"a path as version":  {good, agents.Request{Agent: "claude", Version: "../2"}, "not a version"},
		"another hash":       {good, agents.Request{Agent: "claude", Integrity: integrity(nil)}, "integrity"},
		"the default's hash": {good, agents.Request{Agent: "claude"}, "integrity"},
		"truncated":          {good[:len(good)/2], agents.Request{Agent: "claude", Version: "1.0.0"}, "EOF"},
		"without program": {
			tarball(t, map[string]string{"claude": "a"}), agents.Request{Agent: "claude", Version: "1.0.0"}, "cli.js",
		},
		"a way out": {
			tarball(t, map[string]string{"cli.js": "a", "../../../../x": "a"}),
			agents.Request{Agent: "claude", Version: "1.0.0"},
			"not in the package",
		},
	} {
		t.Run(name, func(t *testing.T) {
			around := t.TempDir()
			dir := filepath.Join(around, "agents")
			_, err := install(t, newRegistry(t, tt.content), dir, tt.request)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want an error with %q", err, tt.want)
			}
			left, err := filepath.Glob(around + "/agents/*/*")
			if hidden, errHidden := filepath.Glob(around + "/agents/*/.*"); err != nil || errHidden != nil ||
				len(left)+len(hidden) > 0 {
				t.Errorf("left behind: %q %q", left, hidden)
			}
			if around, err := os.ReadDir(around); err != nil || len(around) > 1 {
				t.Errorf("outside of the directory: %v, %v", around, err)
			}
		})
	}
}

func TestListFindsProblems(t *testing.T) {
	r := newRegistry(t, tarball(t, map[string]string{"cli.js": "a", "vendor/rg": "b"}))
	for want, spoil := range map[string]func(dir string) error{
		"": func(string) error { return nil },
		"has no manifest": func(dir string) error {
			return os.Remove(filepath.Join(dir, agents.ManifestFile))
		},
		"decode its manifest": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, agents.ManifestFile), []byte("x"), 0o600)
		},
		`its manifest is of "claude" "2.0.0"`: func(dir string) error {
			return os.WriteFile(filepath.Join(dir, agents.ManifestFile), []byte(`{"agent":"claude","version":"2.0.0"}`), 0o600)
		},
		"and this machine is": func(dir string) error {
			text := `{"agent":"claude","version":"1.0.0","architecture":"vax"}`
			return os.WriteFile(filepath.Join(dir, agents.ManifestFile), []byte(text), 0o600)
		},
		"no such file":               func(dir string) error { return os.Remove(filepath.Join(dir, "cli.js")) },
		"user can read cli.js":       func(dir string) error { return os.Chmod(filepath.Join(dir, "cli.js"), 0o700) },
		"not every user can enter .": func(dir string) error { return os.Chmod(dir, 0o700) },
		"cli.js is not a file": func(dir string) error {
			path := filepath.Join(dir, "cli.js")
			if err := os.Remove(path); err != nil {
				return err
			}
			return os.Symlink("/etc/passwd", path)
		},
	} {
		dir := t.TempDir()
		x, err := install(t, r, dir, agents.Request{Agent: "claude", Version: "1.0.0"})
		if err != nil {
			t.Fatal(err)
		}
		if err := spoil(x.Dir); err != nil {
			t.Fatal(err)
		}
		d, problems, err := agents.Open(dir)
		switch {
		case err != nil:
			t.Fatal(err)
		case want == "":
			if len(problems) > 0 || len(d.Versions()) != 1 {
				t.Errorf("got %v, %v", problems, d.Versions())
			}
		case len(problems) != 1 || len(d.Versions()) != 0 || !strings.Contains(problems[0].Err.Error(), want) ||
			!strings.Contains(problems[0].Err.Error(), "remove "+x.Dir):
			t.Errorf("%s: got %v, %v", want, problems, d.Versions())
		}
	}
}

// Entries that are not agents are named, except hidden ones.
func TestListOtherEntries(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"claude-code", "lost+found", ".snapshot", "codex/.unfinished-1", "codex/latest"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "amp"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	all, err := agents.List(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, i := range all {
		if i.Err == nil {
			t.Errorf("%+v is usable", i)
		}
		got = append(got, i.Agent+" "+i.Version)
	}
	if want := []string{"amp ", "claude-code ", "codex latest"}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if _, err := agents.List(filepath.Join(dir, "nowhere")); err == nil {
		t.Error("a missing directory is no error")
	}
}
