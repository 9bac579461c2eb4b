package api

import (
	"time"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
)

// MetadataParam begins the parameters that select executions by their metadata.
const MetadataParam = "metadata."

// MaxMetadata is the number of keys that metadata may have.
const MaxMetadata = 10

// ValidMetadata reports whether an execution may have such metadata.
func ValidMetadata(key, value string) bool {
	return len(key) <= maxMetadataKeyLen && metadataPattern.MatchString(key) && utf8.ValidString(value) &&
		utf8.RuneCountInString(value) <= maxMetadataValueLen
}

// historyParams are the parameters of the list of executions.
func historyParams() []Param {
	return append([]Param{
		query("status", "Only executions with this status.", object{"type": "string", "enum": texts(Statuses())}),
		query("language", "Only programs in this language.", object{"type": "string", "enum": texts(proto.Languages())}),
		query("delivery_mode", "Only executions that were submitted in this mode.",
			object{"type": "string", "enum": texts(Modes())}),
		query("thread_id", "Only executions in this thread.", filter()),
		query("request_id", "Only executions that the request with this X-Request-Id submitted.", filter()),
		query("key", "Only executions under the API key of this id.", filter()),
		query("schedule", "Only executions that the schedule of this id started.", filter()),
		query("batch", "Only executions of the batch of this id.", filter()),
		query("pipeline", "Only executions that the run of a pipeline of this id started.", filter()),
		query("created_after", "Only executions that were created at this time or later.",
			object{"type": "string", "format": "date-time"}),
		query("created_before", "Only executions that were created before this time.",
			object{"type": "string", "format": "date-time"}),
		query("metadata.<key>", "Only executions whose metadata has this key with this value. May be given for several keys.",
			text()),
	}, paging()...)
}

// Statuses returns all statuses that an execution may have.
func Statuses() []proto.Status {
	return []proto.Status{
		proto.StatusQueued, proto.StatusRunning, proto.StatusSuccess, proto.StatusFailed, proto.StatusTimeout,
		proto.StatusOOM, proto.StatusSeccomp, proto.StatusCancelled,
	}
}

// Modes returns all delivery modes.
func Modes() []proto.Mode {
	return []proto.Mode{proto.ModeInline, proto.ModeStreaming, proto.ModeAsync, proto.ModeSandbox}
}

// Executions is a page of executions.
type Executions struct {
	Executions []ListedExecution `json:"executions" doc:"Newest first. A page may have fewer than the limit, even none, without being the last one: a search with rarely matching filters takes several requests."`
	NextCursor *string           `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
	Complete   bool              `json:"complete" doc:"Whether the index had caught up with the time of the request. Otherwise it did not catch up within 2 s, and the newest changes may be missing."`
	Behind     *int64            `json:"behind,omitempty" minimum:"1" doc:"Only if complete is false: by how many changes the index lagged, if known."`
}

// ListedExecution is an execution in a list, without its output.
type ListedExecution struct {
	TraceID               proto.TraceID         `json:"trace_id" format:"trace-id"`
	Status                proto.Status          `json:"status"`
	ExitCode              *int                  `json:"exit_code"`
	Error                 *string               `json:"error"`
	DurationMS            int64                 `json:"duration_ms" minimum:"0"`
	Mode                  proto.Mode            `json:"delivery_mode"`
	CreatedAt             Time                  `json:"created_at"`
	RunAt                 *Time                 `json:"run_at,omitempty" doc:"When it enters or entered the queue; absent if immediately."`
	CompletedAt           *Time                 `json:"completed_at"`
	WebhookURL            *string               `json:"webhook_url"`
	WebhookDeliveryStatus *proto.DeliveryStatus `json:"webhook_delivery_status"`
	ErrorCode             *string               `json:"error_code" format:"error-code"`
	ErrorMessage          *string               `json:"error_message"`
	Language              proto.Language        `json:"language"`
	Timeout               int                   `json:"timeout" minimum:"1" doc:"Seconds."`
	ThreadID              *string               `json:"thread_id"`
	Metadata              map[string]string     `json:"metadata"`
	Attempt               int                   `json:"attempt" minimum:"0"`
	QueuedMS              int64                 `json:"queued_ms" minimum:"0"`
	Profile               *string               `json:"profile" doc:"The sandbox profile that it was accepted with; null for executions of versions without profiles."`
	ScheduleID            *string               `json:"schedule_id,omitempty" doc:"The schedule that started it; absent for others."`
	Batch                 *BatchItem            `json:"batch,omitempty"`
	PipelineID            *string               `json:"pipeline_id,omitempty" doc:"The pipeline run that it is a step of; absent for others."`
	Step                  *string               `json:"step,omitempty" doc:"The name of that step, with its cell in parentheses."`
	KeyID                 string                `json:"key_id" doc:"The API key that it runs under."`
	WaitingFor            *proto.Missing        `json:"waiting_for,omitempty"`
	RequestID             *string               `json:"request_id" doc:"The X-Request-Id of the request that submitted it."`
}

// NewListedExecution returns the form of an execution in lists, at the time now. delivery is the
// status of its webhook, empty without one. missing is what workers lack to run it, nil if one can.
func NewListedExecution(
	r *proto.Record, delivery proto.DeliveryStatus, missing *proto.Missing, now time.Time,
) ListedExecution {
	e := NewExecution(r, delivery, missing, now)
	return ListedExecution{
		TraceID: e.TraceID, Status: e.Status, ExitCode: e.ExitCode, Error: e.Error, DurationMS: e.DurationMS, Mode: e.Mode,
		CreatedAt: e.CreatedAt, RunAt: e.RunAt, ScheduleID: e.ScheduleID,
		CompletedAt: e.CompletedAt, WebhookURL: e.WebhookURL, WebhookDeliveryStatus: e.WebhookDeliveryStatus,
		ErrorCode:    e.ErrorCode,
		ErrorMessage: e.ErrorMessage, Language: e.Language, Timeout: e.Timeout, ThreadID: e.ThreadID, Metadata: e.Metadata,
		Attempt:  e.Attempt,
		QueuedMS: e.QueuedMS, Profile: e.Profile, KeyID: r.Key, RequestID: optional(r.RequestID),
		Batch: e.Batch, PipelineID: e.PipelineID, Step: e.Step, WaitingFor: e.WaitingFor,
	}
}
