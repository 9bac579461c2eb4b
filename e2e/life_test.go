package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// withNewConnections returns a client that opens a connection for each request, as a new client
// does.
func (a *api) withNewConnections() *api {
	return &api{a.t, a.base, a.key, &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
}

// draining waits until a server drains.
func draining(t *testing.T, a *api) {
	t.Helper()
	eventually(t, "/readyz returns 503", func() (bool, any) {
		r := a.get("/readyz")
		return r.status == http.StatusServiceUnavailable, r
	})
}

// testDrain stops all processes while programs run whose callers wait.
func testDrain(t *testing.T, p *programs, in topology) {
	sys, h := newSystem(t, p, in, 4), newHold()
	inline, stream := sys.start(bash(h.code())), sys.start(bash(h.code()), accept, ndjson)
	polled, stopped := sys.submit(bash(h.code())), sys.submit(bash("sleep 60"))
	h.reached(t, 3)
	sys.front.signal(syscall.SIGTERM)
	// In one process, this would be a second signal, which stops everything at once.
	if in.separate {
		sys.worker.signal(syscall.SIGTERM)
	}
	anew := sys.withNewConnections()
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
	// Clients still ask for what runs.
	for _, path := range []string{execution(polled), "/v1/threads", "/v1/admin/keys"} {
		if r := anew.get(path); r.status != http.StatusOK {
			t.Errorf("%s: %s", path, r)
		}
	}
	if r := anew.do(http.MethodPost, execution(stopped)+"/cancel", nil); r.status != http.StatusAccepted {
		t.Errorf("cancel: %s", r)
	}
	h.reached(t, 3)
	h.release(t)
	if res := inline.answer(t).result(t); res.Stdout != "held\nwoken\n" || !res.Success {
		t.Errorf("inline: %+v", res)
	}
	if stdout, _, _ := checkEvents(t, stream.answer(t).events(t), 0); stdout != "held\nwoken\n" {
		t.Errorf("streamed: %q", stdout)
	}
	for _, proc := range []*process{sys.front, sys.worker} {
		if code := proc.exitCode(t); code != 0 {
			t.Errorf("%s ended with exit code %d:\n%s", proc.name, code, proc.tail())
		}
	}
}

// testDrainAsync stops the server while programs run whose callers do not wait on a connection.
func testDrainAsync(t *testing.T, p *programs) {
	sys, h := newSystem(t, p, topology{}, 1), newHold()
	running := sys.submit(bash(h.code()))
	h.reached(t, 1)
	queued := sys.submit(bash("echo later"))
	sys.front.signal(syscall.SIGTERM)
	anew := sys.withNewConnections()
	// Twenty times in a row, while the program runs.
	for n := 0; n < 20; {
		r, err := anew.try(t.Context(), http.MethodPost, executePath, bash("true"), "Prefer", "respond-async")
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
	if code := sys.front.exitCode(t); code != 0 {
		t.Errorf("exit code %d:\n%s", code, sys.front.tail())
	}
	sys.startFront(t)
	sys.ended(running).succeeded(t, "held\nwoken\n")
	sys.ended(queued).succeeded(t, "later\n")
}

// testDrainOver runs a program for longer than the shutdown waits.
func testDrainOver(t *testing.T, p *programs, in topology) {
	sys, h := newSystem(t, p, in, 3, "--drain", "1s"), newHold()
	id := sys.submit(bash(h.code()))
	inline, stream := sys.start(bash(h.code())), sys.start(bash(h.code()), accept, ndjson)
	h.reached(t, 3)
	sys.worker.signal(syscall.SIGTERM)
	if code := sys.worker.exitCode(t); code != 0 {
		t.Errorf("exit code %d:\n%s", code, sys.worker.tail())
	}
	if pids := h.pids(t); len(pids) > 0 {
		t.Errorf("the server has ended and its program runs on: %v", pids)
	}
	if res := inline.answer(t).result(t); display(res.ErrorCode) != `"worker_lost"` ||
		!strings.Contains(display(res.ErrorMessage), "shut down") {
		t.Errorf("inline: %+v", res)
	}
	if stdout, _, last := checkEvents(t, stream.answer(t).events(t), 0); stdout != "held\n" ||
		display(last.Result.ErrorCode) != `"worker_lost"` {
		t.Errorf("streamed: %q, and at last %+v", stdout, last)
	}
	if !in.separate {
		sys.startFront(t)
	}
	rec := sys.record(id) // recorded before the exit, not detected by a timeout
	rec.failed(t, "failed", "worker_lost", "shut down")
	if display(rec.Error) != `"worker_lost"` || *rec.Stdout != "held\n" {
		t.Errorf("got %s", rec)
	}
	stdout, _, last := checkEvents(t, sys.output(id, 0), 0)
	if stdout != "held\n" || last.Status != "failed" {
		t.Errorf("the output is %q, the end %q", stdout, last.Status)
	}
}

// testOneSlot checks what happens to executions that wait for the only slot.
func testOneSlot(t *testing.T, p *programs, in topology) {
	sys, h := newSystem(t, p, in, 1, "--queue-wait", "1s"), newHold()
	running, waiting := sys.submit(bash(h.code())), newHold()
	h.reached(t, 1)

	queued := sys.submit(bash(waiting.code()))
	if rec := sys.record(queued); rec.Status != "queued" || rec.Attempt != 0 || *rec.DurationMS != 0 {
		t.Errorf("in the queue: %s", rec)
	}
	if r := sys.do(http.MethodPost, execution(queued, "cancel"), nil); r.status != http.StatusAccepted {
		t.Errorf("cancel in the queue: %s", r)
	}
	sys.record(queued).failed(t, "cancelled", "cancelled", "")
	if events := sys.output(queued, 0); len(events) != 1 || events[0].Type != "result" || events[0].Status != "cancelled" {
		t.Errorf("the output of what never ran is %+v", events)
	}

	const key, word = "Idempotency-Key", "withdrawn"
	for _, mode := range []string{"application/json", ndjson} {
		// The thread must be free again for the second one.
		r := sys.execute(bash(waiting.code()).of("withdrawn"), accept, mode, key, word+mode)
		r.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
		r.retryAfter(t)
		sys.record(r.trace(t)).failed(t, "failed", "expired_in_queue", "")
	}
	// What no worker ran is counted and logged too.
	for name, want := range map[string]float64{
		`bullpen_executions_total{error_code="cancelled",language="bash",status="cancelled"}`:     1,
		`bullpen_executions_total{error_code="expired_in_queue",language="bash",status="failed"}`: 2,
	} {
		if n := sys.metric(sys.base, name)(); n != want {
			t.Errorf("%s is %v, want %v", name, n, want)
		}
	}
	if n := strings.Count(sys.front.text(t), `"msg":"execution ended","trace_id":"`); n != 3 {
		t.Errorf("%d executions are logged as ended, want 3", n)
	}
	sys.disconnectWhileQueued(t, bash(waiting.code()).of("left"))
	last := sys.submit(bash("echo last").of("left"))
	patient := sys.start(bash("echo patient"), "Prefer", "wait=600")
	depth := sys.metric(sys.base, "bullpen_queue_depth")
	eventually(t, "both are queued", func() (bool, any) { n := depth(); return n == 2, n })
	sys.execute(bash("true")).rejection(t, http.StatusServiceUnavailable, "service_unavailable") // after --queue-wait
	h.release(t)
	if got := patient.answer(t).result(t); got.Stdout != "patient\n" {
		t.Errorf("the patient call: %+v", got)
	}
	sys.ended(running).succeeded(t, "held\nwoken\n")
	sys.ended(last).succeeded(t, "last\n")
	// No withdrawn program has run. It would have run before the last one, or would hold the slot
	// now.
	if pids := waiting.pids(t); len(pids) > 0 {
		t.Errorf("withdrawn programs run: %v", pids)
	}
	// Its key is free, too.
	if r := sys.execute(bash("echo anew").of("withdrawn"), key, word+ndjson); r.status != http.StatusOK {
		t.Errorf("the key of a withdrawn execution: %s", r)
	}
	sys.drainWorker(t)
}

// drainWorker drains the only worker while a program runs. The program must end, and the next one
// must wait until the worker takes executions again.
func (sys *system) drainWorker(t *testing.T) {
	t.Helper()
	type worker struct {
		Name, Version  string
		Slots, Running int
		Draining       bool
		Capabilities   []string
		Architecture   string
		Languages      map[string]string
		Threads        int `json:"cached_threads"`
		Machine        struct{ Memory int64 }
	}
	only := func() worker {
		t.Helper()
		var list []worker
		out := sys.command(t, sys.key, "workers", "--json")
		if json.Unmarshal([]byte(out), &list) != nil || len(list) != 1 {
			t.Fatalf("bullpen workers printed %s", out)
		}
		return list[0]
	}
	h := newHold()
	running := sys.submit(bash(h.code()).of("left"))
	h.reached(t, 1)
	w := only()
	if w.Slots != 1 || w.Running != 1 || w.Draining || w.Languages["bash"] == "" || w.Version == "" ||
		w.Machine.Memory < 1<<30 ||
		w.Architecture != runtime.GOARCH || !slices.Contains(w.Capabilities, "language:bash") {
		t.Errorf("got %+v", w)
	}
	eventually(t, "the home of the thread is counted", func() (bool, any) { w := only(); return w.Threads > 0, w })
	if out := sys.command(t, sys.key, "workers", "drain", w.Name); !strings.Contains(out, "draining") {
		t.Errorf("bullpen workers drain printed %s", out)
	}
	h.release(t)
	sys.ended(running).succeeded(t, "held\nwoken\n")
	next := sys.submit(bash("echo next"))
	sys.execute(bash("true")).rejection(t, http.StatusServiceUnavailable, "service_unavailable") // after --queue-wait
	if rec := sys.record(next); rec.Status != "queued" {
		t.Errorf("on a draining worker: %s", rec)
	}
	if w := only(); !w.Draining || w.Running != 0 {
		t.Errorf("got %+v", w)
	}
	sys.command(t, sys.key, "workers", "undrain", w.Name)
	sys.ended(next).succeeded(t, "next\n")
}

// disconnectWhileQueued submits a program when no slot is free and disconnects while it is queued.
func (sys *system) disconnectWhileQueued(t *testing.T, program request) {
	t.Helper()
	depth := func() string {
		for line := range strings.Lines(string(sys.get("/metrics").body)) {
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
			_, err := sys.try(ctx, http.MethodPost, executePath, program)
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
	sys := newSystem(t, p, topology{}, 1)
	second := p.startProcess(t, "second", sys.env, p.bullpen, "serve", "--listen", "127.0.0.1:0", "--data", sys.data,
		"--nsjail", p.nsjail)
	if code := second.exitCode(t); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	if text := second.text(t); !strings.Contains(text, "in use by another bullpen") || !strings.Contains(text, sys.data) {
		t.Errorf("its log:\n%s", text)
	}
	if r := sys.inline(bash("echo unharmed")); r.Stdout != "unharmed\n" {
		t.Errorf("the first: %+v", r)
	}
	sys.front.kill() // the lock is released when its holder dies
	sys.startFront(t)
	sys.ready(t)
}

// testKillEverything kills the single process while many jobs are queued and running and more are
// arriving.
func testKillEverything(t *testing.T, p *programs) {
	const jobs, slots = 40, 2 // running the jobs lasts longer than submitting them
	sys := newSystem(t, p, topology{}, slots)
	h := newHold() // it occupies a slot, so it is certain to be lost
	long := sys.submit(bash(h.code()))
	h.reached(t, 1)
	accepted := map[string]string{} // expected output by id
	enough, over := make(chan struct{}), make(chan struct{})
	go func() { // runs until the server dies
		defer close(over)
		for i := 0; ; i++ {
			word := fmt.Sprintf("job %d", i)
			r, err := sys.try(t.Context(), http.MethodPost, executePath, bash("sleep 0.05; echo "+word), "Prefer",
				"respond-async")
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
		t.Fatal("the server accepts no jobs")
	}
	sys.front.kill()
	<-over
	h.reached(t, 0)

	sys.startFront(t)
	sys.ready(t)
	lost, ended := 0, map[string]string{}
	for id, word := range accepted {
		rec := sys.ended(id)
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
	sys.ended(long).failed(t, "failed", "worker_lost", "lost")
	if lost > slots-1 {
		t.Errorf("%d of %d are lost, with %d slots of which one was held", lost, len(accepted), slots)
	}
	t.Logf("%d accepted, %d lost", len(accepted)+1, lost+1)
	sys.front.kill() // a second kill, when idle: finished executions must not change
	sys.startFront(t)
	for id, was := range ended {
		if now := sys.record(id).String(); now != was {
			t.Errorf("ended as %s, now %s", was, now)
		}
		if events := sys.output(id, 0); events[len(events)-1].Type != "result" {
			t.Errorf("the output of %s ends with %+v", id, events[len(events)-1])
		}
	}
}

// newSmallSystem deploys one process with two slots on a disk of 192 MiB.
func newSmallSystem(t *testing.T, p *programs) (sys *system, disk string) {
	t.Helper()
	disk = filepath.Join(t.TempDir(), "disk")
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
	sys = &system{
		topology: topology{}, programs: p, data: filepath.Join(disk, "data"), args: []string{"--slots", "2"},
		api: &api{t: t, key: newSecret(), http: newHTTP(t, nil)},
	}
	sys.env = []string{"BULLPEN_BOOTSTRAP_KEY=" + sys.key}
	sys.startFront(t)
	sys.ready(t)
	return sys, disk
}

// testFullDisk fills the disk under the data directory and then frees space again.
func testFullDisk(t *testing.T, p *programs) {
	sys, disk := newSmallSystem(t, p)
	var before []string
	for i := range 8 {
		before = append(before, sys.submit(bash(fmt.Sprintf("echo %d", i))))
	}
	for i, id := range before {
		sys.ended(id).succeeded(t, strconv.Itoa(i)+"\n")
	}
	h := newHold()
	running := []string{sys.submit(bash(h.code())), sys.submit(bash(h.code()))}
	h.reached(t, 2)
	queued := sys.submit(bash("echo queued"))

	filler := filepath.Join(disk, "filler")
	fillDisk(t, filler)
	for _, mode := range [][]string{nil, {"Prefer", "respond-async"}, {accept, ndjson}} {
		r := sys.execute(bash("true"), mode...)
		r.rejection(t, http.StatusServiceUnavailable, "disk_full")
		r.retryAfter(t)
	}
	for i, id := range before {
		sys.record(id).succeeded(t, strconv.Itoa(i)+"\n")
	}
	h.release(t) // they end while nothing can be stored
	h.reached(t, 0)
	fillDisk(t, filler)
	for range 5 {
		sys.execute(bash("true"), "Prefer", "respond-async").rejection(t, http.StatusServiceUnavailable, "disk_full")
	}
	for _, id := range append(running, queued) {
		if rec := sys.record(id); rec.TraceID != id {
			t.Errorf("accepted before: %s", rec)
		}
	}

	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	eventually(t, "work is taken again, without a restart", func() (bool, any) {
		r, err := sys.try(t.Context(), http.MethodPost, executePath, bash("echo again"))
		return err == nil && r.status == http.StatusOK && strings.Contains(string(r.body), `"again\n"`), fmt.Sprint(r, err)
	})
	for i, id := range before {
		sys.record(id).succeeded(t, strconv.Itoa(i)+"\n")
	}
	for _, id := range running {
		sys.ended(id).succeeded(t, "held\nwoken\n")
	}
	sys.ended(queued).succeeded(t, "queued\n")
}

// fillDisk writes until the disk is full.
func fillDisk(t testing.TB, name string) {
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
	sys := newSystem(t, p, topology{separate: true}, 4)
	once, twice := newHold(), newHold()
	lost, again := sys.submit(bash(once.code())), sys.submit(bash(twice.code()).and("max_attempts", 2))
	inline, stream := sys.start(bash(once.code())), sys.start(bash(once.code()), accept, ndjson)
	once.reached(t, 3)
	twice.reached(t, 1)
	follow := sys.follow(again, 0)
	// No slot is free, and no worker will be left.
	late := sys.start(bash("true"), "Prefer", "wait=3")
	sys.worker.kill()
	killed := time.Now()
	once.reached(t, 0)
	twice.reached(t, 0)
	t.Logf("the jails were gone %s after their worker", time.Since(killed).Round(time.Millisecond))
	late.answer(t).rejection(t, http.StatusServiceUnavailable, "service_unavailable")

	sys.startWorker(t)
	end := sys.ended(lost)
	end.failed(t, "failed", "worker_lost", "lost")
	t.Logf("the end was recorded %s after the worker was killed", end.CompletedAt.Sub(killed).Round(time.Millisecond))
	if res := inline.answer(t).result(t); display(res.ErrorCode) != `"worker_lost"` {
		t.Errorf("inline: %+v", res)
	}
	for _, events := range [][]event{sys.output(lost, 0), stream.answer(t).events(t)} {
		if stdout, _, last := checkEvents(t, events, 0); stdout != "held\n" || last.Status != "failed" ||
			display(last.Result.ErrorCode) != `"worker_lost"` {
			t.Errorf("the output of a lost one is %q, its end %+v", stdout, last)
		}
	}
	twice.reached(t, 1)
	if rec := sys.record(again); rec.Status != "running" || rec.Attempt != 2 {
		t.Errorf("run again: %s", rec)
	}
	twice.release(t)
	rec := sys.ended(again)
	rec.succeeded(t, "held\nwoken\n") // the last attempt's output
	if rec.Attempt != 2 {
		t.Errorf("attempt %d", rec.Attempt)
	}
	// Its events are those of both attempts, numbered consecutively, with a single status.
	for _, events := range [][]event{sys.output(again, 0), follow.answer(t).events(t)} {
		if stdout, _, _ := checkEvents(t, events, 0); stdout != "held\nheld\nwoken\n" {
			t.Errorf("the output of both attempts is %q", stdout)
		}
	}
}

// testNoWorker submits jobs while there is no worker.
func testNoWorker(t *testing.T, p *programs) {
	sys := newSystem(t, p, topology{separate: true}, noSlots, "--queue-wait", "1s")
	eventually(t, "not ready, for want of a worker", func() (bool, any) {
		r := sys.get("/readyz")
		return r.status == http.StatusServiceUnavailable && strings.Contains(string(r.body), "worker"), r
	})
	id := sys.submit(bash("echo at last"))
	r := sys.execute(bash("true"))
	r.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
	r.retryAfter(t)
	if rec := sys.record(id); rec.Status != "queued" {
		t.Errorf("without a worker: %s", rec)
	}
	sys.startWorker(t)
	sys.ended(id).succeeded(t, "at last\n")
	sys.ready(t)
}

// testThreeGateways queries gateways for executions that were submitted at another one, and revokes
// keys at each of them.
func testThreeGateways(t *testing.T, p *programs) {
	sys := newSystem(t, p, topology{separate: true}, 2)
	gateway := func(name string) *api {
		args := append([]string{"--data", filepath.Join(t.TempDir(), name), "--roles", "gateway"}, sys.args...)
		_, base := p.startServe(t, name+" front", sys.env, args...)
		return &api{t, base, sys.key, sys.http}
	}
	first, second, third := sys.api, gateway("second"), gateway("third")

	h := newHold()
	id := first.submit(bash(h.code()), "Idempotency-Key", "one")
	h.reached(t, 1)
	for _, a := range []*api{second, third} {
		if got := a.submit(bash(h.code()), "Idempotency-Key", "one"); got != id {
			t.Errorf("another gateway ran it again: %s, want %s", got, id)
		}
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
	checkRevocation(t, []*api{first, second, third})
	checkCluster(t, p, sys)

	// The first gateway is also the leading dispatcher. Without it, another one takes over
	// everything, because every gateway is on standby.
	sys.front.kill()
	for _, a := range []*api{second, third} {
		eventually(t, "the other gateways are ready without the first", func() (bool, any) {
			r := a.get("/readyz")
			return r.status == http.StatusOK, r
		})
		if r := a.inline(bash("echo on")); r.Stdout != "on\n" {
			t.Errorf("without the first: %+v", r)
		}
	}
}

// checkCluster asks three gateways and a worker about themselves.
func checkCluster(t *testing.T, p *programs, sys *system) {
	t.Helper()
	checkProcesses(t, p, sys.env, sys.args)
	checkProcesses(t, p, nil, []string{"--url", sys.base, "--key", sys.key})
}

func checkProcesses(t *testing.T, p *programs, env, args []string) {
	t.Helper()
	code, output := p.run(t, env, append([]string{"doctor", "--cluster", "--json"}, args...)...)
	var all []proto.Process
	if err := json.Unmarshal([]byte(output), &all); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v: %s", code, err, output)
	}
	roles := map[string]int{}
	for _, process := range all {
		roles[process.Roles[0]]++
		if len(process.Problems) > 0 || process.Version == "" {
			t.Errorf("%+v", process)
		}
	}
	if len(all) != 4 || roles["gateway"] != 3 || roles["worker"] != 1 {
		t.Errorf("the processes are %+v", all)
	}
}

// checkRevocation revokes keys at each gateway in turn. Every gateway must refuse a key within a
// second of the answer to its revocation. On a busy machine this may take longer, so that one of
// three keys suffices.
func checkRevocation(t *testing.T, gateways []*api) {
	t.Helper()
	const limit = time.Second
	for i, at := range gateways {
		var took []time.Duration
		for len(took) < 3 && (len(took) == 0 || slices.Min(took) > limit) {
			took = append(took, revocationTime(t, at, gateways))
		}
		t.Logf("keys revoked at gateway %d were refused everywhere after %s", i+1, took)
		if slices.Min(took) > limit {
			t.Errorf("keys revoked at gateway %d were refused everywhere after %s, none within %s", i+1, took, limit)
		}
	}
}

// revocationTime revokes a new key at one gateway. It returns the time from the answer until every
// gateway has refused the key.
func revocationTime(t *testing.T, at *api, gateways []*api) time.Duration {
	t.Helper()
	secret, id := at.newKey("everywhere", "pro")
	everywhere := func(status int) {
		t.Helper()
		for i, a := range gateways {
			eventually(t, fmt.Sprintf("gateway %d answers the key with %d", i+1, status), func() (bool, any) {
				r := a.with(secret).get(execution("trc_x"))
				return r.status == status, r
			})
		}
	}
	everywhere(http.StatusNotFound)
	r := at.do(http.MethodDelete, "/v1/admin/keys/"+id, nil)
	revoked := time.Now()
	if r.status != http.StatusOK {
		t.Fatalf("revoke: %s", r)
	}
	everywhere(http.StatusUnauthorized)
	return time.Since(revoked).Round(time.Microsecond)
}

// testFrontKilled kills the gateway and the dispatcher while programs run and wait. The worker is
// not affected.
func testFrontKilled(t *testing.T, p *programs) {
	sys, h := newSystem(t, p, topology{separate: true}, 1), newHold()
	running := sys.submit(bash(h.code()))
	h.reached(t, 1)
	queued := sys.submit(bash("echo queued"))
	sys.front.kill()
	eventually(t, "the worker logs that no dispatcher assigns jobs", func() (bool, any) {
		_, ok := sys.worker.findLog(t, "no dispatcher: start a gateway or scheduler on this NATS")
		return ok, "no such line"
	})
	sys.startFront(t)
	if rec := sys.record(running); rec.Status != "running" {
		t.Errorf("after the restart: %s", rec)
	}
	h.release(t)
	sys.ended(running).succeeded(t, "held\nwoken\n")
	sys.ended(queued).succeeded(t, "queued\n")
}

// testWorkerFirst starts a worker when only NATS is running. The worker must log what it waits for
// and continue once that exists.
func testWorkerFirst(t *testing.T, p *programs) {
	b := p.startBroker(t)
	sys := &system{
		programs: p, topology: topology{separate: true}, args: b.flags(p),
		env: append(b.env(), "BULLPEN_BOOTSTRAP_KEY="+newSecret()),
	}
	data := filepath.Join(t.TempDir(), "worker")
	args := append([]string{"serve", "--roles", "worker", "--data", data, "--nsjail", p.nsjail, "--log-format", "json"},
		sys.args...)
	sys.worker = p.startProcess(t, "worker", sys.env, p.bullpen, args...)
	eventually(t, "the worker logs what it waits for", func() (bool, any) {
		_, ok := sys.worker.findLog(
			t, "waiting for the streams of bullpen on this NATS; a gateway or scheduler creates them when it starts")
		return ok, "no such line"
	})
	sys.api, sys.data = &api{t: t, http: newHTTP(t, nil)}, filepath.Join(t.TempDir(), "front")
	sys.startFront(t)
	sys.ready(t)
	entries, err := os.ReadDir(data)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if err != nil || strings.Join(names, " ") != "homes lock sandboxes spool" {
		t.Errorf("a worker, which stores nothing but cached homes, the lock of its data directory, sockets of sandboxes "+
			"and what is being written to storage connections, has %v: %v", names, err)
	}
}

// testBrokerKilled kills the NATS server and restarts it before any lease expires. A client that
// reads a stream meanwhile need not notice.
func testBrokerKilled(t *testing.T, p *programs) {
	sys, h := newSystem(t, p, topology{separate: true}, 1), newHold()
	running := sys.submit(bash(h.code()))
	h.reached(t, 1)
	queued := sys.submit(bash("echo queued"))
	live, err := sys.open(t.Context(), http.MethodGet, execution(running, "output"), nil)
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
	sys.broker.kill()
	// A job in flight when NATS died may have been stored. Only then is the outcome unknown, and
	// the id can be polled later.
	torn := sys.execute(bash("echo torn"), "Prefer", "respond-async")
	maybe := torn.header.Get("X-Trace-Id")
	if maybe == "" {
		torn.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
		torn.retryAfter(t)
	} else if output := torn.rejection(t, http.StatusInternalServerError, "internal"); !strings.Contains(
		output, "/v1/executions/"+maybe) {
		t.Errorf("the answer does not name the URL: %q", output)
	}
	sys.broker.restart(t, p)
	sys.ready(t)
	h.release(t)
	if maybe != "" {
		if r := sys.get(execution(maybe)); r.status != http.StatusNotFound {
			sys.ended(maybe)
		}
	}
	rec := sys.ended(running)
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
	sys.ended(queued).succeeded(t, "queued\n")
	eventually(t, "work goes on", func() (bool, any) {
		r := sys.execute(bash("echo on"))
		return r.status == http.StatusOK, r
	})
	// NATS stays down longer than a lease lasts: every submission is rejected with Retry-After.
	sys.broker.kill()
	eventually(t, "the gateway has noticed", func() (bool, any) {
		r := sys.get("/readyz")
		return r.status == http.StatusServiceUnavailable, r
	})
	for what, r := range map[string]*pending{
		"async": sys.start(bash("true"), "Prefer", "respond-async"), "inline": sys.start(bash("true")),
		"streaming":               sys.start(bash("true"), accept, ndjson),
		"with an Idempotency-Key": sys.start(bash("true"), "Idempotency-Key", "k"),
		"in a thread":             sys.start(bash("true").of("t")),
	} {
		answer := r.answer(t)
		t.Logf("%s: %s", what, answer)
		answer.rejection(t, http.StatusServiceUnavailable, "service_unavailable")
		answer.retryAfter(t)
	}
	sys.broker.restart(t, p)
	sys.ready(t)
}

// testCredentials checks that the NATS server of the other tests rejects clients without
// credentials.
func testCredentials(t *testing.T, p *programs) {
	b := p.startBroker(t)
	for name, c := range map[string]struct {
		env, flags []string
		output     string
	}{
		"nobody":         {nil, []string{"--nats", b.url, "--nats-ca", p.cert}, "Authorization Violation"},
		"wrong password": {[]string{"BULLPEN_NATS_PASSWORD=wrong"}, b.flags(p), "Authorization Violation"},
		"no authority":   {b.env()[:2], []string{"--nats", b.url, "--nats-user", natsUser}, "certificate"},
	} {
		args := append([]string{
			"serve", "--listen", "127.0.0.1:0", "--data", t.TempDir(), "--nsjail", p.nsjail,
			"--secrets-plain",
		}, c.flags...)
		proc := p.startProcess(t, "stranger", c.env, p.bullpen, args...)
		if code := proc.exitCode(t); code != 1 || !strings.Contains(proc.text(t), c.output) {
			t.Errorf("%s: exit code %d, and its output is\n%s", name, code, proc.text(t))
		}
		if strings.Contains(proc.text(t), natsPassword) {
			t.Errorf("%s: the log shows the password", name)
		}
	}
	// The key that a server generates is stored in a file and nowhere else.
	sys := newSystem(t, p, topology{}, 1)
	sys.front.kill()
	sys.data, sys.env = filepath.Join(t.TempDir(), "fresh"), nil
	sys.startFront(t)
	name := filepath.Join(sys.data, "bootstrap.key")
	raw, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(name); err != nil || info.Mode().Perm() != fs.FileMode(0o600) {
		t.Errorf("its mode is %v: %v", info.Mode(), err)
	}
	sys.key = strings.TrimSpace(string(raw))
	if err := proto.CheckKeyForm(sys.key); err != nil {
		t.Error(err)
	}
	sys.ready(t)
	if r := sys.inline(bash("echo in")); r.Stdout != "in\n" {
		t.Errorf("got %+v", r)
	}
	if text := sys.front.text(t); strings.Contains(text, sys.key) || !strings.Contains(text, name) {
		t.Errorf("the log must name the file and not show the key:\n%s", text)
	}
}
