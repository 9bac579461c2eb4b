// Package agentsessions stores sessions of coding agents: a record in a bucket, and a log. Package
// agent/sessions defines the log.
package agentsessions

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/agentlogs"
	"github.com/bullpen-run/bullpen/scheduler/engine"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// maxRunning and maxRunningOrg limit the sessions with work that are driven at once: in total, and
	// per organisation. Others wait.
	maxRunning    = 4096
	maxRunningOrg = proto.MaxAgentSessions
	retryAfter    = 5 * time.Second
	conflictPause = 200 * time.Millisecond
)

// Sessions stores sessions. Run must be running for changes to be seen.
type Sessions struct {
	agentlogs.Logs

	stored *store.Collection[proto.AgentSession]
	queue  engine.Queue[proto.AgentSession]
}

// Open reads all records.
func Open(ctx context.Context, st *store.Store, log *slog.Logger) (*Sessions, error) {
	s := &Sessions{Logs: agentlogs.Logs{Store: st}}
	var err error
	s.stored, err = store.OpenCollection(ctx, store.CollectionConfig[proto.AgentSession]{
		Store: st, Bucket: st.AgentSessions, Keys: "*.*", Name: "agent sessions", DropMalformed: true, Log: log,
		Order: func(x *proto.AgentSession) string { return store.NewestFirst(x.CreatedAt) },
		Check: checkLimit,
		OnChange: engine.Watch(&s.queue, "", func(known, x *proto.AgentSession) bool {
			if x != nil {
				*known = *x
			}
			return x != nil
		}),
	})
	return s, err
}

// checkLimit returns a [*proto.QuotaError] if others leave no room for a session.
func checkLimit(_ *proto.AgentSession, others []*proto.AgentSession) error {
	if len(others) >= proto.MaxAgentSessions {
		return &proto.QuotaError{What: "agent sessions", Limit: proto.MaxAgentSessions}
	}
	return nil
}

// Run applies changes by other gateways until ctx is done.
func (s *Sessions) Run(ctx context.Context) error { return s.stored.Run(ctx) }

func keyOf(org, id string) string { return org + "." + proto.AgentSessionKey(id) }

// Create stores a new session. It returns [proto.ErrExists] if there is one with its id, and a
// [*proto.QuotaError] if the organisation has too many.
func (s *Sessions) Create(ctx context.Context, x *proto.AgentSession) error {
	return s.stored.Create(ctx, keyOf(x.Org, x.ID), x)
}

// Find returns a session, or [proto.ErrNotFound].
func (s *Sessions) Find(ctx context.Context, org, id string) (proto.AgentSession, error) {
	return s.stored.Find(ctx, keyOf(org, id))
}

// List returns the sessions of an organisation, the newest first.
func (s *Sessions) List(org string) []proto.AgentSession { return s.stored.List(org) }

// Change changes a session, and returns it. It returns [proto.ErrNotFound] if there is none, and the
// errors of change, which may be called again.
func (s *Sessions) Change(
	ctx context.Context, org, id string, change func(*proto.AgentSession) error,
) (proto.AgentSession, error) {
	return s.stored.Change(ctx, keyOf(org, id), change)
}

// Activate stores that a session has work for a runner. It returns [proto.ErrNotFound] if there is no
// such session.
func (s *Sessions) Activate(ctx context.Context, org, id string) error {
	_, err := s.stored.Change(ctx, keyOf(org, id), func(x *proto.AgentSession) error {
		x.Active, x.UpdatedAt = true, time.Now().UTC()
		return nil
	})
	return err
}

// Deactivate stores that a session has no work, and that webhooks of events up to a sequence number were
// created. It is no error if the session was removed.
func (s *Sessions) Deactivate(ctx context.Context, org, id string, notified int64) error {
	_, err := s.stored.Change(ctx, keyOf(org, id), func(x *proto.AgentSession) error {
		x.Active, x.Notified = false, max(x.Notified, notified)
		return nil
	})
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	return err
}

// Remove removes a session with its log. It returns [proto.ErrNotFound] if there is none.
func (s *Sessions) Remove(ctx context.Context, org, id string) error {
	// A record without a log can be removed again, and a log without a record could not.
	if err := s.Logs.Remove(ctx, org, proto.AgentSessionKey(id)); err != nil {
		return err
	}
	_, err := s.stored.Remove(ctx, keyOf(org, id), nil)
	return err
}

// Engine returns an engine that carries out sessions with work in a process with this name, and removes
// those that were not used for the time of retention.
func (s *Sessions) Engine(
	carryOut func(context.Context, proto.AgentSession) error, retention time.Duration, instance string, log *slog.Logger,
) *engine.Engine[proto.AgentSession] {
	return &engine.Engine[proto.AgentSession]{
		Queue: &s.queue, Store: s.Store, Name: "agent-sessions", Instance: instance, Log: log,
		Due: func(x *proto.AgentSession) (at time.Time, ok bool) {
			if x.Active {
				return at, true
			}
			return x.UpdatedAt.Add(retention), true
		},
		Handle: func(ctx context.Context, _ engine.Item, x proto.AgentSession) error {
			if !x.Active {
				return s.expire(ctx, &x, retention)
			}
			err := carryOut(ctx, x)
			if !errors.Is(err, proto.ErrConflict) {
				return err
			}
			select { // another process still drives it
			case <-ctx.Done():
			case <-time.After(conflictPause):
			}
			return nil
		},
		Interrupt: func(x *proto.AgentSession) error {
			if x.ID == "" {
				return errRemoved
			}
			return nil
		},
		RetryAfter: retryAfter, Handlers: maxRunning, HandlersOfOrg: maxRunningOrg,
	}
}

// errRemoved ends the work of a session that was removed.
var errRemoved = errors.New("the session was removed")

// errUsed means that a session was used meanwhile.
var errUsed = errors.New("the session was used")

// expire removes a session that was not used for the time of retention.
func (s *Sessions) expire(ctx context.Context, x *proto.AgentSession, retention time.Duration) error {
	_, err := s.stored.Remove(ctx, keyOf(x.Org, x.ID), func(now *proto.AgentSession) error {
		if now.Active || time.Since(now.UpdatedAt) < retention {
			return errUsed
		}
		return nil
	})
	if errors.Is(err, errUsed) || errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return s.Logs.Remove(ctx, x.Org, x.LogID())
}
