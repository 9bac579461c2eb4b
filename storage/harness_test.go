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
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"filippo.io/age"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/blob"
	"github.com/bullpen-run/bullpen/storage/s3"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

const (
	// Idle timeouts of stores with faults.
	longTimeout  = time.Minute
	shortTimeout = 150 * time.Millisecond
)

// server is the S3 server of all tests, started by the first test that needs it.
var server struct {
	once sync.Once
	err  error
	*storagetest.Server
}

func startServer(t testing.TB) *storagetest.Server {
	t.Helper()
	server.once.Do(func() { server.Server, server.err = storagetest.Start("") })
	if server.err != nil {
		t.Fatal(server.err)
	}
	return server.Server
}

// serving stops the server after the tests.
type serving struct{ *testing.M }

func (s serving) Run() int {
	code := s.M.Run()
	if server.Server != nil {
		if err := server.Close(); err != nil {
			panic(err)
		}
	}
	return code
}

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		putUntilKilled(dir)
	}
	if err := storagetest.Setenv(); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(serving{m})
}

// quick is a retry policy with short pauses.
func quick() blob.RetryPolicy {
	return blob.RetryPolicy{Attempts: 6, MinWait: time.Millisecond, MaxWait: 4 * time.Millisecond}
}

// faulty injects faults into a backend without a network.
type faulty struct {
	blob.Backend
	*storagetest.Injector
	silence time.Duration
}

func unavailable(op, key string) error {
	return &blob.Error{
		Op: op, Key: key, Kind: blob.ErrUnavailable, Retryable: true,
		Err: errors.New("a fault of the test"),
	}
}

// withNextFault carries out a request with the next fault.
func (f *faulty) withNextFault(ctx context.Context, op, key string, do func() error) error {
	return f.injectFault(ctx, f.Next(op), op, key, do)
}

func (f *faulty) injectFault(ctx context.Context, kind storagetest.Fault, op, key string, do func() error) error {
	switch kind {
	case storagetest.Broken, storagetest.Throttled, storagetest.Cut, storagetest.Reset:
		return unavailable(op, key)
	case storagetest.Silent:
		select {
		case <-time.After(f.silence):
			return unavailable(op, key)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	case storagetest.Lost:
		if err := do(); err != nil {
			return err
		}
		return unavailable(op, key)
	default:
		return do()
	}
}

func (f *faulty) Put(ctx context.Context, key string, size int64, content io.Reader, replace bool) error {
	return f.withNextFault(ctx, "put", key, func() error { return f.Backend.Put(ctx, key, size, content, replace) })
}

func (f *faulty) Stat(ctx context.Context, key string) (e blob.Entry, err error) {
	err = f.withNextFault(ctx, "stat", key, func() error {
		e, err = f.Backend.Stat(ctx, key)
		return err
	})
	return e, err
}

func (f *faulty) Delete(ctx context.Context, key string) error {
	return f.withNextFault(ctx, "delete", key, func() error { return f.Backend.Delete(ctx, key) })
}

func (f *faulty) List(ctx context.Context, prefix, after string) iter.Seq2[blob.Entry, error] {
	return func(yield func(blob.Entry, error) bool) {
		if err := f.withNextFault(ctx, "list", prefix, func() error { return nil }); err != nil {
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
	kind := f.Next("get")
	if kind == storagetest.Cut || kind == storagetest.Wrong || kind == storagetest.Slow {
		body, err := f.Backend.Get(ctx, key, span)
		if err != nil {
			return nil, err
		}
		return &storagetest.FaultyReader{ReadCloser: body, Kind: kind, Size: span.Length}, nil
	}
	var body io.ReadCloser
	err := f.injectFault(ctx, kind, "get", key, func() (err error) {
		body, err = f.Backend.Get(ctx, key, span)
		return err
	})
	if err != nil && body != nil {
		_ = body.Close()
	}
	return body, err
}

// world is a store of one kind, with and without injected faults.
type world struct {
	store        *blob.Store
	front        *blob.Store // waits a minute for a response
	shortTimeout *blob.Store // times out early
	*storagetest.Injector
	// path returns the file of an object; nil for stores without files.
	path func(key string) string
}

var worlds = map[string]func(testing.TB) world{
	"memory": func(t testing.TB) world {
		m := &storagetest.Memory{}
		return newWorld(t, m, func(f *storagetest.Injector, silence time.Duration) blob.Backend {
			return &faulty{m, f, silence}
		}, nil)
	},
	"directory": func(t testing.TB) world {
		d, at := openDirectory(t)
		return newWorld(t, d, func(f *storagetest.Injector, silence time.Duration) blob.Backend {
			return &faulty{d, f, silence}
		}, at)
	},
	"encrypted directory": func(t testing.TB) world {
		d, at := openDirectory(t)
		key := keyFile(t, false)
		return newWorld(t, encrypt(t, d, key), func(f *storagetest.Injector, silence time.Duration) blob.Backend {
			return encrypt(t, &faulty{d, f, silence}, key)
		}, at)
	},
	"S3": func(t testing.TB) world {
		prefix := newPrefix()
		return newWorld(t, openS3(t, &storagetest.Injector{}, prefix, longTimeout),
			func(f *storagetest.Injector, silence time.Duration) blob.Backend {
				return openS3(t, f, prefix, silence)
			}, inBucket(prefix))
	},
	"encrypted S3": func(t testing.TB) world {
		prefix, key := newPrefix(), keyFile(t, true)
		return newWorld(t, encrypt(t, openS3(t, &storagetest.Injector{}, prefix, longTimeout), key),
			func(f *storagetest.Injector, silence time.Duration) blob.Backend {
				return encrypt(t, openS3(t, f, prefix, silence), key)
			}, inBucket(prefix))
	},
}

func newWorld(
	t testing.TB, backend blob.Backend, front func(*storagetest.Injector, time.Duration) blob.Backend,
	path func(string) string,
) world {
	f := &storagetest.Injector{}
	w := world{
		store:        &blob.Store{Backend: backend, Retry: quick()},
		front:        &blob.Store{Backend: front(f, longTimeout), Retry: quick()},
		shortTimeout: &blob.Store{Backend: front(f, shortTimeout), Retry: quick()}, Injector: f, path: path,
	}
	t.Cleanup(func() {
		if err := w.store.Close(); err != nil {
			t.Error(err)
		}
		_, _ = w.front.Close(), w.shortTimeout.Close() // may share a backend
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
	return func(key string) string { return server.Path(prefix + "/" + key) }
}

func openS3(t testing.TB, f *storagetest.Injector, prefix string, silence time.Duration) *s3.Store {
	t.Helper()
	proxy := startServer(t).Proxy(f)
	t.Cleanup(proxy.Close)
	s, err := s3.Open(t.Context(), s3.Config{
		Bucket: storagetest.Bucket, Prefix: prefix, Endpoint: proxy.Endpoint, Region: storagetest.Region, PathStyle: true,
		IdleTimeout: silence, Retry: quick(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// keyFile creates a key file.
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

// inEach runs a test in a new world of each kind. With -short, two worlds cover each backend once.
func inEach(t *testing.T, test func(*testing.T, world)) {
	t.Helper()
	names := slices.Sorted(maps.Keys(worlds))
	if testing.Short() {
		names = []string{"directory", "encrypted S3"}
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, worlds[name](t))
		})
	}
}

// content returns unique random bytes.
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

// wantContent checks the content of an object.
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

// wantError checks the kind, operation and key of an error, and that it has a remedy.
func wantError(t testing.TB, err, kind error, op, key string) {
	t.Helper()
	var e *blob.Error
	if !errors.Is(err, kind) || !errors.As(err, &e) || e.Op != op || e.Key != key {
		t.Fatalf("got %v, want %q for %s of %s", err, kind, op, key)
	}
	if text := err.Error(); !strings.Contains(text, op+" blob") || !strings.Contains(text, key) ||
		strings.HasSuffix(text, ": ") {
		t.Errorf("the text of the error is incomplete: %s", text)
	}
}

// wantAbsent checks that an object does not exist.
func wantAbsent(t testing.TB, s *blob.Store, key string) {
	t.Helper()
	if e, err := s.Stat(t.Context(), key); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("the object exists: %v, %v", e, err)
	}
	if keys := keysOf(t, s, ""); slices.Contains(keys, key) {
		t.Fatalf("%s is listed: %v", key, keys)
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
