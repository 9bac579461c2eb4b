package queue

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// submittedWithin is how long slots stay reserved after the last submission by an organisation,
	// or of an interactive job.
	submittedWithin = 5 * time.Minute
	demandsKey      = "dispatcher.demands"
)

// demand records recent submissions with the same needs. Slots of the workers that meet the needs
// are reserved for their submitters, see shares.
type demand struct {
	Needs []string  `json:"needs"`
	Last  submitter `json:"last"`  // the last one
	Other submitter `json:"other"` // the last one of another organisation than Last
	// Interactive is when any organisation last submitted an interactive job.
	Interactive time.Time `json:"interactive,omitzero"`

	workers        []*workerState // that meet the needs, of workersVersion
	workersVersion int
	scarce         bool // in this round, so few slots are free that some are reserved
	shares         shares
	background     int // background jobs on the workers
}

// shares are how many slots of a demand may be taken.
type shares struct {
	org           int // by one organisation while another one has submitted
	background    int // by background jobs while interactive ones have been submitted
	orgBackground int // by background jobs of one organisation while both are the case; the smallest
}

// shares returns the shares of the given slots. Within an organisation's share, its background jobs
// leave some to its interactive ones, too.
func (d *Dispatcher) shares(slots int) shares {
	left := func(reserved func(int) int, n int) int {
		if reserved == nil {
			return n
		}
		return n - reserved(n)
	}
	org := left(d.Reserved, slots)
	return shares{org: org, background: left(d.Interactive, slots), orgBackground: left(d.Interactive, org)}
}

// submitter is an organisation and when it last submitted.
type submitter struct {
	Org string    `json:"org"`
	At  time.Time `json:"at"`
}

// observe adds the submission of a job. Submissions may be observed in any order.
func (d *demand) observe(s submitter, class proto.Class) {
	if class == proto.ClassInteractive && s.At.After(d.Interactive) {
		d.Interactive = s.At
	}

	switch {
	case s.Org == d.Last.Org:
		if s.At.After(d.Last.At) {
			d.Last.At = s.At
		}
	case !s.At.Before(d.Last.At):
		d.Last, d.Other = s, d.Last
	case s.At.After(d.Other.At):
		d.Other = s
	}
}

// besides reports whether another organisation than org has submitted since a time.
func (d *demand) besides(org string, since time.Time) bool {
	if d.Last.Org == org {
		return d.Other.At.After(since)
	}
	return d.Last.At.After(since)
}

// caller is an organisation if key is empty, otherwise one of its API keys.
type caller struct{ org, key string }

// demands are the demands of the last submittedWithin, by needKey.
type demands struct {
	all         map[string]*demand
	interactive map[caller]time.Time // of the last interactive submission
	// before is when the last leader saved its demands. Organisations that are not in interactive
	// may have submitted until then.
	before time.Time
	next   handover
}

func newDemands() demands {
	all := map[string]*demand{}
	return demands{all: all, interactive: map[caller]time.Time{}, next: handover{
		key: demandsKey, what: "the organisations that submitted lately", value: func() any {
			return slices.Collect(maps.Values(all))
		},
	}}
}

// of returns the demand for needs.
func (d *demands) of(needs []string) *demand {
	key := needKey(needs)
	one := d.all[key]
	if one == nil {
		one = &demand{Needs: needs}
		d.all[key] = one
	}
	return one
}

// observe adds a submission at a time to the demand for its needs.
func (t *term) observe(m *proto.Meta, at time.Time) {
	if !t.reserves() {
		return
	}
	d := &t.demands
	d.of(needsOf(m)).observe(submitter{m.Org, at}, m.Class())
	d.next.changed = true
	if m.Class() != proto.ClassInteractive {
		return
	}
	callers := []caller{{org: m.Org}}
	if m.KeyConcurrent > 0 {
		callers = append(callers, caller{m.Org, m.Key})
	}
	for _, c := range callers {
		if at.After(d.interactive[c]) {
			d.interactive[c] = at
		}
	}
}

// reserves reports whether anything is reserved.
func (d *Dispatcher) reserves() bool { return d.Reserved != nil || d.Interactive != nil }

// interactiveSince reports whether c may have submitted interactive jobs since a time.
func (d *demands) interactiveSince(c caller, since time.Time) bool {
	return d.interactive[c].After(since) || d.before.After(since)
}

// loadDemands reads the last leader's demands. Without them, slots are reserved for the submitters
// seen by this leader and the owners of existing jobs.
func (t *term) loadDemands(ctx context.Context) {
	if !t.reserves() {
		return
	}
	var saved []demand
	t.demands.before = t.demands.next.load(ctx, t, &saved)
	for i := range saved {
		d := t.demands.of(saved[i].Needs)
		d.observe(saved[i].Other, proto.ClassBackground)
		d.observe(saved[i].Last, proto.ClassBackground)
		d.Interactive = saved[i].Interactive
	}
}

// reviewDemands deletes old demands, and saves the others.
func (t *term) reviewDemands(ctx context.Context, now time.Time) {
	d := &t.demands
	maps.DeleteFunc(d.all, func(_ string, d *demand) bool { return now.Sub(d.Last.At) > submittedWithin })
	maps.DeleteFunc(d.interactive, func(_ caller, at time.Time) bool { return now.Sub(at) > submittedWithin })
	d.next.review(ctx, t, now)
}

// update updates the slots of the demand. If more are free than reserved, any tenant may take one.
func (d *demand) update(t *term, since time.Time) {
	if d.scarce, d.shares = false, (shares{}); !d.Last.At.After(since) {
		return
	}
	if d.workersVersion != t.workersVersion {
		d.workers, d.workersVersion = d.workers[:0], t.workersVersion
		for _, w := range t.workers {
			if w.capabilities.meet(d.Needs) {
				d.workers = append(d.workers, w)
			}
		}
	}
	free, usable := 0, 0
	d.background = 0
	for _, w := range d.workers {
		free += len(w.free)
		// A draining worker has fewer slots than it announced. A job whose end is not known yet
		// counts in addition to its slot.
		usable += min(len(w.free)+w.load.jobs.all, w.slots)
		d.background += w.load.jobs.background
	}
	d.shares = t.shares(usable)
	d.scarce = free > 0 && free <= usable-d.shares.orgBackground
}

// reserves reports whether a worker's free slots are reserved for others than c, whose organisation
// has active jobs on all workers.
func (d *demand) reserves(w *workerState, c contender, active tally, since time.Time) bool {
	if !d.scarce || !w.capabilities.meet(d.Needs) {
		return false
	}
	others, held := d.besides(c.org, since), tally{}
	if others && active.all >= d.shares.orgBackground { // orgBackground is at most org
		held = d.held(c.org)
	}
	if others && held.all >= d.shares.org {
		return true
	}
	if c.class != proto.ClassBackground || !d.Interactive.After(since) {
		return false
	}
	return d.background >= d.shares.background || others && held.background >= d.shares.orgBackground
}

// held returns the jobs of org on the workers that meet the needs.
func (d *demand) held(org string) (n tally) {
	for _, w := range d.workers {
		o := w.load.orgs[org]
		n.all += o.all
		n.background += o.background
	}
	return n
}

// atShare returns the organisations that get no further slot that others' jobs could use.
func (t *term) atShare(now time.Time) (orgs []string) {
	since := now.Add(-submittedWithin)
	for _, d := range t.demands.all {
		d.update(t, since)
		share := d.shares.org
		for org, o := range t.queue.orgs {
			if share > 0 && o.active.all >= share && d.besides(org, since) && d.held(org).all >= share &&
				!slices.Contains(orgs, org) {
				orgs = append(orgs, org)
			}
		}
	}
	return orgs
}
