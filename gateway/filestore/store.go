package filestore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// Store is the set of files that a request addresses: the home of a thread, or an API key's part of
// a storage connection. Paths are cleaned and relative to the home or the connection.
type Store struct {
	Org string
	ID  string // of the thread or the storage connection
	// Root is the programs' path of the files; paths in requests may start with it.
	Root string
	// Blobs reports that files are stored in the blob store and count against the organisation's
	// quota.
	Blobs bool
	// Held reports that the caller already holds a transfer, which covers the use of the files.
	Held bool

	opener *Opener
	files  MountFiles
	bucket BucketFiles // files, for a connection of kind s3; otherwise nil
	source proto.FileSource
	// prefix is the visible path in the connection, empty for all of it and for threads. Outside
	// it, only the parent directories of prefix can be seen.
	prefix   string
	readOnly bool
	done     func()
}

// Close releases what the files use.
func (f *Store) Close() {
	if f.files != nil {
		_ = f.files.Close() // nothing is written any more
	}
	f.done()
}

// At makes List and Open read a version, 0 for the newest. Only threads and volumes have versions.
func (f *Store) At(version int64) error {
	home, ok := f.files.(*homeFiles)
	if !ok && version > 0 {
		return proto.FieldErrorf("version", "must not be given: the storage connection %s has no versions", f.ID)
	}
	if ok {
		home.version = version
	}
	return nil
}

// Begin begins a transfer, unless one is already held. end ends it.
func (f *Store) Begin(ctx context.Context) (end func(), err error) {
	if f.Held {
		return func() {}, nil
	}
	return f.opener.Transfers.Begin(ctx, f.Org)
}

// BeginUpload begins a transfer, unless one is already held, and reserves memory for an upload. end
// ends it.
func (f *Store) BeginUpload(ctx context.Context, size int64) (end func(), err error) {
	o := f.opener
	if err := o.CheckDisk(); err != nil {
		return nil, err
	}
	done, err := f.Begin(ctx)
	if err != nil {
		return nil, err
	}
	memory := web.UploadMemory(size)
	if !o.ReserveFor(f.Org, memory) {
		done()
		return nil, web.ErrOverloaded
	}
	return func() { o.Release(f.Org, memory); done() }, nil
}

// below returns the path of a name below the prefix. ok is false for what is outside.
func (f *Store) below(name string) (sub string, ok bool) {
	if name == f.prefix || f.prefix == "" {
		return strings.TrimPrefix(name, f.prefix), true
	}
	return strings.CutPrefix(name, f.prefix+"/")
}

// List calls each for the entries of a directory, or for a single file.
func (f *Store) List(ctx context.Context, name string, recursive bool, each func(proto.File) error) error {
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
	if !isNoFile(err) || sub == "" {
		return f.Wrap("list files of", ignoreNoFile(err))
	}
	content, err := f.files.Open(ctx, sub)
	if err != nil {
		return f.Wrap("list files of", ignoreNoFile(err))
	}
	file := content.File
	file.Path = name
	return each(file)
}

// isNoFile reports whether there is nothing at a path, in files that exist.
func isNoFile(err error) bool {
	_, noVersion := errors.AsType[*proto.NoVersionError](err)
	return errors.Is(err, proto.ErrNotFound) && !noVersion
}

func ignoreNoFile(err error) error {
	if isNoFile(err) {
		return nil
	}
	return err
}

// Compare returns what differs at a path and below it between two versions, and whether there may
// be more. from 0 is before the first version, to 0 is the newest with the staged files.
func (f *Store) Compare(
	ctx context.Context, from, to int64, name string,
) (changes []proto.FileChange, truncated bool, err error) {
	home, ok := f.files.(*homeFiles)
	if !ok {
		return nil, false, proto.FieldErrorf("id", "must be a thread or a volume: the storage connection %s has no versions",
			f.ID)
	}
	sub, ok := f.below(name)
	if !ok && !proto.IsBelow(f.prefix, name) {
		return nil, false, api.Errorf(api.CodeNotFound, "%s", &proto.NoFileError{Path: name})
	}
	changes, truncated, err = home.compare(ctx, from, to, sub)
	for i := range changes {
		changes[i].Path = path.Join(f.prefix, changes[i].Path)
	}
	return changes, truncated, f.Wrap("compare versions of", err)
}

// Open returns the content of a file.
func (f *Store) Open(ctx context.Context, name string) (*proto.FileContent, error) {
	err := proto.ErrNotFound
	var content *proto.FileContent
	if sub, ok := f.below(name); ok && sub != "" {
		content, err = f.files.Open(ctx, sub)
	}
	if isNoFile(err) {
		what := "thread, or no such thread"
		if f.source != proto.SourceThread {
			what = "storage connection"
		}
		return nil, api.Errorf(api.CodeNotFound,
			"there is no file at this path of the %s; links are not followed; see /v1/files/list", what)
	}
	if err != nil {
		return nil, f.Wrap("open a file of", err)
	}
	return content, nil
}

// WritablePath returns a path to change relative to the prefix, or an error if the API key may not
// change it.
func (f *Store) WritablePath(name string) (sub string, err error) {
	if f.readOnly {
		return "", api.Errorf(api.CodeForbidden, "the API key may only read the storage connection %s", f.ID)
	}
	sub, ok := f.below(name)
	if !ok || sub == "" {
		return "", api.Errorf(api.CodeForbidden, "%q is not in the part of the storage connection %s that the API key has",
			proto.Shorten(name), f.ID)
	}
	return sub, nil
}

// CheckPut returns the error with which Put would refuse a file of that size now.
func (f *Store) CheckPut(ctx context.Context, name string, size int64) error {
	sub, err := f.WritablePath(name)
	if err != nil {
		return err
	}
	return f.Wrap("check an upload to", f.files.CheckPut(ctx, sub, size))
}

// Put stores a file.
func (f *Store) Put(ctx context.Context, name string, size int64, body io.Reader) error {
	sub, err := f.WritablePath(name)
	if err != nil {
		return err
	}
	return f.Wrap("store a file of", f.files.Put(ctx, sub, size, body))
}

// Remove deletes what is at a path.
func (f *Store) Remove(ctx context.Context, name string, recursive bool) (version int64, err error) {
	sub, err := f.WritablePath(name)
	if err != nil {
		return 0, err
	}
	version, err = f.files.Delete(ctx, sub, recursive)
	return version, f.Wrap("delete a file of", err)
}

// Rename renames what is at a path.
func (f *Store) Rename(ctx context.Context, from, to string) (version int64, err error) {
	subFrom, err := f.WritablePath(from)
	if err != nil {
		return 0, err
	}
	subTo, err := f.WritablePath(to)
	if err != nil {
		return 0, err
	}
	version, err = f.files.Rename(ctx, subFrom, subTo)
	return version, f.Wrap("rename a file of", err)
}

// Wrap returns the error for the client. It words storage errors for the people who can fix them.
func (f *Store) Wrap(operation string, err error) error {
	if err == nil {
		return nil
	}
	if missing, ok := errors.AsType[*proto.NoVersionError](err); ok {
		return api.Errorf(api.CodeNotFound, "the %s %s has no version %d", f.source, proto.Shorten(f.ID), missing.Number)
	}
	if missing, ok := errors.AsType[*proto.NoFileError](err); ok {
		missing.Path = path.Join(f.prefix, missing.Path)
		return api.Errorf(api.CodeNotFound, "%s", missing)
	}
	if at, ok := errors.AsType[*proto.PathError](err); ok {
		at.Path = path.Join(f.prefix, at.Path)
	}
	if f.source == proto.SourceThread {
		return web.ThreadError(operation, f.ID, err)
	}
	if busy, ok := errors.AsType[*proto.BusyError](err); ok {
		return api.Errorf(api.CodeConflict,
			"the volume %s is in use by execution %s; send the request again when that has ended", f.ID, busy.Holder)
	}
	conflict := func(format string, args ...any) error {
		return fmt.Errorf("%w: %w",
			api.Errorf(api.CodeConflict, "the storage connection %s %s", f.ID, fmt.Sprintf(format, args...)), err)
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
			f.ID, none.Why)
	case isTest:
		return conflict("cannot be used: it could not %s: %s", test.Step, test.Why)
	case known || field || errors.As(err, &public):
		return fmt.Errorf("%s storage connection %s: %w", operation, f.ID, err)
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
			api.Unavailable(2, "the storage connection "+f.ID+" does not answer as it should; send the request again"), err)
	default:
		return fmt.Errorf("%s storage connection %s: %w", operation, f.ID, err)
	}
}
