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

// maxHeld is how large an object of a stream may be, in bytes, to be held in memory, so that it can be sent again.
const maxHeld = 8 << 20

// PutStream stores content, which must be size bytes, under a key that was never used, and gives the object's name with the digest of what
// came. Content is read once, and as it comes: up to 8 MiB are held in memory, and the request is made again as [Store.Put] makes it; of
// more only what is on its way, and only parts of it are sent again, by a backend that sends it in parts. Nobody sees the object before it
// is whole, and there is none after an error. That is content's own, wrapped, where it fails; [proto.ErrCorrupt] where content is shorter or
// longer than size; [proto.ErrExists] where the key was used. The end of ctx does not interrupt a Read of content.
func (s *Store) PutStream(ctx context.Context, key string, size int64, content io.Reader) (proto.Blob, error) {
	if err := checkKey("put", key); err != nil {
		return proto.Blob{}, err
	}
	if size < 0 {
		return proto.Blob{}, fmt.Errorf("put blob %q: size %d: one of 0 or more is needed", key, size)
	}
	in := &measured{from: content, key: key, size: size, left: size, sum: sha256.New()}
	var err error
	if size <= maxHeld {
		var held bytes.Buffer // grows with what has come, not with what was said
		if _, err = held.ReadFrom(in); err != nil {
			return proto.Blob{}, fmt.Errorf("read what is to be stored: %w", err)
		}
		err = s.Policy.Do(ctx, func() error { return s.Backend.Put(ctx, key, size, bytes.NewReader(held.Bytes()), false) })
	} else {
		err = s.Backend.Put(ctx, key, size, in, false)
	}
	stored := proto.Blob{Key: key, Size: size, Digest: "sha256:" + hex.EncodeToString(in.sum.Sum(nil))}
	if in.whole && errors.Is(err, proto.ErrExists) {
		err = s.isThere(ctx, stored, err)
	}
	if err != nil {
		return proto.Blob{}, err
	}
	return stored, nil
}

// isThere sees whether an object that was found under a new key is the one that was just put there, by a request whose answer was lost.
// If it is not, the error is exists.
func (s *Store) isThere(ctx context.Context, b proto.Blob, exists error) error {
	r, err := s.Get(ctx, b)
	if err == nil {
		_, err = io.Copy(io.Discard, r)
		_ = r.Close() // only read
	}
	if errors.Is(err, proto.ErrCorrupt) {
		return exists
	}
	return err
}

// measured reads content of a size that was said, takes its digest, and gives [io.EOF] only where both content and size end.
type measured struct {
	from       io.Reader
	key        string
	size, left int64 // bytes
	sum        hash.Hash
	whole      bool
	err        error
}

func (m *measured) Read(p []byte) (int, error) {
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
		m.err = m.mistaken(fmt.Errorf("the content ends %d bytes before its size of %d", m.left, m.size))
	default:
		m.whole, m.err = true, io.EOF
	}
	return n, m.err
}

// end sees that nothing comes after the last byte.
func (m *measured) end() error {
	switch _, err := io.ReadFull(m.from, make([]byte, 1)); {
	case err == nil:
		return m.mistaken(fmt.Errorf("the content goes on after its size of %d", m.size))
	case errors.Is(err, io.EOF):
		m.whole = true
		return io.EOF
	default:
		return err
	}
}

func (m *measured) mistaken(err error) error {
	return &Error{Op: "put", Key: m.key, Kind: proto.ErrCorrupt, Err: err, Do: "nothing was stored; give the size that the content has"}
}
