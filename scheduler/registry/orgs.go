package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Orgs is the list of organisations. Run must be running for changes to be seen.
type Orgs struct{ *store.Collection[proto.Org] }

// OpenOrgs reads all organisations.
func OpenOrgs(ctx context.Context, st *store.Store, log *slog.Logger) (*Orgs, error) {
	all, err := store.OpenCollection(ctx, store.CollectionConfig[proto.Org]{
		Store: st, Bucket: st.Orgs, Keys: "*", Name: "organisations", Order: store.ByKey[proto.Org], Log: log,
		Kind: proto.ChangedOrgs,
	})
	return &Orgs{all}, err
}

// Org returns the organisation of that name, or [proto.ErrNotFound] if there is none.
func (l *Orgs) Org(ctx context.Context, name string) (proto.Org, error) { return l.Find(ctx, name) }

// Stored reads an organisation from the bucket. It returns [proto.ErrNotFound] if there is none.
func (l *Orgs) Stored(ctx context.Context, name string) (proto.Org, error) {
	o, _, err := l.Read(ctx, name)
	if err != nil {
		return proto.Org{}, err
	}
	return *o, nil
}

// List returns all organisations by name.
func (l *Orgs) List() []proto.Org { return l.Collection.List("") }

// Create stores a new organisation. It returns [proto.ErrExists] if there is one of that name.
func (l *Orgs) Create(ctx context.Context, o proto.Org) error {
	return l.Collection.Create(ctx, o.Name, &o)
}

// Remove removes an organisation that is being deleted. It returns [proto.ErrNotFound] if there is
// none, and [proto.ErrConflict] if it is not being deleted.
func (l *Orgs) Remove(ctx context.Context, name string) error {
	_, err := l.Collection.Remove(ctx, name, func(o *proto.Org) error {
		if o.DeletingAt == nil {
			return fmt.Errorf("organisation %q is not being deleted: %w", name, proto.ErrConflict)
		}
		return nil
	})
	return err
}

// Adopt creates the missing organisations of keys. Versions that did not store organisations knew
// them only by their keys, each of which had a plan. The organisation gets the largest of these
// plans.
func (l *Orgs) Adopt(ctx context.Context, keys []proto.Key) error {
	size := func(plan string) int {
		return slices.IndexFunc(proto.PresetPlans(), func(p proto.Plan) bool { return p.Name == plan })
	}
	missing := map[string]string{} // organisation -> plan
	for _, k := range keys {
		if k.RevokedAt != nil || l.Get(k.Org) != nil {
			continue
		}
		if plan := cmp.Or(k.Plan, proto.UnlimitedPlan); missing[k.Org] == "" || size(plan) > size(missing[k.Org]) {
			missing[k.Org] = plan
		}
	}
	for name, plan := range missing {
		err := l.Collection.Create(ctx, name, &proto.Org{Name: name, Plan: plan, CreatedAt: time.Now().UTC()})
		if err != nil && !errors.Is(err, proto.ErrExists) { // else another gateway has created it
			return fmt.Errorf("create the organisation %s of existing API keys: %w", name, err)
		}
	}
	return nil
}
