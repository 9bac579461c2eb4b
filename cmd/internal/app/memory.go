package app

import (
	"bufio"
	"math"
	"os"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// minMemory is enough for the server itself, and for a few of the largest requests beside it.
	minMemory = 256 * proto.MiB
	// programMemory is what the program itself has in memory, which the garbage collector does not count.
	programMemory = 48 << 20
	// memoryShare is the part of the machine's memory that a process takes for itself unless it is told: most is for programs.
	memoryShare = 4
	// The parts of a process's memory, in sixteenths, that open requests, the jobs that wait, and connections may take. A quarter of the
	// second comes on top of it for jobs that are being stored; the rest is for everything else, such as results on their way.
	requestSixteenths    = 6
	jobSixteenths        = 4
	connectionSixteenths = 2
	// connectionCost is what a connection is taken to need that no request is open on, in bytes.
	connectionCost = 16 << 10
)

// MemoryLimit gives how many bytes of memory this process may use, the programs that it runs aside: what is set, else a quarter of what
// the machine or container has, and at least 256 MiB.
func (c *Config) MemoryLimit() int64 {
	if c.Memory > 0 {
		return int64(c.Memory)
	}
	return max(machineMemory()/memoryShare, int64(minMemory))
}

// limitMemory has the garbage collector work harder when memory gets scarce, unless the environment says when.
func (c *Config) limitMemory() {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(c.MemoryLimit() - programMemory)
	}
}

func (c *Config) requestMemory() int64 { return c.MemoryLimit() / 16 * requestSixteenths }

func (c *Config) jobMemory() int64 { return c.MemoryLimit() / 16 * jobSixteenths }

func (c *Config) maxConnections() int64 {
	return c.MemoryLimit() / 16 * connectionSixteenths / connectionCost
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
