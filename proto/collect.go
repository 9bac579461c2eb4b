package proto

import "time"

// The age at which unreferenced blobs of threads are garbage. A younger blob may belong to an
// execution or upload in progress.
const (
	DefaultSafeAge = 24 * time.Hour
	MinSafeAge     = 2 * time.Hour
)

// Collected is what a garbage collection removed from the thread store, across organisations.
type Collected struct {
	Layers    Swept `json:"layers"`
	Objects   Swept `json:"objects"`
	Manifests Swept `json:"manifests"`
	Uploads   Swept `json:"uploads"`
}

// Swept is the number and size of removed blobs of one kind.
type Swept struct {
	Blobs int64 `json:"blobs" minimum:"0"`
	Bytes int64 `json:"bytes" minimum:"0"`
}

// Rebuilt is the outcome of rebuilding the threads of all organisations from the store.
type Rebuilt struct {
	Made int64 `json:"made" minimum:"0" doc:"Threads that were rebuilt."`
	Kept int64 `json:"kept" minimum:"0" doc:"Threads that existed already."`
	Lost int64 `json:"lost" minimum:"0" doc:"Threads without a complete version."`
}
