package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	schema "github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/proto/fault"
)

// hold starts a process in the sandbox that outlives the request. The machine sees it as one that holds.
func (s *liveSandbox) hold(h hold) {
	s.t.Helper()
	s.check("setsid sleep "+h.seconds+" >/dev/null 2>&1 </dev/null &", "")
}

// named returns the only sandbox with a name, nil if there is none.
func (a *api) named(name string) *schema.LiveSandbox {
	a.t.Helper()
	var list schema.LiveSandboxes
	r := a.get("/v1/sandboxes?name=" + name)
	if r.into(a.t, &list); r.status != http.StatusOK || len(list.Sandboxes) > 1 {
		a.t.Fatalf("sandboxes of the name %s: %s", name, r)
	}
	if len(list.Sandboxes) == 0 {
		return nil
	}
	return &list.Sandboxes[0]
}

// stepOfWorker is a step of a sandbox's life at which its worker dies.
type stepOfWorker struct {
	at fault.Point
	// create means that the worker dies when the sandbox is created, otherwise when it is paused for the
	// second time.
	create bool
	long   bool // the loss of the worker must be declared, which takes a minute
	state  string
	reason string // "" for a sandbox that runs
	home   string // after a resume
}

func stepsOfWorkers() []stepOfWorker {
	all := []stepOfWorker{
		{at: fault.AfterClaimBeforeStart, create: true, long: true, state: "paused", reason: "worker_lost"},
		{at: fault.AfterOutputBeforeResult, long: true, state: "paused", reason: "worker_lost", home: "1\n"},
		{at: fault.AfterSaveBeforePending, long: true, state: "paused", reason: "worker_lost", home: "1\n"},
		{at: fault.AfterPendingBeforeCommit, long: true, state: "paused", reason: "paused", home: "1\n2\n"},
		{at: fault.AfterCommitBeforeResult, long: true, state: "paused", reason: "paused", home: "1\n2\n"},
		{at: fault.AfterResultBeforeAck, state: "paused", reason: "paused", home: "1\n2\n"},
		// The last, since the next worker gets the job.
		{at: fault.AfterTakeBeforeClaim, create: true, state: "running"},
	}
	if testing.Short() {
		all = slices.DeleteFunc(all, func(s stepOfWorker) bool { return s.long })
	}
	return all
}

// testLiveSandboxesKilled kills each process at each step of a sandbox's life. Afterwards the sandbox is
// in the state that is promised, with the home of its last save, runs once at most, and nothing is left.
func testLiveSandboxesKilled(t *testing.T, p *programs, in topology) {
	temporary := t.TempDir() // of all processes
	start := func(t *testing.T) *crashSystem {
		sys := &crashSystem{died: map[fault.Point]bool{}}
		args := []string{"--sandboxes", "4"}
		if in.separate {
			args = append(args, p.newBucket(t).flags()...)
		}
		sys.system = newSystem(t, p.faulty(t), in, 2, args...)
		sys.env = append(sys.env, "TMPDIR="+temporary)
		return sys
	}
	t.Run("worker", func(t *testing.T) { start(t).killWorkersOfSandboxes(t) })
	if in.separate {
		t.Run("gateway", func(t *testing.T) { start(t).killGatewaysOfSandboxes(t) })
	}
	left, err := os.ReadDir(temporary)
	if err != nil || len(left) > 0 {
		t.Errorf("in the directory for temporary files remain %v, %v", left, err)
	}
}

// killWorkersOfSandboxes kills a worker at each step, and checks all sandboxes at the end.
func (sys *crashSystem) killWorkersOfSandboxes(t *testing.T) {
	sys.stopWorker(t)
	data := filepath.Join(t.TempDir(), "worker")
	start := func(t *testing.T) {
		if !sys.separate {
			sys.startFront(t)
			sys.ready(t)
			return
		}
		sys.worker, sys.health = sys.startWorkerIn(t, data)
	}
	h := newHold()
	for _, step := range stepsOfWorkers() {
		body := request{"name": step.at, "on_timeout": "pause"}
		if step.create {
			sys.startDying(t, step.at, start)
			created := sys.begin(http.MethodPost, "/v1/sandboxes", body)
			sys.awaitCrash(t, step.at, sys.worker)
			if step.state != "running" {
				continue
			}
			start(t)
			if sys.separate {
				if r := created.answer(t); r.status != http.StatusCreated {
					t.Errorf("%s: %s", step.at, r)
				}
			}
			continue
		}
		sys.startDying(t, step.at+":2", start) // the first time is the first pause
		s := sys.newSandbox(body)
		s.check("echo 1 >f", "")
		s.change(http.MethodPost, "/pause")
		s.change(http.MethodPost, "/resume")
		s.check("echo 2 >>f", "")
		s.hold(h)
		h.reached(t, 1)
		sys.begin(http.MethodPost, s.path("/pause"), nil)
		sys.awaitCrash(t, step.at, sys.worker)
		h.reached(t, 0)
	}
	for _, step := range stepsOfWorkers() {
		x := sys.named(string(step.at))
		if x == nil {
			t.Errorf("%s: the sandbox is gone", step.at)
			continue
		}
		s := &liveSandbox{sys.api, x.ID}
		if s.awaits(step.state, step.reason); step.reason != "" {
			s.change(http.MethodPost, "/resume")
		}
		s.check("cat f 2>/dev/null || true", step.home)
		if step.reason != "" {
			s.hold(h)
			h.reached(t, 1)
		}
		s.change(http.MethodDelete, "")
		h.reached(t, 0)
	}
	sys.stopWorker(t)
}

// stepOfGateway is a step of a sandbox's life at which the gateway dies.
type stepOfGateway struct {
	at     fault.Point
	method string // of the request during which it dies
	route  string // "" creates the sandbox
	long   bool   // only after a minute it is certain that the sandbox was not submitted
	more   bool   // not with -short
	state  string // "" for none
	reason string
	home   string // after a resume
}

func stepsOfGateways() []stepOfGateway {
	all := []stepOfGateway{
		{at: fault.AfterSandboxBeforeJob, long: true},
		{at: fault.AfterSandboxBeforeJob, route: "/resume", long: true, state: "paused", reason: "not_started", home: "1\n"},
		{at: fault.AfterJobBeforeReply, state: "running"},
		{at: fault.AfterAssign, route: "/resume", more: true, state: "running", home: "1\n"},
		{at: fault.AfterGuestBeforeRunning, more: true, state: "running"},
		{at: fault.AfterStoppingBeforeCancel, route: "/pause", state: "paused", reason: "paused", home: "1\n"},
		{
			at: fault.AfterStoppingBeforeCancel, method: http.MethodDelete, route: "/", more: true,
			state: "ended", reason: "killed",
		},
	}
	if testing.Short() {
		all = slices.DeleteFunc(all, func(s stepOfGateway) bool { return s.long || s.more })
	}
	return all
}

// killGatewaysOfSandboxes kills the gateway, and with it the dispatcher, at each step.
func (sys *crashSystem) killGatewaysOfSandboxes(t *testing.T) {
	ids := make([]string, len(stepsOfGateways()))
	name := func(i int) string { return fmt.Sprintf("gateway-%d", i) }
	for i, step := range stepsOfGateways() {
		path, method := "/v1/sandboxes", http.MethodPost
		if step.route != "" {
			s := sys.newSandbox(request{"on_timeout": "pause", "name": name(i)})
			s.check("echo 1 >f", "")
			if step.route == "/resume" {
				s.change(http.MethodPost, "/pause")
			}
			ids[i], path = s.id, s.path(step.route)
			if step.method == http.MethodDelete {
				method, path = step.method, s.path("")
			}
		}
		sys.front.kill()
		sys.startDying(t, step.at, sys.startFront)
		sys.ready(t)
		var body any
		if step.route == "" {
			body = request{"on_timeout": "pause", "name": name(i)}
		}
		eventually(t, string(step.at), func() (bool, any) { // it may not know yet what workers can run
			r, err := sys.try(t.Context(), method, path, body)
			return err != nil, r
		})
		sys.awaitCrash(t, step.at, sys.front)
		sys.startFront(t)
		sys.ready(t)
		if x := sys.named(name(i)); ids[i] == "" && x != nil {
			ids[i] = x.ID
		}
		if ids[i] == "" {
			t.Fatalf("%s: the sandbox is not counted", step.at)
		}
		if !step.long {
			sys.checkSandboxOf(t, step, name(i), ids[i])
		}
	}
	for i, step := range stepsOfGateways() {
		if step.long {
			sys.checkSandboxOf(t, step, name(i), ids[i])
		}
	}
	sys.worker.signal(syscall.SIGTERM)
	sys.worker.exitCode(t)
}

// checkSandboxOf checks what has become of the sandbox of a step.
func (sys *crashSystem) checkSandboxOf(t *testing.T, step stepOfGateway, name, id string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s is %q %q", step.at, step.state, step.reason), func() (bool, any) {
		x := sys.named(name)
		if x == nil || step.state == "" {
			return x == nil && step.state == "", x
		}
		return string(x.State) == step.state && (step.reason == "" || string(*x.Reason) == step.reason), x
	})
	s := &liveSandbox{sys.api, id}
	if step.state == "" || step.state == "ended" {
		return
	}
	if step.state == "paused" {
		s.change(http.MethodPost, "/resume")
	}
	s.check("cat f 2>/dev/null || true", step.home)
	s.change(http.MethodDelete, "")
}

// testLiveSandboxesFrozen freezes the worker or NATS beneath sandboxes. Half a minute ends nothing. A
// sandbox that is declared lost does not run any more, whatever its worker does when it wakes.
func testLiveSandboxesFrozen(t *testing.T, p *programs) {
	start := func(t *testing.T) *system {
		return newSystem(t, p, topology{separate: true}, 2, append(p.newBucket(t).flags(), "--sandboxes", "4")...)
	}
	t.Run("worker", func(t *testing.T) {
		t.Parallel()
		sys, h := start(t), newHold()
		s := sys.in(t).newSandbox(request{"on_timeout": "pause"})
		s.check("echo 1 >f", "")
		s.change(http.MethodPost, "/pause")
		s.change(http.MethodPost, "/resume")
		s.check("echo 2 >>f", "")
		s.hold(h)
		h.reached(t, 1)
		frozen := sys.worker
		t.Cleanup(func() { frozen.signal(syscall.SIGCONT) }) // so that it can exit
		frozen.signal(syscall.SIGSTOP)
		sys.startWorker(t)
		s.awaits("paused", "worker_lost")
		if pids := h.pids(t); len(pids) > 0 {
			t.Errorf("the sandbox may start again, and %v still run in it", pids)
		}
		s.change(http.MethodPost, "/resume")
		s.check("cat f", "1\n")
		s.hold(h)
		frozen.signal(syscall.SIGCONT)
		eventually(t, "the woken worker gives up what it had", func() (bool, any) {
			_, ok := frozen.findLog(t, "execution abandoned")
			return ok, "no such line"
		})
		h.reached(t, 1)
		s.check("echo 3 >>f; cat f", "1\n3\n")
		s.change(http.MethodPost, "/pause")
		s.change(http.MethodPost, "/resume")
		s.check("cat f", "1\n3\n")
		s.change(http.MethodDelete, "")
	})
	for name, disrupt := range map[string]func(*testing.T, *system, func()){
		"NATS-frozen": func(_ *testing.T, sys *system, during func()) {
			sys.broker.signal(syscall.SIGSTOP)
			during()
			sys.broker.signal(syscall.SIGCONT)
		},
		"NATS-killed": func(t *testing.T, sys *system, during func()) {
			sys.broker.kill()
			during()
			sys.broker.restart(t, sys.programs)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sys, h := start(t), newHold()
			s := sys.in(t).newSandbox(request{"on_timeout": "pause"})
			s.check("echo 1 >f", "")
			s.hold(h)
			h.reached(t, 1)
			t.Cleanup(func() { sys.broker.signal(syscall.SIGCONT) })
			disrupt(t, sys, func() { s.check("sleep 30; echo survived", "survived\n") })
			s.awaits("running", "")
			s.check("cat f", "1\n") // a request that begins now
			h.reached(t, 1)
			disrupt(t, sys, func() { h.reached(t, 0) }) // the worker's lease expires
			s.awaits("paused", "worker_lost")
			s.change(http.MethodPost, "/resume")
			s.check("ls", "") // it was not saved before
			s.change(http.MethodDelete, "")
		})
	}
	t.Run("no worker", func(t *testing.T) { // and the gateway is killed while the sandbox waits for one
		t.Parallel()
		sys := start(t)
		sys.worker.signal(syscall.SIGTERM)
		sys.worker.exitCode(t)
		sys.begin(http.MethodPost, "/v1/sandboxes", request{"name": "waits"})
		eventually(t, "it waits", func() (bool, any) { x := sys.named("waits"); return x != nil, x })
		sys.front.kill()
		sys.startFront(t)
		eventually(t, "it has not started", func() (bool, any) {
			x := sys.named("waits")
			return x == nil || x.State == "ended" && *x.Reason == "not_started", x
		})
	})
}
