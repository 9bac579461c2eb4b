package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	watchPause   = 200 * time.Millisecond
	watchTimeout = time.Second // for the answer to a watch
)

// CacheConfig configures a [Cache].
type CacheConfig[T any] struct {
	Store  *Store
	Bucket jetstream.KeyValue
	Keys   string // pattern of the bucket's keys
	Name   string // of the values in logs and errors, such as "API keys"
	Decode func(e jetstream.KeyValueEntry) (*T, error)
	// Encode, if not nil, encodes values to store. Otherwise they are stored as JSON.
	Encode func(ctx context.Context, key string, value *T) ([]byte, error)
	// DropMalformed forgets a value when it is replaced by one that cannot be decoded.
	DropMalformed bool
	// OnChange, if not nil, is called under the cache's lock when a value has changed. old or
	// current is nil if there is none.
	OnChange func(key string, old, current *T)
	Log      *slog.Logger
}

// Cache holds the decoded values of a bucket in memory. Run must be running for changes by other
// processes to be seen. Values must not be modified.
type Cache[T any] struct {
	CacheConfig[T]

	mu     sync.RWMutex
	values map[string]cached[T]
	seen   uint64 // the last revision that the watch has delivered
}

// cached is a value as it was last seen in the bucket.
type cached[T any] struct {
	value    *T // nil if it was removed here, and the watch has not delivered the removal
	revision uint64
}

// OpenCache reads all values. It waits for the leader of the bucket's stream until ctx is done.
func OpenCache[T any](ctx context.Context, cfg CacheConfig[T]) (*Cache[T], error) {
	c := &Cache[T]{CacheConfig: cfg, values: map[string]cached[T]{}}
	err := Retry{OnRetry: func(err error, _ time.Duration) { c.Log.Warn("waiting for the "+c.Name, "error", err) }}.Do(ctx, func(ctx context.Context) error { return ReadBucket(ctx, c.Bucket, c.Keys, c.apply) })
	if err != nil {
		return nil, fmt.Errorf("read the %s: %w", c.Name, err)
	}
	return c, nil
}

// ReadBucket calls handle with all entries of a bucket whose keys match a pattern, possibly more
// than once.
func ReadBucket(ctx context.Context, bucket jetstream.KeyValue, keys string, handle func(jetstream.KeyValueEntry)) error {
	watcher, err := bucket.Watch(ctx, keys)
	if err != nil {
		return err
	}
	defer func() { _ = watcher.Stop() }()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case e, open := <-watcher.Updates():
			switch {
			case !open:
				return errWatchEnded
			case e == nil: // all entries were delivered
				return nil
			}
			handle(e)
		}
	}
}

var errWatchEnded = errors.New("the watch ended")

// Run applies changes until ctx is done. It always returns nil.
func (c *Cache[T]) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		err := c.watch(ctx)
		if ctx.Err() == nil && c.Store.Conn.IsConnected() { // else the lost connection is logged already
			c.Log.Warn("watch of "+c.Name+" lost, will retry", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(watchPause):
		}
	}
	return nil
}

// watch applies changes until the watch is lost or ctx is done.
func (c *Cache[T]) watch(ctx context.Context) error {
	// A server that was restarted has forgotten its watches, which they notice only after seconds.
	lost := c.Store.Conn.StatusChanged(nats.RECONNECTING)
	defer c.Store.Conn.RemoveStatusListener(lost)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	late := time.AfterFunc(watchTimeout, func() { cancel(errors.New("no answer")) })
	watcher, err := c.Bucket.Watch(ctx, c.Keys)
	if err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	defer func() { _ = watcher.Stop() }()
	if !late.Stop() {
		return context.Cause(ctx)
	}
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-lost:
			return errDisconnected
		case e, open := <-watcher.Updates():
			if !open {
				return errWatchEnded
			}
			if e != nil {
				c.apply(e)
			}
		}
	}
}

// apply stores an entry that was read from the bucket, unless a newer one is known.
func (c *Cache[T]) apply(e jetstream.KeyValueEntry) {
	var value *T
	var err error
	if e.Operation() == jetstream.KeyValuePut {
		if value, err = c.Decode(e); err != nil {
			c.Log.Error("malformed entry of the "+c.Name+" ignored", "key", e.Key(), "error", err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen = max(c.seen, e.Revision())
	if c.values[e.Key()].revision < e.Revision() && (err == nil || c.DropMalformed) {
		c.set(e.Key(), value, e.Revision())
	}
}

func (c *Cache[T]) set(key string, value *T, revision uint64) {
	old := c.values[key].value
	if value == nil {
		delete(c.values, key)
	} else {
		c.values[key] = cached[T]{value, revision}
	}
	if c.OnChange != nil {
		c.OnChange(key, old, value)
	}
}

// Get returns a value, nil if there is none.
func (c *Cache[T]) Get(key string) *T {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.values[key].value
}

// All returns all values in no particular order.
func (c *Cache[T]) All() []*T {
	c.mu.RLock()
	defer c.mu.RUnlock()
	all := make([]*T, 0, len(c.values))
	for _, v := range c.values {
		if v.value != nil {
			all = append(all, v.value)
		}
	}
	return all
}

// View calls f under the cache's lock, for what OnChange maintains.
func (c *Cache[T]) View(f func()) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	f()
}

// Read reads a value and its revision from the bucket. It returns [proto.ErrNotFound] if there is
// none.
func (c *Cache[T]) Read(ctx context.Context, key string) (*T, uint64, error) {
	e, err := c.Entry(ctx, key)
	if err != nil {
		return nil, 0, err
	}
	value, err := c.Decode(e)
	return value, e.Revision(), err
}

// Entry reads an entry from the bucket. It returns [proto.ErrNotFound] if there is none.
func (c *Cache[T]) Entry(ctx context.Context, key string) (jetstream.KeyValueEntry, error) {
	e, err := c.Bucket.Get(ctx, key)
	if IsNotFound(err) {
		return nil, fmt.Errorf("%s: no entry %s: %w", c.Name, key, proto.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: read %s: %w", c.Name, key, err)
	}
	return e, nil
}

// Refresh reads a value from the bucket into the cache.
func (c *Cache[T]) Refresh(ctx context.Context, key string) error {
	e, err := c.Entry(ctx, key)
	if err != nil {
		return err
	}
	value, err := c.Decode(e)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.values[key].revision < e.Revision() && e.Revision() > c.seen {
		c.set(key, value, e.Revision())
	}
	return nil
}

// Put stores a value in place of any other.
func (c *Cache[T]) Put(ctx context.Context, key string, value *T) error {
	_, err := c.write(ctx, key, value, func(body []byte) (uint64, error) { return c.Bucket.Put(ctx, key, body) })
	return err
}

// Create stores a value if there is none yet. Otherwise [IsConflict] matches its error.
func (c *Cache[T]) Create(ctx context.Context, key string, value *T) error {
	_, err := c.write(ctx, key, value, func(body []byte) (uint64, error) { return c.Bucket.Create(ctx, key, body) })
	return err
}

// Replace stores a value in place of the one with that revision, and returns the new revision.
// Otherwise [IsConflict] matches its error. Revision 0 stands for no value.
func (c *Cache[T]) Replace(ctx context.Context, key string, value *T, revision uint64) (uint64, error) {
	return c.write(ctx, key, value, func(body []byte) (uint64, error) {
		if revision == 0 {
			return c.Bucket.Create(ctx, key, body)
		}
		return c.Bucket.Update(ctx, key, body, revision)
	})
}

// write stores a value and returns its revision.
func (c *Cache[T]) write(ctx context.Context, key string, value *T, put func(body []byte) (uint64, error)) (uint64, error) {
	encode := c.Encode
	if encode == nil {
		encode = func(context.Context, string, *T) ([]byte, error) { return json.Marshal(value) }
	}
	body, err := encode(ctx, key, value)
	if err != nil {
		return 0, fmt.Errorf("%s: encode %s: %w", c.Name, key, err)
	}
	revision, err := put(body)
	if err != nil {
		return 0, fmt.Errorf("%s: store %s: %w", c.Name, key, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if revision > c.seen { // else the watch has delivered this value, or newer ones
		c.set(key, value, revision)
	}
	return revision, nil
}

// Update stores what change makes of a value, which is nil if there is none. change may be called
// again, and returns nil to leave the value as it is. Update returns the value that is stored then.
func (c *Cache[T]) Update(ctx context.Context, key string, change func(old *T) (*T, error)) (value *T, err error) {
	err = Update(ctx, func() error {
		old, revision, err := c.Read(ctx, key)
		if err != nil && !errors.Is(err, proto.ErrNotFound) {
			return err
		}
		if value, err = change(old); err != nil {
			return err
		}
		if value == nil {
			value = old
			return nil
		}
		_, err = c.Replace(ctx, key, value, revision)
		return err
	})
	return value, err
}

// UpdateWithAll stores what change returns for a value on condition that no value of the cache was
// changed since change was called. all holds all values of the bucket by their keys, without the
// removed ones. change may be called again, and returns nil to leave the value as it is.
// UpdateWithAll returns the value that is stored then.
func (c *Cache[T]) UpdateWithAll(ctx context.Context, key string, change func(all map[string]*T) (*T, error)) (value *T, err error) {
	prefix := "$KV." + c.Bucket.Bucket() + "."
	err = Update(ctx, func() error {
		all := map[string]*T{}
		var last uint64
		err := ReadBucket(ctx, c.Bucket, c.Keys, func(e jetstream.KeyValueEntry) {
			last = max(last, e.Revision())
			delete(all, e.Key())
			if e.Operation() != jetstream.KeyValuePut {
				return
			}
			if v, err := c.Decode(e); err == nil { // else apply logs it
				all[e.Key()] = v
			}
		})
		if err != nil {
			return fmt.Errorf("read the %s: %w", c.Name, err)
		}
		if value, err = change(all); err != nil {
			return err
		}
		if value == nil {
			value = all[key]
			return nil
		}
		_, err = c.write(ctx, key, value, func(body []byte) (uint64, error) {
			return decided(ctx, func(ctx context.Context) (uint64, error) {
				unchanged := jetstream.WithExpectLastSequenceForSubject(last, prefix+c.Keys)
				ack, err := c.Store.JS.Publish(ctx, prefix+key, body, unchanged)
				if err != nil {
					return 0, err
				}
				return ack.Sequence, nil
			})
		})
		return err
	})
	return value, err
}

// Remove removes a value after allow, if not nil, has returned nil for its entry. allow may be
// called again. Remove returns the removed entry, or [proto.ErrNotFound] if there is none.
func (c *Cache[T]) Remove(
	ctx context.Context, key string, allow func(jetstream.KeyValueEntry) error, opts ...jetstream.KVDeleteOpt,
) (removed jetstream.KeyValueEntry, err error) {
	err = Update(ctx, func() error {
		if removed, err = c.Entry(ctx, key); err != nil {
			return err
		}
		if allow != nil {
			if err := allow(removed); err != nil {
				return err
			}
		}
		// A purge, unlike a deletion, may leave a marker that expires.
		return c.Bucket.Purge(ctx, key, append(opts, jetstream.LastRevision(removed.Revision()))...)
	})
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if old, ok := c.values[key]; ok && old.revision <= removed.Revision() {
		c.values[key] = cached[T]{nil, removed.Revision()}
		if c.OnChange != nil {
			c.OnChange(key, old.value, nil)
		}
	}
	return removed, nil
}

// DecodeJSON returns a decoder for a [CacheConfig] whose values are JSON. what names a value in
// errors, such as "the state of schedule".
func DecodeJSON[T any](what string) func(e jetstream.KeyValueEntry) (*T, error) {
	return func(e jetstream.KeyValueEntry) (*T, error) {
		value := new(T)
		if err := json.Unmarshal(e.Value(), value); err != nil {
			return nil, fmt.Errorf("decode %s %s: %w", what, e.Key(), err)
		}
		return value, nil
	}
}
