package agent_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/agenttest"
	"github.com/bullpen-run/bullpen/agent/anthropic"
	"github.com/bullpen-run/bullpen/agent/responses"
	"github.com/bullpen-run/bullpen/agent/script"
	"github.com/bullpen-run/bullpen/agent/upstream"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// The paths of the model APIs.
const (
	messagesAPI  = "/anthropic/v1/messages"
	responsesAPI = "/openai/v1/responses"
	chatAPI      = "/openai/v1/chat/completions"
)

// apis are the model APIs with a scripted model behind them.
type apis struct {
	t      *testing.T
	server *httptest.Server
	mu     sync.Mutex
	asked  string // the body of the last request to the model
	betas  string // its header
}

func newAPIs(t *testing.T, p upstream.Protocol, rules string) *apis {
	t.Helper()
	s, err := script.Parse([]byte(rules))
	if err != nil {
		t.Fatal(err)
	}
	a := &apis{t: t}
	model := httptest.NewServer(&script.Server{Script: s, Requests: func(h http.Header, body []byte) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.asked, a.betas = string(body), h.Get("Anthropic-Beta")
	}})
	t.Cleanup(model.Close)
	client := &http.Client{Transport: &http.Transport{}}
	t.Cleanup(client.CloseIdleConnections)
	up := &upstream.Client{
		Protocol: p, URL: model.URL, Key: func() (string, error) { return "", nil }, Timeout: time.Minute, HTTP: client,
	}
	host := func(r *http.Request) agent.RequestHost {
		h := agenttest.NewHost()
		h.R = r
		return h
	}
	log := slog.New(slog.DiscardHandler)
	answers := &responses.Server{Upstream: up, Host: host, Runs: agenttest.NewStore(), Log: log}
	if p == upstream.OpenAI {
		answers.Completions = up
	}
	router := chi.NewRouter()
	add := func(routes []agent.Route, fail func(http.ResponseWriter, *http.Request, *api.Error)) {
		for _, route := range routes {
			router.Method(route.Method, route.Path, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if err := route.Handle(w, r); err != nil {
					fail(w, r, publicError(err))
				}
			}))
		}
	}
	messages := &anthropic.Server{Upstream: up, Host: host, Log: log}
	add(slices.DeleteFunc(messages.Routes(), func(r agent.Route) bool {
		return !strings.HasPrefix(r.Path, anthropic.Prefix)
	}), anthropic.WriteError)
	add(answers.Routes(), responses.WriteError)
	a.server = httptest.NewServer(router)
	t.Cleanup(a.server.Close)
	return a
}

// publicError returns the error that the gateway would answer with.
func publicError(err error) *api.Error {
	if field, ok := errors.AsType[*proto.FieldError](err); ok {
		return api.Errorf(api.CodeValidation, "%s", field.Message)
	}
	return agent.Public(err)
}

// event is an event of an answer, or its whole body.
type event map[string]any

// at returns the text of a member of a member.
func (e event) at(path ...string) string {
	var v any = map[string]any(e)
	for _, name := range path {
		switch at := v.(type) {
		case map[string]any:
			v = at[name]
		case []any:
			if v = nil; len(at) > 0 {
				v = at[0].(map[string]any)[name] //nolint:forcetypeassert // of these APIs
			}
		default:
			return ""
		}
	}
	if v == nil {
		return ""
	}
	return fmt.Sprint(v)
}

// post sends a request, and returns the status and the events of the answer.
func (a *apis) post(path, body string, headers http.Header) (status int, events []event) {
	a.t.Helper()
	r, err := http.NewRequestWithContext(a.t.Context(), http.MethodPost, a.server.URL+path, strings.NewReader(body))
	if err != nil {
		a.t.Fatal(err)
	}
	if headers != nil {
		r.Header = headers
	}
	resp, err := a.server.Client().Do(r)
	if err != nil {
		a.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	in := bufio.NewScanner(resp.Body)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		text := strings.TrimPrefix(in.Text(), "data: ")
		var e event
		if json.Unmarshal([]byte(text), &e) == nil {
			events = append(events, e)
		}
	}
	return resp.StatusCode, events
}

// reply is what a client reads from a stream: the thinking, the texts and the calls, each with the number
// of its parts, and the end.
type reply struct {
	list []string
	// Of the last one.
	text  string
	parts int
}

func (r *reply) begin() { r.text, r.parts = "", 0 }

func (r *reply) part(text string) {
	r.text += text
	if text != "" {
		r.parts++
	}
}

func (r *reply) end(kind string) {
	several := ""
	if r.parts > 1 {
		several = "…"
	}
	r.list = append(r.list, kind+several+"("+r.text+")")
	r.begin()
}

// readMessage reads the stream of a message.
func readMessage(events []event) string {
	r, kinds := &reply{}, map[string]string{}
	for _, e := range events {
		at := e.at("index")
		switch e.at("type") {
		case "content_block_start":
			r.begin()
			kinds[at] = strings.TrimSpace(e.at("content_block", "type") + " " + e.at("content_block", "name"))
		case "content_block_delta":
			r.part(e.at("delta", "text") + e.at("delta", "thinking") + e.at("delta", "partial_json"))
		case "content_block_stop":
			r.end(strings.TrimPrefix(kinds[at], "tool_use "))
		case "message_delta":
			r.list = append(r.list, e.at("delta", "stop_reason"))
		case "error":
			r.list = append(r.list, "error "+e.at("error", "type"))
		}
	}
	return strings.Join(r.list, " ")
}

// readResponse reads the stream of a response. What an item has at its end is what its parts were.
func readResponse(events []event) string {
	r := &reply{}
	for _, e := range events {
		switch kind := e.at("type"); {
		case kind == "response.output_item.added":
			r.begin()
		case strings.HasSuffix(kind, ".delta"):
			r.part(e.at("delta"))
		case kind == "response.output_item.done":
			name, whole := "text", e.at("item", "content", "text")
			switch e.at("item", "type") {
			case "reasoning":
				name, whole = "thinking", e.at("item", "summary", "text")
			case "function_call":
				name, whole = e.at("item", "name"), e.at("item", "arguments")
			case "custom_tool_call":
				name, whole = e.at("item", "name"), e.at("item", "input")
			}
			if whole != r.text {
				r.text = fmt.Sprintf("parts %q of %q", r.text, whole)
			}
			r.end(name)
		case kind == "response.completed", kind == "response.incomplete":
			r.list = append(r.list, strings.TrimPrefix(kind, "response."))
		case kind == "response.failed":
			r.list = append(r.list, "failed "+e.at("response", "error", "code"))
		}
	}
	return strings.Join(r.list, " ")
}

// readChat reads the stream of a chat completion.
func readChat(events []event) string {
	r, open := &reply{}, ""
	item := func(kind, text string) {
		if text != "" && kind != open && open != "" {
			r.end(open)
		}
		if text != "" {
			open = kind
			r.part(text)
		}
	}
	for _, e := range events {
		delta := func(path ...string) string { return e.at(append([]string{"choices", "delta"}, path...)...) }
		if name := delta("tool_calls", "function", "name"); name != "" {
			if open != "" {
				r.end(open)
			}
			open = name
		}
		item("thinking", delta("reasoning_content"))
		item("text", delta("content"))
		item(open, delta("tool_calls", "function", "arguments"))
		if finish := e.at("choices", "finish_reason"); finish != "" {
			if open != "" {
				r.end(open)
			}
			r.list = append(r.list, finish)
		}
		if kind := e.at("error", "type"); kind != "" {
			r.list = append(r.list, "error "+kind)
		}
	}
	return strings.Join(r.list, " ")
}

var readers = map[string]func([]event) string{ // read only
	messagesAPI: readMessage, responsesAPI: readResponse, chatAPI: readChat,
}

// codex are the headers of Codex.
func codex() http.Header { return http.Header{"Originator": {"codex_exec"}} }

// programs are requests of coding agents in the middle of a conversation: with thinking, parallel calls and
// their results, and an image in a result. They were recorded from the programs, and shortened.
var programs = []struct {
	name, path string
	headers    http.Header
	rules      string // the model's next turn
	want       string // what the program reads of it
	// What the model's server gets with each protocol, and what it does not.
	openAI, anthropic, neither []string
}{
	{
		name: "claude", path: messagesAPI, headers: http.Header{
			"Anthropic-Beta": {"claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27"},
		},
		rules: `rules: [{thinking: "Let me see.", text: "I look.", chunk: 4, calls: [{name: Bash, arguments: {command: ` +
			`ls}}, {name: Read, arguments: {file_path: "a b"}}]}]`,
		want: `thinking…(Let me see.) text…(I look.) Bash…({"command":"ls"}) Read…({"file_path":"a b"}) tool_use`,
		anthropic: []string{
			`"system":[{"type":"text","text":"x-anthropic-billing`, `"thinking":{"type":"adaptive"}`, `"effort":"high"`,
			`"context_management":{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]}`,
			`software …","cache_control":{"type":"ephemeral"}}`,
			`{"type":"thinking","thinking":"Both ran; now a file.","signature":"scripted"}`,
			`{"type":"tool_result","tool_use_id":"toolu_4","content":[{"type":"image","source":{"type":"base64",` +
				`"media_type":"image/png","data":"aW1hZ2U="}}]}`,
			`"media_type":"application/pdf","data":"aW1hZ2U="},"cache_control":{"type":"ephemeral"}}`,
		},
		openAI: []string{
			`"role":"system","content":"x-anthropic-billing`, `"role":"tool","content":"one","tool_call_id":"toolu_1"`,
			`"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,aW1hZ2U="}},` +
				`{"type":"file","file":{"filename":"document","file_data":"data:application/pdf;base64,aW1hZ2U="}}]`,
		},
		neither: []string{"device_id"},
	},
	{
		name: "codex", path: responsesAPI, headers: codex(),
		rules: `rules: [{thinking: "Let me see.", text: "I look.", chunk: 4, calls: [{name: exec_command, arguments: {cmd: ` +
			`ls}}, {name: apply_patch, arguments: {input: "*** Begin\n+\"é\" → \\\n"}}]}]`,
		want: `thinking…(Let me see.) text…(I look.) exec_command…({"cmd":"ls"}) apply_patch…(*** Begin` + "\n" + `+"é" → \` +
			"\n" + `) completed`,
		anthropic: []string{
			`{"type":"tool_use","id":"call_3","name":"apply_patch","input":{"input":"*** Begin Patch\n`,
			`{"type":"tool_result","tool_use_id":"call_4","content":[{"type":"image",`,
			`"name":"apply_patch","description":"Use the`, `grammar (lark):\nstart: begin_patch`,
			`"cache_control":{"type":"ephemeral"}}]}`, // Codex does not know that it must ask for it
		},
		openAI: []string{
			`"reasoning_effort":"medium"`, `"reasoning_content":"Both ran; now a file."`, `"role":"system"`,
			`"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,aW1hZ2U="}}]`,
		},
		neither: []string{"web_search", "prompt_cache_key"},
	},
	{
		name: "opencode-chat", path: chatAPI,
		rules: `rules: [{thinking: "Let me see.", text: "I look.", chunk: 4, calls: [{name: bash, arguments: {command: ` +
			`ls}}, {name: read, arguments: {filePath: "a b"}}]}]`,
		want: `thinking…(Let me see.) text…(I look.) bash…({"command":"ls"}) read…({"filePath":"a b"}) tool_calls`,
		anthropic: []string{
			`"system":[{"type":"text","text":"You are opencode`, `"tool_use_id":"call_1"`,
			`{"type":"image","source":{"type":"base64","media_type":"image/png","data":"aW1hZ2U="}`,
			`"max_tokens":32000`, `"cache_control":{"type":"ephemeral"}}]}`,
		},
		openAI: []string{`"reasoning_content":"Both ran; now a file."`, `"tool_choice":"auto"`},
	},
	{
		name: "opencode-anthropic", path: messagesAPI,
		rules: `rules: [{thinking: "Let me see.", text: "I look.", chunk: 4, calls: [{name: bash, arguments: {command: ` +
			`ls}}, {name: read, arguments: {filePath: "a b"}}]}]`,
		want:      `text…(I look.) bash…({"command":"ls"}) read…({"filePath":"a b"}) tool_use`, // it asked for no thinking
		anthropic: []string{`"tool_choice":{"type":"auto"}`, `"cache_control":{"type":"ephemeral"}`},
		openAI:    []string{`"role":"tool","content":"two\n"`},
		neither:   []string{`"thinking":{`},
	},
}

// Each program's conversation reaches a model of either protocol, and it can read the stream of the next turn.
func TestProgramsWithEachProtocol(t *testing.T) {
	for _, program := range programs {
		body, err := os.ReadFile(filepath.Join("testdata", "programs", program.name+".json"))
		if err != nil {
			t.Fatal(err)
		}
		for p, want := range map[upstream.Protocol][]string{
			upstream.OpenAI: program.openAI, upstream.Anthropic: program.anthropic,
		} {
			t.Run(program.name+" with "+string(p), func(t *testing.T) {
				t.Parallel()
				a := newAPIs(t, p, program.rules)
				status, events := a.post(program.path+"?beta=true", string(body), program.headers)
				if got := readers[program.path](events); status != http.StatusOK || got != program.want {
					t.Errorf("%d\n got %s\nwant %s", status, got, program.want)
				}
				for _, part := range want {
					if !strings.Contains(a.asked, part) {
						t.Errorf("the model was not told %s: %s", part, a.asked)
					}
				}
				for _, part := range program.neither {
					if strings.Contains(a.asked, part) {
						t.Errorf("the model was told %s: %s", part, a.asked)
					}
				}
				if betas := program.headers.Get("Anthropic-Beta"); p == upstream.Anthropic && a.betas != betas {
					t.Errorf("the model's server was asked for %q", a.betas)
				}
			})
		}
	}
}

// question returns a short request to an API, with tools of the client.
func question(path, text string, stream bool) string {
	switch path {
	case messagesAPI:
		return fmt.Sprintf(`{"model":"m","max_tokens":99,"stream":%t,"messages":[{"role":"user","content":%q}],"tools":[`+
			`{"name":"run","input_schema":{"type":"object"}}]}`, stream, text)
	case responsesAPI:
		return fmt.Sprintf(`{"model":"m","stream":%t,"store":false,"input":%q,"tools":[{"type":"function","name":"run",`+
			`"parameters":{"type":"object"}},{"type":"custom","name":"patch"}]}`, stream, text)
	default:
		return fmt.Sprintf(`{"model":"m","stream":%t,"messages":[{"role":"user","content":%q}],"tools":[{"type":"function",`+
			`"function":{"name":"run","parameters":{"type":"object"}}}]}`, stream, text)
	}
}

// Each API states how a reply ends in its own way, with a model of either protocol. Programs repeat a request
// or not by that.
func TestEndsWithEachProtocol(t *testing.T) {
	const rules = `rules:
  - {match: "cut text", text: "I am", finish: length}
  - {match: "cut call", calls: [{name: run, raw: '{"x": "ab'}], finish: length, chunk: 3}
  - {match: "no JSON", calls: [{name: run, raw: '{"x": oops}'}]}
  - {match: "refused", text: "No.", finish: refused}
  - {match: "too long", status: 400, text: "This model's maximum context length is 8192 tokens."}
  - {match: "denied", status: 401, text: "no"}
  - {match: "busy", status: 529, text: "no"}
  - {match: "often", status: 429, text: "no"}
  - {match: "broken", text: "I am broken", chunk: 4, fault: drop}`
	const noCodex = "as the others"
	for text, want := range map[string]struct{ messages, responses, codex, chat string }{
		"cut text": {
			"200 text(I am) max_tokens", "200 text(I am) incomplete",
			"200 text(I am) completed", "200 text(I am) length",
		},
		"cut call": {
			`200 run…({"x": "ab) max_tokens`, `200 run…({"x": "ab) incomplete`, `200 run…({"x": "ab) completed`,
			`200 run…({"x": "ab) length`,
		},
		"no JSON": {
			`200 run({"x": oops}) tool_use`, `200 run({"x": oops}) completed`,
			noCodex, `200 run({"x": oops}) tool_calls`,
		},
		"refused": {
			"200 text(No.) refusal", "200 text(No.) incomplete",
			"200 text(No.) completed", "200 text(No.) content_filter",
		},
		"too long": {
			"400 invalid_request_error prompt is too long", "400 context_length_exceeded", "200 failed context_length_exceeded",
			"400 context_length_exceeded",
		},
		"denied": {"403 permission_error", "429 insufficient_quota", "400 insufficient_quota", "403 permission_denied"},
		"busy":   {"529 overloaded_error", "503 server_error", noCodex, "503 server_error"},
		"often":  {"429 rate_limit_error", "429 rate_limit_exceeded", "503 rate_limit_exceeded", "429 rate_limit_exceeded"},
		"broken": {
			"200 error api_error", "200 failed server_error", noCodex, "200 error server_error",
		},
	} {
		for _, p := range []upstream.Protocol{upstream.OpenAI, upstream.Anthropic} {
			t.Run(text+" with "+string(p), func(t *testing.T) {
				t.Parallel()
				a := newAPIs(t, p, rules)
				check := func(name, path, want string, headers http.Header) {
					status, events := a.post(path, question(path, text, true), headers)
					got := fmt.Sprint(status, " ", readers[path](events))
					if status != http.StatusOK && path == messagesAPI {
						got = fmt.Sprint(status, " ", events[0].at("error", "type"))
						if message := events[0].at("error", "message"); strings.HasPrefix(message, "prompt is too long") {
							got += " prompt is too long"
						}
					} else if status != http.StatusOK {
						got = fmt.Sprint(status, " ", events[0].at("error", "code"))
					}
					if got != want {
						t.Errorf("%s:\n got %s\nwant %s", name, got, want)
					}
				}
				check("messages", messagesAPI, want.messages, nil)
				check("responses", responsesAPI, want.responses, nil)
				if want.codex == noCodex {
					want.codex = want.responses
				}
				check("codex", responsesAPI, want.codex, codex())
				if p == upstream.Anthropic || text != "broken" { // a completion that is passed on is broken off, too
					check("chat", chatAPI, want.chat, nil)
				}
			})
		}
	}
}

// Answers that are no streams have the same content.
func TestWholeAnswersWithEachProtocol(t *testing.T) {
	for _, p := range []upstream.Protocol{upstream.OpenAI, upstream.Anthropic} {
		a := newAPIs(t, p, `rules: [{text: "I run it.", calls: [{name: run, arguments: {x: 1}}]}]`)
		for path, want := range map[string][][]string{
			messagesAPI:  {{"content", "text"}, {"I run it."}, {"stop_reason"}, {"tool_use"}},
			responsesAPI: {{"output", "content", "text"}, {"I run it."}, {"status"}, {"completed"}},
			chatAPI: {
				{"choices", "message", "content"},
				{"I run it."},
				{"choices", "message", "tool_calls", "function", "arguments"},
				{`{"x":1}`},
				{"choices", "finish_reason"},
				{"tool_calls"},
			},
		} {
			status, events := a.post(path, question(path, "x", false), nil)
			if status != http.StatusOK || len(events) != 1 {
				t.Fatalf("%s with %s: %d %v", path, p, status, events)
			}
			for i := 0; i < len(want); i += 2 {
				if got := events[0].at(want[i]...); got != want[i+1][0] {
					t.Errorf("%s with %s: %v is %q", path, p, want[i], got)
				}
			}
		}
	}
}

// What a model thinks returns to it within a turn, though a client sees no difference between protocols.
func TestThinkingReturns(t *testing.T) {
	const thoughts = `rules: [{thinking: "Hm.", text: "I run it.", calls: [{name: run, arguments: {x: 1}}]}]`
	for p, want := range map[upstream.Protocol]string{
		upstream.OpenAI:    `"reasoning_content":"Hm."`,
		upstream.Anthropic: `{"type":"thinking","thinking":"Hm.","signature":"scripted"}`,
	} {
		a := newAPIs(t, p, thoughts)
		body := strings.Replace(question(messagesAPI, "x", true), `"stream"`, `"thinking":{"type":"adaptive"},"stream"`, 1)
		_, events := a.post(messagesAPI, body, nil)
		signature := ""
		for _, e := range events {
			signature += e.at("delta", "signature")
		}
		history := fmt.Sprintf(`{"role":"user","content":"x"},{"role":"assistant","content":[{"type":"thinking","thinking":`+
			`"Hm.","signature":%q},{"type":"tool_use","id":"t","name":"run","input":{}}]},{"role":"user","content":[{"type":`+
			`"tool_result","tool_use_id":"t","content":"ok"}]}`, signature)
		if a.post(messagesAPI, strings.Replace(body, `{"role":"user","content":"x"}`, history, 1), nil); signature == "" ||
			!strings.Contains(a.asked, want) {
			t.Errorf("messages with %s: %q: %s", p, signature, a.asked)
		}

		_, events = a.post(responsesAPI, question(responsesAPI, "x", true), nil)
		var items []string
		for _, e := range events {
			if e.at("type") == "response.output_item.done" {
				item, err := json.Marshal(e["item"])
				if err != nil {
					t.Fatal(err)
				}
				items = append(items, string(item))
			}
		}
		history = fmt.Sprintf(`"input":[{"role":"user","content":"x"},%s]`, strings.Join(items, ","))
		body = strings.Replace(question(responsesAPI, "x", true), `"input":"x"`, history, 1)
		if a.post(responsesAPI, body, nil); len(items) != 3 || !strings.Contains(a.asked, want) {
			t.Errorf("responses with %s: %v: %s", p, items, a.asked)
		}
	}
}

// The input of a custom tool is streamed as text, however the model's arguments are cut and escaped.
func TestCustomToolInput(t *testing.T) {
	for raw, want := range map[string]string{
		`{"input":"*** Begin \u003c\ud83d\ude00\u00e9\\\"\n\t\/é"}`: "*** Begin <😀é\\\"\n\t/é",
		`{ "input" : "" }`:        "",
		`{"patch":"otherwise"}`:   "otherwise",
		`{"input":["no text"]}`:   `{"input":["no text"]}`,
		`*** Begin, without JSON`: `*** Begin, without JSON`,
	} {
		for chunk := range 8 {
			a := newAPIs(t, upstream.OpenAI, fmt.Sprintf("rules: [{calls: [{name: patch, raw: '%s'}], chunk: %d}]", raw, chunk))
			_, events := a.post(responsesAPI, question(responsesAPI, "x", true), nil)
			input, parts := "", ""
			for _, e := range events {
				if e.at("type") == "response.custom_tool_call_input.delta" {
					parts += e.at("delta")
				}
				if e.at("type") == "response.output_item.done" {
					input = e.at("item", "input")
				}
			}
			if input != want || parts != "" && parts != want || strings.HasPrefix(raw, `{"input":"`) && parts != want {
				t.Errorf("%s in parts of %d: %q, %q", raw, chunk, input, parts)
			}
		}
	}
}

// Refusals that stay end a program's turn at once. Limits that pass do not.
func TestRefusals(t *testing.T) {
	used := api.NotInPlan("the budget of this month is used up")
	revoked := &api.Error{Code: api.CodeUnauthorized, Message: "the API key was revoked", Permanent: true}
	soon := api.Errorf(api.CodeRateLimited, "too many requests")
	for _, c := range []struct {
		path    string
		headers http.Header
		e       *api.Error
		status  int
		kind    string
	}{
		{messagesAPI, nil, used, http.StatusForbidden, "permission_error"},
		{messagesAPI, nil, revoked, http.StatusForbidden, "permission_error"},
		{messagesAPI, nil, soon, http.StatusTooManyRequests, "rate_limit_error"},
		{responsesAPI, nil, used, http.StatusTooManyRequests, "insufficient_quota"},
		{responsesAPI, nil, revoked, http.StatusTooManyRequests, "insufficient_quota"},
		{responsesAPI, nil, soon, http.StatusTooManyRequests, "rate_limit_error"},
		{responsesAPI, codex(), used, http.StatusBadRequest, "insufficient_quota"},
		{responsesAPI, codex(), soon, http.StatusServiceUnavailable, "rate_limit_error"},
		{chatAPI, nil, used, http.StatusForbidden, "permission_error"},
		{chatAPI, nil, revoked, http.StatusForbidden, "permission_error"},
		{chatAPI, nil, soon, http.StatusTooManyRequests, "rate_limit_error"},
	} {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, c.path, http.NoBody)
		if c.headers != nil {
			r.Header = c.headers
		}
		if c.path == messagesAPI {
			anthropic.WriteError(w, r, c.e)
		} else {
			responses.WriteError(w, r, c.e)
		}
		var body event
		if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
			t.Fatal(err)
		}
		if w.Code != c.status || body.at("error", "type") != c.kind ||
			body.at("error", "message") != c.e.Message || (w.Header().Get("X-Should-Retry") == "false") != c.e.Permanent {
			t.Errorf("%s %v: %d %s", c.path, c.e, w.Code, w.Body)
		}
	}
}

// partsModel is a model that calls tools in parts.
type partsModel struct {
	agent.Upstream
	parts  []any // texts, and parts of calls
	finish agent.Finish
	turns  int
}

func (m *partsModel) Stream(_ context.Context, turn *agent.Turn, text func(string) error) (*agent.Reply, error) {
	m.turns++
	reply := &agent.Reply{Finish: m.finish}
	for _, part := range m.parts {
		var err error
		switch part := part.(type) {
		case string:
			err = text(part)
		case agent.CallPart:
			for len(reply.Calls) <= part.Call {
				reply.Calls = append(reply.Calls, agent.Call{Name: part.Name})
			}
			c := &reply.Calls[part.Call]
			c.Arguments = append(c.Arguments, part.Arguments...)
			err = turn.OnCallPart(&part)
		}
		if err != nil {
			return nil, err
		}
	}
	return reply, nil
}

// Calls of the client's tools are passed on as they arrive, one after another, in the order of the model.
func TestPartsOfCalls(t *testing.T) {
	part := func(call int, name, arguments string) agent.CallPart {
		return agent.CallPart{Call: call, Name: name, Arguments: arguments}
	}
	end := func(call int, name string) agent.CallPart { return agent.CallPart{Call: call, Name: name, End: true} }
	for name, c := range map[string]struct {
		parts  []any
		finish agent.Finish
		want   string
		turns  int
	}{
		"one after another": {
			[]any{"Now", part(0, "ask", `{"q":`), part(0, "ask", `1}`), part(1, "ask", `{}`)},
			agent.FinishDone,
			`0:"Now" 1+ask 1+{"q": 1+1} 1:ask({"q":1}) 2+ask 2+{} 2:ask({}) calls`, 1,
		},
		"at the same time": {
			[]any{part(0, "ask", `{"a"`), part(1, "ask", `{"b"`), part(0, "ask", `:1}`), part(1, "ask", `:2}`)},
			agent.FinishDone, `0+ask 0+{"a" 0+:1} 0:ask({"a":1}) 1+ask 1+{"b" 1+:2} 1:ask({"b":2}) calls`, 1,
		},
		"ends that the server states": {
			[]any{part(0, "ask", ""), end(0, "ask"), "Then", part(1, "ask", ""), end(1, "ask")},
			agent.FinishDone,
			`0+ask 0:ask({}) 1:"Then" 2+ask 2:ask({}) calls`, 1,
		},
		"a text within a call": {
			[]any{part(0, "ask", `{"a":`), "and", part(0, "ask", `1}`)},
			agent.FinishDone,
			`0+ask 0+{"a": 0+1} 0:ask({"a":1}) 1:"and" calls`, 1,
		},
		"no JSON": {
			[]any{part(0, "ask", `{"a":`), part(0, "ask", `oops}`)},
			agent.FinishDone,
			`0+ask 0+{"a": 0+oops} 0:ask({}) calls`, 1,
		},
		"cut off": {
			[]any{part(0, "ask", `{}`), part(1, "ask", `{"a`)},
			agent.FinishLength,
			`0+ask 0+{} 0:ask({}) 1+ask 1+{"a length`, 1,
		},
		"a tool that does not exist, besides": {
			[]any{part(0, "sudo", `{}`), part(1, "ask", `{}`)}, agent.FinishDone, `0+ask 0+{} 0:ask({}) calls`, 1,
		},
		"a tool that does not exist": {[]any{part(0, "sudo", `{}`)}, agent.FinishDone, `paused`, 4},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, w := run(say("x")), &world{t: t}
			r.Tools, r.Parts = r.Tools[1:], true // those of the client
			model := &partsModel{parts: c.parts, finish: c.finish}
			if err := agent.Continue(t.Context(), model, r, w); err != nil {
				t.Fatal(err)
			}
			var list []string
			begun := -1
			for _, e := range w.events {
				switch e.Kind {
				case agent.EventCallPart:
					if begun != e.Item {
						begun = e.Item
						list = append(list, fmt.Sprintf("%d+%s", e.Item, e.Call.Name))
					}
					if e.Text != "" {
						list = append(list, fmt.Sprintf("%d+%s", e.Item, e.Text))
					}
				case agent.EventCall:
					list = append(list, fmt.Sprintf("%d:%s(%s)", e.Item, e.Call.Name, e.Call.Arguments))
				case agent.EventTextEnd:
					list = append(list, fmt.Sprintf("%d:%q", e.Item, e.Text))
				case agent.EventEnd:
					list = append(list, string(e.End.Reason))
				}
			}
			if got := strings.Join(list, " "); got != c.want || model.turns != c.turns {
				t.Errorf("%d turns\n got %s\nwant %s", model.turns, got, c.want)
			}
		})
	}
}

// A call that arrives in parts counts towards the memory of its request.
func TestMemoryOfPartsOfCalls(t *testing.T) {
	full := errors.New("full")
	left := int64(10)
	r, w := run(say("x")), &world{t: t}
	r.Tools, r.Parts = r.Tools[1:], true
	r.Reserve = func(n int64) error {
		if left -= n; left < 0 {
			return full
		}
		return nil
	}
	model := &partsModel{parts: []any{
		agent.CallPart{Name: "ask", Arguments: `{"a":"bc`}, agent.CallPart{Name: "ask", Arguments: `defghi"}`},
	}}
	if err := agent.Continue(t.Context(), model, r, w); !errors.Is(err, full) {
		t.Errorf("%v", err)
	}
}
