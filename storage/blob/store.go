package blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// reputAfter is the age at which an existing object is put again. A garbage collector must spare
// objects younger than this plus the longest time between a Put and the reference to it.
const reputAfter = time.Hour

// Store stores immutable objects and verifies what it reads. It is safe for concurrent use. Its
// errors are [*Error], except for those of ctx.
type Store struct {
	Backend Backend
	Retry   RetryPolicy
}

// Close closes the backend.
func (s *Store) Close() error {
	if c, ok := s.Backend.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// Put stores b.Size bytes of content with the digest b.Digest under b.Key. Content is read again
// from the start for each attempt. The object becomes visible when it is complete. An existing
// object of the same key and size is assumed to be the same; if it is older than an hour, it is put
// again, so that it is new to a garbage collector. An existing object of another size is
// [proto.ErrExists].
func (s *Store) Put(ctx context.Context, b proto.Blob, content io.ReaderAt) error {
	if err := check("put", b); err != nil {
		return err
	}
	put := func(replace bool) error {
		source := io.NewSectionReader(content, 0, b.Size)
		return s.Backend.Put(ctx, b.Key, b.Size, checked(source, b, "put"), replace)
	}
	return s.Retry.Do(ctx, func() error {
		putErr := put(false)
		// A server may answer that the object exists and hang up before it has read the content,
		// which then fails the request.
		var broken *Error
		if !errors.Is(putErr, proto.ErrExists) && (!errors.As(putErr, &broken) || !broken.Retryable) {
			return putErr
		}
		existing, err := s.Backend.Stat(ctx, b.Key)
		switch {
		case err != nil && broken != nil:
			return putErr
		case errors.Is(err, proto.ErrNotFound):
			return &Error{
				Op: "put", Key: b.Key, Kind: ErrUnavailable, Retryable: true,
				Err: errors.New("put reported that it exists, stat that it does not"),
			}
		case err != nil:
			return err
		case existing.Size != b.Size:
			return &Error{
				Op: "put", Key: b.Key, Kind: proto.ErrExists,
				Err: fmt.Errorf("it exists with %d bytes, want %d", existing.Size, b.Size),
			}
		case time.Since(existing.Modified) < reputAfter:
			return nil
		}
		if err := put(true); !errors.Is(err, proto.ErrExists) {
			return err
		}
		return &Error{
			Op: "put", Key: b.Key, Kind: ErrUnavailable, Retryable: true,
			Err: errors.New("the response to an attempt was lost"),
		}
	})
}

// Get opens a whole object. If it is not what b names, a Read returns [proto.ErrCorrupt]: nothing
// may be relied on before [io.EOF]. A broken stream is resumed. The reader uses ctx and must be
// closed.
func (s *Store) Get(ctx context.Context, b proto.Blob) (io.ReadCloser, error) {
	if err := check("get", b); err != nil {
		return nil, err
	}
	r, err := s.open(ctx, b, 0, b.Size)
	if err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{checked(r, b, "get"), r}, nil
}

// GetRange opens length bytes of an object at offset. A digest covers a whole object, so a shorter
// range is verified only as far as the backend does it. [Encrypted] does, except against a store
// that swaps objects.
func (s *Store) GetRange(ctx context.Context, b proto.Blob, offset, length int64) (io.ReadCloser, error) {
	if err := check("get", b); err != nil {
		return nil, err
	}
	if offset < 0 || length < 0 || offset > b.Size || length > b.Size-offset {
		return nil, fmt.Errorf("get blob %q: bytes %d to %d are not within its %d", b.Key, offset, offset+length, b.Size)
	}
	if length == b.Size {
		return s.Get(ctx, b)
	}
	if length == 0 {
		_, err := s.Stat(ctx, b.Key)
		return io.NopCloser(strings.NewReader("")), err
	}
	return s.open(ctx, b, offset, length)
}

func (s *Store) open(ctx context.Context, b proto.Blob, offset, length int64) (*resumingReader, error) {
	r := &resumingReader{ctx: ctx, store: s, key: b.Key, size: b.Size, offset: offset, left: length}
	if err := s.Retry.Do(ctx, r.open); err != nil {
		return nil, err
	}
	return r, nil
}

// Stat describes an object without reading it.
func (s *Store) Stat(ctx context.Context, key string) (Entry, error) {
	if err := checkKey("stat", key); err != nil {
		return Entry{}, err
	}
	var found Entry
	err := s.Retry.Do(ctx, func() (err error) {
		found, err = s.Backend.Stat(ctx, key)
		return err
	})
	return found, err
}

// Delete removes an object. It is no error if there is none. Concurrent readers may get the rest of
// the object or an error.
func (s *Store) Delete(ctx context.Context, key string) error {
	if err := checkKey("delete", key); err != nil {
		return err
	}
	return s.Retry.Do(ctx, func() error { return s.Backend.Delete(ctx, key) })
}

// List yields the objects whose keys begin with prefix, in byte order. It may include objects that
// are put or deleted meanwhile. It ends after an error.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		after, stopped := "", false
		// An attempt that yielded objects resets the retry policy, since the next one continues
		// after them.
		for progress := true; progress && !stopped; {
			progress = false
			err := s.Retry.Do(ctx, func() error {
				for e, err := range s.Backend.List(ctx, prefix, after) {
					if err != nil {
						if progress {
							return nil
						}
						return err
					}
					after, progress = e.Key, true
					if stopped = !yield(e, nil); stopped {
						return nil
					}
				}
				progress = false
				return nil
			})
			if err != nil {
				yield(Entry{}, err)
				return
			}
		}
	}
}

func check(op string, b proto.Blob) error {
	if err := checkKey(op, b.Key); err != nil {
		return err
	}
	if b.Size < 0 || !proto.ValidImageDigest(b.Digest) {
		return fmt.Errorf("%s blob %q: size %d and digest %.100q: want a size of 0 or more and a digest of the form sha256:…",
			op, b.Key, b.Size, b.Digest)
	}
	return nil
}

func checkKey(op, key string) error {
	if !ValidKey(key) {
		return fmt.Errorf("%s blob %.600q: not a key: up to %d bytes in components of A-Z a-z 0-9 . _ - =, which begin "+
			"with a letter or digit",
			op, key, maxKey)
	}
	return nil
}
