package registry

import (
	"context"
	"log/slog"
	"slices"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Connections stores the storage connections of organisations. Run must be running for changes to be
// seen.
type Connections struct {
	store *store.Store
	*store.Collection[proto.Connection]
}

// OpenConnections reads all connections.
func OpenConnections(ctx context.Context, st *store.Store, log *slog.Logger) (*Connections, error) {
	all, err := store.OpenCollection(ctx, store.CollectionConfig[proto.Connection]{
		Store: st, Bucket: st.Connections, Keys: "*.*", Name: "storage connections", Log: log,
		Kind: proto.ChangedConnections, Clone: cloneConnection, Order: store.ByKey[proto.Connection],
		Check: func(_ *proto.Connection, others []*proto.Connection) error {
			if len(others) >= proto.MaxConnections {
				return proto.FieldErrorf("slug", "would be one storage connection too many: an organisation has at most %d",
					proto.MaxConnections)
			}
			return nil
		},
	})
	return &Connections{st, all}, err
}

func connectionKey(org, slug string) string { return org + "." + slug }

// Connection returns a connection, or [proto.ErrNotFound].
func (l *Connections) Connection(ctx context.Context, org, slug string) (proto.Connection, error) {
	return l.Find(ctx, connectionKey(org, slug))
}

func cloneConnection(c *proto.Connection) *proto.Connection {
	clone := *c
	if c.S3 != nil {
		clone.S3 = new(*c.S3)
	}
	return &clone
}

// Create stores a new connection. It returns [proto.ErrExists] if the organisation has one of that
// slug, and a [*proto.FieldError] if it has too many.
func (l *Connections) Create(ctx context.Context, c proto.Connection) error {
	return l.Collection.Create(ctx, connectionKey(c.Org, c.Slug), cloneConnection(&c))
}

// Change stores the result of change for a connection, and returns it. change may be called again,
// and must not change the organisation and the slug. Its error is returned unchanged. Change
// returns [proto.ErrNotFound] if there is no such connection.
func (l *Connections) Change(
	ctx context.Context, org, slug string, change func(*proto.Connection) error,
) (proto.Connection, error) {
	return l.Collection.Change(ctx, connectionKey(org, slug), change)
}

// Remove removes a connection for which check returns nil, and returns it. It returns
// [proto.ErrNotFound] if there is none, and a [*proto.BoundConnectionError] if unrevoked keys use
// it. A volume is first marked as being removed, then Remove calls empty. If empty fails, the mark
// stays, and the next Remove continues. Both may be called again. Executions of a key that
// concurrently gets the connection are refused.
func (l *Connections) Remove(
	ctx context.Context, org, slug string, check, empty func(proto.Connection) error,
) (proto.Connection, error) {
	key := connectionKey(org, slug)
	allow := func(c *proto.Connection) error {
		if err := check(*cloneConnection(c)); err != nil {
			return err
		}
		return l.checkUnbound(ctx, org, slug)
	}
	c, _, err := l.Read(ctx, key)
	if err != nil {
		return proto.Connection{}, err
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
			return proto.Connection{}, err
		}
		allow = func(c *proto.Connection) error {
			if !c.Removing { // another one, after another removal
				return proto.ErrConflict
			}
			return nil
		}
	}
	return removed(l.Collection.Remove(ctx, key, allow))
}

// checkUnbound returns a [*proto.BoundConnectionError] if unrevoked keys name a connection.
func (l *Connections) checkUnbound(ctx context.Context, org, slug string) error {
	names := func(m proto.KeyMount) bool { return m.Connection == slug }
	bound, err := keysWith(ctx, l.store, func(k *storedKey) bool {
		return k.Org == org && slices.ContainsFunc(k.Mounts, names)
	})
	if err == nil && len(bound) > 0 {
		err = &proto.BoundConnectionError{Connection: slug, Keys: bound}
	}
	return err
}
