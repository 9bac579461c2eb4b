package home

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/storage/thread/layer"
)

// Limits are what a caller allows a layer to be; see layer.Limits.
type Limits = layer.Limits

// Digest is a SHA-256.
type Digest = layer.Digest

// ErrLimit is in errors about a layer that is larger than its Limits.
var ErrLimit = layer.ErrLimit

// Fetch opens an object, size bytes. Apply closes it, and checks the digest.
type Fetch func(ctx context.Context, digest Digest, size int64) (io.ReadCloser, error)

// Apply changes dir, which is the last version or, for the first layer, empty,
// into the next one. When it fails, or the process ends before, dir is neither:
// so it must be a directory that is not yet in use, and be renamed afterwards.
// Nothing is synced. Files are never changed in place, so dir may share them with
// another directory by hard links. New files are the caller's, which is root.
//
// The index of the layer must be read from its beginning to its end, and so must
// its pack, which may be nil where it is empty. What is wrong with the pack Apply
// finds out; whether the index is the right one, the caller.
func Apply(ctx context.Context, dir string, index, pack io.Reader, limits Limits, fetch Fetch) error {
	root, err := openRoot(dir)
	if err != nil {
		return fmt.Errorf("apply a layer: %w", err)
	}
	defer closeFD(root)
	in, err := layer.NewReader(index, pack, limits)
	if err != nil {
		return fmt.Errorf("apply a layer: %w", err)
	}
	defer in.Close()
	a := &applier{ctx: ctx, in: in, fetch: fetch, root: root, from: open{fd: -1}, aside: -1, buf: make([]byte, 256<<10)}
	defer a.close()
	if err := a.run(); err != nil {
		return fmt.Errorf("apply a layer: %s: %w", a.where(), err)
	}
	return nil
}

// open is a directory that is being changed.
type open struct {
	fd    int
	place *place
	entry *layer.Entry
	empty bool // at first, so that no name in it is taken
}

// place is where a directory is. A path in its stead would be of 131,072 bytes at
// worst, and one would be kept for each file with several names.
type place struct {
	in   *place // nil for the root
	name string
}

// path is relative to the root.
func (p *place) path() string {
	var names []string
	for ; p.in != nil; p = p.in {
		names = append(names, p.name)
	}
	slices.Reverse(names)
	return strings.Join(names, "/")
}

// first is the first name of a file or symlink that has others.
type first struct {
	in   *place
	name string
}

type applier struct {
	ctx   context.Context
	in    *layer.Reader
	fetch Fetch
	buf   []byte

	root      int
	stack     []open
	groups    []first // of each
	from      open    // the directory of the first name that was linked to last
	aside     int     // holds what is to be moved, by index; -1 if nothing is
	asideName string
}

func (a *applier) close() {
	closeFD(a.aside)
	closeFD(a.from.fd)
	for _, d := range a.stack {
		closeFD(d.fd)
	}
}

// where is for people.
func (a *applier) where() string {
	path := ""
	if len(a.stack) > 0 {
		path = a.stack[len(a.stack)-1].place.path()
	}
	if len(path) > 200 {
		path = "…" + path[len(path)-200:]
	}
	return fmt.Sprintf("in %q", "/"+path)
}

func (a *applier) run() error {
	if err := a.setAside(); err != nil {
		return err
	}
	for {
		if a.ctx.Err() != nil {
			return context.Cause(a.ctx)
		}
		e, err := a.in.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := a.entry(e); err != nil {
			return fmt.Errorf("%.300q: %w", e.Name, err)
		}
	}
}

// setAside takes all directories that move from where they are, those in others
// first: then neither their old places nor their new ones are in each other's way.
func (a *applier) setAside() error {
	moves := a.in.Moves()
	if len(moves) == 0 {
		return nil
	}
	a.asideName = ".bullpen-" + rand.Text()
	if err := unix.Mkdirat(a.root, a.asideName, 0o700); err != nil {
		return fmt.Errorf("make a directory for what moves: %w", err)
	}
	var err error
	if a.aside, err = openAt(a.root, a.asideName, readDir, 0); err != nil {
		return err
	}
	order := make([]int, len(moves))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int {
		return cmp.Compare(strings.Count(moves[j], "/"), strings.Count(moves[i], "/"))
	})
	for _, i := range order {
		if err := a.takeAside(moves[i], strconv.Itoa(i)); err != nil {
			return fmt.Errorf("move %.300q: %w", moves[i], err)
		}
	}
	return nil
}

func (a *applier) takeAside(path, name string) error {
	in, old := split(path)
	if in == "" && old == a.asideName {
		return errors.New("this directory is ours")
	}
	dir, err := walkTo(a.root, in)
	if err != nil {
		return err
	}
	defer closeFD(dir)
	// Only a directory, and none that something is mounted on.
	fd, err := openAt(dir, old, readDir, 0)
	if err != nil {
		return err
	}
	closeFD(fd)
	return unix.Renameat(dir, old, a.aside, name)
}

func (a *applier) entry(e *layer.Entry) error {
	if len(a.stack) == 0 {
		return a.begin(e)
	}
	d := &a.stack[len(a.stack)-1]
	if e.Kind == layer.Leave {
		return a.leave(d)
	}
	if merge := e.Kind == layer.Dir && e.Base == layer.Merge; !d.empty && !merge {
		if err := remove(d.fd, e.Name); err != nil {
			return err
		}
	}
	switch e.Kind {
	case layer.Dir:
		return a.enter(d.fd, d.place, e)
	case layer.File:
		return a.file(d.fd, e)
	case layer.Symlink:
		if err := unix.Symlinkat(e.Target, d.fd, e.Name); err != nil {
			return fmt.Errorf("make a symlink: %w", err)
		}
		a.group(e)
		return setTime(d.fd, e)
	case layer.Link:
		return a.link(d.fd, e)
	case layer.Delete, layer.Leave:
	}
	return nil
}

// begin is the root. Its descriptor is a second one, which can be closed as the
// others are.
func (a *applier) begin(e *layer.Entry) error {
	fd, err := openAt(a.root, ".", readDir, 0)
	if err != nil {
		return err
	}
	a.stack = append(a.stack, open{fd: fd, place: &place{}, entry: e, empty: e.Base == layer.Fresh})
	if e.Base == layer.Merge {
		return nil
	}
	return removeAllIn(fd)
}

func (a *applier) enter(dir int, in *place, e *layer.Entry) error {
	var err error
	switch e.Base {
	case layer.Fresh:
		err = unix.Mkdirat(dir, e.Name, 0o700)
	case layer.Moved:
		err = unix.Renameat(a.aside, strconv.Itoa(e.Move), dir, e.Name)
	case layer.Merge:
	}
	if err != nil {
		return fmt.Errorf("make a directory: %w", err)
	}
	fd, err := openAt(dir, e.Name, readDir, 0)
	if err != nil {
		return err
	}
	a.stack = append(a.stack, open{fd: fd, place: &place{in, e.Name}, entry: e, empty: e.Base == layer.Fresh})
	if e.Base == layer.Moved {
		return checkHeight(fd, len(a.stack))
	}
	return nil
}

// leave gives a directory its metadata, which changes in it would spoil.
func (a *applier) leave(d *open) error {
	if len(a.stack) == 1 && a.aside >= 0 {
		if err := unix.Unlinkat(a.root, a.asideName, unix.AT_REMOVEDIR); err != nil {
			return fmt.Errorf("remove the directory for what moves: %w", err)
		}
	}
	// The root may be new, and still have attributes of its own.
	if err := setXattrs(d.fd, d.entry.Xattrs, !d.empty || len(a.stack) == 1); err != nil {
		return err
	}
	if err := unix.Fchmod(d.fd, d.entry.Mode); err != nil {
		return fmt.Errorf("set the mode: %w", err)
	}
	if err := setTimeOf(d.fd, ".", d.entry); err != nil {
		return err
	}
	closeFD(d.fd)
	a.stack = a.stack[:len(a.stack)-1]
	return nil
}

func setTime(dir int, e *layer.Entry) error { return setTimeOf(dir, e.Name, e) }

func setTimeOf(dir int, name string, e *layer.Entry) error {
	t := unix.Timespec{Sec: e.Sec, Nsec: int64(e.Nsec)}
	if err := unix.UtimesNanoAt(dir, name, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("set the modification time: %w", err)
	}
	return nil
}

func (a *applier) file(dir int, e *layer.Entry) error {
	fd, err := openAt(dir, e.Name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), e.Name)
	err = a.content(f, e)
	if err == nil {
		err = setXattrs(fd, e.Xattrs, false)
	}
	if err == nil && e.Mode != 0o600 {
		err = unix.Fchmod(fd, e.Mode)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	a.group(e)
	return setTime(dir, e)
}

func (a *applier) content(f *os.File, e *layer.Entry) error {
	var err error
	switch {
	case e.Size == 0:
		return nil
	case e.Inline():
		err = a.parts(f, e, a.in.Content())
	default:
		err = a.object(f, e)
	}
	if err != nil {
		return err
	}
	if n := len(e.Extents); n > 0 && e.Extents[n-1].Offset+e.Extents[n-1].Len == e.Size {
		return nil
	}
	return f.Truncate(e.Size)
}

func (a *applier) object(f *os.File, e *layer.Entry) error {
	size := e.Data()
	r, err := a.fetch(a.ctx, e.Object, size)
	if err != nil {
		return fmt.Errorf("fetch object %x: %w", e.Object, err)
	}
	sum := sha256.New()
	err = a.parts(f, e, io.TeeReader(io.LimitReader(r, size), sum))
	if err := errors.Join(err, r.Close()); err != nil {
		return fmt.Errorf("object %x: %w", e.Object, err)
	}
	if Digest(sum.Sum(nil)) != e.Object {
		return fmt.Errorf("object %x: the store has something else under this digest", e.Object)
	}
	return nil
}

// parts writes what is not holes.
func (a *applier) parts(f *os.File, e *layer.Entry, r io.Reader) error {
	for _, x := range e.Extents {
		for done := int64(0); done < x.Len; {
			if a.ctx.Err() != nil {
				return context.Cause(a.ctx)
			}
			b := a.buf[:min(int64(len(a.buf)), x.Len-done)]
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

func (a *applier) group(e *layer.Entry) {
	if e.Group > 0 {
		a.groups = append(a.groups, first{a.stack[len(a.stack)-1].place, e.Name})
	}
}

func (a *applier) link(dir int, e *layer.Entry) error {
	to := a.groups[e.Group-1]
	if a.from.place != to.in { // names of files in one directory mostly come together
		fd, err := walkTo(a.root, to.in.path())
		if err != nil {
			return err
		}
		closeFD(a.from.fd)
		a.from = open{fd: fd, place: to.in}
	}
	if err := unix.Linkat(a.from.fd, to.name, dir, e.Name, 0); err != nil {
		return fmt.Errorf("link to %.300q: %w", to.name, err)
	}
	return nil
}
