package events

import (
	"bytes"
	"context"
	"strconv"
	"sync"
	"time"

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
	messageCost = 256                       // overhead of a stored message, in bytes
	maxKept     = 32 << 20                  // stored bytes of an attempt, with messageCost
	trimSlack   = 8 << 20                   // by which maxKept is exceeded before the output is trimmed
	// evictAfter is how long all events of an ended execution are kept, for readers that are
	// behind.
	evictAfter = 30 * time.Second
	// publishTimeout is how long a message is retried while the store does not answer.
	publishTimeout = 15 * time.Second
	retryEvery     = 50 * time.Millisecond
)

// Writer publishes the events of one attempt: one per line, and many in one message if the program
// writes fast. It is safe for concurrent use. While the store does not answer, the program waits
// once maxPending is reached. Events that the store does not accept are lost, and the result says
// so.
//
// One message is in flight at a time, while the next one fills. Otherwise a message that is lost
// and sent again could be stored after later ones.
type Writer struct {
	store   *store.Store
	id      proto.TraceID
	attempt int
	subject string

	mu      sync.Mutex
	shrunk  *sync.Cond // pending was taken or dropped
	pending []part     // one per message
	waiting int        // bytes of pending
	seq     int64      // of the last event
	outputs int64
	tails   map[proto.Stream][]byte // incomplete lines
	lost    bool
	closed  bool
	wake    chan struct{}
	done    chan struct{}

	// Owned by run.
	stored []message // that are not evicted, oldest first
	kept   int       // bytes of stored, with messageCost
}

// part is the content of one message.
type part struct {
	events      []byte // encoded
	first, last int64  // sequence numbers
}

// message is a stored message.
type message struct {
	last int64 // event
	size int   // with messageCost
	seq  uint64
}

// NewWriter returns a writer for an attempt. baseSeq is the number of the last known event of
// earlier attempts. The first attempt begins with the status event. A later one begins with a
// fence, a message after which readers ignore earlier attempts, and continues their numbers.
func NewWriter(ctx context.Context, st *store.Store, id proto.TraceID, attempt int, baseSeq int64) *Writer {
	w := &Writer{
		store: st, id: id, attempt: attempt, subject: store.OutputSubject(id, attempt), seq: baseSeq, tails: map[proto.Stream][]byte{},
		wake: make(chan struct{}, 1), done: make(chan struct{}),
	}
	w.shrunk = sync.NewCond(&w.mu)
	ctx = context.WithoutCancel(ctx) // the output is kept, whatever ends the program
	if attempt > 1 {
		w.lost = w.fence(ctx) != nil
	} else {
		w.seq = 1
		w.pending = []part{{proto.AppendStatusEvent(nil, id), 1, 1}}
		w.wake <- struct{}{}
	}
	go w.run(ctx)
	return w
}

// fence stores the first message of a later attempt directly after the last message of earlier
// ones. It contains no event, or the status event if there is none yet.
func (w *Writer) fence(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
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
	switch m, err := w.store.Last(ctx, w.store.Output, store.OutputPattern(w.id)); {
	case err == nil:
		at = m.Seq
		if w.seq, err = w.store.LastEvent(ctx, w.id, w.attempt-1); err != nil {
			return err
		}
	case !store.IsNotFound(err):
		return err
	}
	msg := w.message(part{first: w.seq + 1, last: w.seq})
	if w.seq == 0 {
		msg = w.message(part{proto.AppendStatusEvent(nil, w.id), 1, 1})
	}
	if _, err := w.store.JS.PublishMsg(ctx, msg, jetstream.WithExpectLastSequenceForSubject(at, store.OutputPattern(w.id))); err != nil {
		return err
	}
	w.seq = max(w.seq, 1)
	return nil
}

func (w *Writer) message(p part) *nats.Msg {
	h := nats.Header{}
	h.Set(store.HeaderFirst, strconv.FormatInt(p.first, 10))
	h.Set(store.HeaderLast, strconv.FormatInt(p.last, 10))
	return &nats.Msg{Subject: w.subject, Header: h, Data: p.events}
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
			take := min(len(line), maxLine-len(tail))
			tail = append(tail, line[:take]...)
			whole = whole && take == len(line)
			p = p[take:]
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
	n := len(w.pending)
	switch {
	case n == 0:
		w.pending = append(w.pending, part{first: w.seq})
	case len(w.pending[n-1].events)+len(data)+eventCost > maxMessage:
		// The program writes fast, so this message will become full too: allocate it at once.
		w.pending = append(w.pending, part{first: w.seq, events: make([]byte, 0, max(maxMessage, len(data)+eventCost))})
	}
	p := &w.pending[len(w.pending)-1]
	before := len(p.events)
	p.events = proto.AppendOutputEvent(p.events, s, data, w.seq)
	w.waiting += len(p.events) - before
	if before > 0 && len(p.events) > maxMessage { // the encoded event is longer than its data
		next := part{bytes.Clone(p.events[before:]), w.seq, w.seq}
		p.events = p.events[:before]
		w.pending = append(w.pending, next)
	} else {
		p.last = w.seq
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

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
	w.shrunk.Broadcast()
	w.mu.Unlock()
	close(w.wake)
	<-w.done
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
	if w.outputs > proto.MaxEvents {
		evict := w.eviction()
		time.AfterFunc(evictAfter, func() { evict(ctx) })
	}
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
	at, err := w.publishMsg(ctx, w.message(p))
	if err != nil {
		w.markLost()
		return store.IsRejected(err)
	}
	size := len(p.events) + messageCost
	w.stored = append(w.stored, message{p.last, size, at})
	w.kept += size
	if w.kept > maxKept+trimSlack {
		w.trim(ctx)
	}
	return true
}

// publishMsg sends a message until it is stored, and returns its sequence number.
func (w *Writer) publishMsg(ctx context.Context, m *nats.Msg) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	for {
		changed := w.store.LeaderChanged(store.OutputLeader)
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

// eviction returns a function that evicts all but the last [proto.MaxEvents] output events. The
// function does not reference the writer.
func (w *Writer) eviction() func(context.Context) {
	n, _ := w.excess(w.seq-proto.MaxEvents, w.kept)
	if n == 0 {
		return func(context.Context) {}
	}
	st, id, last := w.store, w.id, w.stored[n-1].seq
	return func(ctx context.Context) { _ = purge(ctx, st, id, last) } // otherwise they stay until the end of retention
}

// trim evicts the oldest messages beyond maxKept bytes, so that one execution cannot evict the
// output of others.
func (w *Writer) trim(ctx context.Context) {
	n, kept := w.excess(0, maxKept)
	if n == 0 {
		return
	}
	w.markLost() // perhaps within the promised number
	if purge(ctx, w.store, w.id, w.stored[n-1].seq) != nil {
		return // retried with the next message
	}
	w.stored, w.kept = append(w.stored[:0], w.stored[n:]...), kept
}

// excess returns the number of messages that have only events up to oldest or are beyond limit
// bytes, and the bytes of the others. It never counts the last message.
func (w *Writer) excess(oldest int64, limit int) (n, kept int) {
	kept = w.kept
	for n < len(w.stored)-1 && (w.stored[n].last <= oldest || kept > limit) {
		kept -= w.stored[n].size
		n++
	}
	return n, kept
}

// purge deletes the messages of all attempts of an execution up to sequence number last.
func purge(ctx context.Context, st *store.Store, id proto.TraceID, last uint64) error {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	return st.Output.Purge(ctx, jetstream.WithPurgeSubject(store.OutputPattern(id)), jetstream.WithPurgeSequence(last+1))
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
