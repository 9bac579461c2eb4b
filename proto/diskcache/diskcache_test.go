package diskcache_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/bullpen-run/bullpen/proto/diskcache"
)

type value struct{ Text string }

func open(t *testing.T, dir string, limit int64) *diskcache.Cache[*value] {
	t.Helper()
	c, err := diskcache.Open(diskcache.Config{Dir: dir, Mode: 0o700, Limit: limit, Log: slog.New(slog.DiscardHandler)},
		func() *value { return &value{} })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Wait)
	return c
}

// fill makes an entry complete with one file of the given size.
func fill(t *testing.T, c *diskcache.Cache[*value], key string, size int64) *diskcache.Entry[*value] {
	t.Helper()
	e := c.Acquire(key)
	if err := c.Create(e); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(e.Path("f"), make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	e.Value.Text = key
	if err := c.Complete(e, size); err != nil {
		t.Fatal(err)
	}
	return e
}

// has reports whether a cache has a complete entry.
func has(c *diskcache.Cache[*value], key string) bool {
	e := c.Acquire(key)
	defer c.Release(e)
	_, err := os.Stat(e.Path("f"))
	return e.IsComplete() && e.Value.Text == key && err == nil
}

func TestEviction(t *testing.T) {
	c := open(t, t.TempDir(), 20)
	a, b := fill(t, c, "a", 10), fill(t, c, "b", 10)
	c.Release(b)
	d := fill(t, c, "d", 10)
	if !has(c, "a") || has(c, "b") || !has(c, "d") {
		t.Error("not exactly the unused entry was evicted")
	}
	next := c.Replace(a, &value{})
	if _, err := os.Stat(a.Path("f")); err != nil || !c.IsDetached(a) {
		t.Errorf("a replaced entry in use: %v", err)
	}
	path := a.Path("f")
	c.Release(a)
	if _, err := os.Stat(path); err == nil {
		t.Error("a released entry that was replaced still exists")
	}
	c.Release(next)
	c.Release(d)
}

func TestNextProcess(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir, 100)
	c.Release(fill(t, c, "complete", 10))
	if err := c.Invalidate(fill(t, c, "invalid", 10)); err != nil {
		t.Fatal(err)
	}
	if err := c.Create(c.Acquire("new")); err != nil {
		t.Fatal(err)
	}
	c = open(t, dir, 100)
	if !has(c, "complete") || has(c, "invalid") || has(c, "new") {
		t.Error("not exactly the complete entry was adopted")
	}
	if err := os.WriteFile(filepath.Join(dir, "boot"), []byte("another"), 0o600); err != nil {
		t.Fatal(err)
	}
	if c = open(t, dir, 100); has(c, "complete") {
		t.Error("an entry survived a reboot")
	}
}
