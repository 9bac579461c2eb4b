package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/storage/image"
	"github.com/bullpen-run/bullpen/worker"
)

const (
	// imageCacheBytes bounds the disk usage of the cache, as far as images are not in use.
	imageCacheBytes = 20 << 30
	// maxImageCaches bounds the workers of a machine with caches in one directory.
	maxImageCaches = 256
)

// imageCache is a worker's cache of images, opened with the first image. Each worker of a machine
// has its own numbered directory. It may take over the directory of a worker that has ended.
type imageCache struct {
	dir    string
	source image.Source
	log    *slog.Logger

	mu    sync.Mutex
	lock  *os.File
	cache *image.Cache
}

// Get implements [worker.Images].
func (c *imageCache) Get(ctx context.Context, digest string) (worker.Image, func(), error) {
	cache, err := c.open()
	if err != nil {
		return worker.Image{}, nil, err
	}
	img, release, err := cache.Get(ctx, digest)
	if err != nil {
		return worker.Image{}, nil, fmt.Errorf("prepare the image: %w", err)
	}
	return worker.Image{Root: img.Root, Languages: img.Languages, Env: img.Env}, release, nil
}

func (c *imageCache) open() (_ *image.Cache, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cache != nil {
		return c.cache, nil
	}
	// Jails access images as other users.
	if err := os.MkdirAll(c.dir, 0o755); err != nil { //nolint:gosec // images are no secrets, and jails must pass
		return nil, fmt.Errorf("create the directory of images: %w: choose another with --image-dir", err)
	}
	number, lock, err := lockNumber(c.dir)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(c.dir, strconv.Itoa(number))
	cache, err := image.Open(dir, c.source, imageCacheBytes, c.log)
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	if err := spreadImages(dir); err != nil {
		c.log.Debug("images are not spread over the disk", "directory", dir, "error", err)
	}
	c.lock, c.cache = lock, cache
	return cache, nil
}

// topDir is EXT4_TOPDIR_FL.
const topDir = 0x20000

// spreadImages makes ext4 place each image of a cache in another part of the disk. Without a
// journal, ext4 avoids the inodes of a deleted file for minutes and searches past them one by one,
// which makes unpacking an image after the removal of another take six times as much processor
// time. Other file systems return an error, and do not need it.
func spreadImages(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	flags, err := unix.IoctlGetInt(int(d.Fd()), unix.FS_IOC_GETFLAGS)
	if err != nil {
		return err
	}
	return unix.IoctlSetPointerInt(int(d.Fd()), unix.FS_IOC_SETFLAGS, flags|topDir)
}

// lockNumber locks the first number that no other worker has. Closing the file unlocks it.
func lockNumber(dir string) (int, *os.File, error) {
	for n := range maxImageCaches {
		lock, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(n)+".lock"), os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return 0, nil, fmt.Errorf("lock a directory of %s: %w", dir, err)
		}
		err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return n, lock, nil
		}
		if err = errors.Join(err, lock.Close()); !errors.Is(err, syscall.EWOULDBLOCK) {
			return 0, nil, fmt.Errorf("lock a directory of %s: %w", dir, err)
		}
	}
	return 0, nil, fmt.Errorf("%d workers have directories in %s: choose another one", maxImageCaches, dir)
}

// count returns the number of images in the cache, excluding directories that this worker has not
// taken over yet.
func (c *imageCache) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cache == nil {
		return 0
	}
	return c.cache.Len()
}

// stats returns the figures of the cache, zero before the first image.
func (c *imageCache) stats() image.CacheStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cache == nil {
		return image.CacheStats{}
	}
	return c.cache.Stats()
}

func (c *imageCache) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cache == nil {
		return nil
	}
	c.cache.Close()
	return c.lock.Close()
}
