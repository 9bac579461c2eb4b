package cgroup

import (
	"runtime"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// Limits are set despite the signals that the runtime sends to its threads.
func TestLimitsDespiteSignals(t *testing.T) {
	g := newGroup(t, newTree(t, "signals"), "a")
	file := map[int]string{1: "memory.limit_in_bytes", 2: "memory.max"}[g.version]
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid, tid := unix.Getpid(), unix.Gettid()
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Tgkill(pid, tid, unix.SIGURG) // the runtime's own signal, which it accepts from anybody
			}
		}
	}()
	defer func() { close(stop); <-done }()
	for i := range 3000 {
		if err := write(g.dirs[g.ctl.memory], file, strconv.Itoa(64<<20+i%1000<<12)); err != nil {
			t.Fatal(err)
		}
	}
}
