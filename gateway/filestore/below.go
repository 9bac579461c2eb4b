package filestore

import (
	"context"
	"errors"
	"io"
	"path"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// belowPrefix are the files below a directory.
type belowPrefix struct {
	MountFiles
	prefix string
}

func (b *belowPrefix) join(name string) string { return path.Join(b.prefix, name) }

// stripPrefix removes the prefix from the paths of an error.
func (b *belowPrefix) stripPrefix(err error) error {
	if missing, ok := errors.AsType[*proto.NoFileError](err); ok {
		missing.Path = b.relative(missing.Path)
	}
	if at, ok := errors.AsType[*proto.PathError](err); ok {
		at.Path = b.relative(at.Path)
	}
	return err
}

func (b *belowPrefix) relative(name string) string {
	if name == b.prefix {
		return ""
	}
	return strings.TrimPrefix(name, b.prefix+"/")
}

// List implements [MountFiles].
func (b *belowPrefix) List(ctx context.Context, dir string, recursive bool, each func(proto.File) error) error {
	return b.MountFiles.List(ctx, b.join(dir), recursive, func(f proto.File) error {
		f.Path = b.relative(f.Path)
		return each(f)
	})
}

// Open implements [MountFiles].
func (b *belowPrefix) Open(ctx context.Context, name string) (*proto.FileContent, error) {
	content, err := b.MountFiles.Open(ctx, b.join(name))
	return content, b.stripPrefix(err)
}

// CheckPut implements [MountFiles].
func (b *belowPrefix) CheckPut(ctx context.Context, name string, size int64) error {
	return b.stripPrefix(b.MountFiles.CheckPut(ctx, b.join(name), size))
}

// Put implements [MountFiles].
func (b *belowPrefix) Put(ctx context.Context, name string, size int64, body io.Reader) error {
	return b.stripPrefix(b.MountFiles.Put(ctx, b.join(name), size, body))
}

// Delete implements [MountFiles].
func (b *belowPrefix) Delete(ctx context.Context, name string, recursive bool) (version int64, err error) {
	version, err = b.MountFiles.Delete(ctx, b.join(name), recursive)
	return version, b.stripPrefix(err)
}

// Rename implements [MountFiles].
func (b *belowPrefix) Rename(ctx context.Context, from, to string) (version int64, err error) {
	version, err = b.MountFiles.Rename(ctx, b.join(from), b.join(to))
	return version, b.stripPrefix(err)
}
