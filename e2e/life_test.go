package e2e

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// fresh returns a client that opens a connection for each request, as a new client does.
func (a *api) fresh() *api {
	return &api{a.t, a.base, a.key, &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
}

// draining waits until new requests are rejected with Retry-After.
func draining(t *testing.T, a *api) {
	t.Helper()
	var told *reply
	eventually(t, "new requests get 503", func() (bool, any) {
		told = a.get(execution("trc_x"))
		return told.status == http.StatusServiceUnavailable, told
	})
	told.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
	told.retryAfter(t)
}

// testDrain stops all processes while programs run whose callers wait.
func testDrain(t *testing.T, p *programs, in topology) {
	w, h := newWorld(t, p, in, 4), newHold()
	inline, stream := w.start(bash(h.code())), w.start(bash(h.code()), accept, ndjson)
	h.reached(t, 2)
	w.front.signal(syscall.SIGTERM)
	// In one process, this would be a second signal, which stops everything at once.
	if in.apart {
		w.worker.signal(syscall.SIGTERM)
	}
	anew := w.fresh()
	draining(t, anew)
	for range 20 { // repeated during the drain: no connection is refused
		r := anew.execute(bash("true"))
		r.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
		r.retryAfter(t)
	}
	if r := anew.get("/readyz"); r.status != http.StatusServiceUnavailable {
		t.Errorf("/readyz: %s", r)
	}
	if r := anew.get("/healthz"); r.status != http.StatusOK {
		t.Errorf("/healthz: %s", r)
	}
	h.reached(t, 2)
	h.release(t)
	if res := inline.answer(t).result(t); res.Stdout != "held\nwoken\n" || !res.Success {
		t.Errorf("inline: %+v", res)
	}
	if stdout, _, _ := checkEvents(t, stream.answer(t).events(t), 0); stdout != "held\nwoken\n" {
		t.Errorf("streamed: %q", stdout)
	}
	for _, proc := range []*process{w.front, w.worker} {
		if code := proc.exitCode(t); code != 0 {
			t.Errorf("%s ended with exit code %d:\n%s", proc.name, code, proc.tail())
		}
	}
}

// testDrainAsync stops the server while programs run whose callers do not wait on a connection.
func testDrainAsync(t *testing.T, p *programs) {
	w, h := newWorld(t, p, topology{}, 1), newHold()
	running := w.submit(bash(h.code()))
	h.reached(t, 1)
	queued := w.submit(bash("echo later"))
	w.front.signal(syscall.SIGTERM)
	anew := w.fresh()
	// Twenty times in a row, while the program runs.
	for n := 0; n < 20; {
		r, err := anew.try(t.Context(), http.MethodGet, execution("trc_x"), nil)
		switch {
		case err != nil:
			t.Errorf("while a program runs that was submitted before the shutdown, a new request gets no answer but: %v", err)
			n = 20
		case r.status == http.StatusServiceUnavailable:
			n++
		}
	}
	h.reached(t, 1)
	h.release(t)
	if code := w.front.exitCode(t); code != 0 {
		t.Errorf("exit code %d:\n%s", code, w.front.tail())
	}
	w.startFront(t)
	w.ended(running).succeeded(t, "held\nwoken\n")
	w.ended(queued).succeeded(t, "later\n")
}

// testDrainOver runs a program for longer than the shutdown waits.
func testDrainOver(t *testing.T, p *programs, in topology) {
	w, h := newWorld(t, p, in, 3, "--drain", "1s"), newHold()
	id := w.submit(bash(h.code()))
	inline, stream := w.start(bash(h.code())), w.start(bash(h.code()), accept, ndjson)
	h.reached(t, 3)
	w.worker.signal(syscall.SIGTERM)
	if code := w.worker.exitCode(t); code != 0 {
		t.Errorf("exit code %d:\n%s", code, w.worker.tail())
	}
	if pids := h.pids(t); len(pids) > 0 {
		t.Errorf("the server has ended and its program runs on: %v", pids)
	}
	if res := inline.answer(t).result(t); display(res.ErrorCode) != `"worker_lost"` || !strings.Contains(display(res.ErrorMessage), "shut down") {
		t.Errorf("inline: %+v", res)
	}
	if stdout, _, last := checkEvents(t, stream.answer(t).events(t), 0); stdout != "held\n" || display(last.Result.ErrorCode) != `"worker_lost"` {
		t.Errorf("streamed: %q, and at last %+v", stdout, last)
	}
	if !in.apart {
		w.startFront(t)
	}
	rec := w.record(id) // recorded before the exit, not detected by a timeout
	rec.failed(t, "failed", "worker_lost", "shut down")
	if display(rec.Error) != `"worker_lost"` || *rec.Stdout != "held\n" {
		t.Errorf("got %s", rec)
	}
	stdout, _, last := checkEvents(t, w.output(id, 0), 0)
	if stdout != "held\n" || last.Status != "failed" {
		t.Errorf("the output is %q, the end %q", stdout, last.Status)
	}
}

// testOneSlot checks what happens to executions that wait for the only slot.
func testOneSlot(t *testing.T, p *programs, in topology) {
	w, h := newWorld(t, p, in, 1, "--queue-wait", "1s"), newHold()
	running, waiting := w.submit(bash(h.code())), newHold()
	h.reached(t, 1)

	queued := w.submit(bash(waiting.code()))
	if rec := w.record(queued); rec.Status != "queued" || rec.Attempt != 0 || *rec.DurationMS != 0 {
		t.Errorf("in the queue: %s", rec)
	}
	if r := w.do(http.MethodPost, execution(queued, "cancel"), nil); r.status != http.StatusAccepted {
		t.Errorf("cancel in the queue: %s", r)
	}
	w.record(queued).failed(t, "cancelled", "cancelled", "")
	if events := w.output(queued, 0); len(events) != 1 || events[0].Type != "result" || events[0].Status != "cancelled" {
		t.Errorf("the output of what never ran is %+v", events)
	}

	const key, word = "Idempotency-Key", "withdrawn"
	for _, mode := range []string{"application/json", ndjson} {
		// The thread must be free again for the second one.
		r := w.execute(bash(waiting.code()).of("withdrawn"), accept, mode, key, word+mode)
		r.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
		r.retryAfter(t)
		w.record(r.trace(t)).failed(t, "failed", "expired_in_queue", "")
	}
	w.leaveQueue(t, bash(waiting.code()).of("left"))
	last := w.submit(bash("echo last").of("left"))
	h.release(t)
	w.ended(running).succeeded(t, "held\nwoken\n")
	w.ended(last).succeeded(t, "last\n")
	// No withdrawn program has run. It would have run before the last one, or would hold the slot
	// now.
	if pids := waiting.pids(t); len(pids) > 0 {
		t.Errorf("withdrawn programs run: %v", pids)
	}
	// Its key is free, too.
	if r := w.execute(bash("echo anew").of("withdrawn"), key, word+ndjson); r.status != http.StatusOK {
		t.Errorf("the key of a withdrawn execution: %s", r)
	}
}

// leaveQueue submits a program when no slot is free and disconnects while it is queued.
func (w *world) leaveQueue(t *testing.T, program request) {
	t.Helper()
	depth := func() string {
		for line := range strings.Lines(string(w.get("/metrics").body)) {
			if n, ok := strings.CutPrefix(line, "bullpen_queue_depth "); ok {
				return strings.TrimSpace(n)
			}
		}
		return "unknown"
	}
	eventually(t, "a program is queued and nobody waits for it", func() (bool, any) {
		ctx, leave := context.WithCancel(t.Context())
		defer leave()
		left := make(chan error, 1)
		go func() {
			_, err := w.try(ctx, http.MethodPost, executePath, program)
			left <- err
		}()
		for depth() != "1" {
			select {
			case err := <-left:
				return false, fmt.Sprintf("the answer came first: %v", err)
			default:
			}
		}
		leave()
		err := <-left
		return errors.Is(err, context.Canceled), err
	})
	eventually(t, "the queue is empty", func() (bool, any) { n := depth(); return n == "0", n })
}

// testDataLock starts a second server on the data directory of the first.
func testDataLock(t *testing.T, p *programs) {
	w := newWorld(t, p, topology{}, 1)
	second := p.startProcess(t, "second", w.env, p.bullpen, "serve", "--listen", "127.0.0.1:0", "--data", w.data, "--nsjail", p.nsjail)
	if code := second.exitCode(t); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	if text := second.text(t); !strings.Contains(text, "in use by another bullpen") || !strings.Contains(text, w.data) {
		t.Errorf("it says:\n%s", text)
	}
	if r := w.inline(bash("echo unharmed")); r.Stdout != "unharmed\n" {
		t.Errorf("the first: %+v", r)
	}
	w.front.kill() // the lock is released when its holder dies
	w.startFront(t)
	w.ready(t)
}

// testKillEverything kills the single process while many jobs are queued and running and more are
// arriving.
func testKillEverything(t *testing.T, p *programs) {
	const jobs, slots = 40, 2 // the jobs take longer than submitting them
	w := newWorld(t, p, topology{}, slots)
	h := newHold() // it occupies a slot, so it is certain to be lost
	long := w.submit(bash(h.code()))
	h.reached(t, 1)
	accepted := map[string]string{} // expected output by id
	enough, over := make(chan struct{}), make(chan struct{})
	go func() { // runs until the server dies
		defer close(over)
		for i := 0; ; i++ {
			word := fmt.Sprintf("job %d", i)
			r, err := w.try(t.Context(), http.MethodPost, executePath, bash("sleep 0.05; echo "+word), "Prefer", "respond-async")
			if err != nil {
				return
			}
			if r.status != http.StatusAccepted {
				t.Errorf("submit: %s", r)
				return
			}
			accepted[r.header.Get("X-Trace-Id")] = word + "\n"
			if i == jobs {
				close(enough)
			}
		}
	}()
	select {
	case <-enough:
	case <-over:
		t.Fatal("the server takes no jobs")
	}
	w.front.kill()
	<-over
	h.reached(t, 0)

	w.startFront(t)
	w.ready(t)
	lost, ended := 0, map[string]string{}
	for id, word := range accepted {
		rec := w.ended(id)
		ended[id] = rec.String()
		if rec.ErrorCode != nil {
			lost++
			rec.failed(t, "failed", "worker_lost", "lost")
		} else {
			rec.succeeded(t, word)
		}
		if rec.Attempt != 1 {
			t.Errorf("%s was run %d times", id, rec.Attempt)
		}
	}
	w.ended(long).failed(t, "failed", "worker_lost", "lost")
	if lost > slots-1 {
		t.Errorf("%d of %d are lost, with %d slots of which one was held", lost, len(accepted), slots)
	}
	t.Logf("%d accepted, %d lost", len(accepted)+1, lost+1)
	w.front.kill() // a second kill, when idle: finished executions must not change
	w.startFront(t)
	for id, was := range ended {
		if now := w.record(id).String(); now != was {
			t.Errorf("ended as %s, now %s", was, now)
		}
		if events := w.output(id, 0); events[len(events)-1].Type != "result" {
			t.Errorf("the output of %s ends with %+v", id, events[len(events)-1])
		}
	}
}

// testFullDisk fills the disk under the data directory and then frees space again.
func testFullDisk(t *testing.T, p *programs) {
	disk := filepath.Join(t.TempDir(), "disk")
	if err := os.Mkdir(disk, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=192m"); err != nil {
		t.Fatalf("mount a small disk: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(disk, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	w := &world{
		topology: topology{}, programs: p, data: filepath.Join(disk, "data"), args: []string{"--slots", "2"},
		api: &api{t: t, key: newSecret(), http: newHTTP(t, nil)},
	}
	w.env = []string{"BULLPEN_BOOTSTRAP_KEY=" + w.key}
	w.startFront(t)
	w.ready(t)

	var before []string
	for i := range 8 {
		before = append(before, w.submit(bash(fmt.Sprintf("echo %d", i))))
	}
	for i, id := range before {
		w.ended(id).succeeded(t, strconv.Itoa(i)+"\n")
	}
	h := newHold()
	running := []string{w.submit(bash(h.code())), w.submit(bash(h.code()))}
	h.reached(t, 2)
	queued := w.submit(bash("echo queued"))

	filler := filepath.Join(disk, "filler")
	fill(t, filler)
	for _, mode := range [][]string{nil, {"Prefer", "respond-async"}, {accept, ndjson}} {
		r := w.execute(bash("true"), mode...)
		r.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
		r.retryAfter(t)
	}
	for i, id := range before {
		w.record(id).succeeded(t, strconv.Itoa(i)+"\n")
	}
	h.release(t) // they end while nothing can be stored
	h.reached(t, 0)
	fill(t, filler)
	for range 5 {
		w.execute(bash("true"), "Prefer", "respond-async").rejection(t, http.StatusServiceUnavailable, "service_unavailable")
	}
	for _, id := range append(running, queued) {
		if rec := w.record(id); rec.TraceID != id {
			t.Errorf("accepted before: %s", rec)
		}
	}

	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	eventually(t, "work is taken again, without a restart", func() (bool, any) {
		r, err := w.try(t.Context(), http.MethodPost, executePath, bash("echo again"))
		return err == nil && r.status == http.StatusOK && strings.Contains(string(r.body), `"again\n"`), fmt.Sprint(r, err)
	})
	for i, id := range before {
		w.record(id).succeeded(t, strconv.Itoa(i)+"\n")
	}
	for _, id := range running {
		w.ended(id).succeeded(t, "held\nwoken\n")
	}
	w.ended(queued).succeeded(t, "queued\n")
}

// fill writes until the disk is full.
func fill(t testing.TB, name string) {
	t.Helper()
	f, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }() // the disk is full by intent
	for piece := make([]byte, 1<<20); len(piece) > 0; {
		_, err := f.Write(piece)
		switch {
		case errors.Is(err, syscall.ENOSPC):
			piece = piece[:len(piece)/2]
		case err != nil:
			t.Fatal(err)
		}
	}
}

// testWorkerKilled kills a worker with one program that may run once and one that may be retried.
func testWorkerKilled(t *testing.T, p *programs) {
	w := newWorld(t, p, topology{apart: true}, 4)
	once, twice := newHold(), newHold()
	lost, again := w.submit(bash(once.code())), w.submit(bash(twice.code()).and("max_attempts", 2))
	inline, stream := w.start(bash(once.code())), w.start(bash(once.code()), accept, ndjson)
	once.reached(t, 3)
	twice.reached(t, 1)
	follow := w.follow(again, 0)
	// No slot is free, and no worker will be left.
	late := w.start(bash("true"))
	w.worker.kill()
	killed := time.Now()
	once.reached(t, 0)
	twice.reached(t, 0)
	t.Logf("the jails were gone %s after their worker", time.Since(killed).Round(time.Millisecond))
	late.answer(t).rejection(t, http.StatusServiceUnavailable, "service_unavailable")

	w.startWorker(t)
	end := w.ended(lost)
	end.failed(t, "failed", "worker_lost", "lost")
	t.Logf("the end was recorded %s after the worker was killed", end.CompletedAt.Sub(killed).Round(time.Millisecond))
	if res := inline.answer(t).result(t); display(res.ErrorCode) != `"worker_lost"` {
		t.Errorf("inline: %+v", res)
	}
	for _, events := range [][]event{w.output(lost, 0), stream.answer(t).events(t)} {
		if stdout, _, last := checkEvents(t, events, 0); stdout != "held\n" || last.Status != "failed" || display(last.Result.ErrorCode) != `"worker_lost"` {
			t.Errorf("the output of a lost one is %q, its end %+v", stdout, last)
		}
	}
	twice.reached(t, 1)
	if rec := w.record(again); rec.Status != "running" || rec.Attempt != 2 {
		t.Errorf("run again: %s", rec)
	}
	twice.release(t)
	rec := w.ended(again)
	rec.succeeded(t, "held\nwoken\n") // the last attempt's output
	if rec.Attempt != 2 {
		t.Errorf("attempt %d", rec.Attempt)
	}
	// Its events are those of both attempts, numbered consecutively, with a single status.
	for _, events := range [][]event{w.output(again, 0), follow.answer(t).events(t)} {
		if stdout, _, _ := checkEvents(t, events, 0); stdout != "held\nheld\nwoken\n" {
			t.Errorf("the output of both attempts is %q", stdout)
		}
	}
}

// testNoWorker submits jobs while there is no worker.
func testNoWorker(t *testing.T, p *programs) {
	w := newWorld(t, p, topology{apart: true}, noSlots, "--queue-wait", "1s")
	eventually(t, "not ready, for want of a worker", func() (bool, any) {
		r := w.get("/readyz")
		return r.status == http.StatusServiceUnavailable && strings.Contains(string(r.body), "worker"), r
	})
	id := w.submit(bash("echo at last"))
	r := w.execute(bash("true"))
	r.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
	r.retryAfter(t)
	if rec := w.record(id); rec.Status != "queued" {
		t.Errorf("without a worker: %s", rec)
	}
	w.startWorker(t)
	w.ended(id).succeeded(t, "at last\n")
	w.ready(t)
}

// testTwoGateways queries one gateway for executions that were submitted at the other.
func testTwoGateways(t *testing.T, p *programs) {
	w := newWorld(t, p, topology{apart: true}, 2)
	first := w.api
	args := append([]string{"--data", filepath.Join(t.TempDir(), "second"), "--roles", "gateway"}, w.args...)
	_, base := p.startServe(t, "second front", w.env, args...)
	second := &api{t, base, w.key, w.http}

	h := newHold()
	id := first.submit(bash(h.code()), "Idempotency-Key", "one")
	h.reached(t, 1)
	if got := second.submit(bash(h.code()), "Idempotency-Key", "one"); got != id {
		t.Errorf("the second gateway ran it again: %s, want %s", got, id)
	}
	resp, err := second.open(t.Context(), http.MethodGet, execution(id, "output"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if rec := second.record(id); rec.Status != "running" {
		t.Errorf("at the second: %s", rec)
	}
	h.release(t)
	var body bytes.Buffer
	if _, err := body.ReadFrom(resp.Body); err != nil {
		t.Fatal(err)
	}
	if stdout, _, _ := checkEvents(t, (&reply{body: body.Bytes()}).events(t), 0); stdout != "held\nwoken\n" {
		t.Errorf("followed at the second: %q", stdout)
	}
	second.ended(id).succeeded(t, "held\nwoken\n")

	h = newHold()
	id = second.submit(bash(h.code()))
	h.reached(t, 1)
	if r := first.do(http.MethodPost, execution(id, "cancel"), nil); r.status != http.StatusAccepted {
		t.Errorf("cancel at the first: %s", r)
	}
	second.ended(id).failed(t, "cancelled", "cancelled", "")

	secret, key := first.newKey("both", "pro")
	eventually(t, "a new key is known at the second gateway", func() (bool, any) {
		r := second.with(secret).get(execution("trc_x"))
		return r.status == http.StatusNotFound, r
	})
	if r := first.do(http.MethodDelete, "/v1/admin/keys/"+key, nil); r.status != http.StatusOK {
		t.Errorf("revoke: %s", r)
	}
	revoked := time.Now()
	eventually(t, "a revoked key is refused at the second gateway", func() (bool, any) {
		r := second.with(secret).get(execution("trc_x"))
		return r.status == http.StatusUnauthorized, r
	})
	t.Logf("revoked everywhere after %s", time.Since(revoked).Round(time.Millisecond))

	// The first gateway is also the leading dispatcher. Without it, the second takes over
	// everything, because every gateway is on standby.
	w.front.kill()
	eventually(t, "the second gateway is ready alone", func() (bool, any) {
		r := second.get("/readyz")
		return r.status == http.StatusOK, r
	})
	if r := second.inline(bash("echo alone")); r.Stdout != "alone\n" {
		t.Errorf("alone: %+v", r)
	}
}

// testFrontKilled kills the gateway and the dispatcher while programs run and wait. The worker is
// not affected.
func testFrontKilled(t *testing.T, p *programs) {
	w, h := newWorld(t, p, topology{apart: true}, 1), newHold()
	running := w.submit(bash(h.code()))
	h.reached(t, 1)
	queued := w.submit(bash("echo queued"))
	w.front.kill()
	eventually(t, "the worker tells that nobody hands out jobs", func() (bool, any) {
		_, ok := w.worker.said(t, "no dispatcher: start a gateway or scheduler on this NATS")
		return ok, "nothing said"
	})
	w.startFront(t)
	if rec := w.record(running); rec.Status != "running" {
		t.Errorf("after the restart: %s", rec)
	}
	h.release(t)
	w.ended(running).succeeded(t, "held\nwoken\n")
	w.ended(queued).succeeded(t, "queued\n")
}

// testWorkerFirst starts a worker when only NATS is running. The worker must log what it waits for
// and continue once that exists.
func testWorkerFirst(t *testing.T, p *programs) {
	b := p.startBroker(t)
	w := &world{programs: p, topology: topology{apart: true}, args: b.flags(p), env: append(b.env(), "BULLPEN_BOOTSTRAP_KEY="+newSecret())}
	data := filepath.Join(t.TempDir(), "worker")
	args := append([]string{"serve", "--roles", "worker", "--data", data, "--nsjail", p.nsjail, "--log-format", "json"}, w.args...)
	w.worker = p.startProcess(t, "worker", w.env, p.bullpen, args...)
	eventually(t, "the worker tells what it waits for", func() (bool, any) {
		_, ok := w.worker.said(t, "waiting for the streams of bullpen on this NATS; a gateway or scheduler creates them when it starts")
		return ok, "nothing said"
	})
	w.api, w.data = &api{t: t, http: newHTTP(t, nil)}, filepath.Join(t.TempDir(), "front")
	w.startFront(t)
	w.ready(t)
	if entries, err := os.ReadDir(data); err != nil || len(entries) != 1 || entries[0].Name() != "homes" {
		t.Errorf("a worker, which keeps nothing but homes that it may need again, has %v: %v", entries, err)
	}
}

// testBrokerKilled kills the NATS server and restarts it before any lease expires. A client that
// reads a stream meanwhile need not notice.
func testBrokerKilled(t *testing.T, p *programs) {
	w, h := newWorld(t, p, topology{apart: true}, 1), newHold()
	running := w.submit(bash(h.code()))
	h.reached(t, 1)
	queued := w.submit(bash("echo queued"))
	live, err := w.open(t.Context(), http.MethodGet, execution(running, "output"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = live.Body.Close() }()
	stream := bufio.NewReader(live.Body)
	read := &reply{status: live.StatusCode, header: live.Header}
	for !bytes.Contains(read.body, []byte("held")) {
		line, err := stream.ReadBytes('\n')
		if err != nil {
			t.Fatal(err)
		}
		read.body = append(read.body, line...)
	}
	w.broker.kill()
	// A job in flight when NATS died may have been stored. Only then is the outcome unknown, and
	// the id can be polled later.
	torn := w.execute(bash("echo torn"), "Prefer", "respond-async")
	maybe := torn.header.Get("X-Trace-Id")
	if maybe == "" {
		torn.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
		torn.retryAfter(t)
	} else if said := torn.rejection(t, http.StatusInternalServerError, "internal"); !strings.Contains(said, "/v1/executions/"+maybe) {
		t.Errorf("the answer does not tell where to ask: %q", said)
	}
	w.broker.restart(t, p)
	w.ready(t)
	h.release(t)
	if maybe != "" {
		if r := w.get(execution(maybe)); r.status != http.StatusNotFound {
			w.ended(maybe)
		}
	}
	rec := w.ended(running)
	rest, err := io.ReadAll(stream)
	if err != nil {
		t.Fatal(err)
	}
	read.body = append(read.body, rest...)
	// On a very slow machine, the lease may expire and the execution may be lost. It must then say
	// so.
	if rec.ErrorCode == nil {
		rec.succeeded(t, "held\nwoken\n")
		stdout, _, last := checkEvents(t, read.events(t), 0)
		if stdout != "held\nwoken\n" || *last.OutputTruncated {
			t.Errorf("the stream has %q, truncated %t", stdout, *last.OutputTruncated)
		}
	} else {
		rec.failed(t, "failed", "worker_lost", "lost")
	}
	w.ended(queued).succeeded(t, "queued\n")
	eventually(t, "work goes on", func() (bool, any) {
		r := w.execute(bash("echo on"))
		return r.status == http.StatusOK, r
	})
	// NATS stays down longer than a lease lasts: every submission is rejected with Retry-After.
	w.broker.kill()
	eventually(t, "the gateway has noticed", func() (bool, any) {
		r := w.get("/readyz")
		return r.status == http.StatusServiceUnavailable, r
	})
	for what, r := range map[string]*pending{
		"async": w.start(bash("true"), "Prefer", "respond-async"), "inline": w.start(bash("true")), "streaming": w.start(bash("true"), accept, ndjson),
		"with an Idempotency-Key": w.start(bash("true"), "Idempotency-Key", "k"), "in a thread": w.start(bash("true").of("t")),
	} {
		answer := r.answer(t)
		t.Logf("%s: %s", what, answer)
		answer.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
		answer.retryAfter(t)
	}
	w.broker.restart(t, p)
	w.ready(t)
}

// testCredentials checks that the NATS server of the other tests rejects clients without
// credentials.
func testCredentials(t *testing.T, p *programs) {
	b := p.startBroker(t)
	for name, c := range map[string]struct {
		env, flags []string
		says       string
	}{
		"nobody":         {nil, []string{"--nats", b.url, "--nats-ca", p.cert}, "Authorization Violation"},
		"wrong password": {[]string{"BULLPEN_NATS_PASSWORD=wrong"}, b.flags(p), "Authorization Violation"},
		"no authority":   {b.env(), []string{"--nats", b.url, "--nats-user", natsUser}, "certificate"},
	} {
		args := append([]string{"serve", "--listen", "127.0.0.1:0", "--data", t.TempDir(), "--nsjail", p.nsjail}, c.flags...)
		proc := p.startProcess(t, "stranger", c.env, p.bullpen, args...)
		if code := proc.exitCode(t); code != 1 || !strings.Contains(proc.text(t), c.says) {
			t.Errorf("%s: exit code %d, and it says:\n%s", name, code, proc.text(t))
		}
		if strings.Contains(proc.text(t), natsPassword) {
			t.Errorf("%s: the log shows the password", name)
		}
	}
	// The key that a server generates is stored in a file and nowhere else.
	w := newWorld(t, p, topology{}, 1)
	w.front.kill()
	w.data, w.env = filepath.Join(t.TempDir(), "fresh"), nil
	w.startFront(t)
	name := filepath.Join(w.data, "bootstrap.key")
	raw, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(name); err != nil || info.Mode().Perm() != fs.FileMode(0o600) {
		t.Errorf("its mode is %v: %v", info.Mode(), err)
	}
	w.key = strings.TrimSpace(string(raw))
	if err := proto.CheckKeyForm(w.key); err != nil {
		t.Error(err)
	}
	w.ready(t)
	if r := w.inline(bash("echo in")); r.Stdout != "in\n" {
		t.Errorf("got %+v", r)
	}
	if text := w.front.text(t); strings.Contains(text, w.key) || !strings.Contains(text, name) {
		t.Errorf("the log must name the file and not show the key:\n%s", text)
	}
}
