package home

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/storage/thread/layer"
)

// Usage is how large a home is, or by how much it is larger than another. A file
// with several names counts under each.
type Usage struct {
	Bytes int64 // content of files without holes
	Files int64 // files, symlinks and directories, but not the home itself
	// Attributes are bytes of extended ones, those of the home itself included.
	Attributes int64
}

func (u *Usage) add(v Usage) {
	u.Bytes += v.Bytes
	u.Files += v.Files
	u.Attributes += v.Attributes
}

func (u *Usage) sub(v Usage) { u.add(Usage{-v.Bytes, -v.Files, -v.Attributes}) }

// meter measures what is in a version. It looks at a directory once, and at a file
// with several names too: one that was renamed in one that was renamed, and so on,
// would else be looked at once for each of them, and so would be a file with a
// million holes for each of its names.
type meter struct {
	ctx   context.Context   // of the reading that it measures for
	dirs  map[uint64]inside // by inode number
	files map[uint64]Usage  // by inode number
}

// inside is what a directory has.
type inside struct {
	Usage
	height int // of directories in each other below it
}

func newMeter(ctx context.Context) *meter {
	return &meter{ctx: ctx, dirs: make(map[uint64]inside), files: make(map[uint64]Usage)}
}

// name is that of a name in a directory, of which st is known, and of what is
// below it. Its height counts the directory itself.
func (m *meter) name(dir int, name string, st *unix.Stat_t) (inside, error) {
	switch kind(st) {
	case unix.S_IFREG:
		size, err := m.file(dir, name, st)
		return inside{Usage: size}, err
	case unix.S_IFLNK:
		return inside{Usage: Usage{Files: 1}}, nil
	case unix.S_IFDIR:
		fd, err := openAt(dir, name, readDir, 0)
		if err != nil {
			return inside{}, err
		}
		defer closeFD(fd)
		in, err := m.below(fd)
		if err != nil {
			return inside{}, err
		}
		own, err := attributesOf(fd)
		in.add(Usage{Files: 1, Attributes: own})
		in.height++
		return in, err
	}
	return inside{}, nil // a version has no others
}

// below is that of all that is in a directory.
func (m *meter) below(dir int) (inside, error) {
	var st unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return inside{}, fmt.Errorf("look at a directory: %w", err)
	}
	if known, ok := m.dirs[st.Ino]; ok {
		return known, nil
	}
	all, err := list(dir)
	if err != nil {
		return inside{}, err
	}
	var sum inside
	for _, name := range all {
		if m.ctx.Err() != nil {
			return inside{}, context.Cause(m.ctx)
		}
		st, err := lstat(dir, name)
		if err == nil && st == nil {
			err = fmt.Errorf("%.300q: %w", name, errMoved)
		}
		if err != nil {
			return inside{}, err
		}
		in, err := m.name(dir, name, st)
		if err != nil {
			return inside{}, err
		}
		sum.add(in.Usage)
		sum.height = max(sum.height, in.height)
	}
	m.dirs[st.Ino] = sum
	return sum, nil
}

// attributesOf is how many bytes the attributes of an open file take.
func attributesOf(fd int) (int64, error) {
	all, err := userXattrs(fd)
	return layer.AttributeBytes(all), err
}

// file measures one. Its blocks do not tell what is not holes: some of them may
// hold its attributes.
func (m *meter) file(dir int, name string, st *unix.Stat_t) (Usage, error) {
	if known, ok := m.files[st.Ino]; ok {
		return known, nil
	}
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOATIME, 0)
	if err != nil {
		return Usage{}, err
	}
	f := os.NewFile(uintptr(fd), name)
	defer func() { _ = f.Close() }()
	parts, err := extents(m.ctx, f, st.Size)
	if err != nil {
		return Usage{}, err
	}
	u := Usage{Bytes: newDense(f, parts).size(), Files: 1}
	if u.Attributes, err = attributesOf(fd); err == nil && st.Nlink > 1 {
		m.files[st.Ino] = u
	}
	return u, err
}
