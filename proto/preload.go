package proto

import "time"

// PreloadFailure is why a worker cannot preload the modules of a sandbox.
type PreloadFailure struct {
	Error  string    `json:"error"`
	Worker string    `json:"worker,omitempty"` // the worker that failed; empty if an earlier version stored it
	At     time.Time `json:"at"`               // of the last attempt
}
