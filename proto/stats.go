package proto

// QueueStats is a snapshot of the queue.
type QueueStats struct {
	Workers     int     `json:"workers"` // live ones
	Slots       int     `json:"slots"`   // of all live workers
	FreeSlots   int     `json:"free_slots"`
	Queued      int     `json:"queued"`
	Running     int     `json:"running"`
	OldestQueue float64 `json:"oldest_queued_seconds"` // age of the oldest queued job in seconds; 0 if none is queued
}
