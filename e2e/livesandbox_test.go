package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"

	rpc "connectrpc.com/connect"

	"github.com/bullpen-run/bullpen/guest/processpb"
	schema "github.com/bullpen-run/bullpen/proto/api"
)

// liveSandbox is a live sandbox and a client of it.
type liveSandbox struct {
	*api
	id string
}

// newSandbox creates a live sandbox and returns it once it runs.
func (a *api) newSandbox(body request) *liveSandbox {
	a.t.Helper()
	var made schema.LiveSandbox
	r := a.do(http.MethodPost, "/v1/sandboxes", body)
	if r.into(a.t, &made); r.status != http.StatusCreated || made.State != "running" {
		a.t.Fatalf("create a sandbox: %s", r)
	}
	return &liveSandbox{a, made.ID}
}

// path returns the path of a route of the sandbox.
func (s *liveSandbox) path(route string) string { return "/v1/sandboxes/" + s.id + route }

// change sends a request that changes the sandbox, and returns the sandbox.
func (s *liveSandbox) change(method, route string) (x schema.LiveSandbox) {
	s.t.Helper()
	r := s.do(method, s.path(route), nil)
	if r.into(s.t, &x); r.status != http.StatusOK {
		s.t.Fatalf("%s %s: %s", method, route, r)
	}
	return x
}

// awaits waits until the sandbox is in a state for a reason, "" for one that has not stopped.
func (s *liveSandbox) awaits(state, reason string) {
	s.t.Helper()
	eventually(s.t, state+" "+reason, func() (bool, any) {
		r, err := s.try(s.t.Context(), http.MethodGet, s.path(""), nil)
		if err != nil {
			return false, err
		}
		var x schema.LiveSandbox
		r.into(s.t, &x)
		got := ""
		if x.Reason != nil {
			got = string(*x.Reason)
		}
		return string(x.State) == state && got == reason, x
	})
}

// run runs a Bash program in the sandbox as a user, and returns its output and its exit status.
func (s *liveSandbox) run(user, code string) (stdout string, exit int32, err error) {
	s.t.Helper()
	client := processpb.NewProcessClient(s.http, s.base+s.path("/guest"), rpc.WithProtoJSON())
	call := rpc.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", code}},
	})
	call.Header().Set("Authorization", "Bearer "+s.key)
	call.Header().Set("Bullpen-User", user)
	ctx, cancel := context.WithCancel(s.t.Context())
	defer cancel()
	stream, err := client.Start(ctx, call)
	if err != nil {
		return "", 0, err
	}
	var out bytes.Buffer
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		out.Write(event.GetData().GetStdout())
		if end := event.GetEnd(); end != nil {
			exit = end.GetExitCode()
		}
	}
	return out.String(), exit, stream.Err()
}

// check checks what a Bash program prints.
func (s *liveSandbox) check(code, want string) {
	s.t.Helper()
	if got, exit, err := s.run("user", code); got != want || exit != 0 || err != nil {
		s.t.Errorf("%s printed %q with exit status %d, %v; want %q", code, got, exit, err, want)
	}
}

var answersOfGuests = repeatsFlag("guest-answers", 300, 5000, "commands whose output must arrive whole")

// testLiveSandboxes is what tenants see of live sandboxes, and how each way of ending is told.
func testLiveSandboxes(t *testing.T, p *programs, in topology) {
	args := []string{"--sandboxes", "4"}
	if in.separate {
		args = append(args, p.newBucket(t).flags()...)
	}
	sys := newSystem(t, p, in, 2, args...)

	t.Run("cycles", func(t *testing.T) { // edits and removals survive every pause
		s := sys.in(t).newSandbox(request{"on_timeout": "pause", "env_vars": request{"GREETING": "hello"}})
		s.check("echo $GREETING $HOME $PWD $USER; id -u", "hello /home/user /home/user user\n1000\n")
		for i := range 6 {
			s.check(fmt.Sprintf("echo %d >>log; rm -f gone%d; echo %d >gone%d; wc -l <log; ls", i, i-1, i, i),
				fmt.Sprintf("%d\ngone%d\nlog\n", i+1, i))
			if x := s.change(http.MethodPost, "/pause"); x.State != "paused" || *x.Reason != "paused" {
				t.Errorf("paused %+v", x)
			}
			if x := s.change(http.MethodPost, "/resume"); x.State != "running" || x.Starts != i+2 {
				t.Errorf("resumed %+v", x)
			}
		}
		if x := s.change(http.MethodDelete, ""); x.State != "ended" || *x.Reason != "killed" {
			t.Errorf("deleted %+v", x)
		}
		if _, _, err := s.run("user", "true"); err == nil {
			t.Error("a program ran in a deleted sandbox")
		}
	})
	t.Run("commands", func(t *testing.T) { // the answers of guests begin while a proxy still reads the requests
		s := sys.in(t).newSandbox(request{})
		for range answersOfGuests.n() {
			if s.check("echo hi", "hi\n"); t.Failed() {
				break
			}
		}
		s.change(http.MethodDelete, "")
	})
	t.Run("ends", func(t *testing.T) {
		a := sys.in(t)
		s := a.newSandbox(request{"on_timeout": "pause"})
		s.check("echo kept >f", "")
		_, _, _ = s.run("user", `python3 -c 'x = bytearray(3 << 30)'`)
		s.awaits("paused", "memory_limit_exceeded")
		s.change(http.MethodPost, "/resume")
		s.check("cat f", "kept\n")
		// A user cannot end the guest or the init, and root only its own sandbox.
		if out, _, err := s.run("user", "kill -9 1; kill -9 2; echo alive"); out != "alive\n" || err != nil {
			t.Errorf("after signals of a user: %q, %v", out, err)
		}
		_, _, _ = s.run("root", "kill -9 2; sleep 60")
		s.awaits("ended", "guest_ended")
		idle := a.newSandbox(request{"idle_timeout": 1})
		idle.awaits("ended", "idle")
		expired := a.newSandbox(request{"timeout": 1, "on_timeout": "pause"})
		expired.awaits("paused", "expired")
		expired.change(http.MethodDelete, "")
		expired.awaits("ended", "killed")
		key, id := a.newKey("default", "enterprise")
		revoked := a.with(key).newSandbox(request{"on_timeout": "pause"})
		a.do(http.MethodDelete, "/v1/admin/keys/"+id, nil)
		(&liveSandbox{a, revoked.id}).awaits("ended", "key_revoked")
	})
	t.Run("privileges", func(t *testing.T) {
		s := sys.in(t).newSandbox(request{})
		for _, user := range []string{"user", "root"} {
			out, _, err := s.run(user, "grep ^Cap /proc/self/status | cut -f2 | sort -u")
			if want := strings.Repeat("0", 16) + "\n"; !strings.HasPrefix(out, want) || err != nil {
				t.Errorf("%s has %q, %v", user, out, err)
			}
		}
		s.change(http.MethodDelete, "")
	})
	t.Run("home", func(t *testing.T) { // of a thread that executions use as well
		a := sys.in(t)
		write := request{"code": "echo from a program >f", "language": "bash", "thread_id": "shared-home"}
		if r := a.inline(write); !r.Success {
			t.Fatalf("%+v", r)
		}
		s := a.newSandbox(request{"thread_id": "shared-home"})
		s.check("cat f; echo from a sandbox >>f", "from a program\n")
		a.execute(request{"code": "true", "language": "bash", "thread_id": "shared-home"}).rejection(
			t, http.StatusConflict, "conflict")
		s.change(http.MethodDelete, "")
		if r := a.inline(request{"code": "cat f", "language": "bash", "thread_id": "shared-home"}); r.Stdout !=
			"from a program\nfrom a sandbox\n" {
			t.Errorf("after the sandbox: %+v", r)
		}
	})
	t.Run("drain", func(t *testing.T) {
		s := sys.in(t).newSandbox(request{})
		s.check("echo precious >f", "")
		sys.worker.signal(syscall.SIGTERM)
		sys.worker.exitCode(t)
		if in.separate {
			sys.startWorker(t)
		} else {
			sys.startFront(t)
			sys.ready(t)
			s.api = sys.in(t)
		}
		s.awaits("paused", "worker_drained")
		eventually(t, "resumed", func() (bool, any) {
			r := s.do(http.MethodPost, s.path("/resume"), nil)
			return r.status == http.StatusOK, r
		})
		s.check("cat f", "precious\n")
		s.change(http.MethodDelete, "")
	})
}

// testLiveSandboxLost kills the worker of live sandboxes: nothing starts a second time, which a file on
// the machine shows, and the sandbox tells why it ended.
func testLiveSandboxLost(t *testing.T, p *programs, in topology) {
	args := []string{"--sandboxes", "4"}
	if in.separate {
		args = append(args, p.newBucket(t).flags()...)
	}
	sys := newSystem(t, p, in, 2, args...)
	paused, killed := sys.newSandbox(request{"on_timeout": "pause"}), sys.newSandbox(request{})
	paused.check("echo 1 >f", "")
	paused.change(http.MethodPost, "/pause")
	paused.change(http.MethodPost, "/resume")
	paused.check("echo 2 >>f", "")
	sys.worker.kill()
	if in.separate {
		sys.startWorker(t)
	} else {
		sys.startFront(t)
		sys.ready(t)
		paused.api, killed.api = sys.api, sys.api
	}
	killed.awaits("ended", "worker_lost")
	paused.awaits("paused", "worker_lost")
	paused.change(http.MethodPost, "/resume")
	paused.check("cat f", "1\n") // what the last pause saved
}
