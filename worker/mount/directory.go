package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/home"
)

// openMountRoot opens a directory that may contain connections. Programs can set the set-uid bit of
// files there. The directory must be mounted nosuid, so that no local user gains the rights of the
// files' owner.
func openMountRoot(root string) (int, error) {
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open the mount root %s: %w", root, err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return -1, errors.Join(fmt.Errorf("open the mount root %s: %w", root, err), unix.Close(fd))
	}
	if fs.Flags&unix.ST_NOSUID == 0 {
		return -1, errors.Join(fmt.Errorf(
			"the mount root %s is not mounted nosuid: programs could leave set-uid programs there for the users of this "+
				"machine: mount it so, such as with mount --bind -o nosuid", root), unix.Close(fd))
	}
	return fd, nil
}

// rootOf returns the mount root of a directory, and the path below it, "." for the root.
func rootOf(roots []string, dir string) (root, below string, ok bool) {
	for _, root := range roots {
		if dir == root {
			return root, ".", true
		}
		if below, ok := strings.CutPrefix(dir, strings.TrimSuffix(root, "/")+"/"); ok {
			return root, below, true
		}
	}
	return "", "", false
}

// openConnection opens the directory of a connection, which must be in one of roots, and returns its
// owner.
func openConnection(roots []string, m proto.Mount) (dir int, owner unix.Stat_t, err error) {
	root, below, ok := rootOf(roots, m.Directory)
	if !ok {
		return -1, owner, &Error{m.Slug, "its directory is outside of what this machine allows (--mount-roots)", nil}
	}
	rootFD, err := openMountRoot(root)
	if err != nil {
		return -1, owner, &Error{m.Slug, "its directory cannot be used on this machine", err}
	}
	defer func() { _ = unix.Close(rootFD) }()
	dir, err = openBeneath(rootFD, below)
	if err != nil {
		return -1, owner, &Error{
			m.Slug, "its directory does not exist on this machine, or is behind a symbolic link or another mount", err,
		}
	}
	if err = unix.Fstat(dir, &owner); err != nil {
		err = &Error{m.Slug, "its directory cannot be used on this machine", err}
	} else if owner.Uid == 0 || owner.Gid == 0 {
		err = &Error{m.Slug, "its directory belongs to root: the administrator can give it to another user and group, " +
			"whose files programs may change", nil}
	}
	if err != nil {
		_ = unix.Close(dir)
		return -1, owner, err
	}
	return dir, owner, nil
}

// mountDirectory returns a mount of a directory in no mount namespace. The files of the owner of
// the connection's directory appear as the program user's. A missing directory below the
// connection's is created, unless the mount is read-only.
func (o *Opener) mountDirectory(m proto.Mount, uid, gid int) (*os.File, error) {
	top, owner, err := openConnection(o.Roots, m)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(top) }()
	dir, err := openPrefix(top, m, owner)
	if err != nil {
		return nil, &Error{
			m.Slug,
			"its directory does not have the part that the program may see, or that is behind a symbolic link or another mount",
			err,
		}
	}
	defer func() { _ = unix.Close(dir) }()
	mounted, err := bind(dir, m.ReadOnly, [2]int{int(owner.Uid), int(owner.Gid)}, [2]int{uid, gid})
	if err != nil {
		return nil, &Error{m.Slug, "its directory cannot be mounted on this machine", err}
	}
	return mounted, nil
}

// mountVolume returns a mount of the part of a volume that the program sees. A missing directory is
// created, unless the mount is read-only. Symbolic links in its path are not followed.
func mountVolume(v Volume, m proto.Mount, uid, gid int) (*os.File, error) {
	if v == nil {
		return nil, &Error{m.Slug, "this worker cannot mount volumes", nil}
	}
	outside := false
	mounted, err := v(uid, gid, func(root int) (int, error) {
		dir, err := openPrefix(root, m, unix.Stat_t{Uid: uint32(uid), Gid: uint32(gid)})
		outside = err != nil
		return dir, err
	})
	if outside {
		return nil, &Error{
			m.Slug,
			"the volume does not have the part that the program may see, or that is no directory or behind a symbolic link", err,
		}
	}
	if err != nil {
		return nil, fmt.Errorf("mount volume %s: %w", m.Slug, err)
	}
	return mounted, nil
}

// openBeneath opens a directory by a path that follows no link, crosses no mount, and stays below
// dir.
func openBeneath(dir int, path string) (int, error) {
	how := unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	for {
		fd, err := unix.Openat2(dir, path, &how)
		if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EAGAIN) {
			return fd, err
		}
	}
}

// openPrefix opens the directory of a mount's prefix, and creates it if allowed.
func openPrefix(top int, m proto.Mount, owner unix.Stat_t) (int, error) {
	fd, err := openBeneath(top, ".")
	if m.Prefix == "" || err != nil {
		return fd, err
	}
	for name := range strings.SplitSeq(m.Prefix, "/") {
		next, err := openBeneath(fd, name)
		if errors.Is(err, unix.ENOENT) && !m.ReadOnly {
			err = mkdirAs(owner, fd, name)
			if err == nil || errors.Is(err, unix.EEXIST) { // created by another execution meanwhile
				next, err = openBeneath(fd, name)
			}
		}
		_ = unix.Close(fd)
		if err != nil {
			return -1, fmt.Errorf("open %.300q: %w", name, err)
		}
		fd = next
	}
	return fd, nil
}

// mkdirAs creates a directory as its owner. Changing the owner afterwards would not be safe: a
// worker that dies in between would leave a directory that no program can write to.
func mkdirAs(owner unix.Stat_t, dir int, name string) error {
	runtime.LockOSThread() // the ids are those of the thread
	defer runtime.UnlockOSThread()
	gid, _ := unix.SetfsgidRetGid(int(owner.Gid))
	uid, _ := unix.SetfsuidRetUid(int(owner.Uid))
	defer func() {
		_, _ = unix.SetfsuidRetUid(uid)
		_, _ = unix.SetfsgidRetGid(gid)
	}()
	return unix.Mkdirat(dir, name, 0o755)
}

// bind returns a mount of a directory without the mounts in it.
func bind(dir int, readOnly bool, from, to [2]int) (*os.File, error) {
	ids, err := home.IDMap(from, to, 1)
	if err != nil {
		return nil, err
	}
	defer func() { _ = ids.Close() }()
	fd, err := unix.OpenTree(dir, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("clone the mount: %w", err)
	}
	mounted := os.NewFile(uintptr(fd), filepath.Base(proto.MountsDir))
	attr := unix.MountAttr{
		Attr_set:  unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_IDMAP,
		Userns_fd: uint64(ids.Fd()),
	}
	if readOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return nil, errors.Join(fmt.Errorf(
			"map the ids: %w: its file system must support id-mapped mounts, as ext4, xfs and btrfs do", err), mounted.Close())
	}
	return mounted, nil
}
