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
	// writing holds files that are not whole. No key begins with a dot.
	writing = ".writing"
	// abandoned is how long after the last write to it a file there has no writer any more.
	abandoned = time.Hour
	// maxMkdir bounds how often directories are made again that a Delete removed as empty.
	maxMkdir = 100
)

// Directory is a [Backend] in a directory, each object a file under its key. Several processes may use the same one; a file system that
// they share over a network must keep names unique and renames whole, as NFS does. Nothing outside it can be reached through a key or a
// link in it.
type Directory struct {
	root *os.Root
}

// OpenDirectory opens a directory for objects, which it makes if need be. It and what is in it are for this process's user alone. What a
// process that died was writing is removed when nobody has written to it for an hour.
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

// Close frees the directory.
func (d *Directory) Close() error { return d.root.Close() }

func (d *Directory) sweep() error {
	if err := d.root.Mkdir(writing, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	entries, err := d.read(writing)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err == nil && time.Since(info.ModTime()) > abandoned {
			err = d.root.Remove(path.Join(writing, e.Name()))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Put is [Backend]'s.
func (d *Directory) Put(ctx context.Context, key string, size int64, content io.Reader, replace bool) error {
	if err := checkKey("put", key); err != nil {
		return err
	}
	temp := path.Join(writing, rand.Text())
	f, err := d.root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return failed("put", key, err)
	}
	defer func() { _ = d.root.Remove(temp) }() // moved away by then, if all went well
	// So that an error of the content comes back as it is, and one of the file gets a kind.
	in := &source{ctx: ctx, from: content}
	n, err := io.Copy(f, in)
	switch {
	case in.err != nil:
		err = in.err
	case err == nil && n != size:
		err = sizeError(key, n, size)
	case err == nil:
		err = failed("put", key, f.Sync())
	default:
		err = failed("put", key, err)
	}
	if closing := f.Close(); err == nil {
		err = failed("put", key, closing)
	}
	if err == nil {
		err = d.place(temp, key, replace)
	}
	return err
}

// place gives a file that is whole its name.
func (d *Directory) place(temp, key string, replace bool) error {
	var err error
	for range maxMkdir {
		if err := d.root.MkdirAll(path.Dir(key), 0o700); err != nil {
			return failed("put", key, err)
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
		info, gone := d.root.Lstat(key)
		if gone != nil || info.Mode().IsRegular() {
			return &Error{Op: "put", Key: key, Kind: proto.ErrExists}
		}
		return &Error{Op: "put", Key: key, Kind: ErrUnavailable, Err: err, Do: "use a key that is not the beginning of others, and put no links there"}
	}
	// The name is safe when its directory is, and that one when the directory above it is.
	for dir := path.Dir(key); err == nil; dir = path.Dir(dir) {
		if err = d.sync(dir); dir == "." {
			break
		}
	}
	return failed("put", key, err)
}

func (d *Directory) sync(dir string) error {
	f, err := d.root.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Get is [Backend]'s.
func (d *Directory) Get(_ context.Context, key string, span Span) (io.ReadCloser, error) {
	if err := checkKey("get", key); err != nil {
		return nil, err
	}
	f, err := d.root.Open(key)
	if err != nil {
		return nil, failed("get", key, err)
	}
	info, err := f.Stat()
	switch {
	case err != nil:
		err = failed("get", key, err)
	case !info.Mode().IsRegular():
		err = &Error{Op: "get", Key: key, Kind: proto.ErrNotFound}
	case info.Size() != span.Size:
		err = sizeCorrupt(key, info.Size(), span.Size)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return &fileSpan{Reader: io.NewSectionReader(f, span.Offset, span.Length), Closer: f, key: key}, nil
}

// fileSpan gives errors of a file a kind.
type fileSpan struct {
	io.Reader
	io.Closer
	key string
}

func (s *fileSpan) Read(p []byte) (int, error) {
	n, err := s.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = failed("get", s.key, err)
	}
	return n, err
}

// Stat is [Backend]'s.
func (d *Directory) Stat(_ context.Context, key string) (Entry, error) {
	if err := checkKey("stat", key); err != nil {
		return Entry{}, err
	}
	info, err := d.root.Stat(key)
	if err == nil && !info.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		return Entry{}, failed("stat", key, err)
	}
	return Entry{Key: key, Size: info.Size(), Modified: info.ModTime()}, nil
}

// Delete is [Backend]'s. It also removes the directories that become empty.
func (d *Directory) Delete(_ context.Context, key string) error {
	if err := checkKey("delete", key); err != nil {
		return err
	}
	info, err := d.root.Lstat(key)
	if err == nil && info.IsDir() {
		return nil // the beginning of other keys, and no object
	}
	if err == nil {
		err = d.root.Remove(key)
	}
	if err := failed("delete", key, err); err != nil {
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

// List is [Backend]'s.
func (d *Directory) List(ctx context.Context, prefix, after string) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		d.list(ctx, ".", prefix, after, yield)
	}
}

// list gives what is below a directory, and reports whether to go on.
func (d *Directory) list(ctx context.Context, dir, prefix, after string, yield func(Entry, error) bool) bool {
	if ctx.Err() != nil {
		yield(Entry{}, context.Cause(ctx))
		return false
	}
	entries, err := d.read(dir)
	if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
		return true
	}
	if err != nil {
		yield(Entry{}, failed("list", prefix, err))
		return false
	}
	// In the order of keys, in which a directory's name goes on with a slash.
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return cmp.Compare(sortName(a), sortName(b)) })
	for _, e := range entries {
		key := path.Join(dir, e.Name())
		switch {
		case !validComponent(e.Name()): // no object; neither is what is below
		case e.IsDir():
			below := key + "/"
			overlaps := strings.HasPrefix(below, prefix) || strings.HasPrefix(prefix, below)
			passed := below < after && !strings.HasPrefix(after, below)
			if overlaps && !passed && !d.list(ctx, key, prefix, after, yield) {
				return false
			}
		case e.Type().IsRegular() && strings.HasPrefix(key, prefix) && key > after:
			info, err := e.Info()
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				yield(Entry{}, failed("list", prefix, err))
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

// failed gives an error of the file system a kind. None of them goes away by trying again at once.
func failed(op, key string, err error) error {
	if err == nil {
		return nil
	}
	kind := ErrUnavailable
	if op != "put" && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)) {
		kind, err = proto.ErrNotFound, nil
	}
	return &Error{Op: op, Key: key, Kind: kind, Err: err}
}

// source reads content until ctx ends, and keeps its error.
type source struct {
	ctx  context.Context // of the request that it reads for
	from io.Reader
	err  error
}

func (s *source) Read(p []byte) (int, error) {
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
