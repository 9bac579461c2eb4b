package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
)

type threadCommands struct {
	List    threadListCommand    `cmd:"" help:"List all threads."`
	Show    threadShowCommand    `cmd:"" help:"Show a thread, and uploaded files that no execution has found yet."`
	History threadHistoryCommand `cmd:"" help:"List the versions of a thread that can be gone back to."`
	Fork    threadForkCommand    `cmd:"" help:"Make a new thread from any version of another. It copies nothing."`
	Export  threadExportCommand  `cmd:"" help:"Write a thread's home directory as a tar."`
	Import  threadImportCommand  `cmd:"" help:"Unpack a tar into a thread's home directory."`
	Rm      threadRmCommand      `cmd:"" help:"Remove a thread with all its versions."`
	Files   threadFilesCommand   `cmd:"" help:"List files of a thread."`
	Get     threadGetCommand     `cmd:"" help:"Download a file of a thread."`
	Put     threadPutCommand     `cmd:"" help:"Upload a file to a thread."`
	GC      threadGCCommand      `cmd:"" name:"gc" help:"Remove from the store what no thread refers to. Needs a key with all rights."`
	Rebuild threadRebuildCommand `cmd:"" help:"Make threads again from what the store has. Needs a key with all rights."`
}

// threadArg is the argument that names a thread.
type threadArg struct {
	Thread string `arg:"" name:"thread" help:"The thread's id."`
}

// Validate checks the id before anything is sent.
func (a *threadArg) Validate() error { return proto.CheckThreadID("thread", a.Thread) }

// versionFlag names a version of a thread.
type versionFlag struct {
	At *int64 `placeholder:"N" help:"The number of a version that bullpen thread history lists; the newest without it."`
}

// number gives the version's number, 0 for the newest.
func (f *versionFlag) number() (int64, error) {
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

// Run carries the command out.
func (c *threadListCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	list, err := api.Threads(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, list)
	}
	t := tabwriter.NewWriter(io.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "THREAD\tVERSION\tSIZE\tFILES\tCREATED\tUSED\tIN USE BY") // Flush gives the error
	for _, x := range list {
		_, _ = fmt.Fprintf(t, "%s\t%d\t%s\t%d\t%s\t%s\t%s\n", x.ID, x.Version, mib(x.Bytes), x.Files,
			x.CreatedAt.Local().Format(timeLayout), x.UsedAt.Local().Format(timeLayout), traceOrDash(x.Holder))
	}
	return t.Flush()
}

func traceOrDash(id *proto.TraceID) string {
	if id == nil {
		return "-"
	}
	return string(*id)
}

type threadShowCommand struct {
	remote    `embed:""`
	threadArg `embed:""`
}

// Run carries the command out.
func (c *threadShowCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	x, raw, err := api.Thread(ctx, c.Thread)
	if err != nil {
		return err
	}
	if c.JSON {
		return printRaw(io.out, raw)
	}
	return printThread(io.out, x)
}

func printThread(w io.Writer, x *client.Thread) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, value string) { _, _ = fmt.Fprintf(t, "%s\t%s\n", name, value) } // Flush gives the error
	row("thread", x.ID)
	row("version", strconv.FormatInt(x.Version, 10))
	row("size", mib(x.Bytes))
	row("files", strconv.FormatInt(x.Files, 10))
	row("created", x.CreatedAt.Local().Format(timeLayout))
	row("used", x.UsedAt.Local().Format(timeLayout))
	row("in use by", traceOrDash(x.Holder))
	for _, f := range x.Staged {
		row("uploaded", fmt.Sprintf("%s, %d bytes, %s", strings.Map(printable, f.Path), f.Size, f.At.Local().Format(timeLayout)))
	}
	return t.Flush()
}

type threadHistoryCommand struct {
	remote    `embed:""`
	threadArg `embed:""`
}

// Run carries the command out.
func (c *threadHistoryCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	x, _, err := api.Thread(ctx, c.Thread)
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, append([]client.ThreadVersion{}, x.Versions...)) // an empty list rather than null
	}
	t := tabwriter.NewWriter(io.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "VERSION\tSIZE\tFILES\tCREATED\tBY") // Flush gives the error
	for _, v := range x.Versions {
		_, _ = fmt.Fprintf(t, "%d\t%s\t%d\t%s\t%s\n", v.Number, mib(v.Bytes), v.Files, v.CreatedAt.Local().Format(timeLayout), traceOrDash(v.Trace))
	}
	return t.Flush()
}

type threadForkCommand struct {
	remote      `embed:""`
	threadArg   `embed:""`
	New         string `arg:"" name:"new" help:"The id of the new thread."`
	versionFlag `embed:""`
}

// Help tells what --help does not know by itself.
func (*threadForkCommand) Help() string {
	return `Without --at, uploaded files that no execution has found yet come along.

Examples:

  bullpen thread fork notebook-1 notebook-2
  bullpen thread fork notebook-1 before-it-broke --at 7`
}

// Run carries the command out.
func (c *threadForkCommand) Run(ctx context.Context, io streams) error {
	if err := proto.CheckThreadID("new", c.New); err != nil {
		return usageError{err}
	}
	version, err := c.number()
	if err != nil {
		return err
	}
	api, err := c.client()
	if err != nil {
		return err
	}
	x, raw, err := api.ForkThread(ctx, c.Thread, c.New, version)
	if err != nil {
		return err
	}
	if c.JSON {
		return printRaw(io.out, raw)
	}
	return printThread(io.out, x)
}

type threadRmCommand struct {
	remote    `embed:""`
	threadArg `embed:""`
}

// Help tells what --help does not know by itself.
func (*threadRmCommand) Help() string {
	return "A thread that is in use is not removed. What it had in the store is freed later, see bullpen thread gc."
}

// Run carries the command out.
func (c *threadRmCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	if err := api.RemoveThread(ctx, c.Thread); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, map[string]string{"id": c.Thread})
	}
	_, err = fmt.Fprintf(io.out, "%s is removed\n", c.Thread)
	return err
}

// outputFlag says where content goes.
type outputFlag struct {
	Output string `short:"o" default:"-" placeholder:"FILE" help:"Where to write it; - for standard output, also without this flag. A file comes to be when it is whole."`
}

// write has f write to where the flag says.
func (o *outputFlag) write(to streams, f func(w io.Writer) error) (err error) {
	if o.Output == "-" {
		return f(to.out)
	}
	if info, err := os.Stat(o.Output); err == nil && !info.Mode().IsRegular() {
		return writeInto(o.Output, f) // a device or a pipe is not replaced
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

func writeInto(path string, f func(w io.Writer) error) error {
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
	outputFlag  `embed:""`
}

// Help tells what --help does not know by itself.
func (*threadExportCommand) Help() string {
	return `Without --at, uploaded files that no execution has found yet are in it.

Examples:

  bullpen thread export notebook-1 -o notebook-1.tar
  bullpen thread export notebook-1 | tar -tv`
}

// Run carries the command out.
func (c *threadExportCommand) Run(ctx context.Context, to streams) error {
	version, err := c.number()
	if err != nil {
		return err
	}
	api, err := c.client()
	if err != nil {
		return err
	}
	return c.write(to, func(w io.Writer) error { return api.ThreadArchive(ctx, c.Thread, version, w) })
}

type threadGetCommand struct {
	remote     `embed:""`
	threadArg  `embed:""`
	Path       string `arg:"" name:"path" help:"The file, relative to the home directory or absolute."`
	outputFlag `embed:""`
}

// Run carries the command out.
func (c *threadGetCommand) Run(ctx context.Context, to streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	return c.write(to, func(w io.Writer) error { return api.Download(ctx, c.Thread, c.Path, w) })
}

type threadPutCommand struct {
	remote    `embed:""`
	threadArg `embed:""`
	Local     string `arg:"" name:"local" help:"The file to upload."`
	Path      string `arg:"" name:"path" help:"Where it is to be, relative to the home directory or absolute."`
}

// Help tells what --help does not know by itself.
func (*threadPutCommand) Help() string {
	return `It takes the place of whatever is there, of a directory with all that is in it too, and directories are made on its way, in the
place of files and links too. The next execution finds it; one that runs does not.`
}

// Run carries the command out.
func (c *threadPutCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	size, err := uploadFile(ctx, api, c.Thread, c.Local, c.Path)
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, map[string]any{"path": c.Path, "size": size})
	}
	_, err = fmt.Fprintf(io.out, "%s has %s now, %d bytes\n", c.Thread, c.Path, size)
	return err
}

// uploadFile uploads a local file, and gives its size in bytes.
func uploadFile(ctx context.Context, api *client.Client, thread, local, path string) (size int64, err error) {
	f, err := os.Open(local)
	if err != nil {
		return 0, fmt.Errorf("upload: %w", err)
	}
	defer func() { _ = f.Close() }() // it was only read
	info, err := f.Stat()
	if err != nil {
		return 0, fmt.Errorf("upload: %w", err)
	}
	if !info.Mode().IsRegular() {
		return 0, fmt.Errorf("upload: %s is not a file with a length", local)
	}
	if err := api.Upload(ctx, thread, path, info.Size(), f); err != nil {
		return 0, fmt.Errorf("upload %s: %w", local, err)
	}
	return info.Size(), nil
}

type threadFilesCommand struct {
	remote    `embed:""`
	threadArg `embed:""`
	Path      string `arg:"" optional:"" name:"path" help:"A directory or file, relative to the home directory or absolute."`
	Recursive bool   `short:"r" help:"Everything below, too."`
}

// Run carries the command out.
func (c *threadFilesCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	files, raw, err := api.Files(ctx, c.Thread, c.Path, c.Recursive)
	if err != nil {
		return err
	}
	if c.JSON {
		return printRaw(io.out, raw)
	}
	t := tabwriter.NewWriter(io.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "MODIFIED\tSIZE\tPATH") // Flush gives the error
	for _, f := range files {
		size, name := strconv.FormatInt(f.Size, 10), strings.Map(printable, f.Path)
		if f.IsDirectory {
			size, name = "-", name+"/"
		}
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\n", f.Modified.Local().Format(timeLayout), size, name)
	}
	return t.Flush()
}

type threadImportCommand struct {
	remote    `embed:""`
	threadArg `embed:""`
	File      string `arg:"" help:"The tar, not compressed, such as bullpen thread export writes."`
	Timeout   int    `short:"t" default:"60" placeholder:"SECONDS" help:"How long unpacking may take (${default})."`
}

// Help tells what --help does not know by itself.
func (*threadImportCommand) Help() string {
	return `The archive is uploaded to the thread and unpacked there by an execution, in the sandbox and under the limits of the API key: the home
directory has to have room for the archive and for what is in it. What is in the home directory already stays, but for files that the
archive has too. The thread is made where there is none. An archive has no holes: sparse files become full ones.`
}

// Run carries the command out.
func (c *threadImportCommand) Run(ctx context.Context, io streams) error {
	if c.Timeout < 1 {
		return usagef("-t %d: give a whole number of seconds, at least 1", c.Timeout)
	}
	api, err := c.client()
	if err != nil {
		return err
	}
	if err := c.free(ctx, api); err != nil {
		return err
	}
	// Nobody can have chosen this name, and in a home it does not show.
	name := ".bullpen-import-" + rand.Text() + ".tar"
	if _, err := uploadFile(ctx, api, c.Thread, c.File, name); err != nil {
		return err
	}
	io.note("unpacking %s", c.File)
	result, id, err := api.Execute(ctx, client.Request{Code: unpackProgram(name), Language: proto.Bash, Timeout: c.Timeout, ThreadID: c.Thread})
	if err != nil {
		return fmt.Errorf("unpack %s: %w\nThe archive may be in the thread as %s until a program removes it", c.File, err, name)
	}
	if c.JSON {
		err = (&printer{io: io, json: true}).whole(id, result)
	} else {
		err = tellUnpacked(io, c.Thread, id, result)
	}
	if err == nil && !result.Success {
		err = exitError(exitFailure)
	}
	return err
}

// free refuses a thread that is in use: what is uploaded to one would lie there until its next execution.
func (c *threadImportCommand) free(ctx context.Context, api *client.Client) error {
	x, _, err := api.Thread(ctx, c.Thread)
	if refused, ok := errors.AsType[*client.Error](err); ok && refused.Status == http.StatusNotFound && refused.Code != "" {
		return nil
	}
	if err == nil && x.Holder != nil {
		err = fmt.Errorf("thread %s is in use by execution %s; wait until that has ended: bullpen logs --follow %[2]s", c.Thread, *x.Holder)
	}
	return err
}

// unpackProgram unpacks the archive of that name in the home directory, and removes it in any case.
func unpackProgram(name string) string {
	return `cd -- "$HOME" || exit
xattrs=--xattrs
tar $xattrs --help >/dev/null 2>&1 || xattrs= # not every tar knows them
tar $xattrs -xpf ./` + name + `
code=$?
rm -f -- ./` + name + `
exit "$code"
`
}

// tellUnpacked says how unpacking went. What tar says may have names in it that others chose.
func tellUnpacked(io streams, thread string, id proto.TraceID, r *proto.Result) error {
	_, _ = fmt.Fprint(io.err, strings.Map(printableLine, r.Stdout+r.Stderr))
	if r.Success {
		_, err := fmt.Fprintf(io.out, "%s has the files now\n", thread)
		return err
	}
	tellEnd(io, id, r)
	if r.ErrorCode == nil {
		_, _ = fmt.Fprintf(io.err, "bullpen: %s: tar ended with exit code %d; what it unpacked before that is there\n", id, r.ExitCode)
	}
	return nil
}

type threadGCCommand struct {
	remote  `embed:""`
	SafeAge *time.Duration `placeholder:"AGE" help:"Leave what is younger (24h; at least 2h): it may belong to an execution or upload that is not done."`
}

// Help tells what --help does not know by itself.
func (*threadGCCommand) Help() string {
	return "It is for all organisations. Servers do the same by themselves now and then."
}

// Run carries the command out.
func (c *threadGCCommand) Run(ctx context.Context, io streams) error {
	if c.SafeAge != nil && *c.SafeAge < proto.MinSafeAge {
		return usagef("--safe-age %s: give at least %s", *c.SafeAge, proto.MinSafeAge)
	}
	api, err := c.client()
	if err != nil {
		return err
	}
	done, err := api.CollectThreads(ctx, c.SafeAge)
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, done)
	}
	t := tabwriter.NewWriter(io.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "REMOVED\tBLOBS\tSIZE") // Flush gives the error
	for _, kind := range []struct {
		name string
		proto.Swept
	}{{"layers", done.Layers}, {"objects", done.Objects}, {"manifests", done.Manifests}, {"uploads", done.Uploads}} {
		_, _ = fmt.Fprintf(t, "%s\t%d\t%s\n", kind.name, kind.Blobs, mib(kind.Bytes))
	}
	return t.Flush()
}

type threadRebuildCommand struct {
	remote `embed:""`
}

// Help tells what --help does not know by itself.
func (*threadRebuildCommand) Help() string {
	return `For when JetStream's data is lost. It is for all organisations. Threads that are there stay as they are; uploaded files that no execution
had found are not found again. No thread may be removed meanwhile.`
}

// Run carries the command out.
func (c *threadRebuildCommand) Run(ctx context.Context, io streams) error {
	api, err := c.client()
	if err != nil {
		return err
	}
	done, err := api.RebuildThreads(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(io.out, done)
	}
	_, err = fmt.Fprintf(io.out, "%d threads are there again, %d were there, %d have no whole version\n", done.Made, done.Kept, done.Lost)
	return err
}
