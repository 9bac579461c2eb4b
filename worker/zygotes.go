package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/pool"
)

const (
	// often is how many executions of a kind an API key must ask for, per second, to have a parent: it costs as much as a jail or two to
	// make, and as much memory to keep.
	often = 2.0
	// lately is the time within which whoever asks does not lose its parent to another.
	lately = 5 * time.Second
	// memoryOfParent is what a parent is taken to hold, in bytes, until it has been made.
	memoryOfParent = 16 << 20
	// A parent is replaced after so many forks of its interpreter, or so long a time, since the hash seed of that and its layout of memory
	// are those of all forks.
	forksOfParent, ageOfParent = 1000, 10 * time.Minute
	// idle is how long a parent is kept that nobody asks for.
	idle = 2 * time.Minute
	// The first pause after a parent could not be made, and the longest: it doubles.
	retry, mostRetry = 5 * time.Second, 5 * time.Minute
	// makeTimeout is how long it may take to make one, with all that it imports.
	makeTimeout = 30 * time.Second
)

// zygotePool holds the jails that others are forked from: one for each kind that an API key asks for often, for that key alone.
type zygotePool struct {
	most   int
	memory int64 // bytes that all may hold
	log    *slog.Logger

	mu       sync.Mutex
	ctx      context.Context // ends when none is made any more
	families map[string]*family
	retired  int   // that still have jails
	held     int64 // bytes, by them
	making   sync.WaitGroup
}

// family is what is known of one kind.
type family struct {
	asked  pool.Rate
	parent *ancestor
	making bool

	failed  time.Duration // the pause after the last failure; 0 after a success
	retryAt time.Time
}

// ancestor is a parent, for as long as it is used.
type ancestor struct {
	jail.Zygote
	size  int64 // bytes
	born  time.Time
	forks int            // of its interpreter that were asked of it
	used  sync.WaitGroup // by forks that are being made
}

// ask reports whether a kind has a parent, and sees to it that it gets one, or a new one, if it should.
func (p *zygotePool) ask(k kind) bool {
	name, now := k.name(), time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.families[name]
	if f == nil {
		f = &family{}
		p.families[name] = f
	}
	f.asked.Ask(now)
	if f.parent != nil && !f.parent.Alive() {
		p.retire(f)
	}
	wanted := f.asked.At(now) >= often || len(k.sandbox.Preload) > 0
	worn := f.parent != nil && (f.parent.forks >= forksOfParent || now.Sub(f.parent.born) > ageOfParent)
	if wanted && (f.parent == nil || worn) && !f.making && now.After(f.retryAt) && p.ctx.Err() == nil && p.room(f) {
		f.making = true
		p.making.Go(func() { p.make(f, k) })
	}
	return f.parent != nil
}

// take gives the parent of the family of a kind, which is not closed before done is called with what came of it; nil if it has none.
func (p *zygotePool) take(k kind) (parent jail.Zygote, done func(err error)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.families[k.family().name()]
	if f == nil || f.parent == nil {
		return nil, nil
	}
	a := f.parent
	if k.language == jail.Forkable {
		a.forks++
	}
	a.used.Add(1)
	return a, func(err error) {
		defer a.used.Done()
		if errors.Is(err, jail.ErrFull) || errors.Is(err, context.Canceled) {
			return
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if err == nil {
			f.failed = 0
		} else if f.parent == a {
			p.retire(f)
			f.fail()
		}
	}
}

// make makes a parent, in the place of the one there is.
func (p *zygotePool) make(f *family, k kind) {
	ctx, cancel := context.WithTimeout(p.ctx, makeTimeout)
	defer cancel()
	parent, err := k.parent(ctx)
	size := int64(0)
	if err == nil {
		size, err = parent.Memory()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	f.making = false
	a := &ancestor{Zygote: parent, size: size, born: time.Now()}
	if _, held := p.kept(f); err == nil && held+size > p.memory {
		err = fmt.Errorf("it holds %d bytes, with which all would hold more than the %d that they may", size, p.memory)
	}
	if err == nil {
		p.retire(f)
		f.parent = a
		return
	}
	f.fail()
	if p.ctx.Err() == nil {
		p.log.Warn("a jail to fork from could not be made, programs of its kind start in jails of their own", "kind", k.name(), "error", err,
			"again_in", f.failed)
	}
	if parent != nil {
		p.close(a)
	}
}

// fail puts off the next try. What is made anew and fails again and again is put off longer and longer.
func (f *family) fail() {
	f.failed = min(max(2*f.failed, retry), mostRetry)
	f.retryAt = time.Now().Add(f.failed)
}

// kept is how many parents there are but that of f, and are being made, and the bytes that they hold.
func (p *zygotePool) kept(f *family) (count int, held int64) {
	count, held = p.retired, p.held
	for _, o := range p.families {
		if o == f {
			continue
		}
		if o.parent != nil {
			count, held = count+1, held+o.parent.size
		} else if o.making {
			count, held = count+1, held+memoryOfParent
		}
	}
	return count, held
}

// room reports whether there is room for a parent of f. If not, it gives up the one that was not asked for longest, if that is idle.
func (p *zygotePool) room(f *family) bool {
	if count, held := p.kept(f); count < p.most && held+memoryOfParent <= p.memory {
		return true
	}
	var other *family
	for _, o := range p.families {
		if o != f && o.parent != nil && (other == nil || o.asked.Last().Before(other.asked.Last())) {
			other = o
		}
	}
	if other != nil && time.Since(other.asked.Last()) > lately {
		p.retire(other)
	}
	return false // until the next one asks
}

// run gives up parents that nobody asks for, until ctx ends, and then all; nobody may ask after that.
func (p *zygotePool) run(ctx context.Context) {
	look := time.NewTicker(idle / 4)
	defer look.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-look.C:
			p.sweep(time.Now().Add(-idle))
		}
	}
	p.making.Wait()
	p.sweep(time.Now())
	p.making.Wait()
}

// sweep forgets the kinds that nobody has asked for since a time.
func (p *zygotePool) sweep(since time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, f := range p.families {
		if !f.asked.Last().After(since) && !f.making {
			p.retire(f)
			delete(p.families, name)
		}
	}
}

// retire gives up the parent of a kind. It lives until the last of its jails has ended.
func (p *zygotePool) retire(f *family) {
	if f.parent != nil {
		p.close(f.parent)
		f.parent = nil
	}
}

// close counts a parent until its last jail has ended.
func (p *zygotePool) close(parent *ancestor) {
	p.retired++
	p.held += parent.size
	p.making.Go(func() {
		defer func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.retired--
			p.held -= parent.size
		}()
		parent.used.Wait()
		if err := parent.Close(); err != nil {
			p.log.Error("a jail to fork from was not given back whole", "error", err)
		}
	})
}
