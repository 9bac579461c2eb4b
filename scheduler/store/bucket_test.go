package store_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// Creating a bucket again succeeds only if its settings are the same.
func TestBucketsMatchTheLibrary(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	for _, cfg := range []jetstream.KeyValueConfig{
		{Bucket: "bullpen_keys"}, {Bucket: "bullpen_bindings", TTL: time.Hour}, {Bucket: "bullpen_webhooks", LimitMarkerTTL: store.WebhookMarkerTTL},
	} {
		cfg.Storage, cfg.Replicas = jetstream.FileStorage, 1
		if _, err := st.JS.CreateKeyValue(ctx, cfg); err != nil {
			t.Errorf("%s: %v", cfg.Bucket, err)
		}
	}
	if _, err := st.JS.CreateObjectStore(ctx, jetstream.ObjectStoreConfig{
		Bucket: "bullpen_bodies", TTL: 3 * 24 * time.Hour, Replicas: 1, Storage: jetstream.FileStorage,
	}); err != nil {
		t.Errorf("bodies: %v", err)
	}
}

// A removed stream stands for one without a leader: nobody answers.
func TestUnansweredRequestsAreDeadlineErrors(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	if err := st.JS.DeleteStream(ctx, "KV_bullpen_bindings"); err != nil {
		t.Fatal(err)
	}
	if _, err := st.Bindings.Create(ctx, "key", nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a write that reached nobody: %v", err)
	}
	soon, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	if _, err := st.Bindings.Get(soon, "key"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a read that reached nobody: %v", err)
	}
}
