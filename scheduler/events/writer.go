package events

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/klauspost/compress/s2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	maxLine     = 64 << 10                  // a longer line becomes several events
	eventCost   = 80                        // maximum overhead of an encoded event, in bytes
	maxMessage  = 2 * (maxLine + eventCost) // encoded bytes
	maxPending  = 2 << 20                   // encoded bytes that wait while as many are being sent; then the program waits
	minPacked   = 4 << 10                   // encoded bytes from which on a message is compressed
	maxUnpacked = 8 * maxLine               // encoded bytes of a message, escapes included
	messageCost = 256                       // overhead of a stored message, in bytes
	maxKept     = 32 << 20                  // stored bytes of an attempt beyond the output in its result, with messageCost
	// part of maxKept, at least minExcess, by which it is exceeded before the output is trimmed
	trimSlack = 4
	// evictAfter is how long an ended execution keeps all events, for readers that lag. It is
	// extended up to maxEvictions times while any does.
	evictAfter   = 30 * time.Second
	maxEvictions = 120
	// readersTimeout bounds the question whether there are readers.
	readersTimeout = 2 * time.Second
	// partialDelay is how long an incomplete line waits for its end, see FlushPartial.
	partialDelay = 100 * time.Millisecond
	// publishTimeout is how long a message is retried while the store does not answer.
	publishTimeout = 15 * time.Second
	retryEvery     = 50 * time.Millisecond
)

// Writer publishes the events of one attempt: one per line, and many in one message if the program
// writes fast. Events whose output is in the result are kept until the execution has ended and its
// last reader has gone. The others, the excess, are trimmed to maxKept bytes. It is safe for
// concurrent use. While the store does not answer, the program waits once maxPending is reached.
// Events that the store rejects are lost, and the record reports that.
//
// One message is in flight at a time, while the next one fills. Otherwise a message that is lost
// and sent again could be stored after later ones.
type Writer struct {
	// FlushPartial makes incomplete lines events after partialDelay. It is set before the first
	// write.
	FlushPartial bool
	// Budget, if not nil, limits what is stored for the organisation. Beyond it, the result keeps
	// minOutput bytes of each output, and as many bytes of events remain after the program has
	// ended. It is set before the first write.
	Budget Budget

	store       *store.Store
	org         string
	id          proto.TraceID
	attempt     int
	reserve     func(need, want int64) (int64, error) // of Budget
	reservation reservation                           // of this attempt

	mu         sync.Mutex
	shrunk     *sync.Cond // pending was taken or dropped
	pending    []part     // one per message
	waiting    int        // bytes of pending
	seq        int64      // of the last event
	outputs    int64
	limits     map[proto.Stream]int64  // bytes of each output, and of displays, that the result may keep
	inResult   map[proto.Stream]int64  // bytes of each that the result holds
	overBudget bool                    // Budget refused a reservation
	written    map[proto.Stream]int64  // bytes in events
	held       int64                   // stored bytes of messages that are not excess
	tails      map[proto.Stream][]byte // incomplete lines
	lost       bool
	closed     bool
	// partial flushes incomplete lines; nil before the first one. flushing reports whether it is set.
	partial  *time.Timer
	flushing bool
	wake     chan struct{}
	done     chan struct{}
	timeout  time.Duration // see publishTimeout
	maxKept  int           // stored bytes of excess; see consumeBudget

	// Owned by run.
	packed    []byte    // scratch space of message
	recent    []message // with the last [proto.MaxEvents] events, oldest first
	evictable uint64    // sequence number of the last message that is older
	excess    []message // that are not trimmed, oldest first
	kept      int       // stored bytes of excess
	most      int       // the largest value of kept for which Budget was asked
	tail      int64     // stored bytes of the messages that are kept beyond the budget
}

// part is the content of one message.
type part struct {
	events      []byte // encoded
	first, last int64  // sequence numbers
	excess      bool   // the result holds none of the output in it
}

// message is a stored message.
type message struct {
	last int64 // event
	size int   // stored bytes, with messageCost
	seq  uint64
}

// NewWriter returns a writer for an attempt at an execution. baseSeq is the number of the last
// known event of earlier attempts. The first attempt begins with the status event. A later one
// begins with a fence, a message that makes readers ignore earlier attempts, and continues their
// numbers. limit is the maximum size of each output in the result, in bytes.
func NewWriter(
	ctx context.Context, st *store.Store, org string, id proto.TraceID, attempt int, baseSeq, limit int64,
) *Writer {
	w := &Writer{timeout: publishTimeout, maxKept: maxKept}
	w.start(ctx, st, org, id, attempt, baseSeq, limit)
	return w
}

func (w *Writer) start(
	ctx context.Context, st *store.Store, org string, id proto.TraceID, attempt int, baseSeq, limit int64,
) {
	w.store, w.org, w.id, w.attempt, w.seq, w.most = st, org, id, attempt, baseSeq, minExcess
	w.limits = map[proto.Stream]int64{
		proto.Stdout: limit, proto.Stderr: limit, displays: min(limit, proto.MaxDisplayBytes),
	}
	w.written, w.inResult, w.tails = map[proto.Stream]int64{}, map[proto.Stream]int64{}, map[proto.Stream][]byte{}
	w.wake, w.done = make(chan struct{}, 1), make(chan struct{})
	w.shrunk = sync.NewCond(&w.mu)
	ctx = context.WithoutCancel(ctx) // the output is kept, whatever ends the program
	w.reserve = func(need, want int64) (int64, error) {
		ctx, cancel := context.WithTimeout(ctx, reserveTimeout)
		defer cancel()
		return w.Budget.ReserveOutput(ctx, w.org, need, want)
	}
	if attempt > 1 {
		w.lost = w.fence(ctx) != nil
	} else {
		w.seq = 1
		w.pending = []part{{events: proto.AppendStatusEvent(nil, id), first: 1, last: 1}}
		w.wake <- struct{}{}
	}
	go w.run(ctx)
}

// fence stores the first message of a later attempt directly after the last message of earlier
// ones. It contains no event, or the status event if there is none yet.
func (w *Writer) fence(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	policy := store.Retry{Pause: retryEvery, Transient: func(err error) bool { return !store.IsRejected(err) }}
	err := policy.Do(ctx, func(ctx context.Context) error {
		return store.Update(ctx, func() error { return w.tryFence(ctx) })
	})
	if err != nil {
		w.seq = max(w.seq, 1) // readers from the beginning get the status event anyway
	}
	return err
}

func (w *Writer) tryFence(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	var at uint64
	switch m, err := w.store.Output.Last(ctx, store.OutputPattern(w.org, w.id)); {
	case err == nil:
		at = m.Seq
		if w.seq, err = w.store.Output.LastEvent(ctx, w.org, w.id, w.attempt-1); err != nil {
			return err
		}
	case !store.IsNotFound(err):
		return err
	}
	msg := w.message(part{first: w.seq + 1, last: w.seq})
	if w.seq == 0 {
		msg = w.message(part{events: proto.AppendStatusEvent(nil, w.id), first: 1, last: 1})
	}
	if _, err := w.store.JS.PublishMsg(
		ctx, msg, jetstream.WithExpectLastSequenceForSubject(at, store.OutputPattern(w.org, w.id))); err != nil {
		return err
	}
	w.seq = max(w.seq, 1)
	return nil
}

func (w *Writer) message(p part) *nats.Msg {
	h := nats.Header{}
	h.Set(store.HeaderFirst, strconv.FormatInt(p.first, 10))
	h.Set(store.HeaderLast, strconv.FormatInt(p.last, 10))
	m := &nats.Msg{Subject: store.OutputSubject(w.org, w.id, w.attempt), Header: h, Data: p.events}
	if p.excess {
		m.Subject = store.ExcessSubject(w.org, w.id, w.attempt)
	}
	if len(p.events) >= minPacked {
		w.packed = s2.Encode(w.packed[:cap(w.packed)], p.events)
		if len(w.packed) < len(p.events) {
			h.Set(store.HeaderPacked, "1")
			m.Data = bytes.Clone(w.packed) // may be resent while the next message is packed
		}
	}
	return m
}

// displays is the name of the results among the limits of outputs.
const displays proto.Stream = "display"

// KeepDisplay reports whether a display of n bytes goes into the result, which has place for it and
// whose organisation has a budget. It is called before Display.
func (w *Writer) KeepDisplay(n int) bool {
	w.mu.Lock()
	before := w.inResult[displays]
	if before+int64(n) > w.limits[displays] {
		w.mu.Unlock()
		return false
	}
	w.inResult[displays] += int64(n)
	w.mu.Unlock()
	if w.consumeBudget(2 * (before + int64(n) - max(before, minOutput))) { // the events hold it again
		return true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.inResult[displays] = before
	w.limits[displays] = max(before, minOutput)
	return false
}

// Display queues the event of the display with an index in the result, after all output before it. It
// waits while maxPending is exceeded.
func (w *Writer) Display(index int, d *proto.Display) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.waiting > maxPending && !w.closed {
		w.shrunk.Wait()
	}
	w.emitTails()
	w.seq++
	w.outputs++
	event := proto.AppendDisplayEvent(nil, index, d, w.seq)
	n := len(w.pending)
	if n == 0 || w.pending[n-1].excess || len(w.pending[n-1].events)+len(event) > maxMessage {
		w.pending = append(w.pending, part{first: w.seq})
		n++
	}
	p := &w.pending[n-1]
	p.events, p.last = append(p.events, event...), w.seq
	w.waiting += len(event)
	w.wakeSender()
}

// Stream returns the writer for one of the program's outputs. Writing to it never fails.
func (w *Writer) Stream(s proto.Stream) *Output { return &Output{w: w, stream: s} }

// Output is an [io.Writer] of one of a program's outputs.
type Output struct {
	w      *Writer
	stream proto.Stream
}

// Write queues p, and waits while maxPending is exceeded.
func (o *Output) Write(p []byte) (int, error) {
	o.w.write(o.stream, p)
	return len(p), nil
}

// Keep returns how many of the next n bytes of output go into the result. It is called before
// Write. The result keeps the beginning of an output, up to the limit and, beyond minOutput, up to
// the remaining budget.
func (o *Output) Keep(n int) int {
	w, s := o.w, o.stream
	w.mu.Lock()
	before := w.inResult[s]
	kept := min(int64(n), w.limits[s]-before)
	w.inResult[s] += kept
	w.mu.Unlock()
	// The events hold the same bytes again.
	if over := before + kept - max(before, minOutput); !w.consumeBudget(2 * over) {
		w.mu.Lock()
		kept -= over
		w.inResult[s] -= over
		w.limits[s] = min(w.limits[s], max(w.inResult[s], minOutput))
		w.mu.Unlock()
	}
	return int(kept)
}

func (w *Writer) write(s proto.Stream, p []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(p) > 0 {
		for w.waiting > maxPending && !w.closed {
			w.shrunk.Wait()
		}
		line := p
		whole := false
		if i := bytes.IndexByte(p, '\n'); i >= 0 {
			line, whole = p[:i+1], true
		}
		if tail := w.tails[s]; len(tail) > 0 || !whole {
			n := min(len(line), maxLine-len(tail))
			tail = append(tail, line[:n]...)
			whole = whole && n == len(line)
			p = p[n:]
			if whole || len(tail) >= maxLine {
				w.emitPiece(s, tail, whole)
			} else {
				w.tails[s] = tail
			}
			continue
		}
		if len(line) > maxLine {
			line = line[:maxLine]
			p = p[maxLine:]
			w.emitPiece(s, append(w.tails[s], line...), false)
			continue
		}
		p = p[len(line):]
		w.emit(s, line)
	}
	if w.FlushPartial && len(w.tails[s]) > 0 {
		if w.partial == nil {
			w.partial = time.AfterFunc(partialDelay, w.flushPartial)
		} else if !w.flushing {
			w.partial.Reset(partialDelay)
		}
		w.flushing = true
	}
}

// flushPartial emits incomplete lines.
func (w *Writer) flushPartial() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.flushing = false
	if !w.closed {
		w.emitTails()
	}
}

// emitTails emits incomplete lines, but for an incomplete character at their end.
func (w *Writer) emitTails() {
	for _, s := range []proto.Stream{proto.Stdout, proto.Stderr} {
		if tail := w.tails[s]; proto.CutUTF8(tail) > 0 {
			w.emitPiece(s, tail, false)
		}
	}
}

// emitPiece emits a whole line, or as much of a long line as does not split a character. The rest
// becomes the tail.
func (w *Writer) emitPiece(s proto.Stream, tail []byte, whole bool) {
	cut := len(tail)
	if !whole {
		cut = proto.CutUTF8(tail)
	}
	w.emit(s, tail[:cut])
	w.tails[s] = append(tail[:0], tail[cut:]...)
}

// emit adds an event to the last pending message, or to a new one if that would become too large.
func (w *Writer) emit(s proto.Stream, data []byte) {
	w.seq++
	w.outputs++
	// A hostile program could spread the result's output over any number of messages.
	excess := w.written[s] >= w.limits[s] || w.held > w.limits[proto.Stdout]+w.limits[proto.Stderr]+int64(w.maxKept)
	w.written[s] += int64(len(data))
	n := len(w.pending)
	switch {
	case n == 0 || w.pending[n-1].excess && !excess:
		w.pending = append(w.pending, part{first: w.seq, excess: excess})
	case len(w.pending[n-1].events)+len(data)+eventCost > maxMessage:
		// The program writes fast, so this message will become full too: allocate it at once.
		w.pending = append(w.pending,
			part{first: w.seq, excess: excess, events: make([]byte, 0, max(maxMessage, len(data)+eventCost))})
	}
	p := &w.pending[len(w.pending)-1]
	before := len(p.events)
	p.events = proto.AppendOutputEvent(p.events, s, data, w.seq)
	w.waiting += len(p.events) - before
	if before > 0 && len(p.events) > maxMessage { // the encoded event is longer than its data
		next := part{bytes.Clone(p.events[before:]), w.seq, w.seq, excess}
		p.events = p.events[:before]
		w.pending = append(w.pending, next)
	} else {
		p.last = w.seq
	}
	w.wakeSender()
}

func (w *Writer) wakeSender() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// OverBudget reports, after Close, whether less of the output is kept because the budget was used
// up.
func (w *Writer) OverBudget() bool { return w.overBudget }

// Close emits incomplete lines and waits until everything is stored. It returns the number of the
// last event, and whether readers may miss events.
func (w *Writer) Close() (last int64, truncated bool) {
	w.mu.Lock()
	for _, s := range []proto.Stream{proto.Stdout, proto.Stderr} {
		if tail := w.tails[s]; len(tail) > 0 {
			w.emit(s, tail)
			w.tails[s] = nil
		}
	}
	w.closed = true
	if w.partial != nil {
		w.partial.Stop()
	}
	w.shrunk.Broadcast()
	w.mu.Unlock()
	close(w.wake)
	<-w.done
	w.settle()
	return w.seq, w.lost || w.outputs > proto.MaxEvents
}

// run sends pending messages until the writer is closed.
func (w *Writer) run(ctx context.Context) {
	defer close(w.done)
	for range w.wake {
		for w.send(ctx) {
		}
	}
	for w.send(ctx) {
	}
	after := evictAfter
	if w.overBudget {
		w.shorten()
		after = 0
	}
	if w.evictable > 0 {
		evictLater(ctx, w.eviction(), after, maxEvictions)
	}
}

// shorten makes all messages evictable except the last minOutput bytes, and at least one message.
func (w *Writer) shorten() {
	for _, m := range slices.Backward(w.recent) {
		if w.tail > 0 && w.tail+int64(m.size) > minOutput {
			w.evictable = m.seq
			w.markLost() // within the promised number
			return
		}
		w.tail += int64(m.size)
	}
}

// evictLater calls evict after a delay, and again after evictAfter while it returns false.
func evictLater(ctx context.Context, evict func(context.Context) bool, after time.Duration, times int) {
	time.AfterFunc(after, func() {
		if !evict(ctx) && times > 1 {
			evictLater(ctx, evict, evictAfter, times-1)
		}
	})
}

// send publishes the pending messages, and reports whether there were any.
func (w *Writer) send(ctx context.Context) bool {
	w.mu.Lock()
	parts := w.pending
	w.pending, w.waiting = nil, 0
	w.shrunk.Broadcast()
	w.mu.Unlock()
	for _, p := range parts {
		if !w.publish(ctx, p) {
			w.dropPending()
			break
		}
	}
	return len(parts) > 0
}

// publish stores a message. It reports whether the store answers.
func (w *Writer) publish(ctx context.Context, p part) bool {
	m := w.message(p)
	at, err := w.publishMsg(ctx, m)
	if err != nil {
		w.markLost()
		return store.IsRejected(err)
	}
	stored := message{p.last, len(m.Data) + messageCost, at}
	for w.recent = append(w.recent, stored); w.recent[0].last <= p.last-proto.MaxEvents; w.recent = w.recent[1:] {
		w.evictable = w.recent[0].seq
	}
	if !p.excess {
		w.mu.Lock()
		w.held += int64(stored.size)
		w.mu.Unlock()
		return true
	}
	w.excess = append(w.excess, stored)
	w.kept += stored.size
	if w.consumeBudget(int64(w.kept - w.most)) {
		w.most = max(w.most, w.kept)
	}
	w.mu.Lock()
	limit := w.maxKept
	w.mu.Unlock()
	if w.kept > limit+max(limit/trimSlack, minExcess) {
		w.trim(ctx, limit)
	}
	return true
}

// publishMsg sends a message until it is stored, and returns its sequence number.
func (w *Writer) publishMsg(ctx context.Context, m *nats.Msg) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	for {
		changed := w.store.Leaders.Changed(store.OutputLeader)
		ack, err := w.store.JS.PublishMsgAsync(m)
		if err == nil {
			select {
			case ok := <-ack.Ok():
				return ok.Sequence, nil
			case err = <-ack.Err():
			case <-changed:
				continue
			case <-ctx.Done():
				return 0, context.Cause(ctx)
			}
		}
		if store.IsRejected(err) {
			return 0, err
		}
		if err := pause(ctx); err != nil {
			return 0, err
		}
	}
}

// dropPending drops the pending messages, since the store has not answered for publishTimeout.
func (w *Writer) dropPending() {
	w.mu.Lock()
	w.pending, w.waiting = nil, 0
	w.shrunk.Broadcast()
	w.mu.Unlock()
}

func (w *Writer) markLost() {
	w.mu.Lock()
	w.lost = true
	w.mu.Unlock()
}

// eviction returns a function that evicts all but the last [proto.MaxEvents] output events, unless
// the output is being read. It reports whether nothing is left to evict. The function does not
// reference the writer.
func (w *Writer) eviction() func(context.Context) bool {
	st, org, id, last := w.store, w.org, w.id, w.evictable
	return func(ctx context.Context) bool {
		asked, cancel := context.WithTimeout(ctx, readersTimeout)
		defer cancel()
		_, err := st.Conn.RequestWithContext(asked, store.ReadersSubject(org, id), nil)
		if !errors.Is(err, nats.ErrNoResponders) {
			return false
		}
		return purge(ctx, st, store.OutputPattern(org, id), last) == nil // otherwise they stay until the end of retention
	}
}

// trim evicts the oldest messages of the excess beyond limit bytes, so that one execution cannot
// fill the disk.
func (w *Writer) trim(ctx context.Context, limit int) {
	n, kept := 0, w.kept
	for n < len(w.excess)-1 && kept > limit {
		kept -= w.excess[n].size
		n++
	}
	if n == 0 {
		return
	}
	w.markLost() // perhaps within the promised number
	if purge(ctx, w.store, store.ExcessSubject(w.org, w.id, w.attempt), w.excess[n-1].seq) != nil {
		return // retried with the next message
	}
	w.excess, w.kept = append(w.excess[:0], w.excess[n:]...), kept
}

// purge deletes the messages on subjects that match pattern up to sequence number last.
func purge(ctx context.Context, st *store.Store, pattern string, last uint64) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	return st.Output.Purge(ctx, jetstream.WithPurgeSubject(pattern), jetstream.WithPurgeSequence(last+1))
}

// pause waits before a retry. It returns the cause of ctx if ctx is done first.
func pause(ctx context.Context) error {
	timer := time.NewTimer(retryEvery)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}
