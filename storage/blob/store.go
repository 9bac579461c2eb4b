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

// fresh is how long after it was put an object is not put again. Whoever collects what nobody refers to must leave alone what is not
// older than this and the longest time from a Put to the reference.
const fresh = time.Hour

// Store keeps immutable objects. What it gives is what was put, or an error says that it is not. It is safe for concurrent use.
// Its errors are [*Error], except for those of ctx.
type Store struct {
	Backend Backend
	Policy  Policy
}

// Close frees what the backend holds.
func (s *Store) Close() error {
	if c, ok := s.Backend.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// Put stores b.Size bytes of content under b.Key; content must have the digest b.Digest, and is read again from the start when the
// store fails meanwhile. Nobody sees the object before it is whole. One of the same key and size that is there is taken for the
// same; it is put again where it is older than an hour, so that to a collection of garbage it is new. One of another size is
// [proto.ErrExists].
func (s *Store) Put(ctx context.Context, b proto.Blob, content io.ReaderAt) error {
	if err := check("put", b); err != nil {
		return err
	}
	put := func(replace bool) error {
		source := io.NewSectionReader(content, 0, b.Size)
		return s.Backend.Put(ctx, b.Key, b.Size, verify(source, b, "put"), replace)
	}
	return s.Policy.Do(ctx, func() error {
		tried := put(false)
		// A server may say that the object is there and hang up before it has read the content, and then that breaks the request off.
		var broken *Error
		if !errors.Is(tried, proto.ErrExists) && (!errors.As(tried, &broken) || !broken.Again) {
			return tried
		}
		there, err := s.Backend.Stat(ctx, b.Key)
		switch {
		case err != nil && broken != nil:
			return tried
		case errors.Is(err, proto.ErrNotFound):
			return &Error{Op: "put", Key: b.Key, Kind: ErrUnavailable, Again: true, Err: errors.New("it is there for put and not for stat")}
		case err != nil:
			return err
		case there.Size != b.Size:
			return &Error{
				Op: "put", Key: b.Key, Kind: proto.ErrExists,
				Err: fmt.Errorf("it has %d bytes there, and was to have %d", there.Size, b.Size),
			}
		case time.Since(there.Modified) < fresh:
			return nil
		}
		if err := put(true); !errors.Is(err, proto.ErrExists) {
			return err
		}
		return &Error{Op: "put", Key: b.Key, Kind: ErrUnavailable, Again: true, Err: errors.New("the answer to a try was lost")}
	})
}

// Get opens a whole object. Its last Read, or an earlier one, gives [proto.ErrCorrupt] if it is not what b names: until [io.EOF], nothing of
// it is to be relied on. A stream that breaks goes on where it was. The reader needs ctx, and must be closed.
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
	}{verify(r, b, "get"), r}, nil
}

// GetRange opens length bytes of an object from offset on. A digest is of a whole object, so a range is checked only if it is that, or
// as far as the backend does it: an encrypted one does, but for a store that gives one object for another.
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

func (s *Store) open(ctx context.Context, b proto.Blob, offset, length int64) (*resuming, error) {
	r := &resuming{ctx: ctx, store: s, key: b.Key, size: b.Size, offset: offset, left: length}
	if err := s.Policy.Do(ctx, r.open); err != nil {
		return nil, err
	}
	return r, nil
}

// Stat tells of an object without reading it.
func (s *Store) Stat(ctx context.Context, key string) (Entry, error) {
	if err := checkKey("stat", key); err != nil {
		return Entry{}, err
	}
	var found Entry
	err := s.Policy.Do(ctx, func() (err error) {
		found, err = s.Backend.Stat(ctx, key)
		return err
	})
	return found, err
}

// Delete removes an object; that there is none is no error. Whoever reads it meanwhile may get the rest of it or an error.
func (s *Store) Delete(ctx context.Context, key string) error {
	if err := checkKey("delete", key); err != nil {
		return err
	}
	return s.Policy.Do(ctx, func() error { return s.Backend.Delete(ctx, key) })
}

// List gives the objects whose keys begin with prefix, in the order of the keys' bytes. Those that are put or deleted meanwhile may be
// among them. After an error nothing follows.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		after, stopped := "", false
		// What was given is not given again, so a try that got further counts as a first one.
		for progress := true; progress && !stopped; {
			progress = false
			err := s.Policy.Do(ctx, func() error {
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
		return fmt.Errorf("%s blob %q: size %d and digest %.100q: a size of 0 or more and sha256:… are needed", op, b.Key, b.Size, b.Digest)
	}
	return nil
}

func checkKey(op, key string) error {
	if !ValidKey(key) {
		return fmt.Errorf("%s blob %.600q: not a key: up to %d bytes in components of A-Z a-z 0-9 . _ - =, which begin with a letter or digit",
			op, key, maxKey)
	}
	return nil
}
