package timer_test

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/hibiken/asynq"

	"github.com/bullpen-run/bullpen/scheduler/timer"
)

const queue = "bullpen-timers"

func TestWakesAtItsTime(t *testing.T) {
	t.Parallel()
	for name, url := range map[string]string{"embedded": "", "Redis": "redis://" + miniredis.RunT(t).Addr()} {
		w := open(t, url)
		at := map[string]time.Time{}
		for i, key := range []string{"now.1", "with space", "soon", "later.é"} {
			at[key] = w.setIn(t, key, time.Duration(i)*700*time.Millisecond)
		}
		for range at {
			select {
			case key := <-w.woken:
				if time.Now().Before(at[key]) {
					t.Errorf("%s: %s is woken %s early", name, key, time.Until(at[key]))
				}
				delete(at, key)
			case <-time.After(patience):
				t.Fatalf("%s: not woken: %v", name, at)
			}
		}
	}
}

func TestEmbeddedHasNoSocket(t *testing.T) { // not parallel: other tests open sockets
	sockets := func() (n int) {
		dir, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range dir {
			if to, err := os.Readlink(filepath.Join("/proc/self/fd", fd.Name())); err == nil &&
				strings.HasPrefix(to, "socket:") {
				n++
			}
		}
		return n
	}
	before := sockets()
	w := open(t, "")
	w.setIn(t, "key", 100*time.Millisecond)
	w.awaitWake(t, "key")
	if n := sockets(); n > before {
		t.Errorf("%d sockets were opened", n-before)
	}
}

func TestAKeyHasOneTimer(t *testing.T) {
	t.Parallel()
	redis := miniredis.RunT(t)
	w := open(t, "redis://"+redis.Addr())
	var at time.Time
	for i := range 50 {
		at = w.setIn(t, "key", time.Hour-time.Duration(i)*time.Second)
	}
	for range 50 { // with the same time again
		if err := w.Set(t.Context(), "key", at); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "one timer is left of 50", func() bool { return len(timersIn(redis)) == 1 })
	if key := timersIn(redis)[0]; !strings.Contains(key, fmt.Sprint(at.Add(time.Millisecond-1).UnixMilli())) {
		t.Errorf("%s is not the last that was set", key)
	}
	w.setIn(t, "key", 100*time.Millisecond) // earlier than before
	w.awaitWake(t, "key")
	eventually(t, "none is left after it fired", func() bool { return len(timersIn(redis)) == 0 })
}

func TestNothingIsLeftBehind(t *testing.T) {
	t.Parallel()
	redis := miniredis.RunT(t)
	w := open(t, "redis://"+redis.Addr())
	for i := range 500 {
		w.setIn(t, fmt.Sprint(i), time.Second)
	}
	for range 500 {
		select {
		case <-w.woken:
		case <-time.After(patience):
			t.Fatal("not all were woken")
		}
	}
	eventually(t, "Redis holds no timer", func() bool { return len(timersIn(redis)) == 0 })
	if n := w.Remembered(); n != 0 {
		t.Errorf("%d timers are remembered", n)
	}
	w.stop()
	for _, key := range redis.Keys() {
		switch {
		case key == "asynq:queues", strings.Contains(key, ":processed"):
		default:
			t.Errorf("%s is left", key)
		}
	}
}

// asynq archives a timer whose end could not be written only after one and a half minutes: this
// test fills the archive itself.
func TestArchiveIsEmptied(t *testing.T) {
	t.Parallel()
	redis := miniredis.RunT(t)
	w := open(t, "redis://"+redis.Addr())
	w.setIn(t, "key", time.Hour)
	inspector := asynq.NewInspector(asynq.RedisClientOpt{Addr: redis.Addr()})
	defer func() { _ = inspector.Close() }()
	scheduled, err := inspector.ListScheduledTasks(queue)
	if err != nil || len(scheduled) != 1 {
		t.Fatalf("%v, %v", scheduled, err)
	}
	if err := inspector.ArchiveTask(queue, scheduled[0].ID); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the archive is empty", func() bool { return len(timersIn(redis)) == 0 })
}

func TestMalformedTimerIsDropped(t *testing.T) {
	t.Parallel()
	redis := miniredis.RunT(t)
	w := open(t, "redis://"+redis.Addr())
	client := asynq.NewClient(asynq.RedisClientOpt{Addr: redis.Addr()})
	defer func() { _ = client.Close() }()
	if _, err := client.Enqueue(asynq.NewTask("other", nil), asynq.TaskID("other"), asynq.Queue(queue)); err != nil {
		t.Fatal(err)
	}
	w.log.waitFor(t, "id=other")
	eventually(t, "it is gone", func() bool { return len(timersIn(redis)) == 0 })
}

func TestSlowUserDoesNotBlock(t *testing.T) {
	t.Parallel()
	redis := miniredis.RunT(t)
	w := &world{woken: make(chan string, 1000)}
	w.openWith(t, "redis://"+redis.Addr())
	entered, leave := make(chan struct{}, 1000), make(chan struct{})
	w.run(t, func(key string) {
		entered <- struct{}{}
		<-leave
		w.woken <- key
	})
	w.setIn(t, "first", 0)
	<-entered
	for range 3 { // timers that fire while nothing receives them
		for i := range 20 {
			w.setIn(t, fmt.Sprint(i), 50*time.Millisecond)
		}
		eventually(t, "timers fire although none is received", func() bool {
			return len(timersIn(redis)) == 0 && w.Remembered() == 0
		})
	}
	w.setIn(t, "last", 0)
	close(leave)
	count := map[string]int{}
	for len(count) < 22 {
		select {
		case key := <-w.woken:
			count[key]++
		case <-time.After(patience):
			t.Fatalf("woken: %v", count)
		}
	}
	w.stop()
	close(w.woken)
	for key := range w.woken {
		count[key]++
	}
	for key, n := range count {
		if n > 2 { // one may have been in flight
			t.Errorf("%s is woken %d times", key, n)
		}
	}
}

func TestEmbeddedIsReplacedWithItsTimers(t *testing.T) {
	t.Parallel()
	w := &world{woken: make(chan string, 1000)}
	w.openWith(t, "")
	w.ShortLife(50)
	first := w.Embedded()
	for i := range 60 {
		w.setIn(t, fmt.Sprint(i), 6*time.Second)
	}
	w.run(t, func(key string) { w.woken <- key })
	eventually(t, "it is replaced", func() bool { return w.Embedded() != first })
	if n := w.Remembered(); n == 0 {
		t.Fatal("the timers fired before it was replaced")
	}
	missing := map[string]bool{}
	for i := range 60 {
		missing[fmt.Sprint(i)] = true
	}
	for len(missing) > 0 {
		select {
		case key := <-w.woken:
			delete(missing, key)
		case <-time.After(patience):
			t.Fatalf("not woken: %v", missing)
		}
	}
}

func TestRedisThatIsKilledAndRestarted(t *testing.T) {
	t.Parallel()
	redis := miniredis.RunT(t)
	p := newProxy(t, redis.Addr())
	w := open(t, p.url())
	w.setIn(t, "before", 2*time.Second)
	redis.Close()
	w.log.waitFor(t, "Redis unreachable")
	if err := w.Set(t.Context(), "meanwhile", time.Now().Add(time.Minute)); err == nil {
		t.Error("a timer was set without Redis")
	}
	w.setIn(t, "due", 0) // needs none
	w.awaitWake(t, "due")
	if err := redis.Restart(); err != nil {
		t.Fatal(err)
	}
	w.awaitWake(t, "before")
	w.setWhenPossible(t, "after", 100*time.Millisecond)
	w.awaitWake(t, "after")
	w.log.waitFor(t, "Redis reachable")
}

func TestRedisThatIsFlushed(t *testing.T) {
	t.Parallel()
	redis := miniredis.RunT(t)
	w := open(t, "redis://"+redis.Addr())
	at := w.setIn(t, "key", time.Hour)
	redis.FlushAll()
	if err := w.Set(t.Context(), "key", at); err != nil { // what a reconciler does
		t.Fatal(err)
	}
	if n := len(timersIn(redis)); n != 1 {
		t.Errorf("%d timers after it was set again", n)
	}
	soon := w.setIn(t, "key", 100*time.Millisecond)
	w.awaitWake(t, "key")
	eventually(t, "the replaced timer is removed too", func() bool {
		if err := w.Set(t.Context(), "other", soon.Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		return len(timersIn(redis)) == 1
	})
}

func TestFailoverToAnEmptyRedis(t *testing.T) {
	t.Parallel()
	one, two := miniredis.RunT(t), miniredis.RunT(t)
	p := newProxy(t, one.Addr())
	w := open(t, p.url())
	at := w.setIn(t, "key", 3*time.Second)
	p.to(two.Addr())
	eventually(t, "the timer is set in the other", func() bool {
		return w.Set(t.Context(), "key", at) == nil && len(timersIn(two)) > 0
	})
	w.awaitWake(t, "key")
	eventually(t, "it is gone from there", func() bool { return len(timersIn(two)) == 0 })
}

func TestRedisThatIsSlow(t *testing.T) {
	t.Parallel()
	redis := miniredis.RunT(t)
	p := newProxy(t, redis.Addr())
	w := open(t, p.url())
	w.setIn(t, "before", 4*time.Second)
	p.delay.Store(int64(timer.SetTimeout + time.Second))
	if err := w.Set(t.Context(), "unconfirmed", time.Now().Add(time.Hour)); err == nil {
		t.Error("a timer was set that Redis did not confirm in time")
	}
	w.awaitWake(t, "before")
	p.delay.Store(0)
	w.setWhenPossible(t, "after", 100*time.Millisecond)
	w.awaitWake(t, "after")
}

func TestRedisThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	redis := miniredis.RunT(t)
	p := newProxy(t, redis.Addr())
	w := open(t, p.url())
	w.setIn(t, "key", 100*time.Millisecond)
	w.awaitWake(t, "key")
	p.unresponsive.Store(true)
	returned := make(chan error, 1)
	go func() { returned <- w.Set(t.Context(), "lost", time.Now().Add(time.Minute)) }()
	select {
	case err := <-returned:
		if err == nil {
			t.Error("a timer was set without an answer")
		}
	case <-time.After(patience):
		t.Fatal("Set waits for Redis without end")
	}
	w.stop() // Run returns too
}

func TestAbsentRedisIsWaitedFor(t *testing.T) {
	t.Parallel()
	redis := miniredis.RunT(t)
	p := newProxy(t, "127.0.0.1:1")
	w := open(t, p.url())
	w.log.waitFor(t, "Redis unreachable")
	p.to(redis.Addr())
	w.setWhenPossible(t, "key", 100*time.Millisecond)
	w.awaitWake(t, "key")
}

func TestRunAgain(t *testing.T) {
	t.Parallel()
	w := open(t, "")
	w.setIn(t, "key", time.Second)
	w.stop()
	w.run(t, func(key string) { w.woken <- key })
	w.awaitWake(t, "key")
}

func TestCredentials(t *testing.T) {
	t.Parallel()
	redis := miniredis.RunT(t)
	redis.RequireUserAuth("bullpen", "hunter2")
	w := open(t, "redis://bullpen:hunter2@"+redis.Addr()+"/1")
	w.setIn(t, "key", 100*time.Millisecond)
	w.awaitWake(t, "key")
	for _, user := range []string{"bullpen:hunter3@", ""} {
		_, err := timer.Open(t.Context(),
			timer.Config{URL: "redis://" + user + redis.Addr(), Log: slog.New(slog.DiscardHandler)})
		if err == nil || strings.Contains(err.Error(), "hunter") {
			t.Errorf("with %q: %v", user, err)
		}
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	cert, ca := certificate(t)
	redis := miniredis.NewMiniRedis()
	if err := redis.StartTLS(
		&tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(redis.Close)
	cfg := timer.Config{URL: "rediss://" + redis.Addr(), CA: ca, Log: slog.New(slog.DiscardHandler)}
	timers, err := timer.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer timers.Close()
	w := &world{Timers: timers, woken: make(chan string, 10)}
	w.run(t, func(key string) { w.woken <- key })
	w.setIn(t, "key", 100*time.Millisecond)
	w.awaitWake(t, "key")
	w.stop()
	none := filepath.Join(t.TempDir(), "none.pem")
	if err := os.WriteFile(none, []byte("none"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, cfg := range map[string]timer.Config{
		"x509":               {URL: cfg.URL},
		"no such file":       {URL: cfg.URL, CA: "/nonexistent"},
		"no PEM certificate": {URL: cfg.URL, CA: none},
		"need a rediss":      {URL: "redis://" + redis.Addr(), CA: ca},
		"write redis://":     {URL: "http://hunter2@x"},
	} {
		cfg.Log = slog.New(slog.DiscardHandler)
		if _, err := timer.Open(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), want) ||
			strings.Contains(err.Error(), "hunter2") {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	redis := miniredis.RunT(t)
	redis.Server().SetPreHook(func(c *server.Peer, cmd string, _ ...string) bool {
		if cmd == "INFO" { // miniredis reports less
			c.WriteBulk("# Server\r\nredis_version:7.0.15\r\n\r\n# Memory\r\nmaxmemory_policy:allkeys-lru\r\n")
		}
		return cmd == "INFO"
	})
	got, err := timer.Check(t.Context(), timer.Config{URL: "redis://" + redis.Addr()})
	if err != nil || got.Version != "7.0.15" || got.Policy != "allkeys-lru" || got.Encrypted {
		t.Errorf("got %+v, %v", got, err)
	}
	redis.RequireAuth("hunter2")
	if _, err := timer.Check(t.Context(), timer.Config{URL: "redis://:wrong@" + redis.Addr()}); err == nil ||
		strings.Contains(err.Error(), "hunter2") {
		t.Errorf("got %v", err)
	}
}
