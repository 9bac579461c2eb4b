package app

import (
	"runtime"

	"github.com/bullpen-run/bullpen/worker"
	"github.com/bullpen-run/bullpen/worker/jail/nsjail"
)

const (
	slotsPerCore  = 4
	memoryPerSlot = 1 << 30 // the default memory limit of a program
	mostZygotes   = 32
	maxOvercommit = 100
)

// SlotCount returns how many programs the worker runs at once. The default is 4 for each core,
// limited by the memory for programs of 1 GiB each and by the user ids. It is at least 1.
func (c *Config) SlotCount() int {
	if c.Slots > 0 {
		return c.Slots
	}
	n := int64(runtime.GOMAXPROCS(0)) * slotsPerCore // includes the CPU limit of the cgroup
	n = min(n, machineMemory()/memoryPerSlot, int64(c.UIDRange.Count/UIDsPerSlot))
	return int(max(n, 1))
}

// liveSandboxes returns how many live sandboxes the worker runs at once. The default is one for each
// GiB of memory, limited by the user ids that programs leave.
func (c *Config) liveSandboxes() int {
	switch {
	case c.Sandboxes < 0:
		return 0
	case c.Sandboxes > 0:
		return c.Sandboxes
	default:
		return int(min(machineMemory()/memoryPerSlot, int64(c.UIDRange.Count/UIDsPerSlot-c.SlotCount())))
	}
}

// sandboxMemory returns the maximum sum of the memory limits of live sandboxes, in bytes.
func (c *Config) sandboxMemory() int64 {
	memory := int64(c.SandboxMemory)
	if memory == 0 {
		memory = machineMemory()
	}
	return int64(min(float64(memory)*c.SandboxOvercommit, 1<<62))
}

// forks returns how many jails one zygote can have. For each slot there are four prewarmed jails,
// one that runs and one that is being removed.
func (c *Config) forks() int { return min(6*c.SlotCount(), nsjail.MaxForks) }

// warm returns the limits of prewarming. Each pool key gets two jails per core in addition to those
// that its rate requires. In total there are at most four jails per slot. Jails and zygotes use
// only user ids that remain when all slots are taken. Their memory is limited by the setting, or by
// a sixteenth of the machine's.
func (c *Config) warm() worker.Warm {
	slots, memory := c.SlotCount(), int64(c.WarmMemory)
	if memory == 0 {
		memory = machineMemory() / 16
	}
	left := c.UIDRange.Count/UIDsPerSlot - slots - c.liveSandboxes()
	most := min(4*slots, left)
	return worker.Warm{
		Spare: min(slots, 2*runtime.GOMAXPROCS(0)), Most: most, Zygotes: min(mostZygotes, (left-most)/(1+c.forks())),
		Memory: memory,
	}
}
