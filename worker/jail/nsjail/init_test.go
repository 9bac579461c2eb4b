package nsjail

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// An order may be as large as a frame and have many variables.
func TestLargeOrder(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	const variables = 3000
	content := make([]byte, 7<<20)
	for i := range content {
		content[i] = byte(i / 7)
	}
	code := `import os
def value(i): return str(i) * (i % 20)
print(all(os.environ["V%d" % i] == value(i) for i in range(3000)), len(os.environ["LARGE"]), os.getcwd())
with open("/tmp/d/large", "rb") as f: content = f.read()
print(len(content), all(content[i] == i // 7 % 256 for i in range(0, len(content), 1001)), oct(os.stat("/tmp/d").st_mode), oct(os.stat("/tmp/d/large").st_mode))`
	p := program(t, "python", code)
	p.Files = append(p.Files, jail.File{Path: "/tmp/d/large", Mode: 0o640, Content: content})
	p.Env = append(p.Env, "LARGE="+strings.Repeat("x", 64<<10))
	for i := range variables {
		p.Env = append(p.Env, fmt.Sprintf("V%d=%s", i, strings.Repeat(strconv.Itoa(i), i%20)))
	}
	for _, mode := range modes {
		setStartMode(t, m, mode)
		runProgram(t, m, testSpec(), p).want(
			t, jail.Exited, fmt.Sprintf("True 65536 %s\n%d True 0o40755 0o100640", DefaultHome, len(content)))
	}
}

// A string with a zero byte is not sent, because the kernel would truncate it there.
func TestZeroBytes(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	for name, change := range map[string]func(p *jail.Program){
		"argument":  func(p *jail.Program) { p.Argv = append(p.Argv, "a\x00b") },
		"variable":  func(p *jail.Program) { p.Env = append(p.Env, "A=1\x00B=2") },
		"directory": func(p *jail.Program) { p.Dir = "/\x00" },
		"file":      func(p *jail.Program) { p.Files[0].Path += "\x00" },
	} {
		p := program(t, "python", "print(1)")
		change(&p)
		if _, err := prepare(t, m, testSpec()).Run(t.Context(), p); err == nil ||
			!strings.Contains(err.Error(), "zero byte") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A program starts with no signals ignored or blocked, whatever the worker ignores or blocks.
func TestIgnoredSignalsAreNotInherited(t *testing.T) {
	m := newMaker(t)
	ignored := []os.Signal{unix.SIGUSR1, unix.SIGTSTP, unix.SIGWINCH, unix.Signal(35), unix.Signal(64)}
	signal.Ignore(ignored...)
	defer func() {
		c := make(chan os.Signal, 1)
		signal.Notify(c, ignored...) // the only way to stop ignoring them (SIGHUP differs)
		signal.Stop(c)
	}()
	p := jail.Program{Argv: []string{"grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"}, Dir: "/"}
	const none = "0000000000000000"
	runIn(t, prepare(t, m, testSpec()), p).want(t, jail.Exited, "SigBlk:\t"+none+"\nSigIgn:\t"+none)
}

// Frames sent directly after an order take effect once the program exists.
func TestFramesRightAfterAnOrder(t *testing.T) {
	m := newMaker(t)
	p := program(t, "python", "import time; time.sleep(600)")
	for _, mode := range modes {
		for signal, frame := range map[unix.Signal][]byte{
			unix.SIGKILL: wire.Frame(wire.Kill, nil),
			unix.SIGUSR2: wire.SignalFrame(uint32(unix.SIGUSR2)),
		} {
			t.Run(mode+"/"+signal.String(), func(t *testing.T) {
				s := jailInMode(t, m, mode)
				order(t, s, p, frame)
				expect(t, s, wire.Started)
				if e, ok := wire.ParseExited(expect(t, s, wire.Exited)); !ok || e.Signal != int32(signal) {
					t.Errorf("got %+v", e)
				}
				expect(t, s, wire.Empty)
				expectEnd(t, s)
			})
		}
	}
}

// The jail ends if the worker sends an invalid frame or disconnects.
func TestProtocolViolationEndsTheJail(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	p := program(t, "python", "import time; time.sleep(600)")
	again, err := encode(wire.Start, p, false)
	if err != nil {
		t.Fatal(err)
	}
	for name, frame := range map[string][]byte{
		"unknown":          wire.Frame('?', nil),
		"empty":            {0, 0, 0, 0, wire.Kill},
		"too long":         {0xff, 0xff, 0xff, 0xff, wire.Kill},
		"another order":    again,
		"kill with more":   wire.Frame(wire.Kill, []byte{9}),
		"signal with less": wire.Frame(wire.Signal, []byte{9}),
	} {
		t.Run(name, func(t *testing.T) {
			s := jailInMode(t, m, cold)
			order(t, s, p, frame)
			expect(t, s, wire.Started)
			expectEnd(t, s)
		})
	}
	for _, mode := range modes {
		t.Run("gone/"+mode, func(t *testing.T) {
			s := jailInMode(t, m, mode)
			if err := s.conn.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			expectEnd(t, s)
		})
		t.Run("gone behind an order/"+mode, func(t *testing.T) {
			s := jailInMode(t, m, mode)
			order(t, s, p, nil)
			if err := s.conn.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			expect(t, s, wire.Started)
			expectEnd(t, s)
		})
	}
}

// The init still handles frames from the worker while it waits for leftover processes to exit. The
// test delays that exit by tracing one.
func TestFramesAreHandledWhileProcessesAreReaped(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	for name, frames := range map[string]string{
		"frames": string(wire.Frame(wire.Kill, nil)) + string(wire.SignalFrame(uint32(unix.SIGKILL))),
		"gone":   "",
	} {
		t.Run(name, func(t *testing.T) {
			// A forked jail: only the init has its end of the socket. In the other modes nsjail has
			// it too.
			s := jailInMode(t, m, forked)
			out := order(t, s, program(t, "python", `
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
if os.fork():
    print("up")
signal.sigwait([signal.SIGUSR1])
os._exit(3)`), nil)
			if up, err := bufio.NewReader(out[0]).ReadString('\n'); up != "up\n" || err != nil {
				t.Fatal(up, err)
			}
			expect(t, s, wire.Started)
			left := children(t, children(t, s.initPID)[0])[0]
			runtime.LockOSThread() // ptrace calls must come from one thread
			defer runtime.UnlockOSThread()
			if err := unix.PtraceSeize(left); err != nil {
				t.Fatal(err)
			}
			reap := func() {
				if _, err := unix.Wait4(left, nil, unix.WALL, nil); err != nil {
					t.Error(err)
				}
			}
			if err := send(s, wire.SignalFrame(uint32(unix.SIGUSR1))); err != nil {
				t.Error(err)
			}
			if e, ok := wire.ParseExited(expect(t, s, wire.Exited)); !ok || e.Code != 3 {
				t.Errorf("got %+v", e)
			}
			if frames == "" {
				if err := s.conn.CloseWrite(); err != nil {
					t.Error(err)
				}
				expectNoFrame(t, s)
				reap()
			} else {
				if err := send(s, []byte(frames)); err != nil {
					t.Error(err)
				}
				reap()
				expect(t, s, wire.Empty)
			}
			expectEnd(t, s)
		})
	}
}

// An init that crashes dies, although it is PID 1, which signals cannot kill. Run returns an error,
// since the failure is ours and not the program's.
func TestInitFault(t *testing.T) {
	m := newMaker(t)
	s := prepare(t, m, testSpec()).(*sandbox)
	done := runSleeper(t, s)
	runtime.LockOSThread() // ptrace calls must come from one thread
	defer runtime.UnlockOSThread()
	if err := unix.PtraceAttach(s.initPID); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Wait4(s.initPID, nil, unix.WALL, nil); err != nil {
		t.Fatal(err)
	}
	var at syscall.PtraceRegs
	if err := syscall.PtraceGetRegs(s.initPID, &at); err != nil {
		t.Fatal(err)
	}
	at.SetPC(0)
	if err := errors.Join(syscall.PtraceSetRegs(s.initPID, &at), unix.PtraceDetach(s.initPID)); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err == nil || !strings.Contains(err.Error(), "the init died without a report") {
		t.Errorf("got %v", err)
	}
	if pids := usersOf(t, []int{s.uids.first, s.uids.first + 1}); len(pids) != 0 {
		t.Errorf("processes left: %q", pids)
	}
}

// jailInMode returns a jail for python whose interpreter is started in the given mode. It is closed
// when the test ends.
func jailInMode(t *testing.T, m *Maker, mode string) *sandbox {
	t.Helper()
	if mode == forked {
		return fork(t, zygoteOf(t, m, testSpec()), testSpec()).(*sandbox)
	}
	spec := testSpec()
	if mode != cold {
		spec = prewarmSpec(t, "python")
	}
	j := prepare(t, m, spec)
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return j.(*sandbox)
}

// order sends the frames that start p, followed by more.
func order(t *testing.T, s *sandbox, p jail.Program, more []byte) outputs {
	t.Helper()
	typ := wire.Start
	if s.prewarmed != nil {
		added, ok := p.Continues(s.prewarmed.program)
		if !ok {
			t.Fatal("the program cannot continue in the interpreter")
		}
		typ, p.Argv, p.Env = wire.Load, nil, added
	}
	frame, err := encode(typ, p, false)
	if err != nil {
		t.Fatal(err)
	}
	if s.prewarmed != nil {
		frame = append(append(frame, wire.Frame(wire.Begin, nil)...), more...)
		if err := send(s, frame); err != nil {
			t.Fatal(err)
		}
		return s.prewarmed.outputs // closed with the jail
	}
	out, err := s.order(append(frame, more...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = out.close() })
	return out
}

// expect receives a frame of the wanted type and returns its payload.
func expect(t *testing.T, s *sandbox, want byte) (payload []byte) {
	t.Helper()
	typ, payload, err := s.receive()
	if typ != want || err != nil {
		t.Fatalf("got %q, %v, want %q", typ, err, want)
	}
	return payload
}

func expectNoFrame(t *testing.T, s *sandbox) {
	t.Helper()
	if typ, _, err := s.receive(); ignoreEnd(err) != nil || err == nil {
		t.Errorf("got %q, %v", typ, err)
	}
}

// expectEnd checks that the init sends no more frames and waits until it has exited.
func expectEnd(t *testing.T, s *sandbox) {
	t.Helper()
	expectNoFrame(t, s)
	if !exits(t, s.initFD) {
		t.Error("the init is still there")
	}
}

// exits reports whether the process of a pidfd exits within the patience of a test. A signal, such as the one that
// the Go runtime preempts with, does not end the wait.
func exits(t *testing.T, pidfd int) bool {
	t.Helper()
	for end := time.Now().Add(patience); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(time.Until(end).Milliseconds()))
		if errors.Is(err, unix.EINTR) && time.Now().Before(end) {
			continue
		}
		if err != nil {
			t.Error(err)
		}
		return n == 1
	}
}

// A jail in which nothing runs wakes up nobody: nsjail blocks its alarm. The program has no signal blocked.
func TestNsjailSleeps(t *testing.T) {
	m := newMaker(t)
	j := prepare(t, m, testSpec())
	status, err := os.ReadFile(procPath(j.(*sandbox).proc.Pid, "status"))
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("SigBlk:\t%016x\n", 1<<(unix.SIGALRM-1)); !strings.Contains(string(status), want) {
		t.Errorf("no %q in the status of nsjail:\n%s", want, status)
	}
	p := program(t, "bash", "grep SigBlk /proc/self/status")
	out := &strings.Builder{}
	p.Stdout = out
	o, err := j.Run(t.Context(), p)
	if err != nil || o.Kind != jail.Exited || out.String() != "SigBlk:\t0000000000000000\n" {
		t.Errorf("%+v, %v: %s", o, err, out)
	}
}
