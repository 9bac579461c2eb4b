package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// watchEvery is how often workers report.
const watchEvery = 2 * time.Second

type workersCommands struct {
	List    workersListCommand    `cmd:"" default:"withargs" help:"List the live workers (default)."`
	Pools   workersPoolsCommand   `cmd:"" help:"List the pools of workers with the demand for them."`
	Drain   workersDrainCommand   `cmd:"" help:"Let a worker finish its executions and get no others."`
	Undrain workersUndrainCommand `cmd:"" help:"Let a draining worker get executions again."`
}

type workersListCommand struct {
	remote `embed:""`
	Watch  bool `help:"Print the list every 2 seconds until interrupted."`
}

func (c *workersListCommand) Run(ctx context.Context, s streams) error {
	list := func() error {
		return compose(s, &c.remote, func(cl *client.Client) ([]api.Worker, error) {
			list, err := cl.Admin().Workers(ctx)
			if err == nil && c.Watch {
				err = s.clear()
			}
			return list, err
		}, func(p *page, list []api.Worker) { printWorkers(p, list...) })
	}
	for {
		if err := list(); err != nil || !c.Watch {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(watchEvery):
		}
	}
}

func printWorkers(p *page, list ...api.Worker) {
	p.row("NAME", "POOL", "STATE", "RUNNING", "ARCH", "BUSY CPUS", "FREE MEMORY", "THREADS", "IMAGES",
		"LANGUAGES", "VERSION")
	for _, w := range list {
		state := "ready"
		if w.Draining {
			state = "draining"
		}
		m := w.Machine
		gib := func(n int64) float64 { return float64(n) / float64(proto.GiB) }
		p.row(w.Name, w.Pool, state, fmt.Sprintf("%d of %d", w.Running, w.Slots), w.Architecture,
			fmt.Sprintf("%.1f of %d", m.CPUsBusy, m.CPUs),
			fmt.Sprintf("%.1f of %.1f GiB", gib(m.MemoryAvailable), gib(m.Memory)), w.Threads, w.Images,
			strings.Join(slices.Sorted(maps.Keys(w.Languages)), ","), w.Version)
	}
}

type workersPoolsCommand struct {
	remote `embed:""`
}

func (*workersPoolsCommand) Help() string {
	return `WANTED is the number of workers that the autoscaler recommends, and why. QUEUED does not count executions
that wait for a limit of their organisation or API key.`
}

func (c *workersPoolsCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) ([]api.Pool, error) {
		return cl.Admin().Pools(ctx)
	}, func(p *page, list []api.Pool) { printPools(p, list) })
}

func printPools(p *page, list []api.Pool) {
	p.row("POOL", "ARCH", "WORKERS", "WANTED", "REASON", "SLOTS", "RUNNING", "QUEUED", "OLDEST", "MEAN")
	for _, one := range list {
		wanted, reason := "-", "-"
		if one.Desired != nil {
			wanted, reason = strconv.Itoa(one.Desired.Workers), one.Desired.Reason
		}
		p.row(one.Name, one.Architecture, one.Workers, wanted, reason, one.Slots, one.Running, one.Queued,
			fmt.Sprintf("%.1f s", one.OldestWait), fmt.Sprintf("%.2f s", one.MeanSeconds))
	}
}

// workerArg is the argument that names a worker.
type workerArg struct {
	Name string `arg:"" help:"Name of the worker."`
}

// drain makes the worker drain, or take executions again.
func (a *workerArg) drain(ctx context.Context, s streams, r *remote, drain bool) error {
	return request(s, r, func(cl *client.Client) (*api.Worker, error) {
		return cl.Admin().DrainWorker(ctx, a.Name, drain)
	}, func(p *page, w *api.Worker) { printWorkers(p, *w) })
}

type workersDrainCommand struct {
	remote    `embed:""`
	workerArg `embed:""`
}

func (*workersDrainCommand) Help() string {
	return `The worker goes on running. It takes executions again after bullpen workers undrain, or when it is started
again.

Example:

  bullpen workers drain vm-1-9VVXPuce`
}

func (c *workersDrainCommand) Run(ctx context.Context, s streams) error {
	return c.drain(ctx, s, &c.remote, true)
}

type workersUndrainCommand struct {
	remote    `embed:""`
	workerArg `embed:""`
}

func (c *workersUndrainCommand) Run(ctx context.Context, s streams) error {
	return c.drain(ctx, s, &c.remote, false)
}
