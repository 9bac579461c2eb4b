// Package sandboxes stores live sandboxes, and follows what becomes of them.
//
// Each start of a sandbox is an execution, which runs the sandbox's guest until the sandbox stops. Its
// lease, its worker and its home are those of an execution. A gateway stores that the sandbox starts,
// and then submits the execution. When the execution has ended, the leading process stores what has
// become of the sandbox, unless the gateway that stopped it was faster. All changes are made by
// compare-and-set, and a second one finds nothing to do.
package sandboxes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/engine"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Sandboxes stores live sandboxes. Run must be running for changes to be seen.
type Sandboxes struct {
	stored *store.Collection[proto.LiveSandbox]
	queue  engine.Queue[entry]
}

// Open reads all sandboxes.
func Open(ctx context.Context, st *store.Store, log *slog.Logger) (*Sandboxes, error) {
	s := new(Sandboxes)
	var err error
	s.stored, err = store.OpenCollection(ctx, store.CollectionConfig[proto.LiveSandbox]{
		Store: st, Bucket: st.Sandboxes, Keys: "*.*", Name: "sandboxes", DropMalformed: true, Log: log,
		Kind:     proto.ChangedSandboxes,
		ByID:     true,
		Order:    func(x *proto.LiveSandbox) string { return store.NewestFirst(x.CreatedAt) },
		OnChange: engine.Watch(&s.queue, "", (*entry).set),
	})
	return s, err
}

// checkLimits returns a [*proto.Rejection] if the other sandboxes of an organisation leave no room for
// one more that is active. most is the limit of its plan.
func checkLimits(others []*proto.LiveSandbox, most int) error {
	kept, active := 0, 0
	for _, other := range others {
		if other.State != proto.SandboxEnded {
			kept++
		}
		if other.State.Active() {
			active++
		}
	}
	switch {
	case kept >= proto.MaxLiveSandboxes:
		return &proto.Rejection{Reason: proto.RejectedSandboxes, Limit: proto.MaxLiveSandboxes, Used: kept}
	case active >= most:
		return &proto.Rejection{Reason: proto.RejectedSandboxes, Limit: most, Used: active}
	}
	return nil
}

// Run applies changes by other processes until ctx is done.
func (s *Sandboxes) Run(ctx context.Context) error { return s.stored.Run(ctx) }

func keyOf(org, id string) string { return org + "." + id }

// Create stores a new sandbox. It returns a [*proto.Rejection] if the organisation has
// [proto.MaxLiveSandboxes] that have not ended, or most that are active.
func (s *Sandboxes) Create(ctx context.Context, x *proto.LiveSandbox, most int) error {
	_, err := s.stored.UpdateWithOthers(ctx, keyOf(x.Org, x.ID),
		func(old *proto.LiveSandbox, others []*proto.LiveSandbox) (*proto.LiveSandbox, error) {
			if old != nil {
				return nil, fmt.Errorf("sandbox %s: %w", x.ID, proto.ErrExists)
			}
			return x, checkLimits(others, most)
		})
	return err
}

// Resume is Change for a sandbox that becomes active. It returns a [*proto.Rejection] if the
// organisation has most others that are active.
func (s *Sandboxes) Resume(
	ctx context.Context, org, id string, most int, change func(*proto.LiveSandbox) error,
) (proto.LiveSandbox, error) {
	x, err := s.stored.UpdateWithOthers(ctx, keyOf(org, id),
		func(old *proto.LiveSandbox, others []*proto.LiveSandbox) (*proto.LiveSandbox, error) {
			if old == nil {
				return nil, fmt.Errorf("sandbox %s: %w", id, proto.ErrNotFound)
			}
			changed := *old
			if err := change(&changed); err != nil {
				return nil, err
			}
			return &changed, checkLimits(others, most)
		})
	if err != nil {
		return proto.LiveSandbox{}, err
	}
	return *x, nil
}

// Get returns a sandbox, or [proto.ErrNotFound].
func (s *Sandboxes) Get(ctx context.Context, org, id string) (*proto.LiveSandbox, error) {
	x, _, err := s.stored.Read(ctx, keyOf(org, id))
	return x, err
}

// Find is Get from memory, which may be outdated for a moment.
func (s *Sandboxes) Find(ctx context.Context, org, id string) (proto.LiveSandbox, error) {
	return s.stored.Find(ctx, keyOf(org, id))
}

// Org returns the organisation of a sandbox from memory, or "". It costs nothing, so that anybody may ask.
func (s *Sandboxes) Org(id string) string { return orgOf(s.stored.KeyOf(id)) }

// FindOrg returns the organisation of a sandbox. It reads the bucket if this process has not seen the
// sandbox yet, and returns [proto.ErrNotFound] if there is none.
func (s *Sandboxes) FindOrg(ctx context.Context, id string) (string, error) {
	key, err := s.stored.FindKey(ctx, id)
	return orgOf(key), err
}

// orgOf returns the organisation in the key of a sandbox.
func orgOf(key string) string {
	org, _, _ := strings.Cut(key, ".")
	return org
}

// Page returns a page of the sandboxes of an organisation, the newest first, see
// [store.Collection.Page].
func (s *Sandboxes) Page(
	org, after string, limit int, keep func(*proto.LiveSandbox) bool,
) (page []proto.LiveSandbox, next string) {
	return s.stored.Page(org, after, limit, keep)
}

// Change stores the result of change for a sandbox, and returns it. change may be called again. Its
// error is returned unchanged. Change returns [proto.ErrNotFound] if there is no such sandbox.
func (s *Sandboxes) Change(
	ctx context.Context, org, id string, change func(*proto.LiveSandbox) error,
) (proto.LiveSandbox, error) {
	return s.stored.Change(ctx, keyOf(org, id), change)
}

// started stores that a sandbox runs whose execution has started, if no gateway has: that which started
// the sandbox may have died.
func (s *Sandboxes) started(ctx context.Context, x *proto.LiveSandbox, rec *proto.Record) error {
	if x.State != proto.SandboxStarting || rec.Worker == "" {
		return nil
	}
	_, err := s.Change(ctx, x.Org, x.ID, func(now *proto.LiveSandbox) error {
		if now.State == proto.SandboxStarting && now.Execution == x.Execution {
			now.State, now.Worker = proto.SandboxRunning, rec.Worker
		}
		return nil
	})
	return err
}

// Settle stores what has become of a sandbox whose execution has ended with a record, and returns the
// sandbox. It changes nothing if the execution is not that of the sandbox's last start.
func (s *Sandboxes) Settle(ctx context.Context, id string, rec *proto.Record) (proto.LiveSandbox, error) {
	x, err := s.Change(ctx, rec.Org, id, func(x *proto.LiveSandbox) error {
		if !x.State.Active() || x.Execution != rec.TraceID {
			return nil
		}
		settle(x, x.NextStop(rec), rec)
		return nil
	})
	if err != nil {
		return x, fmt.Errorf("settle sandbox %s: %w", id, err)
	}
	return x, nil
}

// settle changes a sandbox to how it has stopped.
func settle(x *proto.LiveSandbox, stopped proto.SandboxStopped, rec *proto.Record) {
	x.State, x.Reason, x.Message, x.Stopping = proto.SandboxEnded, stopped.Reason, "", nil
	if stopped.Stop == proto.SandboxPause && !x.Interpreters {
		x.State = proto.SandboxPaused
	}
	x.StoppedAt = time.Now().UTC()
	if rec == nil {
		return
	}
	if rec.CompletedAt != nil {
		x.StoppedAt = *rec.CompletedAt
	}
	if r := rec.Result; r.ErrorMessage != nil && proto.ErrorCode(*r.ErrorCode) != proto.CodeCancelled {
		x.Message = *r.ErrorMessage
	}
}

// Abandon stores that a sandbox did not start, since its execution was not accepted.
func (s *Sandboxes) Abandon(ctx context.Context, x *proto.LiveSandbox, message string) error {
	if x.Starts == 1 { // nobody has seen it
		_, err := s.stored.Remove(ctx, keyOf(x.Org, x.ID), nil)
		if errors.Is(err, proto.ErrNotFound) {
			return nil
		}
		return err
	}
	_, err := s.Change(ctx, x.Org, x.ID, func(now *proto.LiveSandbox) error {
		if now.State.Active() && now.Execution == x.Execution {
			settle(now, proto.SandboxStopped{Stop: proto.SandboxPause, Reason: proto.SandboxNotStarted}, nil)
			now.Message = message
		}
		return nil
	})
	return err
}
