package app

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
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
		{"POST", "/v1/sessions/nobody/interrupt", "", nil, 404, notFound},
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
			invalid("directory: only files in the home directory /home/user are kept; use a path in it"),
		},
		{
			"POST", "/v1/sessions/new",
			`{"agent":"mock","skills":{"sources":[{"type":"local","source":"/nonexistent/path/to/skills"}]}}`, nil, 400,
			invalid("skills: only files in the home directory /home/user are kept; use a path in it"),
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
			"POST", "/v1/fs/upload-batch", "x",
			[]string{"Content-Type", "application/gzip"},
			400,
			invalid("content-type must be application/x-tar"),
		},
		{"GET", "/v1/fs/file?path=../x", "", nil, 400, invalid("invalid relative path: ../x")},
		{"GET", "/v1/fs/file?path=none", "", nil, 400, invalid("path not found: /home/user/none")},

		{
			"POST", "/v1/sessions/new", `{"agent":"mock"}`,
			[]string{"Content-Type", "text/plain"},
			415,
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
			"POST /v1/sessions/scopes/interrupt", "POST /v1/sessions/scopes/terminate", "DELETE /v1/sessions/scopes",
		},
		"files": {"GET /v1/fs/entries"},
	} {
		key := g.newKey("acme", scope)
		for _, route := range []string{
			"GET /v1/agents", "GET /v1/sessions", "GET /v1/sessions/scopes", "GET /v1/sessions/scopes/events",
			"POST /v1/sessions/scopes/interrupt", "POST /v1/sessions/scopes/terminate", "DELETE /v1/sessions/scopes",
			"GET /v1/fs/entries",
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

// Sessions belong to an organisation.
func testSessionOrgs(_ *testing.T, g *gatewayProcess) {
	g.do("POST", "/v1/sessions/ours", `{"agent":"mock"}`).want(200, "")
	other := []string{"Authorization", "Bearer " + g.newKey("other", "read", "execute", "files")}
	g.do("GET", "/v1/sessions", "", other...).want(200, `{"sessions":[]}`)
	g.do("GET", "/v1/sessions/ours", "", other...).want(404, "session_not_found")
	g.do("GET", "/v1/sessions/ours/events", "", other...).want(404, "session_not_found")
	g.do("GET", "/v1/sessions/ours/events/sse", "", other...).want(404, "session_not_found")
	g.do("POST", "/v1/sessions/ours/messages", okMessage, other...).want(404, "session_not_found")
	g.do("POST", "/v1/sessions/ours/interrupt", "", other...).want(404, "session_not_found")
	g.do("POST", "/v1/sessions/ours/terminate", "", other...).want(404, "session_not_found")
	g.do("DELETE", "/v1/sessions/ours", "", other...).want(404, "session_not_found")
	g.do("GET", "/v1/fs/entries?session_id=ours", "", other...).want(404, "session_not_found")
	g.do("POST", "/v1/sessions/ours", `{"agent":"mock"}`, other...).want(200, "")
	g.do("DELETE", "/v1/sessions/ours", "", other...).want(204, "")
	g.do("GET", "/v1/sessions/ours", "").want(200, "")
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
