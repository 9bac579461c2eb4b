package layer

import (
	"crypto/sha256"
	"fmt"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// FrameBytes is how much content a frame has, but for the last one of a pack.
	FrameBytes = 1 << 20
	// maxFrame is more than a frame can take that does not get smaller by compression.
	maxFrame = FrameBytes + 4096
)

// Frame is a part of a pack that can be read alone.
type Frame struct {
	Position int64 // of its content in the unpacked pack
	Len      int64 // of its content, bytes
	Offset   int64 // in the pack, and so in the layer
	Size     int64 // there, bytes
	Digest   Digest
}

// Covering are those of an Index's frames that have the n bytes at a position of
// the unpacked pack, which must be in it. They are adjacent.
func Covering(frames []Frame, position, n int64) []Frame {
	if n == 0 {
		return nil
	}
	return frames[position/FrameBytes : (position+n-1)/FrameBytes+1]
}

// Unpack returns the content of a frame. b is what the layer has in its place,
// which may be anything: the error is [proto.ErrCorrupt] where it is not the frame.
func (f Frame) Unpack(b []byte) ([]byte, error) {
	z, err := newUnpacker()
	if err != nil {
		return nil, fmt.Errorf("unpack a frame: %w", err)
	}
	defer z.Close()
	return f.unpack(z, nil, b)
}

func newUnpacker() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(window),
		zstd.WithDecodeAllCapLimit(true))
}

// unpack uses the memory of to, which is empty, if that is enough.
func (f Frame) unpack(z *zstd.Decoder, to, b []byte) ([]byte, error) {
	if int64(len(b)) != f.Size || sha256.Sum256(b) != f.Digest {
		return nil, fmt.Errorf("unpack a frame: %w: the %d bytes at %d are not those that the index tells of", proto.ErrCorrupt, f.Size, f.Offset)
	}
	content, err := z.DecodeAll(b, slices.Grow(to, int(f.Len))[:0:f.Len])
	if err != nil {
		return nil, fmt.Errorf("unpack the frame at %d: %w", f.Offset, err)
	}
	if int64(len(content)) != f.Len {
		return nil, fmt.Errorf("the frame at %d has %d bytes of content, not %d", f.Offset, len(content), f.Len)
	}
	return content, nil
}
