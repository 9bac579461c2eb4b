package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/gateway/agents"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// maxAgentTimeout is the longest time that a tool call of an agent may run, in seconds.
	maxAgentTimeout = 300
	// maxUploadFields is the number of parts of the form of an upload that are no file.
	maxUploadFields = 16
)

// withSurface adds a surface whose routes answer with what run returns.
func withSurface(run func(a *agents.Agent, w http.ResponseWriter, r *http.Request) error) func(*Server) {
	return func(s *Server) {
		handle := func(w http.ResponseWriter, r *http.Request) error { return run(s.Agents().ForRequest(r), w, r) }
		s.Surfaces = []web.Surface{{
			KeyHeader: "X-Other-Key", Prefixes: []string{"/other/"},
			WriteError: func(w http.ResponseWriter, _ *http.Request, e *api.Error) {
				w.WriteHeader(e.Code.Status())
				// the client may be gone
				_, _ = io.WriteString(w, strings.TrimSuffix("other: "+string(e.Code)+" "+string(e.Reason), " "))
			},
			Routes: []web.SurfaceRow{
				{
					Route:  api.Route{Method: http.MethodPost, Path: "/other/run", ID: "run", Scope: proto.ScopeExecute, Starts: true},
					Handle: handle,
				},
				{
					Route:  api.Route{Method: http.MethodGet, Path: "/other/files", ID: "files", Scope: proto.ScopeFiles},
					Handle: handle,
				},
			},
		}}
	}
}

func TestSurfacesHaveTheirOwnKeysAndErrors(t *testing.T) {
	h := newHarness(t, withSurface(func(_ *agents.Agent, w http.ResponseWriter, _ *http.Request) error {
		_, err := io.WriteString(w, "done")
		return err
	}))
	runs := h.stub.addKey("acme", "", proto.Key{Scopes: []proto.Scope{proto.ScopeExecute}})
	for _, c := range []struct {
		method, path, key string
		headers           []string
		status            int
		body              string
	}{
		{http.MethodPost, "/other/run", h.key, nil, http.StatusOK, "done"},
		{http.MethodPost, "/other/run", "", []string{"X-Other-Key", h.key}, http.StatusOK, "done"},
		{
			http.MethodPost, "/other/run", "",
			[]string{"X-Other-Key", "sk-nobody"},
			http.StatusUnauthorized,
			"other: unauthorized",
		},
		{http.MethodPost, "/other/run", "", nil, http.StatusUnauthorized, "other: unauthorized"},
		{
			http.MethodPost, "/other/run", "",
			[]string{"Cookie", "bullpen_session=x"},
			http.StatusUnauthorized,
			"other: unauthorized",
		},
		{http.MethodPost, "/other/run", "", []string{"X-Other-Key", runs}, http.StatusOK, "done"},
		{http.MethodGet, "/other/files", "", []string{"X-Other-Key", runs}, http.StatusForbidden, "other: forbidden"},
		{http.MethodGet, "/v1/threads", "", []string{"X-Other-Key", h.key}, http.StatusUnauthorized, "{"},
		{http.MethodGet, "/other/nothing", "", nil, http.StatusNotFound, "other: not_found"},
		{http.MethodDelete, "/other/run", h.key, nil, http.StatusMethodNotAllowed, "other: method_not_allowed"},
		{http.MethodGet, "/others/nothing", "", nil, http.StatusNotFound, "{"},
	} {
		headers := append([]string{"Authorization", ""}, c.headers...)
		if c.key != "" {
			headers[1] = "Bearer " + c.key
		}
		if r := h.do(c.method, c.path, "", headers...); r.status != c.status || !strings.HasPrefix(string(r.body), c.body) {
			t.Errorf("%s %v: %d %s", c.path, c.headers, r.status, r.body)
		}
	}
	h.server.Drain()
	if r := h.do(http.MethodPost, "/other/run", ""); r.status != http.StatusServiceUnavailable ||
		string(r.body) != "other: service_unavailable" {
		t.Errorf("while draining: %d %s", r.status, r.body)
	}
	if r := h.do(http.MethodGet, "/other/files", ""); r.status != http.StatusOK {
		t.Errorf("while draining: %d %s", r.status, r.body)
	}
}

// A tool call is an execution with the limits of its key, and ends when its client leaves.
func TestAgentsExecute(t *testing.T) {
	ended := make(chan error, 1)
	h := newHarness(t, withSurface(func(a *agents.Agent, w http.ResponseWriter, r *http.Request) error {
		// only then is it noticed that a client leaves
		if err := a.ReadBody(w, func([]byte) error { return nil }); err != nil {
			return err
		}
		record, err := a.Execute(r.Context(), proto.NewTraceID(), &api.ExecuteRequest{
			Code: "1", Language: proto.Python, MaxAttempts: 1, Metadata: map[string]string{"agent_run": "r"},
		})
		ended <- err
		if err != nil {
			return err
		}
		_, err = io.WriteString(w, record.Result.Stdout)
		return err
	}))
	free := h.stub.addKey("small", "free", asUser)
	h.stub.onSubmit = func(job *proto.Job) {
		if job.Metadata["agent_run"] != "r" || job.Timeout < 1 || job.Timeout > maxAgentTimeout ||
			job.Mode != proto.ModeInline {
			t.Errorf("%+v", job.Meta)
		}
		h.stub.start(job.TraceID)
		r := proto.Exited(0)
		r.Stdout = "42"
		h.stub.finish(job.TraceID, r)
	}
	for _, key := range []string{h.key, free} {
		if r := h.do(http.MethodPost, "/other/run", "{}", "Authorization", "Bearer "+key); string(r.body) != "42" ||
			<-ended != nil {
			t.Errorf("%d %s", r.status, r.body)
		}
	}
	h.stub.refuse = func(*proto.Job) error {
		return &proto.Rejection{Reason: proto.RejectedConcurrency, Used: 1, Limit: 1}
	}
	if r := h.do(http.MethodPost, "/other/run", "{}"); r.status != http.StatusTooManyRequests ||
		r.header.Get("Retry-After") == "" || <-ended == nil {
		t.Errorf("%d %s", r.status, r.body)
	}
	h.stub.refuse = nil
	for len(h.stub.submitted) > 0 {
		<-h.stub.submitted
	}

	h.stub.onSubmit = func(job *proto.Job) { h.stub.start(job.TraceID) }
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		if resp, err := h.client.Do(h.request(http.MethodPost, "/other/run", "{}").WithContext(ctx)); err == nil {
			_ = resp.Body.Close()
		}
	}()
	id := <-h.stub.submitted
	cancel()
	if err := <-ended; err == nil {
		t.Error("no error")
	}
	if rec := h.stub.record(id); !rec.Cancelling && rec.Status != proto.StatusCancelled {
		t.Errorf("%+v", rec)
	}
}

// The wait for a slot is not part of a call's timeout, and a container in use is told of in the words of those who
// know containers alone.
func TestAgentsWaitForSlots(t *testing.T) {
	var executed error
	h := newHarness(t, withSurface(func(a *agents.Agent, _ http.ResponseWriter, r *http.Request) error {
		_, executed = a.Execute(r.Context(), proto.NewTraceID(),
			&api.ExecuteRequest{Code: "1", Language: proto.Python, MaxAttempts: 1, Timeout: 2, ThreadID: "cntr_1"})
		return executed
	}))
	h.server.QueueWait = time.Minute
	h.remount()
	h.stub.onSubmit = func(job *proto.Job) {
		if wait := job.QueueDeadline.Sub(job.CreatedAt); wait != time.Minute || job.Timeout != 2 {
			t.Errorf("the call waits for %v and has %d s", wait, job.Timeout)
		}
		h.stub.start(job.TraceID)
		h.stub.finish(job.TraceID, proto.Exited(0))
	}
	if h.do(http.MethodPost, "/other/run", ""); executed != nil {
		t.Error(executed)
	}
	other := proto.NewTraceID()
	for _, container := range h.threads.heads {
		container.Holder = other
	}
	h.do(http.MethodPost, "/other/run", "")
	known, ok := errors.AsType[*api.Error](executed)
	if !ok || known.Code != api.CodeConflict || !strings.Contains(known.Message, "the container is in use") ||
		strings.Contains(known.Message, "thread") || strings.Contains(known.Message, string(other)) {
		t.Errorf("got %v", executed)
	}
}

// A client that repeats a request repeats its calls. An error after one says so, whatever it is, and
// has no Retry-After; an error that is the request's own fault is not repeated anyway.
func TestErrorsAfterCalls(t *testing.T) {
	var failure error
	calls := true
	h := newHarness(t, withSurface(func(a *agents.Agent, _ http.ResponseWriter, r *http.Request) error {
		if !calls {
			return failure
		}
		if _, err := a.Execute(r.Context(), proto.NewTraceID(),
			&api.ExecuteRequest{Code: "1", Language: proto.Python, MaxAttempts: 1}); err != nil {
			return err
		}
		return failure
	}))
	h.stub.onSubmit = func(job *proto.Job) {
		<-h.stub.submitted
		h.stub.start(job.TraceID)
		h.stub.finish(job.TraceID, proto.Exited(0))
	}
	limited := api.Errorf(api.CodeRateLimited, "slow")
	limited.RetryAfter = 7
	for _, c := range []struct {
		failure    error
		calls      bool
		body       string
		retryAfter string
	}{
		{errors.New("broken"), true, "other: internal calls_carried_out", ""},
		{limited, true, "other: rate_limited calls_carried_out", ""},
		{limited, false, "other: rate_limited", "7"},
		{api.Unavailable(3, "full"), true, "other: service_unavailable calls_carried_out", ""},
		{proto.ErrConflict, true, "other: conflict calls_carried_out", ""},
		{api.Errorf(api.CodeGatewayTimeout, "late"), true, "other: gateway_timeout calls_carried_out", ""},
		{proto.FieldErrorf("model", "is long"), true, "other: validation_error", ""},
		{errors.New("broken"), false, "other: internal", ""},
	} {
		failure, calls = c.failure, c.calls
		if r := h.do(http.MethodPost, "/other/run", "{}"); string(r.body) != c.body ||
			r.header.Get("Retry-After") != c.retryAfter {
			t.Errorf("%v, calls %t: %s, Retry-After %q", c.failure, c.calls, r.body, r.header.Get("Retry-After"))
		}
	}
}

// At Leave, a run ends as if its client had left, and the client is told to ask another server. The run
// can tell both apart.
func TestSurfacesLeave(t *testing.T) {
	begun, causes := make(chan struct{}), make(chan error, 1)
	h := newHarness(t, withSurface(func(_ *agents.Agent, _ http.ResponseWriter, r *http.Request) error {
		begun <- struct{}{}
		<-r.Context().Done()
		causes <- context.Cause(r.Context())
		return r.Context().Err()
	}))
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-begun
		cancel()
	}()
	if resp, err := h.client.Do(h.request(http.MethodPost, "/other/run", "").WithContext(ctx)); err == nil {
		_ = resp.Body.Close()
		t.Errorf("answered with %d", resp.StatusCode)
	}
	if cause := <-causes; !errors.Is(cause, context.Canceled) {
		t.Errorf("the client has left: %v", cause)
	}
	go func() {
		<-begun
		h.server.Leave()
	}()
	if r := h.do(http.MethodPost, "/other/run", ""); r.status != http.StatusServiceUnavailable {
		t.Errorf("%d %s", r.status, r.body)
	}
	if cause := <-causes; !errors.Is(cause, web.ErrDraining) {
		t.Errorf("the server leaves: %v", cause)
	}
}

// What a run keeps is part of the memory of its request.
func TestAgentsReserveMemory(t *testing.T) {
	h := newHarness(t, withSurface(func(a *agents.Agent, w http.ResponseWriter, _ *http.Request) error {
		for range 1000 {
			if err := a.Reserve(1 << 20); err != nil {
				return err
			}
		}
		_, err := io.WriteString(w, "kept")
		return err
	}))
	if r := h.do(http.MethodPost, "/other/run", ""); string(r.body) != "other: service_unavailable" {
		t.Errorf("%s", r.body)
	}
	h.checkNothingHeld()
}

// Contents that agents read are transfers. A copy is one, so that copies do not wait for each other.
func TestAgentsTransfer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		h := newHarness(t, withSurface(func(a *agents.Agent, w http.ResponseWriter, r *http.Request) error {
			content, err := a.OpenFile(r.Context(), "t", "a")
			if err != nil {
				return err
			}
			body, err := content.Read(r.Context(), 0, content.Size)
			if err != nil {
				return err
			}
			defer func() { _ = body.Close() }()
			<-release
			if err := a.PutFile(r.Context(), "t", "b", content.Size, body); err != nil {
				return err
			}
			_, err = io.WriteString(w, "copied")
			return err
		}))
		h.threads.files["acme/container=t/a"] = []byte("hello")
		h.addThread("acme", "container=t")
		var answers []<-chan *reply
		for range web.MaxTransfers {
			answers = append(answers, h.begin(h.request(http.MethodGet, "/other/files", "")))
		}
		synctest.Wait()
		start := time.Now()
		late := h.send(h.request(http.MethodGet, "/other/files", ""))
		if string(late.body) != "other: rate_limited" || time.Since(start) != web.TransferWait {
			t.Errorf("%s after %s", late.body, time.Since(start))
		}
		close(release)
		for _, answer := range answers {
			if r := <-answer; string(r.body) != "copied" {
				t.Errorf("%s", r.body)
			}
		}
		synctest.Wait()
		h.checkNothingHeld()
	})
}

// An agent replaces a file only if that has the tag, and creates one only if there is none.
func TestAgentsReplaceFiles(t *testing.T) {
	h := newHarness(t, withSurface(func(a *agents.Agent, w http.ResponseWriter, r *http.Request) error {
		replace := func(name, tag, text string) {
			err := a.ReplaceFile(r.Context(), "t", name, tag, int64(len(text)), strings.NewReader(text))
			if _, changed := errors.AsType[*proto.FileChangedError](err); changed {
				_, err = io.WriteString(w, name+" has changed\n")
			}
			if err != nil {
				t.Error(err)
			}
		}
		content, err := a.OpenFile(r.Context(), "t", "a")
		if err != nil {
			return err
		}
		replace("a", "", "1")
		replace("a", content.Tag, "2")
		replace("a", content.Tag, "3")
		replace("b", content.Tag, "4")
		replace("b", "", "5")
		return nil
	}))
	h.threads.files["acme/container=t/a"] = []byte("hello")
	h.addThread("acme", "container=t")
	r := h.do(http.MethodGet, "/other/files", "")
	if want := "a has changed\na has changed\nb has changed\n"; string(r.body) != want {
		t.Errorf("%d %s", r.status, r.body)
	}
	if a, b := h.threads.files["acme/container=t/a"], h.threads.files["acme/container=t/b"]; string(a) != "2" ||
		string(b) != "5" {
		t.Errorf("%s, %s", a, b)
	}
	h.checkNothingHeld()
}

// An absolute path outside of the home is a file that no program would find.
func TestPathsOfAgents(t *testing.T) {
	h := newHarness(t)
	a := h.server.Agents().InBackground("acme", "resp_1")
	for path, want := range map[string]string{
		"a/b": "a/b", "./a": "a", "/home/baponi/a": "a", "/home/baponi": "", ".": "",
		"/tmp/a": "!", "/home/baponi2/a": "!", "../a": "!", "/home/baponi/../x": "!",
	} {
		got, err := a.CleanPath(path)
		if err != nil {
			got = "!"
		}
		if got != want {
			t.Errorf("%s: %q, %v", path, got, err)
		}
	}
}

// Runs are stored only if there is room for them, and go on in the background only with a plan that
// has asynchronous executions.
func TestStoredRunsAreAdmitted(t *testing.T) {
	background := false
	h := newHarness(t, withSurface(func(a *agents.Agent, w http.ResponseWriter, r *http.Request) error {
		if err := a.AllowStored(r.Context(), background); err != nil {
			return err
		}
		_, err := io.WriteString(w, "stored")
		return err
	}))
	full := ""
	h.server.DiskFull = func() string { return full }
	free := h.stub.addKey("small", "free", asUser)
	for _, c := range []struct {
		key, full  string
		background bool
		status     int
	}{
		{h.key, "", false, http.StatusOK},
		{h.key, "", true, http.StatusOK},
		{free, "", false, http.StatusOK},
		{free, "", true, http.StatusTooManyRequests},
		{h.key, "the disk is full", false, http.StatusServiceUnavailable},
	} {
		full, background = c.full, c.background
		if r := h.do(http.MethodPost, "/other/run", "{}", "Authorization", "Bearer "+c.key); r.status != c.status {
			t.Errorf("%+v: %d %s", c, r.status, r.body)
		}
	}
}

// An execution of a run in the background that the queue has not confirmed is submitted again under
// another id: the first one never runs.
func TestUnconfirmedCallsAreSubmittedAgain(t *testing.T) {
	h := newHarness(t)
	agent := h.server.Agents().InBackground("acme", "resp_1")
	defer agent.Release()
	ctx, err := agent.Begin(t.Context(), &proto.AgentRun{Org: "acme", ID: "resp_1", Key: h.stub.keys[0].ID}, false)
	if err != nil {
		t.Fatal(err)
	}
	var tried []proto.TraceID
	h.stub.refuse = func(job *proto.Job) error {
		if tried = append(tried, job.TraceID); len(tried) == 1 {
			return errors.New("no answer")
		}
		return nil
	}
	h.stub.onSubmit = func(job *proto.Job) {
		<-h.stub.submitted
		if len(tried) == 2 { // the answer was lost, and the job withdrawn
			h.stub.finish(job.TraceID, proto.Failure(proto.CodeExpiredInQueue, "The queue did not confirm the execution."))
			return
		}
		h.stub.start(job.TraceID)
		h.stub.finish(job.TraceID, proto.Exited(0))
	}
	id := proto.NewTraceID()
	record, err := agent.Execute(ctx, id, &api.ExecuteRequest{Code: "1", Language: proto.Python, MaxAttempts: 1})
	if err != nil || record.Status != proto.StatusSuccess || len(tried) != 3 || tried[0] != id || tried[1] == id ||
		record.TraceID != tried[2] {
		t.Errorf("%+v, %v, after %v", record, err, tried)
	}
}

// A form with a file has few parts, also if they have the same name.
func TestPartsOfUploads(t *testing.T) {
	h := newHarness(t, withSurface(func(a *agents.Agent, w http.ResponseWriter, _ *http.Request) error {
		up, err := a.ReadUpload(w, "")
		if err == nil {
			err = up.Close()
		}
		return err
	}))
	h.server.Spool = func() (*os.File, error) { return os.CreateTemp(t.TempDir(), "") }
	for _, c := range []struct{ fields, status int }{
		{maxUploadFields, http.StatusOK}, {maxUploadFields + 1, http.StatusBadRequest},
	} {
		for _, format := range []string{"purpose", "field-%d"} {
			var body strings.Builder
			for i := range c.fields {
				name := strings.Replace(format, "%d", strconv.Itoa(i), 1)
				fmt.Fprintf(&body, "--x\r\nContent-Disposition: form-data; name=%q\r\n\r\nvalue\r\n", name)
			}
			body.WriteString("--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\ncontent\r\n--x--\r\n")
			if r := h.do(http.MethodPost, "/other/run", body.String(), "Content-Type",
				"multipart/form-data; boundary=x"); r.status != c.status {
				t.Errorf("%d fields %s: %d %s", c.fields, format, r.status, r.body)
			}
		}
	}
}
