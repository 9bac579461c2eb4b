package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	kib         = 1024
	mb          = 1e6
	memoryEvery = 5 * time.Millisecond
)

// residentMB returns the resident memory of a process.
func residentMB(pid int) (float64, error) {
	status, err := os.ReadFile(procPath(pid, "status"))
	if err != nil {
		return 0, fmt.Errorf("read the server's memory: %w", err)
	}
	n, err := megabytes(string(status), "VmRSS")
	if err != nil {
		return 0, fmt.Errorf("read the server's memory: %w", err)
	}
	return n, nil
}

// megabytes parses a field that the kernel prints in kB.
func megabytes(text, name string) (float64, error) {
	n, err := strconv.ParseFloat(strings.TrimSuffix(field(text, name), " kB"), 64)
	return n * kib / mb, err
}

// jailMemory is the total memory of a prewarmed jail's processes, without the kernel's memory for
// them.
type jailMemory struct {
	Language   proto.Language `json:"language"`
	ResidentMB float64        `json:"resident_mb"` // shared pages count for each process
	UnsharedMB float64        `json:"unshared_mb"` // pages that it has written
}

// prewarmedJails returns the memory of a server's prewarmed jails before it has run anything. There
// is one for each language, each below its own process.
func prewarmedJails(server int) ([]jailMemory, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	var jails []jailMemory
	for _, top := range all {
		if top.parent != server {
			continue
		}
		var j jailMemory
		for _, p := range append(descendants(all, top.pid), top) {
			for _, l := range languages {
				if name, _, _ := strings.Cut(text(procPath(p.pid, "cmdline")), "\x00"); filepath.Base(name) == l.interpreter {
					j.Language = l.name
				}
			}
			rollup := text(procPath(p.pid, "smaps_rollup"))
			for name, sum := range map[string]*float64{"Rss": &j.ResidentMB, "Private_Dirty": &j.UnsharedMB} {
				n, err := megabytes(rollup, name)
				if err != nil {
					return nil, fmt.Errorf("read the memory of %s: %w", p, err)
				}
				*sum += n
			}
		}
		if j.Language != "" {
			jails = append(jails, j)
		}
	}
	if len(jails) == 0 {
		return nil, errors.New("the server makes no jails ahead")
	}
	return jails, nil
}

// cpuMillis returns the CPU time, in ms, that this machine has spent since its start. It excludes
// the benchmark and the programs that the benchmark started and waited for. On a quiet machine, the
// rest is the server, its jails, and the kernel's work for both. The processes themselves cannot be
// queried, because the time of unreaped ones is lost. It is 0 if the server is not on this machine.
func (t *target) cpuMillis() (float64, error) {
	if t.pid == 0 {
		return 0, nil
	}
	millis, err := machineMillis()
	if err != nil {
		return 0, fmt.Errorf("read the processor time of this machine: %w", err)
	}
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var own unix.Rusage
		if err := unix.Getrusage(who, &own); err != nil {
			return 0, fmt.Errorf("read the processor time of the benchmark: %w", err)
		}
		millis -= float64(own.Utime.Nano()+own.Stime.Nano()) / 1e6
	}
	return millis, nil
}

// machineMillis returns the CPU time that this machine has spent, in ms, as control groups count
// it. They count nanoseconds, while the kernel's own total charges each whole tick to the process
// that runs then. Version 2 counts only below the root and so excludes kernel threads.
func machineMillis() (float64, error) {
	const perNano, perMicro = 1e-6, 1e-3
	if roots := cgroupRoots("cpuacct"); len(roots) > 0 {
		n, err := strconv.ParseFloat(text(filepath.Join(roots[0], "cpuacct.usage")), 64)
		return n * perNano, err
	}
	millis := 0.0
	for _, root := range cgroupRoots("") {
		stats, err := filepath.Glob(filepath.Join(root, "*", "cpu.stat"))
		if err != nil {
			return 0, err
		}
		for _, s := range stats {
			fields := strings.Fields(text(s))
			if i := slices.Index(fields, "usage_usec"); i >= 0 && i+1 < len(fields) {
				n, err := strconv.ParseFloat(fields[i+1], 64)
				if err != nil {
					return 0, err
				}
				millis += n * perMicro
			}
		}
	}
	if millis == 0 {
		return 0, errors.New("there is no control group that counts it")
	}
	return millis, nil
}

// watchMemory samples the resident memory of a process until the returned function is called. That
// function returns the first and the largest sample. Both are 0 if there is no process.
func watchMemory(pid int) func() (before, peak float64) {
	if pid == 0 {
		return func() (float64, float64) { return 0, 0 }
	}
	before, _ := residentMB(pid) // a dead process shows up in its responses
	peak := before
	quit := make(chan struct{})
	var watcher sync.WaitGroup
	watcher.Go(func() {
		tick := time.NewTicker(memoryEvery)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
				now, _ := residentMB(pid)
				peak = max(peak, now)
			}
		}
	})
	return func() (float64, float64) {
		close(quit)
		watcher.Wait()
		return before, peak
	}
}

// field returns what follows "name:" in a text of such lines.
func field(text, name string) string {
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

func procPath(pid int, name string) string { return filepath.Join("/proc", strconv.Itoa(pid), name) }

// process describes one process on this machine.
type process struct {
	pid, parent int
	name        string
	zombie      bool
}

func (p process) String() string {
	s := fmt.Sprintf("%s (pid %d)", p.name, p.pid)
	if p.zombie {
		s += ", dead and not waited for"
	}
	return s
}

// processes lists all visible processes.
func processes() ([]process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var all []process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(procPath(pid, "stat"))
		if err != nil {
			continue // it has ended meanwhile
		}
		if p, ok := parseStat(stat); ok {
			all = append(all, p)
		}
	}
	return all, nil
}

// parseStat parses "pid (name) state parent …". The name may contain anything, including
// parentheses.
func parseStat(stat []byte) (process, bool) {
	open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if open < 1 || end < open {
		return process{}, false
	}
	rest := strings.Fields(string(stat[end+1:]))
	if len(rest) < 2 {
		return process{}, false
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(stat[:open])))
	if err != nil {
		return process{}, false
	}
	parent, err := strconv.Atoi(rest[1])
	return process{pid, parent, string(stat[open+1 : end]), rest[0] == "Z"}, err == nil
}

// descendants returns the processes below pid, without itself.
func descendants(all []process, pid int) []process {
	var below []process
	for _, p := range all {
		if p.parent == pid && p.pid != pid {
			below = append(append(below, p), descendants(all, p.pid)...)
		}
	}
	return below
}
