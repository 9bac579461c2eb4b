package e2e

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// testConnectionFiles writes files of storage connections by programs and reads them by the Files
// API, and the other way round.
func testConnectionFiles(t *testing.T, p *programs, in topology) {
	b := p.newBucket(t)
	root := t.TempDir()
	if err := unix.Mount("tmpfs", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755,uid=1234,gid=1234"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(root, unix.MNT_DETACH) })
	flags := slices.Concat(mountFlags(t, b.Endpoint), []string{"127.0.0.0/8,::1/128", "--mount-roots", root})
	sys := newSystem(t, p, in, 2, flags...)
	a := sys.api
	created := func(path string, body request) *reply {
		t.Helper()
		r := a.do(http.MethodPost, path, body)
		if r.status != http.StatusCreated {
			t.Fatalf("%s: %s", path, r)
		}
		return r
	}
	created("/v1/admin/keys", request{"name": "first", "org": "acme", "plan": "pro"}) // creates the organisation
	id, secret := storagetest.Credentials()
	if r := a.do(http.MethodPut, "/v1/admin/secrets/KEYS?org=acme",
		request{"value": fmt.Sprintf(`{"access_key_id":%q,"secret_access_key":%q}`, id, secret)}); r.status != http.StatusOK {
		t.Fatal(r)
	}
	created(connectionsPath, request{
		"org": "acme", "slug": "bucket", "kind": "s3", "endpoint": b.Endpoint, "region": storagetest.Region,
		"bucket": storagetest.Bucket, "path_style": true, "credential": "KEYS", "prefix": b.prefix,
	})
	created(connectionsPath, request{"org": "acme", "slug": "shared", "kind": "directory", "directory": root})
	created(connectionsPath, request{"org": "acme", "slug": "kept", "kind": "volume", "bytes": "1GiB"})
	newKey := func(mount request) (*api, string) {
		t.Helper()
		var made struct{ Key string }
		created("/v1/admin/keys",
			request{"name": "n", "org": "acme", "plan": "pro", "mounts": []request{
				mount.and("connection", "bucket"), mount.and("connection", "shared"), mount.and("connection", "kept"),
			}}).
			into(t, &made)
		return a.with(made.Key), made.Key
	}
	user, key := newKey(request{"prefix": "team/a"})
	reader, _ := newKey(request{"prefix": "team", "read_only": true})
	for _, slug := range []string{"bucket", "shared", "kept"} {
		of := func(path string, more ...any) request {
			body := request{"source": "volume", "id": slug, "path": path}
			for i := 0; i < len(more); i += 2 {
				body[more[i].(string)] = more[i+1]
			}
			return body
		}
		list := func(a *api, path string) (names []string) {
			t.Helper()
			r := a.do(http.MethodPost, "/v1/files/list", of(path, "recursive", true))
			if r.status != http.StatusOK {
				t.Fatalf("list: %s", r)
			}
			var list struct{ Files []listedFile }
			r.into(t, &list)
			for _, f := range list.Files {
				names = append(names, f.Path)
			}
			slices.Sort(names)
			return names
		}
		if got := list(user, ""); !slices.Equal(got, []string{"team", "team/a"}) {
			t.Errorf("%s: new part: %q", slug, got)
		}
		content := randomBytes(9 << 20)
		upload := user.do(http.MethodPost, "/v1/files/upload_url",
			of("team/a/in/data", "content_length", len(content))).signed(t)
		if r := a.useSigned(upload, upload.Method, content); r.status != http.StatusOK {
			t.Fatalf("%s: upload: %s", slug, r)
		}
		program := python(fmt.Sprintf(`
import hashlib, os
os.chdir("/data/%s/team/a")
data = open("in/data", "rb").read()
print(len(data), os.stat("in/data").st_uid == os.getuid(), hashlib.sha256(data).hexdigest() == %q)
os.makedirs("out", exist_ok=True)
open("out/reversed", "wb").write(data[::-1])
os.remove("in/data")
`, slug, fmt.Sprintf("%x", sha256.Sum256(content))))
		user.ended(user.submit(program)).succeeded(t, fmt.Sprintf("%d True True\n", len(content)))
		if got := list(reader, "team"); !slices.Contains(got, "team/a/out/reversed") ||
			slices.Contains(got, "team/a/in/data") {
			t.Errorf("%s: after the program: %q", slug, got)
		}
		slices.Reverse(content)
		download := reader.do(http.MethodPost, "/v1/files/download_url", of("team/a/out/reversed")).signed(t)
		if r := a.useSigned(download, download.Method, nil); r.status != http.StatusOK || !bytes.Equal(r.body, content) {
			t.Errorf("%s: download: HTTP %d, %d bytes", slug, r.status, len(r.body))
		}
		if r := a.useSigned(download, download.Method, nil, "Range", "bytes=-5"); r.status != http.StatusPartialContent ||
			!bytes.Equal(r.body, content[len(content)-5:]) {
			t.Errorf("%s: range: %s", slug, r)
		}
		for path, status := range map[string]int{"team/a/new": http.StatusForbidden, "team/b": http.StatusForbidden} {
			if r := reader.do(http.MethodPost, "/v1/files/upload_url", of(path, "content_length", 1)); r.status != status {
				t.Errorf("%s: read-only: %s", slug, r)
			}
		}
		if r := user.do(http.MethodPost, "/v1/files/upload_url",
			of("team/b", "content_length", 1)); r.status != http.StatusForbidden {
			t.Errorf("%s: outside: %s", slug, r)
		}
		if r := user.do(http.MethodPost, "/v1/files/rename",
			of("team/a/out/reversed", "to", "team/a/renamed")); r.status != http.StatusOK {
			t.Errorf("%s: rename: %s", slug, r)
		}
		testFilesCommand(t, sys, user, key, slug)
		if r := user.do(http.MethodPost, "/v1/files/delete", of("team/a/up", "recursive", true)); r.status != http.StatusOK {
			t.Errorf("%s: delete: %s", slug, r)
		}
		user.ended(user.submit(python("import os; print(os.path.exists('/data/"+slug+"/team/a/up'), os.stat('/data/"+slug+
			"/team/a/renamed').st_size)"))).
			succeeded(t, fmt.Sprintf("False %d\n", len(content)))
	}
}

// testFilesCommand copies a directory with a large file to a connection and back, which a program
// has changed meanwhile.
func testFilesCommand(t *testing.T, sys *system, user *api, key, slug string) {
	t.Helper()
	local := t.TempDir()
	large := bytes.Repeat(randomBytes(1<<20), 65) // in parts
	for name, content := range map[string][]byte{"up/small": []byte("small"), "up/deep/large": large} {
		path := filepath.Join(local, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	at := "volume:" + slug + "/team/a/up"
	if out := sys.command(t, key, "files", "cp", "-r", filepath.Join(local, "up"), at); !strings.Contains(
		out, fmt.Sprintf("2 files, %d bytes", len(large)+5)) {
		t.Errorf("%s: %s", slug, out)
	}
	user.ended(user.submit(python(fmt.Sprintf(`
import os
os.chdir("/data/%s/team/a/up")
print(os.stat("deep/large").st_size)
open("made", "w").write(open("small").read() + "er")
`, slug)))).succeeded(t, fmt.Sprintf("%d\n", len(large)))
	sys.command(t, key, "files", "cp", "-r", at, filepath.Join(local, "down"))
	for name, want := range map[string][]byte{"made": []byte("smaller"), "deep/large": large} {
		if got, err := os.ReadFile(filepath.Join(local, "down", name)); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %s has %d bytes, %v", slug, name, len(got), err)
		}
	}
	sys.command(t, key, "files", "rm", at+"/made")
	if out := sys.command(t, key, "files", "ls", "-r", at); strings.Contains(out, "made") ||
		!strings.Contains(out, "team/a/up/deep/large") {
		t.Errorf("%s: %s", slug, out)
	}
}
