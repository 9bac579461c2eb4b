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
	"github.com/bullpen-run/bullpen/scheduler/stream"
)

const (
	maxLine    = 64 << 10  // a longer line is told in pieces
	maxMessage = 128 << 10 // encoded bytes at which a message is sent
	maxPending = 4 << 20   // encoded bytes waiting to be sent; a program that prints faster waits
	maxUnacked = 64        // messages on their way to the store
	// While small messages are on their way the next one fills: a line a message is slow, and keeps the store busy.
	smallMessage    = 16 << 10
	maxUnackedSmall = 2
	maxKept         = 32 << 20 // encoded bytes of an execution that are kept for reconnection
	// evictAfter is how long an ended execution keeps more than the promised number of events: a reader who is a little behind when
	// it ends shall still get all of them.
	evictAfter   = 30 * time.Second
	trimEvery    = 64 // messages between two trims
	drainTimeout = 10 * time.Second
)

// Writer publishes the events of one attempt: lines as the program writes them, many in one message when it writes fast. Its
// methods are safe for concurrent use. Events that the store does not take are lost, and the result says so.
type Writer struct {
	set     *stream.Set
	id      proto.TraceID
	subject string

	mu      sync.Mutex
	room    *sync.Cond // pending shrank
	pending []byte     // encoded events
	first   int64      // sequence number of the first of them
	seq     int64      // of the last event
	outputs int64
	tails   map[proto.Stream][]byte // a line that is not complete yet
	lost    bool
	closed  bool
	wake    chan struct{}
	done    chan struct{}

	sent []sentMessage // not evicted, oldest first; owned by run
	kept int
}

type sentMessage struct {
	stream uint64 // its sequence number in the stream, 0 until it is known
	last   int64
	size   int
	ack    jetstream.PubAckFuture
}

// NewWriter begins the events of an attempt, after baseSeq of earlier attempts. The first attempt begins with the status event.
func NewWriter(ctx context.Context, set *stream.Set, id proto.TraceID, attempt int, baseSeq int64) *Writer {
	w := &Writer{
		set: set, id: id, subject: stream.Out(id, attempt), seq: baseSeq, tails: map[proto.Stream][]byte{},
		wake: make(chan struct{}, 1), done: make(chan struct{}),
	}
	w.room = sync.NewCond(&w.mu)
	if baseSeq == 0 {
		w.seq, w.first = 1, 1
		w.pending = proto.AppendStatusEvent(nil, id)
		w.wake <- struct{}{}
	}
	go w.run(context.WithoutCancel(ctx)) // what was printed is kept, whatever ends the program
	return w
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
		for len(w.pending) > maxPending && !w.closed {
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

// emit adds an event to what is to be sent.
func (w *Writer) emit(s proto.Stream, data []byte) {
	w.seq++
	w.outputs++
	if len(w.pending) == 0 {
		w.first = w.seq
	}
	w.pending = proto.AppendOutputEvent(w.pending, s, data, w.seq)
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

// run sends what is pending until the writer is closed. While one message is on its way the next one fills.
func (w *Writer) run(ctx context.Context) {
	defer close(w.done)
	for range w.wake {
		for w.send(ctx) {
		}
	}
	for w.send(ctx) {
	}
	deadline := time.Now().Add(drainTimeout)
	for i := range w.sent {
		w.settle(&w.sent[i], time.Until(deadline))
	}
	if w.outputs > proto.MaxEvents {
		evict := w.eviction()
		time.AfterFunc(evictAfter, func() { evict(ctx) })
	}
}

// send publishes what is pending, and reports whether there was anything.
func (w *Writer) send(ctx context.Context) bool {
	w.mu.Lock()
	body, first := w.pending, w.first
	w.pending = nil
	w.room.Broadcast()
	w.mu.Unlock()
	for rest := body; len(rest) > 0; {
		part := rest[:cutLines(rest)]
		rest = rest[len(part):]
		last := first + int64(bytes.Count(part, []byte{'\n'})) - 1
		w.publish(ctx, part, first, last)
		first = last + 1
	}
	return len(body) > 0
}

func (w *Writer) publish(ctx context.Context, part []byte, first, last int64) {
	unacked := maxUnacked
	if len(part) < smallMessage {
		unacked = maxUnackedSmall
	}
	if n := len(w.sent); n >= unacked {
		w.settle(&w.sent[n-unacked], drainTimeout)
	}
	h := nats.Header{}
	h.Set(stream.HeaderFirst, strconv.FormatInt(first, 10))
	h.Set(stream.HeaderLast, strconv.FormatInt(last, 10))
	ack, err := w.set.JS.PublishMsgAsync(&nats.Msg{Subject: w.subject, Header: h, Data: part})
	if err != nil {
		w.lose()
		return
	}
	w.sent = append(w.sent, sentMessage{last: last, size: len(part), ack: ack})
	w.kept += len(part)
	if len(w.sent)%trimEvery == 0 {
		w.trim(ctx)
	}
}

// cutLines finds where a message of at most about maxMessage bytes ends; it holds at least one event.
func cutLines(body []byte) int {
	if len(body) <= maxMessage {
		return len(body)
	}
	if cut := bytes.LastIndexByte(body[:maxMessage], '\n'); cut >= 0 {
		return cut + 1
	}
	return bytes.IndexByte(body, '\n') + 1
}

// settle waits until a message is stored.
func (w *Writer) settle(m *sentMessage, within time.Duration) {
	if m.ack == nil {
		return
	}
	defer func() { m.ack = nil }() // it holds the message
	select {
	case ok := <-m.ack.Ok():
		m.stream = ok.Sequence
	case err := <-m.ack.Err():
		if err != nil {
			w.lose()
		}
	case <-time.After(max(within, 0)):
		w.lose()
	}
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
	set, subject, last := w.set, w.subject, w.sent[n-1].stream
	return func(ctx context.Context) { _ = purge(ctx, set, subject, last) } // what is left goes at the end of retention
}

// trim evicts from the stream what is beyond maxKept bytes, so that one execution's output cannot drive out another's.
func (w *Writer) trim(ctx context.Context) {
	n, kept := w.excess(0, maxKept)
	if n == 0 {
		return
	}
	w.lose() // maybe within the promised number
	if purge(ctx, w.set, w.subject, w.sent[n-1].stream) != nil {
		return // tried again with the next trim
	}
	w.sent, w.kept = append(w.sent[:0], w.sent[n:]...), kept
}

// excess counts the messages with events up to number oldest only, or beyond most bytes, and the bytes of the others. The last
// message is never one of them.
func (w *Writer) excess(oldest int64, most int) (n, kept int) {
	kept = w.kept
	for n < len(w.sent)-1 && (w.sent[n].last <= oldest || kept > most) {
		w.settle(&w.sent[n], drainTimeout)
		kept -= w.sent[n].size
		n++
	}
	for n > 0 && w.sent[n-1].stream == 0 { // one that was not stored
		n--
		kept += w.sent[n].size
	}
	return n, kept
}

// purge removes the messages of a subject up to number last of the stream.
func purge(ctx context.Context, set *stream.Set, subject string, last uint64) error {
	ctx, cancel := context.WithTimeout(ctx, drainTimeout)
	defer cancel()
	return set.Outs.Purge(ctx, jetstream.WithPurgeSubject(subject), jetstream.WithPurgeSequence(last+1))
}
