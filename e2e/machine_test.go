package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// A machine has its own network and, beside it, one that represents the internet. The
// internet has the addresses below, so that everything blocked would otherwise be reachable.
const (
	machineAddr  = "93.184.215.14"
	routerAddr   = "93.184.215.1"
	webAddr      = "93.184.216.34" // www.example.com
	web2Addr     = "93.184.216.35" // other.example.com
	nameserver   = "93.184.216.53"
	metadataAddr = "169.254.169.254"
	privateAddr  = "10.1.2.3"
)

// machine is where the processes of a deployment run. A nil machine is the one that runs the tests.
type machine struct {
	netns    *os.File
	internet *os.File // network beside the machine
	resolv   string   // replaces /etc/resolv.conf; unused with mounts
	mounts   *os.File // mount namespace; nil to make one for each process
}

// enter moves the calling thread, and thus the processes that it starts, permanently to the
// machine.
func (m *machine) enter() error {
	if m == nil {
		return nil
	}
	if m.mounts != nil {
		return m.enterMounts()
	}
	resolv, err := filepath.EvalSymlinks("/etc/resolv.conf")
	if err == nil {
		err = unix.Setns(int(m.netns.Fd()), unix.CLONE_NEWNET)
	}
	if err == nil {
		err = unix.Unshare(unix.CLONE_NEWNS)
	}
	if err == nil {
		err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	}
	if err == nil {
		err = unix.Mount(m.resolv, resolv, "", unix.MS_BIND, "")
	}
	if err != nil {
		return fmt.Errorf("enter the machine: %w", err)
	}
	return nil
}

func (m *machine) enterMounts() error {
	err := unix.Unshare(unix.CLONE_FS) // threads share it by default
	if err == nil {
		err = unix.Setns(int(m.netns.Fd()), unix.CLONE_NEWNET)
	}
	if err == nil {
		err = unix.Setns(int(m.mounts.Fd()), unix.CLONE_NEWNS)
	}
	if err != nil {
		return fmt.Errorf("enter the machine: %w", err)
	}
	return nil
}

// dialer returns a dialer on the machine, or nil for the host.
func (m *machine) dialer() func(ctx context.Context, network, addr string) (net.Conn, error) {
	if m == nil {
		return nil
	}
	return func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
		err = within(m.netns, func() (err error) {
			conn, err = new(net.Dialer).DialContext(ctx, network, addr)
			return err
		})
		return conn, err
	}
}

// Dial connects from the machine.
func (m *machine) Dial(network, addr string) (conn net.Conn, err error) {
	err = m.inNetwork(func() error {
		conn, err = net.DialTimeout(network, addr, time.Second)
		return err
	})
	return conn, err
}

// listen listens on a port of the machine.
func (m *machine) listen(addr string) (ln net.Listener, err error) {
	err = m.inNetwork(func() error {
		ln, err = net.Listen("tcp", addr)
		return err
	})
	return ln, err
}

// inNetwork calls f in the machine's network.
func (m *machine) inNetwork(f func() error) error {
	if m == nil {
		return f()
	}
	return within(m.netns, f)
}

// inMachine calls f on a thread in the machine.
func (m *machine) inMachine(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		err := m.enter()
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// within calls f on a thread in another network. If ns is nil, it makes a new one.
func within(ns *os.File, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		var err error
		if ns == nil {
			err = unix.Unshare(unix.CLONE_NEWNET)
		} else {
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

func newNetwork(t *testing.T) *os.File {
	t.Helper()
	var ns *os.File
	err := within(nil, func() (err error) {
		ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ns.Close() })
	return ns
}

// newMachine makes a machine and its internet, which has a web server and a DNS server.
func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{netns: newNetwork(t), internet: newNetwork(t), resolv: filepath.Join(t.TempDir(), "resolv.conf")}
	if err := os.WriteFile(m.resolv, []byte("nameserver "+nameserver+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	err := within(m.netns, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "up0"
		up := netlink.NewVeth(attrs)
		up.PeerName, up.PeerNamespace = "world0", netlink.NsFd(m.internet.Fd())
		return netlink.LinkAdd(up)
	})
	if err == nil {
		err = addressed(m.netns, "up0", machineAddr+"/24", "10.77.0.2/24")
	}
	if err == nil {
		err = addressed(m.internet, "world0", routerAddr+"/24", webAddr+"/32", web2Addr+"/32", nameserver+"/32",
			metadataAddr+"/32", privateAddr+"/32")
	}
	if err == nil {
		err = within(m.netns, func() error { return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(routerAddr)}) })
	}
	if err == nil {
		err = within(m.internet, func() error { return serveSystem(t) })
	}
	if err != nil {
		t.Fatalf("make a machine: %v", err)
	}
	return m
}

// addressed assigns addresses to an interface and brings it and the loopback up.
func addressed(ns *os.File, name string, addrs ...string) error {
	h, err := netlink.NewHandleAt(netns.NsHandle(ns.Fd()))
	if err != nil {
		return err
	}
	defer h.Close()
	for _, n := range []string{"lo", name} {
		link, err := h.LinkByName(n)
		if err == nil {
			err = h.LinkSetUp(link)
		}
		if err != nil {
			return err
		}
	}
	link, err := h.LinkByName(name)
	for _, a := range addrs {
		addr, parseErr := netlink.ParseAddr(a)
		err = errors.Join(err, parseErr)
		if err == nil {
			err = h.AddrAdd(link, addr)
		}
	}
	return err
}

func serveSystem(t *testing.T) error {
	for _, at := range []string{":80", ":8080"} {
		ln, err := net.Listen("tcp", at)
		if err != nil {
			return err
		}
		server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			_, _ = fmt.Fprintf(w, "this is %s", r.Host)
		})}
		go func() { _ = server.Serve(ln) }()
		t.Cleanup(func() { _ = server.Close() })
	}
	packets, err := net.ListenPacket("udp", nameserver+":53")
	if err != nil {
		return err
	}
	server := &dns.Server{PacketConn: packets, Handler: dns.HandlerFunc(answerName)}
	started := make(chan struct{})
	server.NotifyStartedFunc = func() { close(started) }
	go func() { _ = server.ActivateAndServe() }()
	<-started
	t.Cleanup(func() { _ = server.Shutdown() })
	return nil
}

// answerName answers DNS queries for two names of the internet and one of the private network.
func answerName(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	asked := q.Question[0]
	addr, ok := map[string]string{
		"www.example.com.": webAddr, "other.example.com.": web2Addr, mirrorName + ".": privateAddr,
	}[strings.ToLower(asked.Name)]
	switch {
	case !ok:
		m.Rcode = dns.RcodeNameError
	case asked.Qtype == dns.TypeA:
		m.Answer = []dns.RR{&dns.A{
			Hdr: dns.RR_Header{Name: asked.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60},
			A:   net.ParseIP(addr),
		}}
	}
	_ = w.WriteMsg(m)
}
