package gateway

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// streamPath is the prefix of signed URLs of streams.
const streamPath = "/v1/streams/"

// streamURLOf asks for a URL for an execution and returns its path.
func (h *harness) streamURLOf(id proto.TraceID) string {
	h.t.Helper()
	var answer struct{ URL string }
	if err := json.Unmarshal(h.do("POST", "/v1/executions/"+string(id)+"/stream_url", "").want(200, "").body,
		&answer); err != nil {
		h.t.Fatal(err)
	}
	return strings.TrimPrefix(answer.URL, h.http.URL)
}

func TestStreamURL(t *testing.T) {
	h := newHarness(t)
	id := h.run()
	path := h.streamURLOf(id)
	whole := h.do("GET", "/v1/executions/"+string(id)+"/output", "", "Accept", web.TypeSSE).want(200, "")
	// No key, and what an EventSource sends; a stream whatever is accepted.
	for _, accept := range []string{web.TypeSSE, ""} {
		a := h.do("GET", path, "", "Authorization", "", "Accept", accept).want(200, "")
		if string(a.body) != string(whole.body) || a.header.Get("Content-Type") != web.TypeSSE || a.trace() != id {
			t.Errorf("%v %s", a.header, a.body)
		}
	}
	rest := h.do("GET", path, "", "Authorization", "", "Last-Event-ID", "3").want(200, "")
	if !strings.HasPrefix(string(rest.body), "id: 4\ndata: {\"type\":\"result\"") {
		t.Errorf("%s", rest.body)
	}
	// After the last event the response stops the browser, here as on the route with a key.
	for _, last := range []string{"4", "5"} {
		h.do("GET", path, "", "Authorization", "", "Last-Event-ID", last).want(204, "")
		h.do("GET", "/v1/executions/"+string(id)+"/output", "", "Accept", web.TypeSSE, "Last-Event-ID", last).want(204, "")
	}
	h.do("GET", path, "", "Last-Event-ID", "x").want(400, "validation_error", "Last-Event-ID")
	h.do("GET", path+"?after_seq=-1", "").want(400, "validation_error", "after_seq")
	h.do("HEAD", path, "", "Authorization", "").want(200, "")

	// An execution that runs has no last event yet.
	running := proto.TraceID("")
	h.stub.onSubmit = func(job *proto.Job) { running = job.TraceID; h.stub.start(job.TraceID) }
	h.execute(`{"code":"1"}`, "Prefer", "respond-async").want(202, "")
	live := h.begin(h.request("GET", h.streamURLOf(running), "", "Authorization", "", "Last-Event-ID", "1"))
	h.stub.finish(running, proto.Exited(0))
	if a := <-live; a.status != 200 || !strings.Contains(string(a.body), `"type":"result"`) {
		t.Errorf("%d %s", a.status, a.body)
	}

	// Other texts, signatures, methods, organisations.
	for _, bad := range []string{
		"x", path[len(streamPath):] + "x", strings.Replace(path[len(streamPath):], ".", "x.", 1), "a.b",
	} {
		h.do("GET", streamPath+bad, "").want(403, "forbidden", "not made by this server")
	}
	h.do("POST", path, "").want(405, "method_not_allowed")
	file := h.sign("upload", "a", 1)
	h.do("GET", streamPath+file[strings.LastIndex(file, "/")+1:], "").want(403, "forbidden", "not made by this server")
	h.do("GET", contentPath+path[len(streamPath):], "").want(403, "forbidden", "not made by this server")
	other := h.as(h.stub.addKey("beta", "enterprise", asUser))
	other.do("POST", "/v1/executions/"+string(id)+"/stream_url", "").want(404, "not_found")
}

func TestStreamURLEnds(t *testing.T) {
	h := newHarness(t)
	id := h.run()
	path := h.streamURLOf(id)
	now := time.Now()
	for i := range h.stub.keys {
		h.stub.keys[i].RevokedAt = &now
	}
	h.do("GET", path, "", "Authorization", "").want(403, "forbidden", "expired")
}

func TestCORS(t *testing.T) {
	h := newHarness(t)
	const page, other = "https://app.example.com", "https://other.example.com"
	h.do("OPTIONS", "/v1/executions", "", "Origin", page, "Access-Control-Request-Method", "GET").want(
		405, "method_not_allowed")
	if got := h.do("GET", "/v1/threads", "", "Origin", page).header; got.Get("Access-Control-Allow-Origin") != "" ||
		got.Get("Vary") != "" {
		t.Errorf("off, but %v", got)
	}
	h = newHarness(t, func(s *Server) { s.CORSOrigins = []string{page} })
	preflight := h.do("OPTIONS", "/v1/sandbox/execute", "", "Origin", page, "Authorization", "",
		"Access-Control-Request-Method", "POST",
		"Access-Control-Request-Headers", "authorization,content-type").want(204, "").header
	if preflight.Get("Access-Control-Allow-Origin") != page ||
		!strings.Contains(preflight.Get("Access-Control-Allow-Methods"), "POST") ||
		!strings.Contains(preflight.Get("Access-Control-Allow-Headers"), "Authorization") ||
		preflight.Get("Access-Control-Allow-Credentials") != "" ||
		!strings.Contains(strings.Join(preflight.Values("Vary"), ","), "Origin") {
		t.Errorf("preflight %v", preflight)
	}
	id := h.run()
	for _, path := range []string{"/v1/executions/" + string(id), h.streamURLOf(id), "/none"} { // errors can be read, too
		got := h.do("GET", path, "", "Origin", page).header
		if got.Get("Access-Control-Allow-Origin") != page ||
			!strings.Contains(got.Get("Access-Control-Expose-Headers"), "X-Trace-Id") {
			t.Errorf("%s: %v", path, got)
		}
	}
	// Another page gets nothing, and a cache may not mix the two.
	got := h.do("GET", "/v1/executions/"+string(id), "", "Origin", other).header
	if got.Get("Access-Control-Allow-Origin") != "" || got.Get("Vary") != "Origin" {
		t.Errorf("%v", got)
	}
	h.do("OPTIONS", "/v1/executions", "", "Origin", other, "Access-Control-Request-Method", "GET").want(
		405, "method_not_allowed")
	h.do("POST", "/mcp", `{"jsonrpc":"2.0","id":1,"method":"ping"}`, "Content-Type", web.TypeJSON, "Accept", "*/*",
		"Origin", page).want(200, "")
	h.do("POST", "/mcp", `{"jsonrpc":"2.0","id":1,"method":"ping"}`, "Content-Type", web.TypeJSON, "Accept", "*/*",
		"Origin", other).want(403, "forbidden")
}
