// Package changes notifies clients of changed objects.
//
// An event has the ids of objects and not their new state: clients read their lists again. So
// events are not repeated after a reconnect, and a slow client costs a bounded set of ids.
package changes

import (
	"slices"
	"sync"

	"github.com/bullpen-run/bullpen/proto"
)

// maxIDs is the number of ids of a kind in an event.
const maxIDs = 50

// Feed passes changes to subscriptions. The zero value is ready for use.
type Feed struct {
	mu    sync.Mutex
	byOrg map[string]map[*subscription]struct{} // subscriptions to all organisations are at ""
}

// Changed passes a change to the subscriptions that may see it. It never blocks.
func (f *Feed) Changed(c proto.Change) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.Org == "" {
		for _, all := range f.byOrg {
			add(all, c)
		}
		return
	}
	add(f.byOrg[c.Org], c)
	add(f.byOrg[""], c)
}

func add(to map[*subscription]struct{}, c proto.Change) {
	for s := range to {
		s.add(c)
	}
}

// subscription collects the changes that have not been sent to a client.
type subscription struct {
	feed    *Feed
	org     string // empty for all organisations
	kinds   []proto.ChangeKind
	pending map[proto.ChangeKind]*objects
	changed chan struct{} // has a value while changes are pending
}

// objects are changed objects of a kind.
type objects struct {
	ids  []string
	more bool // more objects have changed than ids has
}

// subscribe starts to collect the changes of objects of these kinds: of an organisation, or of all
// if org is empty. The caller must call close.
func (f *Feed) subscribe(org string, kinds []proto.ChangeKind) *subscription {
	s := &subscription{
		feed: f, org: org, kinds: kinds, pending: map[proto.ChangeKind]*objects{}, changed: make(chan struct{}, 1),
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byOrg == nil {
		f.byOrg = map[string]map[*subscription]struct{}{}
	}
	if f.byOrg[org] == nil {
		f.byOrg[org] = map[*subscription]struct{}{}
	}
	f.byOrg[org][s] = struct{}{}
	return s
}

func (s *subscription) close() {
	s.feed.mu.Lock()
	defer s.feed.mu.Unlock()
	delete(s.feed.byOrg[s.org], s)
	if len(s.feed.byOrg[s.org]) == 0 {
		delete(s.feed.byOrg, s.org)
	}
}

// add is called with the feed locked.
func (s *subscription) add(c proto.Change) {
	if !slices.Contains(s.kinds, c.Kind) {
		return
	}
	o := s.pending[c.Kind]
	if o == nil {
		o = new(objects)
		s.pending[c.Kind] = o
	}
	switch {
	case slices.Contains(o.ids, c.ID):
	case c.ID == "" || len(o.ids) == maxIDs:
		o.more = true
	default:
		o.ids = append(o.ids, c.ID)
	}
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// take returns the pending changes, and removes them.
func (s *subscription) take() map[proto.ChangeKind]*objects {
	s.feed.mu.Lock()
	defer s.feed.mu.Unlock()
	taken := s.pending
	s.pending = map[proto.ChangeKind]*objects{}
	select {
	case <-s.changed:
	default:
	}
	return taken
}
