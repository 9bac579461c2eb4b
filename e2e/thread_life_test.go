package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"filippo.io/age"
	"github.com/google/go-cmp/cmp"
)

// testThreadProcesses uses threads through two gateways and moves them between workers.
func testThreadProcesses(t *testing.T, p *programs) {
	b := p.newBucket(t)
	sys := newSystem(t, p, topology{separate: true}, 2,
		append(b.flags(), "--queue-wait", "1m", "--interactive-slots", "0")...)
	args := append([]string{"--data", filepath.Join(t.TempDir(), "second"), "--roles", "gateway"}, sys.args...)
	_, base := p.startServe(t, "second front", sys.env, args...)
	first, second := sys.api, &api{t, base, sys.key, sys.http}

	testThreadInARow(t, 20, first, second)
	for n := range 6 {
		one, other := first, second
		if n%2 == 1 {
			one, other = second, first
		}
		file, program := []byte(fmt.Sprint("uploaded ", n)), []byte(fmt.Sprint("written ", n))
		one.upload(t, "files", "file", file)
		other.checkDownload(t, "files", "file", file)
		if r := one.inline(bash(fmt.Sprintf("cat file; echo -n written %d > file; echo > new-%02d", n, n)).of(
			"files")); r.Stdout != string(file) {
			t.Errorf("round %d: the program found %+v", n, r)
		}
		other.checkDownload(t, "files", "file", program)
		if list := other.files("files", "", false); len(list) != n+2 || list[len(list)-1] != fmt.Sprintf("new-%02d 1", n) {
			t.Errorf("round %d: %v", n, list)
		}
		// Signed by one gateway, used at the other.
		s := one.uploadURL("files", "signed-elsewhere", 0).signed(t)
		s.URL = strings.Replace(s.URL, one.base, other.base, 1)
		if r := other.useSigned(s, s.Method, nil); r.status != http.StatusOK {
			t.Errorf("a URL of another gateway: %s", r)
		}
		if r := other.inline(bash("cat file; rm signed-elsewhere").of("files")); r.Stdout != string(program) || !r.Success {
			t.Errorf("round %d: the next program found %+v", n, r)
		}
	}
	testThreadQueued(t, first, second)
	testThreadMoves(t, sys, first, second)
}

// testThreadQueued has an execution without a slot hold a thread.
func testThreadQueued(t *testing.T, first, second *api) {
	h := newHold()
	running := []string{first.submit(bash(h.code())), second.submit(bash(h.code()))}
	h.reached(t, len(running))
	id := first.submit(bash("echo never").of("queued"))
	first.checkBusy(t, "queued", id)
	second.checkBusy(t, "queued", id)
	second.upload(t, "queued", "file", []byte("uploaded meanwhile"))
	second.do(http.MethodDelete, "/v1/threads/queued", nil).rejection(t, http.StatusConflict, "conflict")
	if r := first.do(http.MethodPost, execution(id, "cancel"), nil); r.status != http.StatusAccepted {
		t.Errorf("cancel: %s", r)
	}
	next := second.submit(bash("cat file").of("queued")) // accepted at once
	first.checkBusy(t, "queued", next)
	h.release(t)
	first.ended(next).succeeded(t, "uploaded meanwhile")
	for _, id := range running {
		first.ended(id)
	}
}

// testThreadMoves stops one worker and kills the other.
func testThreadMoves(t *testing.T, sys *system, first, second *api) {
	log := ""
	call := func(a *api, word string) {
		t.Helper()
		if r := a.inline(bash("cat log 2>&-; sha256sum < large | cut -c-8; echo " + word + " >> log").of(
			"moves")); !r.Success || r.Stdout != log+"b2cf0f88\n" {
			t.Errorf("%s found %+v, want %q", word, r, log)
		}
		log += word + "\n"
	}
	first.upload(t, "moves", "large", randomBytes(5<<20))
	call(second, "one")
	one := sys.worker
	sys.startWorker(t)
	one.signal(syscall.SIGTERM)
	if code := one.exitCode(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
	call(first, "two") // on the other worker; the first has saved everything to the store
	call(second, "three")

	two := sys.worker
	sys.startWorker(t)
	two.kill()
	call(first, "four") // once the dead worker is known to be lost
	call(second, "five")

	second.checkListing(t, "moves", "", true, "large 5242880", fmt.Sprintf("log %d", len(log)))
}

// testThreadRebuild deletes the thread data in JetStream and rebuilds it from the store.
func testThreadRebuild(t *testing.T, p *programs) {
	sys := newSystem(t, p, topology{}, 2)
	fill := `
os.makedirs('dir/empty'); os.symlink('file', 'dir/link'); open('dir/file', 'w').write('content'); os.link('dir/file', 'hard'); os.chmod('hard', 0o700)
with open('large', 'wb') as f: f.write(b'0123456789abcdef' * (5 << 16))
`
	sys.inline(python(describeCode + fill).of("kept"))
	sys.inline(bash("echo second > second; rm -r dir/empty").of("kept"))
	sys.inline(bash("echo third > third").of("kept"))
	if r := sys.do(http.MethodPost, "/v1/threads/kept/fork",
		request{"id": "forked", "version": 1}); r.status != http.StatusCreated {
		t.Fatalf("fork: %s", r)
	}
	sys.inline(bash("echo removed > x").of("removed"))
	if r := sys.do(http.MethodDelete, "/v1/threads/removed", nil); r.status != http.StatusNoContent {
		t.Errorf("remove: %s", r)
	}
	sys.upload(t, "kept", "never found", []byte("x"))
	sys.upload(t, "only-uploads", "file", []byte("x"))

	type threadState struct {
		Version, Files, Bytes int64
		Versions              []struct {
			Number, Files, Bytes int64
			CreatedAt            string  `json:"created_at"`
			TraceID              *string `json:"trace_id"`
		}
	}
	look := func() (all map[string]threadState, tars map[string][]byte) {
		all, tars = map[string]threadState{}, map[string][]byte{}
		for _, id := range []string{"kept", "forked"} {
			var x threadState
			sys.get("/v1/threads/"+id).into(t, &x)
			all[id] = x
			for _, v := range x.Versions {
				at := fmt.Sprintf("%s/archive?version=%d", id, v.Number)
				r := sys.get("/v1/threads/" + at)
				if r.status != http.StatusOK || len(r.body) < 1024 {
					t.Errorf("archive of %s: %s", at, r)
				}
				tars[at] = r.body
			}
		}
		return all, tars
	}
	before, tars := look()
	if n := len(before["kept"].Versions); n != 3 {
		t.Fatalf("%d versions of what three executions changed", n)
	}
	sys.front.signal(syscall.SIGTERM)
	sys.front.exitCode(t)
	if err := os.RemoveAll(filepath.Join(sys.data, "jetstream")); err != nil {
		t.Fatal(err)
	}
	sys.startFront(t)
	sys.ready(t)
	sys.get("/v1/threads/kept").rejection(t, http.StatusNotFound, "not_found")
	if out := sys.command(t, sys.key, "thread", "rebuild"); out != "2 threads rebuilt, 0 unchanged, 0 without a "+
		"complete version\n" {
		t.Errorf("rebuild prints %s", out)
	}
	if out := sys.command(t, sys.key, "thread", "rebuild"); out != "0 threads rebuilt, 2 unchanged, 0 without a "+
		"complete version\n" {
		t.Errorf("a second time it prints %s", out)
	}
	after, again := look()
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("threads before and after (-before +after):\n%s", diff)
	}
	for at, archive := range tars {
		if !bytes.Equal(archive, again[at]) {
			t.Errorf("the archive of %s is another", at)
		}
	}
	for _, id := range []string{"removed", "only-uploads"} {
		sys.get("/v1/threads/"+id).rejection(t, http.StatusNotFound, "not_found")
	}
	sys.checkListing(t, "kept", "", false, "dir/", "hard 7", "large 5242880", "second 7", "third 6")
	if r := sys.inline(bash("cat second third dir/link; echo fourth > fourth; stat -c %a hard").of(
		"kept")); r.Stdout != "second\nthird\ncontent700\n" {
		t.Errorf("the next execution found %+v", r)
	}
	if r := sys.inline(bash("cat fourth").of("kept")); r.Stdout != "fourth\n" {
		t.Errorf("and the next %+v", r)
	}
}

// testThreadExpiry encrypts thread data. It checks that threads expire and that their data is
// garbage-collected.
func testThreadExpiry(t *testing.T, p *programs, in topology) {
	key, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	keyFile := filepath.Join(t.TempDir(), "store.key")
	if err := os.WriteFile(keyFile, []byte(key.String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	b := p.newBucket(t)
	sys := newSystem(t, p, in, 2, append(b.flags(), "--store-key", keyFile)...)
	const word = "what nobody may read"
	large := bytes.Repeat([]byte(word+"\n"), 5<<20/len(word))
	sys.upload(t, "secret", "staged "+word, []byte(word))
	sys.upload(t, "secret", "large", large)
	r := sys.inline(python(fmt.Sprintf(
		"import os\nopen('%s', 'w').write('%[1]s')\nos.setxattr('large', 'user.x', b'%[1]s')\nos.symlink('%[1]s', 'link')",
		word)).of("secret"))
	if !r.Success {
		t.Fatalf("got %+v", r)
	}
	sys.upload(t, "secret", "uploaded", large)
	stored := b.files(t)
	if len(stored) < 5 { // a layer, an object, a manifest, uploads
		t.Errorf("the bucket has only %v", stored)
	}
	for _, name := range stored {
		content, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(content, []byte(word)) || bytes.Contains(content, []byte("layers")) ||
			strings.Contains(name, "nobody") {
			t.Errorf("%s can be read", name)
		}
		if !bytes.HasPrefix(content, []byte("age-encryption.org/v1\n")) {
			t.Errorf("%s is not encrypted", name)
		}
	}
	sys.checkDownload(t, "secret", "large", large)
	sys.checkDownload(t, "secret", word, []byte(word))
	if in.separate { // on a worker without cached data
		sys.worker.signal(syscall.SIGTERM)
		sys.worker.exitCode(t)
		sys.startWorker(t)
		sys.ready(t)
	}
	if r := sys.inline(bash("cat '" + word + "'; cmp large uploaded").of("secret")); r.Stdout != word || !r.Success {
		t.Errorf("the next execution found %+v", r)
	}

	sys.front.signal(syscall.SIGTERM)
	sys.front.exitCode(t)
	sys.args = append(sys.args, "--thread-expiry", "1s", "--thread-gc", "100ms")
	sys.startFront(t)
	sys.ready(t)
	h := newHold()
	id := sys.submit(bash("echo kept > file\n" + h.code()).of("held"))
	h.reached(t, 1)
	sys.upload(t, "unused", "file", []byte("x"))
	for _, thread := range []string{"unused", "secret"} {
		sys.awaitExpiry(t, thread)
	}
	// These were used later, or before the server started. An execution holds this one.
	if r := sys.get("/v1/threads/held"); r.status != http.StatusOK {
		t.Errorf("a thread in use: %s", r)
	}
	sys.checkListing(t, "secret", "", true)
	h.release(t)
	sys.ended(id).succeeded(t, "held\nwoken\n")
	sys.awaitExpiry(t, "held")
	var found *reply
	eventually(t, "the removal of the expired thread is complete", func() (bool, any) {
		found = sys.execute(bash("ls -A").of("secret"))
		return found.status != http.StatusConflict, found
	})
	if r := found.result(t); r.Stdout != "" || !r.Success {
		t.Errorf("a new thread of an expired one's name has %+v", r)
	}
	sys.awaitExpiry(t, "secret")
	eventually(t, "what nothing refers to is collected once it is old", func() (bool, any) {
		left := b.files(t)
		old := time.Now().Add(-72 * time.Hour)
		for _, name := range left {
			if err := os.Chtimes(name, old, old); err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
		}
		return len(left) == 0, left
	})
}

// awaitExpiry waits until the thread does not exist any more.
func (sys *system) awaitExpiry(t testing.TB, thread string) {
	t.Helper()
	eventually(t, thread+" expires", func() (bool, any) {
		r := sys.get("/v1/threads/" + thread)
		return r.status == http.StatusNotFound, r
	})
}

// files returns the files that hold the bucket's objects.
func (b *bucket) files(t testing.TB) (names []string) {
	t.Helper()
	err := filepath.WalkDir(b.path(""), func(name string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // it was removed meanwhile
			return nil
		}
		if err == nil && e.Type().IsRegular() {
			names = append(names, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
