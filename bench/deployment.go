package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"filippo.io/age"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// Settings of the deployment of a soak. Whatever is kept for a time is kept for minutes, so that a
// steady state is reached. Some things have no such setting, see docs/explanation/performance.md.
const (
	soakSlots     = 4 // of each worker
	soakRetention = "5m"
	soakHomeCache = "8MiB"
)

// natsName is the NATS server among the nodes.
const natsName = "nats"

// node is a process of a deployment. It is started several times, with the same data.
type node struct {
	*target // of the latest start
	name    string
	role    string // empty for NATS
	starts  int
	started time.Time
	down    bool // stopped on purpose, or starting
}

// worker reports whether the node runs programs.
func (n *node) worker() bool { return n.role == "worker" }

// instance returns the name of a start of a node, unique among all processes.
func (n *node) instance(start int) string {
	return fmt.Sprintf("soak-%d-%s-%d", os.Getpid(), n.name, start)
}

// deployment is bullpen in several processes, with a NATS server and an S3 server.
type deployment struct {
	program, dir string
	env          []string // of every process
	s3           *storagetest.Server
	key          string

	mu     sync.Mutex
	nodes  []*node
	killed []time.Time // when workers were killed
}

// startDeployment starts all processes, with their data below dir.
func startDeployment(ctx context.Context, o options, dir string, settings []string) (d *deployment, err error) {
	d = &deployment{program: o.server, dir: dir, key: proto.NewKeySecret("local")}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	identity, err := age.GenerateX25519Identity()
	if err != nil {
		return d, fmt.Errorf("make a key for secrets: %w", err)
	}
	secrets := filepath.Join(dir, "secrets.key")
	if err := os.WriteFile(secrets, []byte(identity.String()+"\n"), 0o600); err != nil {
		return d, fmt.Errorf("write a key for secrets: %w", err)
	}
	if d.s3, err = storagetest.Start(dir); err != nil {
		return d, err
	}
	endpoint, err := d.s3.Endpoint()
	if err != nil {
		return d, err
	}
	client, err := d.startNATS(ctx, o.nats)
	if err != nil {
		return d, err
	}
	d.env = append(append(storagetest.Env(), settings...),
		"BULLPEN_NATS=nats://"+client, "BULLPEN_STORE="+storagetest.StoreURL(endpoint, storePrefix),
		"BULLPEN_SECRETS_KEY="+secrets,
		"BULLPEN_BOOTSTRAP_KEY="+d.key, "BULLPEN_RETENTION="+soakRetention, "BULLPEN_QUEUE_EXPIRY=4m",
		"BULLPEN_AUDIT_RETENTION="+soakRetention,
		"BULLPEN_THREAD_EXPIRY="+soakRetention, "BULLPEN_THREAD_GC=1m", "BULLPEN_HOME_CACHE="+soakHomeCache,
		fmt.Sprintf("BULLPEN_SLOTS=%d", soakSlots))
	for _, name := range []string{"gateway-1", "scheduler", "webhook", "worker-1", "gateway-2", "worker-2"} {
		role, _, _ := strings.Cut(name, "-")
		n := &node{name: name, role: role, down: true}
		d.nodes = append(d.nodes, n)
		if err := d.start(ctx, n); err != nil {
			return d, err
		}
	}
	for _, n := range d.nodes[1:] { // a gateway is ready when there is a worker
		if err := d.ready(ctx, n); err != nil {
			return d, err
		}
	}
	return d, nil
}

// startNATS starts the NATS server and returns its address.
func (d *deployment) startNATS(ctx context.Context, program string) (string, error) {
	client, err := freeAddress(ctx)
	if err != nil {
		return "", err
	}
	monitor, err := freeAddress(ctx)
	if err != nil {
		return "", err
	}
	profiles, err := freeAddress(ctx)
	if err != nil {
		return "", err
	}
	_, profilePort, _ := strings.Cut(profiles, ":")
	n := &node{name: natsName, started: time.Now(), target: &target{
		api: newAPI("http://"+monitor, ""), data: filepath.Join(d.dir, natsName), log: filepath.Join(d.dir, natsName+".log"),
		profileURL: "http://" + profiles,
	}}
	config := filepath.Join(d.dir, "nats.conf")
	text := fmt.Sprintf("listen: %q\nhttp: %q\nprof_port: %s\njetstream { store_dir: %q, sync_interval: always }\n",
		client, monitor, profilePort, n.data)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return "", fmt.Errorf("write the configuration of NATS: %w", err)
	}
	d.nodes = append(d.nodes, n)
	return client, n.start(ctx, nil, program, "--config", config)
}

// start starts a node.
func (d *deployment) start(ctx context.Context, n *node) error {
	address, err := freeAddress(ctx)
	if err != nil {
		return err
	}
	t := &target{
		api: newAPI("http://"+address, d.key), data: filepath.Join(d.dir, n.name),
		log: filepath.Join(d.dir, n.name+".log"), noWorker: n.role != "worker",
	}
	d.mu.Lock()
	n.starts++
	n.started = time.Now()
	env := append(slices.Clip(d.env), "BULLPEN_INSTANCE="+n.instance(n.starts))
	d.mu.Unlock()
	if err := t.start(ctx, env, d.program, "serve", "--roles", n.role, "--listen", address, "--data", t.data,
		"--log-format", "json"); err != nil {
		return err
	}
	d.mu.Lock()
	n.target = t
	d.mu.Unlock()
	return nil
}

// ready waits until a node is ready.
func (d *deployment) ready(ctx context.Context, n *node) error {
	if err := n.ready(ctx); err != nil {
		return fmt.Errorf("start %s: %w", n.name, err)
	}
	d.mu.Lock()
	n.down = false
	d.mu.Unlock()
	return nil
}

// restart stops a node with a signal and starts it again.
func (d *deployment) restart(ctx context.Context, n *node, s syscall.Signal) error {
	d.mu.Lock()
	n.down = true
	if s == syscall.SIGKILL && n.worker() {
		d.killed = append(d.killed, time.Now())
	}
	d.mu.Unlock()
	n.http.CloseIdleConnections()
	if s == syscall.SIGKILL {
		_ = n.cmd.Process.Signal(s) // if it has exited, the sampler has noticed
		<-n.exited
	} else if err := n.close(); err != nil {
		return fmt.Errorf("stop %s: %w", n.name, err)
	}
	if err := d.start(ctx, n); err != nil {
		return err
	}
	return d.ready(ctx, n)
}

// gateway returns the URL of one of the gateways. Another i may be another gateway.
func (d *deployment) gateway(i int) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var urls []string
	for _, n := range d.nodes {
		if n.role == "gateway" {
			urls = append(urls, n.url)
		}
	}
	return urls[i%len(urls)]
}

// node returns the node with a name.
func (d *deployment) node(name string) *node {
	for _, n := range d.nodes {
		if n.name == name {
			return n
		}
	}
	return nil
}

// killedSince reports whether a worker was killed after a time. Its executions that may have
// started are lost with it, unless they may be started again.
func (d *deployment) killedSince(at time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.killed) > 0 && d.killed[len(d.killed)-1].After(at)
}

// close stops all processes, NATS last.
func (d *deployment) close() error {
	var errs []error
	for _, n := range slices.Backward(d.nodes) {
		if n.target != nil && n.cmd != nil {
			if err := n.close(); err != nil && n.role != "" { // NATS reports its signal
				errs = append(errs, fmt.Errorf("stop %s: %w", n.name, err))
			}
		}
	}
	if d.s3 != nil {
		errs = append(errs, d.s3.Close())
	}
	return errors.Join(errs...)
}
