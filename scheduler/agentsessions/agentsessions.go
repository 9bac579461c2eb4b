// Package agentsessions stores sessions of coding agents. A session is a record in a bucket and a
// log. Package agent/sessions defines the content of the log.
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
	// maxRunning and maxRunningOrg bound the sessions that are driven at the same time, in total
	// and per organisation. Other sessions with work wait.
	maxRunning    = 4096
	maxRunningOrg = proto.MaxAgentSessions
	retryAfter    = 5 * time.Second
	conflictPause = 200 * time.Millisecond
)

// Sessions stores sessions. Changes by other gateways are visible only while Run is running.
type Sessions struct {
	agentlogs.Logs

	stored *store.Collection[proto.AgentSession]
	queue  engine.Queue[proto.AgentSession]
}

// Open opens the store and reads all records.
func Open(ctx context.Context, st *store.Store, log *slog.Logger) (*Sessions, error) {
	s := &Sessions{Logs: agentlogs.Logs{Store: st}}
	var err error
	s.stored, err = store.OpenCollection(ctx, store.CollectionConfig[proto.AgentSession]{
		Store: st, Bucket: st.AgentSessions, Keys: "*.*", Name: "agent sessions", DropMalformed: true, Log: log,
		Kind: proto.ChangedAgentSessions, PublicID: func(x *proto.AgentSession) string { return x.ID },
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

// checkLimit returns a [*proto.QuotaError] if an organisation already has too many sessions.
func checkLimit(_ *proto.AgentSession, others []*proto.AgentSession) error {
	if len(others) >= proto.MaxAgentSessions {
		return &proto.QuotaError{What: "agent sessions", Limit: proto.MaxAgentSessions}
	}
	return nil
}

// Run applies changes by other gateways until ctx is done.
func (s *Sessions) Run(ctx context.Context) error { return s.stored.Run(ctx) }

func keyOf(org, id string) string { return org + "." + proto.AgentSessionKey(id) }

// Create stores a new session. It returns [proto.ErrExists] if the id is in use, and a
// [*proto.QuotaError] if the organisation has too many sessions.
func (s *Sessions) Create(ctx context.Context, x *proto.AgentSession) error {
	return s.stored.Create(ctx, keyOf(x.Org, x.ID), x)
}

// Find returns a session. It returns [proto.ErrNotFound] if there is none.
func (s *Sessions) Find(ctx context.Context, org, id string) (proto.AgentSession, error) {
	return s.stored.Find(ctx, keyOf(org, id))
}

// List returns the sessions of an organisation, the newest first.
func (s *Sessions) List(org string) []proto.AgentSession { return s.stored.List(org) }

// Change applies change to a session and returns the session. It may call change repeatedly, and
// returns its error. It returns [proto.ErrNotFound] if there is no such session.
func (s *Sessions) Change(
	ctx context.Context, org, id string, change func(*proto.AgentSession) error,
) (proto.AgentSession, error) {
	return s.stored.Change(ctx, keyOf(org, id), change)
}

// Activate marks a session as having work for a runner. It returns [proto.ErrNotFound] if there is
// no such session.
func (s *Sessions) Activate(ctx context.Context, org, id string) error {
	_, err := s.stored.Change(ctx, keyOf(org, id), func(x *proto.AgentSession) error {
		x.Active, x.UpdatedAt = true, time.Now().UTC()
		return nil
	})
	return err
}

// Deactivate marks a session as having no work, and stores that the webhooks of events up to
// sequence number notified exist. It returns nil if the session was removed.
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
	// Remove the log first: a record without a log can still be removed, a log without a record
	// cannot.
	if err := s.Logs.Remove(ctx, org, proto.AgentSessionKey(id)); err != nil {
		return err
	}
	_, err := s.stored.Remove(ctx, keyOf(org, id), nil)
	return err
}

// Engine returns an engine that calls carryOut for sessions with work, and removes sessions that
// were unused for the retention time. instance is the name of the process.
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
			select { // another process still drives the session
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

// errRemoved interrupts the work of a removed session.
var errRemoved = errors.New("the session was removed")

// errUsed is returned if a session was used before it could expire.
var errUsed = errors.New("the session was used")

// expire removes a session that was unused for the retention time.
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
