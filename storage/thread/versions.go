package thread

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"sync"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/thread/layer"
)

// Beginnings of keys.
const (
	layersPrefix  = "layers/"
	objectsPrefix = "objects/"
	threadsPrefix = "threads/"
	uploadsPrefix = "uploads/"
	sweepPrefix   = "sweep/"
	clockPrefix   = "clock/"
)

// Blobs is the store. Its errors wrap [proto.ErrNotFound] where there is no such object.
type Blobs interface {
	// Put stores content, which has b's size and digest. What is there already under the key is the same, and counts as new to Stat
	// unless it is less than an hour old.
	Put(ctx context.Context, b proto.Blob, content io.ReaderAt) error
	// PutStream stores size bytes under a key that was never used.
	PutStream(ctx context.Context, key string, size int64, content io.Reader) (proto.Blob, error)
	// Get gives a whole object, and an error where it is not what b says.
	Get(ctx context.Context, b proto.Blob) (io.ReadCloser, error)
	GetRange(ctx context.Context, b proto.Blob, offset, length int64) (io.ReadCloser, error)
	Stat(ctx context.Context, key string) (proto.BlobEntry, error)
	Delete(ctx context.Context, key string) error
	// List gives the objects whose keys begin with prefix, in the order of the keys' bytes.
	List(ctx context.Context, prefix string) iter.Seq2[proto.BlobEntry, error]
}

// Versions reads and writes versions of threads. All methods may be called at the same time.
type Versions struct {
	Blobs Blobs
	Heads Heads
	// Limits are what a home may be; a version that is more cannot be read.
	Limits layer.Limits

	trees trees
}

// LayerKey makes a key for a new layer.
func LayerKey(org string) string { return layersPrefix + org + "/" + random() }

// ObjectBlob names the content of a file that is an object of its own: size bytes without holes.
func ObjectBlob(org string, digest layer.Digest, size int64) proto.Blob {
	return proto.Blob{Key: objectsPrefix + org + "/" + hex.EncodeToString(digest[:]), Size: size, Digest: DigestName(digest)}
}

// DigestName is a digest as blobs have it.
func DigestName(digest layer.Digest) string { return "sha256:" + hex.EncodeToString(digest[:]) }

// orgOf takes the organisation out of a key with that beginning; empty if the key is none of ours.
func orgOf(key, prefix string) string {
	org, rest, ok := strings.Cut(strings.TrimPrefix(key, prefix), "/")
	if !ok || !strings.HasPrefix(key, prefix) || !proto.ValidOrg(org) || rest == "" || strings.Contains(rest, "/") {
		return ""
	}
	return org
}

// checkLayer checks what is said of a layer before it is relied on.
func checkLayer(org string, l *proto.Layer) error {
	if orgOf(l.Key, layersPrefix) != org || l.Index <= 0 || l.Index > l.Size || !proto.ValidImageDigest(l.IndexDigest) || l.Objects < 0 {
		return fmt.Errorf("layer %q of %s, with %d bytes of which %d are an index, cannot be: restore the head or the manifest", l.Key, org, l.Size, l.Index)
	}
	return nil
}

// lost takes [proto.ErrNotFound] out of an error of the store about what a head, a manifest or a layer names: to whoever asked, that would say
// that there is no such thread, version or file.
func lost(err error) error {
	if !errors.Is(err, proto.ErrNotFound) {
		return err
	}
	return errors.New("the store has lost it: " + err.Error()) // which says what to see to
}

// each calls f with what it is given, some at a time, and returns the first error, after which it begins no more.
func each[T any](ctx context.Context, all []T, f func(context.Context, T) error) error {
	const atOnce = 8
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var wg sync.WaitGroup
	slots := make(chan struct{}, atOnce)
	for _, one := range all {
		slots <- struct{}{}
		if ctx.Err() != nil {
			break
		}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := f(ctx, one); err != nil {
				stop(err)
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}
