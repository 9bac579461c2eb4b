package image_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/storage/image"
)

// about is the first entry of an image.
var about = tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "pax_global_header", PAXRecords: map[string]string{
	"BULLPEN.image": `{"env":{}}`,
}}

func compress(t testing.TB, b []byte) []byte {
	t.Helper()
	z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = z.Close() }()
	return z.EncodeAll(b, nil)
}

// Everything but the normal form is rejected and writes nothing outside the directory.
func TestOnlyNormalFormIsAccepted(t *testing.T) {
	head := []tar.Header{about, dir("bin/"), bash}
	sound := compress(t, archive(t, append(head, file("f", "x"))...))
	if _, _, err := image.Inspect(bytes.NewReader(sound), smallLimits()); err != nil {
		t.Fatal(err)
	}
	images := map[string][]byte{
		"nothing":            {},
		"no zstd":            []byte("hello"),
		"no tar":             compress(t, []byte("hello")),
		"half of it":         sound[:len(sound)/2],
		"a second frame":     append(slices.Clone(sound), compress(t, []byte("x"))...),
		"garbage at its end": append(slices.Clone(sound), "garbage"...),
		"no record":          compress(t, archive(t, dir("bin/"), bash)),
		"a record of its own": compress(
			t, archive(t, with(about, func(h *tar.Header) {
				h.PAXRecords = map[string]string{"BULLPEN.image": `{"env":{"LD_PRELOAD":"/x"}}`}
			}), dir("bin/"), bash)),
		"more records": compress(
			t, archive(t, with(about, func(h *tar.Header) {
				h.PAXRecords = map[string]string{"BULLPEN.image": `{"env":{}}`, "path": "x"}
			}), dir("bin/"), bash)),
	}
	for name, entries := range map[string][]tar.Header{
		"record twice":          {about},
		"..":                    {file("../evil", "x")},
		".. inside":             {dir("d/"), file("d/../../evil", "x")},
		"absolute":              {file("/evil", "x")},
		"dot":                   {file("./f", "x")},
		"without its directory": {file("d/f", "x")},
		"through a link":        {symlink("l", ".."), file("l/evil", "x")},
		"twice":                 {file("f", "x"), file("f", "x")},
		"link, then file":       {symlink("f", "/tmp/evil"), file("f", "x")},
		"out of order":          {file("g", "x"), file("f", "x")},
		"below a file":          {file("f", "x"), file("f/g", "x")},
		"setuid":                {with(file("f", "x"), func(h *tar.Header) { h.Mode = 0o4755 })},
		"writable":              {with(file("f", "x"), func(h *tar.Header) { h.Mode = 0o666 })},
		"unreadable directory":  {with(dir("d/"), func(h *tar.Header) { h.Mode = 0o700 })},
		"another owner":         {with(file("f", "x"), func(h *tar.Header) { h.Uid = 1 })},
		"another owner by name": {with(file("f", "x"), func(h *tar.Header) { h.Uname = "root" })},
		"capability": {
			with(file("f", "x"), func(h *tar.Header) { h.PAXRecords["SCHILY.xattr.security.capability"] = "\x01" }),
		},
		"part of a second": {
			with(file("f", "x"), func(h *tar.Header) { h.ModTime, h.Format = day.Add(time.Nanosecond), tar.FormatPAX }),
		},
		"device":                    {device("null", tar.TypeChar)},
		"FIFO":                      {device("fifo", tar.TypeFifo)},
		"hard link outside":         {hardLink("l", "../../etc/passwd")},
		"hard link to the host":     {hardLink("l", "/etc/passwd")},
		"hard link through a link":  {symlink("a", "/etc"), hardLink("l", "a/passwd")},
		"hard link to a link":       {symlink("a", "/etc/passwd"), hardLink("l", "a")},
		"hard link to what follows": {hardLink("l", "m"), file("m", "x")},
		"hard link to a directory":  {hardLink("l", "bin")},
		"link to nothing":           {symlink("l", "")},
		"too deep":                  deepDirs(129),
	} {
		images[name] = compress(t, archive(t, append(slices.Clone(head), entries...)...))
	}
	for name, stored := range images {
		t.Run(name, func(t *testing.T) {
			if _, _, err := image.Inspect(bytes.NewReader(stored), smallLimits()); !errors.Is(err, image.ErrForm) {
				t.Errorf("inspected: %v", err)
			}
			around := t.TempDir()
			root := filepath.Join(around, "root")
			if err := os.Mkdir(root, 0o700); err != nil {
				t.Fatal(err)
			}
			if _, _, err := image.Unpack(bytes.NewReader(stored), root, smallLimits()); !errors.Is(err, image.ErrForm) {
				t.Errorf("unpacked: %v", err)
			}
			if outside, err := os.ReadDir(around); err != nil || len(outside) != 1 {
				t.Errorf("beside the root: %v, %v", outside, err)
			}
		})
	}
}

func deepDirs(n int) (dirs []tar.Header) {
	for i := range n {
		dirs = append(dirs, dir(deep(i+1)))
	}
	return dirs
}

func TestFormLimits(t *testing.T) {
	tree := newTree(t, smallLimits())
	if err := tree.AddTar(bytes.NewReader(archive(t, dir("bin"), bash, file("f", "xyz")))); err != nil {
		t.Fatal(err)
	}
	stored, img := pack(t, tree)
	fits := image.Limits{Entries: 3, Unpacked: 5, Stored: img.Size}
	if _, _, err := image.Inspect(bytes.NewReader(stored), fits); err != nil {
		t.Error(err)
	}
	for what, change := range map[string]func(*image.Limits){
		"entries": func(l *image.Limits) { l.Entries-- }, "bytes": func(l *image.Limits) { l.Unpacked-- },
		"stored": func(l *image.Limits) { l.Stored-- },
	} {
		limits := fits
		change(&limits)
		if _, _, err := image.Inspect(bytes.NewReader(stored), limits); !errors.Is(err, image.ErrTooLarge) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// A compression bomb.
	bomb := compress(t, archive(t, about, file("zeros", string(make([]byte, 1<<21)))))
	if _, _, err := image.Inspect(bytes.NewReader(bomb), smallLimits()); !errors.Is(err, image.ErrTooLarge) {
		t.Errorf("a bomb of %d bytes: %v", len(bomb), err)
	}
}

// Errors of the reader are not mistaken for a malformed image.
func TestReaderErrors(t *testing.T) {
	tree := newTree(t, smallLimits())
	if err := tree.AddTar(bytes.NewReader(archive(t, bash))); err != nil {
		t.Fatal(err)
	}
	stored, _ := pack(t, tree)
	broken := errors.New("the line broke")
	for n := range len(stored) {
		r := &breaking{bytes.NewReader(stored[:n]), broken}
		if _, _, err := image.Inspect(r, smallLimits()); !errors.Is(err, broken) || errors.Is(err, image.ErrForm) {
			t.Fatalf("after %d bytes: %v", n, err)
		}
	}
}

type breaking struct {
	from *bytes.Reader
	err  error
}

func (b *breaking) Read(p []byte) (int, error) {
	if b.from.Len() == 0 {
		return 0, b.err
	}
	return b.from.Read(p)
}

func FuzzLayer(f *testing.F) {
	f.Add(archive(f, bash, symlink("l", "../x"), file("l/f", "x"), hardLink("h", "l/f"), file(".wh.l", "")))
	f.Add(archive(f, device("d", tar.TypeChar), file("d/.wh..wh..opq", "")))
	f.Fuzz(func(t *testing.T, b []byte) {
		tree := newTree(t, smallLimits())
		for range 2 {
			if err := tree.AddLayer(bytes.NewReader(b)); err != nil {
				return
			}
		}
		var out bytes.Buffer
		if _, err := tree.Pack(&out); err != nil {
			return
		}
		if _, _, err := image.Inspect(&out, smallLimits()); err != nil {
			t.Fatalf("a packed image is rejected: %v", err)
		}
	})
}

func FuzzForm(f *testing.F) {
	f.Add(archive(f, about, dir("bin/"), bash, hardLink("h", "bin/bash"), symlink("l", "/x")))
	f.Fuzz(func(t *testing.T, b []byte) {
		stored := compress(t, b)
		img, _, err := image.Inspect(bytes.NewReader(stored), smallLimits())
		if err != nil {
			return
		}
		root := t.TempDir()
		got, _, err := image.Unpack(bytes.NewReader(stored), root, smallLimits())
		if err != nil || got.Digest != img.Digest {
			t.Fatalf("inspected and not unpacked: %v", err)
		}
	})
}
