package sessions

import (
	"context"
	"fmt"
	"slices"

	"github.com/bullpen-run/bullpen/proto"
)

// Reader reads the entries of a session's log. It is not safe for concurrent use.
type Reader struct {
	logs     Logs
	org, id  string // id of the log
	session  string
	after    uint64
	offset   int64
	follower Follower // nil until it is needed
}

// Read returns a reader of the events with sequence numbers greater than offset. The caller must
// close it. The error is an [*Error] if there is no such session.
func (s *Service) Read(ctx context.Context, org, id string, offset int64) (*Reader, error) {
	l, err := s.open(ctx, org, id)
	if err != nil {
		return nil, err
	}
	r := &Reader{logs: s.Logs, org: org, id: l.session.LogID(), session: id, offset: offset}
	r.after, err = l.seek(ctx, offset)
	return r, publicError(err, id)
}

// ReadTurn returns a reader of the entries after a sent message. The caller must close it.
func (s *Service) ReadTurn(org, id string, sent *Sent) *Reader {
	return &Reader{logs: s.Logs, org: org, id: proto.AgentSessionKey(id), session: id, after: sent.After}
}

// seek returns a number after which the entries with events after offset begin.
func (l *log) seek(ctx context.Context, offset int64) (uint64, error) {
	if offset <= 0 {
		return 0, nil
	}
	if offset >= l.state.Sequence {
		return l.at, nil
	}
	return Seek(ctx, l.logs, l.session.Org, l.session.LogID(), l.at, func(message []byte) (bool, error) {
		e, err := decodeEntry(message)
		return err == nil && e.State.Sequence > offset, err
	})
}

// Seek finds the first message of a log for which reached returns true, and returns a number after
// which that is the next message. reached returns true for message number last, and for all messages
// after the first. Seek returns [proto.ErrNotFound] if the log is removed in between.
func Seek(
	ctx context.Context, logs Logs, org, id string, last uint64, reached func(message []byte) (bool, error),
) (uint64, error) {
	low, high := uint64(0), last-1
	for low < high {
		middle := low + (high-low)/2
		message, _, err := logs.Next(ctx, org, id, middle)
		if err == nil && message == nil {
			err = fmt.Errorf("log %s: %w", id, proto.ErrNotFound)
		}
		if err != nil {
			return 0, err
		}
		found, err := reached(message)
		switch {
		case err != nil:
			return 0, err
		case found:
			high = middle
		default:
			low = middle + 1
		}
	}
	return low, nil
}

// Next returns the next entry, without the events up to the offset. At the end of the log it
// returns nil, or blocks until there is another entry if wait is set. The error is an [*Error] if
// the session was removed.
func (r *Reader) Next(ctx context.Context, wait bool) (*Entry, error) {
	message, at, err := r.next(ctx, wait)
	if err != nil || message == nil {
		return nil, publicError(err, r.session)
	}
	e, err := decodeEntry(message)
	if err != nil {
		return nil, fmt.Errorf("read session %s: %w", r.session, err)
	}
	r.after = at
	e.Events = slices.DeleteFunc(e.Events, func(e Event) bool { return e.Sequence <= r.offset })
	return e, nil
}

// After returns the number of the last entry that Next has returned.
func (r *Reader) After() uint64 { return r.after }

func (r *Reader) next(ctx context.Context, wait bool) (message []byte, at uint64, err error) {
	if !wait {
		return r.logs.Next(ctx, r.org, r.id, r.after)
	}
	if r.follower == nil {
		if r.follower, err = r.logs.Follow(r.org, r.id); err != nil {
			return nil, 0, err
		}
	}
	return r.follower.Next(ctx, r.after)
}

// Close releases the reader.
func (r *Reader) Close() {
	if r.follower != nil {
		r.follower.Close()
	}
}
