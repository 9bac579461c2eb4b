// Package audit keeps the audit log: an append-only stream of records, each with the hash of the
// one before. Any number of processes append. A write names the record that it follows, so that the
// chain never forks.
package audit

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// window is the number of records read together, readers the number of concurrent reads.
	window  = 64
	readers = 8
	// maxScan bounds the records that one page looks at.
	maxScan = 1024
)

// Log is the audit log.
type Log struct {
	Store *store.Store

	mu sync.Mutex // held during an append, so that a process does not compete with itself
}

// head is the last record, and the sequence number of its message. Neither sequence has gaps, but
// message numbers start over when a backup is restored.
type head struct {
	api.AuditRecord // with nothing but its sequence number if retention has removed it
	message         uint64
}

func (h *head) removed() bool { return h.Hash == "" }

// at returns the sequence number of the message with a record.
func (h *head) at(sequence int64) uint64 { return h.message - uint64(h.Sequence-sequence) }

// head returns the last record, nil for an empty log.
func (l *Log) head(ctx context.Context) (*head, error) {
	m, err := l.Store.Audit.Last(ctx, store.AuditSubject, store.FromLeader)
	if store.IsNotFound(err) {
		return l.removedHead(ctx)
	}
	if err != nil {
		return nil, err
	}
	h := &head{message: m.Seq}
	if err := json.Unmarshal(m.Data, &h.AuditRecord); err != nil {
		return nil, fmt.Errorf("decode the last audit record, message %d: %w", m.Seq, err)
	}
	return h, nil
}

// removedHead returns the last record of a log whose records have expired, nil if it never had any.
func (l *Log) removedHead(ctx context.Context) (*head, error) {
	info, err := l.Store.Audit.Info(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the state of the audit log: %w", err)
	}
	last := info.State.LastSeq
	if last == 0 {
		return nil, nil
	}
	return &head{api.AuditRecord{Sequence: int64(last)}, last}, nil
}

// Append stores a record at the end of the log, and returns it with its sequence number and hashes.
// If the error is ctx's, the record may be stored.
func (l *Log) Append(ctx context.Context, r api.AuditRecord) (api.AuditRecord, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		last, err := l.head(ctx)
		if err != nil {
			return r, fmt.Errorf("append to the audit log: %w", err)
		}
		var previous *api.AuditRecord
		var message, expect uint64
		if last != nil {
			previous, message = &last.AuditRecord, last.message
		}
		if last != nil && !last.removed() {
			expect = message
		}
		line, err := r.Seal(previous)
		if err != nil {
			return r, err
		}
		if len(line) > l.Store.MaxInline {
			return r, fmt.Errorf("append to the audit log: the record of %s has %d bytes, more than a message may have",
				r.Action, len(line))
		}
		_, err = l.Store.Audit.Write(ctx, store.AuditSubject, nats.Header{}, line, expect)
		if err == nil {
			return r, nil
		}
		if !store.IsConflict(err) || ctx.Err() != nil {
			return r, fmt.Errorf("append to the audit log: %w", err)
		}
		// The answer to the write may have been lost, and another process may have appended since.
		stored, err := l.read(ctx, message+1, message+1)
		if err != nil {
			return r, fmt.Errorf("append to the audit log: %w", err)
		}
		if len(stored) == 1 && stored[0].Hash == r.Hash {
			return r, nil
		}
	}
}

// Entry is a stored record and its line, without the line break.
type Entry struct {
	api.AuditRecord
	Line []byte
}

// read returns the records of a range of messages. Those that are gone are left out.
func (l *Log) read(ctx context.Context, first, last uint64) ([]Entry, error) {
	messages := make([]*store.Message, last-first+1)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(readers)
	for i := range messages {
		group.Go(func() (err error) {
			messages[i], err = l.Store.Audit.At(ctx, first+uint64(i))
			if store.IsNotFound(err) {
				return nil
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, fmt.Errorf("read the audit log: %w", err)
	}
	var entries []Entry
	for _, m := range messages {
		if m == nil {
			continue
		}
		e := Entry{Line: m.Data}
		if err := json.Unmarshal(m.Data, &e.AuditRecord); err != nil {
			return nil, fmt.Errorf("decode audit record, message %d: %w", m.Seq, err)
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// bounds returns the last record, nil if the log is empty, and the sequence number of the first
// record.
func (l *Log) bounds(ctx context.Context) (last *head, first int64, err error) {
	last, err = l.head(ctx)
	if err != nil || last == nil || last.removed() {
		return nil, 0, err
	}
	info, err := l.Store.Audit.Info(ctx)
	if err != nil {
		return nil, 0, fmt.Errorf("read the state of the audit log: %w", err)
	}
	return last, last.Sequence - int64(last.message-info.State.FirstSeq), nil
}

// List returns up to limit records that match a filter, newest first, with sequence numbers below
// before (0 for all). It looks at a bounded number of records. next is where the next page starts,
// 0 after the last one.
func (l *Log) List(
	ctx context.Context, f *api.AuditFilter, before int64, limit int,
) (page []api.AuditRecord, next int64, err error) {
	last, first, err := l.bounds(ctx)
	if err != nil || last == nil {
		return nil, 0, err
	}
	if before == 0 || before > last.Sequence {
		before = last.Sequence + 1
	}
	lowest := max(first, before-maxScan)
	for to := before - 1; to >= lowest; to -= window {
		entries, err := l.read(ctx, last.at(max(lowest, to-window+1)), last.at(to))
		if err != nil {
			return nil, 0, err
		}
		for i := len(entries) - 1; i >= 0; i-- {
			e := &entries[i].AuditRecord
			if !f.Matches(e) {
				continue
			}
			if page = append(page, *e); len(page) == limit {
				return page, more(e.Sequence, first), nil
			}
		}
	}
	return page, more(lowest, first), nil
}

// more returns sequence if there are records below it, otherwise 0.
func more(sequence, first int64) int64 {
	if sequence > first {
		return sequence
	}
	return 0
}

// Export calls each with the records after a sequence number and their lines, oldest first, up to
// the last record at the time of the call. It stops if each returns an error.
func (l *Log) Export(ctx context.Context, after int64, each func(r *api.AuditRecord, line []byte) error) error {
	last, first, err := l.bounds(ctx)
	if err != nil || last == nil {
		return err
	}
	for from := max(first, after+1); from <= last.Sequence; from += window {
		entries, err := l.read(ctx, last.at(from), last.at(min(last.Sequence, from+window-1)))
		if err != nil {
			return err
		}
		for i := range entries {
			if err := each(&entries[i].AuditRecord, entries[i].Line); err != nil {
				return err
			}
		}
	}
	return nil
}
