// Package cache provides executions with the homes of their threads. It caches the newest version
// of recently used threads on disk, so that their homes need not be fetched, and stores an
// execution's changes as the next version.
//
// The directory of a version is the lower directory of the overlays on it, and is immutable while
// there are any. When a thread has a newer version, the directory is updated in time proportional
// to the change. It is marked incomplete meanwhile, so that a killed process does not leave a
// broken version.
package cache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/diskcache"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/worker/home"
)

// Heads stores the heads of threads.
type Heads interface {
	// Get returns the current head. It returns [proto.ErrNotFound] if the thread does not exist.
	Get(ctx context.Context, org, id string) (*proto.Thread, error)
	// Compact replaces the first layers of the newest version by an equivalent one. It returns
	// [proto.ErrConflict] if old are not its first layers.
	Compact(ctx context.Context, org, id string, old []proto.Layer, full proto.Layer) error
}

// Versions stores the versions of threads.
type Versions interface {
	// Layers opens layers one after another. Each reader is valid until the next one is yielded.
	Layers(ctx context.Context, org string, layers []proto.Layer) iter.Seq2[layer.Reader, error]
	// NewLayer returns a new layer that is collected in spool, an empty file.
	NewLayer(org string, spool *os.File) (layer.Draft, error)
	OpenObject(ctx context.Context, org string, digest layer.Digest, size int64) (io.ReadCloser, error)
	PutObject(ctx context.Context, org string, digest layer.Digest, size int64, content io.ReaderAt) error
	OpenStaged(ctx context.Context, f proto.StagedFile) (io.ReadCloser, error)
	// WriteManifest stores the manifest of a version, whose layers are stored already, and returns
	// the version with a reference to it. previous is nil for the first version.
	WriteManifest(ctx context.Context, org, thread string, version proto.Version, previous *proto.Version) (
		proto.Version, error)
}

const (
	emptyName = "empty" // lower directory of new threads, in Config.Dir
	homeName  = "home"  // lower directory in the directory of an entry
	// blockSize is the approximate minimal size of a file on disk in bytes.
	blockSize = 4096
	dirMode   = 0o700
)

// Config configures a Cache.
type Config struct {
	// Dir is created if necessary. One process at a time may use it. Its file system must support
	// file handles and id-mapped mounts.
	Dir      string
	Limit    int64 // total size of unused homes in bytes
	Versions Versions
	Heads    Heads
	Owners   *home.Owners
	Log      *slog.Logger
}

// Cache caches homes. It is safe for concurrent use.
type Cache struct {
	cfg   Config
	disk  *diskcache.Cache[*cachedHome]
	drain context.Context // done when compactions must end
	stop  context.CancelFunc
}

// entry is the cached home of a thread.
type entry = diskcache.Entry[*cachedHome]

// cachedHome is the state of an entry. The lock protects the other fields and the entry's
// directory.
type cachedHome struct {
	version
	lock   chan struct{} // holds an element while locked
	mounts int           // homes on the directory

	mu               sync.Mutex
	cancelCompaction context.CancelFunc // nil if none is running
}

// version identifies the version in a directory. Number 0 means none.
type version struct {
	Number int64  `json:"number"`
	Digest string `json:"digest"` // of the manifest
}

func newCachedHome() *cachedHome { return &cachedHome{lock: make(chan struct{}, 1)} }

func versionOf(v *proto.Version) version {
	if v == nil {
		return version{}
	}
	return version{Number: v.Number, Digest: v.Manifest.Digest}
}

// diskSize returns the approximate size of a version on disk in bytes.
func diskSize(v *proto.Version) int64 { return v.Bytes + v.Files*blockSize }

// Open opens a cache.
func Open(cfg Config) (*Cache, error) {
	disk, err := diskcache.Open(diskcache.Config{Dir: cfg.Dir, Mode: dirMode, Limit: cfg.Limit, Log: cfg.Log},
		newCachedHome)
	if err == nil {
		err = os.Mkdir(filepath.Join(cfg.Dir, emptyName), 0o755) //nolint:gosec // the metadata of an empty home
	}
	if err != nil {
		return nil, fmt.Errorf("open the cache of homes: %w", err)
	}
	c := &Cache{cfg: cfg, disk: disk}
	c.drain, c.stop = context.WithCancel(context.Background())
	return c, nil
}

// Len returns the number of homes in the cache.
func (c *Cache) Len() int { return c.disk.Len() }

// Close stops background work and waits for it. All homes must have been closed. Cached homes stay
// for the next process.
func (c *Cache) Close() error {
	c.stop()
	c.disk.Wait()
	return nil
}

// acquireLock locks a home. It returns the cause of ctx if that is done first.
func (h *cachedHome) acquireLock(ctx context.Context) error {
	select {
	case h.lock <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (h *cachedHome) unlock() { <-h.lock }

// prepare makes the newest version of a thread available and returns its entry, which is a new one
// if another version is still mounted. The entry must be locked, and so is the returned one.
func (c *Cache) prepare(ctx context.Context, e *entry, t *proto.Thread) (*entry, error) {
	if e.Value.version == versionOf(t.Version) {
		return e, nil
	}
	if e.Value.mounts > 0 {
		next := newCachedHome()
		next.lock <- struct{}{}
		old := e
		e = c.disk.Replace(old, next)
		old.Value.unlock()
		c.disk.Release(old)
	}
	if t.Version == nil { // the directory belongs to a removed thread of the same name
		c.discard(e)
		return e, nil
	}
	began := time.Now()
	err := c.restore(ctx, e, t)
	if errors.Is(err, proto.ErrCorrupt) {
		// The data may have been corrupted in transit. The second attempt starts from an empty
		// directory, since the first one may have applied a part of it.
		c.cfg.Log.Warn("corrupt home fetched again", "org", t.Org, "thread", t.ID, "error", err)
		err = c.restore(ctx, e, t)
	}
	if err == nil {
		c.cfg.Log.Debug("home restored", "org", t.Org, "thread", t.ID, "version", t.Version.Number, "took", time.Since(began))
	}
	return e, err
}

func (c *Cache) discard(e *entry) {
	c.disk.Discard(e)
	e.Value.version = version{}
}

// restore updates the directory to the newest version if it has an earlier version of the thread
// whose layers the newest one has, and otherwise creates it. After an error there is none.
func (c *Cache) restore(ctx context.Context, e *entry, t *proto.Thread) error {
	current := e.Value.version
	layers := t.Version.Layers
	known := slices.ContainsFunc(t.History, func(v proto.Version) bool { return versionOf(&v) == current })
	if known && !t.Superseded(current.Number) {
		layers = slices.DeleteFunc(slices.Clone(layers), func(l proto.Layer) bool { return l.Version <= current.Number })
	} else {
		c.discard(e)
	}
	return c.change(e, t.Version, func(dir string) error {
		for in, err := range c.cfg.Versions.Layers(ctx, t.Org, layers) {
			if err == nil {
				err = home.Apply(ctx, dir, in, c.openObject(t.Org))
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// change calls apply to turn an entry's directory into a version, creating it if necessary. After
// an error there is no directory.
func (c *Cache) change(e *entry, v *proto.Version, apply func(dir string) error) error {
	var err error
	if e.Value.Number > 0 {
		err = c.disk.Invalidate(e)
	} else if err = c.disk.Create(e); err == nil {
		err = os.Mkdir(e.Path(homeName), dirMode)
	}
	e.Value.version = version{}
	if err == nil {
		err = apply(e.Path(homeName))
	}
	if err == nil {
		e.Value.version = versionOf(v)
		err = c.disk.Complete(e, diskSize(v))
	}
	if err != nil {
		c.discard(e)
	}
	return err
}

func (c *Cache) openObject(org string) home.Fetch {
	return func(ctx context.Context, digest layer.Digest, size int64) (io.ReadCloser, error) {
		return c.cfg.Versions.OpenObject(ctx, org, digest, size)
	}
}

func (c *Cache) putObject(org string) home.Store {
	return func(ctx context.Context, digest layer.Digest, size int64, content io.ReaderAt) error {
		return c.cfg.Versions.PutObject(ctx, org, digest, size, content)
	}
}
