package responses_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-chi/chi/v5"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/agenttest"
	"github.com/bullpen-run/bullpen/agent/responses"
	"github.com/bullpen-run/bullpen/agent/script"
	"github.com/bullpen-run/bullpen/agent/upstream"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world serves the routes with a scripted model.
type world struct {
	t    *testing.T
	host *agenttest.Host
	runs *agenttest.Store
	// answers has the routes.
	answers  *responses.Server
	notified chan string // bodies of webhooks
	mu       sync.Mutex
	asked    []string // bodies of requests to the model
	server   *httptest.Server
}

func newWorld(t *testing.T, rules string) *world {
	t.Helper()
	s, err := script.Parse([]byte(rules))
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, host: agenttest.NewHost(), runs: agenttest.NewStore(), notified: make(chan string, 16)}
	model := httptest.NewServer(&script.Server{Script: s, Requests: func(_ http.Header, body []byte) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.asked = append(w.asked, string(body))
	}})
	t.Cleanup(model.Close)
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(client.CloseIdleConnections)
	up := &upstream.Client{
		URL: model.URL, Key: func() (string, error) { return "", nil }, Timeout: time.Minute,
		HTTP: client,
	}
	w.answers = &responses.Server{
		Upstream: up, Completions: up,
		Host: func(r *http.Request) agent.RequestHost { w.host.R = r; return w.host }, Runs: w.runs,
		Log: slog.New(slog.DiscardHandler),
		Notify: func(_ context.Context, _, _, _ string, body any) error {
			text, err := json.Marshal(body)
			w.notified <- string(text)
			return err
		},
	}
	router := chi.NewRouter()
	for _, route := range w.answers.Routes() {
		router.Method(route.Method, route.Path, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if err := route.Handle(rw, r); err != nil {
				responses.WriteError(rw, r, asAPI(err))
			}
		}))
	}
	w.server = httptest.NewServer(router)
	t.Cleanup(w.server.Close)
	return w
}

// asAPI returns the error that the gateway would answer with.
func asAPI(err error) *api.Error {
	if known, ok := errors.AsType[*api.Error](err); ok {
		return known
	}
	if field, ok := errors.AsType[*proto.FieldError](err); ok {
		return api.Errorf(api.CodeValidation, "%s", field.Message)
	}
	return api.Errorf(api.CodeInternal, "%v", err)
}

// lastRequest returns the last request to the model.
func (w *world) lastRequest() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.asked[len(w.asked)-1]
}

func (w *world) do(method, path, body string, headers ...string) (status int, answer string) {
	w.t.Helper()
	r, err := http.NewRequestWithContext(w.t.Context(), method, w.server.URL+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	resp, err := w.server.Client().Do(r)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return resp.StatusCode, string(raw)
}

// ask asks for a response at a path, with members of the request such as "x": 1.
func (w *world) ask(path string, members ...string) (status int, answer string) {
	w.t.Helper()
	all := append([]string{`"model":"m"`}, members...)
	if !strings.Contains(strings.Join(members, ""), `"input"`) {
		all = append(all, `"input":"x"`)
	}
	return w.do(http.MethodPost, path, "{"+strings.Join(all, ",")+"}")
}

const (
	openAI      = "/openai/v1/responses"
	perplexity  = "/perplexity/v1/responses"
	interpreter = `"tools":[{"type":"code_interpreter","container":{"type":"auto"}}]`
	shell       = `"tools":[{"type":"shell","environment":{"type":"container_auto"}}]`
	sandbox     = `"tools":[{"type":"sandbox"}]`
	outputs     = `"include":["code_interpreter_call.outputs"]`

	interpreterRule = `{role: user, tool: code_interpreter, text: abcd, chunk: 2, calls: [{name: code_interpreter, ` +
		`arguments: {code: "1"}}]}`
	shellRule = `{role: user, tool: shell, calls: [{name: shell, arguments: {commands: [ls, pwd], ` +
		`timeout_ms: 1500}}]}`
	sandboxRule = `{role: user, tool: sandbox, text: abcd, chunk: 2, calls: [{name: sandbox, arguments: {language: ` +
		`python, code: "1"}}]}`
	allRules = `rules: [` + interpreterRule + `, ` + shellRule + `, ` + sandboxRule + `, {text: ok}]`
)

func TestModels(t *testing.T) {
	w := newWorld(t, allRules)
	for _, prefix := range []string{"/openai/v1", "/perplexity/v1"} {
		status, answer := w.do(http.MethodGet, prefix+"/models", "")
		if status != http.StatusOK ||
			!strings.HasPrefix(answer,
				`{"object":"list","data":[{"id":"script","object":"model","created":0,"owned_by":"bullpen"}]`) {
			t.Errorf("%d %s", status, answer)
		}
		if status, answer := w.do(http.MethodGet, prefix+"/models/script", ""); status != http.StatusOK ||
			!strings.HasPrefix(answer, `{"id":"script"`) {
			t.Errorf("%d %s", status, answer)
		}
		for _, other := range []string{"other", "a%2Fscript", "a/script"} {
			if status, answer := w.do(http.MethodGet, prefix+"/models/"+other, ""); status != http.StatusNotFound ||
				!strings.Contains(answer, "invalid_request_error") {
				t.Errorf("%d %s", status, answer)
			}
		}
	}
}

// response is what the tests read of one.
type response struct {
	ID, Status string
	Error      struct{ Code, Message, Type, Param string }
	Incomplete struct{ Reason string } `json:"incomplete_details"`
	Output     []map[string]any
	Usage      struct {
		Details map[string]map[string]int `json:"tool_calls_details"`
	}
}

func decode(t *testing.T, answer string) *response {
	t.Helper()
	var r response
	if err := json.Unmarshal([]byte(answer), &r); err != nil {
		t.Fatalf("%v: %s", err, answer)
	}
	return &r
}

// types returns the types of the items of a response.
func (r *response) types() string {
	var list []string
	for _, item := range r.Output {
		list = append(list, fmt.Sprint(item["type"]))
	}
	return strings.Join(list, " ")
}

func TestSandboxResults(t *testing.T) {
	for name, c := range map[string]struct {
		result proto.Result
		err    error
		status string // of the item and its result
		exit   float64
	}{
		"a success": {result: proto.Exited(0), status: "completed"},
		"a failure": {result: proto.Exited(3), status: "completed", exit: 3},
		"a timeout": {result: proto.TimedOut(1), status: "timed_out", exit: -1},
		"no memory": {result: proto.Failure(proto.CodeMemory, "It used too much."), status: "failed", exit: -1},
		"no worker": {err: api.Unavailable(1, "no worker"), status: "failed", exit: -1},
		"a limit":   {err: api.Errorf(api.CodeRateLimited, "too many"), status: "failed", exit: -1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, allRules)
			w.host.Result, w.host.Err = c.result, c.err
			for _, path := range []string{perplexity, "/perplexity/v1/agent", "/v1/agent", "/v1/responses"} {
				status, answer := w.ask(path, sandbox)
				r := decode(t, answer)
				if status != http.StatusOK || r.Status != "completed" || r.types() != "message sandbox_results message" {
					t.Fatalf("%s: %d %s", path, status, answer)
				}
				item := r.Output[1]
				results, _ := item["results"].([]any)
				if len(results) != 1 || item["status"] != c.status || item["language"] != "python" || item["code"] != "1" ||
					item["call_id"] == "" {
					t.Fatalf("%v", item)
				}
				if one, _ := results[0].(map[string]any); one["status"] != c.status || one["exit_code"] != c.exit {
					t.Errorf("%v", one)
				}
				if r.Usage.Details["sandbox"]["invocation"] != 1 {
					t.Errorf("%s", answer)
				}
			}
		})
	}
}

func TestCodeInterpreter(t *testing.T) {
	for name, c := range map[string]struct {
		result proto.Result
		err    error
		status string
	}{
		"a success": {result: proto.Exited(0), status: "completed"},
		"a failure": {result: proto.Exited(3), status: "completed"},
		"a timeout": {result: proto.TimedOut(1), status: "incomplete"},
		"no worker": {err: api.Unavailable(1, "no worker"), status: "failed"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, allRules)
			w.host.Result, w.host.Err = c.result, c.err
			w.host.Result.Stdout = "printed"
			_, answer := w.ask(openAI, interpreter, outputs)
			r := decode(t, answer)
			if r.types() != "message code_interpreter_call message" || r.Output[1]["status"] != c.status ||
				strings.Contains(answer, "printed") != (c.err == nil) {
				t.Fatalf("%s", answer)
			}
			_, answer = w.ask(openAI, interpreter)
			if r := decode(t, answer); r.Output[1]["outputs"] != nil {
				t.Errorf("outputs that the request does not include: %s", answer)
			}
		})
	}
}

// The code of the code interpreter is a cell, whose pictures are outputs. A model does not get them again.
func TestCodeInterpreterKeepsItsState(t *testing.T) {
	t.Parallel()
	w := newWorld(t, allRules)
	w.host.Cell = func(string) (*api.CellResult, error) {
		return &api.CellResult{Status: "ok", Stdout: "printed\n", Results: []api.Display{{
			Data: map[string]json.RawMessage{
				"image/png": json.RawMessage(`"cG5n"`), "text/plain": json.RawMessage(`"a figure"`),
			},
		}}}, nil
	}
	_, answer := w.ask(openAI, interpreter, outputs)
	const want = `"outputs":[{"type":"logs","logs":"printed\na figure"},` +
		`{"type":"image","url":"data:image/png;base64,cG5n"}]`
	r := decode(t, answer)
	if !strings.Contains(answer, want) || len(w.host.Requests()) != 0 {
		t.Fatalf("%s", answer)
	}
	w.ask(openAI, interpreter, fmt.Sprintf(`"previous_response_id":%q`, r.ID))
	if last := w.lastRequest(); !strings.Contains(last, "printed") || strings.Contains(last, "cG5n") {
		t.Errorf("%s", last)
	}
}

func TestShell(t *testing.T) {
	w := newWorld(t, allRules)
	w.host.Result = proto.Exited(3)
	_, answer := w.ask(openAI, shell)
	r := decode(t, answer)
	if r.types() != "shell_call shell_call_output message" ||
		strings.Count(answer, `"outcome":{"type":"exit","exit_code":3}`) != 2 {
		t.Fatalf("%s", answer)
	}
	if n := len(w.host.Requests()); n != 2 || w.host.Requests()[0].Timeout != 2 {
		t.Errorf("%d executions, %+v", n, w.host.Requests()[0])
	}
	w.host.Result = proto.TimedOut(2)
	if _, answer := w.ask(openAI, shell); !strings.Contains(answer, `"outcome":{"type":"timeout"}`) {
		t.Errorf("%s", answer)
	}
}

// failing is a host whose executions fail after the first.
type failing struct {
	*agenttest.Host
	err error
}

func (f *failing) Execute(
	ctx context.Context, id proto.TraceID, req *api.ExecuteRequest,
) (*proto.Record, error) {
	if len(f.Requests()) > 0 {
		return nil, f.err
	}
	return f.Host.Execute(ctx, id, req)
}

// A command that cannot be started leaves the results of those before it, and each that did not run has one
// that says why.
func TestShellHasAResultForEachCommand(t *testing.T) {
	w := newWorld(t, `rules: [{role: user, calls: [{name: shell, arguments: {commands: [ls, pwd, id]}}]}, `+
		`{match: "no worker", text: told}]`)
	w.host.Result = proto.Exited(0)
	w.host.Result.Stdout = "printed"
	w.answers.Host = func(r *http.Request) agent.RequestHost {
		w.host.R = r
		return &failing{w.host, api.Unavailable(1, "no worker was free")}
	}
	_, answer := w.ask(openAI, shell)
	r := decode(t, answer)
	if r.types() != "shell_call shell_call_output message" || r.Output[1]["status"] != "incomplete" ||
		strings.Count(answer, `"stdout":"printed"`) != 1 || strings.Count(answer, "no worker was free") != 2 ||
		!strings.Contains(answer, "told") {
		t.Errorf("%s", answer)
	}
}

func TestStreamsHaveNumberedEventsInOrder(t *testing.T) {
	const (
		created = "response.created response.in_progress "
		added   = "response.output_item.added "
		done    = "response.output_item.done "
		part    = "response.content_part.added "
		delta   = "response.output_text.delta "
		text    = "response.output_text.done "
		end     = "response.content_part.done "
		call    = "response.code_interpreter_call"
		command = "response.shell_call_command"
		output  = "response.shell_call_output_content"
		message = added + part + delta + text + end + done
		lines   = command + ".added " + command + ".delta " + command + ".done "
		lists   = output + ".delta " + output + ".done "
	)
	w := newWorld(t, allRules)
	for _, c := range []struct{ path, tools, want string }{
		{openAI, interpreter, created + added + part + delta + delta + text + end + done +
			added + call + ".in_progress " + call + "_code.delta " + call + "_code.done " + call + ".interpreting " + call +
			".completed " + done + message + "response.completed"},
		{openAI, shell, created + added + lines + lines + done + added + lists + lists + done + message +
			"response.completed"},
		{perplexity, sandbox, created + added + delta + delta + text + done + added + done + added + delta + text + done +
			"response.completed"},
	} {
		w.host.Result = proto.Exited(0)
		status, answer := w.ask(c.path, c.tools, `"stream":true`)
		var names []string
		for event := range strings.SplitSeq(strings.TrimSpace(answer), "\n\n") {
			if event == "data: [DONE]" {
				continue
			}
			name, data, _ := strings.Cut(strings.TrimPrefix(event, "event: "), "\ndata: ")
			var body struct {
				Type   string
				Number int `json:"sequence_number"`
			}
			if err := json.Unmarshal([]byte(data), &body); err != nil || body.Type != name || body.Number != len(names) {
				t.Errorf("event %q: %v", event, err)
			}
			names = append(names, name)
		}
		if got := strings.Join(names, " "); status != http.StatusOK || got != c.want {
			t.Errorf("%d\n got %s\nwant %s", status, got, c.want)
		}
		if strings.HasSuffix(answer, "data: [DONE]\n\n") != (c.path == perplexity) {
			t.Errorf("the end of %s", answer)
		}
	}
}

// An error before anything was carried out is an answer, a later one is part of the response.
func TestErrors(t *testing.T) {
	w := newWorld(t, `rules: [{match: early, status: 429, retry_after: 100}, {match: broken, text: half, fault: drop}, `+
		interpreterRule+`, {role: tool, text: half, fault: drop}, {text: ok}]`)
	w.host.Result = proto.Exited(0)
	for _, more := range []string{`"stream":false`, `"stream":true`} {
		status, answer := w.ask(openAI, `"input":"early"`, more)
		if r := decode(t, answer); status != http.StatusTooManyRequests || r.Error.Code != "rate_limit_exceeded" {
			t.Errorf("%d %s", status, answer)
		}
	}
	if status, answer := w.ask(openAI, `"input":"broken"`); status != http.StatusInternalServerError ||
		decode(t, answer).Error.Type != "server_error" {
		t.Errorf("%d %s", status, answer)
	}
	status, answer := w.ask(openAI, interpreter)
	r := decode(t, answer)
	if status != http.StatusOK || r.Status != "failed" || r.Error.Code != "server_error" ||
		r.types() != "message code_interpreter_call message" || r.Output[2]["status"] != "incomplete" {
		t.Errorf("%d %s", status, answer)
	}
	status, answer = w.ask(perplexity, `"input":"broken"`, `"stream":true`)
	if status != http.StatusOK || !strings.Contains(answer, "event: response.failed\ndata: ") ||
		strings.Contains(answer, "response.completed") {
		t.Errorf("%d %s", status, answer)
	}
}

func TestRequestsThatAreRefused(t *testing.T) {
	w := newWorld(t, allRules)
	for body, param := range map[string]string{
		`{"input":"x"}`:            "model",
		`{"model":"m"}`:            "input",
		`{"model":"m","input":[]}`: "input",
		`{"model":"m","input":[{"role":"root",` +
			`"content":"x"}]}`: "input[0]",
		`{"model":"m","input":[{"role":"user","content":[{"type":"input_file",` +
			`"file_id":"f"}]}]}`: "input[0]",
		`{"model":"m","input":[{"type":"function_call","call_id":"c","name":"f",` +
			`"arguments":"1"}]}`: "input[0]",
		`{"model":"m","input":"x","previous_response_id":"resp_1"}`:          "previous_response_id",
		`{"model":"m","input":"x","conversation":"conv_1"}`:                  "conversation",
		`{"model":"m","input":"x","text":{"format":{"type":"json_schema"}}}`: "text.format",
		`{"model":"m","input":"x","max_output_tokens":0}`:                    "max_output_tokens",
		`{"model":"m","input":"x","tools":[{"type":"web_search"}]}`:          "tools[0].type",
		`{"model":"m","input":"x","tools":[{"type":"sandbox"}]}`:             "tools[0].type",
		`{"model":"m","input":"x","tools":[{"type":"code_interpreter"}]}`:    "tools[0].container",
		`{"model":"m","input":"x","tools":[{"type":"code_interpreter","container":{"type":"auto",` +
			`"network_policy":{"type":"allowlist"}}}]}`: "tools",
		`{"model":"m","input":"x","tools":[{"type":"shell","environment":{"type":"local"}}]}`: "tools[0].environment",
		`{"model":"m","input":"x","tools":[{"type":"code_interpreter","container":{"type":"auto"}},{"type":"function",` +
			`"name":"code_interpreter"}]}`: "tools[1]",
		`{"model":"m","input":"x","tool_choice":{"type":"function","name":"f"}}`: "tool_choice",
		`{`: "",
	} {
		status, answer := w.do(http.MethodPost, openAI, body)
		if r := decode(t, answer); status != http.StatusBadRequest || r.Error.Type != "invalid_request_error" ||
			r.Error.Param != param {
			t.Errorf("%s: %d %s", body, status, answer)
		}
	}
	if n := len(w.host.Requests()); n != 0 {
		t.Errorf("%d executions", n)
	}
}

// A container that has expired is never replaced in silence, unless the client leaves the choice.
func TestContainers(t *testing.T) {
	w := newWorld(t, allRules)
	w.host.Result, w.host.Leaves = proto.Exited(0), map[string]string{"plot.png": "chart", ".hidden/x": "no"}
	named := func(id string) string { return `"tools":[{"type":"code_interpreter","container":"` + id + `"}]` }
	_, answer := w.ask(openAI, interpreter)
	id := fmt.Sprint(decode(t, answer).Output[1]["container_id"])
	for _, path := range []string{"/openai/v1/containers/" + id, "/openai/v1/containers/" + id + "/files"} {
		if status, answer := w.do(http.MethodGet, path, ""); status != http.StatusOK || !strings.Contains(answer, id) {
			t.Errorf("%s: %d %s", path, status, answer)
		}
	}
	content, _ := decode(t, answer).Output[2]["content"].([]any)[0].(map[string]any)
	citation, _ := content["annotations"].([]any)[0].(map[string]any)
	file := fmt.Sprintf("/openai/v1/containers/%v/files/%v", citation["container_id"], citation["file_id"])
	if status, content := w.do(http.MethodGet, file+"/content", ""); status != http.StatusOK || content != "chart" ||
		citation["filename"] != "plot.png" {
		t.Errorf("%d %s, %v", status, content, citation)
	}
	if status, answer := w.ask(openAI, named(id)); status != http.StatusOK ||
		decode(t, answer).Output[1]["container_id"] != id {
		t.Errorf("%d %s", status, answer)
	}
	earlier := `"input":[{"role":"user","content":"x"},{"type":"code_interpreter_call","id":"ci_1","code":"1",` +
		`"status":"completed","container_id":"` + id + `"},{"role":"user","content":"y"}]`
	if status, answer := w.ask(openAI, interpreter, earlier); status != http.StatusOK ||
		decode(t, answer).Output[1]["container_id"] != id {
		t.Errorf("%d %s", status, answer)
	}
	w.host.Threads[id].UsedAt = time.Now().Add(-21 * time.Minute)
	if status, answer := w.ask(openAI, interpreter, earlier); status != http.StatusOK ||
		decode(t, answer).Output[1]["container_id"] == id {
		t.Errorf("%d %s", status, answer)
	}
	w.host.Threads["private"] = &proto.Thread{ID: "private", UsedAt: time.Now()}
	for _, other := range []string{id, "private", "cntr_x"} {
		if status, answer := w.ask(openAI, named(other)); status != http.StatusNotFound {
			t.Errorf("%s: %d %s", other, status, answer)
		}
		if status, _ := w.do(http.MethodGet, "/openai/v1/containers/"+other+"/files", ""); status != http.StatusNotFound {
			t.Errorf("the files of %s: %d", other, status)
		}
	}
}

func TestFilesOfSandboxes(t *testing.T) {
	w := newWorld(t, allRules)
	w.host.Result, w.host.Leaves = proto.Exited(0), map[string]string{"data.csv": "1,2"}
	_, answer := w.ask(perplexity, sandbox)
	path := perplexity + "/" + decode(t, answer).ID + "/files"
	_, answer = w.do(http.MethodGet, path, "")
	var files struct {
		Data []struct{ ID, Filename string }
	}
	if err := json.Unmarshal([]byte(answer), &files); err != nil || len(files.Data) != 1 ||
		files.Data[0].Filename != "data.csv" {
		t.Fatalf("%s", answer)
	}
	if status, content := w.do(http.MethodGet, path+"/"+files.Data[0].ID+"/content", ""); status != http.StatusOK ||
		content != "1,2" {
		t.Errorf("%d %s", status, content)
	}
	for _, other := range []string{
		perplexity + "/resp_x/files", perplexity + "/x/files", path + "/cfile_Li4vLi4/content",
		path + "/file_x/content",
	} {
		if status, answer := w.do(http.MethodGet, other, ""); status != http.StatusNotFound {
			t.Errorf("%s: %d %s", other, status, answer)
		}
	}
}

// Calls of the client's tools end the response, after a call of ours beside them was carried out. It is not
// carried out again when the client's results arrive.
func TestClientsTools(t *testing.T) {
	w := newWorld(t, `rules: [{role: user, calls: [{name: sandbox, arguments: {language: bash, code: ls}}, {name: `+
		`weather, arguments: {city: Paris}}]}, {text: ok}]`)
	w.host.Result = proto.Exited(0)
	tools := `"tools":[{"type":"sandbox"},{"type":"function","name":"weather","parameters":{"type":"object"}}]`
	_, answer := w.ask(perplexity, tools)
	r := decode(t, answer)
	if r.Status != "requires_action" || r.types() != "sandbox_results function_call" ||
		r.Output[0]["status"] != "completed" || len(w.host.Requests()) != 1 {
		t.Fatalf("%s", answer)
	}
	first, err := json.Marshal(r.Output)
	if err != nil {
		t.Fatal(err)
	}
	input := strings.TrimSuffix(string(first), "]") +
		fmt.Sprintf(`,{"type":"function_call_output","call_id":%q,"output":"sunny"}]`, r.Output[1]["call_id"])
	_, answer = w.ask(perplexity, tools, `"input":[{"role":"user","content":"x"},`+input[1:])
	if r := decode(t, answer); r.Status != "completed" || r.types() != "message" || len(w.host.Requests()) != 1 {
		t.Errorf("%s", answer)
	}
}

// A reply that is cut off has no calls, and an endless loop ends.
func TestLimits(t *testing.T) {
	w := newWorld(t, `rules: [{match: cut, text: half, finish: length, calls: [{name: sandbox, raw: '{"language": `+
		`"ba'}]}, {match: bad, role: user, calls: [{name: sandbox, raw: '[1]'}]}, `+
		`{match: JSON, role: tool, text: sorry}, {calls: [{name: sandbox, arguments: {language: bash, code: ls}}]}]`)
	w.host.Result = proto.Exited(0)
	for input, c := range map[string]struct {
		status, reason, types string
		runs                  int
	}{
		"cut":  {"incomplete", "max_output_tokens", "message", 0},
		"bad":  {"completed", "", "sandbox_results message", 0},
		"loop": {"incomplete", "max_steps", "sandbox_results sandbox_results", 2},
	} {
		before := len(w.host.Requests())
		_, answer := w.ask(perplexity, sandbox, `"max_steps":2`, `"input":"`+input+`"`)
		if r := decode(t, answer); r.Status != c.status || r.Incomplete.Reason != c.reason || r.types() != c.types ||
			len(w.host.Requests())-before != c.runs {
			t.Errorf("%s: %s", input, answer)
		}
	}
}

func TestContainersAndFilesOfClients(t *testing.T) {
	w := newWorld(t, allRules)
	w.host.Result = proto.Exited(0)
	upload := func(path, purpose string) (status int, answer string) {
		t.Helper()
		var body bytes.Buffer
		form := multipart.NewWriter(&body)
		part, err := form.CreateFormFile("file", "../data.csv")
		if err == nil {
			_, err = part.Write([]byte("1,2"))
		}
		if err != nil || form.WriteField("purpose", purpose) != nil || form.Close() != nil {
			t.Fatal(err)
		}
		return w.do(http.MethodPost, path, body.String(), "Content-Type", form.FormDataContentType())
	}
	const files, containers = "/openai/v1/files", "/openai/v1/containers"
	status, answer := upload(files, "user_data")
	file := decode(t, answer).ID
	if status != http.StatusOK || !strings.Contains(answer, `"filename":"data.csv"`) {
		t.Fatalf("%d %s", status, answer)
	}
	if status, answer := upload(files, "batch"); status != http.StatusBadRequest ||
		decode(t, answer).Error.Param != "purpose" {
		t.Errorf("%d %s", status, answer)
	}
	status, answer = w.do(http.MethodPost, containers, `{"name":"mine","memory_limit":"4g","file_ids":["`+file+`"]}`)
	id := decode(t, answer).ID
	if status != http.StatusOK || !strings.Contains(answer, `"name":"mine"`) ||
		string(w.host.Homes[id+"/data.csv"]) != "1,2" {
		t.Fatalf("%d %s", status, answer)
	}
	w.host.Puts = nil
	if status, answer := upload(containers+"/"+id+"/files", ""); status != http.StatusOK ||
		!strings.Contains(answer, `"source":"user"`) {
		t.Errorf("%d %s", status, answer)
	}
	if status, answer := w.do(http.MethodPost, containers+"/"+id+"/files",
		`{"file_id":"`+file+`"}`); status != http.StatusOK || len(w.host.Puts) != 2 {
		t.Errorf("%d %s", status, answer)
	}
	for fields, want := range map[string]int{"file_id=" + file: http.StatusOK, "other=1": http.StatusBadRequest} {
		var body bytes.Buffer
		form := multipart.NewWriter(&body)
		name, value, _ := strings.Cut(fields, "=")
		if form.WriteField(name, value) != nil || form.Close() != nil {
			t.Fatal("no form")
		}
		if status, answer := w.do(http.MethodPost, containers+"/"+id+"/files", body.String(), "Content-Type",
			form.FormDataContentType()); status != want {
			t.Errorf("a form with %s: %d %s", fields, status, answer)
		}
	}
	auto := `"tools":[{"type":"code_interpreter","container":{"type":"auto","memory_limit":"1g",` +
		`"network_policy":{"type":"disabled"},"file_ids":["` + file + `"]}}]`
	if status, answer := w.ask(openAI, auto); status != http.StatusOK || len(w.host.Puts) != 4 {
		t.Errorf("%d %s", status, answer)
	}
	more := `"tools":[{"type":"code_interpreter","container":{"type":"auto","memory_limit":"16g"}}]`
	if status, answer := w.ask(openAI, more); status != http.StatusBadRequest ||
		!strings.Contains(answer, "the sandbox profile of this API key has 4GiB of memory") {
		t.Errorf("%d %s", status, answer)
	}
	if status, answer := w.do(http.MethodGet, files, ""); status != http.StatusOK ||
		!strings.Contains(answer, `"data":[{"id":"`+file) {
		t.Errorf("%d %s", status, answer)
	}
	if status, answer := w.do(http.MethodDelete, containers+"/"+id+"/files/cfile_ZGF0YS5jc3Y",
		""); status != http.StatusOK || !strings.Contains(answer, `"object":"container.file.deleted","deleted":true`) {
		t.Errorf("%d %s", status, answer)
	}
	if status, answer := w.do(http.MethodDelete, containers+"/"+id+"/files/cfile_ZGF0YS5jc3Y",
		""); status != http.StatusNotFound {
		t.Errorf("%d %s", status, answer)
	}
	for _, path := range []string{files + "/" + file, containers + "/" + id} {
		if status, answer := w.do(http.MethodDelete, path, ""); status != http.StatusOK ||
			!strings.Contains(answer, `"deleted":true`) {
			t.Errorf("%s: %d %s", path, status, answer)
		}
		if status, _ := w.do(http.MethodGet, path, ""); status != http.StatusNotFound {
			t.Errorf("%s after its deletion: %d", path, status)
		}
	}
	for body, param := range map[string]string{
		`{}`: "name", `{"name":"n","memory_limit":"64g"}`: "memory_limit",
		`{"name":"n","memory_limit":"2g"}`:                                     "memory_limit",
		`{"name":"n","network_policy":{"type":"allowlist"}}`:                   "network_policy",
		`{"name":"n","expires_after":{"anchor":"last_active_at","minutes":5}}`: "expires_after",
	} {
		if status, answer := w.do(http.MethodPost, containers, body); status != http.StatusBadRequest ||
			decode(t, answer).Error.Param != param {
			t.Errorf("%s: %d %s", body, status, answer)
		}
	}
}

func TestPages(t *testing.T) {
	w := newWorld(t, allRules)
	now := time.Now()
	w.host.Modified = now
	for i, id := range []string{"cntr_b", "cntr_a", "cntr_c", "cntr_old", "sandbox_x"} {
		w.host.Threads[id] = &proto.Thread{ID: id, CreatedAt: now.Add(time.Duration(i) * time.Second), UsedAt: now}
	}
	w.host.Threads["cntr_old"].UsedAt = now.Add(-21 * time.Minute)
	for name, text := range map[string]string{"1": "x", "2": "xx", "3": "xxx"} {
		w.host.Homes["cntr_a/"+name] = []byte(text)
	}
	ids := func(path string) string {
		t.Helper()
		var page struct {
			Data []struct{ ID string }
			More bool `json:"has_more"`
		}
		status, answer := w.do(http.MethodGet, path, "")
		if err := json.Unmarshal([]byte(answer), &page); err != nil || status != http.StatusOK {
			t.Fatalf("%s: %d %s", path, status, answer)
		}
		var list []string
		for _, one := range page.Data {
			list = append(list, one.ID)
		}
		return fmt.Sprint(list, page.More)
	}
	const containers = "/openai/v1/containers"
	for path, want := range map[string]string{
		containers:                                     "[cntr_c cntr_a cntr_b] false",
		containers + "?order=asc":                      "[cntr_b cntr_a cntr_c] false",
		containers + "?limit=2":                        "[cntr_c cntr_a] true",
		containers + "?limit=2&after=cntr_a":           "[cntr_b] false",
		containers + "?name=cntr_a":                    "[cntr_a] false",
		containers + "/cntr_a/files?limit=1&order=asc": "[cfile_MQ] true",
		containers + "/cntr_a/files?after=cfile_Mg":    "[cfile_MQ] false",
	} {
		if got := ids(path); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
	for query, want := range map[string]int{
		"?limit=0": http.StatusBadRequest, "?limit=101": http.StatusBadRequest,
		"?order=up": http.StatusBadRequest, "?after=cntr_x": http.StatusNotFound,
	} {
		if status, answer := w.do(http.MethodGet, containers+query, ""); status != want {
			t.Errorf("%s: %d %s", query, status, answer)
		}
	}
}
