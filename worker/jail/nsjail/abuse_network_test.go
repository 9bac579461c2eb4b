package nsjail

import (
	"net"
	"strconv"
	"testing"

	"github.com/bullpen-run/bullpen/worker/jail"
)

func networkAttacks() []attack {
	return []attack{
		{name: "blocked: the internet", language: "python", code: tried(
			"socket.create_connection, ('1.1.1.1', 80), 5", "socket.create_connection, ('2606:4700:4700::1111', 80), 5",
			"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b'x', ('8.8.8.8', 53)",
		), stdout: "ENETUNREACH\nENETUNREACH\nENETUNREACH"},
		{name: "blocked: the metadata service", language: "python", code: tried(
			"socket.create_connection, ('169.254.169.254', 80), 5", "socket.create_connection, ('fd00:ec2::254', 80), 5",
		), stdout: "ENETUNREACH\nENETUNREACH"},
		{name: "blocked: names", language: "python", code: `
import socket
try: socket.getaddrinfo('example.com', 80)
except socket.gaierror as e: print(e.errno)`, stdout: "-3"},
		{name: "blocked: the networks of the host", language: "python", code: tried(
			"socket.create_connection, ('10.0.0.1', 80), 5", "socket.create_connection, ('172.17.0.1', 80), 5",
			"socket.create_connection, ('192.168.0.1', 80), 5",
		) + "print(socket.if_nameindex())", stdout: "ENETUNREACH\nENETUNREACH\nENETUNREACH\n[(1, 'lo')]"},
		{
			name: "blocked: broadcast and multicast", language: "python", code: errnos + `
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
print(no(s.sendto, b'x', ('255.255.255.255', 9)), no(s.sendto, b'x', ('224.0.0.1', 9)))`,
			stdout: "ENETUNREACH ENETUNREACH",
		},
		{name: "blocked: what listens on the host's loopback, as the control plane does", run: hostLoopback},
		{name: "blocked: abstract sockets of the host", run: hostAbstract},
		{name: "blocked: raw sockets and packets", language: "python", code: tried(
			"socket.socket, socket.AF_INET, socket.SOCK_RAW, 6", "socket.socket, socket.AF_INET, socket.SOCK_DGRAM, 1",
			"socket.socket, socket.AF_PACKET, socket.SOCK_RAW",
			"socket.socket, socket.AF_INET6, socket.SOCK_RAW, 58",
		), stdout: "EPERM\nEPROTONOSUPPORT\nEAFNOSUPPORT\nEPERM"},
		{
			name: "blocked: making an interface or a route", language: "python", code: netlinkAttack,
			stdout: "EPERM EPERM EPERM\nEPERM",
		},
		{name: "blocked: its own loopback works", language: "python", code: `
import socket
s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); c.send(b'x'); print(s.accept()[0].recv(1))`, stdout: "b'x'"},
	}
}

// hostLoopback listens on the host's loopback, as NATS and the gateway do.
func hostLoopback(t *testing.T, m *Maker) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	runCode(t, m, "python", tried("socket.create_connection, ('127.0.0.1', "+port+"), 5")).want(
		t, jail.Exited, "ECONNREFUSED")
}

func hostAbstract(t *testing.T, m *Maker) {
	name := "bullpen-test-" + t.Name()
	l, err := net.Listen("unix", "@"+name)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	runCode(t, m, "python", tried(`socket.socket(socket.AF_UNIX).connect, '\0`+name+"'")).want(
		t, jail.Exited, "ECONNREFUSED")
}

// netlinkAttack is Python that tries to add an interface, an address and a route, and to take the
// loopback down.
const netlinkAttack = errnos + `
import fcntl, struct
n = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
def ask(kind, body):
    n.send(struct.pack('IHHII', 16 + len(body), kind, 0x605, 1, 0) + body)
    return errno.errorcode.get(-struct.unpack('i', n.recv(4096)[16:20])[0], 'done')
print(ask(16, bytes(16)), ask(20, struct.pack('BBBBI', 2, 8, 0, 0, 1)), ask(24, bytes(12)))
print(no(fcntl.ioctl, socket.socket(), 0x8914, struct.pack('16sH14x', b'lo', 0)))`
