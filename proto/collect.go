package proto

import "time"

// How old blobs of threads must be to be collected. What is younger may belong to an execution or upload that is still about to refer to it.
const (
	DefaultSafeAge = 24 * time.Hour
	MinSafeAge     = 2 * time.Hour
)

// Collected tells what a collection of the blobs of threads removed, of all organisations.
type Collected struct {
	Layers    Swept `json:"layers"`
	Objects   Swept `json:"objects"`
	Manifests Swept `json:"manifests"`
	Uploads   Swept `json:"uploads"`
}

// Swept is what was removed of one kind.
type Swept struct {
	Blobs int64 `json:"blobs" minimum:"0"`
	Bytes int64 `json:"bytes" minimum:"0"`
}

// Rebuilt tells what a rebuild of threads from the store came to, in threads of all organisations.
type Rebuilt struct {
	Made int64 `json:"made" minimum:"0" doc:"Threads that were rebuilt."`
	Kept int64 `json:"kept" minimum:"0" doc:"Threads that existed already."`
	Lost int64 `json:"lost" minimum:"0" doc:"Threads without a complete version."`
}
