package main

import (
	"context"
	"slices"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
)

type doctorCommand struct {
	JSON       bool `name:"json" help:"Print JSON."`
	app.Config `embed:""`
}

func (*doctorCommand) Help() string {
	return `Takes the settings of bullpen serve and checks what a server with them needs. It starts jails of every kind. MISS marks a requirement of
every job, and makes the exit code 1. none marks a requirement of some sandboxes, such as those with a network. Remedies follow the table.`
}

func (c *doctorCommand) Run(ctx context.Context, s streams) error {
	checks := app.Doctor(ctx, &c.Config)
	if err := show(s, c.JSON, checks, printChecks); err != nil {
		return err
	}
	if slices.ContainsFunc(checks, func(check app.Check) bool { return !check.OK && !check.Optional }) {
		return exitError{code: exitFailure}
	}
	return nil
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
