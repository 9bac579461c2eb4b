package registry

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Plans is the list of plans: the built-in ones, and those that were stored. Run must be running
// for changes to be seen.
type Plans struct {
	store *store.Store
	*store.Collection[proto.Plan]
}

// OpenPlans reads all stored plans.
func OpenPlans(ctx context.Context, st *store.Store, log *slog.Logger) (*Plans, error) {
	all, err := store.OpenCollection(ctx, store.CollectionConfig[proto.Plan]{
		Store: st, Bucket: st.Plans, Keys: "*", Name: "plans", Order: store.ByKey[proto.Plan], Log: log,
		Kind: proto.ChangedPlans,
	})
	return &Plans{st, all}, err
}

// Plan returns the plan of that name, or [proto.ErrNotFound] if there is none.
func (l *Plans) Plan(ctx context.Context, name string) (proto.Plan, error) {
	if p, ok := proto.PresetPlan(name); ok && l.Get(name) == nil {
		return p, nil
	}
	return l.Find(ctx, name)
}

// List returns all plans: the built-in ones from the smallest to the largest, then the others by
// name.
func (l *Plans) List() []proto.Plan {
	list := proto.PresetPlans()
	presets := len(list)
	for _, p := range l.Collection.List("") {
		if i := slices.IndexFunc(list[:presets], func(preset proto.Plan) bool { return preset.Name == p.Name }); i >= 0 {
			list[i] = p
		} else {
			list = append(list, p)
		}
	}
	return list
}

// Create stores a new plan. It returns [proto.ErrExists] if there is one of that name.
func (l *Plans) Create(ctx context.Context, p proto.Plan) error {
	if _, preset := proto.PresetPlan(p.Name); preset {
		return fmt.Errorf("plan %q: %w", p.Name, proto.ErrExists)
	}
	return l.Collection.Create(ctx, p.Name, &p)
}

// Replace replaces the plan with the same name if check returns nil for the stored one. check may
// be called again. Replace returns [proto.ErrNotFound] if there is no such plan.
func (l *Plans) Replace(ctx context.Context, p proto.Plan, check func(old proto.Plan) error) error {
	_, err := l.Update(ctx, p.Name, func(old *proto.Plan) (*proto.Plan, error) {
		if preset, ok := proto.PresetPlan(p.Name); ok && old == nil {
			old = &preset
		}
		if old == nil {
			return nil, fmt.Errorf("plan %q: %w", p.Name, proto.ErrNotFound)
		}
		return &p, check(*old)
	})
	return err
}

// Remove removes a stored plan for which check returns nil, and returns it. Removing the
// replacement of a built-in plan restores the built-in one. Remove returns [proto.ErrNotFound] if
// there is no such stored plan, and a [*proto.PlanInUseError] if organisations or unrevoked keys
// use a plan that would be gone.
func (l *Plans) Remove(ctx context.Context, name string, check func(old proto.Plan) error) (proto.Plan, error) {
	return removed(l.Collection.Remove(ctx, name, func(p *proto.Plan) error {
		if err := check(*p); err != nil {
			return err
		}
		if _, preset := proto.PresetPlan(name); preset {
			return nil
		}
		users, err := l.users(ctx, name)
		if err == nil && len(users) > 0 {
			err = &proto.PlanInUseError{Plan: name, Users: users}
		}
		return err
	}))
}

// users returns the organisations and the unrevoked keys that have a plan.
func (l *Plans) users(ctx context.Context, plan string) (users []string, err error) {
	orgs, _, err := store.ReadValues(ctx, l.store.Orgs, "*", store.DecodeJSON[proto.Org])
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(orgs)) {
		if orgs[name].Plan == plan {
			users = append(users, "organisation "+name)
		}
	}
	keys, err := keysWith(ctx, l.store, func(k *storedKey) bool { return k.Plan == plan })
	for _, id := range keys {
		users = append(users, "API key "+id)
	}
	return users, err
}
