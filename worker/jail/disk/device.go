package disk

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// maxAttempts limits how often other users may grab the free device that the kernel returned to us.
// Each time, one of them makes progress.
const maxAttempts = 1000

// EXT4_IOC_SHUTDOWN is _IOR('X', 125, __u32). The flag shuts down without writing anything.
const (
	ext4Shutdown   = 0x8004587d
	goingNoLogSync = 2
)

// attach attaches the image to a free loop device. The kernel detaches it after its last user: the
// returned file, or the file system mounted from it.
func attach(image *os.File) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("find a loop device: %w: load the module loop, and in a container mount the host's /dev", err)
	}
	defer func() { _ = control.Close() }()
	for range maxAttempts {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a loop device: %w: all of them are in use", err)
		}
		device, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if errors.Is(err, unix.ENXIO) {
			continue // the device is being detached
		}
		if err != nil {
			return nil, fmt.Errorf("open the free loop device: %w: in a container mount the host's /dev, where new "+
				"devices appear", err)
		}
		err = unix.IoctlLoopConfigure(int(device.Fd()), &unix.LoopConfig{
			Fd: uint32(image.Fd()), Size: blockSize,
			// Direct I/O keeps a tenant's data out of the image's page cache, which is uncharged.
			// The kernel ignores it if the host's file system cannot.
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
	return nil, fmt.Errorf("find a loop device: other processes were faster %d times", maxAttempts)
}

// mount mounts the image in no namespace, with a limit for directories as in Size. The mount
// disappears when the file is closed, unless it was attached somewhere.
func mount(image *os.File, directory int64) (*os.File, error) {
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
	// Nothing outlives this process, so barriers are off, and a tenant's fsync does not slow other
	// disk users.
	for _, flag := range []string{"nobarrier", "noauto_da_alloc"} {
		err = errors.Join(err, unix.FsconfigSetFlag(fs, flag))
	}
	err = errors.Join(err, unix.FsconfigSetString(fs, "errors", "remount-ro"))
	if directory > 0 {
		err = errors.Join(err, unix.FsconfigSetString(fs, "max_dir_size_kb", strconv.FormatInt(directory>>10, 10)))
	}
	if err == nil {
		err = unix.FsconfigCreate(fs)
	}
	if err != nil {
		return nil, fmt.Errorf("mount %s: %w%s", device.Name(), err, mountMessages(fs))
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return nil, fmt.Errorf("mount %s: %w", device.Name(), err)
	}
	return os.NewFile(uintptr(fd), "volume"), nil
}

// freeze writes a file system to its image, clean as after unmounting, and blocks further writes.
// The unmount may lag behind the closing of the mount, because a starting process holds it until
// its exec.
func freeze(mount *os.File) error {
	fs, err := unix.Fspick(int(mount.Fd()), "", unix.FSPICK_EMPTY_PATH|unix.FSPICK_CLOEXEC)
	if err != nil {
		return fmt.Errorf("write the file system: %w", err)
	}
	defer func() { _ = unix.Close(fs) }()
	if err = unix.FsconfigSetFlag(fs, "ro"); err == nil {
		err = unix.FsconfigReconfigure(fs)
	}
	if err != nil {
		return fmt.Errorf("write the file system: %w%s", err, mountMessages(fs))
	}
	return nil
}

// mountMessages returns the kernel's messages about a failed mount.
func mountMessages(fs int) string {
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

// shutDown makes every further access to a file system fail and discards unwritten data.
func shutDown(mount *os.File) error {
	root, err := os.Open(selfFD(mount))
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	if err := unix.IoctlSetPointerInt(int(root.Fd()), ext4Shutdown, goingNoLogSync); err != nil &&
		!errors.Is(err, unix.EIO) {
		return fmt.Errorf("shut the file system down: %w", err)
	}
	return nil
}

func selfFD(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }
