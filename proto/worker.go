package proto

import "time"

// Worker describes a live worker.
type Worker struct {
	Name      string    `json:"name"` // unique to the process
	Pool      string    `json:"pool"`
	Version   string    `json:"version"`
	StartedAt time.Time `json:"started_at"`
	Slots     int       `json:"slots"`
	Running   int       `json:"running"`             // executions that were assigned to the slots
	Sandboxes int       `json:"sandboxes,omitempty"` // live sandboxes that it runs at once
	// RunningSandboxes are those that it runs.
	RunningSandboxes int `json:"running_sandboxes,omitempty"`
	// SandboxMemory is the maximum sum of the memory limits of live sandboxes, in bytes; 0 for no
	// limit. SandboxMemoryFree is the unused part.
	SandboxMemory     int64    `json:"sandbox_memory,omitempty"`
	SandboxMemoryFree int64    `json:"sandbox_memory_free,omitempty"`
	Draining          bool     `json:"draining"`     // no executions are assigned
	Capabilities      []string `json:"capabilities"` // what its slots can run, such as "network" or "language:python"
	// Architecture is the machine's architecture in Go's terms, such as "amd64". It is empty for a
	// worker of an older version.
	Architecture string              `json:"architecture,omitempty"`
	Languages    map[Language]string `json:"languages"` // the versions of the runtimes outside of images
	Images       int                 `json:"images"`    // unpacked ones that are kept
	Threads      int                 `json:"threads"`   // homes that are kept
	Machine      Machine             `json:"machine"`
}

// Machine is the load of a worker's machine, including other programs.
type Machine struct {
	CPUs            int     `json:"cpus"`             // processors
	CPUsBusy        float64 `json:"cpus_busy"`        // of them busy, on average over the last seconds
	Memory          int64   `json:"memory"`           // bytes
	MemoryAvailable int64   `json:"memory_available"` // bytes that programs can get without swapping
}
