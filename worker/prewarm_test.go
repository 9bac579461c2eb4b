package worker_test

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// laterJobs is a queue whose leases the test sends one at a time.
type laterJobs chan *lease

func (j laterJobs) Take(ctx context.Context) (worker.Lease, error) {
	select {
	case l := <-j:
		return l, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// asker runs executions on one worker inside a synctest bubble.
type asker struct {
	t      *testing.T
	maker  *maker
	queued laterJobs
	starts []worker.Start
}

// ask runs one execution on the worker and returns how its jail was started.
func (a *asker) ask(change func(job *proto.Job)) worker.Start {
	a.t.Helper()
	l := newLease(nil)
	change(l.job)
	a.queued <- l
	synctest.Wait()
	return a.starts[len(a.starts)-1]
}

// asking runs a worker and calls f. It checks that no zygotes remain after the worker stops.
func asking(t *testing.T, f func(a *asker)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		a := &asker{t: t, maker: &maker{}, queued: make(laterJobs)}
		w := &worker.Worker{
			Jobs: a.queued, Jails: a.maker, Images: bashAlone{}, Home: "/home/u", Slots: 1, Log: slog.New(slog.DiscardHandler),
			Warm: worker.Warm{
				Spare: 1, Most: 4, Zygotes: 4, Memory: 1 << 30, Languages: []proto.Language{proto.Python},
				Taken: func(_ proto.Language, s worker.Start) { a.starts = append(a.starts, s) },
			},
			Done: func(*proto.Record) {}, OnHealth: func(error) {},
			Open: func(context.Context, proto.TraceID, int, int64) worker.Output { return output{} },
		}
		done := make(chan error)
		go func() { done <- w.Run(ctx, ctx) }()
		synctest.Wait()
		time.Sleep(time.Second)
		f(a)
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if n := a.maker.parents.Load(); n != 0 {
			t.Errorf("%d jails to fork from are left", n)
		}
	})
}

func TestTheFirstExecutionFindsTheJailThatWasExpected(t *testing.T) {
	asking(t, func(a *asker) {
		if s := a.ask(func(*proto.Job) {}); s != worker.Ready {
			t.Errorf("it started %s", s)
		}
	})
}

// key returns a change that sets a job's API key and then applies more.
func key(id string, more ...func(*proto.Job)) func(*proto.Job) {
	return func(job *proto.Job) {
		job.Key = id
		for _, change := range more {
			change(job)
		}
	}
}

func TestAKeyThatAsksOftenHasItsJailsForked(t *testing.T) {
	strict := func(job *proto.Job) { job.Sandbox.Isolation = proto.IsolationStrict }
	later := func(job *proto.Job) { job.Sandbox.Isolation = "of a later version" }
	bash := func(job *proto.Job) { job.Language = proto.Bash }
	preload := func(job *proto.Job) { job.Sandbox.Preload = []string{"numpy"} }
	for name, tt := range map[string]struct {
		job   func(*proto.Job)
		pause time.Duration
		want  bool
	}{
		"often":                    {key("k"), 100 * time.Millisecond, true},
		"now and then":             {key("k"), time.Second, false},
		"strict":                   {key("k", strict), 100 * time.Millisecond, false},
		"an isolation we know not": {key("k", later), 100 * time.Millisecond, false},
		"bash":                     {key("k", bash), 100 * time.Millisecond, true},
		"preloaded":                {key("k", preload), time.Minute, true},
	} {
		t.Run(name, func(t *testing.T) {
			asking(t, func(a *asker) {
				var last worker.Start
				for range 30 {
					last = a.ask(tt.job)
					time.Sleep(tt.pause)
				}
				if (last == worker.Forked) != tt.want {
					t.Errorf("the last of %v", a.starts)
				}
			})
		})
	}
}

func TestAZygoteIsOfOneKey(t *testing.T) {
	asking(t, func(a *asker) {
		for range 30 {
			a.ask(key("k"))
			time.Sleep(10 * time.Millisecond)
		}
		if s := a.ask(key("other")); s == worker.Forked {
			t.Error("the jail of a key was forked from another's")
		}
		for range 30 {
			a.ask(key("other"))
			time.Sleep(10 * time.Millisecond)
		}
		if n := a.maker.parents.Load(); n != 2 {
			t.Errorf("%d parents for two keys", n)
		}
		time.Sleep(time.Hour)
		if n := a.maker.parents.Load(); n != 0 {
			t.Errorf("%d parents that nobody asks for", n)
		}
	})
}

// bashAlone is an image store whose images contain only bash.
type bashAlone struct{}

func (bashAlone) Get(context.Context, string) (worker.Image, func(), error) {
	return worker.Image{Root: "/image", Languages: map[proto.Language]string{proto.Bash: "/bin/bash"}}, func() {}, nil
}

// A zygote without an interpreter is used when python3 is missing, unless modules must be
// preloaded.
func TestAZygoteWithoutPython(t *testing.T) {
	for name, test := range map[string]struct {
		image   string
		preload []string
		want    worker.Start
	}{
		"in the image":         {"sha256:0", nil, worker.Forked},
		"on the host":          {"", nil, worker.Forked},
		"that is to load some": {"sha256:0", []string{"numpy"}, worker.Ready},
	} {
		t.Run(name, func(t *testing.T) {
			asking(t, func(a *asker) {
				a.maker.withoutPython = true
				a.maker.made = func(s jail.Spec) {
					if s.Ahead != nil {
						t.Errorf("a parent with %+v", s.Ahead)
					}
				}
				var last worker.Start
				for range 30 {
					last = a.ask(func(j *proto.Job) {
						key("k")(j)
						j.Language, j.Sandbox.ImageDigest, j.Sandbox.Preload = proto.Bash, test.image, test.preload
					})
					time.Sleep(100 * time.Millisecond)
				}
				if last != test.want {
					t.Errorf("the last started %s", last)
				}
			})
		})
	}
}

func TestAZygoteIsReplaced(t *testing.T) {
	// Bash is not forked from the interpreter, so it shares no state with the zygote.
	for language, want := range map[proto.Language]int{proto.Python: 3, proto.Bash: 1} {
		asking(t, func(a *asker) {
			made := 0
			a.maker.made = func(jail.Spec) { made++ }
			for range 2500 {
				before := made
				s := a.ask(func(j *proto.Job) {
					key("k")(j)
					j.Language = language
				})
				if before > 0 && s != worker.Forked {
					t.Errorf("while there was a parent, or two, one started %s", s)
				}
				time.Sleep(time.Millisecond)
			}
			if made != want || a.maker.parents.Load() != 1 {
				t.Errorf("of 2500 executions of %s %d parents, %d there at the end", language, made, a.maker.parents.Load())
			}
		})
	}
}

func TestWithoutAParentExecutionsGoOn(t *testing.T) {
	asking(t, func(a *asker) {
		a.maker.barren.Store(true)
		for range 30 {
			if s := a.ask(key("k")); s == worker.Forked {
				t.Error("forked from nothing")
			}
			time.Sleep(100 * time.Millisecond)
		}
		a.maker.barren.Store(false)
		var last worker.Start
		for range 600 {
			last = a.ask(key("k"))
			time.Sleep(100 * time.Millisecond)
		}
		if last != worker.Forked {
			t.Errorf("when parents could be made again, the last started %s", last)
		}
	})
}

func TestAZygoteThatFailsIsReplaced(t *testing.T) {
	asking(t, func(a *asker) {
		made := 0
		a.maker.made = func(jail.Spec) { made++ }
		ask := func(n int) (last worker.Start) {
			for range n {
				last = a.ask(key("k"))
				time.Sleep(100 * time.Millisecond)
			}
			return last
		}
		if s := ask(30); s != worker.Forked {
			t.Errorf("before: %s", s)
		}
		a.maker.sterile.Store(true)
		if s := ask(30); s == worker.Forked {
			t.Error("forked from a parent that fails")
		}
		a.maker.sterile.Store(false)
		if s := ask(30); s != worker.Forked || made < 2 {
			t.Errorf("after: %s, of %d parents", s, made)
		}
	})
}
