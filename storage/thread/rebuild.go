package thread

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Rebuild makes heads again of what the store has. A thread that has manifests and no head gets the one with the highest number whose
// layers and objects are all there as its newest version, the one made last where there are several, and as history what its manifest
// descends from. That may be a version that was reported as not saved; staged files are in no manifest and are lost. A thread that has a head is
// left alone. Where something cannot be read, its thread is left alone too, lest an older version be taken for the newest; the error tells of
// all of these. Collect must not run meanwhile, nor may threads be removed.
func (v *Versions) Rebuild(ctx context.Context) (proto.Rebuilt, error) {
	r := &rebuild{Versions: v}
	var failed []error
	finish := func(of threadKey, manifests []proto.Blob) error {
		err := r.thread(ctx, of, manifests)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("rebuild thread %s of %s: %w", of.id, of.org, err))
		}
		return nil
	}
	// Those of a thread come one after the other, by number.
	var of threadKey
	var manifests []proto.Blob
	for e, err := range v.Blobs.List(ctx, threadsPrefix) {
		if err != nil {
			return r.done, fmt.Errorf("rebuild threads: %w", errors.Join(append(failed, err)...))
		}
		b, key, ok := manifestBlob(e)
		if !ok {
			continue // none of ours
		}
		if next := (threadKey{key.org, key.thread}); next != of {
			if err := finish(of, manifests); err != nil {
				return r.done, fmt.Errorf("rebuild threads: %w", err)
			}
			of, manifests = next, nil
		}
		manifests = append(manifests, b)
	}
	return r.done, errors.Join(append(failed, finish(of, manifests))...)
}

type rebuild struct {
	*Versions
	done proto.Rebuilt
}

func (r *rebuild) thread(ctx context.Context, of threadKey, manifests []proto.Blob) error {
	if len(manifests) == 0 {
		return nil
	}
	_, err := r.Heads.Get(ctx, of.org, of.id)
	if err == nil {
		r.done.Kept++
		return nil
	}
	if !errors.Is(err, proto.ErrNotFound) {
		return err
	}
	newest, err := r.newest(ctx, manifests)
	if err != nil {
		return err
	}
	if newest == nil {
		r.done.Lost++
		return nil
	}
	now := time.Now()
	head := &proto.Thread{
		Org: of.org, ID: of.id, CreatedAt: newest.Version.CreatedAt, UsedAt: newest.Version.CreatedAt,
		Fence:   now.UnixMilli(), // over all that were given out before
		Version: &newest.Version,
	}
	if head.History, err = r.history(ctx, newest); err != nil {
		return err
	}
	if n := len(head.History); n > 0 {
		head.CreatedAt = head.History[n-1].CreatedAt
	}
	switch err := r.Heads.Create(ctx, head); {
	case errors.Is(err, proto.ErrExists):
		r.done.Kept++
	case err != nil:
		return err
	default:
		r.done.Made++
	}
	return nil
}

// newest gives the manifest of the newest version that is whole, nil where none is. Manifests are by number.
func (r *rebuild) newest(ctx context.Context, manifests []proto.Blob) (*proto.Manifest, error) {
	for to := len(manifests); to > 0; {
		key, _ := parseManifestKey(manifests[to-1].Key)
		var same []*proto.Manifest
		for ; to > 0; to-- {
			if next, _ := parseManifestKey(manifests[to-1].Key); next.number != key.number {
				break
			}
			m, err := r.ReadManifest(ctx, manifests[to-1])
			if err != nil {
				return nil, err
			}
			same = append(same, m)
		}
		slices.SortFunc(same, func(a, b *proto.Manifest) int { return b.Version.CreatedAt.Compare(a.Version.CreatedAt) })
		for _, m := range same {
			if whole, err := r.whole(ctx, m, true); whole || err != nil {
				return m, err
			}
		}
	}
	return nil, nil
}

// whole reports whether all layers of a version are in the store, and their objects.
func (r *rebuild) whole(ctx context.Context, m *proto.Manifest, objects bool) (bool, error) {
	for i := range m.Version.Layers {
		if there, err := r.there(ctx, m.Version.Layers[i].Blob); !there || err != nil {
			return false, err
		}
	}
	for i := range m.Version.Layers {
		l := &m.Version.Layers[i]
		if l.Objects == 0 || !objects {
			continue
		}
		missing := false
		err := r.objects(ctx, m.Org, l, func(b proto.Blob) error {
			there, err := r.there(ctx, b)
			missing = missing || !there
			return err
		})
		if missing || err != nil {
			return false, err
		}
	}
	return true, nil
}

func (r *rebuild) there(ctx context.Context, b proto.Blob) (bool, error) {
	e, err := r.Blobs.Stat(ctx, b.Key)
	if errors.Is(err, proto.ErrNotFound) {
		return false, nil
	}
	return err == nil && e.Size == b.Size, err
}

// history gives the versions that one descends from, as far as their layers are there.
func (r *rebuild) history(ctx context.Context, newest *proto.Manifest) ([]proto.Version, error) {
	var all []proto.Version
	for m := newest; m.Parent != nil && len(all) < proto.KeptVersions-1; {
		parent, err := r.ReadManifest(ctx, *m.Parent)
		if errors.Is(err, proto.ErrNotFound) {
			break
		}
		if err != nil {
			return nil, err
		}
		if parent.Org != newest.Org || parent.Thread != newest.Thread || parent.Version.Number >= m.Version.Number {
			return nil, fmt.Errorf("manifest %q names %q as the one before it, which cannot be", m.Version.Manifest.Key, m.Parent.Key)
		}
		if whole, err := r.whole(ctx, parent, false); !whole || err != nil {
			return all, err
		}
		m = parent
		version := parent.Version
		version.Layers, version.Base = nil, nil
		all = append(all, version)
	}
	return all, nil
}
