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
		{Bucket: "bullpen_keys"},
		{Bucket: "bullpen_bindings", TTL: time.Hour},
		{Bucket: "bullpen_webhooks", LimitMarkerTTL: store.WebhookMarkerTTL},
	} {
		cfg.Storage, cfg.Replicas = jetstream.FileStorage, 1
		if _, err := st.JS.CreateKeyValue(ctx, cfg); err != nil {
			t.Errorf("%s: %v", cfg.Bucket, err)
		}
	}
}

// A bucket whose keys come and go does not grow.
func TestMarkersOfRemovedKeysArePurged(t *testing.T) {
	st := storetest.Open(t, storetest.Server(t))
	ctx := storetest.Context(t)
	for _, bucket := range []jetstream.KeyValue{st.Batches, st.Schedules} {
		for _, key := range []string{"removed", "kept", "created.again"} {
			if _, err := bucket.Create(ctx, key, []byte("value")); err != nil {
				t.Fatal(err)
			}
		}
		for _, key := range []string{"removed", "created.again"} {
			if err := bucket.Purge(ctx, key); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := bucket.Create(ctx, "created.again", []byte("again")); err != nil {
			t.Fatal(err)
		}
		messages := func() uint64 {
			status, err := bucket.Status(ctx)
			if err != nil {
				t.Fatal(err)
			}
			return status.Values()
		}
		if err := store.PurgeMarkers(ctx, st, bucket, time.Hour); err != nil || messages() != 3 {
			t.Errorf("%s: %v, %d messages, want the marker that is not an hour old and two values", bucket.Bucket(),
				err, messages())
		}
		if err := store.PurgeMarkers(ctx, st, bucket, 0); err != nil || messages() != 2 {
			t.Errorf("%s: %v, %d messages, want the two values alone", bucket.Bucket(), err, messages())
		}
		for key, value := range map[string]string{"kept": "value", "created.again": "again"} {
			if e, err := bucket.Get(ctx, key); err != nil || string(e.Value()) != value {
				t.Errorf("%s: %s: %v, %v", bucket.Bucket(), key, e, err)
			}
		}
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
