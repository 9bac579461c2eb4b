package registry

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Connections stores the storage connections of organisations. Run must be running for changes to be
// seen.
type Connections struct {
	store *store.Store
	cache *store.Cache[proto.Connection]
}

// OpenConnections reads all connections.
func OpenConnections(ctx context.Context, st *store.Store, log *slog.Logger) (*Connections, error) {
	cache, err := store.OpenCache(ctx, store.CacheConfig[proto.Connection]{
		Store: st, Bucket: st.Connections, Keys: "*.*", Name: "storage connections", Decode: store.DecodeJSON[proto.Connection]("storage connection"), Log: log,
	})
	return &Connections{st, cache}, err
}

// Run applies changes by other gateways until ctx is done.
func (l *Connections) Run(ctx context.Context) error { return l.cache.Run(ctx) }

func connectionKey(org, slug string) string { return org + "." + slug }

// Connection returns a connection, or [proto.ErrNotFound]. One that another gateway has just created
// is read from the bucket.
func (l *Connections) Connection(ctx context.Context, org, slug string) (proto.Connection, error) {
	if c := l.cache.Get(connectionKey(org, slug)); c != nil {
		return cloneConnection(c), nil
	}
	c, _, err := l.cache.Read(ctx, connectionKey(org, slug))
	if err != nil {
		return proto.Connection{}, err
	}
	return *c, nil
}

func cloneConnection(c *proto.Connection) proto.Connection {
	clone := *c
	if c.S3 != nil {
		clone.S3 = new(*c.S3)
	}
	return clone
}

// List returns the connections of an organisation by slug, or all of them, if org is empty, by
// organisation first.
func (l *Connections) List(org string) []proto.Connection {
	list := []proto.Connection{}
	for _, c := range l.cache.All() {
		if org == "" || c.Org == org {
			list = append(list, cloneConnection(c))
		}
	}
	slices.SortFunc(list, func(a, b proto.Connection) int {
		return strings.Compare(connectionKey(a.Org, a.Slug), connectionKey(b.Org, b.Slug))
	})
	return list
}

// Create stores a new connection. It returns [proto.ErrExists] if the organisation has one of that
// slug, and a [*proto.FieldError] if it has too many.
func (l *Connections) Create(ctx context.Context, c proto.Connection) error {
	key := connectionKey(c.Org, c.Slug)
	_, err := l.cache.UpdateWithAll(ctx, key, func(all map[string]*proto.Connection) (*proto.Connection, error) {
		n := 0
		for _, other := range all {
			if other.Org == c.Org {
				n++
			}
		}
		switch {
		case all[key] != nil:
			return nil, fmt.Errorf("storage connection %s: %w", c.Slug, proto.ErrExists)
		case n >= proto.MaxConnections:
			return nil, proto.FieldErrorf("slug", "would be one storage connection too many: an organisation has at most %d", proto.MaxConnections)
		}
		return new(cloneConnection(&c)), nil
	})
	return err
}

// Change stores what change makes of a connection, and returns that. change may be called again, and
// must not change the organisation and the slug. Its error is returned unchanged. Change returns
// [proto.ErrNotFound] if there is no such connection.
func (l *Connections) Change(ctx context.Context, org, slug string, change func(*proto.Connection) error) (proto.Connection, error) {
	c, err := l.cache.Update(ctx, connectionKey(org, slug), func(old *proto.Connection) (*proto.Connection, error) {
		if old == nil {
			return nil, proto.ErrNotFound
		}
		changed := cloneConnection(old)
		return &changed, change(&changed)
	})
	if err != nil {
		return proto.Connection{}, err
	}
	return cloneConnection(c), nil
}

// Remove removes a connection, for which check must return nil, and returns it. It returns
// [proto.ErrNotFound] if there is none, and a [*proto.BoundConnectionError] if unrevoked keys name
// it. A volume is first marked as being removed, then Remove calls empty. After an error of empty the
// mark stays, and the next Remove continues. Both may be called again. Executions of a key that is
// given the connection at the same time are refused.
func (l *Connections) Remove(ctx context.Context, org, slug string, check, empty func(proto.Connection) error) (removed proto.Connection, err error) {
	key := connectionKey(org, slug)
	allow := func(c *proto.Connection) error {
		if err := check(cloneConnection(c)); err != nil {
			return err
		}
		return l.checkUnbound(ctx, org, slug)
	}
	c, _, err := l.cache.Read(ctx, key)
	if err != nil {
		return removed, err
	}
	if c.Kind == proto.MountVolume {
		marked, err := l.Change(ctx, org, slug, func(c *proto.Connection) error {
			err := allow(c)
			c.Removing = true
			return err
		})
		if err == nil {
			err = empty(marked)
		}
		if err != nil {
			return removed, err
		}
		allow = func(c *proto.Connection) error {
			if !c.Removing { // another one, after another removal
				return proto.ErrConflict
			}
			return nil
		}
	}
	_, err = l.cache.Remove(ctx, key, func(e jetstream.KeyValueEntry) error {
		c, err := l.cache.Decode(e)
		if err != nil {
			return err
		}
		removed = *c
		return allow(c)
	}, jetstream.PurgeTTL(store.WebhookMarkerTTL))
	return removed, err
}

// checkUnbound returns a [*proto.BoundConnectionError] if unrevoked keys name a connection.
func (l *Connections) checkUnbound(ctx context.Context, org, slug string) error {
	var bound []string
	err := store.ReadBucket(ctx, l.store.Keys, keyPattern, func(e jetstream.KeyValueEntry) {
		k, err := decodeKey(e)
		names := func(m proto.KeyMount) bool { return m.Connection == slug }
		if err == nil && k.RevokedAt == nil && k.Org == org && slices.ContainsFunc(k.Mounts, names) && !slices.Contains(bound, k.ID) {
			bound = append(bound, k.ID)
		}
	})
	if err != nil {
		return fmt.Errorf("read the API keys: %w", err)
	}
	if len(bound) > 0 {
		return &proto.BoundConnectionError{Connection: slug, Keys: bound}
	}
	return nil
}
