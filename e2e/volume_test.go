package e2e

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
)

// volumes are the volumes of an organisation.
type volumes struct {
	*api   // of a global administrator
	org    string
	keyIDs []string
}

func (v *volumes) must(r *reply, status int, words ...string) *reply {
	v.t.Helper()
	if r.status != status {
		v.t.Fatalf("got %s, want %d", r, status)
	}
	for _, word := range words {
		if !strings.Contains(string(r.body), word) {
			v.t.Errorf("%q is not in %s", word, r)
		}
	}
	return r
}

func (v *volumes) path(slug string, rest ...string) string {
	return strings.Join(append([]string{connectionsPath, slug}, rest...), "/") + "?org=" + v.org
}

func (v *volumes) create(slug, quota string) {
	v.t.Helper()
	v.must(v.do(http.MethodPost, connectionsPath, request{"org": v.org, "slug": slug, "kind": "volume", "bytes": quota}),
		http.StatusCreated)
}

// key returns a client with a new key that has the mounts.
func (v *volumes) key(mounts ...request) *api {
	v.t.Helper()
	var made struct{ ID, Key string }
	v.must(v.do(http.MethodPost, "/v1/admin/keys", request{"name": "n", "org": v.org, "plan": "pro", "mounts": mounts}),
		http.StatusCreated).into(v.t, &made)
	v.keyIDs = append(v.keyIDs, made.ID)
	return v.with(made.Key)
}

// newVolumes creates an organisation.
func newVolumes(a *api, org string) *volumes {
	v := &volumes{api: a, org: org}
	v.key() // creates the organisation
	return v
}

// testVolumes runs programs that share volumes.
func testVolumes(t *testing.T, a *api) {
	v := newVolumes(a, "volumes")
	v.create("work", "64MiB")
	writer, reader := v.key(request{"connection": "work"}), v.key(request{"connection": "work", "read_only": true})
	reader.ended(reader.submit(python("import os; print(os.listdir('/data/work'))"))).succeeded(t, "[]\n")

	writer.ended(writer.submit(python(`
import fcntl, mmap, os, sqlite3, subprocess
os.chdir("/data/work")
for mode in "wal", "delete":
    db = sqlite3.connect(mode + ".db")
    print(db.execute("pragma journal_mode=" + mode).fetchone()[0], db.execute("pragma mmap_size=1048576").fetchone()[0])
    db.execute("create table t (x)")
    for i in range(100):
        with db: db.execute("insert into t values (?)", (i,))
    if mode == "delete": db.close()
def git(*args): return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd="repo", check=True, capture_output=True, text=True).stdout
os.mkdir("repo")
git("init")
open("repo/file", "w").write("content")
git("add", ".")
git("commit", "-m", "first")
with open("mapped", "wb+") as f:
    f.truncate(8192)
    with mmap.mmap(f.fileno(), 8192) as m: m[4096:4099] = b"abc"
    fcntl.flock(f, fcntl.LOCK_EX)
open("log", "a").write("one\n")
open("new", "w").write("renamed"); os.rename("new", "old")
`))).succeeded(t, "wal 1048576\ndelete 1048576\n")
	check := `
import os, sqlite3, subprocess
os.chdir("/data/work")
for mode in "wal", "delete":
    db = sqlite3.connect("file:" + mode + ".db?mode=rw", uri=True)
    print(db.execute("select count(*), sum(x) from t").fetchone(), db.execute("pragma integrity_check").fetchone()[0])
    with db: db.execute("insert into t values (1000)")
    db.close()
git = lambda *args: subprocess.run(["git", *args], cwd="repo", check=True, capture_output=True, text=True).stdout.strip()
print(git("log", "--format=%s"), git("fsck", "--strict"), git("status", "--porcelain"))
print(open("mapped", "rb").read()[4096:4099], open("old").read(), os.path.exists("new"))
open("log", "a").write("two\n")
print(open("log").read().split())
`
	writer.ended(writer.submit(python(check))).succeeded(
		t, "(100, 4950) ok\n(100, 4950) ok\nfirst  \nb'abc' renamed False\n['one', 'two']\n")
	readOnly := `
import os, sqlite3
print(sqlite3.connect("file:/data/work/delete.db?mode=ro", uri=True).execute("select count(*) from t").fetchone())
try: open("/data/work/x", "w")
except OSError as e: print(e.strerror)
s = os.stat("/data/work/log"); print(s.st_uid == os.getuid(), oct(s.st_mode))
`
	reader.ended(reader.submit(python(readOnly))).succeeded(t, "(101,)\nRead-only file system\nTrue 0o100644\n")

	testVolumeHolder(t, v, writer, reader)
	testVolumeParts(t, v, writer, reader)
	testVolumeQuota(t, v, writer)
	testVolumeForks(t, v)
	testVolumeThreads(t, v, writer)
	testVolumeRemoval(t, v, writer)
}

// testVolumeHolder runs a writer, another, and readers at once.
func testVolumeHolder(t *testing.T, v *volumes, writer, reader *api) {
	write, read := newHold(), newHold()
	held := writer.submit(bash("cd /data/work; " + write.code() + "echo three >>log"))
	write.reached(t, 1)
	v.must(writer.execute(python("1")), http.StatusConflict, "volume work is in use by execution "+held)
	v.must(writer.execute(python("1"), "Prefer", "respond-async"), http.StatusConflict, held)
	v.must(v.get(v.path("work", "volume")), http.StatusOK, `"holder":"`+held+`"`)
	beside := reader.submit(bash("cat /data/work/log; " + read.code() + "cat /data/work/log"))
	read.reached(t, 1)
	reader.ended(reader.submit(bash("cat /data/work/log"))).succeeded(t, "one\ntwo\n")
	write.release(t)
	writer.ended(held).succeeded(t, "held\nwoken\n")
	reader.ended(reader.submit(bash("cat /data/work/log"))).succeeded(t, "one\ntwo\nthree\n")
	writer.ended(writer.submit(bash("cat /data/work/log; echo four >>/data/work/log"))).succeeded(t, "one\ntwo\nthree\n")
	read.release(t)
	reader.ended(beside).succeeded(t, "one\ntwo\nheld\nwoken\none\ntwo\n")
	// A program that can change two volumes holds both, or none.
	v.create("second", "16MiB")
	both := v.key(request{"connection": "second"}, request{"connection": "work"})
	held = writer.submit(bash(write.code()))
	write.reached(t, 1)
	v.must(both.execute(python("1")), http.StatusConflict, "volume work")
	v.must(v.get(v.path("second", "volume")), http.StatusOK, `"holder":null`)
	write.release(t)
	writer.ended(held).succeeded(t, "held\nwoken\n")
	both.ended(both.submit(bash("cp /data/work/log /data/second; echo five >>/data/work/log").of("v"))).succeeded(t, "")
	both.ended(both.submit(bash("tail -n 1 /data/work/log /data/second/log").of("v"))).succeeded(
		t, "==> /data/work/log <==\nfive\n\n==> /data/second/log <==\nfour\n")
}

// testVolumeParts runs programs that see a part of a volume.
func testVolumeParts(t *testing.T, v *volumes, writer, reader *api) {
	narrow := v.key(request{"connection": "work", "prefix": "teams/a"})
	narrow.ended(narrow.submit(
		bash("find /data; echo x >/data/work/teams/a/x; echo x 2>/dev/null >/data/work/teams/y || echo refused"))).
		succeeded(t,
			"/data\n/data/work\n/data/work/teams\n/data/work/teams/a\nrefused\n")
	sub := narrow.submit(bash("pwd; ls -A").and("sub_paths", []string{"/data/work/teams/a/new"}))
	narrow.ended(sub).succeeded(t, "/home/baponi\n")
	writer.ended(writer.submit(bash("cat /data/work/teams/a/x; ls -F /data/work/teams/a"))).succeeded(t, "x\nnew/\nx\n")
	reader.ended(reader.submit(bash("ls /data/work/teams/a").and("sub_paths", []string{"/data/work/teams/a"}))).succeeded(
		t, "new\nx\n")
	for _, path := range []string{"none", "teams/none", "log", "teams/a/x"} {
		v.must(reader.execute(python("1").and("sub_paths", []string{"/data/work/" + path})), http.StatusBadRequest,
			"sub_paths", "exist")
	}
	writer.ended(writer.submit(
		bash("cd /data/work; ln -s / root; ln -s ../.. teams/up; mkdir -p closed; chmod 0 closed"))).succeeded(t, "")
	for _, path := range []string{"root", "root/etc", "teams/up", "teams/up/etc", "log", "closed/x"} {
		r := writer.ended(writer.submit(bash("ls").and("sub_paths", []string{"/data/work/" + path})))
		r.failed(t, "failed", string(proto.CodeStorageMount), "The storage connection work could not be mounted")
	}
	v.must(reader.execute(python("1").and("sub_paths", []string{"/data/work/root/etc"})), http.StatusBadRequest, "exist")
	broken := v.key(request{"connection": "work", "prefix": "root/etc", "read_only": true})
	broken.ended(broken.submit(bash("ls"))).failed(t, "failed", string(proto.CodeStorageMount), "symbolic link")
	writer.ended(writer.submit(bash("cd /data/work; rmdir closed; rm root teams/up"))).succeeded(t, "")
}

func testVolumeQuota(t *testing.T, v *volumes, writer *api) {
	writer.ended(writer.submit(python(`
try:
    with open("/data/work/big", "wb") as f:
        for i in range(80): f.write(bytes(1 << 20))
except OSError as e: print(e.strerror)
`))).succeeded(t, "No space left on device\n")
	writer.ended(writer.submit(bash("rm /data/work/big"))).succeeded(t, "")
	// What fits while the program runs, and not afterwards: a file counts once for each name.
	r := writer.inline(bash("cd /data/work; head -c 40M /dev/zero >big; ln big big2; exit 3"))
	if r.ErrorCode == nil || *r.ErrorCode != string(proto.CodeStorageWrite) ||
		!strings.HasPrefix(*r.ErrorMessage, "The volume work was not changed: it has ") ||
		r.ProgramExitCode == nil || *r.ProgramExitCode != 3 {
		t.Errorf("%+v", r)
	}
	writer.ended(writer.submit(bash("ls /data/work | grep big; tail -n 1 /data/work/log"))).succeeded(t, "five\n")
}

func testVolumeForks(t *testing.T, v *volumes) {
	v.must(v.do(http.MethodPost, v.path("work", "fork"), request{"slug": "snapshot", "read_only": true}),
		http.StatusCreated, `"read_only":true`, `"bytes":"64MiB"`)
	v.must(v.do(http.MethodPost, v.path("work", "fork"), request{"slug": "fork"}), http.StatusCreated)
	v.must(v.do(http.MethodPost, v.path("work", "fork"), request{"slug": "fork"}), http.StatusConflict)
	v.must(v.do(http.MethodPost, v.path("work", "fork"), request{"slug": "none", "version": 999}),
		http.StatusNotFound, "version")
	v.must(v.do(http.MethodPost, v.path("work", "fork"), request{"slug": "old", "version": 1}), http.StatusCreated)
	all := v.key(request{"connection": "work"}, request{"connection": "fork"}, request{"connection": "snapshot"},
		request{"connection": "old"})
	all.ended(all.submit(bash(`cd /data
echo of the original >>work/log; echo of the fork >>fork/log; echo x 2>/dev/null >>snapshot/log || echo refused`))).
		succeeded(t, "refused\n")
	all.ended(all.submit(bash("cd /data; tail -qn 1 work/log fork/log snapshot/log old/log"))).succeeded(
		t, "of the original\nof the fork\nfive\none\n")
	tarball := tar.NewReader(
		bytes.NewReader(v.must(v.get(v.path("fork", "archive")+"&path=teams", accept, "application/x-tar"),
			http.StatusOK).body))
	var names []string
	for {
		h, err := tarball.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
	if slices.Sort(names); !slices.Equal(names, []string{"./", "a/", "a/new/", "a/x"}) {
		t.Errorf("the archive has %q", names)
	}
}

// testVolumeThreads looks for volumes among the threads of their organisation.
func testVolumeThreads(t *testing.T, v *volumes, writer *api) {
	list := v.must(writer.get("/v1/threads"), http.StatusOK, `"id":"v"`)
	if bytes.Contains(list.body, []byte("volume")) {
		t.Errorf("%s", list)
	}
	for _, id := range []string{"volume=work", "volume%3Dwork"} {
		v.must(writer.get("/v1/threads/"+id), http.StatusNotFound)
		v.must(writer.get("/v1/threads/"+id+"/archive"), http.StatusNotFound)
		v.must(writer.do(http.MethodDelete, "/v1/threads/"+id, nil), http.StatusNotFound)
		v.must(writer.do(http.MethodPost, "/v1/threads/"+id+"/fork", request{"id": "copy"}), http.StatusNotFound)
		v.must(writer.do(http.MethodPut, "/v1/threads/"+id+"/archive", nil), http.StatusBadRequest, "id")
	}
	v.must(writer.do(http.MethodPost, "/v1/threads/v/fork", request{"id": "volume=new"}), http.StatusBadRequest, "id")
	v.must(writer.execute(python("1").of("volume=work")), http.StatusBadRequest, "thread_id")
	for _, path := range []string{"list", "upload_url", "download_url", "delete", "rename"} {
		body := request{"source": "thread", "id": "volume=work", "path": "log", "to": "x", "content_length": 1}
		v.must(writer.do(http.MethodPost, "/v1/files/"+path, body), http.StatusBadRequest, "id")
	}
}

func testVolumeRemoval(t *testing.T, v *volumes, writer *api) {
	v.must(v.do(http.MethodDelete, v.path("work"), nil), http.StatusConflict, "API keys")
	h := newHold()
	held := writer.submit(bash(h.code()))
	h.reached(t, 1)
	for _, id := range v.keyIDs {
		v.must(v.do(http.MethodDelete, "/v1/admin/keys/"+id, nil), http.StatusOK)
	}
	v.must(v.do(http.MethodDelete, v.path("work"), nil), http.StatusConflict, "volume work is in use by execution "+held)
	h.release(t)
	again := v.key()
	again.ended(held).succeeded(t, "held\nwoken\n")
	v.must(v.do(http.MethodDelete, v.path("work"), nil), http.StatusOK)
	v.must(v.get(v.path("work", "volume")), http.StatusNotFound)
	v.create("work", "1MiB")
	empty := v.key(request{"connection": "work"}, request{"connection": "snapshot"})
	empty.ended(empty.submit(bash("ls -A /data/work; tail -n 1 /data/snapshot/log"))).succeeded(t, "five\n")
}

// testVolumesKilled kills a worker whose programs change volumes.
func testVolumesKilled(t *testing.T, p *programs, in topology) {
	sys := newSystem(t, p, in, 2)
	v := newVolumes(sys.api, "acme")
	var keys []*api
	for _, slug := range []string{"once", "twice"} {
		v.create(slug, "64MiB")
		key := v.key(request{"connection": slug})
		key.ended(key.submit(bash("echo first >/data/"+slug+"/log"))).succeeded(t, "")
		keys = append(keys, key)
	}
	h := newHold()
	code := func(slug string) request {
		return bash("cd /data/" + slug + "; cat log; ls; echo second >>log; touch of-killed; sync\n" + h.code() +
			"rm of-killed")
	}
	once := keys[0].submit(code("once"))
	twice := keys[1].submit(code("twice").and("max_attempts", 2))
	h.reached(t, 2)
	sys.worker.signal(unix.SIGKILL)
	sys.worker.exitCode(t)
	if in.separate {
		sys.startWorker(t)
	} else {
		sys.startFront(t)
	}
	sys.ready(t)
	for i, key := range keys {
		keys[i] = sys.with(key.key)
	}
	v.base = sys.base
	keys[0].ended(once).failed(t, "failed", string(proto.CodeWorkerLost), "attempt 1 of 1")
	h.reached(t, 1) // the next attempt
	v.must(keys[1].execute(python("1")), http.StatusConflict, "volume twice is in use by execution "+twice)
	h.release(t)
	if r := keys[1].ended(twice); r.Attempt != 2 || r.Status != "success" ||
		!strings.HasSuffix(*r.Stdout, "first\nlog\nheld\nwoken\n") {
		t.Errorf("%s", r)
	}
	keys[0].ended(keys[0].submit(bash("cat /data/once/log; ls /data/once"))).succeeded(t, "first\nlog\n")
	keys[1].ended(keys[1].submit(bash("cat /data/twice/log; ls /data/twice"))).succeeded(t, "first\nsecond\nlog\n")
}
