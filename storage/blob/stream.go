package blob

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/bullpen-run/bullpen/proto"
)

// maxBuffered is the size up to which an object of PutStream is buffered in memory, so that it can
// be sent again, in bytes.
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
	in := &sizedReader{from: content, key: key, size: size, left: size, sum: sha256.New()}
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
	stored := proto.Blob{Key: key, Size: size, Digest: "sha256:" + hex.EncodeToString(in.sum.Sum(nil))}
	if in.whole && errors.Is(err, proto.ErrExists) {
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

// sizedReader computes the digest of content and returns [io.EOF] only if both content and the
// announced size end.
type sizedReader struct {
	from       io.Reader
	key        string
	size, left int64 // bytes
	sum        hash.Hash
	whole      bool
	err        error
}

func (m *sizedReader) Read(p []byte) (int, error) {
	if m.err != nil {
		return 0, m.err
	}
	if len(p) == 0 {
		return 0, nil
	}
	if m.left == 0 {
		m.err = m.end()
		return 0, m.err
	}
	n, err := m.from.Read(p[:min(int64(len(p)), m.left)])
	m.sum.Write(p[:n])
	m.left -= int64(n)
	switch {
	case !errors.Is(err, io.EOF):
		m.err = err
	case m.left > 0:
		m.err = m.sizeMismatch(fmt.Errorf("the content ends %d bytes before its size of %d", m.left, m.size))
	default:
		m.whole, m.err = true, io.EOF
	}
	return n, m.err
}

// end checks that nothing follows the last byte.
func (m *sizedReader) end() error {
	switch _, err := io.ReadFull(m.from, make([]byte, 1)); {
	case err == nil:
		return m.sizeMismatch(fmt.Errorf("the content goes on after its size of %d", m.size))
	case errors.Is(err, io.EOF):
		m.whole = true
		return io.EOF
	default:
		return err
	}
}

func (m *sizedReader) sizeMismatch(err error) error {
	return &Error{Op: "put", Key: m.key, Kind: proto.ErrCorrupt, Err: err, Remedy: "nothing was stored; announce the size of the content"}
}
