package filestore

import (
	"context"
	"io"

	"github.com/bullpen-run/bullpen/proto"
)

// MountFiles are the files of a mount or of a thread. Paths are cleaned and relative to the mount's
// prefix or the home, whose path is empty. Links are not followed. Errors about a path are
// [*proto.NoFileError], [*proto.PathError] and [*proto.FieldError]. Others of a mount wrap a
// syscall.Errno, fs.ErrPermission or os.ErrDeadlineExceeded.
type MountFiles interface {
	// List calls each for the entries of a directory, or for everything below it if recursive is
	// true. It stops if each returns an error. It returns [proto.ErrNotFound] if the path does not
	// name a directory.
	List(ctx context.Context, dir string, recursive bool, each func(proto.File) error) error
	// Open returns the content of a file.
	Open(ctx context.Context, path string) (*proto.FileContent, error)
	// CheckPut returns the error with which Put would refuse a file of that size now.
	CheckPut(ctx context.Context, path string, size int64) error
	// Put stores size bytes of body as a file, which appears when it is complete.
	Put(ctx context.Context, path string, size int64, body io.Reader) error
	// Delete deletes the file or directory at a path, a non-empty directory only if recursive is
	// true. version is the new version of a thread, otherwise 0.
	Delete(ctx context.Context, path string, recursive bool) (version int64, err error)
	// Rename renames what is at a path; nothing may be at the new one.
	Rename(ctx context.Context, from, to string) (version int64, err error)
	// Close releases what the files use.
	Close() error
}

// BucketFiles are the files of a bucket, which stores multipart uploads itself.
type BucketFiles interface {
	MountFiles
	PartUploads
}
