package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
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

func (f *auditFilters) query() url.Values {
	query := url.Values{}
	for name, value := range map[string]string{"org": f.Org, "actor": f.Actor, "action": f.Action} {
		if value != "" {
			query.Set(name, value)
		}
	}
	for name, at := range map[string]moment{"created_after": f.After, "created_before": f.Before} {
		if !at.IsZero() {
			query.Set(name, at.UTC().Format(time.RFC3339Nano))
		}
	}
	return query
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
	return `The server writes a record before an administrative act and one after it. The list shows an act once. The status unknown is that of an
act that is not done, or whose server died: it may have been carried out. --json prints all records, with the object before and after.

Examples:

  bullpen audit list --action key.create --after 24h
  bullpen audit list --org acme --json`
}

func (c *auditListCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(api *client.Client) ([]client.AuditRecord, json.RawMessage, error) {
		return decoded(api.Audit(ctx, c.query(), c.Limit))
	}, printAudit)
}

func printAudit(p *page, records []client.AuditRecord) {
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
	api, err := c.client(s)
	if err != nil {
		return err
	}
	query := c.query()
	if c.AfterSequence > 0 {
		query.Set("after", strconv.FormatInt(c.AfterSequence, 10))
	}
	return c.write(s, func(w io.Writer) error {
		body, err := api.ExportAudit(ctx, query)
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
	File   string `arg:"" optional:"" name:"file" help:"An export of the whole log; - for standard input. Default: the log of the server, for which the API key of a global administrator is needed."`
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
	return `Computes the hash of each record, and checks that each record names the hash of the one before. The first record that was altered,
removed or inserted is named, and the exit code is 1. Who can write to the store can also compute all hashes anew, or remove records
from the end: keep the head that the command prints elsewhere, and give it to the next verification.

Unfinished are acts without an outcome: they are not done, or their server died.

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
		api, err := c.client(s)
		if err != nil {
			return nil, err
		}
		return api.ExportAudit(ctx, url.Values{"all": {"true"}})
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
