package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// testAutoscaleProcess starts workers from zero, and drains them to zero again without killing a
// program. When the server is killed, its worker ends.
func testAutoscaleProcess(t *testing.T, p *programs, in topology) {
	// The path of a socket is short.
	dir, err := os.MkdirTemp("", "bullpen")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	policy := filepath.Join(dir, "policy.json")
	if err := os.WriteFile(policy, []byte(`{"scale_down_after": 1, "scale_to_zero_after": 1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	sys := newSystem(t, p, in, noSlots, "--data", filepath.Join(dir, "data"), "--autoscale", "process",
		"--autoscale-policy", policy, "--slots", "2")
	sys.ready(t)
	if list := sys.workers(t); len(list) != 0 {
		t.Errorf("a worker was started for nothing: %v", list)
	}
	if r := sys.inline(bash("echo hello")); r.Stdout != "hello\n" {
		t.Errorf("got %+v", r)
	}
	h := newHold()
	held := sys.submit(bash(h.code()))
	h.reached(t, 1)
	sys.inline(bash("true")) // another evaluation
	h.release(t)
	sys.ended(held).succeeded(t, "held\nwoken\n")
	eventually(t, "the worker is drained", func() (bool, any) {
		list := sys.workers(t)
		return len(list) == 0, list
	})

	sys.inline(bash("true"))
	sys.front.kill()
	eventually(t, "the worker of a killed server ends", func() (bool, any) {
		f, err := os.Open(filepath.Join(dir, "data", "workers", "0", "lock"))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }() // unlocks
		return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil, nil
	})
}

// workers returns the names of the live workers.
func (sys *system) workers(t *testing.T) (names []string) {
	t.Helper()
	var list struct{ Workers []struct{ Name string } }
	sys.get("/v1/admin/workers").into(t, &list)
	for _, w := range list.Workers {
		names = append(names, w.Name)
	}
	return names
}

// testAutoscaleExec runs an operator's command with the number of workers that are needed: one for
// a job that waits, none when it has ended. The test is the cloud that starts and stops them.
func testAutoscaleExec(t *testing.T, p *programs) {
	dir := t.TempDir()
	policy, command, wanted := filepath.Join(dir, "policy.json"), filepath.Join(dir, "scale"), filepath.Join(dir, "wanted")
	for name, text := range map[string]string{
		policy: `{"scale_down_after": 1, "scale_to_zero_after": 1}`,
		command: fmt.Sprintf("#!/bin/sh\necho \"$2 $BULLPEN_AUTOSCALE_LIVE_WORKERS\" >%[1]s.new && mv %[1]s.new %[1]s\n",
			wanted),
	} {
		if err := os.WriteFile(name, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	own := []string{"--autoscale", "exec", "--autoscale-command", command, "--autoscale-policy", policy}
	sys := newSystem(t, p, topology{separate: true}, noSlots, own...)
	sys.args = sys.args[len(own):] // workers do not scale
	wants := func(text string) func() (bool, any) {
		return func() (bool, any) {
			b, err := os.ReadFile(wanted)
			return string(b) == text+"\n", fmt.Sprintf("%q, %v", b, err)
		}
	}
	id := sys.submit(bash("echo hello"))
	eventually(t, "a worker is wanted", wants("1 0"))
	sys.startWorker(t)
	sys.ended(id).succeeded(t, "hello\n")
	eventually(t, "no worker is wanted", wants("0 1"))
	sys.worker.signal(syscall.SIGTERM)
	if code := sys.worker.exitCode(t); code != 0 {
		t.Errorf("the worker that is not wanted exited with %d:\n%s", code, sys.worker.tail())
	}
}
