// Package batches runs batches: many executions that are accepted together and submitted to the
// queue little by little.
//
// The programs are in the blob store, see [Content]. A batch has two entries in its bucket: its
// definition, which clients create and change, and its state, which the leading [Runner] changes.
// The state has one byte per item, which marks an item as possibly submitted before it is. An
// item's trace id is derived from the batch, its index and its round, so a process that finds such
// a mark asks the queue whether the item was submitted. Both entries are changed by
// compare-and-set.
package batches

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/engine"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	definitionPrefix = "def."
	statePrefix      = "run."
)

func definitionKey(org, id string) string { return definitionPrefix + org + "." + id }
func stateKey(org, id string) string      { return statePrefix + org + "." + id }

// Batches stores batches. Run must be running for changes to be seen.
type Batches struct {
	content     *Content
	definitions *store.Collection[proto.Batch]
	states      *store.Collection[proto.BatchState]
	queue       engine.Queue[entry]
}

// Open reads all batches.
func Open(ctx context.Context, st *store.Store, blobs Blobs, log *slog.Logger) (*Batches, error) {
	b := &Batches{content: &Content{Blobs: blobs}}
	var err error
	if b.definitions, err = store.OpenCollection(ctx, store.CollectionConfig[proto.Batch]{
		Store: st, Bucket: st.Batches, Keys: definitionPrefix + "*.*", Name: "batches", Decode: decodeDefinition,
		Kind: proto.ChangedBatches, DropMalformed: true, Log: log,
		Order: func(b *proto.Batch) string { return store.NewestFirst(b.CreatedAt) }, Check: checkLimits,
		OnChange: engine.Watch(&b.queue, definitionPrefix, func(e *entry, d *proto.Batch) bool {
			e.batch = d
			return e.exists()
		}),
	}); err != nil {
		return nil, err
	}
	b.states, err = store.OpenCollection(ctx, store.CollectionConfig[proto.BatchState]{
		Store: st, Bucket: st.Batches, Keys: statePrefix + "*.*", Name: "states of batches", DropMalformed: true, Log: log,
		Kind: proto.ChangedBatches,
		OnChange: engine.Watch(&b.queue, statePrefix, func(e *entry, s *proto.BatchState) bool {
			e.state = s
			return e.exists()
		}),
	})
	return b, err
}

// notify sends a value to a channel of capacity one without blocking.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run applies changes by other processes until ctx is done.
func (b *Batches) Run(ctx context.Context) error {
	var states sync.WaitGroup
	defer states.Wait()
	states.Go(func() { _ = b.states.Run(ctx) })
	return b.definitions.Run(ctx)
}

func decodeDefinition(e jetstream.KeyValueEntry) (*proto.Batch, error) {
	b := new(proto.Batch)
	err := json.Unmarshal(e.Value(), b)
	if err == nil && (definitionKey(b.Org, b.ID) != e.Key() || b.Total < 1 || b.Total > proto.MaxBatchItems) {
		err = fmt.Errorf("it is the entry of %q with %d items", b.ID, b.Total)
	}
	if err != nil {
		return nil, fmt.Errorf("decode batch %s: %w", e.Key(), err)
	}
	return b, nil
}

// Upload starts to store the items of an organisation's new batch. It returns a [*proto.QuotaError]
// if the organisation has too many batches.
func (b *Batches) Upload(org string) (*Upload, error) {
	var others []*proto.Batch
	stored := int64(0)
	for _, d := range b.definitions.List(org) {
		others = append(others, &d)
		stored += d.Content.Stored
	}
	return b.content.upload(org, proto.MaxBatchStored-stored), checkLimits(new(proto.Batch), others)
}

// checkLimits returns a [*proto.QuotaError] if others leave no room for batch.
func checkLimits(batch *proto.Batch, others []*proto.Batch) error {
	stored := batch.Content.Stored
	for _, other := range others {
		stored += other.Content.Stored
	}
	switch {
	case len(others) >= proto.MaxBatches:
		return &proto.QuotaError{What: "batches", Limit: proto.MaxBatches}
	case stored > proto.MaxBatchStored:
		return &proto.QuotaError{What: "bytes of stored batches", Limit: proto.MaxBatchStored}
	}
	return nil
}

// Prefixes returns the key prefixes of all of an organisation's blobs, including orphans.
func (b *Batches) Prefixes(ctx context.Context, org string) ([]string, error) {
	prefixes := []string{orgPrefix(org)}
	all, _, err := store.ReadValues(ctx, b.definitions.Bucket, definitionKey(org, "*"), decodeDefinition)
	if err != nil {
		return nil, err
	}
	for _, key := range slices.Sorted(maps.Keys(all)) {
		name := uploadOf(all[key].Content.Index.Key)
		if !strings.HasPrefix(name, prefixes[0]) && !slices.Contains(prefixes, name) {
			prefixes = append(prefixes, name)
		}
	}
	return prefixes, nil
}

// Create stores a new batch. If its id exists, Create returns the existing batch and false. It
// returns a [*proto.QuotaError] if the organisation has too many batches.
func (b *Batches) Create(ctx context.Context, batch *proto.Batch) (stored *proto.Batch, created bool, err error) {
	key := definitionKey(batch.Org, batch.ID)
	err = b.definitions.Create(ctx, key, batch)
	if err == nil {
		return batch, true, nil
	}
	if _, full := errors.AsType[*proto.QuotaError](err); full {
		return nil, false, err
	}
	// After any other error it may be stored.
	stored, _, readErr := b.definitions.Read(ctx, key)
	if readErr != nil {
		return nil, false, errors.Join(err, readErr)
	}
	return stored, stored.Content.Index == batch.Content.Index, nil
}

// Page returns a page of an organisation's batches, newest first, with their states, see
// [store.Collection.Page].
func (b *Batches) Page(
	org, after string, limit int, keep func(*proto.BatchAndState) bool,
) (page []proto.BatchAndState, next string) {
	withState := func(d *proto.Batch) *proto.BatchAndState {
		return &proto.BatchAndState{Batch: *d, State: *stateOf(d, b.states.Get(stateKey(d.Org, d.ID)))}
	}
	found, next := b.definitions.Page(org, after, limit, func(d *proto.Batch) bool {
		return !d.Removed && (keep == nil || keep(withState(d)))
	})
	page = make([]proto.BatchAndState, len(found))
	for i := range found {
		page[i] = *withState(&found[i])
	}
	return page, next
}

// Get returns a batch with its state, or [proto.ErrNotFound].
func (b *Batches) Get(ctx context.Context, org, id string) (proto.BatchAndState, error) {
	d, _, err := b.definitions.Read(ctx, definitionKey(org, id))
	if err == nil && d.Removed {
		err = fmt.Errorf("batch %s was removed: %w", id, proto.ErrNotFound)
	}
	if err != nil {
		return proto.BatchAndState{}, err
	}
	s, _, err := b.state(ctx, d)
	if err != nil {
		return proto.BatchAndState{}, err
	}
	return proto.BatchAndState{Batch: *d, State: *s}, nil
}

// state returns the state of a batch, initially zero, and its revision for an update.
func (b *Batches) state(ctx context.Context, d *proto.Batch) (*proto.BatchState, uint64, error) {
	s, revision, err := b.states.Read(ctx, stateKey(d.Org, d.ID))
	if errors.Is(err, proto.ErrNotFound) {
		return new(proto.BatchState), 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	return stateOf(d, s), revision, nil
}

// Change stores the result of change for a batch in its current state, and returns both. change may
// be called again. Its error is returned unchanged. Change returns [proto.ErrNotFound] if there is
// no such batch.
func (b *Batches) Change(
	ctx context.Context, org, id string, change func(*proto.Batch, *proto.BatchState) error,
) (proto.BatchAndState, error) {
	var state *proto.BatchState
	d, err := b.definitions.Update(ctx, definitionKey(org, id), func(old *proto.Batch) (*proto.Batch, error) {
		if old == nil || old.Removed {
			return nil, fmt.Errorf("batch %s: %w", id, proto.ErrNotFound)
		}
		var err error
		if state, _, err = b.state(ctx, old); err != nil {
			return nil, err
		}
		changed := *old
		return &changed, change(&changed, state)
	})
	if err != nil {
		return proto.BatchAndState{}, err
	}
	return proto.BatchAndState{Batch: *d, State: *state}, nil
}

// Remove removes a batch that has ended. It returns [proto.ErrNotFound] if there is none, and
// [proto.ErrConflict] if it has not ended. For a batch of agent requests, the runner removes the
// runs first and then the rest.
func (b *Batches) Remove(ctx context.Context, org, id string) error {
	found, err := b.Get(ctx, org, id)
	if err != nil {
		return err
	}
	if found.Batch.API == "" {
		return b.remove(ctx, org, id)
	}
	_, err = b.Change(ctx, org, id, func(d *proto.Batch, s *proto.BatchState) error {
		d.Removed = true
		return checkFinished(d, s)
	})
	return err
}

func checkFinished(d *proto.Batch, s *proto.BatchState) error {
	if !d.Finished(s) {
		return fmt.Errorf("batch %s has not ended: %w", d.ID, proto.ErrConflict)
	}
	return nil
}

// remove removes everything stored for an ended batch except runs.
func (b *Batches) remove(ctx context.Context, org, id string) error {
	removed, err := b.definitions.Remove(ctx, definitionKey(org, id), func(d *proto.Batch) error {
		s, _, err := b.state(ctx, d)
		if err != nil {
			return err
		}
		return checkFinished(d, s)
	})
	if err != nil {
		return err
	}
	return b.removeRest(ctx, removed)
}

// removeMarked removes everything stored for a batch marked as removed, the mark last.
func (b *Batches) removeMarked(ctx context.Context, d *proto.Batch) error {
	if err := b.removeRest(ctx, d); err != nil {
		return err
	}
	_, err := b.definitions.Remove(ctx, definitionKey(d.Org, d.ID), nil)
	return err
}

// removeRest removes the state and the items of a batch.
func (b *Batches) removeRest(ctx context.Context, d *proto.Batch) error {
	if _, err := b.states.Remove(ctx, stateKey(d.Org, d.ID), nil); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return err
	}
	return b.content.remove(ctx, &d.Content)
}

// Items returns the current items of a batch, or [proto.ErrNotFound].
func (b *Batches) Items(ctx context.Context, org, id string) (*Items, error) {
	found, err := b.Get(ctx, org, id)
	if err != nil {
		return nil, err
	}
	items, err := unpack(&found.State, found.Batch.Total)
	if err == nil && found.State.Retries < found.Batch.Retries {
		items.retry(found.Batch.RetryCancelled) // as the runner will
	}
	return items, err
}

// Content returns a reader of the items of a batch as uploaded.
func (b *Batches) Content(
	ctx context.Context, batch *proto.Batch,
) (read func(ctx context.Context, number int) ([]byte, error), err error) {
	r, err := b.content.open(ctx, &batch.Content)
	if err != nil {
		return nil, err
	}
	return r.item, nil
}
