package cache_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/home/cache"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
)

// Readers see one version while writers commit others, which are not fetched for the writers.
func TestReadersSeeOneVersion(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	defer w.close(homes)
	none, dir := w.read(homes, "a", ".")
	if all, err := os.ReadDir(dir); len(all) > 0 || err != nil {
		t.Errorf("a thread that does not exist has %v, %v", all, err)
	}
	none.Close()
	w.run(homes, "a", func(dir string) { write(t, dir+"/d/file", "1") })
	first, dirOfFirst := w.read(homes, "a", ".")
	again, dirOfAgain := w.read(homes, "a", "d")
	fetched := w.blobs.reads
	for _, text := range []string{"2", "3"} {
		w.run(homes, "a", func(dir string) { write(t, dir+"/d/file", text) })
	}
	if w.blobs.reads != fetched {
		t.Error("a version was fetched for a writer")
	}
	has(t, dirOfFirst+"/d/file", "1")
	has(t, dirOfAgain+"/file", "1")
	third, dirOfThird := w.read(homes, "a", ".")
	has(t, dirOfThird+"/d/file", "3")
	has(t, dirOfFirst+"/d/file", "1")
	for _, err := range []error{
		os.WriteFile(dirOfThird+"/new", nil, 0o600), os.Remove(dirOfThird + "/d/file"), os.Chmod(dirOfThird+"/d", 0o777),
		os.Mkdir(dirOfAgain+"/new", 0o700),
	} {
		if !errors.Is(err, unix.EROFS) {
			t.Errorf("changed: %v", err)
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(dirOfThird+"/d/file", &st); err != nil || st.Uid != tenant || st.Gid != tenant {
		t.Errorf("it belongs to %d:%d, %v", st.Uid, st.Gid, err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dirOfThird, &fs); err != nil ||
		fs.Flags&(unix.ST_NOSUID|unix.ST_NODEV|unix.ST_RDONLY) != unix.ST_NOSUID|unix.ST_NODEV|unix.ST_RDONLY {
		t.Errorf("it is mounted with %#x, %v", fs.Flags, err)
	}
	for _, r := range []*cache.Reader{first, again, third} {
		r.Close()
	}
	// A directory that nobody reads is updated.
	w.run(homes, "a", func(dir string) { write(t, dir+"/d/file", "4") })
	last, dirOfLast := w.read(homes, "a", ".")
	has(t, dirOfLast+"/d/file", "4")
	last.Close()
	if n := homes.Len(); n != 2 { // for writers and for readers
		t.Errorf("%d entries", n)
	}
}

// Readers that wait for each other share the directory of the new version, and leave no other.
func TestReadersShareADirectory(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	w.run(homes, "a", func(dir string) { write(t, dir+"/file", "1") })
	old, _ := w.read(homes, "a", ".")
	w.run(homes, "a", func(dir string) { write(t, dir+"/file", "2") })
	var all sync.WaitGroup
	readers := make([]*cache.Reader, 16)
	for i := range readers {
		all.Go(func() {
			r, err := homes.Read(t.Context(), "org", "a")
			if err != nil {
				t.Error(err)
				return
			}
			readers[i] = r
		})
	}
	all.Wait()
	old.Close()
	for _, r := range readers {
		r.Close()
	}
	if n := homes.Len(); n != 2 {
		t.Errorf("%d entries", n)
	}
	w.close(homes)
	dirs, err := filepath.Glob(filepath.Join(w.base, "one", "*", "home"))
	if err != nil || len(dirs) != 2 {
		t.Errorf("%d directories are left: %v", len(dirs), err)
	}
}

// Staged files are written to the whole, of which a part is mounted.
func TestPartOfAHome(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	defer w.close(homes)
	w.run(homes, "a", func(dir string) { write(t, dir+"/d/file", "1") })
	hold := w.job("a")
	b, err := w.blobs.PutStream(t.Context(), "uploads/org/1", 2, strings.NewReader("up"))
	if err != nil {
		t.Fatal(err)
	}
	w.heads["org/a"].Staged = []proto.StagedFile{{Path: "d/up", Blob: b}}
	h, err := homes.CheckOut(t.Context(), hold)
	if err != nil {
		t.Fatal(err)
	}
	v, err := w.pool.Get(t.Context(), disk.Size{Bytes: 32*mib + home.OwnBytes, Inodes: 1100}, tenant, tenant)
	if err != nil {
		t.Fatal(err)
	}
	part, err := h.MountPart(v, tenant, tenant, func(root int) (int, error) {
		return unix.Openat(root, "d", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
	if err := errors.Join(err, h.PutStaged(t.Context()), h.LimitSpace()); err != nil {
		t.Fatal(err)
	}
	dir := fmt.Sprintf("/proc/self/fd/%d", part.Fd())
	has(t, dir+"/file", "1")
	has(t, dir+"/up", "up")
	write(t, dir+"/file", "2")
	if err := part.Close(); err != nil {
		t.Fatal(err)
	}
	c, err := h.Save(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.commit("a", c)
	if err := h.Close(true); err != nil {
		t.Error(err)
	}
	w.run(homes, "a", func(dir string) {
		has(t, dir+"/d/file", "2")
		has(t, dir+"/d/up", "up")
	})
}
