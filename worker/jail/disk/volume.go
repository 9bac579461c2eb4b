package disk

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// Volume is an empty directory with a limit. Its methods may be called from
// several goroutines, but none after Close.
type Volume struct {
	mount *os.File
	close func() error
}

// newVolume makes one, of root's.
func newVolume(dir string, t *template, size Size) (*Volume, error) {
	image, err := t.image(dir)
	if err != nil {
		return nil, err
	}
	// The loop device keeps it.
	defer func() { _ = image.Close() }()
	m, err := mount(image)
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

// Path names the directory within this process, until Close. Another process
// cannot bind it, since its mount is in no namespace: that is what Attach is for.
func (v *Volume) Path() string { return selfFD(v.mount) }

// Attach mounts the volume in a jail, as the function Attach does. It stays until
// the jail is gone, or until Close, which lets every access to it fail.
func (v *Volume) Attach(pidfd int, target string) error { return Attach(v.mount, pidfd, target) }

// Attach moves a mount that is in no namespace into a jail, to the absolute path
// target there; pidfd is a process of the jail. It stays until the jail is gone,
// also when the file is closed. The path is resolved inside the jail, so nothing in
// there that is a tenant's may run yet. A mount can be attached once.
func Attach(mount *os.File, pidfd int, target string) error {
	move := func() error {
		return unix.MoveMount(int(mount.Fd()), "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
	done := make(chan error)
	go func() { done <- enter(pidfd, move) }()
	if err := <-done; err != nil {
		return fmt.Errorf("attach a mount at %s: %w", target, err)
	}
	return nil
}

// enter calls f in the mount namespace of a process, and ends the calling
// goroutine's thread with it, which is of no use afterwards.
func enter(pidfd int, f func() error) error {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The main thread cannot end, and is what /proc/self shows.
		defer runtime.UnlockOSThread()
		done := make(chan error)
		go func() { done <- enter(pidfd, f) }()
		return <-done
	}
	// Threads share their root and working directory, which a namespace brings
	// along.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	if err := unix.Setns(pidfd, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter the jail's mounts: %w", err)
	}
	return f()
}

// Close ends the volume and all that is on it, whoever still uses it, and gives
// back the loop device and the host's disk. It may be called more than once.
func (v *Volume) Close() error { return v.close() }
