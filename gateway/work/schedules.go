package work

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// shownTicks is the number of next ticks in answers, and the default of a preview.
	shownTicks = 5
	// maxPreview bounds the ticks of a preview.
	maxPreview = 100
)

// Schedules stores schedules.
type Schedules interface {
	// Create stores a new schedule. It returns a [*proto.FieldError] if the schedule has no ticks,
	// or if the organisation has too many schedules.
	Create(ctx context.Context, schedule proto.Schedule) error
	web.Pages[proto.Schedule] // by id
	// Get returns a schedule with its state, or [proto.ErrNotFound].
	Get(ctx context.Context, org, id string) (proto.Schedule, proto.ScheduleState, error)
	// Ticks returns the first n ticks of a schedule from a time on, paused or not. It returns a
	// [*proto.FieldError] if the schedule has no ticks.
	Ticks(schedule *proto.Schedule, from time.Time, n int) ([]time.Time, error)
	// Change stores the result of change for a schedule, and returns it. change may be called
	// again. Its error is returned unchanged. Change returns [proto.ErrNotFound] if there is no
	// such schedule, and a [*proto.FieldError] if it has no further ticks.
	Change(ctx context.Context, org, id string, change func(*proto.Schedule) error) (proto.Schedule, error)
	// Remove removes a schedule, or returns [proto.ErrNotFound].
	Remove(ctx context.Context, org, id string) error
	// Record adds a run that did not come from a tick to the history of a schedule.
	Record(ctx context.Context, org, id string, run proto.ScheduleRun) error
}

// StartChecker admits and starts the executions of schedules.
type StartChecker interface {
	// CheckScheduled rejects a schedule whose execution would be rejected now, or whose request caller
	// may not have written.
	CheckScheduled(ctx context.Context, schedule *proto.Schedule, caller *proto.Key) error
	// StartNow starts an execution of a schedule apart from its ticks.
	StartNow(ctx context.Context, schedule *proto.Schedule, now time.Time) (proto.TraceID, error)
}

// Waiting returns, for the queued ones of an organisation's executions, what workers lack to run
// them.
type Waiting = func(
	ctx context.Context, org string, ids []proto.TraceID,
) (map[proto.TraceID]*proto.Missing, error)

// ScheduleRoutes are the routes of schedules.
type ScheduleRoutes struct {
	*web.Core
	Schedules Schedules
	Checker   StartChecker
	Waiting   Waiting

	resource *web.Resource[proto.Schedule, api.Schedule]
}

// Handlers returns the handlers of the routes.
func (s *ScheduleRoutes) Handlers() []web.Handler {
	x := &web.Resource[proto.Schedule, api.Schedule]{
		Core: s.Core, Kind: "schedule", Path: "/v1/schedules", Param: "id", Form: s.form, Valid: proto.ValidScheduleID,
		Name:   func(s *proto.Schedule) (org, id string) { return s.Org, s.ID },
		Answer: func(list []api.Schedule, next *string) any { return api.Schedules{Schedules: list, NextCursor: next} },
		NotFound: func(string) error {
			return api.Errorf(api.CodeNotFound, "there is no schedule of that id; see /v1/schedules")
		},
	}
	s.resource = x
	return []web.Handler{
		{ID: "createSchedule", Handle: s.create},
		{ID: "listSchedules", Handle: x.List(web.OwnOrg, s.Schedules)},
		{ID: "previewSchedule", Handle: s.preview},
		{ID: "getSchedule", Handle: s.get},
		{ID: "patchSchedule", Handle: s.patch},
		{ID: "deleteSchedule", Handle: x.Remove(
			func(ctx context.Context, r *web.Request, id string) (*proto.Schedule, error) {
				return nil, s.Schedules.Remove(ctx, r.Key.Org, id)
			})},
		{ID: "runSchedule", Handle: s.run},
	}
}

func (s *ScheduleRoutes) create(w http.ResponseWriter, r *web.Request) error {
	request, err := web.DecodeBody[api.ScheduleRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	i, now := r.Info, time.Now()
	schedule := proto.Schedule{
		ID: proto.NewScheduleID(), Org: i.Key.Org, Key: i.Key.ID, TimeZone: "UTC", Overlap: proto.OverlapSkip,
		Missed: proto.MissedLast, CreatedAt: now.UTC(),
	}
	if err := request.Apply(&schedule, now); err != nil {
		return err
	}
	if err := s.Checker.CheckScheduled(r.Context(), &schedule, &i.Key); err != nil {
		return err
	}
	if err := s.Schedules.Create(r.Context(), schedule); err != nil {
		return err
	}
	s.resource.Location(w, &schedule)
	return s.write(r.Context(), w, http.StatusCreated, &schedule, new(proto.ScheduleState))
}

// form returns the form of a schedule in lists.
func (s *ScheduleRoutes) form(schedule *proto.Schedule) api.Schedule {
	next, err := s.nextTicks(schedule)
	return api.NewSchedule(schedule, next, err)
}

// nextTicks returns the next ticks of a schedule, none if it is paused.
func (s *ScheduleRoutes) nextTicks(schedule *proto.Schedule) ([]time.Time, error) {
	if schedule.Paused {
		return nil, nil
	}
	return s.Schedules.Ticks(schedule, time.Now(), shownTicks)
}

// preview answers with the ticks of a schedule that does not exist.
func (s *ScheduleRoutes) preview(w http.ResponseWriter, r *web.Request) error {
	fields, from := map[string]any{}, time.Now()
	for name, values := range r.URL.Query() {
		if len(values) > 1 {
			return proto.FieldErrorf(proto.Shorten(name), "must be given only once")
		}
		switch value := values[0]; name {
		case "cron", "time_zone":
			fields[name] = value
		case "every":
			if fields[name] = value; json.Unmarshal([]byte(value), new(float64)) == nil {
				fields[name] = json.RawMessage(value)
			}
		case "from":
			if err := web.ParseTime(&from, name, value); err != nil {
				return err
			}
			if year := from.UTC().Year(); year < 1970 || year > 2999 {
				return proto.FieldErrorf(name, "must be from 1970 to 2999")
			}
		case "count": // below
		default:
			return proto.FieldErrorf(proto.Shorten(name), "is no parameter of this route; see /docs")
		}
	}
	count, err := web.QueryInt(r, "count", 1, maxPreview, shownTicks)
	if err != nil {
		return err
	}
	body, err := json.Marshal(fields)
	if err != nil {
		return fmt.Errorf("encode the timing of a schedule: %w", err)
	}
	request, err := api.Decode[api.ScheduleRequest](body)
	if err != nil {
		return err
	}
	if request.Cron == nil && request.Every == nil {
		return proto.FieldErrorf("cron", "or every must be given")
	}
	schedule := proto.Schedule{Name: "preview", TimeZone: "UTC", CreatedAt: from.UTC()}
	if err := request.Apply(&schedule, from); err != nil {
		return err
	}
	ticks, err := s.Schedules.Ticks(&schedule, from, int(count))
	if err != nil {
		return err
	}
	return web.WriteValue(w, http.StatusOK, api.SchedulePreview{Ticks: api.Times(ticks)})
}

func (s *ScheduleRoutes) get(w http.ResponseWriter, r *web.Request) error {
	id, err := s.resource.ID(r)
	if err != nil {
		return err
	}
	schedule, state, err := s.Schedules.Get(r.Context(), r.Key.Org, id)
	if err != nil {
		return s.resource.Error(id, err)
	}
	return s.write(r.Context(), w, http.StatusOK, &schedule, &state)
}

func (s *ScheduleRoutes) patch(w http.ResponseWriter, r *web.Request) error {
	request, err := web.DecodeBody[api.ScheduleRequest](s.Core, w, r)
	if err != nil {
		return err
	}
	id, err := s.resource.ID(r)
	if err != nil {
		return err
	}
	org := r.Key.Org
	schedule, err := s.Schedules.Change(r.Context(), org, id, func(schedule *proto.Schedule) error {
		if err := request.Apply(schedule, time.Now()); err != nil || request.Request == nil {
			return err
		}
		return s.Checker.CheckScheduled(r.Context(), schedule, &r.Key)
	})
	if err != nil {
		return s.resource.Error(id, err)
	}
	_, state, err := s.Schedules.Get(r.Context(), org, id)
	if err != nil {
		return s.resource.Error(id, err)
	}
	return s.write(r.Context(), w, http.StatusOK, &schedule, &state)
}

// run starts an execution of a schedule now, whatever its overlap policy.
func (s *ScheduleRoutes) run(w http.ResponseWriter, r *web.Request) error {
	id, err := s.resource.ID(r)
	if err != nil {
		return err
	}
	org := r.Key.Org
	schedule, _, err := s.Schedules.Get(r.Context(), org, id)
	if err != nil {
		return s.resource.Error(id, err)
	}
	ctx, cancel := web.Detached(r.Context())
	defer cancel()
	now := time.Now().UTC()
	trace, err := s.Checker.StartNow(ctx, &schedule, now)
	if err != nil {
		return err
	}
	run := proto.ScheduleRun{Tick: now, At: now, Outcome: proto.RunStarted, TraceID: trace}
	if err := s.Schedules.Record(ctx, org, id, run); err != nil {
		return web.AfterAcceptance(trace, err)
	}
	w.Header().Set("Location", "/v1/executions/"+string(trace))
	w.Header().Set("X-Trace-Id", string(trace))
	return web.WriteValue(w, http.StatusAccepted, api.Accepted{TraceID: trace, Status: "running"})
}

func (s *ScheduleRoutes) write(
	ctx context.Context, w http.ResponseWriter, status int, schedule *proto.Schedule, state *proto.ScheduleState,
) error {
	next, noNext := s.nextTicks(schedule)
	whole, err := api.NewWholeSchedule(schedule, state, next, noNext)
	if err != nil {
		return err
	}
	if state.Last != "" {
		waiting, err := s.Waiting(ctx, schedule.Org, []proto.TraceID{state.Last})
		if err != nil {
			return err
		}
		whole.WaitingFor = waiting[state.Last]
	}
	return web.WriteValue(w, status, whole)
}
