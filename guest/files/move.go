package files

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/account"
)

// move renames a file or a directory.
func (t *Tree) move(ctx context.Context, user account.User, source, destination string) error {
	err := t.change(user, destination, true, func(dir int, name string, owner *account.User) error {
		if owner == nil {
			return renameError(source, destination, unix.Renameat(unix.AT_FDCWD, source, dir, name))
		}
		from, err := openParent(source, false, user)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(from) }()
		return renameError(source, destination, unix.Renameat(from, filepath.Base(source), dir, name))
	})
	if !errors.Is(err, unix.EXDEV) {
		return err
	}
	// A copy needs no rights but the user's.
	return t.Lane.Do(user, func() error { return copyAndRemove(ctx, source, destination) })
}

func renameError(source, destination string, err error) error {
	if err != nil {
		return &os.LinkError{Op: "rename", Old: source, New: destination, Err: err}
	}
	return nil
}

// copyAndRemove moves a tree to another file system. The destination appears when it is complete.
func copyAndRemove(ctx context.Context, source, destination string) error {
	temporary, err := os.MkdirTemp(filepath.Dir(destination), ".move-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(temporary) }()
	made := filepath.Join(temporary, "0")
	if err := copyTree(ctx, source, made); err != nil {
		return err
	}
	if err := os.Rename(made, destination); err != nil {
		return err
	}
	return os.RemoveAll(source)
}

// copyTree copies a file, a symbolic link or a directory with modes and times.
func copyTree(ctx context.Context, source, destination string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	info, err := os.Lstat(source)
	if err != nil {
		return err
	}
	switch {
	case info.Mode()&os.ModeSymlink != 0:
		target, err := os.Readlink(source)
		if err != nil {
			return err
		}
		return os.Symlink(target, destination)
	case info.IsDir():
		if err := copyDir(ctx, source, destination); err != nil {
			return err
		}
	case info.Mode().IsRegular():
		if err := copyFile(source, destination); err != nil {
			return err
		}
	default:
		return &os.PathError{Op: "copy", Path: source, Err: errNotRegular}
	}
	if err := os.Chmod(destination, info.Mode()); err != nil {
		return err
	}
	return os.Chtimes(destination, info.ModTime(), info.ModTime())
}

func copyDir(ctx context.Context, source, destination string) error {
	if err := os.Mkdir(destination, 0o700); err != nil {
		return err
	}
	dir, err := os.Open(source)
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	for {
		const batch = 256
		names, err := dir.Readdirnames(batch)
		for _, name := range names {
			if err := copyTree(ctx, filepath.Join(source, name), filepath.Join(destination, name)); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func copyFile(source, destination string) error {
	from, err := os.OpenFile(source, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer func() { _ = from.Close() }()
	to, err := os.OpenFile(destination, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := writeMetadata(to, readMetadata(source)); err != nil && !errors.Is(err, unix.ENOTSUP) {
		_ = to.Close()
		return err
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, to.Close())
}

// remove removes a tree, if it exists.
func (t *Tree) remove(user account.User, path string) error {
	err := t.change(user, path, false, func(dir int, name string, owner *account.User) error {
		if owner != nil {
			// Of this path, only the last element is a name in a directory that can change.
			name = filepath.Join("/proc/self/fd", strconv.Itoa(dir), name)
		}
		return os.RemoveAll(name) //nolint:gosec // clients may name any
	})
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	return err
}
