package home

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Owner maps the files of root, and perhaps of others, to other users by id-mapped mounts. Creating one
// starts a process, which takes about 1 ms. It may be used repeatedly and concurrently.
type Owner struct {
	uid, gid  int
	namespace *os.File // a user namespace in which uid and gid are 0
}

// NewOwner returns an owner with the given user and group, neither of which may be 0.
func NewOwner(uid, gid int) (*Owner, error) {
	if uid <= 0 || gid <= 0 {
		return nil, fmt.Errorf("create an owner: %d:%d is not an unprivileged user and group", uid, gid)
	}
	return newOwner(uid, gid, 1)
}

// NewOwners returns an owner that maps the users and groups from 0 to count-1 to those from first on, which
// must not be 0.
func NewOwners(first, count int) (*Owner, error) {
	if first <= 0 || count <= 0 {
		return nil, fmt.Errorf("create owners: %d+%d are not unprivileged users and groups", first, count)
	}
	return newOwner(first, first, count)
}

func newOwner(uid, gid, count int) (*Owner, error) {
	ns, err := IDMap([2]int{0, 0}, [2]int{uid, gid}, count)
	if err != nil {
		return nil, fmt.Errorf("create an owner: %w", err)
	}
	return &Owner{uid: uid, gid: gid, namespace: ns}, nil
}

// Owners caches owners by user and group.
type Owners struct {
	mu     sync.Mutex
	owners map[[2]int]*Owner
	closed bool
}

// Get returns an owner, which the caller must not close. It may be called concurrently.
func (o *Owners) Get(uid, gid int) (*Owner, error) {
	key := [2]int{uid, gid}
	o.mu.Lock()
	known := o.owners[key]
	o.mu.Unlock()
	if known != nil {
		return known, nil
	}
	owner, err := NewOwner(uid, gid)
	if err != nil {
		return nil, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return nil, errors.Join(errors.New("the owners are closed"), owner.Close())
	}
	if o.owners == nil {
		o.owners = map[[2]int]*Owner{}
	}
	if known = o.owners[key]; known != nil { // created concurrently
		return known, owner.Close()
	}
	o.owners[key] = owner
	return owner, nil
}

// Close closes all owners.
func (o *Owners) Close() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	var errs []error
	for _, owner := range o.owners {
		errs = append(errs, owner.Close())
	}
	o.owners = nil
	return errors.Join(errs...)
}

// Close releases the owner. Existing mounts remain valid.
func (o *Owner) Close() error { return o.namespace.Close() }

// IDMap returns a user namespace that maps count users and groups to others, each from the first on, for
// id-mapped mounts: it starts a process in the namespace, which stops before its first instruction,
// opens the namespace and kills the process.
func IDMap(from, to [2]int, count int) (*os.File, error) {
	// The tracer is a thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p, err := os.StartProcess("/proc/self/exe", []string{"bullpen"}, &os.ProcAttr{Sys: &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: from[0], HostID: to[0], Size: count}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: from[1], HostID: to[1], Size: count}},
		Ptrace:      true,
		Pdeathsig:   syscall.SIGKILL,
	}})
	if err != nil {
		return nil, fmt.Errorf("create a user namespace: %w", err)
	}
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", p.Pid))
	killErr := p.Kill()
	_, waitErr := p.Wait()
	if err := errors.Join(err, killErr, waitErr); err != nil {
		if ns != nil {
			_ = ns.Close()
		}
		return nil, fmt.Errorf("create a user namespace: %w", err)
	}
	return ns, nil
}

// Mapped returns a read-only mount of a directory, in no mount namespace, that shows the files of
// root as the owner's.
func (o *Owner) Mapped(dir int) (*os.File, error) {
	fd, err := o.mapped(dir, "")
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "version"), nil
}

// mapped is like Mapped, for a path relative to a directory.
func (o *Owner) mapped(at int, dir string) (int, error) {
	fd, err := unix.OpenTree(at, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return -1, fmt.Errorf("clone the mount of %s: %w", dir, err)
	}
	attr := unix.MountAttr{
		Attr_set:  unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_IDMAP,
		Userns_fd: uint64(o.namespace.Fd()),
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		closeFD(fd)
		return -1, fmt.Errorf("map the ids of %s: %w: its file system must support id-mapped mounts, as ext4, xfs "+
			"and btrfs do", dir, err)
	}
	return fd, nil
}
