package storage_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"filippo.io/age"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage"
	"github.com/bullpen-run/bullpen/storage/blob"
	"github.com/bullpen-run/bullpen/storage/s3"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// childDir is set in a child process that puts an endless object into a store in that directory.
const childDir = "BULLPEN_TEST_STORE"

// endless is content that blocks after its beginning.
type endless struct{ head []byte }

func (e endless) ReadAt(p []byte, off int64) (int, error) {
	if off >= int64(len(e.head)) {
		fmt.Println("half-way")
		select {}
	}
	return copy(p, e.head[off:]), nil
}

func putUntilKilled(dir string) {
	d, err := blob.OpenDirectory(dir)
	if err != nil {
		panic(err)
	}
	store := &blob.Store{Backend: d, Retry: quick()}
	panic(store.Put(context.Background(), named("a/b", content(2*mebibyte)), endless{content(2 * mebibyte)[:mebibyte]}))
}

func TestKilledWhilePutting(t *testing.T) {
	dir := t.TempDir()
	d, err := blob.OpenDirectory(dir)
	if err != nil {
		t.Fatal(err)
	}
	store := &blob.Store{Backend: d, Retry: quick()}
	defer func() { _ = store.Close() }()
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childDir+"="+dir)
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, len("half-way\n"))
	if _, err := io.ReadFull(out, line); err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	wantAbsent(t, store, "a/b")
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // killed
	wantAbsent(t, store, "a/b")
	left, err := filepath.Glob(filepath.Join(dir, ".writing", "*"))
	if err != nil || len(left) != 1 {
		t.Fatalf("it was not half-way: %v, %v", left, err)
	}
	b := put(t, store, "a/b", content(2*mebibyte))
	wantContent(t, store, b, content(2*mebibyte))

	reopen := func() {
		t.Helper()
		again, err := blob.OpenDirectory(dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := again.Close(); err != nil {
			t.Fatal(err)
		}
	}
	reopen()
	if _, err := os.Stat(left[0]); err != nil {
		t.Errorf("what somebody may be writing was removed: %v", err)
	}
	old := time.Now().Add(-2 * time.Hour)
	if err := os.Chtimes(left[0], old, old); err != nil {
		t.Fatal(err)
	}
	reopen()
	if _, err := os.Stat(left[0]); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an abandoned file still exists: %v", err)
	}
	wantContent(t, store, b, content(2*mebibyte))
}

func TestDirectory(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(outside, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "x", "blobs")
	store, err := storage.Open(t.Context(), "file://"+dir, "")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = store.Close() }()
	put(t, store, "a/b/c", []byte("1"))
	put(t, store, "a/d", []byte("2"))
	modes := map[string]fs.FileMode{".": 0o700, ".writing": 0o700, "a": 0o700, "a/b": 0o700, "a/b/c": 0o600, "a/d": 0o600}
	for name, mode := range modes {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v, want %v", name, info, err, mode)
		}
	}
	if left, err := os.ReadDir(filepath.Join(dir, ".writing")); err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}

	// An object and a directory cannot have the same name. Neither is lost.
	for _, key := range []string{"a/b", "a/d/e"} {
		if err := store.Put(t.Context(), named(key, []byte("x")), strings.NewReader("x")); err == nil {
			t.Errorf("%s was put", key)
		}
		if err := store.Delete(t.Context(), key); err != nil {
			t.Error(err)
		}
	}
	if got := keysOf(t, store, ""); !slices.Equal(got, []string{"a/b/c", "a/d"}) {
		t.Errorf("there are %v", got)
	}

	// Planted links lead nowhere.
	for name, target := range map[string]string{"link": outside, "up": filepath.Dir(outside), "a/rel": "../../../secret"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, key := range []string{"link", "up/secret", "a/rel"} {
		got, err := get(t.Context(), store, named(key, []byte("secret")))
		if err == nil {
			t.Errorf("%s contains %q", key, got)
		}
		_ = store.Delete(t.Context(), key) // removes the link at most
		err = store.Put(t.Context(), named("up/new", []byte("x")), strings.NewReader("x"))
		if err == nil {
			t.Error("something was put outside")
		}
	}
	if b, err := os.ReadFile(outside); err != nil || string(b) != "secret" {
		t.Errorf("the file outside contains %q, %v", b, err)
	}
	if got := keysOf(t, store, ""); !slices.Equal(got, []string{"a/b/c", "a/d"}) {
		t.Errorf("there are %v", got)
	}

	if err := store.Delete(t.Context(), "a/b/c"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "a", "b")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an empty directory is left: %v", err)
	}

	// A process that is killed while it puts or deletes leaves empty directories.
	for _, empty := range []string{"a/killed/x/y", "b"} {
		if err := os.MkdirAll(filepath.Join(dir, empty), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if got := keysOf(t, store, "a/"); !slices.Equal(got, []string{"a/d"}) {
		t.Errorf("there are %v", got)
	}
	for name, want := range map[string]error{"a/killed": fs.ErrNotExist, "a/d": nil, "b": nil, ".writing": nil} {
		if _, err := os.Stat(filepath.Join(dir, name)); !errors.Is(err, want) {
			t.Errorf("after a list, %s: %v, want %v", name, err, want)
		}
	}
}

// Another process lists, and removes empty directories, while objects are put.
func TestPutWhileListing(t *testing.T) {
	var stores [2]*blob.Store
	dir := "file://" + t.TempDir()
	for i := range stores {
		var err error
		if stores[i], err = storage.Open(t.Context(), dir, ""); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = stores[i].Close() }()
	}
	store, other := stores[0], stores[1]
	ctx, stop := context.WithCancel(t.Context())
	var listing sync.WaitGroup
	listing.Go(func() {
		for ctx.Err() == nil {
			for _, err := range other.List(ctx, "") {
				if err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		}
	})
	for i := range 300 {
		key := fmt.Sprintf("a/b%d/c/d", i)
		put(t, store, key, []byte("x"))
		if err := store.Delete(t.Context(), key); err != nil {
			t.Error(err)
		}
	}
	stop()
	listing.Wait()
}

func TestEncryption(t *testing.T) {
	dir, key := t.TempDir(), keyFile(t, false)
	open := func(key string) *blob.Store {
		store, err := storage.Open(t.Context(), "file://"+dir, key)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = store.Close() })
		return store
	}
	store := open(key)
	want := bytes.Repeat([]byte("plain text "), 20_000)
	b := put(t, store, "text", want)
	stored, err := os.ReadFile(filepath.Join(dir, "text"))
	if err != nil || bytes.Contains(stored, []byte("plain")) {
		t.Fatalf("it is not encrypted: %v", err)
	}

	// The age command can decrypt objects.
	text, err := os.Open(key)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = text.Close() }()
	identities, err := age.ParseIdentities(text)
	if err != nil {
		t.Fatal(err)
	}
	r, err := age.Decrypt(bytes.NewReader(stored), identities...)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want) {
		t.Errorf("age decrypted %d bytes, %v", len(got), err)
	}

	other := open(keyFile(t, false))
	_, err = other.Get(t.Context(), b)
	wantError(t, err, blob.ErrUnavailable, "get", "text")
	if errors.Is(err, proto.ErrCorrupt) || !strings.Contains(err.Error(), "use the key file") {
		t.Errorf("got %v", err)
	}
	_, err = open("").Get(t.Context(), b)
	wantError(t, err, proto.ErrCorrupt, "get", "text")

	// A store that exchanges objects encrypted with the same key is detected.
	swapped := put(t, store, "swapped", content(len(want)))
	if err := os.WriteFile(filepath.Join(dir, "swapped"), stored, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = get(t.Context(), store, swapped)
	wantError(t, err, proto.ErrCorrupt, "get", "swapped")

	// A changed byte is detected in a range around it.
	stored[len(stored)/2] ^= 1
	if err := os.WriteFile(filepath.Join(dir, "text"), stored, 0o600); err != nil {
		t.Fatal(err)
	}
	ranged, err := store.GetRange(t.Context(), b, b.Size/2-10, 20)
	if err == nil {
		_, err = io.ReadAll(ranged)
		_ = ranged.Close()
	}
	wantError(t, err, proto.ErrCorrupt, "get", "text")

	for name, text := range map[string]string{
		"empty": "", "none": "# nothing\n",
		"two": mustRead(t, key) + mustRead(t, keyFile(t, false)), "noise": "AGE-SECRET-KEY-1QQQ",
	} {
		file := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := storage.Open(t.Context(), "file://"+dir, file); err == nil || !strings.Contains(err.Error(), file) ||
			strings.Contains(err.Error(), "1QQQ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := os.Chmod(key, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := storage.Open(t.Context(), "file://"+dir, key); err == nil || !strings.Contains(err.Error(), "chmod") {
		t.Errorf("a key that others can read: %v", err)
	}
}

func mustRead(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Only the failed parts are sent again.
func TestFailedPartsAreRetried(t *testing.T) {
	f := &storagetest.Injector{}
	prefix := newPrefix()
	store := &blob.Store{Backend: openS3(t, f, prefix, longTimeout), Retry: quick()}
	want := content(30 * mebibyte)
	b := named("large", want)
	f.Set(storagetest.Broken, 3, "put", 0)
	if err := store.Put(t.Context(), b, bytes.NewReader(want)); err != nil {
		t.Fatal(err)
	}
	requests := map[string]int{}
	for _, r := range f.Seen() {
		switch q := r.URL.Query(); {
		case q.Has("uploads"):
			requests["create"]++
		case q.Has("partNumber"):
			requests["part"]++
		case q.Has("uploadId"):
			requests["complete"]++
		}
	}
	if n := requests["create"] + requests["part"] + requests["complete"]; n != 1+4+1+3 || requests["part"] > 4+3 {
		t.Errorf("with 4 parts and 3 faults, the requests were %v", requests)
	}
	wantContent(t, store, b, want)
}

// The object exists after an upload whichever response is lost.
func TestLostAnswersOfUploads(t *testing.T) {
	f := &storagetest.Injector{}
	store := &blob.Store{Backend: openS3(t, f, newPrefix(), longTimeout), Retry: quick()}
	want := content(9 * mebibyte)
	for i := range 4 { // create, two parts, complete
		f.Set(storagetest.Lost, 1, "put", i)
		b := named(fmt.Sprintf("large/%d", i), want)
		if err := store.Put(t.Context(), b, bytes.NewReader(want)); err != nil {
			t.Errorf("request %d: %v", i, err)
			continue
		}
		if f.Hits() != 1 {
			t.Errorf("there was no request %d", i)
		}
		wantContent(t, store, b, want)
	}
}

// A failed upload leaves no parts behind.
func TestUploadsAreAborted(t *testing.T) {
	f := &storagetest.Injector{}
	prefix := newPrefix()
	store := &blob.Store{Backend: openS3(t, f, prefix, longTimeout), Retry: quick()}
	b := named("large", content(30*mebibyte))
	other := content(30 * mebibyte)
	other[29*mebibyte] ^= 1
	wantError(t, store.Put(t.Context(), b, bytes.NewReader(other)), proto.ErrCorrupt, "put", "large")
	wantAbsent(t, store, "large")
	uploads := func() (open, aborted int) {
		for _, r := range f.Seen() {
			switch q := r.URL.Query(); {
			case q.Has("uploads"):
				open++
			case r.Method == http.MethodDelete && q.Has("uploadId"):
				aborted++
			}
		}
		return open, aborted
	}
	if open, aborted := uploads(); open != 1 || aborted != 1 {
		t.Errorf("%d uploads were begun and %d aborted", open, aborted)
	}
}

// requests is an HTTP server that records requests and stores nothing.
type requests struct {
	mu   sync.Mutex
	seen []*http.Request
	no   func(*http.Request) (status int, code string) // status 0 for the usual response
	// header is added to rejections.
	header http.Header
}

func (q *requests) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	q.mu.Lock()
	q.seen = append(q.seen, r.Clone(r.Context()))
	q.mu.Unlock()
	if q.no != nil {
		if status, code := q.no(r); status != 0 {
			maps.Copy(w.Header(), q.header)
			w.WriteHeader(status)
			_, _ = fmt.Fprintf(w, "<Error><Code>%s</Code></Error>", code)
			return
		}
	}
	w.Header().Set("ETag", `"e"`)
	switch query := r.URL.Query(); {
	case query.Has("uploads"):
		_, _ = io.WriteString(w, "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
	case r.Method == http.MethodPost:
		_, _ = io.WriteString(w, "<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>")
	}
}

func openRecorded(t *testing.T, q *requests, parameters string) *blob.Store {
	t.Helper()
	server := httptest.NewServer(q)
	t.Cleanup(server.Close)
	store, err := storage.Open(t.Context(), "s3://a-bucket/some/prefix?region=eu-test-1&path_style=1&endpoint="+
		url.QueryEscape(server.URL)+parameters, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	store.Retry = quick()
	return store
}

// Requests follow the URL and use no features that older servers do not support.
func TestS3Requests(t *testing.T) {
	q := &requests{}
	store := openRecorded(t, q, "&sse=aws:kms&kms_key=k1")
	put(t, store, "small", content(10))
	put(t, store, "large", content(9*mebibyte))
	encrypted := 0
	for _, r := range q.seen {
		if !strings.HasPrefix(r.URL.Path, "/a-bucket/some/prefix/") ||
			!strings.Contains(r.Header.Get("Authorization"), "/eu-test-1/s3/") {
			t.Errorf("%s %s, %s", r.Method, r.URL, r.Header.Get("Authorization"))
		}
		for name, value := range r.Header {
			if strings.HasPrefix(name, "X-Amz-Checksum") || name == "X-Amz-Trailer" || name == "X-Amz-Sdk-Checksum-Algorithm" ||
				name == "Content-Encoding" || strings.HasPrefix(value[0], "STREAMING-") {
				t.Errorf("%s %s has %s: %s", r.Method, r.URL, name, value)
			}
		}
		if r.Header.Get("X-Amz-Server-Side-Encryption") == "aws:kms" &&
			r.Header.Get("X-Amz-Server-Side-Encryption-Aws-Kms-Key-Id") == "k1" {
			encrypted++
		}
	}
	if len(q.seen) != 1+4 || encrypted != 2 {
		t.Errorf("of %d requests, %d had the headers for encryption", len(q.seen), encrypted)
	}
}

// After one rejected conditional request, no more are sent.
func TestS3WithoutConditions(t *testing.T) {
	q := &requests{no: func(r *http.Request) (int, string) {
		if r.Header.Get("If-None-Match") != "" {
			return http.StatusNotImplemented, "NotImplemented"
		}
		return 0, ""
	}}
	store := openRecorded(t, q, "")
	put(t, store, "large", content(9*mebibyte))
	put(t, store, "small", content(1))
	if len(q.seen) != 1+2+2+1 {
		t.Errorf("there were %d requests", len(q.seen))
	}
}

// Errors that a retry cannot fix are not retried, and have a remedy.
func TestS3Rejections(t *testing.T) {
	for _, rejection := range []struct {
		status int
		code   string
		text   string
	}{
		{http.StatusForbidden, "AccessDenied", "credentials"},
		{http.StatusNotFound, "NoSuchBucket", "make the bucket a-bucket"},
		{http.StatusMovedPermanently, "PermanentRedirect", "write region=eu-there-1 in"},
		{http.StatusTemporaryRedirect, "TemporaryRedirect", "write region=eu-there-1 in"},
		{http.StatusBadRequest, "AuthorizationHeaderMalformed", "write region=eu-there-1 in"},
		{http.StatusForbidden, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"},
		{http.StatusForbidden, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"},
		{http.StatusForbidden, "RequestTimeTooSkewed", "clock"},
		{http.StatusNotFound, "", "endpoint"}, // of a server that is none for S3
		{http.StatusBadRequest, "IllegalLocationConstraintException", "correct region="},
		{http.StatusBadRequest, "InvalidArgument", "S3 protocol"},
	} {
		q := &requests{
			no:     func(*http.Request) (int, string) { return rejection.status, rejection.code },
			header: http.Header{"Location": {"http://elsewhere.invalid/"}},
		}
		if strings.Contains(rejection.text, "eu-there-1") {
			q.header.Set("X-Amz-Bucket-Region", "eu-there-1")
		}
		store := openRecorded(t, q, "")
		err := store.Put(t.Context(), named("k", content(1)), bytes.NewReader(content(1)))
		wantError(t, err, blob.ErrUnavailable, "put", "k")
		if !strings.Contains(err.Error(), rejection.text) || len(q.seen) != 1 {
			t.Errorf("%s: after %d requests: %v", rejection.code, len(q.seen), err)
		}
	}
}

// A response with another range than requested is rejected.
func TestS3WithoutRanges(t *testing.T) {
	server := httptest.NewServer(
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(content(1000)) }))
	defer server.Close()
	backend, err := s3.Open(t.Context(),
		s3.Config{Bucket: "b", Endpoint: server.URL, Region: "r", PathStyle: true, Retry: quick()})
	if err != nil {
		t.Fatal(err)
	}
	store := &blob.Store{Backend: backend, Retry: quick()}
	defer func() { _ = store.Close() }()
	_, err = store.GetRange(t.Context(), named("k", content(1000)), 500, 100)
	wantError(t, err, proto.ErrCorrupt, "get", "k")
}

// Errors without an response have a remedy.
func TestS3Unreachable(t *testing.T) {
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	secret := httptest.NewUnstartedServer(http.NotFoundHandler())
	secret.Config.ErrorLog = log.New(io.Discard, "", 0) // of handshakes
	secret.StartTLS()
	defer secret.Close()
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	for _, test := range []struct{ endpoint, parameters, text string }{
		{gone.URL, "&path_style=1", "start the server at " + gone.URL},
		{strings.Replace(plain.URL, "http:", "https:", 1), "&path_style=1", "write http://"},
		{strings.Replace(secret.URL, "https:", "http:", 1), "&path_style=1", "with https://"},
		{secret.URL, "&path_style=1", "AWS_CA_BUNDLE"},
		{"http://nobody.invalid", "&path_style=1", "resolve it; else correct endpoint="},
		{"http://nobody.invalid", "", "path_style=1"},
	} {
		store, err := storage.Open(t.Context(), "s3://b/p?region=r&endpoint="+test.endpoint+test.parameters, "")
		if err != nil {
			t.Fatal(err)
		}
		store.Retry = quick()
		_, err = store.Stat(t.Context(), "k")
		if err == nil || !errors.Is(err, blob.ErrUnavailable) || !strings.Contains(err.Error(), test.text) {
			t.Errorf("%s%s: %v", test.endpoint, test.parameters, err)
		}
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Missing credentials are reported as such, whatever their provider answered.
func TestS3WithoutCredentials(t *testing.T) {
	nobody := httptest.NewServer(http.NotFoundHandler())
	defer nobody.Close()
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "")
	for name, env := range map[string][2]string{
		"container": {"AWS_CONTAINER_CREDENTIALS_FULL_URI", nobody.URL},
		"machine":   {"AWS_EC2_METADATA_SERVICE_ENDPOINT", nobody.URL},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("AWS_EC2_METADATA_DISABLED", "false")
			t.Setenv(env[0], env[1])
			store := openRecorded(t, &requests{}, "")
			_, err := store.Get(t.Context(), named("k", content(1)))
			wantError(t, err, blob.ErrUnavailable, "get", "k")
			if errors.Is(err, proto.ErrNotFound) || !strings.Contains(err.Error(), "AWS_ACCESS_KEY_ID") {
				t.Errorf("got %v", err)
			}
			if err := store.Delete(t.Context(), "k"); err == nil {
				t.Error("it was deleted")
			}
		})
	}
}

// A server that rejects the caller, or does not speak S3, has not reported that an object is
// missing.
func TestS3NotFound(t *testing.T) {
	nothing := httptest.NewServer(http.NotFoundHandler())
	defer nothing.Close()
	endpoint, err := startServer(t).Endpoint()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "nobody")
	for _, at := range []string{endpoint, nothing.URL} {
		store, err := storage.Open(t.Context(), storagetest.StoreURL(at, newPrefix()), "")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = store.Close() }()
		store.Retry = quick()
		_, err = store.Get(t.Context(), named("k", content(1)))
		wantError(t, err, blob.ErrUnavailable, "get", "k")
		err = store.Delete(t.Context(), "k")
		wantError(t, err, blob.ErrUnavailable, "delete", "k")
		for _, err = range store.List(t.Context(), "") {
			wantError(t, err, blob.ErrUnavailable, "list", "")
		}
		if err == nil {
			t.Error("it was listed")
		}
	}
}

// A closed store leaves no connections.
func TestS3Close(t *testing.T) {
	closed := make(chan struct{}, 10)
	server := httptest.NewUnstartedServer(&requests{})
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateClosed {
			closed <- struct{}{}
		}
	}
	server.Start()
	defer server.Close()
	backend, err := s3.Open(t.Context(),
		s3.Config{Bucket: "b", Endpoint: server.URL, Region: "r", PathStyle: true, Retry: quick()})
	if err != nil {
		t.Fatal(err)
	}
	store := &blob.Store{Backend: backend, Retry: quick()}
	put(t, store, "k", content(1))
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-closed:
	case <-time.After(10 * time.Second):
		t.Error("its connection is still open")
	}
}

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	for _, location := range []string{
		"", "blobs", "/blobs", "file:", "file:///", "file:///..", "file://host/dir", "file:dir", "file://" + dir + "?x=1",
		"file://" + dir + "#x", "mem://", "http://h/b", "s3:b",
		"s3://", "s3:///p", "s3://b/../p?region=r", "s3://b/p//q?region=r", "s3://b/p?region=r&unknown=1",
		"s3://b/p?region=r&region=r", "s3://b/p?region=",
		"s3://b/p?region=r&path_style=maybe", "s3://b/p?region=r&sse=rot13", "s3://b/p?region=r&kms_key=k",
		"s3://b/p?region=r&sse=AES256&kms_key=k",
		"s3://b/p?region=r&endpoint=localhost", "s3://b/p?region=r&endpoint=ftp://h", "s3://b/p", "s3://b/p?region=r%zz",
		"s3://user:hunter2@b/p?region=r", "s3://b/p?region=r&endpoint=http://user:hunter2@h", "s3://user:hunter2@b:x y/p",
	} {
		store, err := storage.Open(t.Context(), location, "")
		if err == nil {
			t.Errorf("%q was opened", location)
			_ = store.Close()
			continue
		}
		if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("a password is in the error: %v", err)
		}
		if text := err.Error(); !strings.Contains(text, "use ") && !strings.Contains(text, "set ") {
			t.Errorf("%q: the error has no remedy: %v", location, err)
		}
		// Check does not look for a region in the environment.
		if checked := storage.Check(location); location != "s3://b/p" && (checked == nil || checked.Error() != err.Error()) {
			t.Errorf("%q: found without opening it: %v", location, checked)
		}
	}
	for _, location := range []string{
		"file://" + dir, "s3://b?region=r", "s3://b/?region=r",
		"s3://b/p/q/?region=r&endpoint=https://h:9000&path_style=1&sse=aws:kms:dsse&kms_key=k",
	} {
		store, err := storage.Open(t.Context(), location, "")
		if err := errors.Join(err, storage.Check(location)); err != nil {
			t.Errorf("%q: %v", location, err)
			continue
		}
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := storage.Open(t.Context(), "file://"+dir, filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing key file: %v", err)
	}
}

// A server may report that an object exists and hang up before it has read the content again.
func TestPutOfExistingObjectEndsEarly(t *testing.T) {
	f := &storagetest.Injector{}
	store := &blob.Store{Backend: openS3(t, f, newPrefix(), longTimeout), Retry: quick()}
	want := content(5 * mebibyte)
	b := named("object", want)
	if err := store.Put(t.Context(), b, bytes.NewReader(want)); err != nil {
		t.Fatal(err)
	}
	f.Set(storagetest.Reset, -1, "put", 0)
	if err := store.Put(t.Context(), b, bytes.NewReader(want)); err != nil {
		t.Errorf("a second time: %v", err)
	}
	if f.Hits() != 1 {
		t.Errorf("%d requests ended early", f.Hits())
	}
	wantError(t, store.Put(t.Context(), named("another", want), bytes.NewReader(want)), blob.ErrUnavailable,
		"put", "another")
	longer := content(6 * mebibyte)
	wantError(t, store.Put(t.Context(), named("object", longer), bytes.NewReader(longer)), proto.ErrExists,
		"put", "object")
}
