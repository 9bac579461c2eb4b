// Package timer calls its user at set times. Redis stores the times, and asynq finds those that are
// due. Without a Redis server, a Redis inside the process stores them, which has no socket
// (miniredis). The package is independent of deliveries.
//
// A timer only wakes its user, which knows what is due and also checks that at intervals. So little
// is promised. A wake-up comes at its time, or up to half a second later with a Redis server
// nearby. It may come twice, or at a time that was replaced. It may not come if Redis or the
// process that runs the timers was lost, or if Redis took longer than [SetTimeout] to confirm it. A
// key has one timer, and setting it again replaces it. Timers leave nothing behind in Redis but
// asynq's counters, one for each of 90 days. Two systems must not share a database of a Redis
// server.
//
// Measured on 2 cores of 2 GHz: inside the process, Set takes 0.2 to 0.3 ms, and some 1,000 timers
// fire per second. 100,000 pending timers take 84 MB and a sixth of a core (10,000: 9 MB and 3 %,
// none: 2 %, before the first: nothing), because asynq asks for due timers every quarter of a
// second, and miniredis sorts all of them to answer. So set a timer only when its time is near.
// With a Redis server, Set takes 0.03 to 0.08 ms, 2,000 timers due at once fire within 0.2 s, and
// 100,000 take 65 MB there, and 8 MB and 1 % of a core here.
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

	pollInterval    = 50 * time.Millisecond  // between polls for due timers when there were none
	forwardInterval = 250 * time.Millisecond // between polls for timers that become due
	healthInterval  = 2 * time.Second
	cleanInterval   = time.Second
	staleInterval   = 5 * time.Second
	lateTimer       = time.Minute     // after which a timer that did not fire is forgotten
	stopGrace       = 2 * time.Second // for asynq's last writes when Run ends
	handlers        = 8               // timers whose end is written at the same time
)

// Config configures where the timers are stored.
type Config struct {
	// URL of a Redis server: redis://[USER:PASSWORD@]HOST:PORT[/DB], or rediss:// for TLS. If it is
	// empty, timers are stored inside the process.
	URL string
	// CA is a PEM file of trusted certificate authorities for rediss://, instead of the system's.
	CA  string
	Log *slog.Logger
}

// Timers wakes its user at set times. One process at a time should call Run: it is the one that is
// woken.
type Timers struct {
	log      *slog.Logger
	options  *redis.Options
	embedded *embedded // nil with a Redis server
	client   *redis.Client
	enqueuer atomic.Pointer[asynq.Client]
	due      dueKeys
	used     func()        // called before a timer is stored in Redis
	first    chan struct{} // closed by used

	mu       sync.Mutex
	set      map[string]int64 // times of keys set by this process and not yet fired, in Unix milliseconds
	replaced []string         // task ids of replaced timers
}

// Open opens the timers. Run waits for a Redis server that does not answer. Open returns an error
// if the server rejects the credentials, or its certificate is not trusted.
func Open(ctx context.Context, cfg Config) (*Timers, error) {
	quietRedis()
	t := &Timers{
		log: cfg.Log, set: map[string]int64{},
		due: dueKeys{wake: make(chan struct{}, 1), keys: map[string]struct{}{}}, first: make(chan struct{}),
	}
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
	t.resetClient()
	if t.embedded != nil {
		return t, nil
	}
	t.used() // it may hold timers of an earlier process
	ctx, cancel := context.WithTimeout(ctx, SetTimeout)
	defer cancel()
	if err := t.client.Ping(ctx).Err(); isRejection(err) {
		t.Close()
		return nil, fmt.Errorf("connect to Redis: %w", err)
	} else if err != nil {
		t.log.Warn("Redis unreachable, timers are late until it answers", "error", err)
	}
	return t, nil
}

// isRejection reports whether waiting does not help against err.
func isRejection(err error) bool {
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

// Close releases the connections. Run must have returned.
func (t *Timers) Close() {
	_ = t.client.Close() // the connections are closed either way
	if t.embedded != nil {
		t.embedded.close()
	}
}

// resetClient makes asynq register its queue in Redis again with the next timer, which it does once
// per client. A flushed or replaced Redis server lacks the registration, and without it timers
// cannot be removed.
func (t *Timers) resetClient() { t.enqueuer.Store(asynq.NewClientFromRedisClient(t.client)) }

// Set sets the timer of key, replacing its earlier time. A time in the past wakes immediately,
// without Redis. Set returns after [SetTimeout] at the latest. After an error the wake-up may still
// come.
func (t *Timers) Set(ctx context.Context, key string, at time.Time) error {
	if !at.After(time.Now()) {
		t.due.add(key)
		return nil
	}
	milli := at.Add(time.Millisecond - 1).UnixMilli() // rounded up
	t.mu.Lock()
	old, known := t.set[key]
	t.set[key] = milli
	t.mu.Unlock()
	t.used()
	ctx, cancel := context.WithTimeout(ctx, SetTimeout)
	defer cancel()
	if err := t.enqueue(ctx, key, milli); ctx.Err() != nil && err != nil {
		return fmt.Errorf("set timer: no confirmation by Redis: %w", ctx.Err()) // which asynq does not wrap
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
		return nil // it is set already
	}
	if err == nil && t.embedded != nil {
		t.embedded.created.Add(1)
	}
	return err
}

// timerID returns the task id of a key's timer. It contains the time, so that a timer whose end
// could not be written yet does not block the next timer of its key.
func timerID(key string, milli int64) string { return strconv.FormatInt(milli, 10) + "." + key }

func parseTimerID(id string) (key string, milli int64, err error) {
	first, key, found := strings.Cut(id, ".")
	if !found {
		return "", 0, errors.New("it contains no time")
	}
	milli, err = strconv.ParseInt(first, 10, 64)
	return key, milli, err
}

// Run calls wake with due keys, one at a time, until ctx is done. It survives the loss of the Redis
// server, and always returns nil. Keys that become due while wake runs are collected, each once.
func (t *Timers) Run(ctx context.Context, wake func(key string)) error {
	ctx, stop := context.WithCancel(ctx)
	var waking sync.WaitGroup
	defer waking.Wait()
	defer stop()
	waking.Go(func() { t.due.run(ctx, wake) })
	select {
	case <-t.first: // until then, finding nothing would cost memory and time
		return t.find(ctx)
	case <-ctx.Done():
		return nil
	}
}

// find lets asynq find due timers until ctx is done.
func (t *Timers) find(ctx context.Context) error {
	conns := &cuttableDialer{dial: t.options.Dialer, conns: map[*cuttableConn]struct{}{}}
	options := *t.options
	options.Dialer = conns.open
	client := redis.NewClient(&options)
	defer func() { _ = client.Close() }()
	log := &taskLog{log: t.log}
	server := asynq.NewServerFromRedisClient(client, asynq.Config{
		Concurrency: handlers, Queues: map[string]int{queueName: 1}, Logger: log, LogLevel: asynq.DebugLevel,
		TaskCheckInterval: pollInterval, DelayedTaskCheckInterval: forwardInterval, ShutdownTimeout: stopGrace,
		HealthCheckInterval: healthInterval, HealthCheckFunc: log.health,
	})
	if err := server.Start(asynq.HandlerFunc(t.fire)); err != nil {
		return fmt.Errorf("start asynq: %w", err)
	}
	var cleaning sync.WaitGroup
	cleaning.Go(func() { t.clean(ctx, asynq.NewInspectorFromRedisClient(client)) })
	<-ctx.Done()
	cut := time.AfterFunc(stopGrace, conns.cut) // do not wait for a Redis that does not answer
	server.Shutdown()
	cleaning.Wait()
	cut.Stop()
	return nil
}

// fire handles a timer that asynq reports as due. asynq counts in whole seconds, so that it may be
// early by one.
func (t *Timers) fire(ctx context.Context, _ *asynq.Task) error {
	id, _ := asynq.GetTaskID(ctx)
	key, milli, err := parseTimerID(id)
	if err != nil {
		t.log.Warn("malformed timer dropped", "id", id, "error", err)
		return nil // asynq keeps a task that fails
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

// clean removes leftovers of asynq, Redis and miniredis that are of no further use, until ctx is
// done.
func (t *Timers) clean(ctx context.Context, inspector *asynq.Inspector) {
	tick := time.NewTicker(cleanInterval)
	defer tick.Stop()
	last, staleRemoved := time.Now(), time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := time.Now()
		if t.embedded != nil {
			t.embedded.age(now.Sub(last))
			if t.embedded.created.Load() >= t.embedded.life {
				t.renew(ctx)
			}
		}
		last = now
		t.removeReplaced(ctx, inspector)
		if now.Sub(staleRemoved) >= staleInterval {
			t.removeStale(now, inspector)
			staleRemoved = now
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
		case errors.Is(err, asynq.ErrQueueNotFound): // until the next timer is set
			t.resetClient()
			t.mu.Lock()
			t.replaced = append(t.replaced, ids[i:]...)
			t.mu.Unlock()
			return
		case errors.Is(err, asynq.ErrTaskNotFound), err == nil:
		default: // it has fired, or is removed when it does
			t.log.Debug("replaced timer not removed", "left", len(ids)-i, "error", err)
			return
		}
	}
}

// removeStale removes timers that asynq archived because their end could not be written while Redis
// was away, registrations of dead asynq servers, and lost timers.
func (t *Timers) removeStale(now time.Time, inspector *asynq.Inspector) {
	t.resetClient()
	_, err := inspector.DeleteAllArchivedTasks(queueName)
	_, listErr := inspector.Servers() // removes registrations of those that are gone
	if err := errors.Join(err, listErr); err != nil {
		t.log.Debug("stale timers not removed, will retry", "error", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, milli := range t.set {
		if now.Sub(time.UnixMilli(milli)) > lateTimer {
			delete(t.set, key)
		}
	}
}

// renew replaces the embedded Redis by a new one with the same timers.
func (t *Timers) renew(ctx context.Context) {
	t.embedded.renew()
	t.resetClient()
	t.mu.Lock()
	pending := maps.Clone(t.set)
	t.replaced = nil
	t.mu.Unlock()
	for key, milli := range pending {
		if err := t.enqueue(ctx, key, milli); err != nil {
			if ctx.Err() == nil {
				t.log.Warn("timers not copied to the new embedded Redis, may be late", "error", err)
			}
			break
		}
	}
	t.embedded.created.Store(0)
}

// dueKeys are due keys that have not been woken yet.
type dueKeys struct {
	mu   sync.Mutex
	keys map[string]struct{}
	wake chan struct{}
}

func (r *dueKeys) add(key string) {
	r.mu.Lock()
	r.keys[key] = struct{}{}
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *dueKeys) run(ctx context.Context, wake func(key string)) {
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
