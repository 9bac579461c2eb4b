package worker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker"
	"github.com/bullpen-run/bullpen/worker/jail"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// lease is a fake worker.Lease that the test controls.
type lease struct {
	job      *proto.Job
	claimErr error
	stop     context.CancelCauseFunc // ends the program's context, set by Claim
	claimed  chan struct{}

	mu       sync.Mutex
	ending   *worker.Outcome
	released bool
}

func newLease(change func(*proto.Job)) *lease {
	l := &lease{claimed: make(chan struct{}), job: &proto.Job{
		Meta:    proto.Meta{TraceID: proto.NewTraceID(), Language: proto.Python, Timeout: 9, MaxAttempts: 1, CreatedAt: time.Now()},
		Sandbox: proto.DefaultSandbox(), Code: "print(1)",
	}}
	if change != nil {
		change(l.job)
	}
	return l
}

func (l *lease) Job() *proto.Job                             { return l.job }
func (l *lease) Attempt() int                                { return 1 }
func (l *lease) Context(ctx context.Context) context.Context { return ctx }

func (l *lease) Claim(ctx context.Context) (context.Context, int64, error) {
	defer close(l.claimed)
	if l.claimErr != nil {
		return nil, 0, l.claimErr
	}
	ctx, l.stop = context.WithCancelCause(ctx)
	return ctx, 0, nil
}

func (l *lease) Finish(_ context.Context, e worker.Outcome) (*proto.Record, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ending = &e
	return &proto.Record{Meta: l.job.Meta, Status: e.Result.Status(), Result: &e.Result}, nil
}

func (l *lease) Release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.released = true
}

// jobs is a queue with a fixed set of leases. Take blocks once it is empty.
type jobs struct{ left chan *lease }

func (j jobs) Take(ctx context.Context) (worker.Lease, error) {
	select {
	case l := <-j.left:
		return l, nil
	default:
		<-ctx.Done()
		return nil, ctx.Err()
	}
}

// box is a fake jail whose run function the test supplies.
type box struct {
	run    func(ctx context.Context, p jail.Program) (jail.Outcome, error)
	failed error // returned by Prepare
	made   bool
	ran    bool
	closed bool
}

func (b *box) Prepare(context.Context, jail.Spec) (jail.Jail, error) {
	b.made = b.failed == nil
	return b, b.failed
}

func (b *box) Zygote(context.Context, jail.Spec) (jail.Zygote, error) {
	return nil, errors.New("nothing can be forked")
}

func (b *box) Close() error { b.closed = true; return nil }

func (b *box) Bring(context.Context, jail.Home) error { return nil }

func (b *box) Load(context.Context, jail.Program) error { return nil }
func (b *box) Alive() bool                              { return true }
func (b *box) Memory() (int64, error)                   { return 1, nil }

func (b *box) Run(ctx context.Context, p jail.Program) (jail.Outcome, error) {
	b.ran = true
	return b.run(ctx, p)
}

// output discards everything.
type output struct{}

func (output) Stream(proto.Stream) io.Writer { return io.Discard }
func (output) Close() (int64, bool)          { return 4, false }

// run processes one lease and returns when the worker has stopped. If cutting is not nil, it is
// called with the function that cancels running programs.
func run(t *testing.T, l *lease, b *box, cutting func(context.CancelCauseFunc)) {
	t.Helper()
	runIn(t, l, b, nil, cutting)
}

// runIn is like run, for a worker with thread homes.
func runIn(t *testing.T, l *lease, b *box, homes worker.Homes, cutting func(context.CancelCauseFunc)) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	cut, kill := context.WithCancelCause(t.Context())
	defer kill(nil)
	w := &worker.Worker{
		Jobs: jobs{make(chan *lease, 1)}, Jails: b, Images: slow{}, Homes: homes, Home: "/home/u", Slots: 1,
		Warm: worker.Warm{Taken: func(proto.Language, worker.Start) {}}, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Done: func(*proto.Record) {}, OnHealth: func(error) {},
		Open: func(context.Context, proto.TraceID, int, int64) worker.Output { return output{} },
	}
	w.Jobs.(jobs).left <- l
	go func() {
		<-l.claimed
		if cutting != nil {
			cutting(kill)
		}
		stop()
	}()
	if err := w.Run(ctx, cut); err != nil {
		t.Fatal(err)
	}
	if b.made && !b.closed {
		t.Error("the jail was not cleared away")
	}
}

func outcome(o jail.Outcome) func(context.Context, jail.Program) (jail.Outcome, error) {
	return func(context.Context, jail.Program) (jail.Outcome, error) { return o, nil }
}

func TestOutcomesAreToldApart(t *testing.T) {
	for name, test := range map[string]struct {
		outcome jail.Outcome
		code    int
		status  proto.Status
		error   proto.ErrorCode
		says    string
	}{
		"success":     {jail.Outcome{Kind: jail.Exited}, 0, proto.StatusSuccess, "", ""},
		"failure":     {jail.Outcome{Kind: jail.Exited, ExitCode: 3}, 3, proto.StatusFailed, "", ""},
		"signal":      {jail.Outcome{Kind: jail.Signaled, Signal: 15}, 143, proto.StatusFailed, "", ""},
		"timeout":     {jail.Outcome{Kind: jail.TimedOut}, -1, proto.StatusTimeout, proto.CodeTimeout, "9 s"},
		"memory":      {jail.Outcome{Kind: jail.OutOfMemory}, -1, proto.StatusOOM, proto.CodeMemory, "1024 MiB"},
		"seccomp":     {jail.Outcome{Kind: jail.Seccomp, Signal: 31}, -1, proto.StatusSeccomp, proto.CodeSeccomp, "forbids"},
		"start":       {jail.Outcome{Kind: jail.StartFailed, Step: "exec python3", Detail: "gone"}, -1, proto.StatusFailed, proto.CodeSandboxStart, "exec python3: gone"},
		"interrupted": {jail.Outcome{Kind: jail.Killed}, -1, proto.StatusFailed, proto.CodeWorkerLost, "shut down"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLease(nil)
			run(t, l, &box{run: outcome(test.outcome)}, nil)
			r := l.ending.Result
			if r.ExitCode != test.code || r.Status() != test.status || r.Success != (test.code == 0) {
				t.Errorf("%+v", r)
			}
			if test.error == "" {
				if r.Error != nil || r.ErrorCode != nil {
					t.Errorf("a program's own end has error %v", *r.ErrorCode)
				}
				return
			}
			if *r.ErrorCode != string(test.error) || !strings.Contains(*r.ErrorMessage, test.says) {
				t.Errorf("%s: %s", *r.ErrorCode, *r.ErrorMessage)
			}
		})
	}
}

func TestProgramThatWasNotClaimedDoesNotRun(t *testing.T) {
	l := newLease(nil)
	l.claimErr = errors.New("somebody else has it")
	b := &box{}
	run(t, l, b, nil)
	if b.ran || l.ending != nil || !l.released {
		t.Errorf("ran %v, ending %v, released %v", b.ran, l.ending, l.released)
	}
}

// waits is a program that runs until it is stopped.
func waits(ctx context.Context, _ jail.Program) (jail.Outcome, error) {
	<-ctx.Done()
	return jail.Outcome{Kind: jail.Killed, Duration: time.Second}, nil
}

func TestCancelledProgram(t *testing.T) {
	l := newLease(nil)
	run(t, l, &box{run: waits}, func(context.CancelCauseFunc) { l.stop(proto.ErrCancelled) })
	if r := l.ending.Result; r.Status() != proto.StatusCancelled || *r.Error != "Cancelled by user" {
		t.Errorf("%+v", r)
	}
}

func TestLostLeaseWritesNothing(t *testing.T) {
	l := newLease(nil)
	run(t, l, &box{run: waits}, func(context.CancelCauseFunc) { l.stop(proto.ErrLost) })
	if l.ending != nil || !l.released {
		t.Errorf("ending %+v, released %v", l.ending, l.released)
	}
}

// A program that ended on its own is recorded even if its lease may be lost. Writing the record
// decides whether it was.
func TestProgramThatEndedWhileItsLeaseWasInDoubtIsRecorded(t *testing.T) {
	l := newLease(nil)
	run(t, l, &box{run: func(ctx context.Context, _ jail.Program) (jail.Outcome, error) {
		<-ctx.Done()
		return jail.Outcome{Kind: jail.Exited, ExitCode: 3}, nil
	}}, func(context.CancelCauseFunc) { l.stop(proto.ErrLost) })
	if l.ending == nil || l.ending.Result.ExitCode != 3 || l.released {
		t.Errorf("ending %+v, released %v", l.ending, l.released)
	}
}

func TestProgramCutOffAtShutdownIsRecorded(t *testing.T) {
	l := newLease(nil)
	run(t, l, &box{run: waits}, func(kill context.CancelCauseFunc) { kill(worker.ErrShutdown) })
	if r := l.ending.Result; *r.ErrorCode != string(proto.CodeWorkerLost) || !strings.Contains(*r.ErrorMessage, "shut down") {
		t.Errorf("%+v", r)
	}
}

func TestJailThatCannotBeMadeOrFails(t *testing.T) {
	for name, b := range map[string]*box{
		"made": {failed: errors.New("no room")},
		"run":  {run: func(context.Context, jail.Program) (jail.Outcome, error) { return jail.Outcome{}, errors.New("broken") }},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLease(nil)
			run(t, l, b, nil)
			if r := l.ending.Result; *r.ErrorCode != string(proto.CodeSandboxStart) {
				t.Errorf("%+v", r)
			}
		})
	}
}

// slow is an image store whose Get blocks until ctx is done.
type slow struct{}

func (slow) Get(ctx context.Context, _ string) (worker.Image, func(), error) {
	<-ctx.Done()
	return worker.Image{}, nil, ctx.Err()
}

func TestJobThatEndsWhileItsImageIsMadeReadyIsNotWaitedFor(t *testing.T) {
	for name, test := range map[string]struct {
		claim, stop error
		status      proto.Status // empty if no record is written
	}{
		"not claimed": {claim: errors.New("somebody else has it")},
		"lost":        {stop: proto.ErrLost},
		"cancelled":   {stop: proto.ErrCancelled, status: proto.StatusCancelled},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLease(func(j *proto.Job) { j.Sandbox.ImageDigest = "sha256:0" })
			l.claimErr = test.claim
			b := &box{failed: errors.New("not to be asked for")}
			run(t, l, b, func(context.CancelCauseFunc) {
				if l.stop != nil {
					l.stop(test.stop)
				}
			})
			switch {
			case test.status == "":
				if l.ending != nil || !l.released {
					t.Errorf("ending %+v, released %v", l.ending, l.released)
				}
			case l.ending == nil || l.ending.Result.Status() != test.status:
				t.Errorf("ending %+v", l.ending)
			}
		})
	}
}

func TestLanguageThatIsUnknown(t *testing.T) {
	l := newLease(func(j *proto.Job) { j.Language = "cobol" })
	run(t, l, &box{}, nil)
	if r := l.ending.Result; *r.ErrorCode != string(proto.CodeSandboxStart) || !strings.Contains(*r.ErrorMessage, `unknown language "cobol"`) {
		t.Errorf("%+v", r)
	}
}

func TestMuchOutputIsKeptWholeUpToItsLimit(t *testing.T) {
	const limit = 3<<20 + 1
	l := newLease(func(j *proto.Job) { j.Sandbox.OutputBytes = limit })
	var printed strings.Builder
	run(t, l, &box{run: func(_ context.Context, p jail.Program) (jail.Outcome, error) {
		out := io.MultiWriter(&printed, p.Stdout)
		for i := 0; printed.Len() <= limit; i++ {
			_, _ = fmt.Fprintf(out, "%0*d\n", 1+i*i%70_000, i)
		}
		_, _ = io.WriteString(p.Stderr, printed.String()[:limit])
		return jail.Outcome{Kind: jail.Exited}, nil
	}}, nil)
	want := printed.String()[:limit]
	if r := l.ending.Result; r.Stdout != want || !r.StdoutTruncated || r.Stderr != want || r.StderrTruncated {
		t.Errorf("%d bytes, cut %t; %d bytes, cut %t; want %d", len(r.Stdout), r.StdoutTruncated, len(r.Stderr), r.StderrTruncated, limit)
	}
}

func TestOutputIsCutBetweenCharacters(t *testing.T) {
	l := newLease(func(j *proto.Job) { j.Sandbox.OutputBytes = 5 })
	run(t, l, &box{run: func(_ context.Context, p jail.Program) (jail.Outcome, error) {
		_, _ = io.WriteString(p.Stdout, "ab")
		_, _ = io.WriteString(p.Stdout, "éé")
		_, _ = io.WriteString(p.Stderr, "12345")
		return jail.Outcome{Kind: jail.Exited}, nil
	}}, nil)
	r := l.ending.Result
	if r.Stdout != "abé" || !r.StdoutTruncated || r.Stderr != "12345" || r.StderrTruncated {
		t.Errorf("%q %v, %q %v", r.Stdout, r.StdoutTruncated, r.Stderr, r.StderrTruncated)
	}
	if l.ending.LastSeq != 4 {
		t.Errorf("the last event is %d", l.ending.LastSeq)
	}
}

// den is a fake home whose errors the test supplies.
type den struct {
	checkOut, fill, save error
	commit               *proto.Commit
	placed               string
	saves                int
	closed, committed    bool
}

func (d *den) CheckOut(context.Context, *proto.Job) (worker.Home, error) {
	if d.checkOut != nil {
		return nil, d.checkOut
	}
	return d, nil
}
func (d *den) Mount(jail.Volume, int, int) (*os.File, error) { return nil, nil }
func (d *den) PutStaged(context.Context) error               { return d.fill }
func (d *den) PutProgram(usual string, _ []byte) (string, error) {
	d.placed = "." + usual
	return d.placed, nil
}

func (d *den) Save(context.Context) (*proto.Commit, error) {
	d.saves++
	return d.commit, d.save
}

func (d *den) Close(committed bool) error {
	d.closed, d.committed = true, committed
	return nil
}

func inThread(j *proto.Job) { j.ThreadID = "t" }

func TestHomeIsSavedHoweverTheProgramEnded(t *testing.T) {
	for name, o := range map[string]jail.Outcome{
		"exited": {Kind: jail.Exited, ExitCode: 3}, "timeout": {Kind: jail.TimedOut}, "memory": {Kind: jail.OutOfMemory},
	} {
		t.Run(name, func(t *testing.T) {
			d := &den{commit: &proto.Commit{Fence: 7}}
			l := newLease(inThread)
			runIn(t, l, &box{run: func(_ context.Context, p jail.Program) (jail.Outcome, error) {
				if len(p.Files) > 0 || p.Argv[len(p.Argv)-1] != "/home/u/.main.py" {
					t.Errorf("the program is %+v", p)
				}
				return o, nil
			}}, d, nil)
			if l.ending.Commit != d.commit || !d.committed || !d.closed {
				t.Errorf("ending %+v, home %+v", l.ending, d)
			}
		})
	}
}

func TestCancelledProgramIsSaved(t *testing.T) {
	d := &den{commit: &proto.Commit{Fence: 7}}
	l := newLease(inThread)
	runIn(t, l, &box{run: waits}, d, func(context.CancelCauseFunc) { l.stop(proto.ErrCancelled) })
	if l.ending.Commit != d.commit || l.ending.Result.Status() != proto.StatusCancelled {
		t.Errorf("%+v", l.ending)
	}
}

func TestHomeThatCannotBeSaved(t *testing.T) {
	for told, err := range map[string]error{
		"12 bytes":                                 &proto.LimitError{Bytes: 12, MaxBytes: 10},
		"more than 13 bytes together":              &proto.AttributesError{Most: 13},
		"more than 14 directories in each other":   &proto.DepthError{Most: 14},
		"not be stored; the worker's log says why": errors.New("of ours"),
	} {
		d := &den{save: fmt.Errorf("save: %w", err)}
		l := newLease(inThread)
		runIn(t, l, &box{run: outcome(jail.Outcome{Kind: jail.Exited, ExitCode: 3})}, d, nil)
		r := l.ending.Result
		if *r.ErrorCode != string(proto.CodeThreadSave) || *r.ProgramExitCode != 3 || r.ExitCode != -1 ||
			!strings.Contains(*r.ErrorMessage, told) || l.ending.Commit != nil || d.committed || !d.closed {
			t.Errorf("%+v, %s, home %+v", r, *r.ErrorMessage, d)
		}
	}
}

func TestHomeThatIsNotThere(t *testing.T) {
	for name, d := range map[string]*den{"checked out": {checkOut: errors.New("gone")}, "filled": {fill: errors.New("gone")}} {
		t.Run(name, func(t *testing.T) {
			l := newLease(inThread)
			b := &box{}
			runIn(t, l, b, d, nil)
			r := l.ending.Result
			if *r.ErrorCode != string(proto.CodeThreadMount) || strings.Contains(*r.ErrorMessage, "gone") || b.ran || d.saves > 0 {
				t.Errorf("%+v", r)
			}
		})
	}
}

func TestHomeOfALostLeaseIsNotSaved(t *testing.T) {
	d := &den{commit: &proto.Commit{}}
	l := newLease(inThread)
	runIn(t, l, &box{run: waits}, d, func(context.CancelCauseFunc) { l.stop(proto.ErrLost) })
	if l.ending != nil || d.saves > 0 || d.committed || !d.closed {
		t.Errorf("ending %+v, home %+v", l.ending, d)
	}
}

func TestHomeOfAProgramCutOffAtShutdownIsNotSaved(t *testing.T) {
	d := &den{commit: &proto.Commit{}}
	l := newLease(inThread)
	runIn(t, l, &box{run: waits}, d, func(kill context.CancelCauseFunc) { kill(worker.ErrShutdown) })
	if d.saves > 0 || d.committed || !d.closed || *l.ending.Result.ErrorCode != string(proto.CodeWorkerLost) {
		t.Errorf("ending %+v, home %+v", l.ending, d)
	}
}
