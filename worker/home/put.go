package home

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/storage/thread/layer"
)

// Put writes a file of the owner's, with mode 0644, into a home that is mounted
// and that nobody uses yet. The path is relative to the home; directories on the
// way are made where they are missing, with mode 0755. Whatever is in the way is
// removed: a file or symlink where a directory must be, anything where the file
// must be. Other names of a file that was there keep it as it was. Content must
// have exactly size bytes. After an error the home must not be used.
func (o *Overlay) Put(mount *os.File, path string, size int64, content io.Reader, modified time.Time) error {
	if err := o.put(int(mount.Fd()), path, size, content, modified); err != nil {
		return fmt.Errorf("put file %.300q into a home: %w", path, err)
	}
	return nil
}

func (o *Overlay) put(mount int, path string, size int64, content io.Reader, modified time.Time) error {
	if err := checkPath(path); err != nil {
		return err
	}
	if size < 0 || size > layer.MaxFileSize {
		return fmt.Errorf("a size of %d bytes is not within %d", size, int64(layer.MaxFileSize))
	}
	in, name := split(path)
	dir, err := o.makeDirs(mount, in)
	if err != nil {
		return err
	}
	defer closeFD(dir)
	if err := remove(dir, name); err != nil {
		return err
	}
	if err := o.create(dir, name, size, content); err != nil {
		return err
	}
	t, err := unix.TimeToTimespec(modified)
	if err != nil {
		return fmt.Errorf("set the modification time %v: %w", modified, err)
	}
	return setTimeOf(dir, name, &layer.Entry{Sec: t.Sec, Nsec: uint32(t.Nsec)})
}

// checkPath is about paths that a layer could not have.
func checkPath(path string) error {
	depth := 0 // of the directory that a name is in
	for name := range strings.SplitSeq(path, "/") {
		if depth++; !layer.ValidName(name) {
			return errors.New("the path is not a clean relative one, or has a name that is too long")
		}
	}
	if depth > layer.MaxDepth {
		return fmt.Errorf("the path has more than %d directories", layer.MaxDepth)
	}
	return nil
}

// makeDirs opens a directory, and makes what is missing on the way.
func (o *Overlay) makeDirs(root int, path string) (int, error) {
	dir, err := openAt(root, ".", readDir, 0)
	if path == "" || err != nil {
		return dir, err
	}
	for name := range strings.SplitSeq(path, "/") {
		next, err := o.makeDir(dir, name)
		closeFD(dir)
		if err != nil {
			return -1, err
		}
		dir = next
	}
	return dir, nil
}

func (o *Overlay) makeDir(in int, name string) (int, error) {
	st, err := lstat(in, name)
	if err != nil {
		return -1, err
	}
	if st != nil && kind(st) == unix.S_IFDIR {
		return openAt(in, name, readDir, 0)
	}
	if err := remove(in, name); err != nil {
		return -1, err
	}
	if err := unix.Mkdirat(in, name, 0o700); err != nil {
		return -1, fmt.Errorf("make directory %.300q: %w", name, err)
	}
	dir, err := openAt(in, name, readDir, 0)
	if err != nil {
		return -1, err
	}
	if err := o.own(dir, 0o755); err != nil {
		closeFD(dir)
		return -1, err
	}
	return dir, nil
}

func (o *Overlay) own(fd int, mode uint32) error {
	if err := errors.Join(unix.Fchown(fd, o.Owner.uid, o.Owner.gid), unix.Fchmod(fd, mode)); err != nil {
		return fmt.Errorf("set owner and mode: %w", err)
	}
	return nil
}

// create makes a file where there is none.
func (o *Overlay) create(dir int, name string, size int64, content io.Reader) error {
	fd, err := openAt(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	err = fill(f, size, content)
	if err == nil {
		err = o.own(fd, 0o644)
	}
	return errors.Join(err, f.Close())
}

// fill also reads the end of the content, which is where a store may say that it
// was not right.
func fill(f *os.File, size int64, content io.Reader) error {
	n, err := io.CopyN(f, content, size)
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("the content has %d bytes, not %d", n, size)
	}
	if err != nil {
		return fmt.Errorf("write the content: %w", err)
	}
	switch n, err := io.ReadFull(content, make([]byte, 1)); {
	case n > 0:
		return fmt.Errorf("the content has more than %d bytes", size)
	case errors.Is(err, io.EOF):
		return nil
	default:
		return fmt.Errorf("read the end of the content: %w", err)
	}
}

// Lent is a file that is in a home while its program runs, and no part of it.
type Lent struct {
	name   string
	handle string // in the upper directory, and of no other file that ever has this inode
	digest Digest
	size   int64
}

// Lend makes a file of the owner's, with mode 0644, in the root of a home that is
// mounted and that nobody uses yet, whose modification time stays as it is. It is
// false where there is something of this name, which then stays too. After an
// error the home must not be used.
func (o *Overlay) Lend(mount *os.File, name string, content []byte) (*Lent, bool, error) {
	l := &Lent{name: name, digest: sha256.Sum256(content), size: int64(len(content))}
	free := true
	err := withTime(int(mount.Fd()), func(root int) error {
		err := o.create(root, name, l.size, bytes.NewReader(content))
		free = !errors.Is(err, unix.EEXIST)
		if !free {
			return nil
		}
		return err
	})
	if err == nil && free {
		l.handle, err = o.handle(name)
	}
	if err != nil {
		return nil, false, fmt.Errorf("lend file %.300q to a home: %w", name, err)
	}
	return l, free, nil
}

// TakeBack removes a file that was lent to a home that nobody uses any more,
// whether it is still mounted or not; the modification time of the root stays as
// it is. It does not if the file has become part of the home: where it has other
// content or a second name, was moved, or is another file.
func (o *Overlay) TakeBack(l *Lent) error {
	upper, err := openRoot(o.upper())
	if err != nil {
		return fmt.Errorf("take file %.300q back from a home: %w", l.name, err)
	}
	defer closeFD(upper)
	untouched, err := l.untouched(upper)
	if untouched && err == nil {
		err = withTime(upper, func(root int) error { return unix.Unlinkat(root, l.name, 0) })
	}
	if err != nil {
		return fmt.Errorf("take file %.300q back from a home: %w", l.name, err)
	}
	return nil
}

func (o *Overlay) handle(name string) (string, error) {
	upper, err := openRoot(o.upper())
	if err != nil {
		return "", err
	}
	defer closeFD(upper)
	return handleOf(upper, name)
}

func (l *Lent) untouched(upper int) (bool, error) {
	st, err := lstat(upper, l.name)
	if st == nil || err != nil || kind(st) != unix.S_IFREG || st.Nlink != 1 || st.Size != l.size {
		return false, err
	}
	// A file that was made after this one was removed may have its inode number.
	if handle, err := handleOf(upper, l.name); handle != l.handle || err != nil {
		return false, err
	}
	fd, err := openAt(upper, l.name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOATIME, 0)
	if err != nil {
		return false, err
	}
	f := os.NewFile(uintptr(fd), l.name)
	defer func() { _ = f.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, io.LimitReader(f, l.size)); err != nil {
		return false, fmt.Errorf("read %.300q: %w", l.name, err)
	}
	return Digest(sum.Sum(nil)) == l.digest, nil
}

// withTime gives a directory its modification time back after a change in it.
func withTime(dir int, change func(dir int) error) error {
	fd, err := openAt(dir, ".", readDir, 0)
	if err != nil {
		return err
	}
	defer closeFD(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("look at a directory: %w", err)
	}
	if err := change(fd); err != nil {
		return err
	}
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, st.Mtim}
	if err := unix.UtimesNanoAt(fd, ".", times, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("set the modification time: %w", err)
	}
	return nil
}
