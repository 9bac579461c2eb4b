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
	"github.com/bullpen-run/bullpen/proto/layer"
)

const (
	// markTimeout is how long PutObject waits for a mark to disappear. The writer of the mark
	// limits the removal to half of that, so that no request is in flight after the timeout.
	markTimeout = time.Minute
	// markInterval is how often PutObject looks for marks.
	markInterval = 100 * time.Millisecond
)

// PutObject stores the content of a file, size bytes with the given digest. The object then exists
// for at least the safe age. The package comment explains how PutObject and Collect interact.
func (v *Versions) PutObject(
	ctx context.Context, org string, digest layer.Digest, size int64, content io.ReaderAt,
) error {
	b := ObjectBlob(org, digest, size)
	for {
		err := v.Blobs.Put(ctx, b, content)
		if err == nil {
			err = v.awaitSweep(ctx, b.Key)
		}
		if err == nil {
			_, err = v.Blobs.Stat(ctx, b.Key)
			if errors.Is(err, proto.ErrNotFound) {
				continue // removed after Put
			}
		}
		if err != nil {
			return fmt.Errorf("put an object: %w", err)
		}
		return nil
	}
}

func markPrefix(key string) string { return sweepPrefix + strings.TrimPrefix(key, objectsPrefix) + "-" }

// awaitSweep waits until no collection is removing an object. It removes marks of collections that
// must have died.
func (v *Versions) awaitSweep(ctx context.Context, key string) error {
	firstSeen := make(map[string]time.Time)
	tick := time.NewTicker(markInterval)
	defer tick.Stop()
	for {
		marked := false
		for mark, err := range v.Blobs.List(ctx, markPrefix(key)) {
			if err != nil {
				return err
			}
			if firstSeen[mark.Key].IsZero() {
				firstSeen[mark.Key] = time.Now()
			}
			if time.Since(firstSeen[mark.Key]) < markTimeout {
				marked = true
				continue
			}
			if err := v.Blobs.Delete(ctx, mark.Key); err != nil {
				return err
			}
		}
		if !marked {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// sweepObject removes an object unless it was put after cutoff.
func (v *Versions) sweepObject(ctx context.Context, key string, cutoff time.Time) (removed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, markTimeout/2)
	defer cancel()
	mark := emptyBlob(markPrefix(key) + random())
	if err := v.Blobs.Put(ctx, mark, bytes.NewReader(nil)); err != nil {
		return false, err
	}
	// After an error the removal may still be in flight, and the mark must stay.
	if removed, err = v.sweep(ctx, key, cutoff); err != nil {
		return false, err
	}
	return removed, v.Blobs.Delete(ctx, mark.Key)
}

// sweep removes a blob unless it was put after cutoff.
func (v *Versions) sweep(ctx context.Context, key string, cutoff time.Time) (removed bool, err error) {
	e, err := v.Blobs.Stat(ctx, key)
	if errors.Is(err, proto.ErrNotFound) {
		return false, nil
	}
	if err != nil || !e.Modified.Before(cutoff) {
		return false, err
	}
	// The process and the timer of the context may have been suspended.
	if deadline, ok := ctx.Deadline(); ok && time.Now().After(deadline) {
		return false, fmt.Errorf("remove blob %q: %w", key, context.DeadlineExceeded)
	}
	return true, v.Blobs.Delete(ctx, key)
}

func emptyBlob(key string) proto.Blob {
	return proto.Blob{Key: key, Digest: DigestName(sha256.Sum256(nil))}
}
