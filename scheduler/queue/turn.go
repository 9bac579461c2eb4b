package queue

import (
	"cmp"
	"slices"
)

// turn is the order in which parties that wait for the same are served: organisations for slots, keys for what their organisation gets.
// It has a clock that counts service and not time. Being served costs a party some of it, and it is due again when that has passed; who
// is due first is next. So of any two parties that wait, each is served as much more often as it costs less.
//
// Whoever comes is due at once, but for what was just served and is not due again yet: staying away saves nothing up, and going and
// coming gains nothing.
type turn[P any] struct {
	now    uint64
	places []*place[P] // those due first come first, and of several those that have stood there longest
}

const (
	// round is what being served once costs a party of weight 1. Weights up to 16 divide it.
	round = 720720
	// mostOwed is how far a party may be from being due, so that what it got while nobody else wanted it is not held against it for long.
	mostOwed = 4 * round
)

// place is a party's place in a turn. A party without jobs keeps it until it is due.
type place[P any] struct {
	party P
	due   uint64
	order uint64 // in which places were taken
	jobs  int
}

func (p *place[P]) compare(q *place[P]) int {
	return cmp.Or(cmp.Compare(p.due, q.due), cmp.Compare(p.order, q.order))
}

// until gives how far the clock has to go on until p is due.
func (t *turn[P]) until(p *place[P]) uint64 {
	return max(p.due, t.now) - t.now
}

// put gives p a place from which it is due when the clock has gone on by that.
func (t *turn[P]) put(p *place[P], until, order uint64) {
	p.due, p.order = t.now+until, order
	at, _ := slices.BinarySearchFunc(t.places, p, (*place[P]).compare)
	t.places = slices.Insert(t.places, at, p)
}

func (t *turn[P]) drop(p *place[P]) {
	at, _ := slices.BinarySearchFunc(t.places, p, (*place[P]).compare)
	t.places = slices.Delete(t.places, at, at+1)
}

// serve takes from p what being served costs.
func (t *turn[P]) serve(p *place[P], cost, order uint64) {
	until := min(t.until(p)+cost, mostOwed)
	t.drop(p)
	t.put(p, until, order)
}

// leave counts one of p's jobs less, and reports whether p has lost its place.
func (t *turn[P]) leave(p *place[P]) (gone bool) {
	p.jobs--
	gone = p.jobs == 0 && t.until(p) == 0
	if gone {
		t.drop(p)
	}
	return gone
}

// pass lets the clock go on, and gives the parties that lose their places by that.
func (t *turn[P]) pass(by uint64) (gone []P) {
	t.now += by
	due, _ := slices.BinarySearchFunc(t.places, t.now, func(p *place[P], now uint64) int {
		if p.due <= now {
			return -1
		}
		return 1
	})
	kept := slices.DeleteFunc(t.places[:due], func(p *place[P]) bool {
		if p.jobs == 0 {
			gone = append(gone, p.party)
		}
		return p.jobs == 0
	})
	t.places = slices.Delete(t.places, len(kept), due)
	return gone
}
