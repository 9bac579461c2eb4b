package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// machine describes the machine that was measured.
type machine struct {
	CPU          string                    `json:"cpu"`
	Cores        int                       `json:"cores"`
	MemoryMB     int                       `json:"memory_mb"`
	Load         string                    `json:"load_before"` // load averages at the start
	Kernel       string                    `json:"kernel"`
	Cgroup       int                       `json:"cgroup_version"`
	Go           string                    `json:"go"`
	Interpreters map[proto.Language]string `json:"interpreters"`
	// The file system that holds the server's data. Each execution includes three durable writes.
	DataFS string   `json:"data_file_system,omitempty"`
	Sync   *summary `json:"data_sync,omitempty"` // fsync of 4 KiB
}

func describe(ctx context.Context, programs []program) machine {
	m := machine{
		CPU: field(text("/proc/cpuinfo"), "model name"), Cores: runtime.NumCPU(), Load: text("/proc/loadavg"),
		Kernel: text("/proc/sys/kernel/osrelease"), Cgroup: cgroupVersion(), Go: runtime.Version() + " " + runtime.GOARCH,
		Interpreters: map[proto.Language]string{},
	}
	if k, err := strconv.Atoi(strings.TrimSuffix(field(text("/proc/meminfo"), "MemTotal"), " kB")); err == nil {
		m.MemoryMB = k * kib / mb
	}
	for _, p := range programs {
		cmd := exec.CommandContext(ctx, p.interpreter, "--version")
		cmd.Env = p.environment()
		out, err := cmd.Output()
		first, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
		if err != nil {
			first = err.Error()
		}
		m.Interpreters[p.language] = p.interpreter + ": " + first
	}
	return m
}

// busyLoad is the load per core above which other processes use much of the machine.
const busyLoad = 0.25

// busy reports whether other processes used the machine at the start, which makes every figure
// worse.
func (m machine) busy() bool {
	first, _, _ := strings.Cut(m.Load, " ")
	load, err := strconv.ParseFloat(first, 64)
	return err == nil && load > busyLoad*float64(m.Cores)
}

// text returns the contents of a small file, or "" if it cannot be read.
func text(path string) string {
	b, _ := os.ReadFile(path)
	return strings.TrimSpace(string(b))
}

// cgroupVersion returns the cgroup version that jails use. It is 1 if version 1 has the memory
// controller.
func cgroupVersion() int {
	if len(cgroupRoots("memory")) > 0 {
		return 1
	}
	return 2
}

// cgroupRoots lists the mounted version 1 cgroup file systems with the controller. If controller is
// empty, it lists all cgroup file systems of any version.
func cgroupRoots(controller string) []string {
	var roots []string
	for line := range strings.Lines(text("/proc/self/mountinfo") + "\n") {
		before, after, _ := strings.Cut(strings.TrimSpace(line), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if len(left) < 5 || len(right) < 3 {
			continue
		}
		one := right[0] == "cgroup" && strings.Contains(","+right[2]+",", ","+controller+",")
		if one || controller == "" && strings.HasPrefix(right[0], "cgroup") {
			roots = append(roots, left[4])
		}
	}
	return roots
}

// measureSync repeatedly writes to a file in dir and waits for the disk.
func measureSync(dir string, times int) (*summary, error) {
	const size = 4 << 10
	f, err := os.CreateTemp(dir, "sync-*")
	if err != nil {
		return nil, fmt.Errorf("measure the disk: %w", err)
	}
	defer func() {
		_ = f.Close()
		_ = os.Remove(f.Name()) //nolint:gosec // in our own directory
	}()
	var took []float64
	for range times {
		if _, err := f.Write(make([]byte, size)); err != nil {
			return nil, fmt.Errorf("measure the disk: %w", err)
		}
		began := time.Now()
		if err := f.Sync(); err != nil {
			return nil, fmt.Errorf("measure the disk: %w", err)
		}
		took = append(took, millis(time.Since(began)))
	}
	return summarise(took), nil
}

// fileSystem returns the type of the file system that holds dir.
func fileSystem(dir string) string {
	kind, longest := "", 0
	for line := range strings.Lines(text("/proc/self/mounts") + "\n") {
		f := strings.Fields(line)
		if len(f) < 3 || len(f[1]) < longest {
			continue
		}
		if rel, err := filepath.Rel(f[1], dir); err == nil && !strings.HasPrefix(rel, "..") {
			kind, longest = f[2], len(f[1])
		}
	}
	return kind
}

// commit returns the short hash of the checked-out commit, or dev if there are changes since.
func commit(ctx context.Context) string {
	const dev = "dev"
	changed, err := exec.CommandContext(ctx, "git", "status", "--porcelain", "--", ".", ":!bench/results").Output()
	if err != nil || len(bytes.TrimSpace(changed)) > 0 {
		return dev
	}
	name, err := exec.CommandContext(ctx, "git", "rev-parse", "--short", "HEAD").Output()
	if err != nil {
		return dev
	}
	return string(bytes.TrimSpace(name))
}
