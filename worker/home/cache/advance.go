package cache

import (
	"context"

	"github.com/bullpen-run/bullpen/worker/home"
)

// advance turns the cached directory into the version that was just committed, so that the next
// execution finds it. It unlocks and releases the entry.
func (h *Home) advance() {
	c := h.cache
	defer c.disk.Release(h.entry)
	defer func() { _ = h.saved.spool.Close() }()
	err := h.applySaved()
	h.entry.Value.unlock()
	if err != nil {
		c.cfg.Log.Warn("cached home not updated", "org", h.req.Org, "thread", h.req.Thread, "error", err)
		return
	}
	c.compact(h)
}

func (h *Home) applySaved() error {
	e := h.entry
	if e.Value.mounts > 0 || h.cache.disk.IsDetached(e) || e.Value.version != versionOf(h.head.Version) {
		return nil // an execution that lost its lease is still using it, or it was replaced
	}
	in, err := h.saved.layer.Reopen()
	if err != nil {
		return err
	}
	defer in.Close()
	return h.cache.change(e, h.saved.head.Version, func(dir string) error {
		return home.Apply(context.Background(), dir, in, h.cache.openObject(h.req.Org))
	})
}
