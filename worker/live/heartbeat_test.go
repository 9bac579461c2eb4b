package live_test

import (
	"fmt"
	"net/http"
	"os"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// All guests of a worker can read its heartbeat, and none can write it.
func TestHeartbeat(t *testing.T) {
	w := newWorld(t)
	guest := func(http.ResponseWriter, *http.Request) {}
	x, y := w.add("one", time.Hour, 0, guest), w.add("two", time.Hour, 0, guest)
	if x.Heartbeat != y.Heartbeat {
		t.Error("two guests have different heartbeats")
	}
	size := os.Getpagesize()
	memory, err := unix.Mmap(int(x.Heartbeat.Fd()), 0, size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(memory) }()
	beats := (*atomic.Int64)(unsafe.Pointer(&memory[0]))
	first := beats.Load()
	if now := monotonic(t); first <= 0 || first > now {
		t.Errorf("the heartbeat is %d at %d", first, now)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for beats.Load() == first {
		if <-tick.C; monotonic(t)-first > int64(time.Minute) {
			t.Fatal("there is no second heartbeat")
		}
	}
	path := fmt.Sprintf("/proc/self/fd/%d", x.Heartbeat.Fd())
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return // nor can it be opened for writing
	}
	defer func() { _ = f.Close() }()
	if _, err := f.WriteAt([]byte{1}, 0); err == nil {
		t.Error("a guest can write the heartbeat")
	}
	if _, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		t.Error("a guest can map the heartbeat to write it")
	}
	if err := f.Truncate(0); err == nil {
		t.Error("a guest can shorten the heartbeat")
	}
}

func monotonic(t *testing.T) int64 {
	t.Helper()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		t.Fatal(err)
	}
	return now.Nano()
}
