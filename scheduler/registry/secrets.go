package registry

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/keyring"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const secretPrefix = "secret."

// storedSecret is a secret as stored: with its value, encrypted.
type storedSecret struct {
	proto.Secret
	Sealed []byte `json:"sealed"`
}

// Secrets stores the named secrets of organisations. Run must be running for changes to be seen.
type Secrets struct {
	store *store.Store
	ring  *keyring.Keyring
	all   *store.Collection[storedSecret]
}

// OpenSecrets reads all secrets.
func OpenSecrets(ctx context.Context, st *store.Store, ring *keyring.Keyring, log *slog.Logger) (*Secrets, error) {
	all, err := store.OpenCollection(ctx, store.CollectionConfig[storedSecret]{
		Store: st, Bucket: st.Secrets, Keys: secretPrefix + "*.*", Name: "secrets", Kind: proto.ChangedSecrets,
		Order: store.ByKey[storedSecret], Log: log,
		Check: func(_ *storedSecret, others []*storedSecret) error {
			if len(others) >= proto.MaxSecrets {
				return proto.FieldErrorf("name", "would be one secret too many: an organisation has at most %d",
					proto.MaxSecrets)
			}
			return nil
		},
	})
	return &Secrets{store: st, ring: ring, all: all}, err
}

// Run applies changes by other processes until ctx is done.
func (s *Secrets) Run(ctx context.Context) error { return s.all.Run(ctx) }

// secretKey is the key of a secret in the bucket.
func secretKey(org, name string) string { return secretPrefix + org + "." + name }

// secretSealName returns the name with which a secret is encrypted. It contains the injection, so that
// the value cannot be decrypted after a change of the stored hosts, or by a gateway of an earlier
// version, which would pass it to programs.
func secretSealName(key string, injection *proto.Injection) (string, error) {
	if injection == nil {
		return key, nil
	}
	text, err := json.Marshal(injection)
	return key + " " + string(text), err
}

// Put stores a secret, replacing one with the same name. If injection is nil, the replaced secret's
// injection stays, so that a change of the value alone does not pass it to programs. Put returns
// [proto.ErrNoSecretsKey] if nothing can be encrypted, and a [*proto.FieldError] if the
// organisation has too many secrets or the value cannot be injected.
func (s *Secrets) Put(ctx context.Context, org, name, value string, injection *proto.Injection) (proto.Secret, error) {
	key, now := secretKey(org, name), time.Now().UTC()
	variable, err := proto.CheckSecretValue(value)
	if err != nil {
		return proto.Secret{}, err
	}
	stored, err := s.all.Update(ctx, key, func(old *storedSecret) (*storedSecret, error) {
		created, inject := now, injection
		if old != nil {
			created, inject = old.CreatedAt, cmp.Or(injection, old.Injection)
		}
		if inject != nil {
			if err := inject.CheckValue(value); err != nil {
				return nil, err
			}
		}
		sealName, err := secretSealName(key, inject)
		if err != nil {
			return nil, err
		}
		sealed, err := s.ring.Seal(ctx, sealName, []byte(value))
		if err != nil {
			return nil, err
		}
		return &storedSecret{Sealed: sealed, Secret: proto.Secret{
			Org: org, Name: name, Bytes: len(value), Variable: variable, Injection: inject, CreatedAt: created, UpdatedAt: now,
		}}, nil
	})
	if err != nil {
		return proto.Secret{}, err
	}
	return stored.Secret, nil
}

// Get returns a secret, or [proto.ErrNotFound].
func (s *Secrets) Get(ctx context.Context, org, name string) (proto.Secret, error) {
	stored, _, err := s.all.Read(ctx, secretKey(org, name))
	if err != nil {
		return proto.Secret{}, err
	}
	return stored.Secret, nil
}

// List returns the secrets of an organisation by name.
func (s *Secrets) List(org string) []proto.Secret {
	list, _ := s.Page(org, "", -1, nil)
	return list
}

// Page returns a page of List, see [store.Collection.Page].
func (s *Secrets) Page(org, after string, limit int, keep func(*proto.Secret) bool) (page []proto.Secret, next string) {
	return store.PageOf(s.all, func(stored *storedSecret) *proto.Secret { return &stored.Secret }, org, after, limit, keep)
}

// Remove removes a secret. It returns [proto.ErrNotFound] if there is none, and a
// [*proto.SecretInUseError] if it is in use. Executions of a key that concurrently gets the secret
// are refused.
func (s *Secrets) Remove(ctx context.Context, org, name string) error {
	unused := func(*storedSecret) error { return s.checkUnused(ctx, org, name) }
	_, err := s.all.Remove(ctx, secretKey(org, name), unused)
	return err
}

// checkUnused returns a [*proto.SecretInUseError] if something of an organisation names a secret.
func (s *Secrets) checkUnused(ctx context.Context, org, name string) error {
	names := func(bindings []string) bool {
		merged, err := proto.MergeSecrets(nil, bindings)
		return err == nil && slices.ContainsFunc(merged, func(b proto.SecretBinding) bool { return b.Secret == name })
	}
	profiles, _, err := store.ReadValues(ctx, s.store.Profiles, "*", decodeProfile)
	if err != nil {
		return err
	}
	used := &proto.SecretInUseError{Secret: name}
	used.Keys, err = keysWith(ctx, s.store, func(k *storedKey) bool {
		return k.Org == org && (names(k.Secrets) || slices.ContainsFunc(k.AllowedProfiles(), func(name string) bool {
			p := profiles[profileKey(name)]
			return p != nil && names(p.Secrets)
		}))
	})
	if err != nil {
		return err
	}
	connections, _, err := store.ReadValues(ctx, s.store.Connections, connectionKey(org, "*"),
		store.DecodeJSON[proto.Connection])
	if err != nil {
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(connections)) {
		if c := connections[key]; c.S3 != nil && c.S3.Credential == name {
			used.Connections = append(used.Connections, c.Slug)
		}
	}
	if len(used.Keys)+len(used.Connections) > 0 {
		return used
	}
	return nil
}

// Value returns the value of a secret for the gateway's own use, or [proto.ErrNotFound].
func (s *Secrets) Value(ctx context.Context, org, name string) ([]byte, error) {
	key := secretKey(org, name)
	stored, _, err := s.all.Read(ctx, key)
	if err != nil {
		return nil, err
	}
	return s.open(ctx, key, stored)
}

// open decrypts the value of the secret that is stored at a key.
func (s *Secrets) open(ctx context.Context, key string, stored *storedSecret) ([]byte, error) {
	sealName, err := secretSealName(key, stored.Injection)
	if err != nil {
		return nil, err
	}
	value, err := s.ring.Open(ctx, sealName, stored.Sealed)
	if err != nil {
		return nil, fmt.Errorf("decrypt the secret %s of %s: %w", stored.Name, stored.Org, err)
	}
	return value, nil
}

// Bind returns the bound secrets, and their values encrypted for one execution. It sets the
// injections of the bindings. It returns a [*proto.MissingSecretError] if one does not exist.
func (s *Secrets) Bind(
	ctx context.Context, org string, id proto.TraceID, bound []proto.SecretBinding,
) (secrets map[string]proto.Secret, sealed []byte, err error) {
	secrets, values := map[string]proto.Secret{}, map[string][]byte{}
	for i, b := range bound {
		key := secretKey(org, b.Secret)
		stored := s.all.Get(key)
		if stored == nil { // perhaps just created by another gateway
			stored, _, err = s.all.Read(ctx, key)
			if errors.Is(err, proto.ErrNotFound) {
				return nil, nil, &proto.MissingSecretError{Secret: b.Secret}
			}
			if err != nil {
				return nil, nil, err
			}
		}
		value, err := s.open(ctx, key, stored)
		if err != nil {
			return nil, nil, err
		}
		secrets[b.Secret], values[b.Secret] = stored.Secret, value
		bound[i].Injection = stored.Injection
	}
	body, err := json.Marshal(values)
	if err != nil {
		return nil, nil, err
	}
	sealed, err = s.ring.Seal(ctx, keyring.JobName(string(id)), body)
	return secrets, sealed, err
}
