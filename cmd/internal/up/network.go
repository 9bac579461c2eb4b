package up

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail/egress"
)

// The network of all deployments. Each has a separate one, so they share the addresses.
var (
	firstAddr = netip.MustParseAddr("10.231.0.1")
	hubAddr   = netip.MustParseAddr("10.231.0.254")
)

const (
	networkBits = 24
	bridgeName  = "bridge0"
	linkName    = "eth0" // inside the namespace of a process
	acceptPause = 10 * time.Millisecond
)

// network is a network namespace with a bridge that connects the namespaces of processes. It has no
// name, no interface on the machine and no way out. The kernel removes it with its last process.
type network struct {
	hub *os.File // the namespace with the bridge
}

func newNetwork() (n *network, err error) {
	n = &network{}
	err = egress.InNamespace(nil, func() (err error) {
		if n.hub, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name = bridgeName
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
			return fmt.Errorf("add a bridge: %w; load the kernel's module bridge", err)
		}
		return setUp(bridgeName, hubAddr)
	})
	if err != nil {
		if n.hub != nil {
			_ = n.hub.Close()
		}
		return nil, fmt.Errorf("create a network namespace: %w", err)
	}
	return n, nil
}

// setUp brings an interface of the calling thread's namespace up, with an address.
func setUp(name string, addr netip.Addr) error {
	link, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(networkBits, 32)}})
	}
	if err == nil {
		err = netlink.LinkSetUp(link)
	}
	if err != nil {
		return fmt.Errorf("bring %s up with %s: %w", name, addr, err)
	}
	return nil
}

// join moves the calling thread, and so the processes that it starts, to a new namespace connected
// to the bridge. The namespace ends with the thread and these processes. The caller has locked the
// goroutine to the thread, and must not use the thread for anything else.
func (n *network) join(addr netip.Addr) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("create the network namespace of %s: %w", addr, err)
		}
	}()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	own, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	defer func() { _ = own.Close() }() // only read
	err = egress.InNamespace(n.hub, func() error {
		bridge, err := netlink.LinkByName(bridgeName)
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MasterIndex = "veth"+strconv.Itoa(int(addr.As4()[3])), bridge.Attrs().Index
		link := netlink.NewVeth(attrs)
		link.PeerName, link.PeerNamespace = linkName, netlink.NsFd(own.Fd())
		if err := netlink.LinkAdd(link); err != nil {
			return fmt.Errorf("add a veth pair: %w; load the kernel's module veth", err)
		}
		return netlink.LinkSetUp(link)
	})
	if err != nil {
		return err
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	return errors.Join(err, setUp(linkName, addr))
}

// dial connects to an address of the network.
func (n *network) dial(ctx context.Context, protocol, addr string) (conn net.Conn, err error) {
	err = egress.InNamespace(n.hub, func() (err error) {
		conn, err = new(net.Dialer).DialContext(ctx, protocol, addr)
		return err
	})
	return conn, err
}

func (n *network) close() { _ = n.hub.Close() }

// forward connects the clients of a listener with an address of the network until ctx is done. It
// closes the listener.
func (n *network) forward(ctx context.Context, l net.Listener, to string) {
	var open sync.WaitGroup
	defer open.Wait()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	for {
		client, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return
			}
			time.Sleep(acceptPause) // out of descriptors: clients wait in the listener's queue
			continue
		}
		open.Go(func() { n.relay(ctx, client.(*net.TCPConn), to) })
	}
}

// relay copies between a client and an address. Each direction ends on its own, as clients expect
// that close theirs first.
func (n *network) relay(ctx context.Context, client *net.TCPConn, to string) {
	defer func() { _ = client.Close() }()
	conn, err := n.dial(ctx, "tcp", to)
	if err != nil {
		return // the process is down, and so is the client's connection
	}
	server := conn.(*net.TCPConn)
	defer func() { _ = server.Close() }()
	defer context.AfterFunc(ctx, func() { _, _ = client.Close(), server.Close() })()
	var copies sync.WaitGroup
	for _, pair := range [][2]*net.TCPConn{{client, server}, {server, client}} {
		copies.Go(func() {
			if _, err := io.Copy(pair[0], pair[1]); err != nil {
				_, _ = client.Close(), server.Close()
			}
			_ = pair[0].CloseWrite() // fails if both are closed
		})
	}
	copies.Wait()
}
