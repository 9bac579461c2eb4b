package cache

import (
	"context"
	"errors"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/worker/home"
)

const (
	// maxChain is the number of layers above which a version is compacted.
	maxChain = 48
	// urgentChain is the number of layers from which an execution waits for the compaction.
	urgentChain = 256
	// maxWaste is the size of superfluous layers in bytes that never triggers a compaction.
	maxWaste = 16 << 20
	// maxEntryBytes is the approximate maximal size of a file in an index.
	maxEntryBytes = layer.MaxName + layer.MaxXattrs + layer.MaxTarget
)

// needsCompaction reports whether the layers of a version should be replaced by one: if there are
// more than 48, or if they take 16 MiB more than twice the maximal size of the home as a single
// layer. A single layer therefore never needs compaction, whatever names and attributes the home
// has.
func needsCompaction(version *proto.Version) bool {
	var size int64
	for i := range version.Layers {
		size += version.Layers[i].Size
	}
	return len(version.Layers) > maxChain || size > 2*(version.Bytes+version.Files*maxEntryBytes)+maxWaste
}

// compact replaces the layers of the version just committed by a single one if necessary. It stops
// when the next execution needs the home.
func (c *Cache) compact(h *Home) {
	v := h.saved.head.Version
	if !needsCompaction(v) || c.drain.Err() != nil {
		return
	}
	ctx, cancel := context.WithCancel(c.drain)
	defer cancel()
	e := h.entry
	e.Value.setCompaction(cancel)
	defer e.Value.setCompaction(nil)
	if c.disk.Users(e) > 1 && len(v.Layers) < urgentChain {
		return
	}
	if err := e.Value.acquireLock(ctx); err != nil {
		return
	}
	defer e.Value.unlock()
	if e.Value.version != versionOf(v) {
		return
	}
	full, err := c.putFull(ctx, h.req.Org, v.Number, e.Path(homeName))
	if err == nil {
		err = c.cfg.Heads.Compact(ctx, h.req.Org, h.req.Thread, v.Layers, full)
	}
	if err != nil && ctx.Err() == nil && !errors.Is(err, proto.ErrConflict) {
		c.cfg.Log.Warn("compaction failed", "org", h.req.Org, "thread", h.req.Thread, "layers", len(v.Layers), "error", err)
	}
}

// putFull stores a directory as a single layer.
func (c *Cache) putFull(ctx context.Context, org string, number int64, dir string) (proto.Layer, error) {
	spool, err := c.newSpool()
	if err != nil {
		return proto.Layer{}, err
	}
	defer func() { _ = spool.Close() }()
	draft, err := c.cfg.Versions.NewLayer(org, spool)
	if err != nil {
		return proto.Layer{}, err
	}
	stats, err := home.Full(ctx, dir, draft, c.putObject(org))
	if err != nil {
		return proto.Layer{}, err
	}
	return draft.Store(ctx, number, len(stats.Objects))
}

func (h *cachedHome) setCompaction(cancel context.CancelFunc) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.cancelCompaction = cancel
}

// interruptCompaction stops a compaction that delays the next execution, unless it is urgent.
func interruptCompaction(e *entry, t *proto.Thread) {
	if t.Version != nil && len(t.Version.Layers) >= urgentChain {
		return
	}
	e.Value.mu.Lock()
	defer e.Value.mu.Unlock()
	if cancel := e.Value.cancelCompaction; cancel != nil {
		cancel()
	}
}
