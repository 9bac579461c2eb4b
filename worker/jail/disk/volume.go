package disk

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// Volume is a directory with a limit. Its methods are safe for concurrent use, but must not be
// called after Close.
type Volume struct {
	mount *os.File
	close func() error
}

// newVolume creates a volume that belongs to root.
func newVolume(dir string, t *template, size Size) (*Volume, error) {
	image, err := t.image(dir)
	if err != nil {
		return nil, err
	}
	// The loop device holds the image.
	defer func() { _ = image.Close() }()
	m, err := mount(image, size.Directory)
	if err != nil {
		return nil, err
	}
	v := &Volume{mount: m}
	v.close = sync.OnceValue(func() error { return errors.Join(shutDown(m), m.Close()) })
	var free unix.Statfs_t
	if err := unix.Fstatfs(int(m.Fd()), &free); err != nil {
		return nil, errors.Join(err, v.Close())
	}
	if int64(free.Bavail) != size.blocks() || int64(free.Ffree) != size.Inodes {
		return nil, errors.Join(fmt.Errorf("the file system has %d blocks and %d inodes, not %d and %d",
			free.Bavail, free.Ffree, size.blocks(), size.Inodes), v.Close())
	}
	return v, nil
}

// Path returns a path of the directory for this process, valid until Close. Other processes cannot
// bind it, since the mount is in no namespace: use Attach.
func (v *Volume) Path() string { return selfFD(v.mount) }

// Attach mounts the volume in a jail, like the function Attach. The mount stays until the jail
// ends, or until Close, after which every access fails.
func (v *Volume) Attach(pidfd int, target string) error { return Attach(v.mount, pidfd, target) }

// Attach moves a mount that is in no namespace to the absolute path target in a jail. pidfd is a
// process of the jail. The mount stays until the jail ends, even if the file is closed. The path is
// resolved inside the jail, so no tenant's program may run there yet. A mount can be attached once.
func Attach(mount *os.File, pidfd int, target string) error {
	move := func() error {
		return unix.MoveMount(int(mount.Fd()), "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
	if err := inMountNamespace(pidfd, move); err != nil {
		return fmt.Errorf("attach a mount at %s: %w", target, err)
	}
	return nil
}

// Bind mounts the directory dir below root at target as well, all in the mount namespace of a process. It
// does not follow links below root.
func Bind(pidfd int, root, dir, target string) error {
	bind := func() error {
		at, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open %s: %w", root, err)
		}
		defer func() { _ = unix.Close(at) }()
		fd, err := unix.Openat2(at, dir, &unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
		})
		if err != nil {
			return fmt.Errorf("open %s in %s: %w", dir, root, err)
		}
		defer func() { _ = unix.Close(fd) }()
		tree, err := unix.OpenTree(fd, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
		if err != nil {
			return fmt.Errorf("clone the mount of %s: %w", root, err)
		}
		defer func() { _ = unix.Close(tree) }()
		return unix.MoveMount(tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
	if err := inMountNamespace(pidfd, bind); err != nil {
		return fmt.Errorf("mount %s at %s: %w", dir, target, err)
	}
	return nil
}

// ReplaceRoot makes a mount that is in no namespace the root of a jail and of its processes, moves the
// mounts at the paths moved into it, and unmounts the former root. The mount has directories and files at
// these paths; at is an empty directory of the former root. No tenant's program may run in the jail yet.
func ReplaceRoot(mount *os.File, pidfd int, at string, moved []string) error {
	replace := func() error {
		if err := unix.MoveMount(int(mount.Fd()), "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("mount it at %s: %w", at, err)
		}
		for _, path := range moved {
			if err := unix.MoveMount(unix.AT_FDCWD, path, unix.AT_FDCWD, at+path, 0); err != nil {
				return fmt.Errorf("move the mount at %s: %w", path, err)
			}
		}
		if err := unix.Chdir(at); err != nil {
			return err
		}
		// With the same directory for both, the former root ends up above the new one, see pivot_root(2).
		if err := unix.PivotRoot(".", "."); err != nil {
			return fmt.Errorf("exchange the roots: %w", err)
		}
		return unix.Unmount(".", unix.MNT_DETACH)
	}
	if err := inMountNamespace(pidfd, replace); err != nil {
		return fmt.Errorf("replace the root: %w", err)
	}
	return nil
}

// inMountNamespace calls f in the mount namespace of a process.
func inMountNamespace(pidfd int, f func() error) error {
	done := make(chan error)
	go func() { done <- runInMountNamespace(pidfd, f) }()
	return <-done
}

// runInMountNamespace does so on the thread of its goroutine, which ends with the goroutine.
func runInMountNamespace(pidfd int, f func() error) error {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The main thread cannot end, and /proc/self shows it.
		defer runtime.UnlockOSThread()
		return inMountNamespace(pidfd, f)
	}
	// Threads share their root and working directory, which setns would change.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	if err := unix.Setns(pidfd, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter the jail's mounts: %w", err)
	}
	return f()
}

// Close discards the volume and its content, even if it is in use, and frees the loop device and
// disk space. It is idempotent.
func (v *Volume) Close() error { return v.close() }
