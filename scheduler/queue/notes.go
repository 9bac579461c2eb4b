package queue

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/proto"
)

// Notes is a file in which a worker notes the jobs that it has and has not claimed, so that the next one that opens the file knows what it
// died with. The dispatcher may have died with it, and known of no loss then. What is written must outlive the process; a machine that loses
// power loses no more than a count.
type Notes interface {
	io.ReaderAt
	io.WriterAt
}

const (
	noteBytes = 256 // of one note: a line of JSON, and spaces before it
	noteRetry = time.Second
)

// noted is a job that a worker has and has not claimed.
type noted struct {
	Trace   proto.TraceID `json:"trace"`
	Attempt int           `json:"attempt"` // that it was to start
	Worker  string        `json:"worker"`
}

// note notes that l was taken. s.mu is held.
func (s *Slots) note(l *Lease) {
	if s.Notes == nil {
		return
	}
	for s.places[l.place] {
		l.place++
	}
	body, err := json.Marshal(noted{l.id, l.attempt, s.Worker})
	if err == nil && len(body) >= noteBytes {
		err = errors.New("the worker's name is too long")
	}
	if err == nil {
		err = s.putNote(l.place, body)
	}
	if err != nil {
		s.Log.Warn("an assigned job could not be noted", "trace_id", l.id, "error", err)
		return
	}
	s.places[l.place], l.noted = true, true
}

// strike removes the note of l, which was claimed or given up. s.mu is held.
func (s *Slots) strike(l *Lease) {
	if l == nil || !l.noted {
		return
	}
	l.noted = false
	delete(s.places, l.place)
	if err := s.putNote(l.place, nil); err != nil {
		s.Log.Warn("the note of a job could not be removed", "trace_id", l.id, "error", err)
	}
}

// claimed takes in that the record tells of l now.
func (s *Slots) claimed(l *Lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.strike(l)
}

func (s *Slots) putNote(place int, body []byte) error {
	line := bytes.Repeat([]byte{' '}, noteBytes)
	line[noteBytes-1] = '\n'
	copy(line[noteBytes-1-len(body):], body)
	_, err := s.Notes.WriteAt(line, int64(place)*noteBytes)
	return err
}

// recall counts the losses of the jobs that the worker before this one noted. What cannot be read or written it leaves: the file is that worker's
// word, and not needed to go on.
func (s *Slots) recall(ctx context.Context) {
	if s.Notes == nil {
		return
	}
	for place := 0; ; place++ {
		line := make([]byte, noteBytes)
		if _, err := s.Notes.ReadAt(line, int64(place)*noteBytes); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			s.Log.Warn("the notes of the worker before this one could not be read", "error", err)
			return
		}
		var n noted
		if json.Unmarshal(line, &n) != nil {
			continue // there is none
		}
		if _, err := proto.ParseTraceID(string(n.Trace)); err != nil {
			continue
		}
		s.Log.Warn("the worker before this one was lost with a job that it had not claimed", "trace_id", n.Trace, "worker", n.Worker)
		if s.own(ctx, &n) != nil {
			return // the next worker does it
		}
		if err := s.putNote(place, nil); err != nil {
			s.Log.Warn("the note of a job could not be removed", "trace_id", n.Trace, "error", err)
		}
	}
}

// own writes the loss that a note tells of into the record, unless that was done. It tries until ctx ends.
func (s *Slots) own(ctx context.Context, n *noted) error {
	return backoff.RetryNotify(func() error {
		// The dispatcher that assigned the job may not have known of the loss before, so it is not said at which revision it did.
		rec, _, err := (&Queue{Store: s.Store}).countLoss(ctx, n.Trace, n.Worker, func(rec *proto.Record, _ uint64) bool {
			return rec.Attempt == n.Attempt-1 && !slices.Contains(rec.Lost, n.Worker)
		})
		switch {
		case errors.Is(err, proto.ErrNotFound): // its job was never stored, or has long ended
			return nil
		case err == nil && rec == nil:
			return fmt.Errorf("count the loss of %s: %w", n.Trace, proto.ErrConflict)
		default:
			return err
		}
	}, backoff.WithContext(backoff.NewConstantBackOff(noteRetry), ctx), func(err error, _ time.Duration) {
		s.Log.Warn("the loss of a job could not be written, will retry", "trace_id", n.Trace, "error", err)
	})
}
