package home

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Overlay is a home. Its directories must stay as they are while it is used.
type Overlay struct {
	// Lower is the directory of the last version, of root's; for a new thread it is
	// empty.
	Lower string
	// Volume is the root of a mount that is in no namespace, as disk.Volume.Path
	// names it, and empty. Mount makes the directories upper and work on it.
	Volume string
	Owner  *Owner
}

// What an overlay needs of its volume for itself, so that a volume that is larger by
// this gives the program all it shall have: the directories upper, work, what the
// kernel makes in that, and one character device that all deletions are links to: 8
// inodes and 7 blocks of 4 KiB with Linux 6.18, and room for a kernel that wants more.
const (
	OwnInodes = 16
	OwnBytes  = 64 << 10
)

func (o *Overlay) upper() string { return o.Volume + "/upper" }
func (o *Overlay) work() string  { return o.Volume + "/work" }

// options are those that decide what the upper directory looks like, whatever the
// kernel's defaults are. With an index, hard links stay hard links; redirects let
// directories be renamed; of a file's content nothing may stay below. Nobody needs
// what is synced: the volume does not outlive the execution.
var options = [][2]string{ // read only
	{"index", "on"}, {"redirect_dir", "on"}, {"metacopy", "off"}, {"nfs_export", "off"}, {"xino", "auto"}, {"volatile", ""},
}

// Mount returns the home as a mount that is in no namespace, which is gone when
// the file is closed, unless it was moved to a place by then. The root of it has
// the metadata that the last version's has. The mount of the volume is in no
// namespace again afterwards, but can no longer be moved to one.
func (o *Overlay) Mount() (*os.File, error) {
	if err := o.makeUpper(); err != nil {
		return nil, fmt.Errorf("make a home: %w", err)
	}
	var mount *os.File
	err := alone(func() (err error) {
		mount, err = o.mount()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make a home: %w", err)
	}
	return mount, nil
}

// makeUpper makes the upper directory, which the overlay shows as the home's
// root, look as the last version's root.
func (o *Overlay) makeUpper() error {
	lower, err := openRoot(o.Lower)
	if err != nil {
		return err
	}
	defer closeFD(lower)
	e, err := metadata(lower)
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
	err = errors.Join(unix.Fchown(upper, o.Owner.uid, o.Owner.gid), unix.Fchmod(upper, e.Mode), setXattrs(upper, e.Xattrs, false))
	if err != nil {
		return fmt.Errorf("make the upper directory: %w", err)
	}
	return setTimeOf(upper, ".", e)
}

// alone calls f in a mount namespace of its own that nothing leaves or enters.
// The thread, and with it the namespace, ends then.
func alone(f func() error) error {
	done := make(chan error)
	go func() { done <- unshared(f) }()
	return <-done
}

func unshared(f func() error) error {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The main thread cannot end, and is what /proc/self shows.
		defer runtime.UnlockOSThread()
		return alone(f)
	}
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	return f()
}

func (o *Overlay) mount() (*os.File, error) {
	lower, err := o.Owner.mapped(o.Lower)
	if err != nil {
		return nil, err
	}
	defer closeFD(lower)
	volume, err := unix.Open(o.Volume, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the volume: %w", err)
	}
	defer closeFD(volume)
	// Where they are does not matter, since descriptors name them.
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
		return nil, fmt.Errorf("mount the overlay: %w%s", err, complaints(fs))
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

// check looks for what the kernel gives up without a word where a file system
// cannot do it.
func (o *Overlay) check(mount int) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(mount, &fs); err != nil {
		return err
	}
	if fs.Flags&unix.ST_RDONLY != 0 {
		return errors.New("the overlay is read-only: the volume's file system can hold no upper directory")
	}
	if _, err := os.Lstat(o.work() + "/index"); err != nil {
		return fmt.Errorf("the overlay has no index: %w: the worker needs CAP_DAC_READ_SEARCH, and the file system of %s must support file handles, "+
			"as ext4, xfs and btrfs do", err, o.Lower)
	}
	return nil
}

// complaints are the messages the kernel left for us while mounting.
func complaints(fs int) string {
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
