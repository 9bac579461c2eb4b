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

	"github.com/bullpen-run/bullpen/proto/layer"
)

// Put writes a file of the owner with mode 0644 into a home that is mounted and not in use yet. The
// path is relative to the home. Missing directories are created with mode 0755. Whatever is in the
// way is removed: a file or symlink where a directory belongs, anything at the file's path. Other
// names of a replaced file keep its content. content must have exactly size bytes. After an error
// the home must not be used.
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
	parent, name := split(path)
	dir, err := o.makeDirs(mount, parent)
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
	return setModified(dir, name, &layer.Entry{Sec: t.Sec, Nsec: uint32(t.Nsec)})
}

// checkPath rejects paths that a layer cannot represent.
func checkPath(path string) error {
	depth := 0 // of the directory that contains the name
	for name := range strings.SplitSeq(path, "/") {
		if depth++; !layer.ValidName(name) {
			return errors.New("the path is not a clean relative path, or has a name that is too long")
		}
	}
	if depth > layer.MaxDepth {
		return fmt.Errorf("the path has more than %d directories", layer.MaxDepth)
	}
	return nil
}

// makeDirs opens the directory at path and creates those that are missing.
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

func (o *Overlay) makeDir(parent int, name string) (int, error) {
	st, err := lstat(parent, name)
	if err != nil {
		return -1, err
	}
	if st != nil && fileType(st) == unix.S_IFDIR {
		return openAt(parent, name, readDir, 0)
	}
	if err := remove(parent, name); err != nil {
		return -1, err
	}
	if err := unix.Mkdirat(parent, name, 0o700); err != nil {
		return -1, fmt.Errorf("create directory %.300q: %w", name, err)
	}
	dir, err := openAt(parent, name, readDir, 0)
	if err != nil {
		return -1, err
	}
	if err := o.setOwner(dir, 0o755); err != nil {
		closeFD(dir)
		return -1, err
	}
	return dir, nil
}

// MakeTmp creates a directory at the root of a mounted, unused home that programs can use as /tmp,
// or adapts an existing one. It removes anything else with that name.
func (o *Overlay) MakeTmp(mount *os.File, name string) error {
	const mode = unix.S_ISVTX | 0o777
	dir, err := o.makeDir(int(mount.Fd()), name)
	if err != nil {
		return fmt.Errorf("make a directory for /tmp in a home: %w", err)
	}
	defer closeFD(dir)
	var st unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return fmt.Errorf("make a directory for /tmp in a home: %w", err)
	}
	if st.Mode&0o7777 == mode { // setting it would change the home
		return nil
	}
	return o.setOwner(dir, mode)
}

func (o *Overlay) setOwner(fd int, mode uint32) error {
	if err := errors.Join(unix.Fchown(fd, o.Owner.uid, o.Owner.gid), unix.Fchmod(fd, mode)); err != nil {
		return fmt.Errorf("set owner and mode: %w", err)
	}
	return nil
}

// create creates a file. It fails if the name exists.
func (o *Overlay) create(dir int, name string, size int64, content io.Reader) error {
	fd, err := openAt(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	err = writeAll(f, size, content)
	if err == nil {
		err = o.setOwner(fd, 0o644)
	}
	return errors.Join(err, f.Close())
}

// writeAll reads content up to io.EOF, because only then does a store report a wrong digest.
func writeAll(f *os.File, size int64, content io.Reader) error {
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

// Temporary is a file that exists in a home while its program runs, but is not part of the home.
type Temporary struct {
	name   string
	handle string // in the upper directory; unlike the inode number it is never reused
	digest layer.Digest
	size   int64
}

// PutTemporary creates a file of the owner with mode 0644 in the root of a home that is mounted and
// not in use yet. It returns an error wrapping [fs.ErrExist] if the home has the name already.
// After any other error the home must not be used.
func (o *Overlay) PutTemporary(mount *os.File, name string, content []byte) (*Temporary, error) {
	t := &Temporary{name: name, digest: sha256.Sum256(content), size: int64(len(content))}
	err := keepModified(int(mount.Fd()), func(root int) error {
		return o.create(root, name, t.size, bytes.NewReader(content))
	})
	if err == nil {
		err = withRoot(o.upper(), func(upper int) (err error) {
			t.handle, err = handleOf(upper, name)
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("put temporary file %.300q into a home: %w", name, err)
	}
	return t, nil
}

// RemoveTemporary removes a temporary file from a home that is no longer in use, whether or not it
// is still mounted. The file stays if it has become part of the home: if the program has changed
// its content, moved or replaced it, or given it a second name.
func (o *Overlay) RemoveTemporary(t *Temporary) error {
	err := withRoot(o.upper(), func(upper int) error {
		unmodified, err := t.isUnmodified(upper)
		if !unmodified || err != nil {
			return err
		}
		return keepModified(upper, func(root int) error { return unix.Unlinkat(root, t.name, 0) })
	})
	if err != nil {
		return fmt.Errorf("remove temporary file %.300q from a home: %w", t.name, err)
	}
	return nil
}

func withRoot(path string, f func(dir int) error) error {
	dir, err := openRoot(path)
	if err != nil {
		return err
	}
	defer closeFD(dir)
	return f(dir)
}

func (t *Temporary) isUnmodified(upper int) (bool, error) {
	st, err := lstat(upper, t.name)
	if st == nil || err != nil || fileType(st) != unix.S_IFREG || st.Nlink != 1 || st.Size != t.size {
		return false, err
	}
	if handle, err := handleOf(upper, t.name); handle != t.handle || err != nil {
		return false, err
	}
	f, err := openFile(upper, t.name)
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, io.LimitReader(f, t.size)); err != nil {
		return false, fmt.Errorf("read %.300q: %w", t.name, err)
	}
	return layer.Digest(sum.Sum(nil)) == t.digest, nil
}

// keepModified calls change and restores the modification time of dir, unless change fails.
func keepModified(dir int, change func(dir int) error) error {
	fd, err := openAt(dir, ".", readDir, 0)
	if err != nil {
		return err
	}
	defer closeFD(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("stat a directory: %w", err)
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
