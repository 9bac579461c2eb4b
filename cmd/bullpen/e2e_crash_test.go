package main

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// testNoFaults checks that what people run cannot be told to crash or to have a bug.
func testNoFaults(t *testing.T, p *programs) {
	words := []string{"BULLPEN_CRASH_AT", "BULLPEN_PLANTED_BUG"}
	for _, point := range fault.Points() {
		words = append(words, string(point))
	}
	for _, bug := range fault.Bugs() {
		words = append(words, string(bug))
	}
	in := func(program string) []string {
		raw, err := os.ReadFile(program)
		if err != nil {
			t.Fatal(err)
		}
		return slices.DeleteFunc(slices.Clone(words), func(w string) bool { return !bytes.Contains(raw, []byte(w)) })
	}
	if found := in(p.bullpen); len(found) > 0 {
		t.Errorf("bullpen has %q in it", found)
	}
	if found := in(p.faulty(t).bullpen); len(found) != len(words) {
		t.Errorf("bullpen with faults has only %q of %q in it", found, words)
	}
}

// crash is what is promised of an execution whose process dies at a point.
type crash struct {
	worker bool // it is the worker that passes the point, with an execution of a thread; else the front
	lost   bool // it ends as worker_lost, and its thread stays as it was; else as its program does
	ran    int  // how often its program does
	posts  int  // how often its webhook comes at least
}

func crashes() map[fault.Point]crash {
	return map[fault.Point]crash{
		fault.AfterClaimBeforeStart:    {worker: true, lost: true},
		fault.AfterOutputBeforeResult:  {worker: true, lost: true, ran: 1},
		fault.AfterSaveBeforePending:   {worker: true, lost: true, ran: 1},
		fault.AfterPendingBeforeCommit: {worker: true, ran: 1},
		fault.AfterCommitBeforeResult:  {worker: true, ran: 1},
		fault.AfterResultBeforeAck:     {worker: true, ran: 1},

		fault.AfterAssign:                   {ran: 1},
		fault.AfterFenceBeforeLost:          {}, // of those that are lost
		fault.AfterJobBeforeReply:           {ran: 1},
		fault.AfterAcceptBeforeAnswer:       {ran: 1},
		fault.AfterResultBeforeDelivery:     {ran: 1, posts: 1},
		fault.AfterDeliveryBeforeJobRemoved: {ran: 1, posts: 1},
		fault.AfterPostBeforeRecord:         {ran: 1, posts: 2},
	}
}

// crashWorld is a deployment whose processes die at points.
type crashWorld struct {
	*world
	hooks *receiver
	ids   map[fault.Point]string

	mu      sync.Mutex
	printed []byte // all that programs did, also such as no reader is shown
}

// testCrashPoints has processes die at each named point of an execution, and sees that it ends as is promised all the same.
func testCrashPoints(t *testing.T, p *programs, in topology) {
	w := &crashWorld{hooks: startReceiver(t), ids: map[fault.Point]string{}}
	w.world = newWorld(t, p.faulty(t), in, 1, w.hooks.flags...)
	if in.apart {
		nc := connect(t, p, w.broker)
		sub, err := nc.Subscribe("bullpen.out.>", func(m *nats.Msg) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.printed = append(w.printed, m.Data...)
		})
		if err == nil {
			err = nc.Flush()
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = sub.Unsubscribe() })
	}
	var workers []fault.Point
	for _, at := range fault.Points() {
		c, known := crashes()[at]
		if !known {
			t.Errorf("it is not known what happens at %s", at)
		}
		if c.worker {
			workers = append(workers, at)
			w.inline(bash("echo 0 >log").and("thread_id", at))
		}
	}
	w.stopWorker(t)
	if in.apart {
		w.front.kill()
		w.dying(t, fault.AfterAssign, w.startFront)
		w.dies(t, fault.AfterAssign, w.front, w.startWorker) // no sooner than the job is stored is there a slot
		w.dying(t, fault.AfterFenceBeforeLost, w.startFront)
		w.check(t, fault.AfterAssign)
		w.stopWorker(t)
	}
	for _, at := range workers {
		w.dying(t, at, w.startVictim)
		w.dies(t, at, w.worker)
	}
	if in.apart {
		w.front.died(t, fault.AfterFenceBeforeLost)
		w.startWorker(t)
	}
	w.startFront(t)
	for _, at := range workers {
		w.check(t, at)
	}
	for _, at := range []fault.Point{
		fault.AfterJobBeforeReply, fault.AfterAcceptBeforeAnswer, fault.AfterResultBeforeDelivery, fault.AfterDeliveryBeforeJobRemoved,
		fault.AfterPostBeforeRecord,
	} {
		if in.apart { // else the worker dies as well, and it is not told at which moment
			w.front.kill()
			w.dying(t, at, w.startFront)
			w.dies(t, at, w.front)
			w.startFront(t)
			w.check(t, at)
		}
	}
}

// stopWorker stops what runs programs, in order.
func (w *crashWorld) stopWorker(t *testing.T) {
	t.Helper()
	w.worker.signal(syscall.SIGTERM)
	if code := w.worker.exitCode(t); code != 0 {
		t.Fatalf("the worker ended with %d:\n%s", code, w.worker.tail())
	}
}

// startVictim starts what runs programs.
func (w *crashWorld) startVictim(t *testing.T) {
	t.Helper()
	if w.apart {
		w.worker, w.health = w.startWorkerIn(t, filepath.Join(t.TempDir(), "worker"))
	} else {
		w.startFront(t)
	}
}

// dying starts a process that is to die at a point.
func (w *crashWorld) dying(t *testing.T, at fault.Point, start func(*testing.T)) {
	t.Helper()
	clean := w.env
	w.env = append(slices.Clone(clean), "BULLPEN_CRASH_AT="+string(at))
	start(t)
	w.env = clean
}

// died waits for the end of a process at a point.
func (p *process) died(t *testing.T, at fault.Point) {
	t.Helper()
	p.exitCode(t)
	if status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		t.Fatalf("%s ended with %s, and did not die at %s:\n%s", p.name, p.cmd.ProcessState, at, p.tail())
	}
}

// dies submits the execution that makes victim die at a point, calls then when it was, and waits for the death. Whether there is an answer
// to the submission depends on the point.
func (w *crashWorld) dies(t *testing.T, at fault.Point, victim *process, then ...func(*testing.T)) {
	t.Helper()
	r, err := w.try(t.Context(), http.MethodPost, executePath, w.program(at), w.headers(at)...)
	if err == nil {
		if r.status != http.StatusAccepted {
			t.Fatalf("submit what dies at %s: %s", at, r)
		}
		w.ids[at] = r.trace(t)
	}
	for _, f := range then {
		f(t)
	}
	victim.died(t, at)
}

func (w *crashWorld) headers(at fault.Point) []string {
	return []string{"Prefer", "respond-async", "Idempotency-Key", string(at)}
}

func (w *crashWorld) program(at fault.Point) request {
	body := bash("echo ran " + string(at) + "\necho 1 >>log")
	switch c := crashes()[at]; {
	case c.worker:
		return body.and("thread_id", at)
	case c.posts > 0:
		return body.and("webhook_url", w.hooks.url+"/200")
	default:
		return body
	}
}

// check sees that an execution whose process died at a point ended as is promised, and that everybody is told the same of it.
func (w *crashWorld) check(t *testing.T, at fault.Point) {
	t.Helper()
	c := crashes()[at]
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r, err := insist(ctx, func() (*reply, error) { // a client that heard nothing asks again
		return w.try(ctx, http.MethodPost, executePath, w.program(at), w.headers(at)...)
	})
	if err != nil {
		t.Fatalf("%s: %v", at, err)
	}
	id := r.trace(t)
	if told := w.ids[at]; told != "" && told != id {
		t.Errorf("%s: submitted as %s, then as %s", at, told, id)
	}
	rec := w.ended(id)
	line := "ran " + string(at) + "\n"
	if c.lost {
		rec.failed(t, "failed", "worker_lost", "was lost")
	} else {
		rec.succeeded(t, line)
	}
	ran := strings.Repeat(line, c.ran)
	stdout, _, last := whole(t, w.output(id, 0), 0)
	if stdout == "" && c.lost && !w.apart {
		ran = "" // NATS in the same process does not sync output
	}
	if stdout != ran || last.Result == nil || deref(last.Result.ErrorCode) != deref(rec.ErrorCode) || last.Status != rec.Status {
		t.Errorf("%s: the stream ends with %+v after %q; want %s after %q", at, last, stdout, rec, ran)
	}
	var events []event
	for _, s := range serverSent(t, w.get(execution(id, "output"), accept, sse)) {
		events = append(events, s.event)
	}
	if again, _, other := whole(t, events, 0); again != stdout || !reflect.DeepEqual(other, last) {
		t.Errorf("%s: by server-sent events %q and %+v; else %q and %+v", at, again, other, stdout, last)
	}
	if w.apart {
		w.mu.Lock()
		n := bytes.Count(w.printed, []byte(strings.TrimSuffix(line, "\n")+`\n`))
		w.mu.Unlock()
		if n != c.ran {
			t.Errorf("%s: the program ran %d times, want %d", at, n, c.ran)
		}
	}
	if c.worker {
		want := "0\n1\n"
		if c.lost {
			want = "0\n"
		}
		if res := w.inline(bash("cat log").and("thread_id", at)); res.Stdout != want {
			t.Errorf("%s: the thread has %q, want %q: %+v", at, res.Stdout, want, res)
		}
	}
	if c.posts > 0 {
		w.checkPosts(t, at, id, c.posts)
	}
}

// checkPosts sees that the webhook of an execution came so often at least, with one id and one body.
func (w *crashWorld) checkPosts(t *testing.T, at fault.Point, id string, least int) {
	t.Helper()
	w.delivered(id).is(t, proto.DeliveryDelivered, 1)
	var posts []posted
	for len(w.hooks.came) > 0 {
		posts = append(posts, <-w.hooks.came)
	}
	for _, p := range posts {
		if p.id != proto.DeliveryID(proto.TraceID(id)) || p.trace(t) != id || !bytes.Equal(p.body, posts[0].body) {
			t.Errorf("%s: webhook %s of %s is %s", at, p.id, id, p.body)
		}
	}
	if len(posts) < least {
		t.Errorf("%s: the webhook of %s came %d times, want %d at least", at, id, len(posts), least)
	}
}
