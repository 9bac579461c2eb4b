package nsjail

import (
	"fmt"
	"runtime/debug"
	"testing"
)

// A jail with a writable root that does not start leaves nothing of its root behind.
func TestRootOfFailedStart(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // it would close what is no longer used
	m := openMaker(t, Config{VolumeDir: diskDir(t)})
	spec := testSpec()
	spec.Root = makeImage(t, map[string]string{"etc/motd": "x"})
	spec.Guest, spec.RootBytes = true, 16<<20
	if err := prepare(t, m, spec).Close(); err != nil { // a root of this kind can be made
		t.Fatal(err)
	}
	m.cfg.NsjailPath = "/bin/false"
	fail := func() {
		if j, err := m.Prepare(t.Context(), spec); err == nil {
			t.Fatalf("prepared %v", j)
		}
		m.jails.Wait()
	}
	fail()
	before := footprint(t, m)
	for range 5 {
		fail()
	}
	if after := footprint(t, m); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("before %v, after %v", before, after)
	}
}
