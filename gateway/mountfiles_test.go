package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/gateway/filestore"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// newBucket gives the organisation acme a bucket of a real server as the connection data, and the
// harness's key all of it. It returns the directory of its objects.
func (h *harness) newBucket(prefix string) string {
	h.t.Helper()
	server, err := storagetest.Start("")
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = server.Close() })
	endpoint, err := server.Endpoint()
	if err != nil {
		h.t.Fatal(err)
	}
	h.do("PUT", "/v1/admin/secrets/KEYS", `{"value":"value"}`).want(200, "")
	store := h.server.Connections.(*connectionStore)
	store.all = append(store.all,
		proto.Connection{Org: "acme", Slug: "data", Kind: proto.MountS3, Prefix: prefix, S3: &proto.S3Mount{
			Endpoint: endpoint, Region: storagetest.Region, Bucket: storagetest.Bucket, PathStyle: true, Credential: "KEYS",
		}})
	h.mount("key_1", proto.KeyMount{Connection: "data"})
	return server.Path(prefix)
}

// mount replaces the mounts of a key.
func (h *harness) mount(key string, mounts ...proto.KeyMount) {
	h.stub.mu.Lock()
	defer h.stub.mu.Unlock()
	for i := range h.stub.keys {
		if h.stub.keys[i].ID == key {
			h.stub.keys[i].Mounts = mounts
		}
	}
}

// volume sends a request about files of the connection data.
func (h *harness) volume(kind, more string) *reply {
	h.t.Helper()
	return h.do("POST", "/v1/files/"+kind, `{"source":"volume","id":"data"`+more+`}`)
}

// names lists a directory of the connection data.
func (h *harness) names(path string, recursive bool) []string {
	h.t.Helper()
	var list struct {
		Files []struct {
			Path        string
			Size        int
			IsDirectory bool `json:"is_directory"`
		}
	}
	a := h.volume("list", fmt.Sprintf(`,"path":%q,"recursive":%v`, path, recursive)).want(200, "")
	if err := json.Unmarshal(a.body, &list); err != nil {
		h.t.Fatal(err)
	}
	names := []string{}
	for _, f := range list.Files {
		name := fmt.Sprint(f.Path, " ", f.Size)
		if f.IsDirectory {
			name = f.Path + "/"
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// signVolume asks for a signed URL for a file of the connection data, and returns its path and
// query.
func (h *harness) signVolume(kind, path string, size int) string {
	h.t.Helper()
	more := ""
	if kind == "upload" {
		more = fmt.Sprintf(`,"content_length":%d`, size)
	}
	a := h.volume(kind+"_url", fmt.Sprintf(`,"path":%q%s`, path, more)).want(200, "").json()
	u, err := url.Parse(a["url"].(string))
	if err != nil {
		h.t.Fatal(err)
	}
	return u.RequestURI()
}

func TestFilesOfBucket(t *testing.T) {
	h := newHarness(t)
	dir := h.newBucket("base")
	wants := func(path string, recursive bool, want ...string) {
		t.Helper()
		if got := h.names(path, recursive); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", path, got, want)
		}
	}
	wants("", true)
	large := bytes.Repeat([]byte("0123456789abcdef"), 20<<20/16) // in parts
	for name, content := range map[string]string{
		"/data/data/a/b.txt": "hello", "a/c d+é": "x", "empty": "", "large": string(large),
	} {
		h.send(h.put(h.signVolume("upload", name, len(content)), content)).want(200, "")
	}
	wants("", false, "a/", "empty 0", fmt.Sprint("large ", len(large)))
	wants("a", false, "a/b.txt 5", "a/c d+é 1")
	wants("/data/data", true, "a/", "a/b.txt 5", "a/c d+é 1", "empty 0", fmt.Sprint("large ", len(large)))
	wants("a/b.txt", false, "a/b.txt 5")
	wants("nothing", false)
	if got, err := os.ReadFile(filepath.Join(dir, "a/b.txt")); err != nil || string(got) != "hello" {
		t.Errorf("%q, %v", got, err)
	}
	at := h.signVolume("download", "large", 0)
	a := h.get(at).want(200, "")
	if !bytes.Equal(a.body, large) {
		t.Errorf("%d bytes", len(a.body))
	}
	for span, want := range map[string]string{
		"bytes=0-3": "0123", "bytes=16-17": "01", "bytes=-3": "def", fmt.Sprintf("bytes=%d-", len(large)-1): "f",
	} {
		part := h.get(at, "Range", span, "If-Range", a.header.Get("ETag")).want(206, "")
		if string(part.body) != want {
			t.Errorf("%s: %q", span, part.body)
		}
	}
	h.get(at, "Range", fmt.Sprintf("bytes=%d-", len(large))).want(416, "range_not_satisfiable")
	h.get(at, "Range", "bytes=0-3", "If-Range", `"other"`).want(200, "")
	if head := h.do("HEAD", at, "", "Authorization", "").want(200, ""); head.header.Get("Content-Length") != fmt.Sprint(
		len(large)) {
		t.Errorf("%v", head.header)
	}
	h.volume("download_url", `,"path":"a"`).want(404, "not_found", "no file at this path of the storage connection")
	h.volume("upload_url", `,"path":"a","content_length":1`).want(409, "conflict", `"a" is a directory`)
	h.volume("upload_url", `,"path":"empty/x/y","content_length":1`).want(409, "conflict", `"empty" is a file`)
	h.volume("rename", `,"path":"a/b.txt","to":"empty"`).want(409, "conflict", `"empty" exists`)
	h.volume("rename", `,"path":"a","to":"b"`).want(409, "conflict", "directory of a bucket")
	h.volume("rename", `,"path":"no","to":"b"`).want(404, "not_found", `nothing at "no"`)
	h.volume("rename", `,"path":"a/c d+é","to":"new/é+ c"`).want(200, "")
	h.volume("delete", `,"path":"a/c d+é"`).want(404, "not_found")
	h.volume("delete", `,"path":"a"`).want(409, "conflict", `"a" is not empty`)
	h.volume("delete", `,"path":"a","recursive":true`).want(200, "")
	wants("", true, "empty 0", fmt.Sprint("large ", len(large)), "new/", "new/é+ c 1")
	h.volume("delete", `,"path":"large"`).want(200, "")
	h.get(at).want(404, "not_found")
	// An upload that breaks off leaves nothing.
	h.send(h.put(h.signVolume("upload", "broken", 9<<20), "short")).want(400, "validation_error", "Content-Length")
	if got := slices.Sorted(maps.Keys(filesBelow(t, dir))); !slices.Equal(got, []string{"empty", "new/é+ c"}) {
		t.Errorf("%q", got)
	}
	h.nothingReserved()
}

// beginUpload begins an upload in parts and returns its path and query, and the part size.
func (h *harness) beginUpload(source, path string, size int) (at string, each int) {
	h.t.Helper()
	a := h.do("POST", "/v1/files/uploads", fmt.Sprintf(`{%s,"path":%q,"content_length":%d}`, source, path, size)).want(
		200, "").json()
	u, err := url.Parse(a["url"].(string))
	if err != nil {
		h.t.Fatal(err)
	}
	return u.RequestURI(), int(a["part_size"].(float64))
}

const (
	ofThread = `"source":"thread","id":"t"`
	ofBucket = `"source":"volume","id":"data"`
)

func TestUploadInParts(t *testing.T) {
	h := newHarness(t)
	dir := h.newBucket("base")
	for source, stored := range map[string]func() string{
		ofThread: func() string {
			h.threads.mu.Lock()
			defer h.threads.mu.Unlock()
			return string(h.threads.files["acme/t/dir/x"])
		},
		ofBucket: func() string { return filesBelow(t, dir)["dir/x"] },
	} {
		content := strings.Repeat("0123456789abcdef", (20<<20)/16)
		at, each := h.beginUpload(source, "dir/x", len(content))
		part := func(n int) string { return content[(n-1)*each : min(n*each, len(content))] }
		send := func(n int, content string) *reply { return h.send(h.put(fmt.Sprint(at, "?part=", n), content)) }
		send(3, part(3)).want(200, "")
		send(1, strings.Repeat("x", each)).want(200, "") // replaced below
		want := fmt.Sprintf(`"parts":3,"uploaded":[{"number":1,"size":%d},{"number":3,"size":%d}]`, each, len(part(3)))
		if a := h.get(at).want(200, ""); !strings.Contains(string(a.body), want) {
			t.Errorf("%s, want %s", a.body, want)
		}
		h.do("POST", at, "", "Authorization", "").want(409, "conflict", "parts are missing: 2")
		send(2, "short").want(400, "validation_error", "Content-Length")
		send(4, "x").want(400, "validation_error", "part must be a whole number from 1 to 3")
		send(0, "x").want(400, "validation_error", "part must")
		h.send(h.put(at, "x")).want(400, "validation_error", "part must be given")
		h.send(h.put(at+"?part=2", part(2), "Content-Encoding", "gzip")).want(415, "unsupported_media_type")
		if stored() != "" {
			t.Error("the file is there before it is complete")
		}
		send(2, part(2)).want(200, "")
		send(1, part(1)).want(200, "")
		h.do("POST", at, "", "Authorization", "").want(200, "")
		if stored() != content {
			t.Errorf("%s: %d bytes", source, len(stored()))
		}
		h.do("POST", at, "", "Authorization", "").want(404, "not_found", "no such upload any more")
		h.get(at).want(404, "not_found")
		send(1, part(1)).want(404, "not_found")
		h.do("DELETE", at, "", "Authorization", "").want(204, "")

		at, _ = h.beginUpload(source, "dir/y", 3)
		send(1, "abc").want(200, "")
		h.do("DELETE", at, "", "Authorization", "").want(204, "")
		send(1, "abc").want(404, "not_found")
		h.do("POST", at, "", "Authorization", "").want(404, "not_found")
		// The URL is for nothing else.
		token := strings.TrimPrefix(at, uploadsPath)
		h.get(contentPath+token).want(403, "forbidden")
		h.send(h.put(contentPath+token, "abc")).want(403, "forbidden")
		h.get(uploadsPath+"x"+token).want(403, "forbidden")
	}
	h.get(uploadsPath+strings.TrimPrefix(h.signVolume("download", "dir/x", 0), contentPath)).want(403, "forbidden")
	h.do("POST", "/v1/files/uploads", `{`+ofThread+`,"path":"a","content_length":0}`).want(400, "validation_error",
		"content_length")
	h.do("POST", "/v1/files/uploads", `{`+ofBucket+`,"path":"dir","content_length":1}`).want(
		409, "conflict", "is a directory")
	h.nothingReserved()
}

// The parts of uploads that are not complete are limited.
func TestPendingUploads(t *testing.T) {
	h := newHarness(t)
	h.admission.Default.Disk.Home = 100 * proto.GiB
	var last string
	for range 16 {
		last, _ = h.beginUpload(ofThread, "a", int(proto.MaxFileBytes))
	}
	h.do("POST", "/v1/files/uploads", `{`+ofThread+`,"path":"a","content_length":1}`).want(
		409, "conflict", "complete or remove some")
	h.do("DELETE", last, "", "Authorization", "").want(204, "")
	h.beginUpload(ofThread, "a", 1)
}

// aloneParts fails a test in which two uploads begin at the same time.
type aloneParts struct {
	filestore.Parts
	t       *testing.T
	running atomic.Int32
}

func (p *aloneParts) BeginUpload(ctx context.Context, org string, size int64) (string, error) {
	if p.running.Add(1) > 1 {
		p.t.Error("an upload begins before another has begun")
	}
	defer p.running.Add(-1)
	for range 100 {
		runtime.Gosched()
	}
	return p.Parts.BeginUpload(ctx, org, size)
}

// Uploads of an organisation begin one after another, so that each counts those before it.
func TestUploadsBeginAtOnce(t *testing.T) {
	h := newHarness(t)
	h.server.Parts = &aloneParts{Parts: h.server.Parts, t: t}
	h.remount()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() { h.beginUpload(ofThread, "a", 1) })
	}
	all.Wait()
}

// A key sees the part of a connection below its prefix, and the directories that lead there.
func TestFilesOfPrefix(t *testing.T) {
	h := newHarness(t)
	dir := h.newBucket("base")
	for _, name := range []string{"tenants/acme/in", "tenants/acme-corp/secret", "tenants/acme/../escaped", "other"} {
		h.writeObject(filepath.Join(dir, name), name)
	}
	h.writeObject(filepath.Join(dir, "../outside"), "outside")
	h.mount("key_1", proto.KeyMount{Connection: "data", Prefix: "tenants/acme"})
	for path, want := range map[string][]string{
		"": {"tenants/"}, "tenants": {"tenants/acme/"}, "tenants/acme": {"tenants/acme/in 15"},
		"tenants/acme/in":   {"tenants/acme/in 15"},
		"tenants/acme-corp": {}, "tenants/ac": {}, "other": {}, "tenants/acme-corp/secret": {}, "tenants/acme/in/x": {},
		"%2e%2e": {}, `..\outside`: {},
		"TENANTS": {}, "tenants/acme\u200b": {}, "tenants\uff0facme": {},
	} {
		if got := h.names(path, false); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", path, got, want)
		}
	}
	if got := h.names("", true); !slices.Equal(got, []string{"tenants/", "tenants/acme/", "tenants/acme/in 15"}) {
		t.Errorf("%q", got)
	}
	for _, path := range []string{
		"other", "tenants/acme-corp/secret", "tenants", "tenants/acme",
		"tenants/acme/%2e%2e/escaped", `tenants/acme/..\..\OTHER`,
	} {
		h.volume("download_url", fmt.Sprintf(`,"path":%q`, path)).want(404, "not_found", "no file at this path")
	}
	for _, path := range []string{"tenants/acme/../acme-corp/secret", "..", "a/../../b", "/data/data/../x"} {
		for kind, more := range map[string]string{
			"list": "", "download_url": "", "upload_url": `,"content_length":1`,
			"uploads": `,"content_length":1`, "delete": "", "rename": `,"to":"x"`,
		} {
			h.volume(kind, fmt.Sprintf(`,"path":%q%s`, path, more)).want(400, "validation_error", `path must not contain ".."`)
		}
	}
	for _, path := range []string{"x", "tenants", "tenants/acme", "tenants/acme-corp/secret", "tenants/acmex"} {
		for kind, more := range map[string]string{
			"upload_url": `,"content_length":1`, "uploads": `,"content_length":1`,
			"delete": `,"recursive":true`, "rename": `,"to":"tenants/acme/y"`,
		} {
			h.volume(kind, fmt.Sprintf(`,"path":%q%s`, path, more)).want(403, "forbidden", "not in the part")
		}
		h.volume("rename", fmt.Sprintf(`,"path":"tenants/acme/in","to":%q`, path)).want(403, "forbidden", "not in the part")
	}
	for _, path := range []string{"a\x00b", strings.Repeat("a", 256), strings.Repeat("a/", 513) + "b"} {
		text, _ := json.Marshal(path)
		h.volume("upload_url", `,"content_length":1,"path":`+string(text)).want(400, "validation_error", "path")
	}
	long := "tenants/acme/" + strings.Repeat(strings.Repeat("l", 200)+"/", 5) + "x"
	h.volume("upload_url", fmt.Sprintf(`,"content_length":1,"path":%q`, long)).want(400, "validation_error",
		"path is too long")
	h.send(h.put(h.signVolume("upload", "/data/data/tenants/acme/out", 1), "x")).want(200, "")
	h.volume("delete", `,"path":"tenants/acme/none"`).want(404, "not_found", `nothing at "tenants/acme/none"`)
	want := map[string]string{
		"tenants/acme/in": "tenants/acme/in", "tenants/acme/out": "x",
		"tenants/acme-corp/secret": "tenants/acme-corp/secret", "tenants/escaped": "tenants/acme/../escaped",
		"other": "other",
	}
	if got := filesBelow(t, dir); !maps.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

// writeObject writes a file of a bucket's server.
func (h *harness) writeObject(path, content string) {
	h.t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
		h.t.Fatal(err)
	}
}

// Signed URLs end with what they were made for.
func TestFilesAreRefusedAtUse(t *testing.T) {
	h := newHarness(t)
	dir := h.newBucket("base")
	h.writeObject(filepath.Join(dir, "a/in"), "in")
	down, up := h.signVolume("download", "a/in", 0), h.signVolume("upload", "a/out", 1)
	parts, _ := h.beginUpload(ofBucket, "a/parts", 1)
	h.send(h.put(parts+"?part=1", "x")).want(200, "")
	refused := func(status int, code, word string, changes bool) {
		t.Helper()
		if !changes {
			h.get(down).want(status, code, word)
		}
		h.send(h.put(up, "x")).want(status, code, word)
		h.send(h.put(parts+"?part=1", "x")).want(status, code, word)
		h.get(parts).want(status, code, word)
		h.do("POST", parts, "", "Authorization", "").want(status, code, word)
		h.do("DELETE", parts, "", "Authorization", "").want(status, code, word)
	}
	const gone = "no storage connection of that name"
	h.mount("key_1")
	refused(404, "not_found", gone, false)
	h.mount("key_1", proto.KeyMount{Connection: "other"})
	refused(404, "not_found", gone, false)
	h.mount("key_1", proto.KeyMount{Connection: "data", ReadOnly: true})
	refused(403, "forbidden", "may only read", true)
	h.get(down).want(200, "")
	h.volume("upload_url", `,"path":"a","content_length":1`).want(403, "forbidden", "may only read")
	h.volume("delete", `,"path":"a/in"`).want(403, "forbidden", "may only read")
	h.volume("rename", `,"path":"a/in","to":"b"`).want(403, "forbidden", "may only read")
	h.mount("key_1", proto.KeyMount{Connection: "data", Prefix: "b"})
	h.get(down).want(404, "not_found", "no file at this path")
	refused(403, "forbidden", "not in the part", true)
	h.mount("key_1", proto.KeyMount{Connection: "data"})

	store := h.server.Connections.(*connectionStore)
	whole := store.all[0]
	store.all[0].Org = "other"
	refused(404, "not_found", gone, false)
	store.all[0] = whole
	store.all[0].Prefix = "elsewhere" // an administrator has changed it
	h.get(down).want(404, "not_found", "no file at this path")
	store.all[0] = whole
	h.do("DELETE", "/v1/admin/secrets/KEYS", "").want(204, "")
	refused(409, "conflict", "credential", false)
	h.do("PUT", "/v1/admin/secrets/KEYS", `{"value":"value"}`).want(200, "")

	// Another key has another connection of the same name.
	h.stub.addKey("other", "pro", proto.Key{Scopes: proto.UserScopes()})
	h.mount("key_2", proto.KeyMount{Connection: "data"})
	foreign := &grant{
		method: "GET", key: "key_2", org: "other", source: proto.SourceVolume, id: "data", path: "a/in",
		expiresAt: time.Now().Add(time.Minute),
	}
	h.get(contentPath+foreign.token(*h.server.URLSecret)).want(404, "not_found", gone)
	foreign.org = "acme"
	h.get(contentPath+foreign.token(*h.server.URLSecret)).want(403, "forbidden", "revoked")

	admin := h.stub.addKey("operator", "enterprise", asAdmin)
	h.do("PUT", "/v1/admin/orgs/acme", `{"plan":"enterprise","suspended":true}`, "Authorization",
		"Bearer "+admin).want(200, "")
	refused(403, "forbidden", "suspended", false)
}

// The files of a volume are those of its thread, below the prefix of the key.
func TestFilesOfVolume(t *testing.T) {
	h := newHarness(t)
	store := h.server.Connections.(*connectionStore)
	store.all = []proto.Connection{{Org: "acme", Slug: "data", Kind: proto.MountVolume, Bytes: 1 << 20, Prefix: "base"}}
	h.mount("key_1", proto.KeyMount{Connection: "data", Prefix: "team"})
	thread := proto.VolumeThread("data")
	most := proto.VolumeSpace(1 << 20)
	h.threads.most = most
	h.send(h.put(h.signVolume("upload", "/data/data/team/a/x", 5), "hello")).want(200, "")
	h.threads.files["acme/"+thread+"/base/other"] = []byte("other")
	h.threads.files["acme/"+thread+"/base/team/a"] = nil // a directory
	if got := h.threads.files["acme/"+thread+"/base/team/a/x"]; string(got) != "hello" {
		t.Errorf("%q", h.threads.files)
	}
	for path, want := range map[string][]string{
		"": {"team/"}, "team/a": {"team/a/x 5"}, "other": {}, "team/a/x": {"team/a/x 5"},
	} {
		if got := h.names(path, false); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", path, got, want)
		}
	}
	if a := h.get(h.signVolume("download", "team/a/x", 0), "Range", "bytes=1-2").want(206, ""); string(a.body) != "el" {
		t.Errorf("%q", a.body)
	}
	h.volume("download_url", `,"path":"other"`).want(404, "not_found")
	h.volume("upload_url", fmt.Sprintf(`,"path":"team/y","content_length":%d`, most.Bytes+1)).want(400, "validation_error",
		"content_length", "room for 1048576")
	h.volume("delete", `,"path":"team/none"`).want(404, "not_found", `nothing at "team/none"`)
	h.volume("rename", `,"path":"team/a/x","to":"team/b"`).want(200, "")
	if _, ok := h.threads.files["acme/"+thread+"/base/team/b"]; !ok {
		t.Errorf("%q", h.threads.files)
	}
	// The thread itself is nobody's.
	h.do("POST", "/v1/files/list", `{"source":"thread","id":"`+thread+`"}`).want(400, "validation_error", "id")
	h.threads.mu.Lock()
	h.threads.heads["acme/"+thread].Holder, h.threads.heads["acme/"+thread].HeldAt = "trc_AbCdEfGhIjKlMnOpQrSt", time.Now()
	h.threads.mu.Unlock()
	h.volume("delete", `,"path":"team/b"`).want(
		409, "conflict", "volume data is in use by execution trc_AbCdEfGhIjKlMnOpQrSt")
	h.send(h.put(h.signVolume("upload", "team/c", 1), "x")).want(
		409, "conflict", "volume data is in use by execution trc_AbCdEfGhIjKlMnOpQrSt")
	h.mount("key_1", proto.KeyMount{Connection: "data", ReadOnly: true})
	h.volume("upload_url", `,"path":"x","content_length":1`).want(403, "forbidden", "may only read")
	h.volume("download_url", `,"path":"other"`).want(200, "")
}

// nothingReserved stops the server, and checks that the requests have released what they had.
func (h *harness) nothingReserved() {
	h.t.Helper()
	h.http.Close()
	h.checkNothingHeld()
}

// checkNothingHeld checks that no request of the organisation acme has memory or a transfer.
func (h *harness) checkNothingHeld() {
	h.t.Helper()
	all := h.server.Memory / web.OrgShare
	if !h.server.ReserveFor("acme", all) {
		h.t.Error("memory is still reserved")
		return
	}
	h.server.Release("acme", all)
	now, cancel := context.WithCancel(h.t.Context())
	cancel()
	for range web.MaxTransfers {
		done, err := h.server.Transfers.Begin(now, "acme")
		if err != nil {
			h.t.Error("a transfer is still going on")
			return
		}
		defer done()
	}
}

// filesBelow returns the contents of the files in a directory by path.
func filesBelow(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if path == dir && errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || d.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		files[strings.TrimPrefix(path, dir+"/")] = string(content)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}
