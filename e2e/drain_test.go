package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

var rollingCallers = repeatsFlag("rolling-callers", 40, 200, "clients that call concurrently while processes restart")

// retryPause is how long a caller waits before it tries another gateway.
const retryPause = 300 * time.Millisecond

// fleet is a deployment whose processes restart one after the other while clients call.
type fleet struct {
	*system
	members []*fleetMember
	workers []*process // all that ever ran
}

// fleetMember is one process of a fleet. It keeps its address and its data across restarts.
type fleetMember struct {
	name string
	base string // where it listens
	args []string
	proc *process
}

// newFleet deploys two processes of each role, or the one that has all roles.
func newFleet(t *testing.T, p *programs, in topology) *fleet {
	t.Helper()
	hook := startReceiver(t)
	flags := append([]string{"--queue-wait", "20s"}, hook.flags...)
	f := &fleet{}
	if !in.separate {
		f.system = newSystem(t, p, in, 8, flags...)
		f.members = []*fleetMember{
			{name: "all", base: f.base, args: append([]string{"--data", f.data}, f.args...), proc: f.front},
		}
		f.workers = []*process{f.front}
	} else {
		f.system = newSystem(t, p, in, noSlots, append(flags, "--slots", "8")...)
		// Gateways stop before the longest streams have ended. Workers stop after the longest
		// program has ended.
		f.add(t, "gateway", "gateway", "--drain", "1s")
		f.add(t, "gateway", "gateway", "--drain", "1s")
		for range 2 {
			f.add(t, "worker", "worker", "--drain", "1m")
			f.add(t, "scheduler", "scheduler")
			f.add(t, "webhook", "webhook")
		}
		// The processes that newWorld started were only needed to create the streams.
		f.front.signal(syscall.SIGTERM)
		if code := f.front.exitCode(t); code != 0 {
			t.Fatalf("exit code %d:\n%s", code, f.front.tail())
		}
		f.front, f.base = f.members[0].proc, f.members[0].base
	}
	f.settings(http.MethodPut, "/v1/webhook", request{"url": hook.url + "/200"})
	f.ready(t)
	return f
}

func (f *fleet) add(t *testing.T, name, role string, args ...string) {
	t.Helper()
	m := &fleetMember{name: fmt.Sprintf("%s %d", name, len(f.members))}
	m.args = slices.Concat([]string{"--roles", role, "--data", filepath.Join(t.TempDir(), "data")}, f.args, args)
	f.members = append(f.members, m)
	f.start(t, m)
}

func (f *fleet) start(t *testing.T, m *fleetMember) {
	t.Helper()
	args := m.args
	if m.base != "" {
		args = append(slices.Clone(args), "--listen", strings.TrimPrefix(m.base, "http://"))
	}
	m.proc, m.base = f.programs.startServe(t, m.name, f.env, args...)
	if strings.HasPrefix(m.name, "worker") || !f.separate {
		f.workers = append(f.workers, m.proc)
	}
}

// restart drains one process and starts it again.
func (f *fleet) restart(t *testing.T, m *fleetMember) {
	t.Helper()
	m.proc.signal(syscall.SIGTERM)
	began := time.Now()
	if code := m.proc.exitCode(t); code != 0 {
		t.Errorf("%s ended with exit code %d:\n%s", m.name, code, m.proc.tail())
	}
	t.Logf("%s drained in %s", m.name, time.Since(began).Round(time.Millisecond))
	f.start(t, m)
	eventually(t, m.name+" is ready", func() (bool, any) {
		r, err := (&api{t, m.base, f.key, f.http}).try(t.Context(), http.MethodGet, "/readyz", nil)
		return err == nil && r.status == http.StatusOK, fmt.Sprint(r, err)
	})
}

// gateways returns the gateways that clients may call.
func (f *fleet) gateways(t testing.TB) (all []*api) {
	for _, m := range f.members {
		if !f.separate || strings.HasPrefix(m.name, "gateway") {
			all = append(all, &api{t, m.base, f.key, f.http})
		}
	}
	return all
}

// caller is a client that knows several gateways and behaves as every client should. When a request
// fails, it sends the same request with the same Idempotency-Key to the next gateway.
type caller struct {
	gateways []*api
	next     int
	cured    *atomic.Int64 // requests that were retried
	resumed  *atomic.Int64 // streams that resumed through another gateway
}

// open sends a request until the response is not retryable. It returns an error for a permanent
// failure.
func (c *caller) open(ctx context.Context, method, path string, body any, headers ...string) (*http.Response, error) {
	pause := time.NewTicker(retryPause)
	defer pause.Stop()
	for {
		resp, err := c.gateways[c.next%len(c.gateways)].open(ctx, method, path, body, headers...)
		switch {
		case err == nil && resp.StatusCode < http.StatusBadRequest:
			return resp, nil
		case ctx.Err() != nil:
			return nil, errors.Join(ctx.Err(), err)
		case err == nil:
			text, _ := io.ReadAll(resp.Body) // only for the error message
			_ = resp.Body.Close()
			later := resp.StatusCode == http.StatusServiceUnavailable && resp.Header.Get("Retry-After") != ""
			runs := resp.StatusCode == http.StatusGatewayTimeout && resp.Header.Get("X-Trace-Id") != ""
			// NATS was briefly unavailable
			unknown := resp.StatusCode == http.StatusInternalServerError && resp.Header.Get("X-Trace-Id") != ""
			if !later && !runs && !unknown {
				return nil, fmt.Errorf("%s %s: %s, Retry-After %q: %s", method, path, resp.Status,
					resp.Header.Get("Retry-After"), text)
			}
		}
		c.cured.Add(1)
		c.next++
		select {
		case <-pause.C:
		case <-ctx.Done():
		}
	}
}

// do reads a response completely. A truncated response is an error.
func (c *caller) do(ctx context.Context, method, path string, body any, headers ...string) (*reply, error) {
	resp, err := c.open(ctx, method, path, body, headers...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("%s %s: half an answer: %w", method, path, err)
	}
	return &reply{resp.StatusCode, resp.Header, raw}, nil
}

// stream reads the events of an execution to the last one, through as many gateways as necessary.
// It starts with resp. If resp is nil, it first requests the output of execution id.
func (c *caller) stream(ctx context.Context, resp *http.Response, id string) (events []event, err error) {
	last := int64(0)
	for {
		if resp == nil {
			if resp, err = c.open(ctx, http.MethodGet, execution(id, "output")+"?after_seq="+strconv.FormatInt(last, 10),
				nil); err != nil {
				return nil, err
			}
		}
		ended := false
		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			var e event
			if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
				break // an incomplete line
			}
			if e.Type == "keepalive" {
				continue
			}
			if e.Seq != last+1 {
				return nil, fmt.Errorf("event %d of %s comes after %d", e.Seq, id, last)
			}
			events, last, ended = append(events, e), e.Seq, e.Type == "result"
		}
		_ = resp.Body.Close()
		if ended {
			return events, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		c.resumed.Add(1)
		c.next++
		resp = nil
	}
}

// call runs one program in one of the modes. It returns the execution's id and the output that the
// client received.
func (c *caller) call(ctx context.Context, n int, word string) (id, stdout string, err error) {
	seconds := "0.1"
	if n%40 == 1 { // runs longer than a gateway waits for its streams
		seconds = "3"
	}
	program := bash(fmt.Sprintf("echo one %[1]s\nsleep %[2]s\necho two %[1]s\nsleep %[2]s\necho three %[1]s",
		word, seconds))
	key := []string{"Idempotency-Key", word}
	switch n % 4 {
	case 0:
		r, err := c.do(ctx, http.MethodPost, executePath, program, key...)
		if err != nil {
			return "", "", err
		}
		var res proto.Result
		if err := json.Unmarshal(r.body, &res); err != nil || !res.Success {
			return "", "", fmt.Errorf("inline: %w: %s", err, r)
		}
		return r.header.Get("X-Trace-Id"), res.Stdout, nil
	case 1:
		resp, err := c.open(ctx, http.MethodPost, executePath, program, append(key, accept, ndjson)...)
		if err != nil {
			return "", "", err
		}
		id = resp.Header.Get("X-Trace-Id")
		events, err := c.stream(ctx, resp, id)
		return id, printedBy(events), err
	}
	r, err := c.do(ctx, http.MethodPost, executePath, program, append(key, "Prefer", "respond-async")...)
	if err != nil {
		return "", "", err
	}
	id = r.header.Get("X-Trace-Id")
	if n%4 == 2 {
		events, err := c.stream(ctx, nil, id)
		return id, printedBy(events), err
	}
	rec, err := c.poll(ctx, id)
	return id, deref(rec.Stdout), err
}

// poll polls an execution until it has ended.
func (c *caller) poll(ctx context.Context, id string) (rec record, err error) {
	for rec.Status == "" || !proto.Status(rec.Status).Terminal() {
		r, err := c.do(ctx, http.MethodGet, execution(id)+"?wait=5", nil)
		if err != nil {
			return rec, err
		}
		if err := json.Unmarshal(r.body, &rec); err != nil {
			return rec, err
		}
	}
	return rec, nil
}

func printedBy(events []event) string {
	var out bytes.Buffer
	for _, e := range events {
		out.WriteString(e.Data)
	}
	return out.String()
}

// testRolling restarts every process one after the other while 200 clients call. No client may get
// an error that a retry does not fix, nothing may be lost, and nothing may run twice.
func testRolling(t *testing.T, p *programs, in topology) {
	f := newFleet(t, p, in)
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	var (
		all            sync.WaitGroup
		restarted      = make(chan struct{})
		cured, resumed atomic.Int64
		calls          atomic.Int64
		mu             sync.Mutex
		words          = map[string]string{} // by execution id
	)
	gateways := f.gateways(t)
	for n := range rollingCallers.n() {
		all.Go(func() {
			c := &caller{gateways: gateways, next: n, cured: &cured, resumed: &resumed}
			for round := 0; ; round++ {
				calls.Add(1)
				word := fmt.Sprintf("word-%d-%d", n, round)
				id, stdout, err := c.call(ctx, n, word)
				switch want := fmt.Sprintf("one %[1]s\ntwo %[1]s\nthree %[1]s\n", word); {
				case err != nil:
					t.Errorf("client %d: %s %v", n, id, err)
				case stdout != want:
					t.Errorf("client %d: %s printed %q", n, id, stdout)
				}
				mu.Lock()
				if words[id] != "" {
					t.Errorf("%s is both %s and %s", id, words[id], word)
				}
				words[id] = word
				mu.Unlock()
				select {
				case <-restarted:
					return
				default:
				}
			}
		})
	}
	eventually(t, "the first answers are there", func() (bool, any) {
		mu.Lock()
		defer mu.Unlock()
		return len(words) > rollingCallers.n()/4, len(words)
	})
	for _, m := range f.members {
		f.restart(t, m)
	}
	if f.cluster != nil {
		for _, n := range f.cluster.nodes {
			f.cluster.whole(t)
			began := time.Now()
			n.stop(t)
			n.start(t)
			f.cluster.whole(t)
			t.Logf("%s is back after %s", n.name, time.Since(began).Round(time.Millisecond))
		}
	}
	close(restarted)
	all.Wait()
	t.Logf("%d calls, %d tries that another one cured, %d streams resumed", calls.Load(), cured.Load(), resumed.Load())
	if in.separate && resumed.Load() == 0 {
		t.Error("no stream had to go on through another gateway: the longest are too short")
	}
	f.ranOnce(t, words)
}

// ranOnce checks the results that clients received. It also checks in the logs of all workers that
// no other program ran and that none ran twice.
func (f *fleet) ranOnce(t *testing.T, words map[string]string) {
	t.Helper()
	ran := map[string]int{}
	for _, w := range f.workers {
		for s := bufio.NewScanner(strings.NewReader(w.text(t))); s.Scan(); {
			var line struct {
				Msg   string
				Trace string `json:"trace_id"`
				Error string `json:"error"`
				Start string `json:"start"` // how the program's jail was made; empty if no program ran
			}
			if json.Unmarshal(s.Bytes(), &line) != nil {
				continue
			}
			// An execution that could not be claimed was withdrawn before its program started.
			if line.Msg == "execution ended" && line.Start != "" || line.Msg == "execution abandoned" &&
				!strings.HasPrefix(line.Error, "claim ") {
				ran[line.Trace]++
			}
		}
	}
	for id, n := range ran {
		if words[id] == "" || n != 1 {
			t.Errorf("%s, which is %q, ran %d times", id, words[id], n)
		}
	}
	for id, word := range words {
		if ran[id] == 0 {
			t.Errorf("%s, which is %s, did not run", id, word)
		}
		want := fmt.Sprintf("one %[1]s\ntwo %[1]s\nthree %[1]s\n", word)
		rec := f.record(id)
		rec.succeeded(t, want)
		if rec.Attempt != 1 {
			t.Errorf("attempt %d: %s", rec.Attempt, rec)
		}
		if stdout, _, last := checkEvents(t, f.output(id, 0), 0); stdout != want || *last.OutputTruncated {
			t.Errorf("the output of %s is %q", id, stdout)
		}
		if rec.DeliveryMode == string(proto.ModeAsync) {
			f.delivered(id).check(t, proto.DeliveryDelivered, 1)
		}
	}
}
