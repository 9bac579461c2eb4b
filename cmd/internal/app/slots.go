package app

import (
	"bufio"
	"math"
	"os"
	"runtime"
	"strconv"
	"strings"
)

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

// machineMemory gives how many bytes of memory this process and its jails can have: the machine's, or the limit of the
// container we are in. Where nothing can be read it does not bound anything.
func machineMemory() int64 {
	memory := int64(math.MaxInt64)
	for _, limit := range []string{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		text, err := os.ReadFile(limit)
		if err != nil {
			continue
		}
		if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
			memory = min(memory, n) // v2 says "max" where there is none, v1 a number close to the largest
		}
	}
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return memory
	}
	defer func() { _ = f.Close() }() // only read
	for s := bufio.NewScanner(f); s.Scan(); {
		rest, ok := strings.CutPrefix(s.Text(), "MemTotal:")
		if !ok {
			continue
		}
		if kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(rest, "kB")), 10, 64); err == nil {
			memory = min(memory, kib<<10)
		}
		break
	}
	return memory
}
