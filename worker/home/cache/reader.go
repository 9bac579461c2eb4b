package cache

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
)

// Reader is one immutable version of a thread. It must not be used concurrently.
//
// Readers of a thread have a cache entry of their own, so that a reader does not pin the writer's
// entry to an old version. Readers of one version share it. A newer version replaces it in place,
// or in another directory while it is being read.
type Reader struct {
	cache *Cache
	entry *entry
	dir   string
}

// readers ends the keys of the entries for readers. No id of a thread contains it.
const readers = "/readers"

// Read returns the newest version of a thread, which is empty if there is no thread. It must be
// closed.
func (c *Cache) Read(ctx context.Context, org, thread string) (*Reader, error) {
	t, err := c.head(ctx, org, thread)
	if errors.Is(err, proto.ErrNotFound) {
		t, err = &proto.Thread{Org: org, ID: thread}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read thread %s: %w", thread, err)
	}
	e, dir, err := c.use(ctx, c.disk.Acquire(org+"/"+thread+readers), t)
	if err != nil {
		return nil, fmt.Errorf("read thread %s: %w", thread, err)
	}
	return &Reader{cache: c, entry: e, dir: dir}, nil
}

// MountPart returns a read-only mount, for a user and a group, of the directory that open opens below
// root, the root of the version. The caller closes it.
func (r *Reader) MountPart(uid, gid int, open func(root int) (dir int, err error)) (*os.File, error) {
	owner, err := r.cache.cfg.Owners.Get(uid, gid)
	if err != nil {
		return nil, err
	}
	root, err := unix.Open(r.dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a version: %w", err)
	}
	defer func() { _ = unix.Close(root) }()
	dir, err := open(root)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(dir) }()
	return owner.Mapped(dir)
}

// Close releases the version. No process of the jail may be left.
func (r *Reader) Close() {
	e := r.entry
	e.Value.lock <- struct{}{}
	e.Value.mounts--
	e.Value.unlock()
	r.cache.disk.Release(e)
}
