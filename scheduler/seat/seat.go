// Package seat elects one leader among the processes that could do the same work. A seat is a key changed by compare-and-set. Its
// holder renews it, and answers pings under its own name, so that a successor need not wait out the term of one that is dead. Two may
// both believe that they lead for a moment: what they write must be decided by compare-and-set as well.
package seat

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/scheduler/stream"
)

const (
	renewed      = time.Second
	stale        = 4 * time.Second // without a renewal, by the observer's own clock: one that hangs is replaced within 5 s
	givenUp      = 3 * time.Second // without a confirmed renewal, the holder steps down
	standEvery   = 500 * time.Millisecond
	pingTimeout  = 300 * time.Millisecond
	renewTimeout = time.Second
	// answerTimeout bounds requests that can be sent again. One that was on its way to a server that was just started again gets
	// no answer at all.
	answerTimeout = time.Second
	restPause     = 200 * time.Millisecond // between two terms: a store that fails at once is not asked again at once
)

// Seat is a place that one process has at a time.
type Seat struct {
	Set      *stream.Set
	Name     string // of the seat, such as "dispatcher": part of a subject
	Instance string // unique to this process
	// Stays has the holder lead on when it cannot renew the seat, until another one has taken it. It asks [Term.Sure] before it does what two
	// must not do at once. A seat that no one can take, since its stream has no leader for a moment, need not be left and taken again then.
	Stays bool
	Log   *slog.Logger
}

// Term is one time of holding a seat.
type Term struct {
	revision uint64
	ping     *nats.Subscription

	mu        sync.Mutex
	confirmed time.Time
}

// confirm takes in that the seat was ours at that time.
func (t *Term) confirm(at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.confirmed = at
}

// Sure reports whether the seat was confirmed so lately that it is not stale for anybody.
func (t *Term) Sure() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return time.Since(t.confirmed) < givenUp
}

// Run stands for the seat and calls lead whenever it has it, with a context that ends when the seat is lost. It returns when ctx ends
// and lead has returned.
func (s *Seat) Run(ctx context.Context, lead func(ctx context.Context, t *Term) error) {
	for ctx.Err() == nil {
		t, err := s.stand(ctx)
		if err != nil {
			continue // ctx ended, or JetStream is away: stand again
		}
		term, stepDown := context.WithCancelCause(ctx)
		left := make(chan struct{})
		go func() { defer close(left); s.hold(term, stepDown, t) }()
		if err := lead(term, t); err != nil && ctx.Err() == nil {
			s.Log.Warn("the "+s.Name+" starts over", "cause", err)
		}
		stepDown(nil)
		<-left
		s.resign(ctx, t)
		select {
		case <-ctx.Done():
		case <-time.After(restPause):
		}
	}
}

// stand waits for the seat to be free and takes it.
func (s *Seat) stand(ctx context.Context) (*Term, error) {
	var seen uint64 // the revision last observed
	var since time.Time
	for {
		elected := s.Set.News(stream.OfControl)
		revision, free, err := s.look(ctx, &seen, &since)
		if err == nil && free {
			var t *Term
			if t, err = s.take(ctx, revision); err == nil {
				return t, nil
			}
		}
		if err != nil && !stream.Conflict(err) && ctx.Err() == nil {
			s.Log.Warn("the "+s.Name+" cannot stand for its seat, will retry", "error", err)
		}
		pause := standEvery
		if left := stale - time.Since(since); left > 0 {
			pause = min(pause, left)
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(pause):
		case <-elected:
		}
	}
}

// look reports whether the seat is free, and the revision to take it over from.
func (s *Seat) look(ctx context.Context, seen *uint64, since *time.Time) (uint64, bool, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	entry, err := s.Set.Control.Get(ctx, s.Name)
	if stream.Missing(err) {
		return 0, true, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("read the seat of the %s: %w", s.Name, err)
	}
	holder := string(entry.Value())
	if holder == "" || holder == s.Instance {
		return entry.Revision(), true, nil
	}
	if entry.Revision() != *seen {
		*seen, *since = entry.Revision(), time.Now()
	}
	if time.Since(*since) > stale {
		return entry.Revision(), true, nil
	}
	ask, stop := context.WithTimeout(ctx, pingTimeout)
	defer stop()
	_, err = s.Set.Conn.RequestWithContext(ask, stream.Ping(s.Name, holder), nil)
	return entry.Revision(), errors.Is(err, nats.ErrNoResponders), nil
}

func (s *Seat) take(ctx context.Context, revision uint64) (*Term, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	ping, err := s.Set.Conn.Subscribe(stream.Ping(s.Name, s.Instance), func(m *nats.Msg) { _ = m.Respond(nil) })
	if err != nil {
		return nil, fmt.Errorf("take the seat of the %s: %w", s.Name, err)
	}
	t := &Term{ping: ping, confirmed: time.Now()}
	if revision == 0 {
		t.revision, err = s.Set.Control.Create(ctx, s.Name, []byte(s.Instance))
	} else {
		t.revision, err = s.Set.Control.Update(ctx, s.Name, []byte(s.Instance), revision)
	}
	if err != nil {
		_ = ping.Unsubscribe()
		return nil, fmt.Errorf("take the seat of the %s: %w", s.Name, err)
	}
	return t, nil
}

// hold renews the seat until term ends, and ends it when the seat is lost.
func (s *Seat) hold(term context.Context, stepDown context.CancelCauseFunc, t *Term) {
	tick := time.NewTicker(renewed)
	defer tick.Stop()
	var elected <-chan struct{} // since a renewal that was not answered
	for {
		select {
		case <-term.Done():
			return
		case <-tick.C:
		case <-elected:
		}
		elected = s.Set.News(stream.OfControl)
		err := s.renew(term, t)
		switch {
		case err == nil:
			elected = nil
		case stream.Conflict(err):
			stepDown(errors.New("another instance has taken the seat"))
			return
		case !s.Stays && !t.Sure():
			stepDown(fmt.Errorf("the seat could not be renewed: %w", err))
			return
		}
	}
}

// renew writes the seat anew. It may have done so before, without having been answered.
func (s *Seat) renew(term context.Context, t *Term) error {
	ctx, cancel := s.Set.Try(term, stream.OfControl, renewTimeout)
	defer cancel()
	for {
		sent := time.Now()
		revision, err := s.Set.Control.Update(ctx, s.Name, []byte(s.Instance), t.revision)
		if stream.Conflict(err) {
			entry, read := s.Set.Control.Get(ctx, s.Name)
			switch {
			case read != nil && !stream.Missing(read):
				return read
			case read == nil && string(entry.Value()) == s.Instance && entry.Revision() != t.revision:
				t.revision = entry.Revision()
				continue
			}
		}
		if err != nil {
			return err
		}
		t.revision = revision
		t.confirm(sent)
		return nil
	}
}

// resign leaves the seat to the next at once.
func (s *Seat) resign(ctx context.Context, t *Term) {
	_ = t.ping.Unsubscribe()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTimeout)
	defer cancel()
	// Whoever comes next would find out by itself; this only saves the time.
	_, _ = s.Set.Control.Update(ctx, s.Name, nil, t.revision)
}
