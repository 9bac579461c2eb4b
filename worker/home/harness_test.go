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
	"reflect"
	"slices"
	"sort"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/storage/thread/codec"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	tenant = 54_321 // uid and gid of the programs
	mib    = 1 << 20
)

var unlimited = layer.Limits{Bytes: 1 << 40, Entries: 1 << 21}

// fatal is implemented by tests and property tests.
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

// objects is a store in memory.
type objects map[layer.Digest][]byte

func (o objects) store(_ context.Context, digest layer.Digest, size int64, content io.ReaderAt) error {
	b, err := io.ReadAll(io.NewSectionReader(content, 0, size))
	if err != nil {
		return err
	}
	if sha256.Sum256(b) != digest {
		return errors.New("the digest does not match the content")
	}
	o[digest] = b
	return nil
}

func (o objects) fetch(_ context.Context, digest layer.Digest, size int64) (io.ReadCloser, error) {
	b, ok := o[digest]
	if !ok || int64(len(b)) != size {
		return nil, fmt.Errorf("no such object of %d bytes", size)
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}

// parts are the two parts of an encoded layer.
type parts struct{ pack, index []byte }

// encode encodes the layer that write writes.
func encode(limits layer.Limits, write func(layer.Writer) (home.Stats, error)) (parts, home.Stats, error) {
	var b bytes.Buffer
	w, err := codec.NewWriter(&b, limits)
	if err != nil {
		return parts{}, home.Stats{}, err
	}
	stats, err := write(w)
	if err != nil {
		return parts{}, home.Stats{}, err
	}
	layout, err := w.Close()
	return parts{b.Bytes()[:layout.Pack], b.Bytes()[layout.Pack:]}, stats, err
}

func encodeDiff(
	ctx context.Context, o *home.Overlay, limits layer.Limits, store home.Store,
) (parts, home.Stats, error) {
	return encode(limits, func(w layer.Writer) (home.Stats, error) { return o.Diff(ctx, w, store) })
}

func diff(tb fatal, o *home.Overlay, stored objects) (parts, home.Stats) {
	tb.Helper()
	l, stats, err := encodeDiff(context.Background(), o, unlimited, stored.store)
	check(tb, err)
	return l, stats
}

func encodeFull(dir string, store home.Store) (parts, home.Stats, error) {
	return encode(unlimited, func(w layer.Writer) (home.Stats, error) {
		return home.Full(context.Background(), dir, w, store)
	})
}

func full(tb fatal, dir string, stored objects) (parts, home.Stats) {
	tb.Helper()
	l, stats, err := encodeFull(dir, stored.store)
	check(tb, err)
	return l, stats
}

func apply(dir string, l parts, stored objects) error {
	return applyWith(dir, l, unlimited, stored.fetch)
}

func applyWith(dir string, l parts, limits layer.Limits, fetch home.Fetch) error {
	in, err := codec.NewReader(bytes.NewReader(l.index), bytes.NewReader(l.pack), limits)
	if err != nil {
		return err
	}
	defer in.Close()
	return home.Apply(context.Background(), dir, in, fetch)
}

func owner(tb testing.TB) *home.Owner {
	tb.Helper()
	o := must[*home.Owner](tb)(home.NewOwner(tenant, tenant))
	tb.Cleanup(func() { check(tb, o.Close()) })
	return o
}

// ext4 returns a pool of volumes like those of jails.
func ext4(tb testing.TB) *disk.Pool {
	tb.Helper()
	pool := must[*disk.Pool](tb)(disk.Open(disk.Config{Dir: tb.TempDir(), Log: slog.New(slog.DiscardHandler)}))
	tb.Cleanup(func() { check(tb, pool.Close()) })
	return pool
}

// tmpfs mounts a volume in memory.
func tmpfs(tb fatal) (*os.File, string) {
	tb.Helper()
	fs := must[int](tb)(unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC))
	defer func() { _ = unix.Close(fs) }()
	check(tb, unix.FsconfigCreate(fs))
	f := os.NewFile(uintptr(must[int](tb)(
		unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV))), "tmpfs")
	return f, pathOf(f)
}

func pathOf(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// shell runs a script in a directory as the tenant.
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
	v := must[*disk.Volume](th.tb)(
		th.volumes.Get(th.tb.Context(), disk.Size{Bytes: 1 << 30, Inodes: 30_000}, tenant, tenant))
	th.tb.Cleanup(func() { check(th.tb, v.Close()) })
	o := &home.Overlay{Lower: th.lower, Volume: v.Path(), Owner: th.owner}
	f := must[*os.File](th.tb)(o.Mount())
	th.tb.Cleanup(func() { _ = f.Close() })
	return o, f
}

// run executes a script in the home and returns the directory of the next version and the stats of
// its layer. It builds the version twice: from the last one and from all layers.
func (th *thread) run(script string) (string, home.Stats) {
	th.tb.Helper()
	o, mount := th.open()
	return th.runIn(o, mount, script)
}

// runIn is like run for a mounted home.
func (th *thread) runIn(o *home.Overlay, mount *os.File, script string) (string, home.Stats) {
	th.tb.Helper()
	shell(th.tb, mount, script)
	want, seen, before := digest(th.tb, pathOf(mount)), listing(th.tb, pathOf(mount)), usage(th.tb, th.lower)
	check(th.tb, mount.Close())
	l, stats := diff(th.tb, o, th.objects)
	if again, _ := diff(th.tb, o, th.objects); !reflect.DeepEqual(l, again) {
		th.tb.Error("the same change has two encodings")
	}
	if named := objectsIn(th.tb, l); !slices.Equal(named, stats.Objects) {
		th.tb.Errorf("the layer has the objects %+v, want %+v", named, stats.Objects)
	}
	th.layers = append(th.layers, l)
	next := newDir(th.tb)
	for _, l := range th.layers {
		check(th.tb, apply(next, l, th.objects))
	}
	check(th.tb, apply(th.lower, l, th.objects))
	for _, dir := range []string{next, th.lower} {
		if got := listing(th.tb, dir); got != seen {
			th.tb.Errorf("the version is\n%s, want\n%s", got, seen)
		} else if digest(th.tb, dir) != want {
			th.tb.Errorf("the version differs from what the program left:\n%s", got)
		}
	}
	after := usage(th.tb, th.lower)
	if sum := (home.Usage{
		Bytes: before.Bytes + stats.Growth.Bytes, Files: before.Files + stats.Growth.Files,
		Attributes: before.Attributes + stats.Growth.Attributes,
	}); sum != after {
		th.tb.Errorf("the home grew from %+v to %+v, but not by %+v", before, after, stats.Growth)
	}
	return th.lower, stats
}

// objectsIn returns the objects that an index refers to.
func objectsIn(tb testing.TB, l parts) []home.Object {
	tb.Helper()
	x := must[*codec.Index](tb)(codec.NewIndex(bytes.NewReader(l.index), unlimited))
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

// usage walks a directory to determine its size.
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

// digest returns a digest of everything that a version records of a directory, including holes.
func digest(tb fatal, dir string) layer.Digest {
	tb.Helper()
	l, _, err := encodeFull(dir, func(context.Context, layer.Digest, int64, io.ReaderAt) error { return nil })
	check(tb, err)
	return sha256.Sum256(l.index) // which includes the digests of the pack
}

// listing describes a directory without times, FIFOs and sockets. It shares no code with the
// package.
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
