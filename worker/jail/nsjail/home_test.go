package nsjail

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/storage/thread/codec"
	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// hiddenPython is the file name of the programs that homeProgram returns.
const hiddenPython = ".main.py"

// homeProgram returns a program whose file has the given name.
func homeProgram(tb testing.TB, language, file, code string) jail.Program {
	tb.Helper()
	p, err := jail.Source{Language: language, Code: code, TraceID: "trc_test", Home: DefaultHome, File: file}.Program()
	if err != nil {
		tb.Fatal(err)
	}
	p.Timeout = patience
	return p
}

// thread is a home that persists between executions. The directory lower holds its last version.
// Only one program may run in it at a time.
type thread struct {
	tb     testing.TB
	owners home.Owners
	lower  string

	// Set by Mount for the last execution.
	overlay *home.Overlay
	mount   *os.File
	volume  jail.Volume

	mu      sync.Mutex
	objects map[layer.Digest][]byte
}

// newThread makes a thread whose first version has these files.
func newThread(tb testing.TB, files map[string]string) *thread {
	tb.Helper()
	th := &thread{tb: tb, lower: filepath.Join(diskDir(tb), "home"), objects: map[layer.Digest][]byte{}}
	tb.Cleanup(func() {
		th.close()
		if err := th.owners.Close(); err != nil {
			tb.Error(err)
		}
	})
	if err := os.Mkdir(th.lower, 0o755); err != nil {
		tb.Fatal(err)
	}
	for name, content := range files {
		path := filepath.Join(th.lower, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, []byte(content), 0o644)); err != nil {
			tb.Fatal(err)
		}
	}
	return th
}

// Mount implements jail.Home.
func (th *thread) Mount(v jail.Volume, uid, gid int) (*os.File, error) {
	owner, err := th.owners.Get(uid, gid)
	if err != nil {
		return nil, err
	}
	overlay := &home.Overlay{Lower: th.lower, Volume: v.Path(), Owner: owner}
	mount, err := overlay.Mount()
	if err != nil {
		return nil, err
	}
	th.overlay, th.mount, th.volume = overlay, mount, v
	return mount, nil
}

// close releases what Mount acquired.
func (th *thread) close() {
	th.tb.Helper()
	if th.volume == nil {
		return
	}
	if err := errors.Join(th.mount.Close(), th.volume.Close()); err != nil {
		th.tb.Error(err)
	}
	th.overlay, th.mount, th.volume = nil, nil, nil
}

// spec returns testSpec with the thread's home.
func (th *thread) spec() jail.Spec {
	s := testSpec()
	s.Home = th
	return s
}

// large returns limits with the thread's home, of 512 MiB.
func (th *thread) large(limits func(*jail.Spec)) func(*jail.Spec) {
	return func(s *jail.Spec) {
		limits(s)
		s.HomeBytes, s.Inodes, s.Home = 512<<20, 65_536, th
	}
}

// save turns what the program left into the next version. It returns an error if that cannot be
// stored.
func (th *thread) save() error {
	defer th.close()
	return saveHome(th.overlay, th.store, th.fetch)
}

// saveHome turns the lower directory of a home into its next version.
func saveHome(o *home.Overlay, store home.Store, fetch home.Fetch) error {
	limits := layer.Limits{Bytes: 1 << 40, Entries: 1 << 21}
	var b bytes.Buffer
	w, err := codec.NewWriter(&b, limits)
	if err != nil {
		return err
	}
	if _, err := o.Diff(context.Background(), w, store); err != nil {
		return err
	}
	layout, err := w.Close()
	if err != nil {
		return err
	}
	pack := bytes.NewReader(b.Next(int(layout.Pack)))
	in, err := codec.NewReader(&b, pack, limits)
	if err != nil {
		return err
	}
	defer in.Close()
	return home.Apply(context.Background(), o.Lower, in, fetch)
}

func (th *thread) store(_ context.Context, digest layer.Digest, size int64, content io.ReaderAt) error {
	b := make([]byte, size)
	if _, err := content.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	th.mu.Lock()
	defer th.mu.Unlock()
	th.objects[digest] = b
	return nil
}

func (th *thread) fetch(_ context.Context, digest layer.Digest, _ int64) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(th.objects[digest])), nil
}

// call runs a program in the thread and saves the result. It checks that the last version does not
// change before the save.
func (th *thread) call(m *Maker, p jail.Program) result {
	th.tb.Helper()
	before := th.version()
	r := runProgram(th.tb, m, th.spec(), p)
	if after := th.version(); after != before {
		th.tb.Errorf("the last version was\n%sand is\n%s", before, after)
	}
	if err := th.save(); err != nil {
		th.tb.Fatal(err)
	}
	return r
}

// version lists the files of the last version, except hiddenPython.
func (th *thread) version() string {
	th.tb.Helper()
	var list strings.Builder
	err := filepath.WalkDir(th.lower, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if d.Name() == hiddenPython {
			return nil
		}
		st := info.Sys().(*syscall.Stat_t)
		name := "." + strings.TrimPrefix(path, th.lower)
		_, _ = fmt.Fprintf(&list, "%v %d:%d %q", info.Mode(), st.Uid, st.Gid, name)
		switch info.Mode().Type() {
		case 0:
			if info.Size() > 1<<30 {
				_, _ = fmt.Fprintf(&list, " %d %d bytes", st.Nlink, info.Size())
				break
			}
			var b []byte
			b, err = os.ReadFile(path)
			_, _ = fmt.Fprintf(&list, " %d %.20q", st.Nlink, b)
		case os.ModeSymlink:
			var to string
			to, err = os.Readlink(path)
			_, _ = fmt.Fprintf(&list, " -> %q", to)
		}
		_, _ = fmt.Fprintln(&list)
		return err
	})
	if err != nil {
		th.tb.Fatal(err)
	}
	return list.String()
}

// wantVersion checks the files of the last version, line by line.
func (th *thread) wantVersion(lines ...string) {
	th.tb.Helper()
	if got, want := th.version(), strings.Join(lines, "\n")+"\n"; got != want {
		th.tb.Errorf("the version is\n%swant\n%s", got, want)
	}
}

func TestMountHome(t *testing.T) {
	t.Parallel()
	m := openMaker(t, Config{VolumeDir: diskDir(t)})
	th := newThread(t, map[string]string{"old/deep/f": "x\n", "read": "only\n", "gone": "x\n", "linked": "x\n"})
	if err := errors.Join(os.Chmod(th.lower, 0o750), os.Chmod(th.lower+"/read", 0o400)); err != nil {
		t.Fatal(err)
	}
	th.call(m, program(t, "bash", `
stat -c '%n %a %u %g' . old/deep read; cat read; find . ! -user 1000 -o ! -group 1000 | wc -l
ls -A; grep -c ' /home/baponi overlay rw,nosuid,nodev' /proc/mounts
echo more >> old/deep/f; mv old new; ln linked second; rm gone; mkdir empty; touch -d @86400.5 read
chmod 600 read; python3 -c "import os; os.setxattr('new', 'user.x', b'y'); os.setxattr('read', 'user.z', b'z')"; chmod 700 .`)).want(t, jail.Exited, `. 750 1000 1000
old/deep 755 1000 1000
read 400 1000 1000
only
0
gone
linked
old
read
1
`)
	th.wantVersion(`drwx------ 0:0 "."`, `drwxr-xr-x 0:0 "./empty"`, `-rw-r--r-- 0:0 "./linked" 2 "x\n"`,
		`drwxr-xr-x 0:0 "./new"`,
		`drwxr-xr-x 0:0 "./new/deep"`, `-rw-r--r-- 0:0 "./new/deep/f" 1 "x\nmore\n"`, `-rw------- 0:0 "./read" 1 "only\n"`,
		`-rw-r--r-- 0:0 "./second" 2 "x\n"`)
	th.call(m, program(t, "bash", `
[ linked -ef second ] && stat -c '%a %Y' read
python3 -c "import os; print(os.getxattr('new', 'user.x'), os.getxattr('read', 'user.z'))"`)).want(
		t, jail.Exited, "600 86400\nb'y' b'z'")
	m.nothingLeft(t)
}

// The home is mounted at other paths too, and what is written there is in it. Links that a program has
// left are not followed.
func TestBindHome(t *testing.T) {
	t.Parallel()
	m := openMaker(t, Config{VolumeDir: diskDir(t)})
	th := newThread(t, map[string]string{".tmp/kept": "kept\n", "f": "file\n"})
	if err := errors.Join(os.Chmod(th.lower+"/.tmp", 0o1777|os.ModeSticky), os.Symlink("/etc", th.lower+"/link"),
		os.Symlink(".tmp", th.lower+"/inside")); err != nil {
		t.Fatal(err)
	}
	for _, prewarmed := range []bool{false, true} {
		spec := th.spec()
		if prewarmed {
			spec = prewarmSpec(t, "bash")
			spec.MountHomeLater = true
		}
		j := prepare(t, m, spec)
		if prewarmed {
			if err := j.MountHome(t.Context(), th); err != nil {
				t.Fatal(err)
			}
		}
		for _, dir := range []string{"link", "inside", "f", "../tmp", "/etc", "missing"} {
			if err := j.BindHome(t.Context(), dir, "/tmp"); err == nil {
				t.Errorf("%s was mounted", dir)
			}
		}
		if err := errors.Join(j.BindHome(t.Context(), ".tmp", "/tmp"),
			j.BindHome(t.Context(), ".", proto.ContainerData)); err != nil {
			t.Fatal(err)
		}
		r := runIn(t, j, program(
			t, "bash", `cat /tmp/kept /mnt/data/f; echo more >> /tmp/kept; echo new > /mnt/data/new; cat new .tmp/kept
stat -c '%a %u' /tmp; grep -c ' \(/tmp\|/mnt/data\) overlay rw,nosuid,nodev' /proc/mounts; touch /mnt/x`))
		r.want(t, jail.Exited, "kept\nfile\nnew\nkept\nmore\n1777 1000\n2\n")
		if r.ExitCode != 1 {
			t.Errorf("%+v", r.Outcome)
		}
		th.close()
	}
	m.nothingLeft(t)
}

// What one call installs is found by the next call. So are files beside the program, whose own file
// may have any name.
func TestNextCallFindsModules(t *testing.T) {
	t.Parallel()
	m := openMaker(t, Config{VolumeDir: diskDir(t)})
	th := newThread(t, map[string]string{"main.py": "kept", "main.js": "kept"})
	th.call(m, homeProgram(t, "python", ".main.py", `
import os, site, sys
for d in (site.getusersitepackages(), 'node_modules/x', 'node_modules/.bin'): os.makedirs(d)
open(site.getusersitepackages() + '/installed.py', 'w').write('a = 1')
open('beside.py', 'w').write('b = 2')
open('node_modules/x/package.json', 'w').write('{"name": "x", "main": "lib.js"}')
open('node_modules/x/lib.js', 'w').write('module.exports = 3')
open('node_modules/.bin/tool', 'w').write('#!/bin/sh\necho 4')
os.chmod('node_modules/.bin/tool', 0o755)
import installed, beside
print(installed.a, beside.b, sys.argv, __file__)
`)).want(t, jail.Exited, "1 2 ['/home/baponi/.main.py'] /home/baponi/.main.py")
	th.call(m, homeProgram(t, "python", ".main2.py",
		"import installed, beside; print(installed.a, beside.b, open('main.py').read())")).
		want(t, jail.Exited, "1 2 kept")
	th.call(m, homeProgram(t, "node", ".main.js",
		"console.log(require('x'), require('fs').readFileSync('main.js', 'utf8'), require.resolve('x'))")).
		want(t, jail.Exited, "3 kept /home/baponi/node_modules/x/lib.js")
	th.call(m, homeProgram(t, "node", ".main.mjs", "import x from 'x'; console.log(x)")).want(t, jail.Exited, "3")
	th.call(m, homeProgram(t, "bash", "", "tool; cat main.py")).want(t, jail.Exited, "4\nkept")
	r := th.call(m, homeProgram(t, "python", "", "print(1)"))
	if r.Kind != jail.StartFailed || r.Step != "write /home/baponi/main.py" || r.Detail != "file exists" {
		t.Errorf("a program in the place of a file of the home: %+v", r.Outcome)
	}
}

// A home that is mounted later has the limits of any other home, whatever its lower directory
// holds.
func TestLimitsOfHomeMountedLater(t *testing.T) {
	t.Parallel()
	m := openMaker(t, Config{VolumeDir: diskDir(t)})
	th := newThread(t, map[string]string{"old": strings.Repeat("x", 9<<20), "d/f": "x"})
	spec := th.spec()
	spec.HomeBytes, spec.Inodes = 20<<20, 300
	const slack = home.OwnBytes
	runProgram(t, m, spec, program(t, "python", errnos+`
def fill(name):
    with open(name, 'wb', 0) as f:
        while True: f.write(bytes(1 << 14))
def inodes():
    for i in range(1000): os.mkdir(f'{i}'); made.append(i)
made = []
print(no(fill, 'x'), 20 << 20 <= os.stat("x").st_size + (1 << 14) <= (20 << 20) + `+strconv.Itoa(slack)+`)
os.unlink('x')
print(no(os.truncate, 'old', 1 << 20), no(fill, 'y'), 19 << 20 <= os.stat('y').st_size + (1 << 14) <= (19 << 20) + `+strconv.Itoa(slack)+`)
os.unlink('y')
print(no(inodes), 300 - 2 <= len(made) <= 300 - 2 + `+strconv.Itoa(home.OwnInodes)+`)
print(no(os.posix_fallocate, os.open('old', os.O_RDWR), 0, 30 << 20))
`)).want(t, jail.Exited, "ENOSPC True\ndone ENOSPC True\nENOSPC True\nENOSPC")
	if err := th.save(); err != nil {
		t.Fatal(err)
	}
	// The next call has the full limit again.
	runProgram(t, m, spec, program(t, "bash", "head -c 20M /dev/zero > new && stat -c %s new")).want(
		t, jail.Exited, "20971520")
}

// What a program leaves can be read, however the program ends.
func TestKilledJailLeavesTheHome(t *testing.T) {
	m := openMaker(t, Config{VolumeDir: diskDir(t)})
	left := "drwxr-xr-x 0:0 \".\"\n-rw-r--r-- 0:0 \"./x\" 1 \"left\\n\"\n"
	for name, test := range map[string]struct {
		code    string
		timeout time.Duration
		cancel  bool
		want    jail.Kind
	}{
		"timeout":       {code: "echo left > x; echo up; exec sleep 600", timeout: time.Second, want: jail.TimedOut},
		"cancel":        {code: "echo left > x; echo up; exec sleep 600", timeout: patience, cancel: true, want: jail.Killed},
		"out of memory": {code: "echo left > x; echo up; x=$(yes | tr -d '\\n')", timeout: patience, want: jail.OutOfMemory},
		"by itself":     {code: "echo left > x; echo up; kill -9 $$", timeout: patience, want: jail.Signaled},
		"survivors": {
			code: "echo left > x; exec 9> x2; rm x2; (setsid sleep 600 >&9 &); echo up", timeout: patience,
			want: jail.Exited,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			th := newThread(t, nil)
			spec, out := th.spec(), newLines()
			memory(64)(&spec)
			p := program(t, "bash", test.code)
			p.Timeout, p.Stdout = test.timeout, out
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if test.cancel {
				go func() {
					out.next(t)
					cancel()
				}()
			}
			o, err := prepare(t, m, spec).Run(ctx, p)
			if err != nil || o.Kind != test.want {
				t.Errorf("%+v, %v", o, err)
			}
			if err := th.save(); err != nil {
				t.Fatal(err)
			}
			if got := th.version(); got != left {
				t.Errorf("left\n%s", got)
			}
		})
	}
}

// A home that fails leaves no jail behind. A jail that fails leaves the home to its owner, who can
// close it.
func TestHomeThatFails(t *testing.T) {
	t.Parallel()
	m := openMaker(t, Config{VolumeDir: diskDir(t)})
	var left *os.File
	spec := testSpec()
	spec.Home = homeFunc(func(v jail.Volume, uid, gid int) (*os.File, error) {
		if entries, err := os.ReadDir(v.Path()); err != nil || len(entries) != 0 || uid != gid || uid < m.cfg.UIDs.First {
			t.Errorf("a volume with %v for %d:%d, %v", entries, uid, gid, err)
		}
		var err error
		left, err = os.Create(v.Path() + "/left")
		return nil, errors.Join(errors.New("no luck"), err)
	})
	if _, err := m.Prepare(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "mount the home: no luck") {
		t.Errorf("%v", err)
	}
	if _, err := left.WriteString("x"); !errors.Is(err, unix.EIO) {
		t.Errorf("the volume is still there: %v", err)
	}
	if err := left.Close(); err != nil {
		t.Error(err)
	}
	th := newThread(t, nil)
	spec = th.spec()
	spec.CPU = 1e12
	if _, err := m.Prepare(t.Context(), spec); err == nil {
		t.Error("prepared")
	}
	if _, err := os.Stat(th.volume.Path() + "/upper"); err != nil {
		t.Errorf("the home, which was made, is gone: %v", err)
	}
	th.close()
	if err := prepare(t, m, th.spec()).Close(); err != nil {
		t.Error(err)
	}
	if err := th.save(); err != nil || th.version() != "drwxr-xr-x 0:0 \".\"\n" {
		t.Errorf("of a jail that was closed: %s, %v", th.version(), err)
	}
	m.nothingLeft(t)
}

type homeFunc func(v jail.Volume, uid, gid int) (*os.File, error)

func (f homeFunc) Mount(v jail.Volume, uid, gid int) (*os.File, error) { return f(v, uid, gid) }

// No file in a home works as set-uid or as a device, whatever the home's own mount allows.
func TestHomeIsNosuidAndNodev(t *testing.T) {
	t.Parallel()
	m := openMaker(t, Config{VolumeDir: diskDir(t)})
	var mount *os.File
	var volume jail.Volume
	spec := testSpec()
	spec.Home = homeFunc(func(v jail.Volume, uid, gid int) (*os.File, error) {
		volume = v
		fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
		if err != nil {
			return nil, err
		}
		defer func() { _ = unix.Close(fs) }()
		owned := errors.Join(unix.FsconfigSetString(fs, "uid", strconv.Itoa(uid)),
			unix.FsconfigSetString(fs, "gid", strconv.Itoa(gid)))
		if err := errors.Join(owned, unix.FsconfigCreate(fs)); err != nil {
			return nil, err
		}
		fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		mount = os.NewFile(uintptr(fd), "home")
		return mount, nil
	})
	runProgram(t, m, spec, program(t, "bash", "grep -c ' /home/baponi tmpfs rw,nosuid,nodev' /proc/mounts")).want(
		t, jail.Exited, "1")
	if err := errors.Join(mount.Close(), volume.Close()); err != nil {
		t.Error(err)
	}
}

func TestTryHome(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(diskDir(t), "not", "there")
	m := openMaker(t, Config{VolumeDir: dir})
	if err := m.TryHome(t.Context(), testSpec()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Dir(dir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left: %v", err)
	}
	m.nothingLeft(t)
	if err := openMaker(t, Config{}).TryHome(t.Context(), testSpec()); err == nil ||
		!strings.Contains(err.Error(), "no directory for it on a disk") {
		t.Errorf("%v", err)
	}
}

// Closing a home releases every host resource that it holds.
func TestHomesMountedLaterLeaveNothing(t *testing.T) {
	dir := diskDir(t)
	m := openMaker(t, Config{VolumeDir: dir})
	th := newThread(t, map[string]string{"d/f": "x"})
	once := func() {
		th.call(m, program(t, "bash", "echo more >> d/f; mv d e; mv e d; setsid sleep 600 & echo x")).want(
			t, jail.Exited, "x")
	}
	// The pool and the owners cache what they make.
	held := func() string {
		m.jails.Wait()
		if err := errors.Join(m.closePool(), th.owners.Close()); err != nil {
			t.Fatal(err)
		}
		th.owners = home.Owners{}
		return fmt.Sprint(footprint(t, m))
	}
	once()
	before := held()
	for i := range 30 {
		switch i % 10 {
		case 0:
			if err := prepare(t, m, th.spec()).Close(); err != nil {
				t.Fatal(err)
			}
			th.close()
		case 1:
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := m.Prepare(ctx, th.spec()); err == nil {
				t.Fatal("prepared with a done context")
			}
			th.close()
		default:
			once()
		}
		m.jails.Wait()
	}
	if after := held(); after != before {
		t.Errorf("before %v, after %v", before, after)
	}
	awaitDetached(t, dir)
}

// awaitDetached waits until no loop device uses an image in a directory.
func awaitDetached(t *testing.T, dir string) {
	t.Helper()
	deadline := time.After(patience)
	for tick := time.Tick(time.Millisecond); ; {
		devices := loops(t, dir)
		if len(devices) == 0 {
			return
		}
		select {
		case <-tick: // the kernel detaches it asynchronously
		case <-deadline:
			t.Fatalf("loop devices left: %q", devices)
		}
	}
}

// loops returns the loop devices whose images are in a directory.
func loops(tb testing.TB, dir string) (found []string) {
	tb.Helper()
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		tb.Fatal(err)
	}
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(b), dir) {
			found = append(found, f)
		}
	}
	return found
}
