package proto

import "time"

// Process is a running process of bullpen as it describes itself.
type Process struct {
	Name      string    `json:"name"` // unique among the running processes
	Roles     []string  `json:"roles"`
	Version   string    `json:"version"`
	StartedAt time.Time `json:"started_at"`
	// Problems are the unmet needs found by the last check, in the order of Need.
	Problems []Problem `json:"problems"`
	// Missing is why its worker does not have a capability, by capability. That is no problem if other
	// workers have it.
	Missing map[string]string `json:"missing,omitempty"`
	// Disk is the disk of its data directory; nil if it stores no growing data there.
	Disk *DiskSpace `json:"disk,omitempty"`
}

// DiskSpace is the free space of a disk, in bytes.
type DiskSpace struct {
	Free    int64 `json:"free"`
	Reserve int64 `json:"reserve"` // below which no more is accepted
}

// Problem is an unmet need of a process.
type Problem struct {
	Need    string `json:"need"`    // what is missing: store, redis, worker or disk
	Message string `json:"message"` // why, and what to do
}
