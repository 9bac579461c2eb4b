package queue

import (
	"container/list"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
)

// state is the state of a job as far as the dispatcher knows.
type state int

const (
	queued   state = iota
	assigned       // sent to a worker, not yet claimed
	running        // claimed
)

// job is a job that is not terminal.
type job struct {
	meta         proto.Meta
	state        state
	attempt      int       // that runs, or ran last
	revision     uint64    // of the execution's record; 0 before the first claim
	worker       string    // that the job is assigned to, or runs on
	ticket       uint64    // of the slot it is assigned to
	seq          uint64    // of its message in the stream; 0 while it is being stored
	msg          *nats.Msg // the job itself; nil once it is stored
	body         string    // name of the object with its body; empty if the message contains it
	since        time.Time // of the state; for a running job, when the lease was last renewed
	losses       int       // workers lost since the program last ran
	writePending bool      // a write that ends the job or counts a loss is in progress
	size         int64     // estimated memory, in bytes
	needs        *needSet  // while queued
	elem         *list.Element
	order        uint64 // order in the stream; ranks the jobs of a key
}

// cost returns what serving the job costs its organisation.
func (j *job) cost() uint64 { return max(1, unitCost/uint64(max(1, j.meta.Weight))) }

// keyQueue holds the jobs of one API key.
type keyQueue struct {
	key    string
	jobs   map[proto.Class]map[*needSet]*list.List // queued, oldest first; no list is empty
	queued map[proto.Class]int
	active int              // assigned and running
	served int              // jobs, to weight the classes
	flow   *flow[*keyQueue] // in the organisation's sfq; nil while idle
}

// interactiveShare of interactiveShare+1 jobs of a key are interactive while both classes wait.
const interactiveShare = 4

// head returns the next job to serve among the runnable ones, or nil.
func (q *keyQueue) head(runnable func(*needSet) bool) *job {
	first, second := q.jobs[proto.ClassInteractive], q.jobs[proto.ClassBatch]
	if q.served%(interactiveShare+1) == interactiveShare {
		first, second = second, first
	}
	for _, class := range []map[*needSet]*list.List{first, second} {
		var oldest *job
		for n, jobs := range class {
			if !runnable(n) {
				continue
			}
			e := jobs.Front()
			for e != nil && e.Value.(*job).writePending {
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

// enqueue inserts a job by its order. A requeued job is older than the jobs that have not run.
func (q *keyQueue) enqueue(j *job) {
	class := j.meta.Class()
	jobs := q.jobs[class][j.needs]
	if jobs == nil {
		jobs = list.New()
		q.jobs[class][j.needs] = jobs
	}
	q.queued[class]++
	e := jobs.Back()
	if e == nil || e.Value.(*job).order < j.order {
		j.elem = jobs.PushBack(j)
		return
	}
	for e = jobs.Front(); e.Value.(*job).order < j.order; {
		e = e.Next()
	}
	j.elem = jobs.InsertBefore(j, e)
}

func (q *keyQueue) dequeue(j *job) {
	class := j.meta.Class()
	q.queued[class]--
	jobs := q.jobs[class][j.needs]
	if jobs.Remove(j.elem); jobs.Len() == 0 {
		delete(q.jobs[class], j.needs)
	}
}

// hasRoom reports whether the key's own limit, at the time m was submitted, is above used.
func (q *keyQueue) hasRoom(m *proto.Meta, used int) bool {
	return m.KeyConcurrent == 0 || used < m.KeyConcurrent
}

// orgQueue holds the jobs of one organisation.
type orgQueue struct {
	org    string
	keys   map[string]*keyQueue // with jobs, or with a flow
	sfq    sfq[*keyQueue]
	flows  map[*needSet]*flow[*orgQueue]
	active int   // assigned and running
	size   int64 // of its jobs
	queued map[proto.Class]int
}

func (o *orgQueue) key(name string) *keyQueue {
	q := o.keys[name]
	if q == nil {
		q = &keyQueue{
			key: name, queued: map[proto.Class]int{},
			jobs: map[proto.Class]map[*needSet]*list.List{proto.ClassInteractive: {}, proto.ClassBatch: {}},
		}
		o.keys[name] = q
	}
	return q
}

// prune deletes q if nothing is left in it.
func (o *orgQueue) prune(q *keyQueue) {
	if q.flow == nil && q.active == 0 {
		delete(o.keys, q.key)
	}
}

// head returns the organisation's next job among the runnable ones, or nil. It skips keys at their
// limit.
func (o *orgQueue) head(runnable func(*needSet) bool) *job {
	for _, f := range o.sfq.flows {
		q := f.party
		if j := q.head(runnable); j != nil && o.active < j.meta.Concurrent && q.hasRoom(&j.meta, q.active) {
			return j
		}
	}
	return nil
}

// debt returns the debt with which the organisation enters another needSet: its smallest one.
func (o *orgQueue) debt() (least uint64) {
	first := true
	for n, f := range o.flows {
		if d := n.orgs.debt(f); first || d < least {
			least, first = d, false
		}
	}
	return least
}

// fairQueue holds every job that is not terminal. It decides which jobs are admitted and which is
// served next. It can be rebuilt from the streams at any time. It is not safe for concurrent use.
//
// Slots are shared at two levels of start-time fair queueing, see sfq: among organisations by the
// weights of their plans, and among the keys of an organisation evenly. Organisations compete per
// set of needs, so that jobs which no free slot can run neither delay nor charge anybody. Serving
// an organisation charges it in all sets it has jobs in, and the virtual times of all runnable sets
// advance together. If every slot can run every job, that equals one sfq over all organisations.
type fairQueue struct {
	jobs     map[proto.TraceID]*job
	orgs     map[string]*orgQueue
	needSets map[string]*needSet
	queued   int
	flowSeq  uint64 // order of the last flow
	jobSeq   uint64 // order of the last job
	size     int64  // of all jobs, in bytes
	maxSize  int64  // 0 for no limit
}

const (
	// jobCost is the estimated memory of a queued job without the texts that its submitter chose,
	// in bytes. It includes the index of a NATS server in the same process. Measured: 3 KiB with
	// garbage.
	jobCost = 4 << 10
	// orgShare divides maxSize: the quotient is the limit of one organisation.
	orgShare = 2
)

// sizeOf returns the estimated memory of a job, in bytes.
func sizeOf(m *proto.Meta) int64 {
	size := jobCost + len(m.ThreadID) + len(m.WebhookURL) + len(m.RequestID) + len(m.ClientID) + len(m.UserAgent)
	for name, value := range m.Metadata {
		size += len(name) + len(value)
	}
	return int64(size)
}

func newFairQueue() *fairQueue {
	return &fairQueue{jobs: map[proto.TraceID]*job{}, orgs: map[string]*orgQueue{}, needSets: map[string]*needSet{}}
}

func (q *fairQueue) org(name string) *orgQueue {
	o := q.orgs[name]
	if o == nil {
		o = &orgQueue{org: name, keys: map[string]*keyQueue{}, flows: map[*needSet]*flow[*orgQueue]{}, queued: map[proto.Class]int{}}
		q.orgs[name] = o
	}
	return o
}

// prune deletes o if nothing is left in it.
func (q *fairQueue) prune(o *orgQueue) {
	if len(o.keys)+len(o.flows)+o.active == 0 {
		delete(q.orgs, o.org)
	}
}

// admit returns a refusal if a limit of the plan, the key or the memory is reached, or nil. Queued
// interactive jobs count as running, since they run at once or not at all.
func (q *fairQueue) admit(m *proto.Meta) *proto.Refusal {
	o := q.org(m.Org)
	defer q.prune(o)
	if size := sizeOf(m); q.maxSize > 0 && (q.size+size > q.maxSize || o.size+size > q.maxSize/orgShare) {
		return &proto.Refusal{Reason: proto.RefusedUnavailable, Detail: "the dispatcher has no memory for more jobs"}
	}
	if m.Class() != proto.ClassInteractive {
		if used := o.queued[proto.ClassBatch]; used >= m.MaxQueued {
			return &proto.Refusal{Reason: proto.RefusedQueueFull, Limit: m.MaxQueued, Used: used}
		}
		return nil
	}
	if used := o.active + o.queued[proto.ClassInteractive]; used >= m.Concurrent {
		return &proto.Refusal{Reason: proto.RefusedConcurrency, Limit: m.Concurrent, Used: used}
	}
	if k := o.keys[m.Key]; k != nil {
		if used := k.active + k.queued[proto.ClassInteractive]; !k.hasRoom(m, used) {
			return &proto.Refusal{Reason: proto.RefusedKeyConcurrency, Limit: m.KeyConcurrent, Used: used}
		}
	}
	return nil
}

// add enqueues a new job, and returns it.
func (q *fairQueue) add(m proto.Meta) *job {
	if j := q.jobs[m.TraceID]; j != nil {
		return j
	}
	q.jobSeq++
	j := &job{meta: m, order: q.jobSeq, size: sizeOf(&m)}
	q.jobs[m.TraceID] = j
	q.size += j.size
	q.org(m.Org).size += j.size
	q.enqueue(j)
	return j
}

func (q *fairQueue) enqueue(j *job) {
	o := q.org(j.meta.Org)
	k := o.key(j.meta.Key)
	needs := needsOf(&j.meta)
	n := q.needSets[needKey(needs)]
	if n == nil {
		n = &needSet{needs: needs}
		q.needSets[needKey(needs)] = n
	}
	j.state, j.worker, j.needs = queued, "", n
	k.enqueue(j)
	o.queued[j.meta.Class()]++
	q.queued++
	q.flowSeq++
	if k.flow == nil {
		k.flow = &flow[*keyQueue]{party: k}
		o.sfq.insert(k.flow, 0, q.flowSeq)
	}
	k.flow.jobs++
	if o.flows[n] == nil {
		f := &flow[*orgQueue]{party: o}
		n.orgs.insert(f, o.debt(), q.flowSeq)
		o.flows[n] = f
	}
	o.flows[n].jobs++
}

func (q *fairQueue) dequeue(j *job) {
	o := q.org(j.meta.Org)
	k := o.keys[j.meta.Key]
	k.dequeue(j)
	o.queued[j.meta.Class()]--
	q.queued--
	if o.sfq.dequeue(k.flow) {
		k.flow = nil
		o.prune(k)
	}
	if j.needs.orgs.dequeue(o.flows[j.needs]) {
		delete(o.flows, j.needs)
	}
	j.elem, j.needs = nil, nil
	if q.queued == 0 {
		q.resetFlows()
	}
}

// resetFlows deletes all flows. Debts are irrelevant while no job is queued.
func (q *fairQueue) resetFlows() {
	clear(q.needSets)
	for _, o := range q.orgs {
		clear(o.flows)
		o.sfq = sfq[*keyQueue]{}
		for _, k := range o.keys {
			k.flow = nil
			o.prune(k)
		}
		q.prune(o)
	}
}

// charge charges the key and the organisation of a queued job for serving it.
func (q *fairQueue) charge(j *job) {
	o := q.org(j.meta.Org)
	k := o.keys[j.meta.Key]
	k.served++
	for _, idle := range o.sfq.advance(o.sfq.debt(k.flow)) {
		idle.flow = nil
		o.prune(idle)
	}
	q.flowSeq++
	o.sfq.charge(k.flow, unitCost, q.flowSeq)
	for n, f := range o.flows {
		n.orgs.charge(f, j.cost(), q.flowSeq)
	}
}

// next returns the next job to serve among the runnable ones, or nil. It leaves the job queued, and
// advances the virtual time to its organisation's start tag.
func (q *fairQueue) next(runnable func(*needSet) bool) *job {
	var best *job
	var debt, order uint64
	for _, n := range q.needSets {
		if !runnable(n) {
			continue
		}
		if j, f := n.first(runnable); j != nil {
			if d := n.orgs.debt(f); best == nil || d < debt || d == debt && f.order < order {
				best, debt, order = j, d, f.order
			}
		}
	}
	if debt > 0 {
		q.advance(debt, runnable)
	}
	return best
}

// first returns the next job of the first organisation that can be served, with its flow.
func (n *needSet) first(runnable func(*needSet) bool) (*job, *flow[*orgQueue]) {
	for _, f := range n.orgs.flows {
		if f.jobs == 0 {
			continue
		}
		if j := f.party.head(runnable); j != nil {
			return j, f
		}
	}
	return nil, nil
}

// advance advances the virtual times of all runnable needSets.
func (q *fairQueue) advance(d uint64, runnable func(*needSet) bool) {
	for _, n := range q.needSets {
		if !runnable(n) {
			continue
		}
		for _, o := range n.orgs.advance(d) {
			delete(o.flows, n)
			q.prune(o)
		}
	}
}

// activate marks a job as assigned or running.
func (q *fairQueue) activate(j *job, s state, worker string, now time.Time) {
	if j.state == queued {
		q.addActive(j, 1)
		q.dequeue(j)
	}
	j.state, j.worker, j.since = s, worker, now
}

// addActive adds n to the active jobs of j's organisation and key.
func (q *fairQueue) addActive(j *job, n int) {
	o := q.org(j.meta.Org)
	o.active += n
	o.keys[j.meta.Key].active += n
}

// requeue queues an active job again.
func (q *fairQueue) requeue(j *job) {
	if j.state == queued {
		return
	}
	q.addActive(j, -1)
	q.enqueue(j)
}

// remove deletes a job.
func (q *fairQueue) remove(j *job) {
	o := q.org(j.meta.Org)
	if j.state == queued {
		q.dequeue(j)
	} else {
		q.addActive(j, -1)
		o.prune(o.keys[j.meta.Key])
	}
	delete(q.jobs, j.meta.TraceID)
	q.size -= j.size
	o.size -= j.size
	q.prune(o)
}
