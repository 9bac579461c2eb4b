package filestore

import (
	"context"
	"io"

	"github.com/bullpen-run/bullpen/proto"
)

// homeFiles are the files of a thread.
type homeFiles struct {
	Homes
	org, thread string
	limit       func(context.Context) (proto.Space, error) // of all its files
}

// List implements [MountFiles].
func (t *homeFiles) List(ctx context.Context, dir string, recursive bool, each func(proto.File) error) error {
	return t.Homes.List(ctx, t.org, t.thread, dir, recursive, each)
}

// Open implements [MountFiles].
func (t *homeFiles) Open(ctx context.Context, name string) (*proto.FileContent, error) {
	return t.Homes.Open(ctx, t.org, t.thread, name)
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
	return t.CheckSpace(ctx, t.org, t.thread, name, size, most)
}

// Put implements [MountFiles].
func (t *homeFiles) Put(ctx context.Context, name string, size int64, body io.Reader) error {
	most, err := t.limit(ctx)
	if err != nil {
		return err
	}
	return t.Stage(ctx, t.org, t.thread, name, size, most, body)
}

// Delete implements [MountFiles].
func (t *homeFiles) Delete(ctx context.Context, name string, recursive bool) (version int64, err error) {
	return t.Homes.Delete(ctx, t.org, t.thread, name, recursive)
}

// Rename implements [MountFiles].
func (t *homeFiles) Rename(ctx context.Context, from, to string) (version int64, err error) {
	most, err := t.limit(ctx)
	if err != nil {
		return 0, err
	}
	return t.Homes.Rename(ctx, t.org, t.thread, from, to, most)
}

// Close implements [MountFiles].
func (*homeFiles) Close() error { return nil }

// volumeFiles are the files of the thread of a volume.
type volumeFiles struct{ homeFiles }

// Put implements [MountFiles]. Programs that only read the volume see its versions, and no staged
// files.
func (v *volumeFiles) Put(ctx context.Context, name string, size int64, body io.Reader) error {
	most, err := v.limit(ctx)
	if err != nil {
		return err
	}
	return v.Homes.Put(ctx, v.org, v.thread, name, size, most, body)
}
