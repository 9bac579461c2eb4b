package thread_test

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
)

const mib = 1 << 20

// live returns the heap memory in use in bytes.
func live() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// weigher is a client that regularly measures the heap memory.
type weigher struct{ written, next, most int64 }

func (w *weigher) Write(p []byte) (int, error) {
	if w.written += int64(len(p)); w.written >= w.next {
		w.next = w.written + 10*mib
		w.most = max(w.most, live())
	}
	return len(p), nil
}

// TestLongPaths reads a home whose paths have 50 MB, which must not all be held in memory.
func TestLongPaths(t *testing.T) {
	w := newWorld(t)
	w.run(t, "t", func(root string) {
		at := must[int](t)(unix.Open(root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0))
		for range 450 {
			name := strings.Repeat("d", 255)
			check(t, unix.Mkdirat(at, name, 0o755))
			next := must[int](t)(unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0))
			check(t, unix.Close(at))
			at = next
		}
		for i := range 100 {
			name := fmt.Sprint("a", i)
			check(t, unix.Close(must[int](t)(unix.Openat(at, name, unix.O_CREAT|unix.O_WRONLY, 0o644))),
				unix.Linkat(at, name, at, fmt.Sprint("b", i), 0))
		}
		check(t, unix.Close(at))
	})
	w.list(t, "t", "", false) // caches the tree
	before := live()
	var paths weigher
	n := 0
	check(t, w.versions.List(w.ctx, org, "t", 0, "", true, func(f proto.File) error {
		n++
		_, err := io.WriteString(&paths, f.Path)
		return err
	}))
	if n != 650 || paths.most > before+10*mib {
		t.Errorf("a list of %d names takes %d MiB", n, (paths.most-before)/mib)
	}
	var archive weigher
	check(t, w.versions.Archive(w.ctx, org, "t", 0, "", &archive))
	if archive.written < 50*mib || archive.most > before+20*mib {
		t.Errorf("an archive of %d MiB takes %d MiB", archive.written/mib, (archive.most-before)/mib)
	}
	stop := errors.New("gone")
	err := w.versions.List(w.ctx, org, "t", 0, "", true, func(proto.File) error { return stop })
	if !errors.Is(err, stop) {
		t.Error(err)
	}
}

// TestUnpackedTarIsNotInMemory unpacks a tar of 240 MiB.
func TestUnpackedTarIsNotInMemory(t *testing.T) {
	w := newWorld(t)
	const files, size = 60, 4 * mib
	r, in := io.Pipe()
	go func() {
		out := tar.NewWriter(in)
		for i := range files {
			err := out.WriteHeader(&tar.Header{Name: fmt.Sprint("f", i), Mode: 0o644, Size: size})
			if err == nil {
				_, err = io.CopyN(out, zero{}, size)
			}
			if err != nil {
				in.CloseWithError(err)
				return
			}
		}
		in.CloseWithError(out.Close())
	}()
	var read, stored weigher
	w.backend.watch(func(string, string) { stored.most = max(stored.most, live()) }, nil)
	before := live()
	check(t, w.unpack("t", "", io.TeeReader(r, &read), unlimitedHome))
	if head := w.head(t, "t"); head.Version.Bytes != files*size || head.Version.Files != files {
		t.Errorf("%+v", head.Version)
	}
	if most := max(read.most, stored.most); read.written < files*size || most > before+40*mib {
		t.Errorf("a tar of %d MiB takes %d MiB", read.written/mib, (most-before)/mib)
	}
}

// TestUploadsAreLimited stages files up to the limits of the home.
func TestUploadsAreLimited(t *testing.T) {
	w := newWorld(t)
	limit := proto.Space{Bytes: 10 * mib, Files: 100}
	zeros := func(n int64) io.Reader { return io.LimitReader(zero{}, n) }
	stage := func(path string, size int64) error {
		early := w.versions.CheckSpace(w.ctx, org, "t", path, size, limit)
		late := w.versions.Stage(w.ctx, org, "t", path, size, limit, zeros(size))
		if (early == nil) != (late == nil) {
			t.Errorf("%s of %d: %v, and then %v", path, size, early, late)
		}
		return late
	}
	rejected := func(err error, words string) {
		t.Helper()
		var full *proto.SpaceError
		if !errors.As(err, &full) || !strings.Contains(err.Error(), words) {
			t.Errorf("%v", err)
		}
	}
	check(t, stage("a", 6*mib))
	rejected(stage("b", 5*mib),
		"take 6291456 bytes and 1, and this change 5242880 bytes and 1 more; the sandbox of this API key has room for "+
			"10485760 bytes and 100")
	check(t, stage("a", 10*mib))
	rejected(stage("b", 1), "")
	check(t, stage("a", 0), stage("b", 5*mib))
	rejected(stage(strings.Repeat("d/", 100)+"f", 0), "and 101 more")
	if n := len(w.backend.keys("uploads/")); n != 4 {
		t.Errorf("%d uploads are stored", n)
	}

	w.run(t, "t", func(root string) {
		check(t, os.WriteFile(root+"/a", make([]byte, 6*mib), 0o644), os.WriteFile(root+"/twin", make([]byte, 2*mib), 0o644),
			os.Link(root+"/twin", root+"/twin2"))
	})
	rejected(stage("c", 5*mib), "has 10485760 bytes in 3 files")
	rejected(stage("twin", 2*mib), "") // its other name remains, so that no space becomes free
	check(t, stage("a", 3*mib))        // replaces 6 MiB
	rejected(stage("c", 4*mib), "has 4194304 bytes in")

	// Another upload is staged concurrently.
	if err := w.heads.Stage(w.ctx, org, "t", proto.StagedFile{Path: "x", Blob: proto.Blob{Key: "k", Size: 1}},
		anything); err != nil {
		t.Fatal(err)
	}
	before := len(w.backend.keys("uploads/"))
	w.backend.watch(nil, once("put", "uploads/", func() {
		check(t, w.heads.Stage(w.ctx, org, "u",
			proto.StagedFile{Path: "x", Blob: proto.Blob{Key: "k", Size: 6 * mib}}, anything))
	}))
	rejected(w.versions.Stage(w.ctx, org, "u", "y", 5*mib, limit, zeros(5*mib)), "take 6291456 bytes")
	if n := len(w.backend.keys("uploads/")); n != before {
		t.Errorf("%d uploads are stored, want %d", n, before)
	}
}

// zero is an infinite reader of zeros.
type zero struct{}

func (zero) Read(p []byte) (int, error) { clear(p); return len(p), nil }
