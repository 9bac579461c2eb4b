// Package keyring encrypts the secrets that bullpen keeps in JetStream. A data key, which is stored
// there as well, encrypts them. The operator's key, which is not, wraps the data key: a copy of
// JetStream, such as a backup, reveals no secret.
package keyring

import (
	"context"
	"crypto/cipher"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/crypto/chacha20poly1305"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// entryKey is the key of the wrapped data key in the bucket of secrets.
	entryKey = "data_key"
	// sealedVersion is the first byte of everything that Seal returns.
	sealedVersion = 1
	purpose       = "bullpen\x00"
	checkName     = "data key"
)

// JobName is the name with which the secrets of an execution are encrypted.
func JobName(trace string) string { return "job." + trace }

// Wrapper encrypts the data key with the operator's key. Its methods may be called concurrently.
type Wrapper interface {
	// Wrap returns the encrypted data key, and names the keys that can decrypt it.
	Wrap(ctx context.Context, dataKey []byte) (wrapped []byte, keys string, err error)
	// Unwrap returns the data key.
	Unwrap(ctx context.Context, wrapped []byte) (dataKey []byte, err error)
}

// errCorrupt does not reveal what was wrong with a ciphertext.
var errCorrupt = errors.New("it was not encrypted with the data key of this deployment, or was changed")

// entry is the wrapped data key, as stored.
type entry struct {
	Wrapped []byte `json:"wrapped"`
	// Keys names the operator's keys that Wrapped can be decrypted with.
	Keys      string    `json:"keys"`
	Check     []byte    `json:"check"` // a sealed empty text
	WrappedAt time.Time `json:"wrapped_at"`
}

// Keyring encrypts and decrypts secrets. Its methods may be called concurrently.
type Keyring struct {
	store   *store.Store
	wrapper Wrapper

	mu   sync.Mutex
	aead cipher.AEAD // nil until the data key is known
	key  []byte
}

// Open returns the keyring of a deployment. wrapper is nil if the operator gave no key: the keyring
// then encrypts nothing, and an existing data key is an error. If create is set and there is no
// data key, Open creates one.
func Open(ctx context.Context, st *store.Store, wrapper Wrapper, create bool, log *slog.Logger) (*Keyring, error) {
	k := &Keyring{store: st, wrapper: wrapper}
	waiting := func(err error, _ time.Duration) { log.Warn("waiting for the key of secrets", "error", err) }
	exists := false
	err := store.Retry{OnRetry: waiting}.Do(ctx, func(ctx context.Context) (err error) {
		exists, err = Exists(ctx, st)
		return err
	})
	switch {
	case err != nil:
	case exists:
		err = k.load(ctx)
	case create && wrapper != nil:
		err = k.create(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("open the key of secrets: %w", err)
	}
	return k, nil
}

// Exists reports whether there is a data key.
func Exists(ctx context.Context, st *store.Store) (bool, error) {
	_, err := st.Secrets.Get(ctx, entryKey)
	if store.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// IsDataKey reports whether messages on a subject are the wrapped data key.
func IsDataKey(subject string) bool { return subject == store.SecretsSubject(entryKey) }

// Check returns an error unless wrapper, nil for none, can unwrap a stored data key. body is the
// message of a backup.
func Check(ctx context.Context, body []byte, wrapper Wrapper) error {
	_, _, err := unwrap(ctx, body, wrapper)
	return err
}

// load reads and unwraps the data key.
func (k *Keyring) load(ctx context.Context) error {
	stored, err := k.store.Secrets.Get(ctx, entryKey)
	if err != nil {
		return err
	}
	key, aead, err := unwrap(ctx, stored.Value(), k.wrapper)
	if err != nil {
		return err
	}
	k.use(key, aead)
	return nil
}

// unwrap returns the data key in a stored entry, and its cipher.
func unwrap(ctx context.Context, body []byte, wrapper Wrapper) (key []byte, aead cipher.AEAD, err error) {
	var e entry
	if err := json.Unmarshal(body, &e); err != nil {
		return nil, nil, fmt.Errorf("decode the data key: %w", err)
	}
	err = proto.ErrNoSecretsKey
	if wrapper != nil {
		key, err = wrapper.Unwrap(ctx, e.Wrapped)
	}
	if err == nil {
		aead, err = chacha20poly1305.NewX(key)
	}
	if err == nil {
		_, err = open(aead, checkName, e.Check)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("the secrets of this deployment are encrypted for %s: %w", e.Keys, err)
	}
	return key, aead, nil
}

func (k *Keyring) use(key []byte, aead cipher.AEAD) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.aead, k.key = aead, key
}

// create creates a data key, or loads one that another process created meanwhile.
func (k *Keyring) create(ctx context.Context) error {
	key := make([]byte, chacha20poly1305.KeySize)
	_, _ = rand.Read(key) // crypto/rand.Read never returns an error since Go 1.24
	e, err := k.wrap(ctx, key)
	if err != nil {
		return err
	}
	body, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if _, err := k.store.Secrets.Create(ctx, entryKey, body); err != nil && !store.IsConflict(err) {
		return err
	}
	return k.load(ctx)
}

// wrap returns the entry for a data key.
func (k *Keyring) wrap(ctx context.Context, key []byte) (*entry, error) {
	wrapped, keys, err := k.wrapper.Wrap(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("wrap the data key: %w", err)
	}
	// A key that cannot be unwrapped would make every secret unreadable at the next start.
	if again, err := k.wrapper.Unwrap(ctx, wrapped); err != nil || string(again) != string(key) {
		return nil, errors.Join(errors.New("wrap the data key: it cannot be unwrapped again"), err)
	}
	aead, err := chacha20poly1305.NewX(key)
	if err != nil {
		return nil, err
	}
	return &entry{Wrapped: wrapped, Keys: keys, Check: seal(aead, checkName, nil), WrappedAt: time.Now().UTC()}, nil
}

// Rotate wraps the data key again with the operator's current keys, and returns their names.
// Secrets are not encrypted again. It returns [proto.ErrNoSecretsKey] if there is no key.
func (k *Keyring) Rotate(ctx context.Context) (keys string, err error) {
	if !k.Enabled() {
		return "", proto.ErrNoSecretsKey
	}
	if _, err := k.cipher(ctx); err != nil {
		return "", err
	}
	err = store.Update(ctx, func() error {
		stored, err := k.store.Secrets.Get(ctx, entryKey)
		if err != nil {
			return err
		}
		k.mu.Lock()
		key := k.key
		k.mu.Unlock()
		e, err := k.wrap(ctx, key)
		if err != nil {
			return err
		}
		keys = e.Keys
		body, err := json.Marshal(e)
		if err != nil {
			return err
		}
		_, err = k.store.Secrets.Update(ctx, entryKey, body, stored.Revision())
		return err
	})
	return keys, err
}

// Enabled reports whether secrets are encrypted. It is false for nil.
func (k *Keyring) Enabled() bool { return k != nil && k.wrapper != nil }

// cipher returns the cipher with the data key. It reads the key if another process has created it
// since Open.
func (k *Keyring) cipher(ctx context.Context) (cipher.AEAD, error) {
	if k == nil || k.wrapper == nil {
		return nil, proto.ErrNoSecretsKey
	}
	k.mu.Lock()
	aead := k.aead
	k.mu.Unlock()
	if aead != nil {
		return aead, nil
	}
	if err := k.load(ctx); err != nil {
		return nil, fmt.Errorf("read the key of secrets: %w", err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.aead, nil
}

// Seal encrypts a secret. Only Open with the same name decrypts it, so that stored ciphertexts
// cannot be swapped. It returns [proto.ErrNoSecretsKey] if this process has no key.
func (k *Keyring) Seal(ctx context.Context, name string, secret []byte) ([]byte, error) {
	aead, err := k.cipher(ctx)
	if err != nil {
		return nil, err
	}
	return seal(aead, name, secret), nil
}

// Open decrypts what Seal returned for a name.
func (k *Keyring) Open(ctx context.Context, name string, sealed []byte) ([]byte, error) {
	aead, err := k.cipher(ctx)
	if err != nil {
		return nil, err
	}
	return open(aead, name, sealed)
}

func seal(aead cipher.AEAD, name string, secret []byte) []byte {
	nonce := make([]byte, aead.NonceSize())
	_, _ = rand.Read(nonce) // crypto/rand.Read never returns an error since Go 1.24
	return aead.Seal(append([]byte{sealedVersion}, nonce...), nonce, secret, []byte(purpose+name))
}

func open(aead cipher.AEAD, name string, sealed []byte) ([]byte, error) {
	if len(sealed) < 1+aead.NonceSize() || sealed[0] != sealedVersion {
		return nil, errCorrupt
	}
	nonce, text := sealed[1:1+aead.NonceSize()], sealed[1+aead.NonceSize():]
	secret, err := aead.Open(nil, nonce, text, []byte(purpose+name))
	if err != nil {
		return nil, errCorrupt
	}
	return secret, nil
}
