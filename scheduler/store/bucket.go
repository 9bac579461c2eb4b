package store

import (
	"context"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// bucketDuplicates is the library's default for the duplicate window of a bucket.
const bucketDuplicates = 2 * time.Minute

// Prefixes of the streams in which the library keeps buckets and object stores.
const (
	bucketPrefix  = "KV_"
	objectsPrefix = "OBJ_"
)

// bucket repeats reads like those of streams, and marks errors that mean that nobody answered as
// [context.DeadlineExceeded]. A write that was not answered may have been carried out.
type bucket struct {
	jetstream.KeyValue
	store *Store
}

func (b bucket) Get(ctx context.Context, key string) (jetstream.KeyValueEntry, error) {
	return read(ctx, b.store.RetryLeader(bucketPrefix+b.Bucket(), getTimeout), func(ctx context.Context) (jetstream.KeyValueEntry, error) {
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

// decided repeats a write while another one on the same key is in progress.
func decided(ctx context.Context, write func(context.Context) (uint64, error)) (revision uint64, err error) {
	err = Retry{Pause: retryMinPause, Transient: isUndecided}.Do(ctx, func(ctx context.Context) error {
		revision, err = write(ctx)
		return err
	})
	return revision, markUnanswered(err)
}

func (b bucket) Purge(ctx context.Context, key string, opts ...jetstream.KVDeleteOpt) error {
	return markUnanswered(b.KeyValue.Purge(ctx, key, opts...))
}
