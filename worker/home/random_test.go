package home_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/bullpen-run/bullpen/worker/home"
)

// component draws from few names, so that operations often refer to the same files.
var component = rapid.SampledFrom([]string{"a", "b", "\xff\n"})

func path(t *rapid.T, label string) string {
	return strings.Join(rapid.SliceOfN(component, 1, 3).Draw(t, label), "/")
}

// operation draws a change to be made in the home and in the model.
func operation(t *rapid.T) (string, func(root string) error) {
	name, other := path(t, "name"), path(t, "other")
	n := rapid.IntRange(0, 20_000).Draw(t, "n")
	at := func(f func(path string) error) func(string) error {
		return func(root string) error { return f(filepath.Join(root, name)) }
	}
	content := bytes.Repeat([]byte{byte(n)}, n)
	switch op := rapid.SampledFrom([]string{
		"mkdir", "mkdir", "mkdirs", "mkdirs", "write", "write", "write", "append", "sparse", "truncate", "rename", "rename",
		"rename", "rename",
		"remove", "remove all", "symlink", "link", "link", "chmod", "time", "attribute", "no attribute", "fifo",
	}).Draw(t, "operation"); op {
	case "mkdir":
		return op, at(func(p string) error { return os.Mkdir(p, 0o755) })
	case "mkdirs":
		return op, at(func(p string) error { return os.MkdirAll(p, 0o755) })
	case "write":
		return op, at(func(p string) error {
			// A FIFO is not to be waited for.
			f, err := os.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o644)
			if err != nil {
				return err
			}
			_, err = f.Write(content)
			return errors.Join(err, f.Close())
		})
	case "append", "sparse":
		return op, at(func(p string) error {
			f, err := os.OpenFile(p, os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
			if err != nil {
				return err
			}
			end, err := f.Seek(0, 2)
			if op == "sparse" {
				end += int64(n) * 10
			}
			_, err2 := f.WriteAt([]byte(op), end)
			return errors.Join(err, err2, f.Close())
		})
	case "truncate":
		return op, at(func(p string) error {
			f, err := os.OpenFile(p, os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
			if err != nil {
				return err
			}
			return errors.Join(f.Truncate(int64(n)), f.Close())
		})
	case "rename":
		return op, func(root string) error { return os.Rename(filepath.Join(root, name), filepath.Join(root, other)) }
	case "remove":
		return op, at(os.Remove)
	case "remove all":
		return op, at(func(p string) error {
			// os.RemoveAll would wait for a FIFO that is on the way.
			if _, err := os.Lstat(p); err != nil {
				return err
			}
			return os.RemoveAll(p)
		})
	case "symlink":
		return op, at(func(p string) error { return os.Symlink(other, p) })
	case "link":
		return op, func(root string) error { return os.Link(filepath.Join(root, name), filepath.Join(root, other)) }
	case "chmod":
		return op, at(func(p string) error {
			return unix.Fchmodat(unix.AT_FDCWD, p, uint32(n)&0o777, unix.AT_SYMLINK_NOFOLLOW)
		})
	case "time":
		return op, at(func(p string) error {
			ts := unix.NsecToTimespec(int64(n) * int64(time.Hour+1))
			return unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
		})
	case "attribute":
		return op, at(func(p string) error { return unix.Lsetxattr(p, fmt.Sprint("user.", n%3), content[:n%100], 0) })
	case "no attribute":
		return op, at(func(p string) error { return unix.Lremovexattr(p, fmt.Sprint("user.", n%3)) })
	default:
		return op, at(func(p string) error { return unix.Mkfifo(p, 0o644) })
	}
}

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
		op, change := operation(t)
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
