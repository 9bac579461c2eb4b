package proto

import "time"

// PreloadFailure is why a worker cannot preload the modules of a sandbox.
type PreloadFailure struct {
	Error string    `json:"error"`
	At    time.Time `json:"at"` // of the last attempt
}
