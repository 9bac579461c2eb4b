package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	watchPause   = 200 * time.Millisecond
	watchTimeout = time.Second // for the answer to a watch
	// readAllTimeout bounds one attempt to read all values, while the server keeps sending them.
	readAllTimeout = 10 * time.Minute
)

// CollectionConfig configures a [Collection].
type CollectionConfig[T any] struct {
	Store  *Store
	Bucket jetstream.KeyValue
	// Keys is the pattern of the keys. If it ends with "*.*", these parts of a key are the organisation
	// and an id, and the values of an organisation can be read without those of others.
	Keys string
	Name string // of the values in logs and errors, such as "API keys"
	// Decode decodes an entry. It is [DecodeJSON] if nil. A value that is nil, without an error, is not held
	// in memory.
	Decode func(e jetstream.KeyValueEntry) (*T, error)
	// Encode, if not nil, encodes values to store. Otherwise they are stored as JSON.
	Encode func(ctx context.Context, key string, value *T) ([]byte, error)
	// Clone returns a copy that may be modified. It copies the value alone if nil.
	Clone func(*T) *T
	// Org, if not nil, returns the organisation of a value whose key does not begin with it.
	Org func(*T) string
	// Order, if not nil, returns what values are listed by, before their keys: see [ByKey],
	// [OldestFirst] and [NewestFirst]. An index has the values of each organisation in this order.
	Order func(*T) string
	// Check, if not nil, returns why a value must not be created beside the others of its scope: of its
	// organisation if keys begin with that, which needs Order, else of all. No other process adds a value
	// in between. Check may be called again.
	Check func(value *T, others []*T) error
	// OneScope makes all values one scope although keys begin with the organisation.
	OneScope bool
	// ByID makes [Collection.KeyOf] and [Collection.FindKey] find values by the ids at the end of their
	// keys, which are unique among all organisations.
	ByID bool
	// DropMalformed forgets a value when it is replaced by one that cannot be decoded.
	DropMalformed bool
	// Kind, if not empty, is the kind of objects under which changes are reported to
	// [Store.OnChange].
	Kind proto.ChangeKind
	// PublicID, if not nil, returns the id of a value in these reports. By default it is the last
	// part of the value's key.
	PublicID func(*T) string
	// OnChange, if not nil, is called under the collection's lock when a value has changed. old or
	// current is nil if there is none.
	OnChange func(key string, old, current *T)
	Log      *slog.Logger
}

// Collection stores values in a bucket and holds them in memory, decoded. Run must be running for
// changes by other processes to be seen. Values behind pointers must not be modified; other results
// are copies.
type Collection[T any] struct {
	CollectionConfig[T]
	perOrg bool                 // an organisation is a scope
	turns  [turns]chan struct{} // of [Collection.UpdateWithOthers]

	mu     sync.RWMutex
	values map[string]cached[T]
	keys   map[string]string      // of values by id, if ByID is set
	lists  map[string][]listed[T] // by organisation, if Order is set
	last   map[string]uint64      // by scope, the last revision up to which all changes are in values
	seen   uint64                 // the last revision that the watch has delivered
}

// cached is a value as it was last seen in the bucket.
type cached[T any] struct {
	value    *T // nil if it was removed here, and the watch has not delivered the removal
	revision uint64
}

// listed is a value in the list of its organisation.
type listed[T any] struct {
	order string // unique
	key   string
	value *T
}

// turns is the number of locks by which the scopes of a collection are changed, one change at a time.
const turns = 64

// errConflict is the error of a write that [IsConflict] matches.
var errConflict = &jetstream.APIError{
	ErrorCode: jetstream.JSErrCodeStreamWrongLastSequence, Description: "created by another process",
}

var scopeSeed = maphash.MakeSeed()

// ByKey orders values by their keys.
func ByKey[T any](*T) string { return "" }

// OldestFirst returns what orders values by a time.
func OldestFirst(at time.Time) string { return fmt.Sprintf("%016x", uint64(at.UnixNano())^1<<63) }

// NewestFirst returns what orders values by a time, the newest first.
func NewestFirst(at time.Time) string { return fmt.Sprintf("%016x", ^(uint64(at.UnixNano()) ^ 1<<63)) }

// OpenCollection reads all values. It waits for the leader of the bucket's stream until ctx is done.
func OpenCollection[T any](ctx context.Context, cfg CollectionConfig[T]) (*Collection[T], error) {
	c := &Collection[T]{
		CollectionConfig: cfg, perOrg: strings.HasSuffix(cfg.Keys, "*.*") && !cfg.OneScope,
		values: map[string]cached[T]{}, keys: map[string]string{}, lists: map[string][]listed[T]{},
		last: map[string]uint64{},
	}
	for i := range c.turns {
		c.turns[i] = make(chan struct{}, 1)
	}
	if c.Decode == nil {
		c.Decode = DecodeJSON[T]
	}
	if c.Clone == nil {
		c.Clone = func(v *T) *T { return new(*v) }
	}
	waiting := func(err error, _ time.Duration) { c.Log.Warn("waiting for the "+c.Name, "error", err) }
	err := Retry{Timeout: readAllTimeout, OnRetry: waiting}.Do(ctx, func(ctx context.Context) error {
		return ReadBucket(ctx, c.Bucket, c.Keys, c.apply)
	})
	if err != nil {
		return nil, fmt.Errorf("read the %s: %w", c.Name, err)
	}
	return c, nil
}

// ReadBucket calls handle with all entries of a bucket whose keys match a pattern, possibly more
// than once. It returns [context.DeadlineExceeded] when the server has not answered for 5 seconds.
func ReadBucket(
	ctx context.Context, bucket jetstream.KeyValue, keys string, handle func(jetstream.KeyValueEntry),
) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := time.AfterFunc(readTimeout, func() { cancel(context.DeadlineExceeded) })
	defer silent.Stop()
	watcher, err := bucket.Watch(ctx, keys)
	if err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	defer stopWatch(watcher)
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case e, open := <-watcher.Updates():
			silent.Reset(readTimeout)
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

// stopWatch ends a watch. It drains unread updates: otherwise the client's goroutine would block forever once
// its buffer is full.
func stopWatch(w jetstream.KeyWatcher) {
	_ = w.Stop() // an error means that the subscription has ended
	for range w.Updates() {
	}
}

// ReadValues returns the values of a bucket whose keys match a pattern, by key, without malformed ones.
// last is the last revision of all these keys, also of removed ones.
func ReadValues[T any](
	ctx context.Context, bucket jetstream.KeyValue, keys string, decode func(jetstream.KeyValueEntry) (*T, error),
) (values map[string]*T, last uint64, err error) {
	values = map[string]*T{}
	err = ReadBucket(ctx, bucket, keys, func(e jetstream.KeyValueEntry) {
		last = max(last, e.Revision())
		delete(values, e.Key())
		if e.Operation() != jetstream.KeyValuePut {
			return
		}
		if v, err := decode(e); err == nil { // else each collection logs it
			values[e.Key()] = v
		}
	})
	if err != nil {
		return nil, 0, fmt.Errorf("read the bucket %s: %w", bucket.Bucket(), err)
	}
	return values, last, nil
}

var errWatchEnded = errors.New("the watch ended")

// Run applies changes until ctx is done. It always returns nil.
func (c *Collection[T]) Run(ctx context.Context) error {
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
func (c *Collection[T]) watch(ctx context.Context) error {
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
	defer stopWatch(watcher)
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
func (c *Collection[T]) apply(e jetstream.KeyValueEntry) {
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
	scope := c.scope(e.Key())
	c.last[scope] = max(c.last[scope], e.Revision())
	if c.values[e.Key()].revision < e.Revision() && (err == nil || c.DropMalformed) {
		c.set(e.Key(), cached[T]{value, e.Revision()})
	}
	if e.Operation() != jetstream.KeyValuePut && c.perOrg && c.Order != nil && len(c.lists[c.orgOf(e.Key(), nil)]) == 0 {
		delete(c.last, scope) // the organisation may be gone
	}
}

// scope returns the pattern of the keys of values beside which the value of a key is checked.
func (c *Collection[T]) scope(key string) string {
	if !c.perOrg {
		return c.Keys
	}
	return key[:strings.LastIndexByte(key, '.')+1] + "*"
}

// orgOf returns the organisation of the value of a key, empty if it belongs to none.
func (c *Collection[T]) orgOf(key string, v *T) string {
	switch {
	case c.Org != nil:
		return c.Org(v)
	case c.perOrg:
		key = key[:strings.LastIndexByte(key, '.')]
		return key[strings.LastIndexByte(key, '.')+1:]
	default:
		return ""
	}
}

// set replaces the value of a key, which is removed if the new one is nil.
func (c *Collection[T]) set(key string, current cached[T]) {
	old := c.values[key].value
	c.values[key] = current
	if current.value == nil {
		delete(c.values, key)
	}
	if c.ByID {
		id := key[strings.LastIndexByte(key, '.')+1:]
		if c.keys[id] = key; current.value == nil {
			delete(c.keys, id)
		}
	}
	if c.Order != nil {
		c.unlist(key, old)
		c.list(key, current.value)
	}
	if c.OnChange != nil {
		c.OnChange(key, old, current.value)
	}
	if c.Kind != "" && c.Store.OnChange != nil {
		c.report(key, old, current.value)
	}
}

// report reports a change of the value of a key.
func (c *Collection[T]) report(key string, old, current *T) {
	v := current
	if v == nil {
		v = old
	}
	if v == nil {
		return
	}
	id := key[strings.LastIndexByte(key, '.')+1:]
	if c.PublicID != nil {
		id = c.PublicID(v)
	}
	c.Store.OnChange(proto.Change{Kind: c.Kind, Org: c.orgOf(key, v), ID: id})
}

// find returns where a value is in the list of its organisation, or belongs.
func (c *Collection[T]) find(key string, v *T) (org string, x listed[T], at int, found bool) {
	org, x = c.orgOf(key, v), listed[T]{c.Order(v) + " " + key, key, v}
	at, found = slices.BinarySearchFunc(c.lists[org], x.order, compareOrder[T])
	return org, x, at, found
}

func compareOrder[T any](x listed[T], order string) int { return cmp.Compare(x.order, order) }

func (c *Collection[T]) list(key string, v *T) {
	if v == nil {
		return
	}
	org, x, at, _ := c.find(key, v)
	c.lists[org] = slices.Insert(c.lists[org], at, x)
}

func (c *Collection[T]) unlist(key string, v *T) {
	if v == nil {
		return
	}
	org, _, at, found := c.find(key, v)
	if !found {
		return
	}
	if c.lists[org] = slices.Delete(c.lists[org], at, at+1); len(c.lists[org]) == 0 {
		delete(c.lists, org)
	}
}

// Get returns a value, nil if there is none.
func (c *Collection[T]) Get(key string) *T {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.values[key].value
}

// KeyOf returns the key of the value with an id, empty if none is in memory.
func (c *Collection[T]) KeyOf(id string) string {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.keys[id]
}

// FindKey returns the key of the value with an id. That of one that another process has just created is
// read from the bucket, among those of all organisations. FindKey returns [proto.ErrNotFound] if there
// is none.
func (c *Collection[T]) FindKey(ctx context.Context, id string) (string, error) {
	if key := c.KeyOf(id); key != "" {
		return key, nil
	}
	if !validKey(id) || strings.Contains(id, ".") {
		return "", c.notFound(id)
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	prefix := "$KV." + c.Bucket.Bucket() + "."
	m, err := c.askLast(ctx, prefix+strings.TrimSuffix(c.Keys, "*")+id)
	if IsNotFound(err) {
		return "", c.notFound(id)
	}
	if err != nil {
		return "", fmt.Errorf("%s: find %s: %w", c.Name, id, err)
	}
	return strings.TrimPrefix(m.Subject, prefix), nil
}

// All returns all values in no particular order.
func (c *Collection[T]) All() []*T {
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

// List returns the values of an organisation, or of all if org is empty, in their order.
func (c *Collection[T]) List(org string) []T {
	list, _ := c.Page(org, "", -1, nil)
	return list
}

// Page returns up to limit values of an organisation, or of all if org is empty, in their order: those
// behind a place, and for which keep, if not nil, returns true. All are returned if limit is negative.
// next is the place behind the page, empty after the last one.
func (c *Collection[T]) Page(org, after string, limit int, keep func(*T) bool) (page []T, next string) {
	page = []T{}
	found := c.listOf(org)
	if after != "" {
		at, exact := slices.BinarySearchFunc(found, after, compareOrder[T])
		if exact {
			at++
		}
		found = found[at:]
	}
	for i, x := range found {
		if keep != nil && !keep(x.value) {
			continue
		}
		if len(page) == limit {
			return page, found[i-1].order
		}
		page = append(page, *c.Clone(x.value))
	}
	return page, ""
}

// PageOf returns a page of what the values of a collection contain, see [Collection.Page].
func PageOf[T, V any](
	c *Collection[T], part func(*T) *V, org, after string, limit int, keep func(*V) bool,
) (page []V, next string) {
	found, next := c.Page(org, after, limit, func(v *T) bool { return keep == nil || keep(part(v)) })
	page = make([]V, len(found))
	for i := range found {
		page[i] = *part(&found[i])
	}
	return page, next
}

// listOf returns the values of an organisation, or of all if org is empty, in their order.
func (c *Collection[T]) listOf(org string) (found []listed[T]) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if org != "" {
		return slices.Clone(c.lists[org])
	}
	for _, list := range c.lists {
		found = append(found, list...)
	}
	slices.SortFunc(found, func(a, b listed[T]) int { return cmp.Compare(a.order, b.order) })
	return found
}

// Orgs returns the organisations that have more than most values, in no particular order.
func (c *Collection[T]) Orgs(most int) (orgs []string) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	for org, list := range c.lists {
		if len(list) > most {
			orgs = append(orgs, org)
		}
	}
	return orgs
}

// Forget drops values from memory, and leaves them in the bucket. Decode does not return them again.
func (c *Collection[T]) Forget(which func(key string) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for key := range c.values {
		if which(key) {
			c.set(key, cached[T]{})
		}
	}
}

// View calls f under the collection's lock, for what OnChange maintains.
func (c *Collection[T]) View(f func()) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	f()
}

// Read reads a value and its revision from the bucket. It returns [proto.ErrNotFound] if there is
// none.
func (c *Collection[T]) Read(ctx context.Context, key string) (*T, uint64, error) {
	e, err := c.Entry(ctx, key)
	if err != nil {
		return nil, 0, err
	}
	value, err := c.Decode(e)
	return value, e.Revision(), err
}

// Find returns a value, or [proto.ErrNotFound]. One that another process has just created is read from
// the bucket.
func (c *Collection[T]) Find(ctx context.Context, key string) (T, error) {
	v := c.Get(key)
	if v == nil {
		var err error
		if v, _, err = c.Read(ctx, key); err != nil {
			return *new(T), err
		}
	}
	return *c.Clone(v), nil
}

// Entry reads an entry from the bucket. It returns [proto.ErrNotFound] if there is none.
func (c *Collection[T]) Entry(ctx context.Context, key string) (jetstream.KeyValueEntry, error) {
	e, err := c.Bucket.Get(ctx, key)
	if IsNotFound(err) {
		return nil, c.notFound(key)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: read %s: %w", c.Name, key, err)
	}
	return e, nil
}

func (c *Collection[T]) notFound(key string) error {
	return fmt.Errorf("%s: no entry %s: %w", c.Name, key, proto.ErrNotFound)
}

// Refresh reads a value from the bucket into the cache.
func (c *Collection[T]) Refresh(ctx context.Context, key string) error {
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
		c.set(key, cached[T]{value, e.Revision()})
	}
	return nil
}

// Put stores a value, replacing any other.
func (c *Collection[T]) Put(ctx context.Context, key string, value *T) error {
	_, err := c.write(ctx, key, value, func(body []byte) (uint64, error) { return c.Bucket.Put(ctx, key, body) })
	return err
}

// Create stores a value that Check allows. It returns [proto.ErrExists] if there is one, whose error
// [IsConflict] may match as well.
func (c *Collection[T]) Create(ctx context.Context, key string, value *T) error {
	if c.Check != nil {
		_, err := c.UpdateWithOthers(ctx, key, func(old *T, others []*T) (*T, error) {
			if old != nil {
				return nil, fmt.Errorf("%s: create %s: %w", c.Name, key, proto.ErrExists)
			}
			return value, c.Check(value, others)
		})
		return err
	}
	_, err := c.write(ctx, key, value, func(body []byte) (uint64, error) { return c.Bucket.Create(ctx, key, body) })
	if IsConflict(err) {
		return fmt.Errorf("%w: %w", proto.ErrExists, err)
	}
	return err
}

// Replace replaces the value with that revision, and returns the new revision.
// Otherwise [IsConflict] matches its error. Revision 0 stands for no value.
func (c *Collection[T]) Replace(ctx context.Context, key string, value *T, revision uint64) (uint64, error) {
	return c.write(ctx, key, value, func(body []byte) (uint64, error) {
		if revision == 0 {
			return c.Bucket.Create(ctx, key, body)
		}
		return c.Bucket.Update(ctx, key, body, revision)
	})
}

// write stores a value and returns its revision.
func (c *Collection[T]) write(
	ctx context.Context, key string, value *T, put func(body []byte) (uint64, error),
) (uint64, error) {
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
		c.set(key, cached[T]{value, revision})
	}
	return revision, nil
}

// Update stores what change makes of a value, which is nil if there is none. change may be called
// again, and returns nil to leave the value as it is. Update returns the value that is stored then, and
// the error of Check for a new one.
func (c *Collection[T]) Update(ctx context.Context, key string, change func(old *T) (*T, error)) (value *T, err error) {
	err = Update(ctx, func() error {
		old, revision, err := c.Read(ctx, key)
		if err != nil && !errors.Is(err, proto.ErrNotFound) {
			return err
		}
		if value, err = change(old); err != nil {
			return err
		}
		switch {
		case value == nil:
			value = old
			return nil
		case revision == 0 && c.Check != nil:
			if err = c.Create(ctx, key, value); errors.Is(err, proto.ErrExists) {
				return errConflict
			}
			return err
		default:
			_, err = c.Replace(ctx, key, value, revision)
			return err
		}
	})
	return value, err
}

// Change stores what change makes of a copy of a value, and returns that. change may be called again.
// Its error is returned unchanged. Change returns [proto.ErrNotFound] if there is no such value.
func (c *Collection[T]) Change(ctx context.Context, key string, change func(*T) error) (T, error) {
	v, err := c.Update(ctx, key, func(old *T) (*T, error) {
		if old == nil {
			return nil, c.notFound(key)
		}
		changed := c.Clone(old)
		return changed, change(changed)
	})
	if err != nil {
		return *new(T), err
	}
	return *c.Clone(v), nil
}

// cachedAttempts is how often [Collection.UpdateWithOthers] tries with the values in memory, before it
// reads the bucket.
const cachedAttempts = 5

// UpdateWithOthers stores what change returns for a value, which is nil if there is none, on condition
// that no other value of its scope was changed since change was called. others are the other values of
// the scope, see Check. change may be called again, and returns nil to leave the value as it is.
// UpdateWithOthers returns the value that is stored then.
func (c *Collection[T]) UpdateWithOthers(
	ctx context.Context, key string, change func(old *T, others []*T) (*T, error),
) (value *T, err error) {
	scope := c.scope(key)
	turn := c.turns[maphash.String(scopeSeed, scope)%turns] // of this process; conflicts with others are rare
	select {
	case turn <- struct{}{}:
		defer func() { <-turn }()
	case <-ctx.Done():
		return nil, fmt.Errorf("%s: wait to store %s: %w", c.Name, key, context.Cause(ctx))
	}
	for attempt := 0; ctx.Err() == nil; attempt++ {
		stored := attempt >= cachedAttempts
		old, others, last, err := c.inScope(ctx, scope, key, stored)
		if err != nil {
			return nil, err
		}
		value, err = change(old, others)
		if err == nil && value != nil {
			if err = c.writeIfLast(ctx, key, value, scope, last, !stored); !IsConflict(err) {
				return value, err
			}
		} else {
			current := stored
			if !stored { // outdated values in memory do not justify a refusal
				var errLast error
				if current, errLast = c.isLast(ctx, scope, last); errLast != nil {
					return nil, errLast
				}
			}
			switch {
			case current && err != nil:
				return nil, err
			case current:
				return old, nil
			}
		}
		if !stored { // the watch is about to deliver what others have changed
			select {
			case <-ctx.Done():
			case <-time.After(retryMinPause):
			}
		}
	}
	return nil, fmt.Errorf("%s: store %s, whose others keep changing: %w", c.Name, key, context.Cause(ctx))
}

// inScope returns the value of a key and the others of its scope, as they are in memory or stored, and the
// last revision of all these keys.
func (c *Collection[T]) inScope(
	ctx context.Context, scope, key string, stored bool,
) (old *T, others []*T, last uint64, err error) {
	add := func(other string, v *T) {
		switch {
		case other == key:
			old = v
		case v != nil:
			others = append(others, v)
		}
	}
	if stored {
		values, last, err := ReadValues(ctx, c.Bucket, scope, c.Decode)
		for other, v := range values {
			add(other, v)
		}
		return old, others, last, err
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.perOrg {
		for _, x := range c.lists[c.orgOf(key, nil)] {
			add(x.key, x.value)
		}
	} else {
		for other, v := range c.values {
			add(other, v.value)
		}
	}
	return old, others, c.last[scope], nil
}

// isLast reports whether a revision is the last one in a scope.
func (c *Collection[T]) isLast(ctx context.Context, scope string, revision uint64) (bool, error) {
	m, err := c.askLast(ctx, "$KV."+c.Bucket.Bucket()+"."+scope)
	if IsNotFound(err) {
		return revision == 0, nil
	}
	if err != nil {
		return false, fmt.Errorf("%s: read the last of %s: %w", c.Name, scope, err)
	}
	return m.Sequence == revision, nil
}

// askLast requests the last message on a subject from the leader of the bucket's stream.
func (c *Collection[T]) askLast(ctx context.Context, subject string) (*jetstream.RawStreamMsg, error) {
	m, err := askLeader(ctx, c.Store, bucketPrefix+c.Bucket.Bucket(), query{Last: subject})
	return m, markUnanswered(err)
}

// writeIfLast stores a value if last is the last revision in its scope. known reports whether all values
// of the scope up to that are in memory.
func (c *Collection[T]) writeIfLast(
	ctx context.Context, key string, value *T, scope string, last uint64, known bool,
) error {
	prefix := "$KV." + c.Bucket.Bucket() + "."
	revision, err := c.write(ctx, key, value, func(body []byte) (uint64, error) {
		return decided(ctx, func(ctx context.Context) (uint64, error) {
			unchanged := jetstream.WithExpectLastSequenceForSubject(last, prefix+scope)
			ack, err := c.Store.JS.Publish(ctx, prefix+key, body, unchanged)
			if err != nil {
				return 0, err
			}
			return ack.Sequence, nil
		})
	})
	if err != nil || !known {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last[scope] == last {
		c.last[scope] = revision
	}
	return nil
}

// Remove removes a value after allow, if not nil, has returned nil for it, and returns it. allow may be
// called again. Without allow, a malformed value is removed too; the result is nil then. Remove returns
// [proto.ErrNotFound] if there is no such value.
func (c *Collection[T]) Remove(ctx context.Context, key string, allow func(*T) error) (removed *T, err error) {
	var revision uint64
	err = Update(ctx, func() error {
		e, err := c.Entry(ctx, key)
		if err != nil {
			return err
		}
		removed, err = c.Decode(e)
		if err != nil && allow != nil {
			return err
		}
		if allow != nil {
			if err := allow(removed); err != nil {
				return err
			}
		}
		revision = e.Revision()
		// A purge, unlike a deletion, may leave a marker that expires.
		return c.Bucket.Purge(ctx, key, jetstream.LastRevision(revision))
	})
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if old, ok := c.values[key]; ok && old.revision <= revision {
		c.set(key, cached[T]{})
		c.values[key] = cached[T]{nil, revision}
	}
	return removed, nil
}

// DecodeJSON decodes an entry whose value is JSON.
func DecodeJSON[T any](e jetstream.KeyValueEntry) (*T, error) {
	value := new(T)
	if err := json.Unmarshal(e.Value(), value); err != nil {
		return nil, fmt.Errorf("decode entry %s of bucket %s: %w", e.Key(), e.Bucket(), err)
	}
	return value, nil
}
