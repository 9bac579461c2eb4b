package history

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// List returns the executions that match a filter, newest first. It waits up to freshTimeout for
// the index to catch up with the time of the call. A [*proto.HistoryError] means that the index
// cannot be used.
func (h *History) List(ctx context.Context, f *proto.HistoryFilter) (proto.HistoryPage, error) {
	h.init()
	behind, err := h.fresh(ctx)
	if _, broken := errors.AsType[*proto.HistoryError](err); broken {
		return proto.HistoryPage{}, err
	}
	page, errList := h.Index.List(ctx, f)
	if errList != nil {
		return proto.HistoryPage{}, errList
	}
	page.Complete, page.Behind = err == nil && behind == 0, behind
	return page, nil
}

// fresh waits for the index to catch up with the streams. It returns how many changes the index
// lags after freshTimeout, or an error if that is unknown.
func (h *History) fresh(ctx context.Context) (behind uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, freshTimeout)
	defer cancel()
	jobs, records, err := h.states(ctx)
	if err != nil {
		return 0, err
	}
	streams := identity(jobs, records)
	for {
		h.mu.Lock()
		failure, applied := h.failure, h.applied
		h.mu.Unlock()
		if _, broken := errors.AsType[*proto.HistoryError](failure); broken {
			return 0, failure
		}
		at, err := h.Index.Position(ctx)
		if err != nil {
			return behind, err
		}
		other := !strings.HasPrefix(at.Streams, streams)
		if other {
			behind = jobs.Last + records.Last
		} else if behind, err = h.missing(ctx, at, jobs, records); err != nil || behind == 0 {
			return behind, err
		}
		select { // to write what it has read
		case h.wake <- struct{}{}:
		default:
		}
		select {
		case <-ctx.Done():
			if other {
				return 0, &proto.HistoryError{
					Reason: "it is being built again", Err: fmt.Errorf("the index is of streams %q", at.Streams),
				}
			}
			return behind, nil
		case <-applied:
		case <-time.After(pollEvery): // another process may write it
		}
	}
}

// missing returns how many messages the index at a position lacks of the streams.
func (h *History) missing(
	ctx context.Context, at proto.HistoryPosition, jobs, records store.StreamState,
) (uint64, error) {
	j, err := h.after(ctx, h.Store.Jobs.Stream, store.AllJobs, at.Jobs, jobs.Last)
	if err != nil {
		return 0, err
	}
	r, err := h.after(ctx, h.Store.Records.Stream, store.AllRecords, at.Records, records.Last)
	return j + r, err
}

// after returns the number of messages of a stream from the first existing one after a sequence
// number to the last one. Messages are removed, so the last one may be gone.
func (h *History) after(ctx context.Context, st store.Stream, subject string, seq, last uint64) (uint64, error) {
	if seq >= last {
		return 0, nil
	}
	m, err := st.Next(ctx, seq+1, subject, store.WithoutBody)
	switch {
	case store.IsNotFound(err):
		return 0, nil
	case err != nil:
		return 0, err
	case m.Seq > last:
		return 0, nil
	default:
		return last - m.Seq + 1, nil
	}
}
