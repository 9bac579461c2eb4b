package gateway

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// sandboxStub keeps sandboxes in memory. Their executions start at once, on a worker that answers for
// the guest if one is set.
type sandboxStub struct {
	*stub
	worker *httptest.Server // nil if no worker answers

	mu   sync.Mutex
	byID map[string]proto.LiveSandbox
	jobs map[proto.TraceID]*proto.Job
	ends map[proto.TraceID]chan struct{} // closed by Cancel
}

func newSandboxStub(q *stub) *sandboxStub {
	return &sandboxStub{
		stub: q, byID: map[string]proto.LiveSandbox{}, jobs: map[proto.TraceID]*proto.Job{},
		ends: map[proto.TraceID]chan struct{}{},
	}
}

// routes returns the routes of sandboxes of a server.
func (s *sandboxStub) routes(server *Server, jobs sandboxes.Admission) *sandboxes.Routes {
	return &sandboxes.Routes{Service: &sandboxes.Service{
		Core: &server.Core, Store: s, Admission: sandboxAdmission{jobs, s}, Jobs: s, Submissions: server.Submissions,
		Events:  noEvents{},
		Tunnels: &sandboxes.Tunnels{Endpoints: s}, TicketKey: &[32]byte{9},
	}}
}

// noEvents has no output of any execution.
type noEvents struct{}

func (noEvents) Follow(context.Context, string, proto.TraceID, int64) (web.Tail, error) {
	return nil, proto.ErrNotFound
}
func (noEvents) Last(context.Context, string, proto.TraceID, int) (int64, error) { return 0, nil }

// sandboxAdmission admits jobs, which start at once.
type sandboxAdmission struct {
	sandboxes.Admission
	stub *sandboxStub
}

func (a sandboxAdmission) Submit(_ context.Context, sub *proto.Submission) (proto.TraceID, error) {
	a.stub.mu.Lock()
	defer a.stub.mu.Unlock()
	if a.stub.refuse != nil {
		if err := a.stub.refuse(sub.Job); err != nil {
			return "", err
		}
	}
	a.stub.jobs[sub.Job.TraceID], a.stub.ends[sub.Job.TraceID] = sub.Job, make(chan struct{})
	return sub.Job.TraceID, nil
}

func (s *sandboxStub) Create(_ context.Context, x *proto.LiveSandbox, _ int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.byID[x.ID] = *x
	return nil
}

func (s *sandboxStub) Get(ctx context.Context, org, id string) (*proto.LiveSandbox, error) {
	x, err := s.Find(ctx, org, id)
	return &x, err
}

func (s *sandboxStub) Find(_ context.Context, org, id string) (proto.LiveSandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x, ok := s.byID[id]
	if !ok || x.Org != org {
		return x, proto.ErrNotFound
	}
	return x, nil
}

func (s *sandboxStub) Change(
	ctx context.Context, org, id string, change func(*proto.LiveSandbox) error,
) (proto.LiveSandbox, error) {
	x, err := s.Find(ctx, org, id)
	if err == nil {
		err = change(&x)
	}
	if err != nil {
		return x, err
	}
	return x, s.Create(ctx, &x, proto.NoLimit)
}

func (s *sandboxStub) Resume(
	ctx context.Context, org, id string, _ int, change func(*proto.LiveSandbox) error,
) (proto.LiveSandbox, error) {
	return s.Change(ctx, org, id, change)
}

func (s *sandboxStub) Settle(ctx context.Context, id string, rec *proto.Record) (proto.LiveSandbox, error) {
	return s.Change(ctx, rec.Org, id, func(x *proto.LiveSandbox) error {
		stopped := x.NextStop(rec)
		x.State, x.Reason, x.Stopping, x.StoppedAt = proto.SandboxEnded, stopped.Reason, nil, time.Now()
		if stopped.Stop == proto.SandboxPause {
			x.State = proto.SandboxPaused
		}
		return nil
	})
}

func (s *sandboxStub) Abandon(_ context.Context, x *proto.LiveSandbox, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byID, x.ID)
	return nil
}

func (s *sandboxStub) Page(
	org, _ string, limit int, keep func(*proto.LiveSandbox) bool,
) (page []proto.LiveSandbox, next string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.byID {
		if x.Org == org && keep(&x) && len(page) < limit {
			page = append(page, x)
		}
	}
	slices.SortFunc(page, func(a, b proto.LiveSandbox) int { return b.CreatedAt.Compare(a.CreatedAt) })
	return page, ""
}

func (s *sandboxStub) WaitStarted(_ context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	return &proto.Record{Meta: proto.Meta{Org: org, TraceID: id}, Status: proto.StatusRunning, Worker: "w"}, nil
}

func (s *sandboxStub) Wait(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error) {
	s.mu.Lock()
	end := s.ends[id]
	s.mu.Unlock()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-end:
		return &proto.Record{
			Meta: proto.Meta{Org: org, TraceID: id}, Status: proto.StatusCancelled, Attempt: 1, Result: new(proto.Cancelled()),
		}, nil
	}
}

func (s *sandboxStub) Cancel(_ context.Context, _ string, id proto.TraceID) (*proto.Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.ends[id])
	return nil, nil
}

func (s *sandboxStub) Endpoint(_ context.Context, worker string) (e proto.WorkerEndpoint, err error) {
	if s.worker == nil {
		return e, fmt.Errorf("find worker %s: %w", worker, proto.ErrNotFound)
	}
	return proto.WorkerEndpoint{
		Address: s.worker.Listener.Addr().String(), Certificate: sha256.Sum256(s.worker.Certificate().Raw),
	}, nil
}

// answers makes the worker answer requests to guests. Its own path and the health of a guest are
// answered before.
func (s *sandboxStub) answers(t *testing.T, guest http.HandlerFunc) {
	s.worker = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x, _ := s.Find(r.Context(), "acme", r.Header.Get(proto.HeaderSandbox))
		s.mu.Lock()
		job := s.jobs[x.Execution]
		s.mu.Unlock()
		switch {
		case job == nil || sha256.Sum256([]byte(r.Header.Get(proto.HeaderTicket))) != job.Live.TicketHash:
			w.WriteHeader(proto.StatusNoSandbox)
		case r.URL.Path == "/health" || r.URL.Path == proto.ExpiryPath:
			w.WriteHeader(http.StatusNoContent)
		default:
			guest(w, r)
		}
	}))
	t.Cleanup(s.worker.Close)
}

// withSandboxes returns a harness whose sandboxes have a guest.
func withSandboxes(t *testing.T, guest http.HandlerFunc) *harness {
	h := newHarness(t)
	h.sandboxes.answers(t, guest)
	return h
}

func noGuest(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "guest") }

func TestLiveSandbox(t *testing.T) {
	h := withSandboxes(t, noGuest)
	made := h.do("POST", "/v1/sandboxes", `{"name":"n","timeout":60,"idle_timeout":5,"on_timeout":"pause",
		"env_vars":{"A":"b"},"metadata":{"user":"7"}}`).want(201, "")
	x := made.json()
	id := x["id"].(string)
	if x["state"] != "running" || made.header.Get("Location") != "/v1/sandboxes/"+id || x["thread_id"] != nil ||
		x["idle_timeout"] != 5.0 || x["starts"] != 1.0 {
		t.Errorf("created %v", x)
	}
	path := "/v1/sandboxes/" + id
	h.do("POST", path+"/resume", "").want(409, "conflict")
	h.do("POST", path+"/extend", `{"timeout":120}`).want(200, "")
	h.do("POST", path+"/extend", `{"timeout":86401}`).want(429, "rate_limited")
	if paused := h.do("POST", path+"/pause", "").want(200, "").json(); paused["state"] != "paused" ||
		paused["reason"] != "paused" || paused["stopped_at"] == nil {
		t.Errorf("paused %v", paused)
	}
	h.do("POST", path+"/pause", "").want(409, "conflict")
	h.do("GET", path+guestPath("/process"), "").want(409, "conflict")
	if resumed := h.do("POST", path+"/resume", "").want(200, "").json(); resumed["state"] != "running" ||
		resumed["starts"] != 2.0 || resumed["trace_id"] == x["trace_id"] || resumed["reason"] != nil {
		t.Errorf("resumed %v", resumed)
	}
	for filter, want := range map[string]int{"": 1, "?state=running": 1, "?state=paused": 0, "?name=n": 1, "?name=m": 0} {
		if list := h.do("GET", "/v1/sandboxes"+filter, "").want(200, "").json()["sandboxes"].([]any); len(list) != want {
			t.Errorf("%s lists %d, want %d", filter, len(list), want)
		}
	}
	h.do("GET", "/v1/sandboxes?state=asleep", "").want(400, "validation_error")
	if ended := h.do("DELETE", path, "").want(200, "").json(); ended["state"] != "ended" || ended["reason"] != "killed" {
		t.Errorf("ended %v", ended)
	}
	h.do("DELETE", path, "").want(200, "")
	h.do("POST", path+"/resume", "").want(409, "conflict")
}

// The worker of a sandbox knows before the store that it has stopped.
func TestExtendWhileStopping(t *testing.T) {
	h := withSandboxes(t, noGuest)
	x := h.do("POST", "/v1/sandboxes", `{}`).want(201, "").json()
	delete(h.sandboxes.jobs, proto.TraceID(x["trace_id"].(string)))
	h.do("POST", "/v1/sandboxes/"+x["id"].(string)+"/extend", `{"timeout":120}`).want(409, "conflict")
}

func guestPath(path string) string { return "/guest" + path }

// Another organisation does not find a sandbox, nor reach its guest.
func TestLiveSandboxOfAnotherOrganisation(t *testing.T) {
	h := withSandboxes(t, noGuest)
	path := "/v1/sandboxes/" + h.do("POST", "/v1/sandboxes", `{}`).want(201, "").json()["id"].(string)
	other := "Bearer " + h.stub.addKey("other", "enterprise", asAdmin)
	for _, r := range [][2]string{
		{"GET", path},
		{"POST", path + "/extend"},
		{"POST", path + "/pause"},
		{"POST", path + "/resume"},
		{"DELETE", path},
		{"GET", path + guestPath("/health")},
		{"POST", path + guestPath("/process.Process/Start")},
	} {
		h.do(r[0], r[1], "", "Authorization", other).want(404, "not_found")
	}
	h.do("GET", "/v1/sandboxes/../keys", "").want(404, "not_found")
	h.do("GET", path+guestPath("/x"), "").want(200, "")
}

// The guest gets what the client sends, but no credentials; the client gets what the guest answers, but
// no cookies for this server.
func TestRequestsToGuests(t *testing.T) {
	h := withSandboxes(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Set-Cookie", "bullpen_session=forged")
		w.Header().Set("X-Guest", "1")
		user, _, _ := r.BasicAuth()
		_, _ = fmt.Fprintf(w, "%s %s %s user=%s key=%t ticket=%t", r.Method, r.URL.RequestURI(), body, user,
			strings.Contains(fmt.Sprint(r.Header), "secret-key"), r.Header.Get(proto.HeaderTicket) != "forged")
	})
	path := "/v1/sandboxes/" + h.do("POST", "/v1/sandboxes", `{}`).want(201, "").json()["id"].(string)
	reply := h.do("POST", path+guestPath("/process.Process/Start?a=b"), "body", "Bullpen-User", "root",
		proto.HeaderTicket, "forged", "X-Api-Key", "secret-key")
	const want = "POST /process.Process/Start?a=b body user=root key=false ticket=true"
	if got := string(reply.want(200, "").body); got != want {
		t.Errorf("the guest got %s", got)
	}
	if reply.header.Get("Set-Cookie") != "" || reply.header.Get("X-Guest") != "1" {
		t.Error("the headers of the guest's answer are wrong")
	}
}

// Browsers store no answers of guests: another person may use the browser after the session.
func TestAnswersOfGuestsAreNotStored(t *testing.T) {
	for _, of := range []string{"", "public, max-age=31536000, immutable"} {
		h := withSandboxes(t, func(w http.ResponseWriter, _ *http.Request) {
			if of != "" {
				w.Header().Set("Cache-Control", of)
			}
			w.Header().Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
		})
		path := "/v1/sandboxes/" + h.do("POST", "/v1/sandboxes", `{}`).want(201, "").json()["id"].(string)
		reply := h.do("GET", path+guestPath("/files?path=x"), "").want(200, "")
		if got := reply.header.Values("Cache-Control"); len(got) != 1 || got[0] != "private, no-store" {
			t.Errorf("the guest says %q: %q", of, got)
		}
	}
}

// A sandbox that the queue does not accept does not exist.
func TestRejectedLiveSandbox(t *testing.T) {
	h := withSandboxes(t, noGuest)
	h.sandboxes.refuse = func(*proto.Job) error { return &proto.Rejection{Reason: proto.RejectedUnavailable} }
	h.do("POST", "/v1/sandboxes", `{}`).want(503, "service_unavailable")
	if list := h.do("GET", "/v1/sandboxes", "").want(200, "").json()["sandboxes"].([]any); len(list) != 0 {
		t.Errorf("it is listed: %v", list)
	}
}

// A gateway that does not reach the worker says so.
func TestUnreachableWorker(t *testing.T) {
	h := newHarness(t)
	h.do("POST", "/v1/sandboxes", `{}`).want(504, "gateway_timeout")
}

var _ web.Pages[proto.LiveSandbox] = (*sandboxStub)(nil)
