package main_test

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/bullpen-run/bullpen/guest/processpb"
)

// stop sends the guest SIGTERM, and waits for its end.
func (s *sandbox) stop() {
	s.t.Helper()
	check(s.t, s.cmd.Process.Signal(syscall.SIGTERM))
	select {
	case err := <-s.exited:
		s.exited <- err // for the end of the test
	case <-time.After(limit):
		s.t.Fatal("the guest did not stop")
	}
}

// TestStop ends processes: with SIGTERM, if that is enough, and their streams with an event.
func TestStop(t *testing.T) {
	s := newSandbox(t)
	polite := s.begin("", bash(`trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.01; done`))
	polite.readUntil("ready")
	plain := s.begin("root", bash("setsid sleep 1000 & echo $!; wait"))
	child := strings.TrimSpace(plain.readLines(1))
	left := s.begin("", bash(
		`setsid bash -c 'trap "" TERM; echo $$; exec >/dev/null 2>&1; while :; do sleep 0.01; done' &`))
	survivor := strings.TrimSpace(left.all().stdout)
	begin := time.Now()
	s.stop()
	if took := time.Since(begin); took < 4*time.Second {
		t.Errorf("a process was killed after %v", took)
	}
	if r := polite.all(); r.err != nil || r.stdout != "bye\n" || r.end.GetExitCode() != 7 {
		t.Errorf("%+v", r)
	}
	if r := plain.all(); r.err != nil || r.end.GetStatus() != "signal: terminated" {
		t.Errorf("%+v", r)
	}
	for _, pid := range []string{child, survivor} {
		if alive(t, pid) {
			t.Errorf("process %s is alive", pid)
		}
	}
}

// TestStopEndsStreams has nothing to wait for.
func TestStopEndsStreams(t *testing.T) {
	s := newSandbox(t)
	e := s.begin("", bash("sleep 1000"))
	s.stop()
	if r := e.all(); r.err != nil || r.end.GetStatus() != "signal: terminated" {
		t.Errorf("%+v", r)
	}
}

// TestMostProcesses starts as many processes as there may be, and leaves their streams.
func TestMostProcesses(t *testing.T) {
	s := newSandbox(t)
	const most = 256
	r := &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "cat"}}
	var first *events
	for i := range most {
		e := s.begin("", r)
		if i == 0 {
			first = e
			continue
		}
		e.close()
	}
	if n := len(s.list()); n != most {
		t.Fatalf("%d processes", n)
	}
	if kib := s.memory(); kib > 16<<10 {
		t.Errorf("the guest has %d KiB of memory", kib)
	}
	wantCode(t, s.startError("", r), connect.CodeResourceExhausted, "256 processes")
	check(t, s.closeStdin(pid(first.pid)))
	if r := first.all(); r.end.GetStatus() != "exit status 0" {
		t.Fatalf("%+v", r)
	}
	last := s.begin("", r)
	check(t, s.kill(pid(last.pid)))
	// All other clients: the guest keeps their connections until it notices that they have gone.
	eventually(t, func() bool {
		last := s.begin("", r)
		check(t, s.kill(pid(last.pid)))
		return last.all().err == nil
	})
}

// TestEndedProcesses keeps the last of them.
func TestEndedProcesses(t *testing.T) {
	s := newSandbox(t)
	var pids []uint32
	for i := range 260 {
		config := &processpb.ProcessConfig{Cmd: "echo", Args: []string{strconv.Itoa(i)}}
		e := s.begin("", &processpb.StartRequest{Process: config})
		e.all()
		pids = append(pids, e.pid)
	}
	for _, i := range []int{4, 100, 259} {
		if r := s.attach(&processpb.ConnectRequest{Process: pid(pids[i])}).all(); r.stdout != fmt.Sprintln(i) {
			t.Errorf("process %d: %+v", i, r)
		}
	}
	stream, err := s.process.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: pid(pids[3])}))
	check(t, err)
	stream.Receive()
	wantCode(t, stream.Err(), connect.CodeNotFound, "")
	check(t, stream.Close())
}

// TestMostClients refuses a client too many, and has room again when one goes.
func TestMostClients(t *testing.T) {
	s := newSandbox(t)
	e := s.begin("", bash("echo x; sleep 1000"))
	all := []*events{e}
	for range 255 {
		all = append(all, s.attach(&processpb.ConnectRequest{Process: pid(e.pid)}))
	}
	more := func() error {
		stream, err := s.process.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: pid(e.pid)}))
		check(t, err)
		defer func() { _ = stream.Close() }()
		if stream.Receive() {
			return nil
		}
		return stream.Err()
	}
	wantCode(t, more(), connect.CodeResourceExhausted, "256 clients")
	all[100].close()
	eventually(t, func() bool { return more() == nil })
	check(t, s.kill(pid(e.pid)))
	for i, e := range all {
		if r := e.all(); i != 100 && (r.err != nil || r.end.GetStatus() != "signal: killed") {
			t.Fatalf("client %d: %+v", i, r)
		}
	}
}

func TestHeaders(t *testing.T) {
	s := newSandbox(t)
	r := s.request("GET", "/health", nil, "X-Long", strings.Repeat("a", 80<<10))
	if code, _, _ := s.do(r); code != 431 {
		t.Fatalf("status %d", code)
	}
}

// TestThreads does much at a time: the guest gets by with the threads it has, nearly.
func TestThreads(t *testing.T) {
	s := newSandbox(t)
	threads := func() int {
		entries, err := os.ReadDir(s.proc("task"))
		check(t, err)
		return len(entries)
	}
	s.run("", "true") // it has started
	before := threads()
	var ended sync.WaitGroup
	for i := range 40 {
		ended.Go(func() {
			name := fmt.Sprintf("dir%d/file", i)
			for range 5 {
				if code, body := s.upload("", name, strings.Repeat("x", 100_000)); code != 200 {
					t.Errorf("%d %s", code, body)
				}
				if code, _, body := s.download("", name); code != 200 || len(body) != 100_000 {
					t.Errorf("%d, %d bytes", code, len(body))
				}
				if _, err := s.stat("", name); err != nil {
					t.Error(err)
				}
				if r := s.run("", "seq 10000 | tail -1"); r.stdout != "10000\n" {
					t.Errorf("%+v", r)
				}
				if err := s.remove("", fmt.Sprintf("dir%d", i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	ended.Wait()
	if after := threads(); before > 32 || after > before+4 {
		t.Errorf("%d threads before, %d after", before, after)
	}
}

// memory returns how much memory the guest has for itself, in KiB.
func (s *sandbox) memory() int {
	s.t.Helper()
	status, err := os.ReadFile(s.proc("status"))
	check(s.t, err)
	_, anonymous, _ := strings.Cut(string(status), "RssAnon:")
	kib, err := strconv.Atoi(strings.Fields(anonymous)[0])
	check(s.t, err)
	s.t.Logf("%d KiB", kib)
	return kib
}

// TestMemory has clients that read nothing and processes that write much. What the guest keeps is limited.
func TestMemory(t *testing.T) {
	s := newSandbox(t)
	var all []*events
	for range 40 {
		r := bash("yes | head -c 3000000; echo done >&2")
		all = append(all, s.begin("", r))
	}
	all[0].readUntil("done")
	if kib := s.memory(); kib > 48<<10 {
		t.Errorf("the guest has %d KiB of memory", kib)
	}
	for _, e := range all[1:] {
		if r := e.all(); r.err != nil || len(r.stdout) != 3_000_000 || r.stderr != "done\n" {
			t.Errorf("%d bytes, %v", len(r.stdout), r.err)
		}
	}
}

// TestOtherUser is a guest without any rights, which has only the ids that it starts with.
func TestOtherUser(t *testing.T) {
	s := prepare(t)
	s.config(map[string]any{
		"users":        []map[string]any{{"name": "someone", "uid": 1000, "gid": 1000, "home": s.home}},
		"default_user": "someone",
	})
	s.start(exec.Command("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", program, s.path("config.json")))
	if r := s.run("", "id -u; pwd; echo $USER"); r.stdout != "1000\n"+s.home+"\nsomeone\n" {
		t.Fatalf("%+v", r)
	}
	if code, body := s.upload("", "dir/file", "x"); code != 200 || owner(t, s.home+"/dir/file") != 1000 {
		t.Fatal(code, body)
	}
	if code, body := s.upload("", s.root+"/file", "x"); code != 403 {
		t.Fatal(code, body)
	}
	e := s.begin("", bash("(setsid sh -c 'echo $$; exec sleep 1000' &); sleep 1000"))
	child := strings.TrimSpace(e.readLines(1))
	check(t, s.kill(pid(e.pid)))
	if alive(t, child) {
		t.Error("a child is alive")
	}
}

func TestConfigErrors(t *testing.T) {
	s := prepare(t)
	for name, config := range map[string]string{
		"no file": "", "malformed": "{", "no user": "{}",
		"no home": `{"users":[{"name":"user","uid":1000,"gid":1000}],"default_user":"user"}`,
	} {
		path := s.path("config.json")
		if config == "" {
			path = s.path("missing")
		} else {
			check(t, os.WriteFile(path, []byte(config), 0o600))
		}
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		output, err := exec.CommandContext(ctx, program, path).CombinedOutput()
		cancel()
		if err == nil || !strings.HasPrefix(string(output), "guest: ") || !strings.Contains(string(output), "config") {
			t.Errorf("%s: %v %s", name, err, output)
		}
	}
}

// TestRequestSizes refuses messages that are too large, alone or together.
func TestRequestSizes(t *testing.T) {
	s := newSandbox(t)
	r := bash("exec sleep 1000") // reads nothing
	r.Stdin = nil
	e := s.begin("", r)
	stream := s.process.StreamInput(t.Context())
	check(t, stream.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Start{
		Start: &processpb.StreamInputRequest_StartEvent{Process: pid(e.pid)},
	}}))
	_ = stream.Send(&processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Data{
		Data: &processpb.StreamInputRequest_DataEvent{Input: &processpb.ProcessInput{
			Input: &processpb.ProcessInput_Stdin{Stdin: make([]byte, 1<<20)},
		}},
	}})
	_, err := stream.CloseAndReceive()
	wantCode(t, err, connect.CodeResourceExhausted, "1048576")

	// Each of these waits for the process to read, and has a message in memory.
	ctx, cancel := context.WithCancel(t.Context())
	var waiting sync.WaitGroup
	refused := make(chan error, 3)
	for range cap(refused) {
		waiting.Go(func() {
			_, err := s.process.SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{
				Process: pid(e.pid),
				Input:   &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: make([]byte, 5<<19)}},
			}))
			refused <- err
		})
	}
	wantCode(t, <-refused, connect.CodeResourceExhausted, "8388608 bytes together")
	cancel()
	waiting.Wait()
	// The memory is free again.
	check(t, s.kill(pid(e.pid)))
	r = bash("head -c 2621440 | wc -c")
	r.Stdin = nil
	e = s.begin("", r)
	check(t, s.send(pid(e.pid), strings.Repeat("x", 5<<19)))
	if r := e.all(); r.stdout != "2621440\n" {
		t.Fatalf("%+v", r)
	}
}

func TestMostTransfers(t *testing.T) {
	s := newSandbox(t)
	var writers []*io.PipeWriter
	var ended sync.WaitGroup
	for i := range 64 {
		body, w := io.Pipe()
		writers = append(writers, w)
		r := s.request("POST", filesURL("", fmt.Sprint(i)), body, "Content-Type", "application/octet-stream")
		ended.Go(func() {
			if code, _, body := s.do(r); code != 200 {
				t.Errorf("%d %s", code, body)
			}
		})
		_, err := w.Write([]byte("x"))
		check(t, err)
		eventually(t, func() bool { // its place is taken
			info, err := os.Stat(fmt.Sprintf("%s/%d", s.home, i))
			return err == nil && info.Size() == 1
		})
	}
	if code, _, body := s.download("", "0"); code != 429 || !strings.Contains(body, "64 uploads and downloads") {
		t.Errorf("%d %s", code, body)
	}
	for _, w := range writers {
		check(t, w.Close())
	}
	ended.Wait()
	if code, _, body := s.download("", "0"); code != 200 || body != "x" {
		t.Errorf("%d %s", code, body)
	}
}

// TestKillForks ends processes that fork all the time.
func TestKillForks(t *testing.T) {
	s := newSandbox(t)
	for name, script := range map[string]string{
		"many": `
import os, resource, time
resource.setrlimit(resource.RLIMIT_NPROC, (150, 150))
print("ready", flush=True)
end = time.time() + 60
while time.time() < end:
    try:
        if os.fork() == 0: os.setsid()
    except OSError: time.sleep(0.01)`,
		"moving": `
import os, time
print("ready", flush=True)
end = time.time() + 60
if os.fork() == 0:
    while time.time() < end:
        os.setsid()
        if os.fork() != 0: os._exit(0)
os.wait()`,
	} {
		t.Run(name, func(t *testing.T) {
			e := s.begin("", &processpb.StartRequest{
				Process: &processpb.ProcessConfig{Cmd: "python3", Args: []string{"-c", script}},
			})
			e.readUntil("ready")
			check(t, s.kill(pid(e.pid)))
			if r := e.all(); r.end == nil {
				t.Errorf("%+v", r)
			}
			wantCode(t, s.kill(pid(e.pid)), connect.CodeNotFound, "has ended")
		})
	}
}
