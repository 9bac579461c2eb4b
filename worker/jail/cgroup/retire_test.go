package cgroup

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Groups that have read files from the disk are not removed before their page cache is gone, since
// the kernel would keep them. It stays until there are many such groups.
func TestGroupsWithPageCache(t *testing.T) {
	dir, err := os.MkdirTemp("/var/tmp", "bullpen-test-") // not in memory
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	tree, err := Open("test-retire")
	if err != nil {
		t.Fatal(err)
	}
	groups := filepath.Join(tree.dirs[tree.ctl.memory], parentName, tree.instance, "[0-9]*")
	const count = maxRetired + 4
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()
	var files []*os.File
	for i := range count {
		f := uncached(t, filepath.Join(dir, strconv.Itoa(i)))
		files = append(files, f)
		g := newGroup(t, tree, strconv.Itoa(i))
		p, err := g.StartProcess("/bin/cat", []string{"cat"}, &os.ProcAttr{Files: []*os.File{f, null}})
		if err != nil {
			t.Fatal(err)
		}
		_, err = p.Wait()
		if err := errors.Join(err, g.Remove()); err != nil {
			t.Fatal(err)
		}
	}
	left, err := filepath.Glob(groups)
	if err != nil || len(left) != maxRetired || cached(t, files[0]) || !cached(t, files[count-1]) {
		t.Errorf("%d groups are left, %v; the first file is in the page cache: %t, the last one: %t", len(left), err,
			cached(t, files[0]), cached(t, files[count-1]))
	}
	if err := tree.Close(); err != nil {
		t.Error(err)
	}
	left, err = filepath.Glob(groups)
	if err != nil || len(left) != 0 || cached(t, files[count-1]) {
		t.Errorf("after the end %d groups are left, %v; the last file is in the page cache: %t", len(left), err,
			cached(t, files[count-1]))
	}
}

// uncached creates a file whose content is not in the page cache.
func uncached(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	_, err = f.WriteAt(make([]byte, 1<<20), 0)
	if err := errors.Join(err, f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)); err != nil {
		t.Fatal(err)
	}
	return f
}

// cached reports whether the first page of a file is in the page cache.
func cached(t *testing.T, f *os.File) bool {
	t.Helper()
	b, err := unix.Mmap(int(f.Fd()), 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(b) }()
	vec := make([]byte, 1)
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)),
		uintptr(unsafe.Pointer(&vec[0]))); errno != 0 {
		t.Fatal(errno)
	}
	return vec[0]&1 != 0
}
