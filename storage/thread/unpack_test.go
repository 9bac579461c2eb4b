package thread_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
)

// tarOf returns a tar of headers. The content of a file is as long as its header says.
func tarOf(tb testing.TB, headers ...tar.Header) []byte {
	tb.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		if h.ModTime.IsZero() {
			h.ModTime = time.Unix(1_000_000_000, 0)
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		check(tb, w.WriteHeader(&h))
		_, err := io.WriteString(w, strings.Repeat("x", int(h.Size)))
		check(tb, err)
	}
	check(tb, w.Close())
	return b.Bytes()
}

func file(name string, size int64) tar.Header {
	return tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size}
}

func symlink(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target}
}

func hardlink(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target}
}

func (w *world) unpack(id, path string, body io.Reader, limit proto.Space) error {
	_, err := w.versions.Unpack(w.ctx, org, id, path, &proto.TarUpload{
		Body: body, Home: "/home/baponi", Most: limit, Proceed: func(int64) error { return nil },
	})
	return err
}

// TestUnpackWhatTarWrites unpacks what GNU tar and Archive write, and compares it with what tar
// unpacks.
func TestUnpackWhatTarWrites(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	from := t.TempDir()
	check(t, os.Chmod(from, 0o750), os.MkdirAll(filepath.Join(from, "d/empty"), 0o700),
		os.WriteFile(filepath.Join(from, "d/small"), []byte("small"), 0o600),
		os.WriteFile(filepath.Join(from, "d/large"), []byte(large("x")), 0o755),
		os.WriteFile(filepath.Join(from, "none"), nil, 0o400),
		os.Link(filepath.Join(from, "d/small"), filepath.Join(from, "again")),
		os.Symlink("d/large", filepath.Join(from, "link")),
		os.Symlink("../none", filepath.Join(from, "d/up")),
		os.WriteFile(filepath.Join(from, strings.Repeat("é", 120)), []byte("long"), 0o644),
		os.Symlink("/home/baponi/d", filepath.Join(from, "absolute")))
	sparse := must[*os.File](t)(os.Create(filepath.Join(from, "sparse")))
	_, err := sparse.WriteAt([]byte("end"), 6<<20)
	check(t, err, sparse.Close())
	want := listing(t, from)
	delete(want, ".")
	for name, args := range map[string][]string{
		"pax": {"--format=pax"}, "sparse": {"--format=pax", "-S"},
		"gnu": {"--format=gnu"}, "old sparse": {"--format=gnu", "-S"},
	} {
		out, err := exec.CommandContext(
			w.ctx, "tar", slices.Concat([]string{"-C", from}, args, []string{"-cf", "-", "."})...).Output()
		check(t, err)
		id := strings.ReplaceAll(name, " ", "-")
		check(t, w.unpack(id, "below/it", bytes.NewReader(out), unlimitedHome))
		got := make(map[string]string)
		for path, line := range w.archived(t, id, 0) {
			if rest, ok := strings.CutPrefix(path, "below/it/"); ok {
				got[rest] = strings.Replace(line, "= below/it/", "= ", 1)
			}
		}
		if name == "pax" || name == "sparse" {
			same(t, got, want)
		} else if len(got) != len(want) { // these formats have times in seconds
			t.Errorf("%s: %d files, want %d", name, len(got), len(want))
		}
		w.catchUp(t, id, 0)
	}
	// What Archive writes.
	var b bytes.Buffer
	check(t, w.versions.Archive(w.ctx, org, "pax", 0, "below/it", &b))
	check(t, w.unpack("copy", "", &b, unlimitedHome))
	got := w.archived(t, "copy", 1)
	if got["."] == "" || !strings.HasPrefix(got["."], "0750") {
		t.Errorf("the home is %q", got["."])
	}
	delete(got, ".")
	same(t, got, want)
	w.catchUp(t, "copy", 0)
}

func TestUnpackReplaces(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.run(t, "t", func(root string) {
		check(t, os.MkdirAll(filepath.Join(root, "d/old"), 0o755), os.WriteFile(filepath.Join(root, "f"), []byte("f"), 0o644),
			os.Symlink("/etc", filepath.Join(root, "link")), os.WriteFile(filepath.Join(root, "d/keep"), []byte("keep"), 0o644))
	})
	w.stage(t, "t", "d/staged", "staged")
	check(t, w.unpack("t", "",
		bytes.NewReader(tarOf(t, file("link/passwd", 3), file("d/old", 4), file("f", 5), file("twice", 1), file("twice", 2))),
		unlimitedHome))
	w.catchUp(t, "t", 1)
	want := []string{"d/", "d/keep", "d/old", "d/staged", "f", "link/", "link/passwd", "twice"}
	if got := w.names(t, "t"); !slices.Equal(got, want) || w.content(t, "t", "f") != "xxxxx" ||
		w.content(t, "t", "twice") != "xx" {
		t.Errorf("%q", got)
	}
	if head := w.head(t, "t"); head.Number() != 2 || head.Version.Trace != "" || len(head.Staged) != 1 {
		t.Errorf("%+v", head)
	}
	if old := w.archived(t, "t", 1); old["link"] == "" || old["d/old"] == "" {
		t.Errorf("version 1 is %v", old)
	}
}

// TestHostileTars unpacks tars that must be refused whole.
func TestHostileTars(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(t, "t", "f", "f")
	limit := proto.Space{Bytes: 1 << 20, Files: 20}
	pax := func(key, value string) tar.Header {
		return tar.Header{Typeflag: tar.TypeReg, Name: "bad", PAXRecords: map[string]string{key: value}}
	}
	sparseBomb := func() []byte {
		dir := t.TempDir()
		f := must[*os.File](t)(os.Create(filepath.Join(dir, "bad")))
		check(t, f.Truncate(1<<40), f.Close())
		return must[[]byte](t)(exec.CommandContext(w.ctx, "tar", "-C", dir, "-S", "-cf", "-", "bad").Output())
	}
	var many, links []tar.Header
	for i := range 30 {
		many = append(many, file(fmt.Sprint("bad", i), 0))
	}
	links = append(links, file("a", 100<<10))
	for i := range 15 {
		links = append(links, hardlink(fmt.Sprint("bad", i), "a"))
	}
	good := tarOf(t, file("good", 10))
	bad := func(h ...tar.Header) []byte { return tarOf(t, append([]tar.Header{file("good", 1)}, h...)...) }
	deep := strings.Repeat("d/", layer.MaxDepth) + "bad"
	for name, c := range map[string]struct {
		tar  []byte
		want string
	}{
		"absolute":  {bad(file("/bad", 0)), "absolute path"},
		"up":        {bad(file("../bad", 0)), `".."`},
		"up inside": {bad(file("a/../../bad", 0)), `".."`},
		"only dots": {bad(file(".", 0)), "names no file"},
		"long name": {bad(file(strings.Repeat("b", 256), 0)), "cannot have"},
		"long path": {bad(file(strings.Repeat(strings.Repeat("b", 200)+"/", 21)+"bad", 0)), "cannot have"},
		"deep":      {bad(file(deep, 0)), "cannot have"},
		"character device": {
			bad(tar.Header{Typeflag: tar.TypeChar, Name: "bad", Devmajor: 1, Devminor: 3}),
			"neither a file",
		},
		"block device":            {bad(tar.Header{Typeflag: tar.TypeBlock, Name: "bad"}), "neither a file"},
		"FIFO":                    {bad(tar.Header{Typeflag: tar.TypeFifo, Name: "bad"}), "neither a file"},
		"set-uid":                 {bad(tar.Header{Typeflag: tar.TypeReg, Name: "bad", Mode: 0o4755}), "set-uid"},
		"set-gid directory":       {bad(tar.Header{Typeflag: tar.TypeDir, Name: "bad/", Mode: 0o2755}), "set-gid"},
		"absolute symlink":        {bad(symlink("bad", "/etc/passwd")), "outside the home"},
		"symlink to a neighbour":  {bad(symlink("bad", "/home/baponi2/x")), "outside the home"},
		"symlink above the home":  {bad(symlink("a/bad", "../../../x")), "outside the home"},
		"symlink through another": {bad(symlink("a/l", ".."), symlink("bad", "a/l/../x")), "outside the home"},
		"absolute symlink up":     {bad(symlink("bad", "/home/baponi/../x")), "outside the home"},
		"empty symlink": {
			bad(pax("linkpath", ""), tar.Header{Typeflag: tar.TypeSymlink, Name: "bad", Linkname: strings.Repeat("l", 1024)}),
			"1 to 1023 bytes",
		},
		"below a symlink":       {bad(symlink("l", "good"), file("l/bad", 0)), "no directory in the tar"},
		"below a file":          {bad(file("good/bad", 0)), "no directory in the tar"},
		"file over a directory": {bad(file("d/x", 0), file("d", 0)), "directory of the tar"},
		"directory over a file": {
			bad(tar.Header{Typeflag: tar.TypeDir, Name: "good/", Mode: 0o755}),
			"place of a file",
		},
		"hard link outside":         {bad(hardlink("bad", "/etc/passwd")), "absolute path"},
		"hard link up":              {bad(hardlink("bad", "../good")), `".."`},
		"hard link into the thread": {bad(hardlink("bad", "f")), "no earlier file"},
		"hard link to a directory": {
			bad(tar.Header{Typeflag: tar.TypeDir, Name: "d/", Mode: 0o755}, hardlink("bad", "d")),
			"no earlier file",
		},
		"hard link to what is later": {bad(hardlink("bad", "a"), file("a", 0)), "no earlier file"},
		"capability":                 {bad(pax("SCHILY.xattr.security.capability", "\x01")), "user.*"},
		"large attributes":           {bad(pax("SCHILY.xattr.user.a", strings.Repeat("a", 5000))), "extended attributes"},
		"attribute without a name":   {bad(pax("SCHILY.xattr.user.", "a")), "invalid name"},
		"time of no year": {
			bad(tar.Header{Typeflag: tar.TypeReg, Name: "bad", Format: tar.FormatPAX, ModTime: time.Unix(1<<50, 0)}),
			"in no year",
		},
		"sparse bomb":                 {sparseBomb(), "has room for"},
		"large file":                  {bad(file("bad", 1<<20)), "has room for"},
		"many files":                  {bad(many...), "has room for"},
		"many directories":            {bad(file(strings.Repeat("d/", 30)+"bad", 0)), "has room for"},
		"hard links to one file":      {bad(links...), "has room for"},
		"with what the home has":      {bad(many[:19]...), "has room for"},
		"cut off in content":          {good[:600], "without its end"},
		"cut off in a header":         {good[:200], "not a complete tar"},
		"cut off between two entries": {good[:1024], "without its end"},
		"nothing":                     {nil, "without its end"},
		"no tar":                      {bytes.Repeat([]byte("no tar "), 1000), "not a complete tar"},
		"endless padding":             {append(slices.Clone(good), make([]byte, 4<<20)...), "after the end of its tar"},
	} {
		err := w.unpack("t", "", bytes.NewReader(c.tar), limit)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
			continue
		}
		_, isField := errors.AsType[*proto.FieldError](err)
		_, isPath := errors.AsType[*proto.PathError](err)
		_, isSpace := errors.AsType[*proto.SpaceError](err)
		if !isField && !isPath && !isSpace {
			t.Errorf("%s: %v is not for the client", name, err)
		}
	}
	if head, names := w.head(t, "t"), w.names(t, "t"); head.Number() != 1 || !slices.Equal(names, []string{"f"}) {
		t.Errorf("version %d: %q", head.Number(), names)
	}
	if objects := w.backend.keys("objects/"); len(objects) > 0 {
		t.Errorf("objects of refused tars: %q", objects)
	}
}

func TestUnpackErrors(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	body := tarOf(t, file("a", 1), file("b", 1))
	left := errors.New("the client left")
	if err := w.unpack("t", "", io.MultiReader(bytes.NewReader(body[:600]), failing{left}), unlimitedHome); !errors.Is(
		err, left) {
		t.Errorf("a body that breaks off: %v", err)
	}
	stop, calls := errors.New("no memory"), 0
	_, err := w.versions.Unpack(w.ctx, org, "t", "",
		&proto.TarUpload{Body: bytes.NewReader(body), Most: unlimitedHome, Proceed: func(memory int64) error {
			if calls++; calls == 2 {
				return stop
			}
			return nil
		}})
	if !errors.Is(err, stop) {
		t.Errorf("without memory: %v", err)
	}
	if _, err := w.heads.Get(w.ctx, org, "t"); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("the thread was created: %v", err)
	}
	// An execution begins while the body arrives.
	w.write(t, "t", "f", "f")
	var holder proto.TraceID
	late := readerFunc(func([]byte) (int, error) {
		if holder == "" {
			holder = proto.NewTraceID()
			_, _, err := w.heads.Lock(w.ctx, org, "t", holder)
			check(t, err)
		}
		return 0, io.EOF
	})
	if err := w.unpack("t", "", io.MultiReader(bytes.NewReader(body), late), unlimitedHome); !isBusy(err) {
		t.Errorf("during an execution: %v", err)
	}
	if got := w.names(t, "t"); !slices.Equal(got, []string{"f"}) {
		t.Errorf("%q", got)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
