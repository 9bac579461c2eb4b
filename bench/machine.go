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

// machine is what the figures were measured on.
type machine struct {
	CPU          string                    `json:"cpu"`
	Cores        int                       `json:"cores"`
	MemoryMB     int                       `json:"memory_mb"`
	Load         string                    `json:"load_before"` // averages, when it began
	Kernel       string                    `json:"kernel"`
	Cgroup       int                       `json:"cgroup_version"`
	Go           string                    `json:"go"`
	Interpreters map[proto.Language]string `json:"interpreters"`
	// Of the file system that holds the server's data. Three durable writes are part of each execution.
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

// busyLoad is the load, for each core, above which others take much of the machine.
const busyLoad = 0.25

// busy says that others used the machine when it began; that makes every figure worse.
func (m machine) busy() bool {
	first, _, _ := strings.Cut(m.Load, " ")
	load, err := strconv.ParseFloat(first, 64)
	return err == nil && load > busyLoad*float64(m.Cores)
}

// text is a small file's, empty where there is none.
func text(path string) string {
	b, _ := os.ReadFile(path)
	return strings.TrimSpace(string(b))
}

// cgroupVersion is the one that jails use: version 1 where it has the memory controller.
func cgroupVersion() int {
	if len(cgroupRoots("memory")) > 0 {
		return 1
	}
	return 2
}

// cgroupRoots lists the mounted cgroup file systems of version 1 with the controller; with an empty one all of any version.
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

// measureSync writes to a file in dir and waits for the disk, several times.
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

// fileSystem is the type of the one that holds dir.
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

// commit is the short name of the commit that is checked out, or dev where something has been changed since.
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
