package main

import (
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type scheduleCommands struct {
	Create  scheduleCreateCommand  `cmd:"" help:"Run a program at set times."`
	List    scheduleListCommand    `cmd:"" help:"List the organisation's schedules."`
	Show    scheduleShowCommand    `cmd:"" help:"Show a schedule, its next ticks and its last ones."`
	Preview schedulePreviewCommand `cmd:"" help:"Show when a schedule would tick."`
	Change  scheduleChangeCommand  `cmd:"" help:"Change when a schedule ticks."`
	Pause   schedulePauseCommand   `cmd:"" help:"Pause a schedule."`
	Resume  scheduleResumeCommand  `cmd:"" help:"Resume a paused schedule."`
	Run     scheduleRunCommand     `cmd:"" help:"Start an execution of a schedule now, and print its id."`
	Rm      scheduleRmCommand      `cmd:"" help:"Remove a schedule. Executions that have started go on."`
}

// tickFlags describe when a schedule ticks.
type tickFlags struct {
	Cron  *string        `placeholder:"EXPR" xor:"ticks" help:"Cron expression of 5 fields, or of 6 with the seconds first, or @hourly, @daily, @weekly, @monthly or @yearly."`
	Every *time.Duration `placeholder:"DURATION" xor:"ticks" help:"Interval, such as 90s or 12h."`
	Zone  *string        `name:"time-zone" placeholder:"ZONE" help:"Time zone of --cron, such as Europe/Berlin. Default: UTC."`
}

// timeFlags describe when executions of a schedule start.
type timeFlags struct {
	tickFlags `embed:""`
	Jitter    *time.Duration `placeholder:"DURATION" help:"Delay each tick by a part of this, up to 1h."`
	Overlap   *string        `placeholder:"POLICY" help:"At a tick while the previous execution runs: skip (default), queue, or replace it."`
	Missed    *string        `placeholder:"POLICY" help:"Ticks that no server could start: none, last (default) or all start late."`
}

// request returns the part of a schedule that the flags set.
func (f *tickFlags) request() *api.ScheduleRequest {
	return &api.ScheduleRequest{Cron: f.Cron, Every: seconds(f.Every), TimeZone: f.Zone}
}

// request returns the part of a schedule that the flags set.
func (f *timeFlags) request() *api.ScheduleRequest {
	r := f.tickFlags.request()
	r.Jitter, r.Overlap, r.Missed = seconds(f.Jitter), (*proto.OverlapPolicy)(f.Overlap), (*proto.MissedPolicy)(f.Missed)
	return r
}

func seconds(d *time.Duration) *proto.Seconds {
	if d == nil {
		return nil
	}
	return new(proto.Seconds(*d))
}

func printSchedule(p *page, s *api.WholeSchedule) {
	p.row("schedule", s.ID)
	p.row("name", s.Name)
	p.row("ticks", ticks(&s.Schedule))
	p.row("overlap", s.Overlap)
	p.row("missed", s.Missed)
	p.row("key", s.KeyID)
	p.row("created", s.CreatedAt)
	for _, tick := range s.Next {
		p.row("next", tick)
	}
	if s.Error != nil {
		p.row("error", *s.Error)
	}
	if s.Waiting > 0 {
		p.row("waiting", s.Waiting)
	}
	p.waiting(s.WaitingFor)
	if len(s.Runs) == 0 {
		return
	}
	p.textf("\n")
	p.row("TICK", "OUTCOME", "EXECUTION")
	for _, r := range s.Runs {
		what := cell(r.TraceID)
		if r.Reason != nil {
			what = cell(*r.Reason)
		}
		p.row(r.Tick, r.Outcome, what)
	}
}

// ticks describes when a schedule ticks.
func ticks(s *api.Schedule) string {
	text := ""
	if s.Cron != nil {
		text = *s.Cron + " " + s.TimeZone
	}
	if s.Every != nil {
		text = "every " + time.Duration(*s.Every).String()
	}
	if s.Jitter > 0 {
		text += " + up to " + time.Duration(s.Jitter).String()
	}
	if s.Paused {
		text += ", paused"
	}
	return text
}

type scheduleCreateCommand struct {
	remote       `embed:""`
	timeFlags    `embed:""`
	Name         string `short:"n" required:"" placeholder:"NAME" help:"Name of the schedule, for people."`
	Paused       bool   `help:"Create it paused."`
	WebhookURL   string `name:"webhook-url" placeholder:"URL" help:"Send the results to this URL."`
	programFlags `embed:""`
}

func (*scheduleCreateCommand) Help() string {
	return `The executions run async, under the API key of this command. See bullpen schedule show for their ids.

Examples:

  bullpen schedule create -n report --cron '30 2 * * *' --time-zone Europe/Berlin report.py
  bullpen schedule create -n poll --every 5m --overlap replace poll.sh`
}

func (c *scheduleCreateCommand) Run(ctx context.Context, s streams) error {
	program, err := c.programFlags.request(s.in)
	if err != nil {
		return err
	}
	program.WebhookURL = c.WebhookURL
	r := c.timeFlags.request()
	r.Name, r.Paused, r.Request = &c.Name, &c.Paused, &program
	return request(s, &c.remote, func(cl *client.Client) (*api.WholeSchedule, error) {
		return cl.CreateSchedule(ctx, r)
	}, printSchedule)
}

type scheduleListCommand struct {
	remote `embed:""`
}

func (c *scheduleListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[api.Schedule, error] {
		return cl.Schedules(ctx)
	}, func(p *page, list []api.Schedule) {
		p.row("ID", "NAME", "TICKS", "NEXT")
		for i := range list {
			x := &list[i]
			next := "-"
			if len(x.Next) > 0 {
				next = cell(x.Next[0])
			}
			p.row(x.ID, x.Name, ticks(x), next)
		}
	})
}

// scheduleArg is the argument that names a schedule.
type scheduleArg struct {
	ID string `arg:"" name:"schedule" help:"Id of the schedule: sch_…"`
}

// Validate checks the id before anything is sent.
func (a *scheduleArg) Validate() error {
	if !proto.ValidScheduleID(a.ID) {
		return fmt.Errorf("%q is not a schedule's id", a.ID)
	}
	return nil
}

// change changes the schedule and prints it.
func (a *scheduleArg) change(ctx context.Context, s streams, to *remote, r *api.ScheduleRequest) error {
	return request(s, to, func(cl *client.Client) (*api.WholeSchedule, error) {
		return cl.ChangeSchedule(ctx, a.ID, r)
	}, printSchedule)
}

type scheduleShowCommand struct {
	remote      `embed:""`
	scheduleArg `embed:""`
}

func (c *scheduleShowCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.WholeSchedule, error) {
		return cl.Schedule(ctx, c.ID)
	}, printSchedule)
}

type schedulePreviewCommand struct {
	remote    `embed:""`
	tickFlags `embed:""`
	From      time.Time `placeholder:"TIME" help:"Ticks at this time or later, such as 2027-03-28T00:00:00Z. Default: now."`
	Count     int       `short:"n" default:"5" placeholder:"N" help:"Number of ticks, at most 100. Default: ${default}."`
}

func (*schedulePreviewCommand) Help() string {
	return `Creates nothing. Each tick is shown in this computer's time zone and in the one of --time-zone.

Example:

  bullpen schedule preview --cron '30 2 * * *' --time-zone Europe/Berlin --from 2027-03-27T00:00:00Z`
}

func (c *schedulePreviewCommand) Run(ctx context.Context, s streams) error {
	r := c.request()
	zone := time.UTC
	if r.TimeZone != nil {
		if known, err := time.LoadLocation(*r.TimeZone); err == nil { // the server refuses others
			zone = known
		}
	}
	return request(s, &c.remote, func(cl *client.Client) (*api.SchedulePreview, error) {
		return cl.PreviewSchedule(ctx, r, c.From, c.Count)
	}, func(p *page, preview *api.SchedulePreview) {
		p.row("TICK", "IN ITS TIME ZONE")
		for _, tick := range preview.Ticks {
			p.row(tick, tick.In(zone).Format(timeLayout))
		}
	})
}

type scheduleChangeCommand struct {
	remote      `embed:""`
	timeFlags   `embed:""`
	Name        *string `short:"n" placeholder:"NAME" help:"Another name."`
	scheduleArg `embed:""`
}

func (*scheduleChangeCommand) Help() string {
	return `What is not given stays. To run another program, create another schedule.`
}

func (c *scheduleChangeCommand) Run(ctx context.Context, s streams) error {
	r := c.request()
	r.Name = c.Name
	return c.change(ctx, s, &c.remote, r)
}

type schedulePauseCommand struct {
	remote      `embed:""`
	scheduleArg `embed:""`
}

func (c *schedulePauseCommand) Run(ctx context.Context, s streams) error {
	return c.change(ctx, s, &c.remote, &api.ScheduleRequest{Paused: new(true)})
}

type scheduleResumeCommand struct {
	remote      `embed:""`
	scheduleArg `embed:""`
}

func (*scheduleResumeCommand) Help() string { return `Ticks during the pause do not run.` }

func (c *scheduleResumeCommand) Run(ctx context.Context, s streams) error {
	return c.change(ctx, s, &c.remote, &api.ScheduleRequest{Paused: new(false)})
}

type scheduleRunCommand struct {
	remote      `embed:""`
	scheduleArg `embed:""`
}

func (c *scheduleRunCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Accepted, error) {
		return cl.RunSchedule(ctx, c.ID)
	}, func(p *page, a *api.Accepted) { p.textf("%s\n", a.TraceID) })
}

type scheduleRmCommand struct {
	remote      `embed:""`
	scheduleArg `embed:""`
}

func (c *scheduleRmCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) (removed, error) {
		return removed{c.ID}, cl.RemoveSchedule(ctx, c.ID)
	}, printRemoved)
}
