package thread

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/thread/layer"
)

const (
	// markLife is how long the mark of a removal is waited for, seen from the one who waits. Who made it gives the removal half of that
	// time, so that after it nothing is on its way any more.
	markLife = time.Minute
	// markPause is how often a mark is looked for.
	markPause = 100 * time.Millisecond
)

// PutObject stores the content of a file, size bytes that have the digest, so that it is there until a safe age after PutObject returns.
// See the package's comment for how it and Collect keep out of each other's way.
func (v *Versions) PutObject(ctx context.Context, org string, digest layer.Digest, size int64, content io.ReaderAt) error {
	b := ObjectBlob(org, digest, size)
	for {
		err := v.Blobs.Put(ctx, b, content)
		if err == nil {
			err = v.awaitSweep(ctx, b.Key)
		}
		if err == nil {
			_, err = v.Blobs.Stat(ctx, b.Key)
			if errors.Is(err, proto.ErrNotFound) {
				continue // it was removed after it was put
			}
		}
		if err != nil {
			return fmt.Errorf("put an object: %w", err)
		}
		return nil
	}
}

func markPrefix(key string) string { return sweepPrefix + strings.TrimPrefix(key, objectsPrefix) + "-" }

// awaitSweep waits until nobody removes an object. Marks of one who must have died are removed.
func (v *Versions) awaitSweep(ctx context.Context, key string) error {
	seen := make(map[string]time.Time)
	tick := time.NewTicker(markPause)
	defer tick.Stop()
	for {
		there := false
		for mark, err := range v.Blobs.List(ctx, markPrefix(key)) {
			if err != nil {
				return err
			}
			if seen[mark.Key].IsZero() {
				seen[mark.Key] = time.Now()
			}
			if time.Since(seen[mark.Key]) < markLife {
				there = true
				continue
			}
			if err := v.Blobs.Delete(ctx, mark.Key); err != nil {
				return err
			}
		}
		if !there {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// sweepObject removes an object, unless it was put since a time.
func (v *Versions) sweepObject(ctx context.Context, key string, cutoff time.Time) (removed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, markLife/2)
	defer cancel()
	mark := emptyBlob(markPrefix(key) + random())
	if err := v.Blobs.Put(ctx, mark, bytes.NewReader(nil)); err != nil {
		return false, err
	}
	// The mark stays where it is not known whether the removal is still on its way.
	if removed, err = v.sweep(ctx, key, cutoff); err != nil {
		return false, err
	}
	return removed, v.Blobs.Delete(ctx, mark.Key)
}

// sweep removes a blob, unless it was put since a time.
func (v *Versions) sweep(ctx context.Context, key string, cutoff time.Time) (removed bool, err error) {
	e, err := v.Blobs.Stat(ctx, key)
	if errors.Is(err, proto.ErrNotFound) {
		return false, nil
	}
	if err != nil || !e.Modified.Before(cutoff) {
		return false, err
	}
	// This process may have slept, and the deadline's timer too.
	if deadline, ok := ctx.Deadline(); ok && time.Now().After(deadline) {
		return false, fmt.Errorf("remove blob %q: %w", key, context.DeadlineExceeded)
	}
	return true, v.Blobs.Delete(ctx, key)
}

func emptyBlob(key string) proto.Blob {
	return proto.Blob{Key: key, Digest: DigestName(sha256.Sum256(nil))}
}
