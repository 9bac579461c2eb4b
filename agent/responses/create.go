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
	// maxWall is the time for a response.
	maxWall = 10 * time.Minute

	responsePrefix = "resp_"
	// openAIContainer and sandboxContainer begin the ids of containers.
	openAIContainer  = "cntr_"
	sandboxContainer = "sandbox_"
	// containerLife is how long a container of OpenAI may be used after its last use.
	containerLife = 20 * time.Minute
)

// run is a response in the making.
type run struct {
	agent.Run
	vendor    vendor
	container *container
	outputs   bool // of the code interpreter are shown
	response  *response
}

func (s *Server) create(v vendor, w http.ResponseWriter, r *http.Request) error {
	host := s.Host(r)
	body, err := host.ReadBody(w)
	if err != nil {
		return err
	}
	if v == byTools {
		v = vendorOf(body)
	}
	req, err := decodeRequest(v, body)
	if err != nil {
		return err
	}
	run, err := newRun(r.Context(), v, host, req)
	if err != nil {
		return err
	}
	if req.Stream {
		return s.stream(w, r, run)
	}
	out := newEncoder(run)
	if err := agent.Continue(r.Context(), s.Upstream, &run.Run, out); err != nil {
		if r.Context().Err() != nil || out.results == 0 {
			return agent.ClientError(err)
		}
		// What was carried out is not lost.
		s.Log.WarnContext(r.Context(), "agent run failed", "run", run.response.ID, "error", err, "request_id", w.Header().Get("X-Request-Id"))
		out.fail(agent.Public(err))
	}
	writeJSON(w, http.StatusOK, out.response)
	return nil
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

// newRun returns the run that a request asks for. The files that it puts into the container are
// there then.
func newRun(ctx context.Context, v vendor, host Host, req *request) (*run, error) {
	set, err := req.toolSet(v)
	if err != nil {
		return nil, err
	}
	for _, ref := range set.refs {
		err := ref.check(ctx, host)
		if field, ok := errors.AsType[*proto.FieldError](err); ok {
			err = proto.FieldErrorf("tools", "have a container whose %s", field.Message)
		}
		if err != nil {
			return nil, err
		}
	}
	talk, err := req.conversation()
	if err != nil {
		return nil, err
	}
	choice, err := req.choice(set)
	if err != nil {
		return nil, err
	}
	id := newID()
	r := &run{vendor: v, response: newResponse(v, responsePrefix+id, req)}
	c := &container{agent.Container{Host: host, ID: sandboxContainer + id, Run: r.response.ID, InPlace: true}}
	if v == openAI && len(set.hosted) > 0 {
		if c.ID, err = chooseContainer(ctx, host, set.container, talk.container); err != nil {
			return nil, err
		}
		if err := c.stage(ctx, set.files); err != nil {
			return nil, agent.ClientError(err)
		}
	}
	steps := maxSteps
	if req.MaxSteps != nil {
		steps = *req.MaxSteps
	}
	for _, name := range req.Include {
		r.outputs = r.outputs || name == includeOutputs
	}
	r.container = c
	r.Run = agent.Run{
		Turn: agent.Turn{
			Model: req.Model, System: strings.Join(talk.system, "\n"), Items: talk.items, Choice: choice,
			Temperature: req.Temperature, TopP: req.TopP,
		},
		Tools: set.all(c), NewCallID: newCallID, Reserve: host.Reserve, Steps: steps, Wall: maxWall,
	}
	if req.MaxOutputTokens != nil {
		r.Turn.MaxTokens = *req.MaxOutputTokens
	}
	return r, nil
}

// chooseContainer returns the id of the container that a request names, of the one that an earlier
// response of its conversation has used and that has not expired, or of a new one.
func chooseContainer(ctx context.Context, host Host, named, earlier string) (string, error) {
	if named != "" {
		_, err := findContainer(ctx, host, named)
		return named, err
	}
	if earlier != "" {
		_, err := findContainer(ctx, host, earlier)
		if err == nil || agent.Public(err).Code != api.CodeNotFound {
			return earlier, err
		}
	}
	return agent.NewContainerID(openAIContainer), nil
}

var errNoContainer = api.Errorf(api.CodeNotFound, `container: there is none of this id, or it has expired; use the type "auto" to get a new one`)

// findContainer returns the thread of a container that has not expired.
func findContainer(ctx context.Context, host Host, id string) (*proto.Thread, error) {
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
