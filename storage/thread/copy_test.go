package thread_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/thread"
)

// copyTo copies paths of a home to a directory of another one.
func (w *world) copyTo(from, to, dir string, paths ...string) error {
	return w.versions.Copy(w.ctx, org, to, &proto.TreeCopy{
		Parts: []proto.TreePart{{Thread: from, Paths: paths, Dir: dir}}, Most: unlimitedHome, Home: unlimitedHome,
	})
}

// TestRandomCopies copies homes with everything that a home can have, and compares all that an archive
// has of them, in the store and in the directory of a worker.
func TestRandomCopies(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	count := 0
	rapid.Check(t, func(t *rapid.T) {
		count++
		from, to := fmt.Sprint("from", count), fmt.Sprint("to", count)
		for range rapid.IntRange(1, 2).Draw(t, "versions") {
			w.run(t, from, func(root string) {
				for range rapid.IntRange(0, 15).Draw(t, "operations") {
					operation(t, root)
				}
			})
		}
		if rapid.Bool().Draw(t, "staged") {
			w.stage(t, from, "staged/file", large(from))
		}
		w.write(t, to, "always", "")
		number := w.head(t, to).Number()
		dir := rapid.SampledFrom([]string{"", "below/here"}).Draw(t, "dir")
		check(t, w.copyTo(from, to, dir, "**"))
		w.catchUp(t, to, number)
		want, got := w.archived(t, from, 0), w.archived(t, to, 0)
		delete(got, "always")
		for path, line := range want {
			if target, ok := strings.CutPrefix(line, "= "); ok {
				line = "= " + filepath.Join(dir, target)
			}
			if at := filepath.Join(dir, path); path != "." {
				if got[at] != line {
					t.Fatalf("%q is\n%s\nwant\n%s", at, got[at], line)
				}
				delete(got, at)
			}
		}
		for path := range got { // directories above
			if path != "." && !strings.HasPrefix("below/here", path) {
				t.Fatalf("unexpected %q", path)
			}
		}
		check(t, w.versions.Remove(w.ctx, org, from), w.versions.Remove(w.ctx, org, to), os.RemoveAll(w.dirs[from]),
			os.RemoveAll(w.dirs[to]))
	})
}

func TestCopy(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.run(t, "from", func(root string) {
		check(t, os.MkdirAll(filepath.Join(root, "a/empty"), 0o700), os.MkdirAll(filepath.Join(root, "other"), 0o755))
		check(t, os.WriteFile(filepath.Join(root, "a/tool"), []byte("new"), 0o755),
			os.WriteFile(filepath.Join(root, "other/x"), nil, 0o644))
		check(t, os.Symlink("/etc/passwd", filepath.Join(root, "a/out")), os.Symlink("tool", filepath.Join(root, "a/in")))
	})
	w.run(t, "to", func(root string) {
		check(t, os.Mkdir(filepath.Join(root, "a"), 0o755), os.WriteFile(filepath.Join(root, "a/tool"), []byte("old"), 0o644))
		check(t, os.WriteFile(filepath.Join(root, "a/kept"), []byte("kept"), 0o644))
	})
	check(t, w.copyTo("from", "to", "", "a/[^z]*"))
	got := w.archived(t, "to", 0)
	for path, want := range map[string]string{
		"a/tool": "755", "a/kept": "644", "a/empty": "700", "a/out": `-> "/etc/passwd"`, "a/in": `-> "tool"`, "a": "755",
	} {
		if !strings.Contains(got[path], want) {
			t.Errorf("%s is %q, want %s", path, got[path], want)
		}
	}
	if w.content(t, "to", "a/tool") != "new" || got["other"] != "" {
		t.Errorf("%v", got)
	}
	fresh := func(to string, most, home proto.Space, paths ...string) error {
		return w.versions.Copy(w.ctx, org, to,
			&proto.TreeCopy{
				Parts: []proto.TreePart{{Thread: "from", Paths: paths}, {Thread: "nobody", Paths: []string{"**"}}},
				New:   true, Most: most, Home: home,
			})
	}
	check(t, fresh("new", unlimitedHome, unlimitedHome, "a"))
	if err := fresh("new", unlimitedHome, unlimitedHome, "other"); !errors.Is(err, proto.ErrExists) {
		t.Error(err)
	}
	if got := w.names(t, "new"); strings.Join(got, " ") != "a/ a/empty/ a/in a/out a/tool" {
		t.Errorf("%q", got)
	}
	check(t, fresh("nothing", unlimitedHome, unlimitedHome, "missing"))
	if _, err := w.heads.Get(w.ctx, org, "nothing"); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("a copy of nothing made a thread: %v", err)
	}
	// 5 entries with 3 bytes.
	for _, test := range []struct {
		name       string
		most, home proto.Space
		ok         bool
	}{
		{"at both limits", proto.Space{Bytes: 3, Files: 5}, proto.Space{Bytes: 3, Files: 5}, true},
		{"too many files", proto.Space{Bytes: 3, Files: 4}, unlimitedHome, false},
		{"too many bytes", proto.Space{Bytes: 2, Files: 5}, unlimitedHome, false},
		{"home too small", unlimitedHome, proto.Space{Bytes: 2, Files: 5}, false},
	} {
		var conflict interface{ Conflict() }
		if err := fresh(strings.ReplaceAll(test.name, " ", "-"), test.most, test.home, "a"); (err == nil) != test.ok ||
			err != nil && !errors.As(err, &conflict) {
			t.Errorf("%s: %v", test.name, err)
		}
	}
	trace := proto.NewTraceID()
	_, _, err := w.heads.Lock(w.ctx, org, "to", trace)
	check(t, err)
	var busy *proto.BusyError
	if err := w.copyTo("from", "to", "", "a"); !errors.As(err, &busy) {
		t.Error(err)
	}
}

// TestCopyOfRemovedSource removes the source and collects its blobs during each request that a copy
// makes. The copy must either be complete or not exist.
func TestCopyOfRemovedSource(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	complete, none := 0, 0
	for step, stop := 0, false; !stop; step++ {
		id, to := fmt.Sprint("t", step), fmt.Sprint("c", step)
		w.run(t, id, func(root string) {
			check(t, os.WriteFile(filepath.Join(root, "large"), []byte(large(id)), 0o644),
				os.WriteFile(filepath.Join(root, "small"), []byte(id), 0o644))
		})
		want := w.archived(t, id, 0)
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
		v := &thread.Versions{Blobs: w.versions.Blobs, Heads: heads, Spool: w.versions.Spool, Limits: unlimited}
		err := v.Copy(w.ctx, org, to, &proto.TreeCopy{
			Parts: []proto.TreePart{{Thread: id, Paths: []string{"*"}}}, New: true,
			Most: unlimitedHome, Home: unlimitedHome,
		})
		w.backend.watch(nil, nil)
		stop = !gone.Load()
		must[proto.Collected](t)(w.versions.Collect(w.ctx, safeAge))
		if _, missing := w.heads.Get(w.ctx, org, to); errors.Is(missing, proto.ErrNotFound) {
			none++ // nothing to copy, or an error
			continue
		}
		complete++
		check(t, err)
		got := w.archived(t, to, 0)
		delete(got, ".")
		delete(want, ".")
		same(t, got, want)
	}
	if complete == 0 || none == 0 {
		t.Errorf("%d complete copies, %d without a copy", complete, none)
	}
}
