package app

import (
	"runtime"
	"sync"

	"github.com/prometheus/procfs"

	"github.com/bullpen-run/bullpen/proto"
)

// machineLoad measures the load of this machine. Figures that cannot be read are 0.
type machineLoad struct {
	mu          sync.Mutex
	busy, total float64 // seconds of all processors since the boot, at the last call of read
}

// read returns the load since the call before.
func (l *machineLoad) read() proto.Machine {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := proto.Machine{CPUs: runtime.NumCPU()}
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return m
	}
	if stat, err := proc.Stat(); err == nil {
		cpu := stat.CPUTotal
		idle := cpu.Idle + cpu.Iowait
		busy := cpu.User + cpu.Nice + cpu.System + cpu.IRQ + cpu.SoftIRQ + cpu.Steal
		if span := busy + idle - l.total; span > 0 && l.total > 0 {
			m.CPUsBusy = max(0, (busy-l.busy)/span*float64(m.CPUs))
		}
		l.busy, l.total = busy, busy+idle
	}
	m.Memory, m.MemoryAvailable = meminfo()
	return m
}

// meminfo returns this machine's memory in bytes, and how much of it programs can get without
// swapping. It returns zeros if the kernel does not report them.
func meminfo() (total, available int64) {
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return 0, 0
	}
	memory, err := proc.Meminfo()
	if err != nil || memory.MemTotalBytes == nil || memory.MemAvailableBytes == nil {
		return 0, 0
	}
	return int64(*memory.MemTotalBytes), int64(*memory.MemAvailableBytes)
}
