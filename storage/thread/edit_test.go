package thread_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/worker/home"
)

// catchUp applies the layers that edits have added to a worker's directory of a thread at version
// number, and checks that the directory then equals the newest version.
func (w *world) catchUp(tb fatal, id string, number int64) {
	tb.Helper()
	head, dir := w.head(tb, id), w.dir(tb, id)
	if head.Version == nil {
		return
	}
	var added []proto.Layer
	for _, l := range head.Version.Layers {
		if l.Version > number {
			added = append(added, l)
		}
	}
	for in, err := range w.versions.Layers(w.ctx, org, added) {
		check(tb, err)
		check(tb, home.Apply(w.ctx, dir, in,
			func(ctx context.Context, digest layer.Digest, size int64) (io.ReadCloser, error) {
				return w.versions.OpenObject(ctx, org, digest, size)
			}))
	}
	same(tb, w.archived(tb, id, head.Version.Number), listing(tb, dir))
	size := proto.Space{Files: -1} // without the home itself
	check(tb, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		size.Files++
		return err
	}))
	if head.Version.Files != size.Files {
		tb.Fatalf("version %d has %d files, and the directory %d", head.Version.Number, head.Version.Files, size.Files)
	}
}

// names returns the paths in the current home; those of directories end with a slash.
func (w *world) names(tb fatal, id string) []string {
	tb.Helper()
	all := []string{}
	for _, f := range w.list(tb, id, "", true) {
		if f.IsDirectory {
			f.Path += "/"
		}
		all = append(all, f.Path)
	}
	slices.Sort(all)
	return all
}

func (w *world) remove(org, id, path string) error {
	_, err := w.versions.Delete(w.ctx, org, id, path, false)
	return err
}

func (w *world) rename(id, from, to string, limit proto.Space) error {
	_, err := w.versions.Rename(w.ctx, org, id, from, to, limit)
	return err
}

// TestRandomEdits compares edits with what they should do to the names of a home, in the store and
// in the directory of a worker.
func TestRandomEdits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	count := 0
	rapid.Check(t, func(t *rapid.T) {
		count++
		id := fmt.Sprint("t", count)
		w.run(t, id, func(root string) {
			for range rapid.IntRange(0, 15).Draw(t, "operations") {
				operation(t, root)
			}
			check(t, os.WriteFile(filepath.Join(root, "always"), nil, 0o644))
		})
		for range rapid.IntRange(1, 6).Draw(t, "edits") {
			before, number := w.names(t, id), w.head(t, id).Number()
			from, to := editPath(t, "from"), editPath(t, "to")
			var want []string
			var err error
			switch rapid.SampledFrom([]string{"delete", "rename", "rename", "stage"}).Draw(t, "edit") {
			case "stage":
				w.stage(t, id, from, from)
				continue
			case "delete":
				_, err = w.versions.Delete(w.ctx, org, id, from, true)
				want = slices.DeleteFunc(slices.Clone(before), func(p string) bool {
					return p == from || strings.HasPrefix(p, from+"/")
				})
			case "rename":
				_, err = w.versions.Rename(w.ctx, org, id, from, to, unlimitedHome)
				want = renamed(before, from, to)
			}
			if err != nil {
				want = before
			}
			if got := w.names(t, id); !slices.Equal(got, want) {
				t.Fatalf("%s to %s: %v\nbefore %q\nafter  %q\nwant   %q", from, to, err, before, got, want)
			}
			w.catchUp(t, id, number)
		}
		head := w.run(t, id, func(string) {}) // the next execution puts the staged files into a version
		if len(head.Staged) > 0 {
			t.Fatalf("%d files are staged", len(head.Staged))
		}
		check(t, w.versions.Remove(w.ctx, org, id), os.RemoveAll(w.dirs[id]))
	})
}

// editPath draws a path of a request, which is UTF-8.
func editPath(t *rapid.T, label string) string {
	names := rapid.SampledFrom([]string{"a", "b", "%=é"})
	return strings.Join(rapid.SliceOfN(names, 1, 3).Draw(t, label), "/")
}

// renamed returns the names of a home after a rename.
func renamed(before []string, from, to string) []string {
	if from == to {
		return before
	}
	after := make(map[string]bool)
	for _, p := range before {
		if p == from || p == from+"/" || strings.HasPrefix(p, from+"/") {
			p = to + strings.TrimPrefix(p, from)
		}
		after[p] = true
	}
	for i := range to {
		if to[i] == '/' {
			after[to[:i+1]] = true
		}
	}
	var all []string
	for p := range after {
		all = append(all, p)
	}
	slices.Sort(all)
	return all
}

func TestEditKeepsContentAndHistory(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.run(t, "t", func(root string) {
		check(t, os.MkdirAll(filepath.Join(root, "d/sub"), 0o750),
			os.WriteFile(filepath.Join(root, "d/sub/small"), []byte("small"), 0o600),
			os.WriteFile(filepath.Join(root, "d/large"), []byte(large("x")), 0o644),
			os.Link(filepath.Join(root, "d/sub/small"), filepath.Join(root, "other name")),
			os.Symlink("d", filepath.Join(root, "link")))
	})
	w.stage(t, "t", "d/sub/up", "uploaded")
	check(t, w.rename("t", "d", "deep/er", unlimitedHome),
		w.rename("t", "deep/er/large", "large", unlimitedHome),
		w.rename("t", "other name", "deep/name", unlimitedHome),
		w.rename("t", "deep/er/sub/up", "up", unlimitedHome),
		w.remove(org, "t", "link"))
	w.catchUp(t, "t", 1)
	for path, want := range map[string]string{
		"deep/er/sub/small": "small", "deep/name": "small", "large": large("x"),
		"up": "uploaded",
	} {
		if got := w.content(t, "t", path); got != want {
			t.Errorf("%s has %d bytes, want %d", path, len(got), len(want))
		}
	}
	if old := w.archived(t, "t", 1); len(old) != 7 || old["d/large"] == "" {
		t.Errorf("version 1 is %v", old)
	}
	if got := w.archived(t, "t", 0)["deep/name"]; got != "= deep/er/sub/small" {
		t.Errorf("the second name is %q", got)
	}
	// What is left of a deletion of everything, when garbage is collected.
	w.backend.age()
	must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge))
	if got := w.content(t, "t", "large"); got != large("x") {
		t.Errorf("after a collection, large has %d bytes", len(got))
	}
}

func TestEditErrors(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.run(t, "t", func(root string) {
		check(t, os.MkdirAll(filepath.Join(root, "d/sub"), 0o755), os.WriteFile(filepath.Join(root, "f"), []byte("f"), 0o644),
			os.Symlink("d", filepath.Join(root, "link")))
	})
	remove := func(path string) error { return w.remove(org, "t", path) }
	rename := func(from, to string) error { return w.rename("t", from, to, unlimitedHome) }
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"nothing there":         {remove("x"), "nothing at"},
		"through a link":        {remove("link/sub"), "nothing at"},
		"below a file":          {remove("f/x"), "nothing at"},
		"not empty":             {remove("d"), "not empty"},
		"rename nothing":        {rename("x", "y"), "nothing at"},
		"rename through a link": {rename("link/sub", "y"), "nothing at"},
		"to what exists":        {rename("f", "d"), "exists already"},
		"to itself":             {rename("d", "d/sub/d"), "is below"},
		"below a file ":         {rename("d", "f/d"), "is no directory"},
		"into a link":           {rename("f", "link/f"), "is no directory"},
		"up":                    {rename("f", "../f"), "without . and .."},
		"no thread":             {w.remove(org, "u", "f"), "not found"},
		"no thread of another":  {w.remove("other", "t", "f"), "not found"},
		"more than the limit": {
			w.rename("t", "f", "a/b/c/f", proto.Space{Bytes: 1 << 20, Files: 5}),
			"has room for 1048576 bytes and 5",
		},
		"directories in too many": {rename("d", strings.Repeat("x/", layer.MaxDepth-2)+"d"), "too deeply"},
	} {
		if c.err == nil || !strings.Contains(c.err.Error(), c.want) {
			t.Errorf("%s: %v", name, c.err)
		}
	}
	if got, number := w.names(t, "t"), w.head(t, "t").Number(); number != 1 ||
		!slices.Equal(got, []string{"d/", "d/sub/", "f", "link"}) {
		t.Errorf("version %d: %q", number, got)
	}
	check(t, rename("f", "f")) // changes nothing
	if number := w.head(t, "t").Number(); number != 1 {
		t.Errorf("version %d after no change", number)
	}

	_, _, err := w.heads.Lock(w.ctx, org, "t", proto.NewTraceID())
	check(t, err)
	before := len(w.backend.keys("threads/"))
	if err := remove("f"); !isBusy(err) {
		t.Errorf("while an execution runs: %v", err)
	}
	if after := len(w.backend.keys("threads/")); after != before {
		t.Errorf("%d manifests, and %d before", after, before)
	}
}

func isBusy(err error) bool {
	_, busy := errors.AsType[*proto.BusyError](err)
	return busy
}

// TestEditAndUpload stages a file while the next version is being stored.
func TestEditAndUpload(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(t, "t", "f", "f")
	w.backend.watch(nil, once("put", "threads/", func() { w.stage(t, "t", "new", "new") }))
	check(t, w.remove(org, "t", "f"))
	if got := w.names(t, "t"); !slices.Equal(got, []string{"new"}) || len(w.backend.keys("threads/")) != 2 {
		t.Errorf("%q, manifests %q", got, w.backend.keys("threads/"))
	}
	w.catchUp(t, "t", 1)
}

// Uploads to a volume are in a version at once, since its readers have nothing else.
func TestPut(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := proto.VolumeThread("v")
	put := func(path, content string, limit proto.Space) error {
		return w.versions.Put(w.ctx, org, id, path, int64(len(content)), limit, strings.NewReader(content))
	}
	for i, c := range []struct{ path, content string }{
		{"a/b", "small"}, {"large", large("x")}, {"empty", ""}, {"a/b", "replaced"},
	} {
		check(t, put(c.path, c.content, unlimitedHome))
		if head := w.head(t, id); head.Number() != int64(i+1) || len(head.Staged) > 0 {
			t.Errorf("%s: version %d, %d staged files", c.path, head.Number(), len(head.Staged))
		}
		if got := w.content(t, id, c.path); got != c.content {
			t.Errorf("%s has %d bytes, want %d", c.path, len(got), len(c.content))
		}
	}
	w.catchUp(t, id, 0)
	if err := put("more", "12345", proto.Space{Bytes: 10, Files: 100}); err == nil ||
		!strings.Contains(err.Error(), "has room for 10 bytes") {
		t.Errorf("beyond the quota: %v", err)
	}
	_, _, err := w.heads.Lock(w.ctx, org, id, proto.NewTraceID())
	check(t, err)
	if err := put("busy", "x", unlimitedHome); !isBusy(err) {
		t.Errorf("while an execution runs: %v", err)
	}
	if left := w.backend.keys("uploads/"); len(left) > 0 || w.head(t, id).Number() != 4 {
		t.Errorf("version %d, uploads %q", w.head(t, id).Number(), left)
	}
}

// Staged files of a volume are in the version of a fork, and in the next version of the volume.
func TestStagedFilesOfVolume(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	from, to := proto.VolumeThread("from"), proto.VolumeThread("to")
	w.stage(t, from, "staged", "s")
	w.stage(t, from, "large", large("x"))
	head := must[*proto.Thread](t)(w.versions.Fork(w.ctx, org, from, 0, to))
	if head.Number() != 1 || len(head.Staged) > 0 {
		t.Errorf("the fork: %+v", head)
	}
	w.stage(t, from, "late", "l")
	check(t, w.remove(org, from, "staged"))
	if head := w.head(t, from); head.Number() != 1 || len(head.Staged) > 0 {
		t.Errorf("after a change: %+v", head)
	}
	for id, names := range map[string][]string{from: {"large", "late"}, to: {"large", "staged"}} {
		if got := w.names(t, id); !slices.Equal(got, names) || w.content(t, id, "large") != large("x") {
			t.Errorf("%s: %q", id, got)
		}
		w.catchUp(t, id, 0)
	}
}
