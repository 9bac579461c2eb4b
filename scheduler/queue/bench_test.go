package queue_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// BenchmarkCycle measures the overhead of the queue: submission, assignment, claim, result,
// notification.
func BenchmarkCycle(b *testing.B) {
	s := storetest.Server(b)
	st := storetest.Open(b, s)
	q := &queue.Queue{Store: st}
	quiet := slog.New(slog.DiscardHandler)
	d := &queue.Dispatcher{Store: st, Instance: "i", Log: quiet}
	slots := &queue.Slots{
		Store: st, Worker: "w", Total: 4,
		Capabilities: []string{queue.CapabilityLanguage(proto.Python)}, Log: quiet,
	}
	ctx, cancel := context.WithCancel(context.Background())
	b.Cleanup(cancel)
	go func() { _ = d.Run(ctx) }()
	go func() { _ = slots.Run(ctx) }()
	steps := map[string]time.Duration{}
	go func() {
		for {
			l, err := slots.Take(ctx)
			if err != nil {
				return
			}
			began := time.Now()
			if _, _, err := l.Claim(ctx); err != nil {
				b.Error(err)
			}
			steps["claim"] += time.Since(began)
			began = time.Now()
			if _, err := l.Finish(ctx, outcome("1\n")); err != nil && ctx.Err() == nil { // the benchmark may be over
				b.Error(err)
			}
			steps["finish"] += time.Since(began)
		}
	}()
	if _, err := q.Stats(ctx); err != nil {
		b.Fatal(err)
	}
	var submit time.Duration
	for b.Loop() {
		job := storetest.Job("acme", "k", proto.ModeInline)
		began := time.Now()
		if err := q.Submit(ctx, job); err != nil {
			b.Fatal(err)
		}
		submit += time.Since(began)
		if _, err := q.Wait(ctx, job.Org, job.TraceID); err != nil {
			b.Fatal(err)
		}
	}
	n := float64(b.N)
	b.ReportMetric(float64(submit.Microseconds())/n, "submit-µs/op")
	b.ReportMetric(float64(steps["claim"].Microseconds())/n, "claim-µs/op")
	b.ReportMetric(float64(steps["finish"].Microseconds())/n, "finish-µs/op")
}
