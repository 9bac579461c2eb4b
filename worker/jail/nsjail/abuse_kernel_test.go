package nsjail

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

func kernelAttacks() []attack {
	attacks := []attack{
		{
			name: "identity", language: "bash",
			code:   "id; cat /proc/self/[ug]id_map | while read in out n; do echo $in $((out >= 10000)) $n; done",
			stdout: "uid=1000(baponi) gid=1000(baponi) groups=1000(baponi)\n0 1 1\n1000 1 1\n0 1 1\n1000 1 1",
		},
		{
			name: "capabilities", language: "bash",
			code: "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status | tr -s '\\t' ' '",
			stdout: "CapInh: 0000000000000000\nCapPrm: 0000000000000000\nCapEff: 0000000000000000\nCapBnd: " +
				"0000000000000000\nCapAmb: 0000000000000000\nNoNewPrivs: 1\nSeccomp: 2",
		},
		{
			name: "limits", language: "bash",
			code:   "ulimit -Sn; ulimit -Hn; ulimit -v; ulimit -f; ulimit -t; ulimit -u; ulimit -Hn 5000 2>/dev/null; echo $?",
			stdout: "1024\n1024\nunlimited\nunlimited\nunlimited\n256\n1",
		},
		{name: "open files without end", language: "python", code: errnos + `
import resource
kept = []
def more():
    while True: kept.append(os.open('/dev/null', 0))
print(no(more), len(kept) < 1024)`, stdout: "EMFILE True"},
		{
			name: "a core dump for the host's handler", language: "python",
			code:   "import os, resource; print(resource.getrlimit(resource.RLIMIT_CORE), flush=True); os.abort()",
			stdout: "(1, 1)", want: jail.Outcome{Kind: jail.Signaled, Signal: 6},
		},
		{
			name: "descriptors that were inherited", language: "bash", code: "cd /proc/self/fd; echo *; readlink 0",
			stdout: "0 1 2 255 3\n/dev/null",
		},
		{
			name: "variables of the worker", language: "bash", code: "env | cut -d= -f1 | sort | tr '\\n' ' '",
			stdout: "BULLPEN_TRACE_ID HOME LANG NPM_CONFIG_CACHE NPM_CONFIG_PREFIX PATH PIP_BREAK_SYSTEM_PACKAGES " +
				"PIP_CACHE_DIR PWD PYTHONUNBUFFERED SHLVL TERM TMPDIR USER _ ",
		},
		{
			name: "processes of the worker", language: "bash",
			code: "all=$(ps -e -o comm=); sort -u <<< \"$all\" | tr '\\n' ' '; cat /proc/[2-9]/environ /proc/[2-9]/mem " +
				"2>/dev/null | grep -c nsjail; true", stdout: "bash init ps 0",
		},
		{
			name: "namespaces of its own", language: "bash",
			code:   "for o in -U -m -p -n -i -u -C -T -Um; do unshare $o true 2>&1 | grep -c 'not permitted'; done | sort -u",
			stdout: "1",
		},
		{
			name: "namespaces of others by /proc", language: "bash",
			code: "for f in /proc/self/ns/* /proc/1/ns/*; do nsenter --user=$f true 2>/dev/null && echo in; nsenter " +
				"--mount=$f true 2>/dev/null && echo in; done; echo out", stdout: "out",
		},
		{
			name: "mounts", language: "bash",
			code: "for a in '-t proc x /tmp' '-t sysfs x /tmp' '-t cgroup2 x /tmp' '-t tmpfs x /tmp' '-t overlay -o " +
				"lowerdir=/usr:/etc x /tmp' '--bind / /tmp' '-o remount,rw /'; do mount $a 2>&1 | grep -c " +
				"'permi\\|denied\\|superuser'; done | sort -u; umount /tmp 2>/dev/null; echo $?", stdout: "1\n32",
		},
		{
			name: "masks of /proc removed", language: "bash",
			code: "umount /proc/keys 2>/dev/null; umount -l /proc 2>/dev/null; wc -c < /proc/kallsyms; echo x > /proc/keys; " +
				"wc -c < /proc/keys", stdout: "0\n0",
		},
		{
			name: "groups of the host", language: "bash",
			code: "ls /sys/fs/cgroup 2>/dev/null | wc -l; grep -v ':/$' /proc/self/cgroup; find / -name 'cgroup.procs' -o " +
				"-name release_agent 2>/dev/null | grep -v ^/proc | wc -l", stdout: "0\n0",
		},
		{
			name: "switches of the kernel", language: "bash",
			code: "for f in sys/kernel/core_pattern sys/kernel/modprobe sys/vm/drop_caches sys/fs/binfmt_misc/register " +
				"sys/kernel/hostname sys/user/max_user_namespaces sysrq-trigger self/uid_map self/setgroups; do (echo 1 > " +
				"/proc/$f) 2>/dev/null && echo $f; done; find /proc -path '/proc/[0-9]*' -prune -o -type f -writable -exec test " +
				"-f {} ';' -print 2>/dev/null; true", stdout: "",
		},
		{
			name: "host data in /proc", language: "bash", stdout: "0",
			code: `cd /proc; cat kallsyms interrupts keys key-users locks cmdline diskstats driver/rtc partitions modules \
		timer_list kcore sched_debug kmsg slabinfo vmallocinfo \
buddyinfo cgroups config.gz crypto pagetypeinfo schedstat softirqs swaps zoneinfo net/sockstat self/net/softnet_stat thread-self/net/protocols net/rt_acct net/stat/rt_cache 2>/dev/null | wc -c
find acpi asound bus fs irq pressure scsi sys/kernel/pty sys/fs/{aio-nr,dentry-state,file-nr,inode-nr,inode-state,quota} -mindepth 0 ! -type d 2>/dev/null; true`,
		},
		{name: "figures of the host that change, in /proc", run: changingFigures},
		{name: "the host's boot id", run: func(t *testing.T, m *Maker) {
			host, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
			if err != nil {
				t.Fatal(err)
			}
			r := runCode(t, m, "bash", "cat /proc/sys/kernel/random/boot_id")
			if r.want(t, jail.Exited, constantBootID); r.stdout == string(host) {
				t.Error("it is the host's")
			}
		}},
		{name: "paths of the host in mountinfo", run: mountinfo},
		{name: "a program in memory", language: "python", code: `
import os
f = os.memfd_create('x'); os.write(f, open('/usr/bin/id', 'rb').read())
os.execve(f, ['id', '-u'], {})`, stdout: "1000"},
		{
			name: "terminals, without a profile that has some", language: "bash", code: "ls /dev; exec 9<>/dev/ptmx",
			stdout: "fd\nfull\nnull\nrandom\nshm\nstderr\nstdin\nstdout\nurandom\nzero",
			want:   jail.Outcome{Kind: jail.Exited, ExitCode: 1},
		},
		{
			name: "terminals of the host and of others", language: "python", limits: terminals(4), code: errnos + `
import fcntl, pty, termios
print(os.listdir('/dev/pts'), no(os.open, '/dev/tty', os.O_RDWR), no(os.mknod, '/tmp/console', 0o20666, os.makedev(5, 1)))
kept = [pty.openpty()]
print(os.ttyname(kept[0][1]), sorted(os.listdir('/dev/pts')))
for request in (0x5412, 0x541c, 0x541d, 0x5423, 0x5437): # TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD, TIOCVHANGUP
    print(no(fcntl.ioctl, kept[0][1], request, bytes((21, 0, 0, 0))))
def more():
    while True: kept.append(os.open('/dev/ptmx', os.O_RDWR))
print(no(more), len(kept))`,
			stdout: "['ptmx'] ENXIO EPERM\n/dev/pts/0 ['0', 'ptmx']\nEPERM\nEPERM\nEPERM\nEPERM\nEPERM\nENOSPC 4",
		},
		{
			name: "scheduling on all processors", language: "python",
			code: "import os; os.sched_setaffinity(0, range(os.cpu_count())); print(True)", stdout: "True",
		},
	}
	// Machine code that calls getpid through other entry points, which bypass a filter of 64-bit
	// numbers.
	for _, e := range []struct {
		name, code string
		kind       jail.Kind
		stdout     string
	}{
		{"the 32-bit entry", "b814000000cd80c3", jail.Seccomp, "before"},           // mov eax, 20; int 0x80; ret
		{"the 32-bit entry, to mount", "b815000000cd80c3", jail.Seccomp, "before"}, // mov eax, 21; int 0x80; ret
		// mov eax, 0x40000027; syscall; ret
		{"the x32 entry", "b8270000400f05c3", jail.Seccomp, "before"},
		// mov eax, 0x40000209; syscall; ret
		{"the x32 entry, to ptrace", "b8090200400f05c3", jail.Seccomp, "before"},
		{"a call without a number", "48c7c0ffffffff0f05c3", jail.Exited, "before\n-38\nafter"}, // mov rax, -1; syscall; ret
	} {
		a := attack{name: e.name, language: "python", stdout: e.stdout, want: jail.Outcome{Kind: e.kind}, code: `
import ctypes, mmap
b = mmap.mmap(-1, 4096, prot=7)
b.write(bytes.fromhex('` + e.code + `'))
print('before', flush=True)
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(b)))())
print('after')`}
		if e.kind == jail.Seccomp {
			a.want.Signal = 31
		}
		attacks = append(attacks, a)
	}
	for _, c := range attackCalls {
		attacks = append(attacks, attack{
			name: c.name, language: "python", stdout: "before", want: jail.Outcome{Kind: jail.Seccomp, Signal: 31},
			code: "import ctypes; print('before'); ctypes.CDLL(None).syscall(" + c.args + "); print('after')",
		})
	}
	for _, c := range systemCalls {
		attacks = append(attacks, attack{
			name: c.name, language: "python", code: systemCall + "print(sc(" + c.args + "))",
			call: c.args, stdout: c.want,
		})
	}
	return attacks
}

// mountinfo checks that a jail's mountinfo shows no host paths except the unavoidable ones. Those
// are the shared directories, the devices, and the path of the root in the run directory.
func mountinfo(t *testing.T, m *Maker) {
	roots := []string{"", emptyDir}
	for _, name := range m.proc.replaced {
		roots = append(roots, jail.ProcDir+"/"+name)
	}
	r := runCode(t, m, "bash", "cut -d' ' -f4 /proc/self/mountinfo | sort -u | tr '\\n' ' '")
	host := rootInFilesystem(t)
	for path := range strings.FieldsSeq(r.stdout) {
		path = "/" + strings.TrimPrefix(strings.TrimPrefix(path, host), "/")
		shared := path == "/" || path == "/bin" || path == "/sbin" || strings.HasPrefix(path, "/usr") ||
			strings.HasPrefix(path, "/lib")
		root := slices.ContainsFunc(roots, func(in string) bool { return strings.HasSuffix(m.dir+"/root/0"+in, path) })
		if _, err := os.Stat(filepath.Join("/dev", path)); err != nil && !shared && !root {
			t.Errorf("mountinfo shows %s", path)
		}
	}
}

// rootInFilesystem returns where the root of this machine is in its file system, without a slash at the
// end. It is a directory of another machine's file system if that runs this one as a container.
func rootInFilesystem(t *testing.T) string {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	root := ""
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); f[4] == "/" { // the last mount on it counts
			root = strings.TrimSuffix(f[3], "/")
		}
	}
	return root
}

// changingFigures reads all of /proc, except the directories of processes, for a second of the
// host's clock. Meanwhile only files with what sysinfo(2) returns anyway may change, and the
// generator of random ids.
func changingFigures(t *testing.T, m *Maker) {
	runCode(t, m, "python", `
import os
def read():
    found = {}
    for top, dirs, files in os.walk('/proc'):
        if top == '/proc': dirs[:] = [d for d in dirs if not d.isdigit()]
        for name in files:
            try:
                with open(os.path.join(top, name), 'rb') as f: found[os.path.join(top, name)] = f.read()
            except OSError: pass
    return found
before = after = read()
while float(after['/proc/uptime'].split()[0]) < float(before['/proc/uptime'].split()[0]) + 1: after = read()
known = {'/proc/loadavg', '/proc/meminfo', '/proc/uptime', '/proc/sys/kernel/random/uuid'}
print(len(before) > 100, sorted(name for name in after if before.get(name) != after[name] and name not in known))`).
		want(t, jail.Exited, "True []")
}

// attackCalls lists the system calls that end the program, by their x86-64 numbers.
var attackCalls = []struct{ name, args string }{ // read only
	{"reboot", "169, 0, 0, 0"},
	{"kexec_load", "246, 0, 0, 0, 0"},
	{"init_module", "175, 0, 0, 0"},
	{"swapon", "167, 0, 0"},
	{"iopl", "172, 3"},
	{"kexec_file_load", "320, 0, 0, 0, 0, 0"},
	{"finit_module", "313, 0, 0, 0"},
	{"delete_module", "176, 0, 0"},
	{"swapoff", "168, 0"},
	{"ioperm", "173, 0, 1, 1"},
}

// systemCall is Python that makes a system call by number in a child. It returns the errno.
const systemCall = `
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def sc(*a):
    pid = os.fork()
    if pid == 0:
        r = libc.syscall(*[ctypes.c_long(x) for x in a])
        os._exit(ctypes.get_errno() if r == -1 else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
`

// systemCalls lists system calls by their x86-64 numbers; want is what sc prints.
var systemCalls = []struct{ name, args, want string }{ // read only
	{"ptrace traceme", "101, 0, 0, 0, 0", "1"},
	{"ptrace attach init", "101, 16, 1, 0, 0", "1"},
	{"process_vm_readv", "310, 1, 0, 0, 0, 0, 0", "1"},
	{"kcmp", "312, 1, 1, 0, 0, 0", "1"},
	{"pidfd_getfd", "438, 0, 3, 0", "1"},
	{"add_key", "248, 0, 0, 0, 0, 0", "1"},
	{"keyctl", "250, 0, 0, 0, 0, 0", "1"},
	{"bpf", "321, 0, 0, 0", "1"},
	{"perf_event_open", "298, 0, 0, 0, 0, 0", "1"},
	{"userfaultfd", "323, 0", "1"},
	{"io_uring_setup", "425, 1, 0", "1"},
	{"fsopen", "430, 0, 0", "1"},
	{"open_tree", "428, -100, 0, 0", "1"},
	{"mount_setattr", "442, -100, 0, 0, 0, 0", "1"},
	{"setns", "308, 0, 0", "1"},
	{"umount2", "166, 0, 0", "1"},
	{"pivot_root", "155, 0, 0", "1"},
	{"clone newuser", "56, 0x10000011, 0, 0, 0, 0", "1"},
	{"clone3", "435, 0, 0", "38"},
	{"unshare newuser", "272, 0x10000000", "1"},
	{"unshare newtime", "272, 0x80", "1"},
	{"unshare files", "272, 0x400", "0"},
	{"open_by_handle_at", "304, -100, 0, 0", "1"},
	{"name_to_handle_at", "303, -100, 0, 0, 0, 0", "1"},
	{"statmount", "457, 0, 0, 0, 0", "38"},
	{"listmount", "458, 0, 0, 0, 0", "38"},
	{"fanotify_init", "300, 0x200, 0", "1"},
	{"filter by prctl", "157, 22, 2, 0, 0, 0", "22"},
	{"filter by seccomp", "317, 1, 0, 0", "22"},
	{"another prctl", "157, 3, 0, 0, 0, 0", "0"},
	{"name of a mapping", "157, 0x53564d41, 0, 0, 0, 0", "22"},
	{"sharing of a core", "157, 62, 0, 0, 0, 0", "22"},
	{"merging of pages", "157, 67, 1, 0, 0, 0", "22"},
	{"prctl of a kernel to come", "157, 1000, 0, 0, 0, 0", "22"},
	{"processors for threads", "203, 0, 0, 0", "0"},
	{"clock_settime", "227, 0, 0", "1"},
	{"adjtimex", "159, 0", "1"},
	{"syslog", "103, 2, 0, 0", "1"},
	{"personality read", "135, 0xffffffff", "0"},
	{"personality no randomize", "135, 0x0040000", "0"},
	{"personality read implies exec", "135, 0x0400000", "1"},
	{"personality upper bits", "135, 0x100400000", "1"},
	{"modify_ldt", "154, 0, 0, 0", "1"},
	{"tiocsti", "16, 0, 0x5412, 0", "1"},
	{"tiocsti upper bits", "16, 0, 0x100005412, 0", "1"},
	{"tiocsetd", "16, 0, 0x5423, 0", "1"},
	{"tiocsetd upper bits", "16, 0, 0x100005423, 0", "1"},
	{"socket unix", "41, 1, 1, 0", "0"},
	{"socket inet", "41, 2, 1, 0", "0"},
	{"socket netlink route", "41, 16, 3, 0", "0"},
	{"socket netlink netfilter", "41, 16, 3, 12", "93"},
	{"socket packet", "41, 17, 3, 0", "97"},
	{"socket vsock", "41, 40, 1, 0", "97"},
	{"socket alg", "41, 38, 5, 0", "97"},
	{"socket icmp", "41, 2, 2, 1", "93"},
	{"socket udplite", "41, 2, 2, 136", "93"},
	{"socket mptcp", "41, 10, 1, 262", "93"},
	{"socket tcp", "41, 10, 1, 6", "0"},
	{"socket tcp, with flags", "41, 2, 0x80801, 0", "0"},
	{"socket udp", "41, 2, 2, 17", "0"},
	{"socket tcp of datagrams", "41, 2, 2, 6", "93"},
	{"socket udp of a stream", "41, 10, 1, 17", "93"},
	{"socket packets of sctp", "41, 2, 5, 0", "94"},
	{"socket packets of sctp, upper bits", "41, 10, 0x100000005, 132", "94"},
	{"socket dccp", "41, 2, 6, 0", "94"},
	{"socket packet by inet", "41, 2, 10, 3", "94"},
	{"socket raw", "41, 2, 3, 1", "1"},
	{"socket raw, IPv6", "41, 10, 3, 255", "1"},
	{"socket unix packets", "41, 1, 5, 0", "0"},
	{"socket unix raw", "41, 1, 3, 0", "94"},
	{"socket unix, another protocol", "41, 1, 1, 2", "93"},
	{"socketpair unix", "53, 1, 0x80001, 0, 0", "14"},
	{"socketpair inet", "53, 2, 1, 0, 0", "97"},
	{"socketpair unix raw", "53, 1, 3, 0, 0", "94"},
	{"sync", "162", "0"},
	{"syncfs", "306, -1", "0"},
	{"fadvise dontneed", "221, -1, 0, 0, 4", "0"},
	{"fadvise dontneed, upper bits", "221, -1, 0, 0, 0x100000004", "0"},
	{"fadvise willneed", "221, -1, 0, 0, 3", "9"},
	{"attach filter", "54, 0, 1, 26, 0, 0", "1"},
	{"attach bpf", "54, 0, 1, 50, 0, 0", "1"},
	{"attach reuseport filter", "54, 0, 1, 51, 0, 0", "1"},
	{"attach reuseport bpf", "54, 0, 1, 52, 0, 0", "1"},
	{"other socket option", "54, 0, 1, 2, 0, 0", "88"},
	{"mapped pages of a connection", "55, 0, 6, 35, 0, 0", "92"},
	{"io_setup", "206, 1, 0", "38"},
	{"open_tree_attr", "467, -100, 0, 0, 0, 0", "38"},
	{"setuid 0", "105, 0", "1"},
	{"setgroups", "116, 0, 0", "1"},
	{"chroot", "161, 0", "1"},
	{"pidfd of init", "424, 1, 9, 0, 0", "9"},
	{"ptrace seize", "101, 0x4206, 1, 0, 0", "1"},
	{"process_madvise", "440, 0, 0, 0, 0, 0", "38"},
	{"process_vm_writev", "311, 1, 0, 0, 0, 0, 0", "1"},
	{"request_key", "249, 0, 0, 0, 0", "1"},
	{"io_uring_enter", "426, 0, 0, 0, 0, 0", "1"},
	{"io_uring_register", "427, 0, 0, 0, 0", "1"},
	{"mount", "165, 0, 0, 0, 0, 0", "1"},
	{"move_mount", "429, -100, 0, -100, 0, 0", "1"},
	{"fsconfig", "431, 0, 0, 0, 0, 0", "1"},
	{"fsmount", "432, 0, 0, 0", "1"},
	{"clone newpid newnet", "56, 0x60000011, 0, 0, 0, 0", "1"},
	{"settimeofday", "164, 0, 0", "1"},
	{"clock_adjtime", "305, 0, 0", "1"},
	{"sethostname", "170, 0, 0", "1"},
	{"setdomainname", "171, 0, 0", "1"},
	{"acct", "163, 0", "1"},
	{"quotactl", "179, 0, 0, 0, 0", "1"},
	{"vhangup", "153", "1"},
	{"tioclinux", "16, 0, 0x541c, 0", "1"},
	{"socket bluetooth", "41, 31, 3, 1", "97"},
	{"socket can", "41, 29, 3, 1", "97"},
	{"socket tipc", "41, 30, 1, 0", "97"},
	{"socket rds", "41, 21, 5, 0", "97"},
	{"socket pppox", "41, 24, 1, 0", "97"},
	{"socket smc", "41, 43, 1, 0", "97"},
	{"socket xdp", "41, 44, 3, 0", "97"},
	{"socket netlink audit", "41, 16, 3, 9", "93"},
	{"socket sctp", "41, 2, 1, 132", "93"},
	{"fanotify_mark", "301, 0, 0, 0, -100, 0", "1"},
	{"migrate_pages of init", "256, 1, 0, 0, 0", "1"},
	{"migrate_pages of itself", "256, 0, 0, 0, 0", "1"},
	{"move_pages of itself", "279, 0, 0, 0, 0, 0, 0", "1"},
	{"mbind", "237, 0, 0, 0, 0, 0, 0", "1"},
	{"set_mempolicy", "238, 0, 0, 0", "1"},
	{"set_mempolicy_home_node", "450, 0, 0, 0, 0", "1"},
	{"get_mempolicy", "239, 0, 0, 0, 0, 0", "0"},
	{"transmit timestamps", "54, 0, 1, 37, 0, 0", "1"},
	{"transmit timestamps, new", "54, 0, 1, 65, 0, 0", "1"},
	{"transmit timestamps, upper bits", "54, 0, 0x100000001, 0x100000025, 0, 0", "1"},
	{"TLS in the kernel", "54, 0, 6, 31, 0, 0", "2"},
	{"IPsec in datagrams", "54, 0, 17, 100, 0, 0", "92"},
	{"receive timestamps", "54, 0, 1, 29, 0, 0", "88"},
	{"errors of datagrams", "54, 0, 0, 11, 0, 0", "0"},
	{"errors of datagrams, IPv6", "54, 0, 41, 25, 0, 0", "0"},
	{"errors of datagrams, upper bits", "54, 0, 0x100000000, 0x10000000b, 0, 0", "0"},
	{"least to receive", "54, 0, 1, 18, 0, 0", "0"},
	{"least to receive, upper bits", "54, 0, 0x100000001, 0x100000012, 0, 0", "0"},
	{"other option of IP", "54, 0, 0, 10, 0, 0", "88"},
	{"setns by pidfd", "308, 3, 0x20000000", "1"},
	{"setresuid 0", "117, 0, 0, 0", "1"},
	{"setgid 0", "106, 0", "1"},
	{"mknod", "133, 0, 0, 0", "14"},
	{"ioprio_set real time", "251, 1, 0, 0x2000", "1"},
	{"cachestat", "451, -1, 0, 0, 0", "38"},
	{"remap_file_pages", "216, 0, 0, 0, 0, 0", "38"},
	{"lsm_list_modules", "461, 0, 0, 0", "38"},
	{"landlock_create_ruleset", "444, 0, 0, 1", "38"},
	{"ustat", "136, 0, 0", "38"},
	{"a call of a kernel to come", "900", "38"},
}
