package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto/api"
)

type auditCommands struct {
	List   auditListCommand   `cmd:"" help:"List administrative acts, newest first."`
	Export auditExportCommand `cmd:"" help:"Export the audit log as JSONL, oldest first."`
	Verify auditVerifyCommand `cmd:"" help:"Check that no record of the audit log was altered or removed."`
}

// auditFilters select records.
type auditFilters struct {
	Org    string `placeholder:"ORG" help:"Only acts by API keys of this organisation, or on its objects."`
	Actor  string `placeholder:"ID" help:"Only acts of the API key or the member of this id."`
	Action string `placeholder:"ACTION" help:"Only this action, such as key.create."`
	After  moment `placeholder:"TIME" help:"Only records of this time or later: RFC 3339, or how long ago, such as 2h."`
	Before moment `placeholder:"TIME" help:"Only records before this time, likewise."`
}

func (f *auditFilters) filter() api.AuditFilter {
	return api.AuditFilter{
		Org: f.Org, Actor: f.Actor, Action: f.Action, From: api.Time(f.After),
		Before: api.Time(f.Before),
	}
}

type auditListCommand struct {
	remote       `embed:""`
	auditFilters `embed:""`
	Limit        int `short:"n" default:"40" placeholder:"N" help:"Number of records. An act has two."`
}

// Validate checks the flags before anything is sent.
func (c *auditListCommand) Validate() error {
	if c.Limit < 1 {
		return errors.New("--limit must be at least 1")
	}
	return nil
}

func (*auditListCommand) Help() string {
	return `Each act has a record before and one after it; the list shows it once. The status unknown means that the act
is not done or that the server died: it may have been carried out. --json prints all records, with the object before
and after.

Examples:

  bullpen audit list --action key.create --after 24h
  bullpen audit list --org acme --json`
}

func (c *auditListCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) ([]api.AuditRecord, error) {
		records := []api.AuditRecord{}
		for r, err := range cl.Admin().Audit(ctx, c.filter()) {
			if err != nil {
				return nil, err
			}
			if records = append(records, r); len(records) == c.Limit {
				break
			}
		}
		return records, nil
	}, printAudit)
}

func printAudit(p *page, records []api.AuditRecord) {
	p.row("RECORD", "TIME", "ORG", "KEY", "ACTION", "OBJECT", "STATUS", "FROM")
	done := map[int64]bool{}
	for i := range records {
		r := &records[i]
		status := "unknown"
		switch {
		case r.Stage == api.AuditIntent && done[r.Sequence]:
			continue
		case r.Error != nil:
			status = fmt.Sprintf("%d %s", *r.Status, *r.Error)
		case r.Status != nil:
			status = strconv.Itoa(*r.Status)
		}
		if r.Intent != nil {
			done[*r.Intent] = true
		}
		object := r.Object.Name
		if r.Object.Org != nil && *r.Object.Org != r.Actor.Org {
			object += " of " + *r.Object.Org
		}
		p.row(r.Sequence, r.Time, r.Actor.Org, r.Actor.ID, r.Action, object, status, r.SourceIP)
	}
}

type auditExportCommand struct {
	remote        `embed:""`
	auditFilters  `embed:""`
	outputFlag    `embed:""`
	AfterSequence int64 `name:"after-sequence" placeholder:"N" help:"Only records with a larger sequence number, to go on after an earlier export."`
}

func (*auditExportCommand) Help() string {
	return `Without filters, a global administrator gets the whole log, which bullpen audit verify can check later.

Examples:

  bullpen audit export -o audit.jsonl
  bullpen audit export --after-sequence 1042 >> audit.jsonl`
}

func (c *auditExportCommand) Run(ctx context.Context, s streams) error {
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	return c.write(s, func(w io.Writer) error {
		body, err := cl.Admin().ExportAudit(ctx, c.filter(), c.AfterSequence)
		if err != nil {
			return err
		}
		_, err = io.Copy(w, body)
		if err := errors.Join(err, body.Close()); err != nil {
			return fmt.Errorf("export the audit log: %w", err)
		}
		return nil
	})
}

type auditVerifyCommand struct {
	remote `embed:""`
	File   string `arg:"" optional:"" name:"file" help:"An export of the whole log; - for standard input. Default: the server's log, which requires a global administrator's API key."`
	Expect string `placeholder:"HASH" help:"The head that an earlier verification printed. It must still be in the log, or its end was removed."`
}

var hashPattern = regexp.MustCompile("^[0-9a-f]{64}$")

// Validate checks the flags before anything is sent.
func (c *auditVerifyCommand) Validate() error {
	if c.Expect != "" && !hashPattern.MatchString(c.Expect) {
		return fmt.Errorf("--expect: %q is no hash of a record: 64 of 0-9 and a-f", c.Expect)
	}
	return nil
}

func (*auditVerifyCommand) Help() string {
	return `Computes the hash of each record and checks that the next one names it. Exits with 1 and names the first
record that was altered, removed or inserted. An attacker who can write to the store can compute all hashes anew or
cut off the end: keep the printed head elsewhere, and pass it to the next verification.

Acts without an outcome are unfinished: they are not done, or their server died.

Examples:

  bullpen audit verify
  bullpen audit verify audit.jsonl --expect 5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef`
}

// auditVerified is the result of a verification.
type auditVerified struct {
	Records    int     `json:"records"`
	First      int64   `json:"first"`
	Last       int64   `json:"last"`
	Head       string  `json:"head"`
	Unfinished []int64 `json:"unfinished"`
}

func (c *auditVerifyCommand) Run(ctx context.Context, s streams) error {
	export, err := c.open(ctx, s)
	if err != nil {
		return err
	}
	chain, err := client.VerifyAudit(export, c.Expect)
	if err := errors.Join(err, export.Close()); err != nil {
		return err
	}
	v := auditVerified{chain.Records, chain.First, chain.Last, chain.Head, append([]int64{}, chain.Unfinished()...)}
	return show(s, c.JSON, v, printVerified)
}

// open returns the log to verify.
func (c *auditVerifyCommand) open(ctx context.Context, s streams) (io.ReadCloser, error) {
	switch c.File {
	case "":
		cl, err := c.client(s)
		if err != nil {
			return nil, err
		}
		return cl.Admin().ExportWholeAudit(ctx)
	case "-":
		return io.NopCloser(s.in), nil
	default:
		f, err := os.Open(c.File)
		if err != nil {
			return nil, fmt.Errorf("read the export: %w", err)
		}
		return f, nil
	}
}

func printVerified(p *page, v auditVerified) {
	p.row("records", v.Records)
	if v.Records == 0 {
		return
	}
	p.row("sequence", fmt.Sprintf("%d to %d", v.First, v.Last))
	p.row("head", v.Head)
	for _, sequence := range v.Unfinished {
		p.row("unfinished", sequence)
	}
}
