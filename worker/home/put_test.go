package home_test

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/worker/home"
)

// TestPut puts files into a home, and expects them there for the program and in the next version.
// The script runs as the tenant and fails if the home is not as expected.
func TestPut(t *testing.T) {
	shared := newThread(t)
	outside := t.TempDir()
	check(t, os.Chmod(outside, 0o777), os.WriteFile(outside+"/f", []byte("outside"), 0o666))
	before := digest(t, outside)
	when := time.Unix(1_234_567_890, 123_456_789)
	for _, test := range []struct{ name, before, path, script string }{
		{"new", ":", "f", "echo more >> f"},
		{
			"new with parents", ":", "a/b/f",
			`[ "$(stat -c '%a %u %g' a a/b | uniq)" = "755 54321 54321" ]; mv a/b c; echo x > c/g`,
		},
		{"names of many kinds", ":", "\xff\n/-rf", "[ -e $'\\xff\\n/-rf' ]"},
		{"in an old directory", "mkdir -m 750 d; echo x > d/g", "d/f", `[ "$(stat -c %a d)" = 750 ]; cat d/g`},
		{"in a directory without rights", "mkdir d; chmod 000 d", "d/f", `[ "$(stat -c %a d)" = 0 ]`},
		{"over a file", "echo old > f; chmod 400 f", "f", "echo more >> f"},
		{"over one of two names", "echo old > f; ln f g", "f", "[ $(cat g) = old ]; [ $(stat -c %h f) = 1 ]"},
		{"over a symlink", "ln -s " + outside + "/f f", "f", "[ ! -L f ]"},
		{"over a dangling symlink", "ln -s nowhere f", "f", "[ ! -L f ]; [ ! -e nowhere ]"},
		{"over a tree", "mkdir -p f/g/h; echo x > f/g/i; ln -s / f/l; chmod 500 f/g", "f", "[ -f f ]"},
		{"a file in the way", "echo x > f; ln f g", "f/g/h", "[ $(cat g) = x ]"},
		{"a symlink in the way", "ln -s " + outside + " l", "l/f", "[ -d l ]; [ ! -L l ]"},
		{"a symlink within the home", "mkdir d; echo x > d/f; ln -s d l", "l/f", "[ ! -L l ]; [ $(cat d/f) = x ]"},
		{"a symlink further up", "mkdir d; ln -s ../.. d/up", "d/up/a/f", "[ ! -L d/up ]"},
	} {
		for what, content := range map[string]string{"empty": "", "small": "new", "large": strings.Repeat("large", mib)} {
			if what != "small" && test.name != "new" {
				continue
			}
			t.Run(test.name+" "+what, func(t *testing.T) {
				th := &thread{tb: t, owner: shared.owner, volumes: shared.volumes, objects: objects{}, lower: newDir(t)}
				th.run(test.before)
				o, mount := th.open()
				check(t, o.Put(mount, test.path, int64(len(content)), strings.NewReader(content), when))
				f := pathOf(mount) + "/" + test.path
				if b := must[[]byte](t)(os.ReadFile(f)); string(b) != content {
					t.Errorf("got %d bytes, want %d", len(b), len(content))
				}
				var st unix.Stat_t
				check(t, unix.Lstat(f, &st))
				if st.Mode != unix.S_IFREG|0o644 || st.Uid != tenant || st.Gid != tenant || !time.Unix(st.Mtim.Unix()).Equal(when) {
					t.Errorf("status %+v", st)
				}
				dir, _ := th.runIn(o, mount, test.script)
				if strings.Contains(test.script, "mv ") || strings.Contains(test.script, "more") {
					return
				}
				if b := must[[]byte](t)(os.ReadFile(filepath.Join(dir, test.path))); string(b) != content {
					t.Errorf("the version has %q", b)
				}
			})
		}
	}
	if digest(t, outside) != before {
		t.Error("a symlink was followed")
	}
}

func TestPutRejects(t *testing.T) {
	th := newThread(t)
	o, mount := th.open()
	deep := strings.Repeat("d/", layer.MaxDepth-1) + "f"
	for _, path := range []string{
		"", "/", "/f", "f/", "a//f", ".", "./f", "..", "../f", "a/../f", "a/..", "a\x00", strings.Repeat("n", 256),
		"d/" + deep,
	} {
		if err := o.Put(mount, path, 1, strings.NewReader("x"), time.Now()); err == nil {
			t.Errorf("%.300q: accepted", path)
		}
	}
	broken := errors.New("broken")
	for name, test := range map[string]struct {
		size    int64
		content io.Reader
	}{
		"short":             {3, strings.NewReader("xx")},
		"long":              {3, strings.NewReader("xxxx")},
		"negative":          {-1, strings.NewReader("")},
		"huge":              {layer.MaxFileSize + 1, strings.NewReader("")},
		"broken":            {3, iotest.ErrReader(broken)},
		"broken at the end": {3, io.MultiReader(strings.NewReader("xxx"), iotest.ErrReader(broken))},
	} {
		err := o.Put(mount, "f", test.size, test.content, time.Now())
		if err == nil || strings.Contains(name, "broken") != errors.Is(err, broken) {
			t.Errorf("%s: %v", name, err)
		}
	}
	check(t, o.Put(mount, deep, 1, strings.NewReader("x"), time.Now()))
	diff(t, o, th.objects) // as deep as a layer can be
}

// TestPutTemporary creates a file that is not part of the home unless the program changes it.
func TestPutTemporary(t *testing.T) {
	shared := newThread(t)
	const code = "print('hello')\n"
	for _, test := range []struct{ name, script, after string }{
		{"untouched", "cat main.py", ""},
		{"with other files", "echo x > other", "other"},
		{"copied", "cp main.py other", "other"},
		{"other mode and time", "chmod 700 main.py; touch -d 2001-01-01 main.py", ""},
		{"written to", "echo more >> main.py", "main.py"},
		{"same length", "printf P | dd of=main.py conv=notrunc status=none", "main.py"},
		{"truncated", ": > main.py", "main.py"},
		{"removed", "rm main.py", ""},
		{"renamed", "mv main.py other", "other"},
		{"renamed and back", "mv main.py other; mv other main.py", ""},
		{"second name", "ln main.py other", "main.py other"},
		{"second name for a while", "ln main.py other; rm other", ""},
		{"second name alone", "ln main.py other; rm main.py", "other"},
		// Most file systems reuse the inode number for the next file.
		{"created again", "cp main.py copy; rm main.py; cat copy > main.py; rm copy", "main.py"},
		{"created again at once", "code=$(cat main.py; echo .); rm main.py; printf %s \"${code%.}\" > main.py", "main.py"},
		{"replaced", "cp main.py new; mv new main.py", "main.py"},
		{"became a directory", "rm main.py; mkdir main.py", "main.py"},
		{"became a symlink", "mv main.py other; ln -s other main.py", "main.py other"},
		{"became a symlink to nothing", "rm main.py; ln -s /etc/passwd main.py", "main.py"},
		{"became a FIFO", "rm main.py; mkfifo main.py", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			th := &thread{tb: t, owner: shared.owner, volumes: shared.volumes, objects: objects{}, lower: newDir(t)}
			th.run("touch -d '2001-01-01 00:00:00.123456789' .")
			o, mount := th.open()
			temporary := must[*home.Temporary](t)(o.PutTemporary(mount, "main.py", []byte(code)))
			shell(t, mount, "[ \"$(stat -c '%a %u' main.py)\" = '644 54321' ]; "+test.script)
			var left, kept unix.Stat_t
			check(t, unix.Stat(pathOf(mount), &left), mount.Close(), o.RemoveTemporary(temporary))
			l, stats := diff(t, o, th.objects)
			check(t, apply(th.lower, l, th.objects), unix.Stat(th.lower, &kept))
			var names []string
			for _, e := range must[[]os.DirEntry](t)(os.ReadDir(th.lower)) {
				names = append(names, e.Name())
			}
			if got := strings.Join(names, " "); got != test.after {
				t.Errorf("the home has %q, want %q", got, test.after)
			}
			if left.Mtim != kept.Mtim {
				t.Errorf("the modification time of the home is %v, want %v", kept.Mtim, left.Mtim)
			}
			if test.name == "untouched" && !stats.Unchanged {
				t.Errorf("the home has changed: %+v", stats)
			}
		})
	}
	for name, script := range map[string]string{
		"file": "echo mine > main.py", "empty file": ": > main.py", "directory": "mkdir main.py",
		"symlink":          "ln -s other main.py; : > other",
		"dangling symlink": "ln -s nowhere main.py",
	} {
		t.Run("existing "+name, func(t *testing.T) {
			th := &thread{tb: t, owner: shared.owner, volumes: shared.volumes, objects: objects{}, lower: newDir(t)}
			th.run(script)
			o, mount := th.open()
			if _, err := o.PutTemporary(mount, "main.py", []byte(code)); !errors.Is(err, fs.ErrExist) {
				t.Errorf("existing name: %v", err)
			}
			if _, stats := th.runIn(o, mount, ":"); !stats.Unchanged {
				t.Errorf("the home has changed: %+v", stats)
			}
		})
	}
}

// Whatever a program has left in the place of the directory for /tmp, every program can use it. A home
// that has one already is not changed.
func TestMakeTmp(t *testing.T) {
	shared := newThread(t)
	for name, before := range map[string]string{
		"new": ":", "a directory": "mkdir .tmp; echo x > .tmp/f", "closed": "mkdir .tmp; chmod 000 .tmp",
		"a file": "echo x > .tmp", "a link": "mkdir d; ln -s d .tmp",
	} {
		t.Run(name, func(t *testing.T) {
			th := &thread{tb: t, owner: shared.owner, volumes: shared.volumes, objects: objects{}, lower: newDir(t)}
			th.run(before)
			for _, again := range []bool{false, true} {
				o, mount := th.open()
				check(t, o.MakeTmp(mount, ".tmp"))
				var st unix.Stat_t
				check(t, unix.Lstat(pathOf(mount)+"/.tmp", &st))
				if st.Mode != unix.S_IFDIR|unix.S_ISVTX|0o777 || st.Uid != tenant || st.Gid != tenant {
					t.Errorf("status %+v", st)
				}
				if _, err := os.Stat(pathOf(mount) + "/.tmp/f"); name == "a directory" && err != nil {
					t.Error(err)
				}
				if _, stats := th.runIn(o, mount, ":"); again && stats.Growth != (home.Usage{}) {
					t.Errorf("the home grew by %+v", stats.Growth)
				}
			}
		})
	}
}
