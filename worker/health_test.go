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

// maker is a fake jail maker whose failures the test controls.
type maker struct {
	broken        atomic.Bool
	barren        atomic.Bool     // Zygote fails
	sterile       atomic.Bool     // Fork fails
	parents       atomic.Int32    // number of live zygotes
	withoutPython bool            // Zygote fails for a spec with an interpreter
	made          func(jail.Spec) // called with the spec of each zygote; may be nil
}

func (m *maker) Prepare(context.Context, jail.Spec) (jail.Jail, error) {
	if m.broken.Load() {
		return nil, errors.New("control groups are gone")
	}
	return &box{run: outcome(jail.Outcome{Kind: jail.Exited})}, nil
}

// Zygote returns a zygote whose forks are the jails that Prepare returns.
func (m *maker) Zygote(_ context.Context, spec jail.Spec) (jail.Zygote, error) {
	if m.barren.Load() {
		return nil, errors.New("user namespaces are not allowed")
	}
	if spec.Ahead != nil && m.withoutPython {
		return nil, errors.New("there is no python3")
	}
	m.parents.Add(1)
	if m.made != nil {
		m.made(spec)
	}
	return &parent{maker: m}, nil
}

type parent struct {
	maker *maker
	dead  atomic.Bool
}

func (p *parent) Fork(ctx context.Context, spec jail.Spec) (jail.Jail, error) {
	if p.dead.Load() || p.maker.sterile.Load() {
		return nil, errors.New("nothing comes of it")
	}
	return p.maker.Prepare(ctx, spec)
}

func (p *parent) Alive() bool            { return !p.dead.Load() }
func (p *parent) Memory() (int64, error) { return 1, nil }

func (p *parent) Close() error {
	p.maker.parents.Add(-1)
	p.dead.Store(true)
	return nil
}

func TestWorkerThatCanMakeNoJailTakesNoJobs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		m := &maker{}
		m.broken.Store(true)
		queued := jobs{make(chan *lease, 3)}
		var told error
		w := &worker.Worker{
			Jobs: queued, Jails: m, Home: "/home/u", Slots: 1, Log: slog.New(slog.DiscardHandler),
			Warm: worker.Warm{Taken: func(proto.Language, worker.Start) {}},
			Done: func(*proto.Record) {}, OnHealth: func(err error) { told = err },
			Open: func(context.Context, proto.TraceID, int, int64) worker.Output { return output{} },
		}
		first, second := newLease(nil), newLease(nil)
		queued.left <- first
		queued.left <- second
		done := make(chan error)
		go func() { done <- w.Run(ctx, ctx) }()
		time.Sleep(time.Minute)
		synctest.Wait()
		if *first.ending.Result.ErrorCode != string(proto.CodeSandboxStart) {
			t.Errorf("the first job: %+v", first.ending.Result)
		}
		if second.ending != nil || told == nil || told.Error() != "control groups are gone" {
			t.Errorf("the second job: %+v; the worker says %v", second.ending, told)
		}
		m.broken.Store(false)
		time.Sleep(time.Minute)
		synctest.Wait()
		if second.ending == nil || !second.ending.Result.Success || told != nil {
			t.Errorf("when it can again: %+v; the worker says %v", second.ending, told)
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
