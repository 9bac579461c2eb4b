package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// An index that answers, in whatever way, is left to the tool that downloads. One that does not is named.
func TestIndexIsChecked(t *testing.T) {
	refuse := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "no", http.StatusForbidden)
	})
	plain, private := httptest.NewServer(refuse), httptest.NewTLSServer(refuse)
	defer plain.Close()
	defer private.Close()
	gone := httptest.NewServer(refuse)
	gone.Close()
	for _, i := range []packageIndex{
		{url: plain.URL}, {url: private.URL}, {url: "http://index.invalid/", proxy: plain.URL},
	} {
		if err := i.check(t.Context()); err != nil {
			t.Errorf("%+v: %v", i, err)
		}
	}
	i := packageIndex{name: "the index of tests", url: gone.URL, setting: "--index names another one"}
	err := i.check(t.Context())
	for _, want := range []string{i.name, gone.URL, "cannot be reached", i.setting} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not have %q", err, want)
		}
	}
	got := debianIndexes("sid",
		[]string{"/etc/apt/sources.list", "deb [trusted=yes] https://deb.example.com/debian sid main"})
	if len(got) != 1 || got[0].url != "https://deb.example.com/debian" {
		t.Errorf("%+v", got)
	}
}

// Parts are reused for a day, and downloads are kept.
func TestPartsAreReused(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	c, err := openPartCache()
	if err != nil {
		t.Fatal(err)
	}
	write := func(path string) string {
		t.Helper()
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	keep := func(made time.Time, content ...any) part {
		t.Helper()
		p, err := c.part("debian", made, content...)
		if err == nil {
			err = p.store(write(filepath.Join(c.dir, "new")))
		}
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	began := time.Now().Add(-time.Hour).Truncate(time.Second)
	keep(began, "bash")
	keep(time.Now().Add(-partAge-time.Minute), "old")
	debs, err := c.downloads(c.debs(), "mirror")
	if err != nil {
		t.Fatal(err)
	}
	deb := write(filepath.Join(debs, "bash.deb"))
	if err := os.Chtimes(deb, began, time.Unix(0, 0)); err != nil {
		t.Fatal(err)
	}
	if c, err = openPartCache(); err != nil {
		t.Fatal(err)
	}
	for content, want := range map[string]bool{"bash": true, "old": false, "git": false} {
		p, err := c.part("debian", time.Now(), content)
		if err != nil || p.exists != want || want && !p.made.Equal(began) {
			t.Errorf("%s: %+v, %v", content, p, err)
		}
	}
	if _, err := os.Stat(deb); err != nil {
		t.Error(err)
	}
}

// A build takes no package that another mirror or index has supplied.
func TestDownloadsOfSourcesAreApart(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	c, err := openPartCache()
	if err != nil {
		t.Fatal(err)
	}
	list := filepath.Join(t.TempDir(), "sources.list")
	dirs := map[string]string{}
	for _, text := range []string{"deb http://one.example.com sid main", "deb http://two.example.com sid main"} {
		if err := os.WriteFile(list, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, mirror := range []string{list, text} {
			dir, err := c.downloads(c.debs(), "sid", mirrorTexts([]string{mirror}))
			if err != nil {
				t.Fatal(err)
			}
			if other, ok := dirs[dir]; ok {
				t.Errorf("%s and %s share a directory", text, other)
			}
			dirs[dir] = text
			if again, err := c.downloads(c.debs(), "sid", mirrorTexts([]string{mirror})); err != nil || again != dir {
				t.Errorf("%s, then %s: %v", dir, again, err)
			}
		}
	}
}

// A cache that another user can write would decide what images contain.
func TestCacheOfAnotherUser(t *testing.T) {
	for name, c := range map[string]struct {
		of    string
		mode  os.FileMode
		owner int
		ok    bool
	}{
		"own":                  {"bullpen/images", 0o755, 0, true},
		"writable by all":      {"bullpen/images", 0o777, 0, false},
		"writable by a group":  {"bullpen/images", 0o775, 0, false},
		"another owner":        {"bullpen/images", 0o755, 1, false},
		"owner of a parent":    {"bullpen", 0o755, 1, false},
		"another user's cache": {"", 0o755, 1, false},
		"a directory as /tmp":  {"", 0o777 | os.ModeSticky, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			cache := t.TempDir()
			t.Setenv("XDG_CACHE_HOME", cache)
			dir := filepath.Join(cache, c.of)
			err := os.MkdirAll(filepath.Join(cache, "bullpen", "images"), 0o700)
			if err == nil {
				err = os.Chmod(dir, c.mode)
			}
			if err == nil && c.owner != 0 {
				err = os.Chown(dir, c.owner, c.owner)
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := openPartCache(); (err == nil) != c.ok {
				t.Errorf("%v", err)
			}
		})
	}
}
