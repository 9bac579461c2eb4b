package responses

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// maxSteps is the number of turns in a response.
	maxSteps = 10
	// maxWall is the time for a response, and maxBackground for one in the background.
	maxWall       = 10 * time.Minute
	maxBackground = time.Hour

	responsePrefix = "resp_"
	// openAIContainer and sandboxContainer begin the ids of containers.
	openAIContainer  = "cntr_"
	sandboxContainer = "sandbox_"
	// containerLife is how long a container of OpenAI lives after its last use.
	containerLife = 20 * time.Minute
)

func (s *Server) create(v vendor, w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	var body []byte
	var req *request
	err := host.ReadBody(w, func(raw []byte) (err error) {
		if body = raw; v == byTools {
			v = vendorOf(body)
		}
		req, err = decodeRequest(v, body)
		return err
	})
	if err != nil {
		return err
	}
	if body, err = s.resolveReferences(r.Context(), host, v, req, body); err != nil {
		return err
	}
	if req.Previous != nil && *req.Previous != "" {
		if body, err = s.adoptPrevious(r.Context(), host, v, req, body); err != nil {
			return err
		}
	}
	req.codex = isCodex(r)
	run, err := newRun(v, req)
	if err != nil {
		return err
	}
	run.Parts = req.Stream && !req.Background && v == openAI
	run.Patient = run.Patient || req.codex
	if err := run.set.check(r.Context(), host); err != nil {
		return err
	}
	run.record.Request = body
	run.record.Org, run.record.Key = host.Caller()
	if req.stored() {
		if err := host.AllowStored(r.Context(), req.Background); err != nil {
			return err
		}
	}
	if req.Background {
		return s.createBackground(w, r, host, run)
	}
	return s.answer(w, r, host, run)
}

// answer carries out a run, and answers with its response.
func (s *Server) answer(w http.ResponseWriter, r *http.Request, host agent.RequestHost, run *run) error {
	ctx := r.Context()
	if err := run.begin(ctx, host); err != nil {
		return err
	}
	out := run.encoder()
	if run.request.Stream {
		stream := newStream(w, out)
		stream.Begin = func() {
			out.begin()
			out.start(run.container.ID)
		}
		err := stream.Serve(ctx, func(ctx context.Context) error { return s.carryOut(ctx, run, stream) })
		return s.finishStream(r, stream, run.record.ID, err)
	}
	out.start(run.container.ID)
	err := s.carryOut(ctx, run, out)
	if err != nil && (ctx.Err() != nil || out.results == 0) {
		return agent.ClientError(err)
	}
	if err != nil { // what was carried out is not lost
		s.Log.WarnContext(ctx, "agent run failed", "run", run.record.ID, "error", err, "request_id",
			w.Header().Get("X-Request-Id"))
		out.fail(agent.Public(err))
	}
	writeJSON(w, http.StatusOK, out.response)
	return nil
}

// carryOut carries out a run. If the response is stored, events are stored before they are sent.
func (s *Server) carryOut(ctx context.Context, run *run, events agent.Log) error {
	if !run.request.stored() {
		return agent.Continue(ctx, s.Upstream, &run.Run, events)
	}
	at, err := s.store(ctx, run.record)
	if err != nil {
		return err
	}
	log := &agent.StoredLog{Store: s.Runs, Run: run.record, At: at, To: events}
	if err = log.Start(ctx, &agent.Start{Container: run.container.ID}); err == nil {
		err = agent.Continue(ctx, s.Upstream, &run.Run, log)
	}
	if err != nil && ctx.Err() != nil { // the client has left, or the server ends the request with an error
		err = context.Cause(ctx)
	}
	return errors.Join(err, log.End(ctx, err))
}

// vendorOf returns the vendor whose tools a request has.
func vendorOf(body []byte) vendor {
	var r struct {
		Tools []struct {
			Type string `json:"type"`
		} `json:"tools"`
	}
	_ = json.Unmarshal(body, &r) // an error is found again
	for _, t := range r.Tools {
		if t.Type == sandboxName {
			return perplexity
		}
	}
	return openAI
}

// run is a response in the making.
type run struct {
	agent.Run
	vendor    vendor
	request   *request
	record    *proto.AgentRun
	container *container
	set       *toolSet
	earlier   string // the container that the conversation has used last
}

// newRun returns the run for a request, without its container.
func newRun(v vendor, req *request) (*run, error) {
	set, err := req.toolSet(v)
	if err != nil {
		return nil, err
	}
	talk, err := req.conversation()
	if err != nil {
		return nil, err
	}
	choice, err := req.choice(set)
	if err != nil {
		return nil, err
	}
	r := &run{vendor: v, request: req, set: set, earlier: talk.container}
	r.record = &proto.AgentRun{
		ID: responsePrefix + newID(), API: string(v), Background: req.Background, Stream: req.Background && req.Stream,
		CreatedAt: time.Now().UTC(),
	}
	r.Run = agent.Run{
		Turn: agent.Turn{
			Model: req.Model, System: talk.system, Items: talk.items, Choice: choice, Format: req.format,
			Temperature: req.Temperature, TopP: req.TopP, Serial: req.Parallel != nil && !*req.Parallel,
			Anthropic: agent.AnthropicSettings{AutoCache: len(set.clients) > 0},
			OpenAI:    agent.OpenAISettings{Effort: req.Reasoning.Effort, Verbosity: req.Text.Verbosity},
		},
		Steps: maxSteps, Wall: maxWall,
	}
	r.NewCallID = r.newCallID
	if req.Background {
		r.Wall, r.Patient = maxBackground, true
	}
	if req.MaxSteps != nil {
		r.Steps = *req.MaxSteps
	}
	if req.MaxToolCalls != nil {
		r.MaxCalls = *req.MaxToolCalls
	}
	if req.MaxOutputTokens != nil {
		r.Turn.MaxTokens = *req.MaxOutputTokens
	}
	return r, nil
}

// encoder returns the encoder of the response.
func (r *run) encoder() *encoder {
	return newEncoder(r.vendor, r.record.ID, r.record.CreatedAt, r.request)
}

// begin opens the container of a run that has not started, and puts the files of the request into it.
func (r *run) begin(ctx context.Context, host agent.Host) error {
	id, err := r.chooseContainer(ctx, host)
	if err != nil {
		return err
	}
	r.open(host, id)
	return agent.ClientError(r.container.stage(ctx, r.set.files))
}

// open makes a host carry out the run's calls in the container with an id.
func (r *run) open(host agent.Host, id string) {
	r.container = &container{agent.Container{Host: host, ID: id, Run: r.record.ID, InPlace: true}}
	r.Tools, r.Reserve = r.set.all(r.container), host.Reserve
}

// chooseContainer returns the container id of a new run: the request's, an unexpired one of an
// earlier response of its conversation, or a new one.
func (r *run) chooseContainer(ctx context.Context, host agent.Host) (string, error) {
	id := strings.TrimPrefix(r.record.ID, responsePrefix)
	if r.vendor == perplexity {
		return sandboxContainer + id, nil
	}
	if r.set.container != "" {
		_, err := findContainer(ctx, host, r.set.container)
		return r.set.container, err
	}
	if len(r.set.hosted) > 0 && r.earlier != "" {
		_, err := findContainer(ctx, host, r.earlier)
		if err == nil || agent.Public(err).Code != api.CodeNotFound {
			return r.earlier, err
		}
	}
	return openAIContainer + id, nil
}

var errNoContainer = api.Errorf(
	api.CodeNotFound, `container: there is none of this id, or it has expired; use the type "auto" to get a new one`)

// findContainer returns the thread of a container that has not expired.
func findContainer(ctx context.Context, host agent.Host, id string) (*proto.Thread, error) {
	if !strings.HasPrefix(id, openAIContainer) {
		return nil, errNoContainer
	}
	thread, err := host.Thread(ctx, id)
	switch {
	case err != nil && agent.Public(err).Code == api.CodeNotFound:
		return nil, errNoContainer
	case err != nil:
		return nil, err
	case time.Since(thread.UsedAt) > containerLife:
		return nil, errNoContainer
	}
	return thread, nil
}
