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
	expired        // overdue: its terminal record must be written
	delayed        // its RunAt has not come
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
	body         string    // name of its body if that is stored apart, otherwise empty
	since        time.Time // of the state; for a running job, of the last change of its record
	epoch        string    // of the lease that a running job is under; empty if its worker has given it up
	cancelling   bool      // a client has cancelled the running job
	notified     time.Time // when the worker was last notified of that
	started      time.Time // of the attempt that runs; zero if an earlier leader saw it
	losses       int       // workers lost since the program last ran
	writePending bool      // a write that changes its record is in progress
	size         int64     // estimated memory, in bytes
	needs        *needSet  // while queued
	elem         *list.Element
	delayIndex   int    // in the heap, while delayed
	unchecked    bool   // not released before its record is read, see checkDelayed
	order        uint64 // order in which the jobs entered the queue; ranks the jobs of a key
}

// cost returns what serving the job costs its organisation.
func (j *job) cost() uint64 { return max(1, unitCost/uint64(max(1, j.meta.Weight))) }

// tally counts active jobs, those that are assigned or running. Live sandboxes do not count: they have
// slots and limits of their own.
type tally struct {
	all, background int
}

// add adds n jobs of m's class.
func (c *tally) add(m *proto.Meta, n int) {
	if m.SandboxID != "" {
		return
	}
	c.all += n
	if m.Class() == proto.ClassBackground {
		c.background += n
	}
}

// keyQueue holds the jobs of one API key.
type keyQueue struct {
	key    string
	jobs   map[proto.Class]map[*needSet]*list.List // queued, oldest first; no list is empty
	queued map[proto.Class]int
	active tally
	served int              // jobs, to weight the classes
	flow   *flow[*keyQueue] // in the organisation's sfq; nil while idle
}

// interactiveShare of interactiveShare+1 jobs of a key are interactive while both classes wait.
const interactiveShare = 4

// capacity reports which jobs the free slots can run.
type capacity interface {
	// canRun reports whether a free slot meets the needs.
	canRun(n *needSet) bool
	// canRunFor reports whether jobs of c may take such a slot.
	canRunFor(c contender, n *needSet) bool
	// backgroundLimit returns how many of limit concurrent executions may be background jobs. limit
	// is an organisation's if key is empty, otherwise the API key's.
	backgroundLimit(org, key string, limit int) int
}

// contender is who competes for slots: the jobs of one class of an organisation.
type contender struct {
	org   string
	class proto.Class
}

// head returns o's next job of this key that the free slots can run and the limits allow, or nil.
func (q *keyQueue) head(o *orgQueue, free capacity) *job {
	first, second := proto.ClassInteractive, proto.ClassBackground
	if q.served%(interactiveShare+1) == interactiveShare {
		first, second = second, first
	}
	for _, class := range []proto.Class{first, second} {
		var oldest *job
		for n, jobs := range q.jobs[class] {
			if !free.canRunFor(contender{o.org, class}, n) {
				continue
			}
			if j := jobs.Front().Value.(*job); oldest == nil || j.order < oldest.order {
				oldest = j
			}
		}
		if oldest != nil && o.hasRoom(q, &oldest.meta, free) {
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
	active tally
	size   int64 // of its jobs
	queued map[proto.Class]int
	weight int // of the plan, when a job was last queued
}

func (o *orgQueue) key(name string) *keyQueue {
	q := o.keys[name]
	if q == nil {
		q = &keyQueue{
			key: name, queued: map[proto.Class]int{},
			jobs: map[proto.Class]map[*needSet]*list.List{proto.ClassInteractive: {}, proto.ClassBackground: {}},
		}
		o.keys[name] = q
	}
	return q
}

// prune deletes q if nothing is left in it.
func (o *orgQueue) prune(q *keyQueue) {
	if q.flow == nil && q.active.all == 0 {
		delete(o.keys, q.key)
	}
}

// head returns the organisation's next job that the free slots can run, or nil. It skips keys at
// their limit.
func (o *orgQueue) head(free capacity) *job {
	for _, f := range o.sfq.flows {
		if j := f.party.head(o, free); j != nil {
			return j
		}
	}
	return nil
}

// hasRoom reports whether the limits of the organisation and of key q allow another job like m to
// run.
func (o *orgQueue) hasRoom(q *keyQueue, m *proto.Meta, free capacity) bool {
	if m.SandboxID != "" {
		return true
	}
	if o.active.all >= m.Concurrent || !q.hasRoom(m, q.active.all) {
		return false
	}
	if m.Class() != proto.ClassBackground {
		return true
	}
	return o.active.background < free.backgroundLimit(m.Org, "", m.Concurrent) &&
		(m.KeyConcurrent == 0 || q.active.background < free.backgroundLimit(m.Org, m.Key, m.KeyConcurrent))
}

// debt returns the organisation's smallest debt, with which it enters another needSet.
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
// weights of their plans, and among an organisation's keys evenly. Organisations compete per set of
// needs, so that jobs which no free slot can run neither delay nor charge other tenants. Serving an
// organisation charges it in all sets it has jobs in, and the virtual times of all runnable sets
// advance together. If every slot can run every job, that equals one sfq over all organisations.
type fairQueue struct {
	jobs        map[proto.TraceID]*job
	current     map[*job]struct{} // jobs without delay; delayed ones may wait for weeks
	delayed     delayHeap
	orgs        map[string]*orgQueue
	needSets    map[string]*needSet
	queued      int
	interactive int              // of those queued
	active      int              // assigned and running
	flowSeq     uint64           // order of the last flow
	jobSeq      uint64           // order of the last job
	size        int64            // of all jobs, in bytes
	maxSize     int64            // 0 for no limit
	loads       map[string]*load // by worker
}

// load counts the assigned and running jobs of a worker.
type load struct {
	jobs tally
	orgs map[string]tally
	pool string // of the worker; empty before its announcement
}

const (
	// jobCost is the estimated memory of a queued job in bytes, without the texts chosen by its
	// submitter. It includes the index of a NATS server in the same process. Measured: 3 KiB with
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
	return &fairQueue{
		jobs: map[proto.TraceID]*job{}, current: map[*job]struct{}{}, orgs: map[string]*orgQueue{},
		needSets: map[string]*needSet{}, loads: map[string]*load{},
	}
}

func (q *fairQueue) org(name string) *orgQueue {
	o := q.orgs[name]
	if o == nil {
		o = &orgQueue{
			org: name, keys: map[string]*keyQueue{}, flows: map[*needSet]*flow[*orgQueue]{},
			queued: map[proto.Class]int{},
		}
		q.orgs[name] = o
	}
	return o
}

// prune deletes o if nothing is left in it.
func (q *fairQueue) prune(o *orgQueue) {
	if len(o.keys)+len(o.flows)+o.active.all == 0 && o.size == 0 {
		delete(q.orgs, o.org)
	}
}

// admit returns a rejection if a limit of the plan, the key or the memory is reached, or nil.
// Queued interactive jobs count as running, since they run at once or not at all.
func (q *fairQueue) admit(m *proto.Meta) *proto.Rejection {
	o := q.org(m.Org)
	defer q.prune(o)
	if size := sizeOf(m); q.maxSize > 0 && (q.size+size > q.maxSize || o.size+size > q.maxSize/orgShare) {
		return &proto.Rejection{Reason: proto.RejectedUnavailable, Detail: "the dispatcher has no memory for more jobs"}
	}
	if m.SandboxID != "" {
		return nil
	}
	if m.Class() != proto.ClassInteractive {
		if used := o.queued[proto.ClassBackground]; used >= m.MaxQueued {
			return &proto.Rejection{Reason: proto.RejectedQueueFull, Limit: m.MaxQueued, Used: used}
		}
		return nil
	}
	if used := o.active.all + o.queued[proto.ClassInteractive]; used >= m.Concurrent {
		return &proto.Rejection{Reason: proto.RejectedConcurrency, Limit: m.Concurrent, Used: used}
	}
	if k := o.keys[m.Key]; k != nil {
		if used := k.active.all + k.queued[proto.ClassInteractive]; !k.hasRoom(m, used) {
			return &proto.Rejection{Reason: proto.RejectedKeyConcurrency, Limit: m.KeyConcurrent, Used: used}
		}
	}
	return nil
}

// add enqueues a new job, or delays it, and returns it.
func (q *fairQueue) add(m proto.Meta) *job {
	if j := q.jobs[m.TraceID]; j != nil {
		return j
	}
	q.jobSeq++
	j := &job{meta: m, order: q.jobSeq, size: sizeOf(&m)}
	q.jobs[m.TraceID] = j
	q.size += j.size
	q.org(m.Org).size += j.size
	if m.RunAt.IsZero() {
		q.current[j] = struct{}{}
		q.enqueue(j)
	} else {
		q.delay(j)
	}
	return j
}

func (q *fairQueue) enqueue(j *job) {
	o := q.org(j.meta.Org)
	k := o.key(j.meta.Key)
	needs := needsOf(&j.meta)
	key := memoryKey(needs, j.meta.SandboxMemory)
	n := q.needSets[key]
	if n == nil {
		n = &needSet{needs: needs, memory: j.meta.SandboxMemory}
		q.needSets[key] = n
	}
	o.weight = j.meta.Weight
	j.state, j.worker, j.needs = queued, "", n
	k.enqueue(j)
	q.addQueued(o, j, 1)
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

// addQueued adds n to the queued jobs of j's class.
func (q *fairQueue) addQueued(o *orgQueue, j *job, n int) {
	class := j.meta.Class()
	o.queued[class] += n
	q.queued += n
	if class == proto.ClassInteractive {
		q.interactive += n
	}
}

func (q *fairQueue) dequeue(j *job) {
	o := q.org(j.meta.Org)
	k := o.keys[j.meta.Key]
	k.dequeue(j)
	q.addQueued(o, j, -1)
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

// next returns the next job that the free slots can run, or nil. It leaves the job queued, and
// advances the virtual time to its organisation's start tag.
func (q *fairQueue) next(free capacity) *job {
	var best *job
	var debt, order uint64
	for _, n := range q.needSets {
		if !free.canRun(n) {
			continue
		}
		if j, f := n.first(free); j != nil {
			if d := n.orgs.debt(f); best == nil || d < debt || d == debt && f.order < order {
				best, debt, order = j, d, f.order
			}
		}
	}
	if debt > 0 {
		q.advance(debt, free)
	}
	return best
}

// first returns the next job of the first organisation that can be served, with its flow.
func (n *needSet) first(free capacity) (*job, *flow[*orgQueue]) {
	for _, f := range n.orgs.flows {
		if f.jobs == 0 {
			continue
		}
		if j := f.party.head(free); j != nil {
			return j, f
		}
	}
	return nil, nil
}

// advance advances the virtual times of all needSets that the free slots can run.
func (q *fairQueue) advance(d uint64, free capacity) {
	for _, n := range q.needSets {
		if !free.canRun(n) {
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
	if j.active() {
		q.addLoad(j, -1) // another worker may have claimed it
	} else {
		q.addActive(j, 1)
		q.leave(j)
	}
	j.state, j.worker, j.since = s, worker, now
	q.addLoad(j, 1)
}

// load returns the load of a worker.
func (q *fairQueue) load(worker string) *load {
	l := q.loads[worker]
	if l == nil {
		l = &load{orgs: map[string]tally{}}
		q.loads[worker] = l
	}
	return l
}

// addLoad adds n to the load of j's worker.
func (q *fairQueue) addLoad(j *job, n int) {
	l := q.load(j.worker)
	l.jobs.add(&j.meta, n)
	org := l.orgs[j.meta.Org]
	org.add(&j.meta, n)
	if l.orgs[j.meta.Org] = org; org.all == 0 {
		delete(l.orgs, j.meta.Org)
	}
}

// active reports whether j counts against the limits of concurrent executions.
func (j *job) active() bool { return j.state == assigned || j.state == running }

// addActive adds n to the active jobs of j's organisation and key.
func (q *fairQueue) addActive(j *job, n int) {
	o := q.org(j.meta.Org)
	q.active += n
	o.active.add(&j.meta, n)
	o.key(j.meta.Key).active.add(&j.meta, n)
}

// requeue queues a job again.
func (q *fairQueue) requeue(j *job) {
	if j.state != queued {
		q.leave(j)
		j.started = time.Time{}
		q.enqueue(j)
	}
}

// expire takes an overdue job out of the queue.
func (q *fairQueue) expire(j *job) {
	q.leave(j)
	j.state = expired
}

// leave removes j from the queue, or from the delayed jobs.
func (q *fairQueue) leave(j *job) {
	switch {
	case j.state == queued:
		q.dequeue(j)
	case j.state == delayed:
		q.undelay(j)
	case j.active():
		q.addActive(j, -1)
		q.addLoad(j, -1)
	}
}

// remove deletes a job.
func (q *fairQueue) remove(j *job) {
	o := q.org(j.meta.Org)
	q.leave(j)
	if k := o.keys[j.meta.Key]; k != nil {
		o.prune(k)
	}
	delete(q.jobs, j.meta.TraceID)
	delete(q.current, j)
	q.size -= j.size
	o.size -= j.size
	q.prune(o)
}
