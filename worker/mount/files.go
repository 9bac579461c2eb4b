package mount

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// namesRead is how many names of a directory are read at once.
	namesRead = 256
	// maxDepth is how many directories below each other are listed and deleted. Each takes a
	// descriptor.
	maxDepth = 128
)

// Files are the files of a mount of kind directory, outside of a jail. Paths are relative to the
// mount's prefix, whose path is empty. Paths never lead through a symbolic link, into another mount
// or out of the directory, even while a program changes it. Every access uses the rights of the
// owner of the connection's directory, as programs do.
//
// Errors are [*proto.NoFileError], [*proto.PathError], [*proto.FileChangedError] and those of the
// file system.
type Files struct {
	mount proto.Mount
	dir   int // of the connection
	owner unix.Stat_t
}

// OpenDirectory opens the files of a mount of kind directory. It returns a
// [*proto.NoDirectoryError] if they cannot be used in this process.
func OpenDirectory(roots []string, m proto.Mount) (*Files, error) {
	dir, owner, err := openConnection(roots, m)
	if failed, ok := errors.AsType[*Error](err); ok {
		return nil, &proto.NoDirectoryError{Why: failed.Message}
	}
	if err != nil {
		return nil, err
	}
	f := &Files{m, dir, owner}
	if err := f.asOwner(func() error { return nil }); err != nil {
		_ = unix.Close(dir)
		return nil, &proto.NoDirectoryError{Why: err.Error()}
	}
	return f, nil
}

// Close releases the directory.
func (f *Files) Close() error { return unix.Close(f.dir) }

// asOwner calls do in a thread with exactly the owner's rights for files.
func (f *Files) asOwner(do func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := f.becomeOwner()
		if err == nil {
			err = do()
		}
		result <- err
	}()
	return <-result
}

func (f *Files) becomeOwner() error {
	uid, gid := int(f.owner.Uid), int(f.owner.Gid)
	root := os.Geteuid() == 0
	if os.Geteuid() == uid && os.Getegid() == gid {
		return nil // without calls that a service manager may forbid
	}
	if root {
		// Unlike unix.Setgroups, which concerns all threads.
		if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); e != 0 {
			return fmt.Errorf("this server cannot leave its groups: %w", e)
		}
	}
	_, _ = unix.SetfsgidRetGid(gid) // the answer is that before
	_, _ = unix.SetfsuidRetUid(uid)
	if now, _ := unix.SetfsuidRetUid(-1); now != uid {
		return errors.New("this server does not run as root or as the owner of the directory")
	}
	if now, _ := unix.SetfsgidRetGid(-1); now != gid {
		return errors.New("this server does not run as root or as the group of the directory")
	}
	if root {
		return dropResource()
	}
	return nil
}

// dropResource drops this thread's capability to bypass quotas and reserved space. Its other
// capabilities over files end with the file-system user id.
func dropResource() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3} // of this thread
	var sets [2]unix.CapUserData
	err := unix.Capget(&header, &sets[0])
	if err == nil {
		sets[unix.CAP_SYS_RESOURCE/32].Effective &^= 1 << (unix.CAP_SYS_RESOURCE % 32)
		err = unix.Capset(&header, &sets[0])
	}
	if err != nil {
		return fmt.Errorf("this server cannot drop a capability: %w", err)
	}
	return nil
}

// openDir opens a directory below the prefix for lookups. With create, missing ones are made.
func (f *Files) openDir(name string, create bool) (int, error) {
	if name != "" && !proto.ValidObjectName(name) { // joining would clean it
		return -1, &proto.NoFileError{Path: name, Directory: true}
	}
	all := path.Join(f.mount.Prefix, name)
	fd, err := openBeneath(f.dir, ".")
	if all == "" || err != nil {
		return fd, err
	}
	at := ""
	for part := range strings.SplitSeq(all, "/") {
		at = path.Join(at, part)
		next, err := openBeneath(fd, part)
		if create && errors.Is(err, unix.ENOENT) {
			if err = unix.Mkdirat(fd, part, 0o755); err == nil || errors.Is(err, unix.EEXIST) {
				next, err = openBeneath(fd, part)
			}
		}
		_ = unix.Close(fd)
		if err != nil {
			return -1, f.dirError(at, err)
		}
		fd = next
	}
	return fd, nil
}

// dirError returns the error for a path in the connection that is not a usable directory.
func (f *Files) dirError(at string, err error) error {
	name := strings.TrimPrefix(strings.TrimPrefix(at, f.mount.Prefix), "/")
	switch {
	case errors.Is(err, unix.ENOENT):
		return &proto.NoFileError{Path: name, Directory: true}
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
		return &notDirError{proto.PathError{
			Path: name, Message: "is no directory, or is behind a symbolic link or another mount",
		}}
	default:
		return err
	}
}

// notDirError is a [*proto.PathError] for changes. For reads, nothing is at such a path.
type notDirError struct{ proto.PathError }

// Unwrap returns the [*proto.PathError].
func (e *notDirError) Unwrap() error { return &e.PathError }

// absent returns the error for reading below something that is no directory.
func absent(name string, err error) error {
	_, notDir := errors.AsType[*notDirError](err)
	if notDir || errors.Is(err, proto.ErrNotFound) {
		return &proto.NoFileError{Path: name}
	}
	return err
}

func split(name string) (dir, base string) {
	dir, base = path.Split(name)
	return strings.TrimSuffix(dir, "/"), base
}

// inParent calls do as the owner with the directory that contains a path, and its name there. If
// create is true, missing directories are created.
func (f *Files) inParent(name string, create bool, do func(dir int, base string) error) error {
	return f.asOwner(func() error {
		parent, base := split(name)
		if !proto.ValidSegment(base) {
			return &proto.NoFileError{Path: name}
		}
		dir, err := f.openDir(parent, create)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(dir) }()
		return do(dir, base)
	})
}

func lstat(dir int, name string) (stat unix.Stat_t, err error) {
	return stat, unix.Fstatat(dir, name, &stat, unix.AT_SYMLINK_NOFOLLOW)
}

func kindOf(s *unix.Stat_t) uint32 { return s.Mode & unix.S_IFMT }

func newFile(name string, s *unix.Stat_t) proto.File {
	file := proto.File{Path: name, Size: s.Size, Modified: time.Unix(s.Mtim.Unix()).UTC()}
	switch kindOf(s) {
	case unix.S_IFREG:
		file.Executable = s.Mode&unix.S_IXUSR != 0
	case unix.S_IFDIR:
		file.IsDirectory, file.Size = true, 0
	case unix.S_IFLNK:
		file.Link = true
	default:
		file.Special = true
	}
	return file
}

// List calls each for the entries of a directory, or for everything below it if recursive is true,
// in no particular order. It stops if each returns an error. Symbolic links are entries with the
// size of their target. It returns [proto.ErrNotFound] if the path does not name a directory.
func (f *Files) List(ctx context.Context, dir string, recursive bool, each func(proto.File) error) error {
	var fd int
	err := f.asOwner(func() (err error) {
		fd, err = f.openDir(dir, false)
		return err
	})
	if err != nil {
		return absent(dir, err)
	}
	return f.list(ctx, fd, dir, recursive, 0, each)
}

// list lists a directory that it closes.
func (f *Files) list(
	ctx context.Context, fd int, dir string, recursive bool, depth int, each func(proto.File) error,
) error {
	defer func() { _ = unix.Close(fd) }()
	if depth == maxDepth {
		return tooDeep(dir)
	}
	names, err := f.openNames(fd)
	if err != nil {
		return err
	}
	defer func() { _ = names.Close() }()
	for {
		batch, err := names.Readdirnames(namesRead)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var files []proto.File
		for _, name := range batch {
			stat, err := lstat(fd, name)
			if errors.Is(err, unix.ENOENT) {
				continue // deleted meanwhile
			}
			if err != nil {
				return err
			}
			files = append(files, newFile(path.Join(dir, name), &stat))
		}
		for _, file := range files {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if err := each(file); err != nil {
				return err
			}
			if !recursive || !file.IsDirectory {
				continue
			}
			child := -1
			err := f.asOwner(func() (err error) {
				child, err = openBeneath(fd, path.Base(file.Path))
				return err
			})
			if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) ||
				errors.Is(err, unix.EXDEV) {
				continue // replaced meanwhile, or another mount
			}
			if err == nil {
				err = f.list(ctx, child, file.Path, true, depth+1, each)
			}
			if err != nil {
				return err
			}
		}
	}
}

func tooDeep(dir string) error {
	return &proto.PathError{Path: dir, Message: fmt.Sprintf("is below %d other directories; ask for a part", maxDepth)}
}

// openNames opens a directory for reading its names.
func (f *Files) openNames(dir int) (*os.File, error) {
	fd := -1
	err := f.asOwner(func() (err error) {
		fd, err = unix.Openat(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "directory"), nil
}

// openFile opens a regular file for reading.
func (f *Files) openFile(name string) (file *os.File, stat unix.Stat_t, err error) {
	err = f.inParent(name, false, func(dir int, base string) error {
		how := unix.OpenHow{
			// A FIFO must not block.
			Flags:   unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
		}
		before, err := lstat(dir, base)
		if err != nil || kindOf(&before) != unix.S_IFREG { // opening a device may do something
			if err == nil || errors.Is(err, unix.ENOENT) {
				err = &proto.NoFileError{Path: name}
			}
			return err
		}
		fd, err := unix.Openat2(dir, base, &how)
		if err != nil {
			if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.EXDEV) {
				err = &proto.NoFileError{Path: name}
			}
			return err
		}
		file = os.NewFile(uintptr(fd), "file")
		if err = unix.Fstat(fd, &stat); err == nil && kindOf(&stat) != unix.S_IFREG {
			err = &proto.NoFileError{Path: name}
		}
		if err != nil {
			_ = file.Close()
		}
		return err
	})
	return file, stat, absent(name, err)
}

// tag identifies the content of a file, as far as the file system does.
func tag(s *unix.Stat_t) string {
	sum := sha256.Sum256(fmt.Appendln(nil, s.Dev, s.Ino, s.Size, s.Mtim.Nano(), s.Ctim.Nano()))
	return hex.EncodeToString(sum[:16])
}

// Open returns the content of a regular file.
func (f *Files) Open(_ context.Context, name string) (*proto.FileContent, error) {
	file, stat, err := f.openFile(name)
	if err != nil {
		return nil, err
	}
	_ = file.Close()
	return &proto.FileContent{
		File: newFile(name, &stat), Tag: tag(&stat),
		Read: func(_ context.Context, offset, length int64) (io.ReadCloser, error) {
			file, now, err := f.openFile(name)
			if err != nil {
				return nil, err
			}
			if tag(&now) != tag(&stat) {
				_ = file.Close()
				return nil, &proto.FileChangedError{}
			}
			return struct {
				io.Reader
				io.Closer
			}{io.NewSectionReader(file, offset, length), file}, nil
		},
	}, nil
}

// CheckPut returns the error with which Put would refuse a file now.
func (f *Files) CheckPut(_ context.Context, name string, _ int64) error {
	err := f.inParent(name, false, func(dir int, base string) error { return checkReplaced(dir, base, name) })
	if errors.Is(err, proto.ErrNotFound) { // a missing parent
		return nil
	}
	return err
}

// checkReplaced returns an error if a file cannot replace the entry at a path.
func checkReplaced(dir int, base, name string) error {
	stat, err := lstat(dir, base)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err == nil && kindOf(&stat) == unix.S_IFDIR:
		return &proto.PathError{Path: name, Message: "is a directory; delete it first, or choose another name"}
	default:
		return err
	}
}

// Put stores size bytes of body as a file of the owner. It appears, or replaces another, once it is
// complete; otherwise nothing remains. Missing directories are created. The content is written as
// the owner, so that quotas and reserved space of the file system apply.
func (f *Files) Put(_ context.Context, name string, size int64, body io.Reader) error {
	return f.inParent(name, true, func(dir int, base string) error {
		if err := checkReplaced(dir, base, name); err != nil {
			return err
		}
		fd, err := unix.Openat(dir, ".", unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
		if err != nil {
			return err
		}
		file := os.NewFile(uintptr(fd), "upload")
		defer func() { _ = file.Close() }()
		content, stop := readElsewhere(body, size)
		defer stop()
		if _, err := io.Copy(file, content); err != nil {
			return fmt.Errorf("write an upload: %w", err)
		}
		if err := file.Sync(); err != nil {
			return fmt.Errorf("write an upload: %w", err)
		}
		if err := unix.Fchmod(fd, 0o644); err != nil { // whatever the umask of this process is
			return err
		}
		return publish(dir, fd, base, name)
	})
}

// readElsewhere returns a reader of size bytes of another reader that runs with this process's
// rights, since it may open files of its own. stop waits until the other reader is unused.
func readElsewhere(body io.Reader, size int64) (content io.Reader, stop func()) {
	in, out := io.Pipe()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, err := io.CopyN(out, body, size)
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		_ = out.CloseWithError(err) // is never an error
	}()
	return in, func() {
		_ = in.Close() // is never an error
		<-ended
	}
}

// publish links an unnamed file under a name, and replaces a file of that name.
func publish(dir, fd int, base, name string) error {
	unnamed := fmt.Sprintf("/proc/self/fd/%d", fd)
	random := ".bullpen-" + rand.Text()
	if err := unix.Linkat(unix.AT_FDCWD, unnamed, dir, random, unix.AT_SYMLINK_FOLLOW); err != nil {
		return err
	}
	err := unix.Renameat(dir, random, dir, base)
	if err == nil {
		return nil
	}
	_ = unix.Unlinkat(dir, random, 0)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) {
		return &proto.PathError{Path: name, Message: "is a directory; delete it first, or choose another name"}
	}
	return err
}

// Delete deletes a file, a link or a directory: one that is not empty only if recursive is true.
// version is always 0.
func (f *Files) Delete(ctx context.Context, name string, recursive bool) (version int64, err error) {
	err = f.inParent(name, false, func(dir int, base string) error {
		stat, err := lstat(dir, base)
		if err != nil {
			return err
		}
		if kindOf(&stat) != unix.S_IFDIR {
			return unix.Unlinkat(dir, base, 0)
		}
		if recursive {
			if err := f.deleteBelow(ctx, dir, base, name, 0); err != nil {
				return err
			}
		}
		err = unix.Unlinkat(dir, base, unix.AT_REMOVEDIR)
		switch {
		case errors.Is(err, unix.ENOTEMPTY) && !recursive:
			return &proto.PathError{Path: name, Message: "is not empty; delete it with recursive: true"}
		case errors.Is(err, unix.ENOTEMPTY):
			return &proto.PathError{Path: name, Message: "is not empty: somebody made a file there at the same time"}
		case errors.Is(err, unix.EBUSY):
			return &proto.PathError{Path: name, Message: "is where another file system is mounted"}
		}
		return err
	})
	if errors.Is(err, unix.ENOENT) {
		err = fs.ErrNotExist
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = &proto.NoFileError{Path: name}
	}
	return 0, absent(name, err)
}

// deleteBelow deletes what is in a directory.
func (f *Files) deleteBelow(ctx context.Context, parent int, base, name string, depth int) error {
	if depth == maxDepth {
		return tooDeep(name)
	}
	dir, err := openBeneath(parent, base)
	if err != nil {
		return f.dirError(path.Join(f.mount.Prefix, name), err)
	}
	defer func() { _ = unix.Close(dir) }()
	fd, err := unix.Openat(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	names := os.NewFile(uintptr(fd), "directory")
	defer func() { _ = names.Close() }()
	for {
		batch, err := names.Readdirnames(namesRead)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, child := range batch {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			err := unix.Unlinkat(dir, child, 0)
			if errors.Is(err, unix.EISDIR) {
				if err = f.deleteBelow(ctx, dir, child, path.Join(name, child), depth+1); err == nil {
					err = unix.Unlinkat(dir, child, unix.AT_REMOVEDIR)
				}
			}
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
		}
	}
}

// Rename renames what is at a path. Nothing may be at the new one. version is always 0.
func (f *Files) Rename(_ context.Context, from, to string) (version int64, err error) {
	err = f.inParent(from, false, func(oldDir int, oldBase string) error {
		if _, err := lstat(oldDir, oldBase); err != nil {
			return err // before directories are made for nothing
		}
		parent, base := split(to)
		if !proto.ValidSegment(base) {
			return &proto.NoFileError{Path: to}
		}
		dir, err := f.openDir(parent, true)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(dir) }()
		err = unix.Renameat2(oldDir, oldBase, dir, base, unix.RENAME_NOREPLACE)
		switch {
		case errors.Is(err, unix.EEXIST):
			return &proto.PathError{Path: to, Message: "exists; delete it first, or choose another name"}
		case errors.Is(err, unix.EINVAL):
			return &proto.PathError{Path: to, Message: "is below what is renamed"}
		}
		return err
	})
	if errors.Is(err, unix.ENOENT) {
		err = &proto.NoFileError{Path: from}
	}
	return 0, err
}
