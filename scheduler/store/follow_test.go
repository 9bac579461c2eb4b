package store_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// patience bounds what three servers do together. It is not a performance goal.
const patience = 3 * time.Minute

// follow reads each followed delivery at once. It returns after want deliveries, or when the
// consumer is lost.
func follow(ctx context.Context, t *testing.T, st *store.Store, seen map[string]bool, want int) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	followed := make(chan string, want)
	go func() {
		defer stop()
		_ = st.Deliveries.Follow(ctx, store.Range{}, func(m *store.Message) {
			go func() {
				if _, err := st.Deliveries.Last(t.Context(), m.Subject); store.IsNotFound(err) {
					t.Errorf("followed and not found: %v", err)
				}
				followed <- m.Subject
			}()
		}, func() {})
	}()
	for len(seen) < want {
		select {
		case subject := <-followed:
			seen[subject] = true
		case <-ctx.Done():
			return
		}
	}
}

// A consumer lives on any server of a cluster, which may store a message before the leader.
func TestFollowedMessagesAreFound(t *testing.T) {
	st := storetest.Cluster(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	const readers, writers, each = 4, 10, 60
	var all sync.WaitGroup
	for range readers {
		all.Go(func() {
			seen := map[string]bool{}
			for len(seen) < writers*each && ctx.Err() == nil {
				follow(ctx, t, st, seen, writers*each)
			}
			if len(seen) < writers*each {
				t.Errorf("followed %d deliveries", len(seen))
			}
		})
	}
	for w := range writers {
		all.Go(func() {
			for i := range each {
				d := fmt.Sprintf("bullpen.delivery.acme.%d-%d", w, i)
				for _, err := st.JS.Publish(ctx, d, nil); err != nil; _, err = st.JS.Publish(ctx, d, nil) {
					if ctx.Err() != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	all.Wait()
}

// ReadAll delivers every message also if its consumer is lost.
func TestReadAllReplacesALostConsumer(t *testing.T) {
	st, ctx := storetest.Open(t, storetest.Server(t)), storetest.Context(t)
	const deliveries = 200 // more than is sent ahead
	for i := range deliveries {
		if _, err := st.JS.Publish(ctx, fmt.Sprintf("bullpen.delivery.acme.%d", i), make([]byte, 100<<10)); err != nil {
			t.Fatal(err)
		}
	}
	times := map[string]int{}
	if err := st.Deliveries.ReadAll(ctx, func(m *store.Message) {
		if len(times) == 0 {
			for name := range st.Deliveries.ConsumerNames(ctx).Name() {
				if err := st.Deliveries.DeleteConsumer(ctx, name); err != nil {
					t.Error(err)
				}
			}
		}
		times[m.Subject]++
	}); err != nil {
		t.Fatal(err)
	}
	for subject, n := range times {
		if n != 1 {
			t.Errorf("%s came %d times", subject, n)
		}
	}
	if len(times) != deliveries {
		t.Errorf("%d of %d came", len(times), deliveries)
	}
}

// A message that is replaced before it is sent is delivered as it is then, even if others were
// stored in between.
func TestReadAllFindsReplacedMessages(t *testing.T) {
	st, ctx := storetest.Open(t, storetest.Server(t)), storetest.Context(t)
	const deliveries = 200 // more than is sent ahead
	publish := func(i int) {
		if _, err := st.JS.Publish(ctx, fmt.Sprintf("bullpen.delivery.acme.%d", i), make([]byte, 100<<10)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range deliveries {
		publish(i)
	}
	seen := map[string]bool{}
	if err := st.Deliveries.ReadAll(ctx, func(m *store.Message) {
		if len(seen) == 0 {
			publish(deliveries) // takes the place of the replaced one in the count of messages
			publish(deliveries - 1)
		}
		seen[m.Subject] = true
	}); err != nil {
		t.Fatal(err)
	}
	for i := range deliveries {
		if !seen[fmt.Sprintf("bullpen.delivery.acme.%d", i)] {
			t.Errorf("delivery %d was not read", i)
		}
	}
}
