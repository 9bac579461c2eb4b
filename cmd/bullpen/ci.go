package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/cmd/internal/runreport"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/pipelines/spec"
)

// pollEvery is the time between two looks at a run.
const pollEvery = 250 * time.Millisecond

type ciCommands struct {
	Run    ciRunCommand    `cmd:"" help:"Run a pipeline and print what its steps print."`
	Attach ciAttachCommand `cmd:"" help:"Print the output of a run's steps from its beginning, and wait for its end."`
	List   ciListCommand   `cmd:"" aliases:"ls" help:"List the organisation's runs, the newest first."`
	Show   ciShowCommand   `cmd:"" help:"Show a run and its steps."`
	Cancel ciCancelCommand `cmd:"" help:"Cancel a run."`
	Cache  ciCacheCommands `cmd:"" help:"List and remove the caches of pipelines."`
	Schema ciSchemaCommand `cmd:"" help:"Print the JSON schema of pipeline files."`
}

const ciExitCodesHelp = `0 if the run succeeded, 1 if it failed or was cancelled, 125 if its outcome is unknown or an
artifact or report could not be saved, 130 if the command was interrupted. The run goes on after an interruption: see
bullpen ci attach and bullpen ci cancel.`

// ciOutput has the flags of commands that follow a run.
type ciOutput struct {
	ciReports `embed:""`
	Artifacts string `placeholder:"DIR" help:"Save the artifacts below this directory, as STEP/ARTIFACT/PATH or STEP/CELL/ARTIFACT/PATH."`
}

type ciRunCommand struct {
	remote   `embed:""`
	Dir      string `default:"." placeholder:"DIR" help:"Directory that the run begins with. Of a Git repository: all files that are not ignored."`
	Ref      string `placeholder:"COMMIT" help:"Begin with this commit of the repository in --dir, instead of its files."`
	NoInput  bool   `name:"no-input" help:"Begin with an empty directory."`
	Detach   bool   `short:"d" help:"Print the id of the run, and do not wait for its end."`
	ciOutput `embed:""`
	File     string `arg:"" help:"The pipeline in YAML. See bullpen ci schema."`
}

func (*ciRunCommand) Help() string {
	return `Uploads the directory, starts a run, and prints the output of each step as a group; --json prints the run at
its end. Secrets of the steps come from this command's environment, or else from the stored secrets that are bound to
the API key.

Exit codes: ` + ciExitCodesHelp + `

Examples:

  bullpen ci run ci.yaml
  bullpen ci run --junit junit.xml --html report.html ci.yaml
  TOKEN=… bullpen ci run --ref main --artifacts out ci.yaml`
}

func (c *ciRunCommand) Run(ctx context.Context, s streams) error {
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	file, err := readPipelineFile(c.File)
	if err != nil {
		return err
	}
	// The server checks the file as well. Here it saves the upload, and names the secrets.
	p, err := spec.Parse(file)
	if err != nil {
		return fmt.Errorf("%s: %w", c.File, err)
	}
	r := &api.PipelineRequest{File: file, Secrets: secretsOf(p)}
	if !c.NoInput {
		in := &ciInput{dir: c.Dir, ref: c.Ref}
		r.Commit, r.Branch = in.revision(ctx)
		if r.ThreadID, err = in.upload(ctx, cl, s); err != nil {
			return err
		}
		defer func() { // the run has a copy
			clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
			defer cancel()
			if err := cl.RemoveThread(clean, r.ThreadID); err != nil {
				s.errorf("thread %s with the uploaded files stays: %v", r.ThreadID, err)
			}
		}()
	}
	run, err := cl.StartPipeline(ctx, r)
	if err != nil {
		return err
	}
	if c.Detach {
		if c.JSON {
			return printJSON(s.out, run)
		}
		_, err := fmt.Fprintln(s.out, run.ID)
		return err
	}
	return (&ciFollower{streams: s, api: cl, json: c.JSON}).follow(ctx, run.ID, &c.ciOutput)
}

// readPipelineFile reads a file up to the size that the server accepts, and a little more.
func readPipelineFile(name string) (string, error) {
	info, err := os.Stat(name)
	if err == nil && info.Size() > proto.MaxPipelineFile {
		err = fmt.Errorf("it has %d bytes, and at most %d are possible", info.Size(), proto.MaxPipelineFile)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	text, err := os.ReadFile(name)
	return string(text), err
}

// secretsOf returns the values in the environment of secrets that steps name. The server has the
// others, or names them.
func secretsOf(p *proto.Pipeline) map[string]string {
	secrets := map[string]string{}
	for i := range p.Steps {
		for _, name := range p.Steps[i].Secrets {
			if value, ok := os.LookupEnv(name); ok {
				secrets[name] = value
			}
		}
	}
	return secrets
}

// ciFollower prints what the steps of a run print.
type ciFollower struct {
	streams
	api     *client.Client
	json    bool
	printed map[int]bool   // cells
	waiting map[int]string // what a cell waits for, as printed last
}

// follow prints the groups of all steps, and returns once the run has ended.
func (f *ciFollower) follow(ctx context.Context, id string, out *ciOutput) error {
	f.printed, f.waiting = map[int]bool{}, map[int]string{}
	if !f.json {
		f.errorf("run %s; bullpen ci attach %[1]s shows it again", id)
	}
	for {
		run, err := f.api.Pipeline(ctx, id)
		if err != nil {
			return unknownOutcome(err)
		}
		next := -1
		if !f.json {
			next = f.next(run)
		}
		switch {
		case next >= 0:
			if err := f.group(ctx, id, next, &run.Cells[next]); err != nil {
				return unknownOutcome(err)
			}
			f.printed[next] = true
		case run.Status != proto.PipelineRunning:
			return f.finish(ctx, run, out)
		default:
			f.explain(run)
			select {
			case <-ctx.Done():
				return unknownOutcome(context.Cause(ctx))
			case <-time.After(pollEvery):
			}
		}
	}
}

// explain prints why steps wait for a worker that can run them, once each.
func (f *ciFollower) explain(run *api.WholePipeline) {
	for i := range run.Cells {
		c := &run.Cells[i]
		if c.WaitingFor != nil && f.waiting[i] != c.WaitingFor.Message {
			f.waiting[i] = c.WaitingFor.Message
			f.errorf("%s waits: %s", cellName(c), c.WaitingFor.Message)
		}
	}
}

// next returns the cell to print next, -1 for none yet: the first one that has ended or whose
// program runs.
func (f *ciFollower) next(run *api.WholePipeline) int {
	for i := range run.Cells {
		if c := &run.Cells[i]; !f.printed[i] && (c.Status.Ended() || c.StartedAt != nil) {
			return i
		}
	}
	return -1
}

// group prints the output of a cell, between a line with its name and one with its end.
func (f *ciFollower) group(ctx context.Context, run string, i int, c *api.PipelineCell) error {
	name := cellName(c)
	if c.TraceID == nil {
		_, err := fmt.Fprintf(f.out, "--- %s: %s%s\n", name, c.Status, because(c.Reason))
		return err
	}
	if _, err := fmt.Fprintf(f.out, "=== %s %s\n", name, *c.TraceID); err != nil {
		return err
	}
	newline := true
	err := each(f.api.Follow(ctx, *c.TraceID, 0), func(e *client.Event) error {
		if e.Type != proto.EventOutput || e.Data == "" {
			return nil
		}
		newline = strings.HasSuffix(e.Data, "\n")
		_, err := fmt.Fprint(f.out, e.Data)
		return err
	})
	if err != nil {
		return err
	}
	if !newline {
		_, _ = fmt.Fprintln(f.out)
	}
	return f.printEnd(ctx, run, i)
}

// printEnd waits until a cell has ended, which includes keeping its files, and prints how.
func (f *ciFollower) printEnd(ctx context.Context, run string, i int) error {
	for {
		whole, err := f.api.Pipeline(ctx, run)
		if err != nil {
			return err
		}
		if c := &whole.Cells[i]; c.Status.Ended() {
			for _, warning := range c.Warnings {
				f.errorf("%s: warning: %s", cellName(c), warning)
			}
			end := string(c.Status)
			switch {
			case c.Status == proto.StepFailed && c.ExitCode != nil && *c.ExitCode > 0:
				end = fmt.Sprintf("failed with exit code %d", *c.ExitCode)
			case c.Reason != nil:
				end = *c.Reason
			}
			if took, ok := runreport.Took(c); ok {
				end += ", " + took.String()
			}
			_, err := fmt.Fprintf(f.out, "--- %s: %s\n", cellName(c), end)
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pollEvery):
		}
	}
}

func cellName(c *api.PipelineCell) string {
	if c.Cell == nil {
		return c.Step
	}
	return spec.Label(c.Step, *c.Cell)
}

func because(reason *string) string {
	if reason == nil {
		return ""
	}
	return ", " + *reason
}

// finish saves the requested files and prints the end of a run. It continues if saving fails.
func (f *ciFollower) finish(ctx context.Context, run *api.WholePipeline, out *ciOutput) error {
	var errArtifacts error
	if out.Artifacts != "" {
		errArtifacts = f.saveArtifacts(ctx, run, out.Artifacts)
	}
	errSave := errors.Join(errArtifacts, out.save(ctx, f.api, run))
	if f.json {
		if err := printJSON(f.out, run); err != nil {
			return err
		}
	} else {
		took := run.EndedAt.Sub(run.CreatedAt.Time).Round(time.Millisecond)
		if _, err := fmt.Fprintf(f.out, "run %s: %s%s, %s\n", run.ID, run.Status, because(run.Reason), took); err != nil {
			return err
		}
	}
	if run.Status != proto.PipelineSuccess {
		return exitError{exitFailure, errSave}
	}
	return unknownOutcome(errSave)
}

// runArg is the argument that names a run.
type runArg struct {
	ID string `arg:"" name:"run" help:"Id of the run: run_…"`
}

// Validate checks the id before anything is sent.
func (a *runArg) Validate() error {
	if !proto.ValidPipelineID(a.ID) {
		return fmt.Errorf("%q is not a run's id", a.ID)
	}
	return nil
}

type ciAttachCommand struct {
	remote   `embed:""`
	ciOutput `embed:""`
	runArg   `embed:""`
}

func (*ciAttachCommand) Help() string { return "Exit codes: " + ciExitCodesHelp }

func (c *ciAttachCommand) Run(ctx context.Context, s streams) error {
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	return (&ciFollower{streams: s, api: cl, json: c.JSON}).follow(ctx, c.ID, &c.ciOutput)
}

type ciListCommand struct {
	remote `embed:""`
}

func (c *ciListCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) (api.Pipelines, error) {
		runs, err := client.Collect(cl.Pipelines(ctx))
		return api.Pipelines{Pipelines: runs}, err
	}, func(p *page, list api.Pipelines) {
		p.row("ID", "NAME", "STATUS", "BRANCH", "CREATED", "ENDED")
		for i := range list.Pipelines {
			x := &list.Pipelines[i]
			p.row(x.ID, x.Name, x.Status, x.Branch, x.CreatedAt, x.EndedAt)
		}
	})
}

type ciShowCommand struct {
	remote    `embed:""`
	ciReports `embed:""`
	runArg    `embed:""`
}

func (*ciShowCommand) Help() string {
	return "Reports of a run that goes on have its steps as they are now."
}

func (c *ciShowCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) (*api.WholePipeline, error) {
		run, err := cl.Pipeline(ctx, c.ID)
		if err == nil {
			err = c.save(ctx, cl, run)
		}
		return run, err
	}, printPipeline)
}

type ciCancelCommand struct {
	remote `embed:""`
	runArg `embed:""`
}

func (c *ciCancelCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.WholePipeline, error) {
		return cl.CancelPipeline(ctx, c.ID)
	}, printPipeline)
}

func printPipeline(p *page, run *api.WholePipeline) {
	p.row("run", run.ID)
	p.optional("name", run.Name)
	status := string(run.Status)
	if run.Cancelling && run.Status == proto.PipelineRunning {
		status = "cancelling"
	}
	p.row("status", status+because(run.Reason))
	p.optional("commit", run.Commit)
	p.optional("branch", run.Branch)
	p.row("created", run.CreatedAt)
	p.optional("ended", run.EndedAt)
	p.textf("\n")
	p.row("STEP", "STATUS", "EXECUTION", "REASON")
	for i := range run.Cells {
		c := &run.Cells[i]
		reason := cell(c.Reason)
		if c.WaitingFor != nil {
			reason = c.WaitingFor.Message
		}
		p.row(cellName(c), c.Status, c.TraceID, reason)
		for _, warning := range c.Warnings {
			p.row("", "", "warning:", warning)
		}
	}
}

type ciCacheCommands struct {
	List ciCacheListCommand   `cmd:"" aliases:"ls" help:"List the organisation's caches."`
	Rm   ciCacheRemoveCommand `cmd:"" help:"Remove a cache. The next step with its key that succeeds creates it again. For administrators."`
}

type ciCacheListCommand struct {
	remote `embed:""`
}

func (c *ciCacheListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[api.PipelineCache, error] {
		return cl.PipelineCaches(ctx)
	}, func(p *page, caches []api.PipelineCache) {
		p.row("KEY", "SIZE", "FILES", "CREATED")
		for _, x := range caches {
			p.row(x.Key, mib(x.Bytes), x.Files, x.CreatedAt)
		}
	})
}

type ciCacheRemoveCommand struct {
	remote `embed:""`
	Org    string `placeholder:"NAME" help:"The organisation. Default: the API key's."`
	Key    string `arg:"" help:"The key of the cache."`
}

func (c *ciCacheRemoveCommand) Run(ctx context.Context, s streams) error {
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	if err := cl.Admin().RemovePipelineCache(ctx, c.Org, c.Key); err != nil {
		return err
	}
	s.progressf("removed cache %s", c.Key)
	return nil
}

type ciSchemaCommand struct{}

// Run prints the schema.
func (c *ciSchemaCommand) Run(s streams) error {
	_, err := s.out.Write(spec.Schema)
	return err
}
