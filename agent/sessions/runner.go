package sessions

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// deltaEvery is the minimum time between two entries that contain only deltas. Other events do
	// not wait.
	deltaEvery = 10 * time.Millisecond
	// maxBatch bounds the reports that become one entry.
	maxBatch = 256
	// storeTimeout bounds each change of the store.
	storeTimeout = 30 * time.Second
	// checkKeyEvery is how often a runner checks the API key of a session with work.
	checkKeyEvery = 2 * time.Second
	// saveTimeout bounds the save of a sandbox's files after a turn.
	saveTimeout = time.Minute
)

// ActiveRecords are the records of the sessions with work.
type ActiveRecords interface {
	// Deactivate marks a session as having no work, and stores that the webhooks of events up to
	// sequence number notified exist.
	Deactivate(ctx context.Context, org, id string, notified int64) error
	// Activate marks a session as having work for a runner.
	Activate(ctx context.Context, org, id string) error
}

// Runner drives sessions. Its fields must be set before use.
type Runner struct {
	Logs    Logs
	Records ActiveRecords
	Agent   func(id string) (Agent, bool)
	// Sandboxes opens the sandboxes of agents that need one. A sandbox and the agent's program in it stay for
	// KeepAlive after a turn.
	Sandboxes Sandboxes
	KeepAlive time.Duration
	// CheckKey returns an error for which [proto.Final] is true if an API key is no longer valid.
	CheckKey func(ctx context.Context, id string) error
	// Notify creates the webhook of an event. It must be idempotent: after a crash it is called
	// again.
	Notify func(ctx context.Context, x *proto.AgentSession, n Notice) error
	// WideAlways makes a grant for the session cover all commands of the tool.
	WideAlways bool
	Log        *slog.Logger
}

// errSuperseded is returned if another runner drives the session.
var errSuperseded = fmt.Errorf("another process drives the session: %w", proto.ErrConflict)

// CarryOut drives a session until it has no more work or ctx is done. It may be called again after
// an error. The error is a [proto.ErrConflict] if another process drives the session.
func (r *Runner) CarryOut(ctx context.Context, x proto.AgentSession) error {
	l, err := load(ctx, r.Logs, &x)
	if errors.Is(err, proto.ErrNotFound) { // being created, or expired
		return r.Records.Deactivate(ctx, x.Org, x.ID, x.Notified)
	}
	if err != nil {
		return err
	}
	agent, ok := r.Agent(x.Agent)
	if !ok {
		return fmt.Errorf("session %s: no agent %q: add it to this server, or end the session", x.ID, x.Agent)
	}
	d := &drive{
		Runner: r, log: l, agent: agent, id: rand.Text(), notified: x.Notified, reports: make(chan report),
		normaliser: normaliser{info: agent.Info(), mode: x.PermissionMode, wide: r.WideAlways},
	}
	return d.run(ctx)
}

// report is an agent's report, with the conversation that it comes from.
type report struct {
	Native
	of *conversation
}

// conversation is an agent's conversation, as a drive uses it.
type conversation struct {
	Conversation
	sandbox Sandbox // nil if the agent needs none
	cancel  context.CancelFunc
	closed  chan struct{} // closed when the drive no longer reads reports
}

// queued is a message in the queue, with the number of the entry before it.
type queued struct {
	*Message
	after uint64
}

// queuedAfter returns the number of the entry before the first message of a queue; 0 if the queue
// is empty.
func queuedAfter(queue []queued) uint64 {
	if len(queue) == 0 {
		return 0
	}
	return queue[0].after
}

// drive is one call of [Runner.CarryOut].
type drive struct {
	*Runner
	normaliser
	log      *log
	agent    Agent
	id       string
	queue    []queued
	appended []*Entry // appended by other processes and not handled yet
	notified int64    // sequence number of the last event whose webhook exists
	reports  chan report
	changed  chan change
	check    *time.Ticker  // of the API key
	talk     *conversation // nil if there is none
	flushed  time.Time     // when reports were stored last
	idle     *time.Timer   // ends an unused conversation; nil unless there is one
}

// run drives the session.
func (d *drive) run(ctx context.Context) error {
	defer d.closeConversation()
	if err := d.readQueue(ctx); err != nil {
		return err
	}
	follower, err := d.Logs.Follow(d.log.session.Org, d.log.session.LogID())
	if err != nil {
		return err
	}
	defer follower.Close()
	ctx, cancel := context.WithCancel(ctx)
	d.changed = make(chan change)
	defer func() {
		cancel()
		for range d.changed { // wait for watch to return
		}
	}()
	go d.watch(ctx, follower, d.log.at)
	d.check = time.NewTicker(checkKeyEvery)
	defer d.check.Stop()
	if err := d.takeOver(ctx); err != nil {
		return err
	}
	if err := d.checkKey(ctx); err != nil {
		return err
	}
	if err := d.prepare(ctx); err != nil {
		return err
	}
	for {
		if err := d.handleAppended(ctx); err != nil {
			return err
		}
		if done, err := d.step(ctx); done || err != nil {
			return err
		}
		var idle <-chan time.Time
		if d.idle != nil {
			idle = d.idle.C
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-idle:
			d.closeConversation()
		case <-d.check.C:
			if err := d.checkKey(ctx); err != nil {
				return err
			}
		case c := <-d.changed:
			if err := d.catchUp(ctx, c); err != nil {
				return err
			}
		case n := <-d.reports:
			if err := d.store(ctx, n); err != nil {
				return err
			}
		}
	}
}

// change is the number of an appended entry, or the error that ended the watch.
type change struct {
	at  uint64
	err error
}

// catchUp reads the entries up to an appended one.
func (d *drive) catchUp(ctx context.Context, c change) error {
	if c.err != nil || c.at <= d.log.at {
		return c.err
	}
	return d.log.catchUp(ctx, d.queueEntry)
}

// watch sends the number of each entry appended after a number. It closes d.changed when ctx is done
// or after an error.
func (d *drive) watch(ctx context.Context, follower Follower, after uint64) {
	defer close(d.changed)
	for ctx.Err() == nil {
		_, at, err := follower.Next(ctx, after)
		select {
		case d.changed <- change{at, err}:
			after = at
		case <-ctx.Done():
		}
		if err != nil {
			return
		}
	}
}

// readQueue reads the messages whose turns have not started.
func (d *drive) readQueue(ctx context.Context) error {
	state := &d.log.state
	for after := state.QueuedAfter; state.Queued() > 0 && after < d.log.at; {
		message, at, err := d.Logs.Next(ctx, d.log.session.Org, d.log.session.LogID(), after)
		if errors.Is(err, proto.ErrNotFound) || message == nil {
			return nil // expired
		}
		if err != nil {
			return err
		}
		e, err := decodeEntry(message)
		if err != nil {
			return err
		}
		if e.Message != nil && e.Message.Number > state.Turns && at <= d.log.at {
			d.queue = append(d.queue, queued{e.Message, after})
		}
		after = at
	}
	return nil
}

// queueEntry queues an entry that another process has appended. It returns errSuperseded if that
// process is a runner.
func (d *drive) queueEntry(e *Entry) error {
	switch {
	case e.Runner != "":
		return errSuperseded
	case e.Message != nil:
		d.queue = append(d.queue, queued{e.Message, e.State.MessageAfter})
	default:
		d.appended = append(d.appended, e)
	}
	return nil
}

// append appends an entry with the events that fill adds to a batch. It appends nothing if the
// batch changes nothing.
func (d *drive) append(ctx context.Context, turn int64, fill func(*batch) error) error {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	var b *batch
	saved := d.clone()
	_, err := d.log.append(ctx, d.queueEntry, func(state *State) (*Entry, error) {
		d.normaliser = saved.clone()
		b = &batch{normaliser: &d.normaliser, state: state}
		state.Unnotified, state.Runner = state.unnotified(d.notified), d.id
		if state.Ended == EndTerminated {
			return nil, nil
		}
		if err := fill(b); err != nil {
			return nil, err
		}
		before := &d.log.state
		if len(b.events) == 0 && before.Cursor == state.Cursor && before.Native == state.Native &&
			maps.Equal(before.Open, state.Open) {
			return nil, nil
		}
		return &Entry{Events: b.events, Turn: turn, Runner: d.id}, nil
	})
	if errors.Is(err, ErrLogFull) {
		return d.endFull(ctx)
	}
	if err != nil {
		return err
	}
	if err := d.notify(ctx); err != nil {
		return err
	}
	for _, a := range b.answers {
		if err := d.answer(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

// notify creates the webhooks that the log requires and that do not exist yet.
func (d *drive) notify(ctx context.Context) error {
	for _, n := range d.log.state.unnotified(d.notified) {
		if err := d.Notify(ctx, d.log.session, n); err != nil {
			return fmt.Errorf("create the webhook of event %d: %w", n.Sequence, err)
		}
		d.notified = n.Sequence
	}
	return nil
}

// checkKey ends the session if its API key is no longer valid.
func (d *drive) checkKey(ctx context.Context) error {
	if err := d.CheckKey(ctx, d.log.session.Key); !proto.Final(err) {
		return nil
	}
	return d.end(ctx, "the API key with which the session was created is no longer valid")
}

// endFull ends the session because its log is full.
func (d *drive) endFull(ctx context.Context) error {
	return d.end(ctx, fmt.Sprintf("the session has %d MiB of events, which is the limit; create another",
		proto.MaxAgentSessionBytes>>20))
}

// end ends the session. reason is a sentence for its clients.
func (d *drive) end(ctx context.Context, reason string) error {
	_, err := d.log.append(ctx, d.queueEntry, func(state *State) (*Entry, error) {
		if state.Ended == EndTerminated {
			return nil, nil
		}
		b := &batch{normaliser: &d.normaliser, state: state}
		err := b.add(&Native{Type: SessionEnded, Synthetic: true, Data: Ended{
			Reason: EndTerminated, TerminatedBy: FromDaemon,
			Message: reason,
		}})
		return &Entry{Events: b.events, Turn: state.Turns, Runner: d.id}, err
	})
	return err
}

// takeOver continues the turn in progress that another runner started, or ends it with an error.
func (d *drive) takeOver(ctx context.Context) error {
	state := &d.log.state
	d.begin(state.Open)
	if err := d.notify(ctx); err != nil {
		return err
	}
	if !state.Running || state.Ended == EndTerminated {
		return nil
	}
	if err := d.readTurn(ctx); err != nil {
		return err
	}
	if !d.info.Sandboxed { // programs in sandboxes end with their runner
		err := d.start(ctx, true)
		if err == nil && d.talk.Resumed() {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		d.closeConversation()
	}
	return d.append(ctx, state.Turns, func(b *batch) error {
		if !b.state.Running {
			return nil
		}
		return b.fail("turn_interrupted",
			"the server that ran the agent was stopped during this turn; send the message again")
	})
}

// prepare starts the agent before the first message, if the session asks for it.
func (d *drive) prepare(ctx context.Context) error {
	state := &d.log.state
	if !d.info.Sandboxed || !d.log.session.Prepare || state.Messages > 0 || state.Ended != "" {
		return nil
	}
	err := d.start(ctx, false)
	if err != nil && ctx.Err() == nil { // the first turn starts it again, and says why it fails
		d.Log.WarnContext(ctx, "agent not prepared", "session", d.log.session.ID, "org", d.log.session.Org, "error", err)
		return nil
	}
	return err
}

// readTurn reads the turn in progress. It restores the normaliser, and queues the answers and
// interrupts of users, because the agent may not have received them.
func (d *drive) readTurn(ctx context.Context) error {
	state := &d.log.state
	for after := state.TurnAfter; after < d.log.at; {
		message, at, err := d.Logs.Next(ctx, d.log.session.Org, d.log.session.LogID(), after)
		if errors.Is(err, proto.ErrNotFound) || message == nil || at > d.log.at {
			break // the beginning has expired, or the entry is newer
		}
		if err != nil {
			return err
		}
		e, err := decodeEntry(message)
		if err != nil {
			return err
		}
		for i := range e.Events {
			if err := d.replayEvent(e, &e.Events[i]); err != nil {
				return err
			}
		}
		if e.Answer != nil || e.Interrupt {
			d.appended = append(d.appended, e)
		}
		after = at
	}
	if id := placeholderID(d.log.session.ID, state.Turns); state.Open[id] != "" {
		d.placeholder = id
	}
	return nil
}

// replayEvent restores the normaliser from an event of the turn in progress. It queues a permission
// that the runner itself granted like a user's answer.
func (d *drive) replayEvent(e *Entry, v *Event) error {
	if e.Answer == nil && v.Type == PermissionResolved {
		p, err := DataOf[Permission](v)
		if err != nil {
			return err
		}
		d.appended = append(d.appended, &Entry{Answer: &Answer{Permission: &p}, Turn: e.Turn})
	}
	return d.replay(v)
}

// start starts the agent. running reports whether a turn is in progress.
func (d *drive) start(ctx context.Context, running bool) error {
	state := &d.log.state
	ctx, cancel := context.WithCancel(ctx)
	talk := &conversation{cancel: cancel, closed: make(chan struct{})}
	var err error
	if d.info.Sandboxed {
		if talk.sandbox, err = d.open(ctx); err == nil {
			err = placeSkills(ctx, talk.sandbox, d.log.session, d.info.SkillsDir)
		}
		if err != nil {
			talk.closeSandbox()
			cancel()
			return err
		}
	}
	talk.Conversation, err = d.agent.Start(ctx, &Start{
		Session: d.log.session, Sandbox: talk.sandbox, Native: state.Native, Turns: state.Turns, Running: running,
		Cursor:  state.Cursor,
		Pending: slices.Clone(state.Pending),
		Report: func(n Native) error {
			select {
			case d.reports <- report{n, talk}:
				return nil
			case <-talk.closed:
				return context.Canceled
			}
		},
	})
	if err != nil {
		talk.closeSandbox()
		cancel()
		return err
	}
	d.talk = talk
	return nil
}

// errUnwanted is returned if nobody needs a sandbox any more that is being opened.
var errUnwanted = errors.New("the turn was ended before its sandbox had started")

// open opens the sandbox of the session. That may take long, and users may end the turn meanwhile.
func (d *drive) open(ctx context.Context) (Sandbox, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type opened struct {
		sandbox Sandbox
		err     error
	}
	done := make(chan opened, 1)
	go func() {
		sandbox, err := d.Sandboxes.Open(ctx, d.log.session)
		done <- opened{sandbox, err}
	}()
	giveUp := func(cause error) (Sandbox, error) {
		cancel()
		if o := <-done; o.err == nil {
			o.sandbox.Close()
		}
		return nil, cause
	}
	for {
		select {
		case o := <-done:
			return o.sandbox, o.err
		case <-ctx.Done():
			return giveUp(ctx.Err())
		case <-d.check.C:
			if err := d.checkKey(ctx); err != nil {
				return giveUp(err)
			}
		case c := <-d.changed:
			if err := d.catchUp(ctx, c); err != nil {
				return giveUp(err)
			}
		}
		turn := d.log.state.Turns
		interrupted := slices.ContainsFunc(d.appended, func(e *Entry) bool { return e.Interrupt && e.Turn == turn })
		if interrupted || d.log.state.Ended == EndTerminated {
			return giveUp(errUnwanted)
		}
	}
}

// closeConversation closes the conversation, if there is one.
func (d *drive) closeConversation() {
	if d.talk == nil {
		return
	}
	d.keep()
	close(d.talk.closed)
	d.talk.Close()
	d.talk.closeSandbox()
	d.talk.cancel()
	d.talk = nil
}

// keep keeps the conversation, if it was to end for lack of use.
func (d *drive) keep() {
	if d.idle != nil {
		d.idle.Stop()
		d.idle = nil
	}
}

// closeSandbox closes the sandbox, if there is one.
func (c *conversation) closeSandbox() {
	if c.sandbox != nil {
		c.sandbox.Close()
	}
}

// handleAppended passes answers and interrupts that other processes have appended to the agent.
func (d *drive) handleAppended(ctx context.Context) error {
	for len(d.appended) > 0 {
		e := d.appended[0]
		d.appended = d.appended[1:]
		switch {
		case e.Answer != nil:
			if err := d.answer(ctx, e.Answer); err != nil {
				return err
			}
		case e.Interrupt && d.talk != nil && d.log.state.Running && e.Turn == d.log.state.Turns:
			if err := d.talk.Interrupt(ctx); err != nil {
				return d.failTurn(ctx, "interrupt", err)
			}
		}
	}
	return nil
}

// answer delivers an answer to the agent.
func (d *drive) answer(ctx context.Context, a *Answer) error {
	if d.talk == nil {
		return nil
	}
	if err := d.talk.Answer(ctx, a); err != nil {
		return d.failTurn(ctx, "answer", err)
	}
	return nil
}

// failTurn closes the conversation and ends the turn, because the agent returned an error.
func (d *drive) failTurn(ctx context.Context, step string, cause error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	d.closeConversation()
	d.Log.WarnContext(ctx, "agent not reached", "session", d.log.session.ID, "org", d.log.session.Org, "step", step,
		"error", cause)
	return d.append(ctx, d.log.state.Turns, func(b *batch) error {
		if e, ok := errors.AsType[*Error](cause); ok && e.Kind == ConversationLost {
			b.state.Native = ""
			return b.fail(string(e.Kind), e.Message)
		}
		return b.fail("agent_unavailable", "the agent could not be reached: "+publicMessage(cause))
	})
}

// publicMessage returns the part of an agent's error that clients may see.
func publicMessage(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Message
	}
	return "an internal error, which is in this server's log"
}

// step starts the next turn if none is in progress. It reports whether the session has no more
// work.
func (d *drive) step(ctx context.Context) (done bool, err error) {
	state := &d.log.state
	switch {
	case state.Ended == EndTerminated:
		d.queue = nil
		d.closeConversation()
	case state.Running:
		return false, nil
	case len(d.queue) > 0 && state.Ended == EndError:
		return false, d.failMessage(ctx)
	case len(d.queue) > 0:
		if state.Ended != "" { // the agent's program has ended, too
			d.closeConversation()
		}
		return false, d.startTurn(ctx)
	case state.Queued() > 0:
		return false, d.dropExpired(ctx)
	case d.talk != nil && d.talk.sandbox != nil && state.Ended == "":
		if d.idle == nil {
			d.idle = time.NewTimer(d.KeepAlive)
		}
		return false, nil
	}
	d.closeConversation()
	return true, d.finish(ctx)
}

// finish deactivates the session, and reactivates it if work has arrived meanwhile.
func (d *drive) finish(ctx context.Context) error {
	if err := d.notify(ctx); err != nil {
		return err
	}
	x := d.log.session
	if err := d.Records.Deactivate(ctx, x.Org, x.ID, d.notified); err != nil {
		return err
	}
	now, err := load(ctx, d.Logs, x)
	if errors.Is(err, proto.ErrNotFound) {
		return nil
	}
	if err == nil && now.state.hasWork(d.notified) {
		err = d.Records.Activate(ctx, x.Org, x.ID)
	}
	return err
}

// startTurn starts the turn of the first message in the queue.
func (d *drive) startTurn(ctx context.Context) error {
	next := d.queue[0]
	err := d.beginTurn(ctx, func(b *batch) error {
		b.state.Ended = ""
		if next.Number <= b.state.Interrupted {
			return b.add(&Native{Type: TurnEnded})
		}
		return b.startPlaceholder(d.log.session.ID, next.Message)
	})
	if err != nil || !d.log.state.Running { // the session was terminated or the turn interrupted
		return err
	}
	d.keep()
	if d.talk != nil && d.talk.sandbox != nil && d.talk.sandbox.Lost(ctx) != "" { // since the last turn
		d.closeConversation()
	}
	if d.talk == nil {
		if err := d.start(ctx, false); errors.Is(err, errUnwanted) {
			return d.append(ctx, d.log.state.Turns, func(b *batch) error { return b.add(&Native{Type: TurnEnded}) })
		} else if err != nil {
			return d.failTurn(ctx, "start", err)
		}
	}
	message := *next.Message
	message.Model, message.Variant = d.log.state.TurnModel, d.log.state.TurnVariant
	if err := d.talk.Send(ctx, &message); err != nil {
		return d.failTurn(ctx, "send", err)
	}
	return nil
}

// failMessage fails the turn of the first queued message, because the agent's program has failed.
func (d *drive) failMessage(ctx context.Context) error {
	return d.beginTurn(ctx, func(b *batch) error {
		return b.fail(string(AgentExited), "the agent's program ended before this message's turn; create another session")
	})
}

// dropExpired drops the queued messages that the log no longer contains, and reports them as an
// error.
func (d *drive) dropExpired(ctx context.Context) error {
	return d.append(ctx, 0, func(b *batch) error {
		lost := b.state.Queued() - int64(len(d.queue)) // d.queue may have grown
		b.state.Turns, b.state.QueuedAfter = b.state.Turns+lost, queuedAfter(d.queue)
		return b.add(&Native{Type: ErrorEvent, Synthetic: true, Data: Failure{
			Code: new("message_expired"), Message: fmt.Sprintf("%d messages expired before their turns; send them again", lost),
		}})
	})
}

// beginTurn removes the first message from the queue and begins its turn. fill adds further events.
func (d *drive) beginTurn(ctx context.Context, fill func(*batch) error) error {
	next := d.queue[0]
	err := d.append(ctx, next.Number, func(b *batch) error {
		b.begin(nil)
		b.state.Turns, b.state.Running, b.state.Open = next.Number, true, nil
		b.state.TurnModel = cmp.Or(next.Model, b.state.TurnModel)
		b.state.TurnVariant = cmp.Or(next.Variant, b.state.TurnVariant)
		b.state.TurnAfter, b.state.QueuedAfter = d.log.at, queuedAfter(d.queue[1:])
		started := &Native{Type: TurnStarted, Synthetic: true}
		if err := b.event(started, Turn{Phase: "started", ID: turnID(next.Number)}); err != nil {
			return err
		}
		if err := b.userItem(next.Message); err != nil {
			return err
		}
		return fill(b)
	})
	if err == nil && d.log.state.Turns == next.Number {
		d.queue = d.queue[1:]
	}
	return err
}

// store stores a report together with others that have arrived. Deltas wait up to deltaEvery for
// more.
func (d *drive) store(ctx context.Context, first report) error {
	reports := []*Native{}
	onlyDeltas := true
	add := func(r report) {
		if r.of == d.talk {
			n := r.Native
			onlyDeltas = onlyDeltas && n.Type == ItemDelta
			reports = append(reports, &n)
		}
	}
	add(first)
	var wait <-chan time.Time
	if left := deltaEvery - time.Since(d.flushed); onlyDeltas && left > 0 {
		timer := time.NewTimer(left)
		defer timer.Stop()
		wait = timer.C
	}
	for more := true; more && len(reports) < maxBatch; {
		if onlyDeltas && wait != nil {
			select {
			case r := <-d.reports:
				add(r)
			case <-wait:
				wait = nil
			case <-ctx.Done():
				return ctx.Err()
			}
			continue
		}
		select {
		case r := <-d.reports:
			add(r)
		default:
			more = false
		}
	}
	if len(reports) == 0 {
		return nil
	}
	at := slices.IndexFunc(reports, func(n *Native) bool { return n.Type == TurnEnded || n.Type == SessionEnded })
	if at >= 0 && d.talk.sandbox != nil {
		if reports[at].Type == SessionEnded {
			if why := d.talk.sandbox.Lost(ctx); why != "" {
				return d.loseSandbox(ctx, reports[:at], why)
			}
		}
		if d.log.state.Running {
			reports = slices.Insert(reports, at, d.saveFiles(ctx)...)
		}
	}
	d.flushed = time.Now()
	return d.append(ctx, d.log.state.currentTurn(), func(b *batch) error { return b.add(reports...) })
}

// loseSandbox ends the turn in progress, if there is one, because the sandbox has ended. The next turn gets a new
// sandbox, with the files as they were last saved.
func (d *drive) loseSandbox(ctx context.Context, reports []*Native, why string) error {
	d.closeConversation()
	return d.append(ctx, d.log.state.currentTurn(), func(b *batch) error {
		if err := b.add(reports...); err != nil || !b.state.Running {
			return err
		}
		return b.fail("sandbox_lost", why)
	})
}

// saveFiles saves the files of the sandbox, and returns reports about what the turn has changed.
func (d *drive) saveFiles(ctx context.Context) []*Native {
	ctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	changes, more, err := d.talk.sandbox.Save(ctx)
	if err != nil {
		d.Log.WarnContext(ctx, "files of an agent session not saved", "session", d.log.session.ID, "org",
			d.log.session.Org, "error", err)
		return []*Native{{Type: ErrorEvent, Synthetic: true, Data: Failure{
			Code: new("files_not_saved"), Message: "the files of the session were not saved: " + publicMessage(err),
		}}}
	}
	if len(changes) == 0 {
		return nil
	}
	item := Item{
		NativeID: new(fmt.Sprintf("changes_%d", d.log.state.Turns)), Kind: KindSystem, Role: new(RoleSystem),
		Status: Completed,
	}
	for _, c := range changes {
		item.Content = append(item.Content, Part{Type: PartFileRef, Path: c.Path, Action: c.Action, Diff: orNil(c.Diff)})
	}
	if more {
		item.Content = append(item.Content, Part{Type: PartStatus, Label: "More files have changed"})
	}
	return []*Native{{Type: ItemCompleted, Synthetic: true, Data: ItemData{item}}}
}
