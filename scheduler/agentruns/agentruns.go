// Package agentruns stores the runs of agents: a log for each, and a bucket entry while it
// continues in the background.
//
// The first message of a log is the request, as a [proto.AgentRun]; package agent defines the
package agentruns

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/agentlogs"
	"github.com/bullpen-run/bullpen/scheduler/engine"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Runs stores runs. Run must be running for changes to be seen.
type Runs struct {
	agentlogs.Logs

	// Rejects, if not nil, returns why no runs are stored now, or nil. It is set before the first
	// use.
	Rejects func() *proto.Rejection

	active *store.Collection[proto.ActiveAgentRun]
	queue  engine.Queue[proto.ActiveAgentRun]
}

// Open reads the active runs.
func Open(ctx context.Context, st *store.Store, log *slog.Logger) (*Runs, error) {
	r := &Runs{Logs: agentlogs.Logs{Store: st}}
	var err error
	r.active, err = store.OpenCollection(ctx, store.CollectionConfig[proto.ActiveAgentRun]{
		Store: st, Bucket: st.AgentRuns, Keys: "*.*", Name: "active runs of agents", Log: log,
		Order: func(a *proto.ActiveAgentRun) string { return store.OldestFirst(a.CreatedAt) }, Check: checkLimits,
		OnChange: engine.Watch(&r.queue, "", func(known, a *proto.ActiveAgentRun) bool {
			if a != nil {
				*known = *a
			}
			return a != nil
		}),
	})
	return r, err
}

// Run applies changes by other gateways until ctx is done.
func (r *Runs) Run(ctx context.Context) error { return r.active.Run(ctx) }

func activeKey(org, id string) string { return org + "." + id }

// Create stores a new run, and returns the number of its first message. A background run is then
// active, even if it was stored before. Create returns a [*proto.QuotaError] if the organisation
// has too many of these, and the [*proto.Rejection] of Rejects.
func (r *Runs) Create(ctx context.Context, run *proto.AgentRun) (at uint64, err error) {
	if r.Rejects != nil {
		if rejection := r.Rejects(); rejection != nil {
			return 0, rejection
		}
	}
	var body bytes.Buffer
	enc := json.NewEncoder(&body)
	enc.SetEscapeHTML(false) // six bytes for one
	if err := enc.Encode(run); err != nil {
		return 0, fmt.Errorf("encode run %s: %w", run.ID, err)
	}
	at, err = r.Append(ctx, run.Org, run.ID, 0, body.Bytes())
	stored := errors.Is(err, proto.ErrConflict)
	if stored {
		_, at, err = r.Get(ctx, run.Org, run.ID)
	}
	if err != nil || !run.Background {
		return at, err
	}
	err = r.active.Create(ctx, activeKey(run.Org, run.ID),
		&proto.ActiveAgentRun{Org: run.Org, ID: run.ID, CreatedAt: run.CreatedAt, Bytes: int64(len(run.Request))})
	if errors.Is(err, proto.ErrExists) {
		err = nil
	}
	if _, full := errors.AsType[*proto.QuotaError](err); full && !stored {
		err = errors.Join(err, r.Remove(ctx, run.Org, run.ID))
	}
	return at, err
}

// checkLimits returns a [*proto.QuotaError] if others leave no room for run.
func checkLimits(run *proto.ActiveAgentRun, others []*proto.ActiveAgentRun) error {
	size := run.Bytes
	for _, other := range others {
		size += other.Bytes
	}
	switch {
	case len(others) >= proto.MaxAgentRuns:
		return &proto.QuotaError{What: "runs in the background", Limit: proto.MaxAgentRuns}
	case size > proto.MaxAgentRunBytes:
		return &proto.QuotaError{What: "bytes of requests that run in the background", Limit: proto.MaxAgentRunBytes}
	}
	return nil
}

// IsActive reports whether this process knows a run as active.
func (r *Runs) IsActive(org, id string) bool { return r.active.Get(activeKey(org, id)) != nil }

// Get returns a run and the number of its first message, or [proto.ErrNotFound].
func (r *Runs) Get(ctx context.Context, org, id string) (*proto.AgentRun, uint64, error) {
	m, err := r.Store.AgentLogs.Next(ctx, 1, store.AgentLogSubject(org, id))
	if store.IsNotFound(err) {
		return nil, 0, fmt.Errorf("run %s: %w", id, proto.ErrNotFound)
	}
	if err != nil {
		return nil, 0, err
	}
	run := new(proto.AgentRun)
	// the first messages are past their retention
	if json.Unmarshal(m.Data, run) != nil || run.Org != org || run.ID != id {
		return nil, 0, fmt.Errorf("run %s: %w", id, proto.ErrNotFound)
	}
	return run, m.Seq, nil
}

// Cancel requests the end of an active run. It returns [proto.ErrNotFound] if it is not active.
func (r *Runs) Cancel(ctx context.Context, org, id string) error {
	_, err := r.active.Change(ctx, activeKey(org, id), func(a *proto.ActiveAgentRun) error {
		a.Cancelled = true
		return nil
	})
	return err
}

// Finish makes a run not active. It is no error if it is not.
func (r *Runs) Finish(ctx context.Context, org, id string) error {
	_, err := r.active.Remove(ctx, activeKey(org, id), nil)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	return err
}
