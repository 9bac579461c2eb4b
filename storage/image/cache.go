package image

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Source gives images by their digest.
type Source interface {
	// Fetch opens an image in its normal form. Its error is [proto.ErrNotFound] where there is none.
	Fetch(ctx context.Context, digest string) (io.ReadCloser, error)
}

// The names in a cache's directory: each image in a directory of the 64 digits of its digest, what is being made or removed beside
// them.
const (
	workPrefix = "work-"
	rootName   = "root"
	aboutName  = "image.json"
	bootName   = "boot"
	// bootID names this run of the kernel.
	bootID = "/proc/sys/kernel/random/boot_id"
)

// Cache keeps images unpacked in a directory, so that a worker fetches and unpacks each once. An image that is there is whole: it is
// unpacked beside its place, checked against its digest, and then moved. It is safe for concurrent use.
type Cache struct {
	dir    string
	source Source
	most   int64
	limits Limits
	log    *slog.Logger

	mu     sync.Mutex
	images map[string]*cached // by digest
	work   sync.WaitGroup     // fetches and removals
}

// Unpacked is an image in a cache. All who have it share it, and change nothing.
type Unpacked struct {
	Root      string                    `json:"-"`         // the directory of its files
	Languages map[proto.Language]string `json:"languages"` // the absolute path of each interpreter, in the image
	Env       map[string]string         `json:"env"`       // the image's own environment
	Size      int64                     `json:"size"`      // bytes on the disk, or about that
}

// cached is an image that is there, or is being fetched.
type cached struct {
	image  *Unpacked // nil until it is there
	users  int       // those who have it and those who wait for it
	used   time.Time
	ready  chan struct{} // closed when it is there or err says why not
	err    error
	cancel context.CancelFunc // of the fetch
}

// Open opens a cache in dir, which it makes, and which is used by one process at a time. Every user may pass through dir, so that jails
// reach what is in it; the directories above are the caller's. Unused images are removed, those first that were not used for longest,
// while all together take more than most bytes; those in use may take more than that.
func Open(dir string, source Source, most int64, log *slog.Logger) (*Cache, error) {
	c := &Cache{dir: dir, source: source, most: most, limits: DefaultLimits(), log: log, images: map[string]*cached{}}
	err := os.MkdirAll(dir, dirMode)
	if err == nil {
		err = os.Chmod(dir, dirMode)
	}
	if err == nil {
		err = c.sweep()
	}
	if err != nil {
		return nil, fmt.Errorf("open the cache of images: %w", err)
	}
	c.evict() // the bound may be another than it was
	return c, nil
}

// Close ends what is being fetched and removed, and waits for that. What is in the cache stays for the next one.
func (c *Cache) Close() {
	c.mu.Lock()
	for _, i := range c.images {
		i.cancel()
	}
	c.mu.Unlock()
	c.work.Wait()
}

// sweep removes what a process left that was killed, and, after a restart of the machine, everything: files are not synced to disk one by
// one, and a power failure may have emptied some.
func (c *Cache) sweep() error {
	boot, err := os.ReadFile(bootID)
	if err != nil {
		return err
	}
	last, err := os.ReadFile(filepath.Join(c.dir, bootName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() == bootName {
			continue
		}
		if bytes.Equal(boot, last) && c.adopt(e.Name()) {
			continue
		}
		if err := os.RemoveAll(filepath.Join(c.dir, e.Name())); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(c.dir, bootName), boot, fileMode) //nolint:gosec // no secret
}

// adopt takes in an image that is there.
func (c *Cache) adopt(name string) bool {
	digest := digestPrefix + name
	if !proto.ValidImageDigest(digest) {
		return false
	}
	at := filepath.Join(c.dir, name)
	text, err := os.ReadFile(filepath.Join(at, aboutName))
	if err != nil {
		return false
	}
	img := &Unpacked{}
	info, err := os.Stat(at)
	if err != nil || json.Unmarshal(text, img) != nil {
		return false
	}
	img.Root = filepath.Join(at, rootName)
	ready := make(chan struct{})
	close(ready)
	c.images[digest] = &cached{image: img, used: info.ModTime(), ready: ready, cancel: func() {}}
	return true
}

// Get gives an image, fetching and unpacking it if it is not there, and keeps it there until release is called. The files in it belong to this process's user and cannot be written to by others; its links lead where they would if the directory were
// the root, so that nobody may follow them from outside. The errors are [proto.ErrNotFound] where there is no such image, [ErrForm] and
// [ErrTooLarge] where it is not one to unpack, and those of the source and the disk; they are not remembered. Those who want an image
// at the same time fetch it once; the fetch goes on when they no longer wait.
func (c *Cache) Get(ctx context.Context, digest string) (img *Unpacked, release func(), err error) {
	if !proto.ValidImageDigest(digest) {
		return nil, nil, fmt.Errorf("image digest %q: it is not of the form sha256:…", digest)
	}
	i := c.take(ctx, digest)
	release = sync.OnceFunc(func() { c.release(i) })
	select {
	case <-i.ready:
		err = i.err
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		release()
		return nil, nil, fmt.Errorf("get image %s: %w", digest, err)
	}
	return i.image, release, nil
}

// take gives the image as one more user of it, and begins to fetch it if nobody has.
func (c *Cache) take(ctx context.Context, digest string) *cached {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := c.images[digest]; i != nil {
		i.users++
		return i
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	i := &cached{users: 1, ready: make(chan struct{}), cancel: cancel}
	c.images[digest] = i
	c.work.Go(func() {
		defer cancel()
		img, err := c.fetch(ctx, digest)
		c.mu.Lock()
		defer c.mu.Unlock()
		i.image, i.err, i.used = img, err, time.Now()
		if err != nil {
			delete(c.images, digest)
		}
		c.evict() // before anybody has it, so that the bound holds for what they see
		close(i.ready)
	})
	return i
}

func (c *Cache) release(i *cached) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i.users--
	if i.image == nil {
		return
	}
	i.used = time.Now()
	// For the next process. Where it fails, that one may remove another image first.
	_ = os.Chtimes(filepath.Dir(i.image.Root), i.used, i.used)
	c.evict()
}

// fetch gets an image and puts it into its place.
func (c *Cache) fetch(ctx context.Context, digest string) (*Unpacked, error) {
	began := time.Now()
	work, err := os.MkdirTemp(c.dir, workPrefix)
	if err != nil {
		return nil, err
	}
	at := filepath.Join(c.dir, hexOf(digest))
	img, err := c.unpack(ctx, digest, work)
	if err == nil {
		err = os.Rename(work, at)
	}
	if err != nil {
		c.removeAll(work)
		return nil, errors.Join(err, context.Cause(ctx))
	}
	img.Root = filepath.Join(at, rootName)
	c.log.Info("image unpacked", "digest", digest, "bytes", img.Size, "took", time.Since(began))
	return img, nil
}

func (c *Cache) unpack(ctx context.Context, digest, work string) (*Unpacked, error) {
	root := filepath.Join(work, rootName)
	if err := errors.Join(os.Chmod(work, dirMode), os.Mkdir(root, 0o700)); err != nil {
		return nil, err
	}
	from, err := c.source.Fetch(ctx, digest)
	if err != nil {
		return nil, err
	}
	found, size, err := Unpack(from, root, c.limits)
	if err := errors.Join(err, from.Close()); err != nil {
		return nil, err
	}
	if found.Digest != digest {
		return nil, fmt.Errorf("%w: what came has the digest %s", ErrForm, found.Digest)
	}
	img := &Unpacked{Languages: found.Languages, Env: found.Env, Size: size}
	text, err := json.Marshal(img)
	if err != nil {
		return nil, err
	}
	return img, os.WriteFile(filepath.Join(work, aboutName), text, fileMode)
}

func hexOf(digest string) string { return strings.TrimPrefix(digest, digestPrefix) }

// evict removes images that nobody uses while there is too much. It is called with mu held.
func (c *Cache) evict() {
	total := int64(0)
	for _, i := range c.images {
		if i.image != nil {
			total += i.image.Size
		}
	}
	for total > c.most {
		digest := ""
		for d, i := range c.images {
			if i.image != nil && i.users == 0 && (digest == "" || i.used.Before(c.images[digest].used)) {
				digest = d
			}
		}
		if digest == "" || !c.discard(digest) {
			return
		}
		total -= c.images[digest].image.Size
		delete(c.images, digest)
	}
}

// discard moves an image out of its place, and has it removed.
func (c *Cache) discard(digest string) bool {
	away, err := os.MkdirTemp(c.dir, workPrefix)
	if err == nil {
		err = os.Rename(filepath.Join(c.dir, hexOf(digest)), filepath.Join(away, rootName))
	}
	if err != nil {
		c.log.Warn("an unused image could not be removed", "digest", digest, "error", err)
		return false
	}
	c.work.Go(func() { c.removeAll(away) })
	return true
}

func (c *Cache) removeAll(dir string) {
	if err := os.RemoveAll(dir); err != nil {
		c.log.Warn("what is left of an image could not be removed", "directory", dir, "error", err)
	}
}
