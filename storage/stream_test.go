package storage_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage"
	"github.com/bullpen-run/bullpen/storage/blob"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// stream hides the other methods of a reader.
type stream struct{ io.Reader }

func TestPutStream(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		for _, size := range []int{0, 65536, 8 * mebibyte, 8*mebibyte + 1} {
			want := content(size)
			key := fmt.Sprintf("a/%d", size)
			b, err := w.store.PutStream(t.Context(), key, int64(size), stream{bytes.NewReader(want)})
			if err != nil || b != named(key, want) {
				t.Fatalf("got %+v, %v", b, err)
			}
			wantContent(t, w.store, b, want)
		}
		want := content(100_000)
		b, err := w.store.PutStream(t.Context(), "halting", 100_000,
			iotest.DataErrReader(iotest.HalfReader(bytes.NewReader(want))))
		if err != nil {
			t.Fatal(err)
		}
		wantContent(t, w.store, b, want)
	})
}

func TestPutStreamVerifiesSize(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		for _, size := range []int64{1, 9 * mebibyte} {
			for name, in := range map[string]io.Reader{
				"short": io.LimitReader(zeros{}, size-1), "long": io.LimitReader(zeros{}, size+1), "endless": zeros{},
			} {
				key := fmt.Sprintf("other/%d-%s", size, name)
				_, err := w.store.PutStream(t.Context(), key, size, in)
				wantError(t, err, proto.ErrCorrupt, "put", key)
				wantAbsent(t, w.store, key)
			}
			broken := errors.New("the client has gone")
			for _, at := range []int64{size / 2, size} {
				key := fmt.Sprintf("broken/%d-%d", size, at)
				_, err := w.store.PutStream(t.Context(), key, size,
					io.MultiReader(io.LimitReader(zeros{}, at), iotest.ErrReader(broken)))
				if !errors.Is(err, broken) {
					t.Errorf("%s: got %v", key, err)
				}
				wantAbsent(t, w.store, key)
			}
		}
		if _, err := w.store.PutStream(t.Context(), "a/../b", 1, strings.NewReader("x")); err == nil {
			t.Error("an invalid key was accepted")
		}
		if _, err := w.store.PutStream(t.Context(), "a", -1, strings.NewReader("")); err == nil {
			t.Error("a negative size was accepted")
		}
	})
}

// zeros is an infinite reader of zeros.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// An object under a used key is not overwritten, even by one of the same size.
func TestPutStreamKeepsExistingObject(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		for _, size := range []int{1000, 9 * mebibyte} {
			key, want := fmt.Sprintf("used/%d", size), content(size)
			b := put(t, w.store, key, want)
			other := content(size)
			other[size/2] ^= 1
			for _, in := range [][]byte{other, other[1:]} {
				_, err := w.store.PutStream(t.Context(), key, int64(len(in)), bytes.NewReader(in))
				wantError(t, err, proto.ErrExists, "put", key)
			}
			wantContent(t, w.store, b, want)
		}
	})
}

// Temporary faults are not visible if the data can be sent again, although content is read only
// once.
func TestPutStreamWithTemporaryFaults(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		inParts := strings.HasSuffix(t.Name(), "S3")
		for _, kind := range storagetest.Faults() {
			if kind == storagetest.Wrong && !inParts {
				continue // other stores do not verify their input
			}
			front := w.front
			if kind == storagetest.Silent {
				front = w.shortTimeout
			}
			for _, size := range []int{100_000, 9 * mebibyte} {
				if size > 8*mebibyte && !inParts {
					continue // written in one go
				}
				key, want := fmt.Sprintf("of/%v-%d", kind, size), content(size)
				w.Set(kind, 1, "put", 0)
				b, err := front.PutStream(t.Context(), key, int64(size), stream{bytes.NewReader(want)})
				if err != nil || w.Hits() != 1 {
					t.Errorf("%v, %d bytes: %v, after %d faults", kind, size, err, w.Hits())
					continue
				}
				wantContent(t, w.store, b, want)
			}
		}
	})
}

// The object exists whichever response of an upload in parts is lost.
func TestPutStreamWithLostAnswers(t *testing.T) {
	f := &storagetest.Injector{}
	store := &blob.Store{Backend: openS3(t, f, newPrefix(), longTimeout), Retry: quick()}
	want := content(9 * mebibyte)
	for i := range 4 { // create, two parts, complete
		f.Set(storagetest.Lost, 1, "put", i)
		b, err := store.PutStream(t.Context(), fmt.Sprintf("large/%d", i), int64(len(want)), stream{bytes.NewReader(want)})
		if err != nil || f.Hits() != 1 {
			t.Errorf("request %d: %v, after %d faults", i, err, f.Hits())
			continue
		}
		wantContent(t, store, b, want)
	}
}

func TestPutStreamWithPermanentFaults(t *testing.T) {
	inEach(t, func(t *testing.T, w world) {
		for _, size := range []int{1000, 9 * mebibyte} {
			w.Set(storagetest.Broken, -1, "", 0)
			_, err := w.front.PutStream(t.Context(), "never", int64(size), bytes.NewReader(content(size)))
			wantError(t, err, blob.ErrUnavailable, "put", "never")
			w.Clear()
			wantAbsent(t, w.store, "never")
		}
		cause := errors.New("the client was sent away")
		for _, size := range []int{1000, 9 * mebibyte} {
			ctx, cancel := context.WithCancelCause(t.Context())
			w.Set(storagetest.Silent, -1, "put", 0)
			ended := make(chan error, 1)
			go func() {
				_, err := w.front.PutStream(ctx, "cancelled", int64(size), bytes.NewReader(content(size)))
				ended <- err
			}()
			<-w.Hit()
			cancel(cause)
			if err := <-ended; !errors.Is(err, cause) {
				t.Errorf("got %v", err)
			}
			w.Clear()
			wantAbsent(t, w.store, "cancelled")
		}
	})
}

// Memory does not grow with the stream.
func TestPutStreamMemoryIsBounded(t *testing.T) {
	const size = 192 * mebibyte
	directory := func(key string) (*blob.Store, int64) {
		store, err := storage.Open(t.Context(), "file://"+filepath.Join(t.TempDir(), "blobs"), key)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = store.Close() })
		return store, size / 4
	}
	for name, open := range map[string]func() (*blob.Store, int64){
		"directory":           func() (*blob.Store, int64) { return directory("") },
		"encrypted directory": func() (*blob.Store, int64) { return directory(keyFile(t, false)) },
		"S3":                  func() (*blob.Store, int64) { return openRecorded(t, &requests{}, ""), size },
	} {
		t.Run(name, func(t *testing.T) {
			store, size := open()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			if _, err := store.PutStream(t.Context(), "large", size, io.LimitReader(zeros{}, size)); err != nil {
				t.Fatal(err)
			}
			runtime.ReadMemStats(&after)
			// TotalAlloc includes what was freed. Three parts of 8 MiB are in flight.
			if n := after.TotalAlloc - before.TotalAlloc; n > 48*mebibyte {
				t.Errorf("%d MiB were allocated for %d MiB", n>>20, size>>20)
			}
		})
	}
}
