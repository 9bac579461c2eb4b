package queue

import (
	"container/list"
	"slices"
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
	order    int64         // in which the jobs of a line are served
}

// line holds the queued jobs of one key, by class and kind, oldest first.
type line struct {
	key    string
	jobs   map[proto.Class]map[*kind]*list.List // none of them empty
	served int                                  // jobs taken, to weigh the classes
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

func (l *line) empty() bool {
	return len(l.jobs[proto.ClassInteractive])+len(l.jobs[proto.ClassBatch]) == 0
}

// tenant is one organisation: its keys' lines, served in turn, and what counts against its limits.
type tenant struct {
	org    string
	lines  []*line // in turn; only those with jobs
	stands map[*kind]*stand
	turned uint64 // when it last went to the end of its turn, by the book's count
	busy   int    // assigned and running
	size   int64  // of its jobs
	queued map[proto.Class]int
}

// stand is an organisation's place in the turn of a kind of which it has queued jobs.
type stand struct {
	at   *list.Element
	jobs int
}

func (t *tenant) idle() bool {
	return len(t.lines) == 0 && t.busy == 0
}

// head gives the organisation's job to be served next among the kinds that can be run, nil where there is none or its limit is
// reached.
func (t *tenant) head(can func(*kind) bool) *job {
	for _, l := range t.lines {
		if j := l.head(can); j != nil && t.busy < j.meta.Concurrent {
			return j
		}
	}
	return nil
}

// book is the dispatcher's memory: every job that is not terminal, in fair order. It can be rebuilt from the streams at any time.
// It is not safe for concurrent use: one goroutine owns it.
//
// Each kind has a turn of its own, so that jobs which no free slot can run are not even looked at. An organisation that was served
// goes to the end of all turns it stands in, and of the first in each turn the one that was served longest ago is next: with
// slots that offer everything that is one round over all organisations.
type book struct {
	jobs    map[proto.TraceID]*job
	tenants map[string]*tenant
	kinds   map[string]*kind // those with queued jobs
	turns   uint64           // counts turns taken
	front   int64            // order of the job that last went to the front of its line, from 0 down
	back    int64            // and to the back, from 0 up
	size    int64            // of all jobs, in bytes
	most    int64            // that they may have together; 0 for no limit
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
		t = &tenant{org: org, stands: map[*kind]*stand{}, queued: map[proto.Class]int{}}
		b.tenants[org] = t
	}
	return t
}

// admit refuses a job that its organisation's plan or the book has no place for. Interactive jobs run now or not at all: those queued
// count as running. Batch jobs wait, as many as the plan allows.
func (b *book) admit(m *proto.Meta) *proto.Refusal {
	t := b.tenant(m.Org)
	defer b.forget(t)
	if size := sizeOf(m); b.most > 0 && (b.size+size > b.most || t.size+size > b.most/orgShare) {
		return &proto.Refusal{Reason: proto.RefusedUnavailable, Detail: "the dispatcher has no memory for more jobs"}
	}
	if m.Class() == proto.ClassInteractive {
		if used := t.busy + t.queued[proto.ClassInteractive]; used >= m.Concurrent {
			return &proto.Refusal{Reason: proto.RefusedConcurrency, Limit: m.Concurrent, Used: used}
		}
	} else if used := t.queued[proto.ClassBatch]; used >= m.MaxQueued {
		return &proto.Refusal{Reason: proto.RefusedQueueFull, Limit: m.MaxQueued, Used: used}
	}
	return nil
}

// add takes a job that was submitted or found in the stream.
func (b *book) add(m proto.Meta) *job {
	if j := b.jobs[m.TraceID]; j != nil {
		return j
	}
	j := &job{meta: m, size: sizeOf(&m)}
	b.jobs[m.TraceID] = j
	b.size += j.size
	b.tenant(m.Org).size += j.size
	b.enqueue(j, false)
	return j
}

// enqueue puts a job in its key's line, at the front when it has waited before.
func (b *book) enqueue(j *job, front bool) {
	t := b.tenant(j.meta.Org)
	var l *line
	for _, have := range t.lines {
		if have.key == j.meta.Key {
			l = have
		}
	}
	if l == nil {
		l = &line{key: j.meta.Key, jobs: map[proto.Class]map[*kind]*list.List{proto.ClassInteractive: {}, proto.ClassBatch: {}}}
		t.lines = append(t.lines, l)
	}
	k := b.enter(t, needsOf(&j.meta))
	class := j.meta.Class()
	if l.jobs[class][k] == nil {
		l.jobs[class][k] = list.New()
	}
	if front {
		b.front--
		j.order, j.place = b.front, l.jobs[class][k].PushFront(j)
	} else {
		b.back++
		j.order, j.place = b.back, l.jobs[class][k].PushBack(j)
	}
	j.state, j.worker, j.kind = queued, "", k
	t.queued[class]++
}

// enter counts a job of some needs in the turn of its kind.
func (b *book) enter(t *tenant, needs []string) *kind {
	name := kindName(needs)
	k := b.kinds[name]
	if k == nil {
		k = &kind{needs: needs, turn: list.New()}
		b.kinds[name] = k
	}
	if len(t.stands) == 0 {
		b.turns++
		t.turned = b.turns
	}
	s := t.stands[k]
	if s == nil {
		s = &stand{at: k.turn.PushBack(t)}
		t.stands[k] = s
	}
	s.jobs++
	return k
}

// dequeue takes a queued job out of its line.
func (b *book) dequeue(j *job) {
	t := b.tenant(j.meta.Org)
	class := j.meta.Class()
	t.queued[class]--
	i := slices.IndexFunc(t.lines, func(l *line) bool { return l.key == j.meta.Key })
	jobs := t.lines[i].jobs[class]
	if jobs[j.kind].Remove(j.place); jobs[j.kind].Len() == 0 {
		delete(jobs, j.kind)
	}
	if t.lines[i].empty() {
		t.lines = slices.Delete(t.lines, i, i+1)
	}
	s := t.stands[j.kind]
	if s.jobs--; s.jobs == 0 {
		j.kind.turn.Remove(s.at)
		delete(t.stands, j.kind)
	}
	if j.kind.turn.Len() == 0 {
		delete(b.kinds, kindName(j.kind.needs))
	}
	j.place, j.kind = nil, nil
}

// serve takes the job that is next out of its line, and sends its key and its organisation to the end of their turns.
func (b *book) serve(j *job) {
	t := b.tenant(j.meta.Org)
	i := slices.IndexFunc(t.lines, func(l *line) bool { return l.key == j.meta.Key })
	l := t.lines[i]
	l.served++
	t.lines = append(slices.Delete(t.lines, i, i+1), l)
	b.dequeue(j)
	b.turns++
	t.turned = b.turns
	for k, s := range t.stands {
		k.turn.MoveToBack(s.at)
	}
}

// next finds the job to be served next among the kinds that can be run, leaving it where it is: round robin over organisations, then
// over their keys, passing over those at their limit. It is nil when there is none.
func (b *book) next(can func(*kind) bool) *job {
	var best *job
	var turned uint64
	for _, k := range b.kinds {
		if !can(k) {
			continue
		}
		for e := k.turn.Front(); e != nil; e = e.Next() {
			t := e.Value.(*tenant)
			if best != nil && t.turned >= turned {
				break
			}
			if j := t.head(can); j != nil {
				best, turned = j, t.turned
				break
			}
		}
	}
	return best
}

// take marks a job as assigned or running, wherever it was before.
func (b *book) take(j *job, s state, worker string, now time.Time) {
	if j.state == queued {
		b.serve(j)
		b.tenant(j.meta.Org).busy++
	}
	j.state, j.worker, j.since = s, worker, now
}

// requeue puts a job that was assigned or running back in line.
func (b *book) requeue(j *job) {
	if j.state == queued {
		return
	}
	b.tenant(j.meta.Org).busy--
	b.enqueue(j, true)
}

// remove forgets a job that is terminal.
func (b *book) remove(j *job) {
	t := b.tenant(j.meta.Org)
	if j.state == queued {
		b.dequeue(j)
	} else {
		t.busy--
	}
	delete(b.jobs, j.meta.TraceID)
	b.size -= j.size
	t.size -= j.size
	b.forget(t)
}

func (b *book) forget(t *tenant) {
	if t.idle() {
		delete(b.tenants, t.org)
	}
}
