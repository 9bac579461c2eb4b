package nsjail

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
)

// MountData mounts storage; see jail.Jail.
func (s *sandbox) MountData(ctx context.Context, d jail.Data) error {
	s.mu.Lock()
	s.data = d // kill aborts it from now on
	s.mu.Unlock()
	mounts, err := d.Mount(s.uids.program(), s.uids.program())
	defer func() {
		for _, m := range mounts {
			_ = m.Mount.Close()
		}
	}()
	if err != nil {
		return err
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	parent, err := s.mountsDir(mounts)
	if err != nil {
		return fmt.Errorf("make %s: %w", proto.MountsDir, err)
	}
	defer func() { _ = parent.Close() }()
	if err := disk.Attach(parent, s.initFD, proto.MountsDir); err != nil {
		return err
	}
	for _, m := range mounts {
		if err := disk.Attach(m.Mount, s.initFD, proto.MountsDir+"/"+m.Name); err != nil {
			return err
		}
	}
	return nil
}

// MountAgent mounts the program of an agent; see jail.Jail.
func (s *sandbox) MountAgent(ctx context.Context, agent, dir string) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir,
		unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("clone the mount of %s: %w", dir, err)
	}
	mounted := os.NewFile(uintptr(fd), dir)
	defer func() { _ = mounted.Close() }()
	// Private: what the host mounts there later must not appear in the jail.
	attr := unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV,
		Propagation: unix.MS_PRIVATE,
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("make the mount of %s read-only: %w", dir, err)
	}
	return disk.Attach(mounted, s.initFD, proto.AgentDir(agent))
}

// mountsDir returns a read-only file system with an empty directory for each mount and its
// ancestors, in no mount namespace.
func (s *sandbox) mountsDir(mounts []jail.DataMount) (_ *os.File, err error) {
	dirs := dirsOf(mounts)
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fs) }()
	root := strconv.Itoa(s.uids.first)
	for name, value := range map[string]string{
		"size": "64k", "nr_inodes": strconv.Itoa(len(dirs) + 2), "mode": "0755",
		"uid": root, "gid": root,
	} {
		err = errors.Join(err, unix.FsconfigSetString(fs, name, value))
	}
	if err == nil {
		err = unix.FsconfigCreate(fs)
	}
	if err != nil {
		return nil, err
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, err
	}
	parent := os.NewFile(uintptr(fd), "mounts")
	for _, dir := range dirs {
		err = errors.Join(err, unix.Mkdirat(fd, dir, 0o755))
	}
	if err == nil {
		err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	}
	if err != nil {
		return nil, errors.Join(err, parent.Close())
	}
	return parent, nil
}

// dirsOf returns the directories of mounts and their ancestors, parents first.
func dirsOf(mounts []jail.DataMount) (dirs []string) {
	for _, m := range mounts {
		for i, c := range m.Name {
			if c == '/' {
				dirs = append(dirs, m.Name[:i])
			}
		}
		dirs = append(dirs, m.Name)
	}
	return dirs
}
