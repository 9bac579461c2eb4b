package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type batchCommands struct {
	Run     batchRunCommand     `cmd:"" help:"Run many programs, and show their progress."`
	List    batchListCommand    `cmd:"" aliases:"list" name:"ls" help:"List batches."`
	Status  batchStatusCommand  `cmd:"" help:"Show a batch."`
	Results batchResultsCommand `cmd:"" help:"Download the results of a batch."`
	Cancel  batchCancelCommand  `cmd:"" help:"Cancel the items of a batch that have not ended."`
	Retry   batchRetryCommand   `cmd:"" help:"Run the failed items of a batch again."`
	Pause   batchPauseCommand   `cmd:"" help:"Start no more items of a batch."`
	Resume  batchResumeCommand  `cmd:"" help:"Continue a paused batch."`
	Remove  batchRemoveCommand  `cmd:"" aliases:"remove" name:"rm" help:"Remove a batch that has ended. The records of its executions stay."`
}

// batchExitCodesHelp documents the exit codes of commands that wait for a batch.
const batchExitCodesHelp = `
  0    all items succeeded
  1    an item failed or was cancelled
  2    wrong usage
  125  the batch was not accepted, or the server was lost and the outcome is unknown
  130  the command was interrupted, or the batch was cancelled`

type batchRunCommand struct {
	remote        `embed:""`
	Source        string   `arg:"" name:"file|dir" help:"JSONL with an item in each line, - for standard input, or a directory of programs."`
	Program       string   `placeholder:"FILE" help:"Program of all items without code. Its name says the language."`
	Language      string   `name:"lang" short:"l" placeholder:"LANG" help:"Language of items that name none: ${languages}. Default: python."`
	Profile       string   `placeholder:"NAME" help:"Sandbox profile of items that name none, one that the API key may choose. Default: the key's own."`
	Timeout       int      `short:"t" placeholder:"SECONDS" help:"Timeout of items that have none."`
	Env           []string `short:"e" sep:"none" placeholder:"NAME=VALUE" help:"Environment variable of all items. Repeatable."`
	Metadata      []string `short:"m" sep:"none" placeholder:"NAME=VALUE" help:"Metadata of the batch. Repeatable."`
	MaxParallel   int      `name:"max-parallel" placeholder:"N" help:"Most items queued or running at a time. Default: as many as suit the plan."`
	StopOnFailure bool     `name:"stop-on-failure" help:"After the first item that fails, start no other one."`
	Priority      int      `placeholder:"0-9" help:"Items of the organisation's batches with a higher priority go first."`
	WebhookURL    string   `name:"webhook-url" placeholder:"URL" help:"Send the end of the batch to this URL."`
	Output        string   `short:"o" placeholder:"FILE" help:"Write the results to this new file as JSONL, in the order of the items; - is standard output."`
	Async         bool     `help:"Print the batch's id and exit. See bullpen wait --batch."`
	Quiet         bool     `short:"q" help:"Do not print the progress on standard error."`
}

func (*batchRunCommand) Help() string {
	return `Each line of FILE is a request to run a program, such as {"code": "print(1)", "timeout": 10}; the first line
may be {"batch": {…}} with settings. In DIR, each file with a language's extension is an item, in the order of names;
the metadata "file" has the name. If an item is wrong, nothing is accepted, and the message names its line or file.

The progress is a bar on a terminal, and otherwise a line every 10 seconds, on standard error. Ctrl-C leaves the batch
running.

Exit codes:
` + batchExitCodesHelp + `

Examples:

  bullpen batch run items.jsonl -o results.jsonl
  bullpen batch run ./programs --max-parallel 4
  jq -c '{args: [.name]}' rows.jsonl | bullpen batch run - --program greet.py`
}

func (c *batchRunCommand) Run(ctx context.Context, s streams) error {
	items, err := c.open(s)
	if err != nil {
		return unknownOutcome(err)
	}
	defer items.close()
	cl, err := c.client(s)
	if err != nil {
		return unknownOutcome(err)
	}
	results, err := newResults(c.Output)
	if err != nil {
		return unknownOutcome(err)
	}
	if results != nil {
		defer results.Close() //nolint:errcheck // closed below; this is for errors before
	}
	batch, err := cl.CreateBatch(ctx, items.size, items.reader)
	if err != nil {
		return unknownOutcome(items.explain(err))
	}
	if c.Async {
		return unknownOutcome(show(s, c.JSON, batch, func(p *page, b *api.Batch) { p.textf("%s\n", b.ID) }))
	}
	if !c.Quiet {
		s.errorf("batch %s, %d items", batch.ID, batch.Counts.Total)
	}
	w := &batchWaiter{remote: &c.remote, streams: s, id: batch.ID, quiet: c.Quiet, json: c.JSON}
	switch {
	case c.Output == "-":
		w.results = s.out
	case results != nil:
		w.results = results
	}
	return w.run(ctx)
}

// batchWaiter waits for the end of a batch, shows its progress and copies its results.
type batchWaiter struct {
	streams
	remote      *remote
	id          string
	quiet, json bool
	results     io.Writer // nil for none
}

// run returns the error with the exit code of the batch.
func (w *batchWaiter) run(ctx context.Context) error {
	batch, err := w.wait(ctx)
	switch {
	case ctx.Err() != nil:
		return exitError{
			exitInterrupted,
			fmt.Errorf("interrupted; batch %s goes on: see bullpen wait --batch %[1]s, bullpen batch cancel %[1]s", w.id),
		}
	case err != nil:
		return unknownOutcome(fmt.Errorf("%w\nBatch %s may go on: see bullpen batch status %[2]s", explain(err), w.id))
	case w.json && w.results != w.out:
		err = printJSON(w.out, batch)
	case !w.quiet:
		text := fmt.Sprintf("batch %s %s: %s", w.id, batch.Status, ended(batch))
		if w.results == nil {
			text += "; see bullpen batch results " + w.id
		}
		w.errorf("%s", text)
	}
	if err != nil {
		return unknownOutcome(err)
	}
	return batchOutcome(batch)
}

// wait waits for the end of the batch and of its results.
func (w *batchWaiter) wait(ctx context.Context) (batch *api.Batch, err error) {
	progress := newProgress(w.streams, w.id, w.quiet)
	defer progress.close()
	above := w.streams
	if progress.bars != nil {
		above.err = progress.bars
	}
	cl, err := w.remote.client(above)
	if err != nil {
		return nil, err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		for pause := minBatchPause; ; pause = min(2*pause, maxBatchPause) {
			var err error
			if batch, err = cl.Batch(ctx, w.id); err != nil {
				return err
			}
			progress.show(batch, time.Now())
			if batch.CompletedAt != nil {
				return nil
			}
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(pause):
			}
		}
	})
	if w.results != nil {
		group.Go(func() error { return writeResults(w.results, cl.BatchResults(ctx, w.id, -1, true)) })
	}
	return batch, group.Wait()
}

// The pauses between two requests for the state of a batch.
const (
	minBatchPause = 100 * time.Millisecond
	maxBatchPause = time.Second
)

// batchOutcome returns the error with the exit code of a finished batch, nil for 0.
func batchOutcome(b *api.Batch) error {
	switch {
	case b.Status == proto.BatchCancelled:
		return exitError{exitInterrupted, errors.New("the batch was cancelled")}
	case b.Counts.Succeeded == b.Counts.Total:
		return nil
	case b.Reason != nil:
		return exitError{exitFailure, errors.New(*b.Reason)}
	default:
		return exitError{code: exitFailure}
	}
}

// ended returns how the items of a batch have ended.
func ended(b *api.Batch) string {
	c := b.Counts
	text := fmt.Sprintf("%d of %d succeeded, %d failed", c.Succeeded, c.Total, c.Failed)
	if c.Cancelled > 0 {
		text += fmt.Sprintf(", %d cancelled", c.Cancelled)
	}
	return text
}

// batchArg is the argument that names a batch.
type batchArg struct {
	ID string `arg:"" name:"id" help:"Id of the batch: bat_…"`
}

// Validate checks the form of the id.
func (a *batchArg) Validate() error {
	if !proto.ValidBatchID(a.ID) {
		return fmt.Errorf("%q is not a batch's id, such as bat_abcdefghijklmnopqrstuvwxyz", a.ID)
	}
	return nil
}

type batchListCommand struct {
	remote `embed:""`
}

func (c *batchListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[api.Batch, error] {
		return cl.Batches(ctx)
	}, func(p *page, list []api.Batch) {
		p.row("ID", "STATUS", "ITEMS", "SUCCEEDED", "FAILED", "CANCELLED", "LEFT", "CREATED")
		for _, b := range list {
			p.row(b.ID, b.Status, b.Counts.Total, b.Counts.Succeeded, b.Counts.Failed, b.Counts.Cancelled,
				b.Counts.Total-b.Counts.Ended(), b.CreatedAt)
		}
	})
}

type batchStatusCommand struct {
	remote   `embed:""`
	batchArg `embed:""`
}

func (c *batchStatusCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.Batch, error) {
		return cl.Batch(ctx, c.ID)
	}, printBatch)
}

func printBatch(p *page, b *api.Batch) {
	p.row("batch", b.ID)
	p.row("status", b.Status)
	p.optional("reason", b.Reason)
	p.waiting(b.WaitingFor)
	p.row("items", b.Counts.Total)
	for _, count := range []struct {
		name string
		n    int
	}{
		{"waiting", b.Counts.Waiting},
		{"queued", b.Counts.Queued},
		{"running", b.Counts.Running},
		{"succeeded", b.Counts.Succeeded},
		{"failed", b.Counts.Failed},
		{"cancelled", b.Counts.Cancelled},
	} {
		if count.n > 0 {
			p.row("  "+count.name, count.n)
		}
	}
	if b.Rate > 0 {
		p.row("rate", formatRate(b.Rate))
	}
	if b.TimeLeft != nil {
		p.row("time left", time.Duration(*b.TimeLeft)*time.Second)
	}
	p.row("key", b.KeyID)
	p.optional("at once", b.MaxParallel)
	p.row("priority", b.Priority)
	if b.StopOnFailure {
		p.row("stops", "on the first failure")
	}
	if b.Retries > 0 {
		p.row("retries", b.Retries)
	}
	if b.WebhookURL != nil {
		p.row("webhook", cell(b.WebhookDeliveryStatus)+", "+*b.WebhookURL)
	}
	p.metadata(b.Metadata)
	p.row("created", b.CreatedAt)
	p.optional("started", b.StartedAt)
	p.optional("completed", b.CompletedAt)
}

// change changes a batch, and prints its status.
func (a *batchArg) change(s streams, r *remote, change func(*client.Client) (*api.Batch, error)) error {
	return request(s, r, change, func(p *page, b *api.Batch) { p.textf("%s %s\n", b.ID, b.Status) })
}

type batchCancelCommand struct {
	remote   `embed:""`
	batchArg `embed:""`
}

func (*batchCancelCommand) Help() string { return `Running items are cancelled, too.` }

func (c *batchCancelCommand) Run(ctx context.Context, s streams) error {
	return c.change(s, &c.remote, func(cl *client.Client) (*api.Batch, error) { return cl.CancelBatch(ctx, c.ID) })
}

type batchRetryCommand struct {
	remote    `embed:""`
	batchArg  `embed:""`
	Cancelled bool `help:"Also run the items that were cancelled."`
}

func (*batchRetryCommand) Help() string {
	return `The batch must have ended. Each failed item becomes a new execution, which replaces its result. bullpen ` +
		`wait --batch waits for the end.`
}

func (c *batchRetryCommand) Run(ctx context.Context, s streams) error {
	return c.change(s, &c.remote, func(cl *client.Client) (*api.Batch, error) {
		return cl.RetryBatch(ctx, c.ID, c.Cancelled)
	})
}

type batchPauseCommand struct {
	remote   `embed:""`
	batchArg `embed:""`
}

func (*batchPauseCommand) Help() string { return `Items that are in the queue or running go on.` }

func (c *batchPauseCommand) Run(ctx context.Context, s streams) error {
	return c.change(s, &c.remote, func(cl *client.Client) (*api.Batch, error) { return cl.PauseBatch(ctx, c.ID) })
}

type batchResumeCommand struct {
	remote   `embed:""`
	batchArg `embed:""`
}

func (c *batchResumeCommand) Run(ctx context.Context, s streams) error {
	return c.change(s, &c.remote, func(cl *client.Client) (*api.Batch, error) { return cl.ResumeBatch(ctx, c.ID) })
}

type batchRemoveCommand struct {
	remote   `embed:""`
	batchArg `embed:""`
}

func (c *batchRemoveCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) (removed, error) {
		return removed{c.ID}, cl.RemoveBatch(ctx, c.ID)
	}, printRemoved)
}
