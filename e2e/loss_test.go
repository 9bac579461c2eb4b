package e2e

import (
	"fmt"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto/fault"
)

// startDyingWorker starts a worker that dies when it has received a job and not yet claimed it. It
// returns the time of death.
func (sys *system) startDyingWorker(t *testing.T) time.Time {
	t.Helper()
	p := sys.programs.faulty(t)
	args := append([]string{"serve", "--listen", "127.0.0.1:0", "--nsjail", p.nsjail, "--log-format", "json"}, sys.args...)
	if sys.separate {
		args = append(args, "--roles", "worker", "--data", filepath.Join(t.TempDir(), "doomed"))
	} else {
		args = append(args, "--data", sys.data)
	}
	env := append(slices.Clone(sys.env), "BULLPEN_CRASH_AT="+string(fault.AfterTakeBeforeClaim))
	proc := p.startProcess(t, "doomed", env, p.bullpen, args...)
	proc.exitCode(t)
	if status, ok := proc.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		t.Fatalf("it ended with %s:\n%s", proc.cmd.ProcessState, proc.tail())
	}
	return time.Now()
}

// testWorkersLost kills workers that hold a job that they have not claimed. The job goes to other
// workers. After three of them it is dead-lettered, and it runs again when it is requeued.
func testWorkersLost(t *testing.T, p *programs) {
	hooks := startReceiver(t)
	sys := newSystem(t, p, topology{separate: true}, noSlots, append(hooks.flags, "--slots", "1")...)
	elsewhere := sys.submit(bash("echo elsewhere"))
	killed := sys.startDyingWorker(t)
	sys.startWorker(t)
	rec := sys.ended(elsewhere)
	rec.succeeded(t, "elsewhere\n")
	if rec.Attempt != 1 {
		t.Errorf("attempt %d: the first has never started", rec.Attempt)
	}
	t.Logf("it has run elsewhere %s after its worker was killed", rec.CompletedAt.Sub(killed).Round(time.Millisecond))
	sys.worker.signal(syscall.SIGTERM)
	if code := sys.worker.exitCode(t); code != 0 {
		t.Fatalf("the worker ended with %d:\n%s", code, sys.worker.tail())
	}

	const program = "echo one >>file\ncat file\necho $SECRET\n"
	body := bash(program+"# "+strings.Repeat("x", 600<<10)).and("thread_id", "poison", "webhook_url", hooks.url+"/200",
		"metadata", map[string]string{"team": "blue"}, "env_vars", map[string]string{"SECRET": "s3cret"})
	id := sys.submit(body)
	sys.startDyingWorker(t)
	sys.startDyingWorker(t)
	js, err := jetstream.New(connect(t, p, sys.broker))
	if err != nil {
		t.Fatal(err)
	}
	execs, err := js.Stream(t.Context(), "BULLPEN_EXECS")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "two losses are written down", func() (bool, any) {
		m, err := execs.GetLastMsgForSubject(t.Context(), "bullpen.exec.default."+id)
		if err != nil {
			return false, err
		}
		return m.Header.Get("Bullpen-Losses") == "2", m.Header
	})
	sys.front.kill() // the next leader knows about them
	sys.startFront(t)
	killed = sys.startDyingWorker(t)
	rec = sys.ended(id)
	rec.failed(t, "failed", "worker_lost", "3 workers were lost with this job")
	if rec.Attempt != 0 || *rec.Stdout != "" {
		t.Errorf("%s", rec)
	}
	t.Logf("it was dead-lettered %s after the last of its workers was killed",
		rec.CompletedAt.Sub(killed).Round(time.Millisecond))
	if got := hooks.next(t).trace(t); got != id {
		t.Errorf("a webhook of %s", got)
	}
	sys.requeue(t, id, hooks)
	sys.checkMalformedDeadLetter(t)
}

// testServerLost has a job kill the whole server repeatedly. Only the next start can detect this.
func testServerLost(t *testing.T, p *programs) {
	sys, h := newSystem(t, p, topology{}, 1), newHold()
	running := sys.submit(bash(h.code()))
	h.reached(t, 1)
	poison, behind := sys.submit(bash("echo never")), sys.submit(bash("echo behind"))
	sys.front.kill()
	for range 3 {
		sys.startDyingWorker(t)
	}
	sys.startFront(t)
	rec := sys.ended(poison)
	rec.failed(t, "failed", "worker_lost", "3 workers were lost with this job")
	sys.ended(behind).succeeded(t, "behind\n")
	sys.ended(running).failed(t, "failed", "worker_lost", "lost")
	eventually(t, "its dead letter is there", func() (bool, any) {
		list := sys.command(t, sys.key, "deadletter", "list")
		return strings.Count(list, "workers_lost") == 1 && strings.Contains(list, poison), list
	})
}

// requeue requeues the job with several concurrent requests.
func (sys *system) requeue(t *testing.T, id string, hooks *receiver) {
	t.Helper()
	cli := func(args ...string) string {
		return sys.command(t, sys.key, append([]string{"deadletter"}, args...)...)
	}
	eventually(t, "its dead letter is there", func() (bool, any) {
		list := cli("list")
		return regexp.MustCompile(id+` +workers_lost .* default +-\n`).MatchString(list) &&
			strings.Count(list, "\n") == 2, list
	})
	show := cli("show", id)
	if strings.Count(show, "lost worker") != 3 || strings.Contains(show, "s3cret") || strings.Contains(show, "echo one") ||
		!strings.Contains(show, "team=blue") {
		t.Errorf("it is shown as\n%s", show)
	}
	var asked []*pending
	for range 4 {
		asked = append(asked, sys.begin(http.MethodPost, "/v1/admin/dead-letters/"+id+"/requeue", nil))
	}
	again := strings.TrimSpace(cli("requeue", id))
	for _, a := range asked {
		if r := a.answer(t); r.status != http.StatusAccepted || r.trace(t) != again || again == id {
			t.Errorf("%s, and before %s", r, again)
		}
	}
	if !strings.Contains(cli("list"), again) || !strings.Contains(cli("show", id), again) {
		t.Errorf("the dead letter does not name %s:\n%s", again, cli("show", id))
	}
	// its thread is still held
	sys.execute(bash("true").and("thread_id", "poison")).rejection(t, http.StatusConflict, "conflict")
	sys.startWorker(t)
	rec := sys.ended(again)
	rec.succeeded(t, "one\ns3cret\n")
	if rec.Metadata["team"] != "blue" || rec.Attempt != 1 {
		t.Errorf("%s of %v", rec, rec.Metadata)
	}
	if got := hooks.next(t).trace(t); got != again {
		t.Errorf("a webhook of %s, want %s", got, again)
	}
	sys.record(id).failed(t, "failed", "worker_lost", "") // this status is final
	if got := strings.TrimSpace(cli("requeue", id)); got != again {
		t.Errorf("asked again it runs as %s", got)
	}
	if res := sys.inline(bash("cat file").and("thread_id", "poison")); res.Stdout != "one\n" {
		t.Errorf("the thread has %q", res.Stdout)
	}
	plain, _ := sys.newKey("other", "pro")
	if out := sys.command(t, plain, "deadletter", "show", id); !strings.Contains(out, "forbidden") {
		t.Errorf("another organisation is shown\n%s", out)
	}
	if out := cli("rm", id); out != id+" is removed\n" {
		t.Errorf("%s", out)
	}
	if out := cli("show", id); !strings.Contains(out, "there is no dead letter of that id") {
		t.Errorf("what was removed is shown as\n%s", out)
	}
}

// checkMalformedDeadLetter publishes an invalid job message and checks its dead letter.
func (sys *system) checkMalformedDeadLetter(t *testing.T) {
	t.Helper()
	nc := connect(t, sys.programs, sys.broker)
	publish(t, nc, "bullpen.job.x", "nothing of ours", "Bullpen-Meta", "{")
	flush(t, nc)
	var id string
	eventually(t, "the message is dead-lettered", func() (bool, any) {
		list := sys.command(t, sys.key, "deadletter", "list")
		id = regexp.MustCompile(`dead_[0-9]+`).FindString(list)
		return id != "", list
	})
	for _, word := range []string{"malformed", "bullpen.job.x", "Bullpen-Meta: {", "nothing of ours"} {
		if out := sys.command(t, sys.key, "deadletter", "show", id); !strings.Contains(out, word) {
			t.Errorf("there is no %q in\n%s", word, out)
		}
	}
	if out := sys.command(t, sys.key, "deadletter", "requeue", id); !strings.Contains(out, "a message that is no job") {
		t.Errorf("%s", out)
	}
}

// testWorkerFrozen suspends a worker for so long that its job is retried elsewhere. Its program
// keeps running. When the worker resumes, no reader may see its messages, neither one connected now
// nor a later one.
func testWorkerFrozen(t *testing.T, p *programs) {
	sys := newSystem(t, p, topology{separate: true}, noSlots, "--slots", "1")
	frozen, _ := sys.startWorkerIn(t, filepath.Join(t.TempDir(), "frozen"))
	t.Cleanup(func() { frozen.signal(syscall.SIGCONT) }) // so that it can exit
	sys.ready(t)
	first, second := newHold(), newHold()
	id := sys.submit(bash(fmt.Sprintf("n=$RANDOM$RANDOM\necho held $n\nsleep %s\necho woken $n\nsleep %s\necho done $n\n",
		first.seconds, second.seconds)).
		and("max_attempts", 2))
	first.reached(t, 1)
	live := []*pending{sys.follow(id, 0), sys.follow(id, 0, accept, sse)}
	printed := func() string {
		stdout := ""
		for _, e := range sys.get(execution(id, "output") + "?follow=false").events(t) {
			stdout += e.Data
		}
		return stdout
	}
	eventually(t, "its first line is there", func() (bool, any) { s := printed(); return strings.HasSuffix(s, "\n"), s })
	before := printed()

	frozen.signal(syscall.SIGSTOP)
	stopped := time.Now()
	sys.startWorker(t)
	first.reached(t, 2) // of each attempt
	eventually(t, "only the other worker is listed", func() (bool, any) {
		list := sys.workers(t)
		return len(list) == 1, list
	})
	t.Logf("the next attempt had begun %s after its worker was frozen", time.Since(stopped).Round(time.Millisecond))
	first.release(t)
	second.reached(t, 2)
	if rec := sys.record(id); rec.Status != "running" || rec.Attempt != 2 {
		t.Errorf("%s", rec)
	}
	frozen.signal(syscall.SIGCONT)
	eventually(t, "the woken worker gives up what it had", func() (bool, any) {
		_, ok := frozen.findLog(t, "execution abandoned")
		return ok, "no such line"
	})
	second.reached(t, 1) // its program is dead
	second.release(t)
	rec := sys.ended(id)
	if rec.Status != "success" || rec.Attempt != 2 {
		t.Errorf("%s", rec)
	}
	own := *rec.Stdout
	if ok, _ := regexp.MatchString(`^held (\d+)\nwoken (\d+)\ndone (\d+)\n$`, own); !ok ||
		strings.Contains(own, strings.TrimPrefix(before, "held ")) {
		t.Errorf("the result has %q, after %q of the first attempt", own, before)
	}
	var sent []event
	for _, s := range serverSent(t, live[1].answer(t)) {
		sent = append(sent, s.event)
	}
	for name, events := range map[string][]event{
		"the live reader": live[0].answer(t).events(t), "the server-sent events": sent, "a later reader": sys.output(id, 0),
	} {
		if stdout, _, last := checkEvents(t, events, 0); stdout != before+own || *last.OutputTruncated ||
			last.Status != "success" {
			t.Errorf("%s has %q and %+v, want %q", name, stdout, last, before+own)
		}
	}
}
