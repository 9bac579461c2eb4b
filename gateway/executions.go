package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
)

// maxWait is how long GET /v1/executions/{id} may be asked to wait, in seconds.
const maxWait = 60

// timeLayout is that of all times: RFC 3339 in UTC with milliseconds.
const timeLayout = proto.TimeLayout

// lookup finds the execution that the path names. One of another organisation is as unknown as one that never was.
func (s *Server) lookup(r *http.Request) (*proto.Record, error) {
	id, err := proto.ParseTraceID(chi.URLParam(r, "id"))
	if err != nil {
		return nil, proto.ErrNotFound
	}
	i := infoOf(r.Context())
	record, err := s.Jobs.Lookup(r.Context(), id)
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", id, err)
	}
	if record.Org != i.key.Org {
		return nil, proto.ErrNotFound
	}
	i.trace = id
	i.rec.Header().Set("X-Trace-Id", string(id))
	return record, nil
}

func (s *Server) getExecution(w http.ResponseWriter, r *http.Request) error {
	wait, err := queryInt(r, "wait", 0, maxWait, 0)
	if err != nil {
		return err
	}
	record, err := s.lookup(r)
	if err != nil {
		return err
	}
	if wait > 0 && !record.Status.Terminal() {
		ended, err := s.waitUntil(r.Context(), record.TraceID, nil, time.Now().Add(time.Duration(wait)*time.Second))
		if errors.Is(err, errNoAnswerInTime) {
			ended, err = s.Jobs.Lookup(r.Context(), record.TraceID)
		}
		if err != nil {
			return err
		}
		record = ended
	}
	delivery, err := s.deliveryStatus(r.Context(), record)
	if err != nil {
		return err
	}
	output := 0
	if r := record.Result; r != nil {
		output = len(r.Stdout) + len(r.Stderr)
	}
	return writeOutput(w, output, func(w io.Writer) error { return writeExecution(w, record, delivery, time.Now()) })
}

// maxWhole is as far as JSON numbers are whole everywhere.
const maxWhole = 1<<53 - 1

// queryInt reads a whole number from least to most from the query, and gives otherwise where it is missing.
func queryInt(r *http.Request, name string, least, most, otherwise int64) (int64, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return otherwise, nil
	}
	n, err := strconv.ParseUint(text, 10, 63)
	if err != nil || int64(n) < least || int64(n) > most {
		return 0, &proto.FieldError{Field: name, Message: fmt.Sprintf("%s must be a whole number from %d to %d", name, least, most)}
	}
	return int64(n), nil
}

// pageSize gives how many entries of a list are asked for.
func pageSize(r *http.Request) (int, error) {
	limit, err := queryInt(r, "limit", 1, mostPage, defaultPage)
	return int(limit), err
}

// queryBool reads true or false from the query, and gives otherwise where it is missing.
func queryBool(r *http.Request, name string, otherwise bool) (bool, error) {
	switch r.URL.Query().Get(name) {
	case "":
		return otherwise, nil
	case "true":
		return true, nil
	case "false":
		return false, nil
	default:
		return false, &proto.FieldError{Field: name, Message: name + " must be true or false"}
	}
}

// snapshot is a tail that ends where the events ended when it was opened, and not with the result.
type snapshot struct {
	Tail
	given, until int64 // sequence numbers of the last event given out and of the last one to give
}

func (t *snapshot) Next(ctx context.Context) (proto.Batch, error) {
	if t.given >= t.until {
		return proto.Batch{}, io.EOF
	}
	batch, err := t.Tail.Next(ctx)
	t.given = batch.Last
	return batch, err
}

// getOutput streams the events of an execution, during its run and after.
func (s *Server) getOutput(w http.ResponseWriter, r *http.Request) error {
	after, err := queryInt(r, "after_seq", 0, maxWhole, 0)
	if err != nil {
		return err
	}
	live, err := queryBool(r, "follow", true)
	if err != nil {
		return err
	}
	sse := preferred(r.Header, typeNDJSON, typeSSE) == typeSSE
	if id := r.Header.Get("Last-Event-ID"); sse && id != "" {
		// It is newer than the query, which the browser repeats when it connects again.
		n, err := strconv.ParseUint(id, 10, 63)
		if err != nil || n > maxWhole {
			return &proto.FieldError{Field: "Last-Event-ID", Message: "Last-Event-ID must be the id of an event of this execution"}
		}
		after = int64(n)
	}
	record, err := s.lookup(r)
	if err != nil {
		return err
	}
	tail, err := s.Events.Follow(r.Context(), record.TraceID, after)
	if err != nil {
		return fmt.Errorf("follow %s: %w", record.TraceID, err)
	}
	defer tail.Close()
	if !live && !record.Status.Terminal() {
		last, err := s.Events.Last(r.Context(), record.TraceID, record.Attempt)
		if err != nil {
			return fmt.Errorf("last event of %s: %w", record.TraceID, err)
		}
		tail = &snapshot{Tail: tail, given: after, until: last}
	}
	f := s.newFollower(w, infoOf(r.Context()), tail, sse, after)
	w.WriteHeader(http.StatusOK)
	if err := f.w.FlushError(); err != nil {
		return fmt.Errorf("stream events: %w", err)
	}
	return f.copy(r.Context())
}

func (s *Server) cancelExecution(w http.ResponseWriter, r *http.Request) error {
	record, err := s.lookup(r)
	if err != nil {
		return err
	}
	status, told := http.StatusOK, record.Status
	if !record.Status.Terminal() {
		// Once begun, a cancellation is recorded even if the client does not wait to hear of it.
		store, cancel := detached(r.Context())
		defer cancel()
		if record, err = s.Jobs.Cancel(store, record.TraceID); err != nil {
			return fmt.Errorf("cancel: %w", err)
		}
		status, told = http.StatusAccepted, "cancelling"
		if record.Status.Terminal() && record.Status != proto.StatusCancelled {
			status, told = http.StatusOK, record.Status // it ended by itself first
		}
	}
	writeJSON(w, status, []byte(`{"trace_id":"`+string(record.TraceID)+`","status":"`+string(told)+`"}`))
	return nil
}

// execution is the JSON form of a record but for its first fields, which writeExecution writes.
type execution struct {
	Error                 *string           `json:"error"`
	DurationMS            int64             `json:"duration_ms"`
	DeliveryMode          proto.Mode        `json:"delivery_mode"`
	CreatedAt             string            `json:"created_at"`
	CompletedAt           *string           `json:"completed_at"`
	WebhookURL            *string           `json:"webhook_url"`
	WebhookDeliveryStatus *string           `json:"webhook_delivery_status"`
	ErrorCode             *string           `json:"error_code"`
	ErrorMessage          *string           `json:"error_message"`
	Language              proto.Language    `json:"language"`
	Timeout               int               `json:"timeout"`
	ThreadID              *string           `json:"thread_id"`
	Metadata              map[string]string `json:"metadata"`
	Attempt               int               `json:"attempt"`
	QueuedMS              int64             `json:"queued_ms"`
	StdoutTruncated       bool              `json:"stdout_truncated"`
	StderrTruncated       bool              `json:"stderr_truncated"`
	OutputTruncated       bool              `json:"output_truncated"`
	Sandbox               *string           `json:"sandbox"`
	Network               *networkView      `json:"network,omitempty"` // nil where the network was blocked
}

// networkView is the JSON form of what an execution did with its network.
type networkView struct {
	proto.Traffic
	Blocked []blockedView `json:"blocked_connections"`
}

type blockedView struct {
	proto.BlockedConnection
	At string `json:"at"`
}

func viewNetwork(u *proto.NetworkUsage) *networkView {
	v := &networkView{Traffic: u.Traffic, Blocked: make([]blockedView, len(u.BlockedConnections))}
	for i, b := range u.BlockedConnections {
		v.Blocked[i] = blockedView{b, b.At.UTC().Format(timeLayout)}
	}
	return v
}

// writeExecution writes the JSON form of an execution as it is at now, its outputs in pieces; delivery is how its webhook stands, empty
// where it has none. After an error that is not one of w nothing is written.
func writeExecution(w io.Writer, r *proto.Record, delivery proto.DeliveryStatus, now time.Time) error {
	rest := execution{
		DeliveryMode: r.Mode, CreatedAt: r.CreatedAt.UTC().Format(timeLayout), WebhookURL: optional(r.WebhookURL),
		WebhookDeliveryStatus: optional(string(delivery)), Language: r.Language, Timeout: r.Timeout, ThreadID: optional(r.ThreadID), Metadata: r.Metadata,
		Attempt: r.Attempt, OutputTruncated: r.OutputTruncated, Sandbox: optional(r.Profile),
	}
	if r.Usage != nil && r.Usage.Network != nil {
		rest.Network = viewNetwork(r.Usage.Network)
	}
	if rest.Metadata == nil {
		rest.Metadata = map[string]string{}
	}
	end := now
	if r.CompletedAt != nil {
		end = *r.CompletedAt
		rest.CompletedAt = optional(end.UTC().Format(timeLayout))
	}
	if r.StartedAt == nil {
		rest.QueuedMS = millis(end.Sub(r.CreatedAt))
	} else {
		rest.QueuedMS = millis(r.StartedAt.Sub(r.CreatedAt))
		rest.DurationMS = millis(end.Sub(*r.StartedAt))
	}
	if r.Result != nil {
		rest.Error, rest.ErrorCode, rest.ErrorMessage = r.Result.Error, r.Result.ErrorCode, r.Result.ErrorMessage
		rest.DurationMS = r.Result.DurationMS
		rest.StdoutTruncated, rest.StderrTruncated = r.Result.StdoutTruncated, r.Result.StderrTruncated
	}
	small, err := json.Marshal(rest)
	if err != nil {
		return fmt.Errorf("encode execution %s: %w", r.TraceID, err)
	}
	small[0] = ',' // instead of the brace
	head := append([]byte(`{"trace_id":"`), r.TraceID...)
	head = append(head, `","status":"`...)
	head = append(head, r.Status...)
	if r.Result == nil {
		_, err = w.Write(append(append(head, `","exit_code":null,"stdout":null,"stderr":null`...), small...))
		return err
	}
	head = append(head, `","exit_code":`...)
	head = strconv.AppendInt(head, int64(r.Result.ExitCode), 10)
	if _, err := w.Write(append(head, `,"stdout":`...)); err != nil {
		return err
	}
	if err := proto.WriteJSONString(w, r.Result.Stdout); err != nil {
		return err
	}
	if _, err := io.WriteString(w, `,"stderr":`); err != nil {
		return err
	}
	if err := proto.WriteJSONString(w, r.Result.Stderr); err != nil {
		return err
	}
	_, err = w.Write(small)
	return err
}

// smallOutput is how many bytes of output an answer may have to be put together in memory, so that it has a length.
const smallOutput = 64 << 10

// writeOutput answers with JSON that has that many bytes of output, as they were printed, and that write writes. A large answer is sent
// as it is encoded: it may be six times as long as the output.
func writeOutput(w http.ResponseWriter, output int, write func(io.Writer) error) error {
	if output > smallOutput {
		jsonHeader(w.Header())
		if err := write(w); err != nil {
			return err
		}
		_, err := io.WriteString(w, "\n")
		return err
	}
	var body bytes.Buffer
	if err := write(&body); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, body.Bytes())
	return nil
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// millis is d in milliseconds, and not less than 0: the two clocks may be of different machines.
func millis(d time.Duration) int64 { return max(0, d.Milliseconds()) }

func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, []byte(`{"status":"ok"}`))
}

// readyz tells whether executions would be taken and run, and if not what is missing.
func (s *Server) readyz(w http.ResponseWriter, r *http.Request) {
	var missing, message string
	ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
	defer cancel()
	stats, err := s.Jobs.Stats(ctx)
	switch {
	case s.draining.Load():
		missing, message = "server", "this server is shutting down"
	case err != nil:
		infoOf(r.Context()).err = err
		missing, message = "queue", "the queue does not answer"
	case s.Unfit != nil && s.Unfit() != "":
		missing, message = "worker", "the worker here takes no jobs: "+s.Unfit()
	case stats.Workers == 0:
		missing, message = "worker", "no worker is live"
	default:
		writeJSON(w, http.StatusOK, fmt.Appendf(nil, `{"status":"ready","workers":%d}`, stats.Workers))
		return
	}
	w.Header().Set("Retry-After", "1")
	body := proto.AppendJSONString([]byte(`{"error":"`+codeServiceUnavailable+`","message":`), message)
	writeJSON(w, http.StatusServiceUnavailable, append(body, `,"missing":"`+missing+`"}`...))
}
