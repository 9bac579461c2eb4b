package nsjail

import (
	"slices"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// leaveBytes is Python that defines connect, which returns the ends of a TCP connection, and skip. The
// kernel copies what a process sends into fragments of 4 or 32 KiB, one after the other, and charges
// for the bytes that wait, not for the fragment. skip sends and receives bytes, so that the next byte is
// in another fragment.
const leaveBytes = errnos + `
def connect():
    global listener
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    a.setblocking(False)
    a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return a, b
def skip(bytes):
    between[0].send(data[:bytes])
    while bytes: bytes -= between[1].recv_into(data)
def begin():
    global listener, between
    listener = socket.create_server(('127.0.0.1', 0))
    between = connect()
data = bytearray(32768)
begin()
`

// inAllProcesses is Python that calls leave in one process after the other, each with its own files.
const inAllProcesses = `
print('first', flush=True)
while True:
    kept = leave()
    if os.fork():
        os.wait()
        sys.exit('a process has ended')
    kept = between = listener = None
    os.closerange(3, 1024)
    begin()
`

// leftBytes returns an attack that leaves bytes in queues beside neighbours, in more and more
// processes. It ends by the watch, its memory limit or its timeout. The Python code defines leave.
func leftBytes(name, code string) attack {
	a := attack{
		name: name, language: "python", limits: memory(64), timeout: time.Minute,
		code: leaveBytes + code + inAllProcesses, want: jail.Outcome{Kind: jail.OutOfMemory},
	}
	a.run = func(t *testing.T, m *Maker) {
		r, lost := attemptBeside(t, m, a)
		t.Logf("the host lost %d MiB, and the program ended as %s after %v, for %d MiB", lost>>20, r.Kind, r.Duration,
			r.Uncharged>>20)
		if lost >= mostLost {
			t.Errorf("the host lost %d MiB", lost>>20)
		}
		ends := []jail.Kind{jail.OutOfMemory, jail.TimedOut}
		if !slices.Contains(ends, r.Kind) || r.stdout != "first\n" {
			t.Errorf("got %+v\nstderr %s", r, r.stderr)
		}
	}
	return a
}

// queueAttacks are those on the memory behind what waits in queues.
func queueAttacks() []attack {
	attacks := []attack{
		hostMemory("in corked datagrams", "done", leaveBytes+`
for i in range(900):
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    u.connect(('127.0.0.1', 9))
    kept.append(u)
    for n in range(16):
        u.send(b'x' * 100, socket.MSG_MORE)
        skip(32668)`),
		leftBytes("in what connections receive and send", `
def leave():
    ends = [connect() for i in range(450)]
    for n in range(400):
        for a, b in ends: no(a.send, b'x'); skip(4095)
    return ends`),
		hostMemory("in bytes spliced from connections into pipes", "done", leaveBytes+`
a, b = connect()
for i in range(450):
    r, w = os.pipe()
    kept.append((r, w))
    for n in range(16):
        a.send(b'x')
        os.splice(b.fileno(), w, 1)
        skip(32767)`),
		// 4 MiB a second.
		leftBytes("in what connections receive and send, slowly", `
def leave():
    ends = [connect() for i in range(450)]
    for n in range(400):
        for i, (a, b) in enumerate(ends):
            no(a.send, b'x'); skip(4095)
            if i % 100 == 0: time.sleep(0.1)
    return ends`),
		leftBytes("in parts of corked datagrams", `
def leave():
    kept = []
    for i in range(900):
        u = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        u.setsockopt(socket.IPPROTO_IPV6, 24, 1280) # IPV6_MTU
        u.connect(('::1', 9))
        kept.append(u)
        for n in range(300):
            u.send(bytes(200), socket.MSG_MORE)
            skip(3896)
    return kept`),
		leftBytes("in bytes spliced into sockets of Unix", `
def leave():
    kept = []
    for i in range(400):
        s, t = socket.socketpair()
        s.setblocking(False)
        kept.append((s, t))
        a, b = connect()
        r, w = os.pipe()
        for n in range(100):
            for k in range(16):
                a.send(b'x')
                os.splice(b.fileno(), w, 1)
                skip(4095)
            if no(os.splice, r, s.fileno(), 16, None, None, 2) != 'done': break
        os.close(r); os.close(w)
    return kept`),
		hostMemory("in pages given to pipes", "done", `
import mmap
class page(ctypes.Structure): _fields_ = ('base', ctypes.c_void_p), ('len', ctypes.c_size_t)
for i in range(450):
    r, w = os.pipe()
    kept.append((r, w))
    for n in range(16):
        m = mmap.mmap(-1, 4096)
        m.write(b'x' * 4096)
        at = ctypes.c_char.from_buffer(m)
        libc.vmsplice(w, ctypes.byref(page(ctypes.addressof(at), 4096)), ctypes.c_size_t(1), 0)
        del at
        m.close()`),
		leftBytes("in message queues", `
def leave():
    kept = []
    message = ctypes.create_string_buffer(b'\1' * 9, 9)
    while True:
        q = libc.msgget(0, 0o1600)
        if q < 0: return kept
        while libc.msgsnd(q, message, ctypes.c_size_t(1), 0o4000) == 0: pass`),
		hostMemory("in pages of connections that are mapped", "ENOPROTOOPT", leaveBytes+`
import struct
libc.mmap.restype = ctypes.c_void_p
a, b = connect()
a.setblocking(True)
chunk = 8 * 4096
for i in range(16000):
    at = libc.mmap(None, ctypes.c_size_t(chunk), 1, 1, b.fileno(), ctypes.c_long(0))
    a.send(bytes(chunk))
    wanted = ctypes.create_string_buffer(struct.pack('=QI52x', at, chunk), 64)
    if libc.getsockopt(b.fileno(), 6, 35, wanted, ctypes.byref(ctypes.c_int(64))): raise OSError(ctypes.get_errno(), '')
    left = chunk - struct.unpack_from('=QI', wanted.raw)[1]
    while left: left -= b.recv_into(data, left)`),
	}
	for i := 2; i < len(attacks)-1; i++ {
		attacks[i].long = true
	}
	return attacks
}
