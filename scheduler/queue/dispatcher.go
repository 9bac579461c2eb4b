package queue

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/keyring"
	"github.com/bullpen-run/bullpen/scheduler/leader"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	reviewEvery  = 200 * time.Millisecond
	expiryGrace  = time.Second // gateways withdraw the jobs that their clients wait for themselves
	jobTokens    = 6           // of a job's subject
	maxLosses    = 3           // workers lost with a job before its program starts
	inboxSize    = 1024
	outcomesKept = time.Minute
	// maxExpiring limits the concurrent writes of expired jobs. A long queue may expire all at
	// once, and other writes would wait behind its records.
	maxExpiring    = 16
	requestTimeout = time.Second
	rebuildReads   = 16 // concurrent reads of single records
	// clockSkew bounds the difference between this process's clock and those of the servers that
	// date jobs and records.
	clockSkew = time.Minute
)

// Dispatcher assigns jobs to free slots. Any number may run; one leads at a time. Its state is
// rebuilt from the streams in each term.
type Dispatcher struct {
	Store    *store.Store
	Instance string // unique to this process
	// Memory limits the estimated memory of queued and running jobs, in bytes; 0 for no limit. Jobs
	// being stored may use a quarter more. Jobs beyond it are refused, but never those found in the
	// stream.
	Memory int64
	// Reserved, if not nil, returns how many of the given slots an organisation leaves to others
	// while another one submits executions: fewer than all. The slots are those of the workers that
	// can run the other one's jobs.
	Reserved func(slots int) int
	// Interactive, if not nil, returns how many of the given slots background jobs leave to
	// interactive ones while some are submitted: fewer than all. The slots are those of the workers
	// that can run the interactive jobs. The same share of an organisation's and a key's limit of
	// concurrent executions is reserved for interactive jobs.
	Interactive func(limit int) int
	// OutputBudget is the number of bytes of output that an organisation may store in an hour, 0 for
	// no limit.
	OutputBudget int64
	// Autoscaler, if not nil, decides how many workers there should be.
	Autoscaler *Autoscaler
	// SoleWorker is whether this process's worker can be the only one.
	SoleWorker bool
	// DiskFull, if not nil, reports whether the disk for output is full. Output is then stored as
	// if there were no budget.
	DiskFull func() bool
	// Secrets decrypts the secrets of executions.
	Secrets *keyring.Keyring
	// Ended is called as [Queue.Ended] is.
	Ended func(*proto.Record)
	// DeadLettered, if not nil, is called with the reason of each dead letter, concurrently.
	DeadLettered func(proto.DeadReason)
	Log          *slog.Logger

	leads  atomic.Bool
	timing timing
}

// Leads reports whether this dispatcher assigns jobs now, as far as it knows.
func (d *Dispatcher) Leads() bool { return d.leads.Load() }

// Run campaigns for the leadership and dispatches while it leads. It returns when ctx is done.
func (d *Dispatcher) Run(ctx context.Context) error {
	e := leader.Elector{Store: d.Store, Name: "dispatcher", Instance: d.Instance, LeadInDoubt: true, Log: d.Log}
	e.Run(ctx, d.lead)
	return nil
}

// term is the state of one period of leadership. The loop goroutine owns all of it but inbox,
// storing, statsRequests and poolsRequests.
type term struct {
	*Dispatcher
	queue          *fairQueue
	workers        map[string]*workerState
	workersVersion int                     // version of the set of workers and their capabilities
	leases         map[string]*workerLease // by epoch
	demands        demands
	pools          pools
	offers         *offers
	began          time.Time                 // when the loop began
	stillLeader    func() bool               // reports whether no other dispatcher can lead
	outcomes       map[proto.TraceID]outcome // of the last outcomesKept, as their job or submission may yet arrive
	inbox          chan func()
	storing        atomic.Int64 // bytes of submissions that are not answered yet
	overdue        []*job       // expired, in the order in which to write their terminal records
	expiring       int          // pending writes of those
	announced      bool         // the workers had time to announce themselves
	inDoubt        bool         // stillLeader was false at the last review
	oldest         time.Time    // when the oldest queued job was created, at the last review
	startRate      startRate
	views          views
	garbage        garbage
	output         outputBudget
	timing         timing
	fail           context.CancelCauseFunc

	statsRequests, poolsRequests joinedRequests
}

// outcome records that an execution has ended.
type outcome struct {
	at           time.Time // when the dispatcher learnt of it
	deadLettered bool
}

// workerState is a live worker.
type workerState struct {
	slots        int
	live         bool // the slots are for live sandboxes
	capabilities capabilities
	offer        string           // the capabilities and memory as a key, see memoryKey
	memory       int64            // for the memory limits of live sandboxes, in bytes; 0 for no limit
	free         []uint64         // tickets
	freeMemory   int64            // that the tickets share
	used         map[uint64]int64 // memory by ticket assigned that the worker may still announce as free
	held         map[proto.TraceID]bool
	seen         time.Time
	info         proto.Worker // what the worker said last
	pool         string
	load         *load
}

func (d *Dispatcher) newTerm(stillLeader func() bool, fail context.CancelCauseFunc) *term {
	t := &term{
		Dispatcher: d, stillLeader: stillLeader, queue: newFairQueue(), workers: map[string]*workerState{},
		leases:  map[string]*workerLease{},
		demands: newDemands(), pools: newPools(), offers: newOffers(), views: views{orders: map[string]classOrders{}},
		outcomes: map[proto.TraceID]outcome{}, inbox: make(chan func(), inboxSize), fail: fail,
	}
	t.queue.maxSize, t.timing = d.Memory, d.timing.defaults()
	t.output = outputBudget{limit: d.OutputBudget, used: map[string]*outputUse{}}
	return t
}

func (d *Dispatcher) lead(ctx context.Context, lead *leader.Term) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	t := d.newTerm(lead.StillLeader, fail)
	started := time.Now()
	t.loadDemands(ctx)
	t.loadPools(ctx)
	t.loadOffers(ctx)
	stop, err := t.rebuild(ctx)
	if err != nil {
		return err
	}
	defer stop()
	unsubscribe, err := t.subscribe(ctx)
	if err != nil {
		return err
	}
	defer unsubscribe()
	d.Log.Info("dispatcher leads", "instance", d.Instance, "jobs", len(t.queue.jobs), "rebuilt_ms",
		time.Since(started).Milliseconds())
	d.leads.Store(true)
	defer d.leads.Store(false)
	err = t.loop(ctx)
	if t.stillLeader() {
		t.demands.next.resign(context.WithoutCancel(ctx), t)
		t.pools.next.resign(context.WithoutCancel(ctx), t)
		t.offers.next.resign(context.WithoutCancel(ctx), t)
	}
	return err
}

func (t *term) loop(ctx context.Context) error {
	t.began = time.Now()
	tick := time.NewTicker(reviewEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case f := <-t.inbox:
			f()
		case now := <-tick.C:
			t.announced = true
			t.review(ctx, now)
			t.checkLeadership()
		}
		for more := true; more; { // everything that has arrived is known before slots are assigned
			select {
			case f := <-t.inbox:
				f()
			default:
				more = false
			}
		}
		t.assign(ctx, time.Now())
	}
}

// checkLeadership requests announcements once the leadership is no longer in doubt. The request
// also makes gateways repeat submissions that got no answer in between.
func (t *term) checkLeadership() {
	sure := t.stillLeader()
	if sure && t.inDoubt {
		if err := t.requestAnnouncements(); err != nil {
			t.fail(err)
		}
	}
	t.inDoubt = !sure
}

func (t *term) requestAnnouncements() error {
	if err := t.Store.Conn.Publish(store.AnnounceSubject, nil); err != nil {
		return fmt.Errorf("request announcements: %w", err)
	}
	return nil
}

// post runs f in the loop.
func (t *term) post(ctx context.Context, f func()) {
	select {
	case t.inbox <- f:
	case <-ctx.Done():
	}
}

// rebuild reads all leases, all jobs, and all records since the oldest job that is not of a live
// sandbox. It returns once it has caught up with the streams, and keeps following them.
func (t *term) rebuild(ctx context.Context) (stop func(), err error) {
	stopLeases, err := t.follow(ctx, t.Store.Leases, store.Range{}, t.onLease)
	if err != nil {
		return nil, err
	}
	stopExecutions, err := t.rebuildExecutions(ctx)
	if err != nil {
		stopLeases()
		return nil, err
	}
	return func() { stopExecutions(); stopLeases() }, nil
}

func (t *term) rebuildExecutions(ctx context.Context) (stop func(), err error) {
	stopJobs, err := t.follow(ctx, t.Store.Jobs.Stream, store.Range{}, t.onJob)
	if err != nil {
		return nil, err
	}
	oldest := time.Now()
	var sandboxes []*job
	for _, j := range t.queue.jobs {
		if j.meta.SandboxID != "" {
			sandboxes = append(sandboxes, j)
			continue
		}
		since := j.since
		if j.state == delayed && j.meta.RunAt.After(since) { // nobody has claimed it before
			since = j.meta.RunAt
		}
		if since.Before(oldest) {
			oldest = since
		}
	}
	since := store.Range{Since: oldest.Add(-t.timing.clockSkew)}
	stopRecords, err := t.follow(ctx, t.Store.Records.Stream, since, t.onRecord)
	if err != nil {
		stopJobs()
		return nil, err
	}
	stop = func() { stopJobs(); stopRecords() }
	if err := t.readRecords(ctx, sandboxes); err != nil {
		stop()
		return nil, err
	}
	t.checkDelayed(ctx)
	return stop, nil
}

// readRecords reads the records of jobs one by one. Live sandboxes run for days, and reading all
// records since the oldest would take longer with each execution that ended in between.
func (t *term) readRecords(ctx context.Context, jobs []*job) error {
	records := make([]*store.Message, len(jobs))
	reads, ctxReads := errgroup.WithContext(ctx)
	reads.SetLimit(rebuildReads)
	for i, j := range jobs {
		org, id := j.meta.Org, j.meta.TraceID
		reads.Go(func() (err error) {
			records[i], err = t.Store.Records.Last(ctxReads, store.ExecSubject(org, id), store.FromLeader, store.WithoutBody)
			if store.IsNotFound(err) { // not claimed
				return nil
			}
			return err
		})
	}
	if err := reads.Wait(); err != nil {
		return fmt.Errorf("read the records of live sandboxes: %w", err)
	}
	for _, m := range records {
		if m != nil {
			t.onRecord(ctx, m)
		}
	}
	return nil
}

// follow calls handle in the loop for each message of a stream until stop is called. It returns
// once handle has been called for all existing messages.
func (t *term) follow(
	ctx context.Context, st store.Stream, r store.Range, handle func(context.Context, *store.Message),
) (stop func(), err error) {
	following, cancel := context.WithCancel(ctx)
	current, done := false, make(chan struct{})
	go func() {
		defer close(done)
		err := st.Follow(following, r, func(m *store.Message) {
			t.post(following, func() { handle(ctx, m) })
		}, func() {
			t.post(following, func() { current = true })
		})
		if following.Err() == nil {
			t.fail(err)
		}
	}()
	stop = func() { cancel(); <-done }
	for !current {
		select {
		case f := <-t.inbox:
			f()
		case <-ctx.Done():
			stop()
			return nil, context.Cause(ctx)
		}
	}
	return stop, nil
}

// onJob handles a message in the jobs stream. A malformed one is moved to the dead letters.
func (t *term) onJob(ctx context.Context, m *store.Message) {
	t.garbage.observe(m.Seq)
	meta, err := readMeta(m.Header)
	if err == nil && store.JobSubject(meta) != m.Subject {
		err = errors.New("its header does not belong to its subject")
	}
	if err != nil {
		t.Log.Error("malformed job", "subject", m.Subject, "error", err)
		t.moveMalformed(ctx, m.Seq, err)
		return
	}
	if o, ended := t.outcomes[meta.TraceID]; ended {
		t.removeJob(ctx, meta, m.Seq, store.BodyName(m.Header), o.deadLettered)
		return
	}
	j := t.queue.jobs[meta.TraceID]
	if j == nil {
		if meta.RunAt.IsZero() {
			t.observe(meta, m.Time)
		}
		j = t.queue.add(*meta)
		j.since = m.Time
	}
	j.body = store.BodyName(m.Header)
	t.setStored(j, m.Seq)
}

// onRecord handles a change of a record: a claim, a cancel, a released or requeued attempt, a loss,
// or the end.
func (t *term) onRecord(ctx context.Context, m *store.Message) {
	org, id, err := store.ParseExecSubject(m.Subject)
	r, errHeaders := parseRecordHeaders(m.Header)
	j := t.queue.jobs[id]
	if err != nil || errHeaders != nil || j != nil && j.meta.Org != org {
		t.Log.Error("malformed record ignored", "subject", m.Subject)
		return
	}
	r.revision = m.Seq
	if j != nil {
		t.apply(ctx, j, r)
	} else if r.status.Terminal() {
		t.outcomes[id] = outcome{time.Now(), r.deadLettered()}
	}
}

// recordState is the part of a record that the dispatcher uses.
type recordState struct {
	status   proto.Status
	attempt  int
	worker   string // that runs it
	epoch    string // of the worker's lease; empty without one
	cancel   bool   // a client has cancelled it
	losses   int    // of workers since the program last ran
	revision uint64
}

// stateOf returns the state of a record with a revision.
func stateOf(rec *proto.Record, revision uint64) recordState {
	return recordState{rec.Status, rec.Attempt, rec.Worker, rec.Epoch, rec.Cancelling, len(rec.Lost), revision}
}

// deadLettered reports whether the execution ended because workers were lost with its job.
func (r *recordState) deadLettered() bool { return r.status.Terminal() && r.losses >= maxLosses }

// parseRecordHeaders returns the state in a record's headers, without the revision.
func parseRecordHeaders(h nats.Header) (r recordState, err error) {
	r.status, r.worker = proto.Status(h.Get(store.HeaderStatus)), h.Get(store.HeaderWorker)
	r.epoch, r.cancel = h.Get(store.HeaderEpoch), h.Get(store.HeaderCancel) != ""
	if r.attempt, err = strconv.Atoi(h.Get(store.HeaderAttempt)); err != nil || r.status == "" {
		return r, errors.Join(err, store.ErrMalformed)
	}
	if losses := h.Get(store.HeaderLosses); losses != "" {
		r.losses, err = strconv.Atoi(losses)
	}
	return r, err
}

// apply updates a job from its record. The record may be newer than what the stream has delivered,
// so older revisions are ignored.
func (t *term) apply(ctx context.Context, j *job, r recordState) {
	if r.revision <= j.revision {
		return
	}
	j.attempt, j.losses, j.revision, j.writePending = r.attempt, r.losses, r.revision, false
	now := time.Now()
	switch {
	case r.status.Terminal():
		t.measure(j, now)
		t.queue.remove(j)
		t.outcomes[j.meta.TraceID] = outcome{now, r.deadLettered()}
		if j.seq > 0 {
			t.removeJob(ctx, &j.meta, j.seq, j.body, r.deadLettered())
		}
	case r.status == proto.StatusRunning:
		if j.state != running && t.announced { // an earlier leader saw the running ones start
			j.started = now
		}
		t.queue.activate(j, running, r.worker, now)
		j.epoch, j.cancelling, j.notified = r.epoch, r.cancel, now
	case r.status == proto.StatusQueued:
		t.queue.requeue(j)
		j.since = now
	}
}

// subscribe answers the requests to the leader, and requests announcements.
func (t *term) subscribe(ctx context.Context) (stop func(), err error) {
	var subs []*nats.Subscription
	stop = func() {
		for _, s := range subs {
			_ = s.Unsubscribe()
		}
	}
	for subject, handle := range map[string]nats.MsgHandler{
		store.SubmitSubject:       func(m *nats.Msg) { t.onSubmission(ctx, m) },
		store.SlotsSubject:        func(m *nats.Msg) { t.post(ctx, func() { t.onAnnouncement(m) }) },
		store.StatsSubject:        t.onJoined(ctx, &t.statsRequests, func() any { return t.stats(time.Now()) }),
		store.QueueSubject:        func(m *nats.Msg) { t.post(ctx, func() { t.answerQueue(m) }) },
		store.WorkersSubject:      func(m *nats.Msg) { t.post(ctx, func() { t.answerWorkers(m) }) },
		store.PoolsSubject:        t.onJoined(ctx, &t.poolsRequests, func() any { return t.currentPools(time.Now()) }),
		store.JobSecretsSubject:   func(m *nats.Msg) { t.post(ctx, func() { t.onSecretsRequest(ctx, m) }) },
		store.OutputBudgetSubject: func(m *nats.Msg) { t.onOutputRequest(ctx, m) },
	} {
		sub, err := t.Store.Conn.Subscribe(subject, handle)
		if err != nil {
			stop()
			return nil, fmt.Errorf("listen on %s: %w", subject, err)
		}
		subs = append(subs, sub)
	}
	if err := t.requestAnnouncements(); err != nil {
		stop()
		return nil, err
	}
	return stop, nil
}

// joinedRequests are the requests for one value that are not answered yet. The loop computes one
// answer for all of them: anybody may send any number.
type joinedRequests struct {
	mu      sync.Mutex
	waiting []*nats.Msg
}

// add adds a request, and reports whether it is the only one waiting.
func (r *joinedRequests) add(m *nats.Msg) (first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiting = append(r.waiting, m)
	return len(r.waiting) == 1
}

// takeAll removes and returns the waiting requests.
func (r *joinedRequests) takeAll() []*nats.Msg {
	r.mu.Lock()
	defer r.mu.Unlock()
	waiting := r.waiting
	r.waiting = nil
	return waiting
}

// onJoined returns a handler that adds requests to r. The loop calls value once for all that wait.
func (t *term) onJoined(ctx context.Context, r *joinedRequests, value func() any) nats.MsgHandler {
	return func(m *nats.Msg) {
		if r.add(m) {
			t.post(ctx, func() { t.answerJoined(r, value) })
		}
	}
}

// answerJoined answers outside the loop, but not while submissions are not accepted. The goroutine
// must be able to read value's result while the loop runs.
func (t *term) answerJoined(r *joinedRequests, value func() any) {
	waiting := r.takeAll()
	if !t.stillLeader() {
		return
	}
	v := value()
	go func() {
		for _, m := range waiting {
			t.reply(m, v)
		}
	}()
}

func (t *term) stats(now time.Time) proto.QueueStats {
	st := proto.QueueStats{
		Queued:  len(t.queue.jobs) - t.queue.active - len(t.queue.delayed),
		Delayed: len(t.queue.delayed), Interactive: t.queue.interactive, Running: t.queue.active,
		StartRate: t.startRate.perSecond(), AtShare: t.atShare(now),
	}
	for _, w := range t.workers {
		if !w.live {
			st.Workers, st.Slots, st.FreeSlots = st.Workers+1, st.Slots+w.slots, st.FreeSlots+len(w.free)
		}
	}
	if st.Queued > 0 && !t.oldest.IsZero() {
		st.OldestQueue = max(0, now.Sub(t.oldest).Seconds())
	}
	return st
}

func (t *term) reply(m *nats.Msg, v any) {
	body, err := json.Marshal(v)
	if err == nil {
		err = m.Respond(body)
	}
	if err != nil {
		t.Log.Warn("reply failed", "subject", m.Subject, "error", err)
	}
}

func (t *term) onAnnouncement(m *nats.Msg) {
	var a announcement
	if err := json.Unmarshal(m.Data, &a); err != nil || a.Worker == "" || strings.ContainsAny(a.Worker, ".*> \t\r\n") {
		t.Log.Error("malformed announcement ignored", "error", err)
		return
	}
	for _, id := range a.Dropped {
		if j := t.queue.jobs[id]; j != nil && j.state == assigned && j.worker == a.Worker {
			t.queue.requeue(j)
		}
	}
	if a.Gone {
		t.removeWorker(a.Worker)
		return
	}
	w := t.workers[a.Worker]
	if w == nil {
		w = &workerState{used: map[uint64]int64{}, load: t.queue.load(a.Worker)}
		t.workers[a.Worker] = w
		t.Log.Info("worker joined", "worker", a.Worker, "slots", a.Slots, "capabilities", a.Capabilities)
	}
	drained := w.info.Draining
	if a.Info != nil {
		w.info = *a.Info
	}
	w.info.Draining = a.Draining
	changed := !w.capabilities.equal(a.Capabilities) || w.memory != a.Memory
	if changed {
		w.capabilities, w.memory = newCapabilities(a.Capabilities), a.Memory
		w.offer = memoryKey(slices.Sorted(maps.Keys(w.capabilities)), w.memory)
		t.workersVersion++
	}
	w.slots, w.live, w.seen, w.free = a.Slots, a.Live, time.Now(), w.free[:0]
	if !w.live {
		t.join(w, &a)
	}
	if changed || drained != a.Draining {
		t.reviewOffers(w.seen)
	}
	used := map[uint64]int64{}
	w.freeMemory = a.FreeMemory
	for _, ticket := range a.Free {
		if memory, ok := w.used[ticket]; ok {
			used[ticket] = memory
			w.freeMemory -= memory
		} else {
			w.free = append(w.free, ticket)
		}
	}
	w.used = used
	w.held = make(map[proto.TraceID]bool, len(a.Held))
	for _, id := range a.Held {
		w.held[id] = true
		// A job assigned by the previous leader and not claimed. After a claim the record counts.
		if j := t.queue.jobs[id]; j != nil && (j.state == queued || j.state == delayed) && j.attempt == 0 && !j.writePending {
			t.queue.activate(j, assigned, a.Worker, w.seen)
		}
	}
}

func (t *term) removeWorker(name string) {
	delete(t.workers, name)
	t.workersVersion++
	t.reviewOffers(time.Now())
}

// assign assigns jobs to free slots until either runs out. A leader in doubt assigns nothing, since
// another leader may know of more jobs that count against the limits. A new leader first waits for
// the workers to announce the jobs they hold.
func (t *term) assign(ctx context.Context, now time.Time) {
	if !t.announced || !t.stillLeader() {
		return
	}
	r := &round{term: t, since: now.Add(-submittedWithin), runnable: map[*needSet]bool{}}
	for {
		j := t.queue.next(r)
		if j == nil {
			return
		}
		if t.isOverdue(j, now) {
			t.expire(ctx, j)
			continue
		}
		name, w := r.selectWorker(contender{j.meta.Org, j.meta.Class()}, j.needs, j.meta.Prefer)
		ticket := w.free[0]
		w.free = w.free[1:]
		w.used[ticket] = j.meta.SandboxMemory
		w.freeMemory -= j.meta.SandboxMemory
		t.send(name, assignment{
			Ticket: ticket, Org: j.meta.Org, Trace: j.meta.TraceID, Job: j.seq, Attempt: j.attempt + 1, Revision: j.revision,
			Memory: j.meta.SandboxMemory,
		}, j.msg)
		fault.Here(fault.AfterAssign)
		t.queue.charge(j)
		t.queue.activate(j, assigned, name, now)
		t.startRate.started++
		j.ticket = ticket
		r.known = false
		if len(w.free) == 0 || j.meta.SandboxMemory > 0 {
			clear(r.runnable)
		}
	}
}

// round is the state of one call of assign.
type round struct {
	*term
	since    time.Time         // submissions before it reserve nothing
	runnable map[*needSet]bool // whether a free slot can run jobs with the needs
	known    bool              // the demands are up to date
	scarce   bool              // a demand is scarce
}

// canRun implements [capacity].
func (r *round) canRun(n *needSet) bool {
	able, known := r.runnable[n]
	if !known {
		_, w := r.mostFree(n, nil)
		able = w != nil
		r.runnable[n] = able
	}
	return able
}

// canRunFor implements [capacity].
func (r *round) canRunFor(c contender, n *needSet) bool {
	if !r.canRun(n) {
		return false
	}
	if !r.known {
		r.updateDemands()
	}
	if !r.scarce {
		return true
	}
	_, w := r.selectWorker(c, n, "")
	return w != nil
}

// backgroundLimit implements [capacity].
func (r *round) backgroundLimit(org, key string, limit int) int {
	if r.Interactive == nil || !r.demands.interactiveSince(caller{org, key}, r.since) {
		return limit
	}
	return limit - r.Interactive(limit)
}

func (r *round) updateDemands() {
	r.known, r.scarce = true, false
	for _, d := range r.demands.all {
		d.update(r.term, r.since)
		r.scarce = r.scarce || d.scarce
	}
}

// selectWorker returns the preferred worker if it meets the needs and has a free slot that c may
// take. Otherwise it returns the worker with the most free slots, to spread the load, or nil.
func (r *round) selectWorker(c contender, n *needSet, prefer string) (string, *workerState) {
	var reserved func(*workerState) bool
	if r.scarce {
		active := r.queue.orgs[c.org].active
		reserved = func(w *workerState) bool {
			for _, d := range r.demands.all {
				if d.reserves(w, c, active, r.since) {
					return true
				}
			}
			return false
		}
	}
	if w := r.workers[prefer]; w != nil && w.canTake(n) && (reserved == nil || !reserved(w)) {
		return prefer, w
	}
	return r.mostFree(n, reserved)
}

// canTake reports whether a slot of the worker is free for jobs with the needs.
func (w *workerState) canTake(n *needSet) bool {
	return len(w.free) > 0 && (w.memory == 0 || n.memory <= w.freeMemory) && w.capabilities.meet(n.needs)
}

// mostFree returns the worker with the most free memory for live sandboxes, and then the most free
// slots, that can take jobs with the needs and is not excluded, or nil.
func (t *term) mostFree(n *needSet, exclude func(*workerState) bool) (string, *workerState) {
	var best string
	var worker *workerState
	for name, w := range t.workers {
		if (worker == nil || w.compareFree(worker) > 0) && w.canTake(n) && (exclude == nil || !exclude(w)) {
			best, worker = name, w
		}
	}
	return best, worker
}

// compareFree orders workers by how much is free.
func (w *workerState) compareFree(other *workerState) int {
	return cmp.Or(cmp.Compare(w.freeMemory, other.freeMemory), cmp.Compare(len(w.free), len(other.free)))
}

// anyWorkerMeets reports whether a live worker, busy or not, meets the needs, and a live sandbox with a
// memory limit may be its only one.
func (t *term) anyWorkerMeets(needs []string, memory int64) bool {
	for _, w := range t.workers {
		if hasMemory(w.memory, memory) && w.capabilities.meet(needs) {
			return true
		}
	}
	return false
}
