package app

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/anthropic"
	"github.com/bullpen-run/bullpen/agent/responses"
	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/rest"
	"github.com/bullpen-run/bullpen/gateway/e2b"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// gatewayProcess is a gateway of the whole program, with a NATS server of its own.
type gatewayProcess struct {
	t      *testing.T
	args   []string
	data   string
	base   string
	key    string // with all scopes, of an organisation of its own
	stop   func()
	client *http.Client
}

// startGateway starts a gateway. It has no worker.
func startGateway(t *testing.T, args ...string) *gatewayProcess {
	t.Helper()
	nats := freeAddress(t)
	startNATS(t, nats, "")
	g := &gatewayProcess{
		t: t, data: filepath.Join(t.TempDir(), "data"), key: proto.NewKeySecret("local"),
		client: &http.Client{Transport: &http.Transport{}},
		args: append([]string{
			"--roles", "gateway", "--secrets-plain", "--store", "file://" + t.TempDir(), "--nats", "nats://" + nats.String(),
		}, args...),
	}
	t.Setenv("BULLPEN_BOOTSTRAP_KEY", g.key)
	g.start()
	t.Cleanup(func() { g.stop(); g.client.CloseIdleConnections() })
	return g
}

func (g *gatewayProcess) start() {
	g.t.Helper()
	at := freeAddress(g.t)
	c, err := ParseConfig(append(slices.Clone(g.args), "--listen", at.String(), "--data", g.data))
	if err != nil {
		g.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, c) }()
	stopped := false
	g.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			g.t.Error(err)
		}
	}
	g.base = "http://" + at.String()
	wait, done := context.WithTimeout(g.t.Context(), time.Minute)
	defer done()
	waitFor(wait, g.t, g.base+"/sandbox-agent/v1/health", http.StatusOK, "ok")
}

// reply is an answer.
type reply struct {
	t      *testing.T
	status int
	header http.Header
	body   string
}

// open sends a request below /sandbox-agent, or elsewhere if the path begins with //.
func (g *gatewayProcess) open(method, path, body string, headers ...string) *http.Response {
	g.t.Helper()
	where := g.base + "/sandbox-agent" + path
	if rest, ok := strings.CutPrefix(path, "//"); ok {
		where = g.base + "/" + rest
	}
	r, err := http.NewRequestWithContext(g.t.Context(), method, where, strings.NewReader(body))
	if err != nil {
		g.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+g.key)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
		if headers[i+1] == "" {
			r.Header.Del(headers[i])
		}
	}
	resp, err := g.client.Do(r)
	if err != nil {
		g.t.Fatal(err)
	}
	return resp
}

func (g *gatewayProcess) do(method, path, body string, headers ...string) *reply {
	g.t.Helper()
	resp := g.open(method, path, body, headers...)
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	return &reply{g.t, resp.StatusCode, resp.Header, string(text)}
}

// want checks the status and a part of the body.
func (r *reply) want(status int, part string) *reply {
	r.t.Helper()
	if r.status != status || !strings.Contains(r.body, part) {
		r.t.Fatalf("%d %s, want %d with %s", r.status, r.body, status, part)
	}
	return r
}

// into decodes the body.
func (r *reply) into(v any) {
	r.t.Helper()
	if err := json.Unmarshal([]byte(r.body), v); err != nil {
		r.t.Fatalf("%s: %v", r.body, err)
	}
}

// stream reads server-sent events.
type stream struct {
	t    *testing.T
	body io.ReadCloser
	in   *bufio.Reader
}

// frame is an event with its id.
type frame struct {
	id    string
	event sessions.Event
	text  string
}

func (g *gatewayProcess) stream(method, path, body string, headers ...string) *stream {
	g.t.Helper()
	resp := g.open(method, path, body, headers...)
	s := &stream{g.t, resp.Body, bufio.NewReader(resp.Body)}
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		text, _ := io.ReadAll(resp.Body)
		g.t.Fatalf("%d %v %s", resp.StatusCode, resp.Header, text)
	}
	g.t.Cleanup(s.close)
	return s
}

func (s *stream) close() { _ = s.body.Close() }

// next returns the next event; ok is false at the end, which must be a clean one.
func (s *stream) next() (f frame, ok bool) {
	s.t.Helper()
	for {
		line, err := s.in.ReadString('\n')
		if err == io.EOF && line == "" && f.text == "" {
			return f, false
		}
		if err != nil {
			s.t.Fatalf("stream: %v after %q", err, line)
		}
		line = strings.TrimSuffix(line, "\n")
		if id, ok := strings.CutPrefix(line, "id: "); ok {
			f.id = id
		}
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			f.text = data
		}
		if line == "" && f.text != "" {
			if err := json.Unmarshal([]byte(f.text), &f.event); err != nil {
				s.t.Fatalf("%s: %v", f.text, err)
			}
			return f, true
		}
	}
}

// until returns the events up to the first of a type.
func (s *stream) until(kind sessions.EventType) (list []frame) {
	s.t.Helper()
	for {
		f, ok := s.next()
		if !ok {
			s.t.Fatalf("the stream ended before %s", kind)
		}
		if list = append(list, f); f.event.Type == kind {
			return list
		}
	}
}

func typesOf(list []frame) string {
	var types []string
	for _, f := range list {
		types = append(types, string(f.event.Type))
	}
	return strings.Join(types, " ")
}

// okTurn has the types of the events of the simplest turn.
const okTurn = "turn.started item.started item.completed item.started item.delta item.completed turn.ended"

const okMessage = `{"message":"Reply with exactly the single word OK."}`

// problemOf returns the body of an error of the Sandbox Agent API.
func problemOf(code, title string, status int, detail, more string) string {
	return fmt.Sprintf(`{"type":"urn:sandbox-agent:error:%s","title":"%s","status":%d,"detail":"%s"%s}`,
		code, title, status, detail, more)
}

func TestSandboxAgent(t *testing.T) {
	g := startGateway(t, "--cors-origins", "http://example.com", "--drain", "1s", "--agent-mock-delay", "0s")
	for _, c := range []struct {
		name string
		run  func(*testing.T, *gatewayProcess)
	}{
		{"errors", testSessionErrors},
		{"tokens", testSessionTokens},
		{"agents", testSessionAgents},
		{"sessions", testSessionLifecycle},
		{"ids", testSessionIDs},
		{"turns", testSessionTurns},
		{"approval", testSessionApproval},
		{"streams", testSessionStreams},
		{"idempotency", testSessionIdempotency},
		{"legacy", testLegacyEvents},
		{"files", testSessionFiles},
		{"tars", testSessionTars},
		{"organisations", testSessionOrgs},
		{"restart", testSessionRestart},
	} {
		t.Run(c.name, func(t *testing.T) {
			sub := *g
			sub.t = t
			c.run(t, &sub)
			g.base, g.stop = sub.base, sub.stop
		})
	}
}

// The errors are those of the original, word for word, and this server's own have their form.
func testSessionErrors(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/there", `{"agent":"mock"}`).want(200, `{"healthy":true,"nativeSessionId":"mock-there"}`)
	g.do("POST", "/v1/sessions/over", `{"agent":"mock"}`).want(200, "")
	g.do("POST", "/v1/sessions/over/terminate", "").want(204, "")
	unauthorized := problemOf("token_invalid", "Token Invalid", 401, "token invalid",
		`,"details":{"message":"missing or invalid token"}`)
	invalid := func(detail string) string {
		return problemOf("invalid_request", "Invalid Request", 400, "invalid request: "+detail, "")
	}
	notFound := problemOf("session_not_found", "Session Not Found", 404, "session not found: nobody",
		`,"sessionId":"nobody"`)
	mode := func(mode string) string {
		return problemOf("mode_not_supported", "Mode Not Supported", 400, "mode not supported: mock "+mode,
			`,"agent":"mock","details":{"mode":"`+mode+`"}`)
	}
	unknownAgent := problemOf("unsupported_agent", "Unsupported Agent", 400, "unsupported agent: no one",
		`,"agent":"no one"`)
	long := strings.Repeat("x", proto.MaxAgentSessionID+1)
	for _, c := range []struct {
		method, path, body string
		headers            []string
		status             int
		want               string // the whole body if it begins with {
	}{
		{"GET", "/v1/agents", "", []string{"Authorization", ""}, 401, unauthorized},
		{"GET", "/v1/agents", "", []string{"Authorization", "Bearer wrong-token"}, 401, unauthorized},
		{"GET", "/v1/sessions/nobody", "", nil, 404, notFound},
		{"DELETE", "/v1/sessions/nobody", "", nil, 404, notFound},
		{"GET", "/v1/sessions/nobody/events", "", nil, 404, notFound},
		{"GET", "/v1/sessions/nobody/events/sse", "", nil, 404, notFound},
		{"POST", "/v1/sessions/nobody/messages", okMessage, nil, 404, notFound},
		{"POST", "/v1/sessions/nobody/messages/stream", okMessage, nil, 404, notFound},
		{"POST", "/v1/sessions/nobody/terminate", "", nil, 404, notFound},
		{"POST", "/v1/sessions/nobody/questions/q/reject", "", nil, 404, notFound},
		{"GET", "/v1/fs/entries?session_id=nobody", "", nil, 404, notFound},
		{
			"POST", "/v1/sessions/there", `{"agent":"mock"}`, nil, 409,
			problemOf("session_already_exists", "Session Already Exists", 409, "session already exists: there",
				`,"sessionId":"there"`),
		},
		{"POST", "/v1/sessions/there", `{"agent":"no one"}`, nil, 400, unknownAgent},
		{"GET", "/v1/agents/no%20one/modes", "", nil, 400, unknownAgent},
		{"GET", "/v1/agents/no%20one/models", "", nil, 400, unknownAgent},
		{"POST", "/v1/agents/no%20one/install", "{}", nil, 400, unknownAgent},
		{"POST", "/v1/sessions/new", `{"agent":"mock","agentMode":"sing"}`, nil, 400, mode("sing")},
		{
			"POST", "/v1/sessions/new", `{"agent":"mock","permissionMode":"all"}`, nil, 400,
			invalid("invalid permission mode: all"),
		},
		{"POST", "/v1/sessions/" + long, `{"agent":"mock"}`, nil, 400, invalid("the session's id must have 1 to 200 bytes")},
		{
			"POST", "/v1/sessions/new", `{"agent":"mock","directory":"/etc"}`, nil, 400,
			invalid("directory: only files in the home directory /home/baponi are kept; use a path in it"),
		},
		{
			"POST", "/v1/sessions/new",
			`{"agent":"mock","skills":{"sources":[{"type":"local","source":"/nonexistent/path/to/skills"}]}}`, nil, 400,
			invalid("skills: only files in the home directory /home/baponi are kept; use a path in it"),
		},
		{
			"POST", "/v1/sessions/there/permissions/missing-permission/reply", `{"reply":"once"}`, nil, 400,
			invalid("unknown permission id: missing-permission"),
		},
		{
			"POST", "/v1/sessions/there/questions/missing-question/reply", `{"answers":[["Yes"]]}`, nil, 400,
			invalid("unknown question id: missing-question"),
		},
		{
			"POST", "/v1/sessions/there/questions/missing-question/reject", "", nil, 400,
			invalid("unknown question id: missing-question"),
		},
		{"POST", "/v1/sessions/over/messages", okMessage, nil, 400, invalid("session terminated")},
		{"POST", "/v1/sessions/over/messages/stream", okMessage, nil, 400, invalid("session terminated")},
		{
			"GET", "/v1/sessions/there/events/sse", "",
			[]string{"Last-Event-ID", "x"},
			400,
			invalid("Last-Event-ID must be a positive integer"),
		},
		{
			"POST", "/v1/fs/upload-batch", "x", []string{"Content-Type", "application/gzip"}, 400,
			invalid("content-type must be application/x-tar"),
		},
		{"GET", "/v1/fs/file?path=../x", "", nil, 400, invalid("invalid relative path: ../x")},
		{"GET", "/v1/fs/file?path=none", "", nil, 400, invalid("path not found: /home/baponi/none")},

		{
			"POST", "/v1/sessions/new", `{"agent":"mock"}`, []string{"Content-Type", "text/plain"}, 415,
			"Content-Type: application/json",
		},
		{"POST", "/v1/sessions/new", ``, nil, 415, "Content-Type: application/json"},
		{"POST", "/v1/sessions/new", `{"agent":`, nil, 400, "Failed to parse the request body as JSON"},
		{"POST", "/v1/sessions/new", `{}`, nil, 422, "missing field `agent`"},
		{"POST", "/v1/sessions/new", `{"agent":7}`, nil, 422, "Failed to deserialize"},
		{"POST", "/v1/sessions/new", `{"agent":"mock","mcp":{"a":{"type":"odd"}}}`, nil, 422, "unknown variant `odd`"},
		{"POST", "/v1/sessions/there/messages", `{"text":"a"}`, nil, 422, "missing field `message`"},
		{"POST", "/v1/sessions/there/permissions/p/reply", `{"reply":"maybe"}`, nil, 422, "unknown variant `maybe`"},
		{"POST", "/v1/sessions/there/questions/q/reply", `{}`, nil, 422, "missing field `answers`"},
		{"GET", "/v1/sessions/there/events?offset=x", "", nil, 400, "Failed to deserialize query string"},
		{"GET", "/v1/sessions/there/events?include_raw=1", "", nil, 400, "Failed to deserialize query string"},
		{"GET", "/v1/fs/file", "", nil, 400, "missing field `path`"},
		{"GET", "/v1/nothing", "", nil, 404, "404 Not Found"},
		{"POST", "/v1/agents", "", nil, 405, `"urn:sandbox-agent:error:method_not_allowed"`},
		{
			"POST", "/v1/sessions/there/messages", okMessage,
			[]string{"Content-Encoding", "gzip"},
			415,
			`"type":"urn:sandbox-agent:error:unsupported_media_type","title":"Unsupported Media Type"`,
		},
		{
			"POST", "/v1/sessions/there/messages", `{"message":"` + strings.Repeat("x", 9<<20) + `"}`, nil, 413,
			`"type":"urn:sandbox-agent:error:payload_too_large"`,
		},
	} {
		r := g.do(c.method, c.path, c.body, c.headers...)
		whole := strings.HasPrefix(c.want, "{")
		if r.status != c.status || whole && r.body != c.want || !whole && !strings.Contains(r.body, c.want) {
			t.Errorf("%s %.80s %.80s: %d %s, want %d %s", c.method, c.path, c.body, r.status, r.body, c.status, c.want)
		}
		media := "application/json"
		if !strings.HasPrefix(r.body, "{") {
			media = "text/plain; charset=utf-8"
		}
		if got := r.header.Get("Content-Type"); got != media {
			t.Errorf("%s %.80s: %s", c.method, c.path, got)
		}
	}
	// A page may ask with the headers of clients.
	pre := g.do("OPTIONS", "/v1/agents", "", "Authorization", "", "Origin", "http://example.com",
		"Access-Control-Request-Method", "GET", "Access-Control-Request-Headers", "authorization,content-type")
	if pre.status/100 != 2 || pre.header.Get("Access-Control-Allow-Origin") != "http://example.com" {
		t.Errorf("preflight: %d %v", pre.status, pre.header)
	}
	for _, name := range []string{"Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID"} {
		if !strings.Contains(pre.header.Get("Access-Control-Allow-Headers"), name) {
			t.Errorf("preflight: %v", pre.header)
		}
	}
	vary := strings.ToLower(strings.Join(pre.header.Values("Vary"), ", "))
	if vary != "origin, access-control-request-method, access-control-request-headers" {
		t.Errorf("preflight: Vary: %s", vary)
	}
	health := g.do("GET", "/v1/health", "", "Authorization", "", "Origin", "http://example.com")
	health.want(200, `{"status":"ok"}`)
	if health.header.Get("Access-Control-Allow-Origin") != "http://example.com" {
		t.Errorf("%v", health.header)
	}
	g.do("GET", "/", "", "Authorization", "").want(200, "Sandbox Agent API 0.1.11")
	g.do("GET", "", "", "Authorization", "").want(200, "Sandbox Agent API 0.1.11")
	g.do("GET", "//v1/agents", "").want(404, "not_found")
}

// The token is the API key, in all forms of the original; scopes are checked.
func testSessionTokens(t *testing.T, g *gatewayProcess) {
	encode := base64.StdEncoding.EncodeToString
	for _, token := range []string{
		"Bearer " + g.key, "bearer  " + g.key, "Token " + g.key, "Basic " + encode([]byte("anyone:"+g.key)),
		"Basic " + encode([]byte(g.key)), "Basic " + base64.RawURLEncoding.EncodeToString([]byte("a:"+g.key)),
	} {
		g.do("GET", "/v1/agents", "", "Authorization", token).want(200, "mock")
	}
	for _, token := range []string{"Digest " + g.key, g.key, "Basic " + g.key, "Basic " + encode([]byte(g.key+":x"))} {
		g.do("GET", "/v1/agents", "", "Authorization", token).want(401, "token_invalid")
	}
	g.do("GET", "//v1/threads", "", "Authorization", "Token "+g.key).want(401, "")
	g.do("POST", "/v1/sessions/scopes", `{"agent":"mock"}`).want(200, "")
	for scope, allowed := range map[string][]string{
		"read": {"GET /v1/agents", "GET /v1/sessions", "GET /v1/sessions/scopes", "GET /v1/sessions/scopes/events"},
		"execute": {
			"POST /v1/sessions/scopes/terminate", "DELETE /v1/sessions/scopes",
		},
		"files": {"GET /v1/fs/entries"},
	} {
		key := g.newKey("acme", scope)
		for _, route := range []string{
			"GET /v1/agents", "GET /v1/sessions", "GET /v1/sessions/scopes", "GET /v1/sessions/scopes/events",
			"POST /v1/sessions/scopes/terminate", "DELETE /v1/sessions/scopes", "GET /v1/fs/entries",
		} {
			method, path, _ := strings.Cut(route, " ")
			r := g.do(method, path, "", "Authorization", "Bearer "+key)
			if slices.Contains(allowed, route) != (r.status != 403) {
				t.Errorf("%s with %s: %d %s", route, scope, r.status, r.body)
			}
			if r.status == 403 {
				r.want(403, `"urn:sandbox-agent:error:permission_denied","title":"Permission Denied","status":403,`+
					`"detail":"permission denied","details":{"message":"this needs an API key with the scope `)
			}
		}
	}
}

// newKey creates an API key with scopes.
func (g *gatewayProcess) newKey(org string, scopes ...string) (secret string) {
	g.t.Helper()
	list, err := json.Marshal(scopes)
	if err != nil {
		g.t.Fatal(err)
	}
	var key struct {
		Secret string `json:"key"`
	}
	r := g.do("POST", "//v1/admin/keys", fmt.Sprintf(`{"name":"k","org":%q,"plan":"pro","scopes":%s}`, org, list))
	r.want(201, "").into(&key)
	return key.Secret
}

func testSessionAgents(_ *testing.T, g *gatewayProcess) {
	g.do("GET", "/v1/agents", "").want(200, `{"id":"mock","installed":true,"credentialsAvailable":true,`+
		`"version":"builtin","capabilities":{"planMode":true,`)
	g.do("POST", "/v1/agents/mock/install", "{}").want(204, "")
	g.do("POST", "/v1/agents/mock/install", `{"reinstall":true}`).want(204, "")
	g.do("POST", "/v1/agents/mock/install", "").want(204, "")
	g.do("GET", "/v1/agents/mock/modes", "").want(200, `{"modes":[{"id":"build","name":"Build",`+
		`"description":"Mock agent for UI testing"},{"id":"plan","name":"Plan","description":"Plan-only mock mode"}]}`)
	g.do("GET", "/v1/agents/mock/models", "").want(200, `{"defaultModel":"mock","models":[{"id":"mock","name":"Mock"}]}`)
}

func testSessionLifecycle(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/plain", `{"agent":"mock","unknown":1}`).want(200, `"healthy":true`)
	g.do("GET", "/v1/sessions/plain", "").want(200, `{"sessionId":"plain","agent":"mock","agentMode":"build",`+
		`"permissionMode":"default","model":"mock","variant":null,"nativeSessionId":"mock-plain","ended":false,`+
		`"eventCount":1,`).
		want(200, `"directory":null,"title":null,"pendingQuestions":[],"pendingPermissions":[]}`)
	g.do("POST", "/v1/sessions/edits", `{"agent":"mock","permissionMode":"acceptEdits"}`).want(200, "")
	g.do("GET", "/v1/sessions/edits", "").want(200, `"permissionMode":"default"`)
	g.do("POST", "/v1/sessions/full", `{"agent":"mock","agentMode":"plan","permissionMode":"bypass","model":"m",
		"variant":"v","agentVersion":"1","directory":"work","title":"A title","mcp":{
			"files":{"type":"stdio","command":["npx","files"],"environment":{"A":"1"},"timeout":5},
			"web":{"type":"http","url":"https://example.com","bearer_token_env_var":"T","oauth":false}},
		"skills":{"sources":[{"type":"github","source":"a/b","ref":"main"},{"type":"local","source":"skills"}]}}`).
		want(200, "")
	var list struct {
		Sessions []map[string]any `json:"sessions"`
	}
	g.do("GET", "/v1/sessions", "").want(200, "").into(&list)
	if list.Sessions[0]["sessionId"] != "full" || list.Sessions[1]["sessionId"] != "edits" {
		t.Fatalf("the newest is not the first: %v", list.Sessions)
	}
	full := list.Sessions[0]
	created, ok := full["createdAt"].(float64)
	if !ok || time.Since(time.UnixMilli(int64(created))).Abs() > time.Hour {
		t.Errorf("created at %v", full["createdAt"])
	}
	want := map[string]any{
		"sessionId": "full", "agent": "mock", "agentMode": "plan", "permissionMode": "bypass", "model": "m", "variant": "v",
		"nativeSessionId": "mock-full", "ended": false, "eventCount": 1.0, "directory": "work", "title": "A title",
		"mcp": map[string]any{
			"files": map[string]any{
				"type": "local", "command": []any{"npx", "files"}, "env": map[string]any{"A": "1"}, "timeoutMs": 5.0,
			},
			"web": map[string]any{"type": "remote", "url": "https://example.com", "bearerTokenEnvVar": "T", "oauth": false},
		},
		"skills": map[string]any{"sources": []any{
			map[string]any{"type": "github", "source": "a/b", "ref": "main"},
			map[string]any{"type": "local", "source": "skills"},
		}},
	}
	delete(full, "createdAt")
	delete(full, "updatedAt")
	if fmt.Sprint(full) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", full, want)
	}
	for _, path := range []string{"/v1/sessions", "/v1/sessions/"} {
		var made struct {
			ID      string `json:"sessionId"`
			Healthy bool   `json:"healthy"`
			Native  string `json:"nativeSessionId"`
		}
		g.do("POST", path, `{"agent":"mock"}`).want(200, "").into(&made)
		if made.ID == "" || !made.Healthy || made.Native != "mock-"+made.ID {
			t.Errorf("%+v", made)
		}
		g.do("GET", "/v1/sessions/"+made.ID, "").want(200, made.ID)
	}
	for range 2 {
		g.do("POST", "/v1/sessions/plain/terminate", "").want(204, "")
	}
	g.do("GET", "/v1/sessions/plain", "").want(200, `"ended":true`)
	g.do("GET", "/v1/sessions/plain/events?offset=1", "").want(200,
		`"data":{"reason":"terminated","terminated_by":"daemon"},"raw":null}],"hasMore":false}`)
	g.do("PUT", "/v1/fs/file?session_id=full&path=a.txt", "content").want(200, "")
	g.do("DELETE", "/v1/sessions/full", "").want(204, "")
	g.do("GET", "/v1/sessions/full", "").want(404, "session_not_found")
	g.do("POST", "/v1/sessions/full", `{"agent":"mock"}`).want(200, "") // the id is free, and the home is empty
	g.do("GET", "/v1/fs/entries?session_id=full", "").want(200, "[]")
}

// An id is any text. It is no path.
func testSessionIDs(t *testing.T, g *gatewayProcess) {
	for _, id := range []string{
		"a/b/../c", "..", ".", "%2F", "a%41", "über straße", "*", ">", "a.b", "?x=1&y#z", "\x00\n", "+", " ",
		strings.Repeat("ü", proto.MaxAgentSessionID/2),
	} {
		path := "/v1/sessions/" + url.PathEscape(id)
		if id == ".." || id == "." { // clients resolve these segments, unless their dots are escaped
			path = "/v1/sessions/" + strings.ReplaceAll(id, ".", "%2E")
		}
		g.do("POST", path, `{"agent":"mock"}`).want(200, "")
		var x struct {
			ID string `json:"sessionId"`
		}
		g.do("GET", path, "").want(200, "").into(&x)
		if x.ID != id {
			t.Errorf("%q is %q", id, x.ID)
		}
		events := g.stream("POST", path+"/messages/stream", okMessage).until(sessions.TurnEnded)
		if events[0].event.Session != id {
			t.Errorf("%q is %q", id, events[0].event.Session)
		}
		g.do("PUT", "/v1/fs/file?path=f&session_id="+url.QueryEscape(id), id+" ").want(200, "")
		g.do("GET", "/v1/fs/file?path=f&session_id="+url.QueryEscape(id), "").want(200, id+" ")
		g.do("DELETE", path, "").want(204, "")
	}
	g.do("POST", "/v1/sessions/%FF", `{"agent":"mock"}`).want(400, "Invalid UTF-8")
}

func testSessionTurns(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/turns", `{"agent":"mock"}`).want(200, "")
	s := g.stream("POST", "/v1/sessions/turns/messages/stream", okMessage)
	if got := typesOf(s.until(sessions.TurnEnded)); got != okTurn {
		t.Errorf("%s", got)
	}
	if _, more := s.next(); more {
		t.Error("the stream of a turn goes on after its end")
	}
	// Messages wait for each other.
	for range 3 {
		g.do("POST", "/v1/sessions/turns/messages", okMessage).want(204, "")
	}
	last := g.stream("POST", "/v1/sessions/turns/messages/stream?include_raw=true", okMessage).until(sessions.TurnEnded)
	if got := typesOf(last); got != okTurn {
		t.Errorf("%s", got)
	}
	var all struct {
		Events []sessions.Event `json:"events"`
		More   bool             `json:"hasMore"`
	}
	g.do("GET", "/v1/sessions/turns/events", "").want(200, "").into(&all)
	turn := strings.Fields(okTurn)
	if len(all.Events) != 1+5*len(turn) || all.More {
		t.Fatalf("%d events, more: %t", len(all.Events), all.More)
	}
	for i, e := range all.Events {
		want := "session.started"
		if i > 0 {
			want = turn[(i-1)%len(turn)]
		}
		if string(e.Type) != want || e.Sequence != int64(i+1) || e.ID != fmt.Sprintf("evt_%d", i+1) ||
			string(e.Raw) != "null" {
			t.Errorf("event %d: %+v", i, e)
		}
	}
	// Pages have all events once.
	offset, pages := int64(0), 0
	for more := true; more; pages++ {
		var page struct {
			Events []sessions.Event `json:"events"`
			More   bool             `json:"hasMore"`
		}
		g.do("GET", fmt.Sprintf("/v1/sessions/turns/events?offset=%d&limit=10", offset), "").want(200, "").into(&page)
		if page.Events[0].Sequence != offset+1 || page.More != (len(page.Events) == 10 && offset+10 < 36) {
			t.Errorf("page %d: %d events after %d, more: %t", pages, len(page.Events), offset, page.More)
		}
		offset, more = page.Events[len(page.Events)-1].Sequence, page.More
	}
	if pages != 4 || offset != 36 {
		t.Errorf("%d pages up to %d", pages, offset)
	}
	g.do("GET", "/v1/sessions/turns/events?limit=0", "").want(200, `{"events":[],"hasMore":true}`)
	g.do("GET", "/v1/sessions/turns/events?offset=36", "").want(200, `{"events":[],"hasMore":false}`)
	g.do("GET", "/v1/sessions/turns/events?offset=99999", "").want(200, `{"events":[],"hasMore":false}`)
	// A session that ends also ends the streams of its queued messages.
	g.do("POST", "/v1/sessions/turns/messages", `{"message":"permission"}`).want(204, "")
	waiting := g.stream("POST", "/v1/sessions/turns/messages/stream", okMessage)
	g.do("POST", "/v1/sessions/turns/terminate", "").want(204, "")
	if list := waiting.until(sessions.SessionEnded); len(list) != 1 {
		t.Errorf("%s", typesOf(list))
	}
	if _, more := waiting.next(); more {
		t.Error("the stream of a turn goes on after the end of its session")
	}
}

func testSessionApproval(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/ask", `{"agent":"mock"}`).want(200, "")
	// The stream of a turn ends at what the client must answer.
	s := g.stream("POST", "/v1/sessions/ask/messages/stream", `{"message":"permission"}`)
	asked := s.until(sessions.PermissionRequested)
	if _, more := s.next(); more {
		t.Error("the stream goes on after a permission")
	}
	for {
		var x struct {
			Questions   []sessions.Question   `json:"pendingQuestions"`
			Permissions []sessions.Permission `json:"pendingPermissions"`
		}
		g.do("GET", "/v1/sessions/ask", "").want(200, `"pendingQuestions":[]`).into(&x)
		if len(x.Permissions) == 2 && x.Permissions[0].ID == "mock_1_permission" {
			break
		}
	}
	live := g.stream("GET", "/v1/sessions/ask/events/sse?offset="+asked[len(asked)-1].id, "")
	live.until(sessions.PermissionRequested)
	const first = "/v1/sessions/ask/permissions/mock_1_permission/reply"
	g.do("POST", first, `{"reply":"once"}`).want(204, "")
	g.do("POST", first, `{"reply":"once"}`).want(400, "unknown permission id")
	g.do("POST", "/v1/sessions/ask/permissions/mock_1_permission_denied/reply", `{"reply":"reject"}`).want(204, "")
	var resolved []string
	for _, f := range live.until(sessions.TurnEnded) {
		if f.event.Type == sessions.PermissionResolved {
			p, err := sessions.DataOf[sessions.Permission](&f.event)
			if err != nil {
				t.Fatal(err)
			}
			resolved = append(resolved, p.ID+" "+string(p.Status))
		}
	}
	if got := strings.Join(resolved, ", "); got != "mock_1_permission accept, mock_1_permission_denied reject" {
		t.Error(got)
	}
	g.stream("POST", "/v1/sessions/ask/messages/stream", `{"message":"questions"}`).until(sessions.QuestionRequested)
	live.until(sessions.QuestionRequested)
	live.until(sessions.QuestionRequested)
	g.do("GET", "/v1/sessions/ask", "").want(200, `"pendingQuestions":[{"question_id":"mock_2_question",`+
		`"prompt":"Choose a color","options":["Red","Blue"],"response":null,"status":"requested"},`)
	g.do("POST", "/v1/sessions/ask/questions/mock_2_question/reply", `{"answers":[["Blue"]]}`).want(204, "")
	g.do("POST", "/v1/sessions/ask/questions/mock_2_question_reject/reject", "").want(204, "")
	var answers []string
	for _, f := range live.until(sessions.TurnEnded) {
		if f.event.Type == sessions.QuestionResolved {
			q, err := sessions.DataOf[sessions.Question](&f.event)
			if err != nil {
				t.Fatal(err)
			}
			answer := "null"
			if q.Response != nil {
				answer = *q.Response
			}
			answers = append(answers, answer+" "+string(q.Status))
		}
	}
	if got := strings.Join(answers, ", "); got != "Blue answered, null rejected" {
		t.Error(got)
	}
}

// A stream loses nothing: it begins anywhere, and its reader may be slow.
func testSessionStreams(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/flow", `{"agent":"mock"}`).want(200, "")
	const messages = 30
	slow := g.stream("GET", "/v1/sessions/flow/events/sse", "")
	for range messages {
		g.do("POST", "/v1/sessions/flow/messages", `{"message":"demo"}`).want(204, "")
	}
	ended := map[string]int{}
	var all []frame
	for len(all) == 0 || ended["turn.ended"] < messages {
		f, ok := slow.next()
		if !ok {
			t.Fatal("the stream ended")
		}
		all = append(all, f)
		ended[string(f.event.Type)]++
		if f.event.Type == sessions.PermissionRequested || f.event.Type == sessions.QuestionRequested {
			go g.resolve("flow", &f.event)
		}
	}
	for i, f := range all {
		if f.event.Sequence != int64(i+1) || f.id != fmt.Sprint(i+1) {
			t.Fatalf("event %d has the number %d and the id %s", i, f.event.Sequence, f.id)
		}
	}
	// A client that comes back sends the id of the last event, and the query of its first request.
	for _, last := range []int{0, 1, 7, 1000, len(all) - 1} {
		headers := []string{"Last-Event-ID", fmt.Sprint(last)}
		f, _ := g.stream("GET", "/v1/sessions/flow/events/sse?offset=3", "", headers...).next()
		if f.text != all[last].text {
			t.Errorf("after %d: %s, want %s", last, f.text, all[last].text)
		}
	}
	f, _ := g.stream("GET", "/v1/sessions/flow/events/sse?offset=3", "").next()
	if f.text != all[3].text {
		t.Errorf("after 3: %s", f.text)
	}
	// A removed session ends its streams.
	end := g.stream("GET", fmt.Sprintf("/v1/sessions/flow/events/sse?offset=%d", len(all)), "")
	g.do("DELETE", "/v1/sessions/flow", "").want(204, "")
	for more := true; more; {
		_, more = end.next()
	}
}

// resolve answers what waits for an answer.
func (g *gatewayProcess) resolve(id string, e *sessions.Event) {
	if e.Type == sessions.PermissionRequested {
		p, _ := sessions.DataOf[sessions.Permission](e)
		_ = g.open("POST", "/v1/sessions/"+id+"/permissions/"+p.ID+"/reply", `{"reply":"once"}`).Body.Close()
		return
	}
	q, _ := sessions.DataOf[sessions.Question](e)
	_ = g.open("POST", "/v1/sessions/"+id+"/questions/"+q.ID+"/reject", "").Body.Close()
}

func testSessionIdempotency(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/once", `{"agent":"mock"}`).want(200, "")
	key := []string{"Idempotency-Key", "k1"}
	for range 3 {
		g.do("POST", "/v1/sessions/once/messages", okMessage, key...).want(204, "")
	}
	first := g.stream("POST", "/v1/sessions/once/messages/stream", okMessage, key...).until(sessions.TurnEnded)
	again := g.stream("POST", "/v1/sessions/once/messages/stream", okMessage, key...).until(sessions.TurnEnded)
	if len(first) != len(again) || first[0].event.Sequence != 2 {
		t.Fatalf("%s, and again %s", typesOf(first), typesOf(again))
	}
	for i := range first {
		if first[i].text != again[i].text || first[i].id != again[i].id {
			t.Errorf("%s, and again %s", first[i].text, again[i].text)
		}
	}
	g.do("POST", "/v1/sessions/once/messages", `{"message":"other"}`, key...).want(409,
		`"type":"urn:sandbox-agent:error:conflict","title":"Conflict","status":409,"detail":"the idempotency key was used`)
	long := strings.Repeat("k", proto.MaxIdempotencyKeyLen+1)
	g.do("POST", "/v1/sessions/once/messages", okMessage, "Idempotency-Key", long).want(400, "Idempotency-Key")
}

func testLegacyEvents(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/old", `{"agent":"mock"}`).want(200, "")
	g.stream("POST", "/v1/sessions/old/messages/stream", okMessage).until(sessions.TurnEnded)
	g.stream("POST", "/v1/sessions/old/messages/stream", `{"message":"tool"}`).until(sessions.TurnEnded)
	g.stream("POST", "/v1/sessions/old/messages/stream", `{"message":"error"}`).until(sessions.ErrorEvent)
	g.stream("POST", "/v1/sessions/old/messages/stream", `{"message":"permission"}`).until(sessions.PermissionRequested)
	var list struct {
		Events []map[string]any `json:"events"`
		More   bool             `json:"hasMore"`
	}
	g.do("GET", "/v1/sessions/old/events?schema=legacy", "").
		want(200, `"agentSessionId":"mock-old","nativeSessionId":"mock-old"`).into(&list)
	var kinds []string
	for _, e := range list.Events {
		data, _ := e["data"].(map[string]any)
		kinds = append(kinds, slices.Sorted(maps.Keys(data))...)
		delete(e, "timestamp")
	}
	if got := strings.Join(kinds, " "); !strings.HasPrefix(got,
		"started message message message message message message error raw message permissionAsked") {
		t.Error(got)
	}
	text := func(i int) string {
		b, err := json.Marshal(list.Events[i])
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for i, want := range map[int]string{
		0: `"data":{"started":{"details":{"agent":"mock","agentMode":"build","model":"mock","permissionMode":"default",`,
		2: `"parts":[{"text":"OK","type":"text"}],"role":"assistant"`,
		4: `"parts":[{"id":"mock_2_call","input":{"query":"example"},"name":"mock.search","type":"tool_call"}]`,
		5: `{"id":"mock_2_call","is_error":true,"output":"mock search results","type":"tool_result"},` +
			`{"source":{"path":"mock_2/readme.md","type":"path"},"type":"file"}`,
		7: `"data":{"error":{"details":{"mock":true},"kind":"mock_error","message":"Mock error event."}}`,
		10: `"data":{"permissionAsked":{"always":[],"id":"mock_4_permission",` +
			`"metadata":{"codexRequestKind":"commandExecution","command":"echo mock"},"patterns":[],"permission":"command_execution","sessionId":"old"}}`,
	} {
		if !strings.Contains(text(i), want) {
			t.Errorf("event %d: %s, want %s", i, text(i), want)
		}
	}
	// Offsets stand for the same place in both forms.
	second := list.Events[1]["id"].(float64)
	g.do("GET", fmt.Sprintf("/v1/sessions/old/events?schema=legacy&offset=%v&limit=1", second-1), "").
		want(200, fmt.Sprintf(`{"events":[{"id":%v,`, second)).want(200, `"hasMore":true`)
	g.do("GET", "/v1/sessions/old/events?schema=older", "").want(400, "schema")
	resp := g.open("GET", "/v1/sessions/old/events/sse?schema=legacy", "")
	defer func() { _ = resp.Body.Close() }()
	line, err := bufio.NewReader(resp.Body).ReadString('\n')
	if err != nil || line != "id: 1\n" {
		t.Errorf("%q %v", line, err)
	}
}

func testSessionFiles(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/files", `{"agent":"mock","directory":"/home/baponi/work"}`).want(200, "")
	const in = "&session_id=files"
	octets := []string{"Content-Type", "application/octet-stream"}
	g.do("PUT", "/v1/fs/file?path=a%20b/hello.txt"+in, "hello", octets...).want(200,
		`{"bytesWritten":5,"path":"/home/baponi/work/a b/hello.txt"}`)
	r := g.do("GET", "/v1/fs/file?path=/home/baponi/work/a%20b/hello.txt&sessionId=files", "").want(200, "hello")
	if r.header.Get("Content-Type") != "application/octet-stream" || r.header.Get("Content-Length") != "5" {
		t.Errorf("%v", r.header)
	}
	g.do("GET", "/v1/fs/entries?path=."+in, "").want(200,
		`[{"name":"a b","path":"/home/baponi/work/a b","entryType":"directory","size":0,"modified":"`)
	g.do("GET", "/v1/fs/entries?path=a%20b"+in, "").want(200,
		`[{"name":"hello.txt","path":"/home/baponi/work/a b/hello.txt","entryType":"file","size":5,"modified":"`)
	g.do("GET", "/v1/fs/stat?path=a%20b"+in, "").
		want(200, `{"path":"/home/baponi/work/a b","entryType":"directory","size":0,`)
	g.do("GET", "/v1/fs/stat?path=a%20b/hello.txt"+in, "").want(200,
		`{"path":"/home/baponi/work/a b/hello.txt","entryType":"file","size":5,"modified":"`)
	g.do("GET", "/v1/fs/stat?path=/home/baponi"+in, "").
		want(200, `{"path":"/home/baponi","entryType":"directory","size":0}`)
	g.do("GET", "/v1/fs/entries?path=none"+in, "").want(400, "path not found: /home/baponi/work/none")
	g.do("GET", "/v1/fs/entries?path=a%20b/hello.txt"+in, "").want(400, "path is not a directory: ")
	g.do("GET", "/v1/fs/file?path=a%20b"+in, "").want(400, "path is not a file: ")
	g.do("POST", "/v1/fs/mkdir?path=deep/er"+in, "").want(200, `{"path":"/home/baponi/work/deep/er"}`)
	g.do("POST", "/v1/fs/mkdir?path=deep/er"+in, "").want(200, "")
	g.do("GET", "/v1/fs/entries?path=deep/er"+in, "").want(200, "[]")
	g.do("PUT", "/v1/fs/file?path=second"+in, "2", octets...).want(200, "")
	move := func(body string) *reply { return g.do("POST", "/v1/fs/move?session_id=files", body) }
	move(`{"from":"second","to":"a b/hello.txt"}`).want(400, "destination already exists: /home/baponi/work/a b/hello.txt")
	move(`{"from":"second","to":"a b/hello.txt","overwrite":true}`).want(200,
		`{"from":"/home/baponi/work/second","to":"/home/baponi/work/a b/hello.txt"}`)
	g.do("GET", "/v1/fs/file?path=a%20b/hello.txt"+in, "").want(200, "2")
	move(`{"from":"none","to":"x"}`).want(400, "path not found: /home/baponi/work/none")
	move(`{"from":"a b","to":"/tmp/x"}`).want(400, "invalid path")
	move(`{"from":"a b","to":"new/place"}`).want(200, "")
	move(`{"from":"new/place/hello.txt","to":"new","overwrite":true}`).want(400, "destination contains the source")
	g.do("GET", "/v1/fs/file?path=new/place/hello.txt"+in, "").want(200, "2")
	g.do("DELETE", "/v1/fs/entry?path=new"+in, "").want(409, `"urn:sandbox-agent:error:conflict"`)
	g.do("DELETE", "/v1/fs/entry?path=new&recursive=true"+in, "").want(200, `{"path":"/home/baponi/work/new"}`)
	g.do("DELETE", "/v1/fs/entry?path=new&recursive=true"+in, "").want(400, "path not found")
	g.do("GET", "/v1/fs/stat?path=new"+in, "").want(400, "path not found")
	g.do("DELETE", "/v1/fs/entry?path=/home/baponi&recursive=true"+in, "").want(400, "is the home itself")
	for _, path := range []string{"/etc/passwd", "/home/baponi/../x", "/home/baponi2/x", "../x", "a/../../x", "%00", "/"} {
		for _, route := range []string{
			"GET /v1/fs/file", "PUT /v1/fs/file", "GET /v1/fs/stat", "DELETE /v1/fs/entry", "POST /v1/fs/mkdir",
		} {
			method, at, _ := strings.Cut(route, " ")
			g.do(method, at+"?path="+path+in, "").want(400, "invalid")
		}
	}
	// A body of unknown length is stored, too.
	body, to := io.Pipe()
	go func() { _, _ = io.WriteString(to, "piped"); _ = to.Close() }()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, g.base+"/sandbox-agent/v1/fs/file?path=piped"+in, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+g.key)
	resp, err := g.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	answer, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK || !strings.Contains(string(answer), `"bytesWritten":5`) {
		t.Errorf("%d %s", resp.StatusCode, answer)
	}
	g.do("GET", "/v1/fs/file?path=piped"+in, "").want(200, "piped")
	// Without a session, each key has files of its own.
	g.do("PUT", "/v1/fs/file?path=mine", "mine", octets...).want(200, `{"bytesWritten":4,"path":"/home/baponi/mine"}`)
	g.do("GET", "/v1/fs/entries", "").want(200, `"name":"mine"`)
	other := g.newKey("acme", "files")
	g.do("GET", "/v1/fs/entries", "", "Authorization", "Bearer "+other).want(200, "[]")
	g.do("GET", "/v1/fs/entries?path=/home/baponi"+in, "").want(200, `"name":"work"`)
}

// archive returns a tar.
func archive(t *testing.T, entries ...*tar.Header) string {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		h.Mode = 0o644
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(bytes.Repeat([]byte("x"), int(h.Size))); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func testSessionTars(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/tars", `{"agent":"mock","directory":"work"}`).want(200, "")
	upload := func(path, body string) *reply {
		return g.do("POST", "/v1/fs/upload-batch?session_id=tars&path="+path, body, "Content-Type", "application/x-tar")
	}
	upload("in", archive(t, &tar.Header{Name: "a.txt", Size: 5}, &tar.Header{Name: "nested/b.txt", Size: 3},
		&tar.Header{Name: "./", Typeflag: tar.TypeDir},
		&tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "a.txt"})).want(200,
		`{"paths":["/home/baponi/work/in/a.txt","/home/baponi/work/in/nested/b.txt","/home/baponi/work/in/l"],`+
			`"truncated":false}`)
	g.do("GET", "/v1/fs/file?session_id=tars&path=in/nested/b.txt", "").want(200, "xxx")
	g.do("GET", "/v1/fs/file?session_id=tars&path=in/l", "").want(400, "path is not a file") // links are not followed
	many := make([]*tar.Header, 0, 1030)
	for i := range 1030 {
		many = append(many, &tar.Header{Name: fmt.Sprintf("file_%d.txt", i)})
	}
	var answer struct {
		Paths     []string `json:"paths"`
		Truncated bool     `json:"truncated"`
	}
	upload("many", archive(t, many...)).want(200, "").into(&answer)
	if len(answer.Paths) != 1024 || !answer.Truncated {
		t.Errorf("%d paths, truncated: %t", len(answer.Paths), answer.Truncated)
	}
	for name, h := range map[string]*tar.Header{
		"a parent":          {Name: "../x", Size: 1},
		"an absolute path":  {Name: "/etc/x", Size: 1},
		"a link out":        {Name: "x", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"},
		"a link up":         {Name: "x", Typeflag: tar.TypeSymlink, Linkname: "../../../etc"},
		"a hard link":       {Name: "x", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"},
		"a device":          {Name: "x", Typeflag: tar.TypeBlock, Devmajor: 8},
		"a pipe":            {Name: "x", Typeflag: tar.TypeFifo},
		"the home's parent": {Name: "a/../../../x", Size: 1},
	} {
		if r := upload("bad", archive(t, h)); r.status != 400 || !strings.Contains(r.body, "invalid_request") {
			t.Errorf("%s: %d %s", name, r.status, r.body)
		}
	}
	if r := upload("bad", "no tar"); r.status != 400 {
		t.Errorf("%d %s", r.status, r.body)
	}
	upload("/etc", archive(t, &tar.Header{Name: "x"})).want(400, "invalid path")
	// A bomb: files of more bytes than a home has room for, in a small body.
	var bomb bytes.Buffer
	w := tar.NewWriter(&bomb)
	if err := w.WriteHeader(&tar.Header{Name: "x", Size: 1 << 40, Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	upload("bad", bomb.String()).want(409, "exceeds what the sandbox of this API key has room for")
	g.do("GET", "/v1/fs/stat?session_id=tars&path=bad", "").want(400, "path not found")
}

// Sessions belong to an organisation.
func testSessionOrgs(_ *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/ours", `{"agent":"mock"}`).want(200, "")
	other := []string{"Authorization", "Bearer " + g.newKey("other", "read", "execute", "files")}
	g.do("GET", "/v1/sessions", "", other...).want(200, `{"sessions":[]}`)
	g.do("GET", "/v1/sessions/ours", "", other...).want(404, "session_not_found")
	g.do("GET", "/v1/sessions/ours/events", "", other...).want(404, "session_not_found")
	g.do("GET", "/v1/sessions/ours/events/sse", "", other...).want(404, "session_not_found")
	g.do("POST", "/v1/sessions/ours/messages", okMessage, other...).want(404, "session_not_found")
	g.do("POST", "/v1/sessions/ours/terminate", "", other...).want(404, "session_not_found")
	g.do("DELETE", "/v1/sessions/ours", "", other...).want(404, "session_not_found")
	g.do("GET", "/v1/fs/entries?session_id=ours", "", other...).want(404, "session_not_found")
	g.do("POST", "/v1/sessions/ours", `{"agent":"mock"}`, other...).want(200, "")
	g.do("DELETE", "/v1/sessions/ours", "", other...).want(204, "")
	g.do("GET", "/v1/sessions/ours", "").want(200, "")
}

// A gateway that stops ends its streams cleanly, and another one goes on.
func testSessionRestart(t *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/durable", `{"agent":"mock"}`).want(200, "")
	live := g.stream("GET", "/v1/sessions/durable/events/sse", "")
	g.do("POST", "/v1/sessions/durable/messages", `{"message":"questions"}`).want(204, "")
	live.until(sessions.QuestionRequested)
	last := live.until(sessions.QuestionRequested)
	turn := g.stream("POST", "/v1/sessions/durable/messages/stream", okMessage)
	g.stop()
	for _, s := range []*stream{live, turn} {
		if f, more := s.next(); more {
			t.Errorf("the gateway sent %s when it stopped", f.text)
		}
	}
	g.client.CloseIdleConnections()
	g.start()
	g.do("GET", "/v1/sessions/durable", "").want(200, `"pendingQuestions":[{"question_id":"mock_1_question",`)
	live = g.stream("GET", "/v1/sessions/durable/events/sse", "", "Last-Event-ID", last[len(last)-1].id)
	g.do("POST", "/v1/sessions/durable/questions/mock_1_question/reply", `{"answers":[["Red"]]}`).want(204, "")
	g.do("POST", "/v1/sessions/durable/questions/mock_1_question_reject/reject", "").want(204, "")
	if got := typesOf(live.until(sessions.TurnEnded)); got != "question.resolved question.resolved turn.ended" {
		t.Error(got)
	}
	if got := typesOf(live.until(sessions.TurnEnded)); got != okTurn {
		t.Error(got)
	}
}

// At the root, the routes exist a second time, and hide none of this server's own.
func TestSandboxAgentAtTheRoot(t *testing.T) {
	g := startGateway(t, "--agent-sessions-at-root")
	for _, prefix := range []string{"/", "//"} {
		g.do("GET", prefix+"v1/health", "", "Authorization", "").want(200, `{"status":"ok"}`)
		g.do("GET", prefix+"v1/agents", "", "Authorization", "Token "+g.key).want(200, `"id":"mock"`)
		g.do("GET", prefix+"v1/agents", "", "Authorization", "").want(401, "urn:sandbox-agent:error:token_invalid")
		g.do("GET", prefix+"v1/sessions/none/none", "").want(404, "404 Not Found")
	}
	g.do("POST", "//v1/sessions/root", `{"agent":"mock"}`).want(200, "healthy")
	g.do("GET", "/v1/sessions/root", "").want(200, "root")
	g.do("GET", "//", "", "Accept", "text/html").want(200, "<html")
	g.do("GET", "//v1/session", "").want(200, "")
	g.do("GET", "//v1/sandboxes", "").want(200, "")
}

// No route of the API at the root has the method and the path of another one.
func TestSandboxAgentPathsAreFree(t *testing.T) {
	taken := map[string]string{}
	pattern := regexp.MustCompile(`\{[^}]*\}`)
	add := func(route api.Route) {
		at := route.Method + " " + pattern.ReplaceAllString(route.Path, "{}")
		if taken[at] != "" {
			t.Errorf("%s is %s and %s", at, taken[at], route.ID)
		}
		taken[at] = route.ID
	}
	for _, route := range api.Routes() {
		add(route)
	}
	for _, list := range [][]agent.Route{
		(&anthropic.Server{}).Routes(), (&responses.Server{}).Routes(), (&rest.Server{}).Routes(false),
		(&rest.Server{}).Routes(true),
	} {
		for _, route := range list {
			add(route.Route)
		}
	}
	e2bRoutes := (&e2b.Server{}).Surface()
	for _, row := range e2bRoutes.Routes {
		add(row.Route)
	}
}
