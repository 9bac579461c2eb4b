package registry

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Profiles is the list of sandbox profiles. Run must be running for changes to be seen.
type Profiles struct {
	store *store.Store
	*store.Collection[proto.Profile]
}

// profileKey returns the key of a profile in its bucket. Keys are subjects, so "=" replaces a dot
// in the name.
func profileKey(name string) string { return strings.ReplaceAll(name, ".", "=") }

// OpenProfiles reads all profiles.
func OpenProfiles(ctx context.Context, st *store.Store, log *slog.Logger) (*Profiles, error) {
	all, err := store.OpenCollection(ctx, store.CollectionConfig[proto.Profile]{
		Store: st, Bucket: st.Profiles, Keys: "*", Name: "sandbox profiles", Decode: decodeProfile, Clone: clone,
		Kind:          proto.ChangedProfiles,
		PublicID:      func(p *proto.Profile) string { return p.Name },
		Order:         func(p *proto.Profile) string { return p.Name },
		DropMalformed: true, // its keys are rejected rather than run in another sandbox
		Log:           log,
	})
	return &Profiles{st, all}, err
}

// decodeProfile decodes a stored profile. Fields that an older version did not store have the
// values of the default profile.
func decodeProfile(e jetstream.KeyValueEntry) (*proto.Profile, error) {
	p, err := api.DecodeProfile("", e.Value(), proto.DefaultProfile())
	if err == nil && profileKey(p.Name) != e.Key() {
		err = fmt.Errorf("its name is %q", p.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("decode sandbox profile %s: %w", e.Key(), err)
	}
	return &p, nil
}

// Profile returns the profile of that name, or [proto.ErrNotFound] if there is none.
func (l *Profiles) Profile(ctx context.Context, name string) (proto.Profile, error) {
	return l.Find(ctx, profileKey(name))
}

func clone(p *proto.Profile) *proto.Profile {
	c := *p
	c.Env, c.Network.Allow, c.Preload = maps.Clone(p.Env), slices.Clone(p.Network.Allow), slices.Clone(p.Preload)
	c.SystemCalls, c.Secrets = slices.Clone(p.SystemCalls), slices.Clone(p.Secrets)
	c.Network.Private = slices.Clone(p.Network.Private)
	return &c
}

// Create stores a new profile. It returns [proto.ErrExists] if there is one of that name.
func (l *Profiles) Create(ctx context.Context, p proto.Profile) error {
	return l.Collection.Create(ctx, profileKey(p.Name), clone(&p))
}

// Replace replaces the profile with the same name if check returns nil for the stored one. check
// may be called again. Replace returns [proto.ErrNotFound] if there is no such profile.
func (l *Profiles) Replace(ctx context.Context, p proto.Profile, check func(old proto.Profile) error) error {
	return store.Update(ctx, func() error {
		e, err := l.Entry(ctx, profileKey(p.Name))
		if err != nil {
			return err
		}
		if old, err := decodeProfile(e); err == nil { // else it is fixed by replacing it
			if err := check(*old); err != nil {
				return err
			}
		}
		_, err = l.Collection.Replace(ctx, profileKey(p.Name), clone(&p), e.Revision())
		return err
	})
}

// Remove removes a profile for which check returns nil, and returns it. It returns
// [proto.ErrNotFound] if there is none, and a [*proto.BoundError] if unrevoked keys are bound to it
// or allow it.
func (l *Profiles) Remove(
	ctx context.Context, name string, check func(old proto.Profile) error,
) (proto.Profile, error) {
	p, err := l.Collection.Remove(ctx, profileKey(name), func(p *proto.Profile) error {
		if err := check(*p); err != nil {
			return err
		}
		// Binding a key after this touches the profile, so that its removal fails.
		bound, err := keysWith(ctx, l.store, func(k *storedKey) bool {
			return slices.Contains(k.AllowedProfiles(), name)
		})
		if err == nil && len(bound) > 0 {
			err = &proto.BoundError{Profile: name, Keys: bound}
		}
		return err
	})
	if err != nil {
		return proto.Profile{}, fmt.Errorf("remove sandbox profile %s: %w", name, err)
	}
	return *p, nil
}

// touchProfiles calls touchProfile for each name until one fails.
func touchProfiles(ctx context.Context, st *store.Store, names []string) error {
	for _, name := range names {
		if err := touchProfile(ctx, st, name); err != nil {
			return err
		}
	}
	return nil
}

// touchProfile changes only a profile's revision. A concurrent removal that missed the key just
// bound to the profile then fails. touchProfile returns [proto.ErrNotFound] if the profile does not
// exist.
func touchProfile(ctx context.Context, st *store.Store, name string) error {
	if proto.BuiltInProfile(name) {
		return nil
	}
	err := store.Update(ctx, func() error {
		e, err := st.Profiles.Get(ctx, profileKey(name))
		if err != nil {
			return err
		}
		_, err = st.Profiles.Update(ctx, profileKey(name), e.Value(), e.Revision())
		return err
	})
	if store.IsNotFound(err) {
		err = proto.ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("sandbox profile %q: %w", name, err)
	}
	return nil
}
