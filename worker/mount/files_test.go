package mount_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/mount"
)

const fileOwner = 4321

// filesWorld is a directory of a connection, with what is around it.
type filesWorld struct {
	*testing.T
	root string // mounted nosuid
	dir  string // of the connection
}

func newFilesWorld(t *testing.T) *filesWorld {
	t.Helper()
	w := &filesWorld{T: t, root: t.TempDir()}
	must(t, unix.Mount("tmpfs", w.root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"))
	t.Cleanup(func() { _ = unix.Unmount(w.root, unix.MNT_DETACH) })
	w.dir = filepath.Join(w.root, "shared")
	must(t, os.Mkdir(w.dir, 0o755))
	must(t, os.Chown(w.dir, fileOwner, fileOwner))
	return w
}

// open opens a part of the connection.
func (w *filesWorld) open(prefix string) *mount.Files {
	w.Helper()
	f, err := mount.OpenDirectory(
		[]string{w.root}, proto.Mount{Slug: "s", Kind: proto.MountDirectory, Directory: w.dir, Prefix: prefix, At: prefix})
	must(w.T, err)
	w.Cleanup(func() { _ = f.Close() })
	return f
}

// write writes a file with an owner below the root.
func (w *filesWorld) write(name, content string, owner int, mode os.FileMode) {
	w.Helper()
	path := filepath.Join(w.root, name)
	for dir := filepath.Dir(path); dir != w.root; dir = filepath.Dir(dir) {
		if _, err := os.Stat(dir); err == nil {
			break
		}
		must(w.T, os.MkdirAll(dir, 0o755))
		must(w.T, os.Chown(dir, fileOwner, fileOwner))
	}
	must(w.T, os.WriteFile(path, []byte(content), 0o600))
	must(w.T, os.Chown(path, owner, owner))
	must(w.T, os.Chmod(path, mode))
}

func (w *filesWorld) list(f *mount.Files, dir string, recursive bool) []string {
	w.Helper()
	names := []string{}
	must(w.T, f.List(w.Context(), dir, recursive, func(file proto.File) error {
		name := fmt.Sprint(file.Path, " ", file.Size)
		if file.IsDirectory {
			name = file.Path + "/"
		}
		names = append(names, name)
		return nil
	}))
	slices.Sort(names)
	return names
}

func (w *filesWorld) read(f *mount.Files, name string) (string, error) {
	content, err := f.Open(w.Context(), name)
	if err != nil {
		return "", err
	}
	body, err := content.Read(w.Context(), 0, content.Size)
	if err != nil {
		return "", err
	}
	text, err := io.ReadAll(body)
	return string(text), errors.Join(err, body.Close())
}

func TestFilesOfDirectory(t *testing.T) {
	w := newFilesWorld(t)
	f := w.open("")
	old := unix.Umask(0o077)
	defer unix.Umask(old)
	put := func(name, content string) error {
		return f.Put(t.Context(), name, int64(len(content)), strings.NewReader(content))
	}
	must(t, put("a/b/c.txt", "hello"))
	must(t, put("a/b/c.txt", "replaced"))
	must(t, put("empty", ""))
	for name, mode := range map[string]os.FileMode{"a/b/c.txt": 0o644, "empty": 0o644} {
		info, err := os.Stat(filepath.Join(w.dir, name))
		must(t, err)
		if s := info.Sys().(*syscall.Stat_t); s.Uid != fileOwner || s.Gid != fileOwner || info.Mode().Perm() != mode {
			t.Errorf("%s: %s of %d:%d", name, info.Mode(), s.Uid, s.Gid)
		}
	}
	if got := w.list(f, "", true); !slices.Equal(got, []string{"a/", "a/b/", "a/b/c.txt 8", "empty 0"}) {
		t.Errorf("%q", got)
	}
	if text, err := w.read(f, "a/b/c.txt"); text != "replaced" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	content, err := f.Open(t.Context(), "a/b/c.txt")
	must(t, err)
	part, err := content.Read(t.Context(), 2, 3)
	must(t, err)
	if text, err := io.ReadAll(part); string(text) != "pla" || errors.Join(err, part.Close()) != nil {
		t.Errorf("%q, %v", text, err)
	}
	must(t, put("a/b/c.txt", "again..."))
	var changed *proto.FileChangedError
	if _, err := content.Read(t.Context(), 0, 1); !errors.As(err, &changed) {
		t.Errorf("%v", err)
	}
	for name, err := range map[string]error{
		"a directory":       put("a", "x"),
		"below a file":      put("empty/x", "x"),
		"check, directory":  f.CheckPut(t.Context(), "a", 1),
		"check, below":      f.CheckPut(t.Context(), "empty/x/y", 1),
		"rename over":       last(f.Rename(t.Context(), "empty", "a/b/c.txt")),
		"rename below self": last(f.Rename(t.Context(), "a", "a/b/x")),
		"delete":            last(f.Delete(t.Context(), "a", false)),
	} {
		if _, ok := errors.AsType[*proto.PathError](err); !ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	must(t, f.CheckPut(t.Context(), "new/x", 1))
	must(t, last(f.Rename(t.Context(), "a/b", "new/dir")))
	for name, err := range map[string]error{
		"open": last(w.read(f, "a/b/c.txt")), "delete": last(f.Delete(t.Context(), "none", true)),
		"rename":            last(f.Rename(t.Context(), "none", "x")),
		"open below a file": last(w.read(f, "empty/x")), "open a directory": last(w.read(f, "new")),
	} {
		if !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// What breaks off leaves nothing.
	broken := io.MultiReader(strings.NewReader("part"), failing{})
	if err := f.Put(t.Context(), "new/broken", 10, broken); !errors.Is(err, errBroken) {
		t.Errorf("%v", err)
	}
	if err := f.Put(t.Context(), "new/short", 10, strings.NewReader("part")); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%v", err)
	}
	must(t, last(f.Delete(t.Context(), "empty", false)))
	must(t, last(f.Delete(t.Context(), "a", false)))
	if got := w.list(f, "", true); !slices.Equal(got, []string{"new/", "new/dir/", "new/dir/c.txt 8"}) {
		t.Errorf("%q", got)
	}
	must(t, last(f.Delete(t.Context(), "new", true)))
	if entries, err := os.ReadDir(w.dir); err != nil || len(entries) > 0 {
		t.Errorf("%v, %v", entries, err)
	}
	if err := f.List(t.Context(), "none", false, nil); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

func last[T any](_ T, err error) error { return err }

var errBroken = errors.New("broken")

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errBroken }

// No link, mount, device or mode leads a request to what the program does not have.
func TestFilesOfDirectoryStayInside(t *testing.T) {
	w := newFilesWorld(t)
	w.write("secret", "secret", 0, 0o644)
	w.write("shared/in/file", "inside", fileOwner, 0o644)
	w.write("shared/other/file", "other", fileOwner, 0o644)
	w.write("shared/in/foreign", "foreign", 0, 0o600)
	w.write("shared/in/group", "group", 0, 0o640)
	for name, target := range map[string]string{
		"up": "../..", "secret": "../../secret", "abs": w.root, "root": "/",
		"loop": "loop", "beside": "../other",
	} {
		must(t, os.Symlink(target, filepath.Join(w.dir, "in", name)))
	}
	must(t, os.Mkdir(filepath.Join(w.dir, "in/mounted"), 0o755))
	must(t, unix.Mount(filepath.Join(w.dir, "other"), filepath.Join(w.dir, "in/mounted"), "", unix.MS_BIND, ""))
	defer func() { _ = unix.Unmount(filepath.Join(w.dir, "in/mounted"), unix.MNT_DETACH) }()
	must(t, unix.Mkfifo(filepath.Join(w.dir, "in/fifo"), 0o666))
	f := w.open("in")
	for _, name := range []string{
		"secret", "up/secret", "abs/secret", "abs/shared/in/file", "root/etc/passwd", "loop", "loop/x", "beside/file",
		"mounted/file", "fifo", "..", "../other/file",
	} {
		if text, err := w.read(f, name); err == nil {
			t.Errorf("%s was read: %q", name, text)
		}
		if err := f.List(t.Context(), name, true, func(file proto.File) error {
			return fmt.Errorf("%s", file.Path)
		}); err == nil {
			t.Errorf("%s was listed", name)
		}
	}
	for _, name := range []string{
		"up/x", "abs/x", "root/x", "loop/x", "beside/x", "mounted/x", "beside/file",
		"../other/x", "..", "../x",
	} {
		if err := f.Put(t.Context(), name, 1, strings.NewReader("x")); err == nil {
			t.Errorf("%s was written", name)
		}
		if _, err := f.Delete(t.Context(), name, true); err == nil {
			t.Errorf("%s was deleted", name)
		}
		if _, err := f.Rename(t.Context(), "file", name); err == nil {
			t.Errorf("%s was renamed to", name)
		}
	}
	for _, name := range []string{"foreign", "group"} { // the server runs as root, a program does not
		if text, err := w.read(f, name); !errors.Is(err, os.ErrPermission) {
			t.Errorf("%s: %q, %v", name, text, err)
		}
	}
	if got := w.list(f, "", true); slices.ContainsFunc(got, func(name string) bool {
		return strings.Contains(name, "/") && name != "mounted/"
	}) {
		t.Errorf("%q", got)
	}
	// A file replaces a link, not what it leads to.
	must(t, f.Put(t.Context(), "secret", 3, strings.NewReader("new")))
	must(t, last(f.Delete(t.Context(), "up", true)))
	if got, err := os.ReadFile(filepath.Join(w.root, "secret")); string(got) != "secret" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	// A directory with a link is deleted without what the link leads to.
	must(t, os.Mkdir(filepath.Join(w.dir, "in/tree"), 0o755))
	must(t, os.Chown(filepath.Join(w.dir, "in/tree"), fileOwner, fileOwner))
	must(t, os.Symlink("../../other", filepath.Join(w.dir, "in/tree/link")))
	must(t, last(f.Delete(t.Context(), "tree", true)))
	if _, err := os.Stat(filepath.Join(w.dir, "other/file")); err != nil {
		t.Error(err)
	}
}

// A program that replaces a directory by a link meanwhile leads no request out.
func TestFilesOfDirectoryInRaces(t *testing.T) {
	w := newFilesWorld(t)
	w.write("outside/file", "secret", fileOwner, 0o666)
	must(t, os.Chown(filepath.Join(w.root, "outside"), fileOwner, fileOwner))
	w.write("shared/d/file", "inside", fileOwner, 0o644)
	must(t, os.Symlink("../outside", filepath.Join(w.dir, "link")))
	f := w.open("")
	stop := make(chan struct{})
	var swapping sync.WaitGroup
	swapping.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Renameat2(unix.AT_FDCWD, filepath.Join(w.dir, "d"), unix.AT_FDCWD, filepath.Join(w.dir, "link"),
					unix.RENAME_EXCHANGE)
			}
		}
	})
	var read, written int
	for range 300 {
		text, err := w.read(f, "d/file")
		if err == nil {
			read++
		}
		if text == "secret" {
			t.Error("the file outside was read")
		}
		if f.Put(t.Context(), "d/new", 1, strings.NewReader("x")) == nil {
			written++
		}
		_, _ = f.Delete(t.Context(), "d/new", false)
		_ = f.List(t.Context(), "", true, func(proto.File) error { return nil })
	}
	close(stop)
	swapping.Wait()
	if entries, err := os.ReadDir(filepath.Join(w.root, "outside")); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v", entries, err)
	}
	t.Logf("%d read and %d written of 300", read, written)
}

// A gateway that does not have the directory says why.
func TestDirectoriesThatAServerDoesNotHave(t *testing.T) {
	w := newFilesWorld(t)
	unsafe := filepath.Join(t.TempDir(), "x")
	must(t, os.Mkdir(unsafe, 0o755))
	must(t, os.Mkdir(filepath.Join(w.root, "roots"), 0o755))
	must(t, os.Symlink(w.dir, filepath.Join(w.root, "link")))
	for dir, why := range map[string]string{
		"/etc": "outside of what this machine allows", unsafe: "cannot be used on this machine",
		filepath.Join(w.root, "none"): "does not exist",
		filepath.Join(w.root, "link"): "symbolic link", filepath.Join(w.root, "roots"): "belongs to root",
		w.root + "-other": "outside",
	} {
		var none *proto.NoDirectoryError
		_, err := mount.OpenDirectory([]string{w.root, unsafe},
			proto.Mount{Slug: "s", Kind: proto.MountDirectory, Directory: dir})
		if !errors.As(err, &none) || !strings.Contains(none.Why, why) {
			t.Errorf("%s: %v", dir, err)
		}
	}
	// The part of a key that nobody has made yet is empty, and made by the first file.
	f := w.open("new/part")
	if err := f.List(t.Context(), "", false, nil); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("%v", err)
	}
	must(t, f.Put(t.Context(), "x", 1, strings.NewReader("x")))
	if got := w.list(f, "", true); !slices.Equal(got, []string{"x 1"}) {
		t.Errorf("%q", got)
	}
}

// The content of an upload may come from files of this process, which the owner of the directory may
// not read. So it is read with the rights of this process, which it has afterwards too.
func TestUploadIsReadByThisProcess(t *testing.T) {
	w := newFilesWorld(t)
	f := w.open("")
	check := func(when string) {
		text, err := os.ReadFile("/proc/thread-self/status")
		must(t, err)
		for line := range strings.SplitSeq(string(text), "\n") {
			var ruid, euid, saved, fsuid int
			if n, _ := fmt.Sscanf(line, "Uid: %d %d %d %d", &ruid, &euid, &saved, &fsuid); n == 4 && fsuid != 0 {
				t.Errorf("%s it has the rights of %d", when, fsuid)
			}
		}
	}
	secret := filepath.Join(tempDir(t, "/var/tmp"), "secret")
	must(t, os.WriteFile(secret, []byte("x"), 0o600))
	must(t, f.Put(t.Context(), "a", 1, readerFunc(func(p []byte) (int, error) {
		check("while reading")
		content, err := os.ReadFile(secret)
		return copy(p, content), err
	})))
	check("afterwards")
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
