package thread

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/thread/layer"
)

const (
	// keptBytes is how much memory the trees that are kept may take together.
	keptBytes = 64 << 20
	// atOnce is how many trees are made at a time, and fetchAhead how many indexes of each are fetched before they are needed.
	atOnce     = 4
	fetchAhead = 4
)

// trees keeps those used last.
type trees struct {
	once   sync.Once
	making chan struct{} // a slot for each that is being made

	mu   sync.Mutex
	kept []keptTree // the one used last is the last
	cost int64
}

type keptTree struct {
	key string
	*tree
}

func (c *trees) get(key string) *tree {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.IndexFunc(c.kept, func(k keptTree) bool { return k.key == key })
	if i < 0 {
		return nil
	}
	found := c.kept[i]
	c.kept = append(slices.Delete(c.kept, i, i+1), found)
	return found.tree
}

func (c *trees) put(key string, t *tree) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.cost > keptBytes || slices.ContainsFunc(c.kept, func(k keptTree) bool { return k.key == key }) {
		return
	}
	c.kept = append(c.kept, keptTree{key, t})
	for c.cost += t.cost; c.cost > keptBytes; c.kept = slices.Delete(c.kept, 0, 1) {
		c.cost -= c.kept[0].cost
	}
}

// tree gives the tree of a version whose layers are known.
func (v *Versions) tree(ctx context.Context, org string, version *proto.Version) (*tree, error) {
	// The layers of a version may be replaced, and those before are then removed.
	key := version.Manifest.Key
	if len(version.Layers) > 0 {
		key += " " + version.Layers[0].Key
	}
	if t := v.trees.get(key); t != nil {
		return t, nil
	}
	v.trees.once.Do(func() { v.trees.making = make(chan struct{}, atOnce) })
	select {
	case v.trees.making <- struct{}{}:
		defer func() { <-v.trees.making }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if t := v.trees.get(key); t != nil { // made while we waited
		return t, nil
	}
	t, err := v.makeTree(ctx, org, version)
	if err != nil {
		return nil, fmt.Errorf("read version %d by its manifest %q: %w", version.Number, version.Manifest.Key, lost(err))
	}
	v.trees.put(key, t)
	return t, nil
}

func (v *Versions) makeTree(ctx context.Context, org string, version *proto.Version) (*tree, error) {
	ctx, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	type fetched struct {
		index []byte
		err   error
	}
	layers := version.Layers
	ahead := make([]chan fetched, 0, len(layers))
	t := newTree(org, version.CreatedAt, v.Limits)
	for i := range layers {
		for len(ahead) < min(len(layers), i+fetchAhead) {
			l, to := &layers[len(ahead)], make(chan fetched, 1)
			ahead = append(ahead, to)
			wg.Go(func() {
				index, err := v.fetchIndex(ctx, org, l)
				to <- fetched{index, err}
			})
		}
		got := <-ahead[i]
		ahead[i] = nil
		if got.err != nil {
			return nil, got.err
		}
		if err := v.applyIndex(t, &layers[i], got.index); err != nil {
			return nil, fmt.Errorf("layer %q: %w", layers[i].Key, err)
		}
	}
	return t, nil
}

func (v *Versions) applyIndex(t *tree, l *proto.Layer, index []byte) error {
	in, err := layer.NewIndex(bytes.NewReader(index), v.Limits)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := checkPack(l, in); err != nil {
		return err
	}
	return t.apply(l.Blob, in)
}

// checkPack checks that the pack ends where the index begins.
func checkPack(l *proto.Layer, in *layer.Index) error {
	var end int64
	if frames := in.Frames(); len(frames) > 0 {
		last := frames[len(frames)-1]
		end = last.Offset + last.Size
	}
	if end != l.Size-l.Index {
		return fmt.Errorf("its index tells of %d bytes before it, and there are %d", end, l.Size-l.Index)
	}
	return nil
}

// fetchIndex reads the index of a layer and sees that it is the right one.
func (v *Versions) fetchIndex(ctx context.Context, org string, l *proto.Layer) ([]byte, error) {
	if err := checkLayer(org, l); err != nil {
		return nil, err
	}
	r, err := v.Blobs.GetRange(ctx, l.Blob, l.Size-l.Index, l.Index)
	if err != nil {
		return nil, fmt.Errorf("read the index of layer %q: %w", l.Key, err)
	}
	index, err := io.ReadAll(io.LimitReader(r, l.Index)) // grows with what comes
	if err := errors.Join(err, r.Close()); err != nil {
		return nil, fmt.Errorf("read the index of layer %q: %w", l.Key, err)
	}
	if DigestName(sha256.Sum256(index)) != l.IndexDigest {
		return nil, fmt.Errorf("read the index of layer %q: the store has something else there: put the blob back from a copy", l.Key)
	}
	return index, nil
}

// objects calls f with the objects that a layer refers to.
func (v *Versions) objects(ctx context.Context, org string, l *proto.Layer, f func(proto.Blob) error) error {
	index, err := v.fetchIndex(ctx, org, l)
	if err != nil {
		return err
	}
	in, err := layer.NewIndex(bytes.NewReader(index), v.Limits)
	if err != nil {
		return fmt.Errorf("layer %q: %w", l.Key, err)
	}
	defer in.Close()
	var found int64
	for {
		e, err := in.Next()
		switch {
		case errors.Is(err, io.EOF) && found != l.Objects:
			return fmt.Errorf("layer %q: it has %d objects and not %d", l.Key, found, l.Objects)
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
