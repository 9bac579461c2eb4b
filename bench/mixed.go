package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bullpen-run/bullpen/client/load"
	"github.com/bullpen-run/bullpen/proto"
)

// The load of a soak.
const (
	mixedEvery      = 350 * time.Millisecond // between the starts of two actions
	mixedWithin     = 4 * time.Minute        // for an action with all its retries
	mixedPause      = 250 * time.Millisecond // before a retry
	mixedThreads    = 10                     // in use at a time
	threadsFor      = 2 * time.Minute        // how long a thread is in use
	burstEvery      = time.Minute
	burstSize       = 20
	scheduleSeconds = 15
	schedulesRead   = time.Minute
	mixedBatch      = 20
	hookWithin      = 2 * time.Minute // after the end of the load
	refusedHooks    = 10              // every so many webhooks is refused
	shownFailures   = 20
	mixedLarge      = 1_200_000 // bytes, more than a record in a message holds
)

// mixed is a load of many kinds and its outcome. Each answer is checked.
type mixed struct {
	d    *deployment
	http *http.Client
	key  string

	next     atomic.Int64 // number of the next token
	receiver *http.Server
	hookURL  string

	mu         sync.Mutex
	counts     map[string]int // actions that ended well, by kind
	executions int
	retries    int             // requests that were sent again because a gateway did not answer
	lost       int             // executions that ended as worker_lost after their worker was killed
	hooks      map[string]int  // accepted webhooks by execution
	expected   map[string]bool // executions whose webhook must arrive
	posts      int
	failures   []string
	ticks      map[string]map[time.Time]string // trace ids by schedule and tick
	threads    map[string]*mixedThread
}

// mixedThread is a thread of the load. Its log has a line for each execution.
type mixedThread struct {
	mu          sync.Mutex
	lines, lost int // lines that the log must have, and may have in addition
}

// kinds are the actions of the load with their weights.
func (m *mixed) kinds() map[string]mixedKind {
	prints := func(l proto.Language, code string) func(context.Context, string) error {
		return func(ctx context.Context, token string) error {
			return m.expect(ctx, token, job{asked: asked{Language: l, Code: fmt.Sprintf(code, token), Timeout: programTimeout}},
				outcome{Stdout: token + "\n"})
		}
	}
	return map[string]mixedKind{
		"python": {5, prints(proto.Python, "x = bytearray(20 << 20)\nprint(%q)")},
		"node":   {3, prints(proto.Node, "console.log(%q)")},
		"bash":   {5, prints(proto.Bash, "echo %q")}, "streaming": {4, m.streaming}, "thread": {5, m.thread},
		"file":    {2, m.file},
		"webhook": {4, m.webhook}, "cancelled": {1, m.cancelled}, "timeout": {1, m.timeout}, "failing": {2, m.failing},
		"large": {1, m.large},
		"batch": {1, m.batch},
	}
}

type mixedKind struct {
	weight int
	run    func(ctx context.Context, token string) error
}

// job is an execute request.
type job struct {
	asked
	MaxAttempts int               `json:"max_attempts,omitempty"`
	Webhook     string            `json:"webhook_url,omitempty"`
	Metadata    map[string]string `json:"metadata"`

	async, stream bool
}

// outcome is the part of a result or a record that is checked.
type outcome struct {
	Stdout    string  `json:"stdout"`
	Stderr    string  `json:"stderr"`
	ExitCode  int     `json:"exit_code"`
	ErrorCode *string `json:"error_code"`
}

func (o outcome) equal(want outcome) bool {
	return o.Stdout == want.Stdout && o.Stderr == want.Stderr && o.ExitCode == want.ExitCode && o.code() == want.code()
}

func (o outcome) code() string {
	if o.ErrorCode == nil {
		return ""
	}
	return *o.ErrorCode
}

func (o outcome) String() string {
	return fmt.Sprintf("exit code %d, error %q, stdout %.60q, stderr %.60q", o.ExitCode, o.code(), o.Stdout, o.Stderr)
}

// newMixed starts the receiver of webhooks. The settings let a server send to it.
func newMixed(ctx context.Context) (m *mixed, settings []string, err error) {
	m = &mixed{
		http: &http.Client{Transport: &http.Transport{
			MaxIdleConnsPerHost: idleConnections,
			IdleConnTimeout:     30 * time.Second,
		}}, //nolint:mnd // restarted servers have other addresses
		counts: map[string]int{}, hooks: map[string]int{}, expected: map[string]bool{},
		ticks: map[string]map[time.Time]string{}, threads: map[string]*mixedThread{},
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, fmt.Errorf("start a receiver of webhooks: %w", err)
	}
	m.receiver = &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(m.receive)}
	go func() { _ = m.receiver.Serve(listener) }()
	port := strconv.Itoa(listener.Addr().(*net.TCPAddr).Port)
	m.hookURL = "http://127.0.0.1:" + port + "/"
	return m, []string{
		"BULLPEN_WEBHOOK_ALLOW_HTTP=true", "BULLPEN_WEBHOOK_ALLOW_CIDRS=127.0.0.0/8",
		"BULLPEN_WEBHOOK_ALLOW_PORTS=" + port,
	}, nil
}

// receive accepts webhooks, and refuses every tenth.
func (m *mixed) receive(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Trace  string `json:"trace_id"`
		Result outcome
	}
	err := json.NewDecoder(r.Body).Decode(&body)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.posts++
	if err != nil || m.posts%refusedHooks == 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	m.hooks[body.Trace]++
}

// run sends the load for d, and waits for everything that it began.
func (m *mixed) run(ctx context.Context, d time.Duration) error {
	if err := m.schedules(ctx); err != nil {
		return err
	}
	var wheel []string
	all := m.kinds()
	for name, k := range all {
		for range k.weight {
			wheel = append(wheel, name)
		}
	}
	//nolint:gosec // an order, not a secret
	rand.Shuffle(len(wheel), func(i, j int) { wheel[i], wheel[j] = wheel[j], wheel[i] })
	var loads sync.WaitGroup
	open := func(every time.Duration, run func(load.Due)) {
		loads.Go(func() { load.Open(ctx, load.Steady(1/every.Seconds(), d), 0, run) })
	}
	open(mixedEvery, func(due load.Due) {
		name := wheel[due.N%len(wheel)]
		m.act(ctx, name, all[name].run)
	})
	open(burstEvery, func(load.Due) {
		var burst sync.WaitGroup
		for range burstSize {
			burst.Go(func() { m.act(ctx, "burst", m.burst) })
		}
		burst.Wait()
	})
	open(schedulesRead, func(load.Due) { m.readSchedules(ctx) })
	loads.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	m.readSchedules(ctx)
	m.awaitHooks(ctx)
	return nil
}

// act runs an action and records its outcome.
func (m *mixed) act(ctx context.Context, kind string, run func(context.Context, string) error) {
	token := fmt.Sprintf("t%06d", m.next.Add(1))
	limited, cancel := context.WithTimeout(ctx, mixedWithin)
	defer cancel()
	err := run(limited, token)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		m.counts[kind]++
	} else if ctx.Err() == nil {
		m.fail("%s %s: %v", kind, token, err)
	}
}

// fail records a failure. The lock must be held.
func (m *mixed) fail(format string, args ...any) {
	m.failures = append(m.failures, time.Now().UTC().Format(time.TimeOnly)+" "+fmt.Sprintf(format, args...))
}

// reply is an answer of a gateway.
type reply struct {
	status int
	trace  string
	body   []byte
}

// call sends a request until a gateway answers it. A gateway that is stopped or killed meanwhile
// does not answer, so that the request goes to the other one. headers are pairs.
func (m *mixed) call(ctx context.Context, method, path string, body []byte, headers ...string) (*reply, error) {
	for i := int(m.next.Load()); ; i++ {
		r, err := m.callOnce(ctx, method, m.d.gateway(i)+path, body, headers...)
		if err == nil && r.status != http.StatusServiceUnavailable && r.status != http.StatusTooManyRequests &&
			r.status != http.StatusBadGateway {
			return r, nil
		}
		if err == nil {
			err = fmt.Errorf("HTTP %d: %.300s", r.status, r.body)
		}
		m.mu.Lock()
		m.retries++
		m.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%s %s: no answer: %w", method, path, err)
		case <-time.After(mixedPause):
		}
	}
}

func (m *mixed) callOnce(ctx context.Context, method, url string, body []byte, headers ...string) (*reply, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if !strings.Contains(url, "/v1/files/content/") { // signed URLs need no key
		req.Header.Set("Authorization", "Bearer "+m.key)
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := m.http.Do(req)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return nil, err
	}
	if req.Header.Get("Accept") == "application/x-ndjson" && resp.StatusCode == http.StatusOK &&
		!bytes.Contains(text, []byte(`{"type":"result"`)) {
		return nil, errors.New("the stream ended without a result")
	}
	return &reply{resp.StatusCode, resp.Header.Get("X-Trace-Id"), text}, nil
}

// into decodes a body after a status of success.
func (r *reply) into(to any) error {
	if r.status < 200 || r.status > 299 {
		return fmt.Errorf("HTTP %d: %.300s", r.status, r.body)
	}
	if err := json.Unmarshal(r.body, to); err != nil {
		return fmt.Errorf("decode %.300q: %w", r.body, err)
	}
	return nil
}

// execute runs a program and returns its outcome and its id. It checks that the request, however
// often it was sent, made one execution.
func (m *mixed) execute(ctx context.Context, token string, j job) (o outcome, trace string, err error) {
	trace, o, err = m.submit(ctx, token, j)
	if err != nil {
		return o, trace, err
	}
	if j.async {
		if o, err = m.record(ctx, trace); err != nil {
			return o, trace, err
		}
	}
	return o, trace, m.once(ctx, token, trace)
}

// submit sends a program. If it is async, there is no outcome.
func (m *mixed) submit(ctx context.Context, token string, j job) (trace string, o outcome, err error) {
	j.Metadata = map[string]string{"token": token}
	body, err := json.Marshal(j)
	if err != nil {
		return "", o, err
	}
	headers := []string{"Idempotency-Key", token}
	switch {
	case j.async:
		headers = append(headers, "Prefer", "respond-async")
	case j.stream:
		headers = append(headers, "Accept", "application/x-ndjson")
	}
	r, err := m.call(ctx, http.MethodPost, executePath, body, headers...)
	switch {
	case err != nil:
		return "", o, err
	case j.stream && r.status == http.StatusOK:
		o, err = streamOutcome(r.body)
	default:
		err = r.into(&o)
	}
	if err != nil {
		err = fmt.Errorf("execution %s: %w", r.trace, err)
	}
	return r.trace, o, err
}

// streamOutcome returns the result of a stream, whose output events must be its output.
func streamOutcome(body []byte) (outcome, error) {
	var last struct{ Result outcome }
	lines := bytes.Split(bytes.TrimSpace(body), []byte("\n"))
	if err := json.Unmarshal(lines[len(lines)-1], &last); err != nil || last.Result.code() != "" {
		return last.Result, err
	}
	e, err := (&streamed{body: body}).decode()
	if err == nil && string(e.output) != last.Result.Stdout {
		err = fmt.Errorf("the events have %d bytes of output, the result %d", len(e.output), len(last.Result.Stdout))
	}
	return last.Result, err
}

// record waits for the end of an execution.
func (m *mixed) record(ctx context.Context, trace string) (o outcome, err error) {
	for {
		r, err := m.call(ctx, http.MethodGet, "/v1/executions/"+trace+"?wait=20", nil)
		if err != nil {
			return o, err
		}
		var record struct {
			outcome
			CompletedAt *time.Time `json:"completed_at"`
		}
		if err := r.into(&record); err != nil {
			return o, fmt.Errorf("record of %s: %w", trace, err)
		}
		if record.CompletedAt != nil {
			return record.outcome, nil
		}
	}
}

// once checks that one execution of a token was accepted. An unconfirmed submission is withdrawn,
// so that it never starts, before its key is free for another one.
func (m *mixed) once(ctx context.Context, token, trace string) error {
	for {
		r, err := m.call(ctx, http.MethodGet, "/v1/executions?metadata.token="+token, nil)
		if err != nil {
			return err
		}
		var list struct {
			Executions []struct {
				Trace     string  `json:"trace_id"`
				ErrorCode *string `json:"error_code"`
			}
			Complete bool
		}
		err = r.into(&list)
		var others []string
		for _, e := range list.Executions {
			if e.Trace != trace && (e.ErrorCode == nil || *e.ErrorCode != "expired_in_queue") {
				others = append(others, e.Trace)
			}
		}
		switch {
		case err != nil:
			return fmt.Errorf("list executions: %w", err)
		case !list.Complete && ctx.Err() == nil:
			continue
		case len(others) > 0 || len(list.Executions) == 0:
			return fmt.Errorf("%d executions in the list, among them %q, instead of %s alone", len(list.Executions),
				others, trace)
		}
		m.mu.Lock()
		m.executions++
		m.mu.Unlock()
		return nil
	}
}

// expect runs a program and checks its outcome. An execution that may be started only once may be
// lost with its worker.
func (m *mixed) expect(ctx context.Context, token string, j job, want outcome) error {
	began := time.Now()
	o, trace, err := m.execute(ctx, token, j)
	switch {
	case err != nil:
		return err
	case m.lostWithWorker(j, o, began), o.equal(want):
		return nil
	}
	return fmt.Errorf("execution %s: %s", trace, o)
}

// lostWithWorker reports whether an execution was lost with a worker that was killed.
func (m *mixed) lostWithWorker(j job, o outcome, began time.Time) bool {
	if j.MaxAttempts > 1 || o.code() != "worker_lost" || !m.d.killedSince(began) {
		return false
	}
	m.mu.Lock()
	m.lost++
	m.mu.Unlock()
	return true
}

// schedules creates schedules.
func (m *mixed) schedules(ctx context.Context) error {
	for _, name := range []string{"one", "two"} {
		body, err := json.Marshal(map[string]any{
			"name": name, "every": scheduleSeconds, "overlap": "queue",
			"request": job{asked: bash("echo " + name), MaxAttempts: 3},
		})
		if err != nil {
			return err
		}
		r, err := m.call(ctx, http.MethodPost, "/v1/schedules", body)
		if err != nil {
			return err
		}
		var s struct{ ID string }
		if err := r.into(&s); err != nil {
			return fmt.Errorf("create a schedule: %w", err)
		}
		m.ticks[s.ID] = map[time.Time]string{}
	}
	return nil
}

// readSchedules checks that each tick of a schedule so far started one execution.
func (m *mixed) readSchedules(ctx context.Context) {
	for id, ticks := range m.ticks {
		var s struct {
			Runs []struct {
				Tick   time.Time
				Trace  string `json:"trace_id"`
				Reason string
			}
		}
		r, err := m.call(ctx, http.MethodGet, "/v1/schedules/"+id, nil)
		if err == nil {
			err = r.into(&s)
		}
		m.mu.Lock()
		if err != nil {
			m.fail("schedule %s: %v", id, err)
		}
		for _, run := range slices.Backward(s.Runs) { // the oldest first
			before, seen := ticks[run.Tick]
			if !seen && run.Trace == "" || seen && before != run.Trace {
				m.fail("schedule %s, tick %s: %+v, before %q", id, run.Tick, run, before)
			}
			if ticks[run.Tick] = run.Trace; seen {
				continue
			}
			if _, follows := ticks[run.Tick.Add(-scheduleSeconds*time.Second)]; !follows && len(ticks) > 1 {
				m.fail("schedule %s: the tick before %s is missing", id, run.Tick)
			}
			m.executions++
			m.counts["schedule"]++
		}
		m.mu.Unlock()
	}
}

// awaitHooks waits for all webhooks.
func (m *mixed) awaitHooks(ctx context.Context) {
	for deadline := time.Now().Add(hookWithin); ; {
		m.mu.Lock()
		missing := 0
		for trace := range m.expected {
			if m.hooks[trace] == 0 {
				missing++
			}
		}
		late := time.Now().After(deadline)
		if late && missing > 0 {
			m.fail("%d webhooks have not arrived", missing)
		}
		m.mu.Unlock()
		if late || missing == 0 || ctx.Err() != nil {
			return
		}
		time.Sleep(mixedPause)
	}
}
