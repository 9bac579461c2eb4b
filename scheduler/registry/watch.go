package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go/jetstream"
)

// watched is a part of a bucket that is read once and then followed.
type watched struct {
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

// read takes all entries there are.
func (w *watched) read(ctx context.Context) error {
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
	return backoff.Retry(func() error {
		watcher, err := w.watch(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			w.log.Warn("the "+w.what+" are not followed, will retry", "error", err)
			return err
		}
		defer func() { _ = watcher.Stop() }()
		for {
			select {
			case <-ctx.Done():
				return nil
			case e, open := <-watcher.Updates():
				if !open {
					return errors.New("the watch ended")
				}
				if e != nil {
					w.take(e)
				}
			}
		}
	}, backoff.NewConstantBackOff(watchPause))
}
