package disk

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// maxRaces bounds how often others, in this process or another, may take the free
// device first that the kernel named to us. Each time one of them got on.
const maxRaces = 1000

// EXT4_IOC_SHUTDOWN, _IOR('X', 125, __u32), and its way to go down without
// writing anything.
const (
	ext4Shutdown   = 0x8004587d
	goingNoLogSync = 2
)

// attach puts the image behind a free loop device, which the kernel takes apart
// when its last user is gone: the file returned, or the file system mounted from
// it.
func attach(image *os.File) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("find a loop device: %w: load the module loop, and in a container mount the host's /dev", err)
	}
	defer func() { _ = control.Close() }()
	for range maxRaces {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a loop device: %w: every one that the kernel allows is in use", err)
		}
		device, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if errors.Is(err, unix.ENXIO) {
			continue // it was ending
		}
		if err != nil {
			return nil, fmt.Errorf("open the free loop device: %w: in a container mount the host's /dev, where new devices appear", err)
		}
		err = unix.IoctlLoopConfigure(int(device.Fd()), &unix.LoopConfig{
			Fd: uint32(image.Fd()), Size: blockSize,
			// Direct, so that a tenant's data is not in memory twice, the second time on
			// nobody's account. The kernel falls back where the host's file system cannot.
			Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO},
		})
		if err == nil {
			return device, nil
		}
		_ = device.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("put the image behind %s: %w", device.Name(), err)
		}
	}
	return nil, fmt.Errorf("find a loop device: other processes were faster %d times", maxRaces)
}

// mount returns a file system on the image as a mount that is in no namespace: it
// is gone when the file is closed, unless it was moved to a place by then.
func mount(image *os.File) (*os.File, error) {
	device, err := attach(image)
	if err != nil {
		return nil, err
	}
	defer func() { _ = device.Close() }()
	fs, err := unix.Fsopen("ext4", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open ext4: %w: the kernel needs ext4, and Linux 5.8 or later", err)
	}
	defer func() { _ = unix.Close(fs) }()
	err = unix.FsconfigSetString(fs, "source", device.Name())
	// What is on it never outlives this process, so nothing is written to the
	// host's disk for safety's sake; a tenant's fsync costs others nothing.
	for _, flag := range []string{"nobarrier", "noauto_da_alloc"} {
		err = errors.Join(err, unix.FsconfigSetFlag(fs, flag))
	}
	err = errors.Join(err, unix.FsconfigSetString(fs, "errors", "remount-ro"))
	if err == nil {
		err = unix.FsconfigCreate(fs)
	}
	if err != nil {
		return nil, fmt.Errorf("mount %s: %w%s", device.Name(), err, complaints(fs))
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return nil, fmt.Errorf("mount %s: %w", device.Name(), err)
	}
	return os.NewFile(uintptr(fd), "volume"), nil
}

// settle writes a file system to its image, clean as after unmounting, and lets nothing be written any more. Unmounting itself may come later
// than the closing of the mount: a process that is being started has it until its own program runs.
func settle(mount *os.File) error {
	fs, err := unix.Fspick(int(mount.Fd()), "", unix.FSPICK_EMPTY_PATH|unix.FSPICK_CLOEXEC)
	if err != nil {
		return fmt.Errorf("write the file system: %w", err)
	}
	defer func() { _ = unix.Close(fs) }()
	if err = unix.FsconfigSetFlag(fs, "ro"); err == nil {
		err = unix.FsconfigReconfigure(fs)
	}
	if err != nil {
		return fmt.Errorf("write the file system: %w%s", err, complaints(fs))
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

// shutDown makes a file system refuse everything from now on, and forget what
// it has not written.
func shutDown(mount *os.File) error {
	root, err := os.Open(selfFD(mount))
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	if err := unix.IoctlSetPointerInt(int(root.Fd()), ext4Shutdown, goingNoLogSync); err != nil && !errors.Is(err, unix.EIO) {
		return fmt.Errorf("shut the file system down: %w", err)
	}
	return nil
}

func selfFD(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }
