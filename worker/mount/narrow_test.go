package mount_test

import (
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// A mount below the directory of its connection hides everything beside and above it.
func TestMountBelowItsSlug(t *testing.T) {
	inEachMode(t, func(w *world, mode string) {
		p := unique("narrow", mode)
		w.put(map[string]string{
			p + "/tenants/acme/a/x": "x", p + "/tenants/acme/b": "b", p + "/tenants/acme-corp/s": "s",
			p + "/top": "t",
		})
		m := w.s3("f", p+"/tenants/acme/a")
		m.At = "tenants/acme/a"
		shared, path := w.directory(unique("shared", mode))
		shared.Slug, shared.Prefix, shared.At = "shared", "base/one", "one"
		w.want(w.run(mode, `
import os, errno
print(os.listdir("/data/f"), os.listdir("/data/f/tenants"), os.listdir("/data/f/tenants/acme"), os.listdir("/data/f/tenants/acme/a"), os.listdir("/data/shared"))
print(open("/data/f/tenants/acme/a/x").read())
open("/data/f/tenants/acme/a/new", "w").write("new")
open("/data/shared/one/new", "w").write("new")
def no(f, *a):
    try: f(*a); return "done"
    except OSError as e: return errno.errorcode[e.errno]
for d in "/data", "/data/f", "/data/f/tenants", "/data/f/tenants/acme", "/data/shared":
    print(no(open, d + "/new", "w"), no(os.mkdir, d + "/dir"), no(os.chmod, d, 0o777), no(os.rename, d, d + "2"), oct(os.stat(d).st_mode), os.stat(d).st_uid == os.getuid())
for name in "tenants/acme/b", "tenants/acme-corp/s", "tenants/acme/a/../b", "top": print(no(open, "/data/f/" + name))
print(no(os.rename, "/data/f/tenants/acme/a", "/data/f/tenants/acme/c"), no(os.rmdir, "/data/f/tenants/acme/a"))
`, m, shared), "['tenants'] ['acme'] ['a'] ['x'] ['one']\nx\n"+
			strings.Repeat("EROFS EROFS EROFS EROFS 0o40755 False\n", 5)+strings.Repeat("ENOENT\n", 4)+"EROFS EROFS\n")
		if got := w.object(p + "/tenants/acme/a/new"); got != "new" {
			t.Errorf("the object has %q", got)
		}
		w.wantFile(path+"/base/one/new", "new", 1234)
	})
}

// As many directories as the longest path can have are made.
func TestDeepMount(t *testing.T) {
	w := newWorld(t)
	at := strings.TrimSuffix(strings.Repeat("d/", 256), "/")
	var mounts []proto.Mount
	var slugs []string
	for slug := range strings.SplitSeq("a b c d e f g h", " ") {
		m := w.s3(slug, "p/"+at)
		m.At = at
		mounts, slugs = append(mounts, m), append(slugs, slug)
	}
	w.want(w.run("cold", `
import os
for s in sorted(os.listdir("/data")): print(s, os.listdir("/data/" + s + "/`+at+`"), end=" ")
`, mounts...), strings.Join(slugs, " [] ")+" [] ")
}
