package nsjail

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"syscall"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// mostLogged is the most lines that a program with 300 events may add to the kernel's log. The
// kernel lets ten of each kind pass every five seconds.
const mostLogged = 200

// machine is Python that defines machine, which runs machine code.
const machine = errnos + `
import mmap
def machine(code, *a):
    b = mmap.mmap(-1, 4096, prot=7)
    b.write(bytes.fromhex(code))
    return ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_void_p] * len(a))(ctypes.addressof(ctypes.c_char.from_buffer(b)))(*a)
`

// logFlood returns an attack that makes the kernel log something many times. It evaluates each of
// the Python expressions in turn, in children.
func logFlood(name string, want jail.Outcome, stdout string, events ...string) attack {
	a := attack{name: name, language: "python", want: want, stdout: stdout, code: machine + `
libc.prctl(15, b'flood-of-logs', 0, 0, 0) # PR_SET_NAME
events = [
    lambda: ` + strings.Join(events, ",\n    lambda: ") + `,
]
for i in range(300):
    if os.fork() == 0:
        events[i % len(events)]()
        os._exit(0)
    os.wait()
print('done')`}
	a.run = func(t *testing.T, m *Maker) {
		logged := watchKernelLog(t, "flood-of-logs")
		r := a.attempt(t, m)
		lines := logged()
		if a.check(t, r); len(lines) > mostLogged {
			t.Errorf("%d lines in the kernel's log, such as %q", len(lines), lines[0])
		}
	}
	return a
}

func logAttacks() []attack {
	done := jail.Outcome{Kind: jail.Exited}
	return []attack{
		logFlood("crashes that the kernel logs", done, "done", "ctypes.string_at(8)", "machine('0f0b')",
			"machine('31c931d2f7f1c3')", "machine('ccc3')", "machine('f4c3')",
			// ud2, division by zero, int3, hlt, rt_sigreturn, vsyscall
			"machine('b80f0000000f05c3')", "machine('48c7c0000060ffffd0c3')", "os.abort()"),
		logFlood("forbidden calls that the kernel logs", jail.Outcome{Kind: jail.Seccomp, Signal: 31}, "",
			"libc.syscall(246, 0, 0, 0, 0)", "libc.syscall(172, 3)", "machine('b814000000cd80c3')",
			"machine('b8270000400f05c3')"),
		logFlood("misuse that the kernel logs", done, "done",
			"libc.syscall(202, bytes(4), 5, 1, 1, bytes(4), ctypes.c_uint(0x80fff000))", "libc.syscall(319, b'x', 0)",
			"libc.syscall(125, (ctypes.c_uint * 2)(0x19980330, 0), bytes(64))", "libc.syscall(216, bytes(4096), 4096, 0, 0, 0)",
			"libc.syscall(156, bytes(80))",
			splitLocks+"(1)"), // futex, memfd_create, capget, remap_file_pages, sysctl
	}
}

// watchKernelLog returns a function that returns the lines with a text that have been added to the
// kernel's log since the call.
func watchKernelLog(t *testing.T, text string) (added func() []string) {
	t.Helper()
	fd, err := syscall.Open("/dev/kmsg", syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	if _, err := syscall.Seek(fd, 0, io.SeekEnd); err != nil {
		t.Fatal(err)
	}
	return func() (found []string) {
		for line := make([]byte, 8192); ; {
			n, err := syscall.Read(fd, line)
			switch {
			case errors.Is(err, syscall.EAGAIN):
				return found
			case errors.Is(err, syscall.EPIPE): // others have filled the log
			case err != nil:
				t.Fatal(err)
			case bytes.Contains(line[:n], []byte(text)):
				found = append(found, string(line[:n]))
			}
		}
	}
}

// splitLocks is a Python expression, to be used after machine, of a function that locks two cache
// lines at once that many times. If the host's split_lock_detect is fatal, the process dies.
const splitLocks = "(lambda n: machine('" +
	"4889f9" + // mov rcx, rdi
	"f0834600" + "01" + // lock add dword [rsi], 1
	"48ffc9" + // dec rcx
	"75f6" + // jnz
	"c3', n, ctypes.addressof(ctypes.c_char.from_buffer(mmap.mmap(-1, 4096))) + 62))"
