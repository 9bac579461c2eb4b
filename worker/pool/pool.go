// Package pool keeps jails ready before they are asked for, each for one use.
//
// How many there are of a kind follows what is asked for: as many as come while
// one is made, as were lacking lately, and some spare ones, for as long as the
// kind is used at all. They are made one after another, and seldom while programs run
// that would be slower for it; a pool that has none ready says so, and the caller makes its own.
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
	// memoryOfOne is what a jail is taken to hold, in bytes, until one of its kind has been made.
	memoryOfOne = 16 << 20
	// unused is how long a kind is kept that nobody asks for.
	unused = 10 * time.Minute
	// oldest is how long a jail may wait. What it holds of the host, such as time zones and certificates, is not older than that.
	oldest = 15 * time.Minute
	// look is the pause between two looks for jails that are too old, or dead.
	look = 15 * time.Second
	// backoff is the first pause after a jail could not be made, and mostBackoff the longest: it doubles.
	backoff, mostBackoff = time.Second, 2 * time.Minute
	// aside is how long executions have the machine for themselves: a few times what it takes to make a jail.
	aside = 20 * time.Millisecond
	// remembered is how long a jail that was lacking has another one kept, and one that is not needed any more is.
	remembered = 2 * time.Minute
)

var (
	// ErrGone is returned by a function that cannot make jails any more, since what they are made from is gone. The pool forgets the kind
	// until it is asked for again.
	ErrGone = errors.New("what such jails are made from is gone")
	// ErrFull is returned by a function that cannot make more jails than there are.
	ErrFull = errors.New("there are as many such jails as can be")
)

// Jail is what a pool keeps.
type Jail interface {
	// Alive reports whether it can still be used.
	Alive() bool
	// Memory is what it holds, in bytes.
	Memory() (int64, error)
	// Close gives it back unused.
	Close() error
}

// Config is what a pool must know.
type Config struct {
	Cores  int   // processors
	Spare  int   // jails of each kind to keep beside those that the rate asks for
	Most   int   // jails to keep, of all kinds
	Memory int64 // bytes that all of them may hold
	Log    *slog.Logger
}

// Pool keeps jails of several kinds. Its methods may be called from several goroutines.
type Pool[J Jail] struct {
	cfg  Config
	wake chan struct{} // there may be something to do

	mu     sync.Mutex
	kinds  map[string]*kind[J]
	count  int       // jails that are kept
	held   int64     // bytes, by them
	looked time.Time // for jails that are too old, or dead
	tried  time.Time // to make a jail, the last time
	busy   int       // programs that run

	closing sync.WaitGroup // of jails that are not kept any more
}

// kind is what is known of one kind.
type kind[J Jail] struct {
	name  string
	make  func(ctx context.Context) (J, error)
	ready []kept[J] // oldest first
	size  int64     // bytes, of the last one made

	expected bool
	asked    Rate
	lacking  faded         // that were asked for when none was ready any more
	took     time.Duration // to make the last one

	failed  time.Duration // the pause after the last failure; 0 after a success
	retryAt time.Time
}

type kept[J Jail] struct {
	jail J
	size int64
	born time.Time
}

// New makes an empty pool. Run fills it.
func New[J Jail](cfg Config) *Pool[J] {
	return &Pool[J]{cfg: cfg, wake: make(chan struct{}, 1), kinds: map[string]*kind[J]{}}
}

// Take gives a jail of a kind, which is the caller's then. It is false when none is
// ready. Others of the kind are made with the function from then on, whose context
// ends with Run.
func (p *Pool[J]) Take(name string, with func(ctx context.Context) (J, error)) (J, bool) {
	defer p.tell()
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.want(name, with)
	now := time.Now()
	k.asked.Ask(now)
	for len(k.ready) > 0 {
		last := len(k.ready) - 1
		e := k.ready[last]
		k.ready = k.ready[:last]
		p.forget(e)
		if e.jail.Alive() {
			return e.jail, true
		}
		p.discard(e.jail)
	}
	if k.took > 0 { // else nobody could have made any
		k.lacking.add(now, remembered)
	}
	var none J
	return none, false
}

// Busy tells that somebody waits for an execution, from when its jail is about to be asked for until done is called.
func (p *Pool[J]) Busy() (done func()) {
	count := func(n int) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.busy += n
	}
	count(1)
	return func() {
		count(-1)
		p.tell()
	}
}

// Expect has one jail of a kind made before any is asked for, and one kept for good.
func (p *Pool[J]) Expect(name string, with func(ctx context.Context) (J, error)) {
	defer p.tell()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.want(name, with).expected = true
}

// Ready is how many jails wait.
func (p *Pool[J]) Ready() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count
}

// want finds a kind, or begins to know it.
func (p *Pool[J]) want(name string, with func(ctx context.Context) (J, error)) *kind[J] {
	k := p.kinds[name]
	if k == nil {
		k = &kind[J]{name: name, size: memoryOfOne}
		p.kinds[name] = k
	}
	k.make = with
	return k
}

// tell wakes Run.
func (p *Pool[J]) tell() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Run makes jails until ctx ends, and closes then what is left.
func (p *Pool[J]) Run(ctx context.Context) {
	for ctx.Err() == nil {
		k, until := p.next(time.Now())
		if k != nil {
			p.fill(ctx, k)
			continue
		}
		select {
		case <-ctx.Done():
		case <-p.wake:
		case <-time.After(until):
		}
	}
	p.mu.Lock()
	for _, k := range p.kinds {
		p.drop(k, len(k.ready))
	}
	p.mu.Unlock()
	p.closing.Wait()
}

// fill makes a jail of a kind.
func (p *Pool[J]) fill(ctx context.Context, k *kind[J]) {
	p.mu.Lock()
	with := k.make
	p.mu.Unlock()
	began := time.Now()
	j, err := with(ctx)
	size := int64(0)
	if err == nil {
		if size, err = j.Memory(); err != nil {
			err = errors.Join(err, j.Close())
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.tried = now
	switch {
	case errors.Is(err, ErrGone):
		p.end(k)
		return
	case errors.Is(err, ErrFull):
		k.retryAt = now.Add(backoff)
		return
	case err != nil:
		k.failed = min(max(2*k.failed, backoff), mostBackoff)
		k.retryAt = now.Add(k.failed)
		if ctx.Err() == nil {
			p.cfg.Log.Warn("a jail could not be made ahead, programs of its kind start cold", "kind", k.name, "error", err, "again_in", k.failed)
		}
		return
	}
	k.failed, k.took, k.size = 0, now.Sub(began), size
	k.ready = append(k.ready, kept[J]{j, size, now})
	p.count++
	p.held += size
}

// next is the kind that has the least share of what it should have, of those that there is room for, or how long there may be none. It
// closes what must not be used any more, and what is in the way.
func (p *Pool[J]) next(now time.Time) (next *kind[J], until time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lookAround(now)
	until = look
	least := 1.0
	targets := p.targets(now)
	needed := p.needed(targets)
	for k, target := range targets {
		share := float64(len(k.ready)) / float64(target)
		// Of their number there is always room: all targets are not more than can be kept.
		if share >= least || needed+k.size > p.cfg.Memory {
			continue
		}
		if wait := max(k.retryAt.Sub(now), p.aside(k, share).Sub(now)); wait > 0 {
			until = min(until, wait)
		} else {
			next, least = k, share
		}
	}
	if next != nil {
		p.makeRoom(next, targets)
	}
	return next, until
}

// targets is how many of each kind should be ready, none for those it has not: their depth, if there is room for all. Else they get
// one after the other in turn, those first that were asked for last, so that many of one leave a few of each of the others.
func (p *Pool[J]) targets(now time.Time) map[*kind[J]]int {
	depths, targets := map[*kind[J]]int{}, map[*kind[J]]int{}
	for _, k := range p.kinds {
		depths[k] = k.depth(p.cfg.Spare, now)
	}
	short := slices.SortedFunc(maps.Keys(depths), func(a, b *kind[J]) int { return b.asked.Last().Compare(a.asked.Last()) })
	count, held := p.cfg.Most, p.cfg.Memory
	for len(short) > 0 {
		short = slices.DeleteFunc(short, func(k *kind[J]) bool {
			if targets[k] == depths[k] || count == 0 || held < k.size {
				return true
			}
			targets[k]++
			count--
			held -= k.size
			return false
		})
	}
	return targets
}

// aside is until when programs that run have the machine for themselves, where a kind has such a share of what it should: between two
// jails while they run on all processors, unless none is left, and else from when one was asked for, unless no more than half are left.
func (p *Pool[J]) aside(k *kind[J], share float64) time.Time {
	switch {
	case p.busy == 0 || len(k.ready) == 0:
		return time.Time{}
	case p.busy >= p.cfg.Cores:
		return p.tried.Add(aside)
	case share > 0.5:
		return k.asked.Last().Add(aside)
	default:
		return time.Time{}
	}
}

// lookAround gives up jails that are too old, too many, or dead, and kinds that nobody uses.
func (p *Pool[J]) lookAround(now time.Time) {
	if now.Sub(p.looked) < look {
		return
	}
	p.looked = now
	for _, k := range p.kinds {
		k.ready = slices.DeleteFunc(k.ready, func(e kept[J]) bool {
			bad := now.Sub(e.born) > oldest || !e.jail.Alive()
			if bad {
				p.forget(e)
				p.discard(e.jail)
			}
			return bad
		})
		depth := k.depth(p.cfg.Spare, now)
		for len(k.ready) > depth && now.Sub(k.ready[0].born) > remembered {
			p.drop(k, 1)
		}
		if depth == 0 {
			p.end(k)
		}
	}
}

// end gives up all that is ready of a kind, and forgets it.
func (p *Pool[J]) end(k *kind[J]) {
	p.drop(k, len(k.ready))
	delete(p.kinds, k.name)
}

// depth is how many of a kind should be ready: what is asked for while one is made,
// twice over since requests come in swarms, as many as were lacking in the last one, and the spare ones.
func (k *kind[J]) depth(spare int, now time.Time) int {
	switch {
	case now.Sub(k.asked.Last()) <= unused:
		return int(math.Round(2*k.asked.At(now)*k.took.Seconds()+k.lacking.count(now, remembered))) + spare
	case k.expected:
		return 1
	default:
		return 0
	}
}

// needed is what the jails hold, in bytes, without those that are more than they should be.
func (p *Pool[J]) needed(targets map[*kind[J]]int) int64 {
	held := p.held
	for _, k := range p.kinds {
		for _, e := range k.ready[:max(0, len(k.ready)-targets[k])] {
			held -= e.size
		}
	}
	return held
}

// makeRoom gives up jails that are more than they should be, of the kinds first that were not asked for longest, until there is room for
// one of a kind that has less than it should, and room beside those that all should have.
func (p *Pool[J]) makeRoom(k *kind[J], targets map[*kind[J]]int) {
	for p.count >= p.cfg.Most || p.held+k.size > p.cfg.Memory {
		var other *kind[J]
		for _, o := range p.kinds {
			if len(o.ready) > targets[o] && (other == nil || o.asked.Last().Before(other.asked.Last())) {
				other = o
			}
		}
		p.drop(other, 1)
	}
}

// drop gives up the n oldest of a kind.
func (p *Pool[J]) drop(k *kind[J], n int) {
	for _, e := range k.ready[:n] {
		p.forget(e)
		p.discard(e.jail)
	}
	k.ready = k.ready[n:]
}

// forget no longer counts a jail.
func (p *Pool[J]) forget(e kept[J]) {
	p.count--
	p.held -= e.size
}

// discard closes a jail that is not kept any more.
func (p *Pool[J]) discard(j J) {
	p.closing.Go(func() {
		if err := j.Close(); err != nil {
			p.cfg.Log.Error("a jail that was made ahead was not given back whole", "error", err)
		}
	})
}
