package files

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/account"
)

const fileMode = 0o644

var (
	errDirectory  = errors.New("it is a directory")
	errNotRegular = errors.New("it is not a regular file")
	errLinked     = errors.New("it has several names, and only its owner may change it")
	errProc       = errors.New("files of /proc cannot be written")
)

// create opens a file for writing and empties it. Missing parents are created. What is created belongs
// to the user.
func (t *Tree) create(user account.User, path string) (*os.File, error) {
	var file *os.File
	err := t.change(user, path, true, func(dir int, name string, owner *account.User) error {
		fd, err := openForWriting(dir, name, user, owner)
		if err != nil {
			return &os.PathError{Op: "open", Path: path, Err: err}
		}
		file = os.NewFile(uintptr(fd), path)
		return nil
	})
	return file, err
}

// openForWriting opens a file for its user. With an owner, the thread has the guest's rights and the file
// is given to the owner.
func openForWriting(dir int, name string, user account.User, owner *account.User) (fd int, err error) {
	// Without O_NONBLOCK, opening a pipe waits for its reader.
	const flags = unix.O_WRONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC
	fd, err = unix.Openat(dir, name, flags|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, fileMode)
	if err == nil {
		// The new file of another user belongs to that user already, and the call only notifies
		// those who watch the directory, as E2B's clients expect it.
		if err := unix.Fchown(fd, int(user.UID), int(user.GID)); err != nil {
			_ = unix.Close(fd)
			return -1, err
		}
		return fd, nil
	}
	if !errors.Is(err, unix.EEXIST) {
		return -1, err
	}
	if owner != nil {
		if fd, err = unix.Openat(dir, name, flags|unix.O_NOFOLLOW, 0); errors.Is(err, unix.ELOOP) {
			err = unix.EACCES
		}
	} else {
		fd, err = unix.Openat(dir, name, flags|unix.O_CREAT, fileMode) // the target of a link may be missing
	}
	if err != nil {
		return -1, err
	}
	if err := takeOver(fd, owner); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// takeOver empties a file that exists and gives it to the owner, if that is not nil.
func takeOver(fd int, owner *account.User) error {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return err
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return err
	}
	switch {
	case stat.Mode&unix.S_IFMT == unix.S_IFDIR:
		return errDirectory
	case stat.Mode&unix.S_IFMT != unix.S_IFREG:
		return errNotRegular
	case fs.Type == unix.PROC_SUPER_MAGIC: // it contains the guest's own memory
		return errProc
	}
	if owner != nil {
		// Programs can give a name of theirs to a file of somebody else.
		if stat.Nlink > 1 {
			return errLinked
		}
		if err := unix.Fchown(fd, int(owner.UID), int(owner.GID)); err != nil {
			return err
		}
	}
	return unix.Ftruncate(fd, 0)
}
