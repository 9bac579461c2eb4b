package queue

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/scheduler/stream"
)

// The dispatcher's seat is a key changed by compare-and-set. Its holder renews it, and answers pings under its own name, so that a
// successor need not wait out the term of one that is dead. Two that both believe they lead harm nothing: claims are decided by
// the executions' records, and submissions by the one that is sure of its seat.
const (
	seatKey      = "dispatcher"
	seatRenewed  = 2 * time.Second
	seatStale    = 6 * time.Second // without a renewal, by the observer's own clock
	seatGivenUp  = 5 * time.Second // without a confirmed renewal, the holder steps down
	standEvery   = 500 * time.Millisecond
	pingTimeout  = 300 * time.Millisecond
	seatDeadline = 2 * time.Second // for one renewal
)

// seat is the right to lead.
type seat struct {
	revision uint64
	ping     *nats.Subscription

	mu        sync.Mutex
	confirmed time.Time
}

// confirm takes in that the seat was ours at that time.
func (s *seat) confirm(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.confirmed = at
}

// sure reports whether the seat was confirmed so lately that it is not stale for anybody.
func (s *seat) sure() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.confirmed) < seatGivenUp
}

// stand waits for the seat to be free and takes it.
func (d *Dispatcher) stand(ctx context.Context) (*seat, error) {
	var seen uint64 // the revision last observed
	var since time.Time
	for {
		revision, free, err := d.look(ctx, &seen, &since)
		if err == nil && free {
			var s *seat
			if s, err = d.take(ctx, revision); err == nil {
				return s, nil
			}
		}
		if err != nil && !stream.Conflict(err) && ctx.Err() == nil {
			d.Log.Warn("the dispatcher cannot stand for its seat, will retry", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(standEvery):
		}
	}
}

// look reports whether the seat is free, and the revision to take it over from.
func (d *Dispatcher) look(ctx context.Context, seen *uint64, since *time.Time) (uint64, bool, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	entry, err := d.Set.Control.Get(ctx, seatKey)
	if stream.Missing(err) {
		return 0, true, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("read the dispatcher's seat: %w", err)
	}
	holder := string(entry.Value())
	if holder == "" || holder == d.Instance {
		return entry.Revision(), true, nil
	}
	if entry.Revision() != *seen {
		*seen, *since = entry.Revision(), time.Now()
	}
	if time.Since(*since) > seatStale {
		return entry.Revision(), true, nil
	}
	ask, stop := context.WithTimeout(ctx, pingTimeout)
	defer stop()
	_, err = d.Set.Conn.RequestWithContext(ask, stream.Ping(holder), nil)
	return entry.Revision(), errors.Is(err, nats.ErrNoResponders), nil
}

func (d *Dispatcher) take(ctx context.Context, revision uint64) (*seat, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	ping, err := d.Set.Conn.Subscribe(stream.Ping(d.Instance), func(m *nats.Msg) { _ = m.Respond(nil) })
	if err != nil {
		return nil, fmt.Errorf("take the dispatcher's seat: %w", err)
	}
	s := &seat{ping: ping, confirmed: time.Now()}
	if revision == 0 {
		s.revision, err = d.Set.Control.Create(ctx, seatKey, []byte(d.Instance))
	} else {
		s.revision, err = d.Set.Control.Update(ctx, seatKey, []byte(d.Instance), revision)
	}
	if err != nil {
		_ = ping.Unsubscribe()
		return nil, fmt.Errorf("take the dispatcher's seat: %w", err)
	}
	return s, nil
}

// hold renews the seat until term ends, and ends it when the seat is lost.
func (d *Dispatcher) hold(term context.Context, stepDown context.CancelCauseFunc, s *seat) {
	tick := time.NewTicker(seatRenewed)
	defer tick.Stop()
	for {
		select {
		case <-term.Done():
			return
		case <-tick.C:
		}
		sent := time.Now()
		ctx, cancel := context.WithTimeout(term, seatDeadline)
		revision, err := d.Set.Control.Update(ctx, seatKey, []byte(d.Instance), s.revision)
		cancel()
		switch {
		case err == nil:
			s.revision = revision
			s.confirm(sent)
		case stream.Conflict(err):
			stepDown(errors.New("another dispatcher has taken the seat"))
			return
		case !s.sure():
			stepDown(fmt.Errorf("the seat could not be renewed: %w", err))
			return
		}
	}
}

// resign leaves the seat to the next at once.
func (d *Dispatcher) resign(ctx context.Context, s *seat) {
	_ = s.ping.Unsubscribe()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), answerTimeout)
	defer cancel()
	// Whoever comes next would find out by itself; this only saves the time.
	_, _ = d.Set.Control.Update(ctx, seatKey, nil, s.revision)
}
