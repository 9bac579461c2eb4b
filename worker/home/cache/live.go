package cache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/worker/home"
)

// SaveLive stores the home of a running live sandbox as the thread's next version, and returns the number
// of the newest version. It stores nothing if that has the same files. The errors are those of Save.
//
// freeze calls read while no process changes the home, and returns an error if it did not keep them frozen
// until read returned. They are frozen only while the changes are read into a spool file. commit makes a
// commit, which may have been made if its context is done.
//
// The layer of the version replaces that of an earlier SaveLive: both lead from the version below the
// overlay, which records no deletions of files that only an earlier save has.
func (h *Home) SaveLive(
	ctx context.Context, freeze func(ctx context.Context, read func(ctx context.Context) error) error,
	commit func(ctx context.Context, c *proto.Commit) error,
) (version int64, err error) {
	if err = h.complete(ctx); err == nil {
		err = h.saveLive(ctx, freeze, commit)
	}
	if err != nil {
		return 0, fmt.Errorf("save the running thread %s: %w", h.req.Thread, err)
	}
	return h.current.Number(), nil
}

func (h *Home) saveLive(
	ctx context.Context, freeze func(ctx context.Context, read func(ctx context.Context) error) error,
	commit func(ctx context.Context, c *proto.Commit) error,
) (err error) {
	spool, err := h.cache.newSpool()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, spool.Close()) }()
	objects := &objectSpool{stored: h.objects, added: map[layer.Digest]spooledObject{}}
	if objects.file, err = h.cache.newSpool(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, objects.file.Close()) }()
	draft, err := h.cache.cfg.Versions.NewLayer(h.req.Org, spool)
	if err != nil {
		return err
	}
	var stats home.Stats
	err = freeze(ctx, func(ctx context.Context) (err error) {
		stats, err = h.overlay.Diff(ctx, draft, objects.store)
		return err
	})
	if err != nil {
		return diffError(err)
	}
	if unchanged, err := h.isUnchanged(draft, stats); unchanged || err != nil {
		return err
	}
	if err := objects.put(ctx, h.cache.putObject(h.req.Org)); err != nil {
		return err
	}
	c, err := h.commit(ctx, draft, stats)
	if err != nil {
		return err
	}
	next, err := h.current.Commit(c)
	if err != nil {
		return err
	}
	stored := make(map[layer.Digest]bool)
	for _, o := range stats.Objects {
		stored[o.Digest] = true
	}
	h.pending = func(ctx context.Context) error {
		err := commit(ctx, c)
		if err == nil {
			h.current, h.objects = next, stored
		}
		return err
	}
	return h.complete(ctx)
}

// complete makes a commit whose answer may have been lost. Making it twice is no error.
func (h *Home) complete(ctx context.Context) error {
	if h.pending == nil {
		return nil
	}
	err := h.pending(ctx)
	if err == nil || ctx.Err() == nil {
		h.pending = nil
	}
	return err
}

// objectSpool collects objects, so that they can be put into the store later.
type objectSpool struct {
	file *os.File
	size int64
	// stored are the objects of the newest version, whose layers protect them from garbage collection.
	stored map[layer.Digest]bool
	added  map[layer.Digest]spooledObject
}

// spooledObject is a part of an objectSpool's file.
type spooledObject struct{ offset, size int64 }

// store implements [home.Store].
func (s *objectSpool) store(ctx context.Context, digest layer.Digest, size int64, content io.ReaderAt) error {
	if _, ok := s.added[digest]; ok || s.stored[digest] {
		return nil
	}
	const step = 1 << 20
	for at := int64(0); at < size; at += step {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		part := io.NewSectionReader(content, at, min(step, size-at))
		if _, err := io.Copy(io.NewOffsetWriter(s.file, s.size+at), part); err != nil {
			return fmt.Errorf("spool an object: %w", err)
		}
	}
	s.added[digest] = spooledObject{s.size, size}
	s.size += size
	return nil
}

// put puts the objects into the store.
func (s *objectSpool) put(ctx context.Context, store home.Store) error {
	for digest, o := range s.added {
		if err := store(ctx, digest, o.size, io.NewSectionReader(s.file, o.offset, o.size)); err != nil {
			return err
		}
	}
	return nil
}
