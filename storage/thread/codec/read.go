package codec

import (
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/proto/layer"
)

// Reader decodes an untrusted layer by reading its index and its pack in parallel. It takes a few
// MiB more than an Index.
type Reader struct {
	*Index
	pack   io.Reader
	zstd   *zstd.Decoder
	frames []Frame // not yet read
	packed []byte
	frame  []byte // unpacked
	left   []byte // unread part of frame
	rest   int64  // unread bytes of the last entry's content
}

// NewReader returns a Reader. The pack must end where the index begins; it may be nil if it is
// empty. The Reader must be closed.
func NewReader(index, pack io.Reader, limits layer.Limits) (*Reader, error) {
	x, err := NewIndex(index, limits)
	if err != nil {
		return nil, err
	}
	z, err := newUnpacker()
	if err != nil {
		x.Close()
		return nil, fmt.Errorf("decode the layer: %w", err)
	}
	return &Reader{Index: x, pack: pack, zstd: z, frames: x.Frames()}, nil
}

// Close releases the decoders.
func (r *Reader) Close() {
	r.Index.Close()
	r.zstd.Close()
}

// Next returns the next entry, or io.EOF after the last one. It skips unread content of the entry
// before.
func (r *Reader) Next() (*layer.Entry, error) {
	if _, err := io.Copy(io.Discard, r.Content()); err != nil {
		return nil, err
	}
	e, err := r.Index.Next()
	if errors.Is(err, io.EOF) {
		return nil, r.checkPackEnd()
	}
	if err != nil {
		return nil, err
	}
	if e.Inline() {
		r.rest = e.Data()
	}
	return e, nil
}

// checkPackEnd returns io.EOF if the pack has been read to its end.
func (r *Reader) checkPackEnd() error {
	if r.pack == nil {
		return io.EOF
	}
	switch n, err := io.ReadFull(r.pack, make([]byte, 1)); {
	case n > 0:
		return errors.New("decode the layer: trailing bytes after the pack")
	case errors.Is(err, io.EOF):
		return io.EOF
	default:
		return fmt.Errorf("read the pack: %w", err)
	}
}

// Content reads the rest of the last entry's content, which is empty for anything but an inline
// file. It is valid until the next call of Next.
func (r *Reader) Content() io.Reader { return (*content)(r) }

type content Reader

func (c *content) Read(b []byte) (int, error) {
	if c.rest == 0 {
		return 0, io.EOF
	}
	if len(c.left) == 0 {
		if err := (*Reader)(c).readFrame(); err != nil {
			return 0, err
		}
	}
	n := copy(b[:min(int64(len(b)), c.rest)], c.left)
	c.left = c.left[n:]
	c.rest -= int64(n)
	return n, nil
}

// readFrame reads the next frame. The index was validated, so there is one.
func (r *Reader) readFrame() error {
	f := r.frames[0]
	if r.pack == nil {
		return errors.New("decode the layer: the pack is missing")
	}
	if int64(cap(r.packed)) < f.Size {
		r.packed = make([]byte, f.Size)
	}
	r.packed = r.packed[:f.Size]
	if _, err := io.ReadFull(r.pack, r.packed); err != nil {
		return fmt.Errorf("read the pack: %w", noEOF(err))
	}
	frame, err := f.unpack(r.zstd, r.frame[:0], r.packed)
	if err != nil {
		return err
	}
	r.frames, r.frame, r.left = r.frames[1:], frame, frame
	return nil
}
