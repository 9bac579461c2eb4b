package e2e

import (
	"bufio"
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	openAIPath     = "/openai/v1/responses"
	perplexityPath = "/perplexity/v1/responses"
)

// agentResponse is a response of both APIs.
type agentResponse struct {
	ID, Status string
	Output     []struct {
		Type, Status string
		CallID       string `json:"call_id"`
		ContainerID  string `json:"container_id"`
		Outputs      []struct{ Type, Logs, URL string }
		Results      []struct {
			Stdout, Stderr, Status string
			ExitCode               int `json:"exit_code"`
		}
		Content []struct {
			Text        string
			Annotations []struct {
				FileID string `json:"file_id"`
			}
		}
	}
	Error struct{ Type, Param string }
}

// testAgentResponses runs programs through the responses of a model, over plain HTTP.
func testAgentResponses(t *testing.T, p *programs) {
	sys := newAgents(t, p, "responses")
	ask := func(t *testing.T, path string, body request) *agentResponse {
		t.Helper()
		r := sys.in(t).do(http.MethodPost, path, body)
		if r.status != http.StatusOK || r.header.Get("X-Request-Id") == "" {
			t.Fatalf("%s", r)
		}
		var answer agentResponse
		r.into(t, &answer)
		return &answer
	}
	sandbox := func(input string) request {
		return request{"model": "any", "input": input, "tools": []request{{"type": "sandbox"}}}
	}
	interpreter := func(input string, container any) request {
		return request{
			"model": "any", "input": input, "include": []string{"code_interpreter_call.outputs"},
			"tools": []request{{"type": "code_interpreter", "container": container}},
		}
	}
	t.Run("executions are recorded", func(t *testing.T) {
		t.Parallel()
		r := ask(t, perplexityPath, sandbox("The mean and standard deviation?"))
		if len(r.Output) != 3 || len(r.Output[1].Results) != 1 || r.Output[1].Results[0].Stdout != "5.5 2.8723\n" ||
			r.Status != "completed" {
			t.Fatalf("%+v", r)
		}
		var list struct{ Executions []record }
		eventually(t, "the index has the execution", func() (bool, any) {
			answer := sys.in(t).get("/v1/executions?metadata.agent_run=" + r.ID)
			answer.into(t, &list)
			return len(list.Executions) == 1, answer
		})
		if x := list.Executions[0]; x.Status != string(proto.StatusSuccess) || x.Language != "python" ||
			x.Metadata["agent_call"] != r.Output[1].CallID {
			t.Errorf("%+v", x)
		}
	})
	t.Run("an interpreter keeps its variables", func(t *testing.T) {
		t.Parallel()
		container := ask(t, openAIPath, interpreter("Cell x = 41", request{"type": "auto"})).Output[0].ContainerID
		r := ask(t, openAIPath, interpreter("Cell print(x + 1)", container))
		if outputs := r.Output[0].Outputs; len(outputs) != 1 || outputs[0].Logs != "42\n" {
			t.Errorf("%+v", r)
		}
		r = ask(t, openAIPath, interpreter("Cell type('P', (), {'_repr_png_': lambda self: b'png'})()", container))
		if outputs := r.Output[0].Outputs; len(outputs) != 2 || outputs[1].Type != "image" ||
			outputs[1].URL != "data:image/png;base64,cG5n" {
			t.Errorf("%+v", r)
		}
		r = ask(t, openAIPath, interpreter("Cell x += 1; x", container).and("background", true))
		eventually(t, "the response in the background", func() (bool, any) {
			answer := sys.in(t).get(openAIPath + "/" + r.ID + "?include=code_interpreter_call.outputs")
			answer.into(t, r)
			return r.Status == "completed", answer
		})
		if outputs := r.Output[0].Outputs; len(outputs) != 1 || outputs[0].Logs != "42" {
			t.Errorf("%+v", r)
		}
		answer := sys.in(t).do(http.MethodDelete, "/openai/v1/containers/"+container, nil)
		if answer.status != http.StatusOK {
			t.Errorf("%s", answer)
		}
	})
	t.Run("a failure is a result", func(t *testing.T) {
		t.Parallel()
		r := ask(t, perplexityPath, sandbox("Fail"))
		if one := r.Output[0].Results[0]; one.Stdout != "out\n" || one.Stderr != "err\n" || one.ExitCode != 3 ||
			one.Status != "completed" {
			t.Errorf("%+v", r)
		}
	})
	t.Run("containers and their files are the organisation's", func(t *testing.T) {
		t.Parallel()
		a := sys.in(t)
		r := ask(t, openAIPath, interpreter("Save a file", request{"type": "auto"}))
		id := r.Output[0].ContainerID
		if len(r.Output) != 2 || len(r.Output[1].Content[0].Annotations) != 1 { // the link is left out
			t.Fatalf("%+v", r)
		}
		file := "/openai/v1/containers/" + id + "/files/" + r.Output[1].Content[0].Annotations[0].FileID + "/content"
		if content := a.get(file); string(content.body) != "a,1" {
			t.Errorf("%s", content)
		}
		body := interpreter("Read the file", id)
		if again := ask(t, openAIPath, body); again.Output[0].Outputs[0].Logs != "a,1\n" {
			t.Errorf("%+v", again)
		}
		secret, _ := a.newKey("strangers", "enterprise")
		other := a.with(secret)
		if r := other.do(http.MethodPost, openAIPath, body); r.status != http.StatusNotFound {
			t.Errorf("a container of another organisation: %s", r)
		}
		if r := other.get(file); r.status != http.StatusNotFound {
			t.Errorf("a file of another organisation: %s", r)
		}
		if r := other.do(http.MethodDelete, strings.TrimSuffix(file, "/content"), nil); r.status != http.StatusNotFound {
			t.Errorf("deletion of a file of another organisation: %s", r)
		}
		const containers = "/openai/v1/containers"
		if r := other.get(containers); r.status != http.StatusOK || strings.Contains(string(r.body), id) {
			t.Errorf("the containers of another organisation: %s", r)
		}
		if r := a.get(containers); r.status != http.StatusOK || !strings.Contains(string(r.body), id) {
			t.Errorf("the containers: %s", r)
		}
		const passwd = "/cfile_cGFzc3dk" // the link to /etc/passwd
		if r := a.get("/openai/v1/containers/" + id + "/files" + passwd + "/content"); r.status != http.StatusNotFound {
			t.Errorf("a link: %s", r)
		}
	})
	t.Run("nothing of the model's server is in a sandbox", func(t *testing.T) {
		t.Parallel()
		r := ask(t, perplexityPath, sandbox("Show the environment"))
		if out := r.Output[0].Results[0].Stdout; !strings.Contains(out, "HOME=") || strings.Contains(out, agentKey) ||
			strings.Contains(out, "BULLPEN_AGENT") {
			t.Errorf("the environment: %s", out)
		}
	})
	t.Run("a client that leaves ends its execution", func(t *testing.T) {
		t.Parallel()
		a := sys.in(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		resp, err := a.open(ctx, http.MethodPost, perplexityPath, sandbox("Sleep").and("stream", true))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		run := ""
		for in := bufio.NewScanner(resp.Body); in.Scan() && !strings.Contains(in.Text(), "sandbox_results"); {
			if _, rest, ok := strings.Cut(in.Text(), `"id":"resp_`); ok {
				id, _, _ := strings.Cut(rest, `"`)
				run = "resp_" + id
			}
		}
		var list struct{ Executions []record }
		eventually(t, "the execution runs", func() (bool, any) {
			r := a.get("/v1/executions?metadata.agent_run=" + run)
			r.into(t, &list)
			return len(list.Executions) == 1 && list.Executions[0].Status == string(proto.StatusRunning), r
		})
		cancel()
		if x := a.ended(list.Executions[0].TraceID); x.Status != string(proto.StatusCancelled) {
			t.Errorf("%+v", x)
		}
	})
	t.Run("errors have the form of the API", func(t *testing.T) {
		t.Parallel()
		for _, c := range []struct {
			key        string
			body       any
			status     int
			kind       string
			retryAfter string
		}{
			{"sk-other", sandbox("x"), http.StatusUnauthorized, "invalid_request_error", ""},
			{sys.key, request{"model": "m"}, http.StatusBadRequest, "invalid_request_error", ""},
			{sys.key, []byte("{"), http.StatusBadRequest, "invalid_request_error", ""},
			{sys.key, sandbox("Limit"), http.StatusTooManyRequests, "rate_limit_error", "7"},
			{sys.key, sandbox("Overload"), http.StatusServiceUnavailable, "server_error", "1"},
			{sys.key, sandbox("Break"), http.StatusInternalServerError, "server_error", ""},
		} {
			r := sys.in(t).with(c.key).do(http.MethodPost, perplexityPath, c.body)
			var answer agentResponse
			r.into(t, &answer)
			if r.status != c.status || answer.Error.Type != c.kind || r.header.Get("X-Request-Id") == "" ||
				r.header.Get("Retry-After") != c.retryAfter {
				t.Errorf("%v: %s", c.body, r)
			}
		}
		for _, path := range []string{"/openai/v1/embeddings", "/perplexity/v1/embeddings"} {
			r := sys.in(t).do(http.MethodPost, path, request{"model": "m", "input": "x"})
			var answer agentResponse
			r.into(t, &answer)
			if r.status != http.StatusNotFound || answer.Error.Type != "invalid_request_error" {
				t.Errorf("a route that is not here: %s", r)
			}
		}
	})
}
