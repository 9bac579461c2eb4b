package queue

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// backlog queues n jobs of a key without limits.
func backlog(q *fairQueue, org, key string, n int, change ...func(*proto.Meta)) {
	for range n {
		m := meta(org, key, proto.ModeAsync)
		m.Concurrent = 1 << 30
		for _, c := range change {
			c(&m)
		}
		q.add(m)
	}
}

func withWeight(w int) func(*proto.Meta) { return func(m *proto.Meta) { m.Weight = w } }

func withLanguage(l proto.Language) func(*proto.Meta) { return func(m *proto.Meta) { m.Language = l } }

// A flow that uses less than its share always gets the next free slot.
func TestBacklogDelaysNoOthers(t *testing.T) {
	for name, quiet := range map[string]struct{ org, key string }{
		"organisations": {"quiet", "k"}, "keys": {"loud", "quiet"},
	} {
		t.Run(name, func(t *testing.T) {
			q := newFairQueue()
			backlog(q, "loud", "k", 10000)
			for i := range 1000 {
				for range 2 + i%7 {
					if j := serve(q); j.meta.Org != "loud" || j.meta.Key != "k" {
						t.Fatalf("served %s %s", j.meta.Org, j.meta.Key)
					}
				}
				backlog(q, quiet.org, quiet.key, 1)
				if j := serve(q); j.meta.Org != quiet.org || j.meta.Key != quiet.key {
					t.Fatalf("%d: served %s %s before the quiet one", i, j.meta.Org, j.meta.Key)
				}
			}
		})
	}
}

// A flow that returns as soon as it was served gets its share and no more.
func TestLeavingAndReturningGainsNothing(t *testing.T) {
	for name, tt := range map[string]struct {
		enter func(*fairQueue)
		is    func(*job) bool
		share int // the divisor
	}{
		"organisation": {
			func(q *fairQueue) { backlog(q, "returns", "k", 1, withLanguage(proto.Node)) }, // the only job with these needs
			func(j *job) bool { return j.meta.Org == "returns" }, 1 + 16 + 4,
		},
		"key": {
			func(q *fairQueue) { backlog(q, "large", "returns", 1, withWeight(16)) },
			func(j *job) bool { return j.meta.Org == "large" && j.meta.Key == "returns" }, 4, // of its organisation
		},
	} {
		t.Run(name, func(t *testing.T) {
			q := newFairQueue()
			for i := range 3 {
				backlog(q, "large", fmt.Sprint(i), 2000, withWeight(16))
			}
			backlog(q, "small", "k", 1000, withWeight(4))
			tt.enter(q)
			got, of := 0, 0
			for range 2100 {
				j := serve(q)
				if name == "organisation" || j.meta.Org == "large" {
					of++
				}
				if tt.is(j) {
					got++
					q.remove(j)
					tt.enter(q)
				}
			}
			if want := of / tt.share; got < want-1 || got > want+1 {
				t.Fatalf("got %d of %d, want %d", got, of, want)
			}
		})
	}
}

// An organisation saves nothing up while its limit is reached or no slot meets the needs of its
// jobs.
func TestBlockedOrganisationSavesNothingUp(t *testing.T) {
	q := newFairQueue()
	backlog(q, "free", "k", 3000)
	backlog(q, "limited", "k", 300, func(m *proto.Meta) { m.Concurrent = 1 })
	backlog(q, "node", "k", 300, withLanguage(proto.Node))
	others := slotsFor(func(n *needSet) bool { return n.needs[0] != CapabilityLanguage(proto.Node) })
	var held *job
	for range 1000 {
		j := q.next(others)
		q.charge(j)
		q.activate(j, running, "w", noon)
		if j.meta.Org == "limited" {
			held = j
		}
	}
	q.remove(held)
	served := map[string]int{}
	for range 30 {
		j := serve(q)
		served[j.meta.Org]++
		q.remove(j)
	}
	for org, n := range served {
		if n < 9 || n > 11 {
			t.Errorf("%s was served %d times of 30", org, n)
		}
	}
}

// party is an organisation with a permanent backlog.
type party struct {
	org       string
	weight    int
	keys      int
	languages []proto.Language
}

// refill queues jobs so that each key has jobs in each language.
func (p *party) refill(q *fairQueue) {
	o := q.org(p.org)
	for key := range p.keys {
		for _, l := range p.languages {
			n := q.needSets[needKey([]string{CapabilityLanguage(l)})]
			if k := o.keys[fmt.Sprint(key)]; n == nil || k == nil || k.jobs[proto.ClassBackground][n] == nil {
				backlog(q, p.org, fmt.Sprint(key), 5, withWeight(p.weight), withLanguage(l))
			}
		}
	}
}

func (p *party) leave(q *fairQueue) {
	for _, j := range q.jobs {
		if j.meta.Org == p.org && j.state == queued {
			q.remove(j)
		}
	}
}

// Organisations with random weights, languages and keys enter and leave. While the set of waiting
// ones does not change, each gets the share of its weight, with an error of at most weight+1 jobs.
// The keys of an organisation share evenly.
func TestSharesFollowWeights(t *testing.T) {
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	q := newFairQueue()
	var all, waiting []*party
	for i := range 12 {
		languages := proto.Languages()
		random.Shuffle(len(languages), func(i, j int) { languages[i], languages[j] = languages[j], languages[i] })
		all = append(all, &party{
			org: fmt.Sprintf("o%d", i), weight: []int{1, 2, 3, 4, 7, 16}[random.IntN(6)], keys: 1 + random.IntN(3),
			languages: languages[:1+random.IntN(3)],
		})
	}
	for range 60 {
		for _, p := range all {
			at := slices.Index(waiting, p)
			switch coin := random.IntN(3); {
			case at < 0 && coin == 0:
				waiting = append(waiting, p)
			case at >= 0 && coin == 0:
				waiting = slices.Delete(waiting, at, at+1)
				p.leave(q)
			}
		}
		weights := 0
		for _, p := range waiting {
			weights += p.weight
		}
		served, keys := map[string]int{}, map[string]int{}
		for n := 1; n <= weights*(1+random.IntN(20)); n++ {
			for _, p := range waiting {
				p.refill(q)
			}
			j := serve(q)
			served[j.meta.Org]++
			keys[j.meta.Org+" "+j.meta.Key]++
			if random.IntN(2) == 0 { // otherwise its program continues
				q.remove(j)
			}
			for _, p := range waiting {
				got, share := served[p.org], float64(n*p.weight)/float64(weights)
				if diff := float64(got) - share; math.Abs(diff) > float64(p.weight+1) {
					t.Fatalf("%s, of weight %d of %d, was served %d times of %d", p.org, p.weight, weights, got, n)
				}
				for key := range p.keys {
					if diff := float64(keys[fmt.Sprintf("%s %d", p.org, key)]) - float64(got)/float64(p.keys); math.Abs(diff) > 2 {
						t.Fatalf("key %d of %d of %s: %v", key, p.keys, p.org, keys)
					}
				}
			}
		}
	}
}

// If slots have different capabilities, organisations with equal needs share the slots that meet
// them by weight, whatever others get.
func TestSharesFollowWeightsWhereSlotsDiffer(t *testing.T) {
	q := newFairQueue()
	parties := []*party{
		{"python1", 1, 1, []proto.Language{proto.Python}},
		{"python4", 4, 1, []proto.Language{proto.Python}},
		{"node1", 1, 1, []proto.Language{proto.Node}},
		{"node16", 16, 1, []proto.Language{proto.Node}},
		{"bash", 1, 1, []proto.Language{proto.Bash}},
		{"both2", 2, 1, []proto.Language{proto.Python, proto.Node}},
		{"both3", 3, 1, []proto.Language{proto.Node, proto.Python}},
	}
	served := map[string]int{}
	const slots = 60000
	for n := range slots {
		for _, p := range parties {
			p.refill(q)
		}
		slot := newCapabilities([]string{CapabilityLanguage(proto.Python)}) // ten of eleven slots
		if n%11 == 0 {
			slot = newCapabilities([]string{CapabilityLanguage(proto.Node), CapabilityLanguage(proto.Bash)})
		}
		j := q.next(slotsFor(func(n *needSet) bool { return slot.meet(n.needs) }))
		q.charge(j)
		q.activate(j, running, "w", noon)
		q.remove(j)
		served[j.meta.Org]++
	}
	t.Log(served)
	for _, pair := range [][2]*party{
		{parties[0], parties[1]},
		{parties[2], parties[3]},
		{parties[2], parties[4]},
		{parties[5], parties[6]},
	} {
		p, q := pair[0], pair[1]
		if ratio := float64(served[p.org]*q.weight) / float64(served[q.org]*p.weight); ratio < 0.95 || ratio > 1.05 {
			t.Errorf("%s was served %d times, %s %d times", p.org, served[p.org], q.org, served[q.org])
		}
	}
}
