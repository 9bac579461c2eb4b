package mount_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker"
	"github.com/bullpen-run/bullpen/worker/inject"
	"github.com/bullpen-run/bullpen/worker/jail/nsjail"
)

// lease is an execution that a test gives to a worker.
type lease struct {
	job     *proto.Job
	secrets map[string][]byte
	ended   func(worker.Outcome)
}

func (l *lease) Job() *proto.Job                                         { return l.job }
func (l *lease) Attempt() int                                            { return 1 }
func (l *lease) Context(ctx context.Context) context.Context             { return ctx }
func (l *lease) Secrets(context.Context) (map[string][]byte, error)      { return l.secrets, nil }
func (l *lease) Claim(c context.Context) (context.Context, int64, error) { return c, 0, nil }
func (l *lease) Cancelled() <-chan struct{}                              { return nil }
func (l *lease) Commit(context.Context, *proto.Commit) error             { return nil }
func (l *lease) Release()                                                {}
func (l *lease) Finish(_ context.Context, o worker.Outcome) (*proto.Record, error) {
	l.ended(o)
	return &proto.Record{Meta: l.job.Meta, Status: o.Result.Status(), Result: &o.Result}, nil
}

type jobs chan *lease

func (j jobs) Take(ctx context.Context) (worker.Lease, error) {
	select {
	case l := <-j:
		return l, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type output struct{}

func (output) Stream(proto.Stream) worker.Stream { return stream{} }
func (output) Close() (int64, bool)              { return 0, false }
func (output) OverBudget() bool                  { return false }
func (output) KeepDisplay(int) bool              { return true }
func (output) Display(int, *proto.Display)       {}

type stream struct{}

func (stream) Keep(n int) int              { return n }
func (stream) Write(p []byte) (int, error) { return len(p), nil }

// execute runs jobs at once in a worker and returns their results, and the worker's log.
func (w *world) execute(all ...*proto.Job) (results []proto.Result, log string) {
	w.t.Helper()
	queue, results := make(jobs, len(all)), make([]proto.Result, len(all))
	ctx, stop := context.WithCancel(w.t.Context())
	defer stop()
	var left sync.WaitGroup
	for i, job := range all {
		left.Add(1)
		queue <- &lease{job: job, secrets: w.secret, ended: func(o worker.Outcome) { results[i] = o.Result; left.Done() }}
	}
	go func() { left.Wait(); stop() }()
	var text bytes.Buffer
	run := &worker.Worker{
		Jobs: queue, Jails: w.maker, Home: nsjail.DefaultHome, Slots: len(all), Mounts: w.opener, Homes: w.homes,
		Log:  slog.New(slog.NewTextHandler(&text, nil)),
		Warm: worker.Warm{OnStart: func(proto.Language, worker.Start) {}}, Done: func(*proto.Record) {},
		OnHealth: func(error) {},
		Open:     func(context.Context, *proto.Job, int, int64) worker.Output { return output{} },
		Roots:    inject.Roots{},
	}
	must(w.t, run.Run(ctx, w.t.Context()))
	return results, text.String()
}

func job(code string, mounts ...proto.Mount) *proto.Job {
	return &proto.Job{
		Meta: proto.Meta{
			TraceID: proto.NewTraceID(), Language: proto.Python, Timeout: 100, MaxAttempts: 1,
			CreatedAt: time.Now(), HasMounts: true,
		},
		Code: code, Mounts: mounts, Sealed: []byte("x"), Sandbox: proto.DefaultSandbox(),
	}
}

// TestResults checks the results that clients get.
func TestResults(t *testing.T) {
	w := newWorld(t)
	w.put(map[string]string{"p/a": "a", "p/dir/x": "x"})
	secret := "not-a-secret"
	gone := w.s3("gone", "p")
	front := newFront(t, w.endpoint)
	front.refuse = "PUT"
	gone.S3.Endpoint = front.URL
	outside, _ := w.directory("shared")
	outside.Directory = "/etc"
	file, dir := w.s3("f", "p/a"), w.s3("f", "p/dir")
	file.At, dir.At = "a", "dir"
	without := w.s3("f", "p")
	without.S3.Credential = "other"
	results, log := w.execute(
		job("import sys; print(open('/data/f/a').read(), '"+secret+"'); open('/data/f/b', 'w').write('b'); sys.exit(3)",
			w.s3("f", "p")),
		job("import sys; open('/data/gone/b', 'w').write('b'); sys.exit(4)", gone),
		job("print('ran')", outside),
		job("print('ran')", without),
		job("print('ran')", file),
		job("import os; print(os.listdir('/data/f/dir'))", dir),
	)
	for i, want := range []struct {
		code     proto.ErrorCode
		exit     int
		program  int // -1 for none
		stdout   string
		contains string
	}{
		{"", 3, -1, "a ***\n", ""},
		{proto.CodeStorageWrite, -1, 4, "", `"/data/gone/b" (input/output error)`},
		{
			proto.CodeStorageMount, -1, -1, "",
			"shared could not be mounted, so the program was not started: its directory is outside",
		},
		{proto.CodeStorageMount, -1, -1, "", "credentials are missing"},
		{proto.CodeStorageMount, -1, -1, "", "is a file"},
		{"", 0, -1, "['x']\n", ""},
	} {
		r := results[i]
		code, message, program := "", "", -1
		if r.ErrorCode != nil {
			code, message = *r.ErrorCode, *r.ErrorMessage
		}
		if r.ProgramExitCode != nil {
			program = *r.ProgramExitCode
		}
		if code != string(want.code) || r.ExitCode != want.exit || program != want.program || r.Stdout != want.stdout ||
			!strings.Contains(message, want.contains) {
			t.Errorf("result %d is %q, %q, exit code %d, program's %d, stdout %q, stderr %q", i, code, message, r.ExitCode,
				program, r.Stdout, r.Stderr)
		}
		text, err := json.Marshal(r)
		must(t, err)
		if strings.Contains(string(text), secret) || strings.Contains(string(text), "127.0.0.1") {
			t.Errorf("result %d has the credentials or the server: %s", i, text)
		}
	}
	if strings.Contains(log, secret) {
		t.Errorf("the log has the credentials: %s", log)
	}
	if got := w.object("p/b"); got != "b" {
		t.Errorf("the object has %q", got)
	}
	w.nothingLeft()
}

// TestManyAtOnce runs 32 executions with mounts at once.
func TestManyAtOnce(t *testing.T) {
	w := newWorld(t)
	w.put(map[string]string{"p/a": strings.Repeat("a", 3<<20)})
	var all []*proto.Job
	for i := range 32 {
		program := fmt.Sprintf("print(len(open('/data/f/a').read())); open('/data/f/out%[1]d', 'w').write('%[1]d')", i)
		all = append(all, job(program, w.s3("f", "p")))
	}
	results, _ := w.execute(all...)
	for i, r := range results {
		if r.Stdout != "3145728\n" || !r.Success {
			t.Errorf("execution %d: %+v", i, r)
		}
		if got := w.object(fmt.Sprintf("p/out%d", i)); got != fmt.Sprint(i) {
			t.Errorf("the object of execution %d has %q", i, got)
		}
	}
	w.nothingLeft()
}
