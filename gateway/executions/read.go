package executions

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// maxWait is the largest wait parameter of GET /v1/executions/{id}, in seconds.
const maxWait = 60

func (s *Routes) getExecution(w http.ResponseWriter, r *web.Request) error {
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
	delivery, err := s.DeliveryStatus(r.Context(), record)
	if err != nil {
		return err
	}
	output := 0
	if r := record.Result; r != nil {
		output = r.OutputBytes()
	}
	return web.WriteOutput(w, output, func(w io.Writer) error {
		return api.NewExecution(record, delivery, s.waitingFor(record), time.Now()).Write(w)
	})
}

func (s *Routes) getRequest(w http.ResponseWriter, r *web.Request) error {
	record, err := web.ExecutionInPath(r, s.Jobs.Submitted)
	switch {
	case err != nil:
		return err
	case record.Batch != "":
		return api.Errorf(api.CodeNotFound, "the execution is item %d of the batch %s, and has no request of its own",
			record.BatchIndex, record.Batch)
	case record.SandboxID != "":
		return api.Errorf(api.CodeNotFound, "the execution is the live sandbox %s, see /v1/sandboxes/%s", record.SandboxID,
			record.SandboxID)
	case record.Request == nil:
		return api.Errorf(api.CodeNotFound, "the request is not kept: its code, args and stdin have more than %d bytes "+
			"together, or a version of bullpen that does not keep requests ran it", proto.MaxKeptRequest)
	}
	return web.WriteValue(w, http.StatusOK, api.NewSubmittedRequest(record))
}

// snapshot is a tail that ends with the event that was last when it was opened.
type snapshot struct {
	web.Tail
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
func (s *Routes) getOutput(w http.ResponseWriter, r *web.Request) error {
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
	return s.streamOutput(w, r, record, after, live, sse, func() error { return s.CheckCaller(r) })
}

// getRawOutput returns the handler that sends the exact bytes of an output, or the requested range.
func (s *Routes) getRawOutput(of proto.Stream) func(http.ResponseWriter, *web.Request) error {
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
// present last event. It ends early if check returns an error.
func (s *Routes) streamOutput(
	w http.ResponseWriter, r *web.Request, record *proto.Record, after int64, live, sse bool, check func() error,
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
	f := newFollower(s.Core, w, r.Info, tail, sse, after)
	f.check = check
	w.WriteHeader(http.StatusOK)
	if err := f.w.FlushError(); err != nil || r.Method == http.MethodHead {
		return err
	}
	return f.copy(r.Context())
}

func (s *Routes) cancelExecution(w http.ResponseWriter, r *web.Request) error {
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
