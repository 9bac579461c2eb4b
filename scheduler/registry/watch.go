package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	watchPause   = 200 * time.Millisecond
	watchTimeout = time.Second // for the answer to a watch
	// A cluster that has just lost a leader answers nobody for some seconds, and a process may start meanwhile.
	readTimeout = 30 * time.Second
)

// watched is a part of a bucket that is read once and then followed.
type watched struct {
	store   *store.Store
	bucket  jetstream.KeyValue
	pattern string // of the bucket's keys
	what    string // it holds, for messages
	log     *slog.Logger
	take    func(jetstream.KeyValueEntry) // called for every entry as it is, and again whenever it changes
}

func (w *watched) watch(ctx context.Context) (jetstream.KeyWatcher, error) {
	watcher, err := w.bucket.Watch(ctx, w.pattern)
	if err != nil {
		return nil, fmt.Errorf("watch the %s: %w", w.what, err)
	}
	return watcher, nil
}

// patiently does what a process needs when it starts, again for as long as a
// cluster may need to answer.
func patiently(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	return store.Retry(ctx, store.IsTransient, do)
}

// read takes all entries there are, some of them perhaps twice.
func (w *watched) read(ctx context.Context) error { return patiently(ctx, w.readOnce) }

func (w *watched) readOnce(ctx context.Context) error {
	watcher, err := w.watch(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = watcher.Stop() }()
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("read the %s: %w", w.what, context.Cause(ctx))
		case e, open := <-watcher.Updates():
			switch {
			case !open:
				return fmt.Errorf("read the %s: the watch ended", w.what)
			case e == nil:
				return nil
			}
			w.take(e)
		}
	}
}

// run follows the entries until ctx ends.
func (w *watched) run(ctx context.Context) error {
	// It ends with ctx only, and with its error.
	_ = backoff.Retry(func() error {
		err := w.follow(ctx)
		if ctx.Err() == nil && w.store.Conn.IsConnected() { // else that is told already
			w.log.Warn("the "+w.what+" are not followed, will retry", "error", err)
		}
		return err
	}, backoff.WithContext(backoff.NewConstantBackOff(watchPause), ctx))
	return nil
}

// follow takes in changes until the watch breaks or ctx ends.
func (w *watched) follow(ctx context.Context) error {
	// A server that was started again has forgotten its watches, which they notice by themselves only after seconds.
	away := w.store.Conn.StatusChanged(nats.RECONNECTING)
	defer w.store.Conn.RemoveStatusListener(away)
	opening, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	late := time.AfterFunc(watchTimeout, func() { cancel(errors.New("no answer")) })
	watcher, err := w.watch(opening)
	if err != nil {
		return errors.Join(err, context.Cause(opening))
	}
	defer func() { _ = watcher.Stop() }()
	if !late.Stop() {
		return context.Cause(opening)
	}
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-away:
			return errors.New("the connection to NATS was lost")
		case e, open := <-watcher.Updates():
			if !open {
				return errors.New("the watch ended")
			}
			if e != nil {
				w.take(e)
			}
		}
	}
}
