package thread_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/thread"
)

func TestCollect(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i := range proto.KeptVersions + 2 {
		w.write(t, "t", "f", fmt.Sprint(i))
	}
	w.run(t, "t", func(root string) { check(t, os.WriteFile(root+"/object", []byte(large("kept")), 0o644)) })
	w.stage(t, "t", "taken", "taken")
	fenced := w.head(t, "t")
	w.write(t, "t", "f", "last")
	w.stage(t, "t", "staged", "staged")
	w.write(t, "headless", "object", large("headless"))
	check(t, w.loseHead("headless"))
	w.write(t, "gone", "object", large("gone"))
	check(t, w.versions.Remove(w.ctx, org, "gone"))
	// One commit is already fenced, one will be.
	for _, head := range []*proto.Thread{fenced, w.head(t, "t")} {
		w.save(t, head, func(root string) { check(t, os.WriteFile(root+"/fenced", nil, 0o644)) })
	}
	check(t, w.backend.Put(w.ctx, "others/x/y", 0, bytes.NewReader(nil), false),
		w.backend.Put(w.ctx, "layers/x", 0, bytes.NewReader(nil), false),
		w.backend.Put(w.ctx, "sweep/acme/interrupted", 0, bytes.NewReader(nil), false))
	all := w.backend.keys("")
	if c := must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge)); c != (proto.Collected{}) ||
		len(w.backend.keys("")) != len(all) {
		t.Errorf("removed young blobs: %+v", c)
	}
	if _, err := w.versions.Collect(w.ctx, thread.MinSafeAge-1); err == nil {
		t.Error("accepted a safe age that is too short")
	}
	w.backend.age()
	want := w.archived(t, "t", 0)
	c := must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge))
	// The thread needs the manifests of its history, of the next version and of a base. The fenced
	// commit has a layer of its own.
	if c.Manifests.Blobs != 4 || c.Layers.Blobs != 2 || c.Objects.Blobs != 1 || c.Uploads.Blobs != 1 ||
		c.Objects.Bytes != int64(len(large("gone"))) {
		t.Errorf("%+v", c)
	}
	same(t, w.archived(t, "t", 0), want)
	for _, v := range w.head(t, "t").History {
		w.archived(t, "t", v.Number)
	}
	for prefix, n := range map[string]int{
		"threads/acme/headless": 1, "threads/acme/t": proto.KeptVersions + 2,
		"uploads": 1, "objects": 2, "others": 1, "sweep": 0, "clock": 0,
	} {
		if got := w.backend.keys(prefix + "/"); len(got) != n {
			t.Errorf("%d of %s: %q", len(got), prefix, got)
		}
	}
	if c := must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge)); c != (proto.Collected{}) {
		t.Errorf("second collection: %+v", c)
	}
	if r := must[proto.Rebuilt](t)(w.versions.Rebuild(w.ctx)); r != (proto.Rebuilt{Made: 1, Kept: 1}) {
		t.Errorf("%+v", r)
	}
	same(t, w.archived(t, "t", 0), want)
}

// TestCollectWithUnreadableBlobs expects all blobs of an organisation to be retained if its
// references cannot be read.
func TestCollectWithUnreadableBlobs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	head := w.write(t, "t", "object", large("t"))
	w.write(t, "gone", "object", large("gone"))
	check(t, w.versions.Remove(w.ctx, org, "gone"))
	w.backend.age()
	l := head.Version.Layers[0]
	for key, at := range map[string]int64{head.Version.Manifest.Key: 50, l.Key: l.Size - 5} {
		w.backend.rot(key, at)
		c, err := w.versions.Collect(w.ctx, safeAge)
		if err == nil || !strings.Contains(err.Error(), key) || c != (proto.Collected{}) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	w.backend.rot("", 0)
	w.heads.Store.Close()
	ctx, cancel := context.WithTimeout(w.ctx, 100*time.Millisecond)
	defer cancel()
	if c, err := w.versions.Collect(ctx, safeAge); err == nil || c != (proto.Collected{}) {
		t.Errorf("without heads: %+v: %v", c, err)
	}
	if n := len(w.backend.keys("objects/")); n != 2 {
		t.Errorf("%d objects", n)
	}
}

// TestPutDuringRemoval stops a collection at each of its requests about an unneeded object until a
// commit has put the object again and waits, or is done.
func TestPutDuringRemoval(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	content := []byte("x")
	digest := sha256.Sum256(content)
	key := thread.ObjectBlob(org, digest, int64(len(content))).Key
	put := func() error {
		return w.versions.PutObject(w.ctx, org, digest, int64(len(content)), bytes.NewReader(content))
	}
	mark := "sweep/" + strings.TrimPrefix(key, "objects/")
	for name, at := range map[string]struct {
		op, prefix string
		after      bool
	}{
		"before writing the mark":  {"put", mark, false},
		"after writing the mark":   {"put", mark, true},
		"before the check":         {"stat", key, false},
		"after the check":          {"stat", key, true},
		"before the removal":       {"delete", key, false},
		"after the removal":        {"delete", key, true},
		"before removing the mark": {"delete", mark, false},
		"after removing the mark":  {"delete", mark, true},
	} {
		t.Run(name, func(t *testing.T) {
			check(t, put())
			w.backend.age()
			done := make(chan error, 1)
			waiting := make(chan struct{})
			stop := once(at.op, at.prefix, func() {
				var listed sync.Once
				// The hook is replaced first: a request of put that matches it would wait for stop.
				w.backend.watch(nil, func(op, prefix string) {
					if op == "list" && strings.HasPrefix(prefix, mark) {
						listed.Do(func() { close(waiting) })
					}
				})
				go func() {
					done <- put()
					listed.Do(func() { close(waiting) })
				}()
				<-waiting
			})
			if at.after {
				w.backend.watch(nil, stop)
			} else {
				w.backend.watch(stop, nil)
			}
			must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge))
			stop(at.op, at.prefix) // if the request was never made
			check(t, <-done)
			w.backend.watch(nil, nil)
			if _, err := w.backend.Stat(w.ctx, key); err != nil {
				t.Errorf("the object was put but does not exist: %v", err)
			}
			if got := w.backend.keys("sweep/"); len(got) != 0 {
				t.Error(got)
			}
		})
	}
}

// TestCollectionOfOldUploads completes uploads after Collect read the heads and before it removes
// blobs. They are old by the store's clock, as uploads in parts are whose first request was long
// ago.
func TestCollectionOfOldUploads(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.backend.watch(once("list", "uploads/", func() {
		w.write(t, "t", "object", large("object"))
		w.stage(t, "t", "staged", "staged")
		w.backend.age()
	}), nil)
	c := must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge))
	w.backend.watch(nil, nil)
	if c != (proto.Collected{}) {
		t.Errorf("removed %+v", c)
	}
	w.versions = &thread.Versions{Blobs: w.versions.Blobs, Heads: w.heads, Limits: unlimited}
	if w.content(t, "t", "object") != large("object") || w.content(t, "t", "staged") != "staged" {
		t.Error("the thread has wrong content")
	}
}

// TestConcurrentCollection performs operations that add references to old blobs during each request
// that a collection makes. Afterwards all threads must be complete.
func TestConcurrentCollection(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	work := map[string]func(id string){
		"commit":      func(id string) { w.write(t, id, "object", large("again")) },
		"two commits": func(id string) { w.write(t, id, "f", "1"); w.write(t, id, "f", "2") },
		"fork":        func(id string) { must[*proto.Thread](t)(w.versions.Fork(w.ctx, org, id, 0, id+"fork")) },
		"fork and remove": func(id string) {
			must[*proto.Thread](t)(w.versions.Fork(w.ctx, org, id, 0, id+"fork"))
			check(t, w.versions.Remove(w.ctx, org, id))
		},
		"fork of an old version and remove": func(id string) {
			must[*proto.Thread](t)(w.versions.Fork(w.ctx, org, id, 1, id+"fork"))
			check(t, w.versions.Remove(w.ctx, org, id))
		},
		"stage": func(id string) { w.stage(t, id, "more", "more") },
		"fork and take staged": func(id string) {
			must[*proto.Thread](t)(w.versions.Fork(w.ctx, org, id, 0, id+"fork"))
			w.write(t, id, "f", "")
		},
		"new with an old object": func(id string) { w.write(t, id+"new", "object", large("unneeded")) },
		"compact":                func(id string) { w.compact(t, id) },
	}
	requests, stride := 0, 3
	if testing.Short() {
		stride = 17
	}
	for name, do := range work {
		for step, stop := 0, false; !stop; step += stride {
			id := fmt.Sprintf("%s%d", strings.ReplaceAll(name, " ", "-"), step)
			for _, unneeded := range []string{"unneeded", "again"} {
				b := []byte(large(unneeded))
				check(t, w.versions.PutObject(w.ctx, org, sha256.Sum256(b), int64(len(b)), bytes.NewReader(b)))
			}
			w.write(t, id, "f", id)
			w.write(t, id, "f", id+"2")
			w.stage(t, id, "staged", "staged")
			w.backend.age()
			at, did := 0, false
			var busy sync.Mutex
			w.backend.watch(func(op, key string) {
				// PutObject would wait for the removal, see TestPutDuringRemoval.
				if op != "list" && strings.HasPrefix(key, "objects/") || op == "delete" && strings.HasPrefix(key, "sweep/") {
					return
				}
				busy.Lock()
				now := at == step && !did
				at++
				did = did || now
				busy.Unlock()
				if now {
					do(id)
				}
			}, nil)
			_, err := w.versions.Collect(w.ctx, safeAge)
			w.backend.watch(nil, nil)
			check(t, err)
			if stop = !did; !stop {
				requests++
			}
			for _, of := range []string{id, id + "fork", id + "new"} {
				head, err := w.heads.Get(w.ctx, org, of)
				if errors.Is(err, proto.ErrNotFound) {
					continue
				}
				check(t, err)
				fresh := &thread.Versions{Blobs: w.versions.Blobs, Heads: w.heads, Limits: unlimited}
				readable := &world{tb: t, ctx: w.ctx, versions: fresh}
				readable.archived(t, of, 0)
				for _, v := range head.History {
					readable.archived(t, of, v.Number)
				}
				check(t, w.versions.Remove(w.ctx, org, of))
			}
			w.backend.age()
			must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge))
			if got := w.backend.keys(""); len(got) != 0 {
				t.Fatalf("%s: remaining blobs: %q", id, got)
			}
		}
	}
	t.Logf("%d requests", requests)
}
