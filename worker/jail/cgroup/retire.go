package cgroup

import (
	"errors"
	"io/fs"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// maxRetired is how many groups without members a tree keeps. A group takes about 25 KiB of kernel
// memory on a machine with 2 cores, and more with more cores.
const maxRetired = 64

// retire keeps an empty group that is still charged for page cache. The kernel keeps a removed
// group until its page cache is gone, which without memory pressure never happens. Reclaiming each
// group's page cache immediately would make every jail read from the disk what its predecessor has
// read. So only the oldest group is reclaimed and removed when there are too many.
func (t *Tree) retire(dir string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.retired = append(t.retired, dir)
	if len(t.retired) <= maxRetired {
		return nil
	}
	var errs []error
	// The page cache of a volume is gone once that is unmounted.
	t.retired = slices.DeleteFunc(t.retired, func(dir string) bool {
		n, err := t.pageCache(dir)
		if n > 0 {
			return false
		}
		errs = append(errs, err, removeDir(dir))
		return true
	})
	if len(t.retired) > maxRetired {
		errs = append(errs, t.reclaim(t.retired[0]), removeDir(t.retired[0]))
		t.retired = slices.Delete(t.retired, 0, 1)
	}
	return errors.Join(errs...)
}

// removeRetired reclaims and removes all groups without members.
func (t *Tree) removeRetired() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	var errs []error
	for _, dir := range t.retired {
		errs = append(errs, t.reclaim(dir), removeDir(dir))
	}
	t.retired = nil
	return errors.Join(errs...)
}

// pageCache returns the bytes of page cache charged to the group at dir. It is 0 if the group does
// not exist.
func (t *Tree) pageCache(dir string) (int64, error) {
	n, err := pageCache(t.version, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	return n, err
}

func pageCache(version int, dir string) (int64, error) {
	key := "file"
	if version == 1 {
		key = "cache"
	}
	n, err := readKeys(dir, "memory.stat", key, "shmem")
	if err != nil {
		return 0, err
	}
	return n[0] - n[1], nil // the content of a tmpfs counts as cache
}

// reclaim frees as much as possible of the page cache charged to the group at dir.
func (t *Tree) reclaim(dir string) error {
	file, value := "memory.force_empty", "0"
	if t.version == 2 {
		n, err := t.pageCache(dir)
		if n <= 0 || err != nil {
			return err
		}
		file, value = "memory.reclaim", strconv.FormatInt(n, 10)
	}
	err := write(dir, file, value)
	// Version 2 returns EAGAIN if it could not free all, and has the file since Linux 5.19.
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
