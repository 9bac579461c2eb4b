package e2e

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// testAutoscaleProcess starts workers from zero, and drains them to zero again without killing a
// program. When the server is killed, its worker ends.
func testAutoscaleProcess(t *testing.T, p *programs) {
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
	sys := newSystem(t, p, topology{}, noSlots, "--data", filepath.Join(dir, "data"), "--autoscale", "process", "--autoscale-policy", policy, "--slots", "2")
	sys.ready(t)
	workers := func() (n int, r *reply) {
		var list struct{ Workers []struct{ Name string } }
		r = sys.get("/v1/admin/workers")
		r.into(t, &list)
		return len(list.Workers), r
	}
	if n, r := workers(); n != 0 {
		t.Errorf("a worker was started for nothing: %s", r)
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
		n, r := workers()
		return n == 0, r
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
