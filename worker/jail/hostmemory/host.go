// Package hostmemory finds programs that make the host's kernel hold memory which no control group
// is charged for. It reads what the kernel holds (Read) and what waits in a program's sockets
// (Queued). For everything else it compares what the kernel takes while a program runs with what it
// takes while the program is paused (Trial): that works for causes nobody has thought of.
package hostmemory

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
)

// Host is the state of a host's memory, in bytes.
type Host struct {
	// Available is the kernel's estimate of what new programs could use.
	Available int64
	// Kernel is what neither is free nor belongs to a process, a file or a pool for later use, and
	// cannot be reclaimed: what the kernel holds for itself, and for programs. It may be off by
	// some 10 MiB while programs start and end, because the kernel does not count everything at the
	// same time.
	Kernel int64
	// Objects is the part of Kernel that the kernel counts as such: nearly all but packets. It is
	// exact to 1 MiB.
	Objects int64
}

// Read returns the state of the host's memory. It takes about 0.1 ms on a machine with few
// processors.
func Read() (Host, error) {
	var files [2][]byte
	for i, name := range []string{"meminfo", "zoneinfo"} {
		var err error
		if files[i], err = os.ReadFile("/proc/" + name); err != nil {
			return Host{}, fmt.Errorf("read the host's memory: %w", err)
		}
	}
	h, err := parse(files[0], files[1], int64(os.Getpagesize()))
	if err != nil {
		return Host{}, fmt.Errorf("read the host's memory: %w", err)
	}
	return h, nil
}

// Fields of /proc/meminfo that Kernel does not contain, and those that are Objects. Not each kernel
// has all of them. Stacks of the kernel are in VmallocUsed.
var (
	others  = [...]string{"MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "SReclaimable", "Hugetlb", "Balloon"} // read only
	objects = [...]string{"SUnreclaim", "VmallocUsed", "PageTables", "SecPageTables", "Percpu"}                            // read only
)

// parse computes the state from /proc/meminfo and /proc/zoneinfo.
func parse(meminfo, zoneinfo []byte, page int64) (Host, error) {
	fields := map[string]int64{}
	for line := range bytes.Lines(meminfo) {
		name, rest, _ := bytes.Cut(line, []byte{':'})
		if f := bytes.Fields(rest); len(f) > 0 {
			n, err := strconv.ParseInt(string(f[0]), 10, 64)
			if err != nil {
				return Host{}, fmt.Errorf("meminfo: %w", err)
			}
			fields[string(name)] = n << 10
		}
	}
	h := Host{Available: fields["MemAvailable"], Kernel: fields["MemTotal"]}
	if h.Available == 0 || h.Kernel == 0 {
		return Host{}, errors.New("meminfo has no MemAvailable or no MemTotal")
	}
	for _, name := range others {
		h.Kernel -= fields[name]
	}
	for _, name := range objects {
		h.Objects += fields[name]
	}
	// Each processor keeps freed pages for itself, gigabytes on a large machine. MemFree lacks them.
	h.Kernel -= page * sum(zoneinfo, "count:", "nr_zspages")
	return h, nil
}

// sum adds up the numbers that follow words in text.
func sum(text []byte, words ...string) (total int64) {
	wanted := false
	for f := range bytes.FieldsSeq(text) {
		if wanted {
			if n, err := strconv.ParseInt(string(f), 10, 64); err == nil {
				total += n
			}
		}
		wanted = false
		for _, w := range words {
			wanted = wanted || string(f) == w
		}
	}
	return total
}

// Queued returns how many bytes wait in the sockets of a process's network namespace, and in its
// fragments of packets. Sockets of AF_UNIX are missing: the kernel does not list their bytes, but
// charges them.
func Queued(pid int) (int64, error) {
	var total int64
	dir := filepath.Join("/proc", strconv.Itoa(pid), "net")
	for _, name := range []string{"tcp", "tcp6", "udp", "udp6", "netlink", "sockstat", "sockstat6"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without this protocol
		}
		if err != nil {
			return 0, fmt.Errorf("read the queues of sockets: %w", err)
		}
		switch name {
		case "netlink":
			total += netlinkQueues(b)
		case "sockstat", "sockstat6":
			total += sum(b, "memory")
		default:
			total += inetQueues(b)
		}
	}
	return total, nil
}

// inetQueues returns the larger of the sums of tx_queue and rx_queue of a table such as
// /proc/net/udp: sl local remote state tx_queue:rx_queue …, in hexadecimal. What one program sends
// to itself waits in both, and is there once.
func inetQueues(table []byte) int64 {
	var total [2]int64
	for line := range bytes.Lines(table) {
		f := bytes.Fields(line)
		if len(f) < 5 {
			continue
		}
		tx, rx, ok := bytes.Cut(f[4], []byte{':'})
		if !ok { // the heading
			continue
		}
		for i, hex := range [...][]byte{tx, rx} {
			if n, err := strconv.ParseInt(string(hex), 16, 64); err == nil {
				total[i] += n
			}
		}
	}
	return max(total[0], total[1])
}

// netlinkQueues adds up the columns Rmem and Wmem of /proc/net/netlink:
// sk Eth Pid Groups Rmem Wmem ….
func netlinkQueues(table []byte) (total int64) {
	for line := range bytes.Lines(table) {
		f := bytes.Fields(line)
		if len(f) < 6 {
			continue
		}
		for _, column := range f[4:6] {
			if n, err := strconv.ParseInt(string(column), 10, 64); err == nil {
				total += n
			}
		}
	}
	return total
}
