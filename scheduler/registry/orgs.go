package registry

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Orgs is the list of organisations. Run must be running for changes to be seen.
type Orgs struct{ cache *store.Cache[proto.Org] }

// OpenOrgs reads all organisations.
func OpenOrgs(ctx context.Context, st *store.Store, log *slog.Logger) (*Orgs, error) {
	cache, err := store.OpenCache(ctx, store.CacheConfig[proto.Org]{
		Store: st, Bucket: st.Orgs, Keys: "*", Name: "organisations", Decode: store.DecodeJSON[proto.Org]("organisation"), Log: log,
	})
	return &Orgs{cache}, err
}

// Run applies changes by other gateways until ctx is done.
func (l *Orgs) Run(ctx context.Context) error { return l.cache.Run(ctx) }

// Org returns the organisation of that name, or [proto.ErrNotFound] if there is none. One that
// another gateway has just created is read from the bucket.
func (l *Orgs) Org(ctx context.Context, name string) (proto.Org, error) {
	if o := l.cache.Get(name); o != nil {
		return *o, nil
	}
	return l.Stored(ctx, name)
}

// Stored reads an organisation from the bucket. It returns [proto.ErrNotFound] if there is none.
func (l *Orgs) Stored(ctx context.Context, name string) (proto.Org, error) {
	o, _, err := l.cache.Read(ctx, name)
	if err != nil {
		return proto.Org{}, err
	}
	return *o, nil
}

// List returns all organisations by name.
func (l *Orgs) List() []proto.Org {
	list := []proto.Org{}
	for _, o := range l.cache.All() {
		list = append(list, *o)
	}
	slices.SortFunc(list, func(a, b proto.Org) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// Create stores a new organisation. It returns [proto.ErrExists] if there is one of that name.
func (l *Orgs) Create(ctx context.Context, o proto.Org) error {
	err := l.cache.Create(ctx, o.Name, &o)
	if store.IsConflict(err) {
		return fmt.Errorf("organisation %q: %w", o.Name, proto.ErrExists)
	}
	return err
}

// Change stores what change makes of an organisation, and returns that. change may be called
// again. Change returns [proto.ErrNotFound] if there is no such organisation.
func (l *Orgs) Change(ctx context.Context, name string, change func(*proto.Org) error) (proto.Org, error) {
	stored, err := l.cache.Update(ctx, name, func(old *proto.Org) (*proto.Org, error) {
		if old == nil {
			return nil, fmt.Errorf("organisation %q: %w", name, proto.ErrNotFound)
		}
		changed := *old
		return &changed, change(&changed)
	})
	if err != nil {
		return proto.Org{}, err
	}
	return *stored, nil
}

// Remove removes an organisation that is being deleted. It returns [proto.ErrNotFound] if there is
// none, and [proto.ErrConflict] if it is not being deleted.
func (l *Orgs) Remove(ctx context.Context, name string) error {
	_, err := l.cache.Remove(ctx, name, func(e jetstream.KeyValueEntry) error {
		o, err := l.cache.Decode(e)
		if err == nil && o.DeletingAt == nil {
			err = fmt.Errorf("organisation %q is not being deleted: %w", name, proto.ErrConflict)
		}
		return err
	})
	return err
}

// Adopt creates the missing organisations of keys. Versions before organisations were stored knew
// them only by their keys, each of which had a plan. The organisation gets the largest of these plans.
func (l *Orgs) Adopt(ctx context.Context, keys []proto.Key) error {
	size := func(plan string) int {
		return slices.IndexFunc(proto.PresetPlans(), func(p proto.Plan) bool { return p.Name == plan })
	}
	missing := map[string]string{} // organisation -> plan
	for _, k := range keys {
		if k.RevokedAt != nil || l.cache.Get(k.Org) != nil {
			continue
		}
		if plan := cmp.Or(k.Plan, proto.UnlimitedPlan); missing[k.Org] == "" || size(plan) > size(missing[k.Org]) {
			missing[k.Org] = plan
		}
	}
	for name, plan := range missing {
		err := l.cache.Create(ctx, name, &proto.Org{Name: name, Plan: plan, CreatedAt: time.Now().UTC()})
		if err != nil && !store.IsConflict(err) { // else another gateway has created it
			return fmt.Errorf("create the organisation %s of existing API keys: %w", name, err)
		}
	}
	return nil
}
