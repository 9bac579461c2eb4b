package thread

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"iter"
	"os"
	"sync"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/storage/thread/codec"
)

const (
	// smallLayer is the size in bytes up to which a layer is fetched into memory before it is
	// needed.
	smallLayer = 1 << 20
	// layerPrefetch is how many small layers are fetched before they are needed.
	layerPrefetch = 8
)

// draft is a new layer in a spool file.
type draft struct {
	*codec.Writer
	versions *Versions
	org      string
	spool    *os.File
	sum      hash.Hash
	size     int64
	complete bool
	layout   codec.Layout
}

// NewLayer returns a new layer that is collected in spool, an empty file. The caller closes spool
// once the draft is no longer needed.
func (v *Versions) NewLayer(org string, spool *os.File) (layer.Draft, error) {
	d := &draft{versions: v, org: org, spool: spool, sum: sha256.New()}
	var err error
	if d.Writer, err = codec.NewWriter(writerFunc(d.write), v.Limits); err != nil {
		return nil, fmt.Errorf("begin a layer: %w", err)
	}
	return d, nil
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func (d *draft) write(p []byte) (int, error) {
	n, err := d.spool.Write(p)
	d.sum.Write(p[:n])
	d.size += int64(n)
	return n, err
}

// Digest implements [layer.Draft].
func (d *draft) Digest() (digest string, err error) {
	if !d.complete {
		if d.layout, err = d.Close(); err != nil {
			return "", fmt.Errorf("complete a layer: %w", err)
		}
		d.complete = true
	}
	return DigestName(layer.Digest(d.sum.Sum(nil))), nil
}

// Store implements [layer.Draft].
func (d *draft) Store(ctx context.Context, version int64, objects int) (proto.Layer, error) {
	digest, err := d.Digest()
	if err != nil {
		return proto.Layer{}, fmt.Errorf("store a layer: %w", err)
	}
	l := proto.Layer{
		Blob:    proto.Blob{Key: LayerKey(d.org), Size: d.size, Digest: digest},
		Version: version, Index: d.layout.Index, IndexDigest: DigestName(d.layout.IndexDigest), Objects: int64(objects),
	}
	if err := d.versions.Blobs.Put(ctx, l.Blob, d.spool); err != nil {
		return proto.Layer{}, fmt.Errorf("store a layer: %w", err)
	}
	return l, nil
}

// Reopen implements [layer.Draft].
func (d *draft) Reopen() (layer.ReadCloser, error) {
	index := io.NewSectionReader(d.spool, d.layout.Pack, d.layout.Index)
	return codec.NewReader(index, io.NewSectionReader(d.spool, 0, d.layout.Pack), d.versions.Limits)
}

// Layers opens layers one after another. Each reader is valid until the next one is yielded.
func (v *Versions) Layers(ctx context.Context, org string, layers []proto.Layer) iter.Seq2[layer.Reader, error] {
	return func(yield func(layer.Reader, error) bool) {
		fetch := func(ctx context.Context, i int) ([]byte, error) {
			if layers[i].Size > smallLayer {
				return nil, nil
			}
			return v.fetchLayer(ctx, org, &layers[i])
		}
		i := 0
		for content, err := range prefetch(ctx, len(layers), layerPrefetch, fetch) {
			more := false
			if err == nil {
				more, err = v.openLayer(ctx, org, &layers[i], content, func(r layer.Reader) bool { return yield(r, nil) })
			}
			if err != nil {
				yield(nil, err)
				return
			}
			if !more {
				return
			}
			i++
		}
	}
}

// openLayer calls yield with a reader of a layer. content is the whole layer, or nil to stream it.
func (v *Versions) openLayer(
	ctx context.Context, org string, l *proto.Layer, content []byte, yield func(layer.Reader) bool,
) (more bool, err error) {
	packSize := l.Size - l.Index
	var index []byte
	var pack io.Reader
	if content != nil {
		index, pack = content[packSize:], bytes.NewReader(content[:packSize])
	} else {
		// The index is at the end. It has the digests of all frames of the pack.
		if index, err = v.fetchIndex(ctx, org, l); err != nil {
			return false, err
		}
		r, err := v.Blobs.GetRange(ctx, l.Blob, 0, packSize)
		if err != nil {
			return false, fmt.Errorf("read layer %q: %w", l.Key, err)
		}
		defer func() { _ = r.Close() }()
		ahead := newReadAhead(r)
		defer ahead.stop()
		pack = ahead
	}
	in, err := codec.NewReader(bytes.NewReader(index), pack, v.Limits)
	if err != nil {
		return false, fmt.Errorf("layer %q: %w", l.Key, err)
	}
	defer in.Close()
	return yield(in), nil
}

// fetchLayer reads and verifies a whole layer.
func (v *Versions) fetchLayer(ctx context.Context, org string, l *proto.Layer) ([]byte, error) {
	if err := checkLayer(org, l); err != nil {
		return nil, err
	}
	r, err := v.Blobs.Get(ctx, l.Blob)
	if err != nil {
		return nil, fmt.Errorf("read layer %q: %w", l.Key, err)
	}
	content := make([]byte, l.Size)
	_, err = io.ReadFull(r, content)
	if err == nil {
		_, err = io.Copy(io.Discard, r) // the store reports a wrong digest instead of io.EOF
	}
	if err := errors.Join(noEOF(err), r.Close()); err != nil {
		return nil, fmt.Errorf("read layer %q: %w", l.Key, err)
	}
	return content, nil
}

// fetchIndex reads and verifies the index of a layer.
func (v *Versions) fetchIndex(ctx context.Context, org string, l *proto.Layer) ([]byte, error) {
	if err := checkLayer(org, l); err != nil {
		return nil, err
	}
	r, err := v.Blobs.GetRange(ctx, l.Blob, l.Size-l.Index, l.Index)
	if err != nil {
		return nil, fmt.Errorf("read the index of layer %q: %w", l.Key, err)
	}
	index, err := io.ReadAll(io.LimitReader(r, l.Index)) // grows with what is received
	if err := errors.Join(err, r.Close()); err != nil {
		return nil, fmt.Errorf("read the index of layer %q: %w", l.Key, err)
	}
	if digest := DigestName(sha256.Sum256(index)); digest != l.IndexDigest {
		return nil, fmt.Errorf("read the index of layer %q: %w: its digest is %s and should be %s: restore the blob "+
			"from a copy",
			l.Key, proto.ErrCorrupt, digest, l.IndexDigest)
	}
	return index, nil
}

// prefetch calls fetch for 0 to n-1 and yields the results in order. It runs up to concurrency
// calls before their results are needed. It stops after the first error.
func prefetch[T any](
	ctx context.Context, n, concurrency int, fetch func(ctx context.Context, i int) (T, error),
) iter.Seq2[T, error] {
	type result struct {
		value T
		err   error
	}
	return func(yield func(T, error) bool) {
		ctx, stop := context.WithCancel(ctx)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer stop()
		results := make([]chan result, 0, n)
		for i := range n {
			for len(results) < min(n, i+concurrency) {
				next, out := len(results), make(chan result, 1)
				results = append(results, out)
				wg.Go(func() {
					value, err := fetch(ctx, next)
					out <- result{value, err}
				})
			}
			r := <-results[i]
			results[i] = nil
			if !yield(r.value, r.err) || r.err != nil {
				return
			}
		}
	}
}
