package anthropic

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// API is the [proto.AgentRun.API] of requests for messages.
const API = "anthropic"

const (
	// Ids of batches begin with batchPrefix in this API and with ownBatchPrefix in bullpen's own.
	batchPrefix    = "msgbatch_"
	ownBatchPrefix = "bat_"
	// batchLife is the time after which a batch expires.
	batchLife   = 24 * time.Hour
	maxCustomID = 64 // bytes
)

// batchItem is a request in a batch.
type batchItem struct {
	CustomID string          `json:"custom_id"`
	Params   json.RawMessage `json:"params"`
}

type batchBody struct {
	ID                string      `json:"id"`
	Type              string      `json:"type"`
	ProcessingStatus  string      `json:"processing_status"`
	RequestCounts     batchCounts `json:"request_counts"`
	CreatedAt         string      `json:"created_at"`
	ExpiresAt         string      `json:"expires_at"`
	EndedAt           *string     `json:"ended_at"`
	CancelInitiatedAt *string     `json:"cancel_initiated_at"`
	ArchivedAt        *string     `json:"archived_at"`
	ResultsURL        *string     `json:"results_url"`
}

type batchCounts struct {
	Processing int `json:"processing"`
	Succeeded  int `json:"succeeded"`
	Errored    int `json:"errored"`
	Canceled   int `json:"canceled"`
	Expired    int `json:"expired"`
}

func newBatchBody(b *proto.BatchAndState, base string) *batchBody {
	c := &b.State.Counts
	body := &batchBody{
		ID: batchPrefix + strings.TrimPrefix(b.Batch.ID, ownBatchPrefix), Type: "message_batch",
		ProcessingStatus: "in_progress",
		RequestCounts:    batchCounts{Processing: b.Batch.Total - c.Ended(), Succeeded: c.Succeeded, Errored: c.Failed},
		CreatedAt:        b.Batch.CreatedAt.Format(time.RFC3339Nano), ExpiresAt: b.Batch.ExpiresAt.Format(time.RFC3339Nano),
	}
	if b.State.Stopped == proto.StopExpired {
		body.RequestCounts.Expired = c.Cancelled
	} else {
		body.RequestCounts.Canceled = c.Cancelled
	}
	if b.Batch.Cancelled {
		body.ProcessingStatus, body.CancelInitiatedAt = "canceling", new(b.Batch.CancelledAt.Format(time.RFC3339Nano))
	}
	if b.Batch.Ended(&b.State) {
		body.ProcessingStatus, body.EndedAt = "ended", new(b.State.EndedAt.Format(time.RFC3339Nano))
		body.ResultsURL = new(base + Prefix + "/v1/messages/batches/" + body.ID + "/results")
	}
	return body
}

// batchID returns this server's id of the batch in the path. An unknown one stays unchanged.
func batchID(r *http.Request) string {
	id := chi.URLParam(r, "id")
	if rest, ok := strings.CutPrefix(id, batchPrefix); ok {
		return ownBatchPrefix + rest
	}
	return id
}

// writeBatch answers with a batch.
func writeBatch(w http.ResponseWriter, host agent.RequestHost, b *proto.BatchAndState) error {
	base, err := host.BaseURL()
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, newBatchBody(b, base))
	return nil
}

func (s *Server) createBatch(w http.ResponseWriter, r *http.Request) error {
	host, known := s.Host(r), map[string]bool{}
	if _, err := host.BaseURL(); err != nil {
		return err
	}
	b, err := host.CreateBatch(w, API, "requests", batchLife, func(item []byte) error {
		var in batchItem
		if err := json.Unmarshal(item, &in); err != nil {
			return proto.FieldErrorf("body", "is not a valid request: %v", err)
		}
		switch {
		case in.CustomID == "" || len(in.CustomID) > maxCustomID:
			return proto.FieldErrorf("custom_id", "must have 1 to %d bytes", maxCustomID)
		case known[in.CustomID]:
			return proto.FieldErrorf("custom_id", "must not be that of another request in the batch: %s",
				proto.Shorten(in.CustomID))
		case len(in.Params) == 0 || in.Params[0] != '{':
			return proto.FieldErrorf("params", "must be the body of a request for a message")
		}
		known[in.CustomID] = true
		return nil
	})
	if err != nil {
		return err
	}
	return writeBatch(w, host, b)
}

func (s *Server) listBatches(w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	base, err := host.BaseURL()
	if err != nil {
		return err
	}
	var bodies []*batchBody
	for _, b := range host.Batches() {
		bodies = append(bodies, newBatchBody(&b, base))
	}
	p, err := newPage(bodies, r.URL.Query(), func(b **batchBody) string { return (*b).ID },
		func(b **batchBody) *batchBody { return *b })
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, p)
	return nil
}

func (s *Server) getBatch(w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	b, err := host.Batch(r.Context(), batchID(r))
	if err != nil {
		return err
	}
	return writeBatch(w, host, b)
}

func (s *Server) cancelBatch(w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	b, err := host.CancelBatch(r.Context(), batchID(r))
	if err != nil {
		return err
	}
	return writeBatch(w, host, b)
}

func (s *Server) deleteBatch(w http.ResponseWriter, r *http.Request) error {
	if err := s.Host(r).RemoveBatch(r.Context(), batchID(r)); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, map[string]string{"id": chi.URLParam(r, "id"), "type": "message_batch_deleted"})
	return nil
}

// batchResult is a line of the results.
type batchResult struct {
	CustomID string `json:"custom_id"`
	Result   any    `json:"result"`
}

type (
	succeeded struct {
		Type    string   `json:"type"`
		Message *message `json:"message"`
	}
	errored struct {
		Type  string     `json:"type"`
		Error *errorBody `json:"error"`
	}
)

func (s *Server) getResults(w http.ResponseWriter, r *http.Request) error {
	host, ctx := s.Host(r), r.Context()
	b, err := host.Batch(ctx, batchID(r))
	if err != nil {
		return err
	}
	if !b.Batch.Ended(&b.State) {
		return api.Errorf(api.CodeValidation, "the batch has not ended; its results_url is set when it has")
	}
	h := w.Header()
	h.Set(requestIDHeader, h.Get("X-Request-Id"))
	h.Set("Content-Type", "application/x-jsonl")
	h.Set("Cache-Control", "no-store")
	out, cancelled := json.NewEncoder(w), map[string]string{"type": "canceled"}
	if b.State.Stopped == proto.StopExpired {
		cancelled = map[string]string{"type": "expired"}
	}
	return host.BatchItems(ctx, &b.Batch, func(item []byte, status proto.ItemStatus, run string) error {
		var in batchItem
		if err := json.Unmarshal(item, &in); err != nil {
			return err
		}
		line := &batchResult{in.CustomID, cancelled}
		if status != proto.ItemCancelled {
			var err error
			if line.Result, err = s.result(ctx, host, &b.Batch, run); err != nil {
				if code := api.NewError(err).Code; ctx.Err() != nil || code == api.CodeNotFound ||
					code == api.CodeServiceUnavailable {
					return err
				}
				s.Log.Error("result unreadable", "batch", b.Batch.ID, "run", run, "error", err)
				line.Result = newErrored(
					api.Errorf(api.CodeInternal, "the server could not read the result; its log has the cause"))
			}
		}
		return out.Encode(line)
	})
}

// result returns the result of a run of a batch that has ended.
func (s *Server) result(ctx context.Context, host agent.RequestHost, b *proto.Batch, id string) (any, error) {
	record, at, err := s.Runs.Get(ctx, b.Org, id)
	if errors.Is(err, proto.ErrNotFound) {
		return missingResult(ctx, host, b)
	}
	if err != nil {
		return nil, err
	}
	log := agent.Reader{Store: s.Runs, Org: b.Org, ID: id, At: at}
	var out *collector
	for {
		e, err := log.Next(ctx)
		switch {
		case err != nil:
			return nil, err
		case e == nil: // the log was removed meanwhile
			return missingResult(ctx, host, b)
		case e.Cancelled:
			return map[string]string{"type": "canceled"}, nil
		case e.Failed != nil:
			return newErrored(e.Failed), nil //nolint:nilerr // the error is the result
		case e.Started != nil:
			if out, err = newCollector(host, record, e.Started); err != nil {
				return nil, err
			}
		case out != nil && e.Event != nil:
			if out.at, out.run.container.Used = e.At, out.run.container.Used || e.Event.Kind == agent.EventResult; e.Ended() {
				return &succeeded{"succeeded", &out.run.message}, out.Append(ctx, *e.Event)
			}
			if err := out.Append(ctx, *e.Event); err != nil {
				return nil, err
			}
		}
	}
}

// missingResult returns the result of a run that is no longer stored. It returns an error if the
// batch was deleted meanwhile, with its runs.
func missingResult(ctx context.Context, host agent.RequestHost, b *proto.Batch) (any, error) {
	if _, err := host.Batch(ctx, b.ID); err != nil {
		return nil, err
	}
	return newErrored(api.Errorf(api.CodeNotFound, "the result is past its retention")), nil
}

func newErrored(e *api.Error) *errored {
	_, kind := statusOf(e)
	return &errored{"errored", &errorBody{Type: "error", Error: errorDetail{Type: kind, Message: e.Message}}}
}

// newCollector returns the collector for the message of a stored run that has started.
func newCollector(host agent.RequestHost, record *proto.AgentRun, start *agent.Start) (*collector, error) {
	req, err := decodeRequest(record.Request)
	if err != nil {
		return nil, err
	}
	set, err := req.toolSet()
	if err != nil {
		return nil, err
	}
	talk, err := req.conversation()
	if err != nil {
		return nil, err
	}
	r := &run{
		container: newContainer(host, start.Container, set.revision), created: start.Created,
		message: message{ID: record.ID, Type: "message", Role: "assistant", Model: req.Model, Content: []any{}},
	}
	r.container.Used = req.Container != "" || len(talk.uploads) > 0
	return &collector{run: r}, nil
}

// Prepare implements [agent.API].
func (s *Server) Prepare(
	ctx context.Context, host agent.Host, record *proto.AgentRun, started *agent.Start,
) (*agent.Run, *agent.Start, error) {
	req, err := decodeRequest(record.Request)
	if err != nil {
		return nil, nil, err
	}
	run, err := newRun(ctx, host, req, record.ID, started)
	if err != nil {
		return nil, nil, err
	}
	run.Patient = true
	return &run.Run, &agent.Start{Container: run.container.ID, Created: run.created}, nil
}

// Ended implements [agent.API]. The batch of the run sees its end.
func (s *Server) Ended(context.Context, *proto.AgentRun, *agent.Entry) error { return nil }
