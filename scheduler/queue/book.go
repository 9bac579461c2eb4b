package queue

import (
	"container/list"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
)

// state is where the dispatcher believes a job stands.
type state int

const (
	queued   state = iota // waiting for a slot
	assigned              // told to a worker, not yet claimed
	running               // claimed
)

// job is one job that is not terminal.
type job struct {
	meta     proto.Meta
	state    state
	attempt  int       // the attempt that runs, or that ran last
	revision uint64    // sequence number of the execution's record, 0 before the first claim
	worker   string    // who was assigned it or runs it
	ticket   uint64    // the slot it was assigned
	seq      uint64    // of its message in the stream, 0 while it is being stored
	msg      *nats.Msg // the job itself, until it is stored
	body     string    // the object with its body, where that was claim-checked
	since    time.Time
	losses   int           // workers that died with it since its program last ran, as its record counts them
	ending   bool          // its terminal record is being written
	size     int64         // what it takes of the book's memory
	kind     *kind         // of its needs, while queued
	place    *list.Element // in its key's line, while queued
	order    uint64        // in which the jobs of a line are served: that of the stream
}

// cost is what serving the job takes of its organisation.
func (j *job) cost() uint64 { return max(1, round/uint64(max(1, j.meta.Weight))) }

// line is one key: its queued jobs, by class and kind, oldest first, and what counts against its limit.
type line struct {
	key    string
	jobs   map[proto.Class]map[*kind]*list.List // none of them empty
	queued map[proto.Class]int
	busy   int           // assigned and running
	served int           // jobs taken, to weigh the classes
	place  *place[*line] // in its organisation's turn, nil where it has none
}

// interactiveShare is how many of that many+1 jobs of a key are taken from the interactive class while both classes wait.
const interactiveShare = 4

// head gives the job to be served next among the kinds that can be run.
func (l *line) head(can func(*kind) bool) *job {
	first, second := l.jobs[proto.ClassInteractive], l.jobs[proto.ClassBatch]
	if l.served%(interactiveShare+1) == interactiveShare {
		first, second = second, first
	}
	for _, class := range []map[*kind]*list.List{first, second} {
		var oldest *job
		for k, jobs := range class {
			if !can(k) {
				continue
			}
			e := jobs.Front()
			for e != nil && e.Value.(*job).ending {
				e = e.Next()
			}
			if e == nil {
				continue
			}
			if j := e.Value.(*job); oldest == nil || j.order < oldest.order {
				oldest = j
			}
		}
		if oldest != nil {
			return oldest
		}
	}
	return nil
}

// enqueue puts a job in its place among those of its class and kind. One that has waited before is older than those that have not.
func (l *line) enqueue(j *job) {
	class := j.meta.Class()
	jobs := l.jobs[class][j.kind]
	if jobs == nil {
		jobs = list.New()
		l.jobs[class][j.kind] = jobs
	}
	l.queued[class]++
	if last := jobs.Back(); last == nil || last.Value.(*job).order < j.order {
		j.place = jobs.PushBack(j)
		return
	}
	e := jobs.Front()
	for e.Value.(*job).order < j.order {
		e = e.Next()
	}
	j.place = jobs.InsertBefore(j, e)
}

func (l *line) dequeue(j *job) {
	class := j.meta.Class()
	l.queued[class]--
	jobs := l.jobs[class][j.kind]
	if jobs.Remove(j.place); jobs.Len() == 0 {
		delete(l.jobs[class], j.kind)
	}
}

// room reports whether the key's own limit, as it was when m was submitted, allows one more than used.
func (l *line) room(m *proto.Meta, used int) bool {
	return m.KeyConcurrent == 0 || used < m.KeyConcurrent
}

// tenant is one organisation: its keys' lines, the turn in which those are served, and what counts against its limits.
type tenant struct {
	org    string
	lines  map[string]*line // by key; those with jobs or a place in the turn
	turn   turn[*line]
	stands map[*kind]*place[*tenant] // its places in the turns of kinds
	busy   int                       // assigned and running
	size   int64                     // of its jobs
	queued map[proto.Class]int
}

func (t *tenant) line(key string) *line {
	l := t.lines[key]
	if l == nil {
		l = &line{
			key: key, queued: map[proto.Class]int{},
			jobs: map[proto.Class]map[*kind]*list.List{proto.ClassInteractive: {}, proto.ClassBatch: {}},
		}
		t.lines[key] = l
	}
	return l
}

func (t *tenant) forget(l *line) {
	if l.place == nil && l.busy == 0 {
		delete(t.lines, l.key)
	}
}

// head gives the organisation's job to be served next among the kinds that can be run, nil where there is none or a limit is reached.
func (t *tenant) head(can func(*kind) bool) *job {
	for _, p := range t.turn.places {
		l := p.party
		if j := l.head(can); j != nil && t.busy < j.meta.Concurrent && l.room(&j.meta, l.busy) {
			return j
		}
	}
	return nil
}

// until gives how long the organisation is not due yet where it comes anew: as long as where it stands already.
func (t *tenant) until() (least uint64) {
	first := true
	for k, p := range t.stands {
		if u := k.turn.until(p); first || u < least {
			least, first = u, false
		}
	}
	return least
}

// book is the dispatcher's memory: every job that is not terminal, in fair order. It can be rebuilt from the streams at any time.
// It is not safe for concurrent use: one goroutine owns it.
//
// Each kind has a turn of its own over the organisations, so that jobs which no free slot can run are not even looked at, and weigh
// nothing. An organisation that was served pays for it in all turns it stands in, and the clocks of all kinds that a slot could have run go
// on together: with slots that offer everything that is one turn over all organisations.
type book struct {
	jobs    map[proto.TraceID]*job
	tenants map[string]*tenant
	kinds   map[string]*kind // that had jobs since none was queued
	queued  int
	places  uint64 // counts places taken
	added   uint64 // counts jobs
	size    int64  // of all jobs, in bytes
	most    int64  // that they may have together; 0 for no limit
}

const (
	// jobCost is what a job that waits is taken to need in memory, in bytes, beside the texts that its submitter chose: in the book, and
	// in the index of a NATS that runs in the same process. It was measured with 3 KiB, garbage included.
	jobCost = 4 << 10
	// orgShare is the part of the book's memory that one organisation may have: none can keep the others out.
	orgShare = 2
)

// sizeOf says what the job of m takes of the book's memory, in bytes.
func sizeOf(m *proto.Meta) int64 {
	size := jobCost + len(m.ThreadID) + len(m.WebhookURL) + len(m.RequestID) + len(m.ClientID) + len(m.UserAgent)
	for name, value := range m.Metadata {
		size += len(name) + len(value)
	}
	return int64(size)
}

func newBook() *book {
	return &book{
		jobs: map[proto.TraceID]*job{}, tenants: map[string]*tenant{}, kinds: map[string]*kind{},
	}
}

func (b *book) tenant(org string) *tenant {
	t := b.tenants[org]
	if t == nil {
		t = &tenant{org: org, lines: map[string]*line{}, stands: map[*kind]*place[*tenant]{}, queued: map[proto.Class]int{}}
		b.tenants[org] = t
	}
	return t
}

// admit refuses a job that its organisation's plan, its key or the book has no place for. Interactive jobs run now or not at all: those
// queued count as running. Batch jobs wait, as many as the plan allows.
func (b *book) admit(m *proto.Meta) *proto.Refusal {
	t := b.tenant(m.Org)
	defer b.forget(t)
	if size := sizeOf(m); b.most > 0 && (b.size+size > b.most || t.size+size > b.most/orgShare) {
		return &proto.Refusal{Reason: proto.RefusedUnavailable, Detail: "the dispatcher has no memory for more jobs"}
	}
	if m.Class() != proto.ClassInteractive {
		if used := t.queued[proto.ClassBatch]; used >= m.MaxQueued {
			return &proto.Refusal{Reason: proto.RefusedQueueFull, Limit: m.MaxQueued, Used: used}
		}
		return nil
	}
	if used := t.busy + t.queued[proto.ClassInteractive]; used >= m.Concurrent {
		return &proto.Refusal{Reason: proto.RefusedConcurrency, Limit: m.Concurrent, Used: used}
	}
	if l := t.lines[m.Key]; l != nil {
		if used := l.busy + l.queued[proto.ClassInteractive]; !l.room(m, used) {
			return &proto.Refusal{Reason: proto.RefusedKeyConcurrency, Limit: m.KeyConcurrent, Used: used}
		}
	}
	return nil
}

// add takes a job that was submitted or found in the stream.
func (b *book) add(m proto.Meta) *job {
	if j := b.jobs[m.TraceID]; j != nil {
		return j
	}
	b.added++
	j := &job{meta: m, order: b.added, size: sizeOf(&m)}
	b.jobs[m.TraceID] = j
	b.size += j.size
	b.tenant(m.Org).size += j.size
	b.enqueue(j)
	return j
}

// enqueue puts a job in its key's line, and key and organisation in their turns.
func (b *book) enqueue(j *job) {
	t := b.tenant(j.meta.Org)
	l := t.line(j.meta.Key)
	needs := needsOf(&j.meta)
	k := b.kinds[kindName(needs)]
	if k == nil {
		k = &kind{needs: needs}
		b.kinds[kindName(needs)] = k
	}
	j.state, j.worker, j.kind = queued, "", k
	l.enqueue(j)
	t.queued[j.meta.Class()]++
	b.queued++
	b.places++
	if l.place == nil {
		l.place = &place[*line]{party: l}
		t.turn.put(l.place, 0, b.places)
	}
	l.place.jobs++
	if t.stands[k] == nil {
		p := &place[*tenant]{party: t}
		k.turn.put(p, t.until(), b.places)
		t.stands[k] = p
	}
	t.stands[k].jobs++
}

// dequeue takes a queued job out of its line.
func (b *book) dequeue(j *job) {
	t := b.tenant(j.meta.Org)
	l := t.lines[j.meta.Key]
	l.dequeue(j)
	t.queued[j.meta.Class()]--
	b.queued--
	if t.turn.leave(l.place) {
		l.place = nil
		t.forget(l)
	}
	if j.kind.turn.leave(t.stands[j.kind]) {
		delete(t.stands, j.kind)
	}
	j.place, j.kind = nil, nil
	if b.queued == 0 {
		b.rest()
	}
}

// rest ends all turns: nobody waits.
func (b *book) rest() {
	clear(b.kinds)
	for _, t := range b.tenants {
		clear(t.stands)
		t.turn = turn[*line]{}
		for _, l := range t.lines {
			l.place = nil
			t.forget(l)
		}
		b.forget(t)
	}
}

// serve takes from a queued job's key and organisation what serving it costs them.
func (b *book) serve(j *job) {
	t := b.tenant(j.meta.Org)
	l := t.lines[j.meta.Key]
	l.served++
	for _, gone := range t.turn.pass(t.turn.until(l.place)) {
		gone.place = nil
		t.forget(gone)
	}
	b.places++
	t.turn.serve(l.place, round, b.places)
	for k, p := range t.stands {
		k.turn.serve(p, j.cost(), b.places)
	}
}

// next finds the job to be served next among the kinds that can be run, leaving it where it is: of the organisation that is due first, and
// there of the key that is due first, passing over those at their limits. The clocks go on until that is due. It is nil when there is none.
func (b *book) next(can func(*kind) bool) *job {
	var best *job
	var until, order uint64
	for _, k := range b.kinds {
		if !can(k) {
			continue
		}
		if j, p := k.first(can); j != nil {
			if u := k.turn.until(p); best == nil || u < until || u == until && p.order < order {
				best, until, order = j, u, p.order
			}
		}
	}
	if until > 0 {
		b.pass(until, can)
	}
	return best
}

// first gives the job to be served next of the organisation that is due first of those that wait in the turn of k, with its place.
func (k *kind) first(can func(*kind) bool) (*job, *place[*tenant]) {
	for _, p := range k.turn.places {
		if p.jobs == 0 {
			continue
		}
		if j := p.party.head(can); j != nil {
			return j, p
		}
	}
	return nil, nil
}

// pass lets the clocks of all kinds that can be run go on.
func (b *book) pass(by uint64, can func(*kind) bool) {
	for _, k := range b.kinds {
		if !can(k) {
			continue
		}
		for _, t := range k.turn.pass(by) {
			delete(t.stands, k)
			b.forget(t)
		}
	}
}

// take marks a job as assigned or running, wherever it was before.
func (b *book) take(j *job, s state, worker string, now time.Time) {
	if j.state == queued {
		b.occupy(j, 1)
		b.dequeue(j)
	}
	j.state, j.worker, j.since = s, worker, now
}

// occupy counts the places that the limits of j's organisation and key have for programs.
func (b *book) occupy(j *job, n int) {
	t := b.tenant(j.meta.Org)
	t.busy += n
	t.lines[j.meta.Key].busy += n
}

// requeue puts a job that was assigned or running back in line.
func (b *book) requeue(j *job) {
	if j.state == queued {
		return
	}
	b.occupy(j, -1)
	b.enqueue(j)
}

// remove forgets a job that is terminal.
func (b *book) remove(j *job) {
	t := b.tenant(j.meta.Org)
	if j.state == queued {
		b.dequeue(j)
	} else {
		b.occupy(j, -1)
		t.forget(t.lines[j.meta.Key])
	}
	delete(b.jobs, j.meta.TraceID)
	b.size -= j.size
	t.size -= j.size
	b.forget(t)
}

func (b *book) forget(t *tenant) {
	if len(t.lines)+len(t.stands)+t.busy == 0 {
		delete(b.tenants, t.org)
	}
}
