package cache

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"io"
	"os"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/thread"
	"github.com/bullpen-run/bullpen/worker/home"
)

// mustCompact is how many layers a version may have before an execution waits for them to be made one.
const mustCompact = 256

// follow makes the directory of a home's version that of the one which was just committed, in the background: the next execution finds it
// ready, or waits for the rest.
func (k *Cache) follow(h *Home) {
	h.place.homes--
	k.work.Go(func() {
		defer k.leave(h.place)
		defer func() { _ = h.saved.spool.Close() }()
		err := k.advance(h)
		h.place.exit()
		if err != nil {
			k.cfg.Log.Warn("a home was not made ready for the next execution, which will fetch it", "org", h.job.Org, "thread", h.job.ThreadID, "error", err)
			return
		}
		k.compact(h)
	})
}

// advance is called with the place's turn.
func (k *Cache) advance(h *Home) error {
	p, old, next := h.place, of(h.head.Version), of(h.saved.head.Version)
	if p.homes > 0 || p.gone || p.at != old {
		return nil // an execution that lost its lease is still on it, or another place has been made
	}
	work := k.path(workPrefix + rand.Text())
	var err error
	if old.number == 0 {
		err = os.Mkdir(work, dirMode)
	} else {
		err = os.Rename(k.path(nameOf(p.thread, old)), work)
	}
	if err != nil {
		return err
	}
	k.settled(p, version{})
	pack := io.NewSectionReader(h.saved.spool, 0, h.saved.layout.Pack)
	index := io.NewSectionReader(h.saved.spool, h.saved.layout.Pack, h.saved.layout.Index)
	err = home.Apply(context.Background(), work, index, pack, noLimits, k.fetchObject(h.job.Org))
	if err == nil {
		err = os.Rename(work, k.path(nameOf(p.thread, next)))
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(work))
	}
	k.settled(p, next)
	return nil
}

// compact stores a version as one layer if it has too many, until the next execution wants the home.
func (k *Cache) compact(h *Home) {
	v := h.saved.head.Version
	if !thread.Long(v) {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	k.mu.Lock()
	if k.closed || h.place.users > 1 && len(v.Layers) < mustCompact {
		k.mu.Unlock()
		return
	}
	h.place.compacts = cancel
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		h.place.compacts = func() {}
		k.mu.Unlock()
	}()
	if err := h.place.enter(ctx); err != nil {
		return
	}
	defer h.place.exit()
	if h.place.at != of(v) {
		return
	}
	full, err := k.putFull(ctx, h.job.Org, v.Number, k.path(nameOf(h.place.thread, h.place.at)))
	if err == nil {
		err = k.cfg.Heads.Compact(ctx, h.job.Org, h.job.ThreadID, v.Layers, full)
	}
	if err != nil && ctx.Err() == nil && !errors.Is(err, proto.ErrConflict) {
		k.cfg.Log.Warn("a thread's layers could not be made one", "org", h.job.Org, "thread", h.job.ThreadID, "layers", len(v.Layers), "error", err)
	}
}

// putFull stores a directory as one layer.
func (k *Cache) putFull(ctx context.Context, org string, number int64, dir string) (proto.Layer, error) {
	spool, err := k.spool()
	if err != nil {
		return proto.Layer{}, err
	}
	defer func() { _ = spool.Close() }()
	sum := &digesting{to: spool, sum: sha256.New()}
	stats, err := home.Full(ctx, dir, sum, noLimits, k.storeObject(org))
	if err != nil {
		return proto.Layer{}, err
	}
	return k.putLayer(ctx, org, number, spool, sum, stats)
}

// interrupt ends a compaction that the next execution would wait for, unless it has become urgent.
func (k *Cache) interrupt(p *place, t *proto.Thread) {
	if t.Version != nil && len(t.Version.Layers) >= mustCompact {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	p.compacts()
}
