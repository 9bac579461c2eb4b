package e2b

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-chi/chi/v5"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// apiKey and readKey are keys of the organisation acme; foreignKey is another's.
const (
	apiKey     = "e2b_0123456789abcdef0123456789abcdef01234567"
	readKey    = "e2b_1123456789abcdef0123456789abcdef01234567"
	foreignKey = "e2b_2123456789abcdef0123456789abcdef01234567"
)

// stub is the rest of the server. Its sandboxes start and stop at once.
type stub struct {
	stored   map[string]*proto.LiveSandbox
	profiles map[string]proto.Profile // by name; the empty one is the key's own
	refuse   error                    // of Create and Resume
	stopping int                      // how often the sandbox is read until its worker's stop is stored; 0 if it runs
	guest    http.Handler
	mu       sync.Mutex
	served   []sandboxes.Target
}

func (s *stub) Authenticate(secret string) (*proto.Key, bool) {
	key := proto.Key{ID: "key_1", Org: "acme", Scopes: proto.UserScopes()}
	switch secret {
	case apiKey:
	case readKey:
		key.Scopes = []proto.Scope{proto.ScopeRead}
	case foreignKey:
		key.Org = "other"
	default:
		return nil, false
	}
	return &key, true
}

func (s *stub) Used(_, _ string, _ time.Time)                {}
func (s *stub) LastUsed(_, _ string) (at time.Time, ok bool) { return at, false }
func (s *stub) KeyOfCookie(*http.Request) (*proto.Key, *proto.Session, error) {
	return nil, nil, web.Unauthorized()
}

func (s *stub) CheckCookie(*http.Request) (*proto.Key, error) { return nil, web.Unauthorized() }

func (s *stub) Entitlement(context.Context, *proto.Key) (proto.Entitlement, error) {
	return proto.Entitlement{}, nil
}
func (s *stub) QuotaUses(context.Context, string, proto.Quotas) []proto.QuotaUse { return nil }

func (s *stub) Append(_ context.Context, r api.AuditRecord) (api.AuditRecord, error) { return r, nil }

func (s *stub) ProfileFor(_ context.Context, _ *proto.Key, name string) (proto.Profile, error) {
	p, ok := s.profiles[name]
	if !ok {
		return p, &proto.Rejection{Reason: proto.RejectedProfile, Name: name}
	}
	return p, nil
}

func (s *stub) Get(_ context.Context, org, id string) (*proto.LiveSandbox, error) {
	x := s.stored[id]
	if x == nil || x.Org != org {
		return nil, fmt.Errorf("sandbox %s: %w", id, proto.ErrNotFound)
	}
	if s.stopping > 0 {
		if s.stopping--; s.stopping == 0 {
			x.State = proto.SandboxPaused
		}
	}
	return x, nil
}

func (s *stub) Find(ctx context.Context, org, id string) (proto.LiveSandbox, error) {
	x, err := s.Get(ctx, org, id)
	if err != nil {
		return proto.LiveSandbox{}, err
	}
	return *x, nil
}

func (s *stub) Page(
	org, _ string, _ int, keep func(*proto.LiveSandbox) bool,
) (page []proto.LiveSandbox, next string) {
	for _, x := range s.stored {
		if x.Org == org && keep(x) {
			page = append(page, *x)
		}
	}
	slices.SortFunc(page, func(a, b proto.LiveSandbox) int { return strings.Compare(a.ID, b.ID) })
	return page, ""
}

func (s *stub) Org(id string) string {
	if x := s.stored[id]; x != nil {
		return x.Org
	}
	return ""
}

func (s *stub) FindOrg(_ context.Context, id string) (string, error) {
	if org := s.Org(id); org != "" {
		return org, nil
	}
	return "", proto.ErrNotFound
}

func (s *stub) Create(_ context.Context, _ *web.Info, x *proto.LiveSandbox, _ proto.Caller) error {
	if s.refuse != nil {
		return s.refuse
	}
	x.State, x.StartedAt, x.Execution = proto.SandboxRunning, time.Now(), proto.NewTraceID()
	x.ExpiresAt = x.StartedAt.Add(time.Duration(x.Timeout))
	s.stored[x.ID] = x
	return nil
}

func (s *stub) Resume(
	ctx context.Context, _ *web.Info, id string, timeout int, c proto.Caller,
) (*proto.LiveSandbox, error) {
	x, err := s.Get(ctx, c.Key.Org, id)
	if err != nil {
		return nil, err
	}
	if x.State != proto.SandboxPaused {
		return nil, &sandboxes.ConflictError{State: x.State}
	}
	x.State, x.ExpiresAt = proto.SandboxRunning, time.Now().Add(time.Duration(timeout)*time.Second)
	return x, s.refuse
}

func (s *stub) Stop(
	ctx context.Context, id string, stop proto.SandboxStop, c proto.Caller,
) (*proto.LiveSandbox, error) {
	x, err := s.Get(ctx, c.Key.Org, id)
	if err != nil {
		return nil, err
	}
	switch {
	case stop == proto.SandboxKill:
		x.State = proto.SandboxEnded
	case x.State == proto.SandboxPaused:
		return nil, &sandboxes.ConflictError{State: x.State}
	default:
		x.State = proto.SandboxPaused
	}
	return x, nil
}

func (s *stub) Extend(ctx context.Context, id string, timeout *int, c proto.Caller) (*proto.LiveSandbox, error) {
	x, err := s.Get(ctx, c.Key.Org, id)
	if err != nil {
		return nil, err
	}
	if s.stopping > 0 {
		return nil, &sandboxes.ConflictError{State: proto.SandboxStopping}
	}
	if x.State != proto.SandboxRunning {
		return nil, &sandboxes.ConflictError{State: x.State}
	}
	x.ExpiresAt = time.Now().Add(time.Duration(*timeout) * time.Second)
	return x, nil
}

func (s *stub) Logs(_ context.Context, x *proto.LiveSandbox) (*api.SandboxLogs, error) {
	return &api.SandboxLogs{TraceID: x.Execution, Entries: []api.SandboxLogEntry{
		{Time: api.Time{Time: time.UnixMilli(1000)}, Type: "start", PID: 7, Command: "echo hello"},
		{Time: api.Time{Time: time.UnixMilli(2000)}, Type: "output", PID: 7, Stream: "stdout", Text: "hello\n"},
		{Time: api.Time{Time: time.UnixMilli(3000)}, Type: "end", PID: 7, ExitCode: new(0)},
	}}, nil
}

func (s *stub) Serve(w http.ResponseWriter, r *http.Request, to sandboxes.Target, unreachable func(error)) {
	x, err := s.Get(r.Context(), to.Org, to.ID)
	if err != nil || x.State != proto.SandboxRunning {
		unreachable(errors.Join(err, sandboxes.ErrNotReached))
		return
	}
	if err := http.NewResponseController(w).EnableFullDuplex(); err != nil { // as a tunnel does
		unreachable(err)
		return
	}
	s.mu.Lock()
	s.served = append(s.served, to)
	s.mu.Unlock()
	s.guest.ServeHTTP(w, r)
}

func (s *stub) Ping(context.Context, string, string) error { return s.refuse }

// harness is a server with the routes and the data plane, and one route of its own.
type harness struct {
	*stub
	t      *testing.T
	server *Server
	http   *httptest.Server
}

// native is the answer of the route that is not E2B's.
const native = "native"

func newHarness(t *testing.T, set ...func(*Server)) *harness {
	t.Helper()
	s := &stub{
		stored: map[string]*proto.LiveSandbox{}, profiles: map[string]proto.Profile{"": proto.DefaultProfile()},
		guest: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(r.Header)
		}),
	}
	core := &web.Core{
		Callers: s, Cookies: s, KeyUses: s, Entitlements: s, Auditor: s, Transfers: new(web.Transfers),
		Log: slog.New(slog.DiscardHandler), Tracer: noop.NewTracerProvider().Tracer(""), MaxBody: web.DefaultMaxBody,
		Memory: 1 << 30, CursorSecret: &[32]byte{8},
	}
	core.Init()
	h := &harness{stub: s, t: t, server: &Server{
		Core: core, Sandboxes: s, Guests: s, Store: s, Profiles: s, Tokens: testTokens(),
	}}
	for _, f := range set {
		f(h.server)
	}
	plane := &DataPlane{Core: core, Guests: s, Directory: s, Tokens: testTokens(), Domain: h.server.Domain}
	core.Surfaces = []web.Surface{h.server.Surface()}
	root := chi.NewRouter()
	root.Use(core.Observe)
	root.NotFound(core.Unknown(core.Handle(func(http.ResponseWriter, *web.Request) error { return web.ErrNoRoute })))
	root.HandleFunc("/v1/*", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, native) })
	for i := range core.Surfaces[0].Routes {
		row := core.Row(&core.Surfaces[0].Routes[i])
		core.Guard(root.With(core.Surfaces[0].Adopt), &row).Method(row.Method, row.Path, core.Answered(row.Handle))
	}
	h.http = httptest.NewServer(plane.Around(root))
	t.Cleanup(h.http.Close)
	return h
}

// add stores a sandbox.
func (h *harness) add(id string, change func(*proto.LiveSandbox)) *proto.LiveSandbox {
	now := time.Now()
	x := &proto.LiveSandbox{
		ID: id, Org: "acme", State: proto.SandboxRunning, OnTimeout: proto.SandboxKill, StartedAt: now,
		ExpiresAt: now.Add(time.Minute),
	}
	if change != nil {
		change(x)
	}
	h.stored[id] = x
	return x
}

// answer is an answer with its body.
type answer struct {
	status int
	header http.Header
	body   string
}

func (a *answer) json(t *testing.T) (fields map[string]any) {
	t.Helper()
	if err := json.Unmarshal([]byte(a.body), &fields); err != nil {
		t.Errorf("%v: %s", err, a.body)
	}
	return fields
}

// do sends a request with headers, given as names and values; Host sets the host.
func (h *harness) do(method, path, body string, headers ...string) answer {
	h.t.Helper()
	r, err := http.NewRequestWithContext(h.t.Context(), method, h.http.URL+path, strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		if headers[i] == "Host" {
			r.Host = headers[i+1]
		}
		r.Header.Add(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		h.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, string(text)}
}

// call sends a request with the API key.
func (h *harness) call(method, path, body string, headers ...string) answer {
	h.t.Helper()
	return h.do(method, path, body, append([]string{KeyHeader, apiKey}, headers...)...)
}
