package nsjail

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// Programs that need a terminal work if the sandbox has terminals.
func TestTerminals(t *testing.T) {
	t.Parallel()
	spec := testSpec()
	spec.Terminals = 2
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			m := newMaker(t)
			startModes.Store(m, mode)
			runProgram(t, m, spec, program(t, "bash", `
script -qec 'tty; echo hi; exit 3' /dev/null | tr -d '\r'; echo ${PIPESTATUS[0]}; stat -c '%a %u' /dev/pts/ptmx; ls /dev/pts
tput cols; clear; echo $TERM`)).want(t, jail.Exited, "/dev/pts/0\nhi\n3\n666 0\nptmx\n80\ndumb")
			runProgram(t, m, spec, program(t, "python", `
import fcntl, os, pty, struct, subprocess, sys, termios
pid, fd = pty.fork()
if pid == 0:
    print(os.isatty(0), os.ttyname(1), oct(os.stat(0).st_mode), os.stat(0).st_uid, open('/dev/tty', 'w').isatty()); sys.exit(7)
out = b''
try:
    while part := os.read(fd, 1000): out += part
except OSError: pass
print(out, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
m, s = pty.openpty()
p = subprocess.Popen(['sh', '-c', 'trap "echo size; exit" WINCH; echo ready; while :; do sleep 0.01; done'], stdin=s, stdout=s, start_new_session=True,
    preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
r = os.fdopen(m, 'rb', 0)
print(r.read(7)); fcntl.ioctl(m, termios.TIOCSWINSZ, struct.pack('4H', 10, 20, 0, 0)); print(r.read(6), p.wait())
`)).want(t, jail.Exited, `b'True /dev/pts/0 0o20620 1000 True\r\n' 7
b'ready\r\n'
b'size\r\n' 0`)
		})
	}
}

// Fontconfig finds its configuration, which is the host's.
func TestFonts(t *testing.T) {
	t.Parallel()
	want := ""
	if entries, err := os.ReadDir("/etc/fonts"); err == nil {
		for _, e := range entries {
			want += e.Name() + "\n"
		}
	}
	r := runCode(t, newMaker(t), "bash", "ls -A /etc/fonts; ! fc-match 2>&1 | grep -i error")
	if lines := strings.Fields(r.stdout); r.Kind != jail.Exited || r.ExitCode != 0 ||
		!slices.Equal(lines, strings.Fields(want)) {
		t.Errorf("%+v, want %q", r, want)
	}
}
