package thread_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// compared describes the difference of two versions, one change in a line.
func (w *world) compared(t *testing.T, id string, from, to int64, path string) (list []string) {
	t.Helper()
	changes, truncated, err := w.versions.Compare(w.ctx, org, id, from, to, path)
	if err != nil || truncated {
		t.Fatalf("%d changes, truncated %v, %v", len(changes), truncated, err)
	}
	state := func(s *proto.FileState) string {
		if s == nil {
			return "-"
		}
		return fmt.Sprintf("%s %d %o", s.Type, s.Size, s.Mode)
	}
	for _, c := range changes {
		list = append(list, fmt.Sprintf("%s: %s, %s", c.Path, state(c.Before), state(c.After)))
	}
	return list
}

func TestCompare(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.run(t, "t", func(root string) {
		check(t, os.MkdirAll(root+"/d/sub", 0o755), os.WriteFile(root+"/d/sub/gone", []byte("x"), 0o644),
			os.WriteFile(root+"/same", []byte("same"), 0o644), os.WriteFile(root+"/rewritten", []byte("same"), 0o644),
			os.WriteFile(root+"/changed", []byte("one"), 0o644), os.WriteFile(root+"/mode", nil, 0o644),
			os.WriteFile(root+"/object", []byte(large("a")), 0o644), os.WriteFile(root+"/kept", []byte(large("k")), 0o644),
			os.Symlink("a", root+"/link"), os.WriteFile(root+"/becomes", nil, 0o644))
	})
	w.run(t, "t", func(root string) {
		check(t, os.RemoveAll(root+"/d/sub"), os.WriteFile(root+"/rewritten", []byte("same"), 0o644),
			os.WriteFile(root+"/changed", []byte("two"), 0o644), os.Chmod(root+"/mode", 0o755),
			os.WriteFile(root+"/object", []byte(large("b")), 0o644), os.WriteFile(root+"/kept", []byte(large("k")), 0o644),
			os.Remove(root+"/link"), os.Symlink("b", root+"/link"), os.Remove(root+"/becomes"),
			os.MkdirAll(root+"/becomes", 0o755), os.WriteFile(root+"/becomes/new", []byte("n"), 0o600))
	})
	size := len(large("a"))
	want := []string{
		"becomes: file 0 644, directory 0 755", "becomes/new: -, file 1 600", "changed: file 3 644, file 3 644",
		"d/sub: directory 0 755, -", "d/sub/gone: file 1 644, -", "link: link 1 777, link 1 777",
		"mode: file 0 644, file 0 755", fmt.Sprintf("object: file %d 644, file %[1]d 644", size),
	}
	if got := w.compared(t, "t", 1, 2, ""); !slices.Equal(got, want) {
		t.Errorf("got\n%s", strings.Join(got, "\n"))
	}
	if got := w.compared(t, "t", 1, 2, "d"); !slices.Equal(got, want[3:5]) {
		t.Errorf("below d: %q", got)
	}
	if got := w.compared(t, "t", 1, 2, "changed"); !slices.Equal(got, want[2:3]) {
		t.Errorf("a file: %q", got)
	}
	if got := w.compared(t, "t", 1, 2, "d/sub/gone"); !slices.Equal(got, want[4:5]) {
		t.Errorf("a removed file: %q", got)
	}
	for _, same := range [][2]int64{{2, 2}, {2, 0}} {
		if got := w.compared(t, "t", same[0], same[1], ""); len(got) > 0 {
			t.Errorf("%v: %q", same, got)
		}
	}
	if got := w.compared(t, "t", 2, 1, "changed"); !slices.Equal(got, want[2:3]) {
		t.Errorf("backwards: %q", got)
	}
	if got := w.compared(t, "t", 0, 1, ""); len(got) != 11 || !strings.Contains(got[0], ": -, ") {
		t.Errorf("the first version: %q", got)
	}
	// Uploads are part of the current home. A compaction changes no file.
	w.stage(t, "t", "same", "same")
	w.stage(t, "t", "kept", large("k"))
	w.stage(t, "t", "up", "load")
	if got := w.compared(t, "t", 2, 0, ""); !slices.Equal(got, []string{"up: -, file 4 644"}) {
		t.Errorf("with uploads: %q", got)
	}
	w.compact(t, "t")
	if got := w.compared(t, "t", 1, 2, ""); !slices.Equal(got, want) {
		t.Errorf("compacted:\n%s", strings.Join(got, "\n"))
	}
}

func TestCompareErrors(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(t, "t", "a", "one")
	for _, number := range []int64{2, 1 << 40} {
		for _, pair := range [][2]int64{{number, 1}, {1, number}} {
			_, _, err := w.versions.Compare(w.ctx, org, "t", pair[0], pair[1], "")
			if missing, ok := errors.AsType[*proto.NoVersionError](err); !ok || missing.Number != number {
				t.Errorf("%v: %v", pair, err)
			}
		}
	}
	for _, id := range []string{"none", "t/../t"} {
		if _, _, err := w.versions.Compare(w.ctx, org, id, 0, 0, ""); !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("%s: %v", id, err)
		}
	}
	if _, _, err := w.versions.Compare(w.ctx, "other", "t", 0, 1, ""); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("another organisation: %v", err)
	}
	_, _, err := w.versions.Compare(w.ctx, org, "t", 0, 1, "b")
	if missing, ok := errors.AsType[*proto.NoFileError](err); !ok || missing.Path != "b" {
		t.Errorf("no such path: %v", err)
	}
}

// A comparison ends after 1,000 changes, 1 MiB of paths, or 64 MiB of content to read.
func TestCompareEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.run(t, "many", func(root string) {
		for i := range 1001 {
			check(t, os.WriteFile(fmt.Sprintf("%s/%04d", root, i), nil, 0o644))
		}
	})
	w.run(t, "many", func(root string) { check(t, os.Remove(root+"/0000")) })
	changes, truncated, err := w.versions.Compare(w.ctx, org, "many", 0, 1, "")
	if len(changes) != 1000 || !truncated || err != nil {
		t.Errorf("%d changes, truncated %v, %v", len(changes), truncated, err)
	}
	if changes, truncated, err = w.versions.Compare(w.ctx, org, "many", 0, 2, ""); len(changes) != 1000 || truncated ||
		err != nil {
		t.Errorf("%d changes, truncated %v, %v", len(changes), truncated, err)
	}
	deep := strings.Repeat(strings.Repeat("n", 250)+"/", 12)
	w.run(t, "long", func(root string) {
		check(t, os.MkdirAll(root+"/"+deep, 0o755))
		for i := range 500 {
			check(t, os.WriteFile(fmt.Sprintf("%s/%s%d", root, deep, i), nil, 0o644))
		}
	})
	changes, truncated, err = w.versions.Compare(w.ctx, org, "long", 0, 1, "")
	sum := 0
	for _, c := range changes {
		sum += len(c.Path)
	}
	if sum > 1<<20 || sum < 1<<20-4096 || !truncated || err != nil {
		t.Errorf("%d changes, truncated %v, %v", len(changes), truncated, err)
	}
}
