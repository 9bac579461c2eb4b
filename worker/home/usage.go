package home

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto/layer"
)

// Usage is the size of a home, or the difference between two homes. A file with several names
// counts once per name.
type Usage struct {
	Bytes      int64 // content of files without holes
	Files      int64 // files, symlinks and directories, except for the root
	Attributes int64 // bytes of extended attributes, including those of the root
}

func (u *Usage) add(v Usage) {
	u.Bytes += v.Bytes
	u.Files += v.Files
	u.Attributes += v.Attributes
}

func (u *Usage) subtract(v Usage) { u.add(Usage{-v.Bytes, -v.Files, -v.Attributes}) }

// meter measures parts of a version. It reads each directory, and each file with several names,
// once: renamed directories inside renamed directories would otherwise be read once per level, and
// a file with a million holes once per name.
type meter struct {
	ctx   context.Context     // of the call of Diff or Full
	dirs  map[uint64]measured // contents by inode number
	files map[uint64]Usage    // by inode number
}

// measured is the size of a file or directory.
type measured struct {
	Usage
	height int // levels of nested directories
}

func newMeter(ctx context.Context) *meter {
	return &meter{ctx: ctx, dirs: make(map[uint64]measured), files: make(map[uint64]Usage)}
}

// measure returns the size of the name in a directory, whose status is st, including its contents.
// The height includes the name itself if that is a directory.
func (m *meter) measure(dir int, name string, st *unix.Stat_t) (measured, error) {
	switch fileType(st) {
	case unix.S_IFREG:
		size, err := m.file(dir, name, st)
		return measured{Usage: size}, err
	case unix.S_IFLNK:
		return measured{Usage: Usage{Files: 1}}, nil
	case unix.S_IFDIR:
		fd, err := openAt(dir, name, readDir, 0)
		if err != nil {
			return measured{}, err
		}
		defer closeFD(fd)
		in, err := m.contents(fd)
		if err != nil {
			return measured{}, err
		}
		own, err := attributeBytes(fd)
		in.add(Usage{Files: 1, Attributes: own})
		in.height++
		return in, err
	}
	return measured{}, nil // a version contains no others
}

// contents returns the size of everything in a directory.
func (m *meter) contents(dir int) (measured, error) {
	var st unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return measured{}, fmt.Errorf("stat a directory: %w", err)
	}
	if known, ok := m.dirs[st.Ino]; ok {
		return known, nil
	}
	all, err := list(dir)
	if err != nil {
		return measured{}, err
	}
	var sum measured
	for _, name := range all {
		if m.ctx.Err() != nil {
			return measured{}, context.Cause(m.ctx)
		}
		st, err := lstat(dir, name)
		if err == nil && st == nil {
			err = fmt.Errorf("%.300q: %w", name, errChanged)
		}
		if err != nil {
			return measured{}, err
		}
		in, err := m.measure(dir, name, st)
		if err != nil {
			return measured{}, err
		}
		sum.add(in.Usage)
		sum.height = max(sum.height, in.height)
	}
	m.dirs[st.Ino] = sum
	return sum, nil
}

// attributeBytes returns the size of the attributes of an open file.
func attributeBytes(fd int) (int64, error) {
	all, err := userXattrs(fd)
	return layer.AttributeBytes(all), err
}

// file does not rely on the number of blocks, since those may hold attributes.
func (m *meter) file(dir int, name string, st *unix.Stat_t) (Usage, error) {
	if known, ok := m.files[st.Ino]; ok {
		return known, nil
	}
	f, err := openFile(dir, name)
	if err != nil {
		return Usage{}, err
	}
	defer func() { _ = f.Close() }()
	parts, err := extents(m.ctx, f, st.Size)
	if err != nil {
		return Usage{}, err
	}
	u := Usage{Bytes: newDenseReader(f, parts).size(), Files: 1}
	if u.Attributes, err = attributeBytes(int(f.Fd())); err == nil && st.Nlink > 1 {
		m.files[st.Ino] = u
	}
	return u, err
}
