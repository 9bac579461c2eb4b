package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// maxWait is the largest wait parameter of GET /v1/executions/{id}, in seconds.
const maxWait = 60

// lookup returns the execution in the path, or ErrNotFound also if it belongs to another
// organisation.
func (s *Server) lookup(r *http.Request) (*proto.Record, error) {
	id, err := proto.ParseTraceID(chi.URLParam(r, "id"))
	if err != nil {
		return nil, proto.ErrNotFound
	}
	return s.find(r, id)
}

// find returns an execution, or ErrNotFound also if it belongs to another organisation.
func (s *Server) find(r *http.Request, id proto.TraceID) (*proto.Record, error) {
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
		if errors.Is(err, errDeadline) {
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
	return writeOutput(w, output, func(w io.Writer) error { return api.NewExecution(record, delivery, time.Now()).Write(w) })
}

// queryInt parses a whole number from least to most in the query. It returns fallback if the query
// does not have it.
func queryInt(r *http.Request, name string, least, most, fallback int64) (int64, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return fallback, nil
	}
	n, err := strconv.ParseUint(text, 10, 63)
	if err != nil || int64(n) < least || int64(n) > most {
		return 0, proto.FieldErrorf(name, "must be a whole number from %d to %d", least, most)
	}
	return int64(n), nil
}

const (
	defaultPage = 20
	maxPage     = 100
)

// pageSize returns the number of entries that a request for a list asks for.
func pageSize(r *http.Request) (int, error) {
	limit, err := queryInt(r, "limit", 1, maxPage, defaultPage)
	return int(limit), err
}

// queryBool parses true or false in the query. It returns fallback if the query does not have it.
func queryBool(r *http.Request, name string, fallback bool) (bool, error) {
	switch r.URL.Query().Get(name) {
	case "":
		return fallback, nil
	case "true":
		return true, nil
	case "false":
		return false, nil
	default:
		return false, proto.FieldErrorf(name, "must be true or false")
	}
}

// snapshot is a tail that ends with the event that was the last when it was opened.
type snapshot struct {
	Tail
	sent, until int64 // sequence numbers of the last event returned and of the last to return
}

func (t *snapshot) Next(ctx context.Context) (proto.Events, error) {
	if t.sent >= t.until {
		return proto.Events{}, io.EOF
	}
	batch, err := t.Tail.Next(ctx)
	t.sent = batch.Last
	return batch, err
}

// getOutput streams the events of an execution, during its run and after.
func (s *Server) getOutput(w http.ResponseWriter, r *http.Request) error {
	after, err := queryInt(r, "after_seq", 0, api.MaxWhole, 0)
	if err != nil {
		return err
	}
	live, err := queryBool(r, "follow", true)
	if err != nil {
		return err
	}
	sse := preferred(r.Header, typeNDJSON, typeSSE) == typeSSE
	resumed := false
	if sse {
		if after, resumed, err = lastEventID(r, after); err != nil {
			return err
		}
	}
	record, err := s.lookup(r)
	if err != nil {
		return err
	}
	if resumed && endedBy(record, after) {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	return s.streamOutput(w, r, record, after, live, sse)
}

// lastEventID returns the number in the Last-Event-ID header, or after if there is none. The header
// is newer than the query, which a browser repeats when it reconnects.
func lastEventID(r *http.Request, after int64) (last int64, resumed bool, err error) {
	id := r.Header.Get("Last-Event-ID")
	if id == "" {
		return after, false, nil
	}
	n, err := strconv.ParseUint(id, 10, 63)
	if err != nil || n > api.MaxWhole {
		return 0, false, proto.FieldErrorf("Last-Event-ID", "must be the id of an event of this execution")
	}
	return int64(n), true, nil
}

// endedBy reports whether an execution has no events after a number. A browser that reconnects then
// must get a response that stops it, as it does not know which event is the last.
func endedBy(record *proto.Record, after int64) bool {
	return record.Status.Terminal() && after >= record.ResultSeq
}

// streamOutput streams the events of an execution after a number. Unless live, it ends with the
// present last event.
func (s *Server) streamOutput(w http.ResponseWriter, r *http.Request, record *proto.Record, after int64, live, sse bool) error {
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
		tail = &snapshot{Tail: tail, sent: after, until: last}
	}
	f := s.newFollower(w, infoOf(r.Context()), tail, sse, after)
	w.WriteHeader(http.StatusOK)
	if err := f.w.FlushError(); err != nil || r.Method == http.MethodHead {
		return err
	}
	return f.copy(r.Context())
}

func (s *Server) cancelExecution(w http.ResponseWriter, r *http.Request) error {
	record, err := s.lookup(r)
	if err != nil {
		return err
	}
	answer := api.Cancelled{TraceID: record.TraceID, Status: string(record.Status)}
	if !record.Status.Terminal() {
		store, cancel := detached(r.Context())
		defer cancel()
		if record, err = s.Jobs.Cancel(store, record.TraceID); err != nil {
			return fmt.Errorf("cancel: %w", err)
		}
		answer.Status = string(record.Status)
		if !record.Status.Terminal() || record.Status == proto.StatusCancelled {
			answer.Status = "cancelling"
			return writeValue(w, http.StatusAccepted, answer)
		}
	}
	return writeValue(w, http.StatusOK, answer)
}

// smallOutput is the largest output of an answer that is encoded in memory, so that it has a
// Content-Length.
const smallOutput = 64 << 10

// writeOutput answers with the JSON that write writes, which contains output bytes of output. A
// large answer is sent while it is encoded: it may be six times as long as the output.
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

func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, []byte(`{"status":"ok"}`))
}

// readyz reports whether executions would be accepted and run, and if not what is missing.
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
	case !s.StoreReady():
		missing, message = "store", "the blob store has not answered yet; see the log"
	case s.DiskFull != nil && s.DiskFull() != "":
		missing, message = "disk", s.DiskFull()
	case s.Unfit != nil && s.Unfit() != "":
		missing, message = "worker", "the worker here accepts no jobs: "+s.Unfit()
	case stats.Workers == 0 && !s.FromZero:
		missing, message = "worker", "no worker is live"
	default:
		ready := api.Ready{Status: "ready", Workers: stats.Workers}
		for _, p := range s.Problems() {
			ready.Problems = append(ready.Problems, p.Need)
		}
		_ = writeValue(w, http.StatusOK, ready) // cannot fail
		return
	}
	w.Header().Set("Retry-After", "1")
	_ = writeValue(w, http.StatusServiceUnavailable, api.NotReady{Code: api.CodeServiceUnavailable, Message: message, Missing: missing})
}
