// Package activity follows all executions as they are queued, start and end.
package activity

import (
	"context"
	"log/slog"

	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Follower reports changes of executions, by whichever process. It follows the streams of jobs and
// of records.
type Follower struct {
	Store *store.Store
	// OnChange is called for each change of an execution, and without an id when changes may have
	// been missed.
	OnChange func(proto.Change)
	// OnQueued is called with each accepted execution. OnEnded is called with each execution that has
	// ended, without its output.
	OnQueued func(*proto.Meta)
	OnEnded  func(*proto.Record)
	Log      *slog.Logger

	jobs, records uint64 // sequence numbers of the last messages that were read
}

// Run reports the changes from now on until ctx is done. It always returns nil.
func (f *Follower) Run(ctx context.Context) error {
	f.Store.KeepFollowing(ctx, f.Log, "changes of executions are late, will retry", f.follow)
	return nil
}

// follow reports changes until ctx is done or an error occurs.
func (f *Follower) follow(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return f.read(ctx, f.Store.Jobs.Stream, &f.jobs, f.job) })
	group.Go(func() error {
		return f.read(ctx, f.Store.Records.Stream, &f.records, func(m *store.Message) { f.record(ctx, m) })
	})
	return group.Wait()
}

func (f *Follower) job(m *store.Message) {
	meta, err := store.DecodeMeta(m.Header)
	if err != nil {
		f.Log.Warn("malformed job not counted", "subject", m.Subject, "error", err)
		return
	}
	f.OnChange(proto.Change{Kind: proto.ChangedExecutions, Org: meta.Org, ID: string(meta.TraceID)})
	f.OnQueued(meta)
}

func (f *Follower) record(ctx context.Context, m *store.Message) {
	org, id, err := store.ParseExecSubject(m.Subject)
	if err != nil {
		f.Log.Warn("malformed record not counted", "error", err)
		return
	}
	f.OnChange(proto.Change{Kind: proto.ChangedExecutions, Org: org, ID: string(id)})
	if !proto.Status(m.Header.Get(store.HeaderStatus)).Terminal() {
		return
	}
	switch rec, err := f.Store.Records.Summary(ctx, m); {
	case err == nil:
		f.OnEnded(rec)
	case ctx.Err() == nil && !store.IsNotFound(err): // expired meanwhile
		f.Log.Warn("malformed record not counted", "subject", m.Subject, "error", err)
	}
}

// read calls handle with the messages after the last one that was read. The first time, it begins
// with the next message to be stored.
func (f *Follower) read(ctx context.Context, st store.Stream, last *uint64, handle func(*store.Message)) error {
	r := store.Range{New: true}
	if *last > 0 {
		state, err := st.State(ctx)
		if err != nil {
			return err
		}
		if *last <= state.Last { // otherwise the stream was created again
			r = store.Range{From: *last + 1}
		}
	}
	return st.Follow(ctx, r, func(m *store.Message) {
		*last = m.Seq
		handle(m)
	}, func() {
		f.OnChange(proto.Change{Kind: proto.ChangedExecutions})
	})
}
