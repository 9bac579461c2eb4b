package api

import "github.com/bullpen-run/bullpen/proto"

// Worker is a live worker.
type Worker struct {
	Name      string `json:"name" doc:"Unique to the process. A restarted worker has another name."`
	Pool      string `json:"pool" doc:"The pool of workers that can run the same executions, see autoscaling."`
	Version   string `json:"version"`
	StartedAt Time   `json:"started_at"`
	Slots     int    `json:"slots" minimum:"0" doc:"How many executions it runs at once."`
	Running   int    `json:"running" minimum:"0" doc:"Executions in its slots."`
	Sandboxes int    `json:"sandboxes" minimum:"0" doc:"How many live sandboxes it runs at once, besides executions."`
	// RunningSandboxes are those that it runs.
	RunningSandboxes  int               `json:"running_sandboxes" minimum:"0" doc:"Live sandboxes that it runs."`
	SandboxMemory     int64             `json:"sandbox_memory" minimum:"0" doc:"Maximum sum of the memory limits of its live sandboxes in bytes, including overcommit; 0 if there is no limit or it runs none."`
	SandboxMemoryFree int64             `json:"sandbox_memory_free" minimum:"0" doc:"Unused part of sandbox_memory. A sandbox with a higher memory limit cannot start on this worker now."`
	Draining          bool              `json:"draining" doc:"It finishes its executions and gets no others."`
	Capabilities      []string          `json:"capabilities" doc:"What its sandboxes can have: language:NAME, images, architecture:NAME, network, disk, threads, secrets, mounts, volumes; in live sandboxes agent:NAME and agent:NAME@VERSION for installed programs of coding agents."`
	Architecture      *string           `json:"architecture" enum:"amd64,arm64" doc:"Of its machine. It runs no programs in images of another one. null for a worker of an older version."`
	Languages         map[string]string `json:"languages" doc:"The versions of the machine's own runtimes, for sandboxes without an image."`
	Images            int               `json:"cached_images" minimum:"0" doc:"Unpacked images on its disk."`
	Threads           int               `json:"cached_threads" minimum:"0" doc:"Homes of threads on its disk."`
	Machine           Machine           `json:"machine"`
}

// Machine is the load of a worker's machine.
type Machine struct {
	_ struct{} `doc:"The load of its machine, to which other programs may contribute."`

	CPUs            int     `json:"cpus" minimum:"0" doc:"Processors."`
	CPUsBusy        float64 `json:"cpus_busy" minimum:"0" doc:"Busy processors, on average over the last seconds."`
	Memory          int64   `json:"memory" minimum:"0" doc:"Bytes."`
	MemoryAvailable int64   `json:"memory_available" minimum:"0" doc:"Bytes that programs can get without swapping."`
}

// Workers is the list of all live workers.
type Workers struct {
	Workers []Worker `json:"workers"`
}

// NewWorker returns the form of a worker.
func NewWorker(w *proto.Worker) Worker {
	languages := make(map[string]string)
	for language, version := range w.Languages {
		languages[string(language)] = version
	}
	return Worker{
		Name: w.Name, Pool: w.Pool, Version: w.Version, StartedAt: Time{w.StartedAt}, Slots: w.Slots, Running: w.Running,
		Sandboxes: w.Sandboxes, RunningSandboxes: w.RunningSandboxes,
		SandboxMemory: w.SandboxMemory, SandboxMemoryFree: w.SandboxMemoryFree,
		Draining:     w.Draining,
		Capabilities: w.Capabilities, Architecture: optional(w.Architecture), Languages: languages, Images: w.Images,
		Threads: w.Threads,
		Machine: Machine{
			CPUs: w.Machine.CPUs, CPUsBusy: w.Machine.CPUsBusy, Memory: w.Machine.Memory,
			MemoryAvailable: w.Machine.MemoryAvailable,
		},
	}
}
