package queue

import (
	"math"
	"testing"
	"time"
)

func TestOutputBudgetIsForgottenWithinTheHour(t *testing.T) {
	b := outputBudget{limit: 3600, used: map[string]*outputUse{}}
	now := noon
	for _, step := range []struct {
		after              time.Duration
		settle, need, want int64
		reserved           int64
	}{
		{need: 100, want: 3000, reserved: 3000},
		{need: 100, want: 3000, reserved: 600},
		{need: 1, want: 1},
		{after: 10 * time.Second, need: 11, want: 11},
		{need: 10, want: 20, reserved: 10},
		{settle: -500, need: 100, want: 1000, reserved: 500},
		{settle: 1800, need: 1, want: 1}, // stored without a reservation
		{after: 30 * time.Minute, need: 1, want: 1},
		{after: time.Minute, need: 1, want: 100, reserved: 60},
		{after: 3 * time.Hour, need: 1, want: 9999, reserved: 3600},
		{after: -time.Hour, need: 1, want: 1}, // the clock was set back
	} {
		now = now.Add(step.after)
		b.settle("acme", step.settle, now)
		if got := b.reserve("acme", step.need, step.want, now); got != step.reserved {
			t.Errorf("%+v: reserved %d", step, got)
		}
		if got := b.reserve("other", 1, 1, now); got != 1 {
			t.Errorf("%+v: another organisation reserved %d", step, got)
		}
	}
	if b.forget(now); len(b.used) != 2 {
		t.Errorf("%d organisations are left", len(b.used))
	}
	if b.forget(now.Add(2 * time.Hour)); len(b.used) != 0 {
		t.Errorf("%d organisations are left after two hours", len(b.used))
	}
	if got := (&outputBudget{}).reserve("acme", 1, 1, now); got != math.MaxInt64 {
		t.Errorf("reserved %d without a limit", got)
	}
}
