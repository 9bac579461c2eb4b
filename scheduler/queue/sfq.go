package queue

import (
	"cmp"
	"slices"
)

// sfq schedules flows by start-time fair queueing (Goyal, Vin, Cheng 1996). A flow is an
// organisation that competes for slots, or an API key that competes for its organisation's share.
//
// Each flow has a start tag, the virtual time of its next service. The flow with the smallest tag
// is served next and its tag grows by the cost of the service. Virtual time advances to the tag of
// the flow in service. So flows with a backlog are served in inverse proportion to their costs.
//
// A flow that gets a backlog starts at the current virtual time, or later if it still owes for
// earlier service. Therefore idle flows save nothing up, and leaving and returning gains nothing.
type sfq[P any] struct {
	now   uint64     // virtual time
	flows []*flow[P] // ordered by compare
}

const (
	// unitCost is the cost of a service with weight 1. All weights up to 16 divide it.
	unitCost = 720720
	// maxDebt caps how far a start tag may lie ahead, so that service which no other flow wanted is
	// not held against a flow for long.
	maxDebt = 4 * unitCost
)

// flow is a party in an sfq. A flow without jobs stays until its debt is paid.
type flow[P any] struct {
	party P
	start uint64
	order uint64 // breaks ties: the flow that waits longest is first
	jobs  int
}

func (f *flow[P]) compare(g *flow[P]) int {
	return cmp.Or(cmp.Compare(f.start, g.start), cmp.Compare(f.order, g.order))
}

// debt returns the virtual time until f may be served.
func (s *sfq[P]) debt(f *flow[P]) uint64 { return max(f.start, s.now) - s.now }

// insert adds f with a debt.
func (s *sfq[P]) insert(f *flow[P], debt, order uint64) {
	f.start, f.order = s.now+debt, order
	i, _ := slices.BinarySearchFunc(s.flows, f, (*flow[P]).compare)
	s.flows = slices.Insert(s.flows, i, f)
}

func (s *sfq[P]) remove(f *flow[P]) {
	i, _ := slices.BinarySearchFunc(s.flows, f, (*flow[P]).compare)
	s.flows = slices.Delete(s.flows, i, i+1)
}

// charge adds the cost of a service to the debt of f.
func (s *sfq[P]) charge(f *flow[P], cost, order uint64) {
	debt := min(s.debt(f)+cost, maxDebt)
	s.remove(f)
	s.insert(f, debt, order)
}

// dequeue removes one job of f, and reports whether f was removed, too.
func (s *sfq[P]) dequeue(f *flow[P]) (removed bool) {
	f.jobs--
	removed = f.jobs == 0 && s.debt(f) == 0
	if removed {
		s.remove(f)
	}
	return removed
}

// advance adds d to the virtual time. It removes idle flows whose debt is now paid, and returns
// their parties.
func (s *sfq[P]) advance(d uint64) (removed []P) {
	s.now += d
	paid, _ := slices.BinarySearchFunc(s.flows, s.now, func(f *flow[P], now uint64) int {
		if f.start <= now {
			return -1
		}
		return 1
	})
	kept := slices.DeleteFunc(s.flows[:paid], func(f *flow[P]) bool {
		if f.jobs == 0 {
			removed = append(removed, f.party)
		}
		return f.jobs == 0
	})
	s.flows = slices.Delete(s.flows, len(kept), paid)
	return removed
}
