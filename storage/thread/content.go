package thread

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/bullpen-run/bullpen/storage/thread/layer"
)

// keptFrames is how many unpacked frames an export keeps: files that follow each other are often in the same ones.
const keptFrames = 8

// frames gives the content of frames. It is used by one reader at a time.
type frames struct {
	versions *Versions
	kept     []keptFrame // the one used last is the last
}

type keptFrame struct {
	key     string // of the layer
	offset  int64
	content []byte
}

func (c *frames) get(ctx context.Context, p *pack, f layer.Frame) ([]byte, error) {
	for i, k := range c.kept {
		if k.key == p.blob.Key && k.offset == f.Offset {
			c.kept = append(slices.Delete(c.kept, i, i+1), k)
			return k.content, nil
		}
	}
	r, err := c.versions.Blobs.GetRange(ctx, p.blob, f.Offset, f.Size)
	if err != nil {
		return nil, err
	}
	packed := make([]byte, f.Size)
	_, err = io.ReadFull(r, packed)
	if err := errors.Join(noEOF(err), r.Close()); err != nil {
		return nil, fmt.Errorf("read layer %q: %w", p.blob.Key, err)
	}
	content, err := f.Unpack(packed)
	if err != nil {
		return nil, fmt.Errorf("layer %q: %w", p.blob.Key, err)
	}
	if len(c.kept) == keptFrames {
		c.kept = slices.Delete(c.kept, 0, 1)
	}
	c.kept = append(c.kept, keptFrame{p.blob.Key, f.Offset, content})
	return content, nil
}

// read opens length bytes of a file from offset on, both within its size.
func (t *tree) read(ctx context.Context, n *node, offset, length int64, from *frames) (io.ReadCloser, error) {
	if offset < 0 || length < 0 || offset > n.size || length > n.size-offset {
		return nil, fmt.Errorf("bytes %d to %d are not within the file's %d", offset, offset+length, n.size)
	}
	// What of the content without holes is in the range.
	r := &reader{extents: n.extents, at: offset, end: offset + length}
	first := n.dense(offset)
	size := n.dense(r.end) - first
	if size == 0 {
		r.data = io.NopCloser(bytes.NewReader(nil))
		return r, nil
	}
	var err error
	switch c := n.content; {
	case c.staged != nil:
		r.data, err = from.versions.Blobs.GetRange(ctx, *c.staged, first, size)
	case c.object != nil:
		r.data, err = from.versions.Blobs.GetRange(ctx, ObjectBlob(t.org, *c.object, n.dense(n.size)), first, size)
	default:
		p := &t.packs[c.layer]
		parts := layer.Covering(p.frames, c.position+first, size)
		r.data = &packed{ctx: ctx, from: from, pack: p, frames: parts, skip: c.position + first - parts[0].Position, left: size}
	}
	return r, lost(err)
}

// dense gives how many bytes before one of a file are not holes.
func (n *node) dense(at int64) int64 {
	var sum int64
	for _, x := range n.extents {
		if x.Offset >= at {
			break
		}
		sum += min(x.Len, at-x.Offset)
	}
	return sum
}

// tag names a file's content: two that are different have different ones.
func (t *tree) tag(n *node) string {
	var of string
	switch c := n.content; {
	case c.staged != nil:
		of = c.staged.Digest
	case c.object != nil:
		of = DigestName(*c.object)
	case len(n.extents) > 0:
		of = fmt.Sprint(t.packs[c.layer].blob.Key, " ", c.position)
	}
	sum := sha256.Sum256(fmt.Appendln(nil, of, n.size, n.extents))
	return hex.EncodeToString(sum[:16])
}

// reader puts the holes between the parts of a file.
type reader struct {
	extents []layer.Extent // whose last ones are not before at
	at, end int64          // in the file
	data    io.ReadCloser  // what is not holes, from at on
}

func (r *reader) Read(p []byte) (int, error) {
	if r.at == r.end {
		return 0, io.EOF
	}
	if len(p) == 0 {
		return 0, nil
	}
	for len(r.extents) > 0 && r.extents[0].Offset+r.extents[0].Len <= r.at {
		r.extents = r.extents[1:]
	}
	to := r.end
	if len(r.extents) > 0 && r.extents[0].Offset <= r.at {
		to = min(to, r.extents[0].Offset+r.extents[0].Len)
		n, err := r.data.Read(p[:min(int64(len(p)), to-r.at)])
		r.at += int64(n)
		if n > 0 {
			return n, nil // what is wrong comes again
		}
		return 0, lost(noEOF(err))
	}
	if len(r.extents) > 0 {
		to = min(to, r.extents[0].Offset)
	}
	n := int(min(int64(len(p)), to-r.at))
	clear(p[:n])
	r.at += int64(n)
	return n, nil
}

func (r *reader) Close() error { return r.data.Close() }

// packed reads from adjacent frames.
type packed struct {
	ctx    context.Context // of the request that it reads for
	from   *frames
	pack   *pack
	frames []layer.Frame
	skip   int64 // bytes of the next frame
	left   int64 // bytes of all
	piece  []byte
}

func (r *packed) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, io.EOF
	}
	if len(r.piece) == 0 {
		content, err := r.from.get(r.ctx, r.pack, r.frames[0])
		if err != nil {
			return 0, err
		}
		content = content[r.skip:]
		r.piece, r.frames, r.skip = content[:min(int64(len(content)), r.left)], r.frames[1:], 0
	}
	n := copy(p, r.piece)
	r.piece = r.piece[n:]
	r.left -= int64(n)
	return n, nil
}

func (r *packed) Close() error { return nil }

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
