// Package engine drives organisations' items, such as schedules and pipeline runs, in one process
// at a time: it tracks when each item is due, and handles due items fairly across organisations.
//
// A kind of item has a [Queue] that follows its collections, see [Watch], and an [Engine] with two
// functions: Due returns when an item is due, and Handle handles it.
package engine

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bullpen-run/bullpen/scheduler/leader"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// lookEvery is how late an item that becomes due without a change may be handled.
const lookEvery = 100 * time.Millisecond

// Engine handles a queue's items when they are due, while its process leads.
type Engine[T any] struct {
	Queue    *Queue[T]
	Store    *store.Store
	Name     string // of the leadership, and of items in the log
	Instance string // unique to this process
	Log      *slog.Logger

	// Due returns when to handle an item, as far as the queue knows. ok is false if the item must
	// change first. Due, Order, Urgent, Interrupt and Forget are called under the lock of the
	// queue.
	Due func(*T) (at time.Time, ok bool)
	// Handle does the due work of an item. known is the queue's knowledge at the start of the call,
	// which may take as long as it needs. Calls for one item never overlap. An error is logged.
	Handle func(ctx context.Context, x Item, known T) error

	// Order, if not nil, compares two due items of an organisation: the lesser one is handled
	// first. Without it, the one due first goes first.
	Order func(a, b *T) int
	// Urgent, if not nil, reports whether an item need not wait for others of its organisation:
	// urgent items have handlers of their own.
	Urgent func(*T) bool
	// Interrupt, if not nil, returns why a call in progress must end, or nil. It is called when the
	// item has changed; a forgotten item is zero. The reason becomes the cause of the call's
	// context, unless it existed at the start.
	Interrupt func(*T) error
	// Forget, if not nil, drops a leader's knowledge of an item. It is called for each item when
	// this process has stopped leading.
	Forget func(*T)
	// Beside, if not nil, is other work of the leader, which ends with the context.
	Beside []func(ctx context.Context)

	Pause      time.Duration // the least time between two calls for an item that has not changed
	RetryAfter time.Duration // the same after an error, if that is more
	Timeout    time.Duration // of a call; 0 for none
	Handlers   int           // calls at the same time
	// HandlersOfOrg limits the concurrent calls for one organisation, which may make them slow. It
	// never uses more handlers than it leaves to others.
	HandlersOfOrg int

	term atomic.Pointer[leader.Term]
}

// Run campaigns and handles items until ctx is done. It always returns nil.
func (e *Engine[T]) Run(ctx context.Context) error {
	elector := leader.Elector{Store: e.Store, Name: e.Name, Instance: e.Instance, Log: e.Log}
	elector.Run(ctx, func(ctx context.Context, term *leader.Term) error {
		e.term.Store(term)
		e.Lead(ctx)
		return nil
	})
	return nil
}

// StillLeader reports whether no other process can lead yet: see [leader.Term.StillLeader].
func (e *Engine[T]) StillLeader() bool {
	term := e.term.Load()
	return term != nil && term.StillLeader()
}

// Lead handles items until ctx is done, without an election.
func (e *Engine[T]) Lead(ctx context.Context) {
	woken := e.Queue.begin(e)
	defer e.Queue.end()
	var running sync.WaitGroup
	defer running.Wait()
	for _, f := range e.Beside {
		running.Go(func() { f(ctx) })
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		for c := e.Queue.next(ctx); c != nil; c = e.Queue.next(ctx) {
			running.Go(func() { e.handle(c) })
		}
		select {
		case <-ctx.Done():
		case <-woken:
		case <-tick.C:
		}
	}
}

// Every returns a function for [Engine.Beside] that calls f once per interval.
func Every(interval time.Duration, f func(ctx context.Context)) func(ctx context.Context) {
	return func(ctx context.Context) {
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				f(ctx)
			}
		}
	}
}

func (e *Engine[T]) handle(c *call[T]) {
	ctx, cancel := c.ctx, func() {}
	if e.Timeout > 0 {
		ctx, cancel = context.WithTimeout(ctx, e.Timeout)
	}
	defer cancel()
	pause, err := e.Pause, e.Handle(ctx, c.entry.Item, c.known)
	if err != nil {
		pause = max(pause, e.RetryAfter)
	}
	if err != nil && !errors.Is(ctx.Err(), context.Canceled) {
		e.Log.Warn("not handled, will retry", "kind", e.Name, "id", c.entry.ID, "org", c.entry.Org, "error", err)
	}
	e.Queue.done(c, time.Now().Add(pause))
}
