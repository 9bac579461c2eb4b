package cache

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"sync"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/thread"
	"github.com/bullpen-run/bullpen/worker/home"
)

const (
	// smallLayer is up to which size, in bytes, a layer is fetched into memory while those before it are applied, aheadLayers at most.
	smallLayer  = 1 << 20
	aheadLayers = 8
)

// noLimits are for what was held to limits when it was stored.
var noLimits = home.Limits{Bytes: 1 << 50, Entries: 1 << 30}

// fetched is a small layer, or why it could not be fetched.
type fetched struct {
	content []byte
	err     error
}

// apply makes dir, which is the version before the first of layers, the version of the last.
func (k *Cache) apply(ctx context.Context, dir, org string, layers []proto.Layer) error {
	ctx, cancel := context.WithCancel(ctx)
	var fetching sync.WaitGroup
	defer fetching.Wait()
	defer cancel()
	ahead := make([]chan fetched, len(layers))
	fetch := func(i int) {
		if i >= len(layers) || layers[i].Size > smallLayer {
			return
		}
		ahead[i] = make(chan fetched, 1)
		fetching.Go(func() {
			content, err := k.whole(ctx, layers[i].Blob)
			ahead[i] <- fetched{content, err}
		})
	}
	for i := range aheadLayers {
		fetch(i)
	}
	for i, l := range layers {
		var err error
		if ahead[i] == nil {
			err = k.applyStream(ctx, dir, org, l)
		} else if f := <-ahead[i]; f.err != nil {
			err = f.err
		} else {
			err = k.applyBytes(ctx, dir, org, l, f.content)
		}
		if err != nil {
			return fmt.Errorf("apply the layer of version %d: %w", l.Version, err)
		}
		fetch(i + aheadLayers)
	}
	return nil
}

// whole reads a blob.
func (k *Cache) whole(ctx context.Context, b proto.Blob) ([]byte, error) {
	r, err := k.cfg.Versions.Blobs.Get(ctx, b)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	content := make([]byte, b.Size)
	if _, err := io.ReadFull(r, content); err != nil {
		return nil, err
	}
	// What comes after the last byte is the word on the digest.
	if _, err := io.Copy(io.Discard, r); err != nil {
		return nil, err
	}
	return content, nil
}

func (k *Cache) applyBytes(ctx context.Context, dir, org string, l proto.Layer, content []byte) error {
	pack := l.Size - l.Index
	return home.Apply(ctx, dir, bytes.NewReader(content[pack:]), bytes.NewReader(content[:pack]), noLimits, k.fetchObject(org))
}

// applyStream applies a layer while it is being fetched. What says what is in it lies at its end, and is fetched before; it has the digests of
// all parts of the rest, which are checked before they are used.
func (k *Cache) applyStream(ctx context.Context, dir, org string, l proto.Layer) error {
	index, err := k.index(ctx, l)
	if err != nil {
		return err
	}
	r, err := k.cfg.Versions.Blobs.GetRange(ctx, l.Blob, 0, l.Size-l.Index)
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	pack := readAhead(r)
	defer func() { _ = pack.Close() }()
	return home.Apply(ctx, dir, bytes.NewReader(index), pack, noLimits, k.fetchObject(org))
}

func (k *Cache) index(ctx context.Context, l proto.Layer) ([]byte, error) {
	r, err := k.cfg.Versions.Blobs.GetRange(ctx, l.Blob, l.Size-l.Index, l.Index)
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	index := make([]byte, l.Index)
	if _, err := io.ReadFull(r, index); err != nil {
		return nil, err
	}
	if digest := thread.DigestName(sha256.Sum256(index)); digest != l.IndexDigest {
		return nil, fmt.Errorf("%w: the index of layer %s has the digest %s and should have %s", proto.ErrCorrupt, l.Key, digest, l.IndexDigest)
	}
	return index, nil
}

// fetchObject fetches the content of large files.
func (k *Cache) fetchObject(org string) home.Fetch {
	return func(ctx context.Context, digest home.Digest, size int64) (io.ReadCloser, error) {
		return k.cfg.Versions.Blobs.Get(ctx, thread.ObjectBlob(org, digest, size))
	}
}
