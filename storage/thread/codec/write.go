package codec

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

	"github.com/bullpen-run/bullpen/proto/layer"
)

const (
	magic  = "bullpen home 1\n"
	window = 1 << 20 // bytes
)

// Layout describes the two parts of an encoded layer, the pack and the index.
type Layout struct {
	Pack        int64 // bytes
	Index       int64 // bytes
	IndexDigest layer.Digest
}

// Writer encodes a layer. It rejects whatever a Reader with the same limits would reject. Until
// Close it holds the compressed index in memory: about ten bytes per entry and 40 bytes per MiB of
// content.
type Writer struct {
	limits    layer.Limits
	validator *validator // nil until Begin
	out       *bufio.Writer
	buf       []byte
	pack      *packer
	index     *bytes.Buffer
	zstd      *zstd.Encoder // to index
}

// newEncoder returns an encoder whose output depends on its input only: it uses one goroutine and
// fixed settings. Digests replace its checksums.
func newEncoder(w io.Writer) (*zstd.Encoder, error) {
	return zstd.NewWriter(w, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithWindowSize(window), zstd.WithLowerEncoderMem(true), zstd.WithEncoderCRC(false))
}

// NewWriter returns a Writer that writes a layer to w.
func NewWriter(w io.Writer, limits layer.Limits) (*Writer, error) {
	index := &bytes.Buffer{}
	z, err := newEncoder(index)
	if err != nil {
		return nil, err
	}
	p := &packer{out: w}
	if p.zstd, err = newEncoder(nil); err != nil {
		return nil, err
	}
	return &Writer{limits: limits, out: bufio.NewWriterSize(z, 64<<10), pack: p, index: index, zstd: z}, nil
}

// Begin starts the layer with the paths of its moves in the previous version.
func (w *Writer) Begin(moves []string) (err error) {
	if w.validator, err = newValidator(w.limits, moves); err != nil {
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

// Write appends an entry. If that is an inline file, content must hold exactly e.Data bytes;
// otherwise content is not used.
func (w *Writer) Write(e *layer.Entry, content io.Reader) error {
	if err := w.validator.check(e); err != nil {
		return err
	}
	w.buf = append(w.buf, byte(e.Kind))
	if e.Kind != layer.Leave {
		w.string(e.Name)
	}
	switch e.Kind {
	case layer.Dir:
		w.number(uint64(e.Base))
		if e.Base == layer.Moved {
			w.number(uint64(e.Move))
		}
		w.meta(e)
	case layer.Symlink:
		w.meta(e)
		w.number(uint64(e.Group))
		w.string(e.Target)
	case layer.Link:
		w.number(uint64(e.Group))
	case layer.File:
		return w.file(e, content)
	case layer.Delete, layer.Leave:
	}
	return w.flush()
}

func (w *Writer) meta(e *layer.Entry) {
	w.number(uint64(e.Mode))
	w.buf = binary.AppendVarint(w.buf, e.Sec)
	w.number(uint64(e.Nsec))
	w.number(uint64(len(e.Xattrs)))
	for _, x := range e.Xattrs {
		w.string(x.Name)
		w.string(string(x.Value))
	}
}

func (w *Writer) file(e *layer.Entry, content io.Reader) error {
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
	if err := w.pack.append(content, e.Data()); err != nil {
		return fmt.Errorf("read %d bytes of file %q: %w", e.Data(), e.Name, noEOF(err))
	}
	return nil
}

// Left returns how much may still be written.
func (w *Writer) Left() layer.Limits {
	if w.validator == nil {
		return w.limits
	}
	return w.validator.left
}

// Close completes the layer, all of whose entries must have been written. It does not close the
// underlying writer.
func (w *Writer) Close() (Layout, error) {
	if w.validator == nil || !w.validator.complete() {
		return Layout{}, errors.New("the layer is incomplete")
	}
	if err := w.out.Flush(); err != nil {
		return Layout{}, err
	}
	if err := w.zstd.Close(); err != nil {
		return Layout{}, err
	}
	if err := w.pack.flush(); err != nil {
		return Layout{}, err
	}
	// The table comes first, in a zstd frame of its own.
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
	layout.IndexDigest = layer.Digest(sum.Sum(nil))
	return layout, nil
}

// packer writes a pack.
type packer struct {
	out     io.Writer
	zstd    *zstd.Encoder
	content int64  // bytes appended
	size    int64  // bytes written
	table   []byte // the frames written, encoded for the index
	pending []byte // content that is not written yet, less than FrameBytes
	frame   []byte
}

// append appends the next n bytes of r.
func (p *packer) append(r io.Reader, n int64) error {
	for n > 0 {
		have := len(p.pending)
		part := int(min(n, int64(FrameBytes-have)))
		p.pending = slices.Grow(p.pending, part)[:have+part]
		if _, err := io.ReadFull(r, p.pending[have:]); err != nil {
			return err
		}
		n -= int64(part)
		p.content += int64(part)
		if len(p.pending) == FrameBytes {
			if err := p.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *packer) flush() error {
	if len(p.pending) == 0 {
		return nil
	}
	p.frame = p.zstd.EncodeAll(p.pending, p.frame[:0])
	p.pending = p.pending[:0]
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
