package thread

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"strings"
	"sync"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/layer"
)

// Key prefixes.
const (
	layersPrefix  = "layers/"
	objectsPrefix = "objects/"
	threadsPrefix = "threads/"
	uploadsPrefix = "uploads/"
	sweepPrefix   = "sweep/"
	clockPrefix   = "clock/"
)

// Blobs is the blob store. Its errors wrap [proto.ErrNotFound] if the object does not exist.
type Blobs interface {
	// Put stores content, which has b's size and digest. If the key exists already, its content is
	// the same; Put then renews its modification time unless it is less than an hour old.
	Put(ctx context.Context, b proto.Blob, content io.ReaderAt) error
	// PutStream stores size bytes under a new key.
	PutStream(ctx context.Context, key string, size int64, content io.Reader) (proto.Blob, error)
	// Get reads a whole object. Reading fails before io.EOF if the content does not match b.
	Get(ctx context.Context, b proto.Blob) (io.ReadCloser, error)
	GetRange(ctx context.Context, b proto.Blob, offset, length int64) (io.ReadCloser, error)
	Stat(ctx context.Context, key string) (proto.BlobEntry, error)
	Delete(ctx context.Context, key string) error
	// List yields the objects whose keys begin with prefix in ascending byte order.
	List(ctx context.Context, prefix string) iter.Seq2[proto.BlobEntry, error]
}

// Versions reads and writes versions of threads. It is safe for concurrent use.
type Versions struct {
	Blobs Blobs
	Heads Heads
	// Spool returns a new empty file that is removed when closed. Edits need it.
	Spool func() (*os.File, error)
	// Limits bound a home. A version that exceeds them can be neither written nor read.
	Limits layer.Limits

	trees treeCache
}

// Prefixes returns the beginnings of the keys of all blobs of an organisation.
func Prefixes(org string) (prefixes []string) {
	for _, prefix := range []string{layersPrefix, objectsPrefix, threadsPrefix, uploadsPrefix, sweepPrefix} {
		prefixes = append(prefixes, prefix+org+"/")
	}
	return prefixes
}

// LayerKey returns a new key for a layer.
func LayerKey(org string) string { return layersPrefix + org + "/" + random() }

// ObjectBlob returns the blob of an object with the given size in bytes.
func ObjectBlob(org string, digest layer.Digest, size int64) proto.Blob {
	return proto.Blob{
		Key: objectsPrefix + org + "/" + hex.EncodeToString(digest[:]), Size: size,
		Digest: DigestName(digest),
	}
}

// OpenObject opens the content of a file that is an object.
func (v *Versions) OpenObject(ctx context.Context, org string, digest layer.Digest, size int64) (io.ReadCloser, error) {
	return v.Blobs.Get(ctx, ObjectBlob(org, digest, size))
}

// OpenStaged opens a staged file.
func (v *Versions) OpenStaged(ctx context.Context, f proto.StagedFile) (io.ReadCloser, error) {
	return v.Blobs.Get(ctx, f.Blob)
}

// DigestName returns the digest in the notation of [proto.Blob].
func DigestName(digest layer.Digest) string { return "sha256:" + hex.EncodeToString(digest[:]) }

// orgOf returns the organisation in a key with the given prefix, or "" if the key is foreign.
func orgOf(key, prefix string) string {
	org, rest, ok := strings.Cut(strings.TrimPrefix(key, prefix), "/")
	if !ok || !strings.HasPrefix(key, prefix) || !proto.ValidOrg(org) || rest == "" || strings.Contains(rest, "/") {
		return ""
	}
	return org
}

// checkLayer validates the description of a layer.
func checkLayer(org string, l *proto.Layer) error {
	if orgOf(l.Key, layersPrefix) != org || l.Index <= 0 || l.Index > l.Size || !proto.ValidImageDigest(l.IndexDigest) ||
		l.Objects < 0 {
		return fmt.Errorf("invalid layer %q of %s with %d bytes, %d of them its index: restore the head or the manifest",
			l.Key, org, l.Size, l.Index)
	}
	return nil
}

// hideNotFound replaces a [proto.ErrNotFound] of the store about a blob that a head, a manifest or
// a layer refers to. Callers would otherwise conclude that the thread, version or file does not
// exist.
func hideNotFound(err error) error {
	if !errors.Is(err, proto.ErrNotFound) {
		return err
	}
	return errors.New("the store has lost a blob: " + err.Error())
}

// forEach calls f for all items, a few at a time. It returns the first error, after which it starts
// no more calls.
func forEach[T any](ctx context.Context, items []T, f func(context.Context, T) error) error {
	const concurrency = 8
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var wg sync.WaitGroup
	slots := make(chan struct{}, concurrency)
	for _, item := range items {
		slots <- struct{}{}
		if ctx.Err() != nil {
			break
		}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := f(ctx, item); err != nil {
				stop(err)
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}
