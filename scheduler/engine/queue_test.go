package engine

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

// after is how long after noon an item is due; negative for never.
type after time.Duration

func (a *after) due() (time.Time, bool) { return noon.Add(time.Duration(*a)), *a >= 0 }

func setDue(q *Queue[after], org, id string, at time.Duration) Item {
	x := Item{org, id}
	q.Change(x, func(a *after) bool { *a = after(at); return true })
	return x
}

func ids(list []Item) string {
	var b []string
	for _, x := range list {
		b = append(b, x.ID)
	}
	return strings.Join(b, " ")
}

func TestQueue(t *testing.T) {
	q := new(Queue[after])
	setDue(q, "acme", "a", 3*time.Second)
	q.begin((*after).due)
	b := setDue(q, "acme", "b", time.Second)
	c := setDue(q, "other", "c", 2*time.Second)
	want := func(what, want string, now time.Duration) {
		t.Helper()
		if got := ids(q.take(noon.Add(now))); got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	want("before the first is due", "", 0)
	want("in their order", "b c", 2*time.Second)
	want("being handled", "", 2*time.Second)
	setDue(q, "acme", "b", time.Minute)
	want("changed while it is handled", "", 2*time.Second)
	q.put(b, noon)
	q.put(c, noon.Add(4*time.Second)) // as nothing was changed
	want("handled", "a", 3*time.Second)
	want("again", "c", 4*time.Second)
	forgotten := 0
	q.end(func(*after) { forgotten++ })
	setDue(q, "acme", "a", 4*time.Second)
	want("nobody leads", "", time.Hour)
	q.begin((*after).due)
	if got := q.take(noon.Add(4 * time.Second)); len(got) != 2 || forgotten != 3 { // both are due since the same time
		t.Errorf("another leader: %q, %d items were forgotten", ids(got), forgotten)
	}
	q.Change(b, func(*after) bool { return false })
	want("removed", "", time.Hour)
	setDue(q, "acme", "a", -1)
	q.put(Item{"acme", "a"}, noon)
	want("nothing to do", "", time.Hour)
	if n := len(q.entries); n != 2 {
		t.Errorf("%d items are known", n)
	}
}

func TestOrganisationsTakeTurns(t *testing.T) {
	due := newTurns()
	for org, n := range map[string]int{"large": 5, "small": 2} {
		for i := range n {
			due.add(Item{org, fmt.Sprint(org, i)})
		}
	}
	var got []Item
	take := func(most int) {
		for x, ok := due.next(most); ok; x, ok = due.next(most) {
			got = append(got, x)
		}
	}
	take(2)
	orgs := map[string]int{}
	for _, x := range got {
		orgs[x.Org]++
	}
	if orgs["large"] != 2 || orgs["small"] != 2 || got[0].Org == got[1].Org {
		t.Errorf("at first: %s", ids(got))
	}
	due.done(got[slices.IndexFunc(got, func(x Item) bool { return x.Org == "large" })])
	got = nil
	take(2)
	if ids(got) != "large2" {
		t.Errorf("after one of them: %s", ids(got))
	}
	for range 2 {
		due.done(got[0])
	}
	got = nil
	take(2)
	if ids(got) != "large3 large4" || len(due.orgs)+len(due.waiting) != 0 {
		t.Errorf("at last: %s, and %v waits", ids(got), due.waiting)
	}
}

// A look at items of which none is due costs nothing that grows with their number.
func BenchmarkTake(b *testing.B) {
	for _, n := range []int{100, 100_000} {
		b.Run(fmt.Sprint(n, " items"), func(b *testing.B) {
			q := new(Queue[after])
			q.begin((*after).due)
			for i := range n {
				setDue(q, fmt.Sprint("org", i%10), fmt.Sprint(i), time.Duration(i)*time.Second)
			}
			for b.Loop() {
				q.take(noon.Add(-time.Second))
			}
		})
	}
}
