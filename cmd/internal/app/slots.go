package app

import "runtime"

const (
	slotsPerCore  = 4
	memoryPerSlot = 1 << 30 // what a program may use unless its key says otherwise
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

// warmMemory is how much memory jails may hold that are made before they are asked for, in bytes: what is set, else a sixteenth of the
// machine's.
func (c *Config) warmMemory() int64 {
	if c.WarmMemory > 0 {
		return int64(c.WarmMemory)
	}
	return machineMemory() / 16
}

// warmJails is how many such jails there may be: four for each slot, as far as the user ids go when all slots are taken.
func (c *Config) warmJails() int {
	slots := c.SlotCount()
	return min(4*slots, c.UIDRange.Count/UIDsPerSlot-slots)
}
