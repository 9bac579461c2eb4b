package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"
)

const (
	// openAttempt bounds one attempt to open a stream. The answer comes after the election of the
	// stream's leader, which takes up to 9 s, and longer if it is repeated.
	openAttempt = 15 * time.Second
	// existsAttempt bounds one attempt to ask whether a stream exists. A cluster that is forming drops
	// the question, so that asking again soon is faster than waiting for the answer.
	existsAttempt = 2 * time.Second
	// The log names the streams that are waited for: first after openNotice, then at intervals.
	openNotice      = time.Second
	openNoticeEvery = 10 * time.Second
)

// opener opens streams. It waits for as long as that takes: the servers of a new cluster elect a
// leader for each stream, one after the other on a slow machine.
type opener struct {
	*Store
	cfg Config
	log *slog.Logger

	mu      sync.Mutex
	waiting map[string]error // by stream: the error of the last attempt, nil at first
}

func open(ctx context.Context, nc *nats.Conn, cfg Config, log *slog.Logger) (*Store, error) {
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncTimeout(ackTimeout))
	if err != nil {
		return nil, fmt.Errorf("open JetStream: %w", err)
	}
	s := &Store{
		Conn: nc, JS: js, MaxInline: min(maxInline, int(nc.MaxPayload()/2)),
		Leaders: &Leaders{waiting: map[string]change{}},
	}
	s.maxRecord = s.MaxInline
	if nc.MaxPayload() >= usualPayload {
		s.maxRecord = maxRecord
	}
	if err := s.Leaders.watch(nc); err != nil {
		return nil, fmt.Errorf("subscribe to changes of leaders: %w", err)
	}
	o := &opener{Store: s, cfg: cfg, log: log, waiting: map[string]error{}}
	return s, o.openAll(ctx)
}

// openAll opens all rows that this process needs, in parallel.
func (o *opener) openAll(ctx context.Context) error {
	ctx, stop := context.WithCancelCause(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { o.watch(ctx, stop) })
	defer watching.Wait()
	defer stop(nil)
	if !o.cfg.AttachOnly && !o.cfg.Restoring {
		unfinished := true
		err := o.open(ctx, restoringName, existsAttempt, IsTransient, func(ctx context.Context) (err error) {
			unfinished, err = exists(ctx, o.JS, restoringName)
			return err
		})
		if err != nil {
			return err
		}
		if unfinished {
			return errors.New("a backup was being restored here, and not to its end: run bullpen restore again")
		}
	}
	rows, opening := errgroup.WithContext(ctx)
	for i := range table {
		r := &table[i]
		switch {
		case !o.cfg.AttachOnly:
			rows.Go(func() error {
				return o.open(opening, r.streamName(), openAttempt, isForming, func(ctx context.Context) error {
					return o.ensure(ctx, r)
				})
			})
		case r.attached():
			rows.Go(func() error {
				return o.open(opening, r.streamName(), openAttempt, AnyError, func(ctx context.Context) error {
					return o.openExisting(ctx, r)
				})
			})
		}
	}
	return rows.Wait()
}

// open calls try until it succeeds, fails with an error that is not transient, or ctx is done. Each
// attempt has the timeout.
func (o *opener) open(
	ctx context.Context, name string, timeout time.Duration, transient func(error) bool, try func(context.Context) error,
) error {
	o.setWaiting(name, nil)
	defer o.setOpened(name)
	policy := o.Leaders.Retry(name, timeout)
	policy.Transient = transient
	policy.OnRetry = func(err error, _ time.Duration) { o.setWaiting(name, err) }
	err := policy.Do(ctx, try)
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("open stream %s: %w: check the NATS server's JetStream, and the permissions of this user", name,
			err)
	}
	return nil
}

func (o *opener) setWaiting(name string, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waiting[name] = err
}

func (o *opener) setOpened(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.waiting, name)
}

// watch logs what is waited for, until ctx is done. It calls fail if this user may not send the
// requests, which are never answered then.
func (o *opener) watch(ctx context.Context, fail func(error)) {
	text := "waiting for the streams of bullpen on this NATS"
	if o.cfg.AttachOnly {
		text += "; a gateway or scheduler creates them when it starts"
	}
	timer := time.NewTimer(openNotice)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if denied := o.Conn.LastError(); errors.Is(denied, nats.ErrPermissionViolation) &&
			strings.Contains(denied.Error(), "$JS.API.STREAM.") {
			fail(denied)
			return
		}
		o.mu.Lock()
		names := slices.Sorted(maps.Keys(o.waiting))
		var last error
		for _, name := range names {
			last = cmp.Or(last, o.waiting[name])
		}
		o.mu.Unlock()
		o.log.Info(text, "streams", names, "error", last)
		timer.Reset(openNoticeEvery)
	}
}

// attached reports whether a worker opens the row when it starts.
func (r *row) attached() bool { return r.grants[roleWorker] != 0 && !r.onDemand }

// ensure creates the row, or updates its settings, and opens it.
func (o *opener) ensure(ctx context.Context, r *row) error {
	st, err := o.JS.CreateOrUpdateStream(ctx, r.config(o.cfg))
	if err != nil {
		return err
	}
	return o.attach(ctx, r, st)
}

// openExisting opens a row that another process creates.
func (o *opener) openExisting(ctx context.Context, r *row) error {
	st, err := o.JS.Stream(ctx, r.streamName())
	if err != nil {
		return err
	}
	return o.attach(ctx, r, st)
}

// attach stores the row, whose stream is st, in its field of the store.
func (o *opener) attach(ctx context.Context, r *row, st jetstream.Stream) error {
	if r.stream != nil {
		*r.stream(o.Store) = Stream{st, o.Store}
		return nil
	}
	kv, err := o.JS.KeyValue(ctx, r.name)
	*r.bucket(o.Store) = bucket{kv, o.Store, r.markerTTL}
	return err
}

// PreloadBucket returns Preload, which a worker opens on demand. It fails while no gateway or
// scheduler of this version has created the bucket.
func (s *Store) PreloadBucket(ctx context.Context) (jetstream.KeyValue, error) {
	if s.Preload != nil {
		return s.Preload, nil
	}
	kv, err := s.JS.KeyValue(ctx, preloadName)
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", preloadName, err)
	}
	return bucket{KeyValue: kv, store: s}, nil
}

// exists reports whether there is a stream of that name.
func exists(ctx context.Context, js jetstream.JetStream, name string) (bool, error) {
	_, err := js.Stream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return false, nil
	}
	return err == nil, err
}
