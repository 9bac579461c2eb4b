package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Bindings maps idempotency keys to executions, for [store.BindingTTL].
type Bindings struct{ Store *store.Store }

// name returns the bucket key for an idempotency key, which the client chooses freely.
func (b *Bindings) name(org, scope, key string) string {
	sum := sha256.Sum256([]byte(scope + "\x00" + key))
	return org + "." + hex.EncodeToString(sum[:])
}

// Bind binds key to an execution that is about to be submitted. If key is already bound, bound is
// false, and Bind returns the earlier binding.
func (b *Bindings) Bind(
	ctx context.Context, org, scope, key string, n proto.Binding,
) (binding proto.Binding, bound bool, err error) {
	body, err := json.Marshal(n)
	if err != nil {
		return proto.Binding{}, false, fmt.Errorf("encode idempotency key: %w", err)
	}
	name := b.name(org, scope, key)
	for {
		n.Revision, err = b.Store.Bindings.Create(ctx, name, body)
		if err == nil {
			return n, true, nil
		}
		if !errors.Is(err, jetstream.ErrKeyExists) {
			return proto.Binding{}, false, fmt.Errorf("bind idempotency key: %w", err)
		}
		have, err := b.Bound(ctx, org, scope, key)
		if errors.Is(err, proto.ErrNotFound) {
			continue // released meanwhile
		}
		return have, false, err
	}
}

// Bound returns the binding of a key, or [proto.ErrNotFound].
func (b *Bindings) Bound(ctx context.Context, org, scope, key string) (proto.Binding, error) {
	e, err := b.Store.Bindings.Get(ctx, b.name(org, scope, key))
	if store.IsNotFound(err) {
		return proto.Binding{}, proto.ErrNotFound
	}
	if err != nil {
		return proto.Binding{}, fmt.Errorf("read idempotency key: %w", err)
	}
	return decodeBinding(e)
}

func decodeBinding(e jetstream.KeyValueEntry) (proto.Binding, error) {
	var binding proto.Binding
	if err := json.Unmarshal(e.Value(), &binding); err != nil {
		return proto.Binding{}, fmt.Errorf("decode idempotency key: %w", err)
	}
	binding.Revision = e.Revision()
	return binding, nil
}

// Replace rebinds key from old, whose execution was not accepted, to another execution. It returns
// [proto.ErrConflict] if the binding has changed since.
func (b *Bindings) Replace(ctx context.Context, org, scope, key string, old, n proto.Binding) (proto.Binding, error) {
	body, err := json.Marshal(n)
	if err != nil {
		return proto.Binding{}, fmt.Errorf("encode idempotency key: %w", err)
	}
	n.Revision, err = b.Store.Bindings.Update(ctx, b.name(org, scope, key), body, old.Revision)
	if store.IsConflict(err) {
		return proto.Binding{}, fmt.Errorf("replace idempotency key: %w", proto.ErrConflict)
	}
	if err != nil {
		return proto.Binding{}, fmt.Errorf("replace idempotency key: %w", err)
	}
	return n, nil
}

// Release removes the binding of an execution that was not accepted. A newer binding is left alone.
func (b *Bindings) Release(ctx context.Context, org, scope, key string, n proto.Binding) error {
	err := b.Store.Bindings.Delete(ctx, b.name(org, scope, key), jetstream.LastRevision(n.Revision))
	if err != nil && !store.IsConflict(err) && !store.IsNotFound(err) {
		return fmt.Errorf("release idempotency key: %w", err)
	}
	return nil
}
