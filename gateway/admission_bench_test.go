package gateway

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/admission"
	stored "github.com/bullpen-run/bullpen/scheduler/registry"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// BenchmarkAdmission checks requests with 100,000 API keys of 1,000 organisations: the key, the
// organisation, its plan narrowed by the key, the request rate, the scope and the mode.
func BenchmarkAdmission(b *testing.B) {
	const keys, orgs, writers = 100_000, 1000, 64
	ctx, st, log := context.Background(), storetest.Open(b, storetest.Server(b)), storetest.Log(b)
	check := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	keyList, err := stored.OpenKeys(ctx, st, nil, "local", log)
	check(err)
	orgList, err := stored.OpenOrgs(ctx, st, log)
	check(err)
	planList, err := stored.OpenPlans(ctx, st, log)
	check(err)
	for i := range orgs {
		check(orgList.Create(ctx, proto.Org{Name: fmt.Sprint("org", i), Plan: "pro"}))
	}
	secrets := make([]string, keys)
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			for i := w; i < keys; i += writers {
				key := proto.Key{Name: "n", Org: fmt.Sprint("org", i%orgs), Scopes: proto.UserScopes(), RequestRate: 600}
				var err error
				if _, secrets[i], err = keyList.Create(ctx, key); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	all.Wait()

	a := &admission.Admission{Keys: keyList, Orgs: orgList, Plans: planList, Log: log}
	s := &web.Core{Callers: keyList, Entitlements: a, KeyUses: &keyUses{}, Log: log, Memory: 1 << 30}
	s.Init()
	admitted := 0
	routes := api.Routes()
	execute := routes[slices.IndexFunc(routes, func(r api.Route) bool { return r.ID == "execute" })]
	row := web.Row{Route: execute, Handle: func(_ http.ResponseWriter, r *web.Request) error {
		admitted++
		return a.CheckMode(r.Context(), &r.Plan, proto.ModeAsync)
	}}
	chain := chi.NewRouter()
	chain.Use(s.Observe)
	s.Guard(chain, &row).Method(row.Method, row.Path, s.Handle(row.Handle))
	var took []time.Duration
	for i := 0; b.Loop(); i++ {
		r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/sandbox/execute", http.NoBody)
		r.Header.Set("Authorization", "Bearer "+secrets[i*7919%keys])
		w := httptest.NewRecorder()
		began := time.Now()
		chain.ServeHTTP(w, r)
		took = append(took, time.Since(began))
	}
	if admitted != len(took) {
		b.Fatalf("%d of %d requests were admitted", admitted, len(took))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns/op")
}
