package nsjail

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
)

// WhileFrozen calls f while no process runs; see jail.Jail.
func (s *sandbox) WhileFrozen(ctx context.Context, limit time.Duration, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	end := time.Now().Add(limit)
	s.mu.Lock()
	if s.killed {
		s.mu.Unlock()
		return fmt.Errorf("%w: the jail is dead", jail.ErrNotFrozen)
	}
	s.thaw = func() { cancel(errDying) }
	s.mu.Unlock()
	freezing, stop := context.WithDeadlineCause(ctx, end, errStillRunning)
	err := s.group.Freeze(freezing)
	stop()
	if err != nil {
		return errors.Join(jail.ErrNotFrozen, err, s.group.Thaw())
	}
	clock := time.AfterFunc(time.Until(end), func() { cancel(jail.ErrFrozenTooLong) })
	defer clock.Stop()
	// Not after f, which may wait for a disk that does not answer.
	thawed := make(chan error, 1)
	context.AfterFunc(ctx, func() { thawed <- s.group.Thaw() })
	err = f(ctx)
	if cause := context.Cause(ctx); cause != nil {
		err = errors.Join(jail.ErrNotFrozen, cause, err)
	}
	cancel(nil)
	return errors.Join(err, <-thawed)
}

var (
	errDying        = errors.New("the jail was killed")
	errStillRunning = errors.New("some did not stop in time")
)
