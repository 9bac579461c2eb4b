package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/client/load"
	"github.com/bullpen-run/bullpen/proto"
)

type benchCommands struct {
	Load benchLoadCommand `cmd:"" help:"Send executions at a rate and measure how long they take."`
}

type benchLoadCommand struct {
	remote   `embed:""`
	Rate     float64       `default:"10" placeholder:"N" help:"Executions due each second, on average. Default: ${default}."`
	Duration time.Duration `default:"30s" placeholder:"DURATION" help:"How long executions are due. Default: ${default}."`
	Profiles string        `placeholder:"FILE" help:"YAML file with the kinds of executions; - for standard input. Default: print in Python, inline."`
	InFlight int           `default:"1000" placeholder:"N" help:"Executions at a time; more are not sent, and counted. Default: ${default}."`
	Seed     uint64        `default:"1" placeholder:"N" help:"Seed of the times and their order. Default: ${default}."`
	Report   string        `placeholder:"FILE" help:"Write an HTML page with charts."`
}

func (*benchLoadCommand) Help() string {
	return `The load is open-loop: executions are due at random times that do not depend on the server's answers, and
latency counts from the due time. The exit code is 1 if an execution failed.

The file has a list of profiles:

  # mixed.yaml
  - name: python
    weight: 3              # three of four executions
    language: python
    code: print("hello")
  - name: threads
    weight: 1
    mode: async            # or stream, or inline, the default
    language: bash
    code: date >> log
    threads: 20            # threads that executions take by turns; stdin and timeout may be given too

Example:

  bullpen bench load --rate 50 --duration 1m --profiles mixed.yaml --report load.html`
}

func (c *benchLoadCommand) Validate() error {
	if c.Rate <= 0 || c.Rate > 1e5 || c.Duration <= 0 || c.InFlight < 1 {
		return fmt.Errorf("--rate must be more than 0 and at most 100000, --duration more than 0, and --in-flight at least 1")
	}
	return nil
}

// profiles reads the kinds of executions.
func (c *benchLoadCommand) profiles(s streams) ([]load.Profile, error) {
	if c.Profiles == "" {
		return []load.Profile{{Name: "python", Weight: 1, Mode: load.Inline, Language: proto.Python, Code: `print("hello")`}},
			nil
	}
	text, err := readText(c.Profiles, s.in, maxManifestBytes)
	if err != nil {
		return nil, fmt.Errorf("read the profiles: %w", err)
	}
	var all []load.Profile
	if err := yaml.UnmarshalWithOptions([]byte(text), &all, yaml.DisallowUnknownField()); err != nil {
		return nil, fmt.Errorf("%s: %w", c.Profiles, err)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: it has no profile", c.Profiles)
	}
	for i, p := range all {
		switch {
		case p.Name == "" || p.Language == "" || p.Code == "" || p.Weight <= 0 || p.Threads < 0:
			return nil, fmt.Errorf("%s: profile %d must have a name, a language, code, and a weight of more than 0",
				c.Profiles, i+1)
		case p.Mode != "" && p.Mode != load.Inline && p.Mode != load.Stream && p.Mode != load.Async:
			return nil, fmt.Errorf("%s: mode of profile %d must be inline, stream or async", c.Profiles, i+1)
		}
	}
	return all, nil
}

func (c *benchLoadCommand) Run(ctx context.Context, s streams) error {
	profiles, err := c.profiles(s)
	if err != nil {
		return err
	}
	cfg, err := c.config(s)
	if err != nil {
		return err
	}
	cfg.NoRetry = true
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = c.InFlight // as many clients would have connections
	cfg.HTTP = &http.Client{Transport: transport}
	cl, err := client.New(cfg)
	if err != nil {
		return err
	}
	r := load.Run(ctx, cl, load.Config{
		Profiles: profiles, Rate: c.Rate, Duration: c.Duration, InFlight: c.InFlight,
		Seed: c.Seed,
	})
	if c.Report != "" {
		if err := writeReport(c.Report, r); err != nil {
			return err
		}
	}
	rows := r.Rows()
	err = show(s, c.JSON, rows, func(p *page, rows []load.Row) {
		p.row("PROFILE", "SENT", "SUCCEEDED", "P50", "P90", "P99", "LONGEST", "FAILED")
		for _, row := range rows {
			p.row(row.Name, row.Sent, row.Succeeded, benchMillis(row.P50), benchMillis(row.P90), benchMillis(row.P99),
				benchMillis(row.Max), row.Failed())
		}
		p.textf("\n%s\n", r.Summary())
	})
	switch {
	case err != nil:
		return err
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	for _, row := range rows {
		if row.Succeeded < row.Sent || r.Unsent > 0 {
			return exitError{code: exitFailure}
		}
	}
	return nil
}

func benchMillis(ms float64) string { return fmt.Sprintf("%.1f ms", ms) }

func writeReport(path string, r *load.Result) error {
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	if err := r.HTML(f); err != nil {
		_ = f.Close() // the earlier error is returned
		return err
	}
	return f.Close()
}
