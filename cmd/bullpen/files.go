package main

import (
	"archive/tar"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

type filesCommands struct {
	Ls filesLsCommand `cmd:"" help:"List files of a thread or storage connection."`
	Cp filesCpCommand `cmd:"" help:"Copy files to or from a thread or storage connection."`
	Rm filesRmCommand `cmd:"" help:"Delete a file or directory of a thread or storage connection."`
	Mv filesMvCommand `cmd:"" help:"Rename a file or directory of a thread or storage connection."`
}

const addressHelp = `Files of a thread are thread:ID/PATH, with PATH relative to its home directory. Files of a
storage connection of any kind that the API key has are volume:SLUG/PATH; programs see them at /data/SLUG/PATH.`

// address is a path of a thread or storage connection.
type address struct {
	api.FileRequest
	path string
}

// String returns the form in which the address is given.
func (a address) String() string {
	text := string(a.Source) + ":" + a.ID
	if a.path != "" {
		text += "/" + a.path
	}
	return text
}

// parseAddress parses thread:ID/PATH or volume:SLUG/PATH. ok is false for any other text.
func parseAddress(text string) (a address, ok bool, err error) {
	source, rest, _ := strings.Cut(text, ":")
	a.Source = proto.FileSource(source)
	if a.Source != proto.SourceThread && a.Source != proto.SourceVolume {
		return a, false, nil
	}
	a.ID, a.path, _ = strings.Cut(rest, "/")
	if a.Source == proto.SourceThread {
		err = proto.CheckThreadID("the id in "+text, a.ID)
	} else {
		err = proto.CheckSlug("the slug in "+text, a.ID)
	}
	if err != nil {
		err = usageError{err}
	}
	return a, true, err
}

// remotePath returns the address in an argument that must be one.
func remotePath(text string) (address, error) {
	a, ok, err := parseAddress(text)
	if err == nil && !ok {
		err = usagef("%q is not thread:ID/PATH or volume:SLUG/PATH", text)
	}
	return a, err
}

type filesLsCommand struct {
	remote    `embed:""`
	Path      string `arg:"" help:"thread:ID/PATH or volume:SLUG/PATH."`
	Recursive bool   `short:"r" help:"List subdirectories too."`
}

func (*filesLsCommand) Help() string { return addressHelp }

func (c *filesLsCommand) Run(ctx context.Context, s streams) error {
	at, err := remotePath(c.Path)
	if err != nil {
		return err
	}
	return request(s, &c.remote, func(cl *client.Client) (*api.Files, error) {
		return cl.Files(ctx, at.FileRequest, at.path, c.Recursive)
	}, func(p *page, list *api.Files) {
		files := list.Files
		slices.SortFunc(files, func(a, b api.File) int { return strings.Compare(a.Path, b.Path) })
		p.row("MODIFIED", "SIZE", "PATH")
		for _, f := range files {
			switch {
			case f.IsDirectory && f.Modified.Unix() == 0: // a directory of a bucket has no time
				p.row("-", "-", f.Path+"/")
			case f.IsDirectory:
				p.row(f.Modified, "-", f.Path+"/")
			case f.Type != proto.FileRegular:
				p.row(f.Modified, f.Type, f.Path)
			default:
				p.row(f.Modified, f.Size, f.Path)
			}
		}
	})
}

type filesRmCommand struct {
	remote    `embed:""`
	Path      string `arg:"" help:"thread:ID/PATH or volume:SLUG/PATH."`
	Recursive bool   `short:"r" help:"Delete a directory with its content."`
}

const newVersionHelp = "For a thread or volume, the change is a new version; earlier versions keep their files. One " +
	"that is in use cannot be changed. Buckets and\n" +
	"directories have no versions."

func (*filesRmCommand) Help() string { return addressHelp + "\n\n" + newVersionHelp }

func (c *filesRmCommand) Run(ctx context.Context, s streams) error {
	at, err := remotePath(c.Path)
	if err != nil {
		return err
	}
	return request(s, &c.remote, func(cl *client.Client) (*api.ChangedFile, error) {
		return cl.DeleteFile(ctx, at.FileRequest, at.path, c.Recursive)
	}, func(p *page, f *api.ChangedFile) { printChange(p, "deleted", at.FileRequest, f) })
}

// printChange prints a change of files, with the version if there is one.
func printChange(p *page, what string, at api.FileRequest, f *api.ChangedFile) {
	version := ""
	if f.Version > 0 {
		version = fmt.Sprintf(", version %d", f.Version)
	}
	p.textf("%s %s%s\n", what, address{at, f.Path}, version)
}

type filesMvCommand struct {
	remote `embed:""`
	Path   string `arg:"" help:"thread:ID/PATH or volume:SLUG/PATH."`
	To     string `arg:"" help:"The new path in the same thread or connection, which must not exist. Missing directories are created."`
}

func (*filesMvCommand) Help() string {
	return addressHelp + "\n\n" + newVersionHelp +
		" A directory of a bucket cannot be renamed.\n\nExample:\n\n  bullpen files mv thread:notebook-1/data/in.csv " +
		"old/in.csv"
}

func (c *filesMvCommand) Run(ctx context.Context, s streams) error {
	at, err := remotePath(c.Path)
	if err != nil {
		return err
	}
	to, ok, err := parseAddress(c.To)
	switch {
	case err != nil:
		return err
	case !ok:
		to = address{at.FileRequest, c.To}
	case to.FileRequest != at.FileRequest:
		return usagef("%s is in another place than %s: copy it with bullpen files cp", to, at)
	}
	return request(s, &c.remote, func(cl *client.Client) (*api.ChangedFile, error) {
		return cl.RenameFile(ctx, at.FileRequest, at.path, to.path)
	}, func(p *page, f *api.ChangedFile) { printChange(p, "renamed to", at.FileRequest, f) })
}

type filesCpCommand struct {
	remote    `embed:""`
	From      string `arg:"" help:"A local path, thread:ID/PATH or volume:SLUG/PATH."`
	To        string `arg:"" help:"The same; one of the two is local. - writes a file to standard output. With a trailing slash, or if it is a local directory, the file keeps its own name there."`
	Recursive bool   `short:"r" help:"Copy the content of a directory into a directory."`
}

func (*filesCpCommand) Help() string {
	return addressHelp + `

Missing directories are created. An uploaded file replaces a file; in a thread or volume also a directory. The next
execution of the thread sees it, a
running one does not. Failed parts of files of 64 MiB and more are resent, and broken downloads resumed.

With -r, a local directory becomes one new version of a thread, with modes, times and symlinks, all or nothing; the
thread must not be in use. All
other copies are regular files, one after another: symlinks and the like are skipped, and the command fails in the
end. bullpen thread export
has all of a thread.

Write ./ in front of a local path that begins with thread: or volume:.

Examples:

  bullpen files cp input.csv thread:notebook-1/data/input.csv
  bullpen files cp -r ./project thread:notebook-1/project
  bullpen files cp volume:models/weights.bin .
  bullpen files cp -r volume:results/2026 ./results`
}

// copied is the answer of a copy.
type copied struct {
	Files   int   `json:"files"`
	Bytes   int64 `json:"bytes"`
	Version int64 `json:"version,omitempty"` // the new version of a thread, if a directory was uploaded
	Skipped int   `json:"skipped,omitempty"` // entries that are no regular files
}

func (c *filesCpCommand) Run(ctx context.Context, s streams) error {
	from, fromRemote, err := parseAddress(c.From)
	if err != nil {
		return err
	}
	to, toRemote, err := parseAddress(c.To)
	if err != nil {
		return err
	}
	if fromRemote == toRemote {
		return usagef("one of %q and %q must be a local path, and the other thread:ID/PATH or volume:SLUG/PATH", c.From, c.To)
	}
	cl, err := c.client(s)
	if err != nil {
		return err
	}
	copier := &copier{cl: cl, streams: s}
	switch {
	case fromRemote && c.To == "-" && !c.Recursive:
		return cl.Download(ctx, from.FileRequest, from.path, s.out)
	case fromRemote && c.Recursive:
		err = copier.downloadAll(ctx, from, c.To)
	case fromRemote:
		err = copier.download(ctx, from, c.To)
	case c.Recursive:
		err = copier.uploadAll(ctx, c.From, to)
	default:
		err = copier.upload(ctx, c.From, to)
	}
	if err != nil {
		return err
	}
	err = show(s, c.JSON, copier.copied, func(p *page, done copied) {
		version := ""
		if done.Version > 0 {
			version = fmt.Sprintf(", version %d", done.Version)
		}
		p.textf("copied %s to %s, %s%s\n", c.From, c.To, countOf(done), version)
	})
	if err == nil && copier.Skipped > 0 {
		err = fmt.Errorf("%d entries are no regular files, and were not copied", copier.Skipped)
	}
	return err
}

func countOf(done copied) string {
	switch {
	case done.Version > 0:
		return "all files"
	case done.Files == 1:
		return fmt.Sprintf("1 file, %d bytes", done.Bytes)
	default:
		return fmt.Sprintf("%d files, %d bytes", done.Files, done.Bytes)
	}
}

// copier copies files and counts them.
type copier struct {
	streams
	copied
	cl *client.Client
}

func (c *copier) count(size int64) {
	c.Files++
	c.Bytes += size
}

// skip reports an entry that is no regular file.
func (c *copier) skip(name string) {
	c.Skipped++
	c.errorf("%s is no regular file, or was removed: skipped", strings.Map(printableLine, name))
}

// upload uploads a local file.
func (c *copier) upload(ctx context.Context, local string, to address) error {
	if to.path == "" || strings.HasSuffix(to.path, "/") {
		to.path += filepath.Base(local)
	}
	size, err := uploadFile(ctx, c.cl, to.FileRequest, local, to.path, c.progress(to))
	if err == nil {
		c.count(size)
	}
	return err
}

// progress returns a function that shows the upload progress of a large file on a terminal.
func (c *copier) progress(to address) func(size int64) func(stored int64) {
	return func(size int64) func(stored int64) {
		var shown atomic.Int64
		return func(stored int64) {
			const step = 10 // percent
			now := stored * 100 / size / step * step
			if last := shown.Load(); now > last && shown.CompareAndSwap(last, now) {
				c.progressf("%s: %d%%", to, now)
			}
		}
	}
}

// uploadFile uploads a local file and returns its size in bytes. progress, if not nil, returns a
// function that is called as parts are stored.
func uploadFile(
	ctx context.Context, cl *client.Client, to api.FileRequest, local, path string,
	progress func(size int64) func(stored int64),
) (int64, error) {
	f, err := os.Open(local)
	if err != nil {
		return 0, fmt.Errorf("upload: %w", err)
	}
	defer f.Close() //nolint:errcheck // only read
	info, err := f.Stat()
	if err != nil {
		return 0, fmt.Errorf("upload: %w", err)
	}
	if !info.Mode().IsRegular() {
		return 0, fmt.Errorf("upload: %s is not a regular file", local)
	}
	var stored func(int64)
	if progress != nil {
		stored = progress(info.Size())
	}
	if err := cl.Upload(ctx, to, path, info.Size(), f, stored); err != nil {
		return 0, fmt.Errorf("upload %s: %w", local, err)
	}
	return info.Size(), nil
}

// uploadAll uploads the content of a local directory.
func (c *copier) uploadAll(ctx context.Context, local string, to address) error {
	if info, err := os.Stat(local); err != nil || !info.IsDir() {
		return cmp.Or(err, fmt.Errorf("upload: %s is not a directory", local))
	}
	if to.Source == proto.SourceThread {
		changed, err := uploadDirectory(ctx, c.cl, to.ID, local, to.path)
		if err == nil {
			c.Version = changed.Version
		}
		return err
	}
	root, err := os.OpenRoot(local)
	if err != nil {
		return fmt.Errorf("upload: %w", err)
	}
	defer root.Close() //nolint:errcheck // only read
	return fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return fmt.Errorf("upload: %w", err)
		case d.IsDir():
			return nil
		case !d.Type().IsRegular():
			c.skip(filepath.Join(local, name))
			return nil
		default:
			return c.upload(ctx, filepath.Join(local, name), address{to.FileRequest, path.Join(to.path, filepath.ToSlash(name))})
		}
	})
}

// uploadDirectory uploads the content of a local directory to a thread while reading it.
func uploadDirectory(ctx context.Context, cl *client.Client, thread, local, path string) (*api.ChangedFile, error) {
	r, w := io.Pipe()
	read := make(chan error, 1)
	go func() {
		out := tar.NewWriter(w)
		err := out.AddFS(os.DirFS(local))
		if err == nil {
			err = out.Close()
		}
		read <- err
		w.CloseWithError(err)
	}()
	changed, err := cl.UnpackThread(ctx, thread, path, r)
	_ = r.CloseWithError(errNotSent) // ends the reading, which a refused upload does not need
	if errRead := <-read; errRead != nil && !errors.Is(errRead, errNotSent) {
		return nil, fmt.Errorf("upload %s: %w", local, errRead)
	}
	if err != nil {
		return nil, fmt.Errorf("upload %s: %w", local, err)
	}
	return changed, nil
}

var errNotSent = errors.New("the upload has ended")

// download downloads a file, which appears once it is complete.
func (c *copier) download(ctx context.Context, from address, local string) error {
	if info, err := os.Stat(local); err == nil && info.IsDir() || strings.HasSuffix(local, "/") {
		name := path.Base(from.path)
		if !proto.ValidSegment(name) {
			return usagef("%s does not name a file", from)
		}
		local = filepath.Join(local, name)
	}
	output := outputFlag{Output: local}
	return output.write(c.streams, func(w io.Writer) error {
		counted := &countingWriter{w: w}
		err := c.cl.Download(ctx, from.FileRequest, from.path, counted)
		if err == nil {
			c.count(counted.n)
		}
		return err
	})
}

type countingWriter struct {
	w io.Writer
	n int64
}

// Write implements [io.Writer].
func (c *countingWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// downloadAll downloads what is below a directory. Whoever named the files cannot lead it out of the
// local one.
func (c *copier) downloadAll(ctx context.Context, from address, local string) error {
	list, err := c.cl.Files(ctx, from.FileRequest, from.path, true)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(local, 0o755); err != nil { //nolint:gosec // as mkdir makes them; the umask decides
		return fmt.Errorf("download: %w", err)
	}
	root, err := os.OpenRoot(local)
	if err != nil {
		return fmt.Errorf("download: %w", err)
	}
	defer root.Close() //nolint:errcheck // its files are closed
	base := relativePath(list.Files, from.path)
	for _, f := range list.Files {
		name, ok := strings.CutPrefix(f.Path, base)
		if !ok || !proto.ValidObjectName(name) || !filepath.IsLocal(filepath.FromSlash(name)) {
			return fmt.Errorf("download: the server lists %q, which is not below %s", proto.Shorten(f.Path), from)
		}
		switch f.Type {
		case proto.FileDirectory:
			err = root.MkdirAll(name, 0o755)
		case proto.FileRegular:
			err = c.downloadInto(ctx, root, name, &f, address{from.FileRequest, f.Path})
		default:
			c.skip(address{from.FileRequest, f.Path}.String())
		}
		if err != nil {
			return fmt.Errorf("download: %w", err)
		}
	}
	return nil
}

// relativePath returns the prefix of the names of files below a directory.
func relativePath(files []api.File, dir string) string {
	clean := strings.Trim(path.Clean("/"+dir), "/")
	for clean != "" && len(files) > 0 && !strings.HasPrefix(files[0].Path, clean+"/") {
		_, clean, _ = strings.Cut(clean, "/") // a path may begin with the home, or with /data/SLUG
	}
	if clean == "" {
		return ""
	}
	return clean + "/"
}

// downloadInto downloads a file to a path of a local directory.
func (c *copier) downloadInto(
	ctx context.Context, root *os.Root, name string, file *api.File, from address,
) (err error) {
	if dir := path.Dir(name); dir != "." {
		if err := root.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	part := path.Join(path.Dir(name), ".bullpen-"+path.Base(name)[:min(len(path.Base(name)), 200)])
	mode := os.FileMode(0o644)
	if file.Executable {
		mode = 0o755
	}
	f, err := root.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	counted := &countingWriter{w: f}
	err = c.cl.Download(ctx, from.FileRequest, from.path, counted)
	err = errors.Join(err, f.Close())
	if err == nil {
		if err = root.Rename(part, name); err == nil {
			c.count(counted.n)
			return nil
		}
	}
	if missing, ok := errors.AsType[*client.Error](err); ok && missing.Status == http.StatusNotFound {
		c.skip(from.String())
		return root.Remove(part)
	}
	return errors.Join(err, root.Remove(part))
}
