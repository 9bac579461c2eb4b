package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Execution is the state of an execution.
type Execution struct {
	TraceID               proto.TraceID         `json:"trace_id" format:"trace-id"`
	Status                proto.Status          `json:"status"`
	ExitCode              *int                  `json:"exit_code"`
	Stdout                *string               `json:"stdout"`
	Stderr                *string               `json:"stderr"`
	Results               []proto.Display       `json:"results,omitempty" maxItems:"100" doc:"As in the result."`
	Error                 *string               `json:"error"`
	DurationMS            int64                 `json:"duration_ms" minimum:"0"`
	Mode                  proto.Mode            `json:"delivery_mode"`
	CreatedAt             Time                  `json:"created_at"`
	CompletedAt           *Time                 `json:"completed_at"`
	RunAt                 *Time                 `json:"run_at,omitempty" doc:"When it enters or entered the queue; absent if immediately."`
	WebhookURL            *string               `json:"webhook_url"`
	WebhookDeliveryStatus *proto.DeliveryStatus `json:"webhook_delivery_status"`
	ErrorCode             *string               `json:"error_code" format:"error-code"`
	ErrorMessage          *string               `json:"error_message"`
	ProgramExitCode       *int                  `json:"program_exit_code,omitempty" doc:"As in the result."`
	Language              proto.Language        `json:"language"`
	Timeout               int                   `json:"timeout" minimum:"1" doc:"Seconds."`
	ThreadID              *string               `json:"thread_id"`
	Metadata              map[string]string     `json:"metadata"`
	Attempt               int                   `json:"attempt" minimum:"0"`
	QueuedMS              int64                 `json:"queued_ms" minimum:"0"`
	StdoutTruncated       bool                  `json:"stdout_truncated" doc:"The program wrote more to stdout than its sandbox keeps."`
	StderrTruncated       bool                  `json:"stderr_truncated" doc:"The program wrote more to stderr than its sandbox keeps."`
	ResultsTruncated      bool                  `json:"results_truncated,omitempty" doc:"As in the result."`
	StdoutInvalidUTF8     bool                  `json:"stdout_invalid_utf8,omitempty" doc:"As in the result."`
	StderrInvalidUTF8     bool                  `json:"stderr_invalid_utf8,omitempty" doc:"As in the result."`
	OutputTruncated       bool                  `json:"output_truncated" doc:"Older events of the output stream are gone."`
	OutputBudgetExceeded  bool                  `json:"output_budget_exceeded,omitempty" doc:"As in the result."`
	Profile               *string               `json:"profile" doc:"The sandbox profile that it was accepted with; null for executions of versions without profiles."`
	ScheduleID            *string               `json:"schedule_id,omitempty" doc:"The schedule that started it; absent for others."`
	Network               *NetworkUsage         `json:"network,omitempty"`
	Batch                 *BatchItem            `json:"batch,omitempty"`
	PipelineID            *string               `json:"pipeline_id,omitempty" doc:"The pipeline run that it is a step of; absent for others."`
	Step                  *string               `json:"step,omitempty" doc:"The name of that step, with its cell in parentheses."`
	WaitingFor            *proto.Missing        `json:"waiting_for,omitempty"`
	Steps                 []Step                `json:"steps,omitempty" doc:"What happened when. Absent until the execution has ended, and if its worker was lost. An extension of the public contract."`
}

// Step is a step of an execution.
type Step struct {
	_ struct{} `doc:"A step of the execution: delay until run_at, queue until a worker got it, jail while its sandbox was prepared, home while the thread's home was prepared, program, mounts and save while its changes were stored, commit while the thread got its next version."`

	Name       proto.StepName  `json:"name" enum:"delay,queue,jail,home,program,mounts,save,commit"`
	Within     *proto.StepName `json:"within,omitempty" enum:"jail" doc:"The step that it is a part of; absent for others."`
	AfterMS    float64         `json:"after_ms" doc:"When it began, in milliseconds after created_at. It may be negative, since the two times may come from different machines."`
	DurationMS float64         `json:"duration_ms" minimum:"0"`
	Start      *string         `json:"start,omitempty" enum:"cold,warm,forked" doc:"For jail: created for the execution, prepared before, or forked from a process of its API key."`
}

// NetworkUsage is a program's use of its network.
type NetworkUsage struct {
	_ struct{} `doc:"What the program did with its network. Absent if the network was blocked, and until the program has ended."`

	proto.Traffic
	BlockedConnections []BlockedConnection `json:"blocked_connections" maxItems:"20" doc:"The first different connections and DNS queries that were refused."`
	BlockedTotal       int64               `json:"blocked_total" minimum:"0" doc:"The number of refusals, including unlisted ones. At most 100 packets a second are counted for each reason. 0 for executions of versions without it."`
}

// BlockedConnection is a connection or a DNS query that was refused.
type BlockedConnection struct {
	proto.BlockedConnection
	At Time `json:"at"`
}

// NewExecution returns the state of an execution at the time now. delivery is the status of its
// webhook, empty without one. missing is what workers lack to run it, nil if one can.
func NewExecution(r *proto.Record, delivery proto.DeliveryStatus, missing *proto.Missing, now time.Time) *Execution {
	e := &Execution{
		TraceID: r.TraceID, Status: r.Status, Mode: r.Mode, CreatedAt: Time{r.CreatedAt}, WebhookURL: optional(r.WebhookURL),
		WebhookDeliveryStatus: optional(delivery), Language: r.Language, Timeout: r.Timeout,
		ThreadID: optional(proto.UserThread(r.ThreadID)),
		Metadata: orEmpty(r.Metadata), Attempt: r.Attempt, OutputTruncated: r.OutputTruncated, Profile: optional(r.Profile),
		RunAt: optionalTime(r.RunAt), ScheduleID: optional(r.ScheduleID),
		PipelineID: optional(r.PipelineID), Step: optional(r.Step), WaitingFor: missing,
	}
	if r.Batch != "" {
		e.Batch = &BatchItem{ID: r.Batch, Index: r.BatchIndex}
	}
	if r.Usage != nil && r.Usage.Network != nil {
		e.Network = &NetworkUsage{
			Traffic: r.Usage.Network.Traffic, BlockedConnections: []BlockedConnection{},
			BlockedTotal: r.Usage.Network.BlockedTotal,
		}
		for _, b := range r.Usage.Network.BlockedConnections {
			e.Network.BlockedConnections = append(e.Network.BlockedConnections, BlockedConnection{b, Time{b.At}})
		}
	}
	if r.Steps != nil {
		for _, step := range r.Timeline() {
			s := Step{
				Name: step.Name, Within: optional(step.Within), AfterMS: fraction(step.At.Sub(r.CreatedAt)),
				DurationMS: fraction(step.Took),
			}
			if step.Name == proto.StepJail {
				s.Start = optional(r.Steps.Start)
			}
			e.Steps = append(e.Steps, s)
		}
	}
	end := now
	if r.CompletedAt != nil {
		end = *r.CompletedAt
		e.CompletedAt = &Time{end}
	}
	if r.StartedAt == nil {
		e.QueuedMS = milliseconds(end.Sub(r.QueuedAt()))
	} else {
		e.QueuedMS = milliseconds(r.StartedAt.Sub(r.QueuedAt()))
		e.DurationMS = milliseconds(end.Sub(*r.StartedAt))
	}
	if result := r.Result; result != nil {
		e.ExitCode, e.Stdout, e.Stderr = &result.ExitCode, &result.Stdout, &result.Stderr
		e.Error, e.ErrorCode, e.ErrorMessage = result.Error, result.ErrorCode, result.ErrorMessage
		e.DurationMS, e.StdoutTruncated, e.StderrTruncated = result.DurationMS, result.StdoutTruncated, result.StderrTruncated
		e.StdoutInvalidUTF8, e.StderrInvalidUTF8 = result.StdoutInvalidUTF8, result.StderrInvalidUTF8
		e.Results, e.ResultsTruncated = result.Results, result.ResultsTruncated
		e.OutputBudgetExceeded, e.ProgramExitCode = result.OutputBudgetExceeded, result.ProgramExitCode
	}
	return e
}

// milliseconds returns d in milliseconds, at least 0: the two clocks may be of different
// machines.
func milliseconds(d time.Duration) int64 { return max(0, d.Milliseconds()) }

// fraction returns d in milliseconds.
func fraction(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// Write writes the JSON form of e, and encodes the output in pieces: it may be many MiB. Nothing is
// written before an error that is not one of w.
func (e *Execution) Write(w io.Writer) error {
	rest := *e
	rest.Stdout, rest.Stderr, rest.Results = nil, nil, nil
	small, err := json.Marshal(rest)
	if err != nil {
		return fmt.Errorf("encode execution %s: %w", e.TraceID, err)
	}
	if e.Stdout == nil {
		_, err := w.Write(small)
		return err
	}
	return writeWithOutputs(w, small, *e.Stdout, *e.Stderr, e.Results)
}

// writeWithOutputs writes a JSON object in which both outputs are null, with the outputs and results.
func writeWithOutputs(w io.Writer, object []byte, stdout, stderr string, results []proto.Display) error {
	head, tail, _ := bytes.Cut(object, []byte(`"stdout":null,"stderr":null`))
	return proto.WriteOutputs(w, head, stdout, stderr, results, tail)
}

// SubmittedRequest is the request of an execution.
type SubmittedRequest struct {
	_ struct{} `doc:"What was submitted, with the field names of the request. It can be sent as a request to run the same program. Only the values of env_vars are missing."`

	TraceID     proto.TraceID     `json:"trace_id" format:"trace-id"`
	Mode        proto.Mode        `json:"delivery_mode"`
	Code        string            `json:"code"`
	Language    proto.Language    `json:"language"`
	Args        []string          `json:"args"`
	Stdin       string            `json:"stdin"`
	EnvNames    []string          `json:"env_names" doc:"The names of env_vars. The values are not kept."`
	Profile     *string           `json:"profile" doc:"The sandbox profile that it was accepted with: that of the request, or the API key's own."`
	Image       string            `json:"image,omitempty" doc:"The image that the request chose."`
	Timeout     int               `json:"timeout" minimum:"1" doc:"Seconds."`
	KillGrace   *proto.Seconds    `json:"kill_grace" minimum:"0" maximum:"30"`
	Rich        bool              `json:"rich,omitempty"`
	ThreadID    *string           `json:"thread_id"`
	SubPaths    []string          `json:"sub_paths"`
	Metadata    map[string]string `json:"metadata"`
	MaxAttempts int               `json:"max_attempts" minimum:"1"`
	WebhookURL  *string           `json:"webhook_url" doc:"Where its result is delivered: the URL of the request, or the API key's own."`
}

// NewSubmittedRequest returns the form of the request that a record has.
func NewSubmittedRequest(r *proto.Record) *SubmittedRequest {
	x := r.Request
	return &SubmittedRequest{
		TraceID: r.TraceID, Mode: r.Mode, Code: x.Code, Language: r.Language, Args: append([]string{}, x.Args...),
		Stdin: x.Stdin, EnvNames: append([]string{}, x.EnvNames...), Profile: optional(r.Profile), Image: x.Image,
		Timeout:   r.Timeout,
		KillGrace: x.KillGrace, Rich: x.Rich, ThreadID: optional(proto.UserThread(r.ThreadID)),
		SubPaths: append([]string{}, x.SubPaths...), Metadata: orEmpty(r.Metadata), MaxAttempts: r.MaxAttempts,
		WebhookURL: optional(r.WebhookURL),
	}
}

// Cancelled answers a request to cancel an execution.
type Cancelled struct {
	TraceID proto.TraceID `json:"trace_id" format:"trace-id"`
	Status  string        `json:"status" enum:"cancelling,queued,running,success,failed,timeout,oom,seccomp,cancelled,blocked"`
}

// StatusEvent reports that an execution has started. It is the first event.
type StatusEvent struct {
	Type    proto.EventType `json:"type" enum:"status"`
	TraceID proto.TraceID   `json:"trace_id" format:"trace-id"`
	Status  proto.Status    `json:"status" enum:"running"`
	Seq     int64           `json:"seq" minimum:"1" maximum:"1"`
}

// OutputEvent is a piece of output.
type OutputEvent struct {
	Type   proto.EventType `json:"type" enum:"output"`
	Stream proto.Stream    `json:"stream"`
	Data   string          `json:"data"`
	Base64 *string         `json:"base64,omitempty" doc:"The exact bytes, if U+FFFD replaces bytes in data that are not UTF-8. Otherwise absent. An extension of the public contract."`
	Seq    int64           `json:"seq" minimum:"0"`
}

// DisplayEvent is a result of an execution with rich.
type DisplayEvent struct {
	Type    proto.EventType `json:"type" enum:"display"`
	Index   int             `json:"index" minimum:"0" doc:"Its index in the results of the result event."`
	Display proto.Display   `json:"display"`
	Omitted []string        `json:"omitted,omitempty" doc:"What only the result event has because it is too large for this one: MIME types, metadata, chart or columns."`
	Seq     int64           `json:"seq" minimum:"0"`
}

// KeepaliveEvent is sent after 15 seconds without other events, and where events are missing.
type KeepaliveEvent struct {
	Type    proto.EventType `json:"type" enum:"keepalive"`
	Missing *MissingEvents  `json:"missing,omitempty" doc:"Events that are gone and will not be sent."`
	Seq     int64           `json:"seq" minimum:"0" doc:"The number of the last event sent."`
}

// MissingEvents is a range of event numbers.
type MissingEvents struct {
	First int64 `json:"first" minimum:"1"`
	Last  int64 `json:"last" minimum:"1"`
}

// ResultEvent is the last event of an execution.
type ResultEvent struct {
	Type            proto.EventType `json:"type" enum:"result"`
	TraceID         proto.TraceID   `json:"trace_id" format:"trace-id"`
	Status          proto.Status    `json:"status" enum:"success,failed,timeout,cancelled"`
	Result          proto.Result    `json:"result"`
	OutputTruncated bool            `json:"output_truncated"`
	Seq             int64           `json:"seq" minimum:"0"`
}

// StreamURL is a URL that needs no API key.
type StreamURL struct {
	URL       string `json:"url" doc:"Absolute."`
	ExpiresAt Time   `json:"expires_at" doc:"When the request must have begun."`
}
