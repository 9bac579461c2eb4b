package web

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Organisations take turns, however many requests one of them has.
func TestOrganisationsTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var all Turns
		for range MaxTurns() {
			if err := all.Begin(t.Context(), "first"); err != nil {
				t.Fatal(err)
			}
		}
		var mu sync.Mutex
		var order []string
		wait := func(org string, n int) {
			for range n {
				go func() {
					if err := all.Begin(t.Context(), org); err != nil {
						t.Error(err)
					}
					mu.Lock()
					defer mu.Unlock()
					order = append(order, org)
				}()
			}
			synctest.Wait()
		}
		wait("busy", 5)
		wait("small", 1)
		wait("other", 2)
		gone, leave := context.WithCancel(t.Context())
		left := make(chan error, 1)
		go func() { left <- all.Begin(gone, "leaver") }()
		synctest.Wait()
		leave()
		if err := <-left; !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		for range 8 {
			all.End()
			synctest.Wait()
		}
		if want := []string{"busy", "small", "other", "busy", "other", "busy", "busy", "busy"}; !slices.Equal(order, want) {
			t.Errorf("%v, want %v", order, want)
		}
		for range MaxTurns() {
			all.End()
		}
		if all.held != 0 || len(all.orgs)+len(all.waiting) != 0 {
			t.Errorf("%d turns are held, and %v wait", all.held, all.waiting)
		}
	})
}
