package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

const connectionsPath = "/v1/admin/connections"

// mountFlags allow connections to a server of this machine at a URL.
func mountFlags(t *testing.T, endpoint string) []string {
	t.Helper()
	u, err := url.Parse(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	return []string{"--mount-allow-http", "--mount-allow-ports", u.Port(), "--mount-allow-cidrs"}
}

// testConnections runs programs that see parts of a bucket and of a directory, and looks for the
// credentials of the bucket wherever a program or bullpen could show them.
func testConnections(t *testing.T, p *programs, in topology) {
	b := p.newBucket(t)
	root := t.TempDir()
	if err := unix.Mount("tmpfs", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755,uid=1234,gid=1234"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(root, unix.MNT_DETACH) })
	flags := slices.Concat(mountFlags(t, b.Endpoint),
		[]string{"127.0.0.0/8,::1/128", "--mount-roots", root, "--log-level", "debug"})
	sys := newSystem(t, p, in, 2, flags...)
	a := sys.api
	must := func(r *reply, status int, words ...string) *reply {
		t.Helper()
		if r.status != status {
			t.Fatalf("got %s, want %d", r, status)
		}
		for _, word := range words {
			if !strings.Contains(string(r.body), word) {
				t.Errorf("%q is not in %s", word, r)
			}
		}
		return r
	}
	id, canary := storagetest.Credentials()
	newKey := func(org string, mounts ...request) *api {
		t.Helper()
		var made struct{ Key string }
		must(a.do(http.MethodPost, "/v1/admin/keys", request{"name": "n", "org": org, "plan": "pro", "mounts": mounts}),
			http.StatusCreated).into(t, &made)
		return a.with(made.Key)
	}
	for _, org := range []string{"acme", "other"} {
		newKey(org) // creates the organisation
		secret := fmt.Sprintf(`{"access_key_id":%q,"secret_access_key":%q}`, id, canary)
		must(a.do(http.MethodPut, "/v1/admin/secrets/KEYS?org="+org, request{"value": secret}), http.StatusOK)
	}
	connection := request{
		"org": "acme", "slug": "data", "kind": "s3", "endpoint": b.Endpoint, "region": storagetest.Region,
		"bucket": storagetest.Bucket, "path_style": true,
		"credential": "KEYS", "prefix": b.prefix,
	}
	must(a.do(http.MethodPost, connectionsPath, connection), http.StatusCreated, `"tested_at":"`)
	if left, err := filepath.Glob(b.path("*")); err != nil || len(left) > 0 {
		t.Errorf("the test of the connection left %v, %v", left, err)
	}
	must(a.do(http.MethodPost, connectionsPath, connection.and("slug", "wrong", "bucket", "missing-bucket")),
		http.StatusConflict, "could not list the objects", "NoSuchBucket")
	must(a.do(http.MethodPost, connectionsPath, connection.and("slug", "wrong", "endpoint", "http://127.0.0.1:1")),
		http.StatusBadRequest, "endpoint", "port 1")
	must(a.do(http.MethodPost, connectionsPath, connection.and("slug", "wrong", "endpoint", "http://169.254.169.254")),
		http.StatusBadRequest, "endpoint", "address")

	write := func(name, content string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(b.path(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(b.path(name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("tenants/acme/in", "input")
	write("tenants/acme/jobs/7/in", "of the job")
	write("tenants/acme-corp/secret", "of a neighbour")
	user := newKey("acme", request{"connection": "data", "prefix": "tenants/acme"})
	tree := `
import os
for d, dirs, files in os.walk("/data"): print(d, sorted(dirs), sorted(files))
`
	user.ended(user.submit(python(tree))).succeeded(
		t, "/data ['data'] []\n/data/data ['tenants'] []\n/data/data/tenants ['acme'] []\n"+
			"/data/data/tenants/acme ['jobs'] ['in']\n/data/data/tenants/acme/jobs ['7'] []\n/data/data/tenants/acme/jobs/7 "+
			"[] ['in']\n")
	sub := func(path string) []string { return []string{"/data/data/" + path} }
	job := python(`
import os
os.chdir("/data/data/tenants/acme/jobs/7")
print(open("in").read(), os.listdir("/data/data/tenants/acme"), os.listdir("/data/data/tenants/acme/jobs"))
open("out", "w").write("output")
`).and("sub_paths", sub("tenants/acme/jobs/7"))
	if got := user.inline(job); got.Stdout != "of the job ['jobs'] ['7']\n" || got.ExitCode != 0 {
		t.Errorf("%+v", got)
	}
	if got, err := os.ReadFile(b.path("tenants/acme/jobs/7/out")); err != nil || string(got) != "output" {
		t.Errorf("the object has %q, %v", got, err)
	}
	// A path that does not exist is an empty directory, and refused if nobody may create it.
	empty := python("import os; print(os.listdir('/data/data/tenants/acme/new')); " +
		"open('/data/data/tenants/acme/new/x', 'w').write('x')")
	if got := user.inline(empty.and("sub_paths", sub("tenants/acme/new"))); got.Stdout != "[]\n" {
		t.Errorf("%+v", got)
	}
	if _, err := os.Stat(b.path("tenants/acme/new/x")); err != nil {
		t.Error(err)
	}
	reader := newKey("acme", request{"connection": "data", "prefix": "tenants/acme", "read_only": true})
	if got := reader.inline(python(
		"print(open('/data/data/tenants/acme/in').read())\n" +
			"open('/data/data/tenants/acme/x', 'w')")); got.Stdout != "input\n" ||
		!strings.Contains(got.Stderr, "Read-only file system") {
		t.Errorf("%+v", got)
	}
	must(reader.execute(python("1").and("sub_paths", sub("tenants/acme/none"))), http.StatusBadRequest,
		"sub_paths", "exist")
	for _, path := range []string{"tenants/acme-corp", "tenants", "tenants/acme-corp/secret"} {
		must(user.execute(python("1").and("sub_paths", sub(path))), http.StatusForbidden, "sub_paths")
	}

	// Another organisation sees nothing, also with a connection of the same name.
	other := newKey("other")
	must(other.execute(python("1").and("sub_paths", sub("tenants/acme"))), http.StatusForbidden, "sub_paths")
	if got := other.inline(python("import os; print(os.path.exists('/data/data'))")); got.Stdout != "False\n" {
		t.Errorf("%+v", got)
	}
	must(a.do(http.MethodPost, "/v1/admin/keys",
		request{"name": "n", "org": "other", "mounts": []request{{"connection": "data"}}}), http.StatusBadRequest, "mounts")
	must(a.do(http.MethodPost, connectionsPath, connection.and("org", "other", "prefix", b.prefix+"/others")),
		http.StatusCreated)
	if got := newKey("other", request{"connection": "data"}).inline(
		python(tree)); got.Stdout != "/data ['data'] []\n/data/data [] []\n" {
		t.Errorf("%+v", got)
	}

	// The program has no way to the credentials. Its own code has them backwards.
	backwards := []byte(canary)
	slices.Reverse(backwards)
	search := python(`
import os, glob
word = b"` + string(backwards) + `"[::-1]
found = [n for n, v in os.environb.items() if word in v]
open("/data/data/tenants/acme/in").read()
for name in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/mountinfo") + glob.glob("/run/bullpen/**", recursive=True):
    try: text = open(name, "rb").read()
    except OSError: continue
    if word in text: found.append(name)
print(found)
`)
	if got := user.inline(search); got.Stdout != "[]\n" {
		t.Errorf("%+v", got)
	}

	testDirectoryConnection(t, a, newKey, root)
	if in.separate {
		testWorkerRefusesEndpoint(t, sys, connection, newKey)
	}

	audit := must(a.get("/v1/admin/audit", accept, ndjson), http.StatusOK, `"connection.create"`)
	records := must(user.get("/v1/executions"), http.StatusOK)
	backup := filepath.Join(t.TempDir(), "backup")
	if exit, output := p.run(t, []string{"BULLPEN_URL=" + sys.base, "BULLPEN_API_KEY=" + sys.key}, "backup",
		backup); exit != 0 {
		t.Fatal(output)
	}
	stored := decompressed(t, backup)
	if !bytes.Contains(stored, []byte(b.Endpoint)) {
		t.Errorf("the backup, of %d bytes without compression, lacks the connection", len(stored))
	}
	for name, text := range map[string][]byte{"audit log": audit.body, "records": records.body, "backup": stored} {
		if bytes.Contains(text, []byte(canary)) {
			t.Errorf("the credentials are in the %s", name)
		}
	}
	dirs := []string{sys.data}
	if in.separate {
		dirs = append(dirs, sys.broker.store)
	}
	for _, dir := range dirs {
		if found := filesWith(t, dir, canary); found != nil {
			t.Errorf("the credentials are in %v", found)
		}
	}
	for _, proc := range []*process{sys.front, sys.worker} {
		if strings.Contains(proc.text(t), canary) {
			t.Error("the credentials are in a log")
		}
	}
}

// testDirectoryConnection uses a directory of the worker, which no gateway looks at.
func testDirectoryConnection(t *testing.T, a *api, newKey func(org string, mounts ...request) *api, root string) {
	t.Helper()
	for slug, dir := range map[string]string{"shared": root, "outside": "/etc"} {
		r := a.do(http.MethodPost, connectionsPath,
			request{"org": "acme", "slug": slug, "kind": "directory", "directory": dir, "prefix": "base"})
		if r.status != http.StatusCreated {
			t.Fatalf("create a connection: %s", r)
		}
	}
	user := newKey("acme", request{"connection": "shared", "prefix": "team"})
	code := python("open('/data/shared/team/a/x', 'w').write('x')").and("sub_paths", []string{"/data/shared/team/a"})
	if got := user.inline(code); got.ExitCode != 0 {
		t.Errorf("%+v", got)
	}
	if got, err := os.ReadFile(filepath.Join(root, "base/team/a/x")); err != nil || string(got) != "x" {
		t.Errorf("the file has %q, %v", got, err)
	}
	reader := newKey("acme", request{"connection": "shared", "read_only": true})
	for _, r := range []proto.Result{
		reader.inline(code.and("sub_paths", []string{"/data/shared/none"})),
		newKey("acme", request{"connection": "outside"}).inline(code.and("sub_paths", nil)),
	} {
		if r.ErrorCode == nil || *r.ErrorCode != string(proto.CodeStorageMount) ||
			!strings.Contains(*r.ErrorMessage, "The storage connection ") {
			t.Errorf("%+v", r)
		}
	}
}

// testWorkerRefusesEndpoint restarts the worker, without the settings that allow the address of the
// bucket.
func testWorkerRefusesEndpoint(
	t *testing.T, sys *system, connection request, newKey func(org string, mounts ...request) *api,
) {
	t.Helper()
	local := strings.Replace(connection["endpoint"].(string), "127.0.0.1", "localhost", 1)
	if r := sys.do(http.MethodPost, connectionsPath,
		connection.and("slug", "named", "endpoint", local)); r.status != http.StatusCreated {
		t.Fatalf("create a connection: %s", r)
	}
	sys.worker.signal(unix.SIGTERM)
	sys.worker.exitCode(t)
	i := slices.Index(sys.args, "--mount-allow-cidrs")
	sys.args = slices.Concat(sys.args[:i], []string{"--mount-allow-cidrs", "10.255.0.0/16"}, sys.args[i+2:])
	sys.startWorker(t)
	r := newKey("acme", request{"connection": "data"}).inline(python("1"))
	if r.ErrorCode == nil || *r.ErrorCode != string(proto.CodeStorageMount) ||
		!strings.Contains(*r.ErrorMessage, "endpoint") {
		t.Errorf("an address that the worker does not allow: %+v", r)
	}
	r = newKey("acme", request{"connection": "named"}).inline(
		python("import os\ntry: print(os.listdir('/data/named'))\nexcept OSError as e: print(e.errno)"))
	if r.Stdout != "5\n" { // EIO
		t.Errorf("a name with such an address: %+v", r)
	}
}
