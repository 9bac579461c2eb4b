package nsjail

import (
	"os"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// diskDir returns a directory that is not in memory.
func diskDir(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "bullpen-test-")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	return dir
}

// A program whose home is on disk may write more than its memory limit, up to exactly the limit of
// the home.
func TestHomeOnDisk(t *testing.T) {
	t.Parallel()
	m := openMaker(t, Config{VolumeDir: diskDir(t)})
	spec := testSpec()
	spec.Memory, spec.HomeBytes, spec.TmpBytes, spec.Inodes = 64<<20, 200<<20, 40<<20, 500
	for range 2 { // the second run must find nothing from the first
		r := runProgram(t, m, spec, program(t, "bash", `
ls -A ~ /tmp; stat -c '%a %u %g' ~ /tmp
head -c 180M /dev/zero > big; echo $?; rm big
head -c 220M /dev/zero > big 2>/dev/null; echo $(($? > 0)); got=$(stat -c %s big); echo $((got > 199 << 20 && got <= 200 << 20)); rm big
head -c 50M /dev/zero > /tmp/big 2>/dev/null; echo $(($? > 0)); rm /tmp/big
for i in $(seq 600); do : > f$i || break; done 2>/dev/null; ls | wc -l
rm -f f*; cp /usr/bin/su .; ls -l su | cut -c1-10; grep -c ' /home/baponi ext4 .*nosuid,nodev' /proc/mounts`))
		r.want(t, jail.Exited, `/home/baponi:

/tmp:
755 1000 1000
1777 1000 1000
0
1
1
1
500
-rwxr-xr-x
1`)
	}
	m.nothingLeft(t)
}

func TestHomeOnDiskNeedsADirectory(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	spec := testSpec()
	spec.HomeBytes = spec.Memory
	if _, err := m.Prepare(t.Context(), spec); err == nil ||
		!strings.Contains(err.Error(), "no directory for it on a disk") {
		t.Errorf("%v", err)
	}
	m.canary(t, prepare(t, m, testSpec()))
	m.nothingLeft(t)
}
