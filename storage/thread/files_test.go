package thread_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/storage/thread"
)

// component draws from few names, so that operations often refer to the same files.
var component = rapid.SampledFrom([]string{"a", "b", "\xff\n", "%=é"})

func path(t *rapid.T, label string) string {
	return strings.Join(rapid.SliceOfN(component, 1, 3).Draw(t, label), "/")
}

// operation draws a change and tries to make it.
func operation(t *rapid.T, root string) {
	name, other := filepath.Join(root, path(t, "name")), filepath.Join(root, path(t, "other"))
	n := rapid.IntRange(0, 20_000).Draw(t, "n")
	content := bytes.Repeat([]byte{byte(n), byte(n >> 8), 'x'}, n)
	at := func(flags int, f func(*os.File) error) error {
		file, err := os.OpenFile(name, os.O_RDWR|unix.O_NOFOLLOW|flags, 0o644)
		if err != nil {
			return err
		}
		return errors.Join(f(file), file.Close())
	}
	switch rapid.SampledFrom([]string{
		"mkdirs", "mkdirs", "mkdirs", "write", "write", "write", "write", "object", "append", "sparse", "truncate", "rename",
		"rename", "rename",
		"remove", "remove all", "symlink", "link", "link", "link", "chmod", "time", "attribute", "no attribute",
	}).Draw(t, "operation") {
	case "mkdirs":
		_ = os.MkdirAll(name, 0o755)
	case "write":
		_ = at(os.O_CREATE|os.O_TRUNC, func(f *os.File) error { _, err := f.Write(content); return err })
	case "object":
		_ = at(os.O_CREATE|os.O_TRUNC, func(f *os.File) error { _, err := f.WriteString(large(fmt.Sprint(n))); return err })
	case "append":
		_ = at(os.O_APPEND, func(f *os.File) error { _, err := f.Write(content); return err })
	case "sparse":
		_ = at(0, func(f *os.File) error {
			end, err := f.Seek(0, io.SeekEnd)
			_, err2 := f.WriteAt(content, end+int64(n)*10)
			return errors.Join(err, err2)
		})
	case "truncate":
		_ = at(0, func(f *os.File) error { return f.Truncate(int64(n)) })
	case "rename":
		_ = os.Rename(name, other)
	case "remove":
		_ = os.Remove(name)
	case "remove all":
		_ = os.RemoveAll(name)
	case "symlink":
		_ = os.Symlink(filepath.Base(other), name)
	case "link":
		_ = os.Link(name, other)
	case "chmod":
		_ = unix.Fchmodat(unix.AT_FDCWD, name, uint32(n)&0o1777, unix.AT_SYMLINK_NOFOLLOW)
	case "time":
		ts := unix.NsecToTimespec(int64(n-10_000) * int64(time.Hour+1))
		_ = unix.UtimesNanoAt(unix.AT_FDCWD, name, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
	case "attribute":
		_ = unix.Lsetxattr(name, fmt.Sprint("user.=%", n%3), content[:min(len(content), n%100)], 0)
	case "no attribute":
		_ = unix.Lremovexattr(name, fmt.Sprint("user.=%", n%3))
	}
}

// TestRandomVersions compares versions in the store with directories.
func TestRandomVersions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	count := 0
	rapid.Check(t, func(t *rapid.T) {
		count++
		id := fmt.Sprint("t", count)
		var seen []map[string]string
		for range rapid.IntRange(1, 3).Draw(t, "versions") {
			w.run(t, id, func(root string) {
				for range rapid.IntRange(0, 30).Draw(t, "operations") {
					operation(t, root)
				}
			})
			seen = append(seen, listing(t, w.dirs[id]))
			same(t, w.archived(t, id, 0), seen[len(seen)-1])
			files(t, w, id, "")
		}
		for i, want := range seen {
			same(t, w.archived(t, id, int64(i+1)), want)
		}
		check(t, w.versions.Remove(w.ctx, org, id), os.RemoveAll(w.dirs[id]))
	})
}

// TestChanges makes changes that are unlikely at random.
func TestChanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for name, scripts := range map[string][2]string{
		"renamed out of what is renamed": {"mkdir -p a/b; echo x > a/b/f; echo y > a/g", "mv a/b z; mv a y; mv z y/in"},
		"renamed out of what is deleted": {"mkdir -p a/b; echo x > a/b/f; echo y > a/g", "mv a/b z; rm -r a"},
		"renamed into its own name":      {"mkdir -p a/b; echo x > a/b/f", "mv a x; mkdir a; mv x a/a"},
		"swapped":                        {"mkdir -p a/1 b/2; echo x > a/1/f; echo y > b/2/f", "mv a t; mv b a; mv t b"},
		"swapped with a child":           {"mkdir -p a/b; echo x > a/f; echo y > a/b/g", "mv a/b t; mv a t/b; mv t a"},
		"renamed and refilled":           {"mkdir -p a/b; echo x > a/b/f", "mv a z; mkdir -p a/b; echo n > a/b/n"},
		"directory becomes file":         {"mkdir -p d/e; echo x > d/e/f", "rm -r d; echo y > d"},
		"symlink becomes directory":      {"ln -s /etc l", "rm l; mkdir l; echo x > l/passwd"},
		"one of two names written to":    {"echo x > a; mkdir d; ln a d/b", "echo y >> a"},
		"one of three names removed":     {"echo x > a; mkdir d; ln a d/b; ln a c", "rm a; echo y > a; ln d/b d/d"},
		"a name in a renamed directory":  {"echo x > a; mkdir -p d/e; ln a d/e/b", "mv d z; echo y >> a"},
		"hard links to a symlink":        {"ln -s x a; ln -P a b", "mkdir d; ln -P a d/c; rm a"},
		"an object with two names":       {"yes | head -c 5000000 > a; ln a b", "rm a; mkdir d; ln b d/b"},
		"before 1970": {
			"touch -d '1950-01-01 00:00:00.5' f; mkdir d", "touch -h -d '1931-05-05 05:05:05.123456789' d .",
		},
		"unreadable": {"mkdir d; echo x > d/f; chmod 1700 d", "chmod 000 d/f d"},
		"names": {
			":", `mkdir $'new\nline' -- -rf ' ' '...'; echo x > $'new\nline/\xc3\x28'; echo y > '\'; echo long > $(printf ` +
				`'n%.0s' {1..255})`,
		},
		"deep": {
			"mkdir -p $(printf 'd/%.0s' {1..200})", "mv d/d/d/d/d x; echo x > $(printf 'd/%.0s' {1..4})f",
		},
	} {
		t.Run(name, func(t *testing.T) {
			id := strings.ReplaceAll(name, " ", "-")
			for i, script := range scripts {
				w.run(t, id, func(root string) {
					cmd := exec.CommandContext(w.ctx, "bash", "-euc", script)
					cmd.Dir = root
					if out, err := cmd.CombinedOutput(); err != nil {
						t.Fatalf("%v: %s", err, out)
					}
				})
				same(t, w.archived(t, id, int64(i+1)), listing(t, w.dirs[id]))
			}
		})
	}
}

// files compares the results of List and Open with a directory.
func files(t *rapid.T, w *world, id, dir string) {
	t.Helper()
	var want []string
	for _, e := range must[[]os.DirEntry](t)(os.ReadDir(filepath.Join(w.dirs[id], dir))) {
		want = append(want, filepath.Join(dir, e.Name()))
	}
	slices.Sort(want)
	var got []string
	for _, f := range w.list(t, id, dir, false) {
		got = append(got, f.Path)
		onDisk := filepath.Join(w.dirs[id], f.Path)
		info := must[os.FileInfo](t)(os.Lstat(onDisk))
		if f.IsDirectory != info.IsDir() || !f.Modified.Equal(info.ModTime()) || !info.IsDir() && f.Size != info.Size() {
			t.Fatalf("%+v is %v", f, info)
		}
		_, err := w.versions.Open(w.ctx, org, id, 0, f.Path)
		switch {
		case info.IsDir():
			files(t, w, id, f.Path)
			fallthrough
		case !info.Mode().IsRegular():
			if !errors.Is(err, proto.ErrNotFound) {
				t.Fatalf("%q: %v", f.Path, err)
			}
		default:
			ranges(t, w, id, f.Path, must[[]byte](t)(os.ReadFile(onDisk)))
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("%q has %q, want %q", dir, got, want)
	}
}

// ranges compares a file and ranges of it.
func ranges(t fatal, w *world, id, path string, want []byte) {
	t.Helper()
	f := must[*proto.FileContent](t)(w.versions.Open(w.ctx, org, id, 0, path))
	size := int64(len(want))
	if f.Size != size {
		t.Fatalf("%q has %d bytes, want %d", path, f.Size, size)
	}
	for _, r := range [][2]int64{
		{0, size},
		{size / 3, size / 2},
		{size - size/4, size / 4},
		{size / 2, 0},
		{size, 0},
		{size / 5, min(1, size-size/5)},
	} {
		got := must[[]byte](t)(part(w.ctx, f, r[0], r[1]))
		if !bytes.Equal(got, want[r[0]:r[0]+r[1]]) {
			t.Fatalf("%d bytes of %q at %d differ", r[1], path, r[0])
		}
	}
	for _, r := range [][2]int64{{0, size + 1}, {size + 1, 0}, {-1, 1}, {0, -1}, {1 << 62, 1 << 62}} {
		if _, err := f.Read(w.ctx, r[0], r[1]); err == nil {
			t.Fatalf("read %d bytes of %q at %d", r[1], path, r[0])
		}
	}
}

func TestLargeAndSparseFiles(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	big := []byte(large("big"))
	w.run(t, "t", func(root string) {
		f := must[*os.File](t)(os.Create(root + "/sparse-object"))
		for i := range int64(3) {
			must[int](t)(f.WriteAt(big[:2<<20], 1<<20+i*5<<20))
		}
		check(t, f.Truncate(20<<20), f.Close())
		f = must[*os.File](t)(os.Create(root + "/sparse-inline"))
		for i := range int64(3) {
			must[int](t)(f.WriteAt(big[:1<<20+100], 1<<20+i*3<<20))
		}
		check(t, f.Truncate(12<<20), f.Close(), os.Truncate(root+"/sparse-inline", 11<<20))
		check(t, os.WriteFile(root+"/object", big, 0o600), os.WriteFile(root+"/inline", big[:3<<20], 0o600),
			os.WriteFile(root+"/empty", nil, 0o600))
		f = must[*os.File](t)(os.Create(root + "/hole"))
		check(t, f.Truncate(7<<20), f.Close())
	})
	if n := len(w.backend.keys("objects/")); n != 2 {
		t.Errorf("%d objects", n)
	}
	for _, name := range []string{"sparse-object", "sparse-inline", "object", "inline", "empty", "hole"} {
		ranges(t, w, "t", name, must[[]byte](t)(os.ReadFile(filepath.Join(w.dirs["t"], name))))
	}
	same(t, w.archived(t, "t", 0), listing(t, w.dirs["t"]))
}

// Archives leave out holes, and common programs restore them.
func TestHolesInArchives(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	long := strings.Repeat("long/", 60)
	w.run(t, "t", func(root string) {
		check(t, os.MkdirAll(root+"/"+long, 0o755))
		for name, at := range map[string]int64{
			"start": 0, "middle": 5 << 20, "end": 10<<20 - 5, "ümlaut\xff": 777,
			long + "f": 1 << 20, "before": 1,
		} {
			f := must[*os.File](t)(os.OpenFile(root+"/"+name, os.O_RDWR|os.O_CREATE, 0o640))
			must[int](t)(f.WriteAt([]byte("12345"), at))
			check(t, f.Truncate(10<<20), f.Close(), unix.Setxattr(root+"/"+name, "user.a", []byte("GNU.sparse.major=7"), 0))
		}
		check(t, os.WriteFile(root+"/none", []byte("12345"), 0o640), os.Link(root+"/middle", root+"/other"))
		check(t, os.WriteFile(root+"/empty", nil, 0o640), os.Truncate(root+"/empty", 3<<20))
	})
	want := listing(t, w.dirs["t"])
	same(t, w.archived(t, "t", 0), want)
	archive := filepath.Join(t.TempDir(), "t.tar")
	f := must[*os.File](t)(os.Create(archive))
	check(t, w.versions.Archive(w.ctx, org, "t", 1, "", f))
	if size := must[int64](t)(f.Seek(0, io.SeekCurrent)); size > 256<<10 {
		t.Errorf("the archive has %d bytes", size)
	}
	check(t, f.Close())
	for name, command := range map[string][]string{
		"GNU tar": {"tar", "-xp", "--xattrs", "-f", archive},
		"Python":  {"python3", "-W", "ignore", "-c", "import sys, tarfile; tarfile.open(sys.argv[1]).extractall()", archive},
	} {
		t.Run(name, func(t *testing.T) {
			dir := w.dir(t, name)
			cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
			if cmd.Dir = dir; name == "Python" {
				cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8")
			}
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			got, want := listing(t, dir), maps.Clone(want)
			if name == "Python" { // it restores no attributes, and no nanoseconds of times
				short := regexp.MustCompile(`(\.\d{9})| "user.*`)
				for _, all := range []map[string]string{got, want} {
					for path, line := range all {
						all[path] = short.ReplaceAllString(line, "")
					}
				}
			}
			same(t, got, want)
			var st unix.Stat_t
			if check(t, unix.Stat(dir+"/middle", &st)); st.Blocks*512 > 1<<20 {
				t.Errorf("a file with a hole takes %d bytes", st.Blocks*512)
			}
		})
	}
}

// A file whose holes no disk could hold can be exported.
func TestGiantHoleInArchive(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const middle = 1 << 39
	w.run(t, "t", func(root string) {
		f := must[*os.File](t)(os.Create(root + "/giant"))
		must[int](t)(f.WriteAt([]byte("12345"), middle))
		check(t, f.Truncate(2*middle), f.Close())
	})
	f := must[*os.File](t)(os.Open(must[string](t)(extracted(w, "t")) + "/giant"))
	defer func() { check(t, f.Close()) }()
	var st unix.Stat_t
	check(t, unix.Fstat(int(f.Fd()), &st))
	b := make([]byte, 5)
	if _, err := f.ReadAt(b, middle); err != nil || string(b) != "12345" || st.Size != 2*middle {
		t.Errorf("%q in a file of %d bytes, %v", b, st.Size, err)
	}
}

func TestNotFound(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if got := w.list(t, "none", "", true); len(got) != 0 {
		t.Error(got)
	}
	w.run(t, "t", func(root string) {
		check(t, os.Mkdir(root+"/d", 0o755), os.WriteFile(root+"/d/f", nil, 0o644), os.Symlink("d", root+"/l"))
	})
	for _, path := range []string{"x", "d/f", "d/f/x", "l", "l/f", "..", "/", "d/", "/d"} {
		if err := w.versions.List(w.ctx, org, "t", 0, path, false, nil); !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("list %q: %v", path, err)
		}
	}
	for _, path := range []string{"", "x", "d", "l", "l/f", "d/f/x", "../t"} {
		if _, err := w.versions.Open(w.ctx, org, "t", 0, path); !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("open %q: %v", path, err)
		}
	}
	for _, number := range []int64{-1, 2} {
		if err := w.versions.Archive(w.ctx, org, "t", number, "", io.Discard); !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("version %d: %v", number, err)
		}
		noVersion := func(err error) bool {
			missing, ok := errors.AsType[*proto.NoVersionError](err)
			return ok && missing.Number == number && errors.Is(err, proto.ErrNotFound)
		}
		if err := w.versions.List(w.ctx, org, "t", number, "", false, nil); !noVersion(err) {
			t.Errorf("list version %d: %v", number, err)
		}
		if _, err := w.versions.Open(w.ctx, org, "t", number, "d/f"); !noVersion(err) {
			t.Errorf("open a file of version %d: %v", number, err)
		}
	}
	if err := w.versions.List(w.ctx, org, "none", 1, "", false, nil); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("version of an unknown thread: %v", err)
	}
	if _, err := w.versions.Open(w.ctx, "other", "t", 0, "d/f"); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("thread of another organisation: %v", err)
	}
}

// An earlier version is listed and read as it was, without files that were staged later.
func TestFilesOfVersion(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(t, "t", "a", "one")
	w.write(t, "t", "a", "second")
	w.run(t, "t", func(root string) { check(t, os.Remove(root+"/a")) })
	w.stage(t, "t", "later", "x")
	for number, want := range map[int64]string{1: "a one", 2: "a second", 3: "", 0: "later x"} {
		got := ""
		check(t, w.versions.List(w.ctx, org, "t", number, "", true, func(f proto.File) error {
			c := must[*proto.FileContent](t)(w.versions.Open(w.ctx, org, "t", number, f.Path))
			body := must[[]byte](t)(part(w.ctx, c, 0, c.Size))
			got += f.Path + " " + string(body)
			return nil
		}))
		if got != want {
			t.Errorf("version %d: %q, want %q", number, got, want)
		}
	}
}

func (w *world) stage(tb fatal, id, path, content string) {
	tb.Helper()
	check(tb, w.versions.Stage(w.ctx, org, id, path, int64(len(content)), unlimitedHome, strings.NewReader(content)))
}

func TestStagedFiles(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.stage(t, "new", "only", "one")
	if got := w.content(t, "new", "only"); got != "one" {
		t.Errorf("in a new thread: %q", got)
	}
	w.run(t, "t", func(root string) {
		check(t, os.MkdirAll(root+"/dir/sub", 0o750), os.WriteFile(root+"/dir/sub/f", []byte("old"), 0o600),
			os.WriteFile(root+"/file", []byte("old"), 0o600),
			os.Link(root+"/file", root+"/twin"), os.Symlink("dir", root+"/link"), os.Mkdir(root+"/gone", 0o755),
			os.WriteFile(root+"/gone/x", nil, 0o644))
	})
	before := w.archived(t, "t", 1)
	for _, f := range [][2]string{
		{"dir/sub/g", "new"},
		{"file", "first"},
		{"file", "second"},
		{"link/in", "not followed"},
		{"gone", ""},
		{"a/b/c", "deep"},
		{"twin/x", "was a file"},
	} {
		w.stage(t, "t", f[0], f[1])
	}
	for path, want := range map[string]string{
		"dir/sub/f": "old", "dir/sub/g": "new", "file": "second", "link/in": "not followed", "gone": "", "a/b/c": "deep",
		"twin/x": "was a file",
	} {
		if got := w.content(t, "t", path); got != want {
			t.Errorf("%s: %q", path, got)
		}
	}
	var paths []string
	for _, f := range w.list(t, "t", "", true) {
		paths = append(paths, f.Path)
	}
	want := []string{
		"a", "a/b", "a/b/c", "dir", "dir/sub", "dir/sub/f", "dir/sub/g", "file", "gone", "link", "link/in",
		"twin", "twin/x",
	}
	if !slices.Equal(paths, want) {
		t.Errorf("%q", paths)
	}
	now := w.archived(t, "t", 0)
	if !strings.HasPrefix(now["a/b/c"], "0644 ") || !strings.HasPrefix(now["a/b"], "0755 ") ||
		!strings.HasPrefix(now["dir/sub"], "0750 ") {
		t.Error(now)
	}
	same(t, w.archived(t, "t", 1), before)
	ranges(t, w, "t", "dir/sub/g", []byte("new"))
	for _, path := range []string{
		"", "/x", "x/", "a//b", "../x", "a/../b", ".", "a/.", "a\x00b", strings.Repeat("n", 256),
		strings.Repeat("d/", 600) + "x",
	} {
		var invalid *proto.FieldError
		if err := w.versions.Stage(w.ctx, org, "t", path, 1, unlimitedHome, strings.NewReader("x")); !errors.As(
			err, &invalid) {
			t.Errorf("%.20q: %v", path, err)
		}
	}
}

func TestRejectedUploadIsRemoved(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	head := &proto.Thread{Org: org, ID: "t"}
	for i := range proto.MaxStaged {
		head.Staged = append(head.Staged, proto.StagedFile{Path: fmt.Sprint(i)})
	}
	check(t, w.heads.Create(w.ctx, head))
	var full *proto.StagedError
	if err := w.versions.Stage(w.ctx, org, "t", "more", 1, unlimitedHome, strings.NewReader("x")); !errors.As(err, &full) {
		t.Error(err)
	}
	if err := w.versions.Stage(w.ctx, org, "t", "short", 2, unlimitedHome, strings.NewReader("x")); err == nil {
		t.Error("a short upload was staged")
	}
	if got := w.backend.keys("uploads/"); len(got) != 0 {
		t.Error(got)
	}
}

func TestCompaction(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(t, "t", "a", "one")
	head := w.write(t, "t", "b", "two")
	want := listing(t, w.dirs["t"])
	same(t, w.archived(t, "t", 0), want)
	w.compact(t, "t")
	for _, l := range head.Version.Layers {
		check(t, w.backend.Delete(w.ctx, l.Key))
	}
	same(t, w.archived(t, "t", 0), want)
}

// compact replaces all layers of a thread by one.
func (w *world) compact(tb fatal, id string) {
	tb.Helper()
	head := w.head(tb, id)
	full := w.full(tb, id, head.Number())
	check(tb, w.heads.Compact(w.ctx, org, id, head.Version.Layers, full))
}

func TestLimits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.run(t, "t", func(root string) {
		for i := range 10 {
			check(t, os.WriteFile(filepath.Join(root, fmt.Sprint(i)), nil, 0o644))
		}
	})
	w.run(t, "t", func(root string) {
		for i := range 10 {
			check(t, os.WriteFile(filepath.Join(root, fmt.Sprint("x", i)), nil, 0o644))
		}
	})
	w.versions.Limits.Entries = 15 // enough for each layer
	if err := w.versions.List(w.ctx, org, "t", 0, "", false, nil); !errors.Is(err, layer.ErrLimit) {
		t.Error(err)
	}
}

// TestCorruption flips bits of every blob and expects readers to notice.
func TestCorruption(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	files := map[string]string{"small": "small", "inline": large("inline")[:3<<20], "object": large("object")}
	w.run(t, "t", func(root string) {
		for name, content := range files {
			check(t, os.WriteFile(filepath.Join(root, name), []byte(content), 0o644))
		}
	})
	w.write(t, "t", "later", "")
	want := w.archived(t, "t", 0)
	read := func() (errs int) {
		w.versions = &thread.Versions{Blobs: w.versions.Blobs, Heads: w.heads, Limits: unlimited} // with empty caches
		for name, content := range files {
			f, err := w.versions.Open(w.ctx, org, "t", 0, name)
			var got []byte
			if err == nil {
				got, err = part(w.ctx, f, 0, f.Size)
			}
			if err != nil {
				errs++
			} else if string(got) != content {
				t.Errorf("%s has wrong content", name)
			}
		}
		for _, number := range []int64{0, 1} {
			if err := w.versions.Archive(w.ctx, org, "t", number, "", io.Discard); err != nil {
				errs++
			}
		}
		return errs
	}
	for _, key := range w.backend.keys("") {
		e := must[proto.BlobEntry](t)(w.backend.Stat(w.ctx, key))
		positions := []int64{0, e.Size / 2, e.Size - 1}
		if !testing.Short() {
			positions = append(positions, 1, 20, e.Size/3, e.Size*3/4, e.Size-30)
		}
		for _, at := range positions {
			w.backend.rot(key, at)
			errs := read()
			if errs == 0 && !strings.HasPrefix(key, "threads/"+org+"/t/0000000002") { // which the head makes superfluous
				t.Errorf("byte %d of %s: corruption not noticed", at, key)
			}
		}
	}
	w.backend.rot("", 0)
	same(t, w.archived(t, "t", 0), want)
}

// TestLostBlobs removes blobs of a thread from the store. Errors must name the blob instead of
// reporting that the thread or file does not exist.
func TestLostBlobs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.run(t, "t", func(root string) {
		check(t, os.WriteFile(root+"/small", []byte("small"), 0o644),
			os.WriteFile(root+"/object", []byte(large("object")), 0o644))
	})
	w.write(t, "t", "later", "")
	w.stage(t, "t", "staged", "staged")
	w.list(t, "t", "", false) // caches the tree
	lost := func(what, prefix string, err error) {
		t.Helper()
		if err == nil || errors.Is(err, proto.ErrNotFound) || !strings.Contains(err.Error(), prefix) {
			t.Errorf("%s without %s: %v", what, prefix, err)
		}
	}
	for prefix, name := range map[string]string{"uploads/": "staged", "objects/": "object", "layers/": "small"} {
		for _, key := range w.backend.keys(prefix) {
			check(t, w.backend.Delete(w.ctx, key))
		}
		f := must[*proto.FileContent](t)(w.versions.Open(w.ctx, org, "t", 0, name))
		_, err := part(w.ctx, f, 0, f.Size)
		lost("read "+name, prefix, err)
		lost("archive without "+name, "/"+org+"/", w.versions.Archive(w.ctx, org, "t", 0, "", io.Discard))
	}
	w.versions = &thread.Versions{Blobs: w.versions.Blobs, Heads: w.heads, Limits: unlimited}
	lost("list", "layers/", w.versions.List(w.ctx, org, "t", 0, "", false, nil))
	_, err := w.versions.Open(w.ctx, org, "t", 0, "small")
	lost("open", "layers/", err)
	lost("archive", "layers/", w.versions.Archive(w.ctx, org, "t", 0, "", io.Discard))
	lost("upload that may exceed the limit", "layers/", w.versions.CheckSpace(w.ctx, org, "t", "more", 1, proto.Space{}))
	for _, key := range w.backend.keys("threads/") {
		check(t, w.backend.Delete(w.ctx, key))
	}
	lost("archive of an old version", "threads/", w.versions.Archive(w.ctx, org, "t", 1, "", io.Discard))
	_, err = w.versions.Fork(w.ctx, org, "t", 1, "fork")
	lost("fork of an old version", "threads/", err)
}
