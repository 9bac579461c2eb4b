package api_test

import (
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

func TestBatchProgress(t *testing.T) {
	now := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	running := proto.BatchState{
		Counts: proto.BatchCounts{Total: 1000, Waiting: 690, Running: 10, Succeeded: 280, Failed: 20},
		Rate:   2.004, StartedAt: now.Add(-time.Minute), UpdatedAt: now.Add(-time.Second),
	}
	for name, c := range map[string]struct {
		change func(*proto.Batch, *proto.BatchState)
		rate   float64
		left   int64 // seconds, -1 for unknown
	}{
		"running":       {nil, 2, 350},
		"slow":          {func(_ *proto.Batch, s *proto.BatchState) { s.Rate = 0.5 }, 0.5, 1400},
		"nothing ended": {func(_ *proto.Batch, s *proto.BatchState) { s.Rate = 0 }, 0, -1},
		"state is old":  {func(_ *proto.Batch, s *proto.BatchState) { s.UpdatedAt = now.Add(-time.Minute) }, 0, -1},
		"paused":        {func(b *proto.Batch, _ *proto.BatchState) { b.Paused = true }, 2, -1},
		"cancelled":     {func(b *proto.Batch, _ *proto.BatchState) { b.Cancelled = true }, 2, -1},
		"to be retried": {func(b *proto.Batch, _ *proto.BatchState) { b.Retries = 1 }, 0, -1},
		"ended long since": {func(_ *proto.Batch, s *proto.BatchState) {
			s.EndedAt, s.Notified = now.Add(-time.Hour), true
		}, 0, -1},
	} {
		batch, state := proto.Batch{ID: "bat_x", Total: 1000}, running
		if c.change != nil {
			c.change(&batch, &state)
		}
		got, left := api.NewBatch(&batch, &state, now), int64(-1)
		if got.TimeLeft != nil {
			left = *got.TimeLeft
		}
		if got.Rate != c.rate || left != c.left {
			t.Errorf("%s: rate %v, %d seconds left; want %v, %d", name, got.Rate, left, c.rate, c.left)
		}
	}
}
