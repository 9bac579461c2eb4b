package app

import (
	"math"
	"os"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
)

const (
	// minMemory fits the server and a few of the largest requests.
	minMemory = 256 * proto.MiB
	// binaryMemory is the memory of the binary in bytes, which the garbage collector does not
	// count.
	binaryMemory = 48 << 20
	// defaultMemoryDivisor makes the default a quarter of the machine's memory. Most of the memory
	// is for programs.
	defaultMemoryDivisor = 4
	// The shares of memory for open requests, queued jobs, connections, pending deliveries and the
	// index of stored records, in sixteenths. Jobs being stored may use another quarter of the
	// jobs' share. The rest is for everything else, such as results in transit.
	requestSixteenths    = 6
	jobSixteenths        = 4
	connectionSixteenths = 2
	deliverySixteenths   = 1
	recordSixteenths     = 2
	// connectionCost is the assumed memory of an idle connection in bytes.
	connectionCost = 16 << 10
	// deliveryCost is the memory of a pending delivery in bytes, with a queue of its own.
	deliveryCost = 1 << 10
)

// MemoryLimit returns the memory in bytes that this process may use, without the programs that it
// runs. The default is a quarter of the memory of the machine or container, at least minMemory.
func (c *Config) MemoryLimit() int64 {
	if c.Memory > 0 {
		return int64(c.Memory)
	}
	return max(machineMemory()/defaultMemoryDivisor, int64(minMemory))
}

// limitMemory sets the soft memory limit of the garbage collector, unless the environment does.
func (c *Config) limitMemory() {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(c.MemoryLimit() - binaryMemory)
	}
}

func (c *Config) requestMemory() int64 { return c.MemoryLimit() / 16 * requestSixteenths }

func (c *Config) jobMemory() int64 { return c.MemoryLimit() / 16 * jobSixteenths }

func (c *Config) maxConnections() int64 {
	return c.MemoryLimit() / 16 * connectionSixteenths / connectionCost
}

func (c *Config) maxPendingDeliveries() int {
	return int(c.MemoryLimit() / 16 * deliverySixteenths / deliveryCost)
}

// maxSubjects bounds the index of the embedded NATS.
func (c *Config) maxSubjects() int {
	return int(c.MemoryLimit() / 16 * recordSixteenths / natsembed.SubjectCost)
}

// machineMemory returns the memory in bytes of the machine or the container's limit, whichever is
// less. It returns the largest number if neither can be read.
func machineMemory() int64 {
	memory := int64(math.MaxInt64)
	for _, limit := range []string{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		text, err := os.ReadFile(limit)
		if err != nil {
			continue
		}
		if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
			memory = min(memory, n) // without a limit, v2 has "max" and v1 a huge number
		}
	}
	total, _ := meminfo()
	if total > 0 {
		memory = min(memory, total)
	}
	return memory
}
