package home

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Overlay is a home. Its directories must not change while it is in use.
type Overlay struct {
	// Lower is the directory of the last version, which belongs to root. For a new thread it is
	// empty.
	Lower string
	// Volume is the root of an empty file system whose mount is in no mount namespace, see
	// disk.Volume.Path. Mount creates the directories upper and work on it.
	Volume string
	Owner  *Owner
	// Fill, if not nil, adds files to the upper directory before it is mounted.
	Fill func(upper string) error
}

// Space that an overlay takes on its volume in addition to the home: the directories upper and
// work, the kernel's entries in work, a character device that all deletions link to, and the file
// of LimitSpace. With Linux 6.18 that is 9 inodes and 7 blocks of 4 KiB; the rest is a reserve for
// other kernels.
const (
	OwnInodes = 16
	OwnBytes  = 64 << 10
)

// MaxDirectory is the limit of each directory of the volume of an overlay, in bytes. An overlay
// keeps a list of all names for an open directory in uncharged memory: up to eight
// times the size of the directory, taken by one system call.
const MaxDirectory = 4 << 20

func (o *Overlay) upper() string { return o.Volume + "/upper" }
func (o *Overlay) work() string  { return o.Volume + "/work" }

// options determine the format of the upper directory independently of the kernel's defaults. With
// an index, hard links stay hard links. Redirects allow directories to be renamed. Without
// metacopy, upper contains the whole content of every changed file. The volume does not outlive the
// execution, so that nothing needs to be synced.
var options = [][2]string{
	{"index", "on"},
	{"redirect_dir", "on"},
	{"metacopy", "off"},
	{"nfs_export", "off"},
	{"xino", "auto"},
	{"volatile", ""},
}

// Mount returns the home as a mount that is in no mount namespace. Closing the file unmounts it
// unless it has been moved into a namespace. Its root has the metadata of the last version's root.
// The volume's mount is in no namespace afterwards either, but can no longer be moved into one.
func (o *Overlay) Mount() (*os.File, error) {
	mount, _, err := o.MountPart(nil)
	return mount, err
}

// MountPart is like Mount, but if open is not nil, it also returns a mount of the directory that open
// opens below root, the root of the home. The mount of the whole home can then no longer be moved
// into a namespace.
func (o *Overlay) MountPart(open func(root int) (dir int, err error)) (mount, part *os.File, err error) {
	if err := o.makeUpper(); err != nil {
		return nil, nil, fmt.Errorf("mount a home: %w", err)
	}
	err = inPrivateNamespace(func() (err error) {
		mount, err = o.mount()
		if err != nil || open == nil {
			return err
		}
		if part, err = o.clonePart(mount, open); err != nil {
			err = errors.Join(err, mount.Close())
		}
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("mount a home: %w", err)
	}
	return mount, part, nil
}

// clonePart returns a mount of a directory of the home. Before Linux 6.15, only mounts that are in
// the namespace of the caller can be cloned.
func (o *Overlay) clonePart(mount *os.File, open func(root int) (dir int, err error)) (*os.File, error) {
	fd := int(mount.Fd())
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, o.Lower, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return nil, fmt.Errorf("mount the home: %w", err)
	}
	dir, err := open(fd)
	if err != nil {
		return nil, err
	}
	defer closeFD(dir)
	part, err := unix.OpenTree(dir, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("clone the mount of the home: %w", err)
	}
	return os.NewFile(uintptr(part), "part"), nil
}

// makeUpper creates the upper directory, which becomes the root of the home, with the metadata of
// the last version's root.
func (o *Overlay) makeUpper() error {
	lower, err := openRoot(o.Lower)
	if err != nil {
		return err
	}
	defer closeFD(lower)
	e, err := rootMetadata(lower)
	if err != nil {
		return err
	}
	err = errors.Join(os.Mkdir(o.upper(), 0o700), os.Mkdir(o.work(), 0o700))
	if err != nil {
		return err
	}
	upper, err := openRoot(o.upper())
	if err != nil {
		return err
	}
	defer closeFD(upper)
	err = errors.Join(unix.Fchown(upper, o.Owner.uid, o.Owner.gid), unix.Fchmod(upper, e.Mode),
		setXattrs(upper, e.Xattrs, false))
	if err != nil {
		return fmt.Errorf("create the upper directory: %w", err)
	}
	if o.Fill != nil {
		if err := o.Fill(o.upper()); err != nil {
			return fmt.Errorf("fill the upper directory: %w", err)
		}
	}
	return setModified(upper, ".", e)
}

// LimitSpace leaves at most the given number of bytes of the volume to the home. It allocates the
// rest to a file outside of the home, without writing it.
func (o *Overlay) LimitSpace(left int64) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(o.Volume, &fs); err != nil {
		return fmt.Errorf("limit the space of a home: %w", err)
	}
	excess := int64(fs.Bavail)*fs.Bsize - left
	if excess <= 0 {
		return nil
	}
	f, err := os.OpenFile(o.Volume+"/reserved", os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		err = errors.Join(unix.Fallocate(int(f.Fd()), 0, 0, excess), f.Close())
	}
	if err != nil {
		return fmt.Errorf("limit the space of a home: %w", err)
	}
	return nil
}

// inPrivateNamespace calls f in a new mount namespace without propagation in either direction. The
// namespace ends with the call.
func inPrivateNamespace(f func() error) error {
	done := make(chan error)
	go func() { done <- unshareAndCall(f) }()
	return <-done
}

func unshareAndCall(f func() error) error {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The main thread cannot be discarded, and /proc/self shows its namespace.
		defer runtime.UnlockOSThread()
		return inPrivateNamespace(f)
	}
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("create a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	return f()
}

func (o *Overlay) mount() (*os.File, error) {
	lower, err := o.Owner.mapped(unix.AT_FDCWD, o.Lower)
	if err != nil {
		return nil, err
	}
	defer closeFD(lower)
	volume, err := unix.Open(o.Volume, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the volume: %w", err)
	}
	defer closeFD(volume)
	// The mount point does not matter, since the overlay refers to them by descriptor.
	for _, fd := range []int{lower, volume} {
		if err := unix.MoveMount(fd, "", unix.AT_FDCWD, o.Lower, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return nil, fmt.Errorf("mount a layer: %w", err)
		}
	}
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open overlay: %w: the kernel needs overlay, and Linux 5.19 or later", err)
	}
	defer closeFD(fs)
	err = errors.Join(
		unix.FsconfigSetString(fs, "lowerdir", fmt.Sprintf("/proc/self/fd/%d", lower)),
		unix.FsconfigSetString(fs, "upperdir", fmt.Sprintf("/proc/self/fd/%d/upper", volume)),
		unix.FsconfigSetString(fs, "workdir", fmt.Sprintf("/proc/self/fd/%d/work", volume)))
	for _, option := range options {
		if option[1] == "" {
			err = errors.Join(err, unix.FsconfigSetFlag(fs, option[0]))
		} else {
			err = errors.Join(err, unix.FsconfigSetString(fs, option[0], option[1]))
		}
	}
	if err == nil {
		err = unix.FsconfigCreate(fs)
	}
	if err != nil {
		return nil, fmt.Errorf("mount the overlay: %w%s", err, kernelMessages(fs))
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return nil, fmt.Errorf("mount the overlay: %w", err)
	}
	mount := os.NewFile(uintptr(fd), "home")
	if err := o.check(fd); err != nil {
		return nil, errors.Join(err, mount.Close())
	}
	return mount, nil
}

// check detects features that the kernel disables silently if a file system does not support them.
func (o *Overlay) check(mount int) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(mount, &fs); err != nil {
		return err
	}
	if fs.Flags&unix.ST_RDONLY != 0 {
		return errors.New("the overlay is read-only: the volume's file system does not support upper directories")
	}
	if _, err := os.Lstat(o.work() + "/index"); err != nil {
		return fmt.Errorf("the overlay has no index: %w: the worker needs CAP_DAC_READ_SEARCH, and the file system of %s "+
			"must support file handles, "+
			"as ext4, xfs and btrfs do", err, o.Lower)
	}
	return nil
}

// kernelMessages returns the kernel's messages about a failed mount, each after a colon.
func kernelMessages(fs int) string {
	var all strings.Builder
	b := make([]byte, 4096)
	for {
		n, err := unix.Read(fs, b)
		if err != nil || n == 0 {
			return all.String()
		}
		all.WriteString(": " + strings.TrimSpace(string(b[:n])))
	}
}
