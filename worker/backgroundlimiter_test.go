package worker_test

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// blockingJails creates jails whose background programs run until the test lets one end.
type blockingJails struct {
	started atomic.Int64 // background programs
	end     chan struct{}
}

func (b *blockingJails) Prepare(context.Context, jail.Spec) (jail.Jail, error) {
	return &fakeJail{run: func(ctx context.Context, p jail.Program) (jail.Outcome, error) {
		if !p.LowWeight {
			return jail.Outcome{Kind: jail.Exited}, nil
		}
		b.started.Add(1)
		select {
		case <-b.end:
			return jail.Outcome{Kind: jail.Exited}, nil
		case <-ctx.Done():
			return jail.Outcome{Kind: jail.Killed}, nil
		}
	}}, nil
}

func (b *blockingJails) Zygote(context.Context, jail.Spec) (jail.Zygote, error) {
	return nil, errors.New("zygotes are not supported")
}

// atOnce is how many background jobs start at a time beside interactive ones.
var atOnce = int64(max(1, runtime.GOMAXPROCS(0)/2))

// withBackground runs a worker with twice as many slots as atOnce, and calls f in a synctest bubble.
// fill sends a background job for every slot and returns how many of their programs have started.
func withBackground(t *testing.T, f func(jails *blockingJails, queued jobChan, fill func() int64)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		jails, queued := &blockingJails{end: make(chan struct{})}, make(jobChan)
		w := &worker.Worker{
			Jobs: queued, Jails: jails, Images: blockingImages{}, Home: "/home/u", Slots: int(2 * atOnce),
			Log:  slog.New(slog.DiscardHandler),
			Warm: worker.Warm{OnStart: func(proto.Language, worker.Start) {}},
			Done: func(*proto.Record) {}, OnHealth: func(error) {},
			Open: func(context.Context, *proto.Job, int, int64) worker.Output { return output{} },
		}
		done := make(chan error)
		go func() { done <- w.Run(ctx, ctx) }()
		f(jails, queued, func() int64 {
			for range 2 * atOnce {
				queued <- newLease(func(job *proto.Job) { job.Mode = proto.ModeAsync })
			}
			synctest.Wait()
			return jails.started.Load()
		})
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestBackgroundJobsFillTheSlotsWithoutInteractiveOnes(t *testing.T) {
	withBackground(t, func(_ *blockingJails, _ jobChan, fill func() int64) {
		if n := fill(); n != 2*atOnce {
			t.Errorf("%d of %d have started", n, 2*atOnce)
		}
	})
}

func TestFewBackgroundJobsStartAtATimeBesideInteractiveOnes(t *testing.T) {
	withBackground(t, func(jails *blockingJails, queued jobChan, fill func() int64) {
		queued <- newLease(nil)
		synctest.Wait()
		if n := fill(); n != atOnce {
			t.Errorf("%d have started, want %d", n, atOnce)
		}
		jails.end <- struct{}{}
		synctest.Wait()
		if n := jails.started.Load(); n != atOnce+1 {
			t.Errorf("%d have started when one had ended, want %d", n, atOnce+1)
		}
	})
}

func TestLongBackgroundJobsDoNotDelayOthers(t *testing.T) {
	withBackground(t, func(jails *blockingJails, queued jobChan, fill func() int64) {
		queued <- newLease(nil)
		synctest.Wait()
		fill()
		time.Sleep(time.Second)
		synctest.Wait()
		if n := jails.started.Load(); n != 2*atOnce {
			t.Errorf("%d of %d have started after a second", n, 2*atOnce)
		}
	})
}

func TestBackgroundJobsFillTheSlotsSomeTimeAfterInteractiveOnes(t *testing.T) {
	withBackground(t, func(_ *blockingJails, queued jobChan, fill func() int64) {
		queued <- newLease(nil)
		time.Sleep(time.Minute)
		if n := fill(); n != 2*atOnce {
			t.Errorf("%d of %d have started", n, 2*atOnce)
		}
	})
}

func TestShutdownEndsBackgroundJobsThatWait(t *testing.T) {
	withBackground(t, func(jails *blockingJails, queued jobChan, fill func() int64) {
		queued <- newLease(nil)
		synctest.Wait()
		fill() // withBackground stops the worker meanwhile
	})
}
