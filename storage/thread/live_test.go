package thread_test

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/worker/home"
)

// running is a sandbox that saves the home of a thread while it runs.
type running struct {
	*world
	id      string
	trace   proto.TraceID
	overlay *home.Overlay
	base    *proto.Version
	objects map[layer.Digest]bool // in the store
}

// start starts a sandbox, and returns it with the root of the home.
func (w *world) start(tb testing.TB, id string) (*running, string) {
	tb.Helper()
	trace := proto.NewTraceID()
	head, _, err := w.heads.Lock(w.ctx, org, id, trace)
	check(tb, err)
	volume, at := tmpfs(tb)
	o := &home.Overlay{Lower: w.dir(tb, id), Volume: at, Owner: w.owner}
	mount := must[*os.File](tb)(o.Mount())
	tb.Cleanup(func() { check(tb, mount.Close(), volume.Close()) })
	return &running{w, id, trace, o, head.Version, map[layer.Digest]bool{}}, pathOf(mount) + "/."
}

// commit stores the home as the next version, which replaces that of the last save.
func (r *running) commit(tb testing.TB) *proto.Commit {
	tb.Helper()
	head := r.head(tb, r.id)
	spool := must[*os.File](tb)(os.CreateTemp(r.tb.TempDir(), ""))
	defer func() { _ = spool.Close() }()
	draft := must[layer.Draft](tb)(r.versions.NewLayer(org, spool))
	stats := must[home.Stats](tb)(r.overlay.Diff(r.ctx, draft,
		func(ctx context.Context, digest layer.Digest, size int64, content io.ReaderAt) error {
			if r.objects[digest] {
				return nil
			}
			r.objects[digest] = true
			return r.putObject(ctx, digest, size, content)
		}))
	stored := must[proto.Layer](tb)(draft.Store(r.ctx, head.Number()+1, len(stats.Objects)))
	c := &proto.Commit{Fence: head.Fence}
	whole := proto.Version{
		Number: head.Number() + 1, CreatedAt: time.Now().UTC(), Trace: r.trace,
		Bytes: r.base.Bytes + stats.Growth.Bytes, Files: r.base.Files + stats.Growth.Files,
	}
	if last := head.Version; last.Trace == r.trace {
		c.Replaces, whole.Supersedes = last.Layers[len(last.Layers)-1].Key, last.Supersedes+1
	}
	whole.Layers = append(slices.Clone(r.base.Layers), stored)
	c.Version = must[proto.Version](tb)(r.versions.WriteManifest(r.ctx, org, r.id, whole, head.Version))
	c.Version.Layers = []proto.Layer{stored}
	return c
}

func (r *running) save(tb testing.TB) {
	tb.Helper()
	check(tb, r.heads.Commit(r.ctx, org, r.id, r.trace, r.commit(tb)))
}

// The saves of a running sandbox survive collections, a rebuild and forks, more of them than versions are kept.
func TestLiveSaves(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i := range 6 {
		w.write(t, "t", fmt.Sprint("base", i), "base")
	}
	r, root := w.start(t, "t")
	check(t, os.WriteFile(root+"/large", []byte(large("kept")), 0o644))
	seen := map[int64]map[string]string{}
	for i := range int64(proto.KeptVersions + 5) {
		check(t, os.WriteFile(fmt.Sprint(root, "/f", i), []byte("f"), 0o644))
		if i > 0 {
			check(t, os.Remove(fmt.Sprint(root, "/f", i-1)))
		}
		r.save(t)
		head := w.head(t, "t")
		if head.Number() != 7+i || len(head.Version.Layers) != 7 || head.Version.Supersedes != i ||
			head.Superseded(head.Number()) || head.Superseded(6) || head.Superseded(7) != (i > 0) {
			t.Fatalf("%+v", head)
		}
		seen[head.Number()] = w.archived(t, "t", 0)
		if files := slices.Collect(maps.Keys(seen[head.Number()])); len(files) != 6+3 { // the root, large and one more
			t.Fatalf("version %d has %q", head.Number(), files)
		}
	}
	head := w.head(t, "t")
	kept := func(t *testing.T, id string) {
		t.Helper()
		now := w.head(t, id)
		if now.Number() != head.Number() || len(now.History) != proto.KeptVersions-1 {
			t.Errorf("version %d, %d in the history", now.Number(), len(now.History))
		}
		for _, v := range append(slices.Clone(now.History), *now.Version) {
			same(t, w.archived(t, id, v.Number), seen[v.Number])
			if now.Superseded(v.Number) != (v.Number < now.Number()) {
				t.Errorf("version %d is superseded: %v", v.Number, now.Superseded(v.Number))
			}
		}
	}
	w.backend.age()
	// The layers of the versions that are no longer kept, and all but a few manifests.
	if c := must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge)); c.Layers.Blobs != 5 || c.Objects.Blobs != 0 {
		t.Errorf("%+v", c)
	}
	kept(t, "t")
	for _, number := range []int64{0, head.Number() - 3} {
		id := fmt.Sprint("fork", number)
		must[*proto.Thread](t)(w.versions.Fork(w.ctx, org, "t", number, id))
		if number == 0 {
			number = head.Number()
		}
		same(t, w.archived(t, id, 0), seen[number])
	}
	check(t, w.heads.Unlock(w.ctx, org, "t", r.trace), w.loseHead("t"))
	if rebuilt := must[proto.Rebuilt](t)(w.versions.Rebuild(w.ctx)); rebuilt.Made != 1 {
		t.Errorf("%+v", rebuilt)
	}
	kept(t, "t")
	if c := must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge)); c.Layers.Blobs != 0 || c.Objects.Blobs != 0 {
		t.Errorf("%+v", c)
	}
	kept(t, "t")
}

// A fork of a version that is replaced meanwhile begins again.
func TestForkDuringLiveSave(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(t, "t", "base", "base")
	r, root := w.start(t, "t")
	check(t, os.WriteFile(root+"/f", []byte("1"), 0o644))
	r.save(t)
	check(t, os.WriteFile(root+"/f", []byte("2"), 0o644))
	next := r.commit(t)
	save := func() { check(t, w.heads.Commit(w.ctx, org, "t", r.trace, next)) }
	w.backend.watch(nil, once("put", "threads/acme/fork/", save))
	must[*proto.Thread](t)(w.versions.Fork(w.ctx, org, "t", 0, "fork"))
	if got := w.content(t, "fork", "f"); got != "2" {
		t.Errorf("the fork has %q", got)
	}
}
