package nsjail

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

func TestOutcomes(t *testing.T) {
	m := newMaker(t)
	for _, tt := range []struct {
		name, language, code string
		want                 jail.Outcome
		stdout               string
	}{
		{"exit 0", "python", "print('hello')", jail.Outcome{Kind: jail.Exited}, "hello"},
		{"exit 7", "bash", "echo out; echo err >&2; exit 7", jail.Outcome{Kind: jail.Exited, ExitCode: 7}, "out"},
		{"exit 255", "node", "process.exit(255)", jail.Outcome{Kind: jail.Exited, ExitCode: 255}, ""},
		{"timeout", "python", "print('first')\nwhile True: pass", jail.Outcome{Kind: jail.TimedOut}, "first"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p := program(t, tt.language, tt.code)
			if tt.want.Kind == jail.TimedOut {
				p.Timeout = 2 * time.Second
			}
			r := runProgram(t, m, testSpec(), p)
			r.want(t, tt.want.Kind, tt.stdout)
			if r.ExitCode != tt.want.ExitCode || r.Signal != tt.want.Signal {
				t.Errorf("got %+v, want %+v", r.Outcome, tt.want)
			}
			if r.Kind == jail.TimedOut && (r.Duration < p.Timeout || r.Duration > p.Timeout+10*time.Second) {
				t.Errorf("duration %v for a timeout of %v", r.Duration, p.Timeout)
			}
			if r.CPUTime <= 0 || r.MemoryPeak <= 0 {
				t.Errorf("no usage: %+v", r.Outcome)
			}
		})
	}
}

func TestStartFailures(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	ok := jail.Program{Argv: []string{"true"}, Dir: "/"}
	for name, tt := range map[string]struct {
		change       func(*jail.Program)
		step, detail string
	}{
		"no command":    {func(p *jail.Program) { p.Argv[0] = "nosuchcommand" }, "exec nosuchcommand", unix.ENOENT.Error()},
		"no executable": {func(p *jail.Program) { p.Argv[0] = "/etc/passwd" }, "exec /etc/passwd", unix.EACCES.Error()},
		"no directory":  {func(p *jail.Program) { p.Dir = "/nosuchdir" }, "chdir /nosuchdir", unix.ENOENT.Error()},
		"file exists": {
			func(p *jail.Program) { p.Files = []jail.File{{Path: "/etc/passwd"}} }, "write /etc/passwd",
			unix.EEXIST.Error(),
		},
		"file elsewhere": {
			func(p *jail.Program) { p.Files = []jail.File{{Path: "/data/x"}} }, "write /data/x",
			unix.EROFS.Error(),
		},
		"not its home": {
			func(p *jail.Program) { p.Files = []jail.File{{Path: jail.JobDir + "/x"}} },
			"write " + jail.JobDir + "/x", unix.EACCES.Error(),
		},
		"too big": {func(p *jail.Program) {
			p.Argv = append(p.Argv, strings.Repeat("x", 200<<10))
		}, "exec true", unix.E2BIG.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := ok
			p.Argv = append([]string(nil), ok.Argv...)
			tt.change(&p)
			r := runProgram(t, m, testSpec(), p)
			if r.Kind != jail.StartFailed || r.Step != tt.step || r.Detail != tt.detail {
				t.Errorf("got %+v, want step %q, detail %q", r.Outcome, tt.step, tt.detail)
			}
		})
	}
	if _, err := prepare(t, m, testSpec()).Run(t.Context(), jail.Program{
		Argv: []string{"true"}, Dir: "/", Files: []jail.File{{Path: "/tmp/x", Content: make([]byte, 9<<20)}},
	}); err == nil {
		t.Error("a frame over the cap was sent")
	}
}

func TestBigProgram(t *testing.T) {
	m := newMaker(t)
	code := "#" + strings.Repeat("x", 1<<20-20) + "\nprint('end')\n"
	p := program(t, "python", code[:1])
	p.Files[0].Content = []byte(code)
	for range 16 {
		p.Env = append(p.Env, "V="+strings.Repeat("v", 4<<10))
	}
	runProgram(t, m, testSpec(), p).want(t, jail.Exited, "end")
}

func TestCancel(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	j := prepare(t, m, testSpec())
	out := newLines()
	p := program(t, "bash", "trap '' TERM; setsid sleep 600 & echo up; sleep 600")
	p.Stdout = out
	done := make(chan time.Time, 1)
	go func() {
		out.next(t)
		done <- time.Now()
		cancel(errors.New("no longer wanted"))
	}()
	o, err := j.Run(ctx, p)
	if err != nil || o.Kind != jail.Killed || o.Detail != "no longer wanted" {
		t.Fatalf("got %+v, %v", o, err)
	}
	if late := time.Since(<-done); late > 10*time.Second {
		t.Errorf("gone %v after the cancel", late)
	}
	if _, err := j.Run(t.Context(), p); !errors.Is(err, errUsed) {
		t.Errorf("second run: %v", err)
	}
	ctx, cancelled := context.WithCancel(t.Context())
	cancelled()
	if _, err := m.Prepare(ctx, testSpec()); !errors.Is(err, context.Canceled) {
		t.Errorf("prepare with a done context: %v", err)
	}
}

// A program's end is recorded when it exits, however long it takes to kill leftover processes. Here
// the test traces one, so that it remains until the test has reaped it.
func TestExitIsTheProgramsOwn(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	s := prepare(t, m, testSpec()).(*sandbox)
	out := newLines()
	p := program(t, "bash", "trap 'exit 3' USR1; sleep 600 & echo up; wait")
	p.Stdout, p.Timeout = out, 2*time.Second
	type end struct {
		o   jail.Outcome
		err error
	}
	done := make(chan end, 1)
	go func() {
		o, err := s.Run(t.Context(), p)
		done <- end{o, err}
	}()
	out.next(t)
	left := children(t, children(t, s.initPID)[0])[0]
	runtime.LockOSThread() // ptrace calls must come from one thread
	defer runtime.UnlockOSThread()
	if err := unix.PtraceSeize(left); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(children(t, s.initPID)[0], unix.SIGUSR1); err != nil {
		t.Error(err)
	}
	for tick := time.Tick(10 * time.Millisecond); ; <-tick {
		s.mu.Lock()
		why := s.why
		s.mu.Unlock()
		if why == timedOut {
			break
		}
	}
	if _, err := unix.Wait4(left, nil, unix.WALL, nil); err != nil {
		t.Error(err)
	}
	if e := <-done; e.err != nil || e.o.Kind != jail.Exited || e.o.ExitCode != 3 || e.o.Duration >= p.Timeout {
		t.Errorf("got %+v, %v", e.o, e.err)
	}
}

// A failing output writer is an error of Run, not an outcome of the program.
func TestOutputWriterFails(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	r, w := io.Pipe()
	_ = r.CloseWithError(errors.New("nobody listens"))
	p := program(t, "bash", "head -c 1000000 /dev/zero")
	p.Stdout = w
	if _, err := prepare(t, m, testSpec()).Run(t.Context(), p); err == nil ||
		!strings.Contains(err.Error(), "nobody listens") {
		t.Errorf("got %v", err)
	}
}

// A program that prints 1 MB at once continues before the output is read.
func TestProgramDoesNotWaitForItsReader(t *testing.T) {
	m := newMaker(t)
	r, w := io.Pipe()
	defer func() { _ = r.Close() }()
	out := newLines()
	p := program(t, "bash", "head -c 1000000 /dev/zero; echo printed >&2")
	p.Stdout, p.Stderr = w, out
	j := prepare(t, m, testSpec())
	done := make(chan error, 1)
	go func() {
		_, err := j.Run(t.Context(), p)
		done <- errors.Join(err, w.Close())
	}()
	if got := out.next(t); got != "printed" {
		t.Errorf("got %q", got)
	}
	if n, err := io.Copy(io.Discard, r); n != 1_000_000 || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func send(s *sandbox, frame []byte) error {
	_, err := s.conn.Write(frame)
	return err
}

func TestFramesWhileRunning(t *testing.T) {
	m := newMaker(t)
	for name, tt := range map[string]struct {
		frame func(s *sandbox) error
		want  jail.Outcome
	}{
		"signal": {
			func(s *sandbox) error { return send(s, wire.SignalFrame(uint32(unix.SIGUSR1))) },
			jail.Outcome{Kind: jail.Exited, ExitCode: 5},
		},
		"kill": {
			func(s *sandbox) error { return send(s, wire.Frame(wire.Kill, nil)) },
			jail.Outcome{Kind: jail.Signaled, Signal: 9},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := prepare(t, m, testSpec())
			out := newLines()
			p := program(t, "bash", "trap 'exit 5' USR1; sleep 600 & echo up; wait")
			p.Stdout = out
			sent := make(chan error, 1)
			go func() {
				out.next(t)
				sent <- tt.frame(j.(*sandbox))
			}()
			o, err := j.Run(t.Context(), p)
			if err := errors.Join(err, <-sent); err != nil {
				t.Fatal(err)
			}
			if o.Kind != tt.want.Kind || o.ExitCode != tt.want.ExitCode || o.Signal != tt.want.Signal {
				t.Errorf("got %+v, want %+v", o, tt.want)
			}
		})
	}
}

// A program makes the calls that the spec adds, in every start mode, and no others of the list.
func TestAddedSystemCalls(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		m := newMaker(t)
		setStartMode(t, m, mode)
		for _, tt := range []struct {
			added []string
			want  string
		}{{nil, "38 38 1"}, {[]string{"process_mrelease"}, "9 38 1"}, {proto.AddableSystemCalls(), "9 9 1"}} {
			spec := testSpec()
			spec.SystemCalls = tt.added
			// process_mrelease, process_madvise and ptrace
			runProgram(t, m, spec, program(t, "python",
				systemCall+"print(sc(448, -1, 0), sc(440, -1, 0, 0, 0, 0), sc(101, 0, 0, 0, 0))")).want(t, jail.Exited, tt.want)
		}
	}
	spec := testSpec()
	spec.SystemCalls = []string{"ptrace"}
	if _, err := newMaker(t).Prepare(t.Context(), spec); err == nil ||
		!strings.Contains(err.Error(), "the system call ptrace cannot be allowed") {
		t.Errorf("a call that no program may make is added: %v", err)
	}
}

// The limit of open files is that of the spec, in every start mode.
func TestOpenFiles(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		m := newMaker(t)
		setStartMode(t, m, mode)
		for _, n := range []int{256, 4096} {
			spec := testSpec()
			spec.OpenFiles = n
			for language, code := range map[string]string{
				"python": "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))",
				"bash":   "echo $(ulimit -Sn) $(ulimit -Hn)",
			} {
				runProgram(t, m, spec, program(t, language, code)).want(t, jail.Exited, fmt.Sprintln(min(n, 1024), n))
			}
		}
	}
}
