package proto

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// Limits of schedules.
const (
	// MaxSchedules bounds the schedules of an organisation.
	MaxSchedules = 10_000
	// MaxScheduleRequest bounds the execute request of a schedule, in bytes of JSON.
	MaxScheduleRequest = 256 << 10
	// MaxScheduleRuns limits a schedule's kept runs, and its waiting ones.
	MaxScheduleRuns = 50
)

// Schedule starts an execution at each of its ticks. The ticks are given by Cron or by Every.
type Schedule struct {
	ID       string        `json:"id"`
	Org      string        `json:"org"`
	Key      string        `json:"key"` // the id of the API key under which the executions run
	Name     string        `json:"name"`
	Cron     string        `json:"cron,omitempty"`
	TimeZone string        `json:"time_zone"` // IANA name, of Cron
	Every    Seconds       `json:"every,omitempty"`
	Jitter   Seconds       `json:"jitter,omitempty"` // each tick is later by a part of it
	Overlap  OverlapPolicy `json:"overlap"`
	Missed   MissedPolicy  `json:"missed"`
	Paused   bool          `json:"paused,omitempty"`
	// Request is the execute request in JSON, with defaults filled in.
	Request   json.RawMessage `json:"request"`
	CreatedAt time.Time       `json:"created_at"`
	UpdatedAt time.Time       `json:"updated_at"`
	TimedAt   time.Time       `json:"timed_at"` // when its timing was set; ticks before it do not count
}

// OverlapPolicy decides what happens at a tick while the previous execution is still active.
type OverlapPolicy string

// The policies. With OverlapQueue, up to [MaxScheduleRuns] ticks wait and run one at a time.
const (
	OverlapSkip    OverlapPolicy = "skip"
	OverlapQueue   OverlapPolicy = "queue"
	OverlapReplace OverlapPolicy = "replace" // the previous execution is cancelled
)

// MissedPolicy decides what happens to ticks missed while no process could start executions.
type MissedPolicy string

// The policies. With MissedAll, the newest [MaxScheduleRuns] of the last day run.
const (
	MissedNone MissedPolicy = "none"
	MissedLast MissedPolicy = "last"
	MissedAll  MissedPolicy = "all"
)

// RunOutcome is what became of a tick.
type RunOutcome string

// The outcomes.
const (
	RunStarted RunOutcome = "started" // the execution was accepted
	RunSkipped RunOutcome = "skipped" // because the previous execution had not ended
	RunMissed  RunOutcome = "missed"  // and not made up for
	RunFailed  RunOutcome = "failed"  // the execution was refused
)

// ScheduleRun is a tick in the history of a schedule.
type ScheduleRun struct {
	Tick    time.Time  `json:"tick"`
	At      time.Time  `json:"at"` // when it was handled
	Outcome RunOutcome `json:"outcome"`
	TraceID TraceID    `json:"trace_id,omitempty"` // of a started execution
	Reason  string     `json:"reason,omitempty"`   // of the other outcomes
}

// ScheduleState is the progress of a schedule.
type ScheduleState struct {
	TimedAt time.Time     `json:"timed_at"`          // of the schedule that Next was computed for
	Next    time.Time     `json:"next,omitzero"`     // the first tick that is not handled; zero for none
	Error   string        `json:"error,omitempty"`   // why there is no next tick
	Waiting []time.Time   `json:"waiting,omitempty"` // ticks that wait for the end of the last execution
	Last    TraceID       `json:"last,omitempty"`    // the execution that was started last
	Runs    []ScheduleRun `json:"runs,omitempty"`    // at most [MaxScheduleRuns], newest first
}

// Add adds a run to the history.
func (s *ScheduleState) Add(r ScheduleRun) {
	s.Runs = append([]ScheduleRun{r}, s.Runs[:min(len(s.Runs), MaxScheduleRuns-1)]...)
	if r.TraceID != "" {
		s.Last = r.TraceID
	}
}

// NewDelivery returns the webhook of a tick whose execution was refused.
func (s *Schedule) NewDelivery(url string, r ScheduleRun) (*Delivery, error) {
	body := struct {
		Event      string `json:"event"`
		ScheduleID string `json:"schedule_id"`
		Name       string `json:"name"`
		Tick       string `json:"tick"`
		Timestamp  string `json:"timestamp"`
		Reason     string `json:"reason"`
	}{EventSchedule, s.ID, s.Name, r.Tick.UTC().Format(TimeLayout), r.At.UTC().Format(TimeLayout), r.Reason}
	return NewEventDelivery(fmt.Sprintf("%s of %s at %d", EventSchedule, s.ID, r.Tick.Unix()), s.Org, s.Key,
		url, body, r.At)
}

const scheduleIDPrefix = "sch_"

// NewScheduleID returns a new random id of a schedule.
func NewScheduleID() string { return scheduleIDPrefix + strings.ToLower(rand.Text()) }

// ValidScheduleID reports whether text has the form of a schedule's id.
func ValidScheduleID(text string) bool {
	rest, ok := strings.CutPrefix(text, scheduleIDPrefix)
	return ok && len(rest) == len(rand.Text()) && strings.Trim(rest, "abcdefghijklmnopqrstuvwxyz234567") == ""
}
