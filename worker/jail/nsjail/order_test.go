package nsjail

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
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

// A program runs by an order that has arrived whole, and by nothing else. The tests count runs by what
// programs print: their pipe ends when no process is left that could still run them.

// counted are programs that print a line when they run.
var counted = map[string]string{ // read only
	"python": "print('ran')",
	"node":   "console.log('ran')",
	"bash":   "echo ran",
}

// runs returns how often the program ran that prints to out. It blocks until nobody can print there
// any more.
func runs(t *testing.T, out *os.File) int {
	t.Helper()
	b, err := io.ReadAll(out)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(b, []byte("ran\n"))
}

// countedProgram returns a program of counted with the smallest environment, so that its order is
// short.
func countedProgram(tb testing.TB, language string) jail.Program {
	tb.Helper()
	p := program(tb, language, counted[language])
	p.Env = []string{"A=1"}
	return p
}

// orderOf returns the frames with which a program starts in the jail.
func orderOf(t *testing.T, s *sandbox, p jail.Program) []byte {
	t.Helper()
	typ, more := wire.Start, []byte(nil)
	if s.prewarmed != nil {
		typ, more = wire.Load, wire.Frame(wire.Begin, nil)
		p.Argv = nil
	}
	frame, err := encode(typ, p, false)
	if err != nil {
		t.Fatal(err)
	}
	return append(frame, more...)
}

// sendPart sends the beginning of an order and returns the program's stdout.
func sendPart(t *testing.T, s *sandbox, part []byte) *os.File {
	t.Helper()
	if s.prewarmed != nil {
		if err := send(s, part); err != nil {
			t.Fatal(err)
		}
		return s.prewarmed.outputs[0]
	}
	out, err := s.order(part)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = out.close() })
	return out[0]
}

// eachInterpreter calls f for each language in each mode, with a function that makes jails whose
// interpreter is started in this mode.
func eachInterpreter(t *testing.T, f func(t *testing.T, mode, language string, open func() *sandbox)) {
	t.Helper()
	for _, mode := range modes {
		for _, language := range languages {
			t.Run(mode+"/"+language, func(t *testing.T) {
				t.Parallel()
				m := newMaker(t)
				var zygote jail.Zygote
				if mode == forked {
					zygote = zygoteOf(t, m, testSpec())
				}
				f(t, mode, language, func() *sandbox { return prepareMode(t, m, zygote, mode, testSpec(), language).(*sandbox) })
			})
		}
	}
}

// cuts returns the lengths of all beginnings of an order, or with -short some of them: those at the
// ends and around boundary.
func cuts(order []byte, boundary int) (all []int) {
	for n := range order {
		if !testing.Short() || n%41 == 0 || n >= boundary-1 && n <= boundary+1 || n == len(order)-1 {
			all = append(all, n)
		}
	}
	return all
}

// The worker dies after each byte of an order, and while the program is loaded.
func TestOrderCutOffByTheWorker(t *testing.T) {
	t.Parallel()
	eachInterpreter(t, func(t *testing.T, _, language string, open func() *sandbox) {
		p := countedProgram(t, language)
		s := open()
		order := orderOf(t, s, p)
		for _, n := range cuts(order, len(order)-wire.HeaderSize) {
			if n > 0 {
				out := sendPart(t, s, order[:n])
				if err := s.conn.Close(); err != nil {
					t.Fatal(err)
				}
				if ran := runs(t, out); ran != 0 {
					t.Errorf("ran %d times by the first %d bytes of %d", ran, n, len(order))
				}
			}
			s.conn = nil
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			s = open()
		}
		out := sendPart(t, s, order)
		expect(t, s, wire.Started)
		expect(t, s, wire.Exited)
		expect(t, s, wire.Empty)
		if ran := runs(t, out); ran != 1 {
			t.Errorf("ran %d times by the whole order", ran)
		}
		_ = s.Close()
	})
}

// Each byte of an order arrives long after the one before.
func TestSlowOrder(t *testing.T) {
	t.Parallel()
	eachInterpreter(t, func(t *testing.T, _, language string, open func() *sandbox) {
		s := open()
		order := orderOf(t, s, countedProgram(t, language))
		out := sendPart(t, s, order[:1])
		for i := range order[1:] {
			awaitRead(t, s)
			if queued(t, out, unix.SIOCINQ) != 0 {
				t.Fatalf("ran by the first %d bytes of %d", i+1, len(order))
			}
			if err := send(s, order[i+1:i+2]); err != nil {
				t.Fatal(err)
			}
		}
		expect(t, s, wire.Started)
		expect(t, s, wire.Exited)
		expect(t, s, wire.Empty)
		if ran := runs(t, out); ran != 1 {
			t.Errorf("ran %d times", ran)
		}
		_ = s.Close()
	})
}

// An init does not wait for the rest of an order for ever.
func TestLateOrder(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		return // it takes wire.OrderSeconds
	}
	eachInterpreter(t, func(t *testing.T, mode, language string, open func() *sandbox) {
		s := open()
		order := orderOf(t, s, countedProgram(t, language))
		n := len(order) - 1
		if mode != cold {
			n = len(order) - wire.HeaderSize // loaded
		}
		out := sendPart(t, s, order[:n])
		expectEnd(t, s)
		if ran := runs(t, out); ran != 0 {
			t.Errorf("ran %d times", ran)
		}
		_ = s.Close()
	})
}

// The init dies while the program is loaded.
func TestInitDiesBeforeBegin(t *testing.T) {
	t.Parallel()
	eachInterpreter(t, func(t *testing.T, mode, language string, open func() *sandbox) {
		if mode == cold {
			return
		}
		for range max(2, repeats(30)) {
			s := open()
			p := program(t, language, counted[language])
			if err := s.Load(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			awaitLoaded(t, interpreterPID(t, s, language))
			s.kill()
			if ran := runs(t, s.prewarmed.outputs[0]); ran != 0 {
				t.Errorf("ran %d times", ran)
			}
			_ = s.Close()
		}
	})
}

// An execution that is already over when Run is called does not begin.
func TestRunAfterTheEnd(t *testing.T) {
	t.Parallel()
	over, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("over"))
	eachInterpreter(t, func(t *testing.T, _, language string, open func() *sandbox) {
		for range max(2, repeats(30)) {
			s := open()
			p := program(t, language, counted[language])
			if err := s.Load(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			var out beginning
			p.Stdout = &out
			o, err := s.Run(over, p)
			if o.Kind != jail.Killed || o.Detail != "over" || err != nil || out.written != 0 {
				t.Errorf("%+v, %v, %d bytes of output", o, err, out.written)
			}
		}
	})
}

// The init ends its part of the conversation with a waiting interpreter after each byte of the order,
// sends something else, or is slow. The test plays the init.
func TestOrderOfAWaitingInterpreter(t *testing.T) {
	t.Parallel()
	eachInterpreter(t, func(t *testing.T, mode, language string, open func() *sandbox) {
		if mode == cold {
			return
		}
		settings := DefaultHome + "\x00" + wire.NoInput + "\x00A=1\x00\x00"
		order := settings + string(wire.Begin)
		orders := map[string]int{
			order:           1,
			settings + "n":  0,
			settings + "\n": 0,
			"\x00" + order:  0,
			DefaultHome + "\x00\x00" + string(wire.Begin):                                 0,
			"/nonexistent\x00" + wire.NoInput + "\x00\x00" + string(wire.Begin):           0,
			DefaultHome + "\x00/nonexistent\x00\x00" + string(wire.Begin):                 0,
			DefaultHome + "/main.py\x00" + wire.NoInput + "\x00\x00" + string(wire.Begin): 0,
		}
		for _, n := range cuts([]byte(order), len(settings)) {
			orders[order[:n]] = 0
		}
		for part, want := range orders {
			s := open()
			link := stopInit(t, s)
			writeAsProgram(t, s, program(t, language, counted[language]).Files[0])
			if err := unix.Sendto(link, []byte(part), unix.MSG_NOSIGNAL, nil); len(part) > 0 && err != nil {
				t.Fatal(err)
			}
			if err := unix.Shutdown(link, unix.SHUT_WR); err != nil {
				t.Fatal(err)
			}
			if ran := runs(t, s.prewarmed.outputs[0]); ran != want {
				t.Errorf("ran %d times by %q", ran, part)
			}
			_ = s.Close()
		}
		s := open()
		pid, link := interpreterPID(t, s, language), stopInit(t, s)
		writeAsProgram(t, s, program(t, language, counted[language]).Files[0])
		for i := range order {
			awaitReading(t, pid)
			if queued(t, s.prewarmed.outputs[0], unix.SIOCINQ) != 0 {
				t.Fatalf("ran by %q", order[:i])
			}
			if err := unix.Sendto(link, []byte{order[i]}, unix.MSG_NOSIGNAL, nil); err != nil {
				t.Fatal(err)
			}
		}
		if ran := runs(t, s.prewarmed.outputs[0]); ran != 1 {
			t.Errorf("ran %d times by a slow order", ran)
		}
		_ = s.Close()
	})
}

// interpreterPID returns the host pid of the interpreter that waits in a jail.
func interpreterPID(t *testing.T, s *sandbox, language string) int {
	t.Helper()
	for command, l := range languages {
		if l == language {
			return inJail(t, s, strings.TrimSuffix(command, "3"))
		}
	}
	t.Fatal("no interpreter of " + language)
	return 0
}

// stopInit stops the init and returns a duplicate of its end of the socket on which the jail's
// interpreter waits.
func stopInit(t *testing.T, s *sandbox) int {
	t.Helper()
	if err := unix.Kill(s.initPID, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	fds, err := os.ReadDir(procPath(s.initPID, "fd"))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		number, err := strconv.Atoi(fd.Name())
		target, errLink := os.Readlink(procPath(s.initPID, "fd/"+fd.Name()))
		if err = errors.Join(err, errLink); err != nil {
			t.Fatal(err)
		}
		if number == wire.ControlFD || !strings.HasPrefix(target, "socket:") {
			continue
		}
		link, err := unix.PidfdGetfd(s.initFD, number, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(link) })
		return link
	}
	t.Fatal("the init has no socket but the control socket")
	return 0
}

// writeAsProgram writes a program's file into its jail, as the init does.
func writeAsProgram(t *testing.T, s *sandbox, f jail.File) {
	t.Helper()
	dir, err := unix.Open(procPath(s.initPID, "root")+filepath.Dir(f.Path), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(dir) }()
	id := s.uids.first
	if f.Owner == jail.OwnerProgram {
		id++
	}
	runtime.LockOSThread() // an id of one thread
	defer runtime.UnlockOSThread()
	err = errors.Join(unix.Setfsgid(id), unix.Setfsuid(id))
	fd, errOpen := unix.Openat(dir, filepath.Base(f.Path), unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, f.Mode)
	err = errors.Join(err, errOpen, unix.Setfsuid(0), unix.Setfsgid(0))
	if err == nil {
		_, err = unix.Write(fd, f.Content)
		err = errors.Join(err, unix.Close(fd))
	}
	if err != nil {
		t.Fatalf("write %s: %v", f.Path, err)
	}
}

// awaitReading waits until an interpreter has read all of its order that was sent.
func awaitReading(t *testing.T, pid int) {
	t.Helper()
	reads := fmt.Sprintf("%d %#x ", unix.SYS_READ, wire.PrewarmFD)
	for begin := time.Now(); ; {
		call, err := os.ReadFile(procPath(pid, "syscall"))
		if strings.HasPrefix(string(call), reads) {
			return
		}
		if err != nil || time.Since(begin) > patience {
			t.Fatalf("the interpreter does %q: %v", call, err)
		}
		runtime.Gosched()
	}
}

// awaitRead waits until the init has read all that was sent to it.
func awaitRead(t *testing.T, s *sandbox) {
	t.Helper()
	for begin := time.Now(); queued(t, s.conn, unix.SIOCOUTQ) != 0; {
		if time.Since(begin) > patience {
			t.Fatal("the init does not read")
		}
		runtime.Gosched()
	}
}

// queued returns how many bytes are in a queue of a pipe or a socket.
func queued(t *testing.T, of syscall.Conn, queue uint) (n int) {
	t.Helper()
	conn, err := of.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var errQueue error
	err = conn.Control(func(fd uintptr) { n, errQueue = unix.IoctlGetInt(int(fd), queue) })
	if err = errors.Join(err, errQueue); err != nil {
		t.Fatal(err)
	}
	return n
}
