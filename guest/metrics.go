package main

import (
	"bufio"
	"bytes"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/answer"
)

// metrics serves the resource usage of the sandbox's processes, in bytes and per cent of its
// limits. The totals in /proc are the machine's, not the sandbox's.
type metrics struct {
	dir    string // whose file system is measured
	cpus   float64
	memory uint64 // bytes

	mu         sync.Mutex
	used       time.Duration // by all processes so far
	percentage float64
	at         time.Time
}

const (
	// minInterval is the minimum time between two measurements of the use of processors.
	minInterval = 100 * time.Millisecond
	// tick is the unit of processor time in /proc.
	tick = 10 * time.Millisecond
)

func newMetrics(c config) *metrics {
	m := &metrics{dir: c.Dir, cpus: c.CPU, memory: c.Memory, at: time.Now()}
	if m.dir == "" {
		m.dir = "/"
	}
	if m.cpus == 0 {
		m.cpus = float64(runtime.NumCPU())
	}
	if m.memory == 0 {
		m.memory = meminfo()["MemTotal"]
	}
	m.used = measure().cpu
	return m
}

func (m *metrics) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	used := measure()
	files := filesInMemory(m.dir, "/tmp", "/dev/shm")
	var disk unix.Statfs_t
	if err := unix.Statfs(m.dir, &disk); err != nil {
		_ = unix.Statfs("/", &disk)
	}
	answer.JSON(w, http.StatusOK, struct {
		Time       int64   `json:"ts"`
		CPUs       int     `json:"cpu_count"`
		Percentage float64 `json:"cpu_used_pct"`
		MemTotal   uint64  `json:"mem_total"`
		MemUsed    uint64  `json:"mem_used"`
		MemCache   uint64  `json:"mem_cache"`
		DiskUsed   uint64  `json:"disk_used"`
		DiskTotal  uint64  `json:"disk_total"`
	}{
		time.Now().Unix(), int(math.Ceil(m.cpus)), m.percent(used.cpu),
		m.memory, min(used.memory+files, m.memory), min(files, m.memory),
		(disk.Blocks - disk.Bfree) * uint64(disk.Bsize), disk.Blocks * uint64(disk.Bsize),
	})
}

// percent returns the use of processors since the last measurement. Within minInterval, it returns
// the last result again.
func (m *metrics) percent(used time.Duration) float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	elapsed := time.Since(m.at)
	if elapsed < minInterval {
		return m.percentage
	}
	// The time of a process whose parent ignores its end is lost.
	share := max(0, float64(used-m.used)) / (float64(elapsed) * m.cpus)
	m.percentage = math.Round(min(share, 1)*10_000) / 100
	m.used, m.at = used, time.Now()
	return m.percentage
}

// usage is the resource usage of processes.
type usage struct {
	cpu    time.Duration // with that of the ended children that they have waited for
	memory uint64        // bytes of their own
}

// measure returns the resource usage of all processes of the sandbox.
func measure() (all usage) {
	processes, _ := filepath.Glob("/proc/[0-9]*") // the pattern is valid
	for _, dir := range processes {
		stat, err := os.ReadFile(dir + "/stat")
		if err != nil {
			continue // it has ended
		}
		// The name, in parentheses, may contain anything.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		const first, last = 11, 14 // user and system time of the process, and of its children
		for i := first; i <= last && i < len(fields); i++ {
			ticks, _ := strconv.ParseUint(fields[i], 10, 64)
			all.cpu += time.Duration(ticks) * tick
		}
		statm, _ := os.ReadFile(dir + "/statm")
		if pages := strings.Fields(string(statm)); len(pages) > 2 {
			resident, _ := strconv.ParseUint(pages[1], 10, 64)
			shared, _ := strconv.ParseUint(pages[2], 10, 64)
			all.memory += (resident - min(shared, resident)) * uint64(os.Getpagesize())
		}
	}
	return all
}

// filesInMemory returns the size of the files in those directories whose file systems are in
// memory.
func filesInMemory(dirs ...string) (size uint64) {
	for _, dir := range dirs {
		var fs unix.Statfs_t
		if err := unix.Statfs(dir, &fs); err == nil && fs.Type == unix.TMPFS_MAGIC {
			size += (fs.Blocks - fs.Bfree) * uint64(fs.Bsize)
		}
	}
	return size
}

// meminfo returns the numbers of /proc/meminfo in bytes.
func meminfo() map[string]uint64 {
	values := map[string]uint64{}
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return values
	}
	defer func() { _ = f.Close() }()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		name, rest, _ := strings.Cut(lines.Text(), ":")
		fields := strings.Fields(rest)
		if len(fields) == 0 {
			continue
		}
		if kib, err := strconv.ParseUint(fields[0], 10, 64); err == nil {
			values[name] = kib << 10
		}
	}
	return values
}
