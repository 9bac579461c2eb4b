package nsjail

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// TestProgramsReadProc runs what common programs learn from the files of /proc that are not the
// host's in a jail.
func TestProgramsReadProc(t *testing.T) {
	t.Parallel()
	m := newMaker(t)
	cpus := runtime.NumCPU()
	for language, p := range map[string]struct{ code, want string }{
		"python": {
			`
import os, re, time
print(os.cpu_count(), os.sysconf('SC_NPROCESSORS_CONF'), os.sysconf('SC_PHYS_PAGES') > 0)
stat = open('/proc/stat').read()
print(len(re.findall(r'^cpu\d', stat, re.M)), sum(map(int, stat.split()[1:9])) > 0, int(re.search(r'btime (\d+)', stat)[1]) > 0)
print(re.search(r'pswpin (\d+)', open('/proc/vmstat').read())[1], open('/proc/sys/fs/file-max').read().strip().isdigit())
print(os.listdir('/proc/sys/fs/inotify') != [], len(open('/proc/sys/kernel/random/boot_id').read()))`,
			fmt.Sprintf("%d %d True\n%d True True\n0 True\nTrue 37", cpus, cpus, cpus),
		},
		"node": {
			`
const os = require('os')
console.log(os.cpus().length, os.cpus().every(c => c.times.idle > 0), os.totalmem() > 0, os.freemem() > 0, os.uptime() > 0, os.loadavg().length)`,
			fmt.Sprintf("%d true true true true 3", cpus),
		},
		"bash": {
			`
nproc --all; free -b | grep -c Mem; uptime -p | grep -c up; sysctl -n fs.nr_open | grep -c '^[0-9]'
ps -o lstart= -p $$ | grep -c "$(date +%Y)"; top -bn1 | grep -c Cpu; vmstat | wc -l; sort -n <<< 1`,
			fmt.Sprintf("%d\n1\n1\n1\n1\n1\n3\n1", cpus),
		},
	} {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			runCode(t, m, language, p.code).want(t, jail.Exited, p.want)
		})
	}
}

// TestJailOwnsItsNetwork checks that the files of /proc/net belong to root of the jail. Where they
// belong to the host's root, a worker in a user namespace without that cannot hide those that count
// for the whole host.
func TestJailOwnsItsNetwork(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			m := newMaker(t)
			setStartMode(t, m, mode)
			for _, language := range []string{"python", "bash"} { // a zygote's init forks jails for the latter
				code := "import os; print(os.stat('/proc/self/net/tcp').st_uid, os.stat('/proc/self/net/stat').st_uid)"
				if language == "bash" {
					code = "echo $(stat -c %u /proc/self/net/tcp /proc/self/net/stat)"
				}
				runCode(t, m, language, code).want(t, jail.Exited, "0 0")
			}
		})
	}
}
