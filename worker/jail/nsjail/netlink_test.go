package nsjail

import (
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// TestProgramsUseNetlink runs what common programs do with netlink sockets, which the init creates
// for them.
func TestProgramsUseNetlink(t *testing.T) {
	t.Parallel()
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			m := newMaker(t)
			setStartMode(t, m, mode)
			for language, p := range map[string]struct{ code, want string }{
				"python": {
					`
import concurrent.futures, fcntl, os, socket
print(socket.if_nameindex(), socket.getaddrinfo('localhost', 80, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)[0][4])
with concurrent.futures.ThreadPoolExecutor(30) as e: print(set(map(str, e.map(lambda _: socket.if_nameindex(), range(1000)))))
for flags in 0, socket.SOCK_CLOEXEC, socket.SOCK_NONBLOCK:
    fd = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | flags, 0).detach()
    print(fcntl.fcntl(fd, fcntl.F_GETFD), os.get_blocking(fd))
s = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 0)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
print(s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF), s.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
s.bind((0, 0)); print(s.getsockname()[0] == os.getpid())
if os.fork() == 0: os.setsid(); print(socket.if_nameindex(), flush=True); os._exit(0)
os.wait()`,
					`[(1, 'lo')] ('127.0.0.1', 80)
{"[(1, 'lo')]"}
1 True
1 True
1 False
212992 212992
True
[(1, 'lo')]`,
				},
				"node": {"console.log(Object.keys(require('os').networkInterfaces()))", "[ 'lo' ]"},
				"bash": {
					"for i in 1 2 3; do python3 -c 'import socket; print(socket.if_nameindex())'; done",
					"[(1, 'lo')]\n[(1, 'lo')]\n[(1, 'lo')]",
				},
			} {
				runCode(t, m, language, p.code).want(t, jail.Exited, p.want)
			}
		})
	}
}
