package e2e

import (
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"

	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// deployment is a bullpen deployment for a test that stops its processes one by one.
type deployment struct {
	topology
	t        *testing.T
	programs *programs
	root     string // the first API key, a global administrator's
	key      string
	http     *http.Client
	members  []*member
	store    *bucket
	redis    *redis
	broker   *broker  // nil with embedded NATS or a cluster
	cluster  *cluster // nil without a cluster
	args     []string // of every process
	env      []string
}

// member is a process of a deployment that may be killed and started again.
type member struct {
	name string
	data string
	args []string // its own arguments
	env  []string
	line *line // connection to NATS; nil with embedded NATS or a direct connection
	is   roles

	mu        sync.Mutex
	process   *process
	base      string // base URL for HTTP
	disrupted bool   // it is dead, frozen or cut off
}

// roles are the roles that a member has.
type roles struct{ gateway, worker, scheduler, webhook bool }

const (
	ledgerSlots = 4 // per worker
	// maxWebhookWait is how long a webhook of a ledger waits for another attempt, in seconds.
	maxWebhookWait = 2
)

// deploy starts bullpen on its own machine and returns when it is ready. Each role has its own
// process, unless one process has all roles. If there is a single NATS server, every process has
// its own line to it.
func (d *deployment) deploy() {
	d.t.Helper()
	switch {
	case d.clustered:
		d.cluster = d.programs.startCluster(d.t)
		d.addSeparate(d.cluster.env(), func(m *member) { m.args = append(m.args, d.cluster.flags()...) })
	case d.separate:
		d.addWithLines()
	default:
		d.add("server", "", roles{true, true, true, true}, append(prewarmed, "--slots", strconv.Itoa(ledgerSlots))...)
	}
	d.start()
}

// addWithLines adds processes that reach a NATS server through lines.
func (d *deployment) addWithLines() {
	d.t.Helper()
	b := d.programs.startBroker(d.t)
	d.broker = b
	d.t.Cleanup(func() { d.broker.signal(syscall.SIGCONT) }) // so that it can exit
	d.addSeparate(b.env(), func(m *member) {
		u, err := url.Parse(b.url)
		if err != nil {
			d.t.Fatal(err)
		}
		m.line = newLine(d.t, d.programs.machine, u.Host)
		u.Host = m.line.addr
		m.args = append(m.args, b.flagsBy(u.String(), d.programs)...)
	})
}

// newDeployment makes what processes need besides NATS, on its own machine. args apply to all
// processes.
func newDeployment(t *testing.T, p *programs, in topology, args ...string) *deployment {
	t.Helper()
	with := *p
	with.machine = newMachine(t)
	root := newSecret()
	d := &deployment{topology: in, t: t, programs: &with, root: root, key: root, http: newHTTP(t, with.machine.dialer())}
	d.store, d.redis = with.newBucket(t), startRedis(t, with.machine)
	d.args = slices.Concat(args, d.store.flags(), []string{
		"--redis", "redis://" + d.redis.addr, "--queue-wait", "10s", "--webhook-allow-http",
		"--webhook-allow-ports", hookPort,
	})
	d.env = append(storagetest.Env(), "BULLPEN_BOOTSTRAP_KEY="+d.root)
	return d
}

// addSeparate adds a process for each role, plus a second gateway and worker. join connects each
// one to NATS.
func (d *deployment) addSeparate(env []string, join func(*member)) {
	d.env = append(d.env, env...)
	for _, m := range []*member{
		d.add("gateway-1", "gateway", roles{gateway: true}),
		d.add("gateway-2", "gateway", roles{gateway: true}),
		d.add("scheduler", "scheduler", roles{scheduler: true}),
		d.add("webhook", "webhook", roles{webhook: true}),
		d.add("worker-1", "worker", roles{worker: true}, "--slots", strconv.Itoa(ledgerSlots)),
		d.add("worker-2", "worker", roles{worker: true}, "--slots", strconv.Itoa(ledgerSlots)),
	} {
		join(m)
	}
}

// member returns the process of that name.
func (d *deployment) member(name string) *member {
	i := slices.IndexFunc(d.members, func(m *member) bool { return m.name == name })
	return d.members[i]
}

func (d *deployment) add(name, role string, is roles, args ...string) *member {
	m := &member{name: name, is: is, data: filepath.Join(d.t.TempDir(), name)}
	m.args = slices.Concat([]string{"--data", m.data}, args)
	if role != "" {
		m.args = append(m.args, "--roles", role)
	}
	d.members = append(d.members, m)
	return m
}

// start starts all members and returns once executions are accepted and run.
func (d *deployment) start() {
	d.t.Helper()
	for i, m := range d.members {
		m.start(d)
		// The first member creates the streams; concurrent creation is avoided.
		if i == 0 {
			eventually(d.t, m.name+" leads", func() (bool, any) {
				_, leads := m.process.findLog(d.t, "dispatcher leads")
				return leads, string(m.process.tail())
			})
		}
	}
	d.ready()
}

// ready waits until every gateway reports that executions are accepted and run.
func (d *deployment) ready() {
	d.t.Helper()
	for _, m := range d.members {
		if !m.is.gateway {
			continue
		}
		eventually(d.t, m.name+" is ready", func() (bool, any) {
			if m.process.ended() {
				d.t.Fatalf("%s ended:\n%s", m.name, m.process.tail())
			}
			r, err := d.clientOf(m).try(d.t.Context(), http.MethodGet, "/readyz", nil)
			return err == nil && r.status == http.StatusOK, r
		})
	}
}

// by returns a client of a gateway.
func (d *deployment) clientOf(m *member) *api {
	m.mu.Lock()
	defer m.mu.Unlock()
	return &api{t: d.t, base: m.base, key: d.key, http: d.http}
}

// gateways returns all members that serve clients, in random order.
func (d *deployment) gateways(r *rand.Rand) []*member {
	var all []*member
	for _, m := range d.members {
		if m.is.gateway {
			all = append(all, m)
		}
	}
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// start starts the process. It reuses the data of an earlier run.
func (m *member) start(d *deployment) {
	d.t.Helper()
	proc, base := d.programs.startServe(d.t, m.name, slices.Concat(d.env, m.env), slices.Concat(d.args, m.args)...)
	d.t.Cleanup(func() { proc.signal(syscall.SIGCONT) }) // so that it can exit
	m.mu.Lock()
	defer m.mu.Unlock()
	m.process, m.base = proc, base
}

// line forwards TCP connections to an address. It can be cut, and can drop data in either direction
// for a while.
type line struct {
	addr    string
	to      string
	machine *machine

	mu     sync.Mutex
	change *sync.Cond
	cut    bool    // no connection can be made
	silent [2]bool // data is dropped: towards to, and back
	conns  map[net.Conn]bool
}

func newLine(t *testing.T, m *machine, to string) *line {
	t.Helper()
	ln, err := m.listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &line{addr: ln.Addr().String(), to: to, machine: m, conns: map[net.Conn]bool{}}
	l.change = sync.NewCond(&l.mu)
	t.Cleanup(func() {
		_ = ln.Close()
		l.set(true, false, false)
	})
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go l.carry(conn)
		}
	}()
	return l
}

// set changes the state of the line. A cut closes its connections.
func (l *line) set(cut, silentTo, silentBack bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut, l.silent = cut, [2]bool{silentTo, silentBack}
	if cut {
		for c := range l.conns {
			_ = c.Close()
		}
		clear(l.conns)
	}
	l.change.Broadcast()
}

// keep registers a connection, which a cut closes. It reports false if the line is cut.
func (l *line) keep(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut {
		_ = c.Close()
		return false
	}
	l.conns[c] = true
	return true
}

func (l *line) carry(from net.Conn) {
	if !l.keep(from) {
		return
	}
	var to net.Conn
	err := l.machine.inNetwork(func() (err error) {
		to, err = net.Dial("tcp", l.to)
		return err
	})
	if err != nil || !l.keep(to) {
		_ = from.Close()
		return
	}
	go l.pass(from, to, 0)
	l.pass(to, from, 1)
}

// pass copies data in one direction until either end is closed.
func (l *line) pass(from, to net.Conn, way int) {
	defer func() {
		_, _ = from.Close(), to.Close()
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.conns, from)
		delete(l.conns, to)
	}()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		l.mu.Lock()
		for l.silent[way] && !l.cut {
			l.change.Wait()
		}
		l.mu.Unlock()
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
