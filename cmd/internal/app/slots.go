package app

import (
	"runtime"

	"github.com/bullpen-run/bullpen/worker"
	"github.com/bullpen-run/bullpen/worker/jail/nsjail"
)

const (
	slotsPerCore  = 4
	memoryPerSlot = 1 << 30 // what a program may use unless its key says otherwise
	mostZygotes   = 32
)

// SlotCount gives how many programs the worker runs at once: what is set, else 4 for each core, yet no more than find memory
// for their full limit of 1 GiB, no more than the user ids suffice for, and at least 1.
func (c *Config) SlotCount() int {
	if c.Slots > 0 {
		return c.Slots
	}
	n := int64(runtime.GOMAXPROCS(0)) * slotsPerCore // it knows the CPU limit of our cgroup
	n = min(n, machineMemory()/memoryPerSlot, int64(c.UIDRange.Count/UIDsPerSlot))
	return int(max(n, 1))
}

// forks is how many jails one parent can have, for each slot: four, as are kept ready, one that runs, and one that is being cleared away.
func (c *Config) forks() int { return min(6*c.SlotCount(), nsjail.MostForks) }

// warm says what jails are made before they are asked for: of a kind two for each core, beside those that its rate asks for; four for each
// slot in all, and parents, as far as the user ids go when all slots are taken; and no more than fit into the memory that is set, else into
// a sixteenth of the machine's.
func (c *Config) warm() worker.Warm {
	slots, memory := c.SlotCount(), int64(c.WarmMemory)
	if memory == 0 {
		memory = machineMemory() / 16
	}
	left := c.UIDRange.Count/UIDsPerSlot - slots
	most := min(4*slots, left)
	return worker.Warm{
		Spare: min(slots, 2*runtime.GOMAXPROCS(0)), Most: most, Zygotes: min(mostZygotes, (left-most)/(1+c.forks())), Memory: memory,
	}
}
