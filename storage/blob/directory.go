package blob

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// tempDir holds files that are being written. No key begins with a dot.
	tempDir = ".writing"
	// tempMaxAge is how long after its last write a file in tempDir counts as abandoned.
	tempMaxAge = time.Hour
	// mkdirAttempts limits how often directories are created again after a concurrent Delete or
	// List removed them as empty.
	mkdirAttempts = 100
)

// Directory is a [Backend] in a directory, with one file per object. Several processes may share
// it, also over a network file system if that keeps names unique and renames atomically, as NFS
// does. Keys and links cannot lead outside the directory.
type Directory struct {
	root *os.Root
}

// OpenDirectory opens a directory for objects and creates it if necessary, accessible to this
// process's user only. It removes temporary files that have not been written to for an hour: their process is dead.
func OpenDirectory(dir string) (*Directory, error) {
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		err = os.Chmod(dir, 0o700) //nolint:gosec // a directory
	}
	var root *os.Root
	if err == nil {
		root, err = os.OpenRoot(dir)
	}
	if err != nil {
		return nil, fmt.Errorf("open the blob store in a directory: %w", err)
	}
	d := &Directory{root: root}
	if err := d.sweep(); err != nil {
		_ = root.Close()
		return nil, fmt.Errorf("open the blob store in %s: %w", dir, err)
	}
	return d, nil
}

// Close closes the directory.
func (d *Directory) Close() error { return d.root.Close() }

func (d *Directory) sweep() error {
	if err := d.root.Mkdir(tempDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	entries, err := d.read(tempDir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err == nil && time.Since(info.ModTime()) > tempMaxAge {
			err = d.root.Remove(path.Join(tempDir, e.Name()))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Put implements [Backend].
func (d *Directory) Put(ctx context.Context, key string, size int64, content io.Reader, replace bool) error {
	if err := checkKey("put", key); err != nil {
		return err
	}
	temp := path.Join(tempDir, rand.Text())
	f, err := d.root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return wrapFSError("put", key, err)
	}
	defer func() { _ = d.root.Remove(temp) }() // renamed by then if all went well
	// Errors of content are returned as they are, errors of the file as [*Error].
	in := &contentReader{ctx: ctx, from: content}
	n, err := io.Copy(f, in)
	switch {
	case in.err != nil:
		err = in.err
	case err == nil && n != size:
		err = fmt.Errorf("put blob %q: the content has %d bytes, want %d", key, n, size)
	case err == nil:
		err = wrapFSError("put", key, f.Sync())
	default:
		err = wrapFSError("put", key, err)
	}
	if closing := f.Close(); err == nil {
		err = wrapFSError("put", key, closing)
	}
	if err == nil {
		err = d.publish(temp, key, replace)
	}
	return err
}

// publish renames a complete file to its key.
func (d *Directory) publish(temp, key string, replace bool) error {
	var err error
	for range mkdirAttempts {
		if err = d.root.MkdirAll(path.Dir(key), 0o700); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return wrapFSError("put", key, err)
		}
		if replace {
			err = d.root.Rename(temp, key)
		} else {
			err = d.root.Link(temp, key)
		}
		if !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if errors.Is(err, fs.ErrExist) {
		info, statErr := d.root.Lstat(key)
		if statErr != nil || info.Mode().IsRegular() {
			return &Error{Op: "put", Key: key, Kind: proto.ErrExists}
		}
		return &Error{
			Op: "put", Key: key, Kind: ErrUnavailable, Err: err,
			Remedy: "use a key that is no prefix of others, and remove links from the directory",
		}
	}
	// Directories are synced upwards, because a new name is durable only when its directory is.
	for dir := path.Dir(key); err == nil; dir = path.Dir(dir) {
		if err = d.sync(dir); dir == "." {
			break
		}
	}
	return wrapFSError("put", key, err)
}

func (d *Directory) sync(dir string) error {
	f, err := d.root.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Get implements [Backend].
func (d *Directory) Get(_ context.Context, key string, span Span) (io.ReadCloser, error) {
	if err := checkKey("get", key); err != nil {
		return nil, err
	}
	f, err := d.root.Open(key)
	if err != nil {
		return nil, wrapFSError("get", key, err)
	}
	info, err := f.Stat()
	switch {
	case err != nil:
		err = wrapFSError("get", key, err)
	case !info.Mode().IsRegular():
		err = &Error{Op: "get", Key: key, Kind: proto.ErrNotFound}
	case info.Size() != span.Size:
		err = &Error{
			Op: "get", Key: key, Kind: proto.ErrCorrupt,
			Err: fmt.Errorf("it has %d bytes, want %d", info.Size(), span.Size),
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return &fileSpan{Reader: io.NewSectionReader(f, span.Offset, span.Length), Closer: f, key: key}, nil
}

// fileSpan converts errors of a file to [*Error].
type fileSpan struct {
	io.Reader
	io.Closer
	key string
}

func (s *fileSpan) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = wrapFSError("get", s.key, err)
	}
	return n, err
}

// Stat implements [Backend].
func (d *Directory) Stat(_ context.Context, key string) (Entry, error) {
	if err := checkKey("stat", key); err != nil {
		return Entry{}, err
	}
	info, err := d.root.Stat(key)
	if err == nil && !info.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		return Entry{}, wrapFSError("stat", key, err)
	}
	return Entry{Key: key, Size: info.Size(), Modified: info.ModTime()}, nil
}

// Delete implements [Backend]. It also removes the directories that become empty.
func (d *Directory) Delete(_ context.Context, key string) error {
	if err := checkKey("delete", key); err != nil {
		return err
	}
	info, err := d.root.Lstat(key)
	if err == nil && info.IsDir() {
		return nil // not an object, but a prefix of others
	}
	if err == nil {
		err = d.root.Remove(key)
	}
	if err := wrapFSError("delete", key, err); err != nil {
		if errors.Is(err, proto.ErrNotFound) {
			return nil
		}
		return err
	}
	for dir := path.Dir(key); dir != "." && d.root.Remove(dir) == nil; {
		dir = path.Dir(dir)
	}
	return nil
}

// List implements [Backend]. It also removes empty directories below the prefix, left by a process that
// was killed during a Put or Delete.
func (d *Directory) List(ctx context.Context, prefix, after string) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		d.list(ctx, ".", prefix, after, yield)
	}
}

// list yields what is below a directory. It reports whether to continue.
func (d *Directory) list(ctx context.Context, dir, prefix, after string, yield func(Entry, error) bool) bool {
	if ctx.Err() != nil {
		yield(Entry{}, context.Cause(ctx))
		return false
	}
	entries, err := d.read(dir)
	if errors.Is(err, fs.ErrNotExist) { // removed concurrently
		return true
	}
	if err != nil {
		yield(Entry{}, wrapFSError("list", prefix, err))
		return false
	}
	// Sort by key, in which a directory's name is followed by a slash.
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return cmp.Compare(sortName(a), sortName(b)) })
	for _, e := range entries {
		key := path.Join(dir, e.Name())
		switch {
		case !validComponent(e.Name()): // no object is here or below
		case e.IsDir():
			below := key + "/"
			overlaps := strings.HasPrefix(below, prefix) || strings.HasPrefix(prefix, below)
			passed := below < after && !strings.HasPrefix(after, below)
			if overlaps && !passed && !d.list(ctx, key, prefix, after, yield) {
				return false
			}
			if strings.HasPrefix(below, prefix) {
				_ = d.root.Remove(key) // it fails unless the directory is empty
			}
		case e.Type().IsRegular() && strings.HasPrefix(key, prefix) && key > after:
			info, err := e.Info()
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				yield(Entry{}, wrapFSError("list", prefix, err))
				return false
			}
			if !yield(Entry{Key: key, Size: info.Size(), Modified: info.ModTime()}, nil) {
				return false
			}
		}
	}
	return true
}

func sortName(e fs.DirEntry) string {
	if e.IsDir() {
		return e.Name() + "/"
	}
	return e.Name()
}

func (d *Directory) read(dir string) ([]fs.DirEntry, error) {
	f, err := d.root.Open(dir)
	if err != nil {
		return nil, err
	}
	entries, err := f.ReadDir(-1)
	return entries, errors.Join(err, f.Close())
}

// wrapFSError converts an error of the file system to [*Error]. None of them is retryable.
func wrapFSError(op, key string, err error) error {
	if err == nil {
		return nil
	}
	kind := ErrUnavailable
	if op != "put" && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)) {
		kind, err = proto.ErrNotFound, nil
	}
	return &Error{Op: op, Key: key, Kind: kind, Err: err}
}

// contentReader reads content until ctx is done. It records the error of the content.
type contentReader struct {
	ctx  context.Context // of the request being served
	from io.Reader
	err  error
}

func (s *contentReader) Read(p []byte) (int, error) {
	if s.ctx.Err() != nil {
		s.err = context.Cause(s.ctx)
		return 0, s.err
	}
	n, err := s.from.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}
