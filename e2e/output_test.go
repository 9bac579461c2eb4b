package e2e

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// testOutputBudget lets one organisation flood its outputs until its budget is used up. Its results
// are shortened and say so, and nothing changes for another organisation.
func testOutputBudget(t *testing.T, p *programs) {
	const budget, floods, least = 8 << 20, 16, 64 << 10
	sys := newSystem(t, p, topology{}, 4, "--output-budget", "8MiB", "--output-limit", "4MiB")
	loud, _ := sys.newKey("loud", "pro")
	quiet, _ := sys.newKey("quiet", "pro")
	// Each would store 16 MiB or more: its output in the result and again as events.
	code := `line=$(head -c 3000 /dev/urandom | base64 -w 0); yes "$line" | head -c 4M; yes "$line" | head -c 4M >&2`
	var ids []string
	for range floods {
		ids = append(ids, sys.with(loud).submit(bash(code)))
	}
	kept := 0
	for _, id := range ids {
		r := sys.with(loud).ended(id)
		if r.Status != "success" || len(*r.Stdout) < least || len(*r.Stderr) < least {
			t.Fatalf("%s %s with %d and %d bytes", id, r.Status, len(*r.Stdout), len(*r.Stderr))
		}
		kept += len(*r.Stdout) + len(*r.Stderr)
	}
	if most := budget + 2*floods*least; kept > most {
		t.Errorf("the results hold %d bytes, more than %d", kept, most)
	}
	last := sys.with(loud).ended(ids[floods-1])
	if !last.OutputBudgetExceeded || !last.StdoutTruncated || !last.StderrTruncated || !last.OutputTruncated {
		t.Errorf("beyond the budget: exceeded %v, truncated %v, %v, %v", last.OutputBudgetExceeded, last.StdoutTruncated,
			last.StderrTruncated, last.OutputTruncated)
	}
	id := sys.with(loud).submit(bash(`yes | head -c 4M; echo "last words"`))
	sys.with(loud).ended(id)
	events := sys.with(loud).output(id, 0)
	if n := len(events); events[n-2].Data != "last words\n" || !events[n-1].Result.OutputBudgetExceeded {
		t.Errorf("%d events, the last ones do not tell the end", n)
	}
	r := sys.with(loud).inline(bash("head -c 64K /dev/zero | tr '\\0' x"))
	if len(r.Stdout) != least || r.StdoutTruncated || r.OutputBudgetExceeded {
		t.Errorf("little output beyond the budget: %d bytes, exceeded %v", len(r.Stdout), r.OutputBudgetExceeded)
	}
	r = sys.with(quiet).inline(bash("head -c 1M /dev/zero | tr '\\0' x"))
	if r.Stdout != strings.Repeat("x", 1<<20) || r.StdoutTruncated || r.OutputBudgetExceeded {
		t.Errorf("another organisation: %d bytes, exceeded %v", len(r.Stdout), r.OutputBudgetExceeded)
	}
}

// testDiskReserve leaves less free space on the disk than its reserve, 64 MiB. Nothing new is
// accepted or started, and what was accepted ends with little output.
func testDiskReserve(t *testing.T, p *programs) {
	sys, disk := newSmallSystem(t, p)
	h := newHold()
	running := []string{
		sys.submit(bash(h.code() + "yes | head -c 1M")),
		sys.submit(bash(h.code() + "yes | head -c 1M")),
	}
	h.reached(t, 2)
	queued := sys.submit(bash("echo queued"))

	var st syscall.Statfs_t
	if err := syscall.Statfs(disk, &st); err != nil {
		t.Fatal(err)
	}
	filler, err := os.Create(filepath.Join(disk, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(syscall.Fallocate(int(filler.Fd()), 0, 0, int64(st.Bavail)*st.Bsize-60<<20),
		filler.Close()); err != nil {
		t.Fatal(err)
	}
	for _, mode := range [][]string{nil, {"Prefer", "respond-async"}, {accept, ndjson}} {
		r := sys.execute(bash("true"), mode...)
		r.rejection(t, http.StatusServiceUnavailable, "disk_full")
		r.retryAfter(t)
	}
	if r := sys.get("/readyz"); r.status != http.StatusServiceUnavailable ||
		!strings.Contains(string(r.body), `"missing":"disk"`) {
		t.Errorf("/readyz: %s", r)
	}
	metrics := string(sys.get("/metrics").body)
	if !strings.Contains(metrics, "\nbullpen_disk_reserve_bytes 6.7108864e+07\n") ||
		!strings.Contains(metrics, "\nbullpen_disk_free_bytes{directory=\"data\"} ") {
		t.Error("/metrics lacks the free space and the reserve")
	}
	h.release(t)
	for _, id := range running {
		if r := sys.ended(id); r.Status != "success" || len(*r.Stdout) != 64<<10 || !r.OutputBudgetExceeded {
			t.Errorf("%s with %d bytes, exceeded %v", r.Status, len(*r.Stdout), r.OutputBudgetExceeded)
		}
	}
	if r := sys.record(queued); r.Status != "queued" {
		t.Errorf("accepted before: %s", r)
	}
	if err := os.Remove(filler.Name()); err != nil {
		t.Fatal(err)
	}
	sys.ended(queued).succeeded(t, "queued\n")
	sys.ready(t)
}
