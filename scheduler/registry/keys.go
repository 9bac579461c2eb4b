// Package registry stores small data that is looked up often. API keys, sandbox profiles and
// webhook settings are in buckets that every gateway watches. Idempotency keys are always read and
// written by compare-and-set.
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
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/keyring"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// hashSecretKey holds the secret for hashing API keys. Without it, guessed keys cannot be
	// tested against the hashes.
	hashSecretKey   = "hash_secret"
	hashSecretBytes = 32
	keyPrefix       = "key."
	keyPattern      = keyPrefix + "*.*"
	bootstrapID     = "key_bootstrap"
	bootstrapName   = keyPrefix + proto.DefaultOrg + "." + bootstrapID
)

// storedKey is a key with its hash, as stored in the bucket.
type storedKey struct {
	proto.Key
	Hash string `json:"hash"`
	// PreviousHash is the hash of the secret before the last rotation, which works until OverlapUntil.
	PreviousHash string `json:"previous_hash,omitempty"`
	// Rights is what earlier versions stored instead of the scopes: "execute" or "all".
	Rights string `json:"rights,omitempty"`
}

// withScopes converts the rights of an earlier version's key to scopes.
func (s *storedKey) withScopes() *storedKey {
	switch {
	case s.Scopes != nil:
	case s.Rights == "execute":
		s.Scopes = proto.UserScopes()
	case s.Rights == "all":
		s.Scopes, s.Global = proto.Scopes(), true
	}
	s.Rights = ""
	return s
}

// Keys is the list of API keys. Run must be running for changes to be seen.
type Keys struct {
	store  *store.Store
	region string
	secret []byte
	cache  *store.Collection[storedKey]
	byHash map[string]*storedKey // of keys that are not revoked; guarded by the lock of cache
}

// OpenKeys reads all keys. region is part of the secrets of keys created here.
func OpenKeys(
	ctx context.Context, st *store.Store, ring *keyring.Keyring, region string, log *slog.Logger,
) (*Keys, error) {
	k := &Keys{store: st, region: region, byHash: map[string]*storedKey{}}
	var err error
	if k.secret, err = hashSecret(ctx, st, ring, log); err != nil {
		return nil, fmt.Errorf("open the hash secret of API keys: %w", err)
	}
	k.cache, err = store.OpenCollection(ctx, store.CollectionConfig[storedKey]{
		Store: st, Bucket: st.Keys, Keys: keyPattern, Name: "API keys", Decode: decodeKey, OnChange: k.index, Log: log,
		Kind: proto.ChangedKeys, OneScope: true, ByID: true,
		Org:   func(s *storedKey) string { return s.Org },
		Order: func(s *storedKey) string { return store.OldestFirst(s.CreatedAt) },
	})
	return k, err
}

// hashSecret returns the hash secret, and creates it if there is none. It waits for the leader of
// the bucket's stream until ctx is done. A secret that an earlier version stored is encrypted.
func hashSecret(ctx context.Context, st *store.Store, ring *keyring.Keyring, log *slog.Logger) ([]byte, error) {
	secret := make([]byte, hashSecretBytes)
	_, _ = rand.Read(secret) // crypto/rand.Read never returns an error since Go 1.24
	created, err := encodeHashSecret(ctx, ring, secret)
	if err != nil {
		return nil, err
	}
	stored, revision := created, uint64(0)
	waiting := func(err error, _ time.Duration) { log.Warn("waiting for the hash secret of API keys", "error", err) }
	err = store.Retry{OnRetry: waiting}.Do(ctx, func(ctx context.Context) error {
		_, err := st.Keys.Create(ctx, hashSecretKey, created)
		if errors.Is(err, jetstream.ErrKeyExists) {
			var entry jetstream.KeyValueEntry
			if entry, err = st.Keys.Get(ctx, hashSecretKey); err == nil {
				stored, revision = entry.Value(), entry.Revision()
			}
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(stored) != hashSecretBytes { // encrypted
		return ring.Open(ctx, hashSecretKey, stored)
	}
	if ring.Enabled() {
		body, err := encodeHashSecret(ctx, ring, stored)
		if err != nil {
			return nil, err
		}
		if _, err := st.Keys.Update(ctx, hashSecretKey, body, revision); err != nil && !store.IsConflict(err) {
			return nil, err // else another gateway has encrypted it
		}
	}
	return stored, nil
}

// encodeHashSecret returns the hash secret as stored. It is longer than hashSecretBytes if it is
// encrypted.
func encodeHashSecret(ctx context.Context, ring *keyring.Keyring, secret []byte) ([]byte, error) {
	if !ring.Enabled() {
		return secret, nil
	}
	return ring.Seal(ctx, hashSecretKey, secret)
}

// Run applies changes by other gateways until ctx is done.
func (k *Keys) Run(ctx context.Context) error { return k.cache.Run(ctx) }

// keyName returns the key under which an API key is stored.
func keyName(key *proto.Key) string { return keyPrefix + key.Org + "." + key.ID }

func decodeKey(e jetstream.KeyValueEntry) (*storedKey, error) {
	s := &storedKey{}
	if err := json.Unmarshal(e.Value(), s); err != nil {
		return nil, fmt.Errorf("decode API key %s: %w", e.Key(), err)
	}
	if keyName(&s.Key) != e.Key() {
		return nil, fmt.Errorf("decode API key %s: its id is %q, of %q", e.Key(), s.ID, s.Org)
	}
	return s.withScopes(), nil
}

// keysWith returns the ids of the unrevoked keys in the bucket for which has returns true.
func keysWith(ctx context.Context, st *store.Store, has func(*storedKey) bool) (ids []string, err error) {
	keys, _, err := store.ReadValues(ctx, st.Keys, keyPattern, decodeKey)
	for _, name := range slices.Sorted(maps.Keys(keys)) {
		if k := keys[name]; k.RevokedAt == nil && has(k) {
			ids = append(ids, k.ID)
		}
	}
	return ids, err
}

// index updates byHash when the cache changes.
func (k *Keys) index(_ string, old, current *storedKey) {
	if old != nil {
		for _, hash := range old.hashes() {
			if k.byHash[hash] == old {
				delete(k.byHash, hash)
			}
		}
	}
	if current != nil && current.RevokedAt == nil {
		for _, hash := range current.hashes() {
			k.byHash[hash] = current
		}
	}
}

// hashes returns the hashes of the secrets of a key.
func (s *storedKey) hashes() []string {
	if s.PreviousHash == "" {
		return []string{s.Hash}
	}
	return []string{s.Hash, s.PreviousHash}
}

// accepts reports whether a secret with this hash works at a time. The comparison takes the same time
// for every hash.
func (s *storedKey) accepts(hash string, now time.Time) bool {
	current := subtle.ConstantTimeCompare([]byte(s.Hash), []byte(hash)) == 1
	previous := subtle.ConstantTimeCompare([]byte(s.PreviousHash), []byte(hash)) == 1
	return current || previous && s.OverlapUntil != nil && now.Before(*s.OverlapUntil)
}

// Hash returns the hash under which the key with a secret is stored.
func (k *Keys) Hash(secret string) string {
	mac := hmac.New(sha256.New, k.secret)
	mac.Write([]byte(secret))
	return hex.EncodeToString(mac.Sum(nil))
}

// Derived returns a secret for another purpose. It is the same in all processes.
func (k *Keys) Derived(purpose string) *[32]byte {
	mac := hmac.New(sha256.New, k.secret)
	mac.Write([]byte("derived\x00" + purpose)) // no API key has a NUL
	return (*[32]byte)(mac.Sum(nil))
}

// Authenticate returns the key with that secret. It looks the key up by a keyed hash, so that its
// timing reveals nothing about any key.
func (k *Keys) Authenticate(secret string) (*proto.Key, bool) {
	if proto.CheckKeyForm(secret) != nil {
		return nil, false
	}
	return k.WithHash(k.Hash(secret))
}

// WithHash returns the key with a secret that has this hash, as Authenticate does.
func (k *Keys) WithHash(hash string) (*proto.Key, bool) {
	var found *storedKey
	k.cache.View(func() { found = k.byHash[hash] })
	if found == nil || !found.accepts(hash, time.Now()) {
		return nil, false
	}
	key := found.Key
	return &key, true
}

// Get reads a key from the bucket, revoked or not. It returns [proto.ErrNotFound] if there is none.
func (k *Keys) Get(ctx context.Context, id string) (proto.Key, error) {
	name, err := k.cache.FindKey(ctx, id)
	if err != nil {
		return proto.Key{}, err
	}
	s, _, err := k.cache.Read(ctx, name)
	if err != nil {
		return proto.Key{}, err
	}
	return s.Key, nil
}

// Key returns the key with that id, revoked or not.
func (k *Keys) Key(id string) (*proto.Key, bool) {
	found := k.cache.Get(k.cache.KeyOf(id))
	if found == nil {
		return nil, false
	}
	key := found.Key
	return &key, true
}

// Create creates a key and returns it with its secret, which is not stored. It returns
// [proto.ErrNotFound] if one of the key's sandbox profiles does not exist.
func (k *Keys) Create(ctx context.Context, key proto.Key) (proto.Key, string, error) {
	if err := touchProfiles(ctx, k.store, key.AllowedProfiles()); err != nil {
		return proto.Key{}, "", err
	}
	var id [9]byte
	_, _ = rand.Read(id[:]) // crypto/rand.Read never returns an error since Go 1.24
	key.ID = "key_" + hex.EncodeToString(id[:])
	key.CreatedAt, key.RevokedAt = time.Now().UTC(), nil
	secret := key.Format.NewSecret(k.region)
	s := k.seal(key, secret)
	if err := k.cache.Put(ctx, keyName(&s.Key), s); err != nil {
		return proto.Key{}, "", err
	}
	// Only now does a removal of a profile see that it is bound, so it must still exist.
	if err := touchProfiles(ctx, k.store, key.AllowedProfiles()); err != nil {
		_, revokeErr := k.Revoke(ctx, key.ID)
		return proto.Key{}, "", errors.Join(err, revokeErr)
	}
	return s.Key, secret, nil
}

// Change stores the result of change for a key, and returns it. change may be called again, and
// must not change the id. Its error is returned unchanged. Change returns [proto.ErrNotFound] if
// there is no such key, and a [*proto.LastKeyError] if no global administrator's key without expiry
// would be left. It also returns [proto.ErrNotFound] if a sandbox profile that change adds does not
// exist.
func (k *Keys) Change(ctx context.Context, id string, change func(*proto.Key) error) (proto.Key, error) {
	var added []string
	key, err := k.change(ctx, id, func(s *storedKey) error {
		before := s.AllowedProfiles()
		if err := change(&s.Key); err != nil {
			return err
		}
		added = slices.DeleteFunc(slices.Clone(s.Profiles), func(name string) bool { return slices.Contains(before, name) })
		return touchProfiles(ctx, k.store, added)
	})
	if err != nil {
		return proto.Key{}, err
	}
	if err := touchProfiles(ctx, k.store, added); err != nil { // after the change, as in Create
		_, undoErr := k.change(ctx, id, func(s *storedKey) error {
			s.Profiles = slices.DeleteFunc(slices.Clone(s.Profiles), func(name string) bool {
				return slices.Contains(added, name)
			})
			return nil
		})
		return proto.Key{}, errors.Join(err, undoErr)
	}
	return key, nil
}

// Rotate replaces the secret of a key and returns both. The previous secret works until the given
// time. Rotate returns the same errors as Change, and a [*FirstKeyError] for the server's first key.
func (k *Keys) Rotate(ctx context.Context, id string, until time.Time) (proto.Key, string, error) {
	if id == bootstrapID {
		return proto.Key{}, "", &FirstKeyError{}
	}
	secret := ""
	key, err := k.change(ctx, id, func(s *storedKey) error {
		secret = s.Format.NewSecret(k.region)
		s.PreviousHash, s.Hash, s.OverlapUntil, s.Hint = s.Hash, k.Hash(secret), &until, proto.KeyHint(secret)
		return nil
	})
	return key, secret, err
}

// FirstKeyError is returned for the rotation of the first key.
type FirstKeyError struct{}

func (*FirstKeyError) Error() string {
	return "the first API key comes from the server's settings or its data directory; create the key of another global " +
		"administrator and revoke this one"
}

// Conflict marks the error's text as meant for the client.
func (*FirstKeyError) Conflict() {}

func (k *Keys) change(ctx context.Context, id string, change func(*storedKey) error) (proto.Key, error) {
	name, err := k.cache.FindKey(ctx, id)
	if err != nil {
		return proto.Key{}, err
	}
	s, err := k.cache.UpdateWithOthers(ctx, name, func(old *storedKey, others []*storedKey) (*storedKey, error) {
		if old == nil {
			return nil, fmt.Errorf("API key %q: %w", id, proto.ErrNotFound)
		}
		changed := *old
		if err := change(&changed); err != nil {
			return nil, err
		}
		if reflect.DeepEqual(*old, changed) {
			return nil, nil
		}
		if old.administers() && !changed.administers() && !anyAdministers(others) {
			return nil, &proto.LastKeyError{Key: id}
		}
		return &changed, nil
	})
	if err != nil {
		return proto.Key{}, err
	}
	return s.Key, nil
}

// seal returns a key as it is stored: with the hash of its secret, and a hint at it.
func (k *Keys) seal(key proto.Key, secret string) *storedKey {
	key.Hint = proto.KeyHint(secret)
	return &storedKey{Key: key, Hash: k.Hash(secret)}
}

// ErrRevoked means that a secret belongs to a revoked key.
var ErrRevoked = errors.New("this API key was revoked")

// Bootstrap makes secret a global administrator's key of the organisation "default", replacing an
// earlier one. It removes the earlier one's webhook settings, whose secret its owner knows. It
// returns [ErrRevoked] if secret belongs to a revoked key.
func (k *Keys) Bootstrap(ctx context.Context, secret string) error {
	hash, existing := k.Hash(secret), k.cache.Get(bootstrapName)
	if slices.ContainsFunc(k.cache.All(), func(s *storedKey) bool { return s.Hash == hash && s.RevokedAt != nil }) {
		return ErrRevoked
	}
	switch {
	case existing == nil:
	case existing.Hash == hash:
		return nil
	case existing.RevokedAt != nil: // kept under another id, the same for all gateways that start now
		revoked := *existing
		revoked.ID = "key_" + existing.Hash[:18]
		if err := k.cache.Put(ctx, keyName(&revoked.Key), &revoked); err != nil {
			return err
		}
	}
	if err := k.store.Webhooks.Purge(ctx, settingsKey(proto.DefaultOrg, bootstrapID)); err != nil {
		return fmt.Errorf("remove the webhook settings of the earlier bootstrap key: %w", err)
	}
	return k.cache.Put(ctx, bootstrapName, k.seal(bootstrapKey(), secret))
}

// BootstrapOnce creates that key if there is none, and reports whether it did. Only then does it
// call persist, which must make the secret durable and return it: the key stays, whatever happens
// next.
func (k *Keys) BootstrapOnce(ctx context.Context, persist func() (string, error)) (created bool, err error) {
	if k.cache.Get(bootstrapName) != nil {
		return false, nil
	}
	secret, err := persist()
	if err != nil {
		return false, err
	}
	err = k.cache.Create(ctx, bootstrapName, k.seal(bootstrapKey(), secret))
	if !errors.Is(err, proto.ErrExists) {
		return err == nil, err
	}
	// Another gateway starting at the same moment created it, perhaps with the same secret.
	if err := k.cache.Refresh(ctx, bootstrapName); err != nil {
		return false, err
	}
	existing := k.cache.Get(bootstrapName)
	return existing != nil && existing.Hash == k.Hash(secret), nil
}

func bootstrapKey() proto.Key {
	return proto.Key{
		ID: bootstrapID, Name: "bootstrap", Org: proto.DefaultOrg, Scopes: proto.Scopes(), Global: true,
		CreatedAt: time.Now().UTC(),
	}
}

// List returns the keys of an organisation, or all if org is empty, including revoked ones, oldest
// first.
func (k *Keys) List(org string) []proto.Key {
	list, _ := k.Page(org, "", -1, nil)
	return list
}

// Page returns a page of List, see [store.Collection.Page].
func (k *Keys) Page(org, after string, limit int, keep func(*proto.Key) bool) (page []proto.Key, next string) {
	return store.PageOf(k.cache, func(s *storedKey) *proto.Key { return &s.Key }, org, after, limit, keep)
}

// Revoke revokes a key. This gateway rejects it when Revoke returns, and every other one when its
// watch delivers the change, well within a second. Revoking a revoked key changes nothing. Revoke
// returns [proto.ErrNotFound] if there is no such key, and a [*proto.LastKeyError] if it is the
// last global administrator's key without expiry.
func (k *Keys) Revoke(ctx context.Context, id string) (proto.Key, error) {
	key, err := k.change(ctx, id, func(s *storedKey) error {
		if s.RevokedAt == nil {
			s.RevokedAt = new(time.Now().UTC())
		}
		return nil
	})
	if err != nil {
		return proto.Key{}, fmt.Errorf("revoke: %w", err)
	}
	return key, nil
}

// Administrable reports whether there is a key of a global administrator.
func (k *Keys) Administrable() bool { return anyAdministers(k.cache.All()) }

func anyAdministers(keys []*storedKey) bool {
	return slices.ContainsFunc(keys, (*storedKey).administers)
}

// administers reports whether a key is a global administrator's, is not revoked and never expires.
func (s *storedKey) administers() bool {
	return s.RevokedAt == nil && s.ExpiresAt == nil && s.GlobalAdmin()
}
