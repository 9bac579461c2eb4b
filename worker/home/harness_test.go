package home_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/storage/thread/layer"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	tenant = 54_321 // uid and gid of the programs
	mib    = 1 << 20
)

var roomy = home.Limits{Bytes: 1 << 40, Entries: 1 << 21}

// fatal is what tests and property tests have in common.
type fatal interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

func must[T any](tb fatal) func(T, error) T {
	return func(v T, err error) T {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
		return v
	}
}

func check(tb fatal, errs ...error) {
	tb.Helper()
	if err := errors.Join(errs...); err != nil {
		tb.Fatal(err)
	}
}

// objects are a store in memory.
type objects map[home.Digest][]byte

func (o objects) store(_ context.Context, digest home.Digest, size int64, content io.ReaderAt) error {
	b, err := io.ReadAll(io.NewSectionReader(content, 0, size))
	if err != nil {
		return err
	}
	if sha256.Sum256(b) != digest {
		return errors.New("the digest is not the content's")
	}
	o[digest] = b
	return nil
}

func (o objects) fetch(_ context.Context, digest home.Digest, size int64) (io.ReadCloser, error) {
	b, ok := o[digest]
	if !ok || int64(len(b)) != size {
		return nil, fmt.Errorf("no such object of %d bytes", size)
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}

// parts are a layer, taken apart.
type parts struct{ pack, index []byte }

func split(b *bytes.Buffer, stats home.Stats) parts {
	return parts{b.Bytes()[:stats.Layout.Pack], b.Bytes()[stats.Layout.Pack:]}
}

func apply(dir string, l parts, stored objects) error {
	return home.Apply(context.Background(), dir, bytes.NewReader(l.index), bytes.NewReader(l.pack), roomy, stored.fetch)
}

func owner(tb testing.TB) *home.Owner {
	tb.Helper()
	o := must[*home.Owner](tb)(home.NewOwner(tenant, tenant))
	tb.Cleanup(func() { check(tb, o.Close()) })
	return o
}

// ext4 makes volumes as jails have them.
func ext4(tb testing.TB) *disk.Pool {
	tb.Helper()
	pool := must[*disk.Pool](tb)(disk.Open(disk.Config{Dir: tb.TempDir(), Log: slog.New(slog.DiscardHandler)}))
	tb.Cleanup(func() { check(tb, pool.Close()) })
	return pool
}

// tmpfs is a volume in memory.
func tmpfs(tb fatal) (*os.File, string) {
	tb.Helper()
	fs := must[int](tb)(unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC))
	defer func() { _ = unix.Close(fs) }()
	check(tb, unix.FsconfigCreate(fs))
	f := os.NewFile(uintptr(must[int](tb)(unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV))), "tmpfs")
	return f, pathOf(f)
}

func pathOf(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// shell runs a script as the tenant, in a directory.
func shell(tb testing.TB, dir *os.File, script string) {
	tb.Helper()
	cmd := exec.CommandContext(tb.Context(), "bash", "-euc", "cd /proc/self/fd/3/\n"+script)
	cmd.ExtraFiles = []*os.File{dir}
	cmd.Env = []string{"PATH=/usr/bin:/bin", "LC_ALL=C"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: tenant, Gid: tenant}}
	if out, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("%v: %s\n%s", err, out, script)
	}
}

// thread is a chain of layers.
type thread struct {
	tb      testing.TB
	owner   *home.Owner
	volumes *disk.Pool
	objects objects
	layers  []parts
	lower   string
}

func newThread(tb testing.TB) *thread {
	tb.Helper()
	return &thread{tb: tb, owner: owner(tb), volumes: ext4(tb), objects: objects{}, lower: newDir(tb)}
}

func newDir(tb testing.TB) string {
	tb.Helper()
	dir := filepath.Join(tb.TempDir(), "home")
	check(tb, os.Mkdir(dir, 0o755))
	return dir
}

func (th *thread) open() (*home.Overlay, *os.File) {
	th.tb.Helper()
	v := must[*disk.Volume](th.tb)(th.volumes.Take(th.tb.Context(), disk.Size{Bytes: 1 << 30, Inodes: 30_000}, tenant, tenant))
	th.tb.Cleanup(func() { check(th.tb, v.Close()) })
	o := &home.Overlay{Lower: th.lower, Volume: v.Path(), Owner: th.owner}
	f := must[*os.File](th.tb)(o.Mount())
	th.tb.Cleanup(func() { _ = f.Close() })
	return o, f
}

// run is one execution: it returns the directory of the version it made, and
// what is known of the layer. The version is made twice: of the last one, and of
// all layers.
func (th *thread) run(script string) (string, home.Stats) {
	th.tb.Helper()
	o, mount := th.open()
	return th.runIn(o, mount, script)
}

// runIn is run for a home that is mounted.
func (th *thread) runIn(o *home.Overlay, mount *os.File, script string) (string, home.Stats) {
	th.tb.Helper()
	shell(th.tb, mount, script)
	want, seen, before := digest(th.tb, pathOf(mount)), listing(th.tb, pathOf(mount)), usage(th.tb, th.lower)
	check(th.tb, mount.Close())
	var b, again bytes.Buffer
	stats := must[home.Stats](th.tb)(o.Diff(th.tb.Context(), &b, roomy, th.objects.store))
	must[home.Stats](th.tb)(o.Diff(th.tb.Context(), &again, roomy, th.objects.store))
	if !bytes.Equal(b.Bytes(), again.Bytes()) {
		th.tb.Error("the same change has two encodings")
	}
	if named := objectsIn(th.tb, split(&b, stats)); !slices.Equal(named, stats.Objects) {
		th.tb.Errorf("the layer has the objects %+v, and not %+v", named, stats.Objects)
	}
	th.layers = append(th.layers, split(&b, stats))
	next := newDir(th.tb)
	for _, l := range th.layers {
		check(th.tb, apply(next, l, th.objects))
	}
	check(th.tb, apply(th.lower, split(&b, stats), th.objects))
	for _, dir := range []string{next, th.lower} {
		if got := listing(th.tb, dir); got != seen {
			th.tb.Errorf("the version is\n%s, the program left\n%s", got, seen)
		} else if digest(th.tb, dir) != want {
			th.tb.Errorf("the version is not what the program left:\n%s", got)
		}
	}
	after := usage(th.tb, th.lower)
	if sum := (home.Usage{
		Bytes: before.Bytes + stats.Grown.Bytes, Files: before.Files + stats.Grown.Files, Attributes: before.Attributes + stats.Grown.Attributes,
	}); sum != after {
		th.tb.Errorf("the home grew from %+v to %+v, and not by %+v", before, after, stats.Grown)
	}
	return th.lower, stats
}

// objectsIn reads the index alone.
func objectsIn(tb testing.TB, l parts) []home.Object {
	tb.Helper()
	x := must[*layer.Index](tb)(layer.NewIndex(bytes.NewReader(l.index), roomy))
	defer x.Close()
	var all []home.Object
	for {
		e, err := x.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		check(tb, err)
		if e.Kind == layer.File && !e.Inline() {
			all = append(all, home.Object{Digest: e.Object, Size: e.Data()})
		}
	}
}

// usage is counted name by name.
func usage(tb fatal, dir string) home.Usage {
	tb.Helper()
	var sum home.Usage
	check(tb, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.Type()&fs.ModeSymlink == 0 {
			sum.Attributes += attributeBytes(tb, path)
		}
		if path == dir {
			return nil
		}
		sum.Files++
		if !d.Type().IsRegular() {
			return nil
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		for at := int64(0); ; {
			start, err := f.Seek(at, unix.SEEK_DATA)
			if errors.Is(err, unix.ENXIO) {
				return nil
			}
			if err != nil {
				return err
			}
			if at, err = f.Seek(start, unix.SEEK_HOLE); err != nil {
				return err
			}
			sum.Bytes += at - start
		}
	}))
	return sum
}

func digest(tb fatal, dir string) home.Digest {
	tb.Helper()
	return must[home.Digest](tb)(home.Fingerprint(context.Background(), dir))
}

// listing is a directory in words, by other means than those that are tested,
// without times, FIFOs and sockets.
func listing(tb fatal, dir string) string {
	tb.Helper()
	var lines []string
	first := make(map[uint64]string)
	root := must[string](tb)(filepath.EvalSymlinks(dir))
	if strings.HasPrefix(dir, "/proc/") {
		root = dir + "/." // follows the link to the descriptor
	}
	check(tb, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		rel := must[string](tb)(filepath.Rel(root, path))
		line := fmt.Sprintf("%q %v", rel, info.Mode()&^(fs.ModeSetuid|fs.ModeSetgid))
		switch {
		case info.Mode().IsRegular():
			b := must[[]byte](tb)(os.ReadFile(path))
			line += fmt.Sprintf(" %d %x", len(b), sha256.Sum256(b))
		case info.Mode()&fs.ModeSymlink != 0:
			line += fmt.Sprintf(" -> %q", must[string](tb)(os.Readlink(path)))
		case !info.IsDir():
			return nil
		}
		if st := info.Sys().(*syscall.Stat_t); st.Nlink > 1 && !info.IsDir() {
			if first[st.Ino] == "" {
				first[st.Ino] = rel
			}
			line += fmt.Sprintf(" = %q", first[st.Ino])
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			line += attributes(tb, path)
		}
		lines = append(lines, line)
		return nil
	}))
	return strings.Join(lines, "\n")
}

func attributeBytes(tb fatal, path string) (n int64) {
	tb.Helper()
	list, value := make([]byte, 1<<16), make([]byte, 1<<16)
	for name := range strings.SplitSeq(string(list[:must[int](tb)(unix.Llistxattr(path, list))]), "\x00") {
		if short, ok := strings.CutPrefix(name, "user."); ok {
			n += int64(len(short)+must[int](tb)(unix.Lgetxattr(path, name, value))) + 24
		}
	}
	return n
}

func attributes(tb fatal, path string) string {
	list := make([]byte, 1<<16)
	n := must[int](tb)(unix.Llistxattr(path, list))
	var all []string
	for name := range strings.SplitSeq(string(list[:n]), "\x00") {
		if strings.HasPrefix(name, "user.") {
			b := make([]byte, 1<<16)
			n := must[int](tb)(unix.Lgetxattr(path, name, b))
			all = append(all, fmt.Sprintf(" %s=%q", name, b[:n]))
		}
	}
	sort.Strings(all)
	return strings.Join(all, "")
}
