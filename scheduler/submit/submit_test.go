package submit_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/submit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// backend records the calls of a submitter, and fails those in errs.
type backend struct {
	calls  []string
	errs   map[string]error
	record *proto.Record // returned by Withdraw
	letter proto.DeadLetter
}

func (b *backend) call(name string) error {
	b.calls = append(b.calls, name)
	return b.errs[name]
}

func (b *backend) Submit(context.Context, *proto.Job) error { return b.call("store") }

func (b *backend) Lookup(context.Context, string, proto.TraceID) (*proto.Record, error) {
	return nil, b.call("lookup")
}

func (b *backend) Abandon(context.Context, *proto.Meta, string) error { return b.call("abandon") }

func (b *backend) Withdraw(_ context.Context, _ string, _ proto.TraceID, r proto.Result) (*proto.Record, error) {
	if b.record == nil {
		b.record = &proto.Record{Status: proto.StatusFailed, Result: &r}
	}
	return b.record, b.call("withdraw")
}

func (b *backend) Bind(_ context.Context, _, _, _ string, n proto.Binding) (proto.Binding, bool, error) {
	return n, true, b.call("bind")
}

func (b *backend) Bound(context.Context, string, string, string) (proto.Binding, error) {
	return proto.Binding{}, b.call("bound")
}

func (b *backend) Replace(_ context.Context, _, _, _ string, _, n proto.Binding) (proto.Binding, error) {
	return n, b.call("replace")
}

func (b *backend) Release(context.Context, string, string, string, proto.Binding) error {
	return b.call("release")
}

func (b *backend) Lock(context.Context, string, string, proto.TraceID) (*proto.Thread, string, error) {
	return nil, "w1", b.call("lock")
}

func (b *backend) Unlock(context.Context, string, string, proto.TraceID) error {
	return b.call("unlock")
}

func (b *backend) Get(context.Context, string) (*proto.DeadLetter, *proto.DeadContent, error) {
	letter := b.letter
	return &letter, &proto.DeadContent{Job: &proto.Job{}}, b.call("get")
}

func (b *backend) Mark(_ context.Context, l *proto.DeadLetter) error {
	b.letter = *l
	return b.call("mark")
}

func (b *backend) submitter(t *testing.T) *submit.Submitter {
	return &submit.Submitter{
		Jobs: b, Bindings: b, Threads: b, DeadLetters: b, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
}

func job() *proto.Job {
	return &proto.Job{Meta: proto.Meta{
		TraceID: proto.NewTraceID(), Org: "acme", Key: "k", ThreadID: "t",
		CreatedAt: time.Now(),
	}}
}

// Each failure undoes the steps before it, last first. Nothing is undone if the job may run.
func TestRollback(t *testing.T) {
	failed := errors.New("failed")
	rejection, busy := &proto.Rejection{Reason: proto.RejectedConcurrency}, &proto.BusyError{Thread: "t"}
	for name, tt := range map[string]struct {
		errs  map[string]error
		runs  bool // the execution started before it was withdrawn
		calls string
		want  error
	}{
		"accepted":      {nil, false, "bind lock store", nil},
		"key not bound": {map[string]error{"bind": failed}, false, "bind", failed},
		"thread busy":   {map[string]error{"lock": busy}, false, "bind lock release", busy},
		"lock unknown":  {map[string]error{"lock": failed}, false, "bind lock unlock release", failed},
		"refused":       {map[string]error{"store": rejection}, false, "bind lock store unlock release", rejection},
		"withdrawn": {
			map[string]error{"store": failed},
			false, "bind lock store withdraw unlock release",
			proto.ErrNotConfirmed,
		},
		"started": {map[string]error{"store": failed}, true, "bind lock store withdraw", nil},
		"unknown": {
			map[string]error{"store": failed, "withdraw": proto.ErrNotFound},
			false,
			"bind lock store withdraw unlock release", proto.ErrNotConfirmed,
		},
		"may run": {
			map[string]error{"store": failed, "withdraw": failed},
			false, "bind lock store withdraw",
			proto.ErrMayRun,
		},
		"rollback fails, too": {
			map[string]error{"store": rejection, "unlock": failed, "release": failed},
			false,
			"bind lock store unlock release", rejection,
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := &backend{errs: tt.errs}
			if tt.runs {
				b.record = &proto.Record{Status: proto.StatusRunning}
			}
			j := job()
			id, err := b.submitter(t).Submit(
				t.Context(), &proto.Submission{Job: j, IdempotencyKey: "i", WaitUntil: time.Now().Add(time.Minute)})
			if !errors.Is(err, tt.want) || err == nil && (id != j.TraceID || j.Prefer != "w1") {
				t.Errorf("returned %s, %v; want %v", id, err, tt.want)
			}
			if calls := strings.Join(b.calls, " "); calls != tt.calls {
				t.Errorf("calls %s, want %s", calls, tt.calls)
			}
		})
	}
}

// lockers locks threads like threads.Threads, and fails for some.
type lockers struct {
	*backend
	held []string
	fail map[string]error
}

func (l *lockers) Lock(_ context.Context, _, thread string, _ proto.TraceID) (*proto.Thread, string, error) {
	if err := l.fail[thread]; err != nil {
		return nil, "", err
	}
	l.held = append(l.held, thread)
	return nil, "worker of " + thread, nil
}

func (l *lockers) Unlock(_ context.Context, _, thread string, _ proto.TraceID) error {
	l.held = slices.DeleteFunc(l.held, func(id string) bool { return id == thread })
	return nil
}

// A job locks its thread and the volumes that it can change, or nothing.
func TestThreadsAreLockedTogether(t *testing.T) {
	volume := proto.VolumeThread
	mounts := []proto.Mount{
		{Slug: "z", Kind: proto.MountVolume, Bytes: 1},
		{Slug: "a", Kind: proto.MountVolume, Bytes: 1},
		{Slug: "read", Kind: proto.MountVolume, Bytes: 1, ReadOnly: true},
		{Slug: "dir", Kind: proto.MountDirectory, Directory: "/d"},
	}
	failed := errors.New("failed")
	for name, tt := range map[string]struct {
		thread string
		fail   map[string]error
		store  error
		held   []string
		prefer string
	}{
		"accepted":         {"t", nil, nil, []string{"t", volume("a"), volume("z")}, "worker of t"},
		"after volumes":    {"zz", nil, nil, []string{volume("a"), volume("z"), "zz"}, "worker of zz"},
		"no thread":        {"", nil, nil, []string{volume("a"), volume("z")}, "worker of " + volume("a")},
		"first is busy":    {"t", map[string]error{"t": &proto.BusyError{Thread: "t"}}, nil, []string{}, ""},
		"last is busy":     {"t", map[string]error{volume("z"): &proto.BusyError{Thread: volume("z")}}, nil, []string{}, ""},
		"last is unknown":  {"t", map[string]error{volume("z"): failed}, nil, []string{}, ""},
		"refused by queue": {"t", nil, &proto.Rejection{}, []string{}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := &backend{errs: map[string]error{"store": tt.store}}
			l := &lockers{backend: b, held: []string{}, fail: tt.fail}
			s := b.submitter(t)
			s.Threads = l
			j := job()
			j.ThreadID = tt.thread
			j.SetMounts(mounts)
			_, err := s.Submit(t.Context(), &proto.Submission{Job: j})
			if accepted := tt.prefer != ""; accepted != (err == nil) || accepted && j.Prefer != tt.prefer ||
				!slices.Equal(l.held, tt.held) {
				t.Errorf("%v, prefers %q, holds %q; want %q, %q", err, j.Prefer, l.held, tt.prefer, tt.held)
			}
		})
	}
}

// A requeued dead letter is marked before its job is stored, and unmarked if that fails.
func TestRequeueRollback(t *testing.T) {
	for name, tt := range map[string]struct {
		errs  map[string]error
		calls string
	}{
		"accepted": {nil, "get mark lock store"},
		"refused":  {map[string]error{"store": &proto.Rejection{}}, "get mark lock store unlock mark"},
	} {
		t.Run(name, func(t *testing.T) {
			b, id := &backend{errs: tt.errs}, proto.NewTraceID()
			letter, err := b.submitter(t).Requeue(t.Context(), "l", id, func(*proto.Job) (*proto.Job, error) {
				j := job()
				j.TraceID = id
				return j, nil
			})
			if (err == nil) != (tt.errs == nil) || (letter.Requeued == id) != (err == nil) ||
				b.letter.Requeued != letter.Requeued {
				t.Errorf("%+v, %v; stored %+v", letter, err, b.letter)
			}
			if calls := strings.Join(b.calls, " "); calls != tt.calls {
				t.Errorf("calls %s, want %s", calls, tt.calls)
			}
		})
	}
}

// A cancelled request still completes its steps and its rollback.
func TestSubmitContinuesWithoutTheClient(t *testing.T) {
	b := &backend{errs: map[string]error{"store": &proto.Rejection{}}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.submitter(t).Submit(ctx, &proto.Submission{Job: job()}); err == nil {
		t.Error("no rejection")
	}
	if calls := strings.Join(b.calls, " "); calls != "lock store unlock" {
		t.Errorf("calls %s", calls)
	}
}
