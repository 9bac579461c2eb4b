// Package history keeps the index of executions up to date: it follows the streams of jobs and
// records, and stores changes in batches. The index remembers its position in each stream, so it
// resumes there; a new one starts from the beginning. An execution never waits for it.
package history

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/leader"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	applyEvery  = 250 * time.Millisecond // unless somebody waits for the index
	batch       = 2048                   // changes in one transaction, at most
	expireEvery = 10 * time.Second
	expirePause = 20 * time.Millisecond // between the transactions that remove expired executions
	presentEach = time.Second           // how often an idle index is looked for
	// freshTimeout bounds how long a list waits for the index.
	freshTimeout = 2 * time.Second
	pollEvery    = 20 * time.Millisecond
)

// Index stores which executions there are.
type Index interface {
	// Prepare returns how far the index has read those streams. It begins anew for others.
	Prepare(ctx context.Context, streams string) (proto.HistoryPosition, error)
	// Position returns how far the index has read.
	Position(ctx context.Context) (proto.HistoryPosition, error)
	// Apply stores changes and the new position at once. It returns [proto.ErrConflict] if the index
	// is not at the position from.
	Apply(ctx context.Context, from, to proto.HistoryPosition, changes []proto.HistoryChange) error
	// Expire removes some of the executions whose jobs and records have smaller sequence numbers,
	// and reports whether there are more.
	Expire(ctx context.Context, jobs, records uint64) (more bool, err error)
	// RemoveOrg removes some of the executions of an organisation that were created before a time,
	// and reports whether there are more.
	RemoveOrg(ctx context.Context, org string, before time.Time) (more bool, err error)
	// CountOrg returns the number of executions of an organisation.
	CountOrg(ctx context.Context, org string) (int64, error)
	// Present returns an error if the index is gone and must be prepared again.
	Present() error
	// List returns the executions that match a filter.
	List(ctx context.Context, f *proto.HistoryFilter) (proto.HistoryPage, error)
}

// History is the index of executions and what keeps it up to date.
type History struct {
	Store    *store.Store
	Index    Index
	Shared   bool   // other processes use the same index: one of them writes it
	Instance string // unique to this process
	// Retention is how long records are kept.
	Retention time.Duration
	// DiskFull, if not nil, returns why the index must not grow, or "".
	DiskFull func() string
	Log      *slog.Logger

	once    sync.Once
	wake    chan struct{} // somebody waits for the index
	mu      sync.Mutex
	failure error         // of the last write; nil if it succeeded
	applied chan struct{} // closed after the next write
}

func (h *History) init() {
	h.once.Do(func() { h.wake, h.applied = make(chan struct{}, 1), make(chan struct{}) })
}

// Run keeps the index up to date until ctx is done. It always returns nil.
func (h *History) Run(ctx context.Context) error {
	h.init()
	if h.Shared {
		elector := leader.Elector{Store: h.Store, Name: "history", Instance: h.Instance, Log: h.Log}
		elector.Run(ctx, func(ctx context.Context, _ *leader.Term) error {
			h.keep(ctx)
			return nil
		})
		return nil
	}
	h.keep(ctx)
	return nil
}

// keep follows the streams, restarting after errors, until ctx is done.
func (h *History) keep(ctx context.Context) {
	h.Store.KeepFollowing(ctx, h.Log, "index of executions not up to date, will retry", h.follow)
}

// report notes the result of a write.
func (h *History) report(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failure = err
	close(h.applied)
	h.applied = make(chan struct{})
}

// states returns the content of the streams of jobs and of records.
func (h *History) states(ctx context.Context) (jobs, records store.StreamState, err error) {
	if jobs, err = h.Store.Jobs.State(ctx); err == nil {
		records, err = h.Store.Records.State(ctx)
	}
	return jobs, records, err
}

// identity names the two streams. Streams that were created again are others.
func identity(jobs, records store.StreamState) string {
	return fmt.Sprint(jobs.Created.UnixNano(), " ", records.Created.UnixNano())
}

// follow reads the streams from the index's position and writes changes, until ctx is done or an
// error occurs.
func (h *History) follow(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, freshTimeout)
	defer cancel()
	jobs, records, err := h.states(bounded)
	if err != nil {
		return err
	}
	at, err := h.Index.Prepare(ctx, identity(jobs, records))
	if err == nil && (at.Jobs > jobs.Last || at.Records > records.Last) { // of a later state of the server
		at, err = h.Index.Prepare(ctx, identity(jobs, records)+" before "+time.Now().UTC().Format(time.RFC3339Nano))
	}
	if err != nil {
		h.report(err)
		return err
	}
	if missing, err := h.missing(bounded, at, jobs, records); err == nil && missing == 0 {
		h.report(nil) // else the next write does
	}
	if behind := records.Last - at.Records; at.Records == 0 && behind > 0 {
		h.Log.Info("building the index of executions", "records", behind)
	}
	w := &writer{History: h, at: at, changes: make(chan proto.HistoryChange, batch)}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return w.read(ctx, h.Store.Jobs.Stream, at.Jobs, w.job) })
	group.Go(func() error { return w.read(ctx, h.Store.Records.Stream, at.Records, w.record) })
	group.Go(func() error { return w.run(ctx) })
	group.Go(func() error { return h.expire(ctx) })
	return group.Wait()
}

// expire removes the executions that the streams no longer have.
func (h *History) expire(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(expireEvery):
		}
		jobs, records, err := h.states(ctx)
		if err != nil {
			return err
		}
		if err := untilDone(ctx, func() (bool, error) { return h.Index.Expire(ctx, jobs.First, records.First) }); err != nil {
			return err
		}
		if err := h.removeOrgs(ctx); err != nil {
			return err
		}
	}
}

// untilDone calls remove, which removes a limited number, until there are no more.
func untilDone(ctx context.Context, remove func() (more bool, err error)) error {
	for {
		more, err := remove()
		if err != nil || !more {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(expirePause):
		}
	}
}

// writer writes what it reads from the streams.
type writer struct {
	*History
	at      proto.HistoryPosition
	changes chan proto.HistoryChange
}

// read sends the changes in a stream after a sequence number. decode returns a change without its
// number, or nil.
func (w *writer) read(
	ctx context.Context, st store.Stream, after uint64,
	decode func(ctx context.Context, m *store.Message) proto.HistoryChange,
) error {
	return st.Follow(ctx, store.Range{From: after + 1}, func(m *store.Message) {
		select {
		case w.changes <- decode(ctx, m):
		case <-ctx.Done():
		}
	}, func() {})
}

func (w *writer) job(_ context.Context, m *store.Message) proto.HistoryChange {
	meta, err := store.DecodeMeta(m.Header)
	if err != nil {
		w.Log.Warn("malformed job not in the index of executions", "subject", m.Subject, "error", err)
		return proto.HistoryChange{JobSeq: m.Seq}
	}
	return proto.HistoryChange{JobSeq: m.Seq, Record: &proto.Record{Meta: *meta, Status: proto.StatusQueued}}
}

func (w *writer) record(ctx context.Context, m *store.Message) proto.HistoryChange {
	rec, err := w.Store.Records.Summary(ctx, m)
	if err != nil && ctx.Err() == nil && !store.IsNotFound(err) { // replaced meanwhile
		w.Log.Warn("malformed record not in the index of executions", "subject", m.Subject, "error", err)
	}
	return proto.HistoryChange{Seq: m.Seq, Record: rec}
}

// run writes changes in batches until ctx is done or an error.
func (w *writer) run(ctx context.Context) error {
	timer, present := time.NewTimer(applyEvery), time.NewTicker(presentEach)
	defer timer.Stop()
	defer present.Stop()
	timer.Stop()
	p := pending{latest: map[proto.TraceID]int{}}
	for {
		due := false
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case c := <-w.changes:
			if p.to == (proto.HistoryPosition{}) {
				p.to = w.at
				timer.Reset(applyEvery)
			}
			p.add(c)
			due = len(p.changes) >= batch
		case <-timer.C:
			due = true
		case <-w.wake:
			due = true
		case <-present.C:
			if err := w.Index.Present(); err != nil {
				return err
			}
		}
		if !due || p.to == (proto.HistoryPosition{}) {
			continue
		}
		timer.Stop()
		for more := true; more && len(p.changes) < batch; { // what has arrived goes along
			select {
			case c := <-w.changes:
				p.add(c)
			default:
				more = false
			}
		}
		if err := w.apply(ctx, &p); err != nil {
			return err
		}
		p = pending{latest: map[proto.TraceID]int{}}
	}
}

func (w *writer) apply(ctx context.Context, p *pending) (err error) {
	if w.DiskFull != nil {
		if why := w.DiskFull(); why != "" {
			err = &proto.HistoryError{Reason: "its disk is full", Err: errors.New(why)}
		}
	}
	if err == nil {
		err = w.Index.Apply(ctx, w.at, p.to, p.changes)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err == nil {
		w.at = p.to
	}
	w.report(err)
	return err
}

// pending are changes that are not written yet: the last one of each execution.
type pending struct {
	changes []proto.HistoryChange
	latest  map[proto.TraceID]int
	to      proto.HistoryPosition
}

func (p *pending) add(c proto.HistoryChange) {
	p.to.Jobs, p.to.Records = max(p.to.Jobs, c.JobSeq), max(p.to.Records, c.Seq)
	if c.Record == nil {
		return
	}
	i, known := p.latest[c.Record.TraceID]
	switch {
	case !known:
		p.latest[c.Record.TraceID] = len(p.changes)
		p.changes = append(p.changes, c)
	case c.Seq > p.changes[i].Seq:
		p.changes[i].Record, p.changes[i].Seq = c.Record, c.Seq
	}
}
