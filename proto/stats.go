package proto

import (
	"math"
	"slices"
)

// QueueStats is a snapshot of the queue.
type QueueStats struct {
	Workers     int     `json:"workers"` // live ones
	Slots       int     `json:"slots"`   // of all live workers
	FreeSlots   int     `json:"free_slots"`
	Queued      int     `json:"queued"`
	Delayed     int     `json:"delayed"`     // accepted, and queued later
	Interactive int     `json:"interactive"` // queued inline and streaming executions
	Running     int     `json:"running"`
	OldestQueue float64 `json:"oldest_queued_seconds"` // age of the oldest queued job in seconds; 0 if none is queued
	// starts per second while others were queued, lately; 0 if there were none
	StartRate float64 `json:"start_rate"`
	// AtShare are the organisations that get no further slot while others submit, even if one is
	// free.
	AtShare []string `json:"at_share,omitempty"`
}

const (
	maxRetryAfter     = 30
	unknownRetryAfter = 10 // if nothing is known to have started lately
)

// RetryAfter estimates in how many seconds, from 1 to 30, org will find a free slot for an
// interactive execution: when all interactive executions queued now will have started. An
// organisation at its share waits for its own programs to end.
func (s *QueueStats) RetryAfter(org string) int {
	switch {
	case slices.Contains(s.AtShare, org):
		return maxRetryAfter
	case s.FreeSlots > 0 && s.Interactive == 0:
		return 1
	case s.StartRate == 0:
		return unknownRetryAfter
	}
	seconds := math.Ceil(float64(s.Interactive+1) / s.StartRate)
	return int(min(max(seconds, 1), maxRetryAfter))
}
