package anthropic_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/go-chi/chi/v5"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/agenttest"
	"github.com/bullpen-run/bullpen/agent/anthropic"
	"github.com/bullpen-run/bullpen/agent/script"
	"github.com/bullpen-run/bullpen/agent/upstream"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world serves the routes with a scripted model.
type world struct {
	t       *testing.T
	host    *agenttest.Host
	batches agent.BatchStore // nil for none; tests of the whole program have some
	routes  *anthropic.Server
	server  *httptest.Server
}

func newWorld(t *testing.T, rules string) *world {
	t.Helper()
	s, err := script.Parse([]byte(rules))
	if err != nil {
		t.Fatal(err)
	}
	model := httptest.NewServer(&script.Server{Script: s})
	t.Cleanup(model.Close)
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(client.CloseIdleConnections)
	w := &world{t: t, host: agenttest.NewHost()}
	w.routes = &anthropic.Server{
		Upstream: &upstream.Client{
			URL: model.URL, Key: func() (string, error) { return "", nil }, Timeout: time.Minute,
			HTTP: client,
		},
		Host: func(r *http.Request) agent.RequestHost {
			w.host.R, w.host.BatchStore = r, w.batches
			return w.host
		},
		Log: slog.New(slog.DiscardHandler),
	}
	router := chi.NewRouter()
	for _, route := range w.routes.Routes() {
		router.Method(route.Method, route.Path, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if err := route.Handle(rw, r); err != nil {
				anthropic.WriteError(rw, r, asAPI(err))
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

func (w *world) do(method, path, body string) (status int, answer string) {
	w.t.Helper()
	r, err := http.NewRequestWithContext(w.t.Context(), method, w.server.URL+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
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

// ask asks for a message with a revision of the tool, and members of the request such as "x": 1.
func (w *world) ask(revision, text string, more ...string) (status int, answer string) {
	w.t.Helper()
	members := append([]string{
		fmt.Sprintf(`"model":"m","max_tokens":99,"tools":[{"type":"code_execution_%s","name":"code_execution"}]`, revision),
	},
		more...)
	if !strings.Contains(strings.Join(more, ""), `"messages"`) {
		members = append(members, fmt.Sprintf(`"messages":[{"role":"user","content":%q}]`, text))
	}
	return w.do(http.MethodPost, "/v1/messages", "{"+strings.Join(members, ",")+"}")
}

const (
	first, second = "20250522", "20250825"
	bashRule      = `{role: user, calls: [{name: bash_code_execution, arguments: {command: ls}}]}`
	pythonRule    = `{role: user, calls: [{name: code_execution, arguments: {code: "1"}}]}`
	restRule      = `{text: ok}`
)

func TestModels(t *testing.T) {
	w := newWorld(t, `rules: [{text: ok}]`)
	if status, answer := w.do(http.MethodGet, "/anthropic/v1/models", ""); status != http.StatusOK ||
		!strings.HasPrefix(answer, `{"data":[{"id":"script","type":"model",`) ||
		!strings.Contains(answer, `"has_more":false,"first_id":"script","last_id":"script"`) {
		t.Errorf("%d %s", status, answer)
	}
	for path, status := range map[string]int{
		"/script": http.StatusOK, "/%73cript": http.StatusOK, "/other": http.StatusNotFound, "/a%2Fb": http.StatusNotFound,
		"/a/b":                     http.StatusNotFound,
		"?limit=1&after_id=script": http.StatusOK, "?after_id=other": http.StatusNotFound, "?limit=0": http.StatusBadRequest,
	} {
		if got, answer := w.do(http.MethodGet, "/anthropic/v1/models"+path, ""); got != status {
			t.Errorf("%s: %d %s", path, got, answer)
		}
	}
}

// Each revision of the tool has its own codes for what can go wrong.
func TestOutcomesByRevision(t *testing.T) {
	for name, c := range map[string]struct {
		result       proto.Result
		err          error
		first, other string // in the answer
		last         string // of 20260521, other if empty
	}{
		"a failure": {result: proto.Exited(3), first: `"return_code":3`, other: `"return_code":3`},
		"a timeout": {
			result: proto.TimedOut(1), first: `"error_code":"code_execution_exceeded"`,
			other: `"error_code":"execution_time_exceeded"`, last: `"return_code":124`,
		},
		"no memory": {
			result: proto.Failure(proto.CodeMemory, "The program used too much."),
			first:  `The program used too much.","return_code":1`, other: `The program used too much.","return_code":1`,
		},
		"a busy thread": {
			err: api.Errorf(api.CodeConflict, "busy"), first: `"error_code":"too_many_requests"`,
			other: `"error_code":"too_many_requests"`,
		},
		"a limit": {
			err: api.Errorf(api.CodeRateLimited, "slow"), first: `"error_code":"too_many_requests"`,
			other: `"error_code":"too_many_requests"`,
		},
		"no worker": {
			err: api.Unavailable(1, "none"), first: `"error_code":"unavailable"`,
			other: `"error_code":"unavailable"`,
		},
		"no capable worker": {
			err:   api.NoWorker(&proto.Missing{Message: "no python"}),
			first: `"error_code":"unavailable","error_message":"no python"`,
			other: `"error_code":"unavailable","error_message":"no python"`,
		},
		"no valid number": {
			err: proto.FieldErrorf("code", "is too long"), first: `"error_code":"invalid_tool_input"`,
			other: `"error_code":"invalid_tool_input"`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for revision, want := range map[string]string{
				first: c.first, second: c.other, "20260120": c.other, "20260521": c.last,
			} {
				if want == "" {
					want = c.other
				}
				rule, kind := bashRule, "bash_code_execution_tool_result"
				if revision == first {
					rule, kind = pythonRule, "code_execution_tool_result"
				}
				w := newWorld(t, `rules: [`+rule+`, `+restRule+`]`)
				w.host.Result, w.host.Err = c.result, c.err
				status, answer := w.ask(revision, "x")
				if status != http.StatusOK || !strings.Contains(answer, want) || !strings.Contains(answer, `"type":"`+kind+`"`) {
					t.Errorf("%s: %d %s, want %s", revision, status, answer, want)
				}
			}
		})
	}
}

// Clients of the first revision expect each result in the message of its call. Those of later ones send a
// call beside one of their own back, and get its result then.
func TestClientsToolsByRevision(t *testing.T) {
	const weather = `{name: get_weather, arguments: {city: Paris}}`
	python, bash := strings.TrimSuffix(pythonRule, "]}"), strings.TrimSuffix(bashRule, "]}")
	for revision, c := range map[string]struct {
		rule, want string
		runs       int
	}{
		first:      {python, "server_tool_use code_execution_tool_result tool_use", 1},
		second:     {bash, "server_tool_use tool_use", 0},
		"20260120": {bash, "server_tool_use tool_use", 0},
		"20260521": {bash, "server_tool_use tool_use", 0},
	} {
		w := newWorld(t, `rules: [`+c.rule+`, `+weather+`]}, `+restRule+`]`)
		w.host.Result = proto.Exited(0)
		_, answer := w.ask(revision, "x", `"tools":[{"type":"code_execution_`+revision+`","name":"code_execution"},`+
			`{"name":"get_weather","input_schema":{"type":"object"}}]`)
		var m struct {
			Reason  string `json:"stop_reason"`
			Content []struct{ Type string }
		}
		if err := json.Unmarshal([]byte(answer), &m); err != nil {
			t.Fatal(err)
		}
		var types []string
		for _, block := range m.Content {
			types = append(types, block.Type)
		}
		if got := strings.Join(types, " "); got != c.want || m.Reason != "tool_use" || len(w.host.Requests()) != c.runs {
			t.Errorf("%s: %q, %d executions, %s", revision, got, len(w.host.Requests()), answer)
		}
	}
}

// A container that has expired is never replaced in silence.
func TestContainersExpire(t *testing.T) {
	const id = "container_x"
	for _, c := range []struct {
		revision      string
		created, used time.Duration // ago
		status        int
		want          string
	}{
		{first, 30 * time.Minute, 0, http.StatusOK, `"return_code":0`},
		{first, 61 * time.Minute, 0, http.StatusOK, `"error_code":"container_expired"`},
		{second, 61 * time.Minute, time.Minute, http.StatusOK, `"return_code":0`},
		{second, 60 * 24 * time.Hour, 29 * 24 * time.Hour, http.StatusOK, `"return_code":0`},
		{second, 60 * 24 * time.Hour, 31 * 24 * time.Hour, http.StatusNotFound, `"not_found_error"`},
	} {
		rule := bashRule
		if c.revision == first {
			rule = pythonRule
		}
		w := newWorld(t, `rules: [`+rule+`, `+restRule+`]`)
		now := time.Now()
		w.host.Threads[id] = &proto.Thread{ID: id, CreatedAt: now.Add(-c.created), UsedAt: now.Add(-c.used)}
		w.host.Result = proto.Exited(0)
		for _, ref := range []string{`"container":"` + id + `"`, `"container":{"id":"` + id + `"}`} {
			status, answer := w.ask(c.revision, "x", ref)
			if status != c.status || !strings.Contains(answer, c.want) {
				t.Errorf("%+v: %d %s", c, status, answer)
			}
			w.host.Threads[id].UsedAt = now.Add(-c.used)
		}
		if n := len(w.host.Threads); n != 1 {
			t.Errorf("%+v: %d threads", c, n)
		}
	}
	w := newWorld(t, `rules: [`+restRule+`]`)
	w.host.Threads["private"] = &proto.Thread{ID: "private"}
	for _, other := range []string{"private", "container_y", ""} {
		if status, answer := w.ask(second, "x", `"container":"`+other+`"`); (status == http.StatusNotFound) != (other != "") {
			t.Errorf("%q: %d %s", other, status, answer)
		}
	}
}

// Clients repeat the blocks of earlier messages.
func TestUploadsArePutOnce(t *testing.T) {
	w := newWorld(t, `rules: [`+bashRule+`, `+restRule+`]`)
	f := proto.NewAgentFile("data.csv", 1)
	w.host.Meta, w.host.Homes[f.Thread()+"/content"] = []proto.AgentFile{*f}, []byte("x")
	user := `{"role":"user","content":[{"type":"text","text":"x"},{"type":"container_upload","file_id":"` + f.ID + `"}]}`
	said := user + `,{"role":"assistant","content":"ok"},` + user
	for _, c := range []struct {
		more []string
		want int
	}{
		{[]string{`"messages":[` + user + `]`}, 1},
		{[]string{`"messages":[` + said + `]`}, 1}, // into a new container
		{[]string{`"messages":[` + said + `]`, `"container":"container_x"`}, 0},
		{[]string{`"messages":[` + user + `]`, `"container":"container_x"`}, 1},
	} {
		w.host.Puts, w.host.Threads["container_x"] = nil, &proto.Thread{CreatedAt: time.Now(), UsedAt: time.Now()}
		if status, answer := w.ask(second, "", c.more...); status != http.StatusOK || len(w.host.Puts) != c.want {
			t.Errorf("%v: %d %s, puts %v", c.more, status, answer, w.host.Puts)
		}
	}
	two := proto.NewAgentFile("data.csv", 1)
	w.host.Meta, w.host.Homes[two.Thread()+"/content"] = append(w.host.Meta, *two), []byte("y")
	both := strings.ReplaceAll(user, `]}`, `,{"type":"container_upload","file_id":"`+two.ID+`"}]}`)
	w.host.Puts = nil
	if status, answer := w.ask(second, "", `"messages":[`+both+`]`); status != http.StatusOK ||
		strings.Join(w.host.Puts, " ") != "data.csv data_2.csv" {
		t.Errorf("two files of one name: %d %s, puts %v", status, answer, w.host.Puts)
	}
	if status, answer := w.do(http.MethodPost, "/v1/messages", `{"model":"m","max_tokens":1,"messages":[`+user+
		`]}`); status != http.StatusBadRequest {
		t.Errorf("without the tool: %d %s", status, answer)
	}
}

func TestStreamsHaveNamedEventsInOrder(t *testing.T) {
	w := newWorld(t, `rules: [{role: user, text: abcd, chunk: 2, calls: [{name: bash_code_execution, arguments: `+
		`{command: ls}}]}, `+restRule+`]`)
	w.host.Result = proto.Exited(0)
	status, answer := w.ask(second, "x", `"stream":true`)
	var names []string
	for event := range strings.SplitSeq(strings.TrimSpace(answer), "\n\n") {
		name, data, _ := strings.Cut(strings.TrimPrefix(event, "event: "), "\ndata: ")
		var body struct {
			Type  string
			Index *int
		}
		if err := json.Unmarshal([]byte(data), &body); err != nil || body.Type != name {
			t.Errorf("event %q: %v", event, err)
		}
		if name = strings.TrimPrefix(name, "content_block_"); body.Index != nil {
			name += fmt.Sprint(*body.Index)
		}
		names = append(names, name)
	}
	want := "message_start start0 delta0 delta0 stop0 start1 delta1 stop1 start2 stop2 start3 delta3 stop3 " +
		"message_delta message_stop"
	if got := strings.Join(names, " "); status != http.StatusOK || got != want {
		t.Errorf("%d\n got %s\nwant %s", status, got, want)
	}
}

// An error before the first event is an answer, a later one an event.
func TestErrorsOfStreams(t *testing.T) {
	w := newWorld(t, `rules: [{match: early, status: 429, retry_after: 100}, {match: late, text: half, fault: drop}]`)
	if status, answer := w.ask(second, "early", `"stream":true`); status != http.StatusTooManyRequests ||
		!strings.Contains(answer, "rate_limit_error") {
		t.Errorf("%d %s", status, answer)
	}
	if status, answer := w.ask(second, "late", `"stream":true`); status != http.StatusOK ||
		!strings.Contains(answer, "event: error\ndata: ") || strings.Contains(answer, "message_stop") {
		t.Errorf("%d %s", status, answer)
	}
}

func TestRequestsThatAreRefused(t *testing.T) {
	w := newWorld(t, `rules: [`+restRule+`]`)
	for name, body := range map[string]string{
		"no model":      `{"max_tokens":1,"messages":[{"role":"user","content":"x"}]}`,
		"no messages":   `{"model":"m","max_tokens":1}`,
		"no max_tokens": `{"model":"m","messages":[{"role":"user","content":"x"}]}`,
		"a role":        `{"model":"m","max_tokens":1,"messages":[{"role":"root","content":"x"}]}`,
		"a block":       `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[{"type":"video"}]}]}`,
		"a tool": `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],` +
			`"tools":[{"type":"web_search_20250305","name":"web_search"}]}`,
		"a name twice": `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],` +
			`"tools":[{"name":"bash_code_execution","input_schema":{}},{"type":"code_execution_20250825",` +
			`"name":"code_execution"}]}`,
		"a caller": `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],` +
			`"tools":[{"type":"code_execution_20260120","name":"code_execution","allowed_callers":["direct",` +
			`"code_execution_20260120"]}]}`,
		"skills": `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],` +
			`"container":{"skills":[{"type":"anthropic","skill_id":"pptx"}]}}`,
		"a thread": `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],` +
			`"thread":{"type":"continue","previous_message_id":"msg_1"}}`,
		"an MCP server": `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],` +
			`"mcp_servers":[{"type":"url","url":"https://example.com","name":"x"}]}`,
		"a form of texts": `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],` +
			`"output_config":{"format":{"type":"xml","schema":{}}}}`,
		"the same, earlier": `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],` +
			`"output_format":{"type":"json_schema"}}`,
		"no JSON": `{`,
		"a choice of tools": `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"x"}],` +
			`"tool_choice":{"type":"all"}}`,
	} {
		if status, answer := w.do(http.MethodPost, "/v1/messages", body); status != http.StatusBadRequest ||
			!strings.Contains(answer, "invalid_request_error") {
			t.Errorf("%s: %d %s", name, status, answer)
		} else if name == "a thread" && !strings.Contains(answer, `"details":{"error_code":"thread_unsupported_request"}`) {
			// at which the SDKs send all messages
			t.Errorf("%s: %s", name, answer)
		}
	}
}

// The upstream would fetch a URL from inside the operator's network.
func TestImagesByURLAreRefused(t *testing.T) {
	w := newWorld(t, `rules: [`+restRule+`]`)
	image := func(source string) (status int, answer string) {
		return w.do(http.MethodPost, "/v1/messages",
			`{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[{"type":"image","source":`+source+`}]}]}`)
	}
	for _, url := range []string{
		"http://169.254.169.254/", "https://example.com/a.png", "file:///etc/passwd",
		"data:image/png;base64,eA==",
	} {
		if status, answer := image(`{"type":"url","url":"` + url + `"}`); status != http.StatusBadRequest ||
			!strings.Contains(answer, "messages.0.content.0") || !strings.Contains(answer, "base64") {
			t.Errorf("%s: %d %s", url, status, answer)
		}
	}
	if status, answer := image(`{"type":"base64","media_type":"image/png","data":"eA=="}`); status != http.StatusOK {
		t.Errorf("%d %s", status, answer)
	}
}

// One request cannot have tens of thousands of calls carried out, or keep the results of as many.
func TestPendingCallsAreLimited(t *testing.T) {
	w := newWorld(t, `rules: [`+restRule+`]`)
	w.host.Threads["container_x"] = &proto.Thread{CreatedAt: time.Now(), UsedAt: time.Now()}
	w.host.Homes["container_x/a.png"] = make([]byte, agent.MaxEditBytes)
	view := func(n int) (status int, answer string) {
		call := `,{"type":"server_tool_use","id":"srvtoolu_1","name":"text_editor_code_execution",` +
			`"input":{"command":"view","path":"a.png"}}`
		calls := strings.Repeat(call, n)[1:]
		return w.ask(second, "", `"container":"container_x"`,
			`"messages":[{"role":"user","content":"x"},{"role":"assistant","content":[`+calls+`]}]`)
	}
	if status, answer := view(200); status != http.StatusBadRequest ||
		!strings.Contains(answer, "last message of the assistant") || w.host.Reserved() != 0 {
		t.Errorf("%d %.300s, %d bytes", status, answer, w.host.Reserved())
	}
	w.host.SetMemory(5 * agent.MaxEditBytes)
	if status, answer := view(100); status != 529 || w.host.Reserved() > 7*agent.MaxEditBytes {
		t.Errorf("%d %.300s, %d bytes", status, answer, w.host.Reserved())
	}
}

func TestViewsHaveTheLinesAskedFor(t *testing.T) {
	for _, c := range []struct{ text, lines, want string }{
		{"", "", `"content":"","num_lines":0,"start_line":1,"total_lines":0`},
		{"a", "", `"content":"a","num_lines":1,"start_line":1,"total_lines":1`},
		{"a\nb\n", "", `"content":"a\nb\n","num_lines":2,"start_line":1,"total_lines":2`},
		{"a\n\nc", "", `"content":"a\n\nc","num_lines":3,"start_line":1,"total_lines":3`},
		{"a\n\nc", "2,3", `"content":"\nc","num_lines":2,"start_line":2,"total_lines":3`},
		{"a\n\nc", "1,2", `"content":"a\n\n","num_lines":2,"start_line":1,"total_lines":3`},
		{"a\n\nc", "3,-1", `"content":"c","num_lines":1,"start_line":3,"total_lines":3`},
		{"a\nb", "7,9", `"content":"","num_lines":0,"start_line":3,"total_lines":2`},
		{"a\nb", "2,1", `"error_code":"invalid_tool_input"`},
		{
			strings.Repeat("\n", 9999) + "end", "10000,-1",
			`"content":"end","num_lines":1,"start_line":10000,"total_lines":10000`,
		},
	} {
		w := newWorld(t, `rules: [`+restRule+`]`)
		w.host.Threads["container_x"] = &proto.Thread{CreatedAt: time.Now(), UsedAt: time.Now()}
		w.host.Homes["container_x/a"] = []byte(c.text)
		call := `{"type":"server_tool_use","id":"srvtoolu_1","name":"text_editor_code_execution",` +
			`"input":{"command":"view","path":"a","view_range":[` + c.lines + `]}}`
		_, answer := w.ask(second, "", `"container":"container_x"`,
			`"messages":[{"role":"user","content":"x"},{"role":"assistant","content":[`+call+`]}]`)
		if !strings.Contains(answer, c.want) {
			t.Errorf("%.20q %s: %s", c.text, c.lines, answer)
		}
	}
}

// The files of a call that left too many are kept in part, and the result says so.
func TestTooManyFiles(t *testing.T) {
	w := newWorld(t, `rules: [`+bashRule+`, `+restRule+`]`)
	w.host.Result = proto.Exited(0)
	for i := range 150 {
		w.host.Homes[fmt.Sprintf("container_x/.outputs/%d", i)] = nil
	}
	w.host.Threads["container_x"] = &proto.Thread{CreatedAt: time.Now(), UsedAt: time.Now()}
	_, answer := w.ask(second, "x", `"container":"container_x"`)
	if n := strings.Count(answer, "bash_code_execution_output"); n != 100 || !strings.Contains(answer, "more than 100") {
		t.Errorf("%d files: %s", n, answer)
	}
}

// From 20260120 on, Python code is a cell. Its pictures are files for the client, and seen by the model.
func TestInterpreter(t *testing.T) {
	w := newWorld(t, `rules:
  - {role: user, tool: code_execution, calls: [{name: code_execution, arguments: {code: "plot()"}}]}
  - {text: Done}`)
	ran := ""
	w.host.Cell = func(code string) (*api.CellResult, error) {
		ran = code
		return &api.CellResult{
			Status: "error", Stdout: "out\n", Error: &api.CellError{Traceback: []string{"ZeroDivisionError"}},
			Results: []api.Display{{Data: map[string]json.RawMessage{"image/png": json.RawMessage(`"cG5n"`)}}},
		}, nil
	}
	status, answer := w.ask("20260120", "plot it")
	if status != http.StatusOK || ran != "plot()" || !strings.Contains(answer, `"stdout":"out\n",`+
		`"stderr":"ZeroDivisionError","return_code":1,"content":[{"type":"code_execution_output","file_id":"file_`) {
		t.Errorf("%d %s", status, answer)
	}
	if len(w.host.Meta) != 1 || w.host.Meta[0].Name != "picture-1.png" || w.host.Meta[0].MIMEType != "image/png" {
		t.Errorf("%+v", w.host.Meta)
	}
	w.host.Cell = nil // a server without live sandboxes
	if status, answer := w.ask("20260521", "plot it"); status != http.StatusOK ||
		!strings.Contains(answer, "without the variables of earlier calls") || len(w.host.Requests()) != 1 {
		t.Errorf("%d %s", status, answer)
	}
}
