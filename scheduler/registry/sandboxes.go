package registry

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
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Profiles is the list of sandbox profiles, kept current by a watch. Run must be running for changes to be seen.
type Profiles struct {
	store   *store.Store
	watched watched

	mu     sync.RWMutex
	byName map[string]storedProfile // by name in the bucket, removed ones included
}

// storedProfile is a profile as it was last seen in the bucket.
type storedProfile struct {
	profile  *proto.Profile // nil where it was removed, or cannot be read
	revision uint64
}

// profileKey is where a profile lies in its bucket, whose keys are subjects: a dot of the name is written as "=".
func profileKey(name string) string { return strings.ReplaceAll(name, ".", "=") }

// OpenProfiles reads the profiles there are.
func OpenProfiles(ctx context.Context, st *store.Store, log *slog.Logger) (*Profiles, error) {
	l := &Profiles{store: st, byName: map[string]storedProfile{}}
	l.watched = watched{store: st, bucket: st.Profiles, pattern: ">", what: "sandbox profiles", log: log, take: l.take}
	return l, l.watched.read(ctx)
}

// Run keeps the list current until ctx ends.
func (l *Profiles) Run(ctx context.Context) error { return l.watched.run(ctx) }

// take takes in one entry of the bucket.
func (l *Profiles) take(e jetstream.KeyValueEntry) {
	var p *proto.Profile
	if e.Operation() == jetstream.KeyValuePut {
		var err error
		if p, err = decodeProfile(e); err != nil {
			// Its keys are refused rather than given something else.
			l.watched.log.Error("a malformed sandbox profile was passed over", "key", e.Key(), "error", err)
		}
	}
	l.keep(e.Key(), storedProfile{p, e.Revision()})
}

// decodeProfile reads a stored profile. What an older version did not store yet is as in the default one.
func decodeProfile(e jetstream.KeyValueEntry) (*proto.Profile, error) {
	p, err := proto.DecodeProfile("", e.Value(), proto.DefaultProfile())
	if err == nil && profileKey(p.Name) != e.Key() {
		err = fmt.Errorf("it says that it is %q", p.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("decode sandbox profile %s: %w", e.Key(), err)
	}
	return &p, nil
}

// keep takes p in unless something newer is known: the watch may tell late of what was changed here.
func (l *Profiles) keep(key string, p storedProfile) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byName[key].revision < p.revision {
		l.byName[key] = p
	}
}

// Profile gives the profile of that name. Its error is [proto.ErrNotFound] where there is none. One that is not known here yet, because
// another gateway has just made it, is looked for in the bucket.
func (l *Profiles) Profile(ctx context.Context, name string) (proto.Profile, error) {
	l.mu.RLock()
	known := l.byName[profileKey(name)].profile
	l.mu.RUnlock()
	if known != nil {
		return clone(known), nil
	}
	p, _, err := l.stored(ctx, name)
	if err != nil {
		return proto.Profile{}, err
	}
	return *p, nil
}

func clone(p *proto.Profile) proto.Profile {
	c := *p
	c.Env, c.Network.Allow, c.Preload = maps.Clone(p.Env), slices.Clone(p.Network.Allow), slices.Clone(p.Preload)
	return c
}

// stored reads a profile from the bucket, with the revision to change it by.
func (l *Profiles) stored(ctx context.Context, name string) (*proto.Profile, uint64, error) {
	e, err := l.store.Profiles.Get(ctx, profileKey(name))
	if store.IsNotFound(err) {
		return nil, 0, fmt.Errorf("sandbox profile %q: %w", name, proto.ErrNotFound)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("read sandbox profile %s: %w", name, err)
	}
	p, err := decodeProfile(e)
	return p, e.Revision(), err
}

// List returns all profiles by name.
func (l *Profiles) List(context.Context) ([]proto.Profile, error) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	list := make([]proto.Profile, 0, len(l.byName))
	for _, p := range l.byName {
		if p.profile != nil {
			list = append(list, clone(p.profile))
		}
	}
	slices.SortFunc(list, func(a, b proto.Profile) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// Create stores a new profile. Its error is [proto.ErrExists] where there is one of that name.
func (l *Profiles) Create(ctx context.Context, p proto.Profile) error {
	err := l.write(&p, func(key string, body []byte) (uint64, error) { return l.store.Profiles.Create(ctx, key, body) })
	if errors.Is(err, jetstream.ErrKeyExists) {
		return fmt.Errorf("sandbox profile %q: %w", p.Name, proto.ErrExists)
	}
	return err
}

// Replace stores a profile in place of the one of the same name. Its error is [proto.ErrNotFound] where there is none.
func (l *Profiles) Replace(ctx context.Context, p proto.Profile) error {
	return l.change(p.Name, func() error {
		// Not decoded: replacing is how one that cannot be read is mended.
		e, err := l.store.Profiles.Get(ctx, profileKey(p.Name))
		if store.IsNotFound(err) {
			return fmt.Errorf("sandbox profile %q: %w", p.Name, proto.ErrNotFound)
		}
		if err != nil {
			return fmt.Errorf("read sandbox profile %s: %w", p.Name, err)
		}
		return l.write(&p, func(key string, body []byte) (uint64, error) {
			return l.store.Profiles.Update(ctx, key, body, e.Revision())
		})
	})
}

// write stores a profile with put, which is one of the bucket's ways of writing.
func (l *Profiles) write(p *proto.Profile, put func(key string, body []byte) (uint64, error)) error {
	body, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("encode sandbox profile %s: %w", p.Name, err)
	}
	key := profileKey(p.Name)
	revision, err := put(key, body)
	if err != nil {
		return fmt.Errorf("store sandbox profile %s: %w", p.Name, err)
	}
	kept := clone(p)
	l.keep(key, storedProfile{&kept, revision}) // known here at once; the other gateways learn of it by their watch
	return nil
}

// Remove removes a profile that no unrevoked key is bound to, and gives it as it was. Its error is [proto.ErrNotFound] where there is
// none, and a [*proto.BoundError] where there are such keys.
func (l *Profiles) Remove(ctx context.Context, name string) (removed proto.Profile, err error) {
	err = l.change(name, func() error {
		p, revision, err := l.stored(ctx, name)
		if err != nil {
			return err
		}
		removed = *p
		// A key that is bound after this was read touches the profile, see hold, and the deletion fails.
		bound, err := boundKeys(ctx, l.store, name, l.watched.log)
		if err != nil {
			return err
		}
		if len(bound) > 0 {
			return &proto.BoundError{Profile: name, Keys: bound}
		}
		if err := l.store.Profiles.Delete(ctx, profileKey(name), jetstream.LastRevision(revision)); err != nil {
			return fmt.Errorf("remove sandbox profile %s: %w", name, err)
		}
		l.forget(profileKey(name), revision)
		return nil
	})
	return removed, err
}

// forget makes a profile that was removed at revision unknown here, until the watch tells of its removal.
func (l *Profiles) forget(key string, revision uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byName[key].revision <= revision {
		l.byName[key] = storedProfile{nil, revision}
	}
}

// change repeats f, which changes a profile by compare-and-set, until nobody else changes it meanwhile.
func (l *Profiles) change(name string, f func() error) error {
	for range changeTries {
		if err := f(); !store.IsConflict(err) {
			return err
		}
	}
	return fmt.Errorf("change sandbox profile %s: %w", name, proto.ErrConflict)
}

// hold changes the revision of a profile and nothing else, so that a removal that has not seen the key which was just bound to it
// fails. Its error is [proto.ErrNotFound] where the profile is gone.
func hold(ctx context.Context, st *store.Store, name string) error {
	for range changeTries {
		e, err := st.Profiles.Get(ctx, profileKey(name))
		if err == nil {
			_, err = st.Profiles.Update(ctx, profileKey(name), e.Value(), e.Revision())
		}
		switch {
		case err == nil:
			return nil
		case store.IsNotFound(err):
			return fmt.Errorf("sandbox profile %q: %w", name, proto.ErrNotFound)
		case !store.IsConflict(err):
			return fmt.Errorf("hold sandbox profile %s: %w", name, err)
		}
	}
	return fmt.Errorf("hold sandbox profile %s: %w", name, proto.ErrConflict)
}
