package storage_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/blob"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

const mebibyte = 1 << 20

func TestPutGet(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		for _, size := range []int{0, 1, 65535, 65536, 65537, 8 * mebibyte, 8*mebibyte + 1, 17 * mebibyte} {
			want := content(size)
			began := time.Now()
			b := put(t, w.store, fmt.Sprintf("a/%d", size), want)
			wantContent(t, w.store, b, want)
			e, err := w.store.Stat(t.Context(), b.Key)
			if err != nil || e.Key != b.Key || e.Size != b.Size {
				t.Errorf("stat: %+v, %v; want size %d", e, err, size)
			}
			if e.Modified.Before(began.Add(-2*time.Second)) || e.Modified.After(time.Now().Add(2*time.Second)) {
				t.Errorf("it was modified at %v, and put at %v", e.Modified, began)
			}
		}
	})
}

func TestRanges(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		const size = 300_000
		all := content(size)
		b := put(t, w.store, "ranges", all)
		for _, span := range [][2]int64{
			{0, 0},
			{size, 0},
			{0, 1},
			{size - 1, 1},
			{0, size},
			{0, size - 1},
			{1, size - 1},
			{65535, 2},
			{65536, 65536},
			{131071, 65538},
			{10, 200_000},
		} {
			r, err := w.store.GetRange(t.Context(), b, span[0], span[1])
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(r)
			if err := errors.Join(err, r.Close()); err != nil || !bytes.Equal(got, all[span[0]:span[0]+span[1]]) {
				t.Errorf("%v: got %d bytes, %v", span, len(got), err)
			}
		}
		for _, span := range [][2]int64{
			{-1, 1},
			{0, -1},
			{0, size + 1},
			{size, 1},
			{size + 1, 0},
			{1, 1<<63 - 1},
			{1<<63 - 1, 1},
		} {
			if r, err := w.store.GetRange(t.Context(), b, span[0], span[1]); err == nil {
				_ = r.Close()
				t.Errorf("%v was opened", span)
			}
		}
	})
}

func TestMissingObject(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		b := named("a/b/c", []byte("x"))
		_, err := w.store.Get(t.Context(), b)
		wantError(t, err, proto.ErrNotFound, "get", b.Key)
		_, err = w.store.Stat(t.Context(), b.Key)
		wantError(t, err, proto.ErrNotFound, "stat", b.Key)
		if err := w.store.Delete(t.Context(), b.Key); err != nil {
			t.Error(err)
		}
		if keys := keysOf(t, w.store, ""); len(keys) > 0 {
			t.Errorf("there are %v", keys)
		}
		put(t, w.store, "a/b/c", []byte("x"))
		for range 2 {
			if err := w.store.Delete(t.Context(), b.Key); err != nil {
				t.Error(err)
			}
		}
		wantAbsent(t, w.store, b.Key)
		wantContent(t, w.store, put(t, w.store, "a/b/c", []byte("x")), []byte("x"))
		for _, key := range []string{"a", "a/b", "a/b/c/d"} {
			_, err = w.store.Stat(t.Context(), key)
			wantError(t, err, proto.ErrNotFound, "stat", key)
		}
	})
}

func TestPutVerifiesDigest(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		for _, size := range []int{1, 100_000, 9 * mebibyte} {
			b := named(fmt.Sprintf("other/%d", size), content(size))
			other := content(size)
			other[size/2] ^= 1
			err := w.store.Put(t.Context(), b, bytes.NewReader(other))
			wantError(t, err, proto.ErrCorrupt, "put", b.Key)
			wantAbsent(t, w.store, b.Key)
			err = w.store.Put(t.Context(), b, bytes.NewReader(content(size)[:size-1]))
			wantError(t, err, proto.ErrCorrupt, "put", b.Key)
			wantAbsent(t, w.store, b.Key)
			if size == 1 {
				continue
			}
			broken := errors.New("the disk is gone")
			if err := w.store.Put(t.Context(), b, failing{broken}); !errors.Is(err, broken) {
				t.Errorf("got %v", err)
			}
			wantAbsent(t, w.store, b.Key)
		}
	})
}

type failing struct{ err error }

func (f failing) ReadAt(p []byte, off int64) (int, error) {
	if off > 0 {
		return 0, f.err
	}
	p[0] = 1
	return 1, f.err
}

func TestPutOfExistingObject(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		want := content(100_000)
		b := put(t, w.store, "same", want)
		put(t, w.store, "same", want)
		other := named("same", content(99_999))
		wantError(t, w.store.Put(t.Context(), other, bytes.NewReader(content(99_999))), proto.ErrExists, "put", "same")
		wantContent(t, w.store, b, want)
		if w.path == nil {
			return
		}
		// To a garbage collector, an object that was put again is new.
		old := time.Now().Add(-2 * time.Hour)
		if err := os.Chtimes(w.path("same"), old, old); err != nil {
			t.Fatal(err)
		}
		if e, err := w.store.Stat(t.Context(), "same"); err != nil || time.Since(e.Modified) < time.Hour {
			t.Fatalf("it is not old: %v, %v", e, err)
		}
		put(t, w.store, "same", want)
		if e, err := w.store.Stat(t.Context(), "same"); err != nil || time.Since(e.Modified) > time.Hour {
			t.Errorf("it is still old: %v, %v", e, err)
		}
		wantContent(t, w.store, b, want)
	})
}

func TestList(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		keys := []string{"a-b", "a.b", "a/b", "a/b-c", "a/c/d", "a/c/e", "a0", "b/a", "b/a_", "c", "c=/x"}
		for i, key := range keys {
			put(t, w.store, key, content(i))
		}
		for prefix, want := range map[string][]string{
			"": keys, "a": keys[:7], "a/": keys[2:6], "a/b": keys[2:4], "a/c/": keys[4:6], "b/a_": {"b/a_"}, "b/ax": {},
			"zz/": {}, "c": {"c", "c=/x"},
		} {
			if got := keysOf(t, w.store, prefix); !slices.Equal(got, want) {
				t.Errorf("%q: got %v, want %v", prefix, got, want)
			}
			for i, after := range want {
				got := []string{}
				for e, err := range w.store.Backend.List(t.Context(), prefix, after) {
					if err != nil {
						t.Fatal(err)
					}
					if e.Size != int64(slices.Index(keys, e.Key)) {
						t.Errorf("%s has %d bytes", e.Key, e.Size)
					}
					got = append(got, e.Key)
				}
				if !slices.Equal(got, want[i+1:]) {
					t.Errorf("%q after %q: got %v, want %v", prefix, after, got, want[i+1:])
				}
			}
		}
		for e, err := range w.store.List(t.Context(), "") {
			if err != nil || e.Key != keys[0] {
				t.Errorf("the first is %s, %v", e.Key, err)
			}
			break
		}
	})
}

func TestHostileKeys(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		for _, key := range []string{
			"", "/", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "a/./b", "a//b", "a/", ".writing/x", "a/.b", "a\x00b",
			"a\nb", "a b", "a\\b", "-a", "ä", "%2e%2e/x",
			strings.Repeat("a", 129), strings.Repeat("a/", 256) + "a",
		} {
			b := named(key, []byte("x"))
			if err := w.store.Put(t.Context(), b, strings.NewReader("x")); err == nil {
				t.Errorf("%q was put", key)
			}
			if r, err := w.store.Get(t.Context(), b); err == nil || errors.Is(err, proto.ErrNotFound) {
				t.Errorf("%q was looked for: %v, %v", key, r, err)
			}
			if _, err := w.store.Stat(t.Context(), key); err == nil || errors.Is(err, proto.ErrNotFound) {
				t.Errorf("%q was looked for: %v", key, err)
			}
			if err := w.store.Delete(t.Context(), key); err == nil {
				t.Errorf("%q was deleted", key)
			}
		}
		longest := strings.Repeat(strings.Repeat("k", 127)+"/", 3) + strings.Repeat("k", 128)
		put(t, w.store, longest, []byte("x"))
		if got := keysOf(t, w.store, ""); !slices.Equal(got, []string{longest}) {
			t.Errorf("there are %v", got)
		}
	})
}

// Readers see nothing or the whole object while many writers put it.
func TestConcurrentUse(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		want := content(200_000)
		b := named("shared/one", want)
		var all sync.WaitGroup
		done := make(chan struct{})
		for range 2 {
			all.Go(func() {
				for {
					got, err := get(t.Context(), w.store, b)
					if err == nil && !bytes.Equal(got, want) || err != nil && !errors.Is(err, proto.ErrNotFound) {
						t.Errorf("read %d bytes, %v", len(got), err)
					}
					select {
					case <-done:
						return
					default:
					}
				}
			})
		}
		var puts sync.WaitGroup
		for i := range 6 {
			puts.Go(func() {
				if err := w.store.Put(t.Context(), b, bytes.NewReader(want)); err != nil {
					t.Error(err)
				}
				own := named(fmt.Sprintf("shared/%d", i+10), content(i))
				if err := w.store.Put(t.Context(), own, bytes.NewReader(content(i))); err != nil {
					t.Error(err)
				}
				if err := w.store.Delete(t.Context(), own.Key); err != nil {
					t.Error(err)
				}
			})
		}
		puts.Wait()
		close(done)
		all.Wait()
		if got := keysOf(t, w.store, ""); !slices.Equal(got, []string{b.Key}) {
			t.Errorf("there are %v", got)
		}
	})
}

// Temporary faults are not visible to callers.
func TestTemporaryFaults(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		for _, kind := range storagetest.Faults() {
			name := kind.String()
			want := content(100_000)
			times, front := 2, w.front
			if kind == storagetest.Silent {
				times, front = 1, w.shortTimeout
			}
			b := named("of/"+name, want)
			step := func(only string, do func() error) {
				t.Helper()
				w.Set(kind, times, only, 0)
				if err := do(); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				if w.Hits() == 0 {
					t.Errorf("%s: no request of %s was affected", name, only)
				}
			}
			if kind != storagetest.Wrong || strings.HasSuffix(t.Name(), "S3") { // other stores do not verify their input
				step("put", func() error { return front.Put(t.Context(), b, bytes.NewReader(want)) })
			} else {
				put(t, w.store, b.Key, want)
			}
			if kind == storagetest.Wrong { // the caller has the bytes by then
				w.Set(storagetest.Wrong, 1, "get", 0)
				got, err := get(t.Context(), front, b)
				wantError(t, err, proto.ErrCorrupt, "get", b.Key)
				if len(got) == len(want) {
					t.Error("a corrupt object was returned completely")
				}
				continue
			}
			step("get", func() error {
				got, err := get(t.Context(), front, b)
				if err == nil && !bytes.Equal(got, want) {
					err = errors.New("the content differs")
				}
				return err
			})
			step("get", func() error {
				r, err := front.GetRange(t.Context(), b, 1000, 80_000)
				if err != nil {
					return err
				}
				got, err := io.ReadAll(r)
				if err == nil && !bytes.Equal(got, want[1000:81_000]) {
					err = errors.New("the range differs")
				}
				return errors.Join(err, r.Close())
			})
			step("stat", func() error {
				_, err := front.Stat(t.Context(), b.Key)
				return err
			})
			put(t, w.store, "of/"+name+".2", want)
			put(t, w.store, "of/"+name+".3", want)
			step("list", func() error {
				if got := keysOf(t, front, "of/"+name); !slices.Equal(got, []string{b.Key, b.Key + ".2", b.Key + ".3"}) {
					return fmt.Errorf("got %v", got)
				}
				return nil
			})
			step("delete", func() error { return front.Delete(t.Context(), b.Key) })
			wantAbsent(t, w.store, b.Key)
		}
	})
}

// Permanent faults end with a matching error and leave nothing half-done.
func TestPermanentFaults(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		want := content(100_000)
		there := put(t, w.store, "there", want)
		for _, kind := range []storagetest.Fault{
			storagetest.Broken, storagetest.Throttled, storagetest.Silent,
			storagetest.Cut, storagetest.Reset,
		} {
			front := w.front
			if kind == storagetest.Silent {
				front = &blob.Store{Backend: w.shortTimeout.Backend, Retry: blob.RetryPolicy{Attempts: 2}} // each attempt waits
			}
			for _, size := range []int{1, 100_000, 9 * mebibyte} {
				if kind == storagetest.Silent && size != 1 {
					continue
				}
				w.Set(kind, -1, "", 0)
				b := named("never", content(size))
				wantError(t, front.Put(t.Context(), b, bytes.NewReader(content(size))), blob.ErrUnavailable, "put", b.Key)
				if n := w.Hits(); n < 2 || n > 40 {
					t.Errorf("%s: %d requests were made", kind, n)
				}
				wantAbsent(t, w.store, b.Key)
			}
			w.Set(kind, -1, "", 0)
			_, err := get(t.Context(), front, there)
			if kind != storagetest.Cut { // which lets each stream progress a little
				wantError(t, err, blob.ErrUnavailable, "get", there.Key)
			}
			if kind == storagetest.Silent {
				continue // the operations below would wait in the same way
			}
			w.Set(kind, -1, "", 0)
			_, err = front.Stat(t.Context(), there.Key)
			wantError(t, err, blob.ErrUnavailable, "stat", there.Key)
			w.Set(kind, -1, "", 0)
			for _, err = range front.List(t.Context(), "th") {
				if err != nil {
					break
				}
			}
			if strings.HasSuffix(t.Name(), "S3") { // the fault injector of the others yields an entry each time
				wantError(t, err, blob.ErrUnavailable, "list", "th")
			}
		}
		for range 2 {
			w.Set(storagetest.Wrong, -1, "get", 0)
			_, err := get(t.Context(), w.front, there)
			wantError(t, err, proto.ErrCorrupt, "get", there.Key)
		}
		w.Set(storagetest.None, 0, "", 0)
		wantContent(t, w.front, there, want)
	})
}

// A cancelled context ends every operation.
func TestCancelled(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		b := put(t, w.store, "there", content(1000))
		cause := errors.New("the program was cancelled")
		for op, do := range map[string]func(context.Context) error{
			"put": func(ctx context.Context) error {
				return w.front.Put(ctx, named("new", content(10)), bytes.NewReader(content(10)))
			},
			"get":  func(ctx context.Context) error { _, err := get(ctx, w.front, b); return err },
			"stat": func(ctx context.Context) error { _, err := w.front.Stat(ctx, b.Key); return err },
		} {
			ctx, cancel := context.WithCancelCause(t.Context())
			w.Set(storagetest.Silent, -1, op, 0)
			ended := make(chan error, 1)
			go func() { ended <- do(ctx) }()
			<-w.Hit()
			cancel(cause)
			if err := <-ended; !errors.Is(err, cause) {
				t.Errorf("%s: %v", op, err)
			}
			if w.Hits() > 2 {
				t.Errorf("%s was requested again", op)
			}
		}
		wantAbsent(t, w.store, "new")
	})
}

// Damaged objects are reported.
func TestDamage(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		if w.path == nil {
			return
		}
		damage := map[string]func([]byte) []byte{
			"flip first": func(b []byte) []byte { b[0] ^= 1; return b },
			"flip last":  func(b []byte) []byte { b[len(b)-1] ^= 1; return b },
			"shorter":    func(b []byte) []byte { return b[:len(b)-1] },
			"half":       func(b []byte) []byte { return b[:len(b)/2] },
			"longer":     func(b []byte) []byte { return append(b, 0) },
			"empty":      func([]byte) []byte { return nil },
		}
		for i, name := range slices.Sorted(maps.Keys(damage)) {
			b := put(t, w.store, fmt.Sprintf("damaged/%d", i), content(200_000))
			stored, err := os.ReadFile(w.path(b.Key))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(w.path(b.Key), damage[name](stored), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := get(t.Context(), w.store, b)
			if !errors.Is(err, proto.ErrCorrupt) || len(got) == 200_000 {
				t.Errorf("%s: read %d bytes, %v", name, len(got), err)
			}
		}
	})
}
