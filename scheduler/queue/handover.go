package queue

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	handOverEvery   = 2 * time.Second
	handOverTimeout = time.Second
)

// handover is state that the leader stores for its successor, at most every handOverEvery and when
// it resigns. A leader works without it, but with less knowledge.
type handover struct {
	key     string
	what    string // for messages
	value   func() any
	changed bool // since it was saved
	saving  bool
	saved   time.Time
}

// load reads the last leader's state into v. It returns the time of the save, zero if there is
// none.
func (h *handover) load(ctx context.Context, t *term, v any) (saved time.Time) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	entry, err := t.Store.Control.Get(ctx, h.key)
	if err == nil {
		saved = entry.Created()
		err = json.Unmarshal(entry.Value(), v)
	}
	if err != nil && !store.IsNotFound(err) {
		t.Log.Warn("read "+h.what+" failed", "error", err)
	}
	return saved
}

// review saves a change outside the loop.
func (h *handover) review(ctx context.Context, t *term, now time.Time) {
	if !h.changed || h.saving || now.Sub(h.saved) < handOverEvery {
		return
	}
	h.changed, h.saving, h.saved = false, true, now
	save := h.save(t)
	go func() {
		err := save(ctx)
		if err != nil && ctx.Err() == nil {
			t.Log.Warn("save "+h.what+" failed, will retry", "error", err)
		}
		t.post(ctx, func() { h.saving, h.changed = false, h.changed || err != nil })
	}()
}

// resign saves a change before the leader resigns.
func (h *handover) resign(ctx context.Context, t *term) {
	if !h.changed && !h.saving {
		return
	}
	if err := h.save(t)(ctx); err != nil {
		t.Log.Warn("save "+h.what+" failed", "error", err)
	}
}

// save returns a function that saves the value as it is now.
func (h *handover) save(t *term) func(context.Context) error {
	body, err := json.Marshal(h.value())
	return func(ctx context.Context) error {
		if err != nil {
			return fmt.Errorf("encode %s: %w", h.what, err)
		}
		ctx, cancel := context.WithTimeout(ctx, handOverTimeout)
		defer cancel()
		_, err := t.Store.Control.Put(ctx, h.key, body)
		return err
	}
}
