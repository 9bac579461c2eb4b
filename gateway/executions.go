package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// maxWait is the largest wait parameter of GET /v1/executions/{id}, in seconds.
const maxWait = 60

func (s *Server) getExecution(w http.ResponseWriter, r *web.Request) error {
	wait, err := web.QueryInt(r, "wait", 0, maxWait, 0)
	if err != nil {
		return err
	}
	record, err := web.ExecutionInPath(r, s.Jobs.Lookup)
	if err != nil {
		return err
	}
	if wait > 0 && !record.Status.Terminal() {
		deadline := time.Now().Add(time.Duration(wait) * time.Second)
		ended, err := s.waitUntil(r.Context(), record.Org, record.TraceID, nil, deadline)
		if errors.Is(err, web.ErrDeadline) {
			ended, err = s.Jobs.Lookup(r.Context(), record.Org, record.TraceID)
		}
		if err != nil {
			return err
		}
		record = ended
	}
	delivery, err := s.webhooks().DeliveryStatus(r.Context(), record)
	if err != nil {
		return err
	}
	output := 0
	if r := record.Result; r != nil {
		output = len(r.Stdout) + len(r.Stderr)
	}
	return web.WriteOutput(w, output, func(w io.Writer) error {
		return api.NewExecution(record, delivery, s.waitingFor(record), time.Now()).Write(w)
	})
}

// waitingReads is the number of records that are read at the same time for what they wait for.
const waitingReads = 8

// waitingOf returns what workers lack to run those of some executions of an organisation that are
// queued.
func (s *Server) waitingOf(
	ctx context.Context, org string, ids []proto.TraceID,
) (map[proto.TraceID]*proto.Missing, error) {
	missing := make([]*proto.Missing, len(ids))
	reads, ctx := errgroup.WithContext(ctx)
	reads.SetLimit(waitingReads)
	for i, id := range ids {
		reads.Go(func() error {
			record, err := s.Jobs.Lookup(ctx, org, id)
			switch {
			case errors.Is(err, proto.ErrNotFound): // not submitted yet
				return nil
			case err != nil:
				return fmt.Errorf("look up %s: %w", id, err)
			}
			missing[i] = s.waitingFor(record)
			return nil
		})
	}
	found := map[proto.TraceID]*proto.Missing{}
	err := reads.Wait()
	for i, id := range ids {
		if missing[i] != nil {
			found[id] = missing[i]
		}
	}
	return found, err
}

// waitingFor returns what workers lack to run a queued execution, nil if one can or it is not queued.
func (s *Server) waitingFor(r *proto.Record) *proto.Missing {
	if r.Status != proto.StatusQueued || r.RunAt.After(time.Now()) {
		return nil
	}
	return s.Capabilities.Missing(&r.Meta)
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
func (s *Server) getOutput(w http.ResponseWriter, r *web.Request) error {
	after, err := web.QueryInt(r, "after_seq", 0, api.MaxWhole, 0)
	if err != nil {
		return err
	}
	live, err := web.QueryBool(r, "follow", true)
	if err != nil {
		return err
	}
	sse := web.Preferred(r.Header, web.TypeNDJSON, web.TypeSSE) == web.TypeSSE
	resumed := false
	if sse {
		if after, resumed, err = lastEventID(r, after); err != nil {
			return err
		}
	}
	record, err := web.ExecutionInPath(r, s.Jobs.Summary)
	if err != nil {
		return err
	}
	if resumed && endedBy(record, after) {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	return s.streamOutput(w, r, record, after, live, sse)
}

// getRawOutput returns the handler that sends the exact bytes of an output, or the range of them that
// the request asks for.
func (s *Server) getRawOutput(of proto.Stream) func(http.ResponseWriter, *web.Request) error {
	return func(w http.ResponseWriter, r *web.Request) error {
		record, err := web.ExecutionInPath(r, s.Jobs.Lookup)
		if err != nil {
			return err
		}
		if record.Result == nil {
			return api.Errorf(api.CodeConflict, "the execution has not ended; its output so far is at /v1/executions/%s/output",
				record.TraceID)
		}
		output, truncated := record.Result.Stdout, record.Result.StdoutTruncated
		if of == proto.Stderr {
			output, truncated = record.Result.Stderr, record.Result.StderrTruncated
		}
		part, err := web.PartOf(w, r, int64(len(output)), "")
		if err != nil {
			return err
		}
		if truncated {
			w.Header().Set("X-Output-Truncated", "true")
		}
		part.WriteHeader(w, string(record.TraceID)+"."+string(of))
		if r.Method == http.MethodHead {
			return nil
		}
		_, err = io.WriteString(w, output[part.Offset:part.Offset+part.Length])
		return err
	}
}

// lastEventID returns the number in the Last-Event-ID header, or after if there is none. The header
// is newer than the query, which a browser repeats when it reconnects.
func lastEventID(r *web.Request, after int64) (last int64, resumed bool, err error) {
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
func (s *Server) streamOutput(
	w http.ResponseWriter, r *web.Request, record *proto.Record, after int64, live, sse bool,
) error {
	tail, err := s.Events.Follow(r.Context(), record.Org, record.TraceID, after)
	if err != nil {
		return fmt.Errorf("follow %s: %w", record.TraceID, err)
	}
	defer tail.Close()
	if !live && !record.Status.Terminal() {
		last, err := s.Events.Last(r.Context(), record.Org, record.TraceID, record.Attempt)
		if err != nil {
			return fmt.Errorf("last event of %s: %w", record.TraceID, err)
		}
		tail = &snapshot{Tail: tail, sent: after, until: last}
	}
	f := s.newFollower(w, r.Info, tail, sse, after)
	w.WriteHeader(http.StatusOK)
	if err := f.w.FlushError(); err != nil || r.Method == http.MethodHead {
		return err
	}
	return f.copy(r.Context())
}

func (s *Server) cancelExecution(w http.ResponseWriter, r *web.Request) error {
	record, err := web.ExecutionInPath(r, s.Jobs.Summary)
	if err != nil {
		return err
	}
	answer := api.Cancelled{TraceID: record.TraceID, Status: string(record.Status)}
	if !record.Status.Terminal() {
		store, cancel := web.Detached(r.Context())
		defer cancel()
		if record, err = s.Jobs.Cancel(store, record.Org, record.TraceID); err != nil {
			return fmt.Errorf("cancel: %w", err)
		}
		answer.Status = string(record.Status)
		if !record.Status.Terminal() || record.Status == proto.StatusCancelled {
			answer.Status = "cancelling"
			return web.WriteValue(w, http.StatusAccepted, answer)
		}
	}
	return web.WriteValue(w, http.StatusOK, answer)
}

func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) {
	web.WriteJSON(w, http.StatusOK, []byte(`{"status":"ok"}`))
}

// readyz reports whether executions would be accepted and run, and if not what is missing.
func (s *Server) readyz(w http.ResponseWriter, r *http.Request) {
	var missing, message string
	ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
	defer cancel()
	stats, err := s.Jobs.Stats(ctx)
	switch {
	case s.IsDraining():
		missing, message = "server", "this server is shutting down"
	case err != nil:
		web.RequestOf(r).Err = err
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
		_ = web.WriteValue(w, http.StatusOK, ready) // cannot fail
		return
	}
	w.Header().Set("Retry-After", "1")
	_ = web.WriteValue(w, http.StatusServiceUnavailable,
		api.NotReady{Code: api.CodeServiceUnavailable, Message: message, Missing: missing})
}
