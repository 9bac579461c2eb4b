package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// BatchSettings are the settings of a new batch.
type BatchSettings struct {
	_ struct{} `doc:"null means absent."`

	MaxParallel   int               `json:"max_parallel,omitempty" minimum:"1" maximum:"100000" doc:"The maximum number of items queued or running at a time. By default it depends on the plan."`
	StopOnFailure bool              `json:"stop_on_failure,omitempty" default:"false" doc:"Stop after the first failed item: running items continue, and those that have not started are cancelled."`
	Priority      int               `json:"priority,omitempty" default:"0" minimum:"0" maximum:"9" doc:"Items of the organisation's batches with a higher priority are submitted first. Among batches of the same priority they take turns."`
	Metadata      map[string]string `json:"metadata,omitempty" maxProperties:"10" keyPattern:"^[A-Za-z0-9][A-Za-z0-9_.-]*$" keyMaxLength:"40" valueMaxLength:"256" doc:"Of the batch. Items have their own."`
	WebhookURL    string            `json:"webhook_url,omitempty" format:"webhook-url" doc:"Where batch.completed is delivered when all items have ended, instead of the key's own URL."`
	ItemWebhooks  bool              `json:"item_webhooks,omitempty" default:"false" doc:"Items have webhooks like other async executions: at their own webhook_url, else at the key's. At most 100 different URLs."`
	Request       *BatchItemRequest `json:"request,omitempty" doc:"Fields that items share. An item's own fields replace them; env_vars and metadata are merged by name."`
}

// Validate checks the values of the fields, but not that items have what request lacks.
func (s *BatchSettings) Validate() error {
	if err := checkMetadata(s.Metadata); err != nil || s.Request == nil {
		return err
	}
	shared := *s.Shared()
	if shared.Code == "" {
		shared.Code = "from the items"
	}
	var field *proto.FieldError
	if err := shared.Validate(); errors.As(err, &field) {
		return &proto.FieldError{Field: "request." + field.Field, Message: "request." + field.Message}
	}
	return nil
}

// Shared returns the fields that items share, nil for none.
func (s *BatchSettings) Shared() *ExecuteRequest {
	if s.Request == nil {
		return nil
	}
	shared := s.Request.ExecuteRequest
	shared.Code = s.Request.Code
	return &shared
}

// Apply sets what the settings say about a new batch.
func (s *BatchSettings) Apply(b *proto.Batch) {
	b.MaxParallel, b.StopOnFailure, b.Priority, b.Metadata = s.MaxParallel, s.StopOnFailure, s.Priority, s.Metadata
	b.ItemWebhooks = s.ItemWebhooks
}

// BatchRequest asks for many executions. It documents the body, which is read by [BatchBody].
type BatchRequest struct {
	BatchSettings
	Items []BatchItemRequest `json:"items" maxItems:"100000" doc:"The last member of the object."`
}

// BatchItemRequest asks for an execution of a batch.
type BatchItemRequest struct {
	_ struct{} `doc:"A request to execute a program. An item omits the fields given in the batch's request. null means absent."`

	ExecuteRequest
	Code string `json:"code,omitempty" minLength:"1" maxLength:"1048576" doc:"The program: 1 byte to 1 MiB of UTF-8."`
}

// DecodeBatchItem decodes and validates an item of a batch. shared has the fields that it may leave
// out; nil for none. Errors are [*proto.FieldError].
func DecodeBatchItem(shared *ExecuteRequest, item []byte) (*ExecuteRequest, error) {
	r := new(ExecuteRequest)
	if shared != nil {
		*r = *shared
	}
	env, metadata := r.Env, r.Metadata
	if err := decodeMembers(r, item, true); err != nil {
		return nil, err
	}
	switch {
	case r.RunAt != nil:
		return nil, proto.FieldErrorf("run_at", "must not be given in a batch")
	case r.Delay != 0:
		return nil, proto.FieldErrorf("delay", "must not be given in a batch")
	}
	r.Env, r.Metadata = merged(env, r.Env), merged(metadata, r.Metadata)
	return r, r.Validate()
}

// merged returns the entries of both maps. own replaces entries of shared.
func merged(shared, own map[string]string) map[string]string {
	if len(shared) == 0 {
		return own
	}
	all := maps.Clone(shared)
	maps.Copy(all, own)
	return all
}

// BatchItem is the place of an execution in a batch.
type BatchItem struct {
	_ struct{} `doc:"The batch that the execution belongs to. Absent if there is none."`

	ID    string `json:"id" pattern:"^bat_[a-z2-7]{26}$"`
	Index int    `json:"index" minimum:"0" doc:"The item's place in the batch."`
}

// Batch is the state of a batch.
type Batch struct {
	ID                    string                `json:"id" pattern:"^bat_[a-z2-7]{26}$"`
	Status                proto.BatchStatus     `json:"status" doc:"completed: all items have ended, possibly some in failure. failed: a failure stopped it, see reason. stopping: waiting items are cancelled, and others have not ended."`
	Reason                *string               `json:"reason" doc:"Why it was stopped; else null."`
	Counts                proto.BatchCounts     `json:"counts" doc:"Items by status, at most a second or two old."`
	Rate                  float64               `json:"rate" minimum:"0" doc:"Items that ended per second, over about the last half minute, not counting cancelled ones."`
	TimeLeft              *int64                `json:"time_left" minimum:"0" doc:"Seconds, estimated from the rate; null unless the batch is running and the rate is known."`
	MaxParallel           *int                  `json:"max_parallel"`
	StopOnFailure         bool                  `json:"stop_on_failure"`
	Priority              int                   `json:"priority" minimum:"0" maximum:"9"`
	Metadata              map[string]string     `json:"metadata"`
	KeyID                 string                `json:"key_id" doc:"The API key under which the items run."`
	ItemWebhooks          bool                  `json:"item_webhooks"`
	WebhookURL            *string               `json:"webhook_url" doc:"Where its end is delivered."`
	WebhookDeliveryStatus *proto.DeliveryStatus `json:"webhook_delivery_status" doc:"Of its end; null in lists, before the end and without a webhook."`
	Retries               int                   `json:"retries" minimum:"0"`
	WaitingFor            *proto.Missing        `json:"waiting_for,omitempty"`
	CreatedAt             Time                  `json:"created_at"`
	StartedAt             *Time                 `json:"started_at" doc:"When the first item was submitted."`
	CompletedAt           *Time                 `json:"completed_at" doc:"When the last item had ended."`
}

// rateExpires is the age at which the rate of a batch is stale.
const rateExpires = time.Minute

// NewBatch returns the state of a batch at the time now. A batch has ended for clients once it can be
// retried and removed: when its webhook is stored.
func NewBatch(b *proto.Batch, s *proto.BatchState, now time.Time) Batch {
	if b.Ended(s) && !b.Finished(s) {
		before := *s
		before.EndedAt = time.Time{}
		s = &before
	}
	form := Batch{
		ID: b.ID, Status: b.Status(s), Reason: optional(s.Reason), Counts: s.Counts, MaxParallel: optional(b.MaxParallel),
		StopOnFailure: b.StopOnFailure,
		Priority:      b.Priority, Metadata: orEmpty(b.Metadata), KeyID: b.Key, ItemWebhooks: b.ItemWebhooks,
		WebhookURL: optional(b.WebhookURL),
		Retries:    b.Retries, CreatedAt: Time{b.CreatedAt}, StartedAt: optionalTime(s.StartedAt),
	}
	if form.Counts.Total == 0 { // no process has looked at it yet
		form.Counts = proto.BatchCounts{Total: b.Total, Waiting: b.Total}
	}
	if s.Retries < b.Retries { // no process has looked at that yet
		form.Counts.Waiting, form.Counts.Failed = form.Counts.Waiting+form.Counts.Failed, 0
		if b.RetryCancelled {
			form.Counts.Waiting, form.Counts.Cancelled = form.Counts.Waiting+form.Counts.Cancelled, 0
		}
		form.Reason = nil // of the end before
		return form
	}
	if b.Ended(s) {
		form.CompletedAt = &Time{s.EndedAt}
		return form
	}
	if now.Sub(s.UpdatedAt) < rateExpires && s.Rate > 0 {
		form.Rate = math.Round(s.Rate*100) / 100
		if form.Status == proto.BatchRunning {
			form.TimeLeft = new(int64(math.Ceil(float64(form.Counts.Total-form.Counts.Ended()) / s.Rate)))
		}
	}
	return form
}

// Batches is a page of batches.
type Batches struct {
	Batches    []Batch `json:"batches"`
	NextCursor *string `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// BatchRetryRequest asks for a retry of a batch.
type BatchRetryRequest struct {
	Cancelled bool `json:"cancelled,omitempty" default:"false" doc:"Also start the items that were cancelled."`
}

// BatchResult is a line of the results of a batch.
type BatchResult struct {
	Index             int               `json:"index" minimum:"0"`
	TraceID           *proto.TraceID    `json:"trace_id" doc:"null if it was never submitted."`
	Status            proto.Status      `json:"status"`
	ExitCode          *int              `json:"exit_code"`
	Stdout            *string           `json:"stdout"`
	Stderr            *string           `json:"stderr"`
	Results           []proto.Display   `json:"results,omitempty" maxItems:"100" doc:"As in the result."`
	Error             *string           `json:"error"`
	ErrorCode         *string           `json:"error_code" format:"error-code"`
	ErrorMessage      *string           `json:"error_message" doc:"Also reports that the record has expired."`
	DurationMS        int64             `json:"duration_ms" minimum:"0"`
	StdoutTruncated   bool              `json:"stdout_truncated"`
	StderrTruncated   bool              `json:"stderr_truncated"`
	ResultsTruncated  bool              `json:"results_truncated,omitempty" doc:"As in the result."`
	StdoutInvalidUTF8 bool              `json:"stdout_invalid_utf8,omitempty" doc:"As in the result."`
	StderrInvalidUTF8 bool              `json:"stderr_invalid_utf8,omitempty" doc:"As in the result."`
	Metadata          map[string]string `json:"metadata"`
	Unreadable        bool              `json:"unreadable,omitempty" doc:"The server could not read the record, so the line only has the status."`
}

// NewUnreadableResult returns the line of an item that has ended, whose record cannot be read.
func NewUnreadableResult(index int, status proto.ItemStatus, id proto.TraceID) *BatchResult {
	line := NewBatchResult(index, status, nil)
	line.TraceID, line.Unreadable = &id, true
	line.ErrorMessage = new("The server could not read the result; its log has the cause. Download the results again, " +
		"or ask for this one at /v1/executions/" + string(id) + ".")
	return line
}

// NewBatchResult returns the line of an item that has ended. record is nil if there is none.
func NewBatchResult(index int, status proto.ItemStatus, record *proto.Record) *BatchResult {
	line := &BatchResult{Index: index, Status: proto.StatusCancelled, Metadata: map[string]string{}}
	if record == nil {
		message := "The batch was stopped before this item was submitted."
		if status != proto.ItemCancelled {
			line.Status = map[proto.ItemStatus]proto.Status{
				proto.ItemSucceeded: proto.StatusSuccess, proto.ItemFailed: proto.StatusFailed,
			}[status]
			message = "The result is not kept any more."
		}
		line.ErrorMessage = &message
		return line
	}
	line.TraceID, line.Status, line.Metadata = &record.TraceID, record.Status, orEmpty(record.Metadata)
	if r := record.Result; r != nil {
		line.ExitCode, line.Stdout, line.Stderr = &r.ExitCode, &r.Stdout, &r.Stderr
		line.Error, line.ErrorCode, line.ErrorMessage = r.Error, r.ErrorCode, r.ErrorMessage
		line.StdoutInvalidUTF8, line.StderrInvalidUTF8 = r.StdoutInvalidUTF8, r.StderrInvalidUTF8
		line.Results, line.ResultsTruncated = r.Results, r.ResultsTruncated
		line.DurationMS, line.StdoutTruncated, line.StderrTruncated = r.DurationMS, r.StdoutTruncated, r.StderrTruncated
	}
	return line
}

// Write writes the line with its line break, and encodes the output in pieces: it may be many MiB.
func (r *BatchResult) Write(w io.Writer) error {
	rest := *r
	rest.Stdout, rest.Stderr, rest.Results = nil, nil, nil
	small, err := json.Marshal(rest)
	if err != nil {
		return fmt.Errorf("encode the result of item %d: %w", r.Index, err)
	}
	small = append(small, '\n')
	if r.Stdout == nil || r.Stderr == nil {
		_, err := w.Write(small)
		return err
	}
	return writeWithOutputs(w, small, *r.Stdout, *r.Stderr, r.Results)
}
