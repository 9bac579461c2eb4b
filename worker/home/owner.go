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

// Owner lets a directory of root's be seen as another user's, by an id-mapped
// mount. It takes a process to make one, about 1 ms; it can be used many times,
// also at once.
type Owner struct {
	uid, gid  int
	namespace *os.File // a user namespace in which uid and gid are 0
}

// NewOwner makes the owner uid and gid, neither of them 0.
func NewOwner(uid, gid int) (*Owner, error) {
	if uid <= 0 || gid <= 0 {
		return nil, fmt.Errorf("make an owner: %d:%d is not an unprivileged user and group", uid, gid)
	}
	ns, err := userNamespace(uid, gid)
	if err != nil {
		return nil, fmt.Errorf("make an owner: %w", err)
	}
	return &Owner{uid: uid, gid: gid, namespace: ns}, nil
}

// Owners keeps owners, each for as long as the process needs any.
type Owners struct {
	mu     sync.Mutex
	made   map[[2]int]*Owner
	closed bool
}

// Get returns the owner uid and gid, which is made when it is first asked for and is
// not to be closed. It may be called from several goroutines.
func (o *Owners) Get(uid, gid int) (*Owner, error) {
	key := [2]int{uid, gid}
	o.mu.Lock()
	known := o.made[key]
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
		return nil, errors.Join(errors.New("the owners of homes are given back already"), owner.Close())
	}
	if o.made == nil {
		o.made = map[[2]int]*Owner{}
	}
	if known = o.made[key]; known != nil { // another was faster
		return known, owner.Close()
	}
	o.made[key] = owner
	return owner, nil
}

// Close gives all owners back.
func (o *Owners) Close() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	var errs []error
	for _, owner := range o.made {
		errs = append(errs, owner.Close())
	}
	o.made = nil
	return errors.Join(errs...)
}

// Close gives the owner back. Homes that were made for it stay as they are.
func (o *Owner) Close() error { return o.namespace.Close() }

// userNamespace has a process stopped in it before its first instruction, takes
// hold of the namespace and kills the process.
func userNamespace(uid, gid int) (*os.File, error) {
	// Whoever traces is a thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p, err := os.StartProcess("/proc/self/exe", []string{"bullpen"}, &os.ProcAttr{Sys: &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: gid, Size: 1}},
		Ptrace:      true,
		Pdeathsig:   syscall.SIGKILL,
	}})
	if err != nil {
		return nil, fmt.Errorf("make a user namespace: %w", err)
	}
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", p.Pid))
	killErr := p.Kill()
	_, waitErr := p.Wait()
	if err := errors.Join(err, killErr, waitErr); err != nil {
		if ns != nil {
			_ = ns.Close()
		}
		return nil, fmt.Errorf("make a user namespace: %w", err)
	}
	return ns, nil
}

// mapped is a directory as a mount of its own, read-only and seen as the owner's,
// in no namespace.
func (o *Owner) mapped(dir string) (int, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("clone the mount of %s: %w", dir, err)
	}
	attr := unix.MountAttr{
		Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(o.namespace.Fd()),
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		closeFD(fd)
		return -1, fmt.Errorf("map the ids of %s: %w: its file system must support id-mapped mounts, as ext4, xfs and btrfs do", dir, err)
	}
	return fd, nil
}
