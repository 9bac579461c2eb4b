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

// Index decodes the index of a layer that may be anything. It takes a few MiB of
// memory, whatever the index says, and 80 bytes for each MiB that its limits allow;
// and for each entry the work of an entry.
type Index struct {
	in       *bufio.Reader
	zstd     *zstd.Decoder
	order    *order
	moves    []string
	frames   []Frame
	content  int64 // bytes in the pack, as the table says
	position int64 // of the last entry's content
	end      int64 // of the content of all entries so far
}

// NewIndex begins an index. The Index must be closed.
func NewIndex(r io.Reader, limits Limits) (*Index, error) {
	// One thread; what needs more memory than a layer does is not one.
	z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(window))
	if err != nil {
		return nil, fmt.Errorf("decode the layer: %w", err)
	}
	x := &Index{in: bufio.NewReaderSize(z, 64<<10), zstd: z}
	if err := x.header(limits); err != nil {
		z.Close()
		return nil, fmt.Errorf("decode the layer: %w", noEOF(err))
	}
	return x, nil
}

// Close gives back what the Index took.
func (x *Index) Close() { x.zstd.Close() }

// Moves are the paths of the directories in the last version that entries move.
func (x *Index) Moves() []string { return x.moves }

// Frames are what the pack consists of.
func (x *Index) Frames() []Frame { return x.frames }

// Position is where the content of the last entry, an inline file, begins in the
// unpacked pack, where it is Data bytes long; see Covering.
func (x *Index) Position() int64 { return x.position }

func (x *Index) header(limits Limits) error {
	b := make([]byte, len(magic))
	if _, err := io.ReadFull(x.in, b); err != nil {
		return err
	}
	if string(b) != magic {
		return errors.New("it does not begin as one of version 1")
	}
	if err := x.table(limits); err != nil {
		return err
	}
	n, err := x.number(uint64(max(limits.Entries, 0)))
	if err != nil {
		return fmt.Errorf("the number of moves: %w", err)
	}
	var size int
	for range n {
		path, err := x.string(MaxDepth * (MaxName + 1))
		if err != nil {
			return fmt.Errorf("the path of a move: %w", err)
		}
		// Paths are kept: what they take together is bounded by what names are.
		if size += len(path); size > MaxMoves {
			return fmt.Errorf("the paths of moves take more than %d bytes", MaxMoves)
		}
		x.moves = append(x.moves, path)
	}
	x.order, err = newOrder(limits, x.moves)
	return err
}

func (x *Index) table(limits Limits) error {
	content, err := x.number(math.MaxInt64)
	if err != nil {
		return fmt.Errorf("the size of the pack: %w", err)
	}
	x.content = int64(content)
	if x.content > limits.Bytes {
		return fmt.Errorf("more than %d bytes in files: %w", limits.Bytes, ErrLimit)
	}
	f := Frame{}
	for f.Position < x.content {
		f.Len = min(x.content-f.Position, FrameBytes)
		size, err := x.number(maxFrame)
		if err != nil {
			return fmt.Errorf("the size of a frame: %w", err)
		}
		f.Size = int64(size)
		if _, err := io.ReadFull(x.in, f.Digest[:]); err != nil {
			return err
		}
		x.frames = append(x.frames, f)
		f.Offset += f.Size
		f.Position += f.Len
	}
	return nil
}

// Next returns the next entry, and io.EOF after the end.
func (x *Index) Next() (*Entry, error) {
	e, err := x.next()
	if err != nil && !errors.Is(err, errEnd) {
		return nil, fmt.Errorf("decode the layer: %w", noEOF(err))
	}
	if err != nil {
		return nil, io.EOF
	}
	return e, nil
}

var errEnd = errors.New("end")

func (x *Index) next() (*Entry, error) {
	kind, err := x.in.ReadByte()
	if x.order.ended() {
		if err == nil {
			return nil, errors.New("there is something after the end")
		}
		if errors.Is(err, io.EOF) {
			return nil, x.ended()
		}
	}
	if err != nil {
		return nil, err
	}
	e := &Entry{Kind: Kind(kind)}
	if err := x.fields(e); err != nil {
		return nil, err
	}
	if err := x.order.admit(e); err != nil {
		return nil, err
	}
	x.position = x.end
	if e.Inline() {
		if n := e.Data(); n > x.content-x.end {
			return nil, fmt.Errorf("the content of file %q is not in the pack", e.Name)
		}
		x.end += e.Data()
	}
	return e, nil
}

func (x *Index) ended() error {
	if x.end != x.content {
		return fmt.Errorf("%d bytes in the pack belong to no file", x.content-x.end)
	}
	return errEnd
}

// fields reads what follows the kind.
func (x *Index) fields(e *Entry) (err error) {
	if e.Kind != Leave {
		if e.Name, err = x.string(MaxName); err != nil {
			return fmt.Errorf("a name: %w", err)
		}
	}
	switch e.Kind {
	case Dir:
		base, err := x.number(uint64(Moved))
		if err != nil {
			return err
		}
		e.Base = Base(base)
		if e.Base == Moved {
			if e.Move, err = x.int(); err != nil {
				return err
			}
		}
		return x.meta(e)
	case File:
		return x.file(e)
	case Symlink:
		if err = x.meta(e); err != nil {
			return err
		}
		if e.Group, err = x.int(); err != nil {
			return err
		}
		e.Target, err = x.string(MaxTarget)
		return err
	case Link:
		e.Group, err = x.int()
		return err
	case Delete, Leave:
		return nil
	}
	return fmt.Errorf("unknown kind of entry %q", e.Kind)
}

func (x *Index) meta(e *Entry) error {
	mode, err := x.number(ModeBits)
	if err != nil {
		return fmt.Errorf("a mode: %w", err)
	}
	e.Mode = uint32(mode)
	sec, err := x.number(math.MaxUint64)
	if err != nil {
		return err
	}
	e.Sec = int64(sec>>1) ^ -int64(sec&1)
	nsec, err := x.number(1e9 - 1)
	if err != nil {
		return err
	}
	e.Nsec = uint32(nsec)
	n, err := x.number(MaxXattrs / 24)
	if err != nil {
		return fmt.Errorf("the number of attributes: %w", err)
	}
	for range n {
		name, err := x.string(MaxName)
		if err != nil {
			return err
		}
		value, err := x.string(MaxXattrs)
		if err != nil {
			return err
		}
		e.Xattrs = append(e.Xattrs, Xattr{Name: name, Value: []byte(value)})
	}
	return nil
}

func (x *Index) file(e *Entry) (err error) {
	if err = x.meta(e); err != nil {
		return err
	}
	if e.Group, err = x.int(); err != nil {
		return err
	}
	size, err := x.number(MaxFileSize)
	if err != nil {
		return fmt.Errorf("a size: %w", err)
	}
	e.Size = int64(size)
	n, err := x.number(MaxExtents)
	if err != nil {
		return fmt.Errorf("the number of a file's parts: %w", err)
	}
	var end uint64
	for range n {
		hole, err := x.number(size - end)
		if err != nil {
			return fmt.Errorf("a hole: %w", err)
		}
		length, err := x.number(size - end - hole)
		if err != nil {
			return fmt.Errorf("a part: %w", err)
		}
		e.Extents = append(e.Extents, Extent{Offset: int64(end + hole), Len: int64(length)})
		end += hole + length
	}
	object, err := x.in.ReadByte()
	if err != nil {
		return err
	}
	if (object == 0) != e.Inline() || object > 1 {
		return fmt.Errorf("file %q of %d bytes is in the wrong place", e.Name, e.Data())
	}
	if object == 1 {
		_, err = io.ReadFull(x.in, e.Object[:])
	}
	return err
}

func (x *Index) number(limit uint64) (uint64, error) {
	var n uint64
	for i := range binary.MaxVarintLen64 {
		b, err := x.in.ReadByte()
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

func (x *Index) int() (int, error) {
	n, err := x.number(math.MaxInt32)
	return int(n), err
}

func (x *Index) string(limit int) (string, error) {
	n, err := x.number(uint64(limit))
	if err != nil {
		return "", err
	}
	b := make([]byte, n)
	_, err = io.ReadFull(x.in, b)
	return string(b), err
}
