package store

import (
	"context"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
)

// LastEvent reads the number of the last event that attempts of an execution told, up to that attempt; 0 for none. What an earlier
// attempt published after a later one had begun does not count.
func (s *Store) LastEvent(ctx context.Context, id proto.TraceID, attempt int) (int64, error) {
	for ; attempt > 0; attempt-- {
		last, met, err := s.lastOf(ctx, OutputSubject(id, attempt))
		if err != nil {
			return 0, fmt.Errorf("read the last output of %s: %w", id, err)
		}
		if met {
			return last, nil
		}
	}
	return 0, nil
}

// lastOf reads the number of the last event on a subject, and whether there is any output.
func (s *Store) lastOf(ctx context.Context, subject string) (last int64, met bool, err error) {
	m, err := s.readLast(ctx, s.Output, subject)
	if IsNotFound(err) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	if last, err = lastIn(m); err == nil {
		return last, true, nil
	}
	// Something that is no output lies there: look at all of it.
	for from := uint64(1); ; from = m.Sequence + 1 {
		m, err = s.readAt(ctx, s.Output, from, jetstream.WithGetMsgSubject(subject))
		if IsNotFound(err) {
			return last, met, nil
		}
		if err != nil {
			return 0, false, err
		}
		if n, err := lastIn(m); err == nil {
			last, met = max(last, n), true
		}
	}
}

func lastIn(m *jetstream.RawStreamMsg) (int64, error) {
	n, err := strconv.ParseInt(m.Header.Get(HeaderLast), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("output message %d: %w", m.Sequence, err)
	}
	return n, nil
}
