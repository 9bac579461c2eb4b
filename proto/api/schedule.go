package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
)

const maxScheduleNameLen = 128 // characters

// ScheduleRequest is the part of a schedule that a request sets.
type ScheduleRequest struct {
	_ struct{} `doc:"null means absent."`

	Name     *string              `json:"name,omitempty" minLength:"1" maxLength:"128" doc:"For people. Needed for a new schedule."`
	Cron     *string              `json:"cron,omitempty" maxLength:"1024" doc:"A cron expression of 5 fields, or of 6 with the seconds first, or @hourly, @daily, @weekly, @monthly or @yearly. If both the day of the month and the day of the week are restricted, either is sufficient. L, W and # select days as in Quartz; days of the week are 0 to 7, where 0 and 7 are Sunday. A schedule has cron or every; setting one replaces the other."`
	TimeZone *string              `json:"time_zone,omitempty" default:"UTC" minLength:"1" doc:"The IANA time zone of cron. A time skipped when the clock is put forward is shifted by the same amount; a repeated time counts once, unless the expression matches every hour."`
	Every    *proto.Seconds       `json:"every,omitempty" minimum:"1" maximum:"31536000" doc:"Seconds between two ticks, counted from the creation."`
	Jitter   *proto.Seconds       `json:"jitter,omitempty" default:"0" minimum:"0" maximum:"3600" doc:"Delays each tick by up to this many seconds, differently for each schedule and tick."`
	Overlap  *proto.OverlapPolicy `json:"overlap,omitempty" default:"skip" doc:"What to do at a tick while the previous execution is still active. skip: start nothing. queue: up to 50 ticks wait. replace: cancel the previous execution."`
	Missed   *proto.MissedPolicy  `json:"missed,omitempty" default:"last" doc:"What to do about ticks that no server could start within a minute. none skips them, last starts only the most recent, all starts up to 50 from the last day, subject to overlap."`
	Paused   *bool                `json:"paused,omitempty" default:"false" doc:"Ticks during a pause do not count."`
	Request  *ExecuteRequest      `json:"request,omitempty" doc:"The request to execute at each tick, as an async execution with the API key that created the schedule: at most 262,144 bytes of JSON. Required for a new schedule."`
}

// Validate checks what can be checked without the present schedule.
func (r *ScheduleRequest) Validate() error {
	if r.Name != nil {
		if n := utf8.RuneCountInString(*r.Name); n < 1 || n > maxScheduleNameLen ||
			strings.ContainsFunc(*r.Name, unicode.IsControl) {
			return proto.FieldErrorf("name", "must be 1 to %d characters without control characters", maxScheduleNameLen)
		}
	}
	if r.Cron != nil && r.Every != nil {
		return proto.FieldErrorf("every", "must not be given together with cron")
	}
	if r.TimeZone != nil && *r.TimeZone == "" {
		return proto.FieldErrorf("time_zone", "must not be empty; leave it out for UTC")
	}
	if r.Request == nil {
		return nil
	}
	if r.Request.RunAt != nil || r.Request.Delay > 0 {
		return proto.FieldErrorf("request", "must have neither run_at nor delay; the schedule says when it runs")
	}
	var field *proto.FieldError
	if err := r.Request.Validate(); errors.As(err, &field) {
		return &proto.FieldError{Field: "request." + field.Field, Message: "request." + field.Message}
	}
	return nil
}

// Apply changes a schedule as the request asks. A new schedule has no name.
func (r *ScheduleRequest) Apply(s *proto.Schedule, now time.Time) error {
	switch {
	case s.Name == "" && r.Name == nil:
		return proto.FieldErrorf("name", "must be given")
	case s.Name == "" && r.Cron == nil && r.Every == nil:
		return proto.FieldErrorf("cron", "or every must be given")
	case s.Name == "" && r.Request == nil:
		return proto.FieldErrorf("request", "must be given")
	}
	set(&s.Name, r.Name)
	if r.Cron != nil || r.Every != nil {
		s.Cron, s.Every = "", 0
	}
	set(&s.Cron, r.Cron)
	set(&s.Every, r.Every)
	if r.Cron != nil && *r.Cron == "" {
		return proto.FieldErrorf("cron", "must not be empty")
	}
	set(&s.TimeZone, r.TimeZone)
	set(&s.Jitter, r.Jitter)
	set(&s.Overlap, r.Overlap)
	set(&s.Missed, r.Missed)
	set(&s.Paused, r.Paused)
	s.UpdatedAt = now.UTC()
	if r.Request == nil {
		return nil
	}
	var err error
	if s.Request, err = json.Marshal(r.Request); err != nil {
		return fmt.Errorf("encode the request of a schedule: %w", err)
	}
	if len(s.Request) > proto.MaxScheduleRequest {
		return proto.FieldErrorf("request", "must be at most %d bytes", proto.MaxScheduleRequest)
	}
	return nil
}

// Schedule is a schedule.
type Schedule struct {
	ID        string              `json:"id" pattern:"^sch_[a-z2-7]{26}$"`
	Name      string              `json:"name"`
	Cron      *string             `json:"cron" doc:"null if it has an interval."`
	TimeZone  string              `json:"time_zone"`
	Every     *proto.Seconds      `json:"every" doc:"Seconds; null if it has a cron expression."`
	Jitter    proto.Seconds       `json:"jitter" doc:"Seconds."`
	Overlap   proto.OverlapPolicy `json:"overlap"`
	Missed    proto.MissedPolicy  `json:"missed"`
	Paused    bool                `json:"paused"`
	KeyID     string              `json:"key_id" doc:"The API key under which the executions run."`
	CreatedAt Time                `json:"created_at"`
	UpdatedAt Time                `json:"updated_at"`
	Next      []Time              `json:"next" doc:"The next five ticks, without the jitter; none while it is paused."`
	Error     *string             `json:"error" doc:"Why it has no further ticks, such as a time zone unknown to this server; otherwise null. Setting another timing resumes it."`
}

// SchedulePreview is the ticks that a schedule would have.
type SchedulePreview struct {
	Ticks []Time `json:"ticks" doc:"In order, without a jitter."`
}

// Schedules is a page of schedules.
type Schedules struct {
	Schedules  []Schedule `json:"schedules"`
	NextCursor *string    `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// WholeSchedule is a schedule with its request and its history.
type WholeSchedule struct {
	Schedule
	Request ExecuteRequest `json:"request"`
	Waiting int            `json:"waiting" minimum:"0" doc:"Ticks that wait for the end of the previous execution."`
	Runs    []ScheduleRun  `json:"runs" doc:"The last 50 ticks, the newest first."`
	// WaitingFor is what the last started execution waits for.
	WaitingFor *proto.Missing `json:"waiting_for,omitempty"`
}

// ScheduleRun is a tick in the history of a schedule.
type ScheduleRun struct {
	Tick    Time             `json:"tick"`
	At      Time             `json:"at" doc:"When it was handled."`
	Outcome proto.RunOutcome `json:"outcome" doc:"started: the execution was accepted. skipped: the previous one had not ended. missed: no server could start it in time. failed: the execution was refused."`
	TraceID *proto.TraceID   `json:"trace_id" doc:"The execution that started; else null."`
	Reason  *string          `json:"reason" doc:"Why nothing started; else null."`
}

// NewSchedule returns the form of a schedule in lists. next are its next ticks, and err is why there
// are none.
func NewSchedule(s *proto.Schedule, next []time.Time, err error) Schedule {
	form := Schedule{
		ID: s.ID, Name: s.Name, Cron: optional(s.Cron), TimeZone: s.TimeZone, Every: optional(s.Every), Jitter: s.Jitter,
		Overlap: s.Overlap,
		Missed:  s.Missed, Paused: s.Paused, KeyID: s.Key, CreatedAt: Time{s.CreatedAt}, UpdatedAt: Time{s.UpdatedAt},
		Next: Times(next),
	}
	if err != nil {
		form.Error = new(err.Error())
	}
	return form
}

// Times returns the form of a list of times.
func Times(list []time.Time) []Time {
	form := make([]Time, len(list))
	for i, at := range list {
		form[i] = Time{at}
	}
	return form
}

// NewWholeSchedule returns the form of a schedule with its request and history.
func NewWholeSchedule(
	s *proto.Schedule, state *proto.ScheduleState, next []time.Time, noNext error,
) (*WholeSchedule, error) {
	whole := &WholeSchedule{Schedule: NewSchedule(s, next, noNext), Waiting: len(state.Waiting), Runs: []ScheduleRun{}}
	if state.Error != "" {
		whole.Error = &state.Error
	}
	if err := json.Unmarshal(s.Request, &whole.Request); err != nil {
		return nil, fmt.Errorf("decode the request of schedule %s: %w", s.ID, err)
	}
	for _, r := range state.Runs {
		whole.Runs = append(whole.Runs,
			ScheduleRun{Time{r.Tick}, Time{r.At}, r.Outcome, optional(r.TraceID), optional(r.Reason)})
	}
	return whole, nil
}
