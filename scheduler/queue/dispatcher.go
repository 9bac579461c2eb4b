package queue

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/scheduler/leader"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	reviewEvery    = 200 * time.Millisecond
	workerTimeout  = 6 * time.Second  // without an announcement
	claimGrace     = 2 * time.Second  // between an assignment and an announcement that holds the job
	leaseTimeout   = 12 * time.Second // without a renewal; the holder stops after holderTimeout, which is shorter
	expiryGrace    = time.Second      // gateways withdraw the jobs that their clients wait for themselves
	jobTokens      = 6                // of a job's subject
	maxLosses      = 3                // workers lost with a job before its program starts
	inboxSize      = 1024
	outcomesKept   = time.Minute
	maxExpiring    = 512 // concurrent terminal writes of expired jobs: a long queue may expire in one moment
	requestTimeout = time.Second
	// clockSkew bounds the difference between the clocks of this process and of the servers that
	// date jobs and records.
	clockSkew = time.Minute
)

// Dispatcher assigns jobs to free slots. Any number may run; one leads at a time. Its state is
// rebuilt from the streams in each term.
type Dispatcher struct {
	Store    *store.Store
	Instance string // unique to this process
	// Memory limits the estimated memory of queued and running jobs, in bytes. A quarter as much
	// may be used in addition by jobs that are being stored. More jobs are refused; 0 for no limit.
	// Jobs found in the stream are never refused.
	Memory int64
	Log    *slog.Logger
}

// Run campaigns for the leadership and dispatches while it leads. It returns when ctx is done.
func (d *Dispatcher) Run(ctx context.Context) error {
	e := leader.Elector{Store: d.Store, Name: "dispatcher", Instance: d.Instance, LeadInDoubt: true, Log: d.Log}
	e.Run(ctx, d.lead)
	return nil
}

// term is the state of one period of leadership. The loop goroutine owns all of it but inbox and
// storing.
type term struct {
	*Dispatcher
	queue       *fairQueue
	workers     map[string]*workerState
	stillLeader func() bool               // reports whether no other dispatcher can lead
	outcomes    map[proto.TraceID]outcome // of the last outcomesKept, as their job or submission may yet arrive
	inbox       chan func()
	storing     atomic.Int64 // bytes of submissions that are not answered yet
	writes      int          // pending writes of terminal records and losses
	announced   bool         // the workers had time to announce themselves
	inDoubt     bool         // stillLeader was false at the last review
	garbage     garbage
	fail        context.CancelCauseFunc
}

// outcome records that an execution has ended.
type outcome struct {
	at           time.Time // when the dispatcher learnt of it
	deadLettered bool
}

// workerState is a live worker.
type workerState struct {
	slots        int
	capabilities capabilities
	free         []uint64        // tickets
	used         map[uint64]bool // tickets assigned that the worker may still announce as free
	held         map[proto.TraceID]bool
	seen         time.Time
}

func (d *Dispatcher) newTerm(stillLeader func() bool, fail context.CancelCauseFunc) *term {
	t := &term{
		Dispatcher: d, stillLeader: stillLeader, queue: newFairQueue(), workers: map[string]*workerState{},
		outcomes: map[proto.TraceID]outcome{}, inbox: make(chan func(), inboxSize), fail: fail,
	}
	t.queue.maxSize = d.Memory
	return t
}

func (d *Dispatcher) lead(ctx context.Context, lead *leader.Term) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	t := d.newTerm(lead.StillLeader, fail)
	started := time.Now()
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
	d.Log.Info("dispatcher leads", "instance", d.Instance, "jobs", len(t.queue.jobs), "rebuilt_ms", time.Since(started).Milliseconds())
	return t.loop(ctx)
}

func (t *term) loop(ctx context.Context) error {
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

// checkLeadership requests announcements when the leadership is no longer in doubt. The request
// also makes gateways repeat the submissions that were not answered in between.
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

// rebuild reads all jobs, and all records since the oldest job. It returns when it has processed
// everything that the streams contain, and keeps following both.
func (t *term) rebuild(ctx context.Context) (stop func(), err error) {
	stopJobs, err := t.follow(ctx, t.Store.Jobs, jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy}, t.onJob)
	if err != nil {
		return nil, err
	}
	oldest := time.Now()
	for _, j := range t.queue.jobs {
		if j.since.Before(oldest) {
			oldest = j.since
		}
	}
	oldest = oldest.Add(-clockSkew)
	stopRecords, err := t.follow(ctx, t.Store.Executions, jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &oldest,
	}, t.onRecord)
	if err != nil {
		stopJobs()
		return nil, err
	}
	return func() { stopJobs(); stopRecords() }, nil
}

// follow calls handle in the loop for each message of a stream. It returns when handle has been
// called for all messages that the stream contains.
func (t *term) follow(
	ctx context.Context, st jetstream.Stream, cfg jetstream.ConsumerConfig,
	handle func(context.Context, jetstream.Msg, *jetstream.MsgMetadata),
) (stop func(), err error) {
	handled := uint64(0)
	stop, consumer, err := t.Store.Follow(ctx, st, cfg, func(m jetstream.Msg, meta *jetstream.MsgMetadata) {
		t.post(ctx, func() {
			handle(ctx, m, meta)
			handled++
		})
	}, t.fail)
	if err != nil {
		return nil, err
	}
	pending := consumer.CachedInfo().NumPending
	tick := time.NewTicker(reviewEvery)
	defer tick.Stop()
	for handled < pending {
		select {
		case f := <-t.inbox:
			f()
		case <-tick.C: // pending messages may be removed before they are delivered
			if store.Drained(ctx, consumer, handled) {
				pending = handled
			}
		case <-ctx.Done():
			stop()
			return nil, context.Cause(ctx)
		}
	}
	return stop, nil
}

// onJob handles a message in the jobs stream. A malformed one is moved to the dead letters.
func (t *term) onJob(ctx context.Context, m jetstream.Msg, at *jetstream.MsgMetadata) {
	seq := at.Sequence.Stream
	t.garbage.saw(seq)
	meta, err := readMeta(m.Headers())
	if err == nil && store.JobSubject(meta) != m.Subject() {
		err = errors.New("its header does not belong to its subject")
	}
	if err != nil {
		t.Log.Error("malformed job", "subject", m.Subject(), "error", err)
		t.moveMalformed(ctx, seq, err)
		return
	}
	if o, ended := t.outcomes[meta.TraceID]; ended {
		t.removeJob(ctx, meta, seq, store.BodyObject(m.Headers()), o.deadLettered)
		return
	}
	j := t.queue.jobs[meta.TraceID]
	if j == nil {
		j = t.queue.add(*meta)
		j.since = at.Timestamp
	}
	j.body = store.BodyObject(m.Headers())
	t.setStored(j, seq)
}

// onRecord handles a change of a record: a claim, a renewal, a requeued attempt, a loss, the end.
func (t *term) onRecord(ctx context.Context, m jetstream.Msg, at *jetstream.MsgMetadata) {
	subject := m.Subject()
	id, err := proto.ParseTraceID(subject[strings.LastIndexByte(subject, '.')+1:])
	r, errHeaders := parseRecordHeaders(m.Headers())
	if err != nil || errHeaders != nil {
		t.Log.Error("malformed record ignored", "subject", subject)
		return
	}
	r.revision = at.Sequence.Stream
	if j := t.queue.jobs[id]; j != nil {
		t.apply(ctx, j, r)
	} else if r.status.Terminal() {
		t.outcomes[id] = outcome{time.Now(), r.deadLettered()}
	}
}

// recordState is the part of a record that the dispatcher uses.
type recordState struct {
	status   proto.Status
	attempt  int
	worker   string // that holds the lease
	losses   int    // of workers since the program last ran
	revision uint64
}

// deadLettered reports whether the execution ended because workers were lost with its job.
func (r *recordState) deadLettered() bool { return r.status.Terminal() && r.losses >= maxLosses }

// parseRecordHeaders returns the state in a record's headers, without the revision.
func parseRecordHeaders(h nats.Header) (r recordState, err error) {
	r.status, r.worker = proto.Status(h.Get(store.HeaderStatus)), h.Get(store.HeaderWorker)
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
		t.queue.remove(j)
		t.outcomes[j.meta.TraceID] = outcome{now, r.deadLettered()}
		if j.seq > 0 {
			t.removeJob(ctx, &j.meta, j.seq, j.body, r.deadLettered())
		}
	case r.status == proto.StatusRunning:
		t.queue.activate(j, running, r.worker, now)
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
		store.SubmitSubject: func(m *nats.Msg) { t.onSubmission(ctx, m) },
		store.SlotsSubject:  func(m *nats.Msg) { t.post(ctx, func() { t.onAnnouncement(m) }) },
		store.StatsSubject:  func(m *nats.Msg) { t.post(ctx, func() { t.onStats(m) }) },
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

// onStats does not answer while submissions are not accepted either.
func (t *term) onStats(m *nats.Msg) {
	if !t.stillLeader() {
		return
	}
	now := time.Now()
	st := proto.QueueStats{Workers: len(t.workers)}
	for _, w := range t.workers {
		st.Slots += w.slots
		st.FreeSlots += len(w.free)
	}
	for _, j := range t.queue.jobs {
		if j.state != queued {
			st.Running++
			continue
		}
		st.Queued++
		st.OldestQueue = max(st.OldestQueue, now.Sub(j.meta.CreatedAt).Seconds())
	}
	t.reply(m, st)
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
		delete(t.workers, a.Worker)
		return
	}
	w := t.workers[a.Worker]
	if w == nil {
		w = &workerState{used: map[uint64]bool{}}
		t.workers[a.Worker] = w
		t.Log.Info("worker joined", "worker", a.Worker, "slots", a.Slots, "capabilities", a.Capabilities)
	}
	w.slots, w.capabilities, w.seen, w.free = a.Slots, newCapabilities(a.Capabilities), time.Now(), w.free[:0]
	used := map[uint64]bool{}
	for _, ticket := range a.Free {
		if w.used[ticket] {
			used[ticket] = true
		} else {
			w.free = append(w.free, ticket)
		}
	}
	w.used = used
	w.held = make(map[proto.TraceID]bool, len(a.Held))
	for _, id := range a.Held {
		w.held[id] = true
		// A job that the previous leader assigned and that is not claimed. After a claim the record
		// counts.
		if j := t.queue.jobs[id]; j != nil && j.state == queued && j.attempt == 0 && !j.writePending {
			t.queue.activate(j, assigned, a.Worker, w.seen)
		}
	}
}

// assign assigns jobs to free slots until either runs out. A leader in doubt assigns nothing, since
// another one may know of other jobs that count against the limits. A new leader first waits for
// the announcements of what the workers hold.
func (t *term) assign(ctx context.Context, now time.Time) {
	if !t.announced || !t.stillLeader() {
		return
	}
	cache := map[*needSet]bool{}
	runnable := func(n *needSet) bool {
		able, known := cache[n]
		if !known {
			_, w := t.selectWorker(n, "")
			able = w != nil
			cache[n] = able
		}
		return able
	}
	for {
		j := t.queue.next(runnable)
		if j == nil {
			return
		}
		if t.overdue(j, now) {
			if !t.expire(ctx, j) {
				return
			}
			continue
		}
		name, w := t.selectWorker(j.needs, j.meta.Prefer)
		ticket := w.free[0]
		w.free = w.free[1:]
		w.used[ticket] = true
		t.send(name, assignment{
			Ticket: ticket, Trace: j.meta.TraceID, Job: j.seq, Attempt: j.attempt + 1, Revision: j.revision,
		}, j.msg)
		fault.Here(fault.AfterAssign)
		t.queue.charge(j)
		t.queue.activate(j, assigned, name, now)
		j.ticket = ticket
		if len(w.free) == 0 {
			clear(cache)
		}
	}
}

// selectWorker returns the preferred worker if it has a free slot and meets the needs. Otherwise it
// returns the worker with the most free slots, so that load spreads, or nil.
func (t *term) selectWorker(n *needSet, prefer string) (string, *workerState) {
	if w := t.workers[prefer]; w != nil && len(w.free) > 0 && w.capabilities.meet(n.needs) {
		return prefer, w
	}
	var best string
	var worker *workerState
	for name, w := range t.workers {
		if len(w.free) > 0 && (worker == nil || len(w.free) > len(worker.free)) && w.capabilities.meet(n.needs) {
			best, worker = name, w
		}
	}
	return best, worker
}

// anyWorkerMeets reports whether a live worker, busy or not, meets the needs.
func (t *term) anyWorkerMeets(n *needSet) bool {
	for _, w := range t.workers {
		if w.capabilities.meet(n.needs) {
			return true
		}
	}
	return false
}
