package worker_test

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker"
)

// laterJobs hands out leases as they come.
type laterJobs chan *lease

func (j laterJobs) Take(ctx context.Context) (worker.Lease, error) {
	select {
	case l := <-j:
		return l, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func TestTheFirstExecutionFindsTheJailThatWasExpected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		queued, ready := make(laterJobs), []bool{}
		w := &worker.Worker{
			Jobs: queued, Jails: &maker{}, Home: "/home/u", Slots: 1, Log: slog.New(slog.DiscardHandler),
			Warm: worker.Warm{
				Spare: 1, Most: 1, Memory: 1 << 30, Languages: []proto.Language{proto.Python},
				Taken: func(_ proto.Language, was bool) { ready = append(ready, was) },
			},
			Done: func(*proto.Record) {}, Fit: func(error) {},
			Open: func(context.Context, proto.TraceID, int, int64) worker.Output { return output{} },
		}
		done := make(chan error)
		go func() { done <- w.Run(ctx, ctx) }()
		synctest.Wait()
		time.Sleep(time.Second)
		queued <- newLease(nil)
		synctest.Wait()
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if len(ready) != 1 || !ready[0] {
			t.Errorf("a jail was ready: %v", ready)
		}
	})
}
