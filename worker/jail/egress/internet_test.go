package egress_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

// The tests run in a network namespace that stands for the host. A second one stands for the
// internet. It has every address below, so that whatever is refused could otherwise be reached.
const (
	hostIPv4    = "93.184.215.14"
	hostIPv6    = "2606:2800:21f::2"
	gatewayIPv4 = "93.184.215.1"
	gatewayIPv6 = "2606:2800:21f::1"

	webIPv4    = "93.184.216.34"
	web2IPv4   = "93.184.216.35"
	webIPv6    = "2606:2800:220:1::34"
	nameserver = "93.184.216.53"
	foreignDNS = "8.8.8.8"
	controlIP  = "151.101.65.140"
	silentIPv4 = "93.184.217.1" // accepts packets and never answers

	webPort, otherPort, controlPort = "80", "8080", "4222"
)

var internetAddrs = []string{
	gatewayIPv4, gatewayIPv6, webIPv4, web2IPv4, webIPv6, nameserver, foreignDNS, controlIP,
	"169.254.169.254", "10.1.2.3", "172.16.5.4", "192.168.1.1", "100.100.100.200", "168.63.129.16", "192.0.0.192",
	"198.18.0.1",
	"198.51.100.1", "203.0.113.1", "192.0.2.55", "240.0.0.1",
	"fd00:ec2::254", "fd00:1::1", "2001:db8::1", "2002:a01:203::1", "2001::1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a01:203",
	"fec0::1", "::a01:203",
}

const (
	roleVar     = "EGRESS_TEST_ROLE"
	roleHost    = "host"    // run the tests in a namespace
	roleProgram = "program" // run as a program in a jail
	roleWorker  = "worker"  // open a network, attach the jail on descriptor 3, and wait
	roleOpen    = "open"    // try to open a network with an unusable /dev/net/tun
)

func TestMain(m *testing.M) {
	switch os.Getenv(roleVar) {
	case roleProgram:
		runProgram()
	case roleWorker:
		runWorker()
	case roleOpen:
		runOpen()
	case roleHost:
		if slices.Contains(os.Args, "-test.fuzzworker") {
			os.Exit(m.Run()) // a child process of the tests, in the same namespaces
		}
		if err := makeInternet(); err != nil {
			fmt.Fprintln(os.Stderr, "make the internet of the tests:", err)
			os.Exit(1)
		}
		// An abandoned lookup of the host's resolver runs until its timeout, and the standard library
		// cannot cancel it.
		goleak.VerifyTestMain(m, goleak.IgnoreCurrent(), goleak.IgnoreAnyFunction("net.(*Resolver).lookupIPAddr.func1"),
			goleak.IgnoreAnyFunction("net.(*Resolver).lookupIPAddr.func2"),
			goleak.IgnoreAnyFunction("net.(*Resolver).goLookupIPCNAMEOrder.func3.1"))
	default:
		os.Exit(inOwnNamespace())
	}
}

func inOwnNamespace() int {
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Env = append(os.Environ(), roleVar+"="+roleHost)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "run the tests in a network namespace:", err)
		return 1
	}
	return 0
}

// within runs f on a thread in another network namespace, or in a new one if ns is nil.
func within(ns *os.File, f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	defer func() { _ = home.Close() }()
	if ns == nil {
		err = unix.Unshare(unix.CLONE_NEWNET)
	} else {
		err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
	}
	if err != nil {
		return err
	}
	return errors.Join(f(), unix.Setns(int(home.Fd()), unix.CLONE_NEWNET))
}

// internet is the internet of the tests with its servers.
var internet struct {
	ns       *os.File
	zone     *zone
	received *received
}

func makeInternet() error {
	err := within(nil, func() (err error) {
		internet.ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "up0"
	up := netlink.NewVeth(attrs)
	up.PeerName, up.PeerNamespace = "inet0", netlink.NsFd(internet.ns.Fd())
	if err := netlink.LinkAdd(up); err != nil {
		return fmt.Errorf("link to the internet: %w", err)
	}
	here, err := netlink.NewHandle()
	if err != nil {
		return err
	}
	defer here.Close()
	there, err := netlink.NewHandleAt(netns.NsHandle(internet.ns.Fd()))
	if err != nil {
		return err
	}
	defer there.Close()
	if err := addressed(here, "up0", []string{hostIPv4 + "/24", hostIPv6 + "/64", "10.77.0.2/24"}); err != nil {
		return err
	}
	if err := addressed(there, "inet0", nil); err != nil {
		return err
	}
	for _, a := range internetAddrs {
		bits := "/128"
		switch {
		case a == gatewayIPv4:
			bits = "/24"
		case a == gatewayIPv6:
			bits = "/64"
		case strings.Contains(a, "."):
			bits = "/32"
		}
		if err := addressed(there, "inet0", []string{a + bits}); err != nil {
			return err
		}
	}
	_, silent, err := net.ParseCIDR(silentIPv4 + "/32")
	if err != nil {
		return err
	}
	if err := there.RouteAdd(&netlink.Route{Dst: silent, Type: unix.RTN_BLACKHOLE}); err != nil {
		return fmt.Errorf("route to nowhere: %w", err)
	}
	for _, way := range [][2]string{{"0.0.0.0/0", gatewayIPv4}, {"::/0", gatewayIPv6}} {
		_, all, _ := net.ParseCIDR(way[0])
		if err := here.RouteAdd(&netlink.Route{Dst: all, Gw: net.ParseIP(way[1]), LinkIndex: up.Attrs().Index}); err != nil {
			return fmt.Errorf("default route: %w", err)
		}
	}
	return serveInternet()
}

func addressed(h *netlink.Handle, name string, addrs []string) error {
	for _, n := range []string{"lo", name} {
		link, err := h.LinkByName(n)
		if err != nil {
			return err
		}
		if err := h.LinkSetUp(link); err != nil {
			return err
		}
		if n == "lo" {
			continue
		}
		for _, a := range addrs {
			p := netip.MustParsePrefix(a)
			addr := &netlink.Addr{
				IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}, Flags: unix.IFA_F_NODAD,
			}
			if err := h.AddrAdd(link, addr); err != nil {
				return fmt.Errorf("address %s: %w", a, err)
			}
		}
	}
	return nil
}

func serveInternet() error {
	internet.zone, internet.received = newZone(), &received{}
	err := within(internet.ns, func() error {
		for _, at := range []string{":" + webPort, ":" + otherPort, ":" + controlPort, foreignDNS + ":53", web2IPv4 + ":53"} {
			ln, err := net.Listen("tcp", at)
			if err != nil {
				return err
			}
			go func() { _ = http.Serve(ln, web()) }()
		}
		for _, port := range []string{"7", "19", "9"} {
			ln, err := net.Listen("tcp", ":"+port)
			if err != nil {
				return err
			}
			go serveTCP(ln, port)
		}
		for _, a := range internetAddrs {
			for _, port := range []string{"7", "53"} {
				if a == nameserver && port == "53" {
					continue
				}
				pc, err := net.ListenPacket("udp", net.JoinHostPort(a, port))
				if err != nil {
					return err
				}
				go echoUDP(pc)
			}
		}
		pc, err := net.ListenPacket("udp", nameserver+":53")
		if err != nil {
			return err
		}
		ln, err := net.Listen("tcp", nameserver+":53")
		if err != nil {
			return err
		}
		go func() { _ = (&dns.Server{PacketConn: pc, Handler: internet.zone}).ActivateAndServe() }()
		go func() { _ = (&dns.Server{Listener: ln, Handler: internet.zone}).ActivateAndServe() }()
		return nil
	})
	if err != nil {
		return err
	}
	for _, at := range []string{":" + controlPort, ":" + webPort, ":7"} { // services on the worker's machine
		ln, err := net.Listen("tcp", at)
		if err != nil {
			return err
		}
		go func() { _ = http.Serve(ln, web()) }()
	}
	return nil
}

// web answers with its own address, redirects on request, and echoes bodies.
func web() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(w, "this is %s", r.Context().Value(http.LocalAddrContextKey))
	})
	mux.HandleFunc("/to", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, r.URL.Query().Get("url"), http.StatusFound)
	})
	return mux
}

// serveTCP echoes on port 7, sends endlessly on port 19, and resets connections after the first
// data on port 9.
func serveTCP(ln net.Listener, port string) {
	for {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = conn.Close() }()
			switch port {
			case "7":
				_, _ = io.Copy(conn, conn)
			case "19":
				n, _ := io.Copy(conn, endless{})
				internet.received.sent(n)
			case "9":
				_, _ = conn.Read(make([]byte, 1))
				_ = conn.(*net.TCPConn).SetLinger(0)
			}
		}()
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func echoUDP(pc net.PacketConn) {
	buf := make([]byte, 64<<10)
	for {
		n, from, err := pc.ReadFrom(buf)
		if err != nil {
			return
		}
		internet.received.packet(string(buf[:min(n, 64)]))
		_, _ = pc.WriteTo(buf[:n], from)
	}
}

// received records what reached the internet of the tests.
type received struct {
	mu      sync.Mutex
	packets []string
	bytes   []int64
}

func (h *received) packet(s string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.packets = append(h.packets, s)
}

func (h *received) sent(n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.bytes = append(h.bytes, n)
}

func (h *received) lastSent() (int64, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.bytes) == 0 {
		return 0, false
	}
	return h.bytes[len(h.bytes)-1], true
}

func (h *received) has(s string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Contains(h.packets, s)
}

// zone is a DNS server to which tests add records.
type zone struct {
	mu      sync.Mutex
	records map[string][]string // by name, in the form of a zone file
	then    map[string][]string // replacements after the first query
	asked   map[string]int
}

func newZone() *zone {
	return &zone{records: map[string][]string{}, then: map[string][]string{}, asked: map[string]int{}}
}

// set sets the records of a name. Their owner may be another name.
func (z *zone) set(name string, records ...string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.records[name] = records
}

func (z *zone) after(name string, records ...string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.then[name] = records
}

func (z *zone) count(name string) int {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.asked[name]
}

func (z *zone) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	z.mu.Lock()
	defer z.mu.Unlock()
	m := new(dns.Msg)
	m.SetReply(q)
	name := strings.TrimSuffix(strings.ToLower(q.Question[0].Name), ".")
	z.asked[name]++
	records, ok := z.records[name]
	if !ok {
		m.Rcode = dns.RcodeNameError
	}
	for _, s := range records {
		rr, err := dns.NewRR(s)
		if err != nil {
			panic(err)
		}
		if rr.Header().Rrtype == q.Question[0].Qtype || rr.Header().Rrtype == dns.TypeCNAME {
			m.Answer = append(m.Answer, rr)
		}
	}
	if then, ok := z.then[name]; ok {
		z.records[name] = then
	}
	if opt := q.IsEdns0(); opt != nil && w.RemoteAddr().Network() == "udp" {
		m.Truncate(int(opt.UDPSize()))
	}
	_ = w.WriteMsg(m)
}

// open opens a network like a worker.
func open(t testing.TB, control ...string) *egress.Network {
	t.Helper()
	n, err := egress.Open(t.Context(), config(t.Output(), control...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

func config(log io.Writer, control ...string) egress.Config {
	return egress.Config{
		Upstreams:    []netip.AddrPort{netip.MustParseAddrPort(nameserver + ":53")},
		ControlPlane: control,
		Log:          slog.New(slog.NewTextHandler(log, nil)),
	}
}

var unrestricted = proto.Network{Policy: proto.NetworkUnrestricted}

func allow(rules ...string) proto.Network {
	return proto.Network{Policy: proto.NetworkAllowlist, Allow: rules}
}

// jail is a process in its own network and user namespaces. It is root inside, with more rights
// than a real jail gives a program.
type jail struct {
	t     testing.TB
	cmd   *exec.Cmd
	netns *os.File
	in    io.WriteCloser
	out   *bufio.Scanner
}

func newJail(t testing.TB) *jail {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = []string{roleVar + "=" + roleProgram, "GORACE=atexit_sleep_ms=0"}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	j := &jail{t: t, cmd: cmd, netns: ns, in: in, out: bufio.NewScanner(out)}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
		_ = ns.Close()
	})
	return j
}

func attach(t testing.TB, n *egress.Network, policy proto.Network) (*jail, *egress.Link) {
	t.Helper()
	return attachWith(t, n, policy, 1)
}

// attachWith attaches a jail with a number of cores.
func attachWith(t testing.TB, n *egress.Network, policy proto.Network, cpu float64) (*jail, *egress.Link) {
	t.Helper()
	j := newJail(t)
	l, err := n.Attach(t.Context(), j.netns, policy, cpu)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return j, l
}

// order is a command for the program, and answer its outcome.
type order struct {
	Do   string `json:"do"`
	To   string `json:"to,omitempty"`
	Data string `json:"data,omitempty"`
	N    int    `json:"n,omitempty"`
	Name string `json:"name,omitempty"` // that TLS asks for
	CA   string `json:"ca,omitempty"`   // PEM of the only authorities that TLS trusts
}

type answer struct {
	Error string         `json:"error,omitempty"` // name of the errno, if any
	Data  string         `json:"data,omitempty"`
	Found []string       `json:"found,omitempty"`
	TTL   uint32         `json:"ttl,omitempty"`
	Count map[string]int `json:"count,omitempty"`
}

func (j *jail) do(o order) answer {
	j.t.Helper()
	if err := json.NewEncoder(j.in).Encode(o); err != nil {
		j.t.Fatal(err)
	}
	if !j.out.Scan() {
		j.t.Fatalf("the program has ended at %+v: %v", o, j.out.Err())
	}
	var a answer
	if err := json.Unmarshal(j.out.Bytes(), &a); err != nil {
		j.t.Fatal(err)
	}
	return a
}

// tcp and udp send data to the echo service and return the echo.
func (j *jail) tcp(to, data string) answer {
	j.t.Helper()
	return j.do(order{Do: "tcp", To: to, Data: data})
}

func (j *jail) udp(to, data string) answer {
	j.t.Helper()
	return j.do(order{Do: "udp", To: to, Data: data})
}
func (j *jail) get(url string) answer { j.t.Helper(); return j.do(order{Do: "get", To: url}) }

func (j *jail) resolve(name, kind string) answer {
	j.t.Helper()
	return j.do(order{Do: "resolve", To: name, Data: kind})
}

// until polls until a condition holds, or fails the test.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("timed out waiting for %s", what)
		}
	}
}
