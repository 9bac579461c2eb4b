package registry

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Members is the list of the people who may sign in. Run must be running for changes to be seen.
type Members struct{ cache *store.Cache[proto.Member] }

// OpenMembers reads all members.
func OpenMembers(ctx context.Context, st *store.Store, log *slog.Logger) (*Members, error) {
	cache, err := store.OpenCache(ctx, store.CacheConfig[proto.Member]{
		Store: st, Bucket: st.Members, Keys: "*", Name: "members", Decode: store.DecodeJSON[proto.Member]("member"), Log: log,
		DropMalformed: true, // nobody is to sign in with rights of before
	})
	return &Members{cache}, err
}

// Run applies changes by other gateways until ctx is done.
func (l *Members) Run(ctx context.Context) error { return l.cache.Run(ctx) }

// Member returns the cached member with that id.
func (l *Members) Member(id string) (proto.Member, bool) {
	m := l.cache.Get(id)
	if m == nil {
		return proto.Member{}, false
	}
	return *m, true
}

// Get reads a member from the bucket. It returns [proto.ErrNotFound] if there is none.
func (l *Members) Get(ctx context.Context, id string) (proto.Member, error) {
	m, _, err := l.cache.Read(ctx, id)
	if err != nil {
		return proto.Member{}, err
	}
	return *m, nil
}

// List returns all members, the oldest first.
func (l *Members) List() []proto.Member {
	list := []proto.Member{}
	for _, m := range l.cache.All() {
		list = append(list, *m)
	}
	slices.SortFunc(list, func(a, b proto.Member) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return list
}

// Create stores a new member with the organisation, the address or subject, and the role of m, and
// returns it. It returns [proto.ErrExists] if the organisation has that person, and a
// [*proto.QuotaError] if it has too many.
func (l *Members) Create(ctx context.Context, m proto.Member) (proto.Member, error) {
	var id [9]byte
	_, _ = rand.Read(id[:]) // crypto/rand.Read never returns an error since Go 1.24
	m.ID, m.CreatedAt = proto.MemberPrefix+hex.EncodeToString(id[:]), time.Now().UTC()
	_, err := l.cache.UpdateWithAll(ctx, m.ID, func(all map[string]*proto.Member) (*proto.Member, error) {
		n := 0
		for _, other := range all {
			if other.Org != m.Org {
				continue
			}
			if m.Email != "" && other.Email == m.Email || m.Subject != "" && other.Subject == m.Subject {
				return nil, fmt.Errorf("member %s of %s: %w", m.Name(), m.Org, proto.ErrExists)
			}
			n++
		}
		if n >= proto.MaxMembers {
			return nil, &proto.QuotaError{What: "members", Limit: proto.MaxMembers}
		}
		return &m, nil
	})
	return m, err
}

// Change stores what change makes of a member, and returns that. change may be called again. Its
// error is returned unchanged. Change returns [proto.ErrNotFound] if there is no such member.
func (l *Members) Change(ctx context.Context, id string, change func(*proto.Member) error) (proto.Member, error) {
	stored, err := l.cache.Update(ctx, id, func(old *proto.Member) (*proto.Member, error) {
		if old == nil {
			return nil, fmt.Errorf("member %q: %w", id, proto.ErrNotFound)
		}
		changed := *old
		return &changed, change(&changed)
	})
	if err != nil {
		return proto.Member{}, err
	}
	return *stored, nil
}

// Remove removes a member, for which check must return nil, and returns it. It returns
// [proto.ErrNotFound] if there is none.
func (l *Members) Remove(ctx context.Context, id string, check func(proto.Member) error) (removed proto.Member, err error) {
	_, err = l.cache.Remove(ctx, id, func(e jetstream.KeyValueEntry) error {
		m, err := l.cache.Decode(e)
		if err != nil {
			return err
		}
		removed = *m
		return check(removed)
	}, jetstream.PurgeTTL(store.WebhookMarkerTTL))
	return removed, err
}
