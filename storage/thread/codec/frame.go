package codec

import (
	"crypto/sha256"
	"fmt"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
)

const (
	// FrameBytes is the content size of every frame but the last one of a pack.
	FrameBytes = 1 << 20
	// maxFrame is an upper bound for the compressed size of a frame, even if it is incompressible.
	maxFrame = FrameBytes + 4096
)

// Frame is a part of a pack that can be read independently.
type Frame struct {
	Position int64 // of its content in the unpacked pack
	Len      int64 // of its content in bytes
	Offset   int64 // in the pack and therefore in the layer
	Size     int64 // compressed, in bytes
	Digest   layer.Digest
}

// Covering returns the adjacent frames that contain the n bytes at position of the unpacked pack,
// which must be in range.
func Covering(frames []Frame, position, n int64) []Frame {
	if n == 0 {
		return nil
	}
	return frames[position/FrameBytes : (position+n-1)/FrameBytes+1]
}

// Unpack verifies and decompresses b, which the store returned for the frame. The error wraps
// [proto.ErrCorrupt] if b is not the frame.
func (f Frame) Unpack(b []byte) ([]byte, error) {
	z, err := newUnpacker()
	if err != nil {
		return nil, fmt.Errorf("unpack a frame: %w", err)
	}
	defer z.Close()
	return f.unpack(z, nil, b)
}

func newUnpacker() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(window),
		zstd.WithDecodeAllCapLimit(true))
}

// unpack reuses the memory of to, which is empty, if its capacity is sufficient.
func (f Frame) unpack(z *zstd.Decoder, to, b []byte) ([]byte, error) {
	if int64(len(b)) != f.Size || sha256.Sum256(b) != f.Digest {
		return nil, fmt.Errorf("unpack a frame: %w: the %d bytes at %d do not match the index", proto.ErrCorrupt,
			f.Size, f.Offset)
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
