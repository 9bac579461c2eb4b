// Package engine drives what organisations have, such as schedules and runs of pipelines, in one process
// at a time: it knows when each item is due, and handles due items in turns of the organisations.
package engine

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/scheduler/leader"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// Engine handles the items of a queue when they are due, while its process leads.
type Engine[T any] struct {
	Queue    *Queue[T]
	Store    *store.Store
	Name     string // of the leadership, and of items in the log
	Instance string // unique to this process
	Log      *slog.Logger

	// Due returns when an item is to be handled, as far as the queue knows. ok is false if that needs a
	// change first. Due is called under the lock of the queue.
	Due func(*T) (at time.Time, ok bool)
	// Forget, if not nil, forgets what only a leader knows of an item. It is called for each item when this
	// process has stopped leading, under the lock of the queue.
	Forget func(*T)
	// Handle does what is due for an item. One item is handled by one call at a time. An error is logged.
	Handle func(ctx context.Context, x Item) error
	// Beside, if not nil, are other parts of the leader's work, which end with their context.
	Beside []func(ctx context.Context)

	Every         time.Duration // how late a due item may be noticed
	Pause         time.Duration // the least time between two calls for an item
	Timeout       time.Duration // of a call
	Handlers      int           // calls at the same time
	HandlersOfOrg int           // calls at the same time for one organisation, which may make them slow
}

// Run campaigns and handles items until ctx is done. It always returns nil.
func (e *Engine[T]) Run(ctx context.Context) error {
	elector := leader.Elector{Store: e.Store, Name: e.Name, Instance: e.Instance, Log: e.Log}
	elector.Run(ctx, func(ctx context.Context, _ *leader.Term) error {
		e.lead(ctx)
		return nil
	})
	return nil
}

// lead handles items until ctx is done.
func (e *Engine[T]) lead(ctx context.Context) {
	e.Queue.begin(e.Due)
	defer e.Queue.end(e.Forget)
	var running sync.WaitGroup
	defer running.Wait()
	for _, f := range e.Beside {
		running.Go(func() { f(ctx) })
	}
	due, free, handled := newTurns(), e.Handlers, make(chan Item, e.Handlers)
	tick := time.NewTicker(e.Every)
	defer tick.Stop()
	for {
		for free > 0 {
			x, ok := due.next(e.HandlersOfOrg)
			if !ok {
				break
			}
			free--
			running.Go(func() {
				defer func() { handled <- x }()
				e.handle(ctx, x)
			})
		}
		select {
		case <-ctx.Done():
			return
		case x := <-handled:
			free++
			due.done(x)
			e.Queue.put(x, time.Now().Add(e.Pause))
		case <-tick.C:
			for _, x := range e.Queue.take(time.Now()) {
				due.add(x)
			}
		}
	}
}

func (e *Engine[T]) handle(ctx context.Context, x Item) {
	call, cancel := context.WithTimeout(ctx, e.Timeout)
	defer cancel()
	if err := e.Handle(call, x); err != nil && ctx.Err() == nil {
		e.Log.Warn("not handled, will retry", "kind", e.Name, "id", x.ID, "org", x.Org, "error", err)
	}
}
