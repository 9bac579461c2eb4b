package e2e

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	hubAddr      = "10.99.0.254"
	clientPort   = "4222"
	routePort    = "6222"
	natsSystem   = "system" // account that may remove servers
	clusterNodes = 3
	diskBytes    = 256 << 20 // per node
)

// cluster is three NATS servers, each on its own machine, joined by one network. bullpen's
// processes run where the programs run. They reach each node at a local address that forwards to
// that network.
type cluster struct {
	programs *programs
	dir      string
	hub      *os.File // network that joins the machines
	nodes    []*natsNode
	system   *nats.Conn // connection that may remove servers
	js       jetstream.JetStream
}

// natsNode is one NATS server of a cluster and its machine.
type natsNode struct {
	*process
	name    string // of the server; changes when the node loses its data
	cluster *cluster
	machine *machine
	disk    string // its own file system, visible only on its machine
	port    string // its port on the hub
	addr    string
	url     string // address for clients
	life    int    // number of empty disks it has started with
}

// startCluster starts a cluster and returns once its servers have connected to each other.
func (p *programs) startCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{programs: p, dir: t.TempDir(), hub: newNetwork(t)}
	err := within(c.hub, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "hub"
		return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs})
	})
	if err == nil {
		err = addressed(c.hub, "hub", hubAddr+"/24")
	}
	if err != nil {
		t.Fatalf("make the network of a cluster: %v", err)
	}
	for i := range clusterNodes {
		c.nodes = append(c.nodes, c.newNode(t, i+1))
	}
	c.launch(t)
	opts := []nats.Option{
		nats.RootCAs(p.cert), nats.MaxReconnects(-1), nats.ReconnectWait(100 * time.Millisecond),
		nats.PingInterval(time.Second),
		nats.Timeout(time.Second), nats.IgnoreDiscoveredServers(),
		nats.SetCustomDialer(p.machine),
	}
	c.system, err = nats.Connect(c.urls(), append(opts, nats.UserInfo(natsSystem, natsPassword))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.system.Close)
	conn, err := nats.Connect(c.urls(), append(opts, nats.UserInfo(natsUser, natsPassword))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	if c.js, err = jetstream.New(conn); err != nil {
		t.Fatal(err)
	}
	c.leads(t)
	return c
}

// start restarts all servers on their disks and returns once they have connected to each other.
func (c *cluster) start(t *testing.T) {
	t.Helper()
	c.launch(t)
	c.leads(t)
}

func (c *cluster) launch(t *testing.T) {
	t.Helper()
	for _, n := range c.nodes {
		n.launch(t)
	}
	for _, n := range c.nodes {
		n.awaitListening(t)
	}
}

// leads waits until the servers have elected a meta leader.
func (c *cluster) leads(t *testing.T) {
	t.Helper()
	eventually(t, "the cluster has a leader", func() (bool, any) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := c.js.AccountInfo(ctx)
		return err == nil, err
	})
}

// newNode makes a node's machine: its network with a link to the hub, and its disk.
func (c *cluster) newNode(t *testing.T, number int) *natsNode {
	t.Helper()
	n := &natsNode{
		cluster: c, disk: filepath.Join(c.dir, fmt.Sprintf("disk%d", number)), port: fmt.Sprintf("node%d", number),
		addr:    fmt.Sprintf("10.99.0.%d", number),
		machine: &machine{netns: newNetwork(t)},
	}
	n.rename(number)
	err := within(c.hub, func() error {
		bridge, err := netlink.LinkByName("hub")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MasterIndex = n.port, bridge.Attrs().Index
		link := netlink.NewVeth(attrs)
		link.PeerName, link.PeerNamespace = "eth0", netlink.NsFd(n.machine.netns.Fd())
		if err := netlink.LinkAdd(link); err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	})
	if err == nil {
		err = addressed(n.machine.netns, "eth0", n.addr+"/24")
	}
	if err == nil {
		err = os.Mkdir(n.disk, 0o700)
	}
	if err == nil {
		n.machine.mounts, err = newDisk(n.disk, diskBytes)
	}
	if err == nil {
		t.Cleanup(func() { _ = n.machine.mounts.Close() })
		n.url, err = n.serve(t)
	}
	if err != nil {
		t.Fatalf("make a machine for a NATS server: %v", err)
	}
	return n
}

func (n *natsNode) rename(number int) {
	n.life++
	n.name = fmt.Sprintf("n%d-%d", number, n.life)
}

// newDisk makes a mount namespace with an empty file system of size bytes on dir.
func newDisk(dir string, size int) (mounts *os.File, err error) {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", size))
		}
		if err == nil {
			mounts, err = os.Open("/proc/thread-self/ns/mnt")
		}
		done <- err
	}()
	return mounts, <-done
}

// serve listens at an address that bullpen's processes can reach, and forwards each connection to
// the node.
func (n *natsNode) serve(t *testing.T) (string, error) {
	line, err := n.cluster.programs.machine.listen("127.0.0.1:0")
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var carried sync.WaitGroup
	t.Cleanup(func() { // both ends of each connection are closed by then
		cancel()
		_ = line.Close()
		carried.Wait()
	})
	carried.Go(func() {
		for {
			conn, err := line.Accept()
			if err != nil {
				return
			}
			carried.Go(func() { n.carry(ctx, conn) })
		}
	})
	return "tls://" + line.Addr().String(), nil
}

// carry forwards a connection to the node. Closing either end closes the other.
func (n *natsNode) carry(ctx context.Context, conn net.Conn) {
	defer func() { _ = conn.Close() }()
	var to net.Conn
	err := within(n.cluster.hub, func() (err error) {
		to, err = new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(n.addr, clientPort))
		return err
	})
	if err != nil {
		return
	}
	defer func() { _ = to.Close() }()
	// A server that does not exit cleanly leaves its connections open.
	defer context.AfterFunc(ctx, func() { _ = errors.Join(conn.Close(), to.Close()) })()
	go func() {
		_, _ = io.Copy(to, conn)
		_ = to.Close()
	}()
	_, _ = io.Copy(conn, to)
}

// launch starts the server of the node.
func (n *natsNode) launch(t *testing.T) {
	t.Helper()
	var routes []string
	for _, other := range n.cluster.nodes {
		if other != n {
			routes = append(routes, fmt.Sprintf("%q", "nats://"+net.JoinHostPort(other.addr, routePort)))
		}
	}
	p := *n.cluster.programs
	text := fmt.Sprintf(`
server_name: %q
listen: "0.0.0.0:%s"
client_advertise: %q
jetstream { store_dir: %q, sync_interval: always, max_file_store: 1TB }
cluster { name: "bullpen", listen: "%s:%s", routes: [%s], ping_interval: "2s", ping_max: 2 }
accounts {
  BULLPEN { jetstream: enabled, users: [{ user: %q, password: %q }] }
  SYS { users: [{ user: %q, password: %q }] }
}
system_account: SYS
connect_error_reports: 100000
reconnect_error_reports: 100000
tls { cert_file: %q, key_file: %q }
`, n.name, clientPort, strings.TrimPrefix(n.url, "tls://"), n.disk, n.addr, routePort, strings.Join(routes, ", "),
		natsUser, natsPassword, natsSystem, natsPassword, p.cert, p.certsKey)
	config := filepath.Join(n.cluster.dir, n.name+".conf")
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p.machine = n.machine
	n.process = p.startProcess(t, "nats-"+n.name, nil, p.nats, "--config", config)
	proc := n.process
	t.Cleanup(func() { proc.signal(syscall.SIGCONT) }) // so that it can exit
}

// awaitListening waits until the server accepts connections.
func (n *natsNode) awaitListening(t *testing.T) {
	t.Helper()
	eventually(t, n.name+" listens", func() (bool, any) {
		if n.ended() {
			t.Fatalf("the NATS server %s ended:\n%s", n.name, n.tail())
		}
		return strings.Contains(n.text(t), "Server is ready"), "no such line"
	})
}

// start restarts the server on its disk.
func (n *natsNode) start(t *testing.T) {
	t.Helper()
	n.launch(t)
	n.awaitListening(t)
}

// stop shuts the server down cleanly.
func (n *natsNode) stop(t *testing.T) {
	t.Helper()
	n.signal(syscall.SIGTERM)
	n.exitCode(t)
}

// freeze suspends the server's threads. Its connections stay open.
func (n *natsNode) freeze() { n.signal(syscall.SIGSTOP) }

// thaw resumes the server.
func (n *natsNode) thaw() { n.signal(syscall.SIGCONT) }

// cut sets the node's link down. Packets are lost in both directions and connections stay open.
func (n *natsNode) cut(t *testing.T) {
	t.Helper()
	n.link(t, netlink.LinkSetDown)
}

func (n *natsNode) link(t *testing.T, set func(netlink.Link) error) {
	t.Helper()
	if err := within(n.cluster.hub, func() error {
		link, err := netlink.LinkByName(n.port)
		if err == nil {
			err = set(link)
		}
		return err
	}); err != nil {
		t.Fatalf("the link of %s: %v", n.name, err)
	}
}

// dropOutgoing drops all packets that the node sends. It still receives.
func (n *natsNode) dropOutgoing(t *testing.T) {
	t.Helper()
	n.drop(t, nftables.ChainHookOutput)
}

// dropIncoming drops all packets to the node. It can still send.
func (n *natsNode) dropIncoming(t *testing.T) {
	t.Helper()
	n.drop(t, nftables.ChainHookInput)
}

func (n *natsNode) drop(t *testing.T, hook *nftables.ChainHook) {
	t.Helper()
	n.filter(t, func(c *nftables.Conn) {
		drop := nftables.ChainPolicyDrop
		table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "cut"})
		c.AddChain(&nftables.Chain{
			Name: "all", Table: table, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityFilter,
			Policy: &drop,
		})
	})
}

func (n *natsNode) filter(t *testing.T, change func(*nftables.Conn)) {
	t.Helper()
	c, err := nftables.New(nftables.WithNetNSFd(int(n.machine.netns.Fd())))
	if err == nil {
		change(c)
		err = c.Flush()
	}
	if err != nil {
		t.Fatalf("the packet filter of %s: %v", n.name, err)
	}
}

// heal undoes cut, mute and deafen.
func (n *natsNode) heal(t *testing.T) {
	t.Helper()
	n.filter(t, func(c *nftables.Conn) { c.FlushRuleset() })
	n.link(t, netlink.LinkSetUp)
}

// fill writes to the node's disk until it is full.
func (n *natsNode) fill(t *testing.T) {
	t.Helper()
	err := n.machine.inMachine(func() error {
		f, err := os.OpenFile(n.filling(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		for chunk := make([]byte, 1<<20); len(chunk) > 0; {
			if _, err := f.Write(chunk); errors.Is(err, syscall.ENOSPC) {
				chunk = chunk[:len(chunk)/2]
			} else if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatalf("fill the disk of %s: %v", n.name, err)
	}
}

// free removes what fill wrote.
func (n *natsNode) free(t *testing.T) {
	t.Helper()
	if err := n.machine.inMachine(func() error { return os.Remove(n.filling()) }); err != nil {
		t.Fatal(err)
	}
}

func (n *natsNode) filling() string { return filepath.Join(n.disk, "filling") }

// replace kills the server, discards its data, and replaces it with a server of another name. As
// docs/guides/nats.md requires, the new server joins before the old one is removed.
func (n *natsNode) replace(t *testing.T) {
	t.Helper()
	n.kill()
	old := n.name
	n.wipe(t)
	n.rename(slices.Index(n.cluster.nodes, n) + 1)
	n.start(t)
	n.cluster.remove(t, old)
}

// wipe removes everything from the node's disk.
func (n *natsNode) wipe(t *testing.T) {
	t.Helper()
	if err := n.machine.inMachine(func() error {
		kept, err := filepath.Glob(filepath.Join(n.disk, "*"))
		for _, path := range kept {
			err = errors.Join(err, os.RemoveAll(path))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// remove removes a server from the cluster for good.
func (c *cluster) remove(t *testing.T, name string) {
	t.Helper()
	eventually(t, name+" is removed", func() (bool, any) {
		m, err := c.system.Request("$JS.API.SERVER.REMOVE", fmt.Appendf(nil, `{"peer":%q}`, name), time.Second)
		if err != nil {
			return false, err
		}
		var answer struct {
			Success bool                `json:"success"`
			Error   *jetstream.APIError `json:"error"`
		}
		if err := json.Unmarshal(m.Data, &answer); err != nil {
			return false, err
		}
		gone := answer.Error != nil && answer.Error.ErrorCode == 10044 // no such server
		return answer.Success || gone, string(m.Data)
	})
}

// leader returns the node that leads a stream.
func (c *cluster) leader(t testing.TB, stream string) (leads *natsNode) {
	t.Helper()
	eventually(t, stream+" has a leader", func() (bool, any) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		s, err := c.js.Stream(ctx, stream)
		if err != nil {
			return false, err
		}
		in := s.CachedInfo().Cluster
		if in == nil {
			return false, "no cluster"
		}
		for _, n := range c.nodes {
			if n.name == in.Leader {
				leads = n
			}
		}
		return leads != nil, in.Leader
	})
	return leads
}

// metaGroup is the key of the servers' own Raft group in the result of elections.
const metaGroup = "meta"

// elections returns the last election of each Raft group within a span, by stream name, according
// to the servers' logs.
func (c *cluster) elections(t testing.TB, in span) map[string]time.Time {
	t.Helper()
	out := map[string]time.Time{}
	for _, n := range c.nodes {
		for _, m := range electionLine.FindAllStringSubmatch(n.text(t), -1) {
			at, err := time.ParseInLocation("2006/01/02 15:04:05.000000", m[1], time.Local)
			if err != nil {
				t.Fatal(err)
			}
			group := cmp.Or(m[2], metaGroup)
			if at.After(in.from) && at.Before(in.to) && at.After(out[group]) {
				out[group] = at
			}
		}
	}
	return out
}

// electionLine matches the log line of a server that becomes a leader.
var electionLine = regexp.MustCompile(
	`(?m)^\[\d+\] (\S+ \S+) \[INF\] (?:JetStream cluster new stream leader for '\S+ > (\S+)'|Self is new JetStream ` +
		`cluster metadata leader)$`)

// whole waits until every stream has all its replicas and none is behind.
func (c *cluster) whole(t testing.TB) {
	t.Helper()
	eventually(t, "all replicas are there", func() (bool, any) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		streams, n := c.js.ListStreams(ctx), 0
		for info := range streams.Info() {
			n++
			in := info.Cluster
			if in == nil || in.Leader == "" || len(in.Replicas) != info.Config.Replicas-1 {
				return false, fmt.Sprintf("%s: %+v", info.Config.Name, in)
			}
			for _, r := range in.Replicas {
				if !r.Current || r.Offline {
					return false, fmt.Sprintf("%s: %+v", info.Config.Name, *r)
				}
			}
		}
		return streams.Err() == nil && n > 0, streams.Err()
	})
}

func (c *cluster) urls() string {
	var urls []string
	for _, n := range c.nodes {
		urls = append(urls, n.url)
	}
	return strings.Join(urls, ",")
}

// flags returns the flags for connecting to the cluster. The password is in the environment.
func (c *cluster) flags() []string {
	return []string{
		"--nats", c.urls(), "--nats-user", natsUser, "--nats-ca", c.programs.cert, "--replicas",
		fmt.Sprint(clusterNodes),
	}
}

// env returns the same environment as broker.env.
func (c *cluster) env() []string {
	return []string{
		"BULLPEN_NATS_PASSWORD=" + natsPassword, "BULLPEN_STORE=file://" + filepath.Join(c.dir, "blobs"),
		"BULLPEN_SECRETS_KEY=" + c.programs.secretsKey,
	}
}
