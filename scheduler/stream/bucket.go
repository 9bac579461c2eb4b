package stream

import (
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// bucketDuplicates is for how long a bucket knows again what was written with an id; nothing here is.
const bucketDuplicates = 2 * time.Minute

// bucketConfig is the stream of a bucket as the library makes it, which cannot be told who may answer.
type bucketConfig jetstream.StreamConfig

func bucket(name string) bucketConfig {
	return bucketConfig{
		Name: "KV_" + name, Subjects: []string{"$KV." + name + ".>"}, MaxMsgsPerSubject: 1, Storage: jetstream.FileStorage,
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
