package cache_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/storage/blob"
	"github.com/bullpen-run/bullpen/storage/storagetest"
	"github.com/bullpen-run/bullpen/storage/thread"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/home/cache"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	tenant = 54_321
	mib    = 1 << 20
)

// world is a store with the heads of threads and the parts of workers.
type world struct {
	t      testing.TB
	blobs  *counting
	pool   *disk.Pool
	owners *home.Owners
	base   string

	mu    sync.Mutex
	heads map[string]*proto.Thread
}

// counting is a store that counts reads.
type counting struct {
	*blob.Store
	mu    sync.Mutex
	reads int
	fails func(op, key string) error
}

func (c *counting) check(op, key string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if op == "get" {
		c.reads++
	}
	if c.fails != nil {
		return c.fails(op, key)
	}
	return nil
}

func (c *counting) Put(ctx context.Context, b proto.Blob, content io.ReaderAt) error {
	if err := c.check("put", b.Key); err != nil {
		return err
	}
	return c.Store.Put(ctx, b, content)
}

func (c *counting) Get(ctx context.Context, b proto.Blob) (io.ReadCloser, error) {
	if err := c.check("get", b.Key); err != nil {
		return nil, err
	}
	return c.Store.Get(ctx, b)
}

// GetRange counts reads of packs, which are at the beginning of layers.
func (c *counting) GetRange(ctx context.Context, b proto.Blob, offset, length int64) (io.ReadCloser, error) {
	if offset == 0 {
		if err := c.check("get", b.Key); err != nil {
			return nil, err
		}
	}
	return c.Store.GetRange(ctx, b, offset, length)
}

func newWorld(t testing.TB) *world {
	t.Helper()
	base := t.TempDir()
	pool, err := disk.Open(disk.Config{Dir: filepath.Join(base, "volumes")})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{
		t: t, pool: pool, owners: &home.Owners{}, base: base, heads: map[string]*proto.Thread{},
		blobs: &counting{Store: &blob.Store{Backend: &storagetest.Memory{}, Retry: blob.DefaultRetry()}},
	}
	t.Cleanup(func() {
		if err := errors.Join(pool.Close(), w.owners.Close()); err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w *world) Get(_ context.Context, org, id string) (*proto.Thread, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.heads[org+"/"+id]
	if t == nil {
		return nil, proto.ErrNotFound
	}
	head := *t
	return &head, nil
}

func (w *world) Compact(_ context.Context, org, id string, old []proto.Layer, full proto.Layer) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := *w.heads[org+"/"+id]
	v := *t.Version
	if len(old) > len(v.Layers) || v.Layers[len(old)-1] != old[len(old)-1] {
		return proto.ErrConflict
	}
	v.Layers = append([]proto.Layer{full}, v.Layers[len(old):]...)
	t.Version = &v
	w.heads[org+"/"+id] = &t
	return nil
}

// job lets a new execution hold a thread, and returns its request for the files.
func (w *world) job(id string) proto.CheckoutRequest {
	w.mu.Lock()
	defer w.mu.Unlock()
	j := proto.CheckoutRequest{
		Org: "org", Thread: id, Trace: proto.NewTraceID(), Most: proto.Space{Bytes: 32 * mib, Files: 1000},
	}
	t := proto.Thread{Org: "org", ID: id}
	if old := w.heads["org/"+id]; old != nil {
		t = *old
	}
	t.Fence++
	t.Holder = j.Trace
	w.heads["org/"+id] = &t
	return j
}

// commit applies a commit to the head.
func (w *world) commit(id string, c *proto.Commit) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	next, err := w.heads["org/"+id].Commit(c)
	if err != nil {
		w.t.Fatal(err)
	}
	w.heads["org/"+id] = next
}

// worker opens a cache in a directory.
func (w *world) worker(name string, limit int64) *cache.Cache {
	w.t.Helper()
	homes, err := cache.Open(cache.Config{
		Dir: filepath.Join(w.base, name), Limit: limit, Versions: &thread.Versions{
			Blobs: w.blobs, Limits: layer.Limits{Bytes: 1 << 50, Entries: 1 << 30},
		}, Heads: w, Owners: w.owners,
		Log: slog.New(slog.NewTextHandler(w.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return homes
}

// enter checks out a home and mounts it at dir.
func (w *world) enter(homes *cache.Cache, j proto.CheckoutRequest) (h *cache.Home, dir string) {
	w.t.Helper()
	h, err := homes.CheckOut(w.t.Context(), j)
	if err != nil {
		w.t.Fatal(err)
	}
	v, err := w.pool.Get(w.t.Context(), disk.Size{Bytes: 32*mib + home.OwnBytes, Inodes: 1100}, tenant, tenant)
	if err != nil {
		w.t.Fatal(err)
	}
	mount, err := h.Mount(v, tenant, tenant)
	if err != nil {
		w.t.Fatal(err)
	}
	if err := h.PutStaged(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	if err := h.LimitSpace(); err != nil {
		w.t.Fatal(err)
	}
	return h, fmt.Sprintf("/proc/self/fd/%d", mount.Fd())
}

// run checks out a home, calls f to change it, and commits the change.
func (w *world) run(homes *cache.Cache, id string, f func(dir string)) *proto.Commit {
	w.t.Helper()
	h, dir := w.enter(homes, w.job(id))
	f(dir)
	c, err := h.Save(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	if c != nil {
		w.commit(id, c)
	}
	if err := h.Close(c != nil); err != nil {
		w.t.Error(err)
	}
	return c
}

// read returns a reader of the newest version and a mount of a directory of it.
func (w *world) read(homes *cache.Cache, id, path string) (*cache.Reader, string) {
	w.t.Helper()
	r, err := homes.Read(w.t.Context(), "org", id)
	if err != nil {
		w.t.Fatal(err)
	}
	mount, err := r.MountPart(tenant, tenant, func(root int) (int, error) {
		return unix.Openat(root, path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = mount.Close() })
	return r, fmt.Sprintf("/proc/self/fd/%d", mount.Fd())
}

func (w *world) close(homes *cache.Cache) {
	w.t.Helper()
	if err := homes.Close(); err != nil {
		w.t.Error(err)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func has(t *testing.T, path, text string) {
	t.Helper()
	if b, err := os.ReadFile(path); err != nil || string(b) != text {
		t.Errorf("%s: %.100q, %v; want %.100q", path, b, err, text)
	}
}

func TestHomeIsCached(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	large := strings.Repeat("0123456789abcdef", 6*mib/16)
	if c := w.run(homes, "a", func(dir string) {
		write(t, dir+"/x/file", "1")
		write(t, dir+"/large", large)
	}); c == nil || c.Version.Number != 1 || c.Version.Files != 3 || c.Version.Bytes != int64(len(large))+1 {
		t.Fatalf("commit %+v", c)
	}
	for i := range 3 {
		w.run(homes, "a", func(dir string) {
			has(t, dir+"/x/file", strings.Repeat("1", i+1))
			has(t, dir+"/large", large)
			write(t, dir+"/x/file", strings.Repeat("1", i+2))
		})
	}
	before := w.blobs.reads
	if c := w.run(homes, "a", func(dir string) { has(t, dir+"/x/file", "1111") }); c != nil {
		t.Errorf("a commit without changes: %+v", c)
	}
	if w.blobs.reads != before {
		t.Error("a cached home was fetched")
	}
	w.run(homes, "b", func(dir string) {
		if _, err := os.Stat(dir + "/x"); err == nil {
			t.Error("found a file of another thread")
		}
	})
	// On another worker, and here in the next process.
	other := w.worker("two", 1<<30)
	w.run(other, "a", func(dir string) {
		has(t, dir+"/x/file", "1111")
		has(t, dir+"/large", large)
		write(t, dir+"/x/file", "2")
	})
	w.run(homes, "a", func(dir string) { has(t, dir+"/x/file", "2") })
	w.close(homes)
	w.close(other)
	before = w.blobs.reads
	again := w.worker("one", 1<<30)
	w.run(again, "a", func(dir string) { has(t, dir+"/x/file", "2") })
	if w.blobs.reads != before {
		t.Error("a home of the previous process was fetched")
	}
	w.close(again)
}

func TestProgramIsNotPartOfTheHome(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	defer w.close(homes)
	put := func(h *cache.Home, want string) {
		t.Helper()
		name, err := h.PutProgram("main.py", []byte("print(1)"))
		if err != nil || name != want {
			t.Fatalf("%q, %v; want %q", name, err, want)
		}
	}
	h, _ := w.enter(homes, w.job("a"))
	put(h, "main.py")
	if c, err := h.Save(t.Context()); c != nil || err != nil {
		t.Errorf("%+v, %v", c, err)
	}
	if err := h.Close(false); err != nil {
		t.Error(err)
	}
	w.run(homes, "a", func(dir string) {
		write(t, dir+"/main.py", "mine")
		write(t, dir+"/.main.py", "mine as well")
	})
	h, dir := w.enter(homes, w.job("a"))
	put(h, ".main2.py")
	has(t, dir+"/main.py", "mine")
	write(t, dir+"/new", "new")
	c, err := h.Save(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.commit("a", c)
	if err := h.Close(true); err != nil {
		t.Error(err)
	}
	w.run(homes, "a", func(dir string) {
		all, err := os.ReadDir(dir)
		if fmt.Sprint(all) != "[- .main.py - main.py - new]" || err != nil {
			t.Errorf("%v, %v", all, err)
		}
	})
}

func TestStagedFilesAreSaved(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	defer w.close(homes)
	w.run(homes, "a", func(dir string) { write(t, dir+"/kept", "kept") })
	stage := func(key, path, text string) proto.StagedFile {
		t.Helper()
		b, err := w.blobs.PutStream(t.Context(), "uploads/org/"+key, int64(len(text)), strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		f := proto.StagedFile{Path: path, Blob: b}
		w.mu.Lock()
		head := *w.heads["org/a"]
		head.Staged = append(head.Staged, f)
		w.heads["org/a"] = &head
		w.mu.Unlock()
		return f
	}
	stage("1", "d/up", "up")
	j := w.job("a")
	h, dir := w.enter(homes, j)
	has(t, dir+"/d/up", "up")
	late := stage("2", "late", "late") // while the thread is locked
	c, err := h.Save(t.Context())
	if err != nil || c == nil {
		t.Fatal(c, err)
	}
	w.commit("a", c)
	if err := h.Close(true); err != nil {
		t.Error(err)
	}
	if left := w.heads["org/a"].Staged; len(left) != 1 || left[0] != late {
		t.Errorf("staged: %+v", left)
	}
	w.run(homes, "a", func(dir string) {
		has(t, dir+"/kept", "kept")
		has(t, dir+"/d/up", "up")
		has(t, dir+"/late", "late")
	})
}

// TestLimitWhileWriting writes more than is left of a home's limit.
func TestLimitWhileWriting(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	defer w.close(homes)
	w.run(homes, "a", func(dir string) { write(t, dir+"/one", strings.Repeat("x", 20*mib)) })
	w.run(homes, "a", func(dir string) {
		var free unix.Statfs_t
		if err := unix.Statfs(dir, &free); err != nil {
			t.Fatal(err)
		}
		if left := int64(free.Bavail) * free.Bsize; left > 12*mib || left < 11*mib {
			t.Errorf("%d bytes are left of 32 MiB, 20 of them used", left)
		}
		if err := os.WriteFile(dir+"/two", make([]byte, 20*mib), 0o644); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("a write beyond the limit: %v", err)
		}
	})
	// What was written until then is saved, and so is a home that is filled by one call.
	w.run(homes, "b", func(dir string) {
		if err := os.WriteFile(dir+"/all", make([]byte, 33*mib), 0o644); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("a write beyond the limit: %v", err)
		}
	})
	w.run(homes, "a", func(dir string) {
		for _, name := range []string{"/one", "/two"} {
			if err := os.Remove(dir + name); err != nil {
				t.Error(err)
			}
		}
	})
	w.run(homes, "a", func(dir string) { write(t, dir+"/three", strings.Repeat("z", 30*mib)) })
	// A staged file has the space of the file that it replaces.
	b, err := w.blobs.PutStream(t.Context(), "uploads/org/1", 30*mib, strings.NewReader(strings.Repeat("x", 30*mib)))
	if err != nil {
		t.Fatal(err)
	}
	w.heads["org/a"].Staged = []proto.StagedFile{{Path: "three", Blob: b}}
	w.run(homes, "a", func(string) {})
	// A home that is larger than its limit, which another sandbox may have, can be changed.
	w.heads["org/a"].Version.Bytes = 100 * mib
	w.run(homes, "a", func(dir string) {
		write(t, dir+"/small", "x")
		if err := os.Remove(dir + "/three"); err != nil {
			t.Error(err)
		}
		w.heads["org/a"].Version.Bytes = 30 * mib
	})
}

// TestTooLargeHomeIsNotSaved exceeds the limit with names of one file, each of which counts.
func TestTooLargeHomeIsNotSaved(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	defer w.close(homes)
	w.run(homes, "a", func(dir string) { write(t, dir+"/one", strings.Repeat("x", 10*mib)) })
	h, dir := w.enter(homes, w.job("a"))
	write(t, dir+"/two", strings.Repeat("y", 15*mib))
	if err := os.Link(dir+"/two", dir+"/again"); err != nil {
		t.Fatal(err)
	}
	c, err := h.Save(t.Context())
	var limit *proto.LimitError
	if !errors.As(err, &limit) || c != nil || limit.Bytes != 40*mib || limit.MaxBytes != 32*mib || limit.Files != 3 {
		t.Errorf("%+v, %v", c, err)
	}
	if err := h.Close(false); err != nil {
		t.Error(err)
	}
	w.run(homes, "a", func(dir string) {
		if _, err := os.Stat(dir + "/two"); err == nil {
			t.Error("the home was saved")
		}
	})
}

func TestTooDeepHomeIsNotSaved(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	defer w.close(homes)
	deep := strings.Repeat("/d", layer.MaxDepth-1) // including the home
	w.run(homes, "a", func(dir string) {
		if err := os.MkdirAll(dir+deep, 0o755); err != nil {
			t.Error(err)
		}
	})
	for name, change := range map[string]func(dir string) error{
		"new":   func(dir string) error { return os.Mkdir(dir+deep+"/d", 0o755) },
		"moved": func(dir string) error { return errors.Join(os.Mkdir(dir+"/n", 0o755), os.Rename(dir+"/d", dir+"/n/d")) },
	} {
		h, dir := w.enter(homes, w.job("a"))
		if err := change(dir); err != nil {
			t.Error(err)
		}
		var depth *proto.DepthError
		if c, err := h.Save(t.Context()); !errors.As(err, &depth) || c != nil || depth.Most != layer.MaxDepth {
			t.Errorf("%s: %+v, %v", name, c, err)
		}
		if err := h.Close(false); err != nil {
			t.Error(err)
		}
	}
}

func TestStoreFails(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	defer w.close(homes)
	w.run(homes, "a", func(dir string) { write(t, dir+"/file", "old") })
	broken := errors.New("broken")
	for _, prefix := range []string{"layers/", "objects/", "threads/"} {
		w.blobs.fails = func(op, key string) error {
			if op == "put" && strings.HasPrefix(key, prefix) {
				return broken
			}
			return nil
		}
		h, dir := w.enter(homes, w.job("a"))
		has(t, dir+"/file", "old")
		write(t, dir+"/file", "new")
		write(t, dir+"/large", strings.Repeat("z", 5*mib))
		if c, err := h.Save(t.Context()); !errors.Is(err, broken) || c != nil {
			t.Errorf("%s: %+v, %v", prefix, c, err)
		}
		if err := h.Close(false); err != nil {
			t.Error(err)
		}
	}
	cold := w.worker("two", 1<<30)
	defer w.close(cold)
	w.blobs.fails = func(op, _ string) error {
		if op == "get" {
			return broken
		}
		return nil
	}
	if _, err := cold.CheckOut(t.Context(), w.job("a")); !errors.Is(err, broken) {
		t.Error(err)
	}
	w.blobs.fails = nil
	w.run(cold, "a", func(dir string) { has(t, dir+"/file", "old") })
}

func TestFencedCheckOut(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	defer w.close(homes)
	stale := w.job("a")
	w.job("a")
	if _, err := homes.CheckOut(t.Context(), stale); !errors.Is(err, proto.ErrFenced) {
		t.Error(err)
	}
}

// TestMountedHomeIsNotChanged has an execution that lost its lease and still uses its home.
func TestMountedHomeIsNotChanged(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	defer w.close(homes)
	w.run(homes, "a", func(dir string) { write(t, dir+"/file", "1") })
	stale, old := w.enter(homes, w.job("a"))
	w.run(homes, "a", func(dir string) {
		has(t, dir+"/file", "1")
		write(t, dir+"/file", "2")
	})
	w.run(homes, "a", func(dir string) {
		has(t, dir+"/file", "2")
		write(t, dir+"/file", "3")
	})
	has(t, old+"/file", "1")
	if err := stale.Close(false); err != nil {
		t.Error(err)
	}
	w.run(homes, "a", func(dir string) { has(t, dir+"/file", "3") })
}

func TestEviction(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 25*mib)
	for _, id := range []string{"a", "b", "c"} {
		w.run(homes, id, func(dir string) { write(t, dir+"/file", strings.Repeat(id, 10*mib)) })
		w.run(homes, id, func(string) {}) // waits for background work
	}
	reads := func(id string) int {
		before := w.blobs.reads
		w.run(homes, id, func(dir string) { has(t, dir+"/file", strings.Repeat(id, 10*mib)) })
		return w.blobs.reads - before
	}
	if b, c := reads("b"), reads("c"); b+c != 0 {
		t.Errorf("%d and %d reads of cached homes", b, c)
	}
	if reads("a") == 0 {
		t.Error("a home was cached beyond the limit")
	}
	if reads("c") != 0 || reads("b") == 0 {
		t.Error("not the least recently used home was evicted")
	}
	w.close(homes)
	all, err := os.ReadDir(filepath.Join(w.base, "one"))
	if err != nil || len(all) != 4 { // two homes, the empty one, the boot id
		t.Errorf("remaining: %v, %v", all, err)
	}
}

func TestKilledProcess(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	w.run(homes, "a", func(dir string) { write(t, dir+"/file", "1") })
	w.close(homes)
	dir := filepath.Join(w.base, "one")
	write(t, dir+"/work-ABC/half", "x")
	write(t, dir+"/0123", "x")
	homes = w.worker("one", 1<<30)
	w.run(homes, "a", func(dir string) { has(t, dir+"/file", "1") })
	w.close(homes)
	if all, err := os.ReadDir(dir); err != nil || len(all) != 3 {
		t.Errorf("remaining: %v, %v", all, err)
	}
	write(t, dir+"/boot", "another boot")
	homes = w.worker("one", 1<<30)
	before := w.blobs.reads
	w.run(homes, "a", func(dir string) { has(t, dir+"/file", "1") })
	if w.blobs.reads == before {
		t.Error("a home survived a reboot")
	}
	w.close(homes)
}

func TestCompaction(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	for i := range 60 {
		w.run(homes, "a", func(dir string) { write(t, fmt.Sprintf("%s/f%d", dir, i%7), strings.Repeat("x", i)) })
	}
	w.close(homes) // waits for background work
	head, _ := w.Get(t.Context(), "org", "a")
	if n := len(head.Version.Layers); n > 60 || head.Version.Number != 60 {
		t.Errorf("%d layers, version %d", n, head.Version.Number)
	}
	cold := w.worker("two", 1<<30)
	w.run(cold, "a", func(dir string) {
		for i := 53; i < 60; i++ {
			has(t, fmt.Sprintf("%s/f%d", dir, i%7), strings.Repeat("x", i))
		}
	})
	w.close(cold)
}

func TestCorruptLayer(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	w.run(homes, "a", func(dir string) { write(t, dir+"/file", strings.Repeat("x", 3*mib)) })
	w.close(homes)
	layer := w.heads["org/a"].Version.Layers[0]
	content := bytes.Repeat([]byte{1}, int(layer.Size))
	w.replace(layer.Key, content)
	cold := w.worker("two", 1<<30)
	defer w.close(cold)
	if _, err := cold.CheckOut(t.Context(), w.job("a")); !errors.Is(err, proto.ErrCorrupt) {
		t.Error(err)
	}
}

// TestThreadCreatedAgain removes a thread and creates it again, also while an execution that lost
// its lease uses the old home.
func TestThreadCreatedAgain(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	defer w.close(homes)
	remove := func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.heads, "org/a")
	}
	empty := func(dir string) {
		if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
			t.Errorf("a new thread has %v, %v", entries, err)
		}
	}
	w.run(homes, "a", func(dir string) { write(t, dir+"/first", "1") })
	remove()
	w.run(homes, "a", func(dir string) {
		empty(dir)
		write(t, dir+"/second", "2")
	})
	w.run(homes, "a", func(dir string) { has(t, dir+"/second", "2") })

	stale, _ := w.enter(homes, w.job("a"))
	remove()
	w.run(homes, "a", func(dir string) {
		empty(dir)
		write(t, dir+"/third", "3")
	})
	if err := stale.Close(false); err != nil {
		t.Error(err)
	}
	w.run(homes, "a", func(dir string) { has(t, dir+"/third", "3") })
}

// TestCorruptLayerIsFetchedAgain corrupts a layer for the first read, which applies a part of it.
func TestCorruptLayerIsFetchedAgain(t *testing.T) {
	for name, size := range map[string]int{"small": 1000, "large": 3 * mib} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			homes := w.worker("one", 1<<30)
			text := make([]byte, size)
			_, _ = rand.NewChaCha8([32]byte{}).Read(text)
			w.run(homes, "a", func(dir string) {
				write(t, dir+"/a", "first")
				write(t, dir+"/file", string(text))
			})
			w.close(homes)
			layer := w.heads["org/a"].Version.Layers[0]
			right := w.content(layer.Blob)
			wrong := bytes.Clone(right)
			wrong[layer.Size-layer.Index-1] ^= 1
			w.replace(layer.Key, wrong)
			gets := 0
			w.blobs.fails = func(op, key string) error {
				if op == "get" && key == layer.Key {
					if gets++; gets == 2 {
						w.replace(key, right)
					}
				}
				return nil
			}
			cold := w.worker("two", 1<<30)
			defer w.close(cold)
			if c := w.run(cold, "a", func(dir string) {
				if got, err := os.ReadFile(dir + "/file"); err != nil || !bytes.Equal(got, text) {
					t.Errorf("%d bytes, %v", len(got), err)
				}
			}); c != nil || gets != 2 {
				t.Errorf("%+v after %d reads", c, gets)
			}
		})
	}
}

// content reads a blob.
func (w *world) content(b proto.Blob) []byte {
	w.t.Helper()
	r, err := w.blobs.Store.Get(w.t.Context(), b)
	if err != nil {
		w.t.Fatal(err)
	}
	content, err := io.ReadAll(r)
	if err := errors.Join(err, r.Close()); err != nil {
		w.t.Fatal(err)
	}
	return content
}

// replace changes the content of a key in the store.
func (w *world) replace(key string, content []byte) {
	w.t.Helper()
	if err := w.blobs.Backend.Put(w.t.Context(), key, int64(len(content)), bytes.NewReader(content), true); err != nil {
		w.t.Error(err)
	}
}

// TestStagedFilesDoNotFit expects an error that blames the uploads.
func TestStagedFilesDoNotFit(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	defer w.close(homes)
	j := w.job("a")
	b, err := w.blobs.PutStream(t.Context(), "uploads/org/1", 40*mib, strings.NewReader(strings.Repeat("x", 40*mib)))
	if err != nil {
		t.Fatal(err)
	}
	w.heads["org/a"].Staged = []proto.StagedFile{{Path: "f", Blob: b}}
	h, err := homes.CheckOut(t.Context(), j)
	if err != nil {
		t.Fatal(err)
	}
	v, err := w.pool.Get(t.Context(), disk.Size{Bytes: 32 * mib, Inodes: 1100}, tenant, tenant)
	if err != nil {
		t.Fatal(err)
	}
	if _, err = h.Mount(v, tenant, tenant); err != nil {
		t.Fatal(err)
	}
	var tooMuch *proto.UploadsError
	if err := h.PutStaged(t.Context()); !errors.As(err, &tooMuch) || tooMuch.Bytes != 40*mib || tooMuch.Files != 1 {
		t.Error(err)
	}
	if err := h.Close(false); err != nil {
		t.Error(err)
	}
}

// TestAttributesAreLimited checks the limit for the attributes of all files together.
func TestAttributesAreLimited(t *testing.T) {
	w := newWorld(t)
	homes := w.worker("one", 1<<30)
	defer w.close(homes)
	w.run(homes, "a", func(dir string) {
		write(t, dir+"/f", "x")
		if err := unix.Setxattr(dir+"/f", "user.a", make([]byte, 75), 0); err != nil {
			t.Error(err)
		}
	})
	head := w.heads["org/a"]
	if got := head.Version.Attributes; got != 100 {
		t.Errorf("%d bytes", got)
	}
	head.Version.Attributes = layer.MaxAttributes // in other files
	h, dir := w.enter(homes, w.job("a"))
	if err := unix.Setxattr(dir+"/f", "user.b", nil, 0); err != nil {
		t.Error(err)
	}
	var tooMuch *proto.AttributesError
	if c, err := h.Save(t.Context()); !errors.As(err, &tooMuch) || c != nil {
		t.Errorf("%+v, %v", c, err)
	}
	if err := h.Close(false); err != nil {
		t.Error(err)
	}
	w.run(homes, "a", func(dir string) {
		if err := unix.Removexattr(dir+"/f", "user.a"); err != nil {
			t.Error(err)
		}
	})
	if got := w.heads["org/a"].Version.Attributes; got != layer.MaxAttributes-100 {
		t.Errorf("%d bytes", got)
	}
}
