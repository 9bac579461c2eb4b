package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// mountMemory is the memory of a request about the files of a mount in bytes, beyond content: that
// of a page of a list.
const mountMemory = 4 << 20

// fileStore is the set of files that a request addresses: the home of a thread, or the part of a
// storage connection that an API key has. Paths are cleaned and relative to the home or the
// connection.
type fileStore struct {
	files  MountFiles
	bucket BucketFiles // files, for a connection of kind s3; otherwise nil
	org    string
	source proto.FileSource
	id     string
	// root is the path of the files for programs, with which paths in requests may begin.
	root string
	// prefix is the path of files in the connection, empty for all of it and for threads. Of what is
	// outside, only the directories that lead there can be seen.
	prefix   string
	readOnly bool
	// blobs reports that files are stored in the blob store, which the quota of the organisation
	// limits.
	blobs bool
	held  bool // a transfer is held until done
	done  func()
}

// partsInBlobs reports that the parts of uploads are stored in the blob store.
func (f *fileStore) partsInBlobs() bool { return f.bucket == nil }

// openFiles returns the files that a request addresses. close must be called when it is not used
// any more. What the key does not have does not exist for it.
func (s *Server) openFiles(
	ctx context.Context, key *proto.Key, source proto.FileSource, id string,
) (*fileStore, error) {
	if source == proto.SourceThread {
		limit := func(ctx context.Context) (proto.Space, error) { return s.homeLimit(ctx, key) }
		return &fileStore{
			files: &homeFiles{s.Files, key.Org, id, limit}, org: key.Org, source: source, id: id, root: s.Home, blobs: true,
			done: func() {},
		}, nil
	}
	at := slices.IndexFunc(key.Mounts, func(m proto.KeyMount) bool { return m.Connection == id })
	if at < 0 {
		return nil, errNoVolume
	}
	c, err := s.Connections.Connection(ctx, key.Org, id)
	if errors.Is(err, proto.ErrNotFound) {
		return nil, errNoVolume
	}
	if err != nil {
		return nil, fmt.Errorf("look up storage connection %s: %w", id, err)
	}
	m, err := c.Mount(key.Mounts[at], "")
	if err != nil {
		return nil, api.Errorf(api.CodeConflict, "the storage connection %s cannot be used: %v", id, err)
	}
	f := &fileStore{
		org: key.Org, source: source, id: id, root: path.Join(proto.MountsDir, id), prefix: m.At,
		readOnly: m.ReadOnly,
	}
	if err := s.openMount(ctx, f, m); err != nil {
		return nil, err
	}
	return f, nil
}

var errNoVolume = api.Errorf(api.CodeNotFound, "this API key has no storage connection of that name")

// openMount opens the files of a mount.
func (s *Server) openMount(ctx context.Context, f *fileStore, m proto.Mount) (err error) {
	if m.Kind == proto.MountVolume {
		f.blobs = true
		limit := func(context.Context) (proto.Space, error) { return proto.VolumeSpace(m.Bytes), nil }
		// The home of a volume is the whole connection.
		files := MountFiles(&volumeFiles{homeFiles{s.Files, f.org, proto.VolumeThread(m.Slug), limit}})
		if m.Prefix != "" {
			files = &belowPrefix{files, m.Prefix}
		}
		f.files, f.done = files, func() {}
		return nil
	}
	end, err := s.Transfers.Begin(ctx, f.org) // another server, or a file system, can make a request last
	if err != nil {
		return err
	}
	if !s.ReserveFor(f.org, mountMemory) {
		end()
		return web.ErrOverloaded
	}
	f.held, f.done = true, func() { s.Release(f.org, mountMemory); end() }
	switch m.Kind {
	case proto.MountS3:
		var keys proto.S3Credentials
		if keys, err = s.Admission.BucketCredentials(ctx, f.org, m.S3.Credential); err == nil {
			f.bucket, err = s.Storage.Bucket(m, keys)
			f.files = f.bucket
		}
		if wrong, ok := errors.AsType[*proto.FieldError](err); ok {
			err = api.Errorf(api.CodeConflict,
				"the storage connection %s cannot be used, because its %s; its administrator can change it", f.id, wrong.Message)
		}
	case proto.MountDirectory:
		f.files, err = s.Storage.Directory(m)
	default:
		err = web.NotImplemented(fmt.Sprintf("files of storage connections of kind %s are", m.Kind),
			"run a program that has the connection")
	}
	if err != nil {
		f.done()
		return f.wrap("open", err)
	}
	return nil
}

// close releases what the files use.
func (f *fileStore) close() {
	if f.files != nil {
		_ = f.files.Close() // nothing is written any more
	}
	f.done()
}

// begin begins a transfer, unless one is held already. end ends it.
func (s *Server) begin(ctx context.Context, f *fileStore) (end func(), err error) {
	if f.held {
		return func() {}, nil
	}
	return s.Transfers.Begin(ctx, f.org)
}

// String names the files in errors.
func (f *fileStore) String() string {
	if f.source == proto.SourceThread {
		return "thread " + f.id
	}
	return "storage connection " + f.id
}

// below returns the path of a name below the prefix. ok is false for what is outside.
func (f *fileStore) below(name string) (sub string, ok bool) {
	if name == f.prefix || f.prefix == "" {
		return strings.TrimPrefix(name, f.prefix), true
	}
	return strings.CutPrefix(name, f.prefix+"/")
}

// list calls each for the entries of a directory, or for a single file.
func (f *fileStore) list(ctx context.Context, name string, recursive bool, each func(proto.File) error) error {
	sub, ok := f.below(name)
	for !ok && proto.IsBelow(f.prefix, name) { // a directory on the way to the prefix
		next, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(f.prefix, name), "/"), "/")
		name = path.Join(name, next)
		if err := each(proto.File{Path: name, IsDirectory: true, Modified: time.Unix(0, 0).UTC()}); err != nil || !recursive {
			return err
		}
		sub, ok = f.below(name)
	}
	if !ok {
		return nil
	}
	err := f.files.List(ctx, sub, recursive, func(file proto.File) error {
		file.Path = path.Join(f.prefix, file.Path)
		return each(file)
	})
	if !errors.Is(err, proto.ErrNotFound) || sub == "" {
		return f.wrap("list files of", ignoreNotFound(err))
	}
	content, err := f.files.Open(ctx, sub)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	if err != nil {
		return f.wrap("list files of", err)
	}
	file := content.File
	file.Path = name
	return each(file)
}

func ignoreNotFound(err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	return err
}

// open returns the content of a file.
func (f *fileStore) open(ctx context.Context, name string) (*proto.FileContent, error) {
	err := proto.ErrNotFound
	var content *proto.FileContent
	if sub, ok := f.below(name); ok && sub != "" {
		content, err = f.files.Open(ctx, sub)
	}
	if errors.Is(err, proto.ErrNotFound) {
		what := "thread, or no such thread"
		if f.source != proto.SourceThread {
			what = "storage connection"
		}
		return nil, api.Errorf(api.CodeNotFound,
			"there is no file at this path of the %s; links are not followed; see /v1/files/list", what)
	}
	if err != nil {
		return nil, f.wrap("open a file of", err)
	}
	return content, nil
}

// writablePath returns the path below the prefix of what a request changes, or an error if the API
// key may not change it.
func (f *fileStore) writablePath(name string) (sub string, err error) {
	if f.readOnly {
		return "", api.Errorf(api.CodeForbidden, "the API key may only read the storage connection %s", f.id)
	}
	sub, ok := f.below(name)
	if !ok || sub == "" {
		return "", api.Errorf(api.CodeForbidden, "%q is not in the part of the storage connection %s that the API key has",
			proto.Shorten(name), f.id)
	}
	return sub, nil
}

// checkPut returns the error with which put would refuse a file of a size now.
func (f *fileStore) checkPut(ctx context.Context, name string, size int64) error {
	sub, err := f.writablePath(name)
	if err != nil {
		return err
	}
	return f.wrap("check an upload to", f.files.CheckPut(ctx, sub, size))
}

// put stores a file.
func (f *fileStore) put(ctx context.Context, name string, size int64, body io.Reader) error {
	sub, err := f.writablePath(name)
	if err != nil {
		return err
	}
	return f.wrap("store a file of", f.files.Put(ctx, sub, size, body))
}

// remove deletes what is at a path.
func (f *fileStore) remove(ctx context.Context, name string, recursive bool) (version int64, err error) {
	sub, err := f.writablePath(name)
	if err != nil {
		return 0, err
	}
	version, err = f.files.Delete(ctx, sub, recursive)
	return version, f.wrap("delete a file of", err)
}

// rename renames what is at a path.
func (f *fileStore) rename(ctx context.Context, from, to string) (version int64, err error) {
	subFrom, err := f.writablePath(from)
	if err != nil {
		return 0, err
	}
	subTo, err := f.writablePath(to)
	if err != nil {
		return 0, err
	}
	version, err = f.files.Rename(ctx, subFrom, subTo)
	return version, f.wrap("rename a file of", err)
}

// wrap returns the error for the client. Errors of storage become messages for those who can do
// something about them.
func (f *fileStore) wrap(operation string, err error) error {
	if err == nil {
		return nil
	}
	if missing, ok := errors.AsType[*proto.NoFileError](err); ok {
		missing.Path = path.Join(f.prefix, missing.Path)
		return api.Errorf(api.CodeNotFound, "%s", missing)
	}
	if at, ok := errors.AsType[*proto.PathError](err); ok {
		at.Path = path.Join(f.prefix, at.Path)
	}
	if f.source == proto.SourceThread {
		return web.ThreadError(operation, f.id, err)
	}
	if busy, ok := errors.AsType[*proto.BusyError](err); ok {
		return api.Errorf(api.CodeConflict,
			"the volume %s is in use by execution %s; send the request again when that has ended", f.id, busy.Holder)
	}
	conflict := func(format string, args ...any) error {
		return fmt.Errorf("%w: %w",
			api.Errorf(api.CodeConflict, "the storage connection %s %s", f.id, fmt.Sprintf(format, args...)), err)
	}
	test, isTest := errors.AsType[*proto.StorageTestError](err)
	_, known := errors.AsType[*api.Error](err)
	_, field := errors.AsType[*proto.FieldError](err)
	var public interface{ Conflict() }
	none, isNone := errors.AsType[*proto.NoDirectoryError](err)
	switch {
	case isNone:
		return api.Errorf(api.CodeNotImplemented,
			"the files of the storage connection %s cannot be used here: %s; run a program that has the connection",
			f.id, none.Why)
	case isTest:
		return conflict("cannot be used: it could not %s: %s", test.Step, test.Why)
	case known || field || errors.As(err, &public):
		return fmt.Errorf("%s storage connection %s: %w", operation, f.id, err)
	case errors.Is(err, syscall.ENAMETOOLONG):
		return proto.FieldErrorf("path", "is too long: with the connection's prefix it must have less than %d bytes",
			proto.MaxObjectKey)
	case errors.Is(err, fs.ErrPermission):
		return conflict("does not permit this: its server refuses the credentials, or the file belongs to somebody else")
	case errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT):
		return conflict("is full")
	case errors.Is(err, syscall.EFBIG):
		return conflict("does not take a file of this size")
	case errors.Is(err, syscall.ESTALE):
		return &proto.FileChangedError{}
	case errors.Is(err, syscall.EROFS):
		return conflict("can only be read")
	case errors.Is(err, proto.ErrNotFound):
		return api.Errorf(api.CodeNotFound, "there is nothing at this path; see /v1/files/list")
	case errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, syscall.EIO):
		return fmt.Errorf("%w: %w",
			api.Unavailable(2, "the storage connection "+f.id+" does not answer as it should; send the request again"), err)
	default:
		return fmt.Errorf("%s storage connection %s: %w", operation, f.id, err)
	}
}

// homeFiles are the files of a thread.
type homeFiles struct {
	Files
	org, thread string
	limit       func(context.Context) (proto.Space, error) // of all its files
}

// List implements [MountFiles].
func (t *homeFiles) List(ctx context.Context, dir string, recursive bool, each func(proto.File) error) error {
	return t.Files.List(ctx, t.org, t.thread, dir, recursive, each)
}

// Open implements [MountFiles].
func (t *homeFiles) Open(ctx context.Context, name string) (*proto.FileContent, error) {
	return t.Files.Open(ctx, t.org, t.thread, name)
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
	return t.Files.Delete(ctx, t.org, t.thread, name, recursive)
}

// Rename implements [MountFiles].
func (t *homeFiles) Rename(ctx context.Context, from, to string) (version int64, err error) {
	most, err := t.limit(ctx)
	if err != nil {
		return 0, err
	}
	return t.Files.Rename(ctx, t.org, t.thread, from, to, most)
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
	return v.Files.Put(ctx, v.org, v.thread, name, size, most, body)
}

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
