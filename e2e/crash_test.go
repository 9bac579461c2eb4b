package e2e

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// testNoFaults checks that the released program has no crash points.
func testNoFaults(t *testing.T, p *programs) {
	words := []string{"BULLPEN_CRASH_AT", "bullpen/proto/fault"}
	for _, point := range slices.Concat(fault.Points(), fault.BatchPoints(), fault.SchedulePoints(),
		fault.PipelinePoints(), fault.AgentPoints(), fault.SandboxPoints()) {
		words = append(words, string(point))
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
		t.Errorf("bullpen with faults has only %q in it, of %q", found, words)
	}
}

// crash describes the guarantees for an execution whose process dies at a point.
type crash struct {
	thread bool // it runs in a thread
	// If lost, it ends as worker_lost and leaves its thread unchanged. Otherwise it ends as its
	// program does.
	lost  bool
	ran   int // how often its program runs
	posts int // minimum number of webhook deliveries
}

func crashes() map[fault.Point]crash {
	return map[fault.Point]crash{
		fault.AfterJobBeforeReply:           {ran: 1},
		fault.AfterAcceptBeforeAnswer:       {ran: 1},
		fault.AfterAssign:                   {ran: 1},
		fault.AfterTakeBeforeClaim:          {ran: 1},
		fault.AfterClaimBeforeStart:         {thread: true, lost: true},
		fault.AfterOutputBeforeResult:       {thread: true, lost: true, ran: 1},
		fault.AfterSaveBeforePending:        {thread: true, lost: true, ran: 1},
		fault.AfterPendingBeforeCommit:      {thread: true, ran: 1},
		fault.AfterCommitBeforeResult:       {thread: true, ran: 1},
		fault.AfterResultBeforeAck:          {thread: true, ran: 1},
		fault.AfterFenceBeforeLost:          {thread: true, lost: true, ran: 1},
		fault.AfterResultBeforeDelivery:     {ran: 1, posts: 1},
		fault.AfterDeliveryBeforeJobRemoved: {ran: 1, posts: 1},
		fault.AfterPostBeforeRecord:         {ran: 1, posts: 2},
	}
}

// crashSystem is a deployment whose processes die at crash points.
type crashSystem struct {
	*system
	hooks *receiver
	hold  hold       // held by the program whose worker is killed
	nats  *nats.Conn // nil in one process
	ids   map[fault.Point]string
	died  map[fault.Point]bool

	mu sync.Mutex
	// All output of programs, including output that no reader is shown. Empty in one process.
	printed []byte
}

// testCrashPoints kills processes at each crash point of an execution and checks the guaranteed
// outcome. In one process, only the worker's points are used. At the other points, the worker's
// state is unknown.
func testCrashPoints(t *testing.T, p *programs, in topology) {
	sys := &crashSystem{
		hooks: startReceiver(t), hold: newHold(), ids: map[fault.Point]string{},
		died: map[fault.Point]bool{},
	}
	sys.system = newSystem(t, p.faulty(t), in, 1, sys.hooks.flags...)
	for at, c := range crashes() {
		if c.thread {
			sys.ended(sys.submit(bash("echo 0 >log").and("thread_id", at))).succeeded(t, "")
		}
	}
	if !in.separate {
		sys.crashWorkers(t)
		return
	}
	sys.collectOutput(t)
	sys.crashDispatchers(t)
	sys.crashWorkers(t)
	sys.check(t, fault.AfterFenceBeforeLost)
	for _, at := range []fault.Point{
		fault.AfterJobBeforeReply, fault.AfterAcceptBeforeAnswer, fault.AfterResultBeforeDelivery,
		fault.AfterDeliveryBeforeJobRemoved,
		fault.AfterPostBeforeRecord,
	} {
		sys.front.kill()
		sys.startDying(t, at, sys.startFront)
		sys.submitTo(t, at)
		sys.awaitCrash(t, at, sys.front)
		sys.startFront(t)
		sys.check(t, at)
		sys.awaitNoJobs(t) // leftovers would be met at the next point
	}
	for _, at := range fault.Points() {
		if !sys.died[at] {
			t.Errorf("nothing died at %s", at)
		}
	}
}

// collectOutput collects all published output.
func (sys *crashSystem) collectOutput(t *testing.T) {
	t.Helper()
	sys.nats = connect(t, sys.programs, sys.broker)
	_, err := sys.nats.Subscribe("bullpen.out.>", func(m *nats.Msg) {
		sys.mu.Lock()
		defer sys.mu.Unlock()
		sys.printed = append(sys.printed, m.Data...)
	})
	if err == nil {
		err = sys.nats.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// awaitNoJobs waits until the jobs of all finished executions are removed.
func (sys *crashSystem) awaitNoJobs(t *testing.T) {
	t.Helper()
	js, err := jetstream.New(sys.nats)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "no job is left", func() (bool, any) {
		jobs, err := js.Stream(t.Context(), "BULLPEN_JOBS") // includes its current state
		if err != nil {
			return false, err
		}
		left := jobs.CachedInfo().State.Msgs
		return left == 0, left
	})
}

// timesRan returns how often the program of a crash point has printed its line.
func (sys *crashSystem) timesRan(at fault.Point) int {
	sys.mu.Lock()
	defer sys.mu.Unlock()
	return bytes.Count(sys.printed, []byte("ran "+string(at)+`\n`))
}

// crashDispatchers kills the dispatcher at two points: when it ends an execution whose worker was
// killed, and when it has assigned one.
func (sys *crashSystem) crashDispatchers(t *testing.T) {
	t.Helper()
	at := fault.AfterFenceBeforeLost
	sys.submitTo(t, at)
	eventually(t, "a program runs", func() (bool, any) { return sys.timesRan(at) > 0, nil })
	sys.front.kill()
	sys.startDying(t, at, sys.startFront)
	sys.worker.kill()
	sys.awaitCrash(t, at, sys.front)

	at = fault.AfterAssign
	sys.startDying(t, at, sys.startFront)
	sys.submitTo(t, at)
	sys.startWorker(t) // a slot becomes available only after the job is stored
	sys.awaitCrash(t, at, sys.front)
	sys.startFront(t)
	sys.check(t, at)
}

// crashWorkers kills workers one after the other and checks their executions at the end. Detecting
// a lost worker takes 12 s.
func (sys *crashSystem) crashWorkers(t *testing.T) {
	t.Helper()
	sys.stopWorker(t)
	points := []fault.Point{
		fault.AfterClaimBeforeStart, fault.AfterOutputBeforeResult, fault.AfterSaveBeforePending,
		fault.AfterPendingBeforeCommit,
		fault.AfterCommitBeforeResult, fault.AfterResultBeforeAck,
		// AfterTakeBeforeClaim is last, because the next worker receives the unclaimed job.
		fault.AfterTakeBeforeClaim,
	}
	start := sys.startFront
	if sys.separate {
		start = sys.startWorker
	}
	for _, at := range points {
		sys.startDying(t, at, start)
		sys.submitTo(t, at)
		sys.awaitCrash(t, at, sys.worker)
	}
	start(t)
	for _, at := range points {
		sys.check(t, at)
	}
}

// stopWorker cleanly stops the process that runs programs.
func (sys *crashSystem) stopWorker(t *testing.T) {
	t.Helper()
	sys.worker.signal(syscall.SIGTERM)
	if code := sys.worker.exitCode(t); code != 0 {
		t.Fatalf("the worker ended with %d:\n%s", code, sys.worker.tail())
	}
}

// startDying starts a process that will die at a crash point.
func (sys *crashSystem) startDying(t *testing.T, at fault.Point, start func(*testing.T)) {
	t.Helper()
	clean := sys.env
	sys.env = append(slices.Clone(clean), "BULLPEN_CRASH_AT="+string(at))
	start(t)
	sys.env = clean
}

// awaitCrash waits until a process has died at its crash point.
func (sys *crashSystem) awaitCrash(t *testing.T, at fault.Point, victim *process) {
	t.Helper()
	victim.exitCode(t)
	if status, ok := victim.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		t.Fatalf("%s ended with %s, and did not die at %s:\n%s", victim.name, victim.cmd.ProcessState, at, victim.tail())
	}
	sys.died[at] = true
}

// submitTo submits the execution during which a process dies. Whether there is a response depends
// on the point.
func (sys *crashSystem) submitTo(t *testing.T, at fault.Point) {
	t.Helper()
	var r *reply
	var err error
	// Submission is retried because there may be no leading dispatcher yet.
	eventually(t, "what dies at "+string(at)+" is submitted", func() (bool, any) {
		r, err = sys.try(t.Context(), http.MethodPost, executePath, sys.program(at), sys.headers(at)...)
		return err != nil || r.status < http.StatusInternalServerError, r
	})
	if err != nil {
		return
	}
	if r.status != http.StatusAccepted {
		t.Fatalf("submit what dies at %s: %s", at, r)
	}
	sys.ids[at] = r.trace(t)
}

func (sys *crashSystem) headers(at fault.Point) []string {
	return []string{"Prefer", "respond-async", "Idempotency-Key", string(at)}
}

func (sys *crashSystem) program(at fault.Point) request {
	code := "echo ran " + string(at) + "\necho 1 >>log\n"
	if at == fault.AfterFenceBeforeLost {
		code += "sleep " + sys.hold.seconds
	}
	switch c := crashes()[at]; {
	case c.thread:
		return bash(code).and("thread_id", at)
	case c.posts > 0:
		return bash(code).and("webhook_url", sys.hooks.url+"/200")
	default:
		return bash(code)
	}
}

// check checks that an execution whose process died has the guaranteed outcome for every reader.
func (sys *crashSystem) check(t *testing.T, at fault.Point) {
	t.Helper()
	c := crashes()[at]
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r, err := retryUntilDone(ctx, func() (*reply, error) { // a client without a response retries
		return sys.try(ctx, http.MethodPost, executePath, sys.program(at), sys.headers(at)...)
	})
	if err != nil {
		t.Fatalf("%s: %v", at, err)
	}
	id := r.trace(t)
	if first := sys.ids[at]; first != "" && first != id {
		t.Errorf("%s: submitted as %s, then as %s", at, first, id)
	}
	rec := sys.ended(id)
	line := "ran " + string(at) + "\n"
	if c.lost {
		rec.failed(t, "failed", "worker_lost", "was lost")
	} else {
		rec.succeeded(t, line)
	}
	ran := strings.Repeat(line, c.ran)
	stdout, _, last := checkEvents(t, sys.output(id, 0), 0)
	if stdout == "" && c.lost && !sys.separate {
		ran = "" // embedded NATS does not sync output
	}
	if stdout != ran || last.Result == nil || deref(last.Result.ErrorCode) != deref(rec.ErrorCode) ||
		last.Status != rec.Status {
		t.Errorf("%s: the stream ends with %+v after %q; want %s after %q", at, last, stdout, rec, ran)
	}
	var events []event
	for _, s := range serverSent(t, sys.get(execution(id, "output"), accept, sse)) {
		events = append(events, s.event)
	}
	if again, _, other := checkEvents(t, events, 0); again != stdout || !reflect.DeepEqual(other, last) {
		t.Errorf("%s: by server-sent events %q and %+v; else %q and %+v", at, again, other, stdout, last)
	}
	if n := sys.timesRan(at); sys.separate && n != c.ran {
		t.Errorf("%s: the program ran %d times, want %d", at, n, c.ran)
	}
	if c.thread {
		want := "0\n1\n"
		if c.lost {
			want = "0\n"
		}
		sys.ended(sys.submit(bash("cat log").and("thread_id", at))).succeeded(t, want)
	}
	if c.posts > 0 {
		sys.checkPosts(t, at, id, c.posts)
	}
}

// checkPosts checks that an execution's webhook was delivered at least this often, with one id and
// one body.
func (sys *crashSystem) checkPosts(t *testing.T, at fault.Point, id string, least int) {
	t.Helper()
	sys.delivered(id).check(t, proto.DeliveryDelivered, 1)
	var posts []posted
	for len(sys.hooks.deliveries) > 0 {
		posts = append(posts, <-sys.hooks.deliveries)
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
