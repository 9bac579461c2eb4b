package nsjail

import (
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// grace is the grace of attacks that use it up.
const grace = 400 * time.Millisecond

func endingAttacks() []attack {
	killed := jail.Outcome{Kind: jail.Cancelled}
	itself := jail.Outcome{Kind: jail.Cancelled, Graceful: true}
	return []attack{
		{
			name: "ignoring SIGTERM", language: "bash", grace: grace, want: killed, stdout: "up",
			code: "trap '' TERM; echo up; while :; do :; done",
		},
		{
			name: "ignoring SIGTERM after a timeout", language: "bash", timeout: soon, timeoutGrace: grace,
			want: jail.Outcome{Kind: jail.TimedOut}, code: "trap '' TERM; while :; do :; done",
		},
		{name: "blocking every signal in every thread", language: "python", grace: grace, want: killed, stdout: "up", code: `
import signal, threading, time
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
for i in range(20): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print('up', flush=True)
time.sleep(600)`},
		{name: "forking for ever at SIGTERM", language: "python", grace: grace, want: killed, stdout: "up", code: `
import os, signal, time
def bomb(*_):
    while True:
        try: os.fork()
        except BlockingIOError: pass
signal.signal(signal.SIGTERM, bomb)
print('up', flush=True)
while True: time.sleep(.01)`},
		{
			name: "leaving at SIGTERM, in sessions of their own", language: "bash", grace: patience, want: itself,
			stdout: "up", code: `
trap 'for i in {1..50}; do setsid nohup sleep 600 & done; exit 0' TERM
echo up; while :; do sleep 0.01; done`,
		},
		{
			name: "processes in groups and sessions of their own that SIGTERM does not reach", language: "python",
			grace: patience, want: itself, stdout: "up", code: `
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
for i in range(50):
    if os.fork() == 0:
        if i % 2: os.setsid()
        else: os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
print('up', flush=True)
while True: time.sleep(.01)`,
		},
		{
			name: "leaving the process group that gets SIGTERM", language: "python", grace: patience, want: itself,
			stdout: "EPERM EPERM", code: errnos + `
import signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print(no(os.setsid), no(os.setpgid, 0, 0), flush=True)
while True: time.sleep(.01)`,
		},
		{
			name: "stopping itself at SIGTERM", language: "bash", grace: grace, want: killed, stdout: "up",
			code: "trap 'kill -STOP $$' TERM; echo up; while :; do sleep 0.01; done",
		},
		{
			name: "stopping everything at SIGTERM", language: "bash", grace: grace, want: killed, stdout: "up",
			code: "trap 'kill -STOP -1; kill -STOP $$' TERM; echo up; while :; do sleep 0.01; done",
		},
		{name: "becoming another program at SIGTERM", language: "bash", grace: grace, want: killed, stdout: "up", code: `
trap 'exec setsid --fork --wait bash -c "trap \"\" TERM; while :; do :; done"' TERM
echo up; while :; do sleep 0.01; done`},
		{
			name: "ending at SIGTERM as if it had succeeded", language: "bash", grace: patience, want: itself, stdout: "up",
			code: "trap 'exit 0' TERM; echo up; while :; do sleep 0.01; done",
		},
		{
			name: "dying of another signal at SIGTERM", language: "bash", grace: patience,
			want: jail.Outcome{Kind: jail.Cancelled, Graceful: true, Signal: 9}, stdout: "up",
			code: "trap 'kill -9 $$' TERM; echo up; while :; do sleep 0.01; done",
		},
		{
			name: "killing everything at SIGTERM", language: "python", grace: patience,
			want: jail.Outcome{Kind: jail.Cancelled, Graceful: true, ExitCode: 3}, stdout: "up", code: `
import os, signal, time
def end(*_):
    try: os.kill(-1, 9)
    except ProcessLookupError: pass
    os._exit(3)
signal.signal(signal.SIGTERM, end)
print('up', flush=True)
while True: time.sleep(.01)`,
		},
		{name: "printing for ever at SIGTERM", language: "python", grace: grace, want: killed, stdout: "up", code: `
import os, signal, time
def end(*_):
    while True: os.write(2, b'x' * 65536)
signal.signal(signal.SIGTERM, end)
print('up', flush=True)
while True: time.sleep(.01)`},
		{
			name: "memory at SIGTERM", language: "python", grace: patience, limits: memory(64),
			want: jail.Outcome{Kind: jail.OutOfMemory}, stdout: "up", starved: true, code: `
import signal, time
def end(*_):
    held = []
    while True: held.append(b'x' * (1 << 20))
signal.signal(signal.SIGTERM, end)
print('up', flush=True)
while True: time.sleep(.01)`,
		},
		{
			name: "a forbidden call at SIGTERM", language: "python", grace: patience,
			want: jail.Outcome{Kind: jail.Seccomp, Signal: 31}, stdout: "up", code: `
import ctypes, signal, time
signal.signal(signal.SIGTERM, lambda *_: ctypes.CDLL(None).syscall(169, 0, 0, 0, 0))
print('up', flush=True)
while True: time.sleep(.01)`,
		},
	}
}
