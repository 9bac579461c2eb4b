package executions

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// leaveGrace is how long a stream continues without an event after Leave.
const leaveGrace = time.Second

// flusher is an answer that is sent piece by piece.
type flusher interface {
	io.Writer
	FlushError() error
}

// follower writes the events of one execution to one client.
type follower struct {
	core *web.Core
	w    flusher
	tail web.Tail
	sse  bool
	last int64  // sequence number of the last event the client has
	head []byte // reused
	// check, if not nil, returns an error when the caller may no longer follow the execution.
	check   func() error
	checked time.Time // when check was called last
}

func newFollower(
	core *web.Core, w http.ResponseWriter, r *web.Info, tail web.Tail, sse bool, last int64,
) *follower {
	mediaType := web.TypeNDJSON
	if sse {
		mediaType = web.TypeSSE
	}
	web.StreamHeader(w.Header(), mediaType)
	return &follower{core: core, w: r.Rec, tail: tail, sse: sse, last: last}
}

// copy writes events as they come until the last one. It returns [web.ErrDraining] after Leave when there
// are no more events.
func (f *follower) copy(ctx context.Context) error {
	f.checked = time.Now()
	for {
		if f.check != nil && time.Since(f.checked) >= web.Keepalive {
			if err := f.check(); err != nil {
				return fmt.Errorf("stream events: %w", err)
			}
			f.checked = time.Now()
		}
		left := f.core.HasLeft()
		batch, err := f.next(ctx, left)
		switch {
		case err == nil:
			err = f.write(batch)
			f.last = batch.Last
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, web.ErrDeadline) && left:
			err = web.ErrDraining
		case errors.Is(err, web.ErrDeadline) && f.core.HasLeft():
			continue // send the present events
		case errors.Is(err, web.ErrDeadline):
			err = f.write(proto.Events{First: f.last, Last: f.last, Lines: proto.AppendKeepaliveEvent(nil, f.last)})
		}
		if err != nil {
			return fmt.Errorf("stream events: %w", err)
		}
	}
}

// write sends a batch at once.
func (f *follower) write(batch proto.Events) error {
	if batch.Result == nil && !f.sse {
		if _, err := f.w.Write(batch.Lines); err != nil {
			return err
		}
		return f.w.FlushError()
	}
	// Lines are short and many; longer ones bypass the buffer. A slow stream needs only a small
	// one.
	size := 32 << 10
	if batch.Result == nil {
		size = min(size, 2*len(batch.Lines))
	}
	out := bufio.NewWriterSize(f.w, size)
	if err := f.writeLines(out, batch); err != nil {
		return err
	}
	if err := f.writeResult(out, batch); err != nil {
		return err
	}
	if err := out.Flush(); err != nil {
		return err
	}
	return f.w.FlushError()
}

func (f *follower) writeLines(out io.Writer, batch proto.Events) error {
	if !f.sse {
		_, err := out.Write(batch.Lines)
		return err
	}
	seq := batch.First
	for line := range bytes.Lines(batch.Lines) {
		for _, part := range [][]byte{f.field(seq), line, {'\n'}} {
			if _, err := out.Write(part); err != nil {
				return err
			}
		}
		seq++
	}
	return nil
}

// writeResult writes the batch's result event, if any, without encoding it in memory.
func (f *follower) writeResult(out io.Writer, batch proto.Events) error {
	if batch.Result == nil {
		return nil
	}
	if !f.sse {
		return proto.WriteResultEvent(out, batch.Result)
	}
	if _, err := out.Write(f.field(batch.Last)); err != nil {
		return err
	}
	if err := proto.WriteResultEvent(out, batch.Result); err != nil {
		return err
	}
	_, err := out.Write([]byte{'\n'})
	return err
}

// field returns the text before an event of server-sent events. It is valid until the next call.
func (f *follower) field(seq int64) []byte {
	f.head = append(f.head[:0], "id: "...)
	f.head = strconv.AppendInt(f.head, seq, 10)
	f.head = append(f.head, "\ndata: "...)
	return f.head
}

// next reads the next events. It returns [web.ErrDeadline] when a keepalive is due, and at Leave.
// left reports that Leave was already called.
func (f *follower) next(ctx context.Context, left bool) (proto.Events, error) {
	if !left {
		return nextUntil(ctx, f.core, f.tail, time.Now().Add(web.Keepalive))
	}
	limited, cancel := context.WithTimeout(ctx, leaveGrace)
	defer cancel()
	return nextWithin(ctx, limited, f.tail)
}

// nextUntil reads the next events. It returns [web.ErrDeadline] at the deadline, and at Leave; the tail
// can still be read then.
func nextUntil(ctx context.Context, core *web.Core, tail web.Tail, deadline time.Time) (proto.Events, error) {
	limited, cancel := core.Until(ctx, deadline)
	defer cancel()
	return nextWithin(ctx, limited, tail)
}

// nextWithin reads the next events. limited is ctx with a deadline.
func nextWithin(ctx, limited context.Context, tail web.Tail) (proto.Events, error) {
	batch, err := tail.Next(limited)
	switch {
	case err == nil || errors.Is(err, io.EOF):
		return batch, err
	case ctx.Err() != nil:
		return batch, ctx.Err()
	case limited.Err() != nil:
		return batch, web.ErrDeadline
	default:
		return batch, err
	}
}

// stream streams the events of an accepted execution. The answer begins when the execution starts;
// until then, stream can still return an error for the client.
func (x *Run) stream(ctx context.Context, w http.ResponseWriter, sse bool) error {
	return waitError(x.ID, x.follow(ctx, func(first proto.Events, tail web.Tail) error {
		f := newFollower(x.Core, w, x.request, tail, sse, 0)
		if err := f.write(first); err != nil {
			return fmt.Errorf("stream events: %w", err)
		}
		f.last = first.Last
		return f.copy(ctx)
	}))
}

// follow calls f with the first events of an execution and the tail that reads the others.
func (x *Run) follow(ctx context.Context, f func(first proto.Events, tail web.Tail) error) error {
	limited, cancel := context.WithDeadline(ctx, x.deadline)
	defer cancel()
	tail, err := x.Events.Follow(limited, x.request.Key.Org, x.ID, 0)
	switch {
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		return web.ErrDeadline
	case err != nil:
		return errors.Join(fmt.Errorf("follow %s: %w", x.ID, err), x.clientGone(ctx))
	}
	defer tail.Close()
	first, err := x.awaitStart(ctx, tail)
	if err != nil {
		return err
	}
	return f(first, tail)
}

// awaitStart waits for the first events of an execution.
func (x *Run) awaitStart(ctx context.Context, tail web.Tail) (proto.Events, error) {
	deadline := x.deadline
	if x.submission != nil {
		deadline = x.queueDeadline
	}
	first, err := nextUntil(ctx, x.Core, tail, deadline)
	if err != nil && ctx.Err() != nil {
		return first, x.clientGone(ctx)
	}
	if errors.Is(err, web.ErrDeadline) && x.submission != nil {
		record, withdrawErr := x.Submissions.Withdraw(ctx, x.submission, x.withdrawReason())
		switch {
		case withdrawErr != nil: // it may still start
			x.Log.WarnContext(ctx, "withdraw failed", "trace_id", x.ID, "error", withdrawErr)
		case record.ExpiredInQueue():
			return first, x.noWorkerFree(ctx)
		}
		first, err = nextUntil(ctx, x.Core, tail, x.deadline)
	}
	switch {
	case errors.Is(err, web.ErrDeadline) || (err != nil && ctx.Err() != nil):
		return first, err
	case err != nil:
		return first, fmt.Errorf("first events of %s: %w", x.ID, err)
	case bytes.HasPrefix(first.Lines, []byte(`{"type":"status"`)):
		return first, nil
	}
	// It ended before it started.
	limited, cancel := context.WithDeadline(ctx, x.deadline)
	defer cancel()
	record, err := x.Jobs.Summary(limited, x.request.Key.Org, x.ID)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return first, web.ErrDeadline
	}
	if err != nil {
		return first, fmt.Errorf("look up %s: %w", x.ID, err)
	}
	if record.ExpiredInQueue() {
		return first, x.expiredInQueue(ctx)
	}
	return first, nil
}
