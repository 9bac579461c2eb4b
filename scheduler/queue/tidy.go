package queue

import (
	"context"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/deliveries"
)

const (
	tidyEvery = time.Second
	// tidyAlone is how long a finished job lies among unfinished ones before it is removed by itself.
	tidyAlone = 10 * time.Second
)

// litter is what lies in the jobs' stream and is not needed any more. A finished job does no harm there: its record, which is read
// first, says that it has ended. So jobs are not removed one by one, at the price of a synced write each, but all below the oldest
// unfinished one at once; a job that is among unfinished ones for long is removed by itself.
type litter struct {
	seen   uint64 // the last message taken in
	jobs   []dropped
	bodies []string
	aside  map[uint64]bool // being moved to the dead letters, or made into a delivery: not to be removed before
	tidied time.Time
	busy   bool
}

type dropped struct {
	seq uint64
	at  time.Time
}

func (l *litter) saw(seq uint64) { l.seen = max(l.seen, seq) }

func (l *litter) drop(seq uint64, body string) {
	l.jobs = append(l.jobs, dropped{seq: seq, at: time.Now()})
	if body != "" {
		l.bodies = append(l.bodies, body)
	}
}

// keep keeps a message from being removed with those around it.
func (l *litter) keep(seq uint64) {
	if l.aside == nil {
		l.aside = map[uint64]bool{}
	}
	l.aside[seq] = true
}

// finished has the job of an execution that has ended removed from the stream. Where its result is to be delivered it is what remembers
// that until the delivery is stored.
func (l *leading) finished(ctx context.Context, m *proto.Meta, seq uint64, body string) {
	delivery := proto.NewDelivery(m, time.Now())
	if delivery == nil {
		l.litter.drop(seq, body)
		return
	}
	fault.Here(fault.AfterResultBeforeDelivery)
	l.litter.keep(seq)
	go func() {
		store := &deliveries.Store{Set: l.Set}
		// It ends with ctx at the latest: the next dispatcher meets the job again.
		err := backoff.RetryNotify(func() error { return store.Create(ctx, delivery) },
			backoff.WithContext(backoff.NewConstantBackOff(tidyEvery), ctx), func(err error, _ time.Duration) {
				l.Log.Error("a delivery could not be stored, will retry", "trace_id", m.TraceID, "error", err)
			})
		if err != nil {
			return
		}
		fault.Here(fault.AfterDeliveryBeforeJobRemoved)
		l.post(ctx, func() {
			delete(l.litter.aside, seq)
			l.litter.drop(seq, body)
		})
	}()
}

// tidy removes what is not needed any more, beside the loop and never twice at a time.
func (l *leading) tidy(ctx context.Context, now time.Time) {
	t := &l.litter
	if len(t.jobs) == 0 || t.busy || now.Sub(t.tidied) < tidyEvery {
		return
	}
	floor := t.seen + 1
	for _, j := range l.book.jobs {
		if j.seq > 0 {
			floor = min(floor, j.seq)
		}
	}
	for seq := range t.aside {
		floor = min(floor, seq)
	}
	var alone []uint64
	purge := false
	t.jobs = slices.DeleteFunc(t.jobs, func(d dropped) bool {
		if d.seq < floor {
			purge = true
			return true
		}
		if now.Sub(d.at) > tidyAlone {
			alone = append(alone, d.seq)
			return true
		}
		return false
	})
	bodies := t.bodies
	t.bodies, t.tidied, t.busy = nil, now, true
	go func() {
		if !purge {
			floor = 0
		}
		if err := l.Set.RemoveJobs(ctx, floor, alone, bodies); err != nil && ctx.Err() == nil {
			l.Log.Warn("finished jobs could not be removed, the next dispatcher will", "error", err)
		}
		l.post(ctx, func() { t.busy = false })
	}()
}

// setAside moves a malformed job to the dead letters.
func (l *leading) setAside(ctx context.Context, seq uint64) {
	l.litter.keep(seq)
	go func() {
		if err := l.Set.SetAside(ctx, l.Set.Jobs, seq); err != nil && ctx.Err() == nil {
			l.Log.Error("a malformed job could not be set aside", "sequence", seq, "error", err)
			return // it keeps its place until the next dispatcher meets it
		}
		l.post(ctx, func() { delete(l.litter.aside, seq) })
	}()
}
