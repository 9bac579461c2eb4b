package main_test

import (
	"context"
	"encoding/base64"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/bullpen-run/bullpen/guest/processpb"
)

func basic(user string) string { return base64.StdEncoding.EncodeToString([]byte(user + ":")) }

func (s *sandbox) list() []*processpb.ProcessInfo {
	s.t.Helper()
	answer, err := s.process.List(s.t.Context(), connect.NewRequest(&processpb.ListRequest{}))
	check(s.t, err)
	return answer.Msg.GetProcesses()
}

func (s *sandbox) signal(p *processpb.ProcessSelector, signal processpb.Signal) error {
	_, err := s.process.SendSignal(s.t.Context(),
		connect.NewRequest(&processpb.SendSignalRequest{Process: p, Signal: signal}))
	return err
}

func (s *sandbox) kill(p *processpb.ProcessSelector) error {
	return s.signal(p, processpb.Signal_SIGNAL_SIGKILL)
}

func (s *sandbox) send(p *processpb.ProcessSelector, text string) error {
	_, err := s.process.SendInput(s.t.Context(), connect.NewRequest(&processpb.SendInputRequest{
		Process: p, Input: &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: []byte(text)}},
	}))
	return err
}

func (s *sandbox) closeStdin(p *processpb.ProcessSelector) error {
	_, err := s.process.CloseStdin(s.t.Context(), connect.NewRequest(&processpb.CloseStdinRequest{Process: p}))
	return err
}

// alive reports whether a process lives.
func alive(t *testing.T, pid string) bool {
	t.Helper()
	b, err := os.ReadFile("/proc/" + pid + "/stat")
	if os.IsNotExist(err) {
		return false
	}
	check(t, err)
	_, rest, _ := strings.Cut(string(b), ") ")
	return rest[0] != 'Z' && rest[0] != 'X'
}

func TestRun(t *testing.T) {
	s := newSandbox(t)
	const noCapabilities = "grep -c '^Cap[IPEA].*:.0000000000000000$' /proc/self/status"
	for _, test := range []struct {
		name, user, script, stdout, stderr string
	}{
		{name: "output", script: "echo out; echo err >&2", stdout: "out\n", stderr: "err\n"},
		{name: "default user", script: "id -u; id -g; id -G", stdout: "1000\n1000\n1000\n"},
		{name: "root", user: "root", script: "id -u; id -g; id -G", stdout: "0\n0\n0\n"},
		{name: "no capabilities", script: noCapabilities, stdout: "4\n"},
		{name: "root has none either", user: "root", script: noCapabilities, stdout: "4\n"},
		{name: "descriptors", script: "exec ls /proc/self/fd", stdout: "0\n1\n2\n3\n"},
		{name: "umask", script: "umask", stdout: "0022\n"},
		{name: "directory", script: "pwd", stdout: s.home + "\n"},
		{name: "session", script: `read -r _ _ _ _ _ sid _ < /proc/$$/stat; [ $sid = $$ ] && echo own`, stdout: "own\n"},
		{
			name: "environment", script: `echo "$HOME $USER $LOGNAME $SHARED $E2B_SANDBOX"`,
			stdout: s.home + " user user sandbox true\n",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := s.run(test.user, test.script)
			if r.err != nil || r.stdout != test.stdout || r.stderr != test.stderr || r.end.GetStatus() != "exit status 0" {
				t.Fatalf("%+v", r)
			}
		})
	}
	if n := len(s.list()); n != 0 {
		t.Fatalf("%d processes are listed", n)
	}
}

func TestEnvironmentOfRequest(t *testing.T) {
	s := newSandbox(t)
	r := bash(`echo "$SHARED $OWN"`)
	r.Process.Envs = map[string]string{"SHARED": "request", "OWN": "a b"}
	if got := s.begin("", r).all().stdout; got != "request a b\n" {
		t.Fatal(got)
	}
}

func TestEnd(t *testing.T) {
	s := newSandbox(t)
	for _, test := range []struct {
		script string
		want   *processpb.ProcessEvent_EndEvent
	}{
		{"true", &processpb.ProcessEvent_EndEvent{Exited: true, Status: "exit status 0"}},
		{"exit 3", &processpb.ProcessEvent_EndEvent{
			ExitCode: 3, Exited: true, Status: "exit status 3", Error: new("exit status 3"),
		}},
		{"kill -KILL $$", &processpb.ProcessEvent_EndEvent{
			ExitCode: -1, Status: "signal: killed", Error: new("signal: killed"),
		}},
		{"kill -TERM $$", &processpb.ProcessEvent_EndEvent{
			ExitCode: -1, Status: "signal: terminated", Error: new("signal: terminated"),
		}},
	} {
		if r := s.run("", test.script); r.err != nil || !proto.Equal(r.end, test.want) {
			t.Errorf("%s: %v, %v", test.script, r.end, r.err)
		}
	}
}

func TestDirectory(t *testing.T) {
	s := newSandbox(t)
	check(t, os.MkdirAll(s.home+"/sub/dir", 0o755))
	check(t, os.WriteFile(s.home+"/file", nil, 0o644))
	for _, test := range []struct{ cwd, want string }{
		{"", s.home}, {"~", s.home}, {"~/sub", s.home + "/sub"}, {"sub/dir", s.home + "/sub/dir"}, {"/usr", "/usr"},
	} {
		r := bash("pwd")
		r.Process.Cwd = &test.cwd
		if got := s.begin("", r).all().stdout; got != test.want+"\n" {
			t.Errorf("%q: %q", test.cwd, got)
		}
	}
	for _, cwd := range []string{"missing", "/missing", "file"} {
		r := bash("pwd")
		r.Process.Cwd = &cwd
		wantCode(t, s.startError("", r), connect.CodeInvalidArgument, cwd)
	}
}

// startError starts a process, which must fail.
func (s *sandbox) startError(user string, r *processpb.StartRequest) error {
	s.t.Helper()
	stream, err := s.process.Start(s.t.Context(), as(user, r))
	check(s.t, err)
	defer func() { _ = stream.Close() }()
	if stream.Receive() {
		s.t.Fatalf("an event instead of an error: %v", stream.Msg())
	}
	return stream.Err()
}

func TestStartErrors(t *testing.T) {
	s := newSandbox(t)
	command := func(cmd string, args ...string) *processpb.StartRequest {
		return &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: cmd, Args: args}}
	}
	variable := bash("true")
	variable.Process.Envs = map[string]string{"A=B": "c"}
	many := command("true")
	for range 20 {
		many.Process.Args = append(many.Process.Args, strings.Repeat("a", 100_000))
	}
	for _, test := range []struct {
		name, user string
		request    *processpb.StartRequest
		code       connect.Code
		words      string
	}{
		{"no command", "", command(""), connect.CodeInvalidArgument, "cmd is empty"},
		{"unknown command", "", command("no-such-command"), connect.CodeInvalidArgument, "no program"},
		{"missing file", "", command("/no/such/file"), connect.CodeInvalidArgument, "/no/such/file"},
		{"not executable", "", command("/etc/passwd"), connect.CodeInvalidArgument, "permission denied"},
		{"zero byte", "", command("true", "a\x00b"), connect.CodeInvalidArgument, "zero byte"},
		{"variable", "", variable, connect.CodeInvalidArgument, "A=B"},
		{"unknown user", "nobody", bash("true"), connect.CodeUnauthenticated, "nobody"},
		{
			"long argument", "", command("true", strings.Repeat("a", 128<<10)),
			connect.CodeResourceExhausted, "131071 bytes",
		},
		{"long arguments", "", many, connect.CodeResourceExhausted, "1048576 bytes"},
		{
			"large message", "", command("true", strings.Repeat("a", 5<<20)),
			connect.CodeResourceExhausted, "4194304",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			wantCode(t, s.startError(test.user, test.request), test.code, test.words)
		})
	}
}

func TestUnknownProcess(t *testing.T) {
	s := newSandbox(t)
	for name, selector := range map[string]*processpb.ProcessSelector{
		"pid": pid(4_000_000),
		"tag": {Selector: &processpb.ProcessSelector_Tag{Tag: "no"}},
	} {
		_, update := s.process.Update(t.Context(), connect.NewRequest(&processpb.UpdateRequest{Process: selector}))
		stream, err := s.process.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: selector}))
		check(t, err)
		stream.Receive()
		for method, err := range map[string]error{
			"connect": stream.Err(), "update": update, "input": s.send(selector, "x"), "close": s.closeStdin(selector),
			"kill": s.kill(selector),
		} {
			t.Run(name+" "+method, func(t *testing.T) { wantCode(t, err, connect.CodeNotFound, name) })
		}
		_ = stream.Close()
	}
	wantCode(t, s.kill(nil), connect.CodeInvalidArgument, "neither pid nor tag")
	e := s.begin("", bash("sleep 1000"))
	wantCode(t, s.signal(pid(e.pid), processpb.Signal_SIGNAL_UNSPECIFIED), connect.CodeUnimplemented, "SIGNAL_SIGKILL")
	wantCode(t, s.signal(pid(e.pid), 2), connect.CodeUnimplemented, "SIGNAL_SIGKILL")
	check(t, s.kill(pid(e.pid)))
}

func TestStdin(t *testing.T) {
	s := newSandbox(t)
	if r := s.run("", "cat; echo end"); r.stdout != "end\n" {
		t.Fatalf("without standard input: %+v", r)
	}
	r := bash("cat; echo end")
	r.Stdin = nil // an open pipe
	e := s.begin("", r)
	check(t, s.send(pid(e.pid), "Hello,\n"))
	e.readUntil("Hello,\n")

	stream := s.process.StreamInput(t.Context())
	check(t, stream.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Start{
		Start: &processpb.StreamInputRequest_StartEvent{Process: pid(e.pid)},
	}}))
	for _, text := range []string{"!@#$%^&*()_+", "\xff\x00"} {
		check(t, stream.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Keepalive{}}))
		check(t, stream.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Data{
			Data: &processpb.StreamInputRequest_DataEvent{Input: &processpb.ProcessInput{
				Input: &processpb.ProcessInput_Stdin{Stdin: []byte(text)},
			}},
		}}))
	}
	_, err := stream.CloseAndReceive()
	check(t, err)
	check(t, s.closeStdin(pid(e.pid)))
	if got := e.all(); got.stdout != "!@#$%^&*()_+\xff\x00end\n" {
		t.Fatalf("%+v", got)
	}

	deaf := bash("exec sleep 1000") // lives on after its standard input has ended
	deaf.Stdin = nil
	e = s.begin("", deaf)
	check(t, s.closeStdin(pid(e.pid)))
	check(t, s.closeStdin(pid(e.pid)))
	check(t, s.kill(pid(e.pid)))
}

func TestInputErrors(t *testing.T) {
	s := newSandbox(t)
	none := s.begin("", bash("sleep 1000"))
	wantCode(t, s.send(pid(none.pid), "x"), connect.CodeFailedPrecondition, "closed")
	_, err := s.process.SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{
		Process: pid(none.pid), Input: &processpb.ProcessInput{Input: &processpb.ProcessInput_Pty{Pty: []byte("x")}},
	}))
	wantCode(t, err, connect.CodeInternal, "no terminal")
	_, err = s.process.SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: pid(none.pid)}))
	wantCode(t, err, connect.CodeInvalidArgument, "neither stdin nor pty")

	deaf := bash("echo ready; exec sleep 1000") // reads nothing
	deaf.Stdin = nil
	e := s.begin("", deaf)
	e.readUntil("ready")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err = s.process.SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{
		Process: pid(e.pid),
		Input:   &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: make([]byte, 1<<20)}},
	}))
	wantCode(t, err, connect.CodeDeadlineExceeded, "")
	check(t, s.kill(pid(e.pid)))
}

func TestKillEndsGroup(t *testing.T) {
	s := newSandbox(t)
	// Of these, one is in the session, one has a session of its own, one has left its parent as well, and
	// one has also lost its environment, but not its parent.
	const script = `
		sleep 1000 & echo $!
		setsid sleep 1001 & echo $!
		(setsid bash -c 'echo $$; sleep 1002; :' &)
		setsid bash -c 'env -i sleep 1003 & echo $!; wait' &
		trap '' TERM HUP
		sleep 1004`
	for _, user := range []string{"user", "root"} {
		t.Run(user, func(t *testing.T) {
			e := s.begin(user, bash(script))
			pids := strings.Fields(e.readLines(4))
			check(t, s.kill(pid(e.pid)))
			for _, pid := range pids {
				if alive(t, pid) {
					t.Errorf("process %s of %v is alive", pid, pids)
				}
			}
			if r := e.all(); r.end.GetStatus() != "signal: killed" {
				t.Errorf("%+v", r)
			}
			wantCode(t, s.kill(pid(e.pid)), connect.CodeNotFound, "has ended")
		})
	}
}

// readLines reads a number of lines of output.
func (e *events) readLines(n int) string {
	e.t.Helper()
	var all string
	for strings.Count(all, "\n") < n {
		data := e.next().GetData()
		if data == nil {
			e.t.Fatalf("the event is %v; output so far: %q", e.msg(), all)
		}
		all += string(data.GetStdout()) + string(data.GetPty())
	}
	return all
}

func TestTerminate(t *testing.T) {
	s := newSandbox(t)
	// The child has the pipes and a session of its own, and ends in its own way.
	const script = `
		setsid bash -c 'trap "echo bye >$0; exit" TERM; echo ready; while :; do sleep 0.01; done' "$1" &
		wait`
	bye := s.home + "/bye"
	r := bash(script)
	r.Process.Args = append(r.Process.Args, "bash", bye)
	e := s.begin("", r)
	e.readUntil("ready")
	check(t, s.signal(pid(e.pid), processpb.Signal_SIGNAL_SIGTERM))
	if r := e.all(); r.end.GetStatus() != "signal: terminated" {
		t.Fatalf("%+v", r)
	}
	eventually(t, func() bool {
		b, _ := os.ReadFile(bye)
		return string(b) == "bye\n"
	})
}

// eventually waits for a condition that nobody announces.
func eventually(t *testing.T, condition func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(limit)
	for !condition() {
		select {
		case <-tick.C:
		case <-timeout:
			t.Fatal("it did not happen")
		}
	}
}

// TestKillSurvivors ends what an ended process has left behind.
func TestKillSurvivors(t *testing.T) {
	s := newSandbox(t)
	e := s.begin("", bash(`setsid sleep 1000 >/dev/null 2>&1 & echo $!`))
	r := e.all()
	survivor := strings.TrimSpace(r.stdout)
	if !alive(t, survivor) {
		t.Fatal("the child did not survive")
	}
	check(t, s.kill(pid(e.pid)))
	if alive(t, survivor) {
		t.Fatal("the child survived")
	}
}

func TestDeadline(t *testing.T) {
	s := newSandbox(t)
	e := s.begin("", bash(`setsid sleep 1000 & echo $!; wait`), "Connect-Timeout-Ms", "300")
	child := strings.TrimSpace(e.readLines(1))
	other := s.attach(&processpb.ConnectRequest{Process: pid(e.pid)})
	r := e.all()
	wantCode(t, r.err, connect.CodeDeadlineExceeded, "")
	if r := other.all(); r.err != nil || r.end.GetStatus() != "signal: killed" {
		t.Fatalf("%+v", r)
	}
	eventually(t, func() bool { return !alive(t, child) })
}

// TestDeadlineOfConnect ends the stream, not the process.
func TestDeadlineOfConnect(t *testing.T) {
	s := newSandbox(t)
	e := s.begin("", bash("sleep 1000"))
	ctx, _ := s.context()
	r := connect.NewRequest(&processpb.ConnectRequest{Process: pid(e.pid)})
	r.Header().Set("Connect-Timeout-Ms", "100")
	stream, err := s.process.Connect(ctx, r)
	check(t, err)
	for stream.Receive() {
	}
	wantCode(t, stream.Err(), connect.CodeDeadlineExceeded, "")
	check(t, stream.Close())
	if n := len(s.list()); n != 1 {
		t.Fatalf("%d processes", n)
	}
	check(t, s.kill(pid(e.pid)))
}

func TestConnect(t *testing.T) {
	s := newSandbox(t)
	tag := "server"
	r := bash("echo one; read -r; echo two")
	r.Stdin, r.Tag = nil, &tag
	e := s.begin("", r)
	e.readUntil("one")
	e.close() // and the process lives
	want := &processpb.ProcessInfo{Config: r.GetProcess(), Pid: e.pid, Tag: &tag}
	if listed := s.list(); len(listed) != 1 || !proto.Equal(listed[0], want) {
		t.Fatalf("%v", listed)
	}
	byTag := &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Tag{Tag: tag}}
	first := s.attach(&processpb.ConnectRequest{Process: byTag})
	second := s.attach(&processpb.ConnectRequest{Process: pid(e.pid)})
	check(t, s.send(byTag, "\n"))
	for _, e := range []*events{first, second, s.attach(&processpb.ConnectRequest{Process: byTag})} {
		if r := e.all(); r.err != nil || r.stdout != "one\ntwo\n" || r.end.GetStatus() != "exit status 0" {
			t.Fatalf("%+v", r)
		}
	}
	// It has ended.
	late := s.attach(&processpb.ConnectRequest{Process: byTag})
	if r := late.all(); r.stdout != "one\ntwo\n" || r.end.GetStatus() != "exit status 0" || late.pid != e.pid {
		t.Fatalf("%+v", r)
	}
	wantCode(t, s.send(byTag, "x"), connect.CodeNotFound, "has ended")
}

// TestOpenPipes ends a process when its children have closed its pipes.
func TestOpenPipes(t *testing.T) {
	s := newSandbox(t)
	r := bash("exec 3<&0; (read -r <&3; echo child) & exit 7")
	r.Stdin = nil
	e := s.begin("", r)
	eventually(t, func() bool {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(int(e.pid)) + "/stat")
		return err == nil && strings.Contains(string(b), ") Z ")
	})
	if n := len(s.list()); n != 1 {
		t.Fatalf("%d processes", n)
	}
	check(t, s.send(pid(e.pid), "\n"))
	if r := e.all(); r.stdout != "child\n" || r.end.GetExitCode() != 7 {
		t.Fatalf("%+v", r)
	}
}
