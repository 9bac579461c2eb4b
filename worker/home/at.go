package home

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto/layer"
)

const readDir = unix.O_RDONLY | unix.O_DIRECTORY

// openAt opens a name in a directory. It fails if that is a symlink or a mount point.
func openAt(dir int, name string, flags int, mode uint32) (int, error) {
	how := unix.OpenHow{
		Flags: uint64(flags | unix.O_NOFOLLOW | unix.O_CLOEXEC), Mode: uint64(mode),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	}
	for {
		fd, err := unix.Openat2(dir, name, &how)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil {
			return -1, fmt.Errorf("open %.300q: %w", name, err)
		}
		return fd, nil
	}
}

// openRoot opens a directory by a trusted path.
func openRoot(path string) (int, error) {
	fd, err := unix.Open(path, readDir|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", path, err)
	}
	return fd, nil
}

// walkTo opens the directory at path, one component at a time.
func walkTo(root int, path string) (int, error) {
	fd, err := openAt(root, ".", readDir, 0)
	if path == "" || err != nil {
		return fd, err
	}
	for name := range strings.SplitSeq(path, "/") {
		next, err := openAt(fd, name, readDir, 0)
		closeFD(fd)
		if err != nil {
			return -1, err
		}
		fd = next
	}
	return fd, nil
}

// split splits path into its directory and its last element.
func split(path string) (dir, name string) {
	i := strings.LastIndexByte(path, '/')
	return path[:max(i, 0)], path[i+1:]
}

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

func closeFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd)
	}
}

// list returns the names in a directory in ascending byte order.
func list(dir int) ([]string, error) {
	// A new descriptor starts at the first name.
	fd, err := openAt(dir, ".", readDir, 0)
	if err != nil {
		return nil, err
	}
	defer closeFD(fd)
	var all []string
	buf := make([]byte, 32<<10)
	for {
		n, err := unix.ReadDirent(fd, buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list a directory: %w", err)
		}
		if n == 0 {
			slices.Sort(all)
			return all, nil
		}
		_, _, all = unix.ParseDirent(buf[:n], -1, all)
	}
}

// lstat returns nil if the name does not exist.
func lstat(dir int, name string) (*unix.Stat_t, error) {
	var st unix.Stat_t
	err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("stat %.300q: %w", name, err)
	}
	return &st, nil
}

func fileType(st *unix.Stat_t) uint32 { return st.Mode & unix.S_IFMT }

// xattr returns nil if the file does not have the attribute.
func xattr(fd int, name string) ([]byte, error) {
	b := make([]byte, 1<<16)
	n, err := unix.Fgetxattr(fd, name, b)
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read attribute %q: %w", name, err)
	}
	return b[:n:n], nil
}

// userXattrs returns the attributes in user.*, by name.
func userXattrs(fd int) ([]layer.Xattr, error) {
	n, err := unix.Flistxattr(fd, nil)
	if n == 0 || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	list := make([]byte, n)
	if err == nil {
		n, err = unix.Flistxattr(fd, list)
	}
	if err != nil {
		return nil, fmt.Errorf("list attributes: %w", err)
	}
	var all []layer.Xattr
	for name := range strings.SplitSeq(string(list[:n]), "\x00") {
		short, ok := strings.CutPrefix(name, "user.")
		if !ok {
			continue
		}
		value, err := xattr(fd, name)
		if err != nil {
			return nil, err
		}
		all = append(all, layer.Xattr{Name: short, Value: value})
	}
	slices.SortFunc(all, func(a, b layer.Xattr) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// setXattrs sets attributes in user.*. With replace it removes all others first.
func setXattrs(fd int, want []layer.Xattr, replace bool) error {
	if replace {
		have, err := userXattrs(fd)
		if err != nil {
			return err
		}
		for _, x := range have {
			if err := unix.Fremovexattr(fd, "user."+x.Name); err != nil {
				return fmt.Errorf("remove attribute %q: %w", x.Name, err)
			}
		}
	}
	for _, x := range want {
		if err := unix.Fsetxattr(fd, "user."+x.Name, x.Value, 0); err != nil {
			return fmt.Errorf("set attribute %q: %w", x.Name, err)
		}
	}
	return nil
}

// remove removes a name with everything below it. It is not an error if the name does not exist.
func remove(dir int, name string) error {
	err := unix.Unlinkat(dir, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("remove %.300q: %w", name, err)
	}
	fd, err := openAt(dir, name, readDir, 0)
	if err != nil {
		return err
	}
	err = removeContents(fd)
	closeFD(fd)
	if err != nil {
		return err
	}
	if err := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR); err != nil {
		return fmt.Errorf("remove %.300q: %w", name, err)
	}
	return nil
}

func removeContents(dir int) error {
	all, err := list(dir)
	if err != nil {
		return err
	}
	for _, name := range all {
		if err := remove(dir, name); err != nil {
			return err
		}
	}
	return nil
}

// checkHeight returns [layer.ErrDepth] if dir, which is nested depth levels deep, contains
// directories that are nested too deeply.
func checkHeight(dir, depth int) error {
	if depth > layer.MaxDepth {
		return layer.ErrDepth
	}
	all, err := list(dir)
	if err != nil {
		return err
	}
	for _, name := range all {
		st, err := lstat(dir, name)
		if err != nil {
			return err
		}
		if st == nil || fileType(st) != unix.S_IFDIR {
			continue
		}
		fd, err := openAt(dir, name, readDir, 0)
		if err != nil {
			return err
		}
		err = checkHeight(fd, depth+1)
		closeFD(fd)
		if err != nil {
			return err
		}
	}
	return nil
}
