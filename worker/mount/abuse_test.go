package mount_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/doctest"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// attack is a program that tries to leave its part of a storage connection.
type attack struct {
	name   string // appears in docs/reference/attacks.md
	code   string
	stdout string
}

// attacks use the mounts f, of the prefix tenant of a bucket, and shared, of the directory tenant
// beside the directory other. Both have the file own and the directory sub.
func attacks() []attack {
	const both = `
for d in "/data/f", "/data/shared":
    os.chdir(d)
`
	return []attack{
		{
			"names with `..`", both + `
    print(sorted(os.listdir("..")), no(open, "../other/secret"), no(open, "sub/../../../other/secret"), no(open, d + "/../../../../other/secret"))
    print(no(os.rename, "own", "../moved"), no(os.mkdir, "../x"), no(open, "../other/x", "w"))`,
			strings.Repeat("['f', 'shared'] ENOENT ENOENT ENOENT\nEXDEV EROFS ENOENT\n", 2),
		},
		{
			"symbolic links out of it", `
print(no(os.symlink, "/etc/shadow", "/data/f/l"))
os.chdir("/data/shared")
for to in "../other/secret", "../../other/secret", "/proc/1/root/etc/shadow", "/var/tmp": os.symlink(to, "l"); print(no(open, "l"), no(os.listdir, "l")); os.unlink("l")`,
			"EPERM\n" + strings.Repeat("ENOENT ENOENT\n", 2) + "EACCES EACCES\nENOENT ENOENT\n",
		},
		{
			"hard links into and out of it", `
for a in "/data/f/own", "/data/shared/own", "/etc/passwd", os.path.expanduser("~/mine"):
    open(os.path.expanduser("~/mine"), "a").close()
    print(*(no(os.link, a, b + "/l") for b in ("/data/f", "/data/shared/sub", os.path.expanduser("~"))))
    for b in ("/data/shared/sub/l", os.path.expanduser("~/l")):
        if os.path.exists(b): os.unlink(b)`,
			"EPERM EXDEV EXDEV\nEXDEV done EXDEV\nEXDEV EXDEV EXDEV\nEXDEV EXDEV done\n",
		},
		{
			"renames over the border", both + `
    print(no(os.rename, "own", os.path.expanduser("~/x")), no(os.rename, "sub", "/data/x"), no(os.rename, ".", "x") in ("EBUSY", "EINVAL"), no(os.rename, "sub", "sub/x"))
print(no(os.rename, "/data/f/own", "/data/shared/x"))`,
			strings.Repeat("EXDEV EXDEV True EINVAL\n", 2) + "EXDEV\n",
		},
		{
			"descriptors, roots and working directories", both + `
    fd = os.open("sub", os.O_RDONLY)
    print(no(os.listdir, f"/proc/self/fd/{fd}/../../../other"), no(os.open, "../../other", os.O_RDONLY, 0o600, dir_fd=fd), no(os.chroot, "."), no(os.open, "own", os.O_DIRECTORY))
    os.chdir("sub"); print(no(os.listdir, "/proc/self/cwd/../../../other"), no(os.rmdir, d + "/sub/../../shared"))`,
			strings.Repeat("ENOENT ENOENT EPERM ENOTDIR\nENOENT EROFS\n", 2),
		},
		{"handles of files", `
libc = ctypes.CDLL(None, use_errno=True)
for d in b"/data/f", b"/data/shared":
    h = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128)); m = ctypes.c_int()
    libc.name_to_handle_at(-100, d, h, ctypes.byref(m), 0)
    print(libc.open_by_handle_at(os.open(d, os.O_RDONLY), h, 0))`, "-1\n-1\n"},
		{
			"remounting, binding and unmounting", `
libc = ctypes.CDLL(None, use_errno=True)
for d in b"/data", b"/data/f", b"/data/shared":
    print(libc.mount(b"x", d, None, 32, None), libc.mount(b"/", d, None, 4096, None), libc.umount2(d, 2), libc.mount(b"x", d, b"tmpfs", 0, None))`,
			strings.Repeat("-1 -1 -1 -1\n", 3),
		},
		{
			"devices and set-uid programs", `
os.chdir("/data/shared")
print(no(os.mknod, "n", stat.S_IFBLK, os.makedev(254, 0)), no(os.mknod, "n", stat.S_IFCHR, os.makedev(1, 1)), no(os.chown, "own", 0, 0), no(os.chown, "own", os.getuid(), 0))
shutil.copy("/usr/bin/id", "id"); os.chmod("id", 0o6755); print(subprocess.run(["./id", "-u"], capture_output=True, text=True).stdout.strip()); os.unlink("id")
print([l.split()[3].split(",")[1:3] for l in open("/proc/mounts") if l.split()[1].startswith("/data/")])`,
			"EPERM EPERM EOVERFLOW EOVERFLOW\n1000\n[['nosuid', 'nodev'], ['nosuid', 'nodev']]\n",
		},
		{"case and normal forms of names", `
os.chdir("/data/f")
for n in "Name", "name", "\u00e9", "e\u0301", "a b+c%2F&?#", "back\\slash", "*", "-rf", " ": open(n, "w").write(n)
print(all(open(n).read() == n for n in os.listdir(".") if n not in ("own", "sub")), len(os.listdir(".")))
for n in os.listdir("."):
    if n not in ("own", "sub"): os.unlink(n)`, "True 11\n"},
		{"swaps while a path is walked", `
os.chdir("/data/shared"); os.mkdir("t"); os.symlink("/data/shared/../..", "l")
libc = ctypes.CDLL(None)
if os.fork() == 0:
    while True: libc.renameat2(-100, b"t", -100, b"l", 2)
seen = set()
for i in range(3000):
    try: seen.update(os.listdir("t/../other"))
    except OSError: pass
print("secret" in seen)`, "False\n"},
		{"the credentials, the server and its process", `
import glob
env = repr(os.environ)
for f in glob.glob("/proc/*/environ") + ["/proc/mounts", "/proc/self/mountinfo", "/proc/net/unix"]:
    try: env += open(f, errors="replace").read()
    except OSError: pass
print("not-a-secret" in env, "tester" in env, "127.0.0.1" in env, len(glob.glob("/proc/[0-9]*")) < 6)
print(no(open, "/dev/fuse", "r+"), no(os.listdir, "/sys/fs/fuse"))`, "False False False True\nENOENT ENOENT\n"},
		{"files without end", `
os.chdir("/data/f")
print(no(os.truncate, "own", 1 << 62) in ("EFBIG", "EINVAL"))
fs = []
try:
    for i in range(900): f = open(f"many{i}", "wb", buffering=0); fs.append(f); f.write(bytes(1 << 20))
except OSError as e: print(errno.errorcode[e.errno], len(fs) > 50)
for f in fs: os.unlink(f.name)
for f in fs: f.close()
print(open("own").read())`, "True\nENOSPC True\nmine\n"},
	}
}

const prelude = `
import os, errno, ctypes, struct, stat, shutil, subprocess
def no(f, *a, **k):
    try: f(*a, **k); return "done"
    except OSError as e: return errno.errorcode[e.errno]
`

// TestAbuse runs each attack in a jail that is made in each way, or with -short in one, and checks
// that it is contained and
// that the storage beside it is as before.
func TestAbuse(t *testing.T) {
	inEachMode(t, func(w *world, mode string) {
		m, path := w.directory(unique("attacked", mode))
		m.Slug, m.Prefix = "shared", "tenant"
		for _, dir := range []string{"/tenant", "/tenant/sub", "/other"} {
			must(w.t, os.MkdirAll(path+dir, 0o755))
			must(w.t, os.Chown(path+dir, 1234, 1234))
		}
		for _, file := range []string{"/tenant/own", "/other/secret"} {
			must(w.t, os.WriteFile(path+file, []byte("mine"), 0o600))
			must(w.t, os.Chown(path+file, 1234, 1234))
		}
		p := unique("attacked", mode)
		w.put(map[string]string{
			p + "/tenant/own": "mine", p + "/tenant/sub/x": "x", p + "/other/secret": "mine",
			p + "/tenant-2/secret": "mine",
		})
		outer := w.t
		for i, a := range attacks() {
			if testing.Short() && modes[i%len(modes)] != mode {
				continue
			}
			t.Run(mode+"/"+a.name, func(t *testing.T) {
				w.t = t
				defer func() { w.t = outer }()
				w.want(w.run(mode, prelude+a.code, w.s3("f", p+"/tenant"), m), a.stdout)
				for _, name := range []string{"/other/secret", "/tenant-2/secret", "/tenant/own"} {
					if got := w.object(p + name); got != "mine" {
						t.Errorf("the object %s has %q", name, got)
					}
				}
				w.wantFile(path+"/other/secret", "mine", 1234)
				var st unix.Stat_t
				must(t, unix.Stat(path+"/other", &st))
				if st.Nlink != 2 {
					t.Errorf("something was made beside the part of the program")
				}
			})
		}
		w.nothingLeft()
	})
}

// TestAbuseTable checks that the table in docs/reference/attacks.md matches the attacks; `make docs` rewrites
// it.
func TestAbuseTable(t *testing.T) {
	var names []string
	for _, a := range attacks() {
		names = append(names, a.name)
	}
	text := fmt.Sprintf("\n**mounts.** A program stays in its part of a storage connection and never gets the "+
		"credentials.\n\n| attacks | reported as |\n|---|---|\n"+
		"| %s | `success`: nothing happens |\n\n", strings.Join(names, " · "))
	doctest.Compare(t, "../../docs/reference/attacks.md", "<!-- abuse of mounts: written by `make docs` -->\n",
		"<!-- end of abuse of mounts -->\n", text)
}

// TestKeysThatAreNoPaths lists what a hostile server says that it has.
func TestKeysThatAreNoPaths(t *testing.T) {
	w := newWorld(t)
	keys := []string{
		"p/good", "p//double", "p/../up", "p/..", "p/.", "p/a/./b", "other/x", "/p/x", "p/nul\x00",
		"p/" + strings.Repeat("x", 256), "p", "p/sub/", "p/",
		"../p/x", "p/é", "pp/x",
	}
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("list-type") != "2" {
			http.Error(rw, "", http.StatusNotFound)
			return
		}
		_, _ = fmt.Fprint(rw, `<ListBucketResult><EncodingType>url</EncodingType>`)
		for _, k := range keys {
			k = strings.NewReplacer("\x00", "%00", "é", "%C3%A9").Replace(k)
			_, _ = fmt.Fprintf(
				rw, `<Contents><Key>%s</Key><Size>-5</Size></Contents><CommonPrefixes><Prefix>%s/</Prefix></CommonPrefixes>`, k, k)
		}
		_, _ = fmt.Fprint(rw, `</ListBucketResult>`)
	}))
	defer server.Close()
	m := w.s3("f", "p")
	m.S3.Endpoint = server.URL
	r := w.run("cold", `import os; print(sorted(os.listdir("/data/f")))`, m)
	if r.stdout != "['good', 'é']\n" || r.Kind != jail.Exited {
		t.Errorf("got %q, %s", r.stdout, r.stderr)
	}
}

// TestVisibility shows the table of docs/guides/storage.md: when a change is seen.
func TestVisibility(t *testing.T) {
	inEachModeOrOne(t, func(w *world, mode string) {
		p := unique("seen", mode)
		w.put(map[string]string{p + "/a": "old"})
		sync, release := w.signals()
		w.onLine = func(string) {
			// What is not closed is not seen by others. What another client changes is.
			if got := w.object(p + "/open"); got != "absent" {
				w.t.Errorf("a file that is being written was stored: %q", got)
			}
			if got := w.object(p + "/closed"); got != "closed" {
				w.t.Errorf("a file that was closed has %q", got)
			}
			if got := w.object(p + "/synced"); got != "synced" {
				w.t.Errorf("a file that was synced has %q", got)
			}
			w.put(map[string]string{p + "/a": "newer", p + "/b": "created"})
			release()
		}
		w.want(w.run(mode, awaitSignal+`
os.chdir("/data/f")
f = open("open", "w"); f.write("x"); f.flush()
print(open("open").read(), os.path.getsize("open"), "open" in os.listdir("."), end=" ")
open("closed", "w").write("closed")
g = open("synced", "w"); g.write("synced"); g.flush(); os.fsync(g.fileno())
print(open("a").read(), end=" ")
wait()
deadline = time.time() + 60
while (open("a").read(), os.path.exists("b")) != ("newer", True) and time.time() < deadline: time.sleep(0.05)
print(open("a").read(), open("b").read(), "b" in os.listdir("."))
`, w.s3("f", p), sync), "x 1 True old ready\nnewer created True\n")
		w.want(w.run(mode, `print(open("/data/f/open").read(), open("/data/f/closed").read())`, w.s3("f", p)), "x closed\n")
	})
}

// TestMountsOfOneExecution checks that writes to one mount are not seen in another with another
// prefix.
func TestMountsOfOneExecution(t *testing.T) {
	w := newWorld(t)
	mounts := []proto.Mount{w.s3("a", "p/a"), w.s3("b", "p/b"), readOnly(w.s3("all", "p"))}
	w.want(w.run("cold", `
import os
open("/data/a/x", "w").write("a"); open("/data/b/y", "w").write("b")
print(os.listdir("/data/a"), os.listdir("/data/b"), sorted(os.listdir("/data/all")), open("/data/all/a/x").read())`,
		mounts...), "['x'] ['y'] ['a', 'b'] a\n")
}
