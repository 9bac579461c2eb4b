package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type usageCommand struct {
	remote  `embed:""`
	From    string   `placeholder:"DAY" help:"First day, such as 2026-11-01. Default: the first one of the month of --to."`
	To      string   `placeholder:"DAY" help:"Last day. Default: today, in UTC."`
	GroupBy []string `name:"group-by" default:"day" placeholder:"GROUP,…" help:"What the rows differ in: day, key, language or org. Default: ${default}."`
	Org     string   `placeholder:"ORG" help:"Organisation, for an administrator. Default: the API key's."`
	All     bool     `help:"All organisations, for a global administrator."`
	CSV     bool     `name:"csv" help:"Print CSV."`
}

func (*usageCommand) Help() string {
	return `Shows executions and failures, CPU time, peak memory times duration, bytes received, sent and stored,
attempts of webhooks, and the use of the plan's monthly quotas. The bar shows the number of executions. Without the
group day, stored bytes are those of all days together.

Examples:

  bullpen usage
  bullpen usage --from 2026-10-01 --to 2026-10-31 --group-by key,language
  bullpen usage --all --group-by org,day --csv > usage.csv`
}

// Validate checks the flags before anything is sent.
func (c *usageCommand) Validate() error {
	switch {
	case c.CSV && c.JSON:
		return errors.New("--csv and --json: choose one")
	case c.All && c.Org != "":
		return errors.New("--all and --org: choose one")
	}
	return nil
}

// filter returns what the report has.
func (c *usageCommand) filter() client.UsageFilter {
	f := client.UsageFilter{From: c.From, To: c.To, Org: c.Org, All: c.All, GroupBy: []proto.UsageGroup{}}
	for _, group := range c.GroupBy {
		f.GroupBy = append(f.GroupBy, proto.UsageGroup(group))
	}
	return f
}

func (c *usageCommand) Run(ctx context.Context, s streams) error {
	if c.CSV {
		cl, err := c.client(s)
		if err != nil {
			return err
		}
		return cl.UsageCSV(ctx, c.filter(), s.out)
	}
	return request(s, &c.remote, func(cl *client.Client) (*api.Usage, error) {
		usage, err := cl.Usage(ctx, c.filter())
		if err == nil && !usage.Complete {
			s.errorf("the newest executions are not counted yet")
		}
		return usage, err
	}, func(p *page, u *api.Usage) {
		file, isFile := s.out.(*os.File)
		printUsage(p, u, isFile && isTerminal(file))
	})
}

// usageBarWidth is the number of characters of the longest bar.
const usageBarWidth = 24

// printUsage prints a row for each group, with a bar: of blocks on a terminal, and of ASCII
// elsewhere.
func printUsage(p *page, u *api.Usage, terminal bool) {
	var most int64
	for i := range u.Rows {
		most = max(most, u.Rows[i].Executions.Total)
	}
	var groups []proto.UsageGroup
	var head []any
	for _, g := range proto.UsageGroups() {
		if slices.Contains(u.GroupBy, g) {
			groups, head = append(groups, g), append(head, strings.ToUpper(string(g)))
		}
	}
	stored := "BYTE-DAYS"
	if slices.Contains(groups, proto.UsageByDay) {
		stored = "STORED"
	}
	p.row(append(head, "EXECUTIONS", "FAILED", "CPU", "MEMORY", "RECEIVED", "SENT", stored, "WEBHOOKS")...)
	for i := range u.Rows {
		r := &u.Rows[i]
		var line []any
		for _, g := range groups {
			line = append(line, usageGroup(r, g))
		}
		line = append(line, r.Executions.Total, r.Executions.Total-r.Executions.Success, fmt.Sprintf("%.1f s", r.CPUSeconds),
			fmt.Sprintf("%.0f MiB s", r.MemoryMiBSeconds), mib(r.BytesIn), mib(r.BytesOut), mib(r.StoredByteDays),
			r.WebhookAttempts)
		if r.Executions.Total > 0 {
			line = append(line, bar(r.Executions.Total, most, terminal))
		}
		p.row(line...)
	}
	if len(u.Rows) == 0 {
		p.textf("nothing was used from %s to %s\n", u.From, u.To)
	}
	printQuotas(p, u.Quotas)
}

// printQuotas prints an organisation's use of its quotas.
func printQuotas(p *page, quotas []api.QuotaUse) {
	for i := range quotas {
		q := &quotas[i]
		p.textf("%s: %s used until %s, %s\n", q.Name, strconv.FormatFloat(q.Used, 'f', -1, 64), cell(q.Ends),
			limitsText(limitOrZero(q.Soft), limitOrZero(q.Hard)))
	}
}

func limitOrZero(limit *int64) int64 {
	if limit == nil {
		return 0
	}
	return *limit
}

func usageGroup(r *api.UsageRow, g proto.UsageGroup) any {
	switch g {
	case proto.UsageByOrg:
		return r.Org
	case proto.UsageByDay:
		return r.Day
	case proto.UsageByKey:
		return r.Key
	default:
		return r.Language
	}
}

// bar returns a bar for n of most, of at least one character.
func bar(n, most int64, terminal bool) string {
	character := "#"
	if terminal {
		character = "█"
	}
	return strings.Repeat(character, max(1, int(n*usageBarWidth/most)))
}
