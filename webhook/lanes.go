package webhook

import (
	"container/list"
	"time"
)

// What may be on its way at once. A receiver that does not answer holds its lane, of one organisation, and nobody else's; an organisation
// with many such receivers holds its own share.
const (
	maxFlying    = 1000 // attempts of this process
	maxFlyingOrg = 100  // of one organisation
)

// The breaker of a lane: after so many failures in a row that are the receiver's as a whole it is given one attempt at a time, with
// pauses that grow. It delays, and drops nothing.
const (
	breakAfter   = 5
	breakerFirst = time.Second
	breakerMost  = 30 * time.Second
)

// laneKey names a lane: what one organisation sends to one server.
type laneKey struct{ org, origin string }

// lane is the deliveries of an organisation to a server.
type lane struct {
	key      laneKey
	tenant   *tenant
	entries  int       // in the book
	ready    list.List // of *entry whose time has come, first come first served
	flying   int
	failures int // in a row
	until    time.Time
	place    *list.Element // in its tenant's turn, while it can send
}

// tenant is the lanes of an organisation that can send, in turn.
type tenant struct {
	org    string
	lanes  list.List // of *lane
	all    int       // lanes there are
	flying int
	place  *list.Element // in the turn of all tenants, while it can send
}

// lanes is all deliveries whose time has come, and whose turn it is. It is not safe for concurrent use.
type lanes struct {
	each    int // attempts at once in one lane
	byKey   map[laneKey]*lane
	tenants map[string]*tenant
	turn    list.List // of *tenant
	flying  int
}

func newLanes(each int) *lanes {
	return &lanes{each: each, byKey: map[laneKey]*lane{}, tenants: map[string]*tenant{}}
}

// enter gives the lane of a key for one more entry.
func (l *lanes) enter(key laneKey) *lane {
	n := l.byKey[key]
	if n == nil {
		t := l.tenants[key.org]
		if t == nil {
			t = &tenant{org: key.org}
			l.tenants[key.org] = t
		}
		t.all++
		n = &lane{key: key, tenant: t}
		l.byKey[key] = n
	}
	n.entries++
	return n
}

// leave ends what enter began. A lane that nothing is left for is forgotten, its failures too.
func (l *lanes) leave(n *lane) {
	n.entries--
	if n.entries > 0 || n.flying > 0 {
		return
	}
	delete(l.byKey, n.key)
	if n.tenant.all--; n.tenant.all == 0 && n.tenant.flying == 0 {
		delete(l.tenants, n.tenant.org)
	}
}

// add puts an entry of n in its line.
func (l *lanes) add(n *lane, e *entry, now time.Time) {
	e.place = n.ready.PushBack(e)
	l.settle(n, now)
}

// drop takes an entry out of its line.
func (l *lanes) drop(n *lane, e *entry, now time.Time) {
	n.ready.Remove(e.place)
	e.place = nil
	l.settle(n, now)
}

// next takes the entry whose turn it is; nil where none can be sent now.
func (l *lanes) next(now time.Time) *entry {
	if l.flying >= maxFlying {
		return nil
	}
	at := l.turn.Front()
	if at == nil {
		return nil
	}
	t := at.Value.(*tenant)
	n := t.lanes.Front().Value.(*lane)
	e := n.ready.Remove(n.ready.Front()).(*entry)
	e.place = nil
	n.flying++
	t.flying++
	l.flying++
	l.settle(n, now)
	if n.place != nil {
		t.lanes.MoveToBack(n.place)
	}
	if t.place != nil {
		l.turn.MoveToBack(t.place)
	}
	return e
}

// landed ends an attempt that next began.
func (l *lanes) landed(n *lane, now time.Time) {
	n.flying--
	n.tenant.flying--
	l.flying--
	l.settle(n, now)
}

// judge takes in what an attempt said of the receiver as a whole.
func (l *lanes) judge(n *lane, v verdict, now time.Time) {
	if !v.slow {
		n.failures, n.until = 0, time.Time{}
		l.settle(n, now)
		return
	}
	n.failures++
	pause := v.pause
	if over := n.failures - breakAfter; over >= 0 {
		pause = max(pause, min(breakerFirst<<min(over, 10), breakerMost))
	}
	if until := now.Add(pause); until.After(n.until) {
		n.until = until
	}
	l.settle(n, now)
}

// open reports whether n can send something now.
func (l *lanes) open(n *lane, now time.Time) bool {
	most := l.each
	if n.failures >= breakAfter {
		most = 1
	}
	return n.ready.Len() > 0 && n.flying < most && !now.Before(n.until)
}

// settle puts n, and its tenant, in turn or out of it. It has to be called when a pause of n is over.
func (l *lanes) settle(n *lane, now time.Time) {
	t := n.tenant
	switch open := l.open(n, now); {
	case open && n.place == nil:
		n.place = t.lanes.PushBack(n)
	case !open && n.place != nil:
		t.lanes.Remove(n.place)
		n.place = nil
	}
	switch open := t.lanes.Len() > 0 && t.flying < maxFlyingOrg; {
	case open && t.place == nil:
		t.place = l.turn.PushBack(t)
	case !open && t.place != nil:
		l.turn.Remove(t.place)
		t.place = nil
	}
}
