package thread_test

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/thread"
)

const mib = 1 << 20

// live is the memory in use, in bytes.
func live() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// weigher is a client who looks now and then at how much memory the answer takes.
type weigher struct{ written, next, most int64 }

func (w *weigher) Write(p []byte) (int, error) {
	if w.written += int64(len(p)); w.written >= w.next {
		w.next = w.written + 50*mib
		w.most = max(w.most, live())
	}
	return len(p), nil
}

// TestLongPathsAreNotKept has names whose paths take 100 MB.
func TestLongPathsAreNotKept(t *testing.T) {
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
		for i := range 500 {
			name := fmt.Sprint("a", i)
			check(t, unix.Close(must[int](t)(unix.Openat(at, name, unix.O_CREAT|unix.O_WRONLY, 0o644))), unix.Linkat(at, name, at, fmt.Sprint("b", i), 0))
		}
		check(t, unix.Close(at))
	})
	w.list(t, "t", "", false) // the tree is there
	before := live()
	var paths weigher
	n := 0
	check(t, w.versions.List(w.ctx, org, "t", "", true, func(f thread.File) error {
		n++
		_, err := io.WriteString(&paths, f.Path)
		return err
	}))
	if n != 1450 || paths.most > before+20*mib {
		t.Errorf("a list of %d takes %d MiB", n, (paths.most-before)/mib)
	}
	var archive weigher
	check(t, w.versions.Archive(w.ctx, org, "t", 0, &archive))
	if archive.written < 100*mib || archive.most > before+40*mib {
		t.Errorf("an archive of %d MiB takes %d", archive.written/mib, (archive.most-before)/mib)
	}
	stop := errors.New("gone")
	if err := w.versions.List(w.ctx, org, "t", "", true, func(thread.File) error { return stop }); !errors.Is(err, stop) {
		t.Error(err)
	}
}
