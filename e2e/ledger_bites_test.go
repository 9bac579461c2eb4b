package e2e

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto/fault"
)

// bite is a bug, and what makes it felt.
type bite struct {
	bug    fault.Bug
	apart  bool
	kinds  []kind // of the clients
	wrong  func(l *ledger) []trouble
	cycles int
	// found is in the text of one violation at least.
	found string
}

func bites() []bite {
	kills := func(l *ledger) []trouble { return []trouble{killed(l.members[0], atOnce)} }
	// The process dies when there is a webhook to be sent again.
	forgets := func(l *ledger) []trouble {
		kill := kills(l)[0]
		return []trouble{{kill.name + " with webhooks to be sent again", func(l *ledger, r *rand.Rand) (func(), time.Duration) {
			refused, usual := l.refuseAll()
			defer usual()
			select {
			case <-refused:
			case <-time.After(patience):
				l.violate(troubleSubject, "no webhook comes")
			}
			return kill.inflict(l, r)
		}}}
	}
	// Workers are taken for dead, and come back: one runs on meanwhile, and the other does nothing at all. Each
	// twice, since it may have had nothing to do that it could tell afterwards.
	ghosts := func(l *ledger) []trouble {
		long := func(*rand.Rand) time.Duration { return 16 * time.Second }
		return []trouble{cutOff(l.member("worker-1"), "cut off", long, true, false, false), frozen(l.member("worker-2"), long)}
	}
	return []bite{
		{fault.AckBeforeResult, false, slices.Repeat([]kind{kindPolling}, 8), kills, 1, "has not ended"},
		{fault.ResultWithoutCAS, true, slices.Repeat([]kind{kindPolling}, 8), ghosts, 4, "tells"},
		{fault.ClaimAfterStart, false, slices.Repeat([]kind{kindPolling}, 8), kills, 1, "it ran more often"},
		{fault.LeaseWithoutFencing, true, slices.Repeat([]kind{kindPolling, kindThread}, 4), ghosts, 4, ""},
		{fault.RetryInMemory, false, slices.Repeat([]kind{kindWebhook}, 8), forgets, 1, "its webhook was not delivered"},
	}
}

// testLedgerBites plants bugs, each of which breaks a promise that the ledger holds bullpen to. It must find each of them.
func testLedgerBites(t *testing.T, p *programs) {
	p = p.faulty(t)
	planted := map[fault.Bug]bool{}
	for _, b := range bites() {
		planted[b.bug] = true
		t.Run(string(b.bug), func(t *testing.T) {
			t.Parallel()
			d := newDeployment(t, p, topology{apart: b.apart})
			d.env = append(d.env, "BULLPEN_PLANTED_BUG="+string(b.bug))
			d.deploy()
			l := newLedger(t, d)
			l.kinds, l.longest = b.kinds, 20*time.Second // losses are noticed within 15 s
			violations := l.run(b.wrong(l), b.cycles)
			for _, v := range violations {
				t.Logf("found %s", v)
			}
			if !slices.ContainsFunc(violations, func(v violation) bool { return strings.Contains(v.text, b.found) }) {
				t.Errorf("nothing that %q was found; run it again with -ledger-seed %d", b.found, l.seed)
			}
		})
	}
	for _, bug := range fault.Bugs() {
		if !planted[bug] {
			t.Errorf("nobody looks for %s", bug)
		}
	}
}
