package executions

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/bullpen-run/bullpen/proto"
)

// waitingReads is the number of records read concurrently for what they wait for.
const waitingReads = 8

// WaitingOf returns, for the queued ones of an organisation's executions, what workers lack to run
// them.
func (x *Runner) WaitingOf(
	ctx context.Context, org string, ids []proto.TraceID,
) (map[proto.TraceID]*proto.Missing, error) {
	missing := make([]*proto.Missing, len(ids))
	reads, ctx := errgroup.WithContext(ctx)
	reads.SetLimit(waitingReads)
	for i, id := range ids {
		reads.Go(func() error {
			record, err := x.Jobs.Lookup(ctx, org, id)
			switch {
			case errors.Is(err, proto.ErrNotFound): // not submitted yet
				return nil
			case err != nil:
				return fmt.Errorf("look up %s: %w", id, err)
			}
			missing[i] = x.waitingFor(record)
			return nil
		})
	}
	found := map[proto.TraceID]*proto.Missing{}
	err := reads.Wait()
	for i, id := range ids {
		if missing[i] != nil {
			found[id] = missing[i]
		}
	}
	return found, err
}

// waitingFor returns what workers lack to run a queued execution, nil if one can or it is not
// queued.
func (x *Runner) waitingFor(r *proto.Record) *proto.Missing {
	if r.Status != proto.StatusQueued || r.RunAt.After(time.Now()) {
		return nil
	}
	return x.Capabilities.Missing(&r.Meta)
}
