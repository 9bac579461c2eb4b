// Package leader elects one leader among the processes that can do the same work.
//
// The leader's instance name is stored under a key that is changed by compare-and-set. The leader
// renews the key and answers pings, so that a successor need not wait until the term of a dead
// leader has expired. Two processes may both believe for a moment that they lead. What a leader
// writes must therefore be decided by compare-and-set as well.
package leader

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	renewEvery = time.Second
	// without a renewal, by the observer's clock: a leader that hangs is replaced within 5 s
	expireAfter   = 4 * time.Second
	stepDownAfter = 3 * time.Second // without a confirmed renewal, by the leader's clock
	campaignEvery = 500 * time.Millisecond
	pingTimeout   = 300 * time.Millisecond
	renewTimeout  = time.Second
	// requestTimeout bounds requests that may be repeated. A request to a server that restarts gets
	// no answer at all.
	requestTimeout = time.Second
	termPause      = 200 * time.Millisecond // between two terms, to avoid flooding a failing store
)

// Elector campaigns for the leadership of one kind of work.
type Elector struct {
	Store    *store.Store
	Name     string // of the work, such as "dispatcher": part of a subject
	Instance string // unique to this process
	// LeadInDoubt keeps a term going while the key cannot be renewed, until another process has
	// taken the leadership. The leader must then check [Term.StillLeader] before work that two
	// leaders must not do at once. It avoids a new term when the key's stream has no leader for a
	// moment, since no other process can be elected meanwhile.
	LeadInDoubt bool
	Log         *slog.Logger
}

// Term is one period of leadership.
type Term struct {
	revision uint64
	ping     *nats.Subscription

	mu        sync.Mutex
	confirmed time.Time // when the last successful renewal was sent
}

func (t *Term) confirm(at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.confirmed = at
}

// StillLeader reports whether the last confirmed renewal is so recent that no other process can
// have been elected.
func (t *Term) StillLeader() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return time.Since(t.confirmed) < stepDownAfter
}

// Run campaigns and calls lead for each term won, with a context that is cancelled when the
// leadership is lost. Run returns when ctx is cancelled and lead has returned.
func (e *Elector) Run(ctx context.Context, lead func(ctx context.Context, t *Term) error) {
	for ctx.Err() == nil {
		t, err := e.campaign(ctx)
		if err != nil {
			return
		}
		term, stepDown := context.WithCancelCause(ctx)
		renewed := make(chan struct{})
		go func() { defer close(renewed); e.renewUntilLost(term, stepDown, t) }()
		if err := lead(term, t); err != nil && ctx.Err() == nil {
			e.Log.Warn(e.Name+" term ended", "cause", err)
		}
		stepDown(nil)
		<-renewed
		e.resign(ctx, t)
		select {
		case <-ctx.Done():
		case <-time.After(termPause):
		}
	}
}

// RunEvery calls f once per interval, in one process at a time, until ctx is done. The interval
// spans terms and processes, and starts with the very first term. A call whose term ends does not
// count.
func (e *Elector) RunEvery(ctx context.Context, interval time.Duration, f func(ctx context.Context)) {
	e.Run(ctx, func(term context.Context, _ *Term) error {
		for {
			wait, err := e.untilNext(term, interval)
			if err != nil {
				return err
			}
			select {
			case <-term.Done():
				return context.Cause(term)
			case <-time.After(wait):
			}
			f(term)
			if term.Err() != nil {
				return context.Cause(term)
			}
			if err := e.recordCall(term); err != nil {
				return err
			}
		}
	})
}

// lastCallKey is the key with the time of the last call of RunEvery.
func (e *Elector) lastCallKey() string { return e.Name + ".last" }

// untilNext returns the time until the next call of RunEvery.
func (e *Elector) untilNext(ctx context.Context, interval time.Duration) (time.Duration, error) {
	getCtx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	entry, err := e.Store.Control.Get(getCtx, e.lastCallKey())
	if store.IsNotFound(err) {
		return interval, e.recordCall(ctx)
	}
	if err != nil {
		return 0, fmt.Errorf("read the time of the last %s: %w", e.Name, err)
	}
	var last time.Time
	if err := last.UnmarshalText(entry.Value()); err != nil {
		e.Log.Warn(e.Name+" begins at once: the time of the last one is malformed", "error", err)
	}
	return min(interval-time.Since(last), interval), nil // the clock of another process may be ahead
}

func (e *Elector) recordCall(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if _, err := e.Store.Control.Put(ctx, e.lastCallKey(), []byte(time.Now().UTC().Format(time.RFC3339Nano))); err != nil {
		return fmt.Errorf("record the time of the last %s: %w", e.Name, err)
	}
	return nil
}

// campaign blocks until this process is elected. Its error is the cause of ctx.
func (e *Elector) campaign(ctx context.Context) (*Term, error) {
	var seen uint64 // the revision last observed
	var since time.Time
	for {
		changed := e.Store.Leaders.Changed(store.ControlLeader)
		revision, vacant, err := e.observe(ctx, &seen, &since)
		if err == nil && vacant {
			var t *Term
			if t, err = e.acquire(ctx, revision); err == nil {
				return t, nil
			}
		}
		if err != nil && !store.IsConflict(err) && ctx.Err() == nil {
			e.Log.Warn(e.Name+" campaign failed, will retry", "error", err)
		}
		pause := campaignEvery
		if left := expireAfter - time.Since(since); left > 0 {
			pause = min(pause, left)
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(pause):
		case <-changed:
		}
	}
}

// observe reports whether the leadership is vacant, and the revision at which to acquire it.
func (e *Elector) observe(ctx context.Context, seen *uint64, since *time.Time) (uint64, bool, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	entry, err := e.Store.Control.Get(ctx, e.Name)
	if store.IsNotFound(err) {
		return 0, true, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("read the leader of %s: %w", e.Name, err)
	}
	holder := string(entry.Value())
	if holder == "" || holder == e.Instance {
		return entry.Revision(), true, nil
	}
	if entry.Revision() != *seen {
		*seen, *since = entry.Revision(), time.Now()
	}
	if time.Since(*since) > expireAfter {
		return entry.Revision(), true, nil
	}
	bounded, stop := context.WithTimeout(ctx, pingTimeout)
	defer stop()
	_, err = e.Store.Conn.RequestWithContext(bounded, store.PingSubject(e.Name, holder), nil)
	return entry.Revision(), errors.Is(err, nats.ErrNoResponders), nil
}

// acquire replaces the given revision to make this instance the leader.
func (e *Elector) acquire(ctx context.Context, revision uint64) (*Term, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	ping, err := e.Store.Conn.Subscribe(store.PingSubject(e.Name, e.Instance), func(m *nats.Msg) { _ = m.Respond(nil) })
	if err != nil {
		return nil, fmt.Errorf("acquire the leadership of %s: %w", e.Name, err)
	}
	t := &Term{ping: ping, confirmed: time.Now()}
	if revision == 0 {
		t.revision, err = e.Store.Control.Create(ctx, e.Name, []byte(e.Instance))
	} else {
		t.revision, err = e.Store.Control.Update(ctx, e.Name, []byte(e.Instance), revision)
	}
	if err != nil {
		_ = ping.Unsubscribe()
		return nil, fmt.Errorf("acquire the leadership of %s: %w", e.Name, err)
	}
	return t, nil
}

// renewUntilLost renews the leadership until term is cancelled, and calls stepDown when it is lost.
func (e *Elector) renewUntilLost(term context.Context, stepDown context.CancelCauseFunc, t *Term) {
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	var changed <-chan struct{} // nil unless the last renewal failed
	for {
		select {
		case <-term.Done():
			return
		case <-tick.C:
		case <-changed:
		}
		changed = e.Store.Leaders.Changed(store.ControlLeader)
		err := e.renew(term, t)
		switch {
		case err == nil:
			changed = nil
		case store.IsConflict(err):
			stepDown(errors.New("another instance was elected"))
			return
		case !e.LeadInDoubt && !t.StillLeader():
			stepDown(fmt.Errorf("renew the leadership: %w", err))
			return
		}
	}
}

// renew writes the key again. An earlier renewal may have been stored although its answer was lost.
func (e *Elector) renew(term context.Context, t *Term) error {
	ctx, cancel := e.Store.Leaders.Attempt(term, store.ControlLeader, renewTimeout)
	defer cancel()
	for {
		sent := time.Now()
		revision, err := e.Store.Control.Update(ctx, e.Name, []byte(e.Instance), t.revision)
		if store.IsConflict(err) {
			entry, errGet := e.Store.Control.Get(ctx, e.Name)
			switch {
			case errGet != nil && !store.IsNotFound(errGet):
				return errGet
			case errGet == nil && string(entry.Value()) == e.Instance && entry.Revision() != t.revision:
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

// resign clears the key, so that a successor is elected immediately. A failure only delays that.
func (e *Elector) resign(ctx context.Context, t *Term) {
	_ = t.ping.Unsubscribe()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
	defer cancel()
	_, _ = e.Store.Control.Update(ctx, e.Name, nil, t.revision)
}
