package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/pipelines/spec"
)

// pollEvery is the time between two looks at a run.
const pollEvery = 250 * time.Millisecond

type ciCommands struct {
	Run    ciRunCommand    `cmd:"" help:"Run a pipeline and print what its steps print."`
	Attach ciAttachCommand `cmd:"" help:"Print what the steps of a run print, from its beginning, and wait for its end."`
	List   ciListCommand   `cmd:"" aliases:"ls" help:"List the organisation's runs, the newest first."`
	Show   ciShowCommand   `cmd:"" help:"Show a run and its steps."`
	Cancel ciCancelCommand `cmd:"" help:"Cancel a run."`
	Schema ciSchemaCommand `cmd:"" help:"Print the JSON schema of pipeline files."`
}

const ciExitCodesHelp = `0 if the run succeeded, 1 if it failed or was cancelled, 125 if its outcome is unknown, 130 if the command was
interrupted. The run goes on after an interruption: see bullpen ci attach and bullpen ci cancel.`

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
	return `Uploads the directory, starts a run on the server, and prints the output of each step as a group. With --json it prints the run at its end.
Secrets that the steps name are taken from the environment of this command. For those that are not there, the server takes the stored secrets
that an administrator has bound to the API key.

Exit codes: ` + ciExitCodesHelp + `

Examples:

  bullpen ci run ci.yaml
  bullpen ci run --junit junit.xml --html report.html ci.yaml
  TOKEN=… bullpen ci run --ref main --artifacts out ci.yaml`
}

func (c *ciRunCommand) Run(ctx context.Context, s streams) error {
	api, err := c.client(s)
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
	r := &client.PipelineRequest{File: file, Secrets: secretsOf(p)}
	if !c.NoInput {
		in := &ciInput{dir: c.Dir, ref: c.Ref}
		r.Commit, r.Branch = in.revision(ctx)
		if r.ThreadID, err = in.upload(ctx, api, s); err != nil {
			return err
		}
		defer func() { // the run has a copy
			clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
			defer cancel()
			if err := api.RemoveThread(clean, r.ThreadID); err != nil {
				s.errorf("thread %s with the uploaded files stays: %v", r.ThreadID, err)
			}
		}()
	}
	run, raw, err := api.StartPipeline(ctx, r)
	if err != nil {
		return err
	}
	if c.Detach {
		if c.JSON {
			return printRaw(s.out, raw)
		}
		_, err := fmt.Fprintln(s.out, run.ID)
		return err
	}
	return (&ciFollower{streams: s, api: api, json: c.JSON}).follow(ctx, run.ID, &c.ciOutput)
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

// secretsOf returns the values that the environment has of the secrets that steps name. The server
// has the others, or names them.
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
	printed map[int]bool // cells
}

// follow prints the groups of all steps, and returns once the run has ended.
func (f *ciFollower) follow(ctx context.Context, id string, out *ciOutput) error {
	f.printed = map[int]bool{}
	if !f.json {
		f.errorf("run %s; bullpen ci attach %[1]s shows it again", id)
	}
	for {
		run, raw, err := f.api.Pipeline(ctx, id)
		if err != nil {
			return unknownOutcome(err)
		}
		next := -1
		if !f.json {
			next = f.next(run)
		}
		switch {
		case next >= 0:
			if err := f.group(ctx, &run.Cells[next]); err != nil {
				return unknownOutcome(err)
			}
			f.printed[next] = true
		case run.Status != proto.PipelineRunning:
			return f.finish(ctx, run, raw, out)
		default:
			select {
			case <-ctx.Done():
				return unknownOutcome(context.Cause(ctx))
			case <-time.After(pollEvery):
			}
		}
	}
}

// next returns the cell whose output is printed next, -1 for none yet: the first one that has ended
// or whose program runs.
func (f *ciFollower) next(run *client.WholePipeline) int {
	for i := range run.Cells {
		if c := &run.Cells[i]; !f.printed[i] && (c.Status.Ended() || c.StartedAt != nil) {
			return i
		}
	}
	return -1
}

// group prints the output of a cell, between a line with its name and one with its end.
func (f *ciFollower) group(ctx context.Context, c *client.PipelineCell) error {
	name := cellName(c)
	if c.TraceID == nil {
		_, err := fmt.Fprintf(f.out, "--- %s: %s%s\n", name, c.Status, because(c.Reason))
		return err
	}
	if _, err := fmt.Fprintf(f.out, "=== %s %s\n", name, *c.TraceID); err != nil {
		return err
	}
	newline := true
	var result *proto.Result
	err := f.api.Follow(ctx, *c.TraceID, 0, func(e *client.Event) error {
		result = e.Result
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
	end := "success"
	switch {
	case result.ErrorMessage != nil:
		end = *result.ErrorMessage
	case !result.Success:
		end = fmt.Sprintf("failed with exit code %d", result.ExitCode)
	}
	_, err = fmt.Fprintf(f.out, "--- %s: %s, %s\n", name, end, milliseconds(result.DurationMS))
	return err
}

func cellName(c *client.PipelineCell) string {
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

// finish prints the end of a run and saves what is asked for.
func (f *ciFollower) finish(ctx context.Context, run *client.WholePipeline, raw json.RawMessage, out *ciOutput) error {
	if out.Artifacts != "" {
		if err := saveArtifacts(ctx, f.api, run, out.Artifacts); err != nil {
			return unknownOutcome(err)
		}
	}
	if err := out.save(ctx, f.api, run); err != nil {
		return unknownOutcome(err)
	}
	if f.json {
		if err := printRaw(f.out, raw); err != nil {
			return err
		}
	} else {
		took := run.EndedAt.Sub(run.CreatedAt.Time).Round(time.Millisecond)
		if _, err := fmt.Fprintf(f.out, "run %s: %s%s, %s\n", run.ID, run.Status, because(run.Reason), took); err != nil {
			return err
		}
	}
	if run.Status != proto.PipelineSuccess {
		return exitError{code: exitFailure}
	}
	return nil
}

// saveArtifacts downloads the artifacts of a run below a directory.
func saveArtifacts(ctx context.Context, api *client.Client, run *client.WholePipeline, dir string) error {
	for i := range run.Cells {
		c := &run.Cells[i]
		if c.Thread == nil {
			continue
		}
		files, _, err := api.Files(ctx, client.ThreadFiles(*c.Thread), "", true)
		if err != nil {
			return fmt.Errorf("artifacts of %s: %w", cellName(c), err)
		}
		for _, a := range c.Artifacts {
			for _, file := range files {
				name := strings.TrimPrefix(file.Path, "/")
				if file.IsDirectory || !spec.Match(a.Paths, name) {
					continue
				}
				to := path.Join(c.Step, a.Name, name)
				if c.Cell != nil {
					to = path.Join(c.Step, *c.Cell, a.Name, name)
				}
				if err := saveArtifact(ctx, api, *c.Thread, name, dir, to); err != nil {
					return fmt.Errorf("artifact %s of %s: %w", a.Name, cellName(c), err)
				}
			}
		}
	}
	return nil
}

// saveArtifact downloads a file. A path that leads out of the directory is refused.
func saveArtifact(ctx context.Context, api *client.Client, thread, name, dir, to string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // what the umask leaves, as any program's files
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close() //nolint:errcheck // only a handle
	if err := root.MkdirAll(filepath.Dir(filepath.FromSlash(to)), 0o755); err != nil {
		return err
	}
	f, err := root.Create(filepath.FromSlash(to))
	if err != nil {
		return err
	}
	return errors.Join(api.Download(ctx, client.ThreadFiles(thread), name, f), f.Close())
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
	api, err := c.client(s)
	if err != nil {
		return err
	}
	return (&ciFollower{streams: s, api: api, json: c.JSON}).follow(ctx, c.ID, &c.ciOutput)
}

type ciListCommand struct {
	remote `embed:""`
}

func (c *ciListCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(api *client.Client) ([]client.Pipeline, json.RawMessage, error) {
		return api.Pipelines(ctx)
	}, func(p *page, list []client.Pipeline) {
		p.row("ID", "NAME", "STATUS", "BRANCH", "CREATED", "ENDED")
		for i := range list {
			x := &list[i]
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
	return request(s, &c.remote, func(api *client.Client) (*client.WholePipeline, json.RawMessage, error) {
		run, raw, err := api.Pipeline(ctx, c.ID)
		if err == nil {
			err = c.save(ctx, api, run)
		}
		return run, raw, err
	}, printPipeline)
}

type ciCancelCommand struct {
	remote `embed:""`
	runArg `embed:""`
}

func (c *ciCancelCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(api *client.Client) (*client.WholePipeline, json.RawMessage, error) {
		return api.CancelPipeline(ctx, c.ID)
	}, printPipeline)
}

func printPipeline(p *page, run *client.WholePipeline) {
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
		p.row(cellName(c), c.Status, c.TraceID, c.Reason)
	}
}

type ciSchemaCommand struct{}

// Run prints the schema.
func (c *ciSchemaCommand) Run(s streams) error {
	_, err := s.out.Write(spec.Schema)
	return err
}
