package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/pool"
)

const (
	// minForkRate is the rate of executions per second from which an API key gets a zygote of a
	// pool key. A zygote takes as long to create, and as much memory, as a jail or two.
	minForkRate = 2.0
	// protectedFor is how long after a request a zygote cannot be evicted for another one.
	protectedFor = 5 * time.Second
	// assumedMemory is the assumed memory of a zygote, in bytes, until it has been created.
	assumedMemory = 16 << 20
	// A zygote is replaced after maxForks forks of its interpreter, and at maxZygoteAge: all forks
	// share the interpreter's hash seed and its memory layout.
	maxForks, maxZygoteAge = 1000, 10 * time.Minute
	// evictAfter is how long a zygote is kept after its last request.
	evictAfter = 2 * time.Minute
	// firstRetry is the pause after a failure, which doubles with each further failure up to
	// maxRetry.
	firstRetry, maxRetry = 5 * time.Second, 5 * time.Minute
	// createTimeout limits the creation of a zygote, with its image and all its imports. Importing
	// the largest libraries takes seconds of CPU time, and more real time on a busy machine.
	createTimeout = 2 * time.Minute
)

// zygotePool holds the jails from which others are forked: one for each pool key that an API key
// requests often, used by that API key alone.
type zygotePool struct {
	most     int   // limit of zygotes
	memory   int64 // limit of their memory, in bytes
	log      *slog.Logger
	onCreate func(ctx context.Context, sandbox proto.Sandbox, err error) // Warm.OnZygote

	mu            sync.Mutex
	ctx           context.Context // is done when no more are created
	slots         map[string]*zygoteSlot
	retired       int   // zygotes that still have jails
	retiredMemory int64 // bytes
	background    sync.WaitGroup
}

// zygoteSlot is the state of one pool key.
type zygoteSlot struct {
	requests pool.Rate
	zygote   *zygote // nil if there is none
	creating bool

	retryPause time.Duration // the pause after the last failure; 0 after a success
	retryAt    time.Time
}

// zygote is a jail.Zygote with its use.
type zygote struct {
	jail.Zygote
	memory  int64 // bytes
	created time.Time
	forks   int            // of its interpreter that were requested
	inUse   sync.WaitGroup // forks in progress
}

// request counts a request for k and reports whether there is a zygote to fork from. If the request
// rate justifies it, it starts to create or replace one.
func (p *zygotePool) request(k poolKey) bool {
	name, now := k.String(), time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.slots[name]
	if s == nil {
		s = &zygoteSlot{}
		p.slots[name] = s
	}
	s.requests.Add(now)
	if s.zygote != nil && !s.zygote.Alive() {
		p.retire(s)
	}
	wanted := s.requests.PerSecond(now) >= minForkRate || len(k.sandbox.Preload) > 0
	expired := s.zygote != nil && (s.zygote.forks >= maxForks || now.Sub(s.zygote.created) > maxZygoteAge)
	if wanted && (s.zygote == nil || expired) && !s.creating && now.After(s.retryAt) && p.ctx.Err() == nil &&
		p.hasRoom(s) {
		s.creating = true
		p.background.Go(func() { p.create(s, k) })
	}
	return s.zygote != nil
}

// acquire returns the zygote for k, or nil. The zygote stays open until done is called with the
// result of the fork.
func (p *zygotePool) acquire(k poolKey) (z jail.Zygote, done func(err error)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.slots[k.anyLanguage().String()]
	if s == nil || s.zygote == nil {
		return nil, nil
	}
	acquired := s.zygote
	if k.language == jail.Forkable {
		acquired.forks++
	}
	acquired.inUse.Add(1)
	return acquired, func(err error) {
		defer acquired.inUse.Done()
		if errors.Is(err, jail.ErrFull) || errors.Is(err, context.Canceled) {
			return
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if err == nil {
			s.retryPause = 0
		} else if s.zygote == acquired {
			p.retire(s)
			s.backOff()
		}
	}
}

// create creates the zygote for k, and calls onCreate.
func (p *zygotePool) create(s *zygoteSlot, k poolKey) {
	err := p.replace(s, k)
	if p.onCreate != nil && p.ctx.Err() == nil {
		p.onCreate(p.ctx, k.sandbox, err)
	}
}

// replace creates the zygote of s and retires its predecessor.
func (p *zygotePool) replace(s *zygoteSlot, k poolKey) error {
	ctx, cancel := context.WithTimeout(p.ctx, createTimeout)
	defer cancel()
	created, err := k.createZygote(ctx)
	memory := int64(0)
	if err == nil {
		memory, err = created.Memory()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	s.creating = false
	z := &zygote{Zygote: created, memory: memory, created: time.Now()}
	if _, others := p.usedByOthers(s); err == nil && others+memory > p.memory {
		err = fmt.Errorf("it uses %d bytes, with which all zygotes exceed their limit of %d", memory, p.memory)
	}
	if err == nil {
		p.retire(s)
		s.zygote = z
		return nil
	}
	s.backOff()
	if p.ctx.Err() == nil {
		p.log.Warn("zygote creation failed", "key", k.String(), "error", err, "retry_in", s.retryPause)
	}
	if created != nil {
		p.close(z)
	}
	return err
}

// backOff delays the next attempt. Only a successful fork resets the pause, so a zygote that fails
// again and again is created less and less often.
func (s *zygoteSlot) backOff() {
	s.retryPause = min(max(2*s.retryPause, firstRetry), maxRetry)
	s.retryAt = time.Now().Add(s.retryPause)
}

// usedByOthers returns the number and memory in bytes of all zygotes except those of s, including
// those being created.
func (p *zygotePool) usedByOthers(s *zygoteSlot) (count int, memory int64) {
	count, memory = p.retired, p.retiredMemory
	for _, o := range p.slots {
		if o == s {
			continue
		}
		if o.zygote != nil {
			count, memory = count+1, memory+o.zygote.memory
		} else if o.creating {
			count, memory = count+1, memory+assumedMemory
		}
	}
	return count, memory
}

// hasRoom reports whether there is room for a zygote of s. If not, it evicts the least recently
// requested one, unless that is protected by protectedFor; a later request finds the room.
func (p *zygotePool) hasRoom(s *zygoteSlot) bool {
	if count, memory := p.usedByOthers(s); count < p.most && memory+assumedMemory <= p.memory {
		return true
	}
	var other *zygoteSlot
	for _, o := range p.slots {
		if o != s && o.zygote != nil && (other == nil || o.requests.Last().Before(other.requests.Last())) {
			other = o
		}
	}
	if other != nil && time.Since(other.requests.Last()) > protectedFor {
		p.retire(other)
	}
	return false
}

// run evicts zygotes that are no longer requested, until ctx is done, and then closes all. request
// must not be called after that.
func (p *zygotePool) run(ctx context.Context) {
	ticker := time.NewTicker(evictAfter / 4)
	defer ticker.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-ticker.C:
			p.evict(time.Now().Add(-evictAfter))
		}
	}
	p.background.Wait()
	p.evict(time.Now())
	p.background.Wait()
}

// evict removes the slots whose last request was before a time.
func (p *zygotePool) evict(before time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, s := range p.slots {
		if !s.requests.Last().After(before) && !s.creating {
			p.retire(s)
			delete(p.slots, name)
		}
	}
}

// retire removes the zygote of s. It lives until the last of its jails is gone.
func (p *zygotePool) retire(s *zygoteSlot) {
	if s.zygote != nil {
		p.close(s.zygote)
		s.zygote = nil
	}
}

// close closes z in the background. z counts until its last jail is gone.
func (p *zygotePool) close(z *zygote) {
	p.retired++
	p.retiredMemory += z.memory
	p.background.Go(func() {
		defer func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.retired--
			p.retiredMemory -= z.memory
		}()
		z.inUse.Wait()
		if err := z.Close(); err != nil {
			p.log.Error("zygote close failed", "error", err)
		}
	})
}
