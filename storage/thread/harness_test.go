package thread_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
	"github.com/bullpen-run/bullpen/scheduler/threads"
	"github.com/bullpen-run/bullpen/storage/blob"
	"github.com/bullpen-run/bullpen/storage/storagetest"
	"github.com/bullpen-run/bullpen/storage/thread"
	"github.com/bullpen-run/bullpen/worker/home"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	tenant  = 54_321 // uid and gid of the programs
	org     = "acme"
	safeAge = 24 * time.Hour
)

var unlimited = layer.Limits{Bytes: 1 << 40, Entries: 1 << 21}

var unlimitedHome = proto.Space{Bytes: 1 << 40, Files: 1 << 21}

func anything([]proto.StagedFile, *proto.Thread) error { return nil }

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

// backend is a store in memory whose objects can be aged and corrupted, with hooks before and after
// requests.
type backend struct {
	storagetest.Memory
	mu     sync.Mutex
	old    map[string]bool
	rotten map[string]int64 // index of the corrupt byte by key
	before func(op, key string)
	after  func(op, key string)
}

func (b *backend) hook(op, key string) func() {
	b.mu.Lock()
	before, after := b.before, b.after
	b.mu.Unlock()
	if before != nil {
		before(op, key)
	}
	return func() {
		if after != nil {
			after(op, key)
		}
	}
}

func (b *backend) watch(before, after func(op, key string)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.before, b.after = before, after
}

// once returns a hook that calls f at the first matching request.
func once(op, prefix string, f func()) func(op, key string) {
	var done sync.Once
	return func(o, key string) {
		if o == op && strings.HasPrefix(key, prefix) {
			done.Do(f)
		}
	}
}

func (b *backend) Put(ctx context.Context, key string, size int64, content io.Reader, replace bool) error {
	defer b.hook("put", key)()
	err := b.Memory.Put(ctx, key, size, content, replace)
	if err == nil {
		b.mu.Lock()
		delete(b.old, key)
		b.mu.Unlock()
	}
	return err
}

func (b *backend) Get(ctx context.Context, key string, span blob.Span) (io.ReadCloser, error) {
	defer b.hook("get", key)()
	r, err := b.Memory.Get(ctx, key, span)
	b.mu.Lock()
	at, rotten := b.rotten[key]
	b.mu.Unlock()
	if err != nil || !rotten || at < span.Offset || at >= span.Offset+span.Length {
		return r, err
	}
	content, err := io.ReadAll(r)
	content[at-span.Offset] ^= 0x10
	return io.NopCloser(bytes.NewReader(content)), err
}

func (b *backend) aged(e blob.Entry) blob.Entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.old[e.Key] {
		e.Modified = e.Modified.Add(-2 * safeAge)
	}
	return e
}

func (b *backend) Stat(ctx context.Context, key string) (blob.Entry, error) {
	defer b.hook("stat", key)()
	e, err := b.Memory.Stat(ctx, key)
	return b.aged(e), err
}

func (b *backend) Delete(ctx context.Context, key string) error {
	defer b.hook("delete", key)()
	return b.Memory.Delete(ctx, key)
}

func (b *backend) List(ctx context.Context, prefix, after string) iter.Seq2[blob.Entry, error] {
	return func(yield func(blob.Entry, error) bool) {
		defer b.hook("list", prefix)()
		for e, err := range b.Memory.List(ctx, prefix, after) {
			if !yield(b.aged(e), err) {
				return
			}
		}
	}
}

// keys returns the keys that begin with prefix.
func (b *backend) keys(prefix string) []string {
	var all []string
	for e, err := range b.Memory.List(context.Background(), prefix, "") {
		if err != nil {
			panic(err) // impossible
		}
		all = append(all, e.Key)
	}
	return all
}

// age makes all objects old.
func (b *backend) age() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, key := range b.keys("") {
		b.old[key] = true
	}
}

func (b *backend) rot(key string, at int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rotten = map[string]int64{key: at}
}

// world is a store with heads and the homes of a worker.
type world struct {
	tb       testing.TB
	ctx      context.Context // of the test
	backend  *backend
	heads    *threads.Threads
	owner    *home.Owner
	versions *thread.Versions
	dirs     map[string]string // of the newest version by thread
}

func newWorld(tb testing.TB) *world {
	tb.Helper()
	b := &backend{old: make(map[string]bool)}
	w := &world{tb: tb, ctx: tb.Context(), backend: b, dirs: make(map[string]string)}
	w.heads = &threads.Threads{Store: storetest.Open(tb, storetest.Server(tb))}
	w.versions = &thread.Versions{
		Blobs: &blob.Store{Backend: b, Retry: blob.RetryPolicy{Attempts: 1}}, Heads: w.heads,
		Limits: unlimited,
	}
	dir := tb.TempDir()
	w.versions.Spool = func() (*os.File, error) { return os.CreateTemp(dir, "") }
	w.owner = must[*home.Owner](tb)(home.NewOwner(tenant, tenant))
	tb.Cleanup(func() { check(tb, w.owner.Close()) })
	return w
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

// dir returns the directory of the newest version of a thread.
func (w *world) dir(tb fatal, id string) string {
	tb.Helper()
	if w.dirs[id] == "" {
		w.dirs[id] = must[string](tb)(os.MkdirTemp(w.tb.TempDir(), ""))
		check(tb, os.Chmod(w.dirs[id], 0o755))
	}
	return w.dirs[id]
}

// run changes the home of a thread, commits the change and returns the new head.
func (w *world) run(tb fatal, id string, change func(root string)) *proto.Thread {
	tb.Helper()
	trace := proto.NewTraceID()
	head, _, err := w.heads.Lock(w.ctx, org, id, trace)
	check(tb, err)
	c := w.save(tb, head, change)
	check(tb, w.heads.Commit(w.ctx, org, id, trace, c), w.heads.Unlock(w.ctx, org, id, trace))
	return w.head(tb, id)
}

// loseHead removes a head without its manifests.
func (w *world) loseHead(id string) error {
	removal, err := w.heads.Tombstone(w.ctx, org, id, func(*proto.Thread) error { return nil })
	return errors.Join(err, w.heads.Purge(w.ctx, org, id, removal))
}

func (w *world) head(tb fatal, id string) *proto.Thread {
	tb.Helper()
	return must[*proto.Thread](tb)(w.heads.Get(w.ctx, org, id))
}

// save changes a home and stores the change.
func (w *world) save(tb fatal, head *proto.Thread, change func(root string)) *proto.Commit {
	tb.Helper()
	volume, at := tmpfs(tb)
	defer func() { _ = volume.Close() }()
	dir := w.dir(tb, head.ID)
	o := &home.Overlay{Lower: dir, Volume: at, Owner: w.owner}
	mount := must[*os.File](tb)(o.Mount())
	defer func() { _ = mount.Close() }()
	change(pathOf(mount) + "/.")
	spool := must[*os.File](tb)(os.CreateTemp(w.tb.TempDir(), ""))
	defer func() { _ = spool.Close() }()
	draft := must[layer.Draft](tb)(w.versions.NewLayer(org, spool))
	stats := must[home.Stats](tb)(o.Diff(w.ctx, draft, w.putObject))
	stored := must[proto.Layer](tb)(draft.Store(w.ctx, head.Number()+1, len(stats.Objects)))
	in := must[layer.ReadCloser](tb)(draft.Reopen())
	defer in.Close()
	check(tb, home.Apply(w.ctx, dir, in,
		func(ctx context.Context, digest layer.Digest, size int64) (io.ReadCloser, error) {
			return w.versions.OpenObject(ctx, org, digest, size)
		}))
	return w.commit(tb, head, stored, stats)
}

func (w *world) putObject(ctx context.Context, digest layer.Digest, size int64, content io.ReaderAt) error {
	return w.versions.PutObject(ctx, org, digest, size, content)
}

func (w *world) commit(tb fatal, head *proto.Thread, stored proto.Layer, stats home.Stats) *proto.Commit {
	tb.Helper()
	c := &proto.Commit{Fence: head.Fence, Version: proto.Version{
		Number: head.Number() + 1, CreatedAt: time.Now().UTC(), Trace: head.Holder, Bytes: stats.Growth.Bytes,
		Files: stats.Growth.Files,
	}}
	if v := head.Version; v != nil {
		c.Version.Bytes += v.Bytes
		c.Version.Files += v.Files
	}
	whole := c.Version
	if head.Version != nil {
		whole.Layers = slices.Clone(head.Version.Layers)
	}
	whole.Layers = append(whole.Layers, stored)
	c.Version = must[proto.Version](tb)(w.versions.WriteManifest(w.ctx, org, head.ID, whole, head.Version))
	c.Version.Layers = []proto.Layer{stored}
	for _, f := range head.Staged {
		c.Staged = append(c.Staged, f.Key)
	}
	return c
}

// write writes a file in an execution.
func (w *world) write(tb fatal, id, name, content string) *proto.Thread {
	tb.Helper()
	return w.run(tb, id, func(root string) { check(tb, os.WriteFile(filepath.Join(root, name), []byte(content), 0o644)) })
}

// list returns the results of List.
func (w *world) list(tb fatal, id, dir string, recursive bool) []proto.File {
	tb.Helper()
	var all []proto.File
	check(tb, w.versions.List(w.ctx, org, id, 0, dir, recursive, func(f proto.File) error {
		all = append(all, f)
		return nil
	}))
	return all
}

// large returns content that is stored as an object.
func large(seed string) string {
	return strings.Repeat(seed+"\n", (layer.MaxInline+1<<20)/(len(seed)+1))
}

// listing describes a directory by path.
func listing(tb fatal, dir string) map[string]string {
	tb.Helper()
	all, first := make(map[string]string), make(map[uint64]string)
	check(tb, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		rel := must[string](tb)(filepath.Rel(dir, path))
		st := info.Sys().(*syscall.Stat_t)
		if first[st.Ino] != "" {
			all[rel] = "= " + first[st.Ino]
			return nil
		}
		if st.Nlink > 1 && !info.IsDir() {
			first[st.Ino] = rel
		}
		line := describe(st.Mode&0o7777, info.ModTime())
		switch {
		case info.Mode().IsRegular():
			b := must[[]byte](tb)(os.ReadFile(path))
			line += fmt.Sprintf(" %d %x", len(b), sha256.Sum256(b))
		case info.Mode()&fs.ModeSymlink != 0:
			line += fmt.Sprintf(" -> %q", must[string](tb)(os.Readlink(path)))
		default:
			line += " directory"
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			line += attributes(tb, path)
		}
		all[rel] = line
		return nil
	}))
	return all
}

func describe(mode uint32, modified time.Time) string {
	return fmt.Sprintf("%04o %d.%09d", mode, modified.Unix(), modified.Nanosecond())
}

func attributes(tb fatal, path string) string {
	list := make([]byte, 1<<16)
	n := must[int](tb)(unix.Llistxattr(path, list))
	found := make(map[string]string)
	for name := range strings.SplitSeq(string(list[:n]), "\x00") {
		if strings.HasPrefix(name, "user.") {
			b := make([]byte, 1<<16)
			found[name] = string(b[:must[int](tb)(unix.Lgetxattr(path, name, b))])
		}
	}
	return describeAttributes(found)
}

func describeAttributes(attributes map[string]string) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(attributes)) {
		fmt.Fprintf(&b, " %q=%q", name, attributes[name])
	}
	return b.String()
}

// archived describes an archive of a version in the same way.
func (w *world) archived(tb fatal, id string, number int64) map[string]string {
	tb.Helper()
	r, out := io.Pipe()
	go func() { out.CloseWithError(w.versions.Archive(w.ctx, org, id, number, "", out)) }()
	all := make(map[string]string)
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		check(tb, err)
		name := filepath.Clean(h.Name)
		line := describe(uint32(h.Mode), h.ModTime)
		switch h.Typeflag {
		case tar.TypeLink:
			all[name] = "= " + h.Linkname
			continue
		case tar.TypeDir:
			line += " directory"
		case tar.TypeSymlink:
			line += fmt.Sprintf(" -> %q", h.Linkname)
		case tar.TypeReg:
			sum := sha256.New()
			n := must[int64](tb)(io.Copy(sum, in))
			line += fmt.Sprintf(" %d %x", n, sum.Sum(nil))
		default:
			tb.Fatalf("%q is a %c", name, h.Typeflag)
		}
		found := make(map[string]string)
		for key, value := range h.PAXRecords {
			if name, ok := strings.CutPrefix(key, "SCHILY.xattr."); ok {
				found[strings.NewReplacer("%3D", "=", "%25", "%").Replace(name)] = value
			}
		}
		all[name] = line + describeAttributes(found)
	}
}

func same(tb fatal, got, want map[string]string) {
	tb.Helper()
	for path := range want {
		if got[path] != want[path] {
			tb.Fatalf("%q is\n%s\nwant\n%s", path, got[path], want[path])
		}
	}
	for path := range got {
		if _, ok := want[path]; !ok {
			tb.Fatalf("unexpected %q: %s", path, got[path])
		}
	}
}

// content reads a whole file.
func (w *world) content(tb fatal, id, path string) string {
	tb.Helper()
	f := must[*proto.FileContent](tb)(w.versions.Open(w.ctx, org, id, 0, path))
	return string(must[[]byte](tb)(part(w.ctx, f, 0, f.Size)))
}

func part(ctx context.Context, f *proto.FileContent, offset, length int64) ([]byte, error) {
	r, err := f.Read(ctx, offset, length)
	if err != nil {
		return nil, err
	}
	b := bytes.NewBuffer(make([]byte, 0, length+bytes.MinRead)) // ReadFrom need not grow it
	_, err = b.ReadFrom(r)
	return b.Bytes(), errors.Join(err, r.Close())
}

// full stores the home as a single layer.
func (w *world) full(tb fatal, id string, version int64) proto.Layer {
	tb.Helper()
	spool := must[*os.File](tb)(os.CreateTemp(w.tb.TempDir(), ""))
	defer func() { _ = spool.Close() }()
	draft := must[layer.Draft](tb)(w.versions.NewLayer(org, spool))
	stats := must[home.Stats](tb)(home.Full(w.ctx, w.dirs[id], draft, w.putObject))
	return must[proto.Layer](tb)(draft.Store(w.ctx, version, len(stats.Objects)))
}

// hooked calls before with each request for a head.
type hooked struct {
	*threads.Threads
	before func(op string)
}

func (h *hooked) Get(ctx context.Context, org, id string) (*proto.Thread, error) {
	h.before("get " + id)
	return h.Threads.Get(ctx, org, id)
}

func (h *hooked) Tombstone(ctx context.Context, org, id string, check func(*proto.Thread) error) (string, error) {
	h.before("tombstone " + id)
	return h.Threads.Tombstone(ctx, org, id, check)
}

func (h *hooked) Removal(ctx context.Context, org, id string) (string, error) {
	h.before("removal " + id)
	return h.Threads.Removal(ctx, org, id)
}

func (h *hooked) Purge(ctx context.Context, org, id, removal string) error {
	h.before("purge " + id)
	return h.Threads.Purge(ctx, org, id, removal)
}

func (h *hooked) Create(ctx context.Context, head *proto.Thread) error {
	h.before("create " + head.ID)
	return h.Threads.Create(ctx, head)
}

// extracted extracts the archive of a thread.
func extracted(w *world, id string) (string, error) {
	dir := w.dir(w.tb, id)
	r, out := io.Pipe()
	go func() { out.CloseWithError(w.versions.Archive(w.ctx, org, id, 1, "", out)) }()
	cmd := exec.CommandContext(w.ctx, "tar", "-C", dir, "-xp", "--xattrs")
	cmd.Stdin = r
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, text)
	}
	return dir, nil
}
