package responses

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// maxSilence is how long after its last entry a response that is not in the background counts
	// as abandoned by its server.
	maxSilence = maxWall + agent.MaxTimeout*time.Second
	// cancelWait is how long a request waits for a cancelled response to end.
	cancelWait = 5 * time.Second
	// maxInput is the size of a conversation with all earlier responses, in bytes.
	maxInput = 8 << 20
)

// stored is a stored response as far as its log goes.
type stored struct {
	record  *proto.AgentRun
	request *request
	out     *encoder
	log     *agent.Reader
	ended   bool
}

var errNoResponse = api.Errorf(
	api.CodeNotFound, "there is no response of that id: it was not stored, was deleted, or is past its retention")

// absent returns the error for a response whose log was removed during the read; others are
// unchanged.
func absent(err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return errNoResponse
	}
	return err
}

// open returns a stored response before its first entry.
func (s *Server) open(ctx context.Context, host agent.RequestHost, v vendor, id string) (*stored, error) {
	if !strings.HasPrefix(id, responsePrefix) || proto.CheckThreadID("id", id) != nil {
		return nil, errNoResponse
	}
	org, _ := host.Caller()
	run, at, err := s.Runs.Get(ctx, org, id)
	if errors.Is(err, proto.ErrNotFound) || err == nil && v != byTools && run.API != string(v) {
		return nil, errNoResponse
	}
	if err != nil {
		return nil, err
	}
	if err := host.Reserve(int64(len(run.Request))); err != nil {
		return nil, err
	}
	req, err := decodeRequest(vendor(run.API), run.Request)
	if err != nil {
		return nil, err
	}
	return &stored{
		record: run, request: req, out: newEncoder(vendor(run.API), run.ID, run.CreatedAt, req),
		log: &agent.Reader{Store: s.Runs, Org: org, ID: id, At: at, Reserve: host.Reserve},
	}, nil
}

// read encodes all entries that the log has.
func (r *stored) read(ctx context.Context) error {
	for {
		e, err := r.log.Next(ctx)
		if err != nil {
			return absent(err)
		}
		if e == nil {
			break
		}
		if err := r.out.entry(ctx, e); err != nil {
			return err
		}
		r.ended = e.Ended()
	}
	if !r.ended && !r.record.Background && time.Since(r.out.at) > maxSilence {
		r.out.fail(api.Unavailable(1, "the server with this response has stopped; send the request again"))
		r.ended = true
	}
	return nil
}

// store stores a new run.
func (s *Server) store(ctx context.Context, run *proto.AgentRun) (at uint64, err error) {
	at, err = s.Runs.Create(ctx, run)
	if quota, ok := errors.AsType[*proto.QuotaError](err); ok {
		e := api.Errorf(api.CodeRateLimited, "%s", quota.Error())
		e.RetryAfter = 10
		return 0, e
	}
	if rejection, ok := errors.AsType[*proto.Rejection](err); ok {
		return 0, api.Unavailable(30, rejection.Detail)
	}
	return at, err
}

func (s *Server) createBackground(w http.ResponseWriter, r *http.Request, host agent.RequestHost, run *run) error {
	at, err := s.store(r.Context(), run.record)
	if err != nil {
		return err
	}
	out := run.encoder()
	if !run.request.Stream {
		writeJSON(w, http.StatusOK, out.response)
		return nil
	}
	return s.follow(w, r, &stored{
		record: run.record, out: out,
		log: &agent.Reader{Store: s.Runs, Org: run.record.Org, ID: run.record.ID, At: at, Reserve: host.Reserve},
	}, -1)
}

// follow answers with the events of a stored response after a number.
func (s *Server) follow(w http.ResponseWriter, r *http.Request, run *stored, after int) error {
	stream := newStream(w, run.out)
	stream.after = after
	err := stream.Serve(r.Context(), func(ctx context.Context) error {
		if err := stream.Send(func() error { return nil }); err != nil {
			return err
		}
		return run.log.Follow(ctx, func(e *agent.Entry) error {
			return stream.Send(func() error { return run.out.entry(ctx, e) })
		})
	})
	switch err = absent(err); {
	case err == nil || !stream.Begun() || errors.Is(err, errNoResponse):
		return s.finishStream(r, stream, run.record.ID, err)
	default: // the run goes on; a client that sees no end asks again
		s.Log.WarnContext(r.Context(), "stream of a stored response cut", "run", run.record.ID, "error", err)
		panic(http.ErrAbortHandler)
	}
}

func (s *Server) get(v vendor, w http.ResponseWriter, r *http.Request) error {
	host, query := s.Host(r), r.URL.Query()
	run, err := s.open(r.Context(), host, v, chi.URLParam(r, "id"))
	if err != nil {
		return err
	}
	for _, name := range []string{"include", "include[]"} {
		run.out.outputs = run.out.outputs || slices.Contains(query[name], includeOutputs)
	}
	after := -1
	if text := query.Get("starting_after"); text != "" {
		if after, err = strconv.Atoi(text); err != nil || after < 0 {
			return proto.FieldErrorf("starting_after", "must be the number of an event")
		}
	}
	streamed, err := wantsStream(w, r, host)
	switch {
	case err != nil:
		return err
	case streamed && !run.record.Stream:
		return proto.FieldErrorf(
			"stream", "must be false: only a response that was created with background and stream can be streamed again")
	case streamed:
		return s.follow(w, r, run, after)
	case after >= 0:
		return proto.FieldErrorf("starting_after", "must be left out without stream")
	}
	if err := run.read(r.Context()); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, run.out.response)
	return nil
}

// wantsStream reports whether a request for a stored response wants a stream. OpenAI documents a
// query parameter; its SDK for Go sends a body instead.
func wantsStream(w http.ResponseWriter, r *http.Request, host agent.RequestHost) (bool, error) {
	if r.ContentLength == 0 {
		return r.URL.Query().Get("stream") == "true", nil
	}
	var body struct {
		Stream bool `json:"stream"`
	}
	err := host.ReadBody(w, func(raw []byte) error {
		if err := json.Unmarshal(raw, &body); err != nil {
			return proto.FieldErrorf("body", "must be left out, or have stream alone: %v", err)
		}
		return nil
	})
	if err != nil {
		return false, err
	}
	return body.Stream || r.URL.Query().Get("stream") == "true", nil
}

func (s *Server) cancel(v vendor, w http.ResponseWriter, r *http.Request) error {
	run, err := s.open(r.Context(), s.Host(r), v, chi.URLParam(r, "id"))
	if err != nil {
		return err
	}
	if err := run.read(r.Context()); err != nil {
		return err
	}
	openAIs := run.record.API == string(openAI)
	switch {
	case !run.record.Background:
		return proto.FieldErrorf(
			"response_id", "must be that of a response with background; others end when their client leaves")
	case run.ended && !openAIs:
		return proto.FieldErrorf("response_id", "must be that of a response that has not ended; this one is %s",
			run.out.response.Status)
	case !run.ended:
		if err := s.Runs.Cancel(r.Context(), run.record.Org, run.record.ID); err != nil &&
			!errors.Is(err, proto.ErrNotFound) {
			return err
		}
	}
	if !openAIs {
		writeJSON(w, http.StatusOK, map[string]string{"response_id": run.record.ID, "status": "cancelling"})
		return nil
	}
	if !run.ended {
		ctx, done := context.WithTimeout(r.Context(), cancelWait)
		defer done()
		err := run.log.Follow(ctx, func(e *agent.Entry) error { return run.out.entry(ctx, e) })
		if err != nil && (r.Context().Err() != nil || ctx.Err() == nil) {
			return absent(err)
		}
	}
	writeJSON(w, http.StatusOK, run.out.response)
	return nil
}

func (s *Server) delete(v vendor, w http.ResponseWriter, r *http.Request) error {
	run, err := s.open(r.Context(), s.Host(r), v, chi.URLParam(r, "id"))
	if err != nil {
		return err
	}
	if run.record.Background {
		if err := s.Runs.Cancel(r.Context(), run.record.Org, run.record.ID); err != nil &&
			!errors.Is(err, proto.ErrNotFound) {
			return err
		}
	}
	if err := s.Runs.Remove(context.WithoutCancel(r.Context()), run.record.Org, run.record.ID); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, map[string]any{"id": run.record.ID, "object": "response", "deleted": true})
	return nil
}

// adoptPrevious puts an earlier response's conversation before a request's input. It returns the
// resulting body, which no longer needs the earlier response.
func (s *Server) adoptPrevious(
	ctx context.Context, host agent.RequestHost, v vendor, req *request, body []byte,
) ([]byte, error) {
	before, err := s.open(ctx, host, v, *req.Previous)
	if err != nil && agent.Public(err).Code == api.CodeNotFound {
		return nil, proto.FieldErrorf("previous_response_id", "must be the id of a stored response: %s",
			agent.Public(err).Message)
	}
	if err != nil {
		return nil, err
	}
	before.out.outputs, before.out.encrypted, before.out.forModel = true, true, true
	if err := before.read(ctx); err != nil {
		return nil, err
	}
	if status := before.out.response.Status; status != statusCompleted && status != statusIncomplete &&
		status != statusAction {
		return nil, proto.FieldErrorf("previous_response_id",
			"must be the id of a response that is completed; this one is %s", status)
	}
	items := before.request.inputItems()
	for _, item := range before.out.response.Output {
		items = append(items, value(item))
	}
	return replaceInput(host, req, body, "previous_response_id", append(items, req.inputItems()...))
}

// replaceInput replaces the input of a request, and returns the resulting body. field is the member
// that required it.
func replaceInput(
	host agent.RequestHost, req *request, body []byte, field string, items []json.RawMessage,
) ([]byte, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(body, &members); err != nil {
		return nil, err
	}
	req.Input = value(items)
	members["input"] = req.Input
	if body = value(members); len(body) > maxInput {
		return nil, proto.FieldErrorf(field, "has a conversation that is longer than %d bytes with this input", maxInput)
	}
	return body, host.Reserve(int64(len(body)))
}

// Prepare implements [agent.API].
func (s *Server) Prepare(
	ctx context.Context, host agent.Host, record *proto.AgentRun, started *agent.Start,
) (*agent.Run, *agent.Start, error) {
	req, err := decodeRequest(vendor(record.API), record.Request)
	if err != nil {
		return nil, nil, err
	}
	run, err := newRun(vendor(record.API), req)
	if err != nil {
		return nil, nil, err
	}
	run.record = record
	if started != nil {
		run.open(host, started.Container)
		return &run.Run, started, nil
	}
	if err := run.begin(ctx, host); err != nil {
		return nil, nil, err
	}
	return &run.Run, &agent.Start{Container: run.container.ID}, nil
}

// responseEvent is the body of a webhook about a response, as OpenAI's clients expect it.
type responseEvent struct {
	ID        string            `json:"id"`
	Object    string            `json:"object"`
	Type      string            `json:"type"`
	CreatedAt int64             `json:"created_at"`
	Data      map[string]string `json:"data"`
}

// Ended implements [agent.API].
func (s *Server) Ended(ctx context.Context, run *proto.AgentRun, last *agent.Entry) error {
	if run.API != string(openAI) { // Perplexity documents no webhooks
		return nil
	}
	out := &encoder{vendor: openAI, response: &response{}}
	if err := out.entry(ctx, last); err != nil {
		return err
	}
	return s.Notify(ctx, run.Org, run.Key, "response "+run.ID, &responseEvent{
		"evt_" + strings.TrimPrefix(run.ID, responsePrefix), "event", "response." + out.response.Status, last.At.Unix(),
		map[string]string{"id": run.ID},
	})
}
