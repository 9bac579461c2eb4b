package schedules

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

// addTo adds a schedule whose next tick is at a time.
func addTo(t testing.TB, x *index, org, id string, next time.Time) *definition {
	s := proto.Schedule{ID: id, Org: org, Every: proto.Seconds(time.Minute), TimeZone: "UTC", CreatedAt: noon, UpdatedAt: noon}
	ticker, err := newTicker(&s)
	if err != nil {
		t.Fatal(err)
	}
	d := &definition{Schedule: s, ticker: ticker}
	x.setDefinition(definitionKey(org, id), nil, d)
	x.setState(stateKey(org, id), nil, &proto.ScheduleState{UpdatedAt: noon, Next: next})
	return d
}

func ids(list []*definition) string {
	var b []string
	for _, d := range list {
		b = append(b, d.ID)
	}
	return strings.Join(b, " ")
}

func TestIndex(t *testing.T) {
	x := &index{orgs: map[string]map[string]*entry{}}
	a := addTo(t, x, "acme", "a", noon.Add(3*time.Second))
	b := addTo(t, x, "acme", "b", noon.Add(time.Second))
	c := addTo(t, x, "other", "c", noon.Add(2*time.Second))
	want := func(what, want string, now time.Duration) {
		t.Helper()
		if got := ids(x.take(noon.Add(now))); got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	want("before the first tick", "", 0)
	want("in their order", "b c", 2*time.Second)
	want("being handled", "", 2*time.Second)
	x.setState(stateKey("acme", "b"), nil, &proto.ScheduleState{UpdatedAt: noon, Next: noon.Add(time.Minute)})
	x.put(b, noon)
	x.put(c, noon.Add(4*time.Second)) // as nothing was stored
	want("handled", "a", 3*time.Second)
	want("again", "c", 4*time.Second)
	x.putAll()
	want("another leader", "c a", 4*time.Second)

	paused := *a
	paused.Paused, paused.UpdatedAt = true, noon.Add(time.Second)
	x.putAll()
	x.setDefinition(definitionKey("acme", "a"), a, &paused)
	want("the pause is to be stored", "a c", 4*time.Second)
	x.setState(stateKey("acme", "a"), nil, &proto.ScheduleState{UpdatedAt: paused.UpdatedAt, Next: noon})
	x.putAll()
	want("paused", "c", 5*time.Second)
	x.setDefinition(definitionKey("acme", "b"), b, nil)
	want("removed", "", time.Hour)
	x.setState(stateKey("acme", "b"), nil, nil)
	if n := len(x.orgs["acme"]); n != 1 {
		t.Errorf("%d schedules are left", n)
	}
}

func TestOrganisationsTakeTurns(t *testing.T) {
	due := newTurns()
	for org, n := range map[string]int{"large": 5, "small": 2} {
		for i := range n {
			due.add(&definition{Schedule: proto.Schedule{Org: org, ID: fmt.Sprint(org, i)}})
		}
	}
	var got []*definition
	take := func(most int) {
		for d := due.next(most); d != nil; d = due.next(most) {
			got = append(got, d)
		}
	}
	take(2)
	orgs := map[string]int{}
	for _, d := range got {
		orgs[d.Org]++
	}
	if orgs["large"] != 2 || orgs["small"] != 2 || got[0].Org == got[1].Org {
		t.Errorf("at first: %s", ids(got))
	}
	due.done(got[slices.IndexFunc(got, func(d *definition) bool { return d.Org == "large" })])
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

// A look at schedules of which none is due costs nothing that grows with their number.
func BenchmarkTake(b *testing.B) {
	for _, n := range []int{100, 100_000} {
		b.Run(fmt.Sprint(n, " schedules"), func(b *testing.B) {
			x := &index{orgs: map[string]map[string]*entry{}}
			for i := range n {
				addTo(b, x, fmt.Sprint("org", i%10), fmt.Sprint(i), noon.Add(time.Duration(i)*time.Second))
			}
			for b.Loop() {
				x.take(noon.Add(-time.Second))
			}
		})
	}
}
