package thread_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/thread"
)

func TestManifests(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(t, "t", "f", "one")
	head := w.write(t, "t", "f", "two")
	m := must[*proto.Manifest](t)(w.versions.ReadManifest(w.ctx, head.Version.Manifest))
	if m.Org != org || m.Thread != "t" || !slices.Equal(m.Version.Layers, head.Version.Layers) ||
		m.Version.Trace != head.Version.Trace ||
		m.Version.Manifest != head.Version.Manifest || m.Parent == nil || *m.Parent != head.History[0].Manifest {
		t.Errorf("%+v of %+v", m, head)
	}
	elsewhere := head.Version.Layers[0]
	elsewhere.Key = "layers/other/X"
	for name, v := range map[string]proto.Version{
		"number":                        {},
		"layer of a later version":      {Number: 1, Layers: head.Version.Layers},
		"layers in another order":       {Number: 2, Layers: []proto.Layer{head.Version.Layers[1], head.Version.Layers[0]}},
		"layer of another organisation": {Number: 2, Layers: []proto.Layer{elsewhere}},
	} {
		if _, err := w.versions.WriteManifest(w.ctx, org, "t", v, nil); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// TestManifestsStaySmall writes versions with many layers, whose manifests have bases.
func TestManifestsStaySmall(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i := range 14 {
		head := w.write(t, "t", "f", fmt.Sprint(i))
		if size := head.Version.Manifest.Size; size > 2600 {
			t.Errorf("version %d has a manifest of %d bytes", head.Version.Number, size)
		}
		m := must[*proto.Manifest](t)(w.versions.ReadManifest(w.ctx, head.Version.Manifest))
		if !slices.Equal(m.Version.Layers, head.Version.Layers) {
			t.Errorf("version %d: %d layers, want %d", head.Version.Number, len(m.Version.Layers), len(head.Version.Layers))
		}
	}
	// A compacted version is not a base.
	head := w.head(t, "t")
	full := head.Version.Layers[0]
	check(t, w.heads.Compact(w.ctx, org, "t", head.Version.Layers, full))
	head = w.head(t, "t")
	version := proto.Version{Number: head.Number() + 1, Layers: append(slices.Clone(head.Version.Layers), full)}
	version = must[proto.Version](t)(w.versions.WriteManifest(w.ctx, org, "t", version, head.Version))
	m := must[*proto.Manifest](t)(w.versions.ReadManifest(w.ctx, version.Manifest))
	if !slices.Equal(m.Version.Layers, version.Layers) || version.Base != nil {
		t.Errorf("%+v of %+v", m.Version, version)
	}
}

func TestFork(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(t, "t", "f", "one")
	first := listing(t, w.dirs["t"])
	w.write(t, "t", "object", large("two"))
	second := listing(t, w.dirs["t"])
	head := w.write(t, "t", "f", "three")
	third := listing(t, w.dirs["t"])
	w.stage(t, "t", "staged", "staged")
	blobs := len(w.backend.keys("layers/")) + len(w.backend.keys("objects/"))
	for number, want := range []map[string]string{third, first, second, third} {
		to := fmt.Sprint("fork", number)
		fork := must[*proto.Thread](t)(w.versions.Fork(w.ctx, org, "t", int64(number), to))
		v := fork.Version
		layers := number
		if number == 0 {
			layers = 3
			if got := w.content(t, to, "staged"); got != "staged" {
				t.Errorf("%q", got)
			}
		}
		if v.Number != 1 || v.Trace != "" || len(fork.History) != 0 || len(v.Layers) != layers ||
			v.Layers[0].Key != head.Version.Layers[0].Key {
			t.Errorf("version %d: %+v", number, fork)
		}
		if slices.ContainsFunc(v.Layers, func(l proto.Layer) bool { return l.Version != 1 }) {
			t.Errorf("layers of a fork must belong to version 1: %+v", v.Layers)
		}
		same(t, w.archived(t, to, 1), want)
		w.dirs[to] = must[string](t)(extracted(w, to))
		w.write(t, to, "more", "forked")
		same(t, w.archived(t, to, 0), listing(t, w.dirs[to]))
		same(t, w.archived(t, to, 1), want)
	}
	same(t, w.archived(t, "t", 3), third)
	if n := len(w.backend.keys("layers/")) + len(w.backend.keys("objects/")); n != blobs+4 {
		t.Errorf("%d blobs, then %d", blobs, n)
	}
	if _, err := w.versions.Fork(w.ctx, org, "t", 0, "fork1"); !errors.Is(err, proto.ErrExists) {
		t.Error(err)
	}
	if _, err := w.versions.Fork(w.ctx, org, "none", 0, "new"); !errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
	if _, err := w.versions.Fork(w.ctx, org, "t", 4, "new"); !errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
	w.backend.age()
	check(t, w.versions.Remove(w.ctx, org, "t"))
	must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge))
	for number, want := range []map[string]string{third, first, second, third} {
		same(t, w.archived(t, fmt.Sprint("fork", number), 1), want)
	}
}

func TestForkWithoutVersion(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.stage(t, "t", "d/f", "staged")
	fork := must[*proto.Thread](t)(w.versions.Fork(w.ctx, org, "t", 0, "fork"))
	if fork.Version != nil || w.content(t, "fork", "d/f") != "staged" {
		t.Errorf("%+v", fork)
	}
}

// TestForkOfRemovedSource removes the source and collects its blobs during each request that a fork
// makes. The fork must either be complete or not exist.
func TestForkOfRemovedSource(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	complete, none := 0, 0
	for _, staged := range []bool{false, true} {
		for step, stop := 0, false; !stop; step++ {
			id, to := fmt.Sprintf("t%v%d", staged, step), fmt.Sprintf("f%v%d", staged, step)
			w.write(t, id, "f", large(id))
			want := w.archived(t, id, 0)
			if staged {
				w.stage(t, id, "f", "staged")
				want = w.archived(t, id, 0)
			}
			w.backend.age()
			var requests atomic.Int64
			var gone atomic.Bool
			request := func() { // also called by Remove and Collect, concurrently
				if requests.Add(1) != int64(step)+1 {
					return
				}
				gone.Store(true)
				check(t, w.versions.Remove(w.ctx, org, id))
				must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge))
			}
			w.backend.watch(func(string, string) { request() }, nil)
			heads := &hooked{Threads: w.heads, before: func(string) { request() }}
			v := &thread.Versions{Blobs: w.versions.Blobs, Heads: heads, Limits: unlimited}
			_, err := v.Fork(w.ctx, org, id, 0, to)
			w.backend.watch(nil, nil)
			stop = !gone.Load()
			must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge))
			switch {
			case err == nil:
				complete++
				same(t, w.archived(t, to, 0), want)
			case errors.Is(err, proto.ErrNotFound):
				none++
				if _, err := w.heads.Get(w.ctx, org, to); !errors.Is(err, proto.ErrNotFound) {
					t.Errorf("step %d: the fork exists despite the error: %v", step, err)
				}
			default:
				t.Errorf("step %d: %v", step, err)
			}
		}
	}
	if complete == 0 || none == 0 {
		t.Errorf("%d complete forks, %d without a fork", complete, none)
	}
}

func TestRemove(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(t, "t", "f", "one")
	w.write(t, "t", "f", "two")
	trace := proto.NewTraceID()
	_, _, err := w.heads.Lock(w.ctx, org, "t", trace)
	check(t, err)
	var busy *proto.BusyError
	if err := w.versions.Remove(w.ctx, org, "t"); !errors.As(err, &busy) || busy.Holder != trace {
		t.Error(err)
	}
	if n := len(w.backend.keys("threads/")); n != 2 {
		t.Errorf("%d manifests of a thread in use", n)
	}
	check(t, w.heads.Unlock(w.ctx, org, "t", trace), w.versions.Remove(w.ctx, org, "t"))
	if _, err := w.heads.Get(w.ctx, org, "t"); !errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
	if r := must[proto.Rebuilt](t)(w.versions.Rebuild(w.ctx)); r != (proto.Rebuilt{}) {
		t.Errorf("%+v", r)
	}
	if err := w.versions.Remove(w.ctx, org, "t"); !errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
	w.backend.age()
	if c := must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge)); c.Layers.Blobs != 2 {
		t.Errorf("%+v", c)
	}
	if got := w.backend.keys(""); len(got) != 0 {
		t.Error(got)
	}
}

// TestRemoveDuringUse uses a thread, or one that replaces it, during each request that Remove
// makes. Whatever is committed then must be complete afterwards.
func TestRemoveDuringUse(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	kept, replaced, refused := 0, 0, 0
	for step, stop := 0, false; !stop; step++ {
		id := fmt.Sprint("t", step)
		w.write(t, id, "f", "one")
		w.write(t, id, "f", "two")
		requests, used, committed := 0, false, false
		use := func() {
			if requests++; requests != step+1 || used {
				return
			}
			used = true
			trace := proto.NewTraceID()
			head, _, err := w.heads.Lock(w.ctx, org, id, trace)
			if _, removing := errors.AsType[*proto.RemovingError](err); removing {
				refused++
				return
			}
			check(t, err)
			if head.Version == nil {
				delete(w.dirs, id)
			}
			change := func(root string) { check(t, os.WriteFile(root+"/f", []byte("three"), 0o644)) }
			check(t, w.heads.Commit(w.ctx, org, id, trace, w.save(t, head, change)), w.heads.Unlock(w.ctx, org, id, trace))
			committed = true
		}
		var busy sync.Mutex
		guarded := func() {
			if busy.TryLock() { // false for requests of use itself
				defer busy.Unlock()
				use()
			}
		}
		w.backend.watch(func(string, string) { guarded() }, nil)
		v := &thread.Versions{
			Blobs: w.versions.Blobs, Heads: &hooked{Threads: w.heads, before: func(string) { guarded() }},
			Limits: unlimited,
		}
		err := v.Remove(w.ctx, org, id)
		w.backend.watch(nil, nil)
		stop = !used
		head, getErr := w.heads.Get(w.ctx, org, id)
		switch {
		case errors.Is(getErr, proto.ErrNotFound):
			check(t, err)
			if committed && step > 0 { // before the first request, the removal comes after the commit
				t.Errorf("step %d: the committed version was removed", step)
			}
		case err == nil:
			replaced++
		default:
			kept++
		}
		if getErr == nil {
			check(t, w.loseHead(id))
			if r := must[proto.Rebuilt](t)(w.versions.Rebuild(w.ctx)); r.Made != 1 || w.head(t, id).Number() != head.Number() {
				t.Errorf("step %d: version %d has no manifest: %+v", step, head.Number(), r)
			}
			for number := range head.Number() {
				w.archived(t, id, number+1)
			}
		}
	}
	if refused == 0 {
		t.Errorf("%d kept, %d replaced, %d refused", kept, replaced, refused)
	}
}

// TestStalledRemoval stalls a removal before it lists or removes manifests, while another process
// completes it and a new thread with the same id gets a version.
func TestStalledRemoval(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, before := range []string{"list", "delete"} {
		w.write(t, before, "f", "old")
		var stalled atomic.Bool
		w.backend.watch(func(op, key string) {
			if op == before && strings.HasPrefix(key, "threads/") && stalled.CompareAndSwap(false, true) {
				check(t, w.versions.Remove(w.ctx, org, before))
				delete(w.dirs, before)
				w.write(t, before, "f", "new")
			}
		}, nil)
		check(t, w.versions.Remove(w.ctx, org, before), w.loseHead(before))
		if r := must[proto.Rebuilt](t)(w.versions.Rebuild(w.ctx)); r.Made != 1 || w.content(t, before, "f") != "new" {
			t.Errorf("stalled before %s: %+v", before, r)
		}
	}
}

// TestInterruptedRemoval interrupts a removal, which Collect completes.
func TestInterruptedRemoval(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(t, "t", "f", "one")
	w.write(t, "t", "f", "two")
	ctx, cancel := context.WithCancel(w.ctx)
	w.backend.watch(once("delete", "threads/", cancel), nil)
	if err := w.versions.Remove(ctx, org, "t"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	w.backend.watch(nil, nil)
	var removing *proto.RemovingError
	if err := w.versions.Stage(w.ctx, org, "t", "f", 1, unlimitedHome, strings.NewReader("x")); !errors.As(
		err, &removing) {
		t.Error(err)
	}
	if _, err := w.heads.Get(w.ctx, org, "t"); !errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
	must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge))
	if got := w.backend.keys("threads/"); len(got) != 0 {
		t.Error(got)
	}
	w.stage(t, "t", "f", "x")
}

func TestRemoveWithoutHead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(t, "t", "f", "one")
	check(t, w.loseHead("t"), w.versions.Remove(w.ctx, org, "t"))
	if r := must[proto.Rebuilt](t)(w.versions.Rebuild(w.ctx)); r != (proto.Rebuilt{}) {
		t.Errorf("%+v", r)
	}
}

func TestExpire(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(t, "idle", "f", "")
	w.stage(t, "uploaded", "f", "x")
	w.write(t, "busy", "f", "")
	volume := proto.VolumeThread("v")
	w.write(t, volume, "f", "")
	kept := proto.NewAgentFile("f", 1).Thread()
	w.stage(t, kept, proto.AgentFileContent, "x")
	_, _, err := w.heads.Lock(w.ctx, org, "busy", proto.NewTraceID())
	check(t, err)
	if n := must[int](t)(w.versions.Expire(w.ctx, time.Hour)); n != 0 {
		t.Errorf("%d expired", n)
	}
	// A thread that is used during the expiry is not idle.
	w.write(t, "used", "f", "")
	heads := &hooked{Threads: w.heads, before: func(op string) {
		if op == "tombstone used" {
			w.write(t, "used", "f", "again")
		}
	}}
	v := &thread.Versions{Blobs: w.versions.Blobs, Heads: heads, Limits: unlimited}
	if n := must[int](t)(v.Expire(w.ctx, 0)); n != 2 {
		t.Errorf("%d expired", n)
	}
	for id, gone := range map[string]bool{
		"idle": true, "uploaded": true, "busy": false, "used": false, volume: false,
		kept: false,
	} {
		if _, err := w.heads.Get(w.ctx, org, id); errors.Is(err, proto.ErrNotFound) != gone {
			t.Errorf("%s: %v", id, err)
		}
	}
	if got := w.content(t, "used", "f"); got != "again" {
		t.Error(got)
	}
}

func TestRebuild(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	seen := make(map[string]map[string]string)
	for i := range 4 {
		for _, id := range []string{"complete", "no-layer", "no-object", "kept"} {
			w.write(t, id, "f", fmt.Sprint(id, i))
			seen[fmt.Sprint(id, w.head(t, id).Number())] = w.archived(t, id, 0)
			if id == "no-object" && i == 2 {
				w.write(t, id, "object", large("no-object"))
			}
			seen[fmt.Sprint(id, w.head(t, id).Number())] = w.archived(t, id, 0)
		}
	}
	old := w.head(t, "complete")
	w.stage(t, "complete", "staged", "lost")
	w.write(t, "lost", "f", "")
	noLayer := w.head(t, "no-layer")
	check(t, w.backend.Delete(w.ctx, noLayer.Version.Layers[2].Key),
		w.backend.Delete(w.ctx, w.head(t, "lost").Version.Layers[0].Key),
		w.backend.Delete(w.ctx, w.backend.keys("objects/")[0]))
	for _, id := range []string{"complete", "no-layer", "no-object", "lost"} {
		check(t, w.loseHead(id))
	}
	kept := w.head(t, "kept")
	if r := must[proto.Rebuilt](t)(w.versions.Rebuild(w.ctx)); r != (proto.Rebuilt{Made: 3, Kept: 1, Lost: 1}) {
		t.Errorf("%+v", r)
	}
	for id, number := range map[string]int64{"complete": 4, "no-layer": 2, "no-object": 3, "kept": 4} {
		head := w.head(t, id)
		if head.Number() != number || len(head.History) != int(number)-1 {
			t.Errorf("%s: version %d, %d in the history", id, head.Number(), len(head.History))
		}
		for n := range number {
			same(t, w.archived(t, id, n+1), seen[fmt.Sprint(id, n+1)])
		}
	}
	if now := w.head(t, "kept"); now.Fence != kept.Fence {
		t.Errorf("got %+v, want like %+v", now, kept)
	}
	// An execution that started before the heads were lost cannot commit.
	now := w.head(t, "complete")
	late := &proto.Commit{Fence: old.Fence, Version: proto.Version{Number: 5}}
	if now.Fence <= old.Fence || now.Version.Manifest != old.Version.Manifest ||
		!slices.Equal(now.Version.Layers, old.Version.Layers) {
		t.Errorf("got %+v, want like %+v", now, old)
	}
	if _, err := now.Commit(late); !errors.Is(err, proto.ErrFenced) {
		t.Error(err)
	}
	w.write(t, "complete", "f", "goes on")
	if got := w.content(t, "complete", "f"); got != "goes on" {
		t.Error(got)
	}
	if r := must[proto.Rebuilt](t)(w.versions.Rebuild(w.ctx)); r != (proto.Rebuilt{Kept: 4, Lost: 1}) {
		t.Errorf("%+v", r)
	}
}

// TestRebuildWithUnreadableManifest must not mistake an older version for the newest.
func TestRebuildWithUnreadableManifest(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, id := range []string{"a", "b", "c"} {
		w.write(t, id, "f", "one")
		w.write(t, id, "f", "two")
	}
	rotten := w.head(t, "b").Version.Manifest.Key
	for _, id := range []string{"a", "b", "c"} {
		check(t, w.loseHead(id))
	}
	w.backend.rot(rotten, 40)
	r, err := w.versions.Rebuild(w.ctx)
	if err == nil || r != (proto.Rebuilt{Made: 2}) {
		t.Errorf("%+v: %v", r, err)
	}
	if _, err := w.heads.Get(w.ctx, org, "b"); !errors.Is(err, proto.ErrNotFound) {
		t.Error(err)
	}
	check(t, w.backend.Delete(w.ctx, rotten))
	if r := must[proto.Rebuilt](t)(w.versions.Rebuild(w.ctx)); r != (proto.Rebuilt{Made: 1, Kept: 2}) ||
		w.content(t, "b", "f") != "one" {
		t.Errorf("%+v", r)
	}
}
