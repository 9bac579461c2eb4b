package registry_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// BenchmarkAuthenticate looks keys up among 100,000.
func BenchmarkAuthenticate(b *testing.B) {
	const keys, writers = 100_000, 64
	ctx := context.Background()
	k, err := registry.OpenKeys(ctx, storetest.Open(b, storetest.Server(b)), nil, "local", storetest.Log(b))
	if err != nil {
		b.Fatal(err)
	}
	secrets := make([]string, keys)
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			for i := w; i < keys; i += writers {
				var err error
				if _, secrets[i], err = k.Create(
					ctx, proto.Key{Name: "n", Org: fmt.Sprint("org", i%1000), Plan: "pro", Scopes: proto.UserScopes()}); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	var took []time.Duration
	for i := 0; b.Loop(); i++ {
		began := time.Now()
		if _, ok := k.Authenticate(secrets[i*7919%keys]); !ok {
			b.Fatal("not known")
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns/op")
}
