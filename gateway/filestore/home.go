package filestore

import (
	"context"
	"errors"
	"io"
	"path"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// homeFiles are the files of a thread below a directory of its home.
type homeFiles struct {
	Homes
	org, thread string
	version     int64                                      // for List and Open; 0 for the newest with the staged files
	dir         string                                     // empty for the home
	limit       func(context.Context) (proto.Space, error) // of all files of the thread
	// put is Homes.Stage, or Homes.Put for a volume: programs with read-only access to a volume see
	// its versions, but no staged files.
	put func(ctx context.Context, org, thread, path string, size int64, most proto.Space, body io.Reader) error
}

func (t *homeFiles) join(name string) string { return path.Join(t.dir, name) }

func (t *homeFiles) relative(name string) string {
	if name == t.dir {
		return ""
	}
	return strings.TrimPrefix(name, t.dir+"/")
}

// wrap makes the paths in an error relative to the directory.
func (t *homeFiles) wrap(err error) error {
	if missing, ok := errors.AsType[*proto.NoFileError](err); ok {
		missing.Path = t.relative(missing.Path)
	}
	if at, ok := errors.AsType[*proto.PathError](err); ok {
		at.Path = t.relative(at.Path)
	}
	return err
}

// List implements [MountFiles].
func (t *homeFiles) List(ctx context.Context, dir string, recursive bool, each func(proto.File) error) error {
	return t.Homes.List(ctx, t.org, t.thread, t.version, t.join(dir), recursive, func(f proto.File) error {
		f.Path = t.relative(f.Path)
		return each(f)
	})
}

// Open implements [MountFiles].
func (t *homeFiles) Open(ctx context.Context, name string) (*proto.FileContent, error) {
	content, err := t.Homes.Open(ctx, t.org, t.thread, t.version, t.join(name))
	return content, t.wrap(err)
}

// compare compares versions at a path and below it.
func (t *homeFiles) compare(ctx context.Context, from, to int64, name string) ([]proto.FileChange, bool, error) {
	changes, truncated, err := t.Compare(ctx, t.org, t.thread, from, to, t.join(name))
	for i := range changes {
		changes[i].Path = t.relative(changes[i].Path)
	}
	return changes, truncated, t.wrap(err)
}

// CheckPut implements [MountFiles].
func (t *homeFiles) CheckPut(ctx context.Context, name string, size int64) error {
	most, err := t.limit(ctx)
	if err != nil {
		return err
	}
	if size > most.Bytes {
		return proto.FieldErrorf("content_length", "is %d bytes, and there is room for %d", size, most.Bytes)
	}
	return t.wrap(t.CheckSpace(ctx, t.org, t.thread, t.join(name), size, most))
}

// Put implements [MountFiles].
func (t *homeFiles) Put(ctx context.Context, name string, size int64, body io.Reader) error {
	most, err := t.limit(ctx)
	if err != nil {
		return err
	}
	return t.wrap(t.put(ctx, t.org, t.thread, t.join(name), size, most, body))
}

// Delete implements [MountFiles].
func (t *homeFiles) Delete(ctx context.Context, name string, recursive bool) (version int64, err error) {
	version, err = t.Homes.Delete(ctx, t.org, t.thread, t.join(name), recursive)
	return version, t.wrap(err)
}

// Rename implements [MountFiles].
func (t *homeFiles) Rename(ctx context.Context, from, to string) (version int64, err error) {
	most, err := t.limit(ctx)
	if err != nil {
		return 0, err
	}
	version, err = t.Homes.Rename(ctx, t.org, t.thread, t.join(from), t.join(to), most)
	return version, t.wrap(err)
}

// Close implements [MountFiles].
func (*homeFiles) Close() error { return nil }
