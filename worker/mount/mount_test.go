package mount_test

import (
	"maps"
	"os"
	"strings"
	"testing"
)

func TestReadS3(t *testing.T) {
	inEachMode(t, func(w *world, mode string) {
		w.put(map[string]string{"team/a.txt": "hello", "team/sub/b.txt": "deep", "other/c.txt": "secret"})
		w.want(w.run(mode, `
import os
print(sorted(os.listdir("/data")), sorted(os.listdir("/data/files")))
print(open("/data/files/a.txt").read(), open("/data/files/sub/b.txt").read())
print(os.stat("/data/files/a.txt").st_size, oct(os.stat("/data/files/a.txt").st_mode), os.stat("/data/files/sub").st_uid == os.getuid())
`, w.s3("files", "team")), "['files'] ['a.txt', 'sub']\nhello deep\n5 0o100644 True\n")
	})
}

func TestDirectory(t *testing.T) {
	inEachMode(t, func(w *world, mode string) {
		m, path := w.directory(unique("shared", mode))
		m.Slug = "shared"
		m.Prefix = "team/a"
		w.want(w.run(mode, `
import os
open("/data/shared/x", "w").write("written")
os.makedirs("/data/shared/d/e")
print(open("/data/shared/x").read(), os.stat("/data/shared/x").st_uid == os.getuid(), os.listdir("/data/shared"))
`, m), "written True ['d', 'x']\n")
		w.wantFile(path+"/team/a/x", "written", 1234)
	})
}

func TestWriteS3(t *testing.T) {
	inEachModeOrOne(t, func(w *world, mode string) {
		p := unique("w", mode)
		w.put(map[string]string{p + "/old": "0123456789", p + "/gone": "x", p + "/log": "one\n"})
		w.want(w.run(mode, `
import os, mmap, shutil
os.chdir("/data/f")
open("new", "w").write("new content")
print(open("new").read())                      # in the same execution
with open("log", "a") as f: f.write("two\n")
with open("old", "r+b") as f:
    f.seek(3); f.write(b"XY")
with open("big", "wb") as f:                   # more than a part
    for i in range(40): f.write(bytes([i]) * (1 << 20))
os.truncate("old", 8)
os.unlink("gone")
os.mkdir("d"); open("d/inner", "w").write("i")
os.rename("new", "d/renamed")
with open("tmp~", "w") as f: f.write("safe"); f.flush(); os.fsync(f.fileno())
os.replace("tmp~", "final")
os.mkdir("empty"); os.rename("empty", "empty2"); os.mkdir("none"); os.rmdir("none")
shutil.copy2("final", "copied"); os.chmod("copied", 0o700)
with open("mapped", "w+b") as f:
    f.truncate(4096)
    m = mmap.mmap(f.fileno(), 4096)
m[0:5] = b"hello"; m.close()
r = mmap.mmap(os.open("mapped", os.O_RDONLY), 5, prot=mmap.PROT_READ); print(r[:])
print(sorted(os.listdir(".")), os.listdir("d"), open("old").read(), open("log").read())
with open("unlinked", "w+") as f:
    f.write("kept"); os.unlink("unlinked"); f.seek(0); print(f.read())
`, w.s3("f", p)), "new content\nb'hello'\n['big', 'copied', 'd', 'empty2', 'final', 'log', 'mapped', 'old'] "+
			"['inner', 'renamed'] 012XY567 one\ntwo\n\nkept\n")
		for name, content := range map[string]string{
			"new": "absent", "d/renamed": "new content", "d/inner": "i", "log": "one\ntwo\n", "old": "012XY567",
			"gone":  "absent",
			"final": "safe", "tmp~": "absent", "copied": "safe", "mapped": "hello" + strings.Repeat("\x00", 4091),
			"unlinked": "absent",
		} {
			if got := w.object(p + "/" + name); got != content {
				t.Errorf("%s has %.20q, want %.20q", name, got, content)
			}
		}
		big := w.object(p + "/big")
		if len(big) != 40<<20 || big[39<<20] != 39 {
			t.Errorf("the large object has %d bytes", len(big))
		}
	})
}

func TestReadOnlyMounts(t *testing.T) {
	w := newWorld(t)
	w.put(map[string]string{"ro/a": "a"})
	m, path := w.directory("shared")
	must(t, os.WriteFile(path+"/a", []byte("a"), 0o600))
	must(t, os.Chown(path+"/a", 1234, 1234))
	w.want(w.run("cold", `
import os, errno
for d in "/data/f/", "/data/shared/":
    for act in (lambda: open(d + "a", "w"), lambda: open(d + "new", "w"), lambda: os.unlink(d + "a"), lambda: os.mkdir(d + "x"),
                lambda: os.rename(d + "a", d + "b"), lambda: os.chmod(d + "a", 0o777), lambda: os.truncate(d + "a", 0)):
        try: act(); print("allowed")
        except OSError as e: print(errno.errorcode[e.errno], end=" ")
    print(open(d + "a").read())
try: os.mkdir("/data/x")
except OSError as e: print(errno.errorcode[e.errno])
`, readOnly(w.s3("f", "ro")), readOnly(m)),
		strings.Repeat(strings.Repeat("EROFS ", 7)+"a\n", 2)+"EROFS\n")
}

func TestRefusedOperations(t *testing.T) {
	w := newWorld(t)
	w.put(map[string]string{"p/a": "a", "p/full/x": "x"})
	w.want(w.run("cold", `
import os, errno, stat
os.chdir("/data/f")
for act in (lambda: os.symlink("/etc/passwd", "l"), lambda: os.link("a", "b"), lambda: os.mkfifo("p"), lambda: os.mknod("n", stat.S_IFCHR, os.makedev(1, 3)),
            lambda: os.chown("a", 0, 0), lambda: os.rename("full", "moved"), lambda: os.rmdir("full"), lambda: os.setxattr("a", "user.x", b""),
            lambda: os.rename("a", "/data/g/a"), lambda: os.link("a", "/data/g/a"), lambda: os.rename("a", os.path.expanduser("~") + "/a"),
            lambda: open("x" * 256, "w"), lambda: os.makedirs("/".join(["a" * 200] * 6)), lambda: open("missing")):
    try: act(); print("allowed")
    except OSError as e: print(errno.errorcode[e.errno])
`, w.s3("f", "p"), w.s3("g", "q")),
		"EPERM\nEPERM\nEPERM\nEPERM\nEPERM\nEXDEV\nENOTEMPTY\nENOTSUP\n"+
			"EXDEV\nEXDEV\nEXDEV\nENAMETOOLONG\nENAMETOOLONG\nENOENT\n")
}

// A name that no key can have is refused: another one would stand for it, and two files could become
// one object.
func TestNamesThatAreNoKeys(t *testing.T) {
	w := newWorld(t)
	w.put(map[string]string{"p/a": "a", "p/d/x": "x", "p/r\ufffd.csv": "other"})
	w.want(w.run("cold", `
import os, errno
os.chdir(b"/data/f")
for name in b"r\xe9.csv", b"\xed\xa0\x80", b"line\n", b"\x1b[2J", b"\x7f":
    for act in (lambda: open(name, "w"), lambda: os.mkdir(name), lambda: os.rename(b"a", name), lambda: os.stat(name)):
        try: act(); print("allowed", end=" ")
        except OSError as e: print(errno.errorcode[e.errno], end=" ")
    print()
print(sorted(os.listdir(".")))
`, w.s3("f", "p")),
		strings.Repeat("EILSEQ EILSEQ EILSEQ ENOENT \n", 2)+strings.Repeat("EINVAL EINVAL EINVAL ENOENT \n", 3)+
			"['a', 'd', 'r\ufffd.csv']\n")
}

// Looking up a name takes one request for an object and one for a directory.
func TestRequestsOfLookUps(t *testing.T) {
	w := newWorld(t)
	w.put(map[string]string{"p/a": "a"})
	front := newFront(t, w.endpoint)
	m := w.s3("f", "p")
	m.S3.Endpoint = front.URL
	for program, want := range map[string]map[string]int{
		"import os; print(os.path.exists('/data/f/a'))":   {"HEAD": 1, "LIST": 1},
		"import os; print(os.path.exists('/data/f/no'))":  {"HEAD": 1, "LIST": 1},
		"print(open('/data/f/a').read())":                 {"HEAD": 1, "LIST": 1, "GET": 1},
		"open('/data/f/new', 'w').write('x'); print('w')": {"HEAD": 1, "LIST": 1, "PUT": 1},
	} {
		if r := w.run("cold", program, m); r.stdout == "" || r.finish != nil {
			t.Errorf("%s: %+v", program, r)
		}
		if got := front.taken(); !maps.Equal(got, want) {
			t.Errorf("%s: %v, want %v", program, got, want)
		}
	}
}

func TestSpoolIsBounded(t *testing.T) {
	w := newWorld(t)
	w.want(w.run("cold", `
import os, errno
os.chdir("/data/f")
try:
    with open("large", "wb") as f:
        while True: f.write(bytes(1 << 20))
except OSError as e: print(errno.errorcode[e.errno])
try: os.truncate("large", 1 << 40)
except OSError as e: print(errno.errorcode[e.errno])
os.unlink("large")
with open("fits", "wb") as f: f.write(bytes(60 << 20))
a, b = open("a", "wb"), open("b", "wb")
a.write(bytes(40 << 20))
try:
    b.write(bytes(40 << 20)); b.flush()
except OSError as e: print(errno.errorcode[e.errno])
`, w.s3("f", "p")), "EFBIG\nEFBIG\nENOSPC\n")
}
