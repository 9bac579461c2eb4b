package home

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/storage/thread/layer"
)

// writer writes a tree that was scanned.
type writer struct {
	*tree
	out    *layer.Writer
	store  Store
	groups map[uint64]int // of files in upper with several names, by inode number
	sizes  []Usage        // of a name of each group
	stats  Stats
	buf    []byte
}

func (t *tree) write(out *layer.Writer, store Store) (Stats, error) {
	w := writer{tree: t, out: out, store: store, groups: make(map[uint64]int)}
	root := t.root()
	if err := w.dir(root, &layer.Entry{Base: t.rootBase()}); err != nil {
		return Stats{}, fmt.Errorf("%s: %w", t.where(), err)
	}
	var err error
	if w.stats.Layout, err = out.Close(); err != nil {
		return Stats{}, err
	}
	w.stats.Entries, w.stats.Bytes = out.Entries(), out.Bytes()
	if t.overlay && w.stats.Entries == 1 {
		before, err := metadata(t.lower)
		if err != nil {
			return Stats{}, err
		}
		after, err := metadata(t.upper)
		if err != nil {
			return Stats{}, err
		}
		before.Size, after.Size = 0, 0
		w.stats.Unchanged = reflect.DeepEqual(before, after)
	}
	return w.stats, nil
}

func (t *tree) rootBase() layer.Base {
	if t.overlay {
		return layer.Merge
	}
	return layer.Fresh
}

// dir writes a directory and what is in it. e says what it is made of.
func (w *writer) dir(n node, e *layer.Entry) error {
	fd := n.upper
	if fd < 0 {
		fd = n.lower
	}
	meta, err := metadata(fd)
	if err != nil {
		return err
	}
	e.Kind, e.Mode, e.Sec, e.Nsec, e.Xattrs = layer.Dir, meta.Mode, meta.Sec, meta.Nsec, meta.Xattrs
	if err := w.out.Write(e, nil); err != nil {
		return err
	}
	w.stats.Grown.Attributes += layer.AttributeBytes(e.Xattrs)
	switch {
	case e.Base != layer.Merge && e.Name != "":
		w.stats.Grown.Files++
	case e.Base == layer.Merge:
		before, err := attributesOf(n.lower)
		if err != nil {
			return err
		}
		w.stats.Grown.Attributes -= before
	}
	if e.Base == layer.Moved {
		// Its old place is in a directory that is gone, or has a deletion or something
		// else in it.
		came, err := w.meter.below(n.lower)
		if err != nil {
			return err
		}
		w.stats.Grown.add(came.Usage)
	}
	all, err := w.children(n)
	if err != nil {
		return err
	}
	for _, c := range all {
		if w.ctx.Err() != nil {
			return context.Cause(w.ctx)
		}
		if err := w.child(n, c); err != nil {
			return err
		}
	}
	return w.out.Write(&layer.Entry{Kind: layer.Leave}, nil)
}

func (w *writer) child(n node, c child) error {
	f, err := w.look(n, c)
	if err != nil {
		return err
	}
	switch {
	case f.whiteout:
		return w.deletion(n, c)
	case kind(f.st) == unix.S_IFDIR && c.lower && !w.holders[f.st.Ino]:
		return nil
	case kind(f.st) == unix.S_IFDIR:
		sub, base, err := w.below(n, c)
		if err != nil {
			return err
		}
		defer sub.close()
		e := &layer.Entry{Name: c.name, Base: base}
		if base == layer.Moved {
			e.Move = w.moveOf[sub.path]
		}
		if base != layer.Merge {
			if _, err := w.replaced(n, c); err != nil {
				return err
			}
		}
		w.at = append(w.at, c.name)
		if err := w.dir(sub, e); err != nil {
			return err
		}
		w.at = w.at[:len(w.at)-1]
		return nil
	case kind(f.st) == unix.S_IFREG || kind(f.st) == unix.S_IFLNK:
		return w.leaf(n, c, f)
	case c.lower:
		return nil
	}
	w.stats.NotKept++
	return w.deletion(n, c)
}

// deletion is nothing where there is nothing to delete.
func (w *writer) deletion(n node, c child) error {
	if there, err := w.replaced(n, c); !there || err != nil {
		return err
	}
	return w.out.Write(&layer.Entry{Kind: layer.Delete, Name: c.name}, nil)
}

// replaced counts what a name had in lower, and reports whether there was
// something.
func (w *writer) replaced(n node, c child) (bool, error) {
	if n.lower < 0 {
		return false, nil
	}
	st, err := lstat(n.lower, c.name)
	if st == nil || err != nil {
		return false, err
	}
	gone, err := w.meter.name(n.lower, c.name, st)
	if err != nil {
		return false, fmt.Errorf("measure what %.300q was: %w", c.name, err)
	}
	w.stats.Grown.sub(gone.Usage)
	return true, nil
}

// leaf is a file or a symlink.
func (w *writer) leaf(n node, c child, f found) error {
	dir, name, ino := n.upper, c.name, f.st.Ino
	if c.lower {
		file, ok := w.aliases[f.st.Ino]
		if !ok {
			return nil // as it was
		}
		dir, name, ino = w.index, file.name, file.ino
	}
	if _, err := w.replaced(n, c); err != nil {
		return err
	}
	e := &layer.Entry{Name: c.name}
	if w.links[ino] > 1 {
		if e.Group = w.groups[ino]; e.Group > 0 {
			e.Kind = layer.Link
			w.stats.Grown.add(w.sizes[e.Group-1])
			return w.out.Write(e, nil)
		}
		e.Group = len(w.groups) + 1
		w.groups[ino] = e.Group
	}
	var err error
	if kind(f.st) == unix.S_IFLNK {
		err = w.symlink(dir, name, e)
	} else {
		err = w.file(dir, name, ino, e)
	}
	if err != nil {
		return fmt.Errorf("%.300q: %w", c.name, err)
	}
	size := Usage{Bytes: e.Data(), Files: 1, Attributes: layer.AttributeBytes(e.Xattrs)}
	if w.stats.Grown.add(size); e.Group > 0 {
		w.sizes = append(w.sizes, size)
	}
	return nil
}

func (w *writer) symlink(dir int, name string, e *layer.Entry) error {
	st, err := lstat(dir, name)
	if err == nil && st == nil {
		err = errMoved
	}
	if err != nil {
		return err
	}
	b := make([]byte, layer.MaxTarget+1)
	n, err := unix.Readlinkat(dir, name, b)
	if err != nil {
		return fmt.Errorf("read a symlink: %w", err)
	}
	if n > layer.MaxTarget {
		return fmt.Errorf("the target of the symlink has more than %d bytes", layer.MaxTarget)
	}
	e.Kind, e.Mode, e.Sec, e.Nsec, e.Target = layer.Symlink, 0o777, st.Mtim.Sec, uint32(st.Mtim.Nsec), string(b[:n])
	return w.out.Write(e, nil)
}

func (w *writer) file(dir int, name string, ino uint64, e *layer.Entry) error {
	// O_NONBLOCK, should it be a FIFO after all.
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOATIME, 0)
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), name)
	defer func() { _ = file.Close() }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("look at a file: %w", err)
	}
	if kind(&st) != unix.S_IFREG || st.Ino != ino {
		return errMoved
	}
	meta, err := metadata(fd)
	if err != nil {
		return err
	}
	e.Kind, e.Mode, e.Sec, e.Nsec, e.Xattrs, e.Size = layer.File, meta.Mode, meta.Sec, meta.Nsec, meta.Xattrs, meta.Size
	if e.Extents, err = extents(w.ctx, file, e.Size); err != nil {
		return err
	}
	content := newDense(file, e.Extents)
	if e.Inline() {
		return w.out.Write(e, io.NewSectionReader(content, 0, content.size()))
	}
	// Before it is read: it may be more than is allowed.
	if left := w.limits.Bytes - w.out.Bytes(); content.size() > left {
		return fmt.Errorf("more than %d bytes in files: %w", w.limits.Bytes, ErrLimit)
	}
	if e.Object, err = w.digest(content); err != nil {
		return err
	}
	if err := w.store(w.ctx, e.Object, content.size(), content); err != nil {
		return fmt.Errorf("store object %x: %w", e.Object, err)
	}
	w.stats.Objects = append(w.stats.Objects, Object{e.Object, content.size()})
	return w.out.Write(e, nil)
}

func (w *writer) digest(content *dense) (Digest, error) {
	if w.buf == nil {
		w.buf = make([]byte, 1<<20)
	}
	sum := sha256.New()
	for at := int64(0); at < content.size(); {
		if w.ctx.Err() != nil {
			return Digest{}, context.Cause(w.ctx)
		}
		n, err := content.ReadAt(w.buf, at)
		if err != nil && !errors.Is(err, io.EOF) {
			return Digest{}, fmt.Errorf("read: %w", err)
		}
		sum.Write(w.buf[:n])
		at += int64(n)
	}
	return Digest(sum.Sum(nil)), nil
}
