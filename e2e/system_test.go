package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// topology is a kind of deployment.
type topology struct {
	name string
	// separate deploys the gateway with the scheduler, the worker and the NATS server as separate
	// processes. Otherwise there is one process.
	separate bool
	// clustered deploys a cluster of three NATS servers, see cluster. It requires separate.
	clustered bool
}

func topologies() []topology {
	return []topology{{name: "one process"}, {name: "separate processes", separate: true}}
}

// onCluster returns the topology of the cluster tests.
func onCluster() topology { return topology{name: "on a cluster", separate: true, clustered: true} }

// system is a deployment of a test.
type system struct {
	*api
	topology
	programs *programs
	data     string
	env      []string
	args     []string // of every process, except its roles and data
	front    *process // serves HTTP
	worker   *process // runs programs; the same as front in one process
	health   string   // base URL of the health routes of the worker
	broker   *broker  // nil in one process and on a cluster
	cluster  *cluster // nil without a cluster
}

const (
	noSlots   = 0  // no worker yet
	manySlots = 16 // more than concurrent tests hold
	frontRole = "gateway,scheduler"
)

// newSystem deploys bullpen and returns once it is ready.
func newSystem(t *testing.T, p *programs, in topology, slots int, args ...string) *system {
	t.Helper()
	sys := &system{topology: in, programs: p, data: filepath.Join(t.TempDir(), "data"), args: args}
	secret := newSecret()
	sys.env = append(storagetest.Env(), "BULLPEN_BOOTSTRAP_KEY="+secret)
	if slots != noSlots {
		sys.args = append(slices.Clone(args), "--slots", strconv.Itoa(slots))
	}
	switch {
	case in.clustered:
		sys.cluster = p.startCluster(t)
		sys.args, sys.env = append(sys.args, sys.cluster.flags()...), append(sys.env, sys.cluster.env()...)
	case in.separate:
		sys.broker = p.startBroker(t)
		sys.args, sys.env = append(sys.args, sys.broker.flags(p)...), append(sys.env, sys.broker.env()...)
	}
	sys.api = &api{t: t, key: secret, http: newHTTP(t, p.machine.dialer())}
	sys.startFront(t)
	if in.separate && slots != noSlots {
		sys.startWorker(t)
	}
	if slots != noSlots {
		sys.ready(t)
	}
	return sys
}

// startFront starts or restarts the process that serves HTTP; in one process that is everything.
func (sys *system) startFront(t *testing.T) {
	t.Helper()
	args := append([]string{"--data", sys.data}, sys.args...)
	if sys.separate {
		args = append(args, "--roles", frontRole)
	}
	sys.front, sys.base = sys.programs.startServe(t, "front", sys.env, args...)
	if !sys.separate {
		sys.worker, sys.health = sys.front, sys.base
	}
}

func (sys *system) startWorker(t *testing.T) {
	t.Helper()
	sys.worker, sys.health = sys.startWorkerIn(t, filepath.Join(t.TempDir(), "worker"))
}

// startWorkerIn starts a worker with its data in dir.
func (sys *system) startWorkerIn(t *testing.T, dir string, args ...string) (proc *process, base string) {
	t.Helper()
	return sys.programs.startServe(t, "worker", sys.env,
		slices.Concat([]string{"--roles", "worker", "--data", dir}, sys.args, args)...)
}

// ready waits until the deployment accepts and runs executions.
func (sys *system) ready(t testing.TB) {
	t.Helper()
	eventually(t, "ready", func() (bool, any) {
		if sys.front.ended() {
			t.Fatalf("the front ended:\n%s", sys.front.tail())
		}
		r, err := sys.try(t.Context(), http.MethodGet, "/readyz", nil)
		if err != nil {
			return false, err
		}
		return r.status == http.StatusOK, string(r.body)
	})
}

// api is an HTTP client with one key.
type api struct {
	t    testing.TB
	base string
	key  string
	http *http.Client
}

// newHTTP returns a client that connects by dial, or as usual if dial is nil.
func newHTTP(t testing.TB, dial func(ctx context.Context, network, addr string) (net.Conn, error)) *http.Client {
	transport := &http.Transport{MaxIdleConnsPerHost: 64, DialContext: dial}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// in returns the same client for a subtest.
func (a *api) in(t testing.TB) *api { return &api{t, a.base, a.key, a.http} }

// with returns a client with another key.
func (a *api) with(key string) *api { return &api{a.t, a.base, key, a.http} }

// reply is a response with its body.
type reply struct {
	status int
	header http.Header
	body   []byte
}

// request is the body of a submission.
type request map[string]any

func bash(code string) request   { return request{"language": "bash", "code": code} }
func python(code string) request { return request{"language": "python", "code": code} }

// and returns r with more members.
func (r request) and(pairs ...any) request {
	out := maps.Clone(r)
	for i := 0; i < len(pairs); i += 2 {
		out[pairs[i].(string)] = pairs[i+1]
	}
	return out
}

// open sends a request and returns the response with its body unread. The headers alternate names
// and values.
func (a *api) open(ctx context.Context, method, path string, body any, headers ...string) (*http.Response, error) {
	var reader io.Reader
	switch b := body.(type) {
	case nil:
	case []byte:
		reader = bytes.NewReader(b)
	default:
		raw, err := json.Marshal(b)
		if err != nil {
			return nil, err
		}
		reader = bytes.NewReader(raw)
	}
	r, err := http.NewRequestWithContext(ctx, method, a.base+path, reader)
	if err != nil {
		return nil, err
	}
	if a.key != "" {
		r.Header.Set("Authorization", "Bearer "+a.key)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return a.http.Do(r)
}

// try sends a request and reads the response.
func (a *api) try(ctx context.Context, method, path string, body any, headers ...string) (*reply, error) {
	resp, err := a.open(ctx, method, path, body, headers...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("read the answer (%s) after %d bytes: %w", resp.Status, len(raw), err)
	}
	return &reply{resp.StatusCode, resp.Header, raw}, nil
}

func (a *api) do(method, path string, body any, headers ...string) *reply {
	a.t.Helper()
	r, err := a.try(context.Background(), method, path, body, headers...)
	if err != nil {
		a.t.Fatalf("%s %s: %v", method, path, err)
	}
	return r
}

func (a *api) get(path string, headers ...string) *reply {
	a.t.Helper()
	return a.do(http.MethodGet, path, nil, headers...)
}

const (
	executePath = "/v1/sandbox/execute"
	accept      = "Accept"
	ndjson      = "application/x-ndjson"
	sse         = "text/event-stream"
)

// execution returns the path of an execution.
func execution(id string, rest ...string) string {
	return "/v1/executions/" + strings.Join(append([]string{id}, rest...), "/")
}

func (a *api) execute(body any, headers ...string) *reply {
	a.t.Helper()
	return a.do(http.MethodPost, executePath, body, headers...)
}

// inline runs a program and waits for its result.
func (a *api) inline(body any, headers ...string) proto.Result {
	a.t.Helper()
	return a.execute(body, headers...).result(a.t)
}

// submit submits a program asynchronously and returns its id.
func (a *api) submit(body any, headers ...string) string {
	a.t.Helper()
	r := a.execute(body, append([]string{"Prefer", "respond-async"}, headers...)...)
	if r.status != http.StatusAccepted {
		a.t.Fatalf("submit: %s", r)
	}
	return r.trace(a.t)
}

// record returns the current record of an execution.
func (a *api) record(id string) record {
	a.t.Helper()
	r := a.get(execution(id))
	if r.status != http.StatusOK {
		a.t.Fatalf("record of %s: %s", id, r)
	}
	var rec record
	r.into(a.t, &rec)
	return rec
}

// ended waits for the end of an execution and returns its record.
func (a *api) ended(id string) record {
	a.t.Helper()
	var rec record
	eventually(a.t, id+" ends", func() (bool, any) {
		r := a.get(execution(id) + "?wait=20")
		if r.status != http.StatusOK {
			return false, r
		}
		r.into(a.t, &rec)
		return proto.Status(rec.Status).Terminal(), string(r.body)
	})
	return rec
}

// stream submits in streaming mode and returns all events.
func (a *api) stream(body any, headers ...string) []event {
	a.t.Helper()
	r := a.execute(body, append([]string{accept, ndjson}, headers...)...)
	if r.status != http.StatusOK {
		a.t.Fatalf("stream: %s", r)
	}
	return r.events(a.t)
}

func (a *api) output(id string, after int64) []event {
	a.t.Helper()
	r := a.get(execution(id, "output") + "?after_seq=" + strconv.FormatInt(after, 10))
	if r.status != http.StatusOK {
		a.t.Fatalf("output of %s: %s", id, r)
	}
	return r.events(a.t)
}

// record is an execution as GET returns it.
type record struct {
	TraceID              string            `json:"trace_id"`
	Status               string            `json:"status"`
	ExitCode             *int              `json:"exit_code"`
	Stdout               *string           `json:"stdout"`
	Stderr               *string           `json:"stderr"`
	Error                *string           `json:"error"`
	DurationMS           *int64            `json:"duration_ms"`
	DeliveryMode         string            `json:"delivery_mode"`
	CreatedAt            time.Time         `json:"created_at"`
	CompletedAt          *time.Time        `json:"completed_at"`
	ErrorCode            *string           `json:"error_code"`
	ErrorMessage         *string           `json:"error_message"`
	ProgramExitCode      *int              `json:"program_exit_code"`
	Language             string            `json:"language"`
	Timeout              int               `json:"timeout"`
	Metadata             map[string]string `json:"metadata"`
	Attempt              int               `json:"attempt"`
	StdoutTruncated      bool              `json:"stdout_truncated"`
	StderrTruncated      bool              `json:"stderr_truncated"`
	StdoutInvalidUTF8    bool              `json:"stdout_invalid_utf8"`
	StderrInvalidUTF8    bool              `json:"stderr_invalid_utf8"`
	OutputTruncated      bool              `json:"output_truncated"`
	OutputBudgetExceeded bool              `json:"output_budget_exceeded"`
	Sandbox              *string           `json:"profile"`
	Network              *struct {
		proto.Traffic
		Blocked []proto.BlockedConnection `json:"blocked_connections"`
	} `json:"network"`
}

func (r record) String() string {
	return fmt.Sprintf("%s %s, attempt %d, exit code %s, stdout %s, stderr %s, error %s, %s: %s", r.TraceID,
		r.Status, r.Attempt,
		display(r.ExitCode), display(r.Stdout), display(r.Stderr), display(r.Error), display(r.ErrorCode),
		display(r.ErrorMessage))
}

// display formats an optional value, shortened if it is long.
func display[T any](v *T) string {
	if v == nil {
		return "null"
	}
	return short(fmt.Sprintf("%#v", *v))
}

func short(s string) string {
	const most = 300
	if len(s) <= most {
		return s
	}
	return s[:most/2] + " … " + s[len(s)-most/2:]
}

// succeeded checks that the program succeeded and printed stdout.
func (r record) succeeded(t testing.TB, stdout string) {
	t.Helper()
	if r.Status != "success" || r.Stdout == nil || *r.Stdout != stdout || r.ExitCode == nil || *r.ExitCode != 0 ||
		r.Error != nil {
		t.Errorf("got %s\nwant success with stdout %q", r, short(stdout))
	}
}

// failed checks that the platform ended the execution with an error code and a message.
func (r record) failed(t testing.TB, status, code, message string) {
	t.Helper()
	if r.Status != status || r.ErrorCode == nil || *r.ErrorCode != code || r.ExitCode == nil || *r.ExitCode != -1 ||
		r.ErrorMessage == nil || !strings.Contains(*r.ErrorMessage, message) {
		t.Errorf("got %s\nwant %s, error code %s, a message with %q", r, status, code, message)
	}
}

// event is a line of a stream.
type event struct {
	Type            string        `json:"type"`
	Seq             int64         `json:"seq"`
	TraceID         string        `json:"trace_id"`
	Status          string        `json:"status"`
	Stream          string        `json:"stream"`
	Data            string        `json:"data"`
	Base64          []byte        `json:"base64"`
	Result          *proto.Result `json:"result"`
	OutputTruncated *bool         `json:"output_truncated"`
	Missing         *missing      `json:"missing"`
}

// missing is a range of events that are gone.
type missing struct{ First, Last int64 }

func (r *reply) String() string { return fmt.Sprintf("HTTP %d %s", r.status, short(string(r.body))) }

func (r *reply) into(t testing.TB, v any) {
	t.Helper()
	if err := json.Unmarshal(r.body, v); err != nil {
		t.Fatalf("%v in %s", err, r)
	}
}

// trace returns the execution's id, and fails the test if it is malformed.
func (r *reply) trace(t testing.TB) string {
	t.Helper()
	id := r.header.Get("X-Trace-Id")
	if _, err := proto.ParseTraceID(id); err != nil {
		t.Fatalf("X-Trace-Id: %v in %s", err, r)
	}
	return id
}

// result decodes the response to an inline request.
func (r *reply) result(t testing.TB) proto.Result {
	t.Helper()
	if r.status != http.StatusOK {
		t.Fatalf("got %s, want a result", r)
	}
	var res proto.Result
	r.into(t, &res)
	return res
}

// rejection checks the error envelope of a response, and returns its message.
func (r *reply) rejection(t testing.TB, status int, code string) string {
	t.Helper()
	var e struct{ Error, Message string }
	if json.Unmarshal(r.body, &e) != nil || r.status != status || e.Error != code || e.Message == "" ||
		r.header.Get("X-Request-Id") == "" {
		t.Errorf("got %s, want %d %s with a message and X-Request-Id", r, status, code)
	}
	return e.Message
}

// retryAfter checks the header Retry-After.
func (r *reply) retryAfter(t testing.TB) {
	t.Helper()
	if n, err := strconv.Atoi(r.header.Get("Retry-After")); err != nil || n < 1 || n > 30 {
		t.Errorf("Retry-After is %q on %s, want 1 to 30", r.header.Get("Retry-After"), r)
	}
}

func (r *reply) events(t testing.TB) []event {
	t.Helper()
	var events []event
	for line := range bytes.Lines(r.body) {
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("%v in event %q", err, line)
		}
		if e.Type != "keepalive" || e.Missing != nil {
			events = append(events, e)
		}
	}
	return events
}

// checkEvents checks that events are those of an execution after seq: without gaps, with the status
// first if after is 0 and the result last. It returns the output and the result event.
func checkEvents(t testing.TB, events []event, after int64) (stdout, stderr string, last event) {
	t.Helper()
	var printed [2]strings.Builder
	for i, e := range events {
		want := "output"
		switch {
		case i == len(events)-1:
			want = "result"
		case i == 0 && after == 0:
			want = "status"
		}
		// At or past the end there is only the result, with its own number.
		if e.Type != want || e.Seq != after+int64(i)+1 && (want != "result" || len(events) > 1) {
			t.Fatalf("event %d of %d after %d is %s %d, want %s %d", i+1, len(events), after, e.Type, e.Seq, want,
				after+int64(i)+1)
		}
		switch e.Stream {
		case "stdout":
			printed[0].WriteString(e.Data)
		case "stderr":
			printed[1].WriteString(e.Data)
		}
	}
	if len(events) == 0 || events[len(events)-1].Result == nil || events[len(events)-1].OutputTruncated == nil {
		t.Fatalf("the last of %d events is no result", len(events))
	}
	return printed[0].String(), printed[1].String(), events[len(events)-1]
}

// pending is a request without a response yet.
type pending struct {
	reply *reply
	err   error
	done  chan struct{}
}

// begin sends a request and does not wait for the response.
func (a *api) begin(method, path string, body any, headers ...string) *pending {
	p := &pending{done: make(chan struct{})}
	go func() {
		defer close(p.done)
		p.reply, p.err = a.try(context.Background(), method, path, body, headers...)
	}()
	return p
}

// start submits a program and does not wait for the response.
func (a *api) start(body any, headers ...string) *pending {
	return a.begin(http.MethodPost, executePath, body, headers...)
}

// follow asks for the output of an execution and does not wait for its end.
func (a *api) follow(id string, after int64, headers ...string) *pending {
	return a.begin(http.MethodGet, execution(id, "output")+"?after_seq="+strconv.FormatInt(after, 10), nil, headers...)
}

// answer waits for the response.
func (p *pending) answer(t testing.TB) *reply {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(patience):
		t.Fatal("no answer came")
	}
	if p.err != nil {
		t.Fatalf("no answer came: %v", p.err)
	}
	return p.reply
}

// newKey creates an API key.
func (a *api) newKey(org, plan string) (secret, id string) {
	a.t.Helper()
	r := a.do(http.MethodPost, "/v1/admin/keys",
		request{"name": a.t.Name()[:min(len(a.t.Name()), 100)], "org": org, "plan": plan})
	if r.status != http.StatusCreated {
		a.t.Fatalf("make a key: %s", r)
	}
	var key struct{ ID, Key string }
	r.into(a.t, &key)
	return key.Key, key.ID
}
