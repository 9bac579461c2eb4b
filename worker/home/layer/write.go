package layer

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
)

const (
	magic  = "bullpen home 1\n"
	window = 1 << 20 // bytes
	// maxMoves is how many bytes the paths of moves may take together.
	maxMoves = 16 << 20
)

// Writer encodes a layer. It refuses what a Reader with the same limits would
// refuse.
type Writer struct {
	out   *bufio.Writer
	zstd  *zstd.Encoder // nil for a plain one
	order *order
	buf   []byte
}

// NewWriter begins a layer with its moves, paths in the last version.
func NewWriter(w io.Writer, moves []string, limits Limits) (*Writer, error) {
	// One goroutine and fixed settings: the same input makes the same bytes.
	z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithWindowSize(window), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, err
	}
	lw, err := NewPlainWriter(z, moves, limits)
	if err != nil {
		return nil, err
	}
	lw.zstd = z
	return lw, nil
}

// NewPlainWriter is a NewWriter that leaves out the compression, for a digest.
func NewPlainWriter(w io.Writer, moves []string, limits Limits) (*Writer, error) {
	o, err := newOrder(limits, moves)
	if err != nil {
		return nil, err
	}
	lw := &Writer{out: bufio.NewWriterSize(w, 64<<10), order: o}
	lw.buf = append(lw.buf, magic...)
	lw.number(uint64(len(moves)))
	for _, path := range moves {
		lw.string(path)
	}
	return lw, lw.flush()
}

func (w *Writer) number(n uint64) { w.buf = binary.AppendUvarint(w.buf, n) }
func (w *Writer) string(s string) { w.number(uint64(len(s))); w.buf = append(w.buf, s...) }

func (w *Writer) flush() error {
	_, err := w.out.Write(w.buf)
	w.buf = w.buf[:0]
	return err
}

// Write adds an entry. Of an inline file it reads Data bytes from content, which
// must have no more; content is not used otherwise.
func (w *Writer) Write(e *Entry, content io.Reader) error {
	if err := w.order.admit(e); err != nil {
		return err
	}
	w.buf = append(w.buf, byte(e.Kind))
	if e.Kind != Leave {
		w.string(e.Name)
	}
	switch e.Kind {
	case Dir:
		w.number(uint64(e.Base))
		if e.Base == Moved {
			w.number(uint64(e.Move))
		}
		w.meta(e)
	case Symlink:
		w.meta(e)
		w.number(uint64(e.Group))
		w.string(e.Target)
	case Link:
		w.number(uint64(e.Group))
	case File:
		return w.file(e, content)
	case Delete, Leave:
	}
	return w.flush()
}

func (w *Writer) meta(e *Entry) {
	w.number(uint64(e.Mode))
	w.buf = binary.AppendVarint(w.buf, e.Sec)
	w.number(uint64(e.Nsec))
	w.number(uint64(len(e.Xattrs)))
	for _, x := range e.Xattrs {
		w.string(x.Name)
		w.string(string(x.Value))
	}
}

func (w *Writer) file(e *Entry, content io.Reader) error {
	w.meta(e)
	w.number(uint64(e.Group))
	w.number(uint64(e.Size))
	w.number(uint64(len(e.Extents)))
	var end int64
	for _, x := range e.Extents {
		w.number(uint64(x.Offset - end))
		w.number(uint64(x.Len))
		end = x.Offset + x.Len
	}
	if !e.Inline() {
		w.buf = append(w.buf, 1)
		w.buf = append(w.buf, e.Object[:]...)
		return w.flush()
	}
	w.buf = append(w.buf, 0)
	if err := w.flush(); err != nil {
		return err
	}
	if n, err := io.CopyN(w.out, content, e.Data()); err != nil {
		return fmt.Errorf("read file %q: %d of %d bytes: %w", e.Name, n, e.Data(), noEOF(err))
	}
	return nil
}

// Entries is how many there are so far, as Limits counts them.
func (w *Writer) Entries() int64 { return w.order.entries }

// Bytes is the content of files so far, objects included.
func (w *Writer) Bytes() int64 { return w.order.bytes }

// Close ends the layer, which must be whole. The writer below stays open.
func (w *Writer) Close() error {
	if !w.order.ended() {
		return errors.New("the layer is not at its end")
	}
	if err := w.out.Flush(); err != nil {
		return err
	}
	if w.zstd == nil {
		return nil
	}
	return w.zstd.Close()
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
