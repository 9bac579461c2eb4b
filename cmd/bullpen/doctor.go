package main

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
	"github.com/bullpen-run/bullpen/proto/api"
)

type doctorCommand struct {
	remote     `embed:""`
	Cluster    bool `help:"Ask all running processes instead, through the server at --url, or over NATS if --nats is set."`
	app.Config `embed:""`
}

func (*doctorCommand) Help() string {
	return `Checks what a server with these settings needs, and starts jails of every kind. MISS marks a requirement of
every job, and the exit code is 1. none marks a requirement of some sandboxes, such as those with a network. Remedies
follow the table.

With --cluster, lists the processes that answer within 3 seconds, their missing requirements, and the sandboxes that
their worker cannot run. Needs a global administrator's API key, or --nats and its settings if no gateway answers.
Exits with 1 if a process has a problem or none answers. Processes that are starting or cut off from NATS do not
answer.

Examples:

  bullpen doctor
  bullpen doctor --cluster`
}

func (c *doctorCommand) Run(ctx context.Context, s streams) error {
	if c.Cluster {
		return c.cluster(ctx, s)
	}
	checks := app.Doctor(ctx, &c.Config)
	if err := show(s, c.JSON, checks, printChecks); err != nil {
		return err
	}
	if slices.ContainsFunc(checks, func(check app.Check) bool { return !check.OK && !check.Optional }) {
		return exitError{code: exitFailure}
	}
	return nil
}

func (c *doctorCommand) cluster(ctx context.Context, s streams) error {
	all, err := c.processes(ctx, s)
	if err != nil {
		return err
	}
	if err := show(s, c.JSON, all, printProcesses); err != nil {
		return err
	}
	if len(all) == 0 || slices.ContainsFunc(all, func(p api.Process) bool { return len(p.Problems) > 0 }) {
		return exitError{code: exitFailure}
	}
	return nil
}

func (c *doctorCommand) processes(ctx context.Context, s streams) ([]api.Process, error) {
	if !c.Embedded() {
		list, err := app.Processes(ctx, &c.Config)
		return api.NewProcesses(list).Processes, err
	}
	server, err := c.client(s)
	if err != nil {
		return nil, err
	}
	return server.Admin().Processes(ctx)
}

func printProcesses(p *page, all []api.Process) {
	p.row("PROCESS", "ROLES", "VERSION", "STARTED", "PROBLEMS", "CANNOT RUN")
	for _, process := range all {
		var needs []string
		for _, problem := range process.Problems {
			needs = append(needs, problem.Need)
		}
		missing := slices.Sorted(maps.Keys(process.Missing))
		p.row(process.Name, strings.Join(process.Roles, ","), process.Version, process.StartedAt,
			cmp.Or(strings.Join(needs, ","), "none"), strings.Join(missing, ","))
	}
	if len(all) == 0 {
		p.textf("\nNo process answered.\n")
	}
	for _, process := range all {
		for _, problem := range process.Problems {
			p.textf("\n%s: %s: %s\n", process.Name, problem.Need, problem.Message)
		}
		for _, capability := range slices.Sorted(maps.Keys(process.Missing)) {
			p.textf("\n%s: no %s: %s\n", process.Name, capability, process.Missing[capability])
		}
	}
}

func printChecks(p *page, checks []app.Check) {
	p.row("", "REQUIREMENT", "FOUND")
	for _, check := range checks {
		status := "ok"
		switch {
		case check.OK:
		case check.Optional:
			status = "none"
		default:
			status = "MISS"
		}
		p.row(status, check.Name, check.Found)
	}
	for _, check := range checks {
		if !check.OK && check.Remedy != "" {
			p.textf("\n%s: %s\n", check.Name, check.Remedy)
		}
	}
}
