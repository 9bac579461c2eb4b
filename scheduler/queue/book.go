package queue

import (
	"container/list"
	"time"

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
	attempt  int    // the attempt that runs, or that ran last
	revision uint64 // sequence number of the execution's record, 0 before the first claim
	worker   string // who was assigned it or runs it
	ticket   uint64 // the slot it was assigned
	seq      uint64 // of its message in the stream
	body     string // the object with its body, where that was claim-checked
	since    time.Time
	losses   int           // workers that died with it before its program started
	ending   bool          // its terminal record is being written
	place    *list.Element // in its key's line while queued
}

// line holds the queued jobs of one key, by class, oldest first.
type line struct {
	key    string
	jobs   map[proto.Class]*list.List
	served int // jobs taken, to weigh the classes
}

// interactiveShare is how many of that many+1 jobs of a key are taken from the interactive class while both classes wait.
const interactiveShare = 4

func (l *line) head() *job {
	first, second := l.jobs[proto.ClassInteractive], l.jobs[proto.ClassBatch]
	if l.served%(interactiveShare+1) == interactiveShare {
		first, second = second, first
	}
	for _, q := range []*list.List{first, second} {
		for e := q.Front(); e != nil; e = e.Next() {
			if j := e.Value.(*job); !j.ending {
				return j
			}
		}
	}
	return nil
}

func (l *line) empty() bool {
	return l.jobs[proto.ClassInteractive].Len()+l.jobs[proto.ClassBatch].Len() == 0
}

// tenant is one organisation: its keys' lines, served in turn, and what counts against its limits.
type tenant struct {
	org    string
	lines  []*line // in turn; only those with jobs
	busy   int     // assigned and running
	queued map[proto.Class]int
	held   map[proto.Class]int // admitted, not seen yet
}

func (t *tenant) idle() bool {
	return len(t.lines) == 0 && t.busy == 0 && t.held[proto.ClassInteractive]+t.held[proto.ClassBatch] == 0
}

// reservation is an admission that was granted and whose job has not been seen.
type reservation struct {
	org     string
	class   proto.Class
	expires time.Time
}

// book is the dispatcher's memory: every job that is not terminal, in fair order. It can be rebuilt from the streams at any time.
// It is not safe for concurrent use: one goroutine owns it.
type book struct {
	jobs    map[proto.TraceID]*job
	tenants map[string]*tenant
	turn    []*tenant // those with queued jobs, in turn
	places  map[proto.TraceID]reservation
}

func newBook() *book {
	return &book{
		jobs: map[proto.TraceID]*job{}, tenants: map[string]*tenant{}, places: map[proto.TraceID]reservation{},
	}
}

func (b *book) tenant(org string) *tenant {
	t := b.tenants[org]
	if t == nil {
		t = &tenant{org: org, queued: map[proto.Class]int{}, held: map[proto.Class]int{}}
		b.tenants[org] = t
	}
	return t
}

// admit grants or refuses a place. Interactive jobs run now or not at all: those queued count as running. Batch jobs wait, as many
// as the plan allows.
func (b *book) admit(r admitRequest, now time.Time) *proto.Refusal {
	t := b.tenant(r.Org)
	defer b.forget(t)
	if r.Class == proto.ClassInteractive {
		used := t.busy + t.queued[proto.ClassInteractive] + t.held[proto.ClassInteractive]
		if used >= r.Concurrent {
			return &proto.Refusal{Reason: proto.RefusedConcurrency, Limit: r.Concurrent, Used: used}
		}
	} else if used := t.queued[proto.ClassBatch] + t.held[proto.ClassBatch]; used >= r.MaxQueued {
		return &proto.Refusal{Reason: proto.RefusedQueueFull, Limit: r.MaxQueued, Used: used}
	}
	if _, again := b.places[r.Trace]; !again {
		t.held[r.Class]++
		b.places[r.Trace] = reservation{org: r.Org, class: r.Class, expires: now.Add(placeKept)}
	}
	return nil
}

// vacate gives up the place of a job that has been seen, or never came.
func (b *book) vacate(id proto.TraceID) {
	p, ok := b.places[id]
	if !ok {
		return
	}
	delete(b.places, id)
	t := b.tenant(p.org)
	t.held[p.class]--
	b.forget(t)
}

// add takes a job that was found in the stream.
func (b *book) add(m proto.Meta) *job {
	b.vacate(m.TraceID)
	if j := b.jobs[m.TraceID]; j != nil {
		return j
	}
	j := &job{meta: m}
	b.jobs[m.TraceID] = j
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
		l = &line{key: j.meta.Key, jobs: map[proto.Class]*list.List{
			proto.ClassInteractive: list.New(), proto.ClassBatch: list.New(),
		}}
		t.lines = append(t.lines, l)
		if len(t.lines) == 1 {
			b.turn = append(b.turn, t)
		}
	}
	class := j.meta.Class()
	if front {
		j.place = l.jobs[class].PushFront(j)
	} else {
		j.place = l.jobs[class].PushBack(j)
	}
	j.state, j.worker = queued, ""
	t.queued[class]++
}

// dequeue takes a queued job out of its line and counts it as served.
func (b *book) dequeue(j *job) {
	t := b.tenant(j.meta.Org)
	class := j.meta.Class()
	t.queued[class]--
	for i, l := range t.lines {
		if l.key != j.meta.Key {
			continue
		}
		l.jobs[class].Remove(j.place)
		l.served++
		t.lines = append(t.lines[:i], t.lines[i+1:]...)
		if !l.empty() {
			t.lines = append(t.lines, l)
		}
		break
	}
	j.place = nil
	for i, have := range b.turn {
		if have != t {
			continue
		}
		b.turn = append(b.turn[:i], b.turn[i+1:]...)
		if len(t.lines) > 0 {
			b.turn = append(b.turn, t)
		}
		break
	}
}

// next finds the job to be served next, leaving it where it is: round robin over organisations, then over their keys, passing
// over those at their limit. It is nil when there is none.
func (b *book) next() *job {
	for _, t := range b.turn {
		for _, l := range t.lines {
			if j := l.head(); j != nil && t.busy < j.meta.Concurrent {
				return j
			}
		}
	}
	return nil
}

// take marks a job as assigned or running, wherever it was before.
func (b *book) take(j *job, s state, worker string, now time.Time) {
	if j.state == queued {
		b.dequeue(j)
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
	b.forget(t)
}

func (b *book) forget(t *tenant) {
	if t.idle() {
		delete(b.tenants, t.org)
	}
}
