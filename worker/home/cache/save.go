package cache

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/storage/thread"
	"github.com/bullpen-run/bullpen/storage/thread/layer"
	"github.com/bullpen-run/bullpen/worker/home"
)

// saved is what was stored of a home.
type saved struct {
	spool  *os.File // the layer
	layout layer.Layout
	head   *proto.Thread // as it is after the commit
}

// Save stores what the program changed, and gives the commit that makes it the thread's next version; nil where nothing has changed. Nothing
// of the jail may live any more. It is called once at most. A [*proto.LimitError], [*proto.AttributesError] or
// [*proto.DepthError] says that the home has become too large, or too deep.
func (h *Home) Save(ctx context.Context) (*proto.Commit, error) {
	c, err := h.save(ctx)
	if err != nil {
		return nil, fmt.Errorf("save thread %s: %w", h.job.ThreadID, err)
	}
	return c, nil
}

func (h *Home) save(ctx context.Context) (*proto.Commit, error) {
	err := h.mount.Close()
	h.mount = nil
	if err != nil {
		return nil, err
	}
	if h.lent != nil {
		if err := h.overlay.TakeBack(h.lent); err != nil {
			return nil, err
		}
	}
	spool, err := h.k.spool()
	if err != nil {
		return nil, err
	}
	sum := &digesting{to: spool, sum: sha256.New()}
	// The change is as large as its volume at most, and what it makes of the home is looked at below.
	stats, err := h.overlay.Diff(ctx, sum, noLimits, h.k.storeObject(h.job.Org))
	switch {
	case errors.Is(err, layer.ErrAttributes):
		err = &proto.AttributesError{Most: layer.MaxAttributes}
	case errors.Is(err, layer.ErrDepth):
		err = &proto.DepthError{Most: layer.MaxDepth}
	}
	if err != nil || stats.Unchanged && len(h.head.Staged) == 0 {
		return nil, errors.Join(err, spool.Close())
	}
	c, err := h.commit(ctx, spool, sum, stats)
	if err != nil {
		return nil, errors.Join(err, spool.Close())
	}
	next, err := h.head.Commit(c)
	if err != nil {
		return nil, errors.Join(err, spool.Close())
	}
	h.saved = &saved{spool: spool, layout: stats.Layout, head: next}
	// With the home's turn, until Close: the next execution waits for what becomes of it instead of fetching it.
	h.place.turn <- struct{}{}
	fault.Here(fault.AfterSaveBeforePending)
	return c, nil
}

// tooLarge gives the error about a home that has grown beyond what its sandbox allows; nil where it has not.
func (h *Home) tooLarge(grown home.Usage) *proto.LimitError {
	e := &proto.LimitError{Bytes: grown.Bytes, Files: grown.Files, MaxBytes: h.job.Sandbox.HomeBytes, MaxFiles: h.job.Sandbox.Inodes}
	if v := h.head.Version; v != nil {
		e.Bytes += v.Bytes
		e.Files += v.Files
	}
	if e.Bytes <= e.MaxBytes && e.Files <= e.MaxFiles {
		return nil
	}
	return e
}

// commit stores the layer and the manifest of the next version.
func (h *Home) commit(ctx context.Context, spool *os.File, sum *digesting, stats home.Stats) (*proto.Commit, error) {
	if e := h.tooLarge(stats.Grown); e != nil {
		return nil, e
	}
	attributes := stats.Grown.Attributes
	if v := h.head.Version; v != nil {
		attributes += v.Attributes
	}
	if attributes > layer.MaxAttributes {
		return nil, &proto.AttributesError{Most: layer.MaxAttributes}
	}
	number := h.head.Number() + 1
	made, err := h.k.putLayer(ctx, h.job.Org, number, spool, sum, stats)
	if err != nil {
		return nil, err
	}
	c := &proto.Commit{Fence: h.head.Fence, Version: proto.Version{
		Number: number, CreatedAt: time.Now().UTC(), Trace: h.job.TraceID, Bytes: stats.Grown.Bytes, Files: stats.Grown.Files,
		Attributes: stats.Grown.Attributes, Layers: []proto.Layer{made},
	}}
	for _, f := range h.head.Staged {
		c.Staged = append(c.Staged, f.Key)
	}
	whole := c.Version
	if v := h.head.Version; v != nil {
		whole.Bytes += v.Bytes
		whole.Files += v.Files
		whole.Attributes += v.Attributes
		whole.Layers = append(slices.Clone(v.Layers), made)
	}
	c.Version, err = h.k.cfg.Versions.WriteManifest(ctx, h.job.Org, h.job.ThreadID, whole, h.head.Version)
	c.Version.Layers = []proto.Layer{made}
	return c, err
}

// putLayer stores a layer.
func (k *Cache) putLayer(ctx context.Context, org string, version int64, spool *os.File, sum *digesting, stats home.Stats) (proto.Layer, error) {
	l := proto.Layer{
		Blob:    proto.Blob{Key: thread.LayerKey(org), Size: sum.size, Digest: thread.DigestName(home.Digest(sum.sum.Sum(nil)))},
		Version: version, Index: stats.Layout.Index, IndexDigest: thread.DigestName(stats.Layout.IndexDigest), Objects: int64(len(stats.Objects)),
	}
	return l, k.cfg.Versions.Blobs.Put(ctx, l.Blob, spool)
}

// storeObject stores the content of large files.
func (k *Cache) storeObject(org string) home.Store {
	return func(ctx context.Context, digest home.Digest, size int64, content io.ReaderAt) error {
		return k.cfg.Versions.PutObject(ctx, org, digest, size, content)
	}
}

// spool makes a file without a name, which is gone when it is closed.
func (k *Cache) spool() (*os.File, error) {
	f, err := os.OpenFile(k.cfg.Dir, os.O_RDWR|unix.O_TMPFILE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make room for a layer: %w", err)
	}
	return f, nil
}

// digesting counts and digests what is written.
type digesting struct {
	to   io.Writer
	sum  hash.Hash
	size int64
}

func (d *digesting) Write(p []byte) (int, error) {
	n, err := d.to.Write(p)
	d.sum.Write(p[:n])
	d.size += int64(n)
	return n, err
}
