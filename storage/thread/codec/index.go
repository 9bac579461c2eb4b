package codec

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/proto/layer"
)

// Index decodes the index of an untrusted layer. Whatever the index contains, it takes a few MiB of
// memory and 80 bytes for each MiB that its limits allow.
type Index struct {
	in        *bufio.Reader
	zstd      *zstd.Decoder
	validator *validator
	moves     []string
	frames    []Frame
	content   int64 // bytes in the pack according to the table
	position  int64 // of the last entry's content
	end       int64 // of the content of all entries so far
}

// NewIndex returns an Index that decodes r. It must be closed.
func NewIndex(r io.Reader, limits layer.Limits) (*Index, error) {
	z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(window))
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

// Close releases the decoder.
func (x *Index) Close() { x.zstd.Close() }

// Moves returns the paths of the moves in the previous version.
func (x *Index) Moves() []string { return x.moves }

// Frames returns the frames of the pack.
func (x *Index) Frames() []Frame { return x.frames }

// Position returns the position of the last entry's content, if that is an inline file, in the
// unpacked pack, see [Covering].
func (x *Index) Position() int64 { return x.position }

func (x *Index) header(limits layer.Limits) error {
	b := make([]byte, len(magic))
	if _, err := io.ReadFull(x.in, b); err != nil {
		return err
	}
	if string(b) != magic {
		return errors.New("not a layer of format 1")
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
		path, err := x.string(layer.MaxDepth * (layer.MaxName + 1))
		if err != nil {
			return fmt.Errorf("the path of a move: %w", err)
		}
		// Paths are held in memory.
		if size += len(path); size > layer.MaxMoves {
			return fmt.Errorf("the paths of moves take more than %d bytes", layer.MaxMoves)
		}
		x.moves = append(x.moves, path)
	}
	x.validator, err = newValidator(limits, x.moves)
	return err
}

func (x *Index) table(limits layer.Limits) error {
	content, err := x.number(math.MaxInt64)
	if err != nil {
		return fmt.Errorf("the size of the pack: %w", err)
	}
	x.content = int64(content)
	if x.content > limits.Bytes {
		return fmt.Errorf("more than %d bytes in files: %w", limits.Bytes, layer.ErrLimit)
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

// Next returns the next entry, or io.EOF after the last one.
func (x *Index) Next() (*layer.Entry, error) {
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

func (x *Index) next() (*layer.Entry, error) {
	kind, err := x.in.ReadByte()
	if x.validator.complete() {
		if err == nil {
			return nil, errors.New("trailing bytes after the last entry")
		}
		if errors.Is(err, io.EOF) {
			return nil, x.checkEnd()
		}
	}
	if err != nil {
		return nil, err
	}
	e := &layer.Entry{Kind: layer.Kind(kind)}
	if err := x.fields(e); err != nil {
		return nil, err
	}
	if err := x.validator.check(e); err != nil {
		return nil, err
	}
	x.position = x.end
	if e.Inline() {
		if n := e.Data(); n > x.content-x.end {
			return nil, fmt.Errorf("the content of file %q is beyond the pack", e.Name)
		}
		x.end += e.Data()
	}
	return e, nil
}

func (x *Index) checkEnd() error {
	if x.end != x.content {
		return fmt.Errorf("%d bytes in the pack belong to no file", x.content-x.end)
	}
	return errEnd
}

// fields decodes the fields after the kind.
func (x *Index) fields(e *layer.Entry) (err error) {
	if e.Kind != layer.Leave {
		if e.Name, err = x.string(layer.MaxName); err != nil {
			return fmt.Errorf("a name: %w", err)
		}
	}
	switch e.Kind {
	case layer.Dir:
		base, err := x.number(uint64(layer.Moved))
		if err != nil {
			return err
		}
		e.Base = layer.Base(base)
		if e.Base == layer.Moved {
			if e.Move, err = x.int(); err != nil {
				return err
			}
		}
		return x.meta(e)
	case layer.File:
		return x.file(e)
	case layer.Symlink:
		if err = x.meta(e); err != nil {
			return err
		}
		if e.Group, err = x.int(); err != nil {
			return err
		}
		e.Target, err = x.string(layer.MaxTarget)
		return err
	case layer.Link:
		e.Group, err = x.int()
		return err
	case layer.Delete, layer.Leave:
		return nil
	}
	return fmt.Errorf("unknown kind of entry %q", e.Kind)
}

func (x *Index) meta(e *layer.Entry) error {
	mode, err := x.number(layer.ModeBits)
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
	n, err := x.number(layer.MaxXattrs / 24)
	if err != nil {
		return fmt.Errorf("the number of attributes: %w", err)
	}
	for range n {
		name, err := x.string(layer.MaxName)
		if err != nil {
			return err
		}
		value, err := x.string(layer.MaxXattrs)
		if err != nil {
			return err
		}
		e.Xattrs = append(e.Xattrs, layer.Xattr{Name: name, Value: []byte(value)})
	}
	return nil
}

func (x *Index) file(e *layer.Entry) (err error) {
	if err = x.meta(e); err != nil {
		return err
	}
	if e.Group, err = x.int(); err != nil {
		return err
	}
	size, err := x.number(layer.MaxFileSize)
	if err != nil {
		return fmt.Errorf("a size: %w", err)
	}
	e.Size = int64(size)
	n, err := x.number(layer.MaxExtents)
	if err != nil {
		return fmt.Errorf("the number of extents: %w", err)
	}
	var end uint64
	for range n {
		hole, err := x.number(size - end)
		if err != nil {
			return fmt.Errorf("a hole: %w", err)
		}
		length, err := x.number(size - end - hole)
		if err != nil {
			return fmt.Errorf("an extent: %w", err)
		}
		e.Extents = append(e.Extents, layer.Extent{Offset: int64(end + hole), Len: int64(length)})
		end += hole + length
	}
	object, err := x.in.ReadByte()
	if err != nil {
		return err
	}
	if (object == 0) != e.Inline() || object > 1 {
		return fmt.Errorf("file %q of %d bytes must be inline or an object, but is the other", e.Name, e.Data())
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
	return 0, errors.New("invalid number")
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
