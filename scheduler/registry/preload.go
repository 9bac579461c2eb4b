package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// maxPreloadError bounds a stored error, in bytes.
const maxPreloadError = 4 << 10

// PreloadFailures stores why modules of sandboxes cannot be preloaded, for a day.
type PreloadFailures struct{ Store *store.Store }

// preloadKey returns the key of a sandbox: a hash of what concerns its jails.
func preloadKey(s proto.Sandbox) (string, error) {
	s.OutputBytes = 0
	b, err := json.Marshal(s)
	if err != nil {
		return "", fmt.Errorf("encode a sandbox: %w", err)
	}
	hash := sha256.Sum256(b)
	return hex.EncodeToString(hash[:]), nil
}

// Set stores that a worker cannot preload the modules of s because of failure. If failure is nil, it
// removes what that worker stored.
func (p *PreloadFailures) Set(ctx context.Context, s proto.Sandbox, worker string, failure error) error {
	key, err := preloadKey(s)
	if err != nil {
		return err
	}
	bucket, err := p.Store.PreloadBucket(ctx)
	if err != nil {
		return err
	}
	if failure == nil {
		err = removePreloadFailure(ctx, bucket, key, worker)
	} else {
		err = storePreloadFailure(ctx, bucket, key, worker, failure)
	}
	if err != nil {
		return fmt.Errorf("store why modules cannot be preloaded: %w", err)
	}
	return nil
}

func removePreloadFailure(ctx context.Context, bucket jetstream.KeyValue, key, worker string) error {
	e, err := bucket.Get(ctx, key) // usually there is none, and a deletion would store a marker
	if store.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	f, err := decodePreloadFailure(e)
	if err != nil || f.Worker != "" && f.Worker != worker {
		return err
	}
	return bucket.Delete(ctx, key)
}

func storePreloadFailure(ctx context.Context, bucket jetstream.KeyValue, key, worker string, failure error) error {
	text := strings.ToValidUTF8(failure.Error(), "\uFFFD")
	if len(text) > maxPreloadError {
		text = text[:maxPreloadError]
		text = text[:proto.CutUTF8(text)]
	}
	b, err := json.Marshal(proto.PreloadFailure{Error: text, Worker: worker, At: time.Now().UTC()})
	if err != nil {
		return err
	}
	_, err = bucket.Put(ctx, key, b)
	return err
}

// PreloadFailure returns why the modules of s cannot be preloaded, or nil if no worker has failed
// within a day.
func (p *PreloadFailures) PreloadFailure(ctx context.Context, s proto.Sandbox) (*proto.PreloadFailure, error) {
	key, err := preloadKey(s)
	if err != nil {
		return nil, err
	}
	e, err := p.Store.Preload.Get(ctx, key)
	if store.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read why modules cannot be preloaded: %w", err)
	}
	return decodePreloadFailure(e)
}

func decodePreloadFailure(e jetstream.KeyValueEntry) (*proto.PreloadFailure, error) {
	f := new(proto.PreloadFailure)
	if err := json.Unmarshal(e.Value(), f); err != nil {
		return nil, fmt.Errorf("decode why modules cannot be preloaded: %w", err)
	}
	return f, nil
}
