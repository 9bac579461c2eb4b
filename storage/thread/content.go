package thread

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"

	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/storage/thread/codec"
)

// cachedFrames is how many unpacked frames an archive caches, since consecutive files are often in
// the same ones.
const cachedFrames = 8

// frameReader reads and caches frames. It must not be used concurrently.
type frameReader struct {
	versions *Versions
	cache    lru[[]byte]
}

func (v *Versions) newFrameReader() *frameReader {
	return &frameReader{versions: v, cache: lru[[]byte]{limit: cachedFrames}}
}

func (r *frameReader) read(ctx context.Context, p *pack, f codec.Frame) ([]byte, error) {
	key := fmt.Sprint(p.blob.Key, " ", f.Offset)
	if content, ok := r.cache.get(key); ok {
		return content, nil
	}
	body, err := r.versions.Blobs.GetRange(ctx, p.blob, f.Offset, f.Size)
	if err != nil {
		return nil, err
	}
	packed := make([]byte, f.Size)
	_, err = io.ReadFull(body, packed)
	if err := errors.Join(noEOF(err), body.Close()); err != nil {
		return nil, fmt.Errorf("read layer %q: %w", p.blob.Key, err)
	}
	content, err := f.Unpack(packed)
	if err != nil {
		return nil, fmt.Errorf("layer %q: %w", p.blob.Key, err)
	}
	r.cache.put(key, content, 1)
	return content, nil
}

// open opens length bytes of a file from offset, which must be within its size.
func (t *tree) open(ctx context.Context, n *node, offset, length int64, frames *frameReader) (*sparseReader, error) {
	if offset < 0 || length < 0 || offset > n.size || length > n.size-offset {
		return nil, fmt.Errorf("bytes %d to %d are not within the file's %d", offset, offset+length, n.size)
	}
	r := &sparseReader{extents: n.extents, at: offset, end: offset + length}
	first := n.dense(offset)
	size := n.dense(r.end) - first
	if size == 0 {
		r.data = io.NopCloser(bytes.NewReader(nil))
		return r, nil
	}
	var err error
	switch c := n.content; {
	case c.staged != nil:
		r.data, err = frames.versions.Blobs.GetRange(ctx, *c.staged, first, size)
	case c.object != nil:
		r.data, err = frames.versions.Blobs.GetRange(ctx, ObjectBlob(t.org, *c.object, n.dense(n.size)), first, size)
	default:
		p := &t.packs[c.pack]
		covering := codec.Covering(p.frames, c.position+first, size)
		r.data = &packReader{
			ctx: ctx, reader: frames, pack: p, frames: covering,
			skip: c.position + first - covering[0].Position, left: size,
		}
	}
	return r, hideNotFound(err)
}

// dense returns how many bytes of a file before the offset at are not holes.
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

// tag identifies the content of a file. Different contents have different tags.
func (t *tree) tag(n *node) string {
	var source string
	switch c := n.content; {
	case c.staged != nil:
		source = c.staged.Digest
	case c.object != nil:
		source = DigestName(*c.object)
	case len(n.extents) > 0:
		source = fmt.Sprint(t.packs[c.pack].blob.Key, " ", c.position)
	}
	sum := sha256.Sum256(fmt.Appendln(nil, source, n.size, n.extents))
	return hex.EncodeToString(sum[:16])
}

// sparseReader inserts the holes between the extents of a file.
type sparseReader struct {
	extents []layer.Extent // those that end after at
	at, end int64          // in the file
	data    io.ReadCloser  // the content without holes from at
}

// Read implements [io.Reader].
func (r *sparseReader) Read(p []byte) (int, error) {
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
			return n, nil // the next call returns err again
		}
		return 0, hideNotFound(noEOF(err))
	}
	if len(r.extents) > 0 {
		to = min(to, r.extents[0].Offset)
	}
	n := int(min(int64(len(p)), to-r.at))
	clear(p[:n])
	r.at += int64(n)
	return n, nil
}

// Close implements [io.Closer].
func (r *sparseReader) Close() error { return r.data.Close() }

// packReader reads from adjacent frames.
type packReader struct {
	ctx     context.Context // of the request that reads
	reader  *frameReader
	pack    *pack
	frames  []codec.Frame
	skip    int64 // bytes to skip in the next frame
	left    int64 // bytes left to read
	content []byte
}

// Read implements [io.Reader].
func (r *packReader) Read(p []byte) (int, error) {
	if r.left == 0 {
		return 0, io.EOF
	}
	if len(r.content) == 0 {
		content, err := r.reader.read(r.ctx, r.pack, r.frames[0])
		if err != nil {
			return 0, err
		}
		content = content[r.skip:]
		r.content, r.frames, r.skip = content[:min(int64(len(content)), r.left)], r.frames[1:], 0
	}
	n := copy(p, r.content)
	r.content = r.content[n:]
	r.left -= int64(n)
	return n, nil
}

// Close implements [io.Closer].
func (r *packReader) Close() error { return nil }

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
