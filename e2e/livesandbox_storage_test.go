package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	schema "github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// Values of secrets of testLiveStorage. changedSecret follows storedSecret.
const (
	storedSecret  = "canary-of-a-sandbox-4d1f"
	changedSecret = "canary-after-a-pause-90ce"
	fileSecret    = "canary-of-a-file-77"
)

// testLiveStorage uses a bucket, a directory, a volume and secrets in live sandboxes, over pauses.
func testLiveStorage(t *testing.T, p *programs, in topology) {
	b := p.newBucket(t)
	root := t.TempDir()
	if err := unix.Mount("tmpfs", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755,uid=1234,gid=1234"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(root, unix.MNT_DETACH) })
	dir := filepath.Join(root, "dir")
	if err := errors.Join(os.Mkdir(dir, 0o755), os.Chown(dir, 1234, 1234)); err != nil {
		t.Fatal(err)
	}
	sys := newSystem(t, p, in, 2, slices.Concat(mountFlags(t, b.Endpoint),
		[]string{"127.0.0.0/8,::1/128", "--mount-roots", root, "--sandboxes", "4", "--log-level", "debug"})...)
	l := &liveStorage{volumes: newVolumes(sys.api, "acme"), bucket: b, root: root}
	id, bucketSecret := storagetest.Credentials()
	l.secret("KEYS", fmt.Sprintf(`{"access_key_id":%q,"secret_access_key":%q}`, id, bucketSecret))
	l.secret("TOKEN", storedSecret)
	l.secret("cert", fileSecret)
	for _, connection := range []request{
		{
			"slug": "bucket", "kind": "s3", "endpoint": b.Endpoint, "region": storagetest.Region,
			"bucket": storagetest.Bucket, "path_style": true, "credential": "KEYS", "prefix": b.prefix,
		},
		{"slug": "shared", "kind": "directory", "directory": dir},
		{"slug": "work", "kind": "volume", "bytes": "64MiB"},
	} {
		l.must(l.do(http.MethodPost, connectionsPath, connection.and("org", "acme")), http.StatusCreated)
	}
	l.user = l.boundKey(false)
	l.reader = l.boundKey(true)
	t.Run("pauses", func(t *testing.T) { l.in(t).testPauses(t) })
	t.Run("users", func(t *testing.T) { l.in(t).testUsers(t) })
	t.Run("failures", func(t *testing.T) { l.in(t).testFailures(t) })

	looker := l.key()
	records := l.must(looker.get("/v1/executions"), http.StatusOK, `"delivery_mode":"sandbox"`).body
	list := l.must(looker.get("/v1/sandboxes"), http.StatusOK, `"killed"`).body
	dirs := []string{sys.data}
	if in.separate {
		dirs = append(dirs, sys.broker.store)
	}
	for _, canary := range []string{storedSecret, changedSecret, fileSecret, bucketSecret} {
		for name, text := range map[string][]byte{
			"executions": records, "sandboxes": list, "log of the server": []byte(sys.front.text(t)),
			"log of the worker": []byte(sys.worker.text(t)),
		} {
			if bytes.Contains(text, []byte(canary)) {
				t.Errorf("%s is in the %s", canary, name)
			}
		}
		for _, dir := range dirs {
			if found := filesWith(t, dir, canary); found != nil {
				t.Errorf("%s is in %s", canary, found)
			}
		}
	}
}

// liveStorage is the storage of an organisation that has live sandboxes.
type liveStorage struct {
	*volumes
	bucket       *bucket
	root         string // of the directory
	user, reader *api
	keys         []string // the ids of both
}

// in returns the same storage for a subtest.
func (l *liveStorage) in(t *testing.T) *liveStorage {
	return &liveStorage{&volumes{api: l.api.in(t), org: l.org}, l.bucket, l.root, l.user.in(t), l.reader.in(t), l.keys}
}

func (l *liveStorage) secret(name, value string) {
	l.t.Helper()
	l.must(l.do(http.MethodPut, "/v1/admin/secrets/"+name+"?org=acme", request{"value": value}), http.StatusOK)
}

// boundKey returns a client with a new key that has all storage and secrets.
func (l *liveStorage) boundKey(readOnly bool) *api {
	l.t.Helper()
	var mounts []request
	for _, slug := range []string{"bucket", "shared", "work"} {
		mounts = append(mounts, request{"connection": slug, "read_only": readOnly})
	}
	var made struct{ ID, Key string }
	l.must(l.do(http.MethodPost, "/v1/admin/keys", request{
		"name": "n", "org": "acme", "plan": "pro", "mounts": mounts, "secrets": []string{"TOKEN=TOKEN!", "cert"},
	}), http.StatusCreated).into(l.t, &made)
	l.keys = append(l.keys, made.ID)
	return l.with(made.Key)
}

// testPauses writes to all storage, and reads it from outside and after a pause.
func (l *liveStorage) testPauses(t *testing.T) {
	s := l.user.newSandbox(request{"on_timeout": "pause"})
	s.check(`for at in bucket shared work; do mkdir -p /data/$at/sub; echo one >/data/$at/sub/f; done
cat /data/*/sub/f; ls /data`, "one\none\none\nbucket\nshared\nwork\n")
	s.check("echo ${#TOKEN} $(wc -c </run/bullpen/job/secrets/cert); "+
		"(echo x >/run/bullpen/job/secrets/cert) 2>/dev/null || echo no",
		fmt.Sprintf("%d %d\nno\n", len(storedSecret), len(fileSecret)))
	// Buckets and directories change at once, and the volume when the sandbox stops. Meanwhile it is in use.
	l.checkFile(t, l.bucket.path("sub/f"), "one\n")
	l.checkFile(t, filepath.Join(l.root, "dir/sub/f"), "one\n")
	l.reader.ended(l.reader.submit(bash("cat /data/bucket/sub/f; ls -A /data/work"))).succeeded(t, "one\n")
	l.must(l.user.execute(python("1")), http.StatusConflict, "volume work is in use by")
	l.must(l.user.do(http.MethodPost, "/v1/sandboxes", request{}), http.StatusConflict, "volume work is in use by")
	s.change(http.MethodPost, "/pause")
	l.reader.ended(l.reader.submit(bash("cat /data/*/sub/f"))).succeeded(t, "one\none\none\n")

	// What others write during the pause is there after it, and a new value of a secret.
	l.user.ended(l.user.submit(bash("for at in bucket shared work; do echo two >>/data/$at/sub/f; done"))).
		succeeded(t, "")
	l.secret("TOKEN", changedSecret)
	s.change(http.MethodPost, "/resume")
	s.check("cat /data/*/sub/f; echo ${#TOKEN}", strings.Repeat("one\ntwo\n", 3)+fmt.Sprintln(len(changedSecret)))
	s.check("for at in bucket shared work; do echo three >>/data/$at/sub/f; rm -rf /data/$at/gone; done", "")
	s.change(http.MethodDelete, "")
	l.reader.ended(l.reader.submit(bash("cat /data/*/sub/f"))).succeeded(t, strings.Repeat("one\ntwo\nthree\n", 3))

	// A sandbox with a key that only reads changes nothing, and does not hold the volume.
	s = l.reader.newSandbox(request{"sub_paths": []string{"/data/work/sub"}})
	s.check(`for at in bucket shared work; do
tail -n 1 /data/$at/sub/f; (echo x >/data/$at/sub/f) 2>/dev/null || echo no; done; ls /data/work`,
		strings.Repeat("three\nno\n", 3)+"sub\n")
	l.user.ended(l.user.submit(bash("echo four >>/data/work/sub/f"))).succeeded(t, "")
	s.check("tail -n 1 /data/work/sub/f", "three\n")
	s.change(http.MethodDelete, "")
}

func (l *liveStorage) checkFile(t *testing.T, name, want string) {
	t.Helper()
	if got, err := os.ReadFile(name); string(got) != want || err != nil {
		t.Errorf("%s has %q, %v; want %q", name, got, err, want)
	}
}

// testUsers reads and writes storage as each user, by programs and by the requests for files.
func (l *liveStorage) testUsers(t *testing.T) {
	s := l.user.newSandbox(request{})
	for _, at := range []string{"bucket", "shared", "work"} {
		dir := "/data/" + at
		path := s.path("/guest/files?path=" + dir + "/up")
		l.must(s.do(http.MethodPost, path, []byte("up"), "Content-Type", "application/octet-stream"), http.StatusOK)
		s.check("cat "+dir+"/up; rm "+dir+"/up; echo down >"+dir+"/down", "up")
		for _, user := range []string{"user", "root"} {
			r := s.get(s.path("/guest/files?path="+dir+"/down"), "Bullpen-User", user)
			if r.status != http.StatusOK || string(r.body) != "down\n" {
				t.Errorf("%s of %s: %s", user, at, r)
			}
			l.must(s.do(http.MethodPost, s.path("/guest/filesystem.Filesystem/ListDir"), request{"path": dir},
				"Bullpen-User", user, "Content-Type", "application/json"), http.StatusOK, `"down"`)
			if out, exit, err := s.run(user, "ls -A "+dir+"; cat "+dir+"/down"); exit != 0 || err != nil ||
				!strings.HasSuffix(out, "down\n") {
				t.Errorf("%s of %s: %q, exit status %d, %v", user, at, out, exit, err)
			}
		}
	}
	s.change(http.MethodDelete, "")
}

// testFailures loses the storage of sandboxes that run, and of those that are paused.
func (l *liveStorage) testFailures(t *testing.T) {
	s := l.user.newSandbox(request{"on_timeout": "pause"})
	s.check("echo kept >f; echo kept >/data/work/kept", "")
	broken := func(methods ...string) (stop func() int) {
		return l.bucket.Inject(storagetest.Broken, -1, func(r *http.Request) bool {
			return slices.Contains(methods, r.Method)
		})
	}
	// A file that could not be stored is told when the sandbox stops, and takes nothing else with it.
	stop := broken(http.MethodPut)
	s.check("echo lost >/data/bucket/lost || true; echo still here", "still here\n")
	s.stopsUnsaved(t, func() { s.change(http.MethodPost, "/pause") }, "bucket/lost")
	stop()
	s.change(http.MethodPost, "/resume")
	s.check("cat f /data/work/kept; ls /data/bucket | grep lost || true", "kept\nkept\n")
	// So is a volume beyond its quota, also at the sandbox's timeout. A file counts once for each name.
	s.check("cd /data/work; echo gone >kept; head -c 40M /dev/zero >big; ln big big2; echo new >~/f", "")
	s.stopsUnsaved(t, func() { s.do(http.MethodPost, s.path("/extend"), request{"timeout": 1}) }, "The volume work")
	s.change(http.MethodPost, "/resume")
	s.check("cat f; ls /data/work; cat /data/work/kept", "new\ndown\nkept\nsub\nkept\n")
	// A bucket that cannot be reached fails the calls of programs, and no sandbox.
	stop = broken(http.MethodGet, http.MethodHead, http.MethodPut)
	s.check("ls /data/bucket >~/list 2>&1 || grep -o 'Input/output error' ~/list", "Input/output error\n")
	s.change(http.MethodPost, "/pause")
	s.change(http.MethodPost, "/resume")
	s.check("(cat /data/bucket/sub/f || echo failed) 2>/dev/null; cat f", "failed\nnew\n")
	stop()
	s.check("head -n 1 /data/bucket/sub/f", "one\n")
	s.change(http.MethodPost, "/pause")

	// A directory that is gone when the sandbox is to start again.
	if err := os.Rename(filepath.Join(l.root, "dir"), filepath.Join(l.root, "away")); err != nil {
		t.Fatal(err)
	}
	if r := s.do(http.MethodPost, s.path("/resume"), nil); r.status != http.StatusConflict ||
		!strings.Contains(string(r.body), "The storage connection shared could not be mounted") {
		t.Errorf("a resume without the directory: %s", r)
	}
	s.awaits("paused", "not_started")
	if err := os.Rename(filepath.Join(l.root, "away"), filepath.Join(l.root, "dir")); err != nil {
		t.Fatal(err)
	}
	s.change(http.MethodPost, "/resume")
	s.check("cat f; head -n 1 /data/shared/sub/f", "new\none\n")
	s.change(http.MethodPost, "/pause")
	// A volume that an execution uses meanwhile.
	h := newHold()
	held := l.user.submit(bash(h.code()))
	h.reached(t, 1)
	l.must(s.do(http.MethodPost, s.path("/resume"), nil), http.StatusConflict, "volume work is in use by", held)
	s.awaits("paused", "not_started")
	h.release(t)
	l.user.ended(held).succeeded(t, "held\nwoken\n")
	s.change(http.MethodDelete, "")

	l.testDeleted(t)
}

// stopsUnsaved checks that a stop pauses the sandbox and tells what could not be stored.
func (s *liveSandbox) stopsUnsaved(t *testing.T, stop func(), what string) {
	t.Helper()
	stop()
	s.awaits("paused", "storage_not_saved")
	var x schema.LiveSandbox
	if s.get(s.path("")).into(t, &x); x.Message == nil || !strings.Contains(*x.Message, what) {
		t.Errorf("the message of %+v lacks %s", x, what)
	}
}

// testDeleted deletes connections and keys of a paused sandbox.
func (l *liveStorage) testDeleted(t *testing.T) {
	s := l.user.newSandbox(request{"on_timeout": "pause", "sub_paths": []string{"/data/work/sub"}})
	s.check("ls /data /data/work; echo mine >f", "/data:\nbucket\nshared\nwork\n\n/data/work:\nsub\n")
	l.must(l.do(http.MethodDelete, l.path("work"), nil), http.StatusConflict, "API keys")
	s.change(http.MethodPost, "/pause")
	bare := l.key()
	for _, key := range []string{l.keys[0], l.keys[1]} {
		l.must(l.do(http.MethodDelete, "/v1/admin/keys/"+key, nil), http.StatusOK)
	}
	l.must(l.do(http.MethodDelete, l.path("work"), nil), http.StatusOK)
	// Another key does not have what the sandbox names, and says so. The sandbox stays paused.
	other := &liveSandbox{bare, s.id}
	l.must(other.do(http.MethodPost, other.path("/resume"), nil), http.StatusForbidden, "/data/work/sub")
	other.awaits("paused", "paused")
	l.must(other.do(http.MethodDelete, other.path(""), nil), http.StatusOK)

	plain := bare.newSandbox(request{"on_timeout": "pause"})
	plain.check("ls -A /data; echo mine >f", "")
	plain.change(http.MethodPost, "/pause")
	plain.change(http.MethodPost, "/resume")
	plain.check("ls -A /data; cat f", "mine\n")
	plain.change(http.MethodDelete, "")
}
