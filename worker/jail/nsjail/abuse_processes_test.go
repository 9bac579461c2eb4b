package nsjail

import (
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// soon is the timeout of attacks that end only by timing out.
const soon = 400 * time.Millisecond

func processAttacks() []attack {
	timeout := jail.Outcome{Kind: jail.TimedOut}
	return []attack{
		{name: "fork bomb", language: "python", code: `
import os, time
n = 0
try:
    while True:
        if os.fork() == 0: time.sleep(600)
        n += 1
except BlockingIOError: print(0 < n < 256)`, stdout: "True"},
		{
			name: "fork bomb in a shell", language: "bash", code: "bomb() { bomb | bomb & }; bomb; sleep 600", timeout: soon,
			want: timeout, limits: slow,
		},
		{name: "thread bomb", language: "python", code: `
import os, threading
e = threading.Event()
try:
    for n in range(10000): threading.Thread(target=e.wait, daemon=True).start()
except RuntimeError: print(0 < n < 256, flush=True)
os._exit(0)`, stdout: "True"},
		{name: "storm of vforks", language: "python", code: `
import os
n = 0
try:
    while True: os.posix_spawn('/bin/sleep', ['sleep', '600'], {}); n += 1
except BlockingIOError: print(0 < n < 256)`, stdout: "True"},
		{name: "storm of clone3", language: "python", code: `
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print({(libc.syscall(435, bytes(88), 88), ctypes.get_errno()) for i in range(10000)})`, stdout: "{(-1, 38)}"},
		{name: "1,000 double-forked orphans", language: "python", code: `
import os, time
for i in range(1000):
    if os.fork() == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.wait()
while len([p for p in os.listdir('/proc') if p.isdigit()]) > 2: time.sleep(0.001)
print('reaped')`, stdout: "reaped"},
		{name: "children that nobody waits for", language: "python", code: `
import os
n = 0
try:
    while True:
        if os.fork() == 0: os._exit(0)
        n += 1
except BlockingIOError: print(0 < n < 256)`, stdout: "True"},
		{
			name: "survivor in a session of its own, after the end", language: "bash",
			code: "setsid nohup sleep 600 & disown; echo gone", stdout: "gone",
		},
		{
			name: "survivors in sessions of their own, after a timeout", language: "bash", timeout: soon, want: timeout,
			code: "for i in {1..100}; do setsid sleep 600 & done; wait",
		},
		{
			name: "survivor in a session of its own, after a cancel", language: "bash", grace: soon,
			want: jail.Outcome{Kind: jail.Cancelled}, stdout: "up",
			code: "trap '' TERM; setsid nohup sleep 600 & echo up; sleep 600",
		},
		{
			name: "signals ignored", language: "bash", timeout: soon, want: timeout, stdout: "first",
			code: "trap '' TERM HUP INT QUIT USR1 ALRM; echo first; while :; do :; done",
		},
		{
			name: "50 busy processes that ignore signals, on half a core", language: "bash", timeout: soon, want: timeout,
			limits: slow,
			code:   "for i in {1..50}; do (trap '' TERM; while :; do :; done) & done; wait",
		},
		{name: "stopping itself", language: "bash", code: "kill -STOP $$", timeout: soon, want: timeout},
		{
			name: "stopping everything", language: "bash", code: "sleep 600 & kill -STOP -1; kill -STOP $$", timeout: soon,
			want: timeout,
		},
		{name: "killing everything", language: "python", code: `
import os
os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '600'); os.kill(-1, 9)
print(os.waitstatus_to_exitcode(os.wait()[1]))`, stdout: "-9"},
		{
			name: "killing the init", language: "bash",
			code: "for s in KILL TERM HUP STOP SEGV; do kill -$s 1; done 2>/dev/null; echo alive", stdout: "alive",
		},
		{
			name: "ending by SIGTERM", language: "bash", code: "kill -TERM $$",
			want: jail.Outcome{Kind: jail.Signaled, Signal: 15},
		},
		{
			name: "ending by SIGKILL", language: "bash", code: "kill -KILL $$",
			want: jail.Outcome{Kind: jail.Signaled, Signal: 9},
		},
		{
			name: "abort", language: "python", code: "import os; os.abort()",
			want: jail.Outcome{Kind: jail.Signaled, Signal: 6},
		},
		{
			name: "crash", language: "python", code: "import ctypes; ctypes.string_at(0)",
			want: jail.Outcome{Kind: jail.Signaled, Signal: 11},
		},
		{name: "ptrace of itself, then a fork", language: "python", code: `
import ctypes, os
print(ctypes.CDLL(None).ptrace(0, 0, 0, 0), flush=True)
if os.fork() == 0: os._exit(0)
os.wait()`, stdout: "-1"},
		{
			name: "closing stdout and going on", language: "bash", code: "exec >&- 2>&-; sleep 0.01; exit 3",
			want: jail.Outcome{Kind: jail.Exited, ExitCode: 3},
		},
		{
			name: "ending with stdout held open", language: "bash",
			code: "setsid sleep 600 & setsid nohup sleep 600 & disown; echo gone", stdout: "gone",
		},
		{name: "higher priority", language: "python", code: tried(
			"os.nice, -5", "os.setpriority, os.PRIO_PROCESS, 0, -1",
			"os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)",
		), stdout: "EPERM\nEACCES\nEPERM"},
		{
			name: "lowering its own OOM score", language: "bash", code: "echo -1000 > /proc/self/oom_score_adj; echo $?",
			stdout: "1",
		},
		{name: "children of the init", language: "python", code: errnos + `
for i in range(1000):
    pid = libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0) # CLONE_PARENT
    if pid == 0: libc.syscall(231, i % 7) if i % 2 else libc.abort()
    if pid < 0 and ctypes.get_errno() != errno.EAGAIN: print(errno.errorcode[ctypes.get_errno()])
print(os.getppid(), no(os.wait), flush=True)
if libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0) == 0: time.sleep(600)
os._exit(3)`, stdout: "1 ECHILD", want: jail.Outcome{Kind: jail.Exited, ExitCode: 3}},
		{name: "fork bomb that ends by itself, many times", run: func(t *testing.T, m *Maker) {
			for range repeats(20) {
				a := attack{
					name: "fork bomb", language: "python", limits: func(s *jail.Spec) { s.Pids = MinPids }, stdout: "True",
					want: jail.Outcome{Kind: jail.Exited, ExitCode: 3}, code: `
import os, time
n = 0
try:
    while True:
        if os.fork() == 0: time.sleep(600)
        n += 1
except BlockingIOError: print(0 < n < 16, flush=True)
os._exit(3)`,
				}
				a.check(t, a.attempt(t, m))
			}
		}},
	}
}

func slow(s *jail.Spec) { s.CPU = 0.5 }
