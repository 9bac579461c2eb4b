// Package pool keeps prewarmed jails, each for one use.
//
// The number of jails of a key follows the demand for it: as many as are requested while one is
// being created, as many as were missing recently, and some spare ones, for as long as the key is
// in use. The pool creates one jail at a time, and rarely while programs run that this would slow
// down. A caller that finds no prewarmed jail creates its own.
package pool

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync"
	"time"
)

const (
	// assumedMemory is the assumed memory of a jail, in bytes, until one of its key has been created.
	assumedMemory = 16 << 20
	// forgetAfter is how long a key is kept after its last request.
	forgetAfter = 10 * time.Minute
	// maxAge is how long a jail may wait. It limits how stale its copies of the host's files can
	// be, such as time zones and certificates.
	maxAge = 15 * time.Minute
	// sweepInterval is the pause between two sweeps for dead and expired jails.
	sweepInterval = 15 * time.Second
	// firstRetry is the pause after a failure, which doubles with each further failure up to maxRetry.
	firstRetry, maxRetry = time.Second, 2 * time.Minute
	// quietTime is how long executions have the machine to themselves: a few times what creating a
	// jail takes.
	quietTime = 20 * time.Millisecond
	// missMemory is how long a miss keeps another jail in the pool, and how long a surplus jail
	// stays.
	missMemory = 2 * time.Minute
)

var (
	// ErrGone is returned by a function that can create no more jails, because their source is
	// gone. The pool forgets the key until its next request.
	ErrGone = errors.New("the source of such jails is gone")
	// ErrFull is returned by a function that cannot create more jails than exist.
	ErrFull = errors.New("the maximum number of such jails exists")
)

// Jail is what a pool holds.
type Jail interface {
	// Alive reports whether the jail can still be used.
	Alive() bool
	// Memory returns the memory that the jail uses, in bytes.
	Memory() (int64, error)
	// Close discards the jail unused.
	Close() error
}

// Config configures a pool.
type Config struct {
	Cores  int   // processors
	Spare  int   // jails of each key in addition to those that the rate demands
	Most   int   // limit of jails, of all keys together
	Memory int64 // limit of the memory that they use, in bytes
	Log    *slog.Logger
}

// Pool holds jails under keys: all jails of a key are interchangeable. Its methods may be called
// concurrently.
type Pool[J Jail] struct {
	cfg  Config
	wake chan struct{} // there may be something to do

	mu          sync.Mutex
	queues      map[string]*queue[J]
	count       int       // of prewarmed jails
	memory      int64     // bytes, of prewarmed jails
	sweptAt     time.Time // see sweep
	lastCreated time.Time // or last failure to create one
	busy        int       // programs that run

	closing sync.WaitGroup // discarded jails
}

// queue holds the jails of one key.
type queue[J Jail] struct {
	key    string
	create func(ctx context.Context) (J, error)
	ready  []preparedJail[J] // oldest first
	memory int64             // bytes, of the last one created

	expected bool
	requests Rate
	misses   decayingCount // requests that found no prewarmed jail
	took     time.Duration // to create the last one

	retryPause time.Duration // the pause after the last failure; 0 after a success
	retryAt    time.Time
}

type preparedJail[J Jail] struct {
	jail    J
	memory  int64 // bytes
	created time.Time
}

// New returns an empty pool. Run fills it.
func New[J Jail](cfg Config) *Pool[J] {
	return &Pool[J]{cfg: cfg, wake: make(chan struct{}, 1), queues: map[string]*queue[J]{}}
}

// Get removes a prewarmed jail of key from the pool and returns it. It returns false if there is
// none. From then on, Run creates jails of the key with create, whose context is done when Run's
// is.
func (p *Pool[J]) Get(key string, create func(ctx context.Context) (J, error)) (J, bool) {
	defer p.wakeRun()
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.ensure(key, create)
	now := time.Now()
	q.requests.Add(now)
	for len(q.ready) > 0 {
		last := len(q.ready) - 1
		e := q.ready[last]
		q.ready = q.ready[:last]
		p.uncount(e)
		if e.jail.Alive() {
			return e.jail, true
		}
		p.discard(e.jail)
	}
	if q.took > 0 { // else there was no time to create any
		q.misses.add(now, missMemory)
	}
	var none J
	return none, false
}

// Busy records that an execution needs the machine, from before it requests its jail until done is
// called.
func (p *Pool[J]) Busy() (done func()) {
	add := func(n int) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.busy += n
	}
	add(1)
	return func() {
		add(-1)
		p.wakeRun()
	}
}

// Expect keeps one jail of key prewarmed at all times, before the first request too.
func (p *Pool[J]) Expect(key string, create func(ctx context.Context) (J, error)) {
	defer p.wakeRun()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ensure(key, create).expected = true
}

// Ready returns the number of prewarmed jails.
func (p *Pool[J]) Ready() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count
}

// ensure returns the queue of a key, which it adds if there is none.
func (p *Pool[J]) ensure(key string, create func(ctx context.Context) (J, error)) *queue[J] {
	q := p.queues[key]
	if q == nil {
		q = &queue[J]{key: key, memory: assumedMemory}
		p.queues[key] = q
	}
	q.create = create
	return q
}

func (p *Pool[J]) wakeRun() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Run creates jails until ctx is done, and then closes those that are left.
func (p *Pool[J]) Run(ctx context.Context) {
	for ctx.Err() == nil {
		q, pause := p.next(time.Now())
		if q != nil {
			p.fill(ctx, q)
			continue
		}
		select {
		case <-ctx.Done():
		case <-p.wake:
		case <-time.After(pause):
		}
	}
	p.mu.Lock()
	for _, q := range p.queues {
		p.drop(q, len(q.ready))
	}
	p.mu.Unlock()
	p.closing.Wait()
}

// fill adds a jail to q.
func (p *Pool[J]) fill(ctx context.Context, q *queue[J]) {
	p.mu.Lock()
	create := q.create
	p.mu.Unlock()
	began := time.Now()
	j, err := create(ctx)
	memory := int64(0)
	if err == nil {
		if memory, err = j.Memory(); err != nil {
			err = errors.Join(err, j.Close())
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.lastCreated = now
	switch {
	case errors.Is(err, ErrGone):
		p.remove(q)
		return
	case errors.Is(err, ErrFull):
		q.retryAt = now.Add(firstRetry)
		return
	case err != nil:
		q.retryPause = min(max(2*q.retryPause, firstRetry), maxRetry)
		q.retryAt = now.Add(q.retryPause)
		if ctx.Err() == nil {
			p.cfg.Log.Warn("prewarm failed", "key", q.key, "error", err, "retry_in", q.retryPause)
		}
		return
	}
	q.retryPause, q.took, q.memory = 0, now.Sub(began), memory
	q.ready = append(q.ready, preparedJail[J]{j, memory, now})
	p.count++
	p.memory += memory
}

// next returns the queue to fill now: the one furthest below its target that memory allows. If
// there is none, it returns the time to wait. It closes jails that must no longer be used, and
// those displaced by the next one.
func (p *Pool[J]) next(now time.Time) (next *queue[J], pause time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sweep(now)
	pause = sweepInterval
	lowest := 1.0
	targets := p.targets(now)
	needed := p.neededMemory(targets)
	for q, target := range targets {
		filled := float64(len(q.ready)) / float64(target)
		// The number of jails needs no check: the sum of the targets is within the limit.
		if filled >= lowest || needed+q.memory > p.cfg.Memory {
			continue
		}
		if wait := max(q.retryAt.Sub(now), p.prewarmAfter(q, filled).Sub(now)); wait > 0 {
			pause = min(pause, wait)
		} else {
			next, lowest = q, filled
		}
	}
	if next != nil {
		p.evictFor(next, targets)
	}
	return next, pause
}

// targets returns how many jails each queue should hold, omitting zeros. It is their depth if all
// fit. Otherwise they get one jail each in turn, most recently requested first, so that a busy key
// leaves memory for the others.
func (p *Pool[J]) targets(now time.Time) map[*queue[J]]int {
	depths, targets := map[*queue[J]]int{}, map[*queue[J]]int{}
	for _, q := range p.queues {
		depths[q] = q.depth(p.cfg.Spare, now)
	}
	short := slices.SortedFunc(maps.Keys(depths), func(a, b *queue[J]) int {
		return b.requests.Last().Compare(a.requests.Last())
	})
	count, memory := p.cfg.Most, p.cfg.Memory
	for len(short) > 0 {
		short = slices.DeleteFunc(short, func(q *queue[J]) bool {
			if targets[q] == depths[q] || count == 0 || memory < q.memory {
				return true
			}
			targets[q]++
			count--
			memory -= q.memory
			return false
		})
	}
	return targets
}

// prewarmAfter returns the earliest time at which another jail may be added to q while programs
// run. filled is the filled fraction of q's target. An empty queue is filled immediately. While
// programs run on all processors, jails are quietTime apart. Otherwise a queue that is more than
// half full waits for quietTime after its last request.
func (p *Pool[J]) prewarmAfter(q *queue[J], filled float64) time.Time {
	switch {
	case p.busy == 0 || len(q.ready) == 0:
		return time.Time{}
	case p.busy >= p.cfg.Cores:
		return p.lastCreated.Add(quietTime)
	case filled > 0.5:
		return q.requests.Last().Add(quietTime)
	default:
		return time.Time{}
	}
}

// sweep closes jails that are too old, too many, or dead, and removes keys that are not in use.
func (p *Pool[J]) sweep(now time.Time) {
	if now.Sub(p.sweptAt) < sweepInterval {
		return
	}
	p.sweptAt = now
	for _, q := range p.queues {
		q.ready = slices.DeleteFunc(q.ready, func(e preparedJail[J]) bool {
			unusable := now.Sub(e.created) > maxAge || !e.jail.Alive()
			if unusable {
				p.uncount(e)
				p.discard(e.jail)
			}
			return unusable
		})
		depth := q.depth(p.cfg.Spare, now)
		for len(q.ready) > depth && now.Sub(q.ready[0].created) > missMemory {
			p.drop(q, 1)
		}
		if depth == 0 {
			p.remove(q)
		}
	}
}

// remove closes all jails of a key and forgets it.
func (p *Pool[J]) remove(q *queue[J]) {
	p.drop(q, len(q.ready))
	delete(p.queues, q.key)
}

// depth returns the number of jails that q should hold: twice the requests expected while one is
// created, since requests come in bursts, the recent misses, and the spare ones.
func (q *queue[J]) depth(spare int, now time.Time) int {
	switch {
	case now.Sub(q.requests.Last()) <= forgetAfter:
		return int(math.Round(2*q.requests.PerSecond(now)*q.took.Seconds()+q.misses.value(now, missMemory))) + spare
	case q.expected:
		return 1
	default:
		return 0
	}
}

// neededMemory returns the memory of the jails, in bytes, without those beyond the targets.
func (p *Pool[J]) neededMemory(targets map[*queue[J]]int) int64 {
	memory := p.memory
	for _, q := range p.queues {
		for _, e := range q.ready[:max(0, len(q.ready)-targets[q])] {
			memory -= e.memory
		}
	}
	return memory
}

// evictFor closes jails beyond the targets, those of the least recently requested keys first, until
// memory suffices for another one in q.
func (p *Pool[J]) evictFor(q *queue[J], targets map[*queue[J]]int) {
	for p.count >= p.cfg.Most || p.memory+q.memory > p.cfg.Memory {
		var other *queue[J]
		for _, o := range p.queues {
			if len(o.ready) > targets[o] && (other == nil || o.requests.Last().Before(other.requests.Last())) {
				other = o
			}
		}
		p.drop(other, 1)
	}
}

// drop closes the n oldest jails of q.
func (p *Pool[J]) drop(q *queue[J], n int) {
	for _, e := range q.ready[:n] {
		p.uncount(e)
		p.discard(e.jail)
	}
	q.ready = q.ready[n:]
}

// uncount subtracts a jail that leaves the pool.
func (p *Pool[J]) uncount(e preparedJail[J]) {
	p.count--
	p.memory -= e.memory
}

// discard closes a jail in the background.
func (p *Pool[J]) discard(j J) {
	p.closing.Go(func() {
		if err := j.Close(); err != nil {
			p.cfg.Log.Error("close of a prewarmed jail failed", "error", err)
		}
	})
}
