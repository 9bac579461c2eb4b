package home_test

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/home/hometest"
)

// withoutFIFOs is what a version has of a directory: nothing of FIFOs.
func withoutFIFOs(t fatal, dir string) {
	t.Helper()
	check(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.Type()&os.ModeNamedPipe == 0 {
			return err
		}
		var st unix.Stat_t
		parent := filepath.Dir(path)
		if err := errors.Join(unix.Lstat(parent, &st), os.Remove(path)); err != nil {
			return err
		}
		return unix.UtimesNanoAt(unix.AT_FDCWD, parent, []unix.Timespec{st.Atim, st.Mtim}, 0)
	}))
}

// TestRandomChanges applies the same random changes to homes and to a plain directory, over several
// versions.
func TestRandomChanges(t *testing.T) {
	uid := owner(t)
	scratch := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		dir := must[string](t)(os.MkdirTemp(scratch, ""))
		defer func() { check(t, os.RemoveAll(dir)) }()
		model, lower, chain := filepath.Join(dir, "model"), filepath.Join(dir, "lower"), filepath.Join(dir, "chain")
		check(t, os.Mkdir(model, 0o755), os.Mkdir(lower, 0o755), os.Mkdir(chain, 0o755))
		stored := objects{}
		for range rapid.IntRange(1, 4).Draw(t, "versions") {
			version(t, uid, lower, model, stored, func(l parts) {
				for _, d := range []string{lower, chain} {
					check(t, apply(d, l, stored))
				}
			})
			withoutFIFOs(t, model)
			if got, want := listing(t, lower), listing(t, model); got != want {
				t.Fatalf("the version is\n%s\nand the model\n%s", got, want)
			}
			if digest(t, lower) != digest(t, chain) {
				t.Fatal("applying all layers differs from applying the last one")
			}
		}
		l, stats := full(t, lower, stored)
		check(t, apply(model, l, stored))
		if whole := usage(t, lower); stats.Growth != whole {
			t.Fatalf("the home has %+v, want %+v", whole, stats.Growth)
		}
		if digest(t, lower) != digest(t, model) {
			t.Fatal("one full layer differs from all layers")
		}
	})
}

func version(t *rapid.T, uid *home.Owner, lower, model string, stored objects, apply func(parts)) {
	// On the same file system as the model: tmpfs has no user attributes before Linux 6.6.
	dir := must[string](t)(os.MkdirTemp(filepath.Dir(lower), "volume"))
	volume := os.NewFile(uintptr(
		must[int](t)(unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC))), dir)
	defer func() { _ = volume.Close() }()
	o := &home.Overlay{Lower: lower, Volume: pathOf(volume), Owner: uid}
	mount := must[*os.File](t)(o.Mount())
	defer func() { _ = mount.Close() }()
	for range rapid.IntRange(0, 60).Draw(t, "operations") {
		op, change := hometest.Operation(t)
		want, got := change(model), change(pathOf(mount))
		if (want == nil) != (got == nil) {
			t.Fatalf("%s: in the home %v, in the model %v", op, got, want)
		}
	}
	want, before := digest(t, pathOf(mount)), usage(t, lower)
	check(t, mount.Close())
	l, stats := diff(t, o, stored)
	if again, _ := diff(t, o, stored); !reflect.DeepEqual(l, again) {
		t.Fatal("the same change has two encodings")
	}
	apply(l)
	if after := usage(t, lower); before.Bytes+stats.Growth.Bytes != after.Bytes ||
		before.Files+stats.Growth.Files != after.Files {
		t.Fatalf("the home grew from %+v to %+v, but not by %+v", before, after, stats.Growth)
	}
	if digest(t, lower) != want {
		t.Fatalf("the version differs from what the program left:\n%s", listing(t, lower))
	}
}
