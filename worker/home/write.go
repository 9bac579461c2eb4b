package home

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
)

// writer writes a scanned tree as a layer.
type writer struct {
	*tree
	out    layer.Writer
	store  Store
	groups map[uint64]int // of files in upper with several names, by inode number
	sizes  []Usage        // per name of each group
	stats  Stats
	parts  int64 // extents of all changed files with holes
	buf    []byte
}

// write scans the tree and writes it to out.
func (t *tree) write(out layer.Writer, store Store) (Stats, error) {
	t.limits = out.Left()
	if err := t.scan(t.root()); err != nil {
		return Stats{}, err
	}
	if err := out.Begin(t.moves); err != nil {
		return Stats{}, err
	}
	w := writer{tree: t, out: out, store: store, groups: make(map[uint64]int)}
	base := layer.Fresh
	if t.overlay {
		base = layer.Merge
	}
	if err := w.writeDir(t.root(), &layer.Entry{Base: base}); err != nil {
		return Stats{}, fmt.Errorf("%s: %w", t.where(), err)
	}
	w.stats.Entries = t.limits.Entries - out.Left().Entries
	if t.overlay && w.stats.Entries == 1 {
		before, err := rootMetadata(t.lower)
		if err != nil {
			return Stats{}, err
		}
		after, err := rootMetadata(t.upper)
		if err != nil {
			return Stats{}, err
		}
		before.Size, after.Size = 0, 0
		w.stats.Unchanged = reflect.DeepEqual(before, after)
	}
	return w.stats, nil
}

// writeDir writes a directory and its contents. e has its name and base.
func (w *writer) writeDir(n node, e *layer.Entry) error {
	fd := n.upper
	if fd < 0 {
		fd = n.lower
	}
	meta, err := metadata(fd)
	if err != nil {
		return err
	}
	e.Kind, e.Mode, e.Sec, e.Nsec, e.Xattrs = layer.Dir, meta.Mode, meta.Sec, meta.Nsec, meta.Xattrs
	if e.Name == "" {
		e.Mode |= rootMode
	}
	if err := w.checkXattrs("", e); err != nil {
		return err
	}
	if err := w.out.Write(e, nil); err != nil {
		return err
	}
	if err := w.countDir(n, e); err != nil {
		return err
	}
	all, err := w.children(n)
	if err != nil {
		return err
	}
	for _, c := range all {
		if w.ctx.Err() != nil {
			return context.Cause(w.ctx)
		}
		if err := w.writeChild(n, c); err != nil {
			return err
		}
	}
	return w.out.Write(&layer.Entry{Kind: layer.Leave}, nil)
}

// countDir adds a directory to the growth of the home, without the changes inside.
func (w *writer) countDir(n node, e *layer.Entry) error {
	growth := &w.stats.Growth
	growth.Attributes += layer.AttributeBytes(e.Xattrs)
	if e.Base == layer.Merge {
		before, err := attributeBytes(n.lower)
		growth.Attributes -= before
		return err
	}
	if e.Name != "" {
		growth.Files++
	}
	if e.Base == layer.Moved {
		// Its previous place was already subtracted: it has a deletion or another entry now, or its
		// directory is gone.
		moved, err := w.meter.contents(n.lower)
		growth.add(moved.Usage)
		return err
	}
	return nil
}

func (w *writer) writeChild(n node, c child) error {
	f, err := w.stat(n, c)
	if err != nil {
		return err
	}
	switch {
	case f.whiteout:
		return w.writeDeletion(n, c)
	case fileType(f.st) == unix.S_IFDIR && c.lower && !w.holders[f.st.Ino]:
		return nil
	case fileType(f.st) == unix.S_IFDIR:
		return w.writeSubdir(n, c)
	case fileType(f.st) == unix.S_IFREG || fileType(f.st) == unix.S_IFLNK:
		return w.writeFile(n, c, f)
	case c.lower:
		return nil
	}
	w.stats.Skipped++
	return w.writeDeletion(n, c)
}

func (w *writer) writeSubdir(n node, c child) error {
	sub, base, err := w.open(n, c)
	if err != nil {
		return err
	}
	defer sub.close()
	e := &layer.Entry{Name: c.name, Base: base}
	if base == layer.Moved {
		e.Move = w.moveIndex[sub.path]
	}
	if base != layer.Merge {
		if _, err := w.subtractReplaced(n, c); err != nil {
			return err
		}
	}
	w.at = append(w.at, c.name)
	if err := w.writeDir(sub, e); err != nil {
		return err
	}
	w.at = w.at[:len(w.at)-1]
	return nil
}

// writeDeletion writes a deletion if the previous version has the name.
func (w *writer) writeDeletion(n node, c child) error {
	if replaced, err := w.subtractReplaced(n, c); !replaced || err != nil {
		return err
	}
	return w.out.Write(&layer.Entry{Kind: layer.Delete, Name: c.name}, nil)
}

// subtractReplaced subtracts whatever has the name in lower from the growth of the home, and
// reports whether there is anything.
func (w *writer) subtractReplaced(n node, c child) (bool, error) {
	if n.lower < 0 {
		return false, nil
	}
	st, err := lstat(n.lower, c.name)
	if st == nil || err != nil {
		return false, err
	}
	replaced, err := w.meter.measure(n.lower, c.name, st)
	if err != nil {
		return false, fmt.Errorf("measure the previous %.300q: %w", c.name, err)
	}
	w.stats.Growth.subtract(replaced.Usage)
	return true, nil
}

// writeFile writes a file or symlink.
func (w *writer) writeFile(n node, c child, f found) error {
	dir, name, ino := n.upper, c.name, f.st.Ino
	if c.lower {
		file, ok := w.aliases[f.st.Ino]
		if !ok {
			return nil // unchanged
		}
		dir, name, ino = w.index, file.name, file.ino
	}
	if _, err := w.subtractReplaced(n, c); err != nil {
		return err
	}
	e := &layer.Entry{Name: c.name}
	if w.links[ino] > 1 {
		if e.Group = w.groups[ino]; e.Group > 0 {
			e.Kind = layer.Link
			w.stats.Growth.add(w.sizes[e.Group-1])
			return w.out.Write(e, nil)
		}
		e.Group = len(w.groups) + 1
		w.groups[ino] = e.Group
	}
	var err error
	if fileType(f.st) == unix.S_IFLNK {
		err = w.writeSymlink(dir, name, e)
	} else {
		err = w.writeRegular(dir, name, ino, e)
	}
	if err != nil {
		return fmt.Errorf("%.300q: %w", c.name, err)
	}
	size := Usage{Bytes: e.Data(), Files: 1, Attributes: layer.AttributeBytes(e.Xattrs)}
	if w.stats.Growth.add(size); e.Group > 0 {
		w.sizes = append(w.sizes, size)
	}
	return nil
}

func (w *writer) writeSymlink(dir int, name string, e *layer.Entry) error {
	st, err := lstat(dir, name)
	if err == nil && st == nil {
		err = errChanged
	}
	if err != nil {
		return err
	}
	if err := w.checkLimit(e.Name, st.Size, "bytes in its link target", layer.MaxTarget); err != nil {
		return err
	}
	b := make([]byte, layer.MaxTarget+1)
	n, err := unix.Readlinkat(dir, name, b)
	if err != nil {
		return fmt.Errorf("read a symlink: %w", err)
	}
	e.Kind, e.Mode, e.Sec, e.Nsec, e.Target = layer.Symlink, 0o777, st.Mtim.Sec, uint32(st.Mtim.Nsec), string(b[:n])
	return w.out.Write(e, nil)
}

func (w *writer) writeRegular(dir int, name string, ino uint64, e *layer.Entry) error {
	file, err := openFile(dir, name)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	fd := int(file.Fd())
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("stat a file: %w", err)
	}
	if fileType(&st) != unix.S_IFREG || st.Ino != ino {
		return errChanged
	}
	meta, err := metadata(fd)
	if err != nil {
		return err
	}
	e.Kind, e.Mode, e.Sec, e.Nsec, e.Xattrs, e.Size = layer.File, meta.Mode, meta.Sec, meta.Nsec, meta.Xattrs, meta.Size
	if err := errors.Join(w.checkXattrs(e.Name, e),
		w.checkLimit(e.Name, e.Size, "bytes including holes", layer.MaxFileSize)); err != nil {
		return err
	}
	if e.Extents, err = extents(w.ctx, file, e.Size); err != nil {
		return err
	}
	if err := w.checkLimit(e.Name, int64(len(e.Extents)), "parts between holes", layer.MaxExtents); err != nil {
		return err
	}
	if len(e.Extents) > 1 && w.overlay { // a whole home has the extents of many changes
		w.parts += int64(len(e.Extents))
		if err := w.checkLimit(e.Name, w.parts, "parts between holes with the files before it",
			layer.MaxExtents); err != nil {
			return err
		}
	}
	content := newDenseReader(file, e.Extents)
	if e.Inline() {
		return w.out.Write(e, io.NewSectionReader(content, 0, content.size()))
	}
	// This is checked before the file is read, which may be very large.
	if content.size() > w.out.Left().Bytes {
		return fmt.Errorf("more than %d bytes in files: %w", w.limits.Bytes, layer.ErrLimit)
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

// checkXattrs checks the extended attributes of a name in the current directory, or of that itself
// if name is empty.
func (w *writer) checkXattrs(name string, e *layer.Entry) error {
	return w.checkLimit(name, layer.AttributeBytes(e.Xattrs), "bytes of extended attributes, with 24 for each",
		layer.MaxXattrs)
}

// checkLimit returns a [*proto.FileError] if size exceeds most.
func (w *writer) checkLimit(name string, size int64, unit string, most int64) error {
	if size <= most {
		return nil
	}
	path := join(strings.Join(w.at, "/"), name)
	if name == "" {
		path = cmp.Or(strings.Join(w.at, "/"), ".")
	}
	return &proto.FileError{Path: path, Size: size, Unit: unit, Most: most}
}

func (w *writer) digest(content *denseReader) (layer.Digest, error) {
	if w.buf == nil {
		w.buf = make([]byte, 1<<20)
	}
	sum := sha256.New()
	for at := int64(0); at < content.size(); {
		if w.ctx.Err() != nil {
			return layer.Digest{}, context.Cause(w.ctx)
		}
		n, err := content.ReadAt(w.buf, at)
		if err != nil && !errors.Is(err, io.EOF) {
			return layer.Digest{}, fmt.Errorf("read: %w", err)
		}
		sum.Write(w.buf[:n])
		at += int64(n)
	}
	return layer.Digest(sum.Sum(nil)), nil
}

// openFile opens a regular file for reading without changing its access time. O_NONBLOCK keeps it
// from blocking if the name is a FIFO after all.
func openFile(dir int, name string) (*os.File, error) {
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOATIME, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}
