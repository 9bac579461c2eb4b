package main

import (
	"bufio"
	"bytes"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/answer"
)

// metrics serves figures about the machine as the sandbox sees it, in bytes and per cent.
type metrics struct {
	dir string // whose file system is measured

	mu         sync.Mutex
	busy, all  uint64 // ticks of all processors
	percentage float64
	at         time.Time
}

// minInterval is how much time must pass for the use of processors to be measured again.
const minInterval = 100 * time.Millisecond

func newMetrics(dir string) *metrics {
	if dir == "" {
		dir = "/"
	}
	m := &metrics{dir: dir}
	m.busy, m.all = cpuTicks()
	m.at = time.Now()
	return m
}

func (m *metrics) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	memory := meminfo()
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
		time.Now().Unix(), runtime.NumCPU(), m.cpu(),
		memory["MemTotal"], memory["MemTotal"] - min(memory["MemAvailable"], memory["MemTotal"]), memory["Cached"],
		(disk.Blocks - disk.Bfree) * uint64(disk.Bsize), disk.Blocks * uint64(disk.Bsize),
	})
}

// cpu returns how much of the processors was used since the last call, or before it if that was just now.
func (m *metrics) cpu() float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if time.Since(m.at) < minInterval && m.percentage > 0 {
		return m.percentage
	}
	busy, all := cpuTicks()
	if all > m.all && busy >= m.busy {
		m.percentage = float64(int(10_000*float64(busy-m.busy)/float64(all-m.all))) / 100
	}
	m.busy, m.all, m.at = busy, all, time.Now()
	return m.percentage
}

// cpuTicks returns how long processors were busy, and the whole time.
func cpuTicks() (busy, all uint64) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0
	}
	line, _, _ := bytes.Cut(b, []byte("\n"))
	fields := strings.Fields(string(line))
	const idle, wait, guests = 4, 5, 9 // time of guests is in that of users
	for i, field := range fields {
		ticks, err := strconv.ParseUint(field, 10, 64)
		if err != nil || i >= guests {
			continue
		}
		all += ticks
		if i != idle && i != wait {
			busy += ticks
		}
	}
	return busy, all
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
