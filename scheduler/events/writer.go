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
	maxLine     = 64 << 10                  // a longer line is told in pieces
	eventCost   = 80                        // bytes of an encoded event beside its data, at most
	maxMessage  = 2 * (maxLine + eventCost) // encoded bytes at which a message is sent: two pieces of a long line
	maxPending  = 2 << 20                   // encoded bytes waiting to be sent, beside as many that are being sent; a program that prints faster waits
	messageCost = 256                       // bytes that the store needs for a message beside its events
	maxKept     = 32 << 20                  // encoded bytes of an attempt, with the cost of its messages, that are kept for reconnection
	trimSlack   = 8 << 20                   // more than that are kept before it is trimmed
	// evictAfter is how long an ended execution keeps more than the promised number of events: a reader who is a little behind when
	// it ends shall still get all of them.
	evictAfter = 30 * time.Second
	// patience is how long a message is sent again while the store does not answer, and how long the end of an attempt waits.
	patience   = 15 * time.Second
	retryEvery = 50 * time.Millisecond
)

// Writer publishes the events of one attempt: lines as the program writes them, many in one message when it writes fast. Its
// methods are safe for concurrent use. While the store is away the program waits once as many bytes wait as may. Events that the store
// does not take are lost, and the result says so.
//
// One message is on its way at a time, and the next one fills meanwhile. The order of the stream is so that of the events, whatever becomes
// of the connection or of the server that leads the stream: of several on their way the first could be lost, and the others stored before it is
// sent again.
type Writer struct {
	store   *store.Store
	id      proto.TraceID
	attempt int
	subject string

	mu      sync.Mutex
	room    *sync.Cond // pending shrank
	pending []part     // what waits to be sent, a message each
	waiting int        // bytes of all
	seq     int64      // of the last event
	outputs int64
	tails   map[proto.Stream][]byte // a line that is not complete yet
	lost    bool
	closed  bool
	wake    chan struct{}
	done    chan struct{}

	// Owned by run.
	stored []message // not evicted, oldest first
	kept   int       // bytes of all, with their cost
}

// part is what one message holds.
type part struct {
	events      []byte // encoded
	first, last int64  // sequence numbers
}

// message is one that was stored.
type message struct {
	last   int64  // event
	size   int    // what it takes in the store
	stream uint64 // its sequence number in the stream
}

// NewWriter begins the events of an attempt, after baseSeq of earlier attempts. The first attempt begins with the status event. A later
// one begins with a message that fences off earlier ones: what they publish after it, having lost their lease, is not read. What they
// published since baseSeq was found out is counted in.
func NewWriter(ctx context.Context, st *store.Store, id proto.TraceID, attempt int, baseSeq int64) *Writer {
	w := &Writer{
		store: st, id: id, attempt: attempt, subject: store.OutputSubject(id, attempt), seq: baseSeq, tails: map[proto.Stream][]byte{},
		wake: make(chan struct{}, 1), done: make(chan struct{}),
	}
	w.room = sync.NewCond(&w.mu)
	ctx = context.WithoutCancel(ctx) // what was printed is kept, whatever ends the program
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

// fence stores the first message of a later attempt, right after the last one of those before: numbers go on from there, whoever
// published it. It holds no event, but the status event if no earlier attempt told it.
func (w *Writer) fence(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := w.tryFence(ctx)
		if err == nil {
			return nil
		}
		if !store.IsConflict(err) {
			if store.IsRejected(err) || pause(ctx) != nil {
				w.seq = max(w.seq, 1) // readers from the beginning get the status event all the same
				return err
			}
		}
	}
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

// message makes what is published of some events.
func (w *Writer) message(p part) *nats.Msg {
	h := nats.Header{}
	h.Set(store.HeaderFirst, strconv.FormatInt(p.first, 10))
	h.Set(store.HeaderLast, strconv.FormatInt(p.last, 10))
	return &nats.Msg{Subject: w.subject, Header: h, Data: p.events}
}

// Stream gives the writer for one of the program's outputs. Writing to it never fails.
func (w *Writer) Stream(s proto.Stream) *Output { return &Output{w: w, stream: s} }

// Output is an [io.Writer] of one of a program's outputs.
type Output struct {
	w      *Writer
	stream proto.Stream
}

// Write takes what the program wrote, and waits while too much of it is on its way.
func (o *Output) Write(p []byte) (int, error) {
	o.w.write(o.stream, p)
	return len(p), nil
}

func (w *Writer) write(s proto.Stream, p []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(p) > 0 {
		for w.waiting > maxPending && !w.closed {
			w.room.Wait()
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

// emitPiece tells a whole line, or as much of a long one as does not cut a character; the rest stays as the tail.
func (w *Writer) emitPiece(s proto.Stream, tail []byte, whole bool) {
	cut := len(tail)
	if !whole {
		cut = proto.CutUTF8(tail)
	}
	w.emit(s, tail[:cut])
	w.tails[s] = append(tail[:0], tail[cut:]...)
}

// emit adds an event to what is to be sent: to the last message, or to a new one where that would be too large.
func (w *Writer) emit(s proto.Stream, data []byte) {
	w.seq++
	w.outputs++
	n := len(w.pending)
	switch {
	case n == 0:
		w.pending = append(w.pending, part{first: w.seq})
	case len(w.pending[n-1].events)+len(data)+eventCost > maxMessage:
		// Much waits, so this one will be full as well. Growing to its size would take more than twice that.
		w.pending = append(w.pending, part{first: w.seq, events: make([]byte, 0, max(maxMessage, len(data)+eventCost))})
	}
	p := &w.pending[len(w.pending)-1]
	before := len(p.events)
	p.events = proto.AppendOutputEvent(p.events, s, data, w.seq)
	w.waiting += len(p.events) - before
	if before > 0 && len(p.events) > maxMessage { // it has become longer as JSON
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

// Close tells what was left of unfinished lines, waits until everything is stored, and returns the sequence number of the last
// event and whether readers will miss some.
func (w *Writer) Close() (last int64, truncated bool) {
	w.mu.Lock()
	for _, s := range []proto.Stream{proto.Stdout, proto.Stderr} {
		if tail := w.tails[s]; len(tail) > 0 {
			w.emit(s, tail)
			w.tails[s] = nil
		}
	}
	w.closed = true
	w.room.Broadcast()
	w.mu.Unlock()
	close(w.wake)
	<-w.done
	return w.seq, w.lost || w.outputs > proto.MaxEvents
}

// run sends what is pending until the writer is closed.
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

// send publishes what is pending, and reports whether there was anything.
func (w *Writer) send(ctx context.Context) bool {
	w.mu.Lock()
	parts := w.pending
	w.pending, w.waiting = nil, 0
	w.room.Broadcast()
	w.mu.Unlock()
	for _, p := range parts {
		if !w.publish(ctx, p) {
			w.drop()
			break
		}
	}
	return len(parts) > 0
}

// publish has a message stored. It reports whether the store answers.
func (w *Writer) publish(ctx context.Context, p part) bool {
	at, err := w.publishMsg(ctx, w.message(p))
	if err != nil {
		w.lose()
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

// store sends a message until it is stored, and gives its sequence number in the stream.
func (w *Writer) publishMsg(ctx context.Context, m *nats.Msg) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		elected := w.store.LeaderChanged(store.OutputLeader)
		ack, err := w.store.JS.PublishMsgAsync(m)
		if err == nil {
			select {
			case ok := <-ack.Ok():
				return ok.Sequence, nil
			case err = <-ack.Err():
			case <-elected:
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

// drop gives up all that waits: the store has not answered for too long.
func (w *Writer) drop() {
	w.mu.Lock()
	w.pending, w.waiting = nil, 0
	w.room.Broadcast()
	w.mu.Unlock()
}

func (w *Writer) lose() {
	w.mu.Lock()
	w.lost = true
	w.mu.Unlock()
}

// eviction gives what leaves of an ended execution what is promised, the last [proto.MaxEvents] output events. It holds nothing of
// the writer.
func (w *Writer) eviction() func(context.Context) {
	n, _ := w.excess(w.seq-proto.MaxEvents, w.kept)
	if n == 0 {
		return func(context.Context) {}
	}
	st, id, last := w.store, w.id, w.stored[n-1].stream
	return func(ctx context.Context) { _ = purge(ctx, st, id, last) } // what is left goes at the end of retention
}

// trim evicts from the stream what is beyond maxKept bytes, so that one execution's output cannot drive out another's.
func (w *Writer) trim(ctx context.Context) {
	n, kept := w.excess(0, maxKept)
	if n == 0 {
		return
	}
	w.lose() // maybe within the promised number
	if purge(ctx, w.store, w.id, w.stored[n-1].stream) != nil {
		return // tried again with the next message
	}
	w.stored, w.kept = append(w.stored[:0], w.stored[n:]...), kept
}

// excess counts the messages with events up to number oldest only, or beyond most bytes, and the bytes of the others. The last message is
// never one of them.
func (w *Writer) excess(oldest int64, most int) (n, kept int) {
	kept = w.kept
	for n < len(w.stored)-1 && (w.stored[n].last <= oldest || kept > most) {
		kept -= w.stored[n].size
		n++
	}
	return n, kept
}

// purge removes the messages of an execution, those of earlier attempts too, up to number last of the stream.
func purge(ctx context.Context, st *store.Store, id proto.TraceID, last uint64) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return st.Output.Purge(ctx, jetstream.WithPurgeSubject(store.OutputPattern(id)), jetstream.WithPurgeSequence(last+1))
}

// pause waits a moment before something is tried again. Its error is ctx's when that ends first.
func pause(ctx context.Context) error {
	wait := time.NewTimer(retryEvery)
	defer wait.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-wait.C:
		return nil
	}
}
