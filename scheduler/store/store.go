// Package store opens what bullpen keeps in JetStream, and reads and writes it: the streams and
// buckets with their retention, the subjects, and the encoding of stored messages, including bodies
// too large for a message. It makes no decisions: packages queue, events and registry do.
package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"
)

// Config configures the streams.
type Config struct {
	Replicas  int           // 1, or 3 or 5 on a cluster
	Retention time.Duration // of records and events
	// AttachOnly opens only what a worker needs, and waits for another process to create it. A
	// worker, which is close to untrusted code, needs no permission to change streams or to read
	// API keys.
	AttachOnly bool
	// Restoring opens the streams while a backup is being restored, when other processes may not.
	Restoring bool
}

// Store is everything bullpen keeps in JetStream.
type Store struct {
	Conn        *nats.Conn
	JS          jetstream.JetStream
	Jobs        jetstream.Stream      // one message per job that has not ended
	Executions  jetstream.Stream      // one message per execution: its claim, then its result
	Output      jetstream.Stream      // output events
	DeadLetters jetstream.Stream      // one message per dead letter
	Deliveries  jetstream.Stream      // one message per delivery
	Threads     jetstream.Stream      // one message per thread
	Keys        jetstream.KeyValue    // API keys by id, and the secret they are hashed with
	Profiles    jetstream.KeyValue    // sandbox profiles by name
	Bindings    jetstream.KeyValue    // idempotency keys
	Control     jetstream.KeyValue    // elected leaders
	Images      jetstream.KeyValue    // the catalog of sandbox images
	Webhooks    jetstream.KeyValue    // webhook settings of API keys with their secrets, and failing endpoints
	bodies      jetstream.ObjectStore // bodies too large for a message

	maxInline int // size in bytes up to which a body is stored in the message
	maxRecord int // the same for the record of an execution
	leaders   *leaderChanges
}

// ackTimeout is how long an asynchronous write waits for its acknowledgement.
const ackTimeout = 2 * time.Second

// openTimeout is how long Connect waits for the next stream to be opened.
const openTimeout = 30 * time.Second

// maxInline is the size in bytes up to which a body is stored in the message itself.
const maxInline = 512 << 10

// The record of an execution may fill a message of the usual size but for its header. With 1 MB of
// output it is one write then, which also reaches waiting clients.
const (
	usualPayload = 1 << 20
	maxRecord    = usualPayload - 16<<10
)

func open(ctx context.Context, nc *nats.Conn, cfg Config) (*Store, error) {
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncTimeout(ackTimeout))
	if err != nil {
		return nil, fmt.Errorf("open JetStream: %w", err)
	}
	s := &Store{Conn: nc, JS: js, maxInline: min(maxInline, int(nc.MaxPayload()/2)), leaders: &leaderChanges{waiting: map[string]change{}}}
	s.maxRecord = s.maxInline
	if nc.MaxPayload() >= usualPayload {
		s.maxRecord = maxRecord
	}
	if err := s.watchLeaders(); err != nil {
		return nil, fmt.Errorf("subscribe to changes of leaders: %w", err)
	}
	if cfg.AttachOnly {
		return s, s.each(ctx, (*row).attached, s.openExisting)
	}
	if !cfg.Restoring {
		if unfinished, err := s.RestoreUnfinished(ctx); err != nil {
			return nil, err
		} else if unfinished {
			return nil, errors.New("a backup was being restored here, and not to its end: run bullpen restore again")
		}
	}
	return s, s.each(ctx, func(*row) bool { return true }, func(ctx context.Context, r *row) error { return s.ensure(ctx, r, cfg) })
}

// attached reports whether a worker opens the row.
func (r *row) attached() bool { return r.grants[roleWorker] != 0 }

// each opens the chosen rows in parallel. It waits for as long as another row is opened within
// openTimeout.
func (s *Store) each(ctx context.Context, chosen func(*row) bool, open func(context.Context, *row) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	late := time.AfterFunc(openTimeout, func() { cancel(context.DeadlineExceeded) })
	defer late.Stop()
	rows, ctx := errgroup.WithContext(ctx)
	for i := range table {
		if r := &table[i]; chosen(r) {
			rows.Go(func() error {
				if err := open(ctx, r); err != nil {
					return err
				}
				late.Reset(openTimeout)
				return nil
			})
		}
	}
	return rows.Wait()
}

// ensure creates the row, or updates its settings, and opens it.
func (s *Store) ensure(ctx context.Context, r *row, cfg Config) error {
	err := Retry{Transient: isForming}.Do(ctx, func(ctx context.Context) error {
		st, err := s.JS.CreateOrUpdateStream(ctx, r.config(cfg))
		if err != nil {
			return err
		}
		return s.attach(ctx, r, st)
	})
	if err != nil {
		return fmt.Errorf("open stream %s: %w: check the NATS server's JetStream and permissions", r.streamName(), cause(ctx, err))
	}
	return nil
}

// openExisting opens the row once another process has created it.
func (s *Store) openExisting(ctx context.Context, r *row) error {
	err := Retry{Transient: AnyError}.Do(ctx, func(ctx context.Context) error {
		st, err := s.JS.Stream(ctx, r.streamName())
		if err != nil {
			return err
		}
		return s.attach(ctx, r, st)
	})
	if err != nil {
		return fmt.Errorf("open stream %s: %w: is a gateway running on this NATS, and is this user allowed its JetStream API?",
			r.streamName(), cause(ctx, err))
	}
	return nil
}

// attach stores the row, whose stream is st, in its field of s.
func (s *Store) attach(ctx context.Context, r *row, st jetstream.Stream) (err error) {
	switch {
	case r.stream != nil:
		*r.stream(s) = st
	case r.bucket != nil:
		var kv jetstream.KeyValue
		kv, err = s.JS.KeyValue(ctx, r.name)
		*r.bucket(s) = bucket{kv, s}
	default:
		s.bodies, err = s.JS.ObjectStore(ctx, r.name)
	}
	return err
}

// cause returns the cause of ctx if it is done, else err.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
