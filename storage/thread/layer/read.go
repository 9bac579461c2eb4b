package layer

import (
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
)

// Reader decodes a whole layer that may be anything, as its two parts come. It
// takes what an Index takes, and a few MiB more.
type Reader struct {
	index  *Index
	pack   io.Reader
	zstd   *zstd.Decoder
	frames []Frame // that were not read yet
	packed []byte
	piece  []byte // unpacked
	left   []byte // of the piece, that was not given out
	rest   int64  // of the content of the last entry
}

// NewReader begins a layer. The pack must end where the index begins; where it is
// empty, pack may be nil. The Reader must be closed.
func NewReader(index, pack io.Reader, limits Limits) (*Reader, error) {
	x, err := NewIndex(index, limits)
	if err != nil {
		return nil, err
	}
	z, err := newUnpacker()
	if err != nil {
		x.Close()
		return nil, fmt.Errorf("decode the layer: %w", err)
	}
	return &Reader{index: x, pack: pack, zstd: z, frames: x.Frames()}, nil
}

// Close gives back what the Reader took.
func (r *Reader) Close() {
	r.index.Close()
	r.zstd.Close()
}

// Moves are the paths of the directories in the last version that entries move.
func (r *Reader) Moves() []string { return r.index.Moves() }

// Next returns the next entry, and io.EOF after the end. What was not read of the
// content before it is skipped.
func (r *Reader) Next() (*Entry, error) {
	if _, err := io.Copy(io.Discard, r.Content()); err != nil {
		return nil, err
	}
	e, err := r.index.Next()
	if errors.Is(err, io.EOF) {
		return nil, r.ended()
	}
	if err != nil {
		return nil, err
	}
	if e.Inline() {
		r.rest = e.Data()
	}
	return e, nil
}

// ended checks that the pack is as long as it should be.
func (r *Reader) ended() error {
	if r.pack == nil {
		return io.EOF
	}
	switch n, err := io.ReadFull(r.pack, make([]byte, 1)); {
	case n > 0:
		return errors.New("decode the layer: there is something after the pack")
	case errors.Is(err, io.EOF):
		return io.EOF
	default:
		return fmt.Errorf("read the pack: %w", err)
	}
}

// Content is what is left of the content of the last entry, an inline file; for
// another it is empty. It is valid until Next.
func (r *Reader) Content() io.Reader { return (*content)(r) }

type content Reader

func (c *content) Read(b []byte) (int, error) {
	if c.rest == 0 {
		return 0, io.EOF
	}
	if len(c.left) == 0 {
		if err := (*Reader)(c).frame(); err != nil {
			return 0, err
		}
	}
	n := copy(b[:min(int64(len(b)), c.rest)], c.left)
	c.left = c.left[n:]
	c.rest -= int64(n)
	return n, nil
}

// frame reads the next one. There is one: the index was checked.
func (r *Reader) frame() error {
	f := r.frames[0]
	if r.pack == nil {
		return errors.New("decode the layer: it has no pack")
	}
	if int64(cap(r.packed)) < f.Size {
		r.packed = make([]byte, f.Size)
	}
	r.packed = r.packed[:f.Size]
	if _, err := io.ReadFull(r.pack, r.packed); err != nil {
		return fmt.Errorf("read the pack: %w", noEOF(err))
	}
	piece, err := f.unpack(r.zstd, r.piece[:0], r.packed)
	if err != nil {
		return err
	}
	r.frames, r.piece, r.left = r.frames[1:], piece, piece
	return nil
}
