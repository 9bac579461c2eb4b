package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// storeRequest is a kind of request from workers to their store.
type storeRequest struct {
	name, op, path string
	part           bool // of a blob
}

func (s storeRequest) is(r *http.Request, org string) bool {
	return storagetest.Operation(r) == s.op && strings.Contains(r.URL.Path, s.path+org+"/") &&
		s.part == (r.Header.Get("Range") != "")
}

func storeRequests() []storeRequest {
	return []storeRequest{
		{"put a layer", "put", "/layers/", false},
		{"put an object", "put", "/objects/", false},
		{"put a manifest", "put", "/threads/", false},
		{"get a layer", "get", "/layers/", false},
		{"get a layer's index", "get", "/layers/", true},
		{"get an object", "get", "/objects/", false},
	}
}

// storeFault is a thread in an organisation that meets one fault of the store.
type storeFault struct {
	*threadJournal
	*api
	name   string
	large  bool            // it has a layer whose index is fetched separately
	want   proto.ErrorCode // empty if the fault must not be noticeable
	inject func(b *bucket) (heal func() int)
}

// testThreadsStoreFails makes every request of a worker to its store fail in every way, permanently
// and temporarily.
func testThreadsStoreFails(t *testing.T, p *programs) {
	b := p.newBucket(t)
	sys := newSystem(t, p, topology{separate: true}, noSlots, append(b.flags(), "--slots", "64")...)
	data := filepath.Join(t.TempDir(), "worker")
	worker, _ := sys.startWorkerIn(t, data)
	sys.ready(t)

	const few = 8 // without faults, programs would only wait for the processor
	all := storeFaults(sys.api)
	each := func(what string, atOnce int, f func(ctx context.Context, s *storeFault) error) {
		t.Helper()
		turns := make(chan struct{}, atOnce)
		// A worker waits for a store that does not answer for most of a minute.
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute+patience)
		defer cancel()
		var group sync.WaitGroup
		for _, s := range all {
			turns <- struct{}{}
			group.Go(func() {
				defer func() { <-turns }()
				if err := f(ctx, s); err != nil {
					t.Errorf("%s: %s: %v", s.name, what, err)
				}
			})
		}
		group.Wait()
	}
	write := func(ctx context.Context, s *storeFault, want proto.ErrorCode) error {
		res, err := s.write(ctx, func() *api { return s.api })
		if err == nil && deref(res.ErrorCode) != string(want) {
			err = fmt.Errorf("it ended with %q: %s", deref(res.ErrorCode), deref(res.ErrorMessage))
		}
		return err
	}
	each("before", few, func(ctx context.Context, s *storeFault) error {
		if s.large {
			noise := bash("head -c 2000000 /dev/urandom >.noise").and("thread_id", s.id)
			if r, err := s.try(ctx, http.MethodPost, executePath, noise); err != nil || r.status != http.StatusOK {
				return errors.Join(err, fmt.Errorf("answered %v", r))
			}
		}
		return write(ctx, s, "")
	})
	worker.kill() // without cached homes, all are fetched
	if err := os.RemoveAll(filepath.Join(data, "homes")); err != nil {
		t.Fatal(err)
	}
	sys.startWorkerIn(t, data)
	sys.ready(t)
	heal := map[*storeFault]func() int{}
	for _, s := range all {
		heal[s] = s.inject(b)
	}
	each("meanwhile", len(all), func(ctx context.Context, s *storeFault) error { return write(ctx, s, s.want) })
	for _, s := range all {
		if hits := heal[s](); hits == 0 {
			t.Errorf("%s: it never happened", s.name)
		}
	}
	each("after", few, func(ctx context.Context, s *storeFault) error {
		if err := write(ctx, s, ""); err != nil {
			return err
		}
		if r, err := s.try(ctx, http.MethodGet, "/v1/threads/"+s.id, nil); err != nil ||
			!strings.Contains(string(r.body), `"holder":null`) {
			return errors.Join(err, fmt.Errorf("answered %v", r))
		}
		return nil
	})
}

// storeFaults returns all of them, each in its own organisation.
func storeFaults(a *api) []*storeFault {
	var all []*storeFault
	add := func(name string, large bool, want proto.ErrorCode, fail func(org string, b *bucket) func() int) {
		org := fmt.Sprintf("org%d", len(all))
		key, _ := a.newKey(org, "pro")
		all = append(all, &storeFault{
			threadJournal: &threadJournal{id: "diary"}, api: a.with(key), name: name, large: large, want: want,
			inject: func(b *bucket) func() int { return fail(org, b) },
		})
	}
	for _, kind := range storagetest.Faults() {
		hiccups := storeRequests()
		switch kind {
		case storagetest.Silent:
			hiccups = hiccups[:1] // each costs the delay until the next retry
		case storagetest.Wrong:
			hiccups = hiccups[:4] // a home is fetched at most twice
		default:
		}
		add(kind.String()+" once each", true, "", func(org string, b *bucket) func() int {
			heals := make([]func() int, 0, len(hiccups))
			for _, request := range hiccups {
				heals = append(heals, b.Inject(kind, 1, func(r *http.Request) bool { return request.is(r, org) }))
			}
			return func() int {
				least := 1
				for _, heal := range heals {
					least = min(least, heal())
				}
				return least
			}
		})
		switch kind {
		case storagetest.Slow: // not a failure
			continue
		// To a worker these look like other faults, as the tests of stores show.
		case storagetest.Throttled, storagetest.Reset, storagetest.Lost:
			continue
		default:
		}
		for _, request := range storeRequests() {
			want := proto.CodeThreadSave
			switch {
			case kind == storagetest.Cut && request.op == "get" && !request.part:
				want = "" // the rest of a truncated response is fetched as a part
			case request.op == "get":
				want = proto.CodeThreadMount
			}
			add(request.name+": "+kind.String(), request.part, want, func(org string, b *bucket) func() int {
				return b.Inject(kind, -1, func(r *http.Request) bool { return request.is(r, org) })
			})
		}
	}
	return all
}
