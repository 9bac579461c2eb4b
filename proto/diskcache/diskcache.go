// Package diskcache manages a directory of subdirectories that can be built again, such as homes
// and images: it counts their users, limits their total size, and keeps them for the next process.
//
// An entry is complete once its directory contains a record. Open removes directories without one,
// which a killed process leaves behind. After a reboot it removes everything, because files are not
// synced and a power failure may have truncated some.
package diskcache

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

const (
	bootFile   = "boot"
	recordFile = "entry.json"
	// removedSuffix is the suffix of directories that are being removed.
	removedSuffix = ".removed"
	// bootID identifies this boot of the kernel.
	bootID = "/proc/sys/kernel/random/boot_id"
)

// Config configures a cache.
type Config struct {
	Dir   string      // created if necessary; one process at a time may use it
	Mode  fs.FileMode // of Dir and of the directories in it
	Limit int64       // total size in bytes above which unused entries are evicted
	Log   *slog.Logger
}

// Cache is a cache of directories. It is safe for concurrent use. V is the caller's part of an
// entry, a pointer whose exported fields are stored with the entry.
type Cache[V any] struct {
	cfg      Config
	newValue func() V
	work     sync.WaitGroup

	mu      sync.Mutex
	entries map[string]*Entry[V]
}

// Entry is a directory in use. The caller synchronizes its own access to Value and to the
// directory.
type Entry[V any] struct {
	Value V

	// The cache's lock protects the following fields, and the caller's lock the first two as well.
	dir      string // "" if there is none
	complete bool
	key      string
	size     int64
	users    int
	used     time.Time
	detached bool // another entry has the key
}

type record[V any] struct {
	Key   string `json:"key"`
	Size  int64  `json:"size"`
	Value V      `json:"value"`
}

// Open opens a cache. newValue returns the initial value of an entry.
func Open[V any](cfg Config, newValue func() V) (*Cache[V], error) {
	c := &Cache[V]{cfg: cfg, newValue: newValue, entries: make(map[string]*Entry[V])}
	err := os.MkdirAll(cfg.Dir, cfg.Mode)
	if err == nil {
		err = os.Chmod(cfg.Dir, cfg.Mode)
	}
	if err == nil {
		err = c.adoptAll()
	}
	if err != nil {
		return nil, fmt.Errorf("open cache: %w", err)
	}
	c.evict() // the limit may have changed
	return c, nil
}

// Len returns the number of entries.
func (c *Cache[V]) Len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.entries)
}

// Size returns the size of the entries that are complete.
func (c *Cache[V]) Size() (size int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.entries {
		size += e.size
	}
	return size
}

// Go runs f in the background. Wait waits for it.
func (c *Cache[V]) Go(f func()) { c.work.Go(f) }

// Wait waits for background work.
func (c *Cache[V]) Wait() { c.work.Wait() }

func (c *Cache[V]) adoptAll() error {
	boot, err := os.ReadFile(bootID)
	if err != nil {
		return err
	}
	bootPath := filepath.Join(c.cfg.Dir, bootFile)
	last, err := os.ReadFile(bootPath)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	names, err := os.ReadDir(c.cfg.Dir)
	if err != nil {
		return err
	}
	for _, e := range names {
		path := filepath.Join(c.cfg.Dir, e.Name())
		if path == bootPath || bytes.Equal(boot, last) && c.adopt(path) {
			continue
		}
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	return os.WriteFile(bootPath, boot, 0o600) //nolint:gosec // a fixed name in the caller's directory
}

// adopt adds a complete directory of a previous process.
func (c *Cache[V]) adopt(dir string) bool {
	info, err := os.Stat(dir)
	if err != nil || strings.HasSuffix(dir, removedSuffix) {
		return false
	}
	text, err := os.ReadFile(filepath.Join(dir, recordFile))
	r := record[V]{Value: c.newValue()}
	if err != nil || json.Unmarshal(text, &r) != nil || r.Key == "" || c.entries[r.Key] != nil {
		return false
	}
	c.entries[r.Key] = &Entry[V]{Value: r.Value, dir: dir, complete: true, key: r.Key, size: r.Size, used: info.ModTime()}
	return true
}

// Acquire returns the entry for key, which stays in the cache until it is released.
func (c *Cache[V]) Acquire(key string) *Entry[V] {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.entries[key]
	if e == nil {
		e = &Entry[V]{Value: c.newValue(), key: key}
		c.entries[key] = e
	}
	e.users++
	return e
}

// Release ends one use of an entry.
func (c *Cache[V]) Release(e *Entry[V]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e.users--
	e.used = time.Now()
	if e.complete {
		// Only the order of eviction by the next process depends on this.
		_ = os.Chtimes(e.dir, e.used, e.used)
	}
	switch {
	case e.users > 0:
		return
	case e.detached:
		c.discard(e)
	case !e.complete:
		c.discard(e)
		delete(c.entries, e.key)
	}
	c.evict()
}

// Users returns the number of uses of an entry.
func (c *Cache[V]) Users(e *Entry[V]) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return e.users
}

// Detach removes an entry from the cache, whose directory remains until its last use is released.
func (c *Cache[V]) Detach(e *Entry[V]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.detach(e)
}

func (c *Cache[V]) detach(e *Entry[V]) {
	if c.entries[e.key] == e {
		delete(c.entries, e.key)
	}
	e.detached = true
}

// Replace detaches an entry and returns a new one with the same key, in use and with the given
// value.
func (c *Cache[V]) Replace(e *Entry[V], value V) *Entry[V] {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.detach(e)
	next := &Entry[V]{Value: value, key: e.key, users: 1}
	c.entries[e.key] = next
	return next
}

// IsDetached reports whether an entry has been detached.
func (c *Cache[V]) IsDetached(e *Entry[V]) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return e.detached
}

// Path returns the path of a name in the entry's directory.
func (e *Entry[V]) Path(name string) string { return filepath.Join(e.dir, name) }

// Key returns the key of the entry.
func (e *Entry[V]) Key() string { return e.key }

// IsComplete reports whether the entry's directory is complete.
func (e *Entry[V]) IsComplete() bool { return e.complete }

// Create replaces the entry's directory by an empty one, which is incomplete.
func (c *Cache[V]) Create(e *Entry[V]) error {
	dir := filepath.Join(c.cfg.Dir, rand.Text())
	if err := os.Mkdir(dir, c.cfg.Mode); err != nil {
		return err
	}
	c.mu.Lock()
	c.discard(e)
	e.dir = dir
	c.mu.Unlock()
	return os.Chmod(dir, c.cfg.Mode)
}

// Invalidate makes a complete directory incomplete, so that it can be changed.
func (c *Cache[V]) Invalidate(e *Entry[V]) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := os.Remove(e.Path(recordFile)); err != nil {
		return err
	}
	e.complete, e.size = false, 0
	return nil
}

// Complete stores the entry's value and makes its directory complete. It evicts other entries if
// the cache exceeds its limit.
func (c *Cache[V]) Complete(e *Entry[V], size int64) error {
	text, err := json.Marshal(record[V]{e.key, size, e.Value})
	if err != nil {
		return err
	}
	part := e.Path(recordFile + ".part")
	if err := os.WriteFile(part, text, 0o600); err != nil {
		return err
	}
	if err := os.Rename(part, e.Path(recordFile)); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	e.complete, e.size = true, size
	c.evict()
	return nil
}

// Discard removes the entry's directory in the background, if there is one.
func (c *Cache[V]) Discard(e *Entry[V]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.discard(e)
}

// evict discards the least recently used entries while the cache exceeds its limit.
func (c *Cache[V]) evict() {
	var total int64
	for _, e := range c.entries {
		total += e.size
	}
	for total > c.cfg.Limit {
		var oldest *Entry[V]
		for _, e := range c.entries {
			if e.users == 0 && e.complete && (oldest == nil || e.used.Before(oldest.used)) {
				oldest = e
			}
		}
		if oldest == nil {
			return
		}
		total -= oldest.size
		c.discard(oldest)
		delete(c.entries, oldest.key)
	}
}

func (c *Cache[V]) discard(e *Entry[V]) {
	if e.dir == "" {
		return
	}
	removed := e.dir + removedSuffix
	err := os.Rename(e.dir, removed)
	e.dir, e.complete, e.size = "", false, 0
	c.work.Go(func() {
		if err := errors.Join(err, os.RemoveAll(removed)); err != nil {
			c.cfg.Log.Warn("cache entry not removed", "directory", removed, "error", err)
		}
	})
}
