package e2e

import (
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"path/filepath"
	"testing"

	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// testHistoryPostgres runs two gateways with one index of executions in PostgreSQL, and kills the one
// that writes it. Both list the same executions, each once.
func testHistoryPostgres(t *testing.T, p *programs) {
	server, err := storagetest.StartPostgres()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	database, err := server.NewDatabase(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sys := newSystem(t, p, topology{separate: true}, 4, "--history", database)
	args := append([]string{"--data", filepath.Join(t.TempDir(), "second"), "--roles", frontRole}, sys.args...)
	_, base := p.startServe(t, "second front", sys.env, args...) // the first one writes
	second := &api{t, base, sys.key, sys.http}

	want, number := map[string]string{}, 0
	run := func(a *api, n int) {
		t.Helper()
		for range n {
			code, status := "true", "success"
			if number++; number%3 == 0 {
				code, status = "false", "failed"
			}
			id := a.submit(bash(code).and("metadata", request{"n": fmt.Sprint(number)}))
			a.ended(id)
			want[id] = status
		}
	}
	check := func(gateways ...*api) {
		t.Helper()
		for _, a := range gateways {
			if got := a.listed(t, url.Values{}); !maps.Equal(got, want) {
				t.Errorf("%s lists %v, want %v", a.base, got, want)
			}
			failed := 0
			for id := range a.listed(t, url.Values{"status": {"failed"}}) {
				if want[id] != "failed" {
					t.Errorf("%s lists %s as failed", a.base, id)
				}
				failed++
			}
			if failed != number/3 || len(a.listed(t, url.Values{"metadata.n": {"2"}})) != 1 {
				t.Errorf("%s lists %d failed executions of %d", a.base, failed, number)
			}
		}
	}
	run(sys.api, 4)
	run(second, 4)
	check(sys.api, second)
	waiting := second.submit(bash("true").and("delay", 3600))
	want[waiting] = "queued"
	check(sys.api, second)

	sys.front.kill()
	run(second, 4)
	check(second)
	sys.startFront(t)
	run(sys.api, 4)
	if r := sys.do(http.MethodPost, execution(waiting, "cancel"), nil); r.status != http.StatusAccepted {
		t.Error(r)
	}
	sys.ended(waiting)
	want[waiting] = "cancelled"
	check(sys.api, second)
}
