package home

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto/layer"
)

// Fetch opens an object of the given size in bytes. Apply closes it and verifies its digest.
type Fetch func(ctx context.Context, digest layer.Digest, size int64) (io.ReadCloser, error)

// Apply changes dir from the previous version to the next one; for the first layer dir is empty.
// After an error or a crash dir is neither. Callers therefore apply layers to an unused directory,
// and rename it afterwards. Apply does not sync. It never modifies files in place, so that dir may
// share them with other directories by hard links. New files belong to the calling user, which is
// root.
func Apply(ctx context.Context, dir string, in layer.Reader, fetch Fetch) error {
	root, err := openRoot(dir)
	if err != nil {
		return fmt.Errorf("apply a layer: %w", err)
	}
	defer closeFD(root)
	t := &target{ctx: ctx, in: in, fetch: fetch, root: root, linkDir: -1, detached: -1, buf: make([]byte, 256<<10)}
	defer t.close()
	if err := layer.Apply(ctx, in, t); err != nil {
		return fmt.Errorf("apply a layer: %w", err)
	}
	return nil
}

// openDir is a directory that is being changed.
type openDir struct {
	fd    int
	entry *layer.Entry
	empty bool // initially, so that no name needs to be removed
}

// target is a [layer.Target] on disk. A file is identified by its path.
type target struct {
	ctx   context.Context // of the call of Apply
	in    layer.Reader
	fetch Fetch
	buf   []byte

	root         int
	stack        []openDir
	linkDir      int         // the directory of the last link's target; -1 if there is none
	linkPath     *layer.Path // of linkDir
	detached     int         // directory of the moves, named by index; -1 if there are none
	detachedName string
}

func (t *target) close() {
	closeFD(t.detached)
	closeFD(t.linkDir)
	for _, d := range t.stack {
		closeFD(d.fd)
	}
}

// Detach implements [layer.Target].
func (t *target) Detach(move int, path string) error {
	if t.detached < 0 {
		t.detachedName = ".bullpen-" + rand.Text()
		if err := unix.Mkdirat(t.root, t.detachedName, 0o700); err != nil {
			return fmt.Errorf("create a directory for moves: %w", err)
		}
		var err error
		if t.detached, err = openAt(t.root, t.detachedName, readDir, 0); err != nil {
			return err
		}
	}
	parent, name := split(path)
	if parent == "" && name == t.detachedName {
		return errors.New("this name is reserved")
	}
	dir, err := walkTo(t.root, parent)
	if err != nil {
		return err
	}
	defer closeFD(dir)
	// This fails for anything but a directory, and for mount points.
	fd, err := openAt(dir, name, readDir, 0)
	if err != nil {
		return err
	}
	closeFD(fd)
	return unix.Renameat(dir, name, t.detached, strconv.Itoa(move))
}

// current returns the current directory.
func (t *target) current() *openDir { return &t.stack[len(t.stack)-1] }

// Enter implements [layer.Target].
func (t *target) Enter(at *layer.Path, e *layer.Entry) error {
	if at == nil {
		return t.enterRoot(e)
	}
	dir := t.current().fd
	var err error
	switch e.Base {
	case layer.Fresh:
		err = unix.Mkdirat(dir, e.Name, 0o700)
	case layer.Moved:
		err = unix.Renameat(t.detached, strconv.Itoa(e.Move), dir, e.Name)
	case layer.Merge:
	}
	if err != nil {
		return fmt.Errorf("create a directory: %w", err)
	}
	fd, err := openAt(dir, e.Name, readDir, 0)
	if err != nil {
		return err
	}
	t.stack = append(t.stack, openDir{fd: fd, entry: e, empty: e.Base == layer.Fresh})
	if e.Base == layer.Moved {
		return checkHeight(fd, len(t.stack))
	}
	return nil
}

// enterRoot opens another descriptor of the root, which Leave closes.
func (t *target) enterRoot(e *layer.Entry) error {
	fd, err := openAt(t.root, ".", readDir, 0)
	if err != nil {
		return err
	}
	t.stack = append(t.stack, openDir{fd: fd, entry: e, empty: e.Base == layer.Fresh})
	if e.Base == layer.Merge {
		return nil
	}
	return removeContents(fd)
}

// Leave implements [layer.Target]. It sets the directory's metadata last, because changes inside
// modify it.
func (t *target) Leave() error {
	d := t.current()
	isRoot := len(t.stack) == 1
	if isRoot && t.detached >= 0 {
		if err := unix.Unlinkat(t.root, t.detachedName, unix.AT_REMOVEDIR); err != nil {
			return fmt.Errorf("remove the directory for moves: %w", err)
		}
	}
	// Even a fresh root is an existing directory, which may have attributes.
	if err := setXattrs(d.fd, d.entry.Xattrs, !d.empty || isRoot); err != nil {
		return err
	}
	if err := unix.Fchmod(d.fd, d.entry.Mode); err != nil {
		return fmt.Errorf("set the mode: %w", err)
	}
	if err := setModified(d.fd, ".", d.entry); err != nil {
		return err
	}
	closeFD(d.fd)
	t.stack = t.stack[:len(t.stack)-1]
	return nil
}

// Remove implements [layer.Target].
func (t *target) Remove(name string) error {
	if d := t.current(); !d.empty {
		return remove(d.fd, name)
	}
	return nil
}

// Create implements [layer.Target].
func (t *target) Create(at *layer.Path, e *layer.Entry) (*layer.Path, error) {
	dir := t.current().fd
	if e.Kind == layer.Symlink {
		if err := unix.Symlinkat(e.Target, dir, e.Name); err != nil {
			return nil, fmt.Errorf("create a symlink: %w", err)
		}
	} else if err := t.createFile(dir, e); err != nil {
		return nil, err
	}
	return at, setModified(dir, e.Name, e)
}

func setModified(dir int, name string, e *layer.Entry) error {
	t := unix.Timespec{Sec: e.Sec, Nsec: int64(e.Nsec)}
	if err := unix.UtimesNanoAt(dir, name, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("set the modification time: %w", err)
	}
	return nil
}

func (t *target) createFile(dir int, e *layer.Entry) error {
	fd, err := openAt(dir, e.Name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), e.Name)
	err = t.writeContent(f, e)
	if err == nil {
		err = setXattrs(fd, e.Xattrs, false)
	}
	if err == nil && e.Mode != 0o600 {
		err = unix.Fchmod(fd, e.Mode)
	}
	return errors.Join(err, f.Close())
}

func (t *target) writeContent(f *os.File, e *layer.Entry) error {
	var err error
	switch {
	case e.Size == 0:
		return nil
	case e.Inline():
		err = t.writeExtents(f, e, t.in.Content())
	default:
		err = t.writeObject(f, e)
	}
	if err != nil {
		return err
	}
	if n := len(e.Extents); n > 0 && e.Extents[n-1].Offset+e.Extents[n-1].Len == e.Size {
		return nil
	}
	return f.Truncate(e.Size)
}

func (t *target) writeObject(f *os.File, e *layer.Entry) error {
	size := e.Data()
	r, err := t.fetch(t.ctx, e.Object, size)
	if err != nil {
		return fmt.Errorf("fetch object %x: %w", e.Object, err)
	}
	sum := sha256.New()
	err = t.writeExtents(f, e, io.TeeReader(io.LimitReader(r, size), sum))
	if err := errors.Join(err, r.Close()); err != nil {
		return fmt.Errorf("object %x: %w", e.Object, err)
	}
	if layer.Digest(sum.Sum(nil)) != e.Object {
		return fmt.Errorf("object %x: the store returned other content for this digest", e.Object)
	}
	return nil
}

// writeExtents writes the ranges of f that are not holes.
func (t *target) writeExtents(f *os.File, e *layer.Entry, r io.Reader) error {
	for _, x := range e.Extents {
		for done := int64(0); done < x.Len; {
			if t.ctx.Err() != nil {
				return context.Cause(t.ctx)
			}
			b := t.buf[:min(int64(len(t.buf)), x.Len-done)]
			if _, err := io.ReadFull(r, b); err != nil {
				return fmt.Errorf("read the content: %w", err)
			}
			if _, err := f.WriteAt(b, x.Offset+done); err != nil {
				return fmt.Errorf("write: %w", err)
			}
			done += int64(len(b))
		}
	}
	return nil
}

// Link implements [layer.Target]. It keeps the directory of the last link's target open, since
// names of files in one directory are often adjacent.
func (t *target) Link(name string, to *layer.Path) error {
	if t.linkDir < 0 || t.linkPath != to.Parent() {
		fd, err := walkTo(t.root, to.Parent().String())
		if err != nil {
			return err
		}
		closeFD(t.linkDir)
		t.linkDir, t.linkPath = fd, to.Parent()
	}
	if err := unix.Linkat(t.linkDir, to.Name(), t.current().fd, name, 0); err != nil {
		return fmt.Errorf("link to %.300q: %w", to.Name(), err)
	}
	return nil
}
