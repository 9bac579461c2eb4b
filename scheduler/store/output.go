package store

import (
	"context"
	"fmt"
	"strconv"

	"github.com/bullpen-run/bullpen/proto"
)

// Output is the stream of output events.
type Output struct{ Stream }

// LastEvent returns the number of the last output event of an execution, counting attempts up to
// the given one; 0 if there is none. Events that an earlier attempt published after a later one had
// begun do not count.
func (o Output) LastEvent(ctx context.Context, org string, id proto.TraceID, attempt int) (int64, error) {
	for ; attempt > 0; attempt-- {
		last := int64(-1)
		for _, subject := range []string{OutputSubject(org, id, attempt), ExcessSubject(org, id, attempt)} {
			n, found, err := o.lastEventOn(ctx, subject)
			if err != nil {
				return 0, fmt.Errorf("read the last output of %s: %w", id, err)
			}
			if found {
				last = max(last, n)
			}
		}
		if last >= 0 {
			return last, nil
		}
	}
	return 0, nil
}

func (o Output) lastEventOn(ctx context.Context, subject string) (last int64, found bool, err error) {
	m, err := o.Last(ctx, subject, WithoutBody)
	if IsNotFound(err) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	if last, err = lastEventIn(m); err == nil {
		return last, true, nil
	}
	// The last message is malformed: look at all of them.
	for from := uint64(1); ; from = m.Seq + 1 {
		m, err = o.Next(ctx, from, subject, WithoutBody)
		if IsNotFound(err) {
			return last, found, nil
		}
		if err != nil {
			return 0, false, err
		}
		if n, err := lastEventIn(m); err == nil {
			last, found = max(last, n), true
		}
	}
}

func lastEventIn(m *Message) (int64, error) {
	n, err := strconv.ParseInt(m.Header.Get(HeaderLast), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("output message %d: %w", m.Seq, err)
	}
	return n, nil
}
