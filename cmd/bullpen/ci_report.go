package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/cmd/internal/runreport"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// ciReports has the flags of commands that write reports.
type ciReports struct {
	JUnit      string `name:"junit" placeholder:"FILE" help:"Write a report in JUnit XML: a suite for each step, a case for each cell of its matrix."`
	JSONReport string `name:"json-report" placeholder:"FILE" help:"Write a report in JSON: the run as the server has it, with durations and the ends of the outputs."`
	HTML       string `name:"html" placeholder:"FILE" help:"Write a report in HTML: one page with a timeline and the ends of the outputs."`
}

// save writes the reports that the flags name.
func (c *ciReports) save(ctx context.Context, cl *client.Client, run *api.WholePipeline) error {
	if c.JUnit == "" && c.JSONReport == "" && c.HTML == "" {
		return nil
	}
	r := runreport.New(run, time.Now())
	for i := range r.Cells {
		cell := &r.Cells[i]
		if cell.TraceID == nil {
			continue
		}
		err := each(cl.Output(ctx, *cell.TraceID, 0), func(e *client.Event) error {
			if e.Type == proto.EventOutput {
				cell.Output.Add(e.Data)
			}
			return nil
		})
		if refused, ok := errors.AsType[*client.Error](err); ok &&
			(refused.Status == http.StatusNotFound || refused.Status == http.StatusGone) {
			cell.Output.Gone = true
			continue
		}
		if err != nil {
			return fmt.Errorf("output of %s for the reports: %w", cellName(&cell.PipelineCell), err)
		}
	}
	var errs []error
	for _, x := range []struct {
		file  string
		write func(io.Writer) error
	}{{c.JUnit, r.JUnit}, {c.JSONReport, r.JSON}, {c.HTML, r.HTML}} {
		if x.file == "" {
			continue
		}
		var b bytes.Buffer
		err := x.write(&b)
		if err == nil {
			err = os.WriteFile(x.file, b.Bytes(), 0o644) //nolint:gosec // what the umask leaves, as any program's files
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("write the report %s: %w", x.file, err))
		}
	}
	return errors.Join(errs...)
}
