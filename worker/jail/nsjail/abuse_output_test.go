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
				t.Errorf("%d bytes handed over, want %d", r.written, n)
			}
		}
	}
	return []attack{
		{name: "printing for ever", language: "bash", code: "yes '' | tr -d '\\n' & yes >&2", timeout: soon, want: timeout},
		{
			name: "a line of 100 MB", language: "bash", code: "head -c 100000000 /dev/zero | tr '\\0' ' '",
			also: long(100_000_000),
		},
		{name: "bytes that are no UTF-8, NUL, escapes", language: "bash", code: `printf 'a\xff\xfe\x00\x1b[2J\r\b\xe2\x28z'`, stdout: "a\xff\xfe\x00\x1b[2J\r\b\xe2\x28z"},
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
		{name: "a reader who takes his time", want: jail.Outcome{Kind: jail.Signaled, Signal: 9}, run: slowReader},
		{name: "frames of the init's protocol", language: "bash", code: `printf '\x12\x00\x00\x00X\x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00E' | tee /dev/stderr | wc -c; exit 5`, stdout: "27", want: jail.Outcome{Kind: jail.Exited, ExitCode: 5}},
		{name: "making its pipe larger", language: "python", code: `
import fcntl
try: print(fcntl.fcntl(1, 1031, 1 << 30))
except OSError as e: print(e.errno)`, stdout: "1"},
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
