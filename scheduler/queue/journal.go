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

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// JournalFile stores a worker's assigned, unclaimed jobs. The next worker that opens the file
// counts them as lost, because the dispatcher may have died with the worker. Writes must survive
// the process, but need not be synced: a power failure loses no more than a count.
type JournalFile interface {
	io.ReaderAt
	io.WriterAt
}

const (
	entryBytes = 256 // of one entry: a line of JSON, padded with spaces on the left
	lossRetry  = time.Second
)

// journal is a file of entries of equal size. Removed entries are blank and are used again.
type journal struct {
	file JournalFile
	used map[int]bool
}

type journalEntry struct {
	Org     string        `json:"org"`
	Trace   proto.TraceID `json:"trace"`
	Attempt int           `json:"attempt"` // that was assigned
	Worker  string        `json:"worker"`
}

// append writes e and returns its index.
func (j *journal) append(e journalEntry) (int, error) {
	body, err := json.Marshal(e)
	if err != nil {
		return 0, err
	}
	if len(body) >= entryBytes {
		return 0, errors.New("the worker's name is too long")
	}
	i := 0
	for j.used[i] {
		i++
	}
	if err := j.write(i, body); err != nil {
		return 0, err
	}
	j.used[i] = true
	return i, nil
}

func (j *journal) remove(i int) error {
	delete(j.used, i)
	return j.write(i, nil)
}

func (j *journal) write(i int, body []byte) error {
	line := bytes.Repeat([]byte{' '}, entryBytes)
	line[entryBytes-1] = '\n'
	copy(line[entryBytes-1-len(body):], body)
	_, err := j.file.WriteAt(line, int64(i)*entryBytes)
	return err
}

// read returns entry i. It returns nil if the entry is blank or malformed, and io.EOF after the
// last.
func (j *journal) read(i int) (*journalEntry, error) {
	line := make([]byte, entryBytes)
	if _, err := j.file.ReadAt(line, int64(i)*entryBytes); err != nil {
		return nil, err
	}
	var e journalEntry
	if json.Unmarshal(line, &e) == nil {
		if _, err := proto.ParseTraceID(string(e.Trace)); err == nil {
			return &e, nil
		}
	}
	return nil, nil
}

// journalAssigned records that l was assigned. s.mu is held.
func (s *Slots) journalAssigned(l *Lease) {
	if s.Journal == nil {
		return
	}
	i, err := s.journal.append(journalEntry{l.org, l.id, l.attempt, s.Worker})
	if err != nil {
		s.Log.Warn("journal assignment failed", "trace_id", l.id, "error", err)
		return
	}
	l.journaled, l.entry = true, i
}

// journalDone removes the entry of l. s.mu is held.
func (s *Slots) journalDone(l *Lease) {
	if l == nil || !l.journaled {
		return
	}
	l.journaled = false
	if err := s.journal.remove(l.entry); err != nil {
		s.Log.Warn("remove journal entry failed", "trace_id", l.id, "error", err)
	}
}

// recoverJournal counts the losses of the jobs that the previous worker left in the journal. It is
// best effort: it skips whatever it cannot read or write.
func (s *Slots) recoverJournal(ctx context.Context) {
	if s.Journal == nil {
		return
	}
	for i := 0; ; i++ {
		e, err := s.journal.read(i)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			s.Log.Warn("read journal failed", "error", err)
			return
		}
		if e == nil {
			continue
		}
		s.Log.Warn("previous worker was lost with an assigned job", "trace_id", e.Trace, "worker", e.Worker)
		if s.writeLoss(ctx, e) != nil {
			return // the next worker counts it
		}
		if err := s.journal.remove(i); err != nil {
			s.Log.Warn("remove journal entry failed", "trace_id", e.Trace, "error", err)
		}
	}
}

// writeLoss counts the loss of a journaled job if it is not counted yet. It retries until ctx is
// done.
func (s *Slots) writeLoss(ctx context.Context, e *journalEntry) error {
	policy := store.Retry{Pause: lossRetry, Transient: store.AnyError, OnRetry: func(err error, _ time.Duration) {
		s.Log.Warn("count loss failed, will retry", "trace_id", e.Trace, "error", err)
	}}
	return policy.Do(ctx, func(ctx context.Context) error {
		// The revision is not compared: the dispatcher may not have known of an earlier loss.
		rec, _, err := (&Queue{Store: s.Store, Ended: s.Ended}).countLoss(ctx, e.Org, e.Trace, e.Worker,
			func(rec *proto.Record, _ uint64) bool {
				return rec.Attempt == e.Attempt-1 && !slices.Contains(rec.Lost, e.Worker)
			})
		switch {
		case errors.Is(err, proto.ErrNotFound): // never stored, or ended long ago
			return nil
		case err == nil && rec == nil:
			return fmt.Errorf("count the loss of %s: %w", e.Trace, proto.ErrConflict)
		default:
			return err
		}
	})
}
