package sandboxes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/engine"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// lookEvery is how often the record of an active sandbox's execution is read, in case the notice of
	// its end was lost.
	lookEvery  = 15 * time.Second
	checkEvery = 2 * time.Second // the keys of active sandboxes
	// endedKept is how long a sandbox that has ended stays in lists.
	endedKept  = 24 * time.Hour
	retryAfter = 5 * time.Second
	handlers   = 64
	ofOrg      = 16
	timeout    = time.Minute
)

// Executions reads and cancels executions.
type Executions interface {
	// Summary returns the record of an execution without the outputs of the result, or
	// [proto.ErrNotFound].
	Summary(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
	// Cancel stores a request to end an execution.
	Cancel(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
}

// Keys knows whether API keys may still run something.
type Keys interface {
	// CheckKey returns an error if the key with an id is no longer valid, or its organisation is
	// suspended or deleted.
	CheckKey(ctx context.Context, id string) error
}

// Homes removes the homes of sandboxes.
type Homes interface {
	// Remove removes a thread. It returns [proto.ErrNotFound] if there is none.
	Remove(ctx context.Context, org, thread string) error
}

// Runner stores what has become of sandboxes while it leads, ends those of keys that are no longer
// valid, and removes what ended sandboxes leave.
type Runner struct {
	Sandboxes  *Sandboxes
	Executions Executions
	Keys       Keys
	Homes      Homes
	Store      *store.Store
	Instance   string // unique to this process
	Log        *slog.Logger
}

// entry is what the queue knows of a sandbox.
type entry struct {
	sandbox *proto.LiveSandbox
	lookAt  time.Time          // when to read the record of an active one
	notices *nats.Subscription // of the end of its execution; nil while this process does not lead
	of      proto.TraceID      // the execution of notices
}

// set sets the sandbox, nil if it was removed.
func (e *entry) set(x *proto.LiveSandbox) (keep bool) {
	e.sandbox, e.lookAt = x, time.Time{}
	if x == nil || !x.State.Active() {
		e.forget()
	}
	return x != nil
}

// forget ends the notices.
func (e *entry) forget() {
	if e.notices != nil {
		_ = e.notices.Unsubscribe()
		e.notices = nil
	}
}

// Run campaigns and follows sandboxes until ctx is done. It always returns nil.
func (r *Runner) Run(ctx context.Context) error {
	e := engine.Engine[entry]{
		Queue: &r.Sandboxes.queue, Store: r.Store, Name: "sandboxes", Instance: r.Instance, Log: r.Log,
		Due: due, Handle: r.handle, Forget: (*entry).forget,
		Beside:     []func(context.Context){engine.Every(checkEvery, r.checkKeys)},
		RetryAfter: retryAfter, Timeout: timeout, Handlers: handlers, HandlersOfOrg: ofOrg,
	}
	return e.Run(ctx)
}

// due returns when a sandbox needs work.
func due(e *entry) (at time.Time, ok bool) {
	switch x := e.sandbox; {
	case x == nil:
		return at, false
	case x.State.Active():
		return e.lookAt, true
	case x.State == proto.SandboxEnded && x.OwnHome:
		return at, true
	case x.State == proto.SandboxEnded:
		return x.StoppedAt.Add(endedKept), true
	default: // paused
		return at, false
	}
}

// handle does what is due for a sandbox.
func (r *Runner) handle(ctx context.Context, item engine.Item, e entry) error {
	switch x := e.sandbox; {
	case x.State.Active():
		return r.look(ctx, item, x)
	case x.OwnHome:
		return r.removeHome(ctx, x)
	default:
		_, err := r.Sandboxes.stored.Remove(ctx, keyOf(x.Org, x.ID), func(now *proto.LiveSandbox) error {
			if now.State != proto.SandboxEnded {
				return errChanged
			}
			return nil
		})
		if errors.Is(err, proto.ErrNotFound) || errors.Is(err, errChanged) {
			return nil
		}
		return err
	}
}

var errChanged = errors.New("the sandbox was changed")

// look reads the record of an active sandbox's execution, and follows it if it has not ended.
func (r *Runner) look(ctx context.Context, item engine.Item, x *proto.LiveSandbox) error {
	if err := r.follow(item, x); err != nil {
		return err
	}
	next := lookEvery
	if x.State == proto.SandboxStarting { // no notice comes of a start
		next = retryAfter
	}
	r.later(item, time.Now().Add(next)) // before a notice may make it sooner
	rec, err := r.Executions.Summary(ctx, x.Org, x.Execution)
	switch {
	case errors.Is(err, proto.ErrNotFound):
		// The gateway stores the sandbox before it submits the execution.
		if time.Since(x.StartedAt) < timeout {
			r.later(item, time.Now().Add(retryAfter))
			return nil
		}
		return r.Sandboxes.Abandon(ctx, x, "The sandbox was not accepted by the queue.")
	case err != nil:
		return err
	case !rec.Status.Terminal():
		if x.Stopping != nil && !rec.Cancelling {
			if _, err := r.Executions.Cancel(ctx, x.Org, x.Execution); err != nil {
				return fmt.Errorf("stop sandbox %s: %w", x.ID, err)
			}
		}
		return r.Sandboxes.started(ctx, x, rec)
	}
	_, err = r.Sandboxes.Settle(ctx, x.ID, rec)
	return err
}

// follow makes a sandbox due when the record of its execution changes.
func (r *Runner) follow(item engine.Item, x *proto.LiveSandbox) (err error) {
	r.Sandboxes.queue.Change(item, func(e *entry) bool {
		if e.sandbox == nil || e.sandbox.Execution != x.Execution || e.notices != nil && e.of == x.Execution {
			return e.sandbox != nil
		}
		e.forget()
		e.notices, err = r.Store.Conn.Subscribe(store.DoneSubject(x.Org, x.Execution), func(m *nats.Msg) {
			if proto.Status(m.Header.Get(store.HeaderStatus)).Terminal() {
				r.later(item, time.Time{})
			}
		})
		e.of = x.Execution
		return true
	})
	return err
}

// later sets when to look at an active sandbox again.
func (r *Runner) later(item engine.Item, at time.Time) {
	r.Sandboxes.queue.Change(item, func(e *entry) bool {
		e.lookAt = at
		return e.sandbox != nil
	})
}

// removeHome removes the home that was created for a sandbox that has ended.
func (r *Runner) removeHome(ctx context.Context, x *proto.LiveSandbox) error {
	if err := r.Homes.Remove(ctx, x.Org, x.ThreadID); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return fmt.Errorf("remove the home of sandbox %s: %w", x.ID, err)
	}
	_, err := r.Sandboxes.Change(ctx, x.Org, x.ID, func(now *proto.LiveSandbox) error {
		if now.State == proto.SandboxEnded {
			now.OwnHome = false
		}
		return nil
	})
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	return err
}

// checkKeys stops the sandboxes of keys that are no longer valid.
func (r *Runner) checkKeys(ctx context.Context) {
	for _, x := range r.Sandboxes.stored.All() {
		if !x.State.Active() || x.Stopping != nil && x.Stopping.Stop == proto.SandboxKill {
			continue
		}
		if err := r.Keys.CheckKey(ctx, x.Key); err == nil || !proto.Final(err) {
			continue
		}
		_, err := r.Sandboxes.Change(ctx, x.Org, x.ID, func(now *proto.LiveSandbox) error {
			if now.State.Active() && now.Execution == x.Execution {
				now.State = proto.SandboxStopping
				now.Stopping = &proto.SandboxStopped{Stop: proto.SandboxKill, Reason: proto.SandboxKeyRevoked}
			}
			return nil
		})
		if err != nil {
			r.Log.WarnContext(ctx, "sandbox of an invalid API key not stopped, will retry", "sandbox", x.ID, "org", x.Org,
				"error", err)
		}
	}
}
