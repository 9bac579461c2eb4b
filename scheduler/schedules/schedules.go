// Package schedules starts executions at the ticks of schedules.
//
// A schedule has two entries in its bucket: its definition, which its owner changes, and its state,
// which the leading process changes. The state has the first tick that is not handled. The leader
// starts the executions of the ticks that are due, and then stores the state by compare-and-set. A
// tick is started under an idempotency key made of the schedule and the tick. So a tick that is
// handled again, by the same process, its successor or a second leader, starts nothing again.
package schedules

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
	_ "time/tzdata" // for hosts without a database of time zones

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	definitionPrefix = "def."
	statePrefix      = "run."
)

// Schedules stores schedules. Run must be running for changes to be seen.
type Schedules struct {
	definitions *store.Cache[definition]
	states      *store.Cache[proto.ScheduleState]
	index       index
}

// definition is a schedule with its ticker.
type definition struct {
	proto.Schedule
	ticker *ticker
	// recovered reports whether the leader has looked for ticks that were started but not stored.
	// Only the leader uses it.
	recovered bool
}

// Open reads all schedules.
func Open(ctx context.Context, st *store.Store, log *slog.Logger) (*Schedules, error) {
	s := &Schedules{index: index{orgs: map[string]map[string]*entry{}}}
	var err error
	if s.definitions, err = store.OpenCache(ctx, store.CacheConfig[definition]{
		Store: st, Bucket: st.Schedules, Keys: definitionPrefix + "*.*", Name: "schedules", Decode: decodeDefinition, DropMalformed: true,
		OnChange: s.index.setDefinition, Log: log,
	}); err != nil {
		return nil, err
	}
	s.states, err = store.OpenCache(ctx, store.CacheConfig[proto.ScheduleState]{
		Store: st, Bucket: st.Schedules, Keys: statePrefix + "*.*", Name: "states of schedules",
		Decode: store.DecodeJSON[proto.ScheduleState]("the state of schedule"), DropMalformed: true,
		OnChange: s.index.setState, Log: log,
	})
	return s, err
}

// Run applies changes by other processes until ctx is done.
func (s *Schedules) Run(ctx context.Context) error {
	var states sync.WaitGroup
	defer states.Wait()
	states.Go(func() { _ = s.states.Run(ctx) })
	return s.definitions.Run(ctx)
}

func decodeDefinition(e jetstream.KeyValueEntry) (*definition, error) {
	d := new(definition)
	err := json.Unmarshal(e.Value(), &d.Schedule)
	if err == nil && definitionKey(d.Org, d.ID) != e.Key() {
		err = fmt.Errorf("it is the entry of %s", d.ID)
	}
	if err == nil {
		d.ticker, err = newTicker(&d.Schedule)
	}
	if err != nil {
		return nil, fmt.Errorf("decode schedule %s: %w", e.Key(), err)
	}
	return d, nil
}

func definitionKey(org, id string) string { return definitionPrefix + org + "." + id }
func stateKey(org, id string) string      { return statePrefix + org + "." + id }

// Create stores a new schedule. It returns a [*proto.FieldError] if the schedule has no ticks, or
// if the organisation has [proto.MaxSchedules].
func (s *Schedules) Create(ctx context.Context, schedule proto.Schedule) error {
	t, err := newTicker(&schedule)
	if err != nil {
		return err
	}
	if len(s.List(schedule.Org)) >= proto.MaxSchedules {
		return proto.FieldErrorf("schedules", "are limited to %d for each organisation", proto.MaxSchedules)
	}
	return s.definitions.Create(ctx, definitionKey(schedule.Org, schedule.ID), &definition{Schedule: schedule, ticker: t})
}

// List returns the schedules of an organisation by id.
func (s *Schedules) List(org string) []proto.Schedule {
	list := s.index.list(org)
	slices.SortFunc(list, func(a, b proto.Schedule) int { return strings.Compare(a.ID, b.ID) })
	return list
}

// Get returns a schedule with its state, or [proto.ErrNotFound].
func (s *Schedules) Get(ctx context.Context, org, id string) (proto.Schedule, proto.ScheduleState, error) {
	d, _, err := s.definitions.Read(ctx, definitionKey(org, id))
	if err != nil {
		return proto.Schedule{}, proto.ScheduleState{}, err
	}
	state, err := s.state(ctx, org, id)
	return d.Schedule, state, err
}

// state returns the state of a schedule, which is zero at first.
func (s *Schedules) state(ctx context.Context, org, id string) (proto.ScheduleState, error) {
	state, _, err := s.states.Read(ctx, stateKey(org, id))
	if errors.Is(err, proto.ErrNotFound) {
		return proto.ScheduleState{}, nil
	}
	if err != nil {
		return proto.ScheduleState{}, err
	}
	return *state, nil
}

// Next returns the next n ticks of a schedule. There are fewer if it has no more or is paused.
func (s *Schedules) Next(schedule *proto.Schedule, n int) []time.Time {
	ticks := []time.Time{}
	t, err := newTicker(schedule)
	if err != nil || schedule.Paused {
		return ticks
	}
	for tick := t.next(time.Now()); len(ticks) < n && !tick.IsZero(); tick = t.next(tick) {
		ticks = append(ticks, tick)
	}
	return ticks
}

// Change stores what change makes of a schedule, and returns that. change may be called again. Its
// error is returned unchanged. Change returns [proto.ErrNotFound] if there is no such schedule.
func (s *Schedules) Change(ctx context.Context, org, id string, change func(*proto.Schedule) error) (proto.Schedule, error) {
	d, err := s.definitions.Update(ctx, definitionKey(org, id), func(old *definition) (*definition, error) {
		if old == nil {
			return nil, fmt.Errorf("schedule %s: %w", id, proto.ErrNotFound)
		}
		changed := &definition{Schedule: old.Schedule}
		if err := change(&changed.Schedule); err != nil {
			return nil, err
		}
		var err error
		changed.ticker, err = newTicker(&changed.Schedule)
		return changed, err
	})
	if err != nil {
		return proto.Schedule{}, err
	}
	return d.Schedule, nil
}

// Remove removes a schedule, or returns [proto.ErrNotFound]. Executions that have started go on.
func (s *Schedules) Remove(ctx context.Context, org, id string) error {
	if _, err := s.definitions.Remove(ctx, definitionKey(org, id), nil); err != nil {
		return err
	}
	_, err := s.states.Remove(ctx, stateKey(org, id), nil)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	return err
}

// Record adds a run that did not come from a tick to the history of a schedule.
func (s *Schedules) Record(ctx context.Context, org, id string, run proto.ScheduleRun) error {
	_, err := s.states.Update(ctx, stateKey(org, id), func(old *proto.ScheduleState) (*proto.ScheduleState, error) {
		state := proto.ScheduleState{}
		if old != nil {
			state = *old
		}
		state.Add(run)
		return &state, nil
	})
	return err
}
