package registry

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/scheduler/store"
)

// keyUseEvery is how often the last uses of API keys are stored. Of a use, no more is lost if the
// process is killed.
const keyUseEvery = time.Minute

// KeyUses remembers when each API key was last used. Run must be running to store uses, and to see
// those at other gateways.
type KeyUses struct {
	cache *store.Collection[keyUse]
	log   *slog.Logger

	mu   sync.Mutex
	here map[string]time.Time // by the name of the entry, since the last time they were stored
}

// keyUse is the last use of a key.
type keyUse struct {
	At time.Time `json:"at"`
}

// OpenKeyUses reads the last uses of all keys.
func OpenKeyUses(ctx context.Context, st *store.Store, log *slog.Logger) (*KeyUses, error) {
	cache, err := store.OpenCollection(ctx, store.CollectionConfig[keyUse]{
		Store: st, Bucket: st.KeyUses, Keys: "*.*", Name: "last uses of API keys", Log: log,
	})
	return &KeyUses{cache: cache, log: log, here: map[string]time.Time{}}, err
}

// Run stores uses, and sees those at other gateways, until ctx is done. It always returns nil.
func (u *KeyUses) Run(ctx context.Context) error {
	var watch sync.WaitGroup
	watch.Go(func() { _ = u.cache.Run(ctx) })
	defer watch.Wait()
	tick := time.NewTicker(keyUseEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			u.store(last)
			return nil
		case <-tick.C:
			u.store(ctx)
		}
	}
}

// Used notes that a key of an organisation was used.
func (u *KeyUses) Used(org, key string, at time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.here[org+"."+key] = at
}

// LastUsed returns when a key was last used. ok is false if no use is known.
func (u *KeyUses) LastUsed(org, key string) (at time.Time, ok bool) {
	name := org + "." + key
	u.mu.Lock()
	at, ok = u.here[name]
	u.mu.Unlock()
	if stored := u.cache.Get(name); stored != nil && stored.At.After(at) {
		return stored.At, true
	}
	return at, ok
}

// store stores the uses since it was called last.
func (u *KeyUses) store(ctx context.Context) {
	u.mu.Lock()
	uses := u.here
	u.here = map[string]time.Time{}
	u.mu.Unlock()
	var failed error
	for name, at := range uses {
		if stored := u.cache.Get(name); stored != nil && !at.After(stored.At) {
			continue
		}
		if err := u.cache.Put(ctx, name, &keyUse{at.UTC()}); err != nil {
			failed = fmt.Errorf("store the last use of API key %s: %w", name, err)
			u.mu.Lock()
			if u.here[name].Before(at) {
				u.here[name] = at
			}
			u.mu.Unlock()
		}
	}
	if failed != nil {
		u.log.Warn("last uses of API keys not stored, will retry", "error", failed)
	}
}
