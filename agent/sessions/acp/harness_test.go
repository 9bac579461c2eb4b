package acp_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-chi/chi/v5"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/agent/sessions/acp"
	"github.com/bullpen-run/bullpen/agent/sessions/sessionstest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/agentlogs"
	"github.com/bullpen-run/bullpen/scheduler/agentsessions"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// world is a store with a runner of sessions.
type world struct {
	t     *testing.T
	store *store.Store
	*sessionstest.World
	agent *agent
	stop  func() // ends the runner
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newWorld(t *testing.T) *world {
	t.Helper()
	st := storetest.Open(t, storetest.Server(t))
	a := &agent{gate: make(chan struct{})}
	w := &world{t: t, store: st, agent: a, World: sessionstest.New(t, st, a)}
	w.stop = w.Lead()
	return w
}

// logs adapts logs to the interface of package acp.
type logs struct{ *agentlogs.Logs }

func (l logs) Follow(org, id string) (sessions.Follower, error) { return l.Logs.Follow(org, id) }

// host is the host of all requests.
type host struct {
	r        *http.Request
	refused  error           // of AllowStored
	draining context.Context // ends when the gateway begins to shut down
	reads    *atomic.Int64
}

func (h *host) UntilDrain(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(h.draining, cancel)
	return ctx, func() { stop(); cancel() }
}

func (*host) Caller() (org, key string) { return sessionstest.Org, "key" }

// maxBody is the limit of bodies.
const maxBody = 2 << 20

func (h *host) ReadBody(w http.ResponseWriter, decode func([]byte) error) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, h.r.Body, maxBody))
	if err != nil {
		return api.Errorf(api.CodePayloadTooLarge, "the body is too large")
	}
	return decode(body)
}

func (h *host) AllowStored(context.Context, bool) error { return h.refused }

func (*host) Profile(context.Context) (proto.Profile, error) { return proto.DefaultProfile(), nil }

func (*host) CheckCaller() error { return nil }

func (h *host) LimitReads(ctx context.Context) (limited context.Context, release func()) {
	l := &reads{all: h.reads}
	return proto.WithReadLimit(ctx, l), l.release
}

// reads limits reads of the store as a gateway does.
type reads struct {
	all  *atomic.Int64 // the bytes that are reserved in a gateway
	mu   sync.Mutex
	used int64
}

func (*reads) BeginRead(context.Context) (end func(), err error) { return func() {}, nil }

func (l *reads) ReserveRead(n int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.used += int64(n)
	l.all.Add(int64(n))
	return nil
}

func (l *reads) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all.Add(-l.used)
	l.used = 0
}

func (*host) RemoveHome(context.Context, string) error { return nil }

// gateway is a gateway of a world, with nothing in memory that others share.
type gateway struct {
	*httptest.Server
	t     *testing.T
	acp   *acp.Server
	drain context.CancelFunc // begins to shut down
	leave context.CancelFunc // ends all requests, as a gateway that leaves
	mu    sync.Mutex
	reads atomic.Int64 // the bytes that are reserved for reads of the store
	// refused is the error of AllowStored, and rejected that of all requests.
	refused  error
	rejected *api.Error
}

func (w *world) gateway(wait time.Duration) *gateway {
	w.t.Helper()
	configs, err := agentsessions.OpenConfigs(w.t.Context(), w.store, storetest.Log(w.t))
	if err != nil {
		w.t.Fatal(err)
	}
	draining, drain := context.WithCancel(context.Background())
	g := &gateway{t: w.t, drain: drain}
	g.acp = &acp.Server{
		Sessions: w.Service, Logs: logs{&w.Stored.Logs}, Configs: configs, Version: "1.0", Wait: wait,
		Log: storetest.Log(w.t),
		Host: func(r *http.Request) acp.Host {
			g.mu.Lock()
			defer g.mu.Unlock()
			return &host{r, g.refused, draining, &g.reads}
		},
	}
	ctx, cancel := context.WithCancel(context.Background())
	g.leave = cancel
	router := chi.NewRouter()
	for _, route := range g.acp.Routes(false) {
		router.Method(route.Method, route.Path, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			g.mu.Lock()
			rejected := g.rejected
			g.mu.Unlock()
			if rejected != nil {
				g.acp.WriteError(rw, r, rejected)
				return
			}
			connected, end := context.WithCancel(r.Context())
			defer end()
			defer context.AfterFunc(ctx, end)()
			limited, release := (&host{reads: &g.reads}).LimitReads(connected)
			defer release()
			if err := route.Handle(rw, r.WithContext(limited)); err != nil {
				g.acp.WriteError(rw, r, api.NewError(err))
			}
		}))
	}
	g.Server = httptest.NewServer(router)
	w.t.Cleanup(func() { drain(); cancel(); g.Close() })
	return g
}

func (g *gateway) reject(refused error, rejected *api.Error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.refused, g.rejected = refused, rejected
}

// do sends a request, whose headers are pairs.
func (g *gateway) do(method, path, body string, headers ...string) (*http.Response, string) {
	g.t.Helper()
	req, err := http.NewRequestWithContext(g.t.Context(), method, g.URL+acp.Prefix+path, strings.NewReader(body))
	if err != nil {
		g.t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		g.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	return resp, string(text)
}

// rpc is a message of JSON-RPC.
type rpc struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params struct {
		SessionID string `json:"sessionId"`
		Update    struct {
			Kind    string `json:"sessionUpdate"`
			Content json.RawMessage
			CallID  string `json:"toolCallId"`
			Status  string `json:"status"`
		} `json:"update"`
		Options []struct {
			ID   string `json:"optionId"`
			Name string `json:"name"`
			Kind string `json:"kind"`
		} `json:"options"`
	} `json:"params"`
	Result map[string]any `json:"result"`
	Error  *struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	} `json:"error"`
}

// String returns what matters of a message.
func (m *rpc) String() string {
	u := m.Params.Update
	switch {
	case m.Method == "session/update" && u.CallID != "":
		return u.Kind + " " + u.CallID + " " + u.Status
	case m.Method == "session/update":
		var block struct{ Text, URI string }
		_ = json.Unmarshal(u.Content, &block)
		return u.Kind + " " + block.Text + block.URI
	case m.Method != "":
		text := m.Method
		for _, o := range m.Params.Options {
			text += " " + o.ID + "=" + o.Name
		}
		return text
	case m.Error != nil:
		return fmt.Sprintf("%s: error %d %s", m.ID, m.Error.Code, m.Error.Message)
	case m.Result["stopReason"] != nil:
		return fmt.Sprintf("%s: %s", m.ID, m.Result["stopReason"])
	default:
		return fmt.Sprintf("%s: result", m.ID)
	}
}

func decode(t *testing.T, text string) *rpc {
	t.Helper()
	m := new(rpc)
	if err := json.Unmarshal([]byte(text), m); err != nil {
		t.Fatalf("%v in %q", err, text)
	}
	return m
}

// client is a client with a server.
type client struct {
	*gateway
	path    string
	session string
}

// connect initialises a server of the test agent, and creates a session.
func (g *gateway) connect(server string) *client {
	g.t.Helper()
	c := &client{gateway: g, path: "/v1/acp/" + server}
	resp, text := g.do(http.MethodPost, c.path+"?agent=test", `{"jsonrpc":"2.0","id":0,"method":"initialize","params":{}}`)
	if resp.StatusCode != http.StatusOK || decode(g.t, text).Result["protocolVersion"] != 1.0 {
		g.t.Fatalf("initialize: %s %s", resp.Status, text)
	}
	c.newSession(1)
	return c
}

func (c *client) newSession(id int) {
	c.t.Helper()
	m := c.call(id, "session/new", `{"cwd":"/work","mcpServers":[]}`)
	c.session, _ = m.Result["sessionId"].(string)
	if c.session == "" {
		c.t.Fatalf("session/new: %s", m)
	}
}

// call sends a request, and returns the response, which comes at once.
func (c *client) call(id int, method, params string) *rpc {
	c.t.Helper()
	resp, text := c.post(id, method, params)
	if resp.StatusCode != http.StatusOK {
		c.t.Fatalf("%s: %s %s", method, resp.Status, text)
	}
	return decode(c.t, text)
}

func (c *client) post(id int, method, params string) (*http.Response, string) {
	c.t.Helper()
	return c.do(http.MethodPost, c.path,
		fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":%q,"params":%s}`, id, method, params))
}

func (c *client) prompt(id int, text string) (*http.Response, string) {
	c.t.Helper()
	return c.post(id, "session/prompt", c.promptParams(text))
}

func (c *client) promptParams(text string) string {
	return fmt.Sprintf(`{"sessionId":%q,"prompt":[{"type":"text","text":%q}]}`, c.session, text)
}

// stream is an open stream of server-sent events.
type stream struct {
	t      *testing.T
	lines  *bufio.Reader
	id     string // of the last message
	cancel context.CancelFunc
}

// open opens the stream after the message with an id, empty for none.
func (c *client) open(last string) *stream {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	c.t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL+acp.Prefix+c.path, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	req.Header.Set("Accept", "text/event-stream")
	if last != "" {
		req.Header.Set("Last-Event-ID", last)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = resp.Body.Close() })
	if kind := resp.Header.Get("Content-Type"); resp.StatusCode != http.StatusOK || kind != "text/event-stream" {
		c.t.Fatalf("stream: %s %s", resp.Status, kind)
	}
	return &stream{t: c.t, lines: bufio.NewReader(resp.Body), cancel: cancel}
}

// next returns the next message; nil at a clean end.
func (s *stream) next() *rpc {
	s.t.Helper()
	for {
		line, err := s.lines.ReadString('\n')
		if err == io.EOF {
			return nil
		}
		if err != nil {
			s.t.Fatal(err)
		}
		if id, ok := strings.CutPrefix(line, "id: "); ok {
			s.id = strings.TrimSpace(id)
		}
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			return decode(s.t, data)
		}
	}
}

// until returns the messages up to the first that contains a text, one a line.
func (s *stream) until(last string) (text string) {
	s.t.Helper()
	for {
		m := s.next()
		if m == nil {
			s.t.Fatalf("the stream ended before %q: %s", last, text)
		}
		if text += m.String() + "\n"; strings.Contains(m.String(), last) {
			return text
		}
	}
}

// rest returns the messages up to the end of the stream.
func (s *stream) rest() (text string) {
	s.t.Helper()
	for m := s.next(); m != nil; m = s.next() {
		text += m.String() + "\n"
	}
	return text
}

// want fails the test unless a text is as expected.
func want(t *testing.T, got, expected string) {
	t.Helper()
	if expected = strings.ReplaceAll(strings.TrimSpace(expected), "\t", ""); strings.TrimSpace(got) != expected {
		t.Errorf("got:\n%s\nwant:\n%s", got, expected)
	}
}

// agent is an agent whose turns are what the message says.
type agent struct {
	gate chan struct{} // a turn "gate" waits for a value
}

func (*agent) Info() *sessions.Info {
	return &sessions.Info{
		ID: "test", DefaultModel: "small", PermissionModes: []string{"default", "bypass"},
		Modes:  []sessions.Mode{{ID: "build", Name: "Build"}, {ID: "plan", Name: "Plan"}},
		Models: []sessions.Model{{ID: "small"}, {ID: "large", Variants: []string{"low", "high"}}},
	}
}

func (a *agent) Start(_ context.Context, s *sessions.Start) (sessions.Conversation, error) {
	c := &conversation{agent: a, start: s, answers: make(chan *sessions.Answer, 10), stop: make(chan struct{}, 1)}
	if s.Running {
		c.resumed = true
		c.work.Go(func() { c.wait(s.Turns, "resumed") })
	}
	return c, nil
}

type conversation struct {
	agent   *agent
	start   *sessions.Start
	answers chan *sessions.Answer
	stop    chan struct{}
	resumed bool
	work    sync.WaitGroup
	once    sync.Once
}

func (c *conversation) Resumed() bool { return c.resumed }

func (c *conversation) Answer(_ context.Context, a *sessions.Answer) error {
	c.answers <- a
	return nil
}

func (c *conversation) Interrupt(context.Context) error {
	c.stop <- struct{}{}
	return nil
}

func (c *conversation) Close() {
	c.once.Do(func() { close(c.stop) })
	c.work.Wait()
}

func (c *conversation) Send(_ context.Context, m *sessions.Message) error {
	c.work.Go(func() { c.play(m) })
	return nil
}

func (c *conversation) report(list ...sessions.Native) {
	for _, n := range list {
		if c.start.Report(n) != nil {
			return
		}
	}
}

func (c *conversation) play(m *sessions.Message) {
	id := fmt.Sprintf("item_%d", m.Number)
	command, rest, _ := strings.Cut(m.Text, " ")
	switch command {
	case "say":
		c.say(id, rest)
	case "think":
		c.report(sessions.Native{Type: sessions.ItemCompleted, Data: item(id, sessions.KindMessage, sessions.RoleAssistant,
			sessions.Part{Type: sessions.PartReasoning, Text: rest, Visibility: "public"}, sessions.Text("done"))})
	case "tool":
		c.report(
			sessions.Native{Type: sessions.ItemCompleted, Data: item(id, sessions.KindToolCall, sessions.RoleAssistant,
				sessions.Part{Type: sessions.PartToolCall, Name: "bash", Arguments: `{"command":"ls"}`, CallID: "call"})},
			sessions.Native{Type: sessions.ItemCompleted, Data: item(id+"r", sessions.KindToolResult, sessions.RoleTool,
				sessions.Part{Type: sessions.PartToolResult, CallID: "call", Output: "file"})},
			sessions.Native{Type: sessions.ItemCompleted, Data: item(id+"s", sessions.KindToolCall, sessions.RoleAssistant,
				sessions.Part{Type: sessions.PartToolCall, Name: "bash", Arguments: `{"command":"ps"}`, CallID: "open"})})
	case "error":
		c.report(sessions.Native{Type: sessions.ErrorEvent, Data: sessions.Failure{Message: rest}})
	case "permission":
		c.report(sessions.Native{Type: sessions.PermissionRequested, Data: sessions.Permission{
			ID: id, Action: "bash", Metadata: json.RawMessage(`{"command":"ls"}`),
		}})
	case "question":
		c.report(sessions.Native{Type: sessions.QuestionRequested, Data: sessions.Question{
			ID: id, Prompt: "Color?", Options: []string{"Red", "Blue"}, Status: sessions.QuestionPending,
		}})
	case "exit":
		c.report(sessions.Native{Type: sessions.SessionEnded, Data: sessions.Ended{
			Reason: sessions.EndError, TerminatedBy: sessions.FromAgent, ExitCode: new(3),
		}})
		return
	}
	switch command {
	case "permission", "question", "hang", "gate":
		c.wait(m.Number, id)
	default:
		c.report(sessions.Native{Type: sessions.TurnEnded})
	}
}

func (c *conversation) say(id, text string) {
	for word := range strings.FieldsSeq(text) {
		c.report(sessions.Native{Type: sessions.ItemDelta, Data: sessions.Delta{NativeItemID: &id, Delta: word}})
	}
	c.report(sessions.Native{Type: sessions.ItemCompleted, Data: item(id, sessions.KindMessage, sessions.RoleAssistant,
		sessions.Text(text))})
}

// wait ends a turn after an answer, a value of the gate, or an interruption.
func (c *conversation) wait(number int64, id string) {
	select {
	case a := <-c.answers:
		var text string
		if a.Permission != nil {
			text = string(a.Permission.Status)
		} else {
			text = fmt.Sprint(a.Question.Status, a.Answers)
		}
		c.say(fmt.Sprintf("%s_answer_%d", id, number), strings.ReplaceAll(text, " ", ""))
	case <-c.agent.gate:
		c.say(fmt.Sprintf("%s_gate_%d", id, number), "opened")
	case <-c.stop:
	}
	c.report(sessions.Native{Type: sessions.TurnEnded})
}

func item(id string, kind sessions.ItemKind, role sessions.Role, parts ...sessions.Part) sessions.ItemData {
	return sessions.ItemData{Item: sessions.Item{
		NativeID: &id, Kind: kind, Role: &role, Content: parts, Status: sessions.Completed,
	}}
}
