package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sort"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// shownTicks is the number of next ticks in answers.
const shownTicks = 5

// scheduleWait is how long the start of a scheduled execution waits for another process that starts
// the same one.
const scheduleWait = 5 * time.Second

func scheduleError(id string, err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "there is no schedule of that id; see /v1/schedules")
	}
	return fmt.Errorf("schedule %s: %w", id, err)
}

// scheduleID returns the id in the path. An id of the wrong form does not exist.
func scheduleID(r *http.Request) (string, error) {
	id := chi.URLParam(r, "id")
	if !proto.ValidScheduleID(id) {
		return "", scheduleError(id, proto.ErrNotFound)
	}
	return id, nil
}

func (s *Server) createSchedule(w http.ResponseWriter, r *http.Request) error {
	request, err := decodeBody[api.ScheduleRequest](s, w, r)
	if err != nil {
		return err
	}
	i, now := infoOf(r.Context()), time.Now()
	schedule := proto.Schedule{
		ID: proto.NewScheduleID(), Org: i.key.Org, Key: i.key.ID, TimeZone: "UTC", Overlap: proto.OverlapSkip, Missed: proto.MissedLast, CreatedAt: now.UTC(),
	}
	if err := request.Apply(&schedule, now); err != nil {
		return err
	}
	if err := s.checkScheduled(r.Context(), &schedule); err != nil {
		return err
	}
	if err := s.Schedules.Create(r.Context(), schedule); err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/schedules/"+schedule.ID)
	return s.writeSchedule(w, http.StatusCreated, &schedule, new(proto.ScheduleState))
}

// checkScheduled refuses a schedule whose execution would be refused now.
func (s *Server) checkScheduled(ctx context.Context, schedule *proto.Schedule) error {
	_, err := s.scheduledJob(ctx, schedule, proto.NewTraceID())
	return err
}

func (s *Server) listSchedules(w http.ResponseWriter, r *http.Request) error {
	limit, err := pageSize(r)
	if err != nil {
		return err
	}
	cursor := r.URL.Query().Get("cursor")
	if cursor != "" && !proto.ValidScheduleID(cursor) {
		return badCursor()
	}
	list := s.Schedules.List(infoOf(r.Context()).key.Org)
	list = list[sort.Search(len(list), func(i int) bool { return list[i].ID > cursor }):]
	answer := api.Schedules{Schedules: []api.Schedule{}}
	for i := range list[:min(len(list), limit)] {
		answer.Schedules = append(answer.Schedules, api.NewSchedule(&list[i], s.Schedules.Next(&list[i], shownTicks)))
	}
	if len(list) > limit {
		answer.NextCursor = &list[limit-1].ID
	}
	return writeValue(w, http.StatusOK, answer)
}

func (s *Server) getSchedule(w http.ResponseWriter, r *http.Request) error {
	id, err := scheduleID(r)
	if err != nil {
		return err
	}
	schedule, state, err := s.Schedules.Get(r.Context(), infoOf(r.Context()).key.Org, id)
	if err != nil {
		return scheduleError(id, err)
	}
	return s.writeSchedule(w, http.StatusOK, &schedule, &state)
}

func (s *Server) patchSchedule(w http.ResponseWriter, r *http.Request) error {
	request, err := decodeBody[api.ScheduleRequest](s, w, r)
	if err != nil {
		return err
	}
	id, err := scheduleID(r)
	if err != nil {
		return err
	}
	org := infoOf(r.Context()).key.Org
	schedule, err := s.Schedules.Change(r.Context(), org, id, func(schedule *proto.Schedule) error {
		if err := request.Apply(schedule, time.Now()); err != nil || request.Request == nil {
			return err
		}
		return s.checkScheduled(r.Context(), schedule)
	})
	if err != nil {
		return scheduleError(id, err)
	}
	_, state, err := s.Schedules.Get(r.Context(), org, id)
	if err != nil {
		return scheduleError(id, err)
	}
	return s.writeSchedule(w, http.StatusOK, &schedule, &state)
}

func (s *Server) deleteSchedule(w http.ResponseWriter, r *http.Request) error {
	id, err := scheduleID(r)
	if err != nil {
		return err
	}
	if err := s.Schedules.Remove(r.Context(), infoOf(r.Context()).key.Org, id); err != nil {
		return scheduleError(id, err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// runSchedule starts an execution of a schedule now, whatever its overlap policy.
func (s *Server) runSchedule(w http.ResponseWriter, r *http.Request) error {
	id, err := scheduleID(r)
	if err != nil {
		return err
	}
	org := infoOf(r.Context()).key.Org
	schedule, _, err := s.Schedules.Get(r.Context(), org, id)
	if err != nil {
		return scheduleError(id, err)
	}
	ctx, cancel := detached(r.Context())
	defer cancel()
	now := time.Now().UTC()
	trace, err := s.submitScheduled(ctx, &schedule, fmt.Sprint("now ", now.UnixNano()))
	if err != nil {
		return err
	}
	run := proto.ScheduleRun{Tick: now, At: now, Outcome: proto.RunStarted, TraceID: trace}
	if err := s.Schedules.Record(ctx, org, id, run); err != nil {
		return afterAcceptance(trace, err)
	}
	w.Header().Set("Location", "/v1/executions/"+string(trace))
	w.Header().Set("X-Trace-Id", string(trace))
	return writeValue(w, http.StatusAccepted, api.Accepted{TraceID: trace, Status: "running"})
}

func (s *Server) writeSchedule(w http.ResponseWriter, status int, schedule *proto.Schedule, state *proto.ScheduleState) error {
	whole, err := api.NewWholeSchedule(schedule, state, s.Schedules.Next(schedule, shownTicks))
	if err != nil {
		return err
	}
	return writeValue(w, status, whole)
}

// StartScheduled starts the execution of a schedule's tick, unless it was started before, and
// returns its id. refused is the reason why it will never start, empty if it did. After an error it
// may have started.
func (s *Server) StartScheduled(ctx context.Context, schedule *proto.Schedule, tick time.Time) (id proto.TraceID, refused string, err error) {
	id, err = s.submitScheduled(ctx, schedule, tickName(tick))
	refused, err = s.rejectionReason(ctx, err, schedule.Key)
	if err != nil || refused != "" {
		return "", refused, err
	}
	return id, "", nil
}

// StartedTick returns the execution that was started for a schedule's tick, or [proto.ErrNotFound].
func (s *Server) StartedTick(ctx context.Context, schedule *proto.Schedule, tick time.Time) (proto.TraceID, error) {
	return s.Submissions.Accepted(ctx, schedule.Key, scheduledName(schedule, tickName(tick)))
}

// tickName names the execution of a tick among those of its schedule.
func tickName(tick time.Time) string { return fmt.Sprint("tick ", tick.Unix()) }

// scheduledName returns the idempotency key of an execution of a schedule.
func scheduledName(schedule *proto.Schedule, name string) string { return schedule.ID + " " + name }

// rejectionReason returns the reason why a submission under an API key will never be accepted, or
// the error after which it is to be repeated. Both are empty without an error.
func (s *Server) rejectionReason(ctx context.Context, err error, key string) (string, error) {
	if err == nil {
		return "", nil
	}
	for _, again := range []error{proto.ErrMayRun, proto.ErrSubmissionPending, proto.ErrNotConfirmed, context.DeadlineExceeded, context.Canceled} {
		if errors.Is(err, again) {
			return "", err
		}
	}
	plan := entitlement{}
	if key, ok := s.principal(key); ok {
		plan, _ = s.entitlementOf(ctx, key)
	}
	e := toAPI(err, &plan)
	// A broken sandbox is an internal error for clients.
	if _, known := errors.AsType[*api.Error](err); e.Code.Status() >= http.StatusInternalServerError && !known || e.Code.Status() == http.StatusServiceUnavailable {
		return "", err
	}
	return e.Message, nil
}

// FailedTick returns the webhook of a tick whose execution was refused, nil if neither the request
// of the schedule nor its key has a URL.
func (s *Server) FailedTick(schedule *proto.Schedule, run proto.ScheduleRun) (*proto.Delivery, error) {
	request := new(api.ExecuteRequest)
	if err := json.Unmarshal(schedule.Request, request); err != nil {
		return nil, fmt.Errorf("decode the request of schedule %s: %w", schedule.ID, err)
	}
	url := request.WebhookURL
	if _, ok := s.principal(schedule.Key); ok && url == "" {
		url = s.Webhooks.Webhook(schedule.Key).URL
	}
	if url == "" {
		return nil, nil
	}
	return schedule.NewDelivery(url, run)
}

// submitScheduled submits an execution of a schedule. One with the same name is the same execution.
func (s *Server) submitScheduled(ctx context.Context, schedule *proto.Schedule, name string) (_ proto.TraceID, err error) {
	id := proto.NewTraceID()
	ctx, span := s.startBackgroundSpan(ctx, id, "schedule", schedule.Org, schedule.Key)
	defer func() { endBackgroundSpan(span, err) }()
	job, err := s.scheduledJob(ctx, schedule, id)
	if err != nil {
		return "", err
	}
	return s.submitNew(ctx, &proto.Submission{
		Job: job, IdempotencyKey: scheduledName(schedule, name), BodyHash: schedule.ID, WaitUntil: time.Now().Add(scheduleWait),
	})
}

// scheduledJob returns the job of a schedule's execution, under the schedule's own key.
func (s *Server) scheduledJob(ctx context.Context, schedule *proto.Schedule, id proto.TraceID) (*proto.Job, error) {
	key, plan, err := s.validKey(ctx, schedule.Key)
	if err != nil {
		return nil, err
	}
	request := new(api.ExecuteRequest)
	if err := json.Unmarshal(schedule.Request, request); err != nil {
		return nil, fmt.Errorf("decode the request of schedule %s: %w", schedule.ID, err)
	}
	job, err := s.newJob(ctx, request, client{key: key, plan: plan}, proto.ModeAsync, id, 0)
	if err != nil {
		return nil, err
	}
	job.ScheduleID = schedule.ID
	return job, nil
}

// validKey returns the API key under which work goes on without a request, and what it may do.
func (s *Server) validKey(ctx context.Context, id string) (*proto.Key, entitlement, error) {
	key, ok := s.principal(id)
	if !ok || !key.Valid(time.Now()) {
		return nil, entitlement{}, api.Errorf(api.CodeForbidden, "the API key or member %s, under which this runs, is revoked, removed or has expired; create it again with another one", id)
	}
	if !key.Has(proto.ScopeExecute) {
		return nil, entitlement{}, api.Errorf(api.CodeForbidden, "the API key or member %s, under which this runs, has lost the scope execute; create it again with another one", id)
	}
	plan, err := s.entitlementOf(ctx, key)
	return key, plan, err
}
