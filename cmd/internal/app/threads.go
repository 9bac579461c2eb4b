package app

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/scheduler/leader"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/threads"
	"github.com/bullpen-run/bullpen/storage/thread"
)

// versions returns the versions of threads in the blob store.
func (s *system) versions() *thread.Versions {
	// Saving a home enforces the limits of its sandbox.
	return &thread.Versions{
		Blobs: s.blobs, Heads: s.threads, Spool: s.newSpool,
		Limits: layer.Limits{Bytes: math.MaxInt64, Entries: math.MaxInt32},
	}
}

// newSpool returns an empty file in the data directory that is removed when closed.
func (s *system) newSpool() (*os.File, error) {
	if err := os.MkdirAll(s.cfg.Data, 0o700); err != nil { // only an embedded NATS creates it at start
		return nil, fmt.Errorf("create a spool file: %w", err)
	}
	f, err := os.CreateTemp(s.cfg.Data, ".spool-*")
	if err != nil {
		return nil, fmt.Errorf("create a spool file: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(fmt.Errorf("create a spool file: %w", err), f.Close())
	}
	return f, nil
}

// threadList implements [gateway.Threads]. It omits holders that have finished.
type threadList struct {
	*threads.Threads
	records *queue.Queue
}

// Get implements [gateway.Threads].
func (l threadList) Get(ctx context.Context, org, id string) (*proto.Thread, error) {
	t, err := l.Threads.Get(ctx, org, id)
	if err != nil {
		return nil, err
	}
	t.Holder, err = l.holder(ctx, org, t.Holder)
	return t, err
}

// List implements [gateway.Threads].
func (l threadList) List(
	ctx context.Context, org string, owner proto.ThreadOwner, after string, limit int,
) ([]proto.ThreadSummary, error) {
	found, err := l.Threads.List(ctx, org, owner, after, limit)
	for i := range found {
		if err == nil {
			found[i].Holder, err = l.holder(ctx, org, found[i].Holder)
		}
	}
	return found, err
}

// holder returns id unless that execution has finished.
func (l threadList) holder(ctx context.Context, org string, id proto.TraceID) (proto.TraceID, error) {
	if id == "" {
		return "", nil
	}
	rec, err := l.records.Lookup(ctx, org, id)
	switch {
	case errors.Is(err, proto.ErrNotFound) || err == nil && rec.Status.Terminal():
		return "", nil
	case err != nil:
		return "", err
	}
	return id, nil
}

// runThreadGC periodically removes unused threads and unreferenced blobs, in one process at a time.
func (s *system) runThreadGC(ctx context.Context) error {
	elector := leader.Elector{Store: s.store, Name: "thread-gc", Instance: s.instance, Log: s.log}
	elector.RunEvery(ctx, s.cfg.ThreadGC, s.collectThreads)
	return nil
}

func (s *system) collectThreads(ctx context.Context) {
	versions := s.versions()
	if s.cfg.ThreadExpiry > 0 {
		expired, err := versions.Expire(ctx, s.cfg.ThreadExpiry)
		if err != nil {
			s.log.Warn("thread expiry incomplete, will retry", "error", err)
		}
		if expired > 0 {
			s.log.Info("threads expired", "threads", expired, "unused_for", s.cfg.ThreadExpiry)
		}
	}
	began := time.Now()
	done, err := versions.Collect(ctx, proto.DefaultSafeAge)
	if err != nil {
		s.log.Warn("thread garbage collection failed, will retry", "error", err)
		return
	}
	s.log.Info("thread garbage collected", "removed", done, "took", time.Since(began))
}
