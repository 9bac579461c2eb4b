package s3

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// listPage is how many entries of a directory are listed at once. With the longest keys, a page
	// has 700 KB.
	listPage = 200
	// requestTimeout limits each request, plus one second for each MiB that it moves.
	requestTimeout = 20 * time.Second
	// deleteConcurrency is how many objects are deleted at once.
	deleteConcurrency = 8
	// maxDepth is how many directories below each other are listed and deleted. For each, the names of
	// a page are in memory.
	maxDepth = 128
)

// Files presents the objects of a bucket as files, by the rules of mounts: a directory is the
// common part of keys up to a slash, or an empty object whose key ends with one; it hides an object
// with the same name; keys that cannot be paths are hidden. Paths are relative to the bucket's
// prefix, whose path is empty. Errors are those of a [Bucket], [*proto.NoFileError],
// [*proto.PathError] and [*proto.FileChangedError].
type Files struct{ Bucket *Bucket }

// limited returns a context for a request that moves n bytes.
func limited(ctx context.Context, n int64) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, requestTimeout+time.Duration(n>>20)*time.Second)
}

// listing is the visible part of a directory's page: without invalid names and objects hidden by
// directories.
type listing struct {
	files []proto.File
	dirs  []string // their paths
}

// pages calls each for the pages of a directory. It reports whether the directory has any objects.
func (f *Files) pages(ctx context.Context, dir string, each func(listing) error) (exists bool, err error) {
	for after := ""; ; {
		page, next, nonEmpty, err := f.page(ctx, dir, after)
		exists = exists || nonEmpty
		if err == nil {
			err = each(page)
		}
		if err != nil || next == "" || next == after {
			return exists, err
		}
		after = next
	}
}

func (f *Files) page(ctx context.Context, dir, after string) (page listing, next string, nonEmpty bool, err error) {
	ctx, cancel := limited(ctx, 0)
	defer cancel()
	objects, dirs, next, err := f.Bucket.List(ctx, dir, after, listPage)
	if err != nil {
		return listing{}, "", false, err
	}
	shown := map[string]bool{}
	for _, name := range dirs {
		if proto.ValidSegment(name) && !shown[name] {
			shown[name] = true
			page.dirs = append(page.dirs, path.Join(dir, name))
		}
	}
	for _, o := range objects {
		if proto.ValidSegment(o.Name) && !shown[o.Name] {
			shown[o.Name] = true
			page.files = append(page.files, proto.File{Path: path.Join(dir, o.Name), Size: o.Size, Modified: o.Modified})
		}
	}
	return page, next, len(objects)+len(dirs) > 0, nil
}

// List calls each for the entries of a directory, or for everything below it if recursive is true,
// in no particular order. It stops if each returns an error. Directories have the time 0. It
// returns [proto.ErrNotFound] if the path does not name a directory.
func (f *Files) List(ctx context.Context, dir string, recursive bool, each func(proto.File) error) error {
	exists, err := f.list(ctx, dir, recursive, 0, each)
	if err == nil && !exists && dir != "" {
		err = &proto.NoFileError{Path: dir, Directory: true}
	}
	return err
}

func (f *Files) list(
	ctx context.Context, dir string, recursive bool, depth int, each func(proto.File) error,
) (exists bool, err error) {
	if depth == maxDepth {
		return true, tooDeep(dir)
	}
	return f.pages(ctx, dir, func(page listing) error {
		for _, file := range page.files {
			if err := each(file); err != nil {
				return err
			}
		}
		page.files = nil // it may be long, and the directories below have as many
		for _, sub := range page.dirs {
			if err := each(proto.File{Path: sub, IsDirectory: true, Modified: time.Unix(0, 0).UTC()}); err != nil {
				return err
			}
			if !recursive {
				continue
			}
			if _, err := f.list(ctx, sub, true, depth+1, each); err != nil {
				return err
			}
		}
		return nil
	})
}

func tooDeep(dir string) error {
	return &proto.PathError{Path: dir, Message: fmt.Sprintf("is below %d other directories; ask for a part", maxDepth)}
}

// isDir reports whether a path names a directory.
func (f *Files) isDir(ctx context.Context, dir string) (bool, error) {
	ctx, cancel := limited(ctx, 0)
	defer cancel()
	objects, dirs, _, err := f.Bucket.List(ctx, dir, "", 1)
	return len(objects)+len(dirs) > 0, err
}

// stat describes a file.
func (f *Files) stat(ctx context.Context, name string) (proto.StoredObject, error) {
	ctx, cancel := limited(ctx, 0)
	defer cancel()
	o, err := f.Bucket.Stat(ctx, name)
	if errors.Is(err, fs.ErrNotExist) {
		err = &proto.NoFileError{Path: name}
	}
	return o, err
}

// find describes what is at a path.
func (f *Files) find(ctx context.Context, name string) (o proto.StoredObject, isDir bool, err error) {
	if isDir, err = f.isDir(ctx, name); err != nil || isDir {
		return o, isDir, err
	}
	o, err = f.stat(ctx, name)
	return o, false, err
}

// Open returns the content of a file.
func (f *Files) Open(ctx context.Context, name string) (*proto.FileContent, error) {
	o, isDir, err := f.find(ctx, name)
	if err == nil && isDir {
		err = &proto.NoFileError{Path: name}
	}
	if err != nil {
		return nil, err
	}
	// The server chose the tag, which may be empty or have any characters.
	sum := sha256.Sum256(fmt.Appendln(nil, o.Tag, o.Size, o.Modified.UnixNano()))
	return &proto.FileContent{
		File: proto.File{Path: name, Size: o.Size, Modified: o.Modified}, Tag: hex.EncodeToString(sum[:16]),
		Read: func(ctx context.Context, offset, length int64) (io.ReadCloser, error) {
			if length == 0 {
				return io.NopCloser(strings.NewReader("")), nil
			}
			body, err := f.Bucket.Open(ctx, o, offset, length)
			if errors.Is(err, syscall.ESTALE) || errors.Is(err, fs.ErrNotExist) {
				err = &proto.FileChangedError{}
			}
			return body, err
		},
	}, nil
}

// CheckPut returns the error with which Put would refuse a file now.
func (f *Files) CheckPut(ctx context.Context, name string, _ int64) error {
	if err := checkNew(name); err != nil {
		return err
	}
	isDir, err := f.isDir(ctx, name)
	if err == nil && isDir {
		err = &proto.PathError{Path: name, Message: "is a directory; delete it first, or choose another name"}
	}
	// Where a directory has objects, all directories above it have.
	for dir := path.Dir(name); err == nil && dir != "."; dir = path.Dir(dir) {
		if isDir, err = f.isDir(ctx, dir); err != nil || isDir {
			return err
		}
		if _, err = f.stat(ctx, dir); err == nil {
			return &proto.PathError{Path: dir, Message: "is a file, not a directory; delete it first, or choose another name"}
		}
		if errors.Is(err, proto.ErrNotFound) {
			err = nil
		}
	}
	return err
}

// checkNew returns an error if an object cannot get a name, by the rules for programs: keys are
// Unicode, and stores differ in the control characters that they keep.
func checkNew(name string) error {
	if proto.ValidObjectName(name) && (!utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl)) {
		return &proto.PathError{
			Path:    name,
			Message: "is not UTF-8 or has control characters, which buckets do not keep; choose another name",
		}
	}
	return nil
}

// Put stores size bytes of body as a file. It appears, or replaces another file, when it is
// complete.
func (f *Files) Put(ctx context.Context, name string, size int64, body io.Reader) error {
	if err := f.CheckPut(ctx, name, size); err != nil {
		return err
	}
	return f.Bucket.PutStream(ctx, name, size, body)
}

// Delete deletes a file, or a directory: one that is not empty only if recursive is true. version
// is always 0.
func (f *Files) Delete(ctx context.Context, name string, recursive bool) (version int64, err error) {
	_, isDir, err := f.find(ctx, name)
	if err != nil {
		return 0, err
	}
	if !isDir {
		return 0, f.delete(ctx, name)
	}
	return 0, f.deleteDir(ctx, name, recursive, 0)
}

// checkEmpty returns an error if a directory has more than its own object. emptied reports that its
// files were deleted.
func (f *Files) checkEmpty(ctx context.Context, dir string, emptied bool) error {
	ctx, cancel := limited(ctx, 0)
	defer cancel()
	objects, dirs, _, err := f.Bucket.List(ctx, dir, "", 2)
	if err != nil {
		return err
	}
	if len(dirs) == 0 && !slices.ContainsFunc(objects, func(o proto.StoredObject) bool { return o.Name != "" }) {
		return nil
	}
	message := "is not empty; delete it with recursive: true"
	if emptied {
		message = "is not empty: it has objects that are new, or whose keys are no paths"
	}
	return &proto.PathError{Path: dir, Message: message}
}

func (f *Files) delete(ctx context.Context, name string) error {
	ctx, cancel := limited(ctx, 0)
	defer cancel()
	return f.Bucket.Delete(ctx, name)
}

// deleteDir deletes a directory, page by page. The objects of a page are gone before the
// directories in it are deleted, so that all levels together have deleteConcurrency requests at a
// time.
func (f *Files) deleteDir(ctx context.Context, dir string, recursive bool, depth int) error {
	if depth == maxDepth {
		return tooDeep(dir)
	}
	if recursive {
		_, err := f.pages(ctx, dir, func(page listing) error {
			deleting, deleteCtx := errgroup.WithContext(ctx)
			deleting.SetLimit(deleteConcurrency)
			for _, file := range page.files {
				deleting.Go(func() error { return f.delete(deleteCtx, file.Path) })
			}
			if err := deleting.Wait(); err != nil {
				return err
			}
			page.files = nil // as in list
			for _, sub := range page.dirs {
				if err := f.deleteDir(ctx, sub, true, depth+1); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	if err := f.checkEmpty(ctx, dir, recursive); err != nil {
		return err
	}
	return f.delete(ctx, dir+"/")
}

// Rename renames a file by a copy: between copy and deletion, both exist. version is always 0.
func (f *Files) Rename(ctx context.Context, from, to string) (version int64, err error) {
	if err := checkNew(to); err != nil {
		return 0, err
	}
	o, isDir, err := f.find(ctx, from)
	if err != nil {
		return 0, err
	}
	if isDir {
		return 0, &proto.PathError{
			Path: from, Message: "is a directory of a bucket, which no request renames; rename or copy its files",
		}
	}
	switch _, _, err := f.find(ctx, to); {
	case err == nil:
		return 0, &proto.PathError{Path: to, Message: "exists; delete it first, or choose another name"}
	case !errors.Is(err, proto.ErrNotFound):
		return 0, err
	}
	if err := f.CheckPut(ctx, to, o.Size); err != nil {
		return 0, err
	}
	copying, cancel := limited(ctx, o.Size)
	defer cancel()
	if err := f.Bucket.CopyObject(copying, o, to); err != nil {
		return 0, err
	}
	return 0, f.delete(ctx, from)
}

// Close closes idle connections.
func (f *Files) Close() error { return f.Bucket.Close() }
