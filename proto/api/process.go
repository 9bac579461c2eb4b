package api

import (
	"maps"

	"github.com/bullpen-run/bullpen/proto"
)

// Process is a running process of the deployment.
type Process struct {
	Name      string            `json:"name" doc:"Unique among the running processes."`
	Roles     []string          `json:"roles"`
	Version   string            `json:"version"`
	StartedAt Time              `json:"started_at"`
	Problems  []Problem         `json:"problems" doc:"What it needs and does not have, as of its last check."`
	Missing   map[string]string `json:"missing" doc:"Why its worker lacks a capability, by capability. Other workers may have it."`
	Disk      *DiskSpace        `json:"disk" doc:"The disk of its data directory; null if it stores no growing data there."`
}

// DiskSpace is the free space of a disk.
type DiskSpace struct {
	Free    int64 `json:"free" minimum:"0" doc:"Bytes."`
	Reserve int64 `json:"reserve" minimum:"0" doc:"Bytes below which executions and uploads are rejected: --disk-reserve."`
}

// Problem is something that a process needs and does not have.
type Problem struct {
	Need    string `json:"need" enum:"store,redis,worker,disk"`
	Message string `json:"message" doc:"Why, and what to do."`
}

// Processes is the list of all processes.
type Processes struct {
	Processes []Process `json:"processes"`
}

// NewProcesses returns the form of processes.
func NewProcesses(list []proto.Process) Processes {
	all := make([]Process, len(list))
	for i, p := range list {
		all[i] = Process{
			Name: p.Name, Roles: p.Roles, Version: p.Version, StartedAt: Time{p.StartedAt},
			Problems: make([]Problem, len(p.Problems)), Missing: map[string]string{},
		}
		if p.Disk != nil {
			all[i].Disk = new(DiskSpace(*p.Disk))
		}
		for n, problem := range p.Problems {
			all[i].Problems[n] = Problem(problem)
		}
		maps.Copy(all[i].Missing, p.Missing)
	}
	return Processes{all}
}
