package nsjail

import (
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// TestContained runs programs that attack, and says what they must print.
func TestContained(t *testing.T) {
	m := newMaker(t)
	spec := testSpec()
	spec.HomeBytes, spec.TmpBytes, spec.Inodes = 4<<20, 4<<20, 100
	for _, tt := range []struct{ name, language, code, want string }{
		{"identity", "bash", "id; cat /proc/self/[ug]id_map | while read in out n; do echo $in $((out >= 1900000000)) $n; done", "uid=1000(baponi) gid=1000(baponi) groups=1000(baponi)\n0 1 1\n1000 1 1\n0 1 1\n1000 1 1"},
		{
			"no capability", "bash", "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status | tr -s '\\t' ' '",
			"CapInh: 0000000000000000\nCapPrm: 0000000000000000\nCapEff: 0000000000000000\nCapBnd: 0000000000000000\nCapAmb: 0000000000000000\nNoNewPrivs: 1\nSeccomp: 2",
		},
		{"only three descriptors", "bash", "cd /proc/self/fd; echo *; readlink 0", "0 1 2 255 3\n/dev/null"},
		{"init is closed", "bash", "for f in fd/ environ mem maps root/ cwd/ exe stack syscall; do cat /proc/1/$f 2>&1 | grep -c 'denied\\|not permitted'; done | sort -u", "1"},
		{"init cannot be killed", "bash", "kill -9 1; kill -15 1; kill -STOP 1; echo alive", "alive"},
		{"kill of everything", "python", "import os; os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '600'); os.kill(-1, 9); print(os.waitstatus_to_exitcode(os.wait()[1]))", "-9"},
		{"orphans are reaped", "python", `
import os, time
for i in range(1000):
    if os.fork() == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.wait()
while len([p for p in os.listdir('/proc') if p.isdigit()]) > 2: time.sleep(0.001)
print('reaped')`, "reaped"},
		{"fork bomb", "python", `
import os
n = 0
try:
    while True:
        if os.fork() == 0:
            import time; time.sleep(600)
        n += 1
except BlockingIOError: print(n < 256)`, "True"},
		{"thread bomb", "python", `
import threading
e = threading.Event()
try:
    for n in range(10000): threading.Thread(target=e.wait, daemon=True).start()
except RuntimeError: print(n < 256, flush=True)
import os; os._exit(0)`, "True"},
		{"home is full", "bash", "head -c 5000000 /dev/zero > x; echo $?; rm x; head -c 3000000 /dev/zero > x; echo $?", "1\n0"},
		{"tmp is full", "python", "import errno\ntry: open('/tmp/x', 'wb').write(bytes(5 << 20))\nexcept OSError as e: print(e.errno == errno.ENOSPC)", "True"},
		{"shm is full", "python", "import errno\ntry: open('/dev/shm/x', 'wb').write(bytes(5 << 20))\nexcept OSError as e: print(e.errno == errno.ENOSPC)", "True"},
		{"inodes", "python", "import errno\nfor d in ('.', '/tmp', '/dev/shm'):\n  try:\n    for i in range(1000): open(f'{d}/{i}', 'w')\n  except OSError as e: print(e.errno == errno.ENOSPC)", "True\nTrue\nTrue"},
		{
			"nothing else is writable", "bash", "find / -path /proc -prune -o -path /usr -prune -o -writable ! -type l -print 2>/dev/null | sort | tr '\\n' ' '; touch /data/x /run/bullpen/job/main.sh 2>&1 | wc -l",
			"/dev/full /dev/null /dev/random /dev/shm /dev/urandom /dev/zero /home/baponi /tmp 2",
		},
		{"no network", "python", `
import socket
for host, port in (('1.1.1.1', 80), ('169.254.169.254', 80), ('127.0.0.1', 22)):
    try: socket.create_connection((host, port), 5)
    except OSError as e: print(e.errno)
try: socket.getaddrinfo('example.com', 80)
except socket.gaierror as e: print(e.errno)
print(socket.if_nameindex())`, "101\n101\n111\n-3\n[(1, 'lo')]"},
		{"namespaces", "bash", "for o in -U -m -p -n -i -u -C -T -Um; do unshare $o true 2>&1 | grep -c 'not permitted'; done | sort -u; for f in /proc/self/ns/*; do nsenter --user=$f true 2>&1 | grep -cv xxx; done | sort -u", "1\n1"},
		{"mounts", "bash", "for a in '-t proc x /tmp' '-t tmpfs x /tmp' '--bind / /tmp' '-o remount,rw /'; do mount $a 2>&1 | grep -c 'permi\\|denied\\|superuser'; done | sort -u; umount /tmp 2>/dev/null; echo $?", "1\n32"},
		{"devices", "bash", "mknod x c 1 1; mknod x b 254 0; cat /dev/kmsg /dev/mem /dev/vda; ls /dev | wc -l", "10"},
		{"setuid does nothing", "bash", "su -c id 2>&1 | grep -c uid=0; passwd -d root 2>&1 | grep -c changed; find / -perm -4000 -exec test -u {} \\; -quit 2>/dev/null; grep -vc nosuid /proc/mounts", "0\n0\n0"},
		{"host files", "bash", "cat /etc/shadow /root/.bashrc /proc/kcore /sys/kernel/x 2>/dev/null; ls /root /sys /var /opt /mnt /srv 2>/dev/null; cat /etc/passwd | wc -l; cat /etc/resolv.conf; hostname", "3\nbullpen"},
		{"proc", "bash", "echo 1 > /proc/sys/kernel/core_pattern; echo b > /proc/sysrq-trigger; echo 1 > /proc/sys/vm/drop_caches; echo x > /proc/self/uid_map; echo $?", "1"},
		{"worker is not in sight", "bash", "ps -e -o comm= | sort -u | tr '\\n' ' '", "bash init ps sort tr "},
		{"foreign environment", "bash", "env | cut -d= -f1 | sort | tr '\\n' ' '", "BULLPEN_TRACE_ID HOME LANG NPM_CONFIG_CACHE NPM_CONFIG_PREFIX PATH PIP_BREAK_SYSTEM_PACKAGES PIP_CACHE_DIR PWD SHLVL TMPDIR USER _ "},
		{"closes stdout and runs on", "bash", "exec >&- ; sleep 0.01; echo on >&2; exit 3", ""},
		{"grandchild keeps the pipe", "bash", "setsid sleep 600 & setsid nohup sleep 600 & disown; echo gone", "gone"},
		{"no keyring", "bash", "cat /proc/keys 2>/dev/null | wc -l", "0"},
		{"limits", "bash", "ulimit -Sn; ulimit -Hn; ulimit -v; ulimit -f; ulimit -t; ulimit -u", "1024\n4096\nunlimited\nunlimited\nunlimited\n256"},
		{"a dump is neither written nor piped", "python", "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))", "(1, 1)"},
		{
			"what proc tells of the host", "bash", "cd /proc; cat kallsyms interrupts keys key-users locks cmdline diskstats partitions modules timer_list kcore sched_debug 2>/dev/null | wc -c; find acpi bus fs irq scsi -mindepth 1 2>/dev/null",
			"0",
		},
		{"proc is not writable", "bash", "find /proc -path '/proc/[0-9]*' -prune -o -type f -writable -exec test -f {} ';' -print 2>/dev/null", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r := runProgram(t, m, spec, program(t, tt.language, tt.code))
			if strings.TrimSpace(r.stdout) != strings.TrimSpace(tt.want) || r.Kind != jail.Exited {
				t.Errorf("%+v\nstdout %q\nwant   %q\nstderr %s", r.Outcome, r.stdout, tt.want, r.stderr)
			}
		})
	}
}

// TestSocketBuffers fills the buffers of sockets that nobody reads: on version 1
// they are bounded by an account of their own, on version 2 by the memory limit.
func TestSocketBuffers(t *testing.T) {
	m := newMaker(t)
	runCode(t, m, "python", `
import socket
kept, got = [], 0
for i in range(100):
    r = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    r.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    r.bind(("127.0.0.1", 0))
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for n in range(200):
        s.sendto(bytes(60000), r.getsockname())
    kept += [r, s]
for r in kept[::2]:
    r.setblocking(False)
    try:
        while True: got += len(r.recv(65536))
    except BlockingIOError: pass
print(got <= 64 << 20)
`).want(t, jail.Exited, "True")
}

// TestSystemCalls makes system calls by number and says which errno, or signal,
// they must end with. All are x86-64.
func TestSystemCalls(t *testing.T) {
	m := newMaker(t)
	const call = `
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def sc(*a):
    pid = os.fork()
    if pid == 0:
        r = libc.syscall(*[ctypes.c_long(x) for x in a])
        os._exit(ctypes.get_errno() if r == -1 else 0)
    s = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return s
`
	for _, tt := range []struct{ name, args, want string }{
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
		{"clock_settime", "227, 0, 0", "1"},
		{"adjtimex", "159, 0", "1"},
		{"syslog", "103, 2, 0, 0", "1"},
		{"personality read", "135, 0xffffffff", "0"},
		{"personality no randomize", "135, 0x0040000", "0"},
		{"personality read implies exec", "135, 0x0400000", "1"},
		{"personality upper bits", "135, 0x100000000", "1"},
		{"modify_ldt", "154, 0, 0, 0", "1"},
		{"tiocsti", "16, 0, 0x5412, 0", "1"},
		{"tiocsti upper bits", "16, 0, 0x100005412, 0", "1"},
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
		{"attach filter", "54, 0, 1, 26, 0, 0", "1"},
		{"attach bpf", "54, 0, 1, 50, 0, 0", "1"},
		{"attach reuseport filter", "54, 0, 1, 51, 0, 0", "1"},
		{"attach reuseport bpf", "54, 0, 1, 52, 0, 0", "1"},
		{"other socket option", "54, 0, 1, 2, 0, 0", "88"},
		{"io_setup", "206, 1, 0", "38"},
		{"open_tree_attr", "467, -100, 0, 0, 0, 0", "38"},
		{"reboot", "169, 0, 0, 0", "-31"},
		{"kexec_load", "246, 0, 0, 0, 0", "-31"},
		{"init_module", "175, 0, 0, 0", "-31"},
		{"swapon", "167, 0, 0", "-31"},
		{"iopl", "172, 3", "-31"},
		{"setuid 0", "105, 0", "1"},
		{"setgroups", "116, 0, 0", "1"},
		{"chroot", "161, 0", "1"},
		{"pidfd of init", "424, 1, 9, 0, 0", "9"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			runCode(t, m, "python", call+"print(sc("+tt.args+"))").want(t, jail.Exited, tt.want)
		})
	}
}

// TestOtherEntries makes the system call getpid through the 32-bit and the x32
// entry, with machine code: both would go round a filter that looks only at
// 64-bit numbers. The filter kills, whether the kernel knows the entry or not.
func TestOtherEntries(t *testing.T) {
	m := newMaker(t)
	for _, tt := range []struct {
		name, code string
		kind       jail.Kind
		stdout     string
	}{
		{"int 0x80", "b814000000cd80c3", jail.Seccomp, "before"},                 // mov eax, 20; int 0x80; ret
		{"x32", "b8270000400f05c3", jail.Seccomp, "before"},                      // mov eax, 0x40000027; syscall; ret
		{"no number", "48c7c0ffffffff0f05c3", jail.Exited, "before\n-38\nafter"}, // mov rax, -1; syscall; ret
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			runCode(t, m, "python", `
import ctypes, mmap
b = mmap.mmap(-1, 4096, prot=7)
b.write(bytes.fromhex('`+tt.code+`'))
print('before', flush=True)
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(b)))())
print('after')`).want(t, tt.kind, tt.stdout)
		})
	}
}

// A bomb that kills nothing of ours: it ends on the clock, and at once.
func TestBombsEndInTime(t *testing.T) {
	m := newMaker(t)
	for name, code := range map[string]string{
		"forks":    "bomb() { bomb | bomb & }; bomb; sleep 600",
		"spins":    "for i in {1..50}; do (trap '' TERM; while :; do :; done) & done; wait",
		"sessions": "for i in {1..100}; do setsid sleep 600 & done; wait",
	} {
		t.Run(name, func(t *testing.T) {
			p := program(t, "bash", code)
			p.Timeout = 500 * time.Millisecond
			spec := testSpec()
			spec.CPU = 0.5
			r := runProgram(t, m, spec, p)
			if r.Kind != jail.TimedOut || r.Duration > 20*time.Second {
				t.Errorf("%+v", r.Outcome)
			}
		})
	}
}
