package home

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Usage is how large a home is, or by how much it is larger than another. A file
// with several names counts under each.
type Usage struct {
	Bytes int64 // content of files without holes
	Files int64 // files, symlinks and directories, but not the home itself
}

func (u *Usage) add(v Usage) { u.Bytes += v.Bytes; u.Files += v.Files }
func (u *Usage) sub(v Usage) { u.Bytes -= v.Bytes; u.Files -= v.Files }

// meter measures what is in a version. It looks at a directory once, and at a file
// with several names too: one that was renamed in one that was renamed, and so on,
// would else be looked at once for each of them, and so would be a file with a
// million holes for each of its names.
type meter struct {
	ctx   context.Context   // of the reading that it measures for
	dirs  map[uint64]inside // by inode number
	files map[uint64]int64  // bytes that are not holes, by inode number
}

// inside is what a directory has.
type inside struct {
	Usage
	height int // of directories in each other below it
}

func newMeter(ctx context.Context) *meter {
	return &meter{ctx: ctx, dirs: make(map[uint64]inside), files: make(map[uint64]int64)}
}

// name is that of a name in a directory, of which st is known, and of what is
// below it. Its height counts the directory itself.
func (m *meter) name(dir int, name string, st *unix.Stat_t) (inside, error) {
	switch kind(st) {
	case unix.S_IFREG:
		size, err := m.file(dir, name, st)
		return inside{Usage: Usage{Bytes: size, Files: 1}}, err
	case unix.S_IFLNK:
		return inside{Usage: Usage{Files: 1}}, nil
	case unix.S_IFDIR:
		in, ok := m.dirs[st.Ino]
		if !ok {
			fd, err := openAt(dir, name, readDir, 0)
			if err != nil {
				return inside{}, err
			}
			defer closeFD(fd)
			if in, err = m.below(fd); err != nil {
				return inside{}, err
			}
		}
		in.Files++
		in.height++
		return in, nil
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

// file is how many bytes of a file are not holes. Its blocks do not tell: some
// of them may hold its attributes.
func (m *meter) file(dir int, name string, st *unix.Stat_t) (int64, error) {
	if st.Size == 0 {
		return 0, nil
	}
	if known, ok := m.files[st.Ino]; ok {
		return known, nil
	}
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOATIME, 0)
	if err != nil {
		return 0, err
	}
	f := os.NewFile(uintptr(fd), name)
	defer func() { _ = f.Close() }()
	parts, err := extents(m.ctx, f, st.Size)
	size := newDense(f, parts).size()
	if err == nil && st.Nlink > 1 {
		m.files[st.Ino] = size
	}
	return size, err
}
