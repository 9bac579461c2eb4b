// Package schedules starts executions at the ticks of schedules.
//
// A schedule has two entries in its bucket: its definition, changed by its owner, and its state,
// changed by the leading process. The state has the first unhandled tick. The leader starts the
// executions of due ticks, and then stores the state by compare-and-set. A tick is started under an
// idempotency key made of the schedule and the tick. So handling a tick again, by the same process,
// its successor or a second leader, starts nothing twice.
package schedules

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
	_ "time/tzdata" // for hosts without a database of time zones

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/engine"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	definitionPrefix = "def."
	statePrefix      = "run."
)

// Schedules stores schedules. Run must be running for changes to be seen.
type Schedules struct {
	definitions *store.Collection[definition]
	states      *store.Collection[proto.ScheduleState]
	queue       engine.Queue[entry]
}

// definition is a schedule with its ticker.
type definition struct {
	proto.Schedule
	ticker *ticker
}

// Open reads all schedules.
func Open(ctx context.Context, st *store.Store, log *slog.Logger) (*Schedules, error) {
	s := new(Schedules)
	var err error
	if s.definitions, err = store.OpenCollection(ctx, store.CollectionConfig[definition]{
		Store: st, Bucket: st.Schedules, Keys: definitionPrefix + "*.*", Name: "schedules", Decode: decodeDefinition,
		Kind: proto.ChangedSchedules, DropMalformed: true,
		Order: store.ByKey[definition], Check: checkLimit, Log: log,
		OnChange: engine.Watch(&s.queue, definitionPrefix, func(e *entry, d *definition) bool {
			e.definition = d
			return e.exists()
		}),
	}); err != nil {
		return nil, err
	}
	s.states, err = store.OpenCollection(ctx, store.CollectionConfig[proto.ScheduleState]{
		Store: st, Bucket: st.Schedules, Keys: statePrefix + "*.*", Name: "states of schedules",
		Kind: proto.ChangedSchedules, DropMalformed: true, Log: log,
		OnChange: engine.Watch(&s.queue, statePrefix, func(e *entry, state *proto.ScheduleState) bool {
			e.state = state
			return e.exists()
		}),
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
	if err != nil {
		return nil, fmt.Errorf("decode schedule %s: %w", e.Key(), err)
	}
	if d.ticker, err = newTicker(&d.Schedule); err != nil { // for example its time zone is not known to this server
		d.ticker = failedTicker(err)
	}
	return d, nil
}

// timing determines when a schedule ticks. A jitter delays its ticks and does not change them.
type timing struct {
	cron, timeZone string
	every          proto.Seconds
	paused         bool
}

// timingOf returns the timing of a schedule. An interval has no time zone.
func timingOf(s *proto.Schedule) timing {
	t := timing{s.Cron, s.TimeZone, s.Every, s.Paused}
	if s.Cron == "" {
		t.timeZone = ""
	}
	return t
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
	schedule.TimedAt = schedule.CreatedAt
	return s.definitions.Create(ctx, definitionKey(schedule.Org, schedule.ID), &definition{Schedule: schedule, ticker: t})
}

func checkLimit(_ *definition, others []*definition) error {
	if len(others) >= proto.MaxSchedules {
		return proto.FieldErrorf("schedules", "are limited to %d for each organisation", proto.MaxSchedules)
	}
	return nil
}

// Page returns a page of the schedules of an organisation by id, see [store.Collection.Page].
func (s *Schedules) Page(
	org, after string, limit int, keep func(*proto.Schedule) bool,
) (page []proto.Schedule, next string) {
	return store.PageOf(s.definitions, func(d *definition) *proto.Schedule { return &d.Schedule }, org, after, limit, keep)
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

// state returns the state of a schedule, initially zero.
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

// Ticks returns the first n ticks of a schedule from a time on, paused or not. It returns a
// [*proto.FieldError] if the schedule has no ticks.
func (s *Schedules) Ticks(schedule *proto.Schedule, from time.Time, n int) ([]time.Time, error) {
	t, err := newTicker(schedule)
	if err != nil {
		return nil, err
	}
	var ticks []time.Time
	for after := from.Add(-1); len(ticks) < n; after = ticks[len(ticks)-1] {
		tick, err := t.next(after)
		if err != nil {
			return nil, err
		}
		ticks = append(ticks, tick)
	}
	return ticks, nil
}

// Change stores the result of change for a schedule, and returns it. change may be called again.
// Its error is returned unchanged. Change returns [proto.ErrNotFound] if there is no such schedule.
// Earlier ticks that have not started are dropped if the timing changes, and stay otherwise.
func (s *Schedules) Change(
	ctx context.Context, org, id string, change func(*proto.Schedule) error,
) (proto.Schedule, error) {
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
		if timingOf(&changed.Schedule) != timingOf(&old.Schedule) {
			changed.TimedAt = changed.UpdatedAt
		} else if err != nil {
			changed.ticker, err = failedTicker(err), nil
		}
		return changed, err
	})
	if err != nil {
		return proto.Schedule{}, err
	}
	return d.Schedule, nil
}

// Remove removes a schedule, or returns [proto.ErrNotFound]. Executions that have started continue.
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
