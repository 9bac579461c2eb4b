package blob

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/bullpen-run/bullpen/proto"
)

// maxBuffered is the size in bytes up to which PutStream buffers an object in memory, so that it
// can be resent.
const maxBuffered = 8 << 20

// PutStream stores size bytes of content under a key that was never used, and returns the blob with
// its digest. Content is read once. Up to 8 MiB are buffered and retried like [Store.Put]; larger
// content is retried only part by part, by backends that send parts. The object becomes visible
// when it is complete; after an error there is none. The error wraps an error of content. It is
// [proto.ErrCorrupt] if content is shorter or longer than size, and [proto.ErrExists] if the key
// was used. A blocked Read of content is not interrupted when ctx is done.
func (s *Store) PutStream(ctx context.Context, key string, size int64, content io.Reader) (proto.Blob, error) {
	if err := checkKey("put", key); err != nil {
		return proto.Blob{}, err
	}
	if size < 0 {
		return proto.Blob{}, fmt.Errorf("put blob %q: size %d is negative", key, size)
	}
	in := checked(content, proto.Blob{Key: key, Size: size}, "put")
	var err error
	if size <= maxBuffered {
		var buffered bytes.Buffer // grows with the content, not with the announced size
		if _, err = buffered.ReadFrom(in); err != nil {
			return proto.Blob{}, fmt.Errorf("read the content: %w", err)
		}
		err = s.Retry.Do(ctx, func() error { return s.Backend.Put(ctx, key, size, bytes.NewReader(buffered.Bytes()), false) })
	} else {
		err = s.Backend.Put(ctx, key, size, in, false)
	}
	stored := proto.Blob{Key: key, Size: size, Digest: in.digest()}
	if errors.Is(in.err, io.EOF) && errors.Is(err, proto.ErrExists) {
		err = s.confirmPut(ctx, stored, err)
	}
	if err != nil {
		return proto.Blob{}, err
	}
	return stored, nil
}

// confirmPut reports whether an object found under a new key is b, stored by a request whose answer
// was lost. If it is not, confirmPut returns exists.
func (s *Store) confirmPut(ctx context.Context, b proto.Blob, exists error) error {
	r, err := s.Get(ctx, b)
	if err == nil {
		_, err = io.Copy(io.Discard, r)
		_ = r.Close() // read-only
	}
	if errors.Is(err, proto.ErrCorrupt) {
		return exists
	}
	return err
}
