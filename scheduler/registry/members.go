package registry

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Members is the list of the people who may sign in. Run must be running for changes to be seen.
type Members struct {
	*store.Collection[proto.Member]
}

// OpenMembers reads all members.
func OpenMembers(ctx context.Context, st *store.Store, log *slog.Logger) (*Members, error) {
	all, err := store.OpenCollection(ctx, store.CollectionConfig[proto.Member]{
		Store: st, Bucket: st.Members, Keys: "*.*", ByID: true, Name: "members", Log: log, Check: checkMember,
		Kind:          proto.ChangedMembers,
		Order:         func(m *proto.Member) string { return store.OldestFirst(m.CreatedAt) },
		DropMalformed: true, // or a member would keep the rights of an earlier revision
	})
	return &Members{all}, err
}

// checkMember returns [proto.ErrExists] if the organisation of a new member has that person, and a
// [*proto.QuotaError] if it has too many.
func checkMember(m *proto.Member, others []*proto.Member) error {
	for _, other := range others {
		if m.Email != "" && other.Email == m.Email || m.Subject != "" && other.Subject == m.Subject {
			return fmt.Errorf("member %s of %s: %w", m.Name(), m.Org, proto.ErrExists)
		}
	}
	if len(others) >= proto.MaxMembers {
		return &proto.QuotaError{What: "members", Limit: proto.MaxMembers}
	}
	return nil
}

// Member returns the cached member with that id.
func (l *Members) Member(id string) (proto.Member, bool) {
	m := l.Collection.Get(l.KeyOf(id))
	if m == nil {
		return proto.Member{}, false
	}
	return *m, true
}

// Get reads a member from the bucket. It returns [proto.ErrNotFound] if there is none.
func (l *Members) Get(ctx context.Context, id string) (proto.Member, error) {
	key, err := l.FindKey(ctx, id)
	if err != nil {
		return proto.Member{}, err
	}
	m, _, err := l.Read(ctx, key)
	if err != nil {
		return proto.Member{}, err
	}
	return *m, nil
}

// Change stores the result of change for a member, see [store.Collection.Change].
func (l *Members) Change(ctx context.Context, id string, change func(*proto.Member) error) (proto.Member, error) {
	key, err := l.FindKey(ctx, id)
	if err != nil {
		return proto.Member{}, err
	}
	return l.Collection.Change(ctx, key, change)
}

// Create stores a new member with the organisation, the address or subject, and the role of m, and
// returns it. It returns [proto.ErrExists] if the organisation has that person, and a
// [*proto.QuotaError] if it has too many.
func (l *Members) Create(ctx context.Context, m proto.Member) (proto.Member, error) {
	var id [9]byte
	_, _ = rand.Read(id[:]) // crypto/rand.Read never returns an error since Go 1.24
	m.ID, m.CreatedAt = proto.MemberPrefix+hex.EncodeToString(id[:]), time.Now().UTC()
	return m, l.Collection.Create(ctx, m.Org+"."+m.ID, &m)
}

// Remove removes a member for which check returns nil, and returns it. It returns
// [proto.ErrNotFound] if there is none.
func (l *Members) Remove(ctx context.Context, id string, check func(proto.Member) error) (proto.Member, error) {
	key, err := l.FindKey(ctx, id)
	if err != nil {
		return proto.Member{}, err
	}
	return removed(l.Collection.Remove(ctx, key, func(m *proto.Member) error { return check(*m) }))
}

// removed returns the value that a removal has returned.
func removed[T any](v *T, err error) (T, error) {
	if err != nil {
		return *new(T), err
	}
	return *v, nil
}
