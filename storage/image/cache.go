package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/diskcache"
)

// Source opens images by digest.
type Source interface {
	// Fetch opens an image in the normal form. It returns [proto.ErrNotFound] if the image does not
	// exist.
	Fetch(ctx context.Context, digest string) (io.ReadCloser, error)
}

// rootName is the directory of an image's files in the directory of its entry.
const rootName = "root"

// Cache caches unpacked images on disk, so that a worker fetches and unpacks each image once. Only
// images whose digest has been verified are available. It is safe for concurrent use.
type Cache struct {
	source Source
	log    *slog.Logger
	disk   *diskcache.Cache[*cachedImage]
	uses   atomic.Int64
	misses atomic.Int64
	closed context.Context // done when fetches must end
	stop   context.CancelFunc
}

// Unpacked is an image in a cache. Its users share it and must not modify it.
type Unpacked struct {
	Root      string                    `json:"-"`         // the directory of its files
	Languages map[proto.Language]string `json:"languages"` // the absolute path of each interpreter in the image
	Env       map[string]string         `json:"env"`       // the image's environment
	Size      int64                     `json:"size"`      // approximate size on disk in bytes
}

// cachedImage is the state of an entry.
type cachedImage struct {
	Unpacked
	fetch sync.Once
	ready chan struct{} // closed once the image is available or err is set
	err   error
}

func newCachedImage() *cachedImage { return &cachedImage{ready: make(chan struct{})} }

// Open opens a cache in dir, creating it if necessary. Only one process may use dir at a time.
// Every user can read the images in dir; the caller must make its parent directories accessible.
// The least recently used images are removed while all images exceed limit bytes, except for those
// in use.
func Open(dir string, source Source, limit int64, log *slog.Logger) (*Cache, error) {
	disk, err := diskcache.Open(diskcache.Config{Dir: dir, Mode: dirMode, Limit: limit, Log: log}, newCachedImage)
	if err != nil {
		return nil, fmt.Errorf("open the cache of images: %w", err)
	}
	c := &Cache{source: source, log: log, disk: disk}
	c.closed, c.stop = context.WithCancel(context.Background())
	return c, nil
}

// Len returns the number of images in the cache.
func (c *Cache) Len() int { return c.disk.Len() }

// CacheStats are figures of a cache since it was opened.
type CacheStats struct {
	Bytes        int64 // of the images on disk, approximately
	Hits, Misses int64 // uses that did not need a fetch, or did
}

// Stats returns the figures of the cache.
func (c *Cache) Stats() CacheStats {
	misses := c.misses.Load() // before uses, so that Hits is not negative
	return CacheStats{Bytes: c.disk.Size(), Hits: c.uses.Load() - misses, Misses: misses}
}

// Close cancels fetches and waits for background work. Cached images stay for the next process.
func (c *Cache) Close() {
	c.stop()
	c.disk.Wait()
}

// Get returns an image, which it fetches and unpacks if necessary. The image remains available
// until release is called. Its files belong to the user of this process, and no other user can
// modify them. Its symlinks are relative to its own root and must not be followed from outside.
// Concurrent calls share one fetch, which continues even if all callers give up.
// Errors are not cached. They wrap [proto.ErrNotFound] if the image does not exist, and [ErrForm]
// or [ErrTooLarge] if it is invalid.
func (c *Cache) Get(ctx context.Context, digest string) (img *Unpacked, release func(), err error) {
	if !proto.ValidImageDigest(digest) {
		return nil, nil, fmt.Errorf("image digest %q: it is not of the form sha256:…", digest)
	}
	c.uses.Add(1)
	e := c.disk.Acquire(digest)
	release = sync.OnceFunc(func() { c.disk.Release(e) })
	e.Value.fetch.Do(func() { c.startFetch(ctx, e, digest) })
	select {
	case <-e.Value.ready:
		err = e.Value.err
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		release()
		return nil, nil, fmt.Errorf("get image %s: %w", digest, err)
	}
	return &e.Value.Unpacked, release, nil
}

// startFetch makes an entry's image available in the background, unless a previous process left it.
func (c *Cache) startFetch(ctx context.Context, e *diskcache.Entry[*cachedImage], digest string) {
	if e.IsComplete() {
		e.Value.Root = e.Path(rootName)
		close(e.Value.ready)
		return
	}
	c.misses.Add(1)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	detach := context.AfterFunc(c.closed, cancel)
	c.disk.Acquire(digest) // the fetch itself uses the entry
	c.disk.Go(func() {
		defer close(e.Value.ready)
		defer c.disk.Release(e)
		defer cancel()
		defer detach()
		if err := c.fetch(ctx, e, digest); err != nil {
			e.Value.err = errors.Join(err, context.Cause(ctx))
			c.disk.Discard(e)
			c.disk.Detach(e)
		}
	})
}

func (c *Cache) fetch(ctx context.Context, e *diskcache.Entry[*cachedImage], digest string) error {
	began := time.Now()
	if err := c.disk.Create(e); err != nil {
		return err
	}
	img := &e.Value.Unpacked
	img.Root = e.Path(rootName)
	if err := os.Mkdir(img.Root, 0o700); err != nil {
		return err
	}
	r, err := c.source.Fetch(ctx, digest)
	if err != nil {
		return err
	}
	found, size, err := Unpack(r, img.Root, DefaultLimits())
	if err := errors.Join(err, r.Close()); err != nil {
		return err
	}
	if found.Digest != digest {
		return fmt.Errorf("%w: the fetched image has digest %s", ErrForm, found.Digest)
	}
	img.Languages, img.Env, img.Size = found.Languages, found.Env, size
	if err := c.disk.Complete(e, size); err != nil {
		return err
	}
	c.log.Info("image unpacked", "digest", digest, "bytes", size, "took", time.Since(began))
	return nil
}
