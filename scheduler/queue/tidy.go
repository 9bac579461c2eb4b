package queue

import (
	"context"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/deadletters"
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

// finished has the job of an execution that has ended removed from the stream. Where its result is to be delivered, or the job is to be kept
// aside, it is what remembers that until the delivery and the dead letter are stored.
func (l *leading) finished(ctx context.Context, m *proto.Meta, seq uint64, body string, aside bool) {
	delivery := proto.NewDelivery(m, time.Now())
	if delivery == nil && !aside {
		l.litter.drop(seq, body)
		return
	}
	fault.Here(fault.AfterResultBeforeDelivery)
	l.litter.keep(seq)
	go func() {
		if aside && l.insist(ctx, m.TraceID, "a dead letter", func() error { return l.setAsideJob(ctx, m.TraceID, seq) }) != nil {
			return
		}
		if delivery != nil && l.insist(ctx, m.TraceID, "a delivery", func() error { return (&deliveries.Store{Store: l.Store}).Create(ctx, delivery) }) != nil {
			return
		}
		fault.Here(fault.AfterDeliveryBeforeJobRemoved)
		l.post(ctx, func() {
			delete(l.litter.aside, seq)
			l.litter.drop(seq, body)
		})
	}()
}

// insist tries to store something until it is, or ctx ends: the next dispatcher meets the job again.
func (l *leading) insist(ctx context.Context, id proto.TraceID, what string, store func() error) error {
	return backoff.RetryNotify(store, backoff.WithContext(backoff.NewConstantBackOff(tidyEvery), ctx), func(err error, _ time.Duration) {
		l.Log.Error(what+" could not be stored, will retry", "trace_id", id, "error", err)
	})
}

// setAsideJob makes the dead letter of an execution that was given up.
func (l *leading) setAsideJob(ctx context.Context, id proto.TraceID, seq uint64) error {
	rec, _, err := l.Store.Record(ctx, id)
	if err != nil {
		return err
	}
	if err := (&deadletters.Store{Store: l.Store}).SetAsideJob(ctx, rec, seq); err != nil {
		return err
	}
	l.Log.Error("a job was set aside", "trace_id", id, "org", rec.Org, "workers", rec.Lost)
	return nil
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
		if err := l.Store.RemoveJobs(ctx, floor, alone, bodies); err != nil && ctx.Err() == nil {
			l.Log.Warn("finished jobs could not be removed, the next dispatcher will", "error", err)
		}
		l.post(ctx, func() { t.busy = false })
	}()
}

// setAside moves a malformed job to the dead letters.
func (l *leading) setAside(ctx context.Context, seq uint64, why error) {
	l.litter.keep(seq)
	go func() {
		if err := (&deadletters.Store{Store: l.Store}).SetAsideMessage(ctx, seq, why); err != nil && ctx.Err() == nil {
			l.Log.Error("a malformed job could not be set aside", "sequence", seq, "error", err)
			return // it keeps its place until the next dispatcher meets it
		}
		l.post(ctx, func() { delete(l.litter.aside, seq) })
	}()
}
