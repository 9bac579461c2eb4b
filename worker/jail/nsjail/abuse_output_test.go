package nsjail

import (
	"io"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

func outputAttacks() []attack {
	timeout := jail.Outcome{Kind: jail.TimedOut}
	long := func(n int64) func(testing.TB, result) {
		return func(t testing.TB, r result) {
			t.Helper()
			if r.written != n {
				t.Errorf("%d bytes delivered, want %d", r.written, n)
			}
		}
	}
	return []attack{
		{name: "printing for ever", language: "bash", code: "yes '' | tr -d '\\n' & yes >&2", timeout: soon, want: timeout},
		{
			name: "a line of 100 MB", language: "bash", code: "head -c 100000000 /dev/zero | tr '\\0' ' '",
			also: long(100_000_000),
		},
		{
			name: "bytes that are no UTF-8, NUL, escapes", language: "bash", code: `printf 'a\xff\xfe\x00\x1b[2J\r\b\xe2\x28z'`,
			stdout: "a\xff\xfe\x00\x1b[2J\r\b\xe2\x28z",
		},
		{name: "both streams, a byte at a time", language: "python", code: `
import os
for i in range(20000): os.write(1, b'o'); os.write(2, b'e')`, also: func(t testing.TB, r result) {
			t.Helper()
			if r.written != 20000 || r.stderr != strings.Repeat("e", 20000) {
				t.Errorf("%d bytes of stdout, %d of stderr", r.written, len(r.stderr))
			}
		}, stdout: strings.Repeat("o", 20000)},
		{
			name: "a grandchild that prints after the end", language: "bash", want: jail.Outcome{Kind: jail.Signaled, Signal: 9},
			code: "setsid sh -c 'kill -9 '$$'; yes late >&2' & sleep 600",
		},
		{name: "a slow reader", want: jail.Outcome{Kind: jail.Signaled, Signal: 9}, run: slowReader},
		{
			name: "frames of the init's protocol", language: "bash",
			code: `printf '\x12\x00\x00\x00X\x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00` +
				`\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00E' | tee /dev/stderr | wc -c; exit 5`, stdout: "27",
			want: jail.Outcome{Kind: jail.Exited, ExitCode: 5},
		},
		{name: "making its pipe larger", language: "python", code: `
import fcntl
try: print(fcntl.fcntl(1, 1031, 1 << 30))
except OSError as e: print(e.errno)`, stdout: "1"},
		{
			name: "packets instead of a stream", language: "python", code: `
import fcntl, os
fcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT)
for i in range(3000):
    if os.write(1, b'p' * (i + 1)) != i + 1 or os.write(1, b'') != 0: os._exit(1)`, stdout: strings.Repeat("p", 1<<20),
			also: long(3000 * 3001 / 2),
		},
		{
			name: "pages that change after they are written", want: jail.Outcome{Kind: jail.Signaled, Signal: 9},
			run: changingPages,
		},
		{
			name: "stdout held by sockets that hold themselves", language: "python", code: cycle + "print('whole')",
			stdout: "whole",
		},
		{
			name: "stdout held by sockets that hold themselves, until the timeout", language: "python",
			code: cycle + "print('whole')\nos.fork()\ntime.sleep(600)", stdout: "whole", timeout: 5 * soon, want: timeout,
		},
	}
}

// cycle is Python that leaves stdout and stderr to sockets that only their own messages hold, once
// all processes have ended.
const cycle = errnos + `
pairs = [socket.socketpair() for i in range(50)]
for a, b in pairs:
    for s in a, b: socket.send_fds(s, [b'x'], [a.fileno(), b.fileno(), 1, 2])
`

// changingPages writes pages to stdout that change meanwhile and later. The output has the right
// length and nothing but what the pages have had.
func changingPages(t *testing.T, m *Maker) {
	r := runCode(t, m, "python", errnos+`
import mmap
libc.vmsplice.restype = ctypes.c_ssize_t
size = 1 << 16
page = mmap.mmap(-1, size)
page[:] = b'a' * size
at = ctypes.addressof(ctypes.c_char.from_buffer(page))
if os.fork() == 0:
    while True: page[:] = b'b' * size; page[:] = b'a' * size
for i in range(100):
    left = size
    while left:
        n = libc.vmsplice(1, (ctypes.c_ulong * 2)(at + size - left, left), ctypes.c_ulong(1), 8 * (i % 2))
        if n < 0: sys.exit(errno.errorcode[ctypes.get_errno()])
        left -= n
os.kill(os.getpid(), 9)`)
	if r.Kind != jail.Signaled || r.Signal != 9 || r.written != 100<<16 || strings.Trim(r.stdout, "ab") != "" {
		t.Errorf("%d bytes of %d, %d of them neither a nor b, %+v\n%s", r.written, 100<<16, len(strings.Trim(r.stdout, "ab")),
			r.Outcome, r.stderr)
	}
}

// slowReader reads in small pieces what a program writes, including the output of a process that
// briefly outlives it.
func slowReader(t *testing.T, m *Maker) {
	const size = 8 << 20
	r, w := io.Pipe()
	p := program(t, "bash", "head -c 8388607 /dev/zero & wait; setsid sh -c 'printf x; kill -9 '$$; echo never")
	p.Stdout = w
	got := make(chan int, 1)
	go func() {
		n, buf := 0, make([]byte, 777)
		for {
			k, err := r.Read(buf)
			n += k
			if err != nil {
				got <- n
				return
			}
		}
	}()
	o, err := prepare(t, m, testSpec()).Run(t.Context(), p)
	_ = w.Close()
	if n := <-got; n != size || err != nil || o.Kind != jail.Signaled {
		t.Errorf("%d bytes of %d, %+v, %v", n, size, o, err)
	}
}
