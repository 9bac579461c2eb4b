package layer

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/klauspost/compress/zstd"
)

const (
	magic  = "bullpen home 1\n"
	window = 1 << 20 // bytes
)

// Layout says where in a layer its parts are: first the pack, then the index.
type Layout struct {
	Pack        int64 // bytes
	Index       int64 // bytes
	IndexDigest Digest
}

// Writer encodes a layer. It refuses what a Reader with the same limits would
// refuse. It keeps the index in memory until Close, compressed, which is some ten
// bytes for each entry and 40 for each MiB of content.
type Writer struct {
	out   *bufio.Writer // entries
	order *order
	buf   []byte

	// A plain one has none of these.
	pack  *packer
	index *bytes.Buffer
	zstd  *zstd.Encoder // to index
}

// newEncoder has one goroutine and fixed settings: the same input makes the same
// bytes.
func newEncoder(w io.Writer) (*zstd.Encoder, error) {
	return zstd.NewWriter(w, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithWindowSize(window), zstd.WithLowerEncoderMem(true), zstd.WithEncoderCRC(false)) // digests say whether it is right
}

// NewWriter begins a layer with its moves, paths in the last version.
func NewWriter(w io.Writer, moves []string, limits Limits) (*Writer, error) {
	index := &bytes.Buffer{}
	z, err := newEncoder(index)
	if err != nil {
		return nil, err
	}
	p := &packer{out: w}
	if p.zstd, err = newEncoder(nil); err != nil {
		return nil, err
	}
	lw := &Writer{out: bufio.NewWriterSize(z, 64<<10), pack: p, index: index, zstd: z}
	return lw, lw.begin(moves, limits)
}

// NewPlainWriter writes no layer, but what one would have, uncompressed and with
// each file's content after its entry, for a digest.
func NewPlainWriter(w io.Writer, moves []string, limits Limits) (*Writer, error) {
	lw := &Writer{out: bufio.NewWriterSize(w, 64<<10)}
	lw.buf = append(lw.buf, magic...)
	return lw, lw.begin(moves, limits)
}

func (w *Writer) begin(moves []string, limits Limits) (err error) {
	if w.order, err = newOrder(limits, moves); err != nil {
		return err
	}
	w.number(uint64(len(moves)))
	for _, path := range moves {
		w.string(path)
	}
	return w.flush()
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
	var err error
	if w.pack != nil {
		err = w.pack.take(content, e.Data())
	} else {
		_, err = io.CopyN(w.out, content, e.Data())
	}
	if err != nil {
		return fmt.Errorf("take %d bytes of file %q: %w", e.Data(), e.Name, noEOF(err))
	}
	return nil
}

// Entries is how many there are so far, as Limits counts them.
func (w *Writer) Entries() int64 { return w.order.entries }

// Bytes is the content of files so far, objects included.
func (w *Writer) Bytes() int64 { return w.order.bytes }

// Close ends the layer, which must be whole, and says where what is in it. The
// writer below stays open.
func (w *Writer) Close() (Layout, error) {
	if !w.order.ended() {
		return Layout{}, errors.New("the layer is not at its end")
	}
	if err := w.out.Flush(); err != nil || w.pack == nil {
		return Layout{}, err
	}
	if err := w.zstd.Close(); err != nil {
		return Layout{}, err
	}
	if err := w.pack.flush(); err != nil {
		return Layout{}, err
	}
	// The table goes first, in a frame of its own.
	table := append(binary.AppendUvarint([]byte(magic), uint64(w.pack.content)), w.pack.table...)
	index := w.pack.zstd.EncodeAll(table, nil)
	sum := sha256.New()
	layout := Layout{Pack: w.pack.size}
	for _, part := range [][]byte{index, w.index.Bytes()} {
		sum.Write(part)
		layout.Index += int64(len(part))
		if _, err := w.pack.out.Write(part); err != nil {
			return Layout{}, err
		}
	}
	layout.IndexDigest = Digest(sum.Sum(nil))
	return layout, nil
}

// packer writes a pack.
type packer struct {
	out     io.Writer
	zstd    *zstd.Encoder
	content int64  // bytes taken
	size    int64  // bytes written
	table   []byte // of the frames written, as the index has it
	piece   []byte // content that is not written yet, less than FrameBytes
	frame   []byte
}

// take adds the next n bytes of r.
func (p *packer) take(r io.Reader, n int64) error {
	for n > 0 {
		have := len(p.piece)
		part := int(min(n, int64(FrameBytes-have)))
		p.piece = slices.Grow(p.piece, part)[:have+part]
		if _, err := io.ReadFull(r, p.piece[have:]); err != nil {
			return err
		}
		n -= int64(part)
		p.content += int64(part)
		if len(p.piece) == FrameBytes {
			if err := p.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *packer) flush() error {
	if len(p.piece) == 0 {
		return nil
	}
	p.frame = p.zstd.EncodeAll(p.piece, p.frame[:0])
	p.piece = p.piece[:0]
	p.size += int64(len(p.frame))
	digest := sha256.Sum256(p.frame)
	p.table = append(binary.AppendUvarint(p.table, uint64(len(p.frame))), digest[:]...)
	_, err := p.out.Write(p.frame)
	return err
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
