package store

import (
	"context"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// bucketDuplicates is for how long a bucket knows again what was written with an id; nothing here is.
const bucketDuplicates = 2 * time.Minute

// bucketStreams begins the names of the streams that the library keeps buckets in.
const bucketStreams = "KV_"

// bucket is one whose errors tell when nobody was there to answer: those are [context.DeadlineExceeded] too. Reads are tried again as those of
// streams are; a write that was not answered may have been carried out.
type bucket struct {
	jetstream.KeyValue
	news *news
}

// stream names the stream of the bucket.
func (b bucket) stream() string { return bucketStreams + b.Bucket() }

func (b bucket) Get(ctx context.Context, key string) (e jetstream.KeyValueEntry, err error) {
	return ask(ctx, b.news, b.stream(), func(ctx context.Context) (jetstream.KeyValueEntry, error) { return b.KeyValue.Get(ctx, key) })
}

func (b bucket) Create(ctx context.Context, key string, value []byte, opts ...jetstream.KVCreateOpt) (uint64, error) {
	return decided(ctx, func() (uint64, error) { return b.KeyValue.Create(ctx, key, value, opts...) })
}

func (b bucket) Update(ctx context.Context, key string, value []byte, revision uint64) (uint64, error) {
	return decided(ctx, func() (uint64, error) { return b.KeyValue.Update(ctx, key, value, revision) })
}

// decided writes again while the answer is that another write is being carried out, until ctx ends.
func decided(ctx context.Context, write func() (uint64, error)) (uint64, error) {
	for {
		revision, err := write()
		if !undecided(err) {
			return revision, unanswered(err)
		}
		select {
		case <-ctx.Done():
			return 0, unanswered(ctx.Err())
		case <-time.After(retryFirst):
		}
	}
}

func (b bucket) Delete(ctx context.Context, key string, opts ...jetstream.KVDeleteOpt) error {
	return unanswered(b.KeyValue.Delete(ctx, key, opts...))
}

// bucketConfig is the stream of a bucket as the library makes it, which cannot be told who may answer.
type bucketConfig jetstream.StreamConfig

func bucketOf(name string) bucketConfig {
	return bucketConfig{
		Name: bucketStreams + name, Subjects: []string{"$KV." + name + ".>"}, MaxMsgsPerSubject: 1, Storage: jetstream.FileStorage,
		Discard: jetstream.DiscardNew, Duplicates: bucketDuplicates, AllowRollup: true, DenyDelete: true,
		MaxMsgs: -1, MaxBytes: -1, MaxMsgSize: -1, MaxConsumers: -1,
	}
}

// kept bounds how long values are kept.
func (b bucketConfig) kept(d time.Duration) bucketConfig {
	b.MaxAge, b.Duplicates = d, min(d, bucketDuplicates)
	return b
}

// marked has the server leave marks of removed values for a time.
func (b bucketConfig) marked(d time.Duration) bucketConfig {
	b.AllowMsgTTL, b.SubjectDeleteMarkerTTL = true, d
	return b
}

// objects is the stream of an object store as the library makes it.
func objects(name string) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name: "OBJ_" + name, Subjects: []string{"$O." + name + ".C.>", "$O." + name + ".M.>"}, Storage: jetstream.FileStorage,
		Discard: jetstream.DiscardNew, AllowRollup: true, MaxBytes: -1,
	}
}
