package layer

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/klauspost/compress/zstd"
)

// Reader decodes a layer that may be anything. It takes a few MiB of memory,
// whatever the layer says, and for each entry the work of an entry.
type Reader struct {
	in    *bufio.Reader
	zstd  *zstd.Decoder
	order *order
	moves []string
	rest  int64 // of the content of the last file
}

// NewReader begins a layer. The Reader must be closed.
func NewReader(r io.Reader, limits Limits) (*Reader, error) {
	// One thread; what needs more memory than a layer does is not one.
	z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(window))
	if err != nil {
		return nil, fmt.Errorf("decode the layer: %w", err)
	}
	lr := &Reader{in: bufio.NewReaderSize(z, 64<<10), zstd: z}
	if err := lr.header(limits); err != nil {
		z.Close()
		return nil, fmt.Errorf("decode the layer: %w", noEOF(err))
	}
	return lr, nil
}

// Close gives back what the Reader took.
func (r *Reader) Close() { r.zstd.Close() }

// Moves are the paths of the directories in the last version that entries move.
func (r *Reader) Moves() []string { return r.moves }

func (r *Reader) header(limits Limits) error {
	b := make([]byte, len(magic))
	if _, err := io.ReadFull(r.in, b); err != nil {
		return err
	}
	if string(b) != magic {
		return errors.New("it does not begin as one of version 1")
	}
	n, err := r.number(uint64(max(limits.Entries, 0)))
	if err != nil {
		return fmt.Errorf("the number of moves: %w", err)
	}
	var size int
	for range n {
		path, err := r.string(MaxDepth * (MaxName + 1))
		if err != nil {
			return fmt.Errorf("the path of a move: %w", err)
		}
		// Paths are kept: what they take together is bounded by what names are.
		if size += len(path); size > maxMoves {
			return fmt.Errorf("the paths of moves take more than %d bytes", maxMoves)
		}
		r.moves = append(r.moves, path)
	}
	r.order, err = newOrder(limits, r.moves)
	return err
}

// Next returns the next entry, and io.EOF after the end. What was not read of the
// content before it is skipped.
func (r *Reader) Next() (*Entry, error) {
	e, err := r.next()
	if err != nil && !errors.Is(err, errEnd) {
		return nil, fmt.Errorf("decode the layer: %w", noEOF(err))
	}
	if err != nil {
		return nil, io.EOF
	}
	return e, nil
}

var errEnd = errors.New("end")

func (r *Reader) next() (*Entry, error) {
	if _, err := io.Copy(io.Discard, r.Content()); err != nil {
		return nil, err
	}
	if r.rest > 0 {
		return nil, io.ErrUnexpectedEOF
	}
	kind, err := r.in.ReadByte()
	if r.order.ended() {
		if err == nil {
			return nil, errors.New("there is something after the end")
		}
		if errors.Is(err, io.EOF) {
			return nil, errEnd
		}
	}
	if err != nil {
		return nil, err
	}
	e := &Entry{Kind: Kind(kind)}
	if err := r.fields(e); err != nil {
		return nil, err
	}
	if err := r.order.admit(e); err != nil {
		return nil, err
	}
	if e.Inline() {
		r.rest = e.Data()
	}
	return e, nil
}

// fields reads what follows the kind.
func (r *Reader) fields(e *Entry) (err error) {
	if e.Kind != Leave {
		if e.Name, err = r.string(MaxName); err != nil {
			return fmt.Errorf("a name: %w", err)
		}
	}
	switch e.Kind {
	case Dir:
		base, err := r.number(uint64(Moved))
		if err != nil {
			return err
		}
		e.Base = Base(base)
		if e.Base == Moved {
			if e.Move, err = r.int(); err != nil {
				return err
			}
		}
		return r.meta(e)
	case File:
		return r.file(e)
	case Symlink:
		if err = r.meta(e); err != nil {
			return err
		}
		if e.Group, err = r.int(); err != nil {
			return err
		}
		e.Target, err = r.string(MaxTarget)
		return err
	case Link:
		e.Group, err = r.int()
		return err
	case Delete, Leave:
		return nil
	}
	return fmt.Errorf("unknown kind of entry %q", e.Kind)
}

func (r *Reader) meta(e *Entry) error {
	mode, err := r.number(ModeBits)
	if err != nil {
		return fmt.Errorf("a mode: %w", err)
	}
	e.Mode = uint32(mode)
	sec, err := r.number(math.MaxUint64)
	if err != nil {
		return err
	}
	e.Sec = int64(sec>>1) ^ -int64(sec&1)
	nsec, err := r.number(1e9 - 1)
	if err != nil {
		return err
	}
	e.Nsec = uint32(nsec)
	n, err := r.number(MaxXattrs / 24)
	if err != nil {
		return fmt.Errorf("the number of attributes: %w", err)
	}
	for range n {
		name, err := r.string(MaxName)
		if err != nil {
			return err
		}
		value, err := r.string(MaxXattrs)
		if err != nil {
			return err
		}
		e.Xattrs = append(e.Xattrs, Xattr{Name: name, Value: []byte(value)})
	}
	return nil
}

func (r *Reader) file(e *Entry) (err error) {
	if err = r.meta(e); err != nil {
		return err
	}
	if e.Group, err = r.int(); err != nil {
		return err
	}
	size, err := r.number(MaxFileSize)
	if err != nil {
		return fmt.Errorf("a size: %w", err)
	}
	e.Size = int64(size)
	n, err := r.number(MaxExtents)
	if err != nil {
		return fmt.Errorf("the number of a file's parts: %w", err)
	}
	var end uint64
	for range n {
		hole, err := r.number(size - end)
		if err != nil {
			return fmt.Errorf("a hole: %w", err)
		}
		length, err := r.number(size - end - hole)
		if err != nil {
			return fmt.Errorf("a part: %w", err)
		}
		e.Extents = append(e.Extents, Extent{Offset: int64(end + hole), Len: int64(length)})
		end += hole + length
	}
	object, err := r.in.ReadByte()
	if err != nil {
		return err
	}
	if (object == 0) != e.Inline() || object > 1 {
		return fmt.Errorf("file %q of %d bytes is in the wrong place", e.Name, e.Data())
	}
	if object == 1 {
		_, err = io.ReadFull(r.in, e.Object[:])
	}
	return err
}

// Content is what is left of the content of the last entry, an inline file; for
// another it is empty. It is valid until Next.
func (r *Reader) Content() io.Reader { return (*content)(r) }

type content Reader

func (c *content) Read(b []byte) (int, error) {
	if c.rest == 0 {
		return 0, io.EOF
	}
	n, err := c.in.Read(b[:min(int64(len(b)), c.rest)])
	if c.rest -= int64(n); err != nil && c.rest > 0 {
		return n, noEOF(err)
	}
	return n, nil
}

func (r *Reader) number(limit uint64) (uint64, error) {
	var n uint64
	for i := range binary.MaxVarintLen64 {
		b, err := r.in.ReadByte()
		if err != nil {
			return 0, err
		}
		n |= uint64(b&0x7f) << (7 * i)
		if b >= 0x80 {
			continue
		}
		if i > 0 && b == 0 || i == binary.MaxVarintLen64-1 && b > 1 {
			break // longer than it needs to be, or than 64 bits
		}
		if n > limit {
			return 0, fmt.Errorf("%d is more than %d", n, limit)
		}
		return n, nil
	}
	return 0, errors.New("what should be a number is none")
}

func (r *Reader) int() (int, error) {
	n, err := r.number(math.MaxInt32)
	return int(n), err
}

func (r *Reader) string(limit int) (string, error) {
	n, err := r.number(uint64(limit))
	if err != nil {
		return "", err
	}
	b := make([]byte, n)
	_, err = io.ReadFull(r.in, b)
	return string(b), err
}
