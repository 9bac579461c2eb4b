package worker_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker"
	"github.com/bullpen-run/bullpen/worker/jail"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// lease is a fake worker.Lease that the test controls.
type lease struct {
	secrets  map[string][]byte
	job      *proto.Job
	claimErr error
	stop     context.CancelCauseFunc // ends the program's context, set by Claim
	claimed  chan struct{}
	asked    chan struct{} // closed to cancel the execution

	mu       sync.Mutex
	outcome  *worker.Outcome
	released bool
}

func (l *lease) Secrets(context.Context) (map[string][]byte, error) { return l.secrets, nil }

func newLease(change func(*proto.Job)) *lease {
	l := &lease{claimed: make(chan struct{}), asked: make(chan struct{}), job: &proto.Job{
		Meta: proto.Meta{
			TraceID: proto.NewTraceID(), Language: proto.Python, Timeout: 9, MaxAttempts: 1,
			CreatedAt: time.Now(),
		},
		Sandbox: proto.DefaultSandbox(), Code: "print(1)",
	}}
	if change != nil {
		change(l.job)
	}
	return l
}

func (l *lease) Job() *proto.Job { return l.job }
func (l *lease) Attempt() int    { return 1 }

func (l *lease) Claim(ctx context.Context) (context.Context, int64, error) {
	defer close(l.claimed)
	if l.claimErr != nil {
		return nil, 0, l.claimErr
	}
	ctx, l.stop = context.WithCancelCause(ctx)
	return ctx, 0, nil
}

func (l *lease) Cancelled() <-chan struct{} { return l.asked }

func (l *lease) cancel(context.CancelCauseFunc) { close(l.asked) }

func (l *lease) Finish(_ context.Context, e worker.Outcome) (*proto.Record, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.outcome = &e
	return &proto.Record{Meta: l.job.Meta, Status: e.Result.Status(), Result: &e.Result}, nil
}

func (l *lease) Commit(context.Context, *proto.Commit) error { return nil }

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

// fakeJail is a fake jail whose run function the test supplies.
type fakeJail struct {
	outlives   bool // the worker: it is in use when Run returns
	run        func(ctx context.Context, p jail.Program) (jail.Outcome, error)
	prepareErr error // returned by Prepare
	prepared   bool
	ran        bool
	closed     bool
}

func (b *fakeJail) Prepare(context.Context, jail.Spec) (jail.Jail, error) {
	b.prepared = b.prepareErr == nil
	return b, b.prepareErr
}

func (b *fakeJail) Zygote(context.Context, jail.Spec) (jail.Zygote, error) {
	return nil, errors.New("zygotes are not supported")
}

func (b *fakeJail) Close() error { b.closed = true; return nil }

func (b *fakeJail) MountHome(context.Context, jail.Home) error { return nil }

func (b *fakeJail) BindHome(context.Context, string, string) error { return nil }

func (b *fakeJail) MountAgent(context.Context, string, string) error { return nil }

func (b *fakeJail) MountData(context.Context, jail.Data) error { return nil }

func (b *fakeJail) WhileFrozen(ctx context.Context, _ time.Duration, f func(context.Context) error) error {
	return f(ctx)
}

func (b *fakeJail) Load(context.Context, jail.Program) error { return nil }
func (b *fakeJail) Alive() bool                              { return true }
func (b *fakeJail) Memory() (int64, error)                   { return 1, nil }

func (b *fakeJail) Run(ctx context.Context, p jail.Program) (jail.Outcome, error) {
	b.ran = true
	return b.run(ctx, p)
}

// output discards everything.
type output struct{}

func (output) Stream(proto.Stream) worker.Stream { return discard{} }
func (output) Close() (int64, bool)              { return 4, false }
func (output) OverBudget() bool                  { return false }
func (output) KeepDisplay(int) bool              { return true }
func (output) Display(int, *proto.Display)       {}

type discard struct{}

func (discard) Keep(n int) int              { return n }
func (discard) Write(p []byte) (int, error) { return len(p), nil }

// run processes one lease and returns when the worker has stopped. If onClaimed is not nil, it is
// called with the function that cancels running programs.
func run(t *testing.T, l *lease, b *fakeJail, onClaimed func(context.CancelCauseFunc)) {
	t.Helper()
	runIn(t, l, b, nil, onClaimed)
}

// runIn is like run, for a worker with thread homes.
func runIn(t *testing.T, l *lease, b *fakeJail, homes worker.Homes, onClaimed func(context.CancelCauseFunc)) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	cut, kill := context.WithCancelCause(t.Context())
	defer kill(nil)
	w := &worker.Worker{
		Jobs: jobs{make(chan *lease, 1)}, Jails: b, Images: blockingImages{}, Homes: homes, Home: "/home/u", Slots: 1,
		SaveTimeout: time.Minute,
		Warm:        worker.Warm{OnStart: func(proto.Language, worker.Start) {}},
		Log:         slog.New(slog.NewTextHandler(t.Output(), nil)), Done: func(*proto.Record) {}, OnHealth: func(error) {},
		Open: func(context.Context, *proto.Job, int, int64) worker.Output { return output{} },
	}
	w.Jobs.(jobs).left <- l
	go func() {
		<-l.claimed
		if onClaimed != nil {
			onClaimed(kill)
		}
		stop()
	}()
	if err := w.Run(ctx, cut); err != nil {
		t.Fatal(err)
	}
	if b.prepared && !b.closed && !b.outlives {
		t.Error("the jail was not closed")
	}
}

func exited(o jail.Outcome) func(context.Context, jail.Program) (jail.Outcome, error) {
	return func(context.Context, jail.Program) (jail.Outcome, error) { return o, nil }
}

func TestResultOfEachOutcome(t *testing.T) {
	for name, test := range map[string]struct {
		outcome jail.Outcome
		code    int
		status  proto.Status
		error   proto.ErrorCode
		message string
	}{
		"success": {jail.Outcome{Kind: jail.Exited}, 0, proto.StatusSuccess, "", ""},
		"failure": {jail.Outcome{Kind: jail.Exited, ExitCode: 3}, 3, proto.StatusFailed, "", ""},
		"signal":  {jail.Outcome{Kind: jail.Signaled, Signal: 15}, 143, proto.StatusFailed, "", ""},
		"timeout": {jail.Outcome{Kind: jail.TimedOut}, -1, proto.StatusTimeout, proto.CodeTimeout, "9 s"},
		"memory":  {jail.Outcome{Kind: jail.OutOfMemory}, -1, proto.StatusOOM, proto.CodeMemory, "1024 MiB"},
		"uncharged": {
			jail.Outcome{Kind: jail.OutOfMemory, Uncharged: 90 << 20},
			-1, proto.StatusOOM, proto.CodeMemory,
			"about 90 MiB",
		},
		"host memory": {
			jail.Outcome{Kind: jail.HostOutOfMemory},
			-1, proto.StatusFailed, proto.CodeHostMemory,
			"not exceeded its 1024 MiB",
		},
		"seccomp": {jail.Outcome{Kind: jail.Seccomp, Signal: 31}, -1, proto.StatusSeccomp, proto.CodeSeccomp, "forbids"},
		"start": {
			jail.Outcome{Kind: jail.StartFailed, Step: "exec python3", Detail: "gone"},
			-1, proto.StatusFailed,
			proto.CodeSandboxStart, "exec python3: gone",
		},
		"interrupted": {jail.Outcome{Kind: jail.Killed}, -1, proto.StatusFailed, proto.CodeWorkerLost, "shut down"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLease(nil)
			run(t, l, &fakeJail{run: exited(test.outcome)}, nil)
			r := l.outcome.Result
			if r.ExitCode != test.code || r.Status() != test.status || r.Success != (test.code == 0) {
				t.Errorf("%+v", r)
			}
			if test.error == "" {
				if r.Error != nil || r.ErrorCode != nil {
					t.Errorf("a program that exited has error %v", *r.ErrorCode)
				}
				return
			}
			if *r.ErrorCode != string(test.error) || !strings.Contains(*r.ErrorMessage, test.message) {
				t.Errorf("%s: %s", *r.ErrorCode, *r.ErrorMessage)
			}
		})
	}
}

// An attempt that the host's lack of memory ended is no result while others are left: the lease
// ends without one, and the dispatcher starts the next attempt.
func TestHostOutOfMemoryIsTriedAgain(t *testing.T) {
	for attempts, code := range map[int]proto.ErrorCode{1: proto.CodeHostMemory, 2: ""} {
		for name, b := range map[string]*fakeJail{
			"run":     {run: exited(jail.Outcome{Kind: jail.HostOutOfMemory})},
			"prepare": {prepareErr: fmt.Errorf("prepare: %w", jail.ErrHostOutOfMemory)},
		} {
			l := newLease(func(j *proto.Job) { j.MaxAttempts = attempts })
			run(t, l, b, nil)
			switch {
			case code == "":
				if l.outcome != nil || !l.released {
					t.Errorf("%s with %d attempts: outcome %+v, released %v", name, attempts, l.outcome, l.released)
				}
			case l.outcome == nil || *l.outcome.Result.ErrorCode != string(code):
				t.Errorf("%s with %d attempts: outcome %+v", name, attempts, l.outcome)
			}
		}
	}
}

func TestUnclaimedProgramDoesNotRun(t *testing.T) {
	l := newLease(nil)
	l.claimErr = errors.New("claimed by another worker")
	b := &fakeJail{}
	run(t, l, b, nil)
	if b.ran || l.outcome != nil || !l.released {
		t.Errorf("ran %v, outcome %v, released %v", b.ran, l.outcome, l.released)
	}
}

// Nobody waits for an async execution, so its program leaves the processors to others.
func TestAsyncProgramHasALowWeight(t *testing.T) {
	for mode, want := range map[proto.Mode]bool{
		proto.ModeInline: false, proto.ModeStreaming: false, proto.ModeAsync: true,
	} {
		l := newLease(func(j *proto.Job) { j.Mode = mode })
		run(t, l, &fakeJail{run: func(_ context.Context, p jail.Program) (jail.Outcome, error) {
			if p.LowWeight != want {
				t.Errorf("%s: low weight %v", mode, p.LowWeight)
			}
			return jail.Outcome{Kind: jail.Exited}, nil
		}}, nil)
	}
}

// runUntilStopped is a program that runs until it is stopped.
func runUntilStopped(ctx context.Context, p jail.Program) (jail.Outcome, error) {
	select {
	case <-ctx.Done():
		return jail.Outcome{Kind: jail.Killed, Duration: time.Second}, nil
	case <-p.Cancel:
		return jail.Outcome{Kind: jail.Cancelled, Duration: time.Second}, nil
	}
}

func TestCancelledProgram(t *testing.T) {
	l := newLease(nil)
	run(t, l, &fakeJail{run: runUntilStopped}, l.cancel)
	if r := l.outcome.Result; r.Status() != proto.StatusCancelled || *r.Error != "Cancelled by user" {
		t.Errorf("%+v", r)
	}
}

// The graces of a program are those of its job. A program that ended by itself within one has its
// exit code in the result.
func TestGrace(t *testing.T) {
	seconds := func(s float64) *proto.Seconds { return new(proto.Seconds(time.Duration(s * float64(time.Second)))) }
	for name, test := range map[string]struct {
		grace           *proto.Seconds
		timeout, cancel time.Duration
	}{
		"default": {nil, 0, 2 * time.Second},
		"none":    {seconds(0), 0, 0},
		"given":   {seconds(1.5), 1500 * time.Millisecond, 1500 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			for _, kind := range []jail.Kind{jail.TimedOut, jail.Cancelled} {
				for code, o := range map[int]jail.Outcome{
					-1: {Kind: kind}, 0: {Kind: kind, Graceful: true}, 3: {Kind: kind, Graceful: true, ExitCode: 3},
					143: {Kind: kind, Graceful: true, Signal: 15},
				} {
					l := newLease(func(j *proto.Job) { j.KillGrace = test.grace })
					run(t, l, &fakeJail{run: func(_ context.Context, p jail.Program) (jail.Outcome, error) {
						if p.TimeoutGrace != test.timeout || p.CancelGrace != test.cancel {
							t.Errorf("graces of %v and %v", p.TimeoutGrace, p.CancelGrace)
						}
						return o, nil
					}}, nil)
					r := l.outcome.Result
					if r.ExitCode != -1 || r.Success || (code == -1) != (r.ProgramExitCode == nil) || r.ProgramExitCode != nil &&
						*r.ProgramExitCode != code {
						t.Errorf("%s: %+v", kind, r)
					}
				}
			}
		})
	}
}

func TestLostLeaseWritesNothing(t *testing.T) {
	l := newLease(nil)
	run(t, l, &fakeJail{run: runUntilStopped}, func(context.CancelCauseFunc) { l.stop(proto.ErrLost) })
	if l.outcome != nil || !l.released {
		t.Errorf("outcome %+v, released %v", l.outcome, l.released)
	}
}

// A program that ended on its own is recorded even if its lease may be lost. Writing the record
// decides whether it was.
func TestProgramThatExitedIsRecordedIfTheLeaseIsInDoubt(t *testing.T) {
	l := newLease(nil)
	run(t, l, &fakeJail{run: func(ctx context.Context, _ jail.Program) (jail.Outcome, error) {
		<-ctx.Done()
		return jail.Outcome{Kind: jail.Exited, ExitCode: 3}, nil
	}}, func(context.CancelCauseFunc) { l.stop(proto.ErrLost) })
	if l.outcome == nil || l.outcome.Result.ExitCode != 3 || l.released {
		t.Errorf("outcome %+v, released %v", l.outcome, l.released)
	}
}

func TestProgramKilledAtShutdownIsRecorded(t *testing.T) {
	l := newLease(nil)
	run(t, l, &fakeJail{run: runUntilStopped}, func(kill context.CancelCauseFunc) { kill(worker.ErrShutdown) })
	if r := l.outcome.Result; *r.ErrorCode != string(proto.CodeWorkerLost) ||
		!strings.Contains(*r.ErrorMessage, "shut down") {
		t.Errorf("%+v", r)
	}
}

func TestSandboxFailure(t *testing.T) {
	for name, b := range map[string]*fakeJail{
		"prepare": {prepareErr: errors.New("no cgroup")},
		"run": {run: func(context.Context, jail.Program) (jail.Outcome, error) {
			return jail.Outcome{}, errors.New("broken")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLease(nil)
			run(t, l, b, nil)
			if r := l.outcome.Result; *r.ErrorCode != string(proto.CodeSandboxStart) {
				t.Errorf("%+v", r)
			}
		})
	}
}

// blockingImages is an image store whose Get blocks until ctx is done.
type blockingImages struct{}

func (blockingImages) Get(ctx context.Context, _ string) (worker.Image, func(), error) {
	<-ctx.Done()
	return worker.Image{}, nil, ctx.Err()
}

func TestJobThatEndsStopsPreparingItsImage(t *testing.T) {
	for name, test := range map[string]struct {
		claim, stop error
		cancel      bool
		status      proto.Status // empty if no record is written
	}{
		"not claimed": {claim: errors.New("claimed by another worker")},
		"lost":        {stop: proto.ErrLost},
		"cancelled":   {cancel: true, status: proto.StatusCancelled},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLease(func(j *proto.Job) { j.Sandbox.ImageDigest = "sha256:0" })
			l.claimErr = test.claim
			b := &fakeJail{prepareErr: errors.New("must not be called")}
			run(t, l, b, func(context.CancelCauseFunc) {
				switch {
				case test.cancel:
					close(l.asked)
				case l.stop != nil:
					l.stop(test.stop)
				}
			})
			switch {
			case test.status == "":
				if l.outcome != nil || !l.released {
					t.Errorf("outcome %+v, released %v", l.outcome, l.released)
				}
			case l.outcome == nil || l.outcome.Result.Status() != test.status:
				t.Errorf("outcome %+v", l.outcome)
			}
		})
	}
}

// A program whose requests get a secret has the certificate of the proxy, and nothing of the secret.
func TestInjectedSecret(t *testing.T) {
	const canary = "canary-6b1e"
	l := newLease(func(j *proto.Job) {
		j.Env = map[string]string{"SSL_CERT_FILE": "mine"}
		j.Bound = []proto.SecretBinding{
			{Secret: "API", Injection: &proto.Injection{
				Hosts: []string{"api.example.com"}, Header: "Authorization", Template: "Bearer {{value}}",
			}},
			{Secret: "file"},
		}
	})
	l.secrets = map[string][]byte{"API": []byte(canary), "file": []byte("other")}
	var got jail.Program
	run(t, l, &fakeJail{run: func(_ context.Context, p jail.Program) (jail.Outcome, error) {
		got = p
		_, _ = io.WriteString(p.Stdout, "sent back: "+canary)
		return jail.Outcome{Kind: jail.Exited}, nil
	}}, nil)
	if l.outcome.Result.Stdout != "sent back: ***" {
		t.Errorf("output %q", l.outcome.Result.Stdout)
	}
	if got.Interception == nil || len(got.Interception.Hosts) != 1 || got.Interception.Hosts[0].Name != "api.example.com" {
		t.Errorf("%+v", got.Interception)
	}
	for _, v := range []string{
		"SSL_CERT_FILE=mine", "REQUESTS_CA_BUNDLE=" + jail.TrustFile,
		"NODE_EXTRA_CA_CERTS=" + jail.TrustFile,
	} {
		if !slices.Contains(got.Env, v) {
			t.Errorf("no %s in %s", v, got.Env)
		}
	}
	if strings.Contains(strings.Join(got.Env, " "), canary) {
		t.Errorf("the secret is in %s", got.Env)
	}
	var files []string
	for _, f := range got.Files {
		files = append(files, f.Path)
		if bytes.Contains(f.Content, []byte(canary)) || bytes.Contains(f.Content, []byte("PRIVATE")) {
			t.Errorf("%s has a secret", f.Path)
		}
		if f.Path == jail.TrustFile && !bytes.Contains(f.Content, []byte("BEGIN CERTIFICATE")) {
			t.Errorf("%s has no certificate", f.Path)
		}
	}
	if !slices.Contains(files, jail.TrustFile) || !slices.Contains(files, jail.SecretsDir+"/file") ||
		slices.Contains(files, jail.SecretsDir+"/API") {
		t.Errorf("files %s", files)
	}

	without := newLease(nil)
	run(t, without, &fakeJail{run: func(_ context.Context, p jail.Program) (jail.Outcome, error) {
		got = p
		return jail.Outcome{Kind: jail.Exited}, nil
	}}, nil)
	if got.Interception != nil || strings.Contains(strings.Join(got.Env, " "), jail.TrustFile) || len(got.Files) != 1 {
		t.Errorf("a program without the secret: %+v", got)
	}
}

func TestUnknownLanguage(t *testing.T) {
	l := newLease(func(j *proto.Job) { j.Language = "cobol" })
	run(t, l, &fakeJail{}, nil)
	if r := l.outcome.Result; *r.ErrorCode != string(proto.CodeSandboxStart) ||
		!strings.Contains(*r.ErrorMessage, `unknown language "cobol"`) {
		t.Errorf("%+v", r)
	}
}

func TestOutputLimit(t *testing.T) {
	const limit = 3<<20 + 1
	l := newLease(func(j *proto.Job) { j.Sandbox.OutputBytes = limit })
	var printed strings.Builder
	run(t, l, &fakeJail{run: func(_ context.Context, p jail.Program) (jail.Outcome, error) {
		out := io.MultiWriter(&printed, p.Stdout)
		for i := 0; printed.Len() <= limit; i++ {
			_, _ = fmt.Fprintf(out, "%0*d\n", 1+i*i%70_000, i)
		}
		_, _ = io.WriteString(p.Stderr, printed.String()[:limit])
		return jail.Outcome{Kind: jail.Exited}, nil
	}}, nil)
	want := printed.String()[:limit]
	if r := l.outcome.Result; r.Stdout != want || !r.StdoutTruncated || r.Stderr != want || r.StderrTruncated {
		t.Errorf("%d bytes, cut %t; %d bytes, cut %t; want %d", len(r.Stdout), r.StdoutTruncated, len(r.Stderr),
			r.StderrTruncated, limit)
	}
}

func TestOutputIsTruncatedBetweenCharacters(t *testing.T) {
	l := newLease(func(j *proto.Job) { j.Sandbox.OutputBytes = 5 })
	run(t, l, &fakeJail{run: func(_ context.Context, p jail.Program) (jail.Outcome, error) {
		_, _ = io.WriteString(p.Stdout, "ab")
		_, _ = io.WriteString(p.Stdout, "éé")
		_, _ = io.WriteString(p.Stderr, "12345")
		return jail.Outcome{Kind: jail.Exited}, nil
	}}, nil)
	r := l.outcome.Result
	if r.Stdout != "abé" || !r.StdoutTruncated || r.Stderr != "12345" || r.StderrTruncated {
		t.Errorf("%q %v, %q %v", r.Stdout, r.StdoutTruncated, r.Stderr, r.StderrTruncated)
	}
	if l.outcome.LastSeq != 4 {
		t.Errorf("the last event is %d", l.outcome.LastSeq)
	}
}

// fakeHome is a fake home whose errors the test supplies.
type fakeHome struct {
	checkOutErr, stageErr, saveErr error
	commit                         *proto.Commit
	programFile                    string
	saves                          int
	closed, committed              bool
}

func (d *fakeHome) CheckOut(context.Context, proto.CheckoutRequest) (worker.Home, error) {
	if d.checkOutErr != nil {
		return nil, d.checkOutErr
	}
	return d, nil
}
func (d *fakeHome) Mount(jail.Volume, int, int) (*os.File, error) { return nil, nil }
func (d *fakeHome) MountPart(jail.Volume, int, int, func(int) (int, error)) (*os.File, error) {
	return nil, nil
}

func (d *fakeHome) Read(context.Context, string, string) (worker.VolumeVersion, error) {
	return nil, nil
}
func (d *fakeHome) MakeTmp(string) error { return nil }

func (d *fakeHome) PutStaged(context.Context) error { return d.stageErr }
func (d *fakeHome) LimitSpace() error               { return nil }
func (d *fakeHome) PutProgram(usual string, _ []byte) (string, error) {
	d.programFile = "." + usual
	return d.programFile, nil
}

func (d *fakeHome) SaveLive(
	ctx context.Context, freeze func(context.Context, func(context.Context) error) error,
	commit func(context.Context, *proto.Commit) error,
) (int64, error) {
	if d.saveErr != nil {
		return 0, d.saveErr
	}
	return 1, freeze(ctx, func(ctx context.Context) error { return commit(ctx, d.commit) })
}

func (d *fakeHome) Save(context.Context) (*proto.Commit, error) {
	d.saves++
	return d.commit, d.saveErr
}

func (d *fakeHome) Close(committed bool) error {
	d.closed, d.committed = true, committed
	return nil
}

func inThread(j *proto.Job) { j.ThreadID = "t" }

func TestHomeIsSavedAfterEachOutcome(t *testing.T) {
	for name, o := range map[string]jail.Outcome{
		"exited": {Kind: jail.Exited, ExitCode: 3}, "timeout": {Kind: jail.TimedOut}, "memory": {Kind: jail.OutOfMemory},
	} {
		t.Run(name, func(t *testing.T) {
			d := &fakeHome{commit: &proto.Commit{Fence: 7}}
			l := newLease(inThread)
			runIn(t, l, &fakeJail{run: func(_ context.Context, p jail.Program) (jail.Outcome, error) {
				if len(p.Files) > 0 || p.Argv[len(p.Argv)-1] != "/home/u/.main.py" {
					t.Errorf("the program is %+v", p)
				}
				return o, nil
			}}, d, nil)
			if l.outcome.Commit != d.commit || !d.committed || !d.closed {
				t.Errorf("outcome %+v, home %+v", l.outcome, d)
			}
			none := proto.Interval{}
			if s := l.outcome.Steps; s.Start != "cold" || s.Jail == none || s.Home == none || s.Program == none ||
				s.Save == none || s.Mounts != none ||
				s.Program[0] < s.Jail[0] || s.Save[0] < s.Program[0] { // durations are rounded up, so that ends may be later
				t.Errorf("steps %+v", s)
			}
		})
	}
}

func TestCancelledProgramIsSaved(t *testing.T) {
	d := &fakeHome{commit: &proto.Commit{Fence: 7}}
	l := newLease(inThread)
	runIn(t, l, &fakeJail{run: runUntilStopped}, d, l.cancel)
	if l.outcome.Commit != d.commit || l.outcome.Result.Status() != proto.StatusCancelled {
		t.Errorf("%+v", l.outcome)
	}
}

func TestHomeSaveFailure(t *testing.T) {
	for message, err := range map[string]error{
		"12 bytes":                                        &proto.LimitError{Bytes: 12, MaxBytes: 10},
		"more than 13 bytes together":                     &proto.AttributesError{Most: 13},
		"more than 14 directories in each other":          &proto.DepthError{Most: 14},
		`"a/b" has 16 bytes, more than 15`:                &proto.FileError{Path: "a/b", Size: 16, Unit: "bytes", Most: 15},
		"not be stored; the cause is in the worker's log": errors.New("internal"),
	} {
		d := &fakeHome{saveErr: fmt.Errorf("save: %w", err)}
		l := newLease(inThread)
		runIn(t, l, &fakeJail{run: exited(jail.Outcome{Kind: jail.Exited, ExitCode: 3})}, d, nil)
		r := l.outcome.Result
		if *r.ErrorCode != string(proto.CodeThreadSave) || *r.ProgramExitCode != 3 || r.ExitCode != -1 ||
			!strings.Contains(*r.ErrorMessage, message) || l.outcome.Commit != nil || d.committed || !d.closed {
			t.Errorf("%+v, %s, home %+v", r, *r.ErrorMessage, d)
		}
	}
}

// hangingHome is a home whose save lasts until its context is done, and after that until end is
// closed.
type hangingHome struct {
	fakeHome
	end chan struct{}
}

func (d *hangingHome) CheckOut(context.Context, proto.CheckoutRequest) (worker.Home, error) {
	return d, nil
}

func (d *hangingHome) Save(ctx context.Context) (*proto.Commit, error) {
	<-ctx.Done()
	<-d.end
	return nil, ctx.Err()
}

// The slot is free at the latest 10 s after the timeout, but the home and the jail are kept as long
// as the save uses them.
func TestHomeSaveTimeout(t *testing.T) {
	for name, hangs := range map[string]bool{"a slow store": false, "a store that hangs": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := &hangingHome{end: make(chan struct{})}
				if !hangs {
					close(d.end)
				}
				b := &fakeJail{run: exited(jail.Outcome{Kind: jail.Exited, ExitCode: 3}), outlives: hangs}
				l := newLease(inThread)
				began := time.Now()
				runIn(t, l, b, d, nil)
				want := time.Minute
				if hangs {
					want += 10 * time.Second
				}
				r := l.outcome.Result
				if *r.ErrorCode != string(proto.CodeThreadSave) || *r.ProgramExitCode != 3 || l.outcome.Commit != nil ||
					!strings.Contains(*r.ErrorMessage, "took longer than the 1m0s") || time.Since(began) != want {
					t.Errorf("%+v, %s after %s", r, *r.ErrorMessage, time.Since(began))
				}
				if d.closed == hangs || b.closed == hangs {
					t.Errorf("home closed %v, jail closed %v", d.closed, b.closed)
				}
				if hangs {
					close(d.end)
					synctest.Wait()
				}
				if !d.closed || d.committed || !b.closed {
					t.Errorf("home %+v, jail closed %v", &d.fakeHome, b.closed)
				}
			})
		})
	}
}

func TestHomeMountFailure(t *testing.T) {
	for name, d := range map[string]*fakeHome{
		"checked out": {checkOutErr: errors.New("gone")}, "staged": {stageErr: errors.New("gone")},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLease(inThread)
			b := &fakeJail{}
			runIn(t, l, b, d, nil)
			r := l.outcome.Result
			if *r.ErrorCode != string(proto.CodeThreadMount) || strings.Contains(*r.ErrorMessage, "gone") || b.ran ||
				d.saves > 0 {
				t.Errorf("%+v", r)
			}
		})
	}
}

func TestHomeOfALostLeaseIsNotSaved(t *testing.T) {
	d := &fakeHome{commit: &proto.Commit{}}
	l := newLease(inThread)
	runIn(t, l, &fakeJail{run: runUntilStopped}, d, func(context.CancelCauseFunc) { l.stop(proto.ErrLost) })
	if l.outcome != nil || d.saves > 0 || d.committed || !d.closed {
		t.Errorf("outcome %+v, home %+v", l.outcome, d)
	}
}

func TestHomeOfAProgramKilledAtShutdownIsNotSaved(t *testing.T) {
	d := &fakeHome{commit: &proto.Commit{}}
	l := newLease(inThread)
	runIn(t, l, &fakeJail{run: runUntilStopped}, d, func(kill context.CancelCauseFunc) { kill(worker.ErrShutdown) })
	if d.saves > 0 || d.committed || !d.closed || *l.outcome.Result.ErrorCode != string(proto.CodeWorkerLost) {
		t.Errorf("outcome %+v, home %+v", l.outcome, d)
	}
}
