package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/scaler"
	"github.com/bullpen-run/bullpen/scheduler/autoscale/simulation"
)

type autoscaleCommands struct {
	Simulate autoscaleSimulateCommand `cmd:"" help:"Replay a day of arrivals with an autoscaling policy."`
}

type autoscaleSimulateCommand struct {
	Trace      string        `required:"" placeholder:"FILE" help:"Arrivals in CSV: at,seconds,jobs,over."`
	Policy     string        `required:"" placeholder:"FILE" help:"Policy in JSON, as bullpen serve --autoscale-policy takes it."`
	Pool       string        `default:"default" placeholder:"NAME" help:"Pool whose policy to use, if the file has several."`
	StartDelay time.Duration `default:"30s" placeholder:"DURATION" help:"Time that a new worker takes to start."`
	Every      time.Duration `default:"1s" placeholder:"DURATION" help:"Time between evaluations, at least 100ms."`
	SVG        string        `name:"svg" placeholder:"FILE" help:"Draw slots, queue and waits over time."`
	JSON       bool          `name:"json" help:"Print JSON."`
}

func (*autoscaleSimulateCommand) Help() string {
	return `Time is virtual, and no server is needed. See docs/guides/autoscaling.md for the trace and the policy.
Compares the result with fixed pools: one with as many worker hours, and the smallest one whose jobs wait no longer.

Example:

  bullpen autoscale simulate --trace deploy/autoscale/diurnal.csv --policy deploy/autoscale/policy.json --svg day.svg`
}

func (c *autoscaleSimulateCommand) Validate() error {
	if c.StartDelay < 0 || c.StartDelay > 24*time.Hour {
		return fmt.Errorf("--start-delay must be between 0s and 24h")
	}
	if c.Every < 100*time.Millisecond || c.Every > time.Hour {
		return fmt.Errorf("--every must be between 100ms and 1h")
	}
	return nil
}

func (c *autoscaleSimulateCommand) Run(ctx context.Context, s streams) error {
	simulated, err := c.read()
	if err != nil {
		return err
	}
	report, err := simulated.Report(ctx)
	if err != nil {
		return fmt.Errorf("simulate %s: %w", c.Trace, err)
	}
	if c.SVG != "" {
		picture := simulated.Chart(filepath.Base(c.Trace), &report.Autoscaled)
		if err := os.WriteFile(c.SVG, picture, 0o644); err != nil { //nolint:gosec // a picture for everybody
			return err
		}
	}
	return show(s, c.JSON, report, printSimulation)
}

// read reads the trace and the policy.
func (c *autoscaleSimulateCommand) read() (*simulation.Simulation, error) {
	policies, err := scaler.ReadPolicies(c.Policy)
	if err != nil {
		return nil, err
	}
	simulated := &simulation.Simulation{Policy: policies.Of(c.Pool), StartDelay: c.StartDelay, Every: c.Every}
	trace, err := os.Open(c.Trace)
	if err != nil {
		return nil, err
	}
	defer func() { _ = trace.Close() }()
	if simulated.Jobs, err = simulation.ReadTrace(trace); err != nil {
		return nil, fmt.Errorf("%s: %w", c.Trace, err)
	}
	return simulated, nil
}

func printSimulation(p *page, r *simulation.Report) {
	p.row("POOL", "WORKERS", "WAIT P50", "P90", "P99", "LONGEST", "WORKER HOURS", "UTILIZATION")
	row := func(name, workers string, x *simulation.Result) {
		wait := func(s float64) string {
			return time.Duration(s * float64(time.Second)).Round(100 * time.Millisecond).String()
		}
		p.row(name, workers, wait(x.Waits.P50), wait(x.Waits.P90), wait(x.Waits.P99), wait(x.Waits.Max),
			fmt.Sprintf("%.1f", x.WorkerHours), fmt.Sprintf("%.0f%%", 100*x.Utilization))
	}
	a := &r.Autoscaled
	row("autoscaled", fmt.Sprintf("up to %d", a.PeakWorkers), a)
	row("fixed, same worker hours", fmt.Sprint(r.SameHours.Workers), &r.SameHours.Result)
	if r.SameWait != nil {
		row("fixed, same p99", fmt.Sprint(r.SameWait.Workers), &r.SameWait.Result)
	}
	p.textf("\n%d jobs in %.1f hours. The pool grew %d times, shrank %d times, and had no worker for %.1f hours.\n",
		a.Jobs, a.Hours, a.ScaleOuts, a.ScaleIns, a.ZeroHours)
}
