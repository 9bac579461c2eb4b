package pool_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/worker/pool"
)

// fake is a jail that stays alive until the test kills it.
type fake struct {
	w      *jails
	key    string
	dead   atomic.Bool
	closed atomic.Bool
}

func (f *fake) Alive() bool            { return !f.dead.Load() }
func (f *fake) Memory() (int64, error) { return f.w.size, nil }

func (f *fake) Close() error {
	if f.closed.Swap(true) {
		f.w.t.Errorf("a jail was closed twice")
	}
	f.w.add(f.key, -1)
	return nil
}

// jails counts the live jails.
type jails struct {
	t      *testing.T
	size   int64                 // memory of each jail, bytes
	took   time.Duration         // time to make a jail
	broken atomic.Pointer[error] // error that making a jail returns, if not nil
	tries  atomic.Int64

	mu   sync.Mutex
	live map[string]int
	made []*fake
}

// kill marks all jails as dead.
func (w *jails) kill() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.made {
		f.dead.Store(true)
	}
}

func (w *jails) add(key string, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.live[key] += n
}

func (w *jails) count(key string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.live[key]
}

func (w *jails) make(key string) func(context.Context) (*fake, error) {
	return func(ctx context.Context) (*fake, error) {
		w.tries.Add(1)
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(w.took):
		}
		if err := w.broken.Load(); err != nil {
			return nil, *err
		}
		w.add(key, 1)
		f := &fake{w: w, key: key}
		w.mu.Lock()
		defer w.mu.Unlock()
		w.made = append(w.made, f)
		return f, nil
	}
}

// run calls f with a running pool and checks that no jails remain after the pool stops.
func run(t *testing.T, cfg pool.Config, w *jails, f func(p *pool.Pool[*fake])) {
	synctest.Test(t, func(t *testing.T) {
		w.t, w.live = t, map[string]int{}
		if w.size == 0 {
			w.size = 1
		}
		if w.took == 0 {
			w.took = 10 * time.Millisecond
		}
		cfg.Log = slog.New(slog.DiscardHandler)
		if cfg.Cores == 0 {
			cfg.Cores = 1
		}
		if cfg.Memory == 0 {
			cfg.Memory = 1 << 40
		}
		ctx, stop := context.WithCancel(t.Context())
		p := pool.New[*fake](cfg)
		done := make(chan struct{})
		go func() { p.Run(ctx); close(done) }()
		f(p)
		stop()
		<-done
		for key, n := range w.live {
			if n != 0 {
				t.Errorf("%d jails of key %s are left", n, key)
			}
		}
	})
}

// settle sleeps for d and then waits until the pool is idle.
func settle(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// get gets a jail from the pool and closes it. It reports whether one was ready.
func (w *jails) get(p *pool.Pool[*fake], key string) bool {
	j, ok := p.Get(key, w.make(key))
	if ok {
		if j.key != key {
			w.t.Errorf("a jail of key %s for key %s", j.key, key)
		}
		_ = j.Close()
	}
	return ok
}

func TestKeyIsPrewarmedAfterFirstUse(t *testing.T) {
	w := &jails{}
	run(t, pool.Config{Spare: 3, Most: 10}, w, func(p *pool.Pool[*fake]) {
		if w.get(p, "a") {
			t.Error("there was one before the first was asked for")
		}
		settle(time.Minute)
		if w.count("a") != 3 || p.Ready() != 3 {
			t.Errorf("%d are ready, want the spare ones", w.count("a"))
		}
		for range 3 {
			if !w.get(p, "a") {
				t.Error("none was ready")
			}
		}
		if w.get(p, "a") {
			t.Error("one was given twice")
		}
	})
}

func TestExpectedKeyIsPrewarmed(t *testing.T) {
	w := &jails{}
	run(t, pool.Config{Spare: 3, Most: 10}, w, func(p *pool.Pool[*fake]) {
		p.Expect("a", w.make("a"))
		settle(24 * time.Hour)
		if w.count("a") != 1 {
			t.Errorf("%d are ready, want 1", w.count("a"))
		}
	})
}

func TestDepthFollowsDemand(t *testing.T) {
	w := &jails{took: 100 * time.Millisecond}
	run(t, pool.Config{Spare: 1, Most: 100}, w, func(p *pool.Pool[*fake]) {
		for range 100 { // 5 a second, half of what can be made
			w.get(p, "a")
			settle(200 * time.Millisecond)
		}
		settle(time.Second)
		if n := w.count("a"); n < 2 || n > 4 {
			t.Errorf("%d are ready at 5 a second that take 100 ms each", n)
		}
		for range 100 {
			if !w.get(p, "a") {
				t.Error("none was ready")
			}
			settle(200 * time.Millisecond)
		}
	})
}

func TestUnusedKeyIsForgotten(t *testing.T) {
	w := &jails{}
	run(t, pool.Config{Spare: 2, Most: 10}, w, func(p *pool.Pool[*fake]) {
		w.get(p, "a")
		settle(9 * time.Minute)
		if w.count("a") != 2 {
			t.Errorf("%d are ready after 9 minutes", w.count("a"))
		}
		settle(2 * time.Minute)
		if w.count("a") != 0 {
			t.Errorf("%d are ready after 11 minutes", w.count("a"))
		}
	})
}

func TestOldAndDeadJailsAreReplaced(t *testing.T) {
	w := &jails{}
	run(t, pool.Config{Spare: 2, Most: 10}, w, func(p *pool.Pool[*fake]) {
		p.Expect("a", w.make("a"))
		settle(time.Hour)
		if made := w.tries.Load(); made < 3 || made > 5 || w.count("a") != 1 {
			t.Errorf("%d were made in an hour, %d are ready", made, w.count("a"))
		}
		w.kill()
		if w.get(p, "a") {
			t.Error("a dead one was given out")
		}
		settle(time.Minute)
		w.kill()
		settle(time.Minute)
		if !w.get(p, "a") {
			t.Error("dead ones were not replaced")
		}
	})
}

func TestMemoryIsBounded(t *testing.T) {
	w := &jails{size: 30 << 20}
	run(t, pool.Config{Spare: 8, Most: 100, Memory: 100 << 20}, w, func(p *pool.Pool[*fake]) {
		w.get(p, "a")
		settle(time.Minute)
		if w.count("a") != 3 {
			t.Errorf("%d of 30 MiB are ready in 100 MiB", w.count("a"))
		}
		// Jails of another key replace them one by one once that key is requested.
		w.get(p, "b")
		settle(time.Minute)
		if w.count("a")+w.count("b") != 3 || w.count("b") < 1 {
			t.Errorf("%d and %d are ready", w.count("a"), w.count("b"))
		}
	})
}

func TestFailuresAreNotRepeatedAtOnce(t *testing.T) {
	w := &jails{}
	run(t, pool.Config{Spare: 2, Most: 10}, w, func(p *pool.Pool[*fake]) {
		err := errors.New("out of memory")
		w.broken.Store(&err)
		w.get(p, "a")
		settle(5 * time.Minute)
		if n := w.tries.Load(); n < 5 || n > 12 {
			t.Errorf("tried %d times in 5 minutes", n)
		}
		w.broken.Store(nil)
		settle(3 * time.Minute)
		if w.count("a") != 2 {
			t.Errorf("%d are ready when they can be made again", w.count("a"))
		}
	})
}

func TestGoneKeyIsPrewarmedAfterNextRequest(t *testing.T) {
	w := &jails{}
	run(t, pool.Config{Spare: 2, Most: 10}, w, func(p *pool.Pool[*fake]) {
		w.get(p, "a")
		settle(time.Minute)
		err := fmt.Errorf("make a jail: %w", pool.ErrGone)
		w.broken.Store(&err)
		before := w.tries.Load()
		if !w.get(p, "a") {
			t.Error("none was ready")
		}
		settle(time.Hour)
		if n := w.tries.Load() - before; n != 1 || w.count("a") != 0 {
			t.Errorf("tried %d times, and %d are ready", n, w.count("a"))
		}
		w.broken.Store(nil)
		w.get(p, "a")
		settle(100 * time.Millisecond)
		if w.count("a") != 2 {
			t.Errorf("%d are ready when they can be made again", w.count("a"))
		}
	})
}

func TestFullKeyIsRetriedSoon(t *testing.T) {
	w := &jails{}
	run(t, pool.Config{Spare: 2, Most: 10}, w, func(p *pool.Pool[*fake]) {
		err := fmt.Errorf("make a jail: %w", pool.ErrFull)
		w.broken.Store(&err)
		w.get(p, "a")
		settle(time.Minute)
		if n := w.tries.Load(); n < 30 || n > 61 {
			t.Errorf("tried %d times in a minute", n)
		}
		w.broken.Store(nil)
		settle(2 * time.Second)
		if w.count("a") != 2 {
			t.Errorf("%d are ready when the pool has free memory again", w.count("a"))
		}
	})
}

func TestBurstSizeIsRemembered(t *testing.T) {
	w := &jails{}
	run(t, pool.Config{Spare: 2, Most: 40}, w, func(p *pool.Pool[*fake]) {
		w.get(p, "a")
		settle(time.Second)
		for range 30 {
			w.get(p, "a")
		}
		settle(10 * time.Second)
		for i := range 30 {
			if !w.get(p, "a") {
				t.Fatalf("none was ready for the %dth of a swarm as large as the last", i+1)
			}
		}
		settle(9 * time.Minute)
		if n := w.count("a"); n > 4 {
			t.Errorf("%d are ready long after the last swarm", n)
		}
	})
}

func TestPrewarmingIsSlowDuringExecutions(t *testing.T) {
	w := &jails{took: time.Millisecond}
	run(t, pool.Config{Cores: 2, Spare: 30, Most: 40}, w, func(p *pool.Pool[*fake]) {
		done := p.Busy()
		defer p.Busy()()
		w.get(p, "a")
		settle(100 * time.Millisecond)
		if n := w.count("a"); n < 2 || n > 10 {
			t.Errorf("%d were made in 100 ms while two programs ran", n)
		}
		done()
		settle(50 * time.Millisecond)
		if n := w.count("a"); n != 30 {
			t.Errorf("%d were made when one processor had no program", n)
		}
		defer p.Busy()()
		for range 30 {
			if !w.get(p, "a") {
				t.Error("none was ready")
			}
		}
		settle(2 * time.Millisecond)
		if w.count("a") == 0 {
			t.Error("none was made at once when there was none left")
		}
	})
}

func TestNoPrewarmingDuringExecutionsWhileQueueIsFull(t *testing.T) {
	w := &jails{took: time.Millisecond}
	run(t, pool.Config{Cores: 2, Spare: 4, Most: 10}, w, func(p *pool.Pool[*fake]) {
		ready := func(when string, want int) {
			t.Helper()
			settle(10 * time.Millisecond)
			if n := w.count("a"); n != want {
				t.Errorf("%s: %d are ready, want %d", when, n, want)
			}
		}
		w.get(p, "a")
		ready("at first", 4)
		done := p.Busy()
		w.get(p, "a")
		ready("while a program runs", 3)
		done()
		ready("after it", 4)
		defer p.Busy()()
		for range 3 {
			w.get(p, "a")
		}
		ready("while a program runs, and they have become few", 3)
		settle(10 * time.Millisecond)
		ready("while it runs for long", 4)
	})
}

func TestBurstEvictsNoOtherKey(t *testing.T) {
	w := &jails{took: time.Millisecond}
	run(t, pool.Config{Spare: 2, Most: 10}, w, func(p *pool.Pool[*fake]) {
		w.get(p, "a")
		settle(time.Second)
		for range 40 { // more than the pool can keep
			w.get(p, "a")
		}
		settle(time.Second)
		w.get(p, "b")
		settle(time.Second)
		if a, b := w.count("a"), w.count("b"); a != 8 || b != 2 {
			t.Errorf("%d of the key many were asked for, and %d of the other one", a, b)
		}
	})
}

// Taking a jail from a full pool frees one slot. The slot is not refilled with another key,
// because that jail would have to be evicted for one of this key.
func TestFullPoolReplacesEachUsedJail(t *testing.T) {
	w := &jails{took: time.Millisecond}
	run(t, pool.Config{Spare: 4, Most: 10}, w, func(p *pool.Pool[*fake]) {
		for _, key := range []string{"c", "b", "a"} {
			w.get(p, key)
			settle(time.Second)
		}
		for range 40 { // more than the pool can keep
			w.get(p, "a")
		}
		settle(time.Second)
		for _, key := range []string{"a", "c", "a", "b", "a"} {
			tries := w.tries.Load()
			for range 20 {
				if !w.get(p, key) {
					t.Errorf("none of key %s was ready", key)
				}
				settle(100 * time.Millisecond)
			}
			if made := w.tries.Load() - tries; made > 22 {
				t.Errorf("%d were made for 20 of key %s", made, key)
			}
		}
	})
}
