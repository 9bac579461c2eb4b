// Package hostmemory finds programs that make the host's kernel hold memory that is charged to no
// control group. It reads the kernel's memory (Reader) and the bytes queued in a program's sockets
// (Queued). For everything else it compares the kernel's growth while a program runs with that
// while it is paused (Trial), which also catches unknown causes.
package hostmemory

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
)

// Host is the state of a host's memory, in bytes.
type Host struct {
	// Available is the kernel's estimate of what new programs could use.
	Available int64
	// Kernel is the memory in use by the kernel for itself and for programs: neither free, nor part
	// of a process, a file or a reserve pool, nor reclaimable, nor in Sockets. It is exact to 1 MiB
	// on a machine with few processors. It is too large for some 50 ms while a virtual machine
	// returns free memory to its host.
	Kernel int64
	// Sockets is the memory that the kernel counts for TCP and UDP.
	Sockets int64
}

// files are those that the state is read from, below /proc. ZFS has a cache of its own, in the last
// one, which need not exist.
var files = [...]string{"meminfo", "zoneinfo", "net/sockstat", "spl/kstat/zfs/arcstats"} // read only

// Reader reads the state of the host's memory. It keeps the files open and reuses its buffers. It
// is safe for concurrent use.
type Reader struct {
	mu      sync.Mutex
	files   [len(files)]*os.File
	buffers [len(files)][]byte
}

// Open opens the files of the host's memory.
func Open() (*Reader, error) {
	r := &Reader{}
	for i, name := range files {
		f, err := os.Open("/proc/" + name)
		if i == len(files)-1 && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("read the host's memory: %w", err), r.Close())
		}
		r.files[i], r.buffers[i] = f, make([]byte, 16<<10)
	}
	return r, nil
}

// Close closes the files.
func (r *Reader) Close() error {
	var errs []error
	for _, f := range r.files {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// Read returns the state of the host's memory. It takes about 0.1 ms on a machine with few
// processors.
func (r *Reader) Read() (Host, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var texts [len(files)][]byte
	for i, f := range r.files {
		if f == nil {
			continue
		}
		n, err := readAll(f, &r.buffers[i])
		if err != nil {
			return Host{}, fmt.Errorf("read the host's memory: %w", err)
		}
		texts[i] = r.buffers[i][:n]
	}
	h, err := parse(texts[0], texts[1], texts[2], int64(os.Getpagesize()))
	if err != nil {
		return Host{}, fmt.Errorf("read the host's memory: %w", err)
	}
	h.Kernel -= arcSize(texts[3])
	return h, nil
}

// readAll reads a file from its beginning into a buffer, which it enlarges if necessary, and
// returns the length.
func readAll(f *os.File, buffer *[]byte) (n int, err error) {
	for {
		read, err := f.ReadAt((*buffer)[n:], int64(n))
		n += read
		switch {
		case errors.Is(err, io.EOF):
			return n, nil
		case err != nil:
			return 0, err
		}
		*buffer = append(*buffer, make([]byte, len(*buffer))...)
	}
}

// arcSize returns the size of the ZFS cache in bytes, from a table of names, types and values.
func arcSize(arcstats []byte) int64 {
	for line := range bytes.Lines(arcstats) {
		if f := bytes.Fields(line); len(f) == 3 && string(f[0]) == "size" {
			n, _ := strconv.ParseInt(string(f[2]), 10, 64) // 0 if it is no number
			return n
		}
	}
	return 0
}

// others are the pages in /proc/zoneinfo that Kernel does not contain. Those of processes and files are
// counted as the lists do that the kernel reclaims them from. A page leaves its list when it becomes
// free, but AnonPages when it is unmapped: the pages of a process that ends would be in Kernel
// meanwhile. Each processor keeps freed pages for itself (count:), gigabytes on a large machine.
var others = [...]string{ // read only
	"nr_free_pages", "count:", "nr_inactive_anon", "nr_active_anon", "nr_inactive_file", "nr_active_file",
	"nr_unevictable", "nr_isolated_anon", "nr_isolated_file", "nr_slab_reclaimable", "nr_zspages",
}

// parse computes the state from /proc/meminfo, /proc/zoneinfo and /proc/net/sockstat, whose memory
// covers all network namespaces. All fast-changing values come from zoneinfo, which the kernel
// writes in one go.
func parse(meminfo, zoneinfo, sockstat []byte, page int64) (Host, error) {
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
	h := Host{
		Available: fields["MemAvailable"],
		Kernel:    page * sum(zoneinfo, "managed"),
		Sockets:   page * sum(sockstat, "mem"),
	}
	if h.Available == 0 || h.Kernel == 0 {
		return Host{}, errors.New("meminfo has no MemAvailable, or zoneinfo no managed pages")
	}
	h.Kernel -= page*sum(zoneinfo, others[:]...) + fields["Hugetlb"] + fields["Balloon"] + h.Sockets
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

// Queued returns how many bytes are queued in the sockets of a process's network namespace, and in
// its fragments of packets. AF_UNIX sockets are missing: the kernel does not list their bytes, but
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
// /proc/net/udp: sl local remote state tx_queue:rx_queue …, in hexadecimal. Data that a program
// sends to itself appears in both queues, but exists once.
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
