package storage_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
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
	"github.com/cenkalti/backoff/v4"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/blob"
	"github.com/bullpen-run/bullpen/storage/s3"
)

const (
	accessKey = "tester"
	secretKey = "not-a-secret"
	bucket    = "blobs"
	// How long a front waits for a server that says nothing: long, and where a test wants that it gives up.
	patient = time.Minute
	hasty   = 150 * time.Millisecond
)

// gateway is the S3 server of all tests: versitygw on directories.
var gateway struct {
	once    sync.Once
	err     error
	dir     string // the buckets are directories in it
	socket  string
	process *exec.Cmd
}

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		putForEver(dir)
	}
	dir, err := os.MkdirTemp("", "bullpen-s3-")
	if err != nil {
		panic(err)
	}
	gateway.dir, gateway.socket = filepath.Join(dir, "buckets"), filepath.Join(dir, "s3.sock")
	for name, value := range map[string]string{
		"AWS_ACCESS_KEY_ID": accessKey, "AWS_SECRET_ACCESS_KEY": secretKey, "AWS_EC2_METADATA_DISABLED": "true",
		"AWS_CONFIG_FILE": os.DevNull, "AWS_SHARED_CREDENTIALS_FILE": os.DevNull,
	} {
		if err := os.Setenv(name, value); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if p := gateway.process; p != nil {
			if err := p.Process.Kill(); err != nil {
				panic(err)
			}
			_ = p.Wait() // it was killed
		}
		if err := os.RemoveAll(dir); err != nil {
			panic(err)
		}
		os.Exit(code)
	}))
}

// startGateway builds and starts the S3 server, once for all tests.
func startGateway() error {
	const modfile = "../deploy/s3server/go.mod"
	build := exec.Command("go", "tool", "-modfile="+modfile, "-n", "versitygw") // builds it, and tells where it is
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.Output()
	if err != nil {
		if failed, ok := errors.AsType[*exec.ExitError](err); ok {
			out = failed.Stderr
		}
		return fmt.Errorf("build versitygw: %w\n%s", err, out)
	}
	meta := filepath.Join(filepath.Dir(gateway.dir), "meta")
	if err := errors.Join(os.MkdirAll(filepath.Join(gateway.dir, bucket), 0o700), os.Mkdir(meta, 0o700)); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(filepath.Dir(gateway.dir), "log"))
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	server := exec.Command(strings.TrimSpace(string(out)), "--port", gateway.socket, "--access", accessKey, "--secret", secretKey,
		"--keep-alive", "posix", "--sidecar", meta, gateway.dir)
	server.Stdout, server.Stderr = log, log
	if err := server.Start(); err != nil {
		return err
	}
	gateway.process = server
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return backoff.Retry(func() error {
		c, err := net.Dial("unix", gateway.socket)
		if err != nil {
			text, _ := os.ReadFile(log.Name())
			return fmt.Errorf("versitygw does not listen: %w\n%s", err, text)
		}
		return c.Close()
	}, backoff.WithContext(backoff.NewConstantBackOff(20*time.Millisecond), ctx))
}

// quick is a policy that does not wait long.
func quick() blob.Policy {
	return blob.Policy{Tries: 6, First: time.Millisecond, Most: 4 * time.Millisecond}
}

// fault is what a faulty front does to a request.
type fault int

const (
	none      fault = iota
	slow            // comes byte by byte
	broken          // 500
	throttled       // 503 SlowDown
	silent          // no answer
	cut             // half of what is sent or answered
	wrong           // another byte in it
	lost            // done, but the answer is lost
)

var faultNames = map[fault]string{slow: "slow", broken: "500", throttled: "throttled", silent: "timeout", cut: "cut", wrong: "wrong", lost: "lost"}

// faults says which of the coming requests go wrong, and how.
type faults struct {
	mu    sync.Mutex
	kind  fault
	skip  int         // how many go well before that
	left  int         // how many; below 0 for all
	only  string      // the operations it is for, such as "put"; empty for all
	hit   chan string // told of each
	count int
	seen  []*http.Request // all that came over HTTP
}

func (f *faults) set(kind fault, times int, only string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.kind, f.skip, f.left, f.only, f.hit, f.count = kind, 0, times, only, make(chan string, 1000), 0
}

func (f *faults) take(op string) fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.left == 0 || f.only != "" && f.only != op {
		return none
	}
	if f.skip > 0 {
		f.skip--
		return none
	}
	f.left--
	f.count++
	f.hit <- op
	return f.kind
}

func (f *faults) hits() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count
}

// faulty is a front for backends that are not behind a network.
type faulty struct {
	blob.Backend
	*faults
	silence time.Duration
}

func unavailable(op, key string) error {
	return &blob.Error{Op: op, Key: key, Kind: blob.ErrUnavailable, Again: true, Err: errors.New("a fault of the test")}
}

// around does a request with the next fault.
func (f *faulty) around(ctx context.Context, op, key string, do func() error) error {
	return f.inflict(ctx, f.take(op), op, key, do)
}

func (f *faulty) inflict(ctx context.Context, kind fault, op, key string, do func() error) error {
	switch kind {
	case broken, throttled, cut:
		return unavailable(op, key)
	case silent:
		select {
		case <-time.After(f.silence):
			return unavailable(op, key)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	case lost:
		if err := do(); err != nil {
			return err
		}
		return unavailable(op, key)
	default:
		return do()
	}
}

func (f *faulty) Put(ctx context.Context, key string, size int64, content io.Reader, replace bool) error {
	return f.around(ctx, "put", key, func() error { return f.Backend.Put(ctx, key, size, content, replace) })
}

func (f *faulty) Stat(ctx context.Context, key string) (e blob.Entry, err error) {
	err = f.around(ctx, "stat", key, func() error {
		e, err = f.Backend.Stat(ctx, key)
		return err
	})
	return e, err
}

func (f *faulty) Delete(ctx context.Context, key string) error {
	return f.around(ctx, "delete", key, func() error { return f.Backend.Delete(ctx, key) })
}

func (f *faulty) List(ctx context.Context, prefix, after string) iter.Seq2[blob.Entry, error] {
	return func(yield func(blob.Entry, error) bool) {
		if err := f.around(ctx, "list", prefix, func() error { return nil }); err != nil {
			for e, err := range f.Backend.List(ctx, prefix, after) { // one page
				if !yield(e, err) {
					return
				}
				break
			}
			yield(blob.Entry{}, err)
			return
		}
		f.Backend.List(ctx, prefix, after)(yield)
	}
}

func (f *faulty) Get(ctx context.Context, key string, span blob.Span) (io.ReadCloser, error) {
	kind := f.take("get")
	if kind == cut || kind == wrong || kind == slow {
		body, err := f.Backend.Get(ctx, key, span)
		if err != nil {
			return nil, err
		}
		return &spoilt{ReadCloser: body, kind: kind, half: span.Length / 2}, nil
	}
	var body io.ReadCloser
	err := f.inflict(ctx, kind, "get", key, func() (err error) {
		body, err = f.Backend.Get(ctx, key, span)
		return err
	})
	if err != nil && body != nil {
		_ = body.Close()
	}
	return body, err
}

// spoilt spoils a stream.
type spoilt struct {
	io.ReadCloser
	kind fault
	half int64
	at   int64
}

func (s *spoilt) Read(p []byte) (int, error) {
	if s.kind == cut {
		if s.at == s.half {
			return 0, io.EOF
		}
		p = p[:min(int64(len(p)), s.half-s.at)]
	}
	if s.kind == slow && s.at < 100 {
		p = p[:min(len(p), 1)]
	}
	n, err := s.ReadCloser.Read(p)
	if i := s.half - s.at; s.kind == wrong && i >= 0 && i < int64(n) {
		p[i] ^= 1
	}
	s.at += int64(n)
	return n, err
}

// httpFront is a front before the S3 server.
func httpFront(t testing.TB, f *faults) (endpoint string) {
	t.Helper()
	gateway.once.Do(func() { gateway.err = startGateway() })
	if gateway.err != nil {
		t.Fatal(gateway.err)
	}
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", gateway.socket)
		},
		DisableCompression: true,
	}
	proxy := &httputil.ReverseProxy{
		Transport: transport,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: "s3"})
			r.Out.Host = r.In.Host // is signed
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		f.seen = append(f.seen, r.Clone(context.Background()))
		f.mu.Unlock()
		serveFault(f.take(operation(r)), proxy, w, r)
	}))
	server.Config.ErrorLog = nil
	t.Cleanup(func() {
		server.Close()
		transport.CloseIdleConnections()
	})
	return server.URL
}

func operation(r *http.Request) string {
	switch r.Method {
	case http.MethodPut, http.MethodPost:
		return "put"
	case http.MethodHead:
		return "stat"
	case http.MethodDelete:
		return "delete"
	}
	if r.URL.Query().Has("list-type") {
		return "list"
	}
	return "get"
}

func serveFault(kind fault, proxy http.Handler, w http.ResponseWriter, r *http.Request) {
	refuse := func(status int, code string) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/xml")
		w.WriteHeader(status)
		_, _ = fmt.Fprintf(w, "<Error><Code>%s</Code><Message>a fault of the test</Message></Error>", code)
	}
	switch kind {
	case broken:
		refuse(http.StatusInternalServerError, "InternalError")
	case throttled:
		refuse(http.StatusServiceUnavailable, "SlowDown")
	case silent:
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	case lost:
		proxy.ServeHTTP(httptest.NewRecorder(), r)
		panic(http.ErrAbortHandler)
	case cut, wrong, slow:
		if r.ContentLength > 0 {
			if kind == cut {
				_, _ = io.CopyN(io.Discard, r.Body, r.ContentLength/2)
				panic(http.ErrAbortHandler)
			}
			r.Body = &spoilt{ReadCloser: r.Body, kind: kind, half: r.ContentLength / 2}
			proxy.ServeHTTP(w, r)
			return
		}
		answer := httptest.NewRecorder()
		proxy.ServeHTTP(answer, r)
		maps.Copy(w.Header(), answer.Header())
		w.WriteHeader(answer.Code)
		body := answer.Body.Bytes()
		if len(body) == 0 {
			if kind == cut {
				panic(http.ErrAbortHandler)
			}
			return
		}
		if _, err := io.Copy(flushing{w}, &spoilt{ReadCloser: io.NopCloser(bytes.NewReader(body)), kind: kind, half: int64(len(body) / 2)}); err != nil {
			return
		}
		if kind == cut {
			panic(http.ErrAbortHandler)
		}
	default:
		proxy.ServeHTTP(w, r)
	}
}

// flushing sends each write by itself.
type flushing struct{ http.ResponseWriter }

func (f flushing) Write(p []byte) (int, error) {
	n, err := f.ResponseWriter.Write(p)
	f.ResponseWriter.(http.Flusher).Flush()
	return n, err
}

// world is a store of one kind: the store as it is, and the same through a faulty front.
type world struct {
	store *blob.Store
	front *blob.Store // waits a minute for an answer
	hasty *blob.Store // waits for a moment
	*faults
	// path gives the file that an object is in; nil if it is in none.
	path func(key string) string
}

var worlds = map[string]func(testing.TB) world{
	"memory": func(t testing.TB) world {
		m := &blob.Memory{}
		return newWorld(t, m, func(f *faults, silence time.Duration) blob.Backend { return &faulty{m, f, silence} }, nil)
	},
	"directory": func(t testing.TB) world {
		d, at := openDirectory(t)
		return newWorld(t, d, func(f *faults, silence time.Duration) blob.Backend { return &faulty{d, f, silence} }, at)
	},
	"encrypted directory": func(t testing.TB) world {
		d, at := openDirectory(t)
		key := keyFile(t, false)
		return newWorld(t, encrypt(t, d, key), func(f *faults, silence time.Duration) blob.Backend { return encrypt(t, &faulty{d, f, silence}, key) }, at)
	},
	"S3": func(t testing.TB) world {
		prefix := newPrefix()
		return newWorld(t, openS3(t, &faults{}, prefix, patient), func(f *faults, silence time.Duration) blob.Backend { return openS3(t, f, prefix, silence) }, inBucket(prefix))
	},
	"encrypted S3": func(t testing.TB) world {
		prefix, key := newPrefix(), keyFile(t, true)
		return newWorld(t, encrypt(t, openS3(t, &faults{}, prefix, patient), key),
			func(f *faults, silence time.Duration) blob.Backend {
				return encrypt(t, openS3(t, f, prefix, silence), key)
			}, inBucket(prefix))
	},
}

func newWorld(t testing.TB, backend blob.Backend, front func(*faults, time.Duration) blob.Backend, path func(string) string) world {
	f := &faults{}
	w := world{
		store: &blob.Store{Backend: backend, Policy: quick()}, front: &blob.Store{Backend: front(f, patient), Policy: quick()},
		hasty: &blob.Store{Backend: front(f, hasty), Policy: quick()}, faults: f, path: path,
	}
	t.Cleanup(func() {
		if err := w.store.Close(); err != nil {
			t.Error(err)
		}
		_, _ = w.front.Close(), w.hasty.Close() // may be the same below
	})
	return w
}

func openDirectory(t testing.TB) (d *blob.Directory, path func(string) string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "blobs")
	d, err := blob.OpenDirectory(dir)
	if err != nil {
		t.Fatal(err)
	}
	return d, func(key string) string { return filepath.Join(dir, key) }
}

func newPrefix() string { return fmt.Sprintf("p%016x/threads", rand.Uint64()) }

func inBucket(prefix string) func(string) string {
	return func(key string) string { return filepath.Join(gateway.dir, bucket, prefix, key) }
}

func openS3(t testing.TB, f *faults, prefix string, silence time.Duration) *s3.Store {
	t.Helper()
	s, err := s3.Open(t.Context(), s3.Config{
		Bucket: bucket, Prefix: prefix, Endpoint: httpFront(t, f), Region: "us-east-1", PathStyle: true, Silence: silence, Policy: quick(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// keyFile makes a key file.
func keyFile(t testing.TB, postQuantum bool) string {
	t.Helper()
	var text string
	if postQuantum {
		key, err := age.GenerateHybridIdentity()
		if err != nil {
			t.Fatal(err)
		}
		text = key.String()
	} else {
		key, err := age.GenerateX25519Identity()
		if err != nil {
			t.Fatal(err)
		}
		text = key.String()
	}
	name := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(name, []byte("# made for a test\n"+text+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func encrypt(t testing.TB, under blob.Backend, key string) *blob.Encrypted {
	t.Helper()
	e, err := blob.Encrypt(under, key)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// inEach runs a test in a new world of each kind.
func inEach(t *testing.T, test func(*testing.T, world)) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(worlds)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, worlds[name](t))
		})
	}
}

// content gives bytes that look like no others.
func content(size int) []byte {
	b := make([]byte, size)
	source := rand.NewChaCha8([32]byte{byte(size), byte(size >> 8), byte(size >> 16), 1})
	_, _ = source.Read(b) // never fails
	return b
}

func named(key string, b []byte) proto.Blob {
	sum := sha256.Sum256(b)
	return proto.Blob{Key: key, Size: int64(len(b)), Digest: "sha256:" + hex.EncodeToString(sum[:])}
}

// put stores bytes.
func put(t testing.TB, s *blob.Store, key string, b []byte) proto.Blob {
	t.Helper()
	name := named(key, b)
	if err := s.Put(t.Context(), name, bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	return name
}

// get reads a whole object.
func get(ctx context.Context, s *blob.Store, b proto.Blob) ([]byte, error) {
	r, err := s.Get(ctx, b)
	if err != nil {
		return nil, err
	}
	got, err := io.ReadAll(r)
	return got, errors.Join(err, r.Close())
}

// wantContent reads a whole object and compares.
func wantContent(t testing.TB, s *blob.Store, b proto.Blob, want []byte) {
	t.Helper()
	got, err := get(t.Context(), s, b)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%s: got %d bytes, which are not the %d that were put", b.Key, len(got), len(want))
	}
}

// wantError wants an error of a kind, which names the operation and the key, and that there is something to do.
func wantError(t testing.TB, err, kind error, op, key string) {
	t.Helper()
	var e *blob.Error
	if !errors.Is(err, kind) || !errors.As(err, &e) || e.Op != op || e.Key != key {
		t.Fatalf("got %v, want %q for %s of %s", err, kind, op, key)
	}
	if text := err.Error(); !strings.Contains(text, op+" blob") || !strings.Contains(text, key) || strings.HasSuffix(text, ": ") {
		t.Errorf("the text of the error lacks something: %s", text)
	}
}

// wantAbsent wants that nobody sees an object.
func wantAbsent(t testing.TB, s *blob.Store, key string) {
	t.Helper()
	if e, err := s.Stat(t.Context(), key); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("there is %v, %v", e, err)
	}
	if keys := keysOf(t, s, ""); slices.Contains(keys, key) {
		t.Fatalf("%s is among %v", key, keys)
	}
}

func keysOf(t testing.TB, s *blob.Store, prefix string) []string {
	t.Helper()
	keys := []string{}
	for e, err := range s.List(t.Context(), prefix) {
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, e.Key)
	}
	return keys
}
