package cache_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/storage/thread"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/home/cache"
	"github.com/bullpen-run/bullpen/worker/home/hometest"
)

// fatal is a [testing.T] or a [rapid.T].
type fatal interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

func check(t fatal, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// unfrozen is the freeze of a home that no process uses.
func unfrozen(ctx context.Context, read func(context.Context) error) error { return read(ctx) }

// saveLive saves a home that is in use, and returns the number of the newest version.
func (w *world) saveLive(t fatal, h *cache.Home, id string) int64 {
	t.Helper()
	version, err := h.SaveLive(context.Background(), unfrozen, func(_ context.Context, c *proto.Commit) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		next, err := w.heads["org/"+id].Commit(c)
		if err == nil {
			w.heads["org/"+id] = next
		}
		return err
	})
	check(t, err)
	return version
}

// digest returns the digest of everything in a directory.
func (w *world) digest(t fatal, dir string) string {
	t.Helper()
	spool, err := os.CreateTemp(w.base, "")
	check(t, err, os.Remove(spool.Name()))
	defer func() { _ = spool.Close() }()
	draft, err := w.versions().NewLayer("org", spool)
	check(t, err)
	_, err = home.Full(context.Background(), dir, draft,
		func(context.Context, layer.Digest, int64, io.ReaderAt) error { return nil })
	check(t, err)
	digest, err := draft.Digest()
	check(t, err)
	return digest
}

func (w *world) versions() *thread.Versions {
	return &thread.Versions{Blobs: w.blobs, Limits: layer.Limits{Bytes: 1 << 50, Entries: 1 << 30}}
}

// newest returns the digest of the newest version of a thread as a worker sees it.
func (w *world) newest(t fatal, homes *cache.Cache, id string) string {
	t.Helper()
	r, err := homes.Read(context.Background(), "org", id)
	check(t, err)
	defer r.Close()
	mount, err := r.MountPart(tenant, tenant, func(root int) (int, error) {
		return unix.Openat(root, ".", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
	check(t, err)
	defer func() { _ = mount.Close() }()
	return w.digest(t, fmt.Sprintf("/proc/self/fd/%d", mount.Fd()))
}

// old returns the digest of a version by its manifest alone.
func (w *world) old(t fatal, manifest proto.Blob) string {
	t.Helper()
	dir, err := os.MkdirTemp(w.base, "")
	check(t, err)
	defer func() { check(t, os.RemoveAll(dir)) }()
	m, err := w.versions().ReadManifest(context.Background(), manifest)
	check(t, err)
	for in, err := range w.versions().Layers(context.Background(), "org", m.Version.Layers) {
		check(t, err)
		check(t, home.Apply(context.Background(), dir, in,
			func(ctx context.Context, digest layer.Digest, size int64) (io.ReadCloser, error) {
				return w.versions().OpenObject(ctx, "org", digest, size)
			}))
	}
	return w.digest(t, dir)
}

// TestRandomLiveSaves changes a home at random and saves it while it is in use, in several executions, some
// of which end without a save. Each version equals the home at that time, for workers that have any earlier
// version.
func TestRandomLiveSaves(t *testing.T) {
	w := newWorld(t)
	var workers []*cache.Cache
	for _, name := range []string{"a", "b", "c"} {
		homes := w.worker(name, 1<<30)
		defer w.close(homes)
		workers = append(workers, homes)
	}
	threads := 0
	rapid.Check(t, func(t *rapid.T) {
		threads++
		id := fmt.Sprint("t", threads)
		worker := func(label string) *cache.Cache { return rapid.SampledFrom(workers).Draw(t, label) }
		versions := map[int64]string{} // digests by number
		var number int64
		for range rapid.IntRange(1, 3).Draw(t, "executions") {
			h, dir := w.enter(worker("worker"), w.job(id))
			if number > 0 && w.digest(t, dir) != versions[number] {
				t.Fatalf("version %d differs", number)
			}
			for range rapid.IntRange(0, 4).Draw(t, "saves") {
				for range rapid.IntRange(0, 20).Draw(t, "operations") {
					_, change := hometest.Operation(t)
					_ = change(dir)
				}
				want, before := w.digest(t, dir), number
				if number = w.saveLive(t, h, id); number != before && number != before+1 {
					t.Fatalf("version %d after %d", number, before)
				}
				if number > 0 {
					versions[number] = want
					if got := w.newest(t, worker("reader"), id); got != want {
						t.Fatalf("version %d differs", number)
					}
				}
			}
			var c *proto.Commit
			if rapid.Bool().Draw(t, "last save") {
				want := w.digest(t, dir)
				var err error
				c, err = h.Save(context.Background())
				check(t, err)
				if c != nil {
					w.commit(id, c)
					number = c.Version.Number
					versions[number] = want
				}
			}
			check(t, h.Close(c != nil))
		}
		head, err := w.Get(context.Background(), "org", id)
		check(t, err)
		if head.Version == nil {
			return
		}
		for _, homes := range workers {
			if w.newest(t, homes, id) != versions[number] {
				t.Fatalf("version %d differs", number)
			}
		}
		for _, v := range append(head.History, *head.Version) {
			if w.old(t, v.Manifest) != versions[v.Number] {
				t.Fatalf("version %d differs by its manifest", v.Number)
			}
		}
	})
}
