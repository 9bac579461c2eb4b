package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// liveSaves saves the home of a running live sandbox, one save at a time.
type liveSaves struct {
	*attempt
	c    *claim
	b    *sandbox
	turn chan struct{} // holds an element during a save, and for good after stop
}

// saveLive lets gateways save the home of the job's live sandbox until stop is called. If a save is still
// running a while after stop, that sets b.saving.
func (a *attempt) saveLive(c *claim, b *sandbox) (stop func()) {
	s := &liveSaves{a, c, b, make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(c.running)
	a.live.OnSave(func(request context.Context) proto.SandboxSave {
		request, abort := context.WithCancelCause(request)
		defer abort(nil)
		defer context.AfterFunc(ctx, func() { abort(context.Cause(ctx)) })()
		return s.save(request)
	})
	return func() {
		a.live.OnSave(nil)
		cancel()
		s.stop()
	}
}

// stopping is why a home is not saved if the sandbox stops meanwhile, or the client is gone.
const stopping = "the sandbox is stopping"

// save saves the home.
func (s *liveSaves) save(ctx context.Context) proto.SandboxSave {
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return proto.SandboxSave{Refused: stopping}
	}
	began := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, s.SaveTimeout, errSaveTimeout)
	defer cancel()
	var frozen time.Duration
	freeze := func(ctx context.Context, read func(ctx context.Context) error) error {
		began := time.Now()
		defer func() { frozen = time.Since(began) }()
		return s.b.jail.WhileFrozen(ctx, proto.MaxSandboxFreeze, read)
	}
	version, err := s.b.home.SaveLive(ctx, freeze, s.lease.Commit)
	if ctx.Err() != nil && !errors.Is(context.Cause(ctx), errSaveTimeout) {
		return proto.SandboxSave{Refused: stopping}
	}
	if err != nil {
		failed := &saveError{"", s.SaveTimeout, errors.Join(err, context.Cause(ctx))}
		failed.log(ctx, s.attempt)
		return proto.SandboxSave{Refused: fmt.Sprint(failed.why())}
	}
	s.log.DebugContext(ctx, "running sandbox saved", "version", version, "save_ms", millis(time.Since(began)),
		"frozen_ms", millis(frozen))
	return proto.SandboxSave{Version: version}
}

// stop waits until no save is running. No other begins then.
func (s *liveSaves) stop() {
	grace := time.NewTimer(saveGrace)
	defer grace.Stop()
	select {
	case s.turn <- struct{}{}:
		return
	case <-grace.C:
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.turn <- struct{}{}
	}()
	s.b.saving = ended
}
