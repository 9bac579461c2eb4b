package worker_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// fakeJails is a fake Jails whose failures the test controls.
type fakeJails struct {
	broken        atomic.Bool
	zygoteFails   atomic.Bool     // Zygote fails
	forkFails     atomic.Bool     // Fork fails
	zygotes       atomic.Int32    // number of live zygotes
	withoutPython bool            // Zygote fails for a spec with an interpreter
	onZygote      func(jail.Spec) // called with the spec of each zygote; may be nil
}

func (m *fakeJails) Prepare(context.Context, jail.Spec) (jail.Jail, error) {
	if m.broken.Load() {
		return nil, errors.New("no cgroups")
	}
	return &fakeJail{run: exited(jail.Outcome{Kind: jail.Exited})}, nil
}

// Zygote returns a zygote whose forks are the jails that Prepare returns.
func (m *fakeJails) Zygote(_ context.Context, spec jail.Spec) (jail.Zygote, error) {
	if m.zygoteFails.Load() {
		return nil, errors.New("user namespaces are not allowed")
	}
	if spec.Prewarm != nil && m.withoutPython {
		return nil, errors.New("there is no python3")
	}
	m.zygotes.Add(1)
	if m.onZygote != nil {
		m.onZygote(spec)
	}
	return &fakeZygote{jails: m}, nil
}

type fakeZygote struct {
	jails *fakeJails
	dead  atomic.Bool
}

func (z *fakeZygote) Fork(ctx context.Context, spec jail.Spec) (jail.Jail, error) {
	if z.dead.Load() || z.jails.forkFails.Load() {
		return nil, errors.New("fork failed")
	}
	return z.jails.Prepare(ctx, spec)
}

func (z *fakeZygote) Alive() bool            { return !z.dead.Load() }
func (z *fakeZygote) Memory() (int64, error) { return 1, nil }

func (z *fakeZygote) Close() error {
	z.jails.zygotes.Add(-1)
	z.dead.Store(true)
	return nil
}

func TestUnhealthyWorkerAcceptsNoJobs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		m := &fakeJails{}
		m.broken.Store(true)
		queued := jobs{make(chan *lease, 3)}
		var health error
		w := &worker.Worker{
			Jobs: queued, Jails: m, Home: "/home/u", Slots: 1, Log: slog.New(slog.DiscardHandler),
			Warm: worker.Warm{OnStart: func(proto.Language, worker.Start) {}},
			Done: func(*proto.Record) {}, OnHealth: func(err error) { health = err },
			Open: func(context.Context, *proto.Job, int, int64) worker.Output { return output{} },
		}
		first, second := newLease(nil), newLease(nil)
		queued.left <- first
		queued.left <- second
		done := make(chan error)
		go func() { done <- w.Run(ctx, ctx) }()
		time.Sleep(time.Minute)
		synctest.Wait()
		if *first.outcome.Result.ErrorCode != string(proto.CodeSandboxStart) {
			t.Errorf("the first job: %+v", first.outcome.Result)
		}
		if second.outcome != nil || health == nil || health.Error() != "no cgroups" {
			t.Errorf("the second job: %+v; health %v", second.outcome, health)
		}
		m.broken.Store(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		if second.outcome == nil || !second.outcome.Result.Success || health != nil {
			t.Errorf("when healthy again: %+v; health %v", second.outcome, health)
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
