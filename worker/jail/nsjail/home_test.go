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

	"github.com/bullpen-run/bullpen/worker/home"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// thread is a home that lasts: its last version is the directory lower. One
// program runs in it at a time.
type thread struct {
	tb     testing.TB
	owners home.Owners
	lower  string

	// Of the last execution.
	overlay *home.Overlay
	mount   *os.File
	volume  jail.Volume

	mu      sync.Mutex
	objects map[home.Digest][]byte
}

// newThread makes one whose first version has these files.
func newThread(tb testing.TB, files map[string]string) *thread {
	tb.Helper()
	th := &thread{tb: tb, lower: filepath.Join(diskDir(tb), "home"), objects: map[home.Digest][]byte{}}
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
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
			tb.Fatal(err)
		}
	}
	return th
}

// Mount is jail.Home's.
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

// close gives back what Mount made.
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

// spec is testSpec with the thread's home.
func (th *thread) spec() jail.Spec {
	s := testSpec()
	s.Home = th
	return s
}

// commit makes what a program left the next version.
func (th *thread) commit() {
	th.tb.Helper()
	var layer bytes.Buffer
	limits := home.Limits{Bytes: 1 << 40, Entries: 1 << 21}
	if _, err := th.overlay.Diff(context.Background(), &layer, limits, th.store); err != nil {
		th.tb.Fatal(err)
	}
	th.close()
	if err := home.Apply(context.Background(), th.lower, &layer, limits, th.fetch); err != nil {
		th.tb.Fatal(err)
	}
}

func (th *thread) store(_ context.Context, digest home.Digest, size int64, content io.ReaderAt) error {
	b := make([]byte, size)
	if _, err := content.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	th.mu.Lock()
	defer th.mu.Unlock()
	th.objects[digest] = b
	return nil
}

func (th *thread) fetch(_ context.Context, digest home.Digest, _ int64) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(th.objects[digest])), nil
}

// call runs a program in the thread, and commits.
func (th *thread) call(m *Maker, p jail.Program) result {
	th.tb.Helper()
	r := runProgram(th.tb, m, th.spec(), p)
	th.commit()
	return r
}

// version lists what the last version has.
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
		st := info.Sys().(*syscall.Stat_t)
		name := "." + strings.TrimPrefix(path, th.lower)
		_, _ = fmt.Fprintf(&list, "%v %d:%d %q", info.Mode(), st.Uid, st.Gid, name)
		switch info.Mode().Type() {
		case 0:
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

// wantVersion checks what the last version has, line by line.
func (th *thread) wantVersion(lines ...string) {
	th.tb.Helper()
	if got, want := th.version(), strings.Join(lines, "\n")+"\n"; got != want {
		th.tb.Errorf("the version is\n%swant\n%s", got, want)
	}
}

func TestHomeIsBrought(t *testing.T) {
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
	th.wantVersion(`drwx------ 0:0 "."`, `drwxr-xr-x 0:0 "./empty"`, `-rw-r--r-- 0:0 "./linked" 2 "x\n"`, `drwxr-xr-x 0:0 "./new"`,
		`drwxr-xr-x 0:0 "./new/deep"`, `-rw-r--r-- 0:0 "./new/deep/f" 1 "x\nmore\n"`, `-rw------- 0:0 "./read" 1 "only\n"`,
		`-rw-r--r-- 0:0 "./second" 2 "x\n"`)
	th.call(m, program(t, "bash", `
[ linked -ef second ] && stat -c '%a %Y' read
python3 -c "import os; print(os.getxattr('new', 'user.x'), os.getxattr('read', 'user.z'))"`)).want(t, jail.Exited, "600 86400\nb'y' b'z'")
	m.nothingLeft(t)
}

// What is installed in one call is found in the next, and so is what the program
// finds beside itself; the program's own file may have any name.
func TestNextCallFindsModules(t *testing.T) {
	m := openMaker(t, Config{VolumeDir: diskDir(t)})
	source := func(language, file, code string) jail.Program {
		p, err := jail.Source{Language: language, Code: code, TraceID: "trc_test", Home: DefaultHome, File: file}.Program()
		if err != nil {
			t.Fatal(err)
		}
		p.Timeout = patience
		return p
	}
	th := newThread(t, map[string]string{"main.py": "kept", "main.js": "kept"})
	th.call(m, source("python", ".main.py", `
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
	th.call(m, source("python", ".main2.py", "import installed, beside; print(installed.a, beside.b, open('main.py').read())")).
		want(t, jail.Exited, "1 2 kept")
	th.call(m, source("node", ".main.js", "console.log(require('x'), require('fs').readFileSync('main.js', 'utf8'), require.resolve('x'))")).
		want(t, jail.Exited, "3 kept /home/baponi/node_modules/x/lib.js")
	th.call(m, source("node", ".main.mjs", "import x from 'x'; console.log(x)")).want(t, jail.Exited, "3")
	th.call(m, source("bash", "", "tool; cat main.py")).want(t, jail.Exited, "4\nkept")
	r := th.call(m, source("python", "", "print(1)"))
	if r.Kind != jail.StartFailed || r.Step != "write /home/baponi/main.py" || r.Detail != "file exists" {
		t.Errorf("a program in the place of a file of the home: %+v", r.Outcome)
	}
}

// A home has room for just as much as one that is not brought, whatever is below.
func TestLimitsOfABroughtHome(t *testing.T) {
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
print(no(fill, 'x'), 20 << 20 <= os.stat('x').st_size + (1 << 14) <= (20 << 20) + `+strconv.Itoa(slack)+`)
os.unlink('x')
print(no(os.truncate, 'old', 1 << 20), no(fill, 'y'), 19 << 20 <= os.stat('y').st_size + (1 << 14) <= (19 << 20) + `+strconv.Itoa(slack)+`)
os.unlink('y')
print(no(inodes), 300 - 2 <= len(made) <= 300 - 2 + `+strconv.Itoa(home.OwnInodes)+`)
print(no(os.posix_fallocate, os.open('old', os.O_RDWR), 0, 30 << 20))
`)).want(t, jail.Exited, "ENOSPC True\ndone ENOSPC True\nENOSPC True\nENOSPC")
	th.commit()
	// The next call has the same room again.
	runProgram(t, m, spec, program(t, "bash", "rm main.py; head -c 20M /dev/zero > new && ls | wc -l")).want(t, jail.Exited, "")
}
