package live

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
)

// heartbeat is a page of memory that all guests of a worker can read. Every [proto.HeartbeatEvery],
// the worker writes the monotonic time in nanoseconds to it. A guest whose worker is frozen ends
// itself before the sandbox may start elsewhere.
type heartbeat struct {
	file    *os.File // read-only
	memory  []byte
	stop    chan struct{}
	running sync.WaitGroup
}

// startHeartbeat creates the memory and writes to it until close is called.
func startHeartbeat() (*heartbeat, error) {
	h := &heartbeat{stop: make(chan struct{})}
	if err := h.create(); err != nil {
		return nil, fmt.Errorf("create the heartbeat of the worker: %w", err)
	}
	h.beat()
	h.running.Go(h.run)
	return h, nil
}

// create creates the memory. Only this mapping can write to it.
func (h *heartbeat) create() error {
	fd, err := unix.MemfdCreate("heartbeat", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	size := os.Getpagesize()
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return err
	}
	if h.memory, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return err
	}
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_FUTURE_WRITE
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	if err == nil {
		h.file, err = os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	}
	if err != nil {
		return errors.Join(err, unix.Munmap(h.memory))
	}
	return nil
}

func (h *heartbeat) run() {
	tick := time.NewTicker(proto.HeartbeatEvery)
	defer tick.Stop()
	for {
		select {
		case <-h.stop:
			return
		case <-tick.C:
			h.beat()
		}
	}
}

// beat writes the time. It writes nothing if the clock cannot be read.
func (h *heartbeat) beat() {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err == nil {
		(*atomic.Int64)(unsafe.Pointer(&h.memory[0])).Store(now.Nano()) //nolint:gosec // shared with guests
	}
}

// close stops the heartbeat.
func (h *heartbeat) close() error {
	close(h.stop)
	h.running.Wait()
	return errors.Join(h.file.Close(), unix.Munmap(h.memory))
}
