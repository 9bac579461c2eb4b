package agenttest

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"sync"

	"github.com/bullpen-run/bullpen/proto"
)

// Store implements [agent.Active] in memory. Numbers of messages are places in a log, from 1.
type Store struct {
	mu       sync.Mutex
	logs     map[string][][]byte
	active   []proto.ActiveAgentRun
	follow   func(run proto.ActiveAgentRun, active bool) // nil for nobody
	watchers map[chan struct{}]string                    // the logs that are watched
	// FailAppend, if not nil, is called before a message is appended. Its error is returned.
	FailAppend func(message []byte) error
}

// NewStore returns a store without runs.
func NewStore() *Store {
	return &Store{logs: map[string][][]byte{}, watchers: map[chan struct{}]string{}}
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Create implements [agent.Store].
func (s *Store) Create(ctx context.Context, run *proto.AgentRun) (uint64, error) {
	var message bytes.Buffer
	enc := json.NewEncoder(&message)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(run); err != nil {
		return 0, err
	}
	at, err := s.Append(ctx, run.Org, run.ID, 0, message.Bytes())
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && run.Background {
		a := proto.ActiveAgentRun{Org: run.Org, ID: run.ID, CreatedAt: run.CreatedAt, Bytes: int64(len(run.Request))}
		s.active = append(s.active, a)
		s.changed(a, true)
	}
	return at, err
}

// Append implements [agent.Store].
func (s *Store) Append(_ context.Context, org, id string, after uint64, message []byte) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.FailAppend != nil {
		if err := s.FailAppend(message); err != nil {
			return 0, err
		}
	}
	key := org + "." + id
	if uint64(len(s.logs[key])) != after {
		return 0, proto.ErrConflict
	}
	s.logs[key] = append(s.logs[key], message)
	for c, watched := range s.watchers {
		if watched == key {
			notify(c)
		}
	}
	return after + 1, nil
}

// Get implements [agent.Store].
func (s *Store) Get(ctx context.Context, org, id string) (*proto.AgentRun, uint64, error) {
	message, _, _ := s.Next(ctx, org, id, 0)
	if message == nil {
		return nil, 0, proto.ErrNotFound
	}
	run := new(proto.AgentRun)
	return run, 1, json.Unmarshal(message, run)
}

// Next implements [agent.Store].
func (s *Store) Next(_ context.Context, org, id string, after uint64) ([]byte, uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	log := s.logs[org+"."+id]
	if uint64(len(log)) < after {
		return nil, after, proto.ErrNotFound
	}
	if uint64(len(log)) == after {
		return nil, after, nil
	}
	return log[after], after + 1, nil
}

// Watch implements [agent.Store].
func (s *Store) Watch(org, id string) (<-chan struct{}, func(), error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := make(chan struct{}, 1)
	s.watchers[c] = org + "." + id
	return c, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watchers, c)
	}, nil
}

// Cancel implements [agent.Store].
func (s *Store) Cancel(_ context.Context, org, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.active {
		if s.active[i].Org == org && s.active[i].ID == id {
			s.active[i].Cancelled = true
			s.changed(s.active[i], true)
			return nil
		}
	}
	return proto.ErrNotFound
}

// Remove implements [agent.Store].
func (s *Store) Remove(_ context.Context, org, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.logs, org+"."+id)
	for c, watched := range s.watchers {
		if watched == org+"."+id {
			notify(c)
		}
	}
	return nil
}

// Active returns the runs in the background that have not ended.
func (s *Store) Active() []proto.ActiveAgentRun {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.active)
}

// Follow calls f with the active runs, and then with each changed run. active is false if a run is
// no longer active.
func (s *Store) Follow(f func(run proto.ActiveAgentRun, active bool)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.follow = f
	for _, a := range s.active {
		f(a, true)
	}
}

func (s *Store) changed(a proto.ActiveAgentRun, active bool) {
	if s.follow != nil {
		s.follow(a, active)
	}
}

// Finish implements [agent.Active].
func (s *Store) Finish(_ context.Context, org, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active = slices.DeleteFunc(s.active, func(a proto.ActiveAgentRun) bool { return a.Org == org && a.ID == id })
	s.changed(proto.ActiveAgentRun{Org: org, ID: id}, false)
	return nil
}
