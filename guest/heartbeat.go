package main

import (
	"fmt"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// heartbeatGrace is how long a guest waits before it acts on an overdue heartbeat. After a pause of
// the whole machine, the guest may run before the worker.
const heartbeatGrace = 2 * time.Second

// heartbeat is memory to which the worker writes the monotonic time in nanoseconds every second.
// Sending requests instead would wake up every guest as often.
type heartbeat struct{ nanos *atomic.Int64 }

// openHeartbeat maps the heartbeat, for the life of this program.
func openHeartbeat(fd int) (heartbeat, error) {
	memory, err := unix.Mmap(fd, 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)
	if err == nil {
		err = unix.Close(fd)
	}
	if err != nil {
		return heartbeat{}, fmt.Errorf("map the worker's heartbeat: %w", err)
	}
	return heartbeat{(*atomic.Int64)(unsafe.Pointer(&memory[0]))}, nil //nolint:gosec // shared with the worker
}

// await closes abandoned when the heartbeat is older than the timeout.
func (h heartbeat) await(timeout time.Duration, abandoned chan<- struct{}) {
	for {
		if left := timeout - h.age(); left > 0 {
			// Not time.Sleep: Go's runtime polls until a processor is free for a timer, which costs
			// far more on a busy machine. A signal may end the sleep early.
			pause := unix.NsecToTimespec(int64(left))
			_ = unix.Nanosleep(&pause, nil)
			continue
		}
		time.Sleep(heartbeatGrace)
		if h.age() >= timeout {
			close(abandoned)
			return
		}
	}
}

// age returns the time since the heartbeat.
func (h heartbeat) age() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0
	}
	return time.Duration(now.Nano() - h.nanos.Load())
}
