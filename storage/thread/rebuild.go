package thread

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// Rebuild restores heads from the blob store. For every thread that has manifests but no head, the
// newest version is the one with the highest number whose layers and objects all exist, and of
// several with that number the one created last. The history is the chain of its parents. The
// newest version may be one whose save was reported as failed. Staged files are not recorded in
// manifests and are lost. Rebuild skips threads that have a head, and threads with unreadable
// blobs, since it could mistake an older version for the newest. The error lists the latter.
// Collect must not run and threads must not be removed concurrently.
func (v *Versions) Rebuild(ctx context.Context) (proto.Rebuilt, error) {
	r := &rebuild{Versions: v}
	var failed []error
	rebuildThread := func(thread threadKey, manifests []proto.Blob) error {
		err := r.thread(ctx, thread, manifests)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("rebuild thread %s of %s: %w", thread.id, thread.org, err))
		}
		return nil
	}
	// The manifests of a thread are adjacent, by number.
	var current threadKey
	var manifests []proto.Blob
	for e, err := range v.Blobs.List(ctx, threadsPrefix) {
		if err != nil {
			return r.result, fmt.Errorf("rebuild threads: %w", errors.Join(append(failed, err)...))
		}
		b, key, ok := manifestBlob(e)
		if !ok {
			continue // foreign
		}
		if next := (threadKey{key.org, key.thread}); next != current {
			if err := rebuildThread(current, manifests); err != nil {
				return r.result, fmt.Errorf("rebuild threads: %w", err)
			}
			current, manifests = next, nil
		}
		manifests = append(manifests, b)
	}
	return r.result, errors.Join(append(failed, rebuildThread(current, manifests))...)
}

type rebuild struct {
	*Versions
	result proto.Rebuilt
}

func (r *rebuild) thread(ctx context.Context, thread threadKey, manifests []proto.Blob) error {
	if len(manifests) == 0 {
		return nil
	}
	_, err := r.Heads.Get(ctx, thread.org, thread.id)
	if err == nil {
		r.result.Kept++
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
		r.result.Lost++
		return nil
	}
	now := time.Now()
	head := &proto.Thread{
		Org: thread.org, ID: thread.id, CreatedAt: newest.Version.CreatedAt, UsedAt: newest.Version.CreatedAt,
		Fence:   now.UnixMilli(), // exceeds all earlier ones
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
		r.result.Kept++
	case err != nil:
		return err
	default:
		r.result.Made++
	}
	return nil
}

// newest returns the manifest of the newest complete version, or nil. manifests are sorted by
// number.
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
			if complete, err := r.isComplete(ctx, m, true); complete || err != nil {
				return m, err
			}
		}
	}
	return nil, nil
}

// isComplete reports whether all layers of a version exist, and with objects also all of their
// objects.
func (r *rebuild) isComplete(ctx context.Context, m *proto.Manifest, objects bool) (bool, error) {
	for i := range m.Version.Layers {
		if exists, err := r.exists(ctx, m.Version.Layers[i].Blob); !exists || err != nil {
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
			exists, err := r.exists(ctx, b)
			missing = missing || !exists
			return err
		})
		if missing || err != nil {
			return false, err
		}
	}
	return true, nil
}

func (r *rebuild) exists(ctx context.Context, b proto.Blob) (bool, error) {
	e, err := r.Blobs.Stat(ctx, b.Key)
	if errors.Is(err, proto.ErrNotFound) {
		return false, nil
	}
	return err == nil && e.Size == b.Size, err
}

// history returns the ancestors of a version back to the first incomplete one.
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
			return nil, fmt.Errorf("manifest %q has the invalid parent %q", m.Version.Manifest.Key, m.Parent.Key)
		}
		if complete, err := r.isComplete(ctx, parent, false); !complete || err != nil {
			return all, err
		}
		m = parent
		version := parent.Version
		version.Layers, version.Base = nil, nil
		all = append(all, version)
	}
	return all, nil
}
