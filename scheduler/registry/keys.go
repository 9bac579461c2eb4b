// Package registry keeps what is small and looked up often: API keys, sandbox profiles and webhook settings, in buckets that every gateway
// watches, and idempotency keys, which are always read and written by compare-and-set.
package registry

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// hashSecretKey holds the secret that API keys are hashed with: whoever reads a list of hashes without it cannot test guesses.
const (
	hashSecretKey   = "hash_secret"
	keyPrefix       = "key."
	bootstrapID     = "key_bootstrap"
	changeTries     = 20
	hashSecretBytes = 32
)

// storedKey is a key with its hash, as it lies in the bucket.
type storedKey struct {
	proto.Key
	Hash     string `json:"hash"`
	revision uint64
}

// Keys is the list of API keys, kept current by a watch. Run must be running for changes to be seen.
type Keys struct {
	store   *store.Store
	region  string
	secret  []byte
	watched watched

	mu     sync.RWMutex
	byHash map[string]*storedKey
	byID   map[string]*storedKey
}

// OpenKeys reads the keys there are. region is part of keys that are made here.
func OpenKeys(ctx context.Context, st *store.Store, region string, log *slog.Logger) (*Keys, error) {
	k := &Keys{store: st, region: region, byHash: map[string]*storedKey{}, byID: map[string]*storedKey{}}
	secret := make([]byte, hashSecretBytes)
	_, _ = rand.Read(secret) // crypto/rand.Read never returns an error since Go 1.24
	err := patiently(ctx, func(ctx context.Context) error {
		_, err := st.Keys.Create(ctx, hashSecretKey, secret)
		if errors.Is(err, jetstream.ErrKeyExists) {
			var entry jetstream.KeyValueEntry
			if entry, err = st.Keys.Get(ctx, hashSecretKey); err == nil {
				secret = entry.Value()
			}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open the hash secret of API keys: %w", err)
	}
	k.secret = secret
	k.watched = watchedKeys(st, log, k.take)
	return k, k.watched.read(ctx)
}

func watchedKeys(st *store.Store, log *slog.Logger, take func(jetstream.KeyValueEntry)) watched {
	return watched{store: st, bucket: st.Keys, pattern: keyPrefix + "*", what: "API keys", log: log, take: take}
}

// Run keeps the list current until ctx ends.
func (k *Keys) Run(ctx context.Context) error { return k.watched.run(ctx) }

// take takes in one stored key.
func (k *Keys) take(e jetstream.KeyValueEntry) {
	s, err := decodeKey(e)
	if err != nil {
		k.watched.log.Error("a malformed API key was passed over", "key", e.Key(), "error", err)
		return
	}
	k.keep(s)
}

func decodeKey(e jetstream.KeyValueEntry) (*storedKey, error) {
	s := &storedKey{revision: e.Revision()}
	if err := json.Unmarshal(e.Value(), s); err != nil {
		return nil, fmt.Errorf("decode API key %s: %w", e.Key(), err)
	}
	if keyPrefix+s.ID != e.Key() {
		return nil, fmt.Errorf("decode API key %s: it says that it is %q", e.Key(), s.ID)
	}
	return s, nil
}

// boundKeys gives the ids of the unrevoked keys that are bound to a sandbox profile, as they are in the bucket.
func boundKeys(ctx context.Context, st *store.Store, profile string, log *slog.Logger) ([]string, error) {
	var bound []string
	keys := watchedKeys(st, log, func(e jetstream.KeyValueEntry) {
		if s, err := decodeKey(e); err == nil && s.RevokedAt == nil && s.Sandbox == profile && !slices.Contains(bound, s.ID) {
			bound = append(bound, s.ID)
		}
	})
	err := keys.read(ctx)
	return bound, err
}

// keep takes s in unless something newer is known: the watch may tell late of what was changed here.
func (k *Keys) keep(s *storedKey) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if old := k.byID[s.ID]; old != nil {
		if old.revision >= s.revision {
			return
		}
		delete(k.byHash, old.Hash)
	}
	k.byID[s.ID] = s
	if s.RevokedAt == nil {
		k.byHash[s.Hash] = s
	}
}

func (k *Keys) hash(secret string) string {
	mac := hmac.New(sha256.New, k.secret)
	mac.Write([]byte(secret))
	return hex.EncodeToString(mac.Sum(nil))
}

// Derived gives a secret for another purpose, the same in all processes.
func (k *Keys) Derived(purpose string) *[32]byte {
	mac := hmac.New(sha256.New, k.secret)
	mac.Write([]byte("derived\x00" + purpose)) // no API key has a NUL
	return (*[32]byte)(mac.Sum(nil))
}

// Authenticate finds the key that secret is. The look-up is by a keyed hash, so that its time tells nothing of any key.
func (k *Keys) Authenticate(secret string) (*proto.Key, bool) {
	if proto.CheckKeyForm(secret) != nil {
		return nil, false
	}
	hash := k.hash(secret)
	k.mu.RLock()
	found := k.byHash[hash]
	k.mu.RUnlock()
	if found == nil || subtle.ConstantTimeCompare([]byte(found.Hash), []byte(hash)) != 1 {
		return nil, false
	}
	key := found.Key
	return &key, true
}

// Key gives the key of an id, also where it is revoked.
func (k *Keys) Key(id string) (*proto.Key, bool) {
	k.mu.RLock()
	found := k.byID[id]
	k.mu.RUnlock()
	if found == nil {
		return nil, false
	}
	key := found.Key
	return &key, true
}

// Create makes a key and returns it with its secret, which is kept nowhere. Its error is [proto.ErrNotFound] where there is no sandbox
// profile of the name that it is to be bound to.
func (k *Keys) Create(ctx context.Context, key proto.Key) (proto.Key, string, error) {
	if key.Sandbox != "" {
		if err := hold(ctx, k.store, key.Sandbox); err != nil {
			return proto.Key{}, "", err
		}
	}
	var id [9]byte
	_, _ = rand.Read(id[:]) // crypto/rand.Read never returns an error since Go 1.24
	key.ID = "key_" + hex.EncodeToString(id[:])
	key.CreatedAt, key.RevokedAt = time.Now().UTC(), nil
	secret := proto.NewKeySecret(k.region)
	if err := k.put(ctx, &key, secret, k.store.Keys.Put); err != nil {
		return proto.Key{}, "", err
	}
	if key.Sandbox == "" {
		return key, secret, nil
	}
	// Only now does whoever removes the profile see that it is bound, so it must still be there.
	if err := hold(ctx, k.store, key.Sandbox); err != nil {
		_, revokeErr := k.Revoke(ctx, key.ID)
		return proto.Key{}, "", errors.Join(err, revokeErr)
	}
	return key, secret, nil
}

// put stores a key with write, which is one of the bucket's ways of writing.
func (k *Keys) put(
	ctx context.Context, key *proto.Key, secret string, write func(context.Context, string, []byte) (uint64, error),
) error {
	key.Hint = proto.KeyHint(secret)
	return k.putStored(ctx, &storedKey{Key: *key, Hash: k.hash(secret)}, write)
}

func (k *Keys) putStored(ctx context.Context, s *storedKey, write func(context.Context, string, []byte) (uint64, error)) error {
	body, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode API key %s: %w", s.ID, err)
	}
	if s.revision, err = write(ctx, keyPrefix+s.ID, body); err != nil {
		return fmt.Errorf("store API key %s: %w", s.ID, err)
	}
	k.keep(s) // known here at once; the other gateways learn of it by their watch
	return nil
}

// ErrRevoked says that a secret is that of a key which was revoked, and stays so.
var ErrRevoked = errors.New("this API key was revoked")

// Bootstrap makes secret the key with all rights for the organisation "default", in place of an earlier one. Its error is [ErrRevoked] where
// it is that of a revoked key.
func (k *Keys) Bootstrap(ctx context.Context, secret string) error {
	hash, have := k.hash(secret), k.bootstrapped()
	if k.revoked(hash) {
		return ErrRevoked
	}
	switch {
	case have == nil:
	case have.RevokedAt != nil: // is remembered under an id of its own, the same for all gateways that start now
		old := *have
		old.ID = "key_" + have.Hash[:18]
		if err := k.putStored(ctx, &old, k.store.Keys.Put); err != nil {
			return err
		}
	case have.Hash == hash:
		return nil
	}
	return k.put(ctx, bootstrapKey(), secret, k.store.Keys.Put)
}

func (k *Keys) revoked(hash string) bool {
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, s := range k.byID {
		if s.Hash == hash && s.RevokedAt != nil {
			return true
		}
	}
	return false
}

// BootstrapOnce makes that key if there was none yet, and reports whether it did. Its secret is asked for only then, and has to be
// where it can be found again when keep returns it: the key stays, whatever happens next.
func (k *Keys) BootstrapOnce(ctx context.Context, keep func() (string, error)) (made bool, err error) {
	if k.bootstrapped() != nil {
		return false, nil
	}
	secret, err := keep()
	if err != nil {
		return false, err
	}
	err = k.put(ctx, bootstrapKey(), secret, func(ctx context.Context, name string, body []byte) (uint64, error) {
		return k.store.Keys.Create(ctx, name, body)
	})
	if !errors.Is(err, jetstream.ErrKeyExists) {
		return err == nil, err
	}
	// Another gateway that starts at the same moment made it, perhaps of the same secret.
	e, err := k.store.Keys.Get(ctx, keyPrefix+bootstrapID)
	if err != nil {
		return false, fmt.Errorf("read API key %s: %w", bootstrapID, err)
	}
	k.take(e)
	have := k.bootstrapped()
	return have != nil && have.Hash == k.hash(secret), nil
}

func (k *Keys) bootstrapped() *storedKey {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.byID[bootstrapID]
}

func bootstrapKey() *proto.Key {
	return &proto.Key{
		ID: bootstrapID, Name: "bootstrap", Org: "default", Plan: "enterprise", Rights: proto.RightsAll, CreatedAt: time.Now().UTC(),
	}
}

// List returns all keys, revoked ones included, oldest first.
func (k *Keys) List(context.Context) ([]proto.Key, error) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	out := make([]proto.Key, 0, len(k.byID))
	for _, s := range k.byID {
		out = append(out, s.Key)
	}
	slices.SortFunc(out, func(a, b proto.Key) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return out, nil
}

// Revoke ends a key. It is refused here when Revoke returns, and by every other gateway as soon as its watch tells it, well within
// a second. Revoking a revoked key changes nothing. The error is [proto.ErrNotFound] where there is no such key.
func (k *Keys) Revoke(ctx context.Context, id string) (proto.Key, error) {
	for range changeTries {
		k.mu.RLock()
		known := k.byID[id]
		k.mu.RUnlock()
		if known == nil {
			return proto.Key{}, fmt.Errorf("API key %q: %w", id, proto.ErrNotFound)
		}
		e, err := k.store.Keys.Get(ctx, keyPrefix+id)
		if err != nil {
			return proto.Key{}, fmt.Errorf("read API key %s: %w", id, err)
		}
		s, err := decodeKey(e)
		if err != nil {
			return proto.Key{}, err
		}
		if s.RevokedAt != nil {
			return s.Key, nil
		}
		now := time.Now().UTC()
		s.RevokedAt = &now
		err = k.putStored(ctx, s, func(ctx context.Context, name string, body []byte) (uint64, error) {
			return k.store.Keys.Update(ctx, name, body, e.Revision())
		})
		if store.IsConflict(err) {
			continue
		}
		if err != nil {
			return proto.Key{}, fmt.Errorf("revoke: %w", err)
		}
		return s.Key, nil
	}
	return proto.Key{}, fmt.Errorf("revoke API key %s: %w", id, proto.ErrConflict)
}
