package proto

import "testing"

func TestRetryAfter(t *testing.T) {
	for name, tt := range map[string]struct {
		stats QueueStats
		want  int
	}{
		"a slot is free":       {QueueStats{Slots: 8, FreeSlots: 1, StartRate: 2}, 1},
		"empty":                {QueueStats{Slots: 8, StartRate: 2}, 1},
		"one slot, slow":       {QueueStats{Slots: 1, StartRate: .2}, 5},
		"backlog":              {QueueStats{Slots: 8, Interactive: 13, StartRate: 2}, 7},
		"long backlog":         {QueueStats{Slots: 8, Interactive: 1000, StartRate: 2}, 30},
		"nothing has started":  {QueueStats{Slots: 8, Interactive: 3}, 10},
		"no worker":            {QueueStats{}, 10},
		"at its share":         {QueueStats{Slots: 8, FreeSlots: 1, StartRate: 2, AtShare: []string{"other", "acme"}}, 30},
		"another at its share": {QueueStats{Slots: 8, FreeSlots: 1, StartRate: 2, AtShare: []string{"other"}}, 1},
	} {
		if got := tt.stats.RetryAfter("acme"); got != tt.want {
			t.Errorf("%s: %d s, want %d", name, got, tt.want)
		}
	}
}
