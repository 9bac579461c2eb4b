// Package timer wakes its user at a time. Redis keeps the times and asynq finds those that have come; without a Redis of their own
// they are kept by one inside the process that has no socket at all (miniredis). It knows nothing of deliveries.
//
// A timer only wakes: what is due is known to its user, who looks at the time when woken and goes over what is due at intervals.
// So little is promised. A wake comes at its time or, with Redis at hand, up to half a second later. It may come twice, or at a time
// that another has replaced since. It may not come when Redis or the process running it was lost, or when Redis took longer than
// [SetTimeout] to confirm it. A key has one timer; setting it anew replaces it. None leaves anything behind in Redis, other than the
// counters of asynq, one for each day of 90. Two systems must not share a database of a Redis.
//
// Measured on 2 cores of 2 GHz: inside the process, Set takes 0.2 to 0.3 ms, some 1,000 timers a second come, and 100,000 that are to
// come take 84 MB and a sixth of a core (10,000: 9 MB and 3 % of one, none: 2 %, until the first is set: nothing), because asynq asks every quarter of a second which
// are due, and miniredis sorts all of them to tell. So set what is due soon, and let whoever knows what is due later do so when its
// time is near. With a Redis outside, Set takes 0.03 to 0.08 ms, 2,000 due at once all come within 0.2 s, and 100,000 take 65 MB there,
// 8 MB here and 1 % of a core.
package timer

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

const (
	// SetTimeout is how long Set waits for Redis.
	SetTimeout = 2 * time.Second

	queueName = "bullpen-timers"
	taskType  = "wake"

	pollInterval    = 50 * time.Millisecond  // between looks for timers that have come, when there were none
	forwardInterval = 250 * time.Millisecond // between looks for timers that are to come
	healthInterval  = 2 * time.Second
	keepInterval    = time.Second
	tidyInterval    = 5 * time.Second
	lateTimer       = time.Minute     // after its time a timer that did not come is forgotten
	stopGrace       = 2 * time.Second // for what asynq still has to write when Run ends
	handlers        = 8               // timers whose end is being written at once
)

// Config says where the timers are kept.
type Config struct {
	// URL is that of a Redis, redis://[USER:PASSWORD@]HOST:PORT[/DB], or rediss:// for TLS. Empty keeps timers inside the process.
	URL string
	// CA is a PEM file of certificate authorities to trust with rediss://, in place of the system's.
	CA  string
	Log *slog.Logger
}

// Timers are times to be woken at. One process at a time should Run them: who runs them is who is woken.
type Timers struct {
	log      *slog.Logger
	options  *redis.Options
	embedded *embedded // nil with a Redis of its own
	client   *redis.Client
	enqueuer atomic.Pointer[asynq.Client]
	due      ready
	used     func()        // to be called before a timer is given to Redis
	first    chan struct{} // closed when that has happened

	mu       sync.Mutex
	set      map[string]int64 // what this process set and has not seen come: the time of a key, Unix milliseconds
	replaced []string         // ids of timers that another of their key replaced
}

// Open opens the timers. A Redis that does not answer is waited for by Run; one that refuses the credentials, or whose certificate is
// not trusted, is an error.
func Open(ctx context.Context, cfg Config) (*Timers, error) {
	quietRedis()
	t := &Timers{log: cfg.Log, set: map[string]int64{}, due: ready{wake: make(chan struct{}, 1), keys: map[string]struct{}{}}, first: make(chan struct{})}
	t.used = sync.OnceFunc(func() { close(t.first) })
	if cfg.URL == "" {
		t.embedded = newEmbedded()
		t.options = &redis.Options{Dialer: t.embedded.dial, Addr: "embedded"}
	} else {
		var err error
		if t.options, err = parse(cfg); err != nil {
			return nil, err
		}
	}
	bound(t.options)
	t.client = redis.NewClient(t.options)
	t.publish()
	if t.embedded != nil {
		return t, nil
	}
	t.used() // it may hold timers of a process before this one
	ctx, cancel := context.WithTimeout(ctx, SetTimeout)
	defer cancel()
	if err := t.client.Ping(ctx).Err(); refused(err) {
		t.Close()
		return nil, fmt.Errorf("connect to Redis: %w", err)
	} else if err != nil {
		t.log.Warn("Redis does not answer yet; timers come late until it does", "error", err)
	}
	return t, nil
}

// refused reports whether err is one that waiting does not mend.
func refused(err error) bool {
	if reply, ok := errors.AsType[redis.Error](err); ok {
		for _, sign := range []string{"WRONGPASS", "NOAUTH", "NOPERM", "ERR AUTH", "ERR invalid password", "ERR DB index"} {
			if strings.HasPrefix(reply.Error(), sign) {
				return true
			}
		}
	}
	_, ok := errors.AsType[*tls.CertificateVerificationError](err)
	return ok
}

// Close releases what Open took. Run must have returned.
func (t *Timers) Close() {
	_ = t.client.Close() // the connections end with it either way
	if t.embedded != nil {
		t.embedded.close()
	}
}

// publish makes asynq list its queue in Redis with the next timer, as it does once for each client: a Redis that was flushed since, or
// replaced by an empty one, has no such list, and without it no timer could be removed.
func (t *Timers) publish() { t.enqueuer.Store(asynq.NewClientFromRedisClient(t.client)) }

// Set makes key be woken at the time, in place of its time so far. A time that has come wakes at once, without Redis. With an error,
// given after [SetTimeout] at the latest, the wake may still come.
func (t *Timers) Set(ctx context.Context, key string, at time.Time) error {
	if !at.After(time.Now()) {
		t.due.add(key)
		return nil
	}
	milli := at.Add(time.Millisecond - 1).UnixMilli() // not before the time
	t.mu.Lock()
	old, known := t.set[key]
	t.set[key] = milli
	t.mu.Unlock()
	t.used()
	ctx, cancel := context.WithTimeout(ctx, SetTimeout)
	defer cancel()
	if err := t.enqueue(ctx, key, milli); ctx.Err() != nil && err != nil {
		return fmt.Errorf("set timer: Redis does not confirm it: %w", ctx.Err()) // which asynq does not wrap
	} else if err != nil {
		return fmt.Errorf("set timer: %w", err)
	}
	if known && old != milli {
		t.mu.Lock()
		t.replaced = append(t.replaced, timerID(key, old))
		t.mu.Unlock()
	}
	return nil
}

func (t *Timers) enqueue(ctx context.Context, key string, milli int64) error {
	_, err := t.enqueuer.Load().EnqueueContext(ctx, asynq.NewTask(taskType, nil), asynq.TaskID(timerID(key, milli)),
		asynq.Queue(queueName), asynq.MaxRetry(0), asynq.ProcessAt(time.UnixMilli(milli)))
	if errors.Is(err, asynq.ErrTaskIDConflict) {
		return nil // it is set
	}
	if err == nil && t.embedded != nil {
		t.embedded.made.Add(1)
	}
	return err
}

// timerID names the timer of a key for a time. The time is part of it: a timer whose end is still being written, or could not be when
// Redis was away, does not stand in the way of the next of its key.
func timerID(key string, milli int64) string { return strconv.FormatInt(milli, 10) + "." + key }

func parseTimerID(id string) (key string, milli int64, err error) {
	first, key, found := strings.Cut(id, ".")
	if !found {
		return "", 0, errors.New("no time in it")
	}
	milli, err = strconv.ParseInt(first, 10, 64)
	return key, milli, err
}

// Run calls wake with the keys whose time has come, one after the other, until ctx ends. It outlives a Redis that goes away, and gives
// no error. While wake does not return, keys that come gather, each once.
func (t *Timers) Run(ctx context.Context, wake func(key string)) error {
	ctx, stop := context.WithCancel(ctx)
	var waking sync.WaitGroup
	defer waking.Wait()
	defer stop()
	waking.Go(func() { t.due.run(ctx, wake) })
	select {
	case <-t.first: // before that there is nothing to find, and it would take memory and time all the same
		return t.find(ctx)
	case <-ctx.Done():
		return nil
	}
}

// find has asynq find timers that have come, until ctx ends.
func (t *Timers) find(ctx context.Context) error {
	line := &line{dial: t.options.Dialer, conns: map[*lineConn]struct{}{}}
	options := *t.options
	options.Dialer = line.open
	client := redis.NewClient(&options)
	defer func() { _ = client.Close() }()
	log := &taskLog{log: t.log}
	server := asynq.NewServerFromRedisClient(client, asynq.Config{
		Concurrency: handlers, Queues: map[string]int{queueName: 1}, Logger: log, LogLevel: asynq.DebugLevel,
		TaskCheckInterval: pollInterval, DelayedTaskCheckInterval: forwardInterval, ShutdownTimeout: stopGrace,
		HealthCheckInterval: healthInterval, HealthCheckFunc: log.health,
	})
	if err := server.Start(asynq.HandlerFunc(t.come)); err != nil {
		return fmt.Errorf("start asynq: %w", err)
	}
	var keeping sync.WaitGroup
	keeping.Go(func() { t.keep(ctx, asynq.NewInspectorFromRedisClient(client)) })
	<-ctx.Done()
	cut := time.AfterFunc(stopGrace, line.cut) // a Redis that does not answer is not waited for
	server.Shutdown()
	keeping.Wait()
	cut.Stop()
	return nil
}

// come takes a timer that asynq says has come. asynq counts in whole seconds, so that it may be early by one.
func (t *Timers) come(ctx context.Context, _ *asynq.Task) error {
	id, _ := asynq.GetTaskID(ctx)
	key, milli, err := parseTimerID(id)
	if err != nil {
		t.log.Warn("what is no timer was found among them and is dropped", "id", id, "error", err)
		return nil // an error would keep it
	}
	t.mu.Lock()
	if t.set[key] == milli {
		delete(t.set, key)
	}
	t.mu.Unlock()
	if early := time.Until(time.UnixMilli(milli)); early > 0 {
		time.AfterFunc(early, func() { t.due.add(key) })
		return nil
	}
	t.due.add(key)
	return nil
}

// keep removes what asynq, Redis and miniredis would keep for longer than it is of use, until ctx ends.
func (t *Timers) keep(ctx context.Context, inspector *asynq.Inspector) {
	tick := time.NewTicker(keepInterval)
	defer tick.Stop()
	last, tidied := time.Now(), time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := time.Now()
		if t.embedded != nil {
			t.embedded.age(now.Sub(last))
			if t.embedded.made.Load() >= t.embedded.life {
				t.renew(ctx)
			}
		}
		last = now
		t.removeReplaced(ctx, inspector)
		if now.Sub(tidied) >= tidyInterval {
			t.tidy(now, inspector)
			tidied = now
		}
	}
}

func (t *Timers) removeReplaced(ctx context.Context, inspector *asynq.Inspector) {
	t.mu.Lock()
	ids := t.replaced
	t.replaced = nil
	t.mu.Unlock()
	for i, id := range ids {
		if ctx.Err() != nil {
			return
		}
		err := inspector.DeleteTask(queueName, id)
		switch {
		case errors.Is(err, asynq.ErrQueueNotFound): // until the next is set
			t.publish()
			t.mu.Lock()
			t.replaced = append(t.replaced, ids[i:]...)
			t.mu.Unlock()
			return
		case errors.Is(err, asynq.ErrTaskNotFound), err == nil:
		default: // it has come, or Redis is away: it goes when it comes
			t.log.Debug("a replaced timer was not removed", "left", len(ids)-i, "error", err)
			return
		}
	}
}

// tidy removes timers that asynq archived, because their end could not be written when Redis was away, and what Redis knows of asynq
// servers that are gone; and forgets timers that were lost.
func (t *Timers) tidy(now time.Time, inspector *asynq.Inspector) {
	t.publish()
	_, err := inspector.DeleteAllArchivedTasks(queueName)
	_, listErr := inspector.Servers() // removes those that are gone
	if err := errors.Join(err, listErr); err != nil {
		t.log.Debug("timers were not tidied up, it is tried again", "error", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, milli := range t.set {
		if now.Sub(time.UnixMilli(milli)) > lateTimer {
			delete(t.set, key)
		}
	}
}

// renew replaces the Redis inside the process by a new one with the same timers.
func (t *Timers) renew(ctx context.Context) {
	t.embedded.renew()
	t.publish()
	t.mu.Lock()
	pending := maps.Clone(t.set)
	t.replaced = nil
	t.mu.Unlock()
	for key, milli := range pending {
		if err := t.enqueue(ctx, key, milli); err != nil {
			if ctx.Err() == nil {
				t.log.Warn("timers were not taken over into a new embedded Redis and may come late", "error", err)
			}
			break
		}
	}
	t.embedded.made.Store(0)
}

// ready are keys whose time has come and that have not been woken.
type ready struct {
	mu   sync.Mutex
	keys map[string]struct{}
	wake chan struct{}
}

func (r *ready) add(key string) {
	r.mu.Lock()
	r.keys[key] = struct{}{}
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *ready) run(ctx context.Context, wake func(key string)) {
	for {
		r.mu.Lock()
		keys := r.keys
		r.keys = map[string]struct{}{}
		r.mu.Unlock()
		for key := range keys {
			if ctx.Err() != nil {
				return
			}
			wake(key)
		}
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		}
	}
}
