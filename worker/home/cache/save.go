package cache

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/worker/home"
)

// saved is a change that was stored.
type saved struct {
	spool *os.File
	layer layer.Draft
	head  *proto.Thread // after the commit
}

// Save stores the program's changes and returns the commit that makes them the thread's next
// version, or nil if there are none. No process of the jail may be left. Save must be called at
// most once, after the last call of SaveLive. The error is a [*proto.LimitError], a [*proto.AttributesError], a
// [*proto.DepthError] or a [*proto.FileError] if the home exceeds a limit.
func (h *Home) Save(ctx context.Context) (*proto.Commit, error) {
	c, err := h.save(ctx)
	if err != nil {
		return nil, fmt.Errorf("save thread %s: %w", h.req.Thread, err)
	}
	return c, nil
}

func (h *Home) save(ctx context.Context) (*proto.Commit, error) {
	err := h.mount.Close()
	h.mount = nil
	if err != nil {
		return nil, err
	}
	if h.program != nil {
		if err := h.overlay.RemoveTemporary(h.program); err != nil {
			return nil, err
		}
	}
	if err := h.complete(ctx); err != nil {
		return nil, err
	}
	spool, err := h.cache.newSpool()
	if err != nil {
		return nil, err
	}
	c, err := h.saveTo(ctx, spool)
	if h.saved == nil {
		err = errors.Join(err, spool.Close())
	}
	if err != nil || c == nil {
		return nil, err
	}
	// The entry stays locked until Close has updated it, so that the next execution need not fetch
	// the version.
	h.entry.Value.lock <- struct{}{}
	fault.Here(fault.AfterSaveBeforePending)
	return c, nil
}

// saveTo sets h.saved if it returns a commit.
func (h *Home) saveTo(ctx context.Context, spool *os.File) (*proto.Commit, error) {
	draft, err := h.cache.cfg.Versions.NewLayer(h.req.Org, spool)
	if err != nil {
		return nil, err
	}
	stats, err := h.overlay.Diff(ctx, draft, h.cache.putObject(h.req.Org))
	if err != nil {
		return nil, diffError(err)
	}
	if unchanged, err := h.isUnchanged(draft, stats); unchanged || err != nil {
		return nil, err
	}
	c, err := h.commit(ctx, draft, stats)
	if err != nil {
		return nil, err
	}
	next, err := h.current.Commit(c)
	if err != nil {
		return nil, err
	}
	h.saved = &saved{spool: spool, layer: draft, head: next}
	return c, nil
}

// diffError returns the error of a diff in the form of this package.
func diffError(err error) error {
	switch {
	case errors.Is(err, layer.ErrAttributes):
		return &proto.AttributesError{Most: layer.MaxAttributes}
	case errors.Is(err, layer.ErrDepth):
		return &proto.DepthError{Most: layer.MaxDepth}
	default:
		return err
	}
}

// isUnchanged reports whether a layer leads to the newest version, and there are no staged files to add.
func (h *Home) isUnchanged(draft layer.Draft, stats home.Stats) (bool, error) {
	last := h.lastSave()
	if last == nil {
		return stats.Unchanged && len(h.head.Staged) == 0, nil
	}
	digest, err := draft.Digest()
	return digest == last.Digest, err
}

// lastSave returns the layer of the last save of the running sandbox, nil if there is none.
func (h *Home) lastSave() *proto.Layer {
	if h.current == h.head {
		return nil
	}
	return &h.current.Version.Layers[len(h.current.Version.Layers)-1]
}

// commit stores the layer and the manifest of the next version.
func (h *Home) commit(ctx context.Context, draft layer.Draft, stats home.Stats) (*proto.Commit, error) {
	c := &proto.Commit{Fence: h.head.Fence}
	whole := proto.Version{
		Number: h.current.Number() + 1, CreatedAt: time.Now().UTC(), Trace: h.req.Trace, Bytes: stats.Growth.Bytes,
		Files: stats.Growth.Files, Attributes: stats.Growth.Attributes,
	}
	if base := h.head.Version; base != nil {
		whole.Bytes += base.Bytes
		whole.Files += base.Files
		whole.Attributes += base.Attributes
		whole.Layers = slices.Clone(base.Layers)
	}
	if last := h.lastSave(); last != nil {
		c.Replaces, whole.Supersedes = last.Key, h.current.Version.Supersedes+1
	}
	if most := h.req.Most; whole.Bytes > most.Bytes || whole.Files > most.Files {
		return nil, &proto.LimitError{Bytes: whole.Bytes, Files: whole.Files, MaxBytes: most.Bytes, MaxFiles: most.Files}
	}
	if whole.Attributes > layer.MaxAttributes {
		return nil, &proto.AttributesError{Most: layer.MaxAttributes}
	}
	stored, err := draft.Store(ctx, whole.Number, len(stats.Objects))
	if err != nil {
		return nil, err
	}
	whole.Layers = append(whole.Layers, stored)
	for _, f := range h.current.Staged {
		c.Staged = append(c.Staged, f.Key)
	}
	c.Version, err = h.cache.cfg.Versions.WriteManifest(ctx, h.req.Org, h.req.Thread, whole, h.current.Version)
	c.Version.Layers = []proto.Layer{stored}
	return c, err
}

// newSpool creates a file without a name, which is deleted when it is closed.
func (c *Cache) newSpool() (*os.File, error) {
	f, err := os.OpenFile(c.cfg.Dir, os.O_RDWR|unix.O_TMPFILE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("create a spool file: %w", err)
	}
	return f, nil
}
