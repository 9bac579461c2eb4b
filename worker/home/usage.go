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

// usageOf is that of a name, of which st is known, and of what is below it.
func usageOf(ctx context.Context, dir int, name string, st *unix.Stat_t) (Usage, error) {
	switch kind(st) {
	case unix.S_IFREG:
		size, err := dataIn(dir, name, st)
		return Usage{Bytes: size, Files: 1}, err
	case unix.S_IFLNK:
		return Usage{Files: 1}, nil
	case unix.S_IFDIR:
		fd, err := openAt(dir, name, readDir, 0)
		if err != nil {
			return Usage{}, err
		}
		defer closeFD(fd)
		u, err := usageBelow(ctx, fd)
		u.Files++
		return u, err
	}
	return Usage{}, nil // a version has no others
}

// usageBelow is that of all that is in a directory.
func usageBelow(ctx context.Context, dir int) (Usage, error) {
	all, err := list(dir)
	if err != nil {
		return Usage{}, err
	}
	var sum Usage
	for _, name := range all {
		if ctx.Err() != nil {
			return Usage{}, context.Cause(ctx)
		}
		st, err := lstat(dir, name)
		if err == nil && st == nil {
			err = fmt.Errorf("%.300q: %w", name, errMoved)
		}
		if err != nil {
			return Usage{}, err
		}
		u, err := usageOf(ctx, dir, name, st)
		if err != nil {
			return Usage{}, err
		}
		sum.add(u)
	}
	return sum, nil
}

// dataIn is how many bytes of a file are not holes. Its blocks do not tell: some
// of them may hold its attributes.
func dataIn(dir int, name string, st *unix.Stat_t) (int64, error) {
	if st.Size == 0 {
		return 0, nil
	}
	fd, err := openAt(dir, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOATIME, 0)
	if err != nil {
		return 0, err
	}
	f := os.NewFile(uintptr(fd), name)
	defer func() { _ = f.Close() }()
	parts, err := extents(f, st.Size)
	return newDense(f, parts).size(), err
}
