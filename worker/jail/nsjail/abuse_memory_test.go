package nsjail

import (
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// withNetLimit returns an attack that is refused where the kernel has the setting for each network
// namespace. Elsewhere the worker must say that it lacks the setting, and the host's memory is the
// witness: the program may end by itself, by its memory limit, or by the watch.
func withNetLimit(setting string, a attack) attack {
	b := a
	b.run = func(t *testing.T, m *Maker) {
		if err := m.NetLimits(); err == nil || !strings.Contains(err.Error(), setting) {
			a.test(t, m)
			return
		}
		witness(t, m, &a, func(r result) {
			if r.Kind != jail.Exited && r.Kind != jail.OutOfMemory {
				t.Errorf("got %+v\nstderr %s", r.Outcome, r.stderr)
			}
		})
	}
	return b
}

// leaveConnections is Python that defines leave, which makes connections to a listener that nobody
// accepts, with data that nobody reads.
const leaveConnections = `
def leave(l, connections):
    for n in range(connections):
        s = socket.socket()
        s.setblocking(False)
        s.connect_ex(l.getsockname())
        try: s.send(bytes(60000))
        except OSError: pass
        s.close()`

// locks is Python that prints first and defines lock, which opens files and takes 2,000 locks of
// each: 0.4 MiB that nobody is charged for.
const locks = `
import fcntl, struct, time
print('first', flush=True)
kept = []
def lock(files):
    for n in range(files):
        kept.append(open(f'/tmp/{len(kept)}', 'w'))
        for start in range(4000, 0, -2): fcntl.fcntl(kept[-1], fcntl.F_SETLK, struct.pack('hhqqi', fcntl.F_WRLCK, 0, start, 1, 0))
`

// openDirectories is Python that prints first and opens a directory of an overlay again and again. It
// changes it in between, so that the kernel makes a new list of its entries each time.
const openDirectories = `
import os, time
print('first', flush=True)
open('f', 'w').close()
for i in range(11000): os.link('f', f'{i:05}' + 'x' * 240)
kept = []
while len(kept) < 250 or not os.fork():
    if len(kept) >= 250: kept = []
    open('new', 'w').close(); os.unlink('new')
    d = os.open('.', os.O_RDONLY)
    kept.append((d, os.scandir(d)))
    next(kept[-1][1])
time.sleep(600)`

// quarterCore are the limits of a small sandbox.
func quarterCore(s *jail.Spec) {
	memory(64)(s)
	s.CPU = 0.25
}

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
		bomb("in a child", "import subprocess, time\nsubprocess.run(['python3', '-c', 'bytearray(200 << "+
			"20)'])\ntime.sleep(600)"),
		bomb("in many processes",
			"import os\nfor i in range(8):\n  if not os.fork(): x = bytearray(30 << 20)\nwhile True: pass"),
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
			code: "find /usr/lib /usr/bin -type f -size +1M -readable 2>/dev/null | head -50 | xargs cat | wc -c | grep -c " +
				"'^........'", stdout: "1",
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
		hostMemory("in policies of shared memory", "EPERM", `
libc.mmap.restype = ctypes.c_void_p
libc.mbind = lambda *a: libc.syscall(237, *a)
f = os.memfd_create('x')
os.ftruncate(f, 1 << 46)
node, window = (ctypes.c_ulong * 1)(1), 1 << 25
for start in range(0, 100 * window, window):
    at = libc.mmap(None, ctypes.c_size_t(window), 3, 1, f, ctypes.c_long(start))
    for page in range(at, at + window, 8192):
        if libc.syscall(237, ctypes.c_void_p(page), ctypes.c_ulong(4096), 1, node, ctypes.c_ulong(2), 0) != 0:
            raise OSError(ctypes.get_errno(), 'mbind')
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(window))`),
		hostMemory("in transmit timestamps that nobody reads", "EPERM", `
for i in range(60):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    s.setsockopt(socket.SOL_SOCKET, 37, 0x12)
    kept.append(s)
    for n in range(200):
        try: s.sendto(bytes(60000), ('127.0.0.1', 9))
        except ConnectionRefusedError: pass`),
		// 50 MiB, which is too little for the watch, so that the refusal alone decides.
		hostMemory("in keys of TCP connections", "ENOPROTOOPT", `
import struct
for i in range(300):
    s = socket.socket()
    kept.append(s)
    for n in range(960):
        s.setsockopt(6, 14, struct.pack('=H2xI120xBBHi80s', socket.AF_INET, 10 + n, 0, 0, 80, 0, bytes(80)))`),
		hostMemory("in multicast groups", "ENODEV", `
import struct
for i in range(20):
    s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    kept.append(s)
    for n in range(300): s.setsockopt(41, 20, struct.pack('>HQIH', 0xff02, 0, i, n) + struct.pack('=I', 1))`),
		hostMemory("in options of the packets of IPv6 sockets", "ENOPROTOOPT", `
import struct
options = struct.pack('=Qiii4x', 20, 41, 52, 1) * 2600
for i in range(700):
    s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    kept.append(s)
    s.setsockopt(41, 6, options)`),
		{
			name: "in options of sockets", language: "python", code: errnos + `
t, u = socket.socket(), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
print(*{no(t.setsockopt, 6, option, bytes(300)) for option in (14, 32, 38, 39, 40)})
print(*{no(t.setsockopt, 0, option, bytes(300)) for option in (35, 39, 42, 46)})
print(*{no(u.setsockopt, 41, option, bytes(300)) for option in (20, 27, 42, 46)})
print(*{no(u.setsockopt, 41, option, bytes(300)) for option in (6, 32)})`,
			stdout: "ENOPROTOOPT\nENODEV\nENODEV\nENOPROTOOPT",
		},
		withNetLimit("core/optmem_max", attack{
			name: "in control data of messages", language: "python", code: errnos + `
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
a, b = socket.socketpair()
print(no(s.sendmsg, [b'x'], [(99, 0, bytes(5000))], 0, ('127.0.0.1', 9)), no(socket.send_fds, a, [b'x'], [0] * 253))`,
			stdout: "ENOBUFS done",
		}),
		{name: "in errors of datagrams that nobody reads", language: "python", code: errnos + `
for family, address, level, option in (socket.AF_INET, '127.0.0.1', 0, 11), (socket.AF_INET6, '::1', 41, 25):
    s = socket.socket(family, socket.SOCK_DGRAM)
    s.setsockopt(level, option, 1)
    print(s.sendto(b'x', (address, 9)), no(s.sendto, b'x', (address, 9)), no(s.recv, 1, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT))
    s.connect((address, 9))
    print(s.send(b'x'), no(s.send, b'x'))`, stdout: "1 done EAGAIN\n1 ECONNREFUSED\n1 done EAGAIN\n1 ECONNREFUSED"},
		witnessed(attack{
			name: "in terminals, and in what nobody reads from them", language: "python", stdout: "ENOSPC",
			limits: func(s *jail.Spec) {
				memory(64)(s)
				terminals(64)(s)
			}, code: errnos + `
import fcntl, tty
kept = []
def attack():
    while True:
        m = os.open('/dev/ptmx', os.O_RDWR)
        fcntl.ioctl(m, 0x40045431, bytes(4)) # TIOCSPTLCK
        s = fcntl.ioctl(m, 0x5441, os.O_RDWR | os.O_NOCTTY) # TIOCGPTPEER
        kept.append((m, s))
        tty.setraw(s)
        for fd in m, s:
            os.set_blocking(fd, False)
            try:
                while os.write(fd, bytes(65536)): time.sleep(0.001)
            except BlockingIOError: pass
        if len(kept) == 64:
            for i in range(800): kept.append(os.open(os.ttyname(s), os.O_RDWR | os.O_NOCTTY))
print(no(attack))`,
		}),
		hostMemory("in netlink errors that nobody reads", "ENOBUFS", `
import struct
request = struct.pack('IHHII', 32768, 0x7fff, 1, 0, 0) + bytes(32752)
for i in range(60):
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    kept.append(s)
    for n in range(200): s.send(request)
while True: kept.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))`),
		withNetLimit("core/tstamp_allow_data", hostMemory("in transmit timestamps that each message asks for", "done", `
for i in range(90):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    kept.append(s)
    for n in range(200):
        try: s.sendmsg([bytes(60000)], [(socket.SOL_SOCKET, 37, bytes((2, 0, 0, 0)))], 0, ('127.0.0.1', 9))
        except ConnectionRefusedError: pass`)),
		withNetLimit("core/somaxconn", hostMemory("in connections that nobody accepts", "done", leaveConnections+`
for i in range(8):
    l = socket.create_server(('127.0.0.1', 0), backlog=1 << 20)
    kept.append(l)
    leave(l, 4096)`)),
		withNetLimit("core/somaxconn",
			hostMemory("in connections to many listeners with large buffers", "ENOBUFS", leaveConnections+`
try:
    for i in range(900):
        l = socket.socket()
        l.setsockopt(socket.SOL_SOCKET, (socket.SO_RCVBUF, socket.SO_RCVLOWAT, socket.SO_KEEPALIVE)[i % 3], 1 << 20)
        l.bind(('127.0.0.1', 0))
        l.listen(4096)
        kept.append(l)
finally:
    for l in kept: leave(l, 20)`)),
		uncharged(attack{
			name: "in locks of files", language: "python", want: oom, stdout: "first", limits: quarterCore,
			code: locks + `
lock(1000)
print('never')`,
		}, false),
		// Each burst is over before a search has a result, and it waits until the search has ended. This
		// attack and the next one take minutes, and longer on a host that others keep busy.
		uncharged(attack{
			name: "in bursts of locks of files", language: "python", want: oom, stdout: "first", long: true,
			limits: memory(64), code: locks + `
while len(kept) < 900:
    lock(100)
    time.sleep(8)
print('never')`,
		}, false),
		// 4 MiB a second.
		uncharged(attack{
			name: "in locks of files, slowly", language: "python", want: oom, stdout: "first", long: true,
			limits: quarterCore, code: locks + `
while len(kept) < 900:
    lock(1)
    time.sleep(0.1)
print('never')`,
		}, false),
		// An overlay reads a whole directory at once, however many names it has.
		{name: "in one list of a directory's entries", run: func(t *testing.T, m *Maker) {
			watching.Lock()
			defer watching.Unlock()
			th := newThread(t, threadFiles())
			defer th.close()
			a := attack{name: "one list", language: "python", stdout: "ENOSPC", limits: th.large(memory(64)), code: errnos + `
def fill():
    for n in range(2000000):
        if n % 60000 == 0: open(f'file{n}', 'w').close()
        os.link(f'file{n // 60000 * 60000}', f'{n:X}')
print(no(fill))
next(os.scandir('.'))`}
			loss := watchHostMemory(t, m)
			a.check(t, a.attempt(t, m))
			if lost := loss(); lost >= mostLost/2 {
				t.Errorf("the host lost %d MiB", lost>>20)
			}
		}},
		// Each open directory has a list of the entries that were there when it was read.
		uncharged(attack{
			name: "in open directories of an overlay", language: "python", want: oom, stdout: "first",
			limits: quarterCore, code: openDirectories,
		}, true),
		uncharged(attack{
			name: "in open directories of ext4", language: "python", want: oom, stdout: "first",
			limits: func(s *jail.Spec) {
				quarterCore(s)
				s.HomeBytes = 512 << 20
			}, code: `
import ctypes, os, time
print('first', flush=True)
open('f', 'w').close()
for i in range(1000): os.link('f', f'{i:05}' + 'x' * 240)
some = ctypes.create_string_buffer(300)
while True:
    for d in [os.open('.', os.O_RDONLY) for i in range(1000)]: ctypes.CDLL(None).getdents64(d, some, 300)
    if os.fork(): time.sleep(600)
    os.closerange(3, 1024)`,
		}, false),
		{
			name: "before the first instruction", starved: true, language: "python", limits: memory(2),
			code: "print('never')", want: oom,
		},
		{name: "many times in a row", run: func(t *testing.T, m *Maker) {
			for range repeats(40) {
				a := attack{
					name: "touching", language: "bash", limits: memory(32), code: "echo first; tail /dev/zero; sleep 600", want: oom,
					stdout: "first",
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
