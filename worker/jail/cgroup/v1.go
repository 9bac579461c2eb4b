package cgroup

import (
	"errors"
	"io/fs"
	"strconv"
	"time"
)

// socketMemory limits the socket buffers of a group on version 1, in bytes, in addition to its
// memory. The default is the host's limit.
const socketMemory = 64 << 20

func (g *Group) limit1(l Limits) error {
	mem := g.dirs[g.ctl.memory]
	bytes := strconv.FormatInt(l.Memory, 10)
	if err := write(mem, "memory.limit_in_bytes", bytes); err != nil {
		return err
	}
	// Missing if the kernel does not account swap: then swappiness 0 must suffice.
	if err := write(mem, "memory.memsw.limit_in_bytes", bytes); errors.Is(err, fs.ErrNotExist) {
		if err := write(mem, "memory.swappiness", "0"); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	// Version 1 does not charge socket buffers before this limit is set, and then separately. The
	// file is missing if the kernel has no such account.
	sockets := strconv.FormatInt(min(l.Memory, socketMemory), 10)
	if err := write(mem, "memory.kmem.tcp.limit_in_bytes", sockets); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return write(g.dirs[g.ctl.pids], "pids.max", strconv.Itoa(l.Tasks))
}

func (g *Group) usage1() (Usage, error) {
	cpu, err := readInt(g.dirs[g.ctl.cpuacct], "cpuacct.usage")
	if err != nil {
		return Usage{}, err
	}
	peak, err := readInt(g.dirs[g.ctl.memory], "memory.max_usage_in_bytes")
	if err != nil {
		return Usage{}, err
	}
	kills, err := readKey(g.dirs[g.ctl.memory], "memory.oom_control", "oom_kill")
	if err != nil {
		return Usage{}, err
	}
	return Usage{CPUTime: time.Duration(cpu), MemoryPeak: peak, OOMKills: kills}, nil
}
