package orgdata

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Executions ends executions.
type Executions interface {
	// Cancel stores a request to end an execution.
	Cancel(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)
}

// Blobs is the blob store.
type Blobs interface {
	// List yields the objects whose keys begin with prefix.
	List(ctx context.Context, prefix string) iter.Seq2[proto.BlobEntry, error]
	// Delete removes an object. It is no error if there is none.
	Delete(ctx context.Context, key string) error
}

// Index is the index of executions.
type Index interface {
	// CountOrg returns the number of executions of an organisation in the index of this process.
	CountOrg(ctx context.Context, org string) (int64, error)
	// RemoveOrg removes the executions of an organisation from the indexes of all processes.
	RemoveOrg(ctx context.Context, org string) error
}

// Sources are where data is that the store does not have, and what ends executions.
type Sources struct {
	Executions Executions
	Blobs      Blobs
	// Threads and Batches return the beginnings of the keys of an organisation's blobs.
	Threads func(org string) []string
	Batches func(ctx context.Context, org string) ([]string, error)
	Index   Index
}

// New returns the data of organisations: one holder for each kind, including one for each of
// [store.OrgBuckets]. The organisation is in all subjects and keys, so that nothing of another one is read or
// removed.
//
// The order matters. Executions end first, so that nothing new is stored. Blobs of batches
// are removed before batches, which name them. Usage is counted from records, and removed after them.
func New(st *store.Store, src Sources) *Data {
	threads := func(_ context.Context, org string) ([]string, error) { return src.Threads(org), nil }
	first := []Holder{
		{
			"executions that have not ended",
			[]string{st.Jobs.Name()},
			countMessages(st.Jobs.Stream, store.JobPatternOf),
			cancelAll(st, src.Executions),
		},
		{"items of batches", nil, countBlobs(src.Blobs, src.Batches), removeBlobs(src.Blobs, src.Batches)},
	}
	var resources []Holder
	for _, b := range store.OrgBuckets(st) {
		resources = append(resources, inBucket(b.Kind, b.KeyValue, b.Keys...))
	}
	return &Data{Holders: slices.Concat(first, resources, []Holder{
		inStream("logs of agents", st.AgentLogs, store.AgentLogPatternOf, st.AgentLogs.PurgeSubject),
		inStream("threads", st.Threads, store.ThreadPatternOf, st.Threads.PurgeSubject),
		{"files of threads", nil, countBlobs(src.Blobs, threads), removeBlobs(src.Blobs, threads)},
		inStream("dead letters", st.DeadLetters, store.DeadLetterPatternOf, st.DeadLetters.EraseSubject),
		inStream("webhook deliveries", st.Deliveries, store.DeliveryPattern, st.Deliveries.PurgeSubject),
		inStream("output", st.Output.Stream, store.OutputPatternOf, st.Output.EraseSubject),
		inStream("large bodies", st.Bodies.Stream, store.BodyPatternOf, st.Bodies.PurgeSubject),
		inStream("records of executions", st.Records.Stream, store.RecordPatternOf, st.Records.EraseSubject),
		inBucket("usage", st.Usage, "org.%s.*", "key.%s.*.*", "cross.%s.>"),
		{"index of executions", nil, countIndex(src.Index), removeIndex(src.Index)},
		{"organisation", []string{st.Orgs.Bucket()}, countKeys(st.Orgs, "%s"), nil}, // the runner removes it
	})}
}

// inBucket returns the holder of what is in a bucket under the keys that match one of the patterns, in
// which %s is the organisation.
func inBucket(kind string, bucket jetstream.KeyValue, patterns ...string) Holder {
	return Holder{kind, []string{bucket.Bucket()}, countKeys(bucket, patterns...), removeKeys(bucket, patterns...)}
}

// sizes returns the sizes of the values of an organisation in a bucket, by key.
func sizes(ctx context.Context, bucket jetstream.KeyValue, org string, patterns []string) (map[string]*int, error) {
	all := map[string]*int{}
	for _, pattern := range patterns {
		found, _, err := store.ReadValues(ctx, bucket, fmt.Sprintf(pattern, org),
			func(e jetstream.KeyValueEntry) (*int, error) { return new(len(e.Value())), nil })
		if err != nil {
			return nil, err
		}
		maps.Copy(all, found)
	}
	return all, nil
}

func countKeys(bucket jetstream.KeyValue, patterns ...string) func(ctx context.Context, org string) (Amount, error) {
	return func(ctx context.Context, org string) (n Amount, err error) {
		found, err := sizes(ctx, bucket, org, patterns)
		for _, size := range found {
			n.Count++
			n.Bytes += int64(*size)
		}
		return n, err
	}
}

func removeKeys(bucket jetstream.KeyValue, patterns ...string) func(ctx context.Context, org string) error {
	return func(ctx context.Context, org string) error {
		found, err := sizes(ctx, bucket, org, patterns)
		if err != nil {
			return err
		}
		for key := range found {
			if err := bucket.Purge(ctx, key); err != nil {
				return fmt.Errorf("remove %s from the bucket %s: %w", key, bucket.Bucket(), err)
			}
		}
		return nil
	}
}

// inStream returns the holder of what is in a stream on the subjects that match the pattern of an
// organisation.
func inStream(
	kind string, stream store.Stream, pattern func(org string) string,
	remove func(ctx context.Context, pattern string) error,
) Holder {
	return Holder{
		kind,
		[]string{stream.Name()},
		countMessages(stream, pattern),
		func(ctx context.Context, org string) error { return remove(ctx, pattern(org)) },
	}
}

func countMessages(
	stream store.Stream, pattern func(org string) string,
) func(ctx context.Context, org string) (Amount, error) {
	return func(ctx context.Context, org string) (n Amount, err error) {
		subjects, err := stream.Subjects(ctx, pattern(org))
		for _, messages := range subjects {
			n.Count += int64(messages)
		}
		return n, err
	}
}

// cancelAll cancels executions, which ends running ones a moment later. The dispatcher removes
// their jobs then.
func cancelAll(st *store.Store, executions Executions) func(ctx context.Context, org string) error {
	return func(ctx context.Context, org string) error {
		jobs, err := st.Jobs.Subjects(ctx, store.JobPatternOf(org))
		if err != nil {
			return err
		}
		for subject := range jobs {
			_, id := store.ParseJobSubject(subject)
			if _, err := executions.Cancel(ctx, org, id); err != nil && !errors.Is(err, proto.ErrNotFound) {
				return fmt.Errorf("cancel execution %s: %w", id, err)
			}
		}
		return nil
	}
}

type prefixesOf func(ctx context.Context, org string) ([]string, error)

// eachBlob calls f with each blob of an organisation.
func eachBlob(ctx context.Context, org string, blobs Blobs, prefixes prefixesOf, f func(proto.BlobEntry) error) error {
	list, err := prefixes(ctx, org)
	if err != nil {
		return err
	}
	for _, prefix := range list {
		for e, err := range blobs.List(ctx, prefix) {
			if err != nil {
				return fmt.Errorf("list the blobs of %s: %w", prefix, err)
			}
			if err := f(e); err != nil {
				return err
			}
		}
	}
	return nil
}

func countBlobs(blobs Blobs, prefixes prefixesOf) func(ctx context.Context, org string) (Amount, error) {
	return func(ctx context.Context, org string) (n Amount, err error) {
		err = eachBlob(ctx, org, blobs, prefixes, func(e proto.BlobEntry) error {
			n.Count++
			n.Bytes += e.Size
			return nil
		})
		return n, err
	}
}

func removeBlobs(blobs Blobs, prefixes prefixesOf) func(ctx context.Context, org string) error {
	return func(ctx context.Context, org string) error {
		return eachBlob(ctx, org, blobs, prefixes, func(e proto.BlobEntry) error { return blobs.Delete(ctx, e.Key) })
	}
}

func countIndex(index Index) func(ctx context.Context, org string) (Amount, error) {
	return func(ctx context.Context, org string) (n Amount, err error) {
		n.Count, err = index.CountOrg(ctx, org)
		return n, err
	}
}

func removeIndex(index Index) func(ctx context.Context, org string) error {
	return func(ctx context.Context, org string) error { return index.RemoveOrg(ctx, org) }
}
