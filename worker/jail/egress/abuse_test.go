package egress_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

func TestJailsAreIsolated(t *testing.T) {
	n := open(t)
	a, l := attach(t, n, unrestricted)
	b, _ := attach(t, n, unrestricted)
	var want []proto.BlockedConnection
	refused := func(addr string, port int) {
		want = append(want, proto.BlockedConnection{Address: addr, Port: port, Protocol: "tcp", Reason: proto.BlockedAddress})
		if got := a.tcp(net.JoinHostPort(addr, fmt.Sprint(port)), "x"); got.Error != "ECONNREFUSED" {
			t.Errorf("%s port %d: %+v", addr, port, got)
		}
	}
	for _, text := range b.do(order{Do: "interfaces"}).Found {
		addr, _, _ := strings.Cut(text, "/")
		if !net.ParseIP(addr).IsLoopback() {
			refused(addr, 7)
		}
	}
	refused(egress.ResolverIPv4.String(), 80)
	refused(egress.ResolverIPv6.String(), 22)
	wantBlocked(t, l, want...)
}

func TestSpoofedSources(t *testing.T) {
	n := open(t)
	a, la := attach(t, n, unrestricted)
	b, lb := attach(t, n, unrestricted)
	own := map[string]string{}
	for _, text := range b.do(order{Do: "interfaces"}).Found {
		addr, _, _ := strings.Cut(text, "/")
		own[map[bool]string{true: "6", false: "4"}[strings.Contains(addr, ":")]] = addr
	}
	for _, tc := range []struct{ from, to string }{
		{own["4"], webIPv4},
		{web2IPv4, webIPv4},
		{egress.ResolverIPv4.String(), webIPv4},
		{"127.0.0.1", webIPv4},
		{hostIPv4, webIPv4},
		{own["6"], webIPv6},
		{"2606:2800:220:1::35", webIPv6},
		{egress.ResolverIPv6.String(), webIPv6},
		{"fe80::1", webIPv6},
	} {
		from, to := net.JoinHostPort(tc.from, "4000"), net.JoinHostPort(tc.to, "7")
		message := "spoofed from " + tc.from
		if got := a.do(order{Do: "spoof", To: from + " " + to, Data: message}); got.Error != "" {
			t.Fatalf("%s: the test cannot send: %s", from, got.Error)
		}
		after := message + ", and after"
		if got := a.udp(to, after); got.Data != after { // earlier datagrams would have arrived before
			t.Fatalf("%s: %+v", to, got)
		}
		if internet.received.has(message) || !internet.received.has(after) {
			t.Errorf("%s: the spoofed packet has arrived, or the honest one has not", from)
		}
	}
	if got := a.udp(webIPv4+":7", "x"); got.Data != "x" {
		t.Errorf("after all that: %+v", got)
	}
	la.Close()
	if report := lb.Close(); report.Traffic != (proto.Traffic{}) || len(report.Blocked) != 0 {
		t.Errorf("the other jail's report has traffic: %+v", report)
	}
}

func TestOtherProtocolsAreRejected(t *testing.T) {
	j, l := attach(t, open(t), unrestricted)
	if a := j.do(order{Do: "ping", To: webIPv4}); a.Error != "EHOSTUNREACH" {
		t.Errorf("ping: %+v", a)
	}
	wantBlocked(t, l, proto.BlockedConnection{Address: webIPv4, Protocol: "icmp", Reason: proto.BlockedProtocol})
}

func TestKernelPacketsAreNotReported(t *testing.T) {
	j, l := attach(t, open(t), unrestricted)
	for _, addr := range []string{webIPv4, webIPv6} {
		to := net.JoinHostPort(addr, "7")
		if a := j.do(order{Do: "shout", To: to, Data: "never mind", N: 50}); a.Error != "" {
			t.Errorf("%+v", a)
		}
		until(t, "late answers", func() bool {
			return j.udp(to, "x").Data == "x" && l.BytesIn() >= 50*int64(len("never mind"))
		})
	}
	wantBlocked(t, l)
}

func TestConnectionsAreLimited(t *testing.T) {
	n := open(t)
	hostile, l := attach(t, n, unrestricted)
	quiet, _ := attach(t, n, unrestricted)
	const more = 20
	to := webIPv4 + ":7"
	if a := hostile.do(order{Do: "hold", To: to, N: egress.MaxConnections + more}); a.Count[""] != egress.MaxConnections ||
		a.Count["ECONNREFUSED"] != more {
		t.Errorf("opened: %v", a.Count)
	}
	if a := hostile.udp(to, "x"); a.Error != "ECONNREFUSED" {
		t.Errorf("udp beyond the limit: %+v", a)
	}
	if a := quiet.tcp(to, "x"); a.Data != "x" {
		t.Errorf("another jail during that time: %+v", a)
	}
	hostile.do(order{Do: "release"})
	until(t, "a place to be free again", func() bool { return hostile.tcp(to, "x").Data == "x" })
	limit := proto.BlockedConnection{Address: webIPv4, Port: 7, Protocol: "tcp", Reason: proto.BlockedLimit}
	report := l.Close()
	if !slices.ContainsFunc(report.Blocked, func(b proto.BlockedConnection) bool { b.At = limit.At; return b == limit }) {
		t.Errorf("the limit is not in the report: %+v", report.Blocked)
	}
}

func TestUnansweredConnections(t *testing.T) {
	n := open(t)
	hostile, l := attach(t, n, unrestricted)
	quiet, _ := attach(t, n, unrestricted)
	const more = 30
	if a := hostile.do(order{
		Do: "open_pending", To: silentIPv4 + ":80", N: egress.MaxConnections + more,
	}); a.Count["ECONNREFUSED"] != more {
		t.Errorf("beyond the limit: %v", a.Count)
	}
	if a := quiet.tcp(webIPv4+":7", "x"); a.Data != "x" {
		t.Errorf("another jail during that time: %+v", a)
	}
	wantBlocked(t, l, proto.BlockedConnection{Address: silentIPv4, Port: 80, Protocol: "tcp", Reason: proto.BlockedLimit})
	until(t, "the other jail's connection to be forgotten too", func() bool { return n.Endpoints() == 0 })
}

func TestFloodOfDatagrams(t *testing.T) {
	n := open(t)
	hostile, _ := attach(t, n, unrestricted)
	quiet, _ := attach(t, n, unrestricted)
	before := heap()
	flooded := make(chan answer, 1)
	go func() { flooded <- hostile.do(order{Do: "flood", To: silentIPv4 + ":80", N: repeats(50000)}) }()
	for range 20 {
		if a := quiet.tcp(webIPv4+":7", "x"); a.Data != "x" {
			t.Errorf("another jail during that time: %+v", a)
		}
		if after := heap(); after > before+64<<20 {
			t.Errorf("the worker holds %d bytes more", after-before)
		}
	}
	if a := <-flooded; a.Error != "" {
		t.Errorf("%+v", a)
	}
}

// The packets of a program with little cpu cost the worker little.
func TestPacketRateFollowsCPU(t *testing.T) {
	for cpu, rate := range map[float64]float64{0.05: 50_000. / 16, 0.25: 12_500, 0.3: 25_000, 64: 50_000} {
		n := open(t)
		hostile, _ := attachWith(t, n, unrestricted, cpu)
		before, began := n.Received(), time.Now()
		if a := hostile.do(order{Do: "flood", To: silentIPv4 + ":80", Data: "x", N: 40_000}); a.Error != "" {
			t.Errorf("%+v", a)
		}
		most := rate / 5 // the burst
		most += rate * time.Since(began).Seconds()
		if got := float64(n.Received() - before); got == 0 || got > most+100 {
			t.Errorf("with %g cores %g packets were handled, and at most %g may be", cpu, got, most)
		}
	}
}

func TestConnectionRateIsLimited(t *testing.T) {
	n := open(t)
	hostile, l := attach(t, n, allow("listed.example.com"))
	a := hostile.do(order{Do: "hold", To: webIPv4 + ":7", N: 3000})
	if a.Count["ECONNREFUSED"] != 3000 {
		t.Errorf("opened: %v", a.Count)
	}
	quiet, _ := attach(t, n, unrestricted)
	if a := quiet.tcp(webIPv4+":7", "x"); a.Data != "x" {
		t.Errorf("another jail: %+v", a)
	}
	if report := l.Close(); len(report.Blocked) == 0 {
		t.Error("no rejected packet was reported")
	}
}

func TestQueriesAreLimited(t *testing.T) {
	internet.zone.set("often.example.com", "often.example.com. 60 IN A "+webIPv4)
	n := open(t)
	hostile, l := attach(t, n, unrestricted)
	quiet, _ := attach(t, n, unrestricted)
	const questions = 3000
	a := hostile.do(order{Do: "ask", To: "often.example.com", N: questions})
	refused := a.Count["REFUSED"] + a.Count["ECONNREFUSED"]
	if refused == 0 || a.Count["NOERROR"] == 0 || a.Count["NOERROR"]+refused != questions {
		t.Errorf("answers: %v", a.Count)
	}
	if a := quiet.resolve("often.example.com", "A"); a.Found == nil {
		t.Errorf("another jail: %+v", a)
	}
	limit := proto.BlockedConnection{Host: "often.example.com", Protocol: "dns", Reason: proto.BlockedLimit}
	if report := l.Close(); !slices.ContainsFunc(report.Blocked, func(b proto.BlockedConnection) bool {
		b.At = limit.At
		return b == limit
	}) {
		t.Errorf("the limit is not in the report: %+v", report.Blocked)
	}
}

func TestResolverConnectionsAreLimited(t *testing.T) {
	internet.zone.set("still.example.com", "still.example.com. 60 IN A "+webIPv4)
	j, _ := attach(t, open(t), unrestricted)
	j.do(order{Do: "hold", To: net.JoinHostPort(egress.ResolverIPv4.String(), "53"), N: 100})
	if a := j.resolve("still.example.com", "A"); a.Found == nil {
		t.Errorf("over UDP: %+v", a)
	}
	j.do(order{Do: "release"})
	until(t, "a connection to be free again", func() bool { return j.resolve("still.example.com", "A tcp").Found != nil })
}

// TestSlowReader has a server send endlessly to a program that does not read, and then closes the
// link.
func TestSlowReader(t *testing.T) {
	n := open(t)
	j, l := attach(t, n, unrestricted)
	if a := j.do(order{Do: "hold", To: webIPv4 + ":19"}); a.Count[""] != 1 {
		t.Fatalf("%+v", a)
	}
	if a := j.tcp(webIPv4+":7", "x"); a.Data != "x" {
		t.Errorf("the program's other connections: %+v", a)
	}
	report := l.Close()
	var sent int64
	until(t, "the sender to notice", func() (ok bool) { sent, ok = internet.received.lastSent(); return ok })
	if sent > 64<<20 || report.BytesIn > 16<<20 {
		t.Errorf("the sender sent %d bytes, and %d reached a program that reads nothing", sent, report.BytesIn)
	}
	if got := n.Endpoints(); got != 0 {
		t.Errorf("the stack keeps %d connections of a closed link", got)
	}
}

// TestHostSocketBuffersAreBounded checks the kernel buffers of the worker's sockets, which no limit
// of the program covers.
func TestHostSocketBuffersAreBounded(t *testing.T) {
	const much, most = 16 << 20, 1 << 20
	j, l := attach(t, open(t), unrestricted)
	echoed := make(chan answer)
	go func() { echoed <- j.do(order{Do: "bulk", To: webIPv4 + ":7", N: 100 * much}) }()
	outside := -1
	until(t, "a connection to the internet", func() bool {
		outside = connectedTo(t, netip.MustParseAddrPort(webIPv4+":7"))
		return outside >= 0
	})
	until(t, "much to be sent both ways", func() bool {
		info, err := unix.GetsockoptTCPInfo(outside, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil {
			t.Fatal(err)
		}
		return min(info.Bytes_received, info.Bytes_acked) > much
	})
	for name, option := range map[string]int{"receives": unix.SO_RCVBUF, "sends": unix.SO_SNDBUF} {
		if size, err := unix.GetsockoptInt(outside, unix.SOL_SOCKET, option); err != nil || size > most {
			t.Errorf("the buffer for what the socket outside %s has %d bytes, more than %d: %v", name, size, most, err)
		}
	}
	l.Close()
	<-echoed
}

// connectedTo returns the socket of this process that is connected to an address, or -1.
func connectedTo(t *testing.T, to netip.AddrPort) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		if peer, err := unix.Getpeername(fd); err == nil {
			if at, ok := peer.(*unix.SockaddrInet4); ok && netip.AddrPortFrom(netip.AddrFrom4(at.Addr), uint16(at.Port)) == to {
				return fd
			}
		}
	}
	return -1
}

func TestCloseEndsEverything(t *testing.T) {
	n := open(t)
	j, l := attach(t, n, unrestricted)
	j.do(order{Do: "hold", To: webIPv4 + ":7", N: 5})
	j.do(order{Do: "hold", To: net.JoinHostPort(webIPv6, "7"), N: 5})
	if a := j.udp(webIPv4+":7", "four"); a.Data != "four" {
		t.Fatalf("%+v", a)
	}
	first := l.Close()
	if want := (proto.Traffic{BytesIn: 4, BytesOut: 4}); first.Traffic != want {
		t.Errorf("traffic %+v, want %+v", first.Traffic, want)
	}
	if diff := cmp.Diff(first, l.Close()); diff != "" {
		t.Errorf("the second report differs: %s", diff)
	}
	if got := n.Endpoints(); got != 0 {
		t.Errorf("the stack keeps %d connections", got)
	}
	until(t, "the interface to go", func() bool { return len(j.do(order{Do: "interfaces"}).Found) == 2 })
	if a := j.tcp(webIPv4+":7", "x"); a.Error != "ENETUNREACH" {
		t.Errorf("afterwards: %+v", a)
	}
	if l, err := n.Attach(t.Context(), j.netns, unrestricted, 1); err != nil {
		t.Errorf("a second network for the same jail: %v", err)
	} else if a := j.tcp(webIPv4+":7", "x"); a.Data != "x" {
		t.Errorf("through it: %+v", a)
	} else {
		l.Close()
	}
}

func TestDataIsIntact(t *testing.T) {
	size := repeats(32 << 20)
	n := open(t)
	j, l := attach(t, n, unrestricted)
	for _, to := range []string{webIPv4, webIPv6} {
		if a := j.do(order{Do: "bulk", To: net.JoinHostPort(to, "7"), N: size}); a.Error != "" || a.Count["bytes"] != size {
			t.Errorf("%s: %+v", to, a)
		}
	}
	big := strings.Repeat("x", 60000)
	if a := j.udp(webIPv4+":7", big); a.Data != big {
		t.Errorf("a datagram of %d bytes: %d came back, %s", len(big), len(a.Data), a.Error)
	}
	if got, want := l.Close().Traffic,
		(proto.Traffic{BytesIn: int64(2*size) + 60000, BytesOut: int64(2*size) + 60000}); got != want {
		t.Errorf("traffic %+v, want %+v", got, want)
	}
}

func TestUpstreamErrorsReachTheProgram(t *testing.T) {
	j, l := attach(t, open(t), unrestricted)
	if a := j.tcp(webIPv4+":1", "x"); a.Error != "ECONNREFUSED" {
		t.Errorf("a closed port: %+v", a)
	}
	if a := j.tcp(webIPv4+":9", "x"); a.Error != "ECONNRESET" {
		t.Errorf("a reset: %+v", a)
	}
	wantBlocked(t, l) // we rejected neither
}

func TestNewHostAddressesAreRefused(t *testing.T) {
	n := open(t)
	j, l := attach(t, n, unrestricted)
	if a := j.tcp(web2IPv4+":7", "x"); a.Data != "x" {
		t.Fatalf("before: %+v", a)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	addr, err := netlink.ParseAddr(web2IPv4 + "/32")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(lo, addr); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := netlink.AddrDel(lo, addr); err != nil {
			t.Error(err)
		}
	}()
	if a := j.tcp(web2IPv4+":7", "x"); a.Error != "ECONNREFUSED" {
		t.Errorf("at once: %+v", a)
	}
	wantBlocked(t, l, proto.BlockedConnection{Address: web2IPv4, Port: 7, Protocol: "tcp", Reason: proto.BlockedAddress})
}

func TestAttachErrors(t *testing.T) {
	n := open(t)
	j := newJail(t)
	host, err := os.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = host.Close() }()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()
	for name, tc := range map[string]struct {
		ns     *os.File
		policy proto.Network
	}{
		"blocked":      {j.netns, proto.Network{}},
		"bad policy":   {j.netns, allow("not a rule")},
		"the host":     {host, unrestricted},
		"no namespace": {null, unrestricted},
	} {
		if l, err := n.Attach(t.Context(), tc.ns, tc.policy, 1); err == nil {
			l.Close()
			t.Errorf("%s: attached", name)
		}
	}
	if got := j.do(order{Do: "interfaces"}); len(got.Found) != 0 {
		t.Errorf("a jail that was not attached has %v", got.Found)
	}
}

// hostState is the visible state of the host's network.
func hostState(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		fmt.Fprintln(&b, "link", l.Attrs().Name)
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range routes {
		fmt.Fprintln(&b, "route", r)
	}
	conn, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	tables, err := conn.ListTables()
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range tables {
		fmt.Fprintln(&b, "table", table.Name)
	}
	for _, name := range []string{
		"ipv4/conf/all/forwarding", "ipv6/conf/all/forwarding", "ipv4/icmp_ratemask",
		"ipv6/icmp/ratelimit",
	} {
		value, err := os.ReadFile("/proc/sys/net/" + name)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&b, name, string(value))
	}
	return b.String()
}

func TestHostNetworkIsUnchanged(t *testing.T) {
	before := hostState(t)
	n := open(t)
	j, _ := attach(t, n, unrestricted)
	if a := j.tcp(webIPv4+":7", "x"); a.Data != "x" {
		t.Fatalf("%+v", a)
	}
	if diff := cmp.Diff(before, hostState(t)); diff != "" {
		t.Errorf("the host's network has changed:\n%s", diff)
	}
}

func TestDeadWorkerLeavesNothing(t *testing.T) {
	j := newJail(t)
	cmd := exec.Command(os.Args[0])
	cmd.Env = []string{roleVar + "=" + roleWorker}
	cmd.ExtraFiles = []*os.File{j.netns}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close() }()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	if line != "attached\n" {
		t.Fatalf("output of the worker: %q", line)
	}
	if a := j.tcp(webIPv4+":7", "x"); a.Data != "x" {
		t.Errorf("while it lives: %+v", a)
	}
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	until(t, "the jail's interface to go", func() bool { return len(j.do(order{Do: "interfaces"}).Found) == 2 })
	if a := j.tcp(webIPv4+":7", "x"); a.Error != "ENETUNREACH" {
		t.Errorf("afterwards: %+v", a)
	}
}

func TestOpenErrorsHaveRemedies(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = []string{roleVar + "=" + roleOpen, "GORACE=atexit_sleep_ms=0"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, word := range []string{"uplink device", "/dev/net/tun"} {
		if !strings.Contains(string(out), word) {
			t.Errorf("the error does not name %s: %s", word, out)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := egress.Open(ctx, config(io.Discard, "control.example.com:4222")); err == nil {
		_ = n.Close()
		t.Error("opened, though the control plane could not be resolved, and so not be refused")
	}
}

// repeats returns n, or with -short a tenth of it.
func repeats(n int) int {
	if testing.Short() {
		return n / 10
	}
	return n
}

func openFiles(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(files)
}

func goroutines() string {
	buf := make([]byte, 1<<20)
	return string(bytes.TrimSpace(buf[:runtime.Stack(buf, true)]))
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestLinksLeaveNothing attaches and closes up to 2,000 links, some with connections of all kinds.
func TestLinksLeaveNothing(t *testing.T) {
	const width = 40
	internet.zone.set("cycle.example.com", "cycle.example.com. 60 IN A "+webIPv4)
	n := open(t)
	jails := make([]*jail, width)
	for i := range jails {
		jails[i] = newJail(t)
	}
	round := func(number int) {
		links := make([]*egress.Link, width)
		for i, j := range jails {
			var err error
			if links[i], err = n.Attach(t.Context(), j.netns, allow("*.example.com", "10.0.0.0/8"), 1); err != nil {
				t.Fatal(err)
			}
		}
		j := jails[number%width]
		if a := j.tcp("cycle.example.com:7", "x"); a.Data != "x" {
			t.Fatalf("round %d: %+v", number, a)
		}
		j.udp(webIPv4+":7", "x")
		j.tcp("10.1.2.3:7", "x")
		j.do(order{Do: "hold", To: webIPv4 + ":7", N: 3})
		for _, l := range links {
			l.Close()
		}
		j.do(order{Do: "release"})
		for _, j := range jails {
			until(t, "the interface to go", func() bool { return len(j.do(order{Do: "interfaces"}).Found) == 2 })
		}
	}
	for i := range 5 {
		round(i)
	}
	devices, err := n.Devices()
	if err != nil {
		t.Fatal(err)
	}
	files, routines, memory := openFiles(t), runtime.NumGoroutine(), heap()
	for i := range repeats(50) {
		round(i)
	}
	if got, err := n.Devices(); err != nil || got != devices {
		t.Errorf("%d interfaces, %v; there were %d", got, err, devices)
	}
	until(t, "connections to be forgotten", func() bool { return n.Endpoints() == 0 })
	if got := openFiles(t); got > files+8 {
		t.Errorf("%d open files, there were %d", got, files)
	}
	if got := runtime.NumGoroutine(); got > routines+8 {
		t.Errorf("%d goroutines, there were %d:\n%s", got, routines, goroutines())
	}
	if got := heap(); got > memory+8<<20 {
		t.Errorf("%d bytes in use, there were %d", got, memory)
	}
}

// FuzzParseLog parses logged packets, which tenants wrote.
func FuzzParseLog(f *testing.F) {
	packet := append([]byte{0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 100, 64, 0, 2, 10, 1, 2, 3}, make([]byte, 20)...)
	attr := func(kind byte, data []byte) []byte {
		return append([]byte{byte(4 + len(data)), 0, kind, 0}, data...)
	}
	f.Add(append(attr(10, []byte("address\x00")), attr(9, packet)...))
	f.Add(attr(9, append([]byte{0x60, 0, 0, 0, 0, 0, 17, 64}, make([]byte, 32)...)))
	f.Add([]byte{3, 0, 9, 0})
	f.Fuzz(func(_ *testing.T, attrs []byte) { egress.ParseLog(attrs) })
}
