package main_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/guest/filesystempb"
	"github.com/bullpen-run/bullpen/guest/processpb"
)

// program is the built guest.
var program string

// limit is how long a test may wait for anything.
const limit = 2 * time.Minute

func TestMain(m *testing.M) {
	code, err := buildAndTest(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

func buildAndTest(m *testing.M) (int, error) {
	dir, err := os.MkdirTemp("", "guest-*")
	if err != nil {
		return 1, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	program = filepath.Join(dir, "guest")
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		return 1, fmt.Errorf("build the guest: %w\n%s", err, output)
	}
	if err := errors.Join(os.Chmod(dir, 0o755), os.Chmod(program, 0o755)); err != nil {
		return 1, err
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			return 1, err
		}
	}
	return code, nil
}

// sandbox is a running guest, and the clients of it.
type sandbox struct {
	t          *testing.T
	dir        string // below which the homes are
	home, root string
	http       *http.Client
	process    processpb.ProcessClient
	filesystem filesystempb.FilesystemClient
	cmd        *exec.Cmd
	exited     chan error
}

// capabilities are those that the guest has in a jail.
const capabilities = "-all,+setuid,+setgid,+chown,+kill,+dac_override"

// newSandbox starts the guest with the capabilities and security bits that it has in a jail.
func newSandbox(t *testing.T) *sandbox {
	t.Helper()
	s := prepare(t)
	s.configUsers(map[string]any{"env": map[string]string{"E2B_SANDBOX": "true", "SHARED": "sandbox"}})
	s.start(s.command())
	return s
}

// command returns the command that starts the guest with its rights in a jail.
func (s *sandbox) command() *exec.Cmd {
	return exec.Command("setpriv", "--securebits=+noroot", "--inh-caps="+capabilities,
		"--ambient-caps="+capabilities, "--bounding-set="+capabilities, "--clear-groups", program, s.path("config.json"))
}

// prepare makes the directories of a sandbox. The test runs beside others.
func prepare(t *testing.T) *sandbox {
	t.Helper()
	t.Parallel()
	dir, err := os.MkdirTemp("", "sandbox-*")
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(dir)) })
	s := &sandbox{t: t, dir: dir, home: filepath.Join(dir, "home"), root: filepath.Join(dir, "root")}
	check(t, os.Chmod(dir, 0o755))
	check(t, os.Mkdir(s.home, 0o755))
	check(t, os.Chown(s.home, 1000, 1000))
	check(t, os.Mkdir(s.root, 0o700))
	return s
}

func (s *sandbox) path(name string) string { return filepath.Join(s.dir, name) }

// configUsers writes a config with the users of a sandbox.
func (s *sandbox) configUsers(more map[string]any) {
	s.t.Helper()
	c := map[string]any{
		"users": []map[string]any{
			{"name": "user", "uid": 1000, "gid": 1000, "home": s.home},
			{"name": "root", "uid": 0, "gid": 0, "home": s.root},
		},
		"default_user": "user", "dir": s.home,
	}
	maps.Copy(c, more)
	s.config(c)
}

func (s *sandbox) config(c map[string]any) {
	s.t.Helper()
	b, err := json.Marshal(c)
	check(s.t, err)
	check(s.t, os.WriteFile(s.path("config.json"), b, 0o644))
}

// listen returns the listening socket of the guest.
func (s *sandbox) listen() *os.File {
	s.t.Helper()
	listener, err := net.Listen("unix", s.path("socket"))
	check(s.t, err)
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	file, err := listener.(*net.UnixListener).File()
	check(s.t, err)
	check(s.t, listener.Close())
	return file
}

// start starts the guest with a socket, and stops it at the end of the test.
func (s *sandbox) start(cmd *exec.Cmd) {
	s.t.Helper()
	file := s.listen()
	var stderr bytes.Buffer
	cmd.ExtraFiles, cmd.Stderr = []*os.File{file}, &stderr
	cmd.Dir = "/"
	check(s.t, cmd.Start())
	check(s.t, file.Close())
	s.serve(cmd, &stderr)
}

// connect creates the clients of the guest.
func (s *sandbox) connect() {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", s.path("socket"))
	}}
	s.t.Cleanup(transport.CloseIdleConnections)
	s.http = &http.Client{Transport: transport}
	s.process = processpb.NewProcessClient(s.http, "http://guest", connect.WithProtoJSON())
	s.filesystem = filesystempb.NewFilesystemClient(s.http, "http://guest", connect.WithProtoJSON())
}

// serve connects to a guest that was started, and stops it at the end of the test.
func (s *sandbox) serve(cmd *exec.Cmd, stderr *bytes.Buffer) {
	s.t.Helper()
	s.cmd, s.exited = cmd, make(chan error, 1)
	go func() { s.exited <- cmd.Wait() }()
	s.connect()
	s.t.Cleanup(func() {
		s.http.CloseIdleConnections()
		if cmd.ProcessState == nil {
			_ = cmd.Process.Signal(syscall.SIGTERM)
		}
		select {
		case err := <-s.exited:
			if err != nil {
				s.t.Errorf("the guest ended with %v: %s", err, stderr.String())
			}
		case <-time.After(limit):
			_ = cmd.Process.Kill()
			s.t.Errorf("the guest did not stop: %s", stderr.String())
		}
	})
}

// as makes a request of a user.
func as[T any](user string, message *T) *connect.Request[T] {
	r := connect.NewRequest(message)
	if user != "" {
		r.Header().Set("Authorization", "Basic "+basic(user))
	}
	return r
}

// events are those of a process that a client has received.
type events struct {
	t      *testing.T
	stream interface {
		Receive() bool
		Err() error
		Close() error
	}
	msg    func() *processpb.ProcessEvent
	cancel context.CancelFunc
	pid    uint32
}

// context returns a context that ends in time, without a deadline that the guest is told.
func (s *sandbox) context() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(s.t.Context())
	timer := time.AfterFunc(limit, cancel)
	s.t.Cleanup(func() {
		timer.Stop()
		cancel()
	})
	return ctx, cancel
}

// begin starts a process and reads the first event.
func (s *sandbox) begin(user string, r *processpb.StartRequest, headers ...string) *events {
	s.t.Helper()
	ctx, cancel := s.context()
	request := as(user, r)
	for i := 0; i < len(headers); i += 2 {
		request.Header().Set(headers[i], headers[i+1])
	}
	stream, err := s.process.Start(ctx, request)
	check(s.t, err)
	event := func() *processpb.ProcessEvent { return stream.Msg().GetEvent() }
	e := &events{t: s.t, stream: stream, cancel: cancel, msg: event}
	e.first()
	return e
}

// attach connects to a process and reads the first event.
func (s *sandbox) attach(r *processpb.ConnectRequest) *events {
	s.t.Helper()
	ctx, cancel := s.context()
	stream, err := s.process.Connect(ctx, connect.NewRequest(r))
	check(s.t, err)
	event := func() *processpb.ProcessEvent { return stream.Msg().GetEvent() }
	e := &events{t: s.t, stream: stream, cancel: cancel, msg: event}
	e.first()
	return e
}

func (e *events) first() {
	e.t.Helper()
	e.t.Cleanup(func() { e.close() })
	event := e.next()
	if event.GetStart() == nil {
		e.t.Fatalf("the first event is %v, not start", event)
	}
	e.pid = event.GetStart().GetPid()
}

// next returns the next event.
func (e *events) next() *processpb.ProcessEvent {
	e.t.Helper()
	if !e.stream.Receive() {
		e.t.Fatalf("the stream ended: %v", e.stream.Err())
	}
	return e.msg()
}

// close ends the stream like a client that goes away.
func (e *events) close() {
	e.cancel()
	_ = e.stream.Close()
}

// result is what a process has written, and how it ended.
type result struct {
	stdout, stderr, pty string
	end                 *processpb.ProcessEvent_EndEvent
	err                 error
}

// all reads until the end.
func (e *events) all() result {
	var r result
	var stdout, stderr, pty strings.Builder
	for e.stream.Receive() {
		event := e.msg()
		stdout.Write(event.GetData().GetStdout())
		stderr.Write(event.GetData().GetStderr())
		pty.Write(event.GetData().GetPty())
		if event.GetEnd() != nil {
			r.end = event.GetEnd()
		}
	}
	r.stdout, r.stderr, r.pty, r.err = stdout.String(), stderr.String(), pty.String(), e.stream.Err()
	return r
}

// readUntil reads output until it contains a text.
func (e *events) readUntil(text string) string {
	e.t.Helper()
	var all string
	for !strings.Contains(all, text) {
		data := e.next().GetData()
		if data == nil {
			e.t.Fatalf("the event is %v; output so far: %q", e.msg(), all)
		}
		all += string(data.GetStdout()) + string(data.GetStderr()) + string(data.GetPty())
	}
	return all
}

// bash makes a process that runs a script without standard input.
func bash(script string) *processpb.StartRequest {
	stdin := false
	return &processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", script}}, Stdin: &stdin,
	}
}

func pid(pid uint32) *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: pid}}
}

// run runs a script to its end.
func (s *sandbox) run(user, script string) result {
	s.t.Helper()
	return s.begin(user, bash(script)).all()
}

// do makes a plain request and returns the status and the body.
func (s *sandbox) do(r *http.Request) (int, http.Header, string) {
	s.t.Helper()
	answer, err := s.http.Do(r)
	check(s.t, err)
	defer func() { _ = answer.Body.Close() }()
	b, err := io.ReadAll(answer.Body)
	check(s.t, err)
	return answer.StatusCode, answer.Header, string(b)
}

func (s *sandbox) request(method, path string, body io.Reader, headers ...string) *http.Request {
	s.t.Helper()
	r, err := http.NewRequestWithContext(s.t.Context(), method, "http://guest"+path, body)
	check(s.t, err)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return r
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantCode(t *testing.T, err error, code connect.Code, words string) {
	t.Helper()
	if connect.CodeOf(err) != code || err == nil || !strings.Contains(err.Error(), words) {
		t.Fatalf("error %v, want %v with %q", err, code, words)
	}
}

// proc returns the path of a file of /proc about the guest.
func (s *sandbox) proc(name string) string {
	return filepath.Join("/proc", strconv.Itoa(s.cmd.Process.Pid), name)
}
