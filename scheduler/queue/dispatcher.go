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
	tickEvery     = 200 * time.Millisecond
	workerDead    = 6 * time.Second  // without a word
	claimGrace    = 2 * time.Second  // between an assignment and the worker's saying that it holds it
	leaseOver     = 12 * time.Second // without a renewal; the holder stops at leaseLost, earlier
	expiryGrace   = time.Second      // gateways withdraw what their callers wait for themselves
	jobTokens     = 6                // of a job's subject
	startsAllowed = 3                // workers that may die with a job before its program starts
	inboxSize     = 1024
	endedKept     = time.Minute
	// maxExpiring bounds how many terminal records are being written when another job is ended that has waited too long: a long queue may
	// expire in one moment.
	maxExpiring = 512
	// clockSkew is how far the clocks may be apart that records and jobs are dated by: those of this process and of the servers that
	// lead the two streams.
	clockSkew = time.Minute
	// answerTimeout bounds requests that can be sent again. One that was on its way to a server that was just started again gets
	// no answer at all.
	answerTimeout = time.Second
)

// Dispatcher hands jobs to free slots. Any number may run; one leads, and the others stand by. Its memory is rebuilt from the
// streams whenever it starts to lead or loses touch with them.
type Dispatcher struct {
	Store    *store.Store
	Instance string // unique to this process
	// Memory bounds, in bytes, what jobs take here that wait and run, and besides them a quarter as much those that are being stored.
	// More are refused; 0 for no bound. Those that were stored already are always taken in.
	Memory int64
	Log    *slog.Logger
}

// Run stands by, leads when it can, and returns when ctx ends.
func (d *Dispatcher) Run(ctx context.Context) error {
	e := leader.Elector{Store: d.Store, Name: "dispatcher", Instance: d.Instance, LeadInDoubt: true, Log: d.Log}
	e.Run(ctx, d.lead)
	return nil
}

// leading is one term of leadership: the memory and what feeds it. One goroutine, loop, owns all of it but inbox.
type leading struct {
	*Dispatcher
	book    *book
	workers map[string]*member
	sure    func() bool           // whether nobody else can lead by now
	ended   map[proto.TraceID]end // those that did within endedKept: their job or its submission may yet come
	inbox   chan func()
	storing atomic.Int64 // bytes of submissions that were not answered yet
	endings int          // records of ends and losses that are being written
	called  bool         // the roll, and the workers had time to answer
	doubted bool         // whether it leads, when it was last looked at
	litter  litter
	fail    context.CancelCauseFunc
}

// end is that of an execution.
type end struct {
	at    time.Time // when it was learnt
	aside bool      // its job is a dead letter now
}

// member is a live worker as the dispatcher knows it.
type member struct {
	slots  int
	offers offers
	free   []uint64
	used   map[uint64]bool // tickets assigned that the worker may still announce as free
	held   map[proto.TraceID]bool
	heard  time.Time
}

func (d *Dispatcher) newTerm(sure func() bool, fail context.CancelCauseFunc) *leading {
	l := &leading{
		Dispatcher: d, sure: sure, book: newBook(), workers: map[string]*member{}, ended: map[proto.TraceID]end{},
		inbox: make(chan func(), inboxSize), fail: fail,
	}
	l.book.most = d.Memory
	return l
}

func (d *Dispatcher) lead(ctx context.Context, term *leader.Term) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	l := d.newTerm(term.StillLeader, fail)
	started := time.Now()
	stop, err := l.rebuild(ctx)
	if err != nil {
		return err
	}
	defer stop()
	unsubscribe, err := l.listen(ctx)
	if err != nil {
		return err
	}
	defer unsubscribe()
	d.Log.Info("dispatcher leads", "instance", d.Instance, "jobs", len(l.book.jobs), "rebuilt_ms", time.Since(started).Milliseconds())
	return l.loop(ctx)
}

func (l *leading) loop(ctx context.Context) error {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case f := <-l.inbox:
			f()
		case now := <-tick.C:
			l.called = true
			l.review(ctx, now)
			l.resume()
		}
		for more := true; more; { // what has already arrived is taken in before slots are given away
			select {
			case f := <-l.inbox:
				f()
			default:
				more = false
			}
		}
		l.assign(ctx, time.Now())
	}
}

// resume calls the roll when this dispatcher is sure again that it leads: who submitted something in vain meanwhile hears that as well.
func (l *leading) resume() {
	sure := l.sure()
	if sure && l.doubted {
		if err := l.Store.Conn.Publish(store.AnnounceSubject, nil); err != nil {
			l.fail(fmt.Errorf("call the roll: %w", err))
		}
	}
	l.doubted = !sure
}

// post hands work to the loop.
func (l *leading) post(ctx context.Context, f func()) {
	select {
	case l.inbox <- f:
	case <-ctx.Done():
	}
}

// rebuild reads every job and then every record written since the oldest job, and leaves both feeds running. It returns when what
// lay in the streams has been taken in.
func (l *leading) rebuild(ctx context.Context) (stop func(), err error) {
	var stops []func()
	stop = func() {
		for _, f := range stops {
			f()
		}
	}
	oldest := time.Now()
	feeds := []struct {
		stream jetstream.Stream
		cfg    jetstream.ConsumerConfig
		take   func(jetstream.Msg, *jetstream.MsgMetadata)
	}{
		{l.Store.Jobs, jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy}, func(m jetstream.Msg, at *jetstream.MsgMetadata) {
			l.tookJob(ctx, m, at)
		}},
		{l.Store.Executions, jetstream.ConsumerConfig{DeliverPolicy: jetstream.DeliverByStartTimePolicy}, func(m jetstream.Msg, at *jetstream.MsgMetadata) {
			l.tookRecord(ctx, m, at)
		}},
	}
	for _, feed := range feeds {
		if feed.cfg.DeliverPolicy == jetstream.DeliverByStartTimePolicy {
			for _, j := range l.book.jobs {
				if j.since.Before(oldest) {
					oldest = j.since
				}
			}
			oldest = oldest.Add(-clockSkew)
			feed.cfg.OptStartTime = &oldest
		}
		taken := uint64(0)
		halt, info, err := l.Store.Follow(ctx, feed.stream, feed.cfg, func(m jetstream.Msg, at *jetstream.MsgMetadata) {
			l.post(ctx, func() {
				feed.take(m, at)
				taken++
			})
		}, l.fail)
		if err != nil {
			stop()
			return nil, err
		}
		stops = append(stops, halt)
		pending := info.CachedInfo().NumPending
		look := time.NewTicker(tickEvery)
		defer look.Stop()
		for taken < pending {
			select {
			case f := <-l.inbox:
				f()
			case <-look.C:
				if store.Drained(ctx, info, taken) {
					pending = taken
				}
			case <-ctx.Done():
				stop()
				return nil, context.Cause(ctx)
			}
		}
	}
	return stop, nil
}

// tookJob takes in a job of the stream. One that cannot be read is set aside: it must not stop the others.
func (l *leading) tookJob(ctx context.Context, m jetstream.Msg, at *jetstream.MsgMetadata) {
	l.litter.saw(at.Sequence.Stream)
	meta, err := readMeta(m.Headers())
	if err == nil && store.JobSubject(meta) != m.Subject() {
		err = errors.New("its header does not belong to its subject")
	}
	if err != nil {
		l.Log.Error("a malformed job is set aside", "subject", m.Subject(), "error", err)
		l.setAside(ctx, at.Sequence.Stream, err)
		return
	}
	if ended, ok := l.ended[meta.TraceID]; ok {
		l.finished(ctx, meta, at.Sequence.Stream, store.BodyObject(m.Headers()), ended.aside)
		return
	}
	j := l.book.jobs[meta.TraceID]
	if j == nil {
		j = l.book.add(*meta)
		j.since = at.Timestamp
	}
	j.body = store.BodyObject(m.Headers())
	l.stored(j, at.Sequence.Stream)
}

// tookRecord takes in a change of an execution's record: a claim, a renewal, another attempt, the loss of a worker, the end.
func (l *leading) tookRecord(ctx context.Context, m jetstream.Msg, at *jetstream.MsgMetadata) {
	name := m.Subject()
	id, err := proto.ParseTraceID(name[strings.LastIndexByte(name, '.')+1:])
	s, errStanding := standingOf(m.Headers())
	if err != nil || errStanding != nil {
		l.Log.Error("a malformed record was passed over", "subject", name)
		return
	}
	s.revision = at.Sequence.Stream
	if j := l.book.jobs[id]; j != nil {
		l.changed(ctx, j, s)
	} else if s.status.Terminal() {
		l.ended[id] = end{time.Now(), s.aside()}
	}
}

// standing is what an execution's record says of it.
type standing struct {
	status   proto.Status
	attempt  int
	worker   string // that wrote it while it runs
	losses   int    // of workers since the program last ran
	revision uint64
}

// aside reports whether the job was given up because of the workers that were lost with it.
func (s *standing) aside() bool { return s.status.Terminal() && s.losses >= startsAllowed }

// standingOf reads the headers of a record.
func standingOf(h nats.Header) (s standing, err error) {
	s.status, s.worker = proto.Status(h.Get(store.HeaderStatus)), h.Get(store.HeaderWorker)
	if s.attempt, err = strconv.Atoi(h.Get(store.HeaderAttempt)); err != nil || s.status == "" {
		return s, errors.Join(err, store.ErrMalformed)
	}
	if losses := h.Get(store.HeaderLosses); losses != "" {
		s.losses, err = strconv.Atoi(losses)
	}
	return s, err
}

// changed takes in what a job's record says now. What was read beside the feed may be ahead of it.
func (l *leading) changed(ctx context.Context, j *job, s standing) {
	if s.revision <= j.revision {
		return
	}
	j.attempt, j.losses, j.revision, j.ending = s.attempt, s.losses, s.revision, false
	now := time.Now()
	switch {
	case s.status.Terminal() || fault.Planted(fault.AckBeforeResult) && s.status == proto.StatusRunning:
		l.book.remove(j)
		l.ended[j.meta.TraceID] = end{now, s.aside()}
		if j.seq > 0 {
			l.finished(ctx, &j.meta, j.seq, j.body, s.aside())
		}
	case s.status == proto.StatusRunning:
		l.book.take(j, running, s.worker, now)
	case s.status == proto.StatusQueued:
		l.book.requeue(j)
		j.since = now
	}
}

// listen answers the requests that only the leader answers.
func (l *leading) listen(ctx context.Context) (stop func(), err error) {
	var subs []*nats.Subscription
	stop = func() {
		for _, s := range subs {
			_ = s.Unsubscribe()
		}
	}
	for subject, handle := range map[string]nats.MsgHandler{
		store.SubmitSubject: func(m *nats.Msg) { l.arrived(ctx, m) },
		store.SlotsSubject:  func(m *nats.Msg) { l.post(ctx, func() { l.hear(m) }) },
		store.StatsSubject:  func(m *nats.Msg) { l.post(ctx, func() { l.stats(m) }) },
	} {
		sub, err := l.Store.Conn.Subscribe(subject, handle)
		if err != nil {
			stop()
			return nil, fmt.Errorf("listen on %s: %w", subject, err)
		}
		subs = append(subs, sub)
	}
	if err := l.Store.Conn.Publish(store.AnnounceSubject, nil); err != nil {
		stop()
		return nil, fmt.Errorf("call the roll: %w", err)
	}
	return stop, nil
}

// stats says nothing where submissions are not taken either.
func (l *leading) stats(m *nats.Msg) {
	if !l.sure() {
		return
	}
	now := time.Now()
	st := proto.QueueStats{Workers: len(l.workers)}
	for _, w := range l.workers {
		st.Slots += w.slots
		st.FreeSlots += len(w.free)
	}
	for _, j := range l.book.jobs {
		if j.state != queued {
			st.Running++
			continue
		}
		st.Queued++
		st.OldestQueue = max(st.OldestQueue, now.Sub(j.meta.CreatedAt).Seconds())
	}
	l.reply(m, st)
}

func (l *leading) reply(m *nats.Msg, v any) {
	body, err := json.Marshal(v)
	if err == nil {
		err = m.Respond(body)
	}
	if err != nil {
		l.Log.Warn("a request to the dispatcher was not answered", "subject", m.Subject, "error", err)
	}
}

// hear takes in what a worker says of itself.
func (l *leading) hear(m *nats.Msg) {
	var a announcement
	if err := json.Unmarshal(m.Data, &a); err != nil || a.Worker == "" || strings.ContainsAny(a.Worker, ".*> \t\r\n") {
		l.Log.Error("a malformed announcement was passed over", "error", err)
		return
	}
	for _, id := range a.Dropped {
		if j := l.book.jobs[id]; j != nil && j.state == assigned && j.worker == a.Worker {
			l.book.requeue(j)
		}
	}
	if a.Gone {
		delete(l.workers, a.Worker)
		return
	}
	w := l.workers[a.Worker]
	if w == nil {
		w = &member{used: map[uint64]bool{}}
		l.workers[a.Worker] = w
		l.Log.Info("worker joined", "worker", a.Worker, "slots", a.Slots, "offers", a.Offers)
	}
	w.slots, w.offers, w.heard, w.free = a.Slots, offersOf(a.Offers), time.Now(), w.free[:0]
	still := map[uint64]bool{}
	for _, ticket := range a.Free {
		if w.used[ticket] {
			still[ticket] = true
		} else {
			w.free = append(w.free, ticket)
		}
	}
	w.used = still
	w.held = make(map[proto.TraceID]bool, len(a.Held))
	for _, id := range a.Held {
		w.held[id] = true
		// Assigned by the dispatcher that led before, and not claimed yet. After a claim the records tell.
		if j := l.book.jobs[id]; j != nil && j.state == queued && j.attempt == 0 && !j.ending {
			l.book.take(j, assigned, a.Worker, w.heard)
		}
	}
}

// assign gives free slots to jobs that they can run, fairly, as long as there are both. A dispatcher that is not sure that it leads gives
// none: another one may know of other jobs that count against the limits. One that has just begun to lead first hears from the workers
// what they hold.
func (l *leading) assign(ctx context.Context, now time.Time) {
	if !l.called || !l.sure() {
		return
	}
	runnable := map[*kind]bool{}
	can := func(k *kind) bool {
		able, known := runnable[k]
		if !known {
			_, w := l.freest(k, "")
			able = w != nil
			runnable[k] = able
		}
		return able
	}
	for {
		j := l.book.next(can)
		if j == nil {
			return
		}
		if l.late(j, now) {
			if !l.expire(ctx, j) {
				return // until others have ended
			}
			continue
		}
		name, w := l.freest(j.kind, j.meta.Prefer)
		ticket := w.free[0]
		w.free = w.free[1:]
		w.used[ticket] = true
		l.tell(name, assignment{
			Ticket: ticket, Trace: j.meta.TraceID, Job: j.seq, Attempt: j.attempt + 1, Revision: j.revision,
		}, j.msg)
		fault.Here(fault.AfterAssign)
		l.book.serve(j)
		l.book.take(j, assigned, name, now)
		j.ticket = ticket
		if len(w.free) == 0 {
			clear(runnable)
		}
	}
}

// freest finds the live worker with the most free slots of those that can run jobs of kind k, so that load spreads; but the one that is
// preferred if it has any.
func (l *leading) freest(k *kind, prefer string) (string, *member) {
	if w := l.workers[prefer]; w != nil && len(w.free) > 0 && w.offers.meet(k.needs) {
		return prefer, w
	}
	var name string
	var best *member
	for n, w := range l.workers {
		if len(w.free) > 0 && (best == nil || len(w.free) > len(best.free)) && w.offers.meet(k.needs) {
			name, best = n, w
		}
	}
	return name, best
}

// offered reports whether a live worker, busy or not, can run jobs of kind k.
func (l *leading) offered(k *kind) bool {
	for _, w := range l.workers {
		if w.offers.meet(k.needs) {
			return true
		}
	}
	return false
}
