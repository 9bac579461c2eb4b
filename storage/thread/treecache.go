package thread

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
	"github.com/bullpen-run/bullpen/storage/thread/codec"
)

const (
	// maxCachedBytes limits the memory of all cached trees together.
	maxCachedBytes = 64 << 20
	// maxBuilds limits how many trees are built at a time.
	maxBuilds = 4
	// indexPrefetch is how many indexes are fetched before they are needed.
	indexPrefetch = 4
)

// treeCache holds the most recently used trees.
type treeCache struct {
	once   sync.Once
	builds chan struct{} // semaphore

	mu  sync.Mutex
	lru lru[*tree]
}

func (c *treeCache) init() {
	c.builds = make(chan struct{}, maxBuilds)
	c.lru.limit = maxCachedBytes
}

func (c *treeCache) get(key string) *tree {
	c.mu.Lock()
	defer c.mu.Unlock()
	t, _ := c.lru.get(key)
	return t
}

func (c *treeCache) put(key string, t *tree) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lru.put(key, t, t.cost)
}

// tree returns the tree of a version that lists its layers.
func (v *Versions) tree(ctx context.Context, org string, version *proto.Version) (*tree, error) {
	v.trees.once.Do(v.trees.init)
	// A compaction replaces the layers of a version, and the previous ones are removed.
	key := version.Manifest.Key
	if len(version.Layers) > 0 {
		key += " " + version.Layers[0].Key
	}
	if t := v.trees.get(key); t != nil {
		return t, nil
	}
	select {
	case v.trees.builds <- struct{}{}:
		defer func() { <-v.trees.builds }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if t := v.trees.get(key); t != nil { // built in the meantime
		return t, nil
	}
	t, err := v.buildTree(ctx, org, version)
	if err != nil {
		return nil, fmt.Errorf("read version %d by its manifest %q: %w", version.Number, version.Manifest.Key,
			hideNotFound(err))
	}
	v.trees.put(key, t)
	return t, nil
}

func (v *Versions) buildTree(ctx context.Context, org string, version *proto.Version) (*tree, error) {
	t := newTree(org, version.CreatedAt, v.Limits)
	layers := version.Layers
	fetch := func(ctx context.Context, i int) ([]byte, error) { return v.fetchIndex(ctx, org, &layers[i]) }
	i := 0
	for index, err := range prefetch(ctx, len(layers), indexPrefetch, fetch) {
		if err != nil {
			return nil, err
		}
		if err := v.applyIndex(ctx, t, &layers[i], index); err != nil {
			return nil, fmt.Errorf("layer %q: %w", layers[i].Key, err)
		}
		i++
	}
	return t, nil
}

func (v *Versions) applyIndex(ctx context.Context, t *tree, l *proto.Layer, index []byte) error {
	in, err := codec.NewIndex(bytes.NewReader(index), v.Limits)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := checkPack(l, in); err != nil {
		return err
	}
	return t.apply(ctx, l.Blob, in)
}

// checkPack checks that the pack ends where the index begins.
func checkPack(l *proto.Layer, in *codec.Index) error {
	var end int64
	if frames := in.Frames(); len(frames) > 0 {
		last := frames[len(frames)-1]
		end = last.Offset + last.Size
	}
	if end != l.Size-l.Index {
		return fmt.Errorf("its index describes a pack of %d bytes, but the pack has %d", end, l.Size-l.Index)
	}
	return nil
}

// objects calls f with the objects that a layer refers to.
func (v *Versions) objects(ctx context.Context, org string, l *proto.Layer, f func(proto.Blob) error) error {
	index, err := v.fetchIndex(ctx, org, l)
	if err != nil {
		return err
	}
	in, err := codec.NewIndex(bytes.NewReader(index), v.Limits)
	if err != nil {
		return fmt.Errorf("layer %q: %w", l.Key, err)
	}
	defer in.Close()
	var found int64
	for {
		e, err := in.Next()
		switch {
		case errors.Is(err, io.EOF) && found != l.Objects:
			return fmt.Errorf("layer %q: it has %d objects, not %d", l.Key, found, l.Objects)
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("layer %q: %w", l.Key, err)
		case e.Kind == layer.File && !e.Inline():
			found++
			if err := f(ObjectBlob(org, e.Object, e.Data())); err != nil {
				return err
			}
		}
	}
}
