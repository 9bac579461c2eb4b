package main_test

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// heart is the heartbeat of a worker.
type heart struct {
	file  *os.File
	nanos *atomic.Int64
}

func newHeart(s *sandbox) *heart {
	s.t.Helper()
	f, err := os.Create(s.path("heartbeat"))
	check(s.t, err)
	size := os.Getpagesize()
	check(s.t, f.Truncate(int64(size)))
	memory, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	check(s.t, err)
	s.t.Cleanup(func() {
		check(s.t, unix.Munmap(memory))
		check(s.t, f.Close())
	})
	h := &heart{f, (*atomic.Int64)(unsafe.Pointer(&memory[0]))}
	h.beat(s.t)
	return h
}

func (h *heart) beat(t *testing.T) {
	t.Helper()
	var now unix.Timespec
	check(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
	h.nanos.Store(now.Nano())
}

// waiting starts a guest that waits for its sandbox, and returns the socket on which it waits. The
// guest has no config yet.
func (s *sandbox) waiting() (*exec.Cmd, *net.UnixConn, *bytes.Buffer) {
	s.t.Helper()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	check(s.t, err)
	ours, theirs := os.NewFile(uintptr(ends[0]), "ours"), os.NewFile(uintptr(ends[1]), "theirs")
	conn, err := net.FileConn(ours)
	check(s.t, err)
	check(s.t, ours.Close())
	s.t.Cleanup(func() { _ = conn.Close() })
	cmd, stderr := exec.Command(program, s.path("config.json")), &bytes.Buffer{}
	cmd.Env = []string{"BULLPEN_PREWARM=1", "GOMAXPROCS=1"}
	cmd.ExtraFiles, cmd.Stderr, cmd.Dir = []*os.File{theirs}, stderr, "/"
	check(s.t, cmd.Start())
	check(s.t, theirs.Close())
	check(s.t, conn.SetDeadline(time.Now().Add(limit)))
	ready := make([]byte, 1)
	_, err = conn.Read(ready)
	check(s.t, err)
	return cmd, conn.(*net.UnixConn), stderr
}

// sendFiles sends a guest that waits its descriptors, and the strings.
func (s *sandbox) sendFiles(to *net.UnixConn, files ...*os.File) {
	s.t.Helper()
	for _, f := range files {
		_, _, err := to.WriteMsgUnix([]byte{'.'}, unix.UnixRights(int(f.Fd())), nil)
		check(s.t, err)
	}
	_, err := to.Write([]byte("/\x00/dev/null\x00\x00"))
	check(s.t, err)
}

// A guest that was started before its sandbox was known serves the sandbox.
func TestPrewarmed(t *testing.T) {
	s := prepare(t)
	cmd, conn, stderr := s.waiting()
	s.configUsers(map[string]any{"heartbeat_timeout": limit})
	listener := s.listen()
	s.sendFiles(conn, listener, newHeart(s).file)
	_, err := conn.Write([]byte{'N'})
	check(t, err)
	check(t, listener.Close())
	s.serve(cmd, stderr)
	if r := s.begin("root", bash("id -u; ls /proc/self/fd | wc -l")).all(); r.stdout != "0\n4\n" {
		t.Errorf("%+v", r)
	}
}

// A guest that waits serves nothing before the order to begin: it ends if its worker does, or sends
// anything else.
func TestPrewarmedWithoutOrder(t *testing.T) {
	for name, order := range map[string]string{"nothing": "", "another order": "X", "more than the order": "NN"} {
		t.Run(name, func(t *testing.T) {
			s := prepare(t)
			cmd, conn, stderr := s.waiting()
			s.configUsers(nil)
			listener := s.listen()
			s.sendFiles(conn, listener, newHeart(s).file)
			_, err := conn.Write([]byte(order))
			check(t, err)
			check(t, conn.Close())
			check(t, listener.Close())
			if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != 1 ||
				!strings.Contains(stderr.String(), "wait for the sandbox") {
				t.Errorf("the guest ended with %v: %s", err, stderr)
			}
		})
	}
}

// A guest goes on as long as its worker's heart beats, and then ends.
func TestHeartbeat(t *testing.T) {
	s := prepare(t)
	h := newHeart(s)
	s.configUsers(map[string]any{"heartbeat_timeout": 2 * time.Second})
	cmd, stderr := exec.Command(program, s.path("config.json")), &bytes.Buffer{}
	listener := s.listen()
	executable, err := os.Open(program)
	check(t, err)
	cmd.ExtraFiles, cmd.Stderr, cmd.Dir = []*os.File{listener, executable, h.file}, stderr, "/"
	check(t, cmd.Start())
	check(t, listener.Close())
	check(t, executable.Close())
	s.connect()
	e := s.begin("root", bash("sleep 5"))
	ended := make(chan string, 1)
	go func() { ended <- e.all().end.GetStatus() }()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for status := ""; status == ""; {
		h.beat(t)
		select {
		case status = <-ended:
			if status != "exit status 0" {
				t.Errorf("the process ended with %q: %s", status, stderr)
			}
		case <-tick.C:
		}
	}
	timer := time.AfterFunc(limit, func() { _ = cmd.Process.Signal(syscall.SIGKILL) })
	defer timer.Stop()
	err = cmd.Wait()
	if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(stderr.String(), "heartbeat") {
		t.Errorf("the guest ended with %v: %s", err, stderr)
	}
}
