package nsjail

import "github.com/bullpen-run/bullpen/worker/jail"

func outcomeAttacks() []attack {
	seccomp := jail.Outcome{Kind: jail.Seccomp, Signal: 31}
	exited := func(code int) jail.Outcome { return jail.Outcome{Kind: jail.Exited, ExitCode: code} }
	return []attack{
		{
			name: "through the init's /proc", language: "bash",
			code: "for f in fd/ environ mem maps root/ cwd/ exe stack syscall; do cat /proc/1/$f 2>&1 | grep -c " +
				"'denied\\|not permitted'; done | sort -u; exit 9", stdout: "1", want: exited(9),
		},
		{
			name: "through descriptors it was given", language: "bash",
			code:   "cd /proc/self/fd; echo *; readlink 0; for i in {3..20}; do echo forged >&$i; done 2>/dev/null; exit 9",
			stdout: "0 1 2 255 3\n/dev/null", want: exited(9),
		},
		{name: "by ptrace of the init", language: "python", code: errnos + `
print(libc.ptrace(16, 1, 0, 0), ctypes.get_errno(), libc.ptrace(0x4206, 1, 0, 0), ctypes.get_errno())
sys.exit(9)`, stdout: "-1 1 -1 1", want: exited(9)},
		{name: "with the init's descriptor", language: "python", code: errnos + `
p = os.pidfd_open(1)
print([libc.syscall(438, p, fd, 0) for fd in range(8)], ctypes.get_errno())
sys.exit(9)`, stdout: "[-1, -1, -1, -1, -1, -1, -1, -1] 1", want: exited(9)},
		{
			name: "by the init's memory", language: "python",
			code:   tried("open, '/proc/1/mem', 'r+b'", "open, '/proc/1/syscall'", "os.readlink, '/proc/1/exe'") + "sys.exit(9)",
			stdout: "EACCES\nEACCES\nEACCES", want: exited(9),
		},
		{name: "an exit code that looks like a signal", language: "bash", code: "exit 137", want: exited(137)},
		{name: "an exit code that looks like a timeout", language: "bash", code: "exit 124", want: exited(124)},
		{
			name: "a signal that looks like the filter's", language: "bash", code: "kill -SYS $$",
			want: jail.Outcome{Kind: jail.Signaled, Signal: 31},
		},
		{
			name: "a forbidden call", language: "python",
			code: "import ctypes; print(1); ctypes.CDLL(None).syscall(169, 0, 0, 0, 0)", stdout: "1", want: seccomp,
		},
		{
			name: "a forbidden call in a child", language: "bash",
			code: `echo 1; python3 -c 'import ctypes; ctypes.CDLL(None).syscall(169)'; echo $?`, stdout: "1", want: seccomp,
		},
		{
			name: "a forbidden call in another thread", language: "python", code: `
import ctypes, threading
t = threading.Thread(target=lambda: ctypes.CDLL(None).syscall(169, 0, 0, 0, 0)); t.start(); t.join(); print('never')`,
			want: seccomp,
		},
		{name: "forbidden calls in one child after another", language: "python", code: `
import ctypes, os
call = ctypes.CDLL(None).syscall
for i in range(1000):
    print(i)
    if os.fork() == 0: call(169)
    os.wait()`, stdout: "0", want: seccomp},
		{
			name: "out of memory in a child, and an end as if nothing had been", language: "bash", limits: memory(64),
			code: "tail /dev/zero; sleep 600", want: jail.Outcome{Kind: jail.OutOfMemory},
		},
		{
			name: "killing its parent, the init's child", language: "bash", code: "(kill -9 $$; exit 0)",
			want: jail.Outcome{Kind: jail.Signaled, Signal: 9},
		},
		{
			name: "a child that ends otherwise", language: "bash",
			code: "(exit 0) & (exit 1) & setsid sh -c 'exit 2' & wait; exit 9", want: exited(9),
		},
	}
}
