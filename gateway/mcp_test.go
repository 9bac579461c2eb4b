package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// modelClient connects the official client with an API key. version is the version of the protocol,
// empty for the newest one. The client sends text of progress to progress.
func (h *harness) modelClient(key, version string, progress chan<- string) *sdk.ClientSession {
	h.t.Helper()
	client := sdk.NewClient(&sdk.Implementation{Name: "test", Version: "1"}, &sdk.ClientOptions{
		ProgressNotificationHandler: func(_ context.Context, r *sdk.ProgressNotificationClientRequest) {
			progress <- r.Params.Message
		},
	})
	dial := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return h.dial() }}
	transport := &sdk.StreamableClientTransport{
		Endpoint: h.http.URL + "/mcp", HTTPClient: &http.Client{Transport: &bearer{key, dial}},
	}
	session, err := client.Connect(h.t.Context(), transport, &sdk.ClientSessionOptions{ProtocolVersion: version})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		_ = session.Close()
		dial.CloseIdleConnections()
	})
	return session
}

// bearer adds an API key to requests.
type bearer struct {
	key string
	*http.Transport
}

func (b *bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r.Header.Set("Authorization", "Bearer "+b.key)
	return b.Transport.RoundTrip(r)
}

// until waits until a condition holds.
func (h *harness) until(what string, holds func() bool) {
	h.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !holds(); runtime.Gosched() {
		if time.Now().After(deadline) {
			h.t.Fatalf("%s: not within 10 s", what)
		}
	}
}

func (a *reply) has(text string) {
	a.t.Helper()
	if !bytes.Contains(a.body, []byte(text)) {
		a.t.Errorf("%q is not in %s", text, a.body)
	}
}

func callTool(
	t *testing.T, session *sdk.ClientSession, tool string, arguments map[string]any,
) (map[string]any, *sdk.CallToolResult) {
	t.Helper()
	result, err := session.CallTool(t.Context(), &sdk.CallToolParams{Name: tool, Arguments: arguments})
	if err != nil {
		t.Fatalf("%s %v: %v", tool, arguments, err)
	}
	structured, _ := result.StructuredContent.(map[string]any)
	return structured, result
}

func TestTools(t *testing.T) {
	h := newHarness(t)
	session := h.modelClient(h.key, "", nil)
	tools, err := session.ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, tool := range tools.Tools {
		names = append(names, tool.Name)
		schema, _ := json.Marshal(tool.InputSchema)
		for _, never := range []string{`"profile"`, "sub_paths", "webhook_url", "$ref"} {
			if strings.Contains(string(schema), never) {
				t.Errorf("%s of %s: %s", never, tool.Name, schema)
			}
		}
	}
	if got := strings.Join(names, " "); got != "context_execute files_download files_list files_upload sandbox_execute" {
		t.Errorf("tools %s", got)
	}

	// A program that fails is a result.
	h.stub.finishAtOnce(proto.Exited(3), "one\n", "two\n")
	out, result := callTool(t, session, "sandbox_execute",
		map[string]any{"code": "exit 3", "language": "bash", "thread_id": "t1", "env_vars": map[string]any{"A": "b"}})
	if result.IsError || out["exit_code"] != 3.0 || out["stdout"] != "one\ntwo\n" || out["success"] != false {
		t.Errorf("%v %v", out, result)
	}
	var text map[string]any
	if err := json.Unmarshal([]byte(result.Content[0].(*sdk.TextContent).Text), &text); err != nil ||
		text["trace_id"] != out["trace_id"] {
		t.Errorf("text %v: %v", text, err)
	}
	id, _ := out["trace_id"].(string)
	job := h.stub.runs[proto.TraceID(id)].job
	if job.Profile != proto.DefaultProfileName {
		t.Errorf("profile %q", job.Profile)
	}
	if job.ThreadID != "t1" || job.Env["A"] != "b" || job.Language != proto.Bash || job.Mode != proto.ModeInline ||
		job.Timeout != 60 {
		t.Errorf("job %+v", job)
	}
}

// Both versions of the protocol: the older one has sessions, and cancels with a request.
func TestToolProgressAndCancel(t *testing.T) {
	for _, version := range []string{"2025-11-25", ""} {
		t.Run("version "+version, func(t *testing.T) {
			h := newHarness(t)
			progress := make(chan string, 10)
			session := h.modelClient(h.key, version, progress)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			params := &sdk.CallToolParams{Name: "sandbox_execute", Arguments: map[string]any{"code": "1"}}
			params.SetProgressToken("p")
			go func() {
				_, err := session.CallTool(ctx, params)
				ended <- err
			}()
			id := <-h.stub.submitted
			h.stub.start(id)
			h.stub.output(id, proto.Stdout, "a line\n")
			if got := <-progress; got != "a line\n" {
				t.Errorf("progress %q", got)
			}
			// Another call ends meanwhile, and another client of the same key has a call of the same id.
			other := h.modelClient(h.key, version, nil)
			h.stub.finishAtOnce(proto.Exited(0))
			callTool(t, session, "sandbox_execute", map[string]any{"code": "2"})
			callTool(t, other, "sandbox_execute", map[string]any{"code": "2"})
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("the call ended with %v", err)
			}
			h.until("the execution is cancelled", func() bool { return h.stub.record(id).Cancelling })
			h.stub.finish(id, proto.Cancelled())
			if len(h.stub.runs) != 3 {
				t.Errorf("%d executions", len(h.stub.runs))
			}
		})
	}
}

// A client of the older protocol that goes away leaves its program running, as other clients do.
func TestToolClientGone(t *testing.T) {
	h := newHarness(t)
	ctx, cancel := context.WithCancel(t.Context())
	r := h.request("POST", "/mcp",
		`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"sandbox_execute","arguments":{"code":"1"}}}`,
		"Content-Type", "application/json", "Accept", "application/json, text/event-stream", "Mcp-Session-Id",
		"s").WithContext(ctx)
	go func() {
		if resp, err := h.client.Do(r); err == nil {
			_ = resp.Body.Close()
		}
	}()
	id := <-h.stub.submitted
	h.stub.start(id)
	cancel()
	h.until("the request is logged", func() bool { return strings.Contains(h.log.String(), string(id)) })
	if h.stub.record(id).Cancelling {
		t.Error("it was cancelled")
	}
	// The same session and id again is not another execution of that name.
	h.do("POST", "/mcp", `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"sandbox_execute",`+
		`"arguments":{"code":"1"}}}`,
		"Content-Type", "application/json", "Accept", "application/json, text/event-stream", "Mcp-Session-Id", "s").want(
		200, "").has("another request of this session had the same id")
	// The session and the id name the execution of this key only.
	cancelled := `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}`
	other := h.stub.addKey("acme", "enterprise", asUser)
	h.do("POST", "/mcp", cancelled, "Content-Type", "application/json", "Accept", "*/*", "Mcp-Session-Id", "s",
		"Authorization", "Bearer "+other).want(202, "")
	if h.stub.record(id).Cancelling {
		t.Error("another key cancelled it")
	}
	h.do("POST", "/mcp", cancelled, "Content-Type", "application/json", "Accept", "*/*", "Mcp-Session-Id",
		"s").want(202, "")
	if !h.stub.record(id).Cancelling {
		t.Error("it was not cancelled")
	}
	h.stub.finish(id, proto.Cancelled())
}

func TestToolErrors(t *testing.T) {
	h := newHarness(t)
	free := h.stub.addKey("beta", "free", asUser)
	filesOnly := h.stub.addKey("acme", "pro", proto.Key{Scopes: []proto.Scope{proto.ScopeFiles}})
	noFiles := h.stub.addKey(
		"acme", "pro", proto.Key{Scopes: []proto.Scope{proto.ScopeExecute, proto.ScopeRead, proto.ScopeAdmin}})
	progress := make(chan string, 10)
	for _, c := range []struct {
		name, key, tool string
		arguments       map[string]any
		code, message   string
	}{
		{
			"target", h.key, "sandbox_execute",
			map[string]any{"code": "1", "webhook_url": "https://example.com"},
			"validation_error", "webhook_url is not available to tools",
		},
		{
			"profile", h.key, "sandbox_execute",
			map[string]any{"code": "1", "profile": "default"},
			"validation_error", "profile is not available to tools",
		},
		{
			"path", h.key, "sandbox_execute",
			map[string]any{"code": "1", "sub_paths": []any{}},
			"validation_error",
			"sub_paths is not available to tools",
		},
		{
			"made up", h.key, "sandbox_execute",
			map[string]any{"code": "1", "cwd": "/"},
			"validation_error",
			"cwd is not known here",
		},
		{"no program", h.key, "sandbox_execute", nil, "validation_error", "code must be between 1 byte and 1 MB"},
		{
			"reserved", h.key, "sandbox_execute",
			map[string]any{"code": "1", "env_vars": map[string]any{"PATH": "/"}},
			"validation_error", "env_vars",
		},
		{
			"plan", free, "sandbox_execute",
			map[string]any{"code": "1", "timeout": 61},
			"rate_limited",
			"timeout is above the maximum of 60 seconds of the Free plan",
		},
		{"volume", h.key, "files_list", map[string]any{"source": "volume", "id": "v"}, "not_found", "no storage connection"},
		{
			"no file", h.key, "files_download",
			map[string]any{"source": "thread", "id": "t", "path": "a"},
			"not_found",
			"there is no file at this path",
		},
		{"no scope to execute", filesOnly, "sandbox_execute", map[string]any{"code": "1"}, "forbidden", "scope execute"},
		{
			"no scope to list", noFiles, "files_list",
			map[string]any{"source": "thread", "id": "t"},
			"forbidden",
			"scope files",
		},
		{
			"no scope to upload", noFiles, "files_upload",
			map[string]any{"source": "thread", "id": "t", "path": "a", "content_length": 1},
			"forbidden", "scope files",
		},
		{
			"no scope to download", noFiles, "files_download",
			map[string]any{"source": "thread", "id": "t", "path": "a"},
			"forbidden", "scope files",
		},
		{
			"scope to download", filesOnly, "files_download",
			map[string]any{"source": "thread", "id": "t", "path": "a"},
			"not_found", "no file",
		},
		{
			"outside", h.key, "files_upload",
			map[string]any{"source": "thread", "id": "t", "path": "../a", "content_length": 1},
			"validation_error", "path",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, result := callTool(t, h.in(t).modelClient(c.key, "", progress), c.tool, c.arguments)
			text := result.Content[0].(*sdk.TextContent).Text
			if !result.IsError || result.Meta["bullpen.run/error"] != c.code || !strings.Contains(text, c.message) {
				t.Errorf("%v %q", result.Meta, text)
			}
		})
	}
	// The same refusals as of the route: no worker, no capacity, none of it an error of the protocol.
	h.stub.refuse = func(*proto.Job) error {
		return &proto.Rejection{Reason: proto.RejectedConcurrency, Used: 5, Limit: 5}
	}
	_, result := callTool(t, h.modelClient(free, "", progress), "sandbox_execute", map[string]any{"code": "1"})
	if text := result.Content[0].(*sdk.TextContent).Text; text != "concurrent execution limit reached (5/5). Upgrade "+
		"to Pro for 100 concurrent executions." {
		t.Errorf("%q", text)
	}
	if result.Meta["bullpen.run/retry_after"] != 1.0 {
		t.Errorf("%v", result.Meta)
	}
	h.stub.refuse = nil
	// A plan without streaming has no progress.
	h.stub.finishAtOnce(proto.Exited(0), "x\n")
	params := &sdk.CallToolParams{Name: "sandbox_execute", Arguments: map[string]any{"code": "1"}}
	params.SetProgressToken("p")
	if result, err := h.modelClient(free, "", progress).CallTool(t.Context(), params); err != nil || result.IsError ||
		len(progress) > 0 {
		t.Errorf("%v %v, %d notifications", result, err, len(progress))
	}
}

func TestToolFiles(t *testing.T) {
	h := newHarness(t)
	session := h.modelClient(h.key, "", nil)
	up, result := callTool(t, session, "files_upload",
		map[string]any{"source": "thread", "id": "t", "path": "a.txt", "content_length": 2})
	if result.IsError {
		t.Fatalf("%v", result.Content[0])
	}
	path := func(signed map[string]any) string { return strings.TrimPrefix(signed["url"].(string), h.http.URL) }
	h.do("PUT", path(up), "hi", "Authorization", "").want(200, "")
	list, _ := callTool(t, session, "files_list", map[string]any{"source": "thread", "id": "t"})
	if files, _ := list["files"].([]any); len(files) != 1 || list["truncated"] != false {
		t.Errorf("%v", list)
	}
	down, _ := callTool(t, session, "files_download", map[string]any{"source": "thread", "id": "t", "path": "a.txt"})
	if got := h.do("GET", path(down), "", "Authorization", "").want(200, ""); string(got.body) != "hi" {
		t.Errorf("%q", got.body)
	}
}

func TestMCPRequests(t *testing.T) {
	h := newHarness(t)
	const list = `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`
	post := func(body string, headers ...string) *reply {
		return h.do("POST", "/mcp", body,
			append([]string{"Content-Type", "application/json", "Accept", "application/json, text/event-stream"}, headers...)...)
	}
	post(list).want(200, "").has("sandbox_execute")
	post(list, "Authorization", "Bearer "+proto.NewKeySecret("local")).want(401, "unauthorized")
	post(list, "Accept", "application/json").want(400, "validation_error")
	post(list, "Content-Type", "text/plain").want(415, "unsupported_media_type")
	post("["+list+"]").want(400, "validation_error")
	post("{").want(400, "validation_error", "malformed payload")
	post(`{"jsonrpc":"2.0","id":1,"method":"x"}`).want(400, "validation_error", "x")
	post(list, "Mcp-Protocol-Version", "1999-01-01").want(400, "validation_error", "Unsupported protocol version")
	post(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"x"}}`).want(200, "").has("unknown tool")
	listen := `{"jsonrpc":"2.0","id":1,"method":"subscriptions/listen",` +
		`"params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28",` +
		`"io.modelcontextprotocol/clientInfo":{"name":"c","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}}}`
	if a := post(listen, "Mcp-Protocol-Version", "2026-07-28", "Mcp-Method", "subscriptions/listen"); a.status != 404 {
		t.Errorf("%d %s", a.status, a.body)
	}
	h.do("GET", "/mcp", "").want(405, "method_not_allowed")
	h.do("DELETE", "/mcp", "").want(405, "method_not_allowed")

	h.server.PublicURL = "https://bullpen.example.com/sub"
	for origin, status := range map[string]int{
		h.http.URL: 200, "https://bullpen.example.com": 200, "https://example.com": 403, "null": 403,
		"http://127.0.0.1:1": 403, "http://localhost.example.com": 403,
	} {
		if a := post(list, "Origin", origin); a.status != status {
			t.Errorf("%s: %d", origin, a.status)
		}
	}
	// The name of a page that was made to resolve to this server is also the host of the request.
	r := h.request("POST", "/mcp", list, "Content-Type", "application/json", "Accept", "*/*", "Origin",
		"http://rebound.example.com")
	r.Host = "rebound.example.com"
	h.send(r).want(403, "forbidden")
	if web.Loopback("127.0.0.1.example.com") || !web.Loopback("127.0.0.1") || !web.Loopback("::1") ||
		!web.Loopback("LocalHost") {
		t.Error("loopback")
	}
}

// A draining server refuses programs, not other calls.
func TestToolsOfDrainingServer(t *testing.T) {
	h := newHarness(t)
	before := h.modelClient(h.key, "", nil)
	h.server.Drain()
	for name, session := range map[string]*sdk.ClientSession{
		"connected before": before, "connected after": h.modelClient(h.key, "", nil),
	} {
		t.Run(name, func(t *testing.T) {
			if tools, err := session.ListTools(t.Context(), nil); err != nil || len(tools.Tools) == 0 {
				t.Errorf("%v, %v", tools, err)
			}
			file := map[string]any{"source": "thread", "id": "t", "path": "a.txt", "content_length": 2}
			up, result := callTool(t, session, "files_upload", file)
			if result.IsError {
				t.Fatalf("%v", result.Content[0])
			}
			h.in(t).do("PUT", strings.TrimPrefix(up["url"].(string), h.http.URL), "hi", "Authorization", "").want(200, "")
			delete(file, "content_length")
			if _, result := callTool(t, session, "files_download", file); result.IsError {
				t.Errorf("%v", result.Content[0])
			}
			if list, _ := callTool(t, session, "files_list", map[string]any{"source": "thread", "id": "t"}); len(
				list["files"].([]any)) != 1 {
				t.Errorf("%v", list)
			}
			_, result = callTool(t, session, "sandbox_execute", map[string]any{"code": "1"})
			text := result.Content[0].(*sdk.TextContent).Text
			if !result.IsError || result.Meta["bullpen.run/error"] != "service_unavailable" ||
				result.Meta["bullpen.run/retry_after"] != 2.0 ||
				!strings.Contains(text, "shutting down") {
				t.Errorf("%v %q", result.Meta, text)
			}
		})
	}
	if len(h.stub.runs) != 0 {
		t.Errorf("%d executions", len(h.stub.runs))
	}
	call := `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"sandbox_execute","arguments":{"code":"1"}}}`
	a := h.do("POST", "/mcp", call, "Content-Type", "application/json", "Accept", "application/json, text/event-stream").
		want(200, "")
	if a.has("shutting down"); !a.closed {
		t.Error("the connection stays open")
	}
}
