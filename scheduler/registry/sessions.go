package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Sessions is the list of the logins of browsers. Run must be running for changes to be seen.
type Sessions struct {
	secret *[32]byte
	cache  *store.Cache[proto.Session]
}

// OpenSessions reads all sessions. secret is the same in all processes: tokens prove with it that
// they are worth a look into the bucket.
func OpenSessions(ctx context.Context, st *store.Store, secret *[32]byte, log *slog.Logger) (*Sessions, error) {
	cache, err := store.OpenCache(ctx, store.CacheConfig[proto.Session]{
		Store: st, Bucket: st.Sessions, Keys: "*", Name: "sessions", Decode: store.DecodeJSON[proto.Session]("session"), Log: log, DropMalformed: true,
	})
	return &Sessions{secret, cache}, err
}

// Run applies changes by other gateways until ctx is done.
func (l *Sessions) Run(ctx context.Context) error { return l.cache.Run(ctx) }

// Session returns the session with a token, also if it has expired. It returns [proto.ErrNotFound] if
// there is none. A session that another gateway has just created is read from the bucket.
func (l *Sessions) Session(ctx context.Context, token string) (proto.Session, error) {
	if !proto.CheckSessionToken(token, l.secret) {
		return proto.Session{}, fmt.Errorf("session: %w", proto.ErrNotFound)
	}
	id := proto.SessionID(token)
	s := l.cache.Get(id)
	if s == nil {
		var err error
		if s, _, err = l.cache.Read(ctx, id); err != nil {
			return proto.Session{}, err
		}
	}
	return *s, nil
}

// List returns all sessions that have not expired, the oldest first.
func (l *Sessions) List() []proto.Session {
	list, now := []proto.Session{}, time.Now()
	for _, s := range l.cache.All() {
		if !s.Expired(now) {
			list = append(list, *s)
		}
	}
	slices.SortFunc(list, func(a, b proto.Session) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return list
}

// Create stores a new session and returns it with its token, which is not stored. If its member or
// API key has [proto.MaxSessions], the ones that were not used for the longest time end.
func (l *Sessions) Create(ctx context.Context, s proto.Session) (proto.Session, string, error) {
	token := proto.NewSessionToken(l.secret)
	s.ID, s.CreatedAt = proto.SessionID(token), time.Now().UTC()
	s.UsedAt = s.CreatedAt
	others := slices.DeleteFunc(l.List(), func(other proto.Session) bool { return other.KeyID != s.KeyID })
	slices.SortFunc(others, func(a, b proto.Session) int { return b.UsedAt.Compare(a.UsedAt) })
	for _, other := range others[min(len(others), proto.MaxSessions-1):] {
		if err := l.End(ctx, other.ID); err != nil && !errors.Is(err, proto.ErrNotFound) {
			return s, "", err
		}
	}
	return s, token, l.cache.Create(ctx, s.ID, &s)
}

// Use stores that a session is used. It does nothing if the session has ended, or if another request
// has just stored the same.
func (l *Sessions) Use(ctx context.Context, id string) error {
	_, err := l.cache.Update(ctx, id, func(old *proto.Session) (*proto.Session, error) {
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
	_, err := l.cache.Remove(ctx, id, nil, jetstream.PurgeTTL(store.WebhookMarkerTTL))
	return err
}
