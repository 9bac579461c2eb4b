package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Sessions is the list of the logins of browsers. Run must be running for changes to be seen.
type Sessions struct {
	secret *[32]byte
	all    *store.Collection[proto.Session]
}

// OpenSessions reads all sessions. secret is the same in all processes: it proves that a token is
// genuine before the bucket is read.
func OpenSessions(ctx context.Context, st *store.Store, secret *[32]byte, log *slog.Logger) (*Sessions, error) {
	all, err := store.OpenCollection(ctx, store.CollectionConfig[proto.Session]{
		Store: st, Bucket: st.Sessions, Keys: "*.*", ByID: true, Name: "sessions", Log: log, DropMalformed: true,
		Order: func(s *proto.Session) string { return store.OldestFirst(s.CreatedAt) },
	})
	return &Sessions{secret, all}, err
}

// Run applies changes by other gateways until ctx is done.
func (l *Sessions) Run(ctx context.Context) error { return l.all.Run(ctx) }

// Session returns the session with a token, even if it has expired. It returns [proto.ErrNotFound]
// if there is none. A session just created by another gateway is read from the bucket.
func (l *Sessions) Session(ctx context.Context, token string) (proto.Session, error) {
	if !proto.CheckSessionToken(token, l.secret) {
		return proto.Session{}, fmt.Errorf("session: %w", proto.ErrNotFound)
	}
	key, err := l.all.FindKey(ctx, proto.SessionID(token))
	if err != nil {
		return proto.Session{}, err
	}
	return l.all.Find(ctx, key)
}

// Page returns a page of the sessions that have not expired, see [store.Collection.Page].
func (l *Sessions) Page(
	org, after string, limit int, keep func(*proto.Session) bool,
) (page []proto.Session, next string) {
	now := time.Now()
	return l.all.Page(org, after, limit, func(s *proto.Session) bool {
		return !s.Expired(now) && (keep == nil || keep(s))
	})
}

// Create stores a new session and returns it with its token, which is not stored. If its member or
// API key has [proto.MaxSessions], the least recently used ones end.
func (l *Sessions) Create(ctx context.Context, s proto.Session) (proto.Session, string, error) {
	token := proto.NewSessionToken(l.secret)
	s.ID, s.CreatedAt = proto.SessionID(token), time.Now().UTC()
	s.UsedAt = s.CreatedAt
	others, _ := l.Page(s.Org, "", -1, func(other *proto.Session) bool { return other.KeyID == s.KeyID })
	slices.SortFunc(others, func(a, b proto.Session) int { return b.UsedAt.Compare(a.UsedAt) })
	for _, other := range others[min(len(others), proto.MaxSessions-1):] {
		if err := l.End(ctx, other.ID); err != nil && !errors.Is(err, proto.ErrNotFound) {
			return s, "", err
		}
	}
	return s, token, l.all.Create(ctx, s.Org+"."+s.ID, &s)
}

// Use stores that a session is used. It does nothing if the session has ended, or if another
// request has just done so.
func (l *Sessions) Use(ctx context.Context, id string) error {
	key, err := l.all.FindKey(ctx, id)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = l.all.Update(ctx, key, func(old *proto.Session) (*proto.Session, error) {
		now := time.Now().UTC()
		if old == nil || !old.Stale(now) {
			return nil, nil
		}
		used := *old
		used.UsedAt = now
		return &used, nil
	})
	return err
}

// End ends a session. This gateway refuses it when End returns, and every other one when its watch
// delivers the change, well within a second. End returns [proto.ErrNotFound] if there is none.
func (l *Sessions) End(ctx context.Context, id string) error {
	key, err := l.all.FindKey(ctx, id)
	if err == nil {
		_, err = l.all.Remove(ctx, key, nil)
	}
	return err
}
