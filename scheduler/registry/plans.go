package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Plans is the list of plans: the built-in ones, and those that were stored. Run must be running
// for changes to be seen.
type Plans struct {
	store *store.Store
	cache *store.Cache[proto.Plan]
}

// OpenPlans reads all stored plans.
func OpenPlans(ctx context.Context, st *store.Store, log *slog.Logger) (*Plans, error) {
	cache, err := store.OpenCache(ctx, store.CacheConfig[proto.Plan]{
		Store: st, Bucket: st.Plans, Keys: "*", Name: "plans", Decode: store.DecodeJSON[proto.Plan]("plan"), Log: log,
	})
	return &Plans{st, cache}, err
}

// Run applies changes by other gateways until ctx is done.
func (l *Plans) Run(ctx context.Context) error { return l.cache.Run(ctx) }

// Plan returns the plan of that name, or [proto.ErrNotFound] if there is none. A plan that another
// gateway has just created is read from the bucket.
func (l *Plans) Plan(ctx context.Context, name string) (proto.Plan, error) {
	if p := l.cache.Get(name); p != nil {
		return *p, nil
	}
	if p, ok := proto.PresetPlan(name); ok {
		return p, nil
	}
	p, _, err := l.cache.Read(ctx, name)
	if err != nil {
		return proto.Plan{}, err
	}
	return *p, nil
}

// List returns all plans: the built-in ones from the smallest to the largest, then the others by
// name.
func (l *Plans) List() []proto.Plan {
	list := proto.PresetPlans()
	presets := len(list)
	for _, p := range l.cache.All() {
		if i := slices.IndexFunc(list[:presets], func(preset proto.Plan) bool { return preset.Name == p.Name }); i >= 0 {
			list[i] = *p
		} else {
			list = append(list, *p)
		}
	}
	slices.SortFunc(list[presets:], func(a, b proto.Plan) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// Create stores a new plan. It returns [proto.ErrExists] if there is one of that name.
func (l *Plans) Create(ctx context.Context, p proto.Plan) error {
	if _, preset := proto.PresetPlan(p.Name); preset {
		return fmt.Errorf("plan %q: %w", p.Name, proto.ErrExists)
	}
	err := l.cache.Create(ctx, p.Name, &p)
	if store.IsConflict(err) {
		return fmt.Errorf("plan %q: %w", p.Name, proto.ErrExists)
	}
	return err
}

// Replace replaces the plan of the same name if check returns nil for the stored one. check may be
// called again. Replace returns [proto.ErrNotFound] if there is no such plan.
func (l *Plans) Replace(ctx context.Context, p proto.Plan, check func(old proto.Plan) error) error {
	_, err := l.cache.Update(ctx, p.Name, func(old *proto.Plan) (*proto.Plan, error) {
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

// Remove removes a stored plan, for which check must return nil, and returns it. A built-in plan
// that was replaced is as it was built in then. Remove returns [proto.ErrNotFound] if there is no
// such stored plan, and a [*proto.PlanInUseError] if organisations or unrevoked keys have a plan
// that would be gone.
func (l *Plans) Remove(ctx context.Context, name string, check func(old proto.Plan) error) (removed proto.Plan, err error) {
	_, err = l.cache.Remove(ctx, name, func(e jetstream.KeyValueEntry) error {
		p, err := l.cache.Decode(e)
		if err != nil {
			return err
		}
		removed = *p
		if err := check(removed); err != nil {
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
	})
	return removed, err
}

// users returns the organisations and the unrevoked keys that have a plan.
func (l *Plans) users(ctx context.Context, plan string) (users []string, err error) {
	add := func(user string) {
		if !slices.Contains(users, user) {
			users = append(users, user)
		}
	}
	decode := store.DecodeJSON[proto.Org]("organisation")
	orgs := store.ReadBucket(ctx, l.store.Orgs, "*", func(e jetstream.KeyValueEntry) {
		if e.Operation() != jetstream.KeyValuePut {
			return
		}
		if o, err := decode(e); err == nil && o.Plan == plan {
			add("organisation " + o.Name)
		}
	})
	keys := store.ReadBucket(ctx, l.store.Keys, keyPattern, func(e jetstream.KeyValueEntry) {
		if s, err := decodeKey(e); err == nil && s.RevokedAt == nil && s.Plan == plan {
			add("API key " + s.ID)
		}
	})
	if err := errors.Join(orgs, keys); err != nil {
		return nil, fmt.Errorf("look for users of plan %s: %w", plan, err)
	}
	return users, nil
}
