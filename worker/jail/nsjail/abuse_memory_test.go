package nsjail

import (
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

func memoryAttacks() []attack {
	oom := jail.Outcome{Kind: jail.OutOfMemory}
	within := func(t testing.TB, r result) {
		t.Helper()
		if r.MemoryPeak > 65<<20 {
			t.Errorf("peak %d over the limit", r.MemoryPeak)
		}
	}
	// bomb returns an attack that must be killed after it prints its first line.
	bomb := func(name, code string) attack {
		return attack{
			name: name, language: "python", code: "print('first', flush=True)\n" + code + "\nprint('never')",
			limits: memory(64), want: oom, stdout: "first", also: within,
		}
	}
	return []attack{
		bomb("touching", "x = bytearray(200 << 20)"),
		bomb("in a child", "import subprocess, time\nsubprocess.run(['python3', '-c', 'bytearray(200 << 20)'])\ntime.sleep(600)"),
		bomb("in many processes", "import os\nfor i in range(8):\n  if not os.fork(): x = bytearray(30 << 20)\nwhile True: pass"),
		bomb("in files in memory", "import os\nf = os.memfd_create('x')\nwhile True: os.write(f, b'x' * (1 << 20))"),
		// The files use nearly all of the memory, and a fork of python adds nearly nothing.
		bomb("in home, /tmp and /dev/shm", `
x = bytearray(8 << 20)
for d, n in ('/home/baponi', 31), ('/tmp', 15), ('/dev/shm', 15):
  for i in range(n): open(f'{d}/{i}', 'wb').write(b'x' * (1 << 20))`),
		bomb("in System V shared memory", `
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for i in range(8): ctypes.memset(libc.shmat(libc.shmget(i + 1, ctypes.c_size_t(20 << 20), 0o1600), None, 0), 1, 20 << 20)`),
		bomb("in pipes", `
import fcntl, os
ends = []
while True:
    r, w = os.pipe(); ends += [r, w]
    os.set_blocking(w, False)
    try:
        while True: os.write(w, bytes(65536))
    except BlockingIOError: pass
    if len(ends) > 800:
        if os.fork(): os.wait()
        os.closerange(3, 1024); ends = []`),
		{name: "locking", language: "python", limits: memory(64), code: `
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.mlockall(3) == 0 or ctypes.get_errno() in (1, 12))`, stdout: "True"},
		{
			name: "the page cache", language: "bash", limits: memory(32),
			code: "find /usr/lib /usr/bin -type f -size +1M -readable 2>/dev/null | head -50 | xargs cat | wc -c | grep -c '^........'", stdout: "1",
		},
		{
			// Version 1 accounts for socket buffers separately. Version 2 counts them towards the
			// memory limit.
			name: "in buffers of sockets that nobody reads", language: "python", code: `
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
print(got <= 64 << 20)`, stdout: "True",
		},
		{name: "before the first instruction", starved: true, language: "python", limits: memory(2), code: "print('never')", want: oom},
		{name: "40 times, which the kernel could blame on the jail", run: func(t *testing.T, m *Maker) {
			for range 40 {
				a := attack{
					name: "touching", language: "bash", limits: memory(32), code: "echo first; tail /dev/zero; sleep 600", want: oom, stdout: "first",
				}
				r := a.attempt(t, m)
				a.check(t, r)
				if r.MemoryPeak > 33<<20 || r.MemoryPeak < 16<<20 {
					t.Errorf("peak %d", r.MemoryPeak)
				}
			}
		}, want: oom},
	}
}
