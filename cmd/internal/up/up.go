// Package up runs a deployment of many processes on this machine, for tests and demonstrations: each
// process in a network namespace of its own, restarted when it ends. It is no service manager.
package up

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
	"github.com/bullpen-run/bullpen/cmd/internal/secretskey"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
)

const (
	servePort = 8080 // of processes with roles, in their own network
	// region is in the first API key.
	region        = "local"
	readyInterval = 200 * time.Millisecond
	readyTimeout  = 5 * time.Second // of one request
	stages        = 4
)

// Run starts the processes of a topology and prints their output to w, until ctx is done. Then it
// stops them, gateways first and servers last. It keeps their files, the first API key and the key
// of secrets in the directory data, creating it if necessary. It needs root.
func Run(ctx context.Context, t *Topology, data string, w io.Writer) error {
	if os.Geteuid() != 0 {
		return errors.New("bullpen up needs root, for network namespaces and for the sandboxes of workers")
	}
	data, err := filepath.Abs(data)
	if err != nil {
		return fmt.Errorf("find the data directory: %w", err)
	}
	lock, err := natsembed.LockDir(data)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }() // only locked
	d := &deployment{topology: t, data: data}
	if err := d.prepare(w); err != nil {
		return err
	}
	defer d.network.close()
	return d.run(ctx)
}

// deployment is a topology that runs.
type deployment struct {
	topology  *Topology
	data      string
	key       string // path of the first API key
	network   *network
	console   *console
	processes []*process
}

// prepare creates what the processes share.
func (d *deployment) prepare(w io.Writer) (err error) {
	if err := os.MkdirAll(filepath.Join(d.data, "store"), 0o700); err != nil {
		return fmt.Errorf("create the blob store: %w", err)
	}
	if err := (secretskey.File{Path: filepath.Join(d.data, "secrets.key")}).Create(); err != nil {
		return fmt.Errorf("create the key of secrets: %w", err)
	}
	d.key = filepath.Join(d.data, "bootstrap.key")
	key, err := app.PersistKey(d.key, region)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	if d.network, err = newNetwork(); err != nil {
		return err
	}
	d.console = &console{w: w}
	password := rand.Text()
	for _, s := range d.topology.specs() {
		p := &process{spec: s, network: d.network, console: d.console}
		p.command(d.topology, self, d.data, password, key)
		d.processes = append(d.processes, p)
		d.console.width = max(d.console.width, len(p.name))
	}
	return nil
}

// stage has processes that stop together.
type stage struct {
	running sync.WaitGroup
	ctx     context.Context // is done when they stop
	stop    context.CancelFunc
}

func newStage(ctx context.Context) *stage {
	s := &stage{}
	s.ctx, s.stop = context.WithCancel(ctx)
	return s
}

// run starts the processes, and stops them when ctx is done or the first start of one fails.
func (d *deployment) run(ctx context.Context) error {
	stay, leave := context.WithCancel(context.WithoutCancel(ctx)) // outlives ctx until the processes have stopped
	var others sync.WaitGroup
	defer others.Wait()
	defer leave()
	urls := map[*process]string{}
	for _, p := range d.processes {
		if p.service.Publish == nil {
			continue
		}
		l, err := p.listen(ctx)
		if err != nil {
			return err
		}
		urls[p] = "http://" + l.Addr().String()
		others.Go(func() { d.network.forward(stay, l, p.serveAddr()) })
	}

	var all [stages]*stage
	for i := range all {
		all[i] = newStage(stay)
	}
	err := d.start(all, urls)
	if err == nil {
		others.Go(func() { d.awaitReady(ctx) })
		<-ctx.Done()
	}
	for _, s := range slices.Backward(all[:]) {
		s.stop()
		s.running.Wait()
	}
	return err
}

// start starts all processes and prints which they are.
func (d *deployment) start(all [stages]*stage, urls map[*process]string) error {
	d.console.mu.Lock() // the list comes first
	defer d.console.mu.Unlock()
	var list strings.Builder
	for _, p := range d.processes {
		type result struct {
			pid int
			err error
		}
		started := make(chan result, 1)
		s := all[p.service.stage()]
		s.running.Go(func() { p.run(s.ctx, func(pid int, err error) { started <- result{pid, err} }) })
		r := <-started
		if r.err != nil {
			return r.err
		}
		line := fmt.Sprintf("%-*s   pid %-8d %-13s %s", d.console.width, p.name, r.pid, p.addr, urls[p])
		list.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	for _, p := range d.processes {
		if slices.Contains(p.service.Roles, app.RoleGateway) && urls[p] != "" {
			_, _ = fmt.Fprintf(&list, "\nexport BULLPEN_URL=%s\nexport BULLPEN_API_KEY=$(cat %s)\n\n", urls[p], d.key)
			break
		}
	}
	_, _ = io.WriteString(d.console.w, list.String())
	return nil
}

// listen listens on the port of this machine that publishes the process.
func (p *process) listen(ctx context.Context) (net.Listener, error) {
	port := *p.service.Publish
	if port > 0 {
		port += p.number
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("publish %s: %w", p.name, err)
	}
	return l, nil
}

// serveAddr is the address of the HTTP server of a process with roles.
func (p *process) serveAddr() string {
	return net.JoinHostPort(p.addr.String(), strconv.Itoa(servePort))
}

// awaitReady waits until all processes with roles have started and all gateways accept executions,
// and prints that.
func (d *deployment) awaitReady(ctx context.Context) {
	began := time.Now()
	client := &http.Client{
		Timeout:   readyTimeout,
		Transport: &http.Transport{DialContext: d.network.dial, DisableKeepAlives: true},
	}
	for _, p := range d.processes {
		for len(p.service.Roles) > 0 && !ready(ctx, client, p.serveAddr()) {
			select {
			case <-ctx.Done():
				return
			case <-time.After(readyInterval):
			}
		}
	}
	d.console.printf("up", "ready after %s", time.Since(began).Round(time.Millisecond))
}

func ready(ctx context.Context, client *http.Client, addr string) bool {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/readyz", http.NoBody)
	if err != nil {
		return false
	}
	resp, err := client.Do(r)
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}
