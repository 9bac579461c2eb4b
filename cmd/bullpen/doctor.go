package main

import (
	"context"
	"fmt"
	"text/tabwriter"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
)

type doctorCommand struct {
	JSON       bool `name:"json" help:"Print JSON for programs."`
	app.Config `embed:""`
}

// Help tells what --help does not know by itself.
func (*doctorCommand) Help() string {
	return `Takes the settings of bullpen serve and checks what that would need, with jails of every kind. MISS marks what no job can run
without, and gives exit code 1; none what some sandboxes need, such as those with a network. What to do stands below the table.`
}

// Run carries the command out.
func (c *doctorCommand) Run(ctx context.Context, io streams) error {
	checks := app.Doctor(ctx, &c.Config)
	fit := true
	for _, check := range checks {
		fit = fit && (check.OK || check.Optional)
	}
	if err := c.print(io, checks); err != nil {
		return err
	}
	if !fit {
		return exitError(exitFailure)
	}
	return nil
}

func (c *doctorCommand) print(io streams, checks []app.Check) error {
	if c.JSON {
		return printJSON(io.out, checks)
	}
	t := tabwriter.NewWriter(io.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "\tREQUIREMENT\tFOUND") // Flush gives the error
	for _, check := range checks {
		sign := "ok"
		switch {
		case check.OK:
		case check.Optional:
			sign = "none"
		default:
			sign = "MISS"
		}
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\n", sign, check.Name, check.Found)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, check := range checks {
		if !check.OK && check.Remedy != "" {
			if _, err := fmt.Fprintf(io.out, "\n%s: %s\n", check.Name, check.Remedy); err != nil {
				return err
			}
		}
	}
	return nil
}
