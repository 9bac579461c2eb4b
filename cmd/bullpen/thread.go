package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type threadCommands struct {
	List    threadListCommand    `cmd:"" help:"List all threads."`
	Show    threadShowCommand    `cmd:"" help:"Show a thread and its uploaded files."`
	History threadHistoryCommand `cmd:"" help:"List the versions of a thread."`
	Fork    threadForkCommand    `cmd:"" help:"Create a thread from a version of another, without copying."`
	Export  threadExportCommand  `cmd:"" help:"Write a thread's home directory as a tar archive."`
	Import  threadImportCommand  `cmd:"" help:"Unpack a tar archive into a thread's home directory."`
	Rm      threadRmCommand      `cmd:"" help:"Remove a thread and all its versions."`
	GC      threadGCCommand      `cmd:"" name:"gc" help:"Remove stored files that no thread refers to (admin)."`
	Rebuild threadRebuildCommand `cmd:"" help:"Rebuild the list of threads from stored files (admin)."`
}

type threadArg struct {
	Thread string `arg:"" name:"thread" help:"Id of the thread."`
}

func (a *threadArg) Validate() error { return proto.CheckThreadID("thread", a.Thread) }

type versionFlag struct {
	At *int64 `placeholder:"N" help:"Version, as bullpen thread history prints it. Default: the newest."`
}

// version returns the number of the version, 0 for the newest.
func (f *versionFlag) version() (int64, error) {
	switch {
	case f.At == nil:
		return 0, nil
	case *f.At < 1:
		return 0, usagef("--at %d: give the number of a version, at least 1", *f.At)
	default:
		return *f.At, nil
	}
}

type threadListCommand struct {
	remote `embed:""`
}

func (c *threadListCommand) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[api.Thread, error] {
		return cl.Threads(ctx)
	}, func(p *page, threads []api.Thread) {
		p.row("THREAD", "VERSION", "SIZE", "FILES", "CREATED", "USED", "IN USE BY")
		for _, t := range threads {
			p.row(t.ID, t.Version, mib(t.Bytes), t.Files, t.CreatedAt, t.UsedAt, t.Holder)
		}
	})
}

type threadShowCommand struct {
	remote    `embed:""`
	threadArg `embed:""`
}

func (c *threadShowCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*api.WholeThread, error) {
		return cl.Thread(ctx, c.Thread)
	}, printThread)
}

func printThread(p *page, t *api.WholeThread) {
	p.row("thread", t.ID)
	p.row("version", t.Version)
	p.row("size", mib(t.Bytes))
	p.row("files", t.Files)
	p.row("created", t.CreatedAt)
	p.row("used", t.UsedAt)
	p.row("in use by", t.Holder)
	for _, f := range t.Staged {
		p.row("uploaded", fmt.Sprintf("%s, %d bytes, %s", f.Path, f.Size, cell(f.At)))
	}
}

type threadHistoryCommand struct {
	remote    `embed:""`
	threadArg `embed:""`
}

func (c *threadHistoryCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) ([]api.ThreadVersion, error) {
		t, err := cl.Thread(ctx, c.Thread)
		if err != nil {
			return nil, err
		}
		return append([]api.ThreadVersion{}, t.Versions...), nil // [] rather than null
	}, func(p *page, versions []api.ThreadVersion) {
		p.row("VERSION", "SIZE", "FILES", "CREATED", "BY")
		for _, v := range versions {
			p.row(v.Number, mib(v.Bytes), v.Files, v.CreatedAt, v.TraceID)
		}
	})
}

type threadForkCommand struct {
	remote      `embed:""`
	threadArg   `embed:""`
	New         string `arg:"" name:"new" help:"Id of the new thread."`
	versionFlag `embed:""`
}

func (*threadForkCommand) Help() string {
	return `Without --at, the new thread also has the uploaded files that no execution has used yet.

Examples:

  bullpen thread fork notebook-1 notebook-2
  bullpen thread fork notebook-1 before-it-broke --at 7`
}

func (c *threadForkCommand) Run(ctx context.Context, s streams) error {
	if err := proto.CheckThreadID("new", c.New); err != nil {
		return usageError{err}
	}
	version, err := c.version()
	if err != nil {
		return err
	}
	return request(s, &c.remote, func(cl *client.Client) (*api.WholeThread, error) {
		return cl.ForkThread(ctx, c.Thread, c.New, version)
	}, printThread)
}

type threadRmCommand struct {
	remote    `embed:""`
	threadArg `embed:""`
}

func (*threadRmCommand) Help() string {
	return "A thread that is in use cannot be removed. Its stored files are freed later: see bullpen thread gc."
}

func (c *threadRmCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) (removed, error) {
		return removed{c.Thread}, cl.RemoveThread(ctx, c.Thread)
	}, printRemoved)
}

type outputFlag struct {
	Output string `short:"o" default:"-" placeholder:"FILE" help:"File to write; - for standard output. The file appears when it is complete."`
}

// write calls f with the writer that the flag names. A regular file is replaced only if f succeeds.
func (o *outputFlag) write(s streams, f func(w io.Writer) error) (err error) {
	if o.Output == "-" {
		return f(s.out)
	}
	if info, err := os.Stat(o.Output); err == nil && !info.Mode().IsRegular() {
		return writeDevice(o.Output, f)
	}
	part, err := os.CreateTemp(filepath.Dir(o.Output), ".bullpen-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", o.Output, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(part.Name()))
		}
	}()
	err = f(part)
	if err := errors.Join(err, part.Close()); err != nil {
		return err
	}
	if err := os.Rename(part.Name(), o.Output); err != nil {
		return fmt.Errorf("write %s: %w", o.Output, err)
	}
	return nil
}

// writeDevice calls f with a device or pipe, which must not be replaced by a file.
func writeDevice(path string, f func(w io.Writer) error) error {
	out, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("write: %w", err)
	}
	err = f(out)
	return errors.Join(err, out.Close())
}

type threadExportCommand struct {
	remote      `embed:""`
	threadArg   `embed:""`
	versionFlag `embed:""`
	Path        string `placeholder:"DIRECTORY" help:"Directory to write, absolute or relative to the home directory. Default: the home directory."`
	outputFlag  `embed:""`
}

func (*threadExportCommand) Help() string {
	return `Without --at, the archive also has the uploaded files that no execution has used yet.

Examples:

  bullpen thread export notebook-1 -o notebook-1.tar
  bullpen thread export notebook-1 | tar -tv`
}

func (c *threadExportCommand) Run(ctx context.Context, s streams) error {
	version, err := c.version()
	if err != nil {
		return err
	}
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	return c.write(s, func(w io.Writer) error { return cl.ThreadArchive(ctx, c.Thread, version, c.Path, w) })
}

type threadGCCommand struct {
	remote  `embed:""`
	SafeAge *time.Duration `placeholder:"AGE" help:"Keep files younger than this, since a running execution or upload may still need them; at least 2h. Default: 24h."`
}

func (*threadGCCommand) Help() string {
	return "Covers all organisations. Servers do the same periodically (--thread-gc)."
}

func (c *threadGCCommand) Run(ctx context.Context, s streams) error {
	if c.SafeAge != nil && *c.SafeAge < proto.MinSafeAge {
		return usagef("--safe-age %s: give at least %s", *c.SafeAge, proto.MinSafeAge)
	}
	return request(s, &c.remote, func(cl *client.Client) (*proto.Collected, error) {
		return cl.Admin().CollectThreads(ctx, c.SafeAge)
	}, func(p *page, done *proto.Collected) {
		p.row("REMOVED", "BLOBS", "SIZE")
		for _, kind := range []struct {
			name string
			proto.Swept
		}{{"layers", done.Layers}, {"objects", done.Objects}, {"manifests", done.Manifests}, {"uploads", done.Uploads}} {
			p.row(kind.name, kind.Blobs, mib(kind.Bytes))
		}
	})
}

type threadRebuildCommand struct {
	remote `embed:""`
}

func (*threadRebuildCommand) Help() string {
	return `Recovers from the loss of JetStream's data. Covers all organisations. Existing threads are not changed.
Uploaded files that no execution had used are lost. Do not remove threads while the command runs.`
}

func (c *threadRebuildCommand) Run(ctx context.Context, s streams) error {
	return request(s, &c.remote, func(cl *client.Client) (*proto.Rebuilt, error) {
		return cl.Admin().RebuildThreads(ctx)
	}, func(p *page, done *proto.Rebuilt) {
		p.textf("%d threads rebuilt, %d unchanged, %d without a complete version\n", done.Made, done.Kept, done.Lost)
	})
}
