package store

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// bucketDuplicates is the library's default for the duplicate window of a bucket.
const bucketDuplicates = 2 * time.Minute

// bucketPrefix begins the names of the streams in which the library keeps buckets.
const bucketPrefix = "KV_"

// bucket retries reads as streams do, and marks missing answers as [context.DeadlineExceeded]. An
// unanswered write may have been carried out.
type bucket struct {
	jetstream.KeyValue
	store     *Store
	markerTTL time.Duration // of the markers of removed keys; 0 for ever
}

// validKey reports whether a bucket may have an entry with a key, which is a part of a subject. The
// library lets pass some that a server never answers for.
func validKey(key string) bool {
	return key != "" && !strings.HasPrefix(key, ".") && !strings.HasSuffix(key, ".") && !strings.Contains(key, "..") &&
		!strings.ContainsFunc(key, func(c rune) bool {
			return !strings.ContainsRune("-/_=.", c) && (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z')
		})
}

// Get returns [jetstream.ErrKeyNotFound] for a key that no entry can have.
func (b bucket) Get(ctx context.Context, key string) (jetstream.KeyValueEntry, error) {
	if !validKey(key) {
		return nil, jetstream.ErrKeyNotFound
	}
	return read(ctx, b.store.Leaders.Retry(bucketPrefix+b.Bucket(), getTimeout),
		func(ctx context.Context) (jetstream.KeyValueEntry, error) {
			return b.KeyValue.Get(ctx, key)
		})
}

func (b bucket) Create(ctx context.Context, key string, value []byte, opts ...jetstream.KVCreateOpt) (uint64, error) {
	return decided(ctx, func(ctx context.Context) (uint64, error) { return b.KeyValue.Create(ctx, key, value, opts...) })
}

func (b bucket) Update(ctx context.Context, key string, value []byte, revision uint64) (uint64, error) {
	return decided(ctx, func(ctx context.Context) (uint64, error) { return b.KeyValue.Update(ctx, key, value, revision) })
}

func (b bucket) Delete(ctx context.Context, key string, opts ...jetstream.KVDeleteOpt) error {
	return markUnanswered(b.KeyValue.Delete(ctx, key, opts...))
}

// collectMarkersEvery is how often [CollectMarkers] looks for old markers.
const collectMarkersEvery = time.Hour

// CollectMarkers removes the markers of removed keys from a bucket when they are as old as
// [WebhookMarkerTTL], now and every hour until ctx is done. Buckets whose markers expire by
// themselves do not need it. An older version could not use a bucket that was changed to be one.
func CollectMarkers(ctx context.Context, s *Store, bucket jetstream.KeyValue, log *slog.Logger) {
	tick := time.NewTicker(collectMarkersEvery)
	defer tick.Stop()
	for {
		if err := PurgeMarkers(ctx, s, bucket, WebhookMarkerTTL); err != nil && ctx.Err() == nil {
			log.Warn("removal of old markers failed, will retry", "bucket", bucket.Bucket(), "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// PurgeMarkers removes the markers that removed keys have left in a bucket, if they are at least as
// old as age. A process that was disconnected for longer does not learn of the removals.
func PurgeMarkers(ctx context.Context, s *Store, bucket jetstream.KeyValue, age time.Duration) error {
	old, limit := map[string]uint64{}, time.Now().Add(-age)
	err := ReadBucket(ctx, bucket, ">", func(e jetstream.KeyValueEntry) {
		if e.Operation() != jetstream.KeyValuePut && !e.Created().After(limit) {
			old[e.Key()] = e.Revision()
		}
	})
	if err != nil {
		return fmt.Errorf("read the markers of bucket %s: %w", bucket.Bucket(), err)
	}
	if len(old) == 0 {
		return nil
	}
	st, err := s.JS.Stream(ctx, bucketPrefix+bucket.Bucket())
	if err != nil {
		return fmt.Errorf("open the stream of bucket %s: %w", bucket.Bucket(), err)
	}
	for key, revision := range old {
		// Up to the marker: the key may have been created again.
		if err := st.Purge(ctx, jetstream.WithPurgeSubject("$KV."+bucket.Bucket()+"."+key),
			jetstream.WithPurgeSequence(revision+1)); err != nil {
			return fmt.Errorf("purge the marker of %s in bucket %s: %w", key, bucket.Bucket(), err)
		}
	}
	return nil
}

// decided repeats a write while another one on the same key is in progress.
func decided(ctx context.Context, write func(context.Context) (uint64, error)) (revision uint64, err error) {
	err = Retry{Pause: retryMinPause, Transient: isUndecided}.Do(ctx, func(ctx context.Context) error {
		revision, err = write(ctx)
		return err
	})
	return revision, markUnanswered(err)
}

// Purge removes a key. It leaves a marker, from which other processes learn of the removal, and which
// expires in buckets that allow it.
func (b bucket) Purge(ctx context.Context, key string, opts ...jetstream.KVDeleteOpt) error {
	if b.markerTTL > 0 {
		opts = append(opts, jetstream.PurgeTTL(b.markerTTL))
	}
	return markUnanswered(b.KeyValue.Purge(ctx, key, opts...))
}
