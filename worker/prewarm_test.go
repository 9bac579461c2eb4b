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

// jobChan is a queue whose leases the test sends one at a time.
type jobChan chan *lease

func (j jobChan) Take(ctx context.Context) (worker.Lease, error) {
	select {
	case l := <-j:
		return l, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// harness runs executions on one worker inside a synctest bubble.
type harness struct {
	t       *testing.T
	jails   *fakeJails
	queued  jobChan
	starts  []worker.Start
	created []error // of each zygote
}

// execute runs one execution on the worker and returns how its jail was started.
func (a *harness) execute(change func(job *proto.Job)) worker.Start {
	a.t.Helper()
	l := newLease(nil)
	change(l.job)
	a.queued <- l
	synctest.Wait()
	return a.starts[len(a.starts)-1]
}

// withWorker runs a worker and calls f. It checks that no zygotes remain after the worker stops.
func withWorker(t *testing.T, f func(a *harness)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		a := &harness{t: t, jails: &fakeJails{}, queued: make(jobChan)}
		w := &worker.Worker{
			Jobs: a.queued, Jails: a.jails, Images: bashImages{}, Home: "/home/u", Slots: 1,
			Log: slog.New(slog.DiscardHandler),
			Warm: worker.Warm{
				Spare: 1, Most: 4, Zygotes: 4, Memory: 1 << 30, Languages: []proto.Language{proto.Python},
				OnStart:  func(_ proto.Language, s worker.Start) { a.starts = append(a.starts, s) },
				OnZygote: func(_ context.Context, _ proto.Sandbox, err error) { a.created = append(a.created, err) },
			},
			Done: func(*proto.Record) {}, OnHealth: func(error) {},
			Open: func(context.Context, *proto.Job, int, int64) worker.Output { return output{} },
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
		if n := a.jails.zygotes.Load(); n != 0 {
			t.Errorf("%d zygotes remain", n)
		}
	})
}

func TestFirstExecutionGetsAPrewarmedJail(t *testing.T) {
	withWorker(t, func(a *harness) {
		if s := a.execute(func(*proto.Job) {}); s != worker.Ready {
			t.Errorf("its jail is %s", s)
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

func TestJailsAreForkedForFrequentKeys(t *testing.T) {
	strict := func(job *proto.Job) { job.Sandbox.Isolation = proto.IsolationStrict }
	later := func(job *proto.Job) { job.Sandbox.Isolation = "of a later version" }
	bash := func(job *proto.Job) { job.Language = proto.Bash }
	preload := func(job *proto.Job) { job.Sandbox.Preload = []string{"numpy"} }
	for name, tt := range map[string]struct {
		job   func(*proto.Job)
		pause time.Duration
		want  bool
	}{
		"frequent":          {key("k"), 100 * time.Millisecond, true},
		"rare":              {key("k"), time.Second, false},
		"strict":            {key("k", strict), 100 * time.Millisecond, false},
		"unknown isolation": {key("k", later), 100 * time.Millisecond, false},
		"bash":              {key("k", bash), 100 * time.Millisecond, true},
		"preloaded":         {key("k", preload), time.Minute, true},
	} {
		t.Run(name, func(t *testing.T) {
			withWorker(t, func(a *harness) {
				var last worker.Start
				for range 30 {
					last = a.execute(tt.job)
					time.Sleep(tt.pause)
				}
				if (last == worker.Forked) != tt.want {
					t.Errorf("the jails were %v", a.starts)
				}
			})
		})
	}
}

func TestZygoteServesOneKey(t *testing.T) {
	withWorker(t, func(a *harness) {
		for range 30 {
			a.execute(key("k"))
			time.Sleep(10 * time.Millisecond)
		}
		if s := a.execute(key("other")); s == worker.Forked {
			t.Error("the jail of a key was forked from another's")
		}
		for range 30 {
			a.execute(key("other"))
			time.Sleep(10 * time.Millisecond)
		}
		if n := a.jails.zygotes.Load(); n != 2 {
			t.Errorf("%d zygotes for two keys", n)
		}
		time.Sleep(time.Hour)
		if n := a.jails.zygotes.Load(); n != 0 {
			t.Errorf("%d unused zygotes", n)
		}
	})
}

// bashImages is an image store whose images contain only bash.
type bashImages struct{}

func (bashImages) Get(context.Context, string) (worker.Image, func(), error) {
	return worker.Image{Root: "/image", Languages: map[proto.Language]string{proto.Bash: "/bin/bash"}}, func() {}, nil
}

// A zygote without an interpreter is used when python3 is missing, unless modules must be
// preloaded.
func TestZygoteWithoutPython(t *testing.T) {
	for name, test := range map[string]struct {
		image   string
		preload []string
		want    worker.Start
	}{
		"in the image": {"sha256:0", nil, worker.Forked},
		"on the host":  {"", nil, worker.Forked},
		"with preload": {"sha256:0", []string{"numpy"}, worker.Ready},
	} {
		t.Run(name, func(t *testing.T) {
			withWorker(t, func(a *harness) {
				a.jails.withoutPython = true
				a.jails.onZygote = func(s jail.Spec) {
					if s.Prewarm != nil {
						t.Errorf("a zygote with %+v", s.Prewarm)
					}
				}
				var last worker.Start
				for range 30 {
					last = a.execute(func(j *proto.Job) {
						key("k")(j)
						j.Language, j.Sandbox.ImageDigest, j.Sandbox.Preload = proto.Bash, test.image, test.preload
					})
					time.Sleep(100 * time.Millisecond)
				}
				if last != test.want {
					t.Errorf("the last jail is %s", last)
				}
				for _, err := range a.created {
					if (err != nil) != (test.preload != nil) {
						t.Errorf("a zygote was created with %v", err)
					}
				}
				if len(a.created) == 0 {
					t.Error("no zygote was created")
				}
			})
		})
	}
}

func TestZygoteIsReplacedAfterMaxForks(t *testing.T) {
	// Bash is not forked from the interpreter, so it shares no state with the zygote.
	for language, want := range map[proto.Language]int{proto.Python: 3, proto.Bash: 1} {
		withWorker(t, func(a *harness) {
			created := 0
			a.jails.onZygote = func(jail.Spec) { created++ }
			for range 2500 {
				before := created
				s := a.execute(func(j *proto.Job) {
					key("k")(j)
					j.Language = language
				})
				if before > 0 && s != worker.Forked {
					t.Errorf("while there was a zygote, a jail is %s", s)
				}
				time.Sleep(time.Millisecond)
			}
			if created != want || a.jails.zygotes.Load() != 1 {
				t.Errorf("2500 executions of %s created %d zygotes, %d remain", language, created, a.jails.zygotes.Load())
			}
		})
	}
}

func TestExecutionsContinueWithoutZygotes(t *testing.T) {
	withWorker(t, func(a *harness) {
		a.jails.zygoteFails.Store(true)
		for range 30 {
			if s := a.execute(key("k")); s == worker.Forked {
				t.Error("forked without a zygote")
			}
			time.Sleep(100 * time.Millisecond)
		}
		a.jails.zygoteFails.Store(false)
		var last worker.Start
		for range 600 {
			last = a.execute(key("k"))
			time.Sleep(100 * time.Millisecond)
		}
		if last != worker.Forked {
			t.Errorf("after zygotes work again, the last jail is %s", last)
		}
	})
}

func TestFailedZygoteIsReplaced(t *testing.T) {
	withWorker(t, func(a *harness) {
		created := 0
		a.jails.onZygote = func(jail.Spec) { created++ }
		ask := func(n int) (last worker.Start) {
			for range n {
				last = a.execute(key("k"))
				time.Sleep(100 * time.Millisecond)
			}
			return last
		}
		if s := ask(30); s != worker.Forked {
			t.Errorf("before: %s", s)
		}
		a.jails.forkFails.Store(true)
		if s := ask(30); s == worker.Forked {
			t.Error("forked from a failing zygote")
		}
		a.jails.forkFails.Store(false)
		if s := ask(30); s != worker.Forked || created < 2 {
			t.Errorf("after: %s, %d zygotes created", s, created)
		}
	})
}

// A sandbox that sets no limit of open files, as those of older versions, has the default one.
func TestSpecOfOpenFiles(t *testing.T) {
	s := proto.DefaultSandbox()
	for set, want := range map[int]int{0: proto.DefaultOpenFiles, 4096: 4096} {
		s.OpenFiles = set
		if got := worker.Spec(s, "").OpenFiles; got != want {
			t.Errorf("%d open files for a sandbox with %d", got, want)
		}
	}
	s.Terminals = 3
	if got := worker.Spec(s, "").Terminals; got != 3 {
		t.Errorf("%d terminals for a sandbox with 3", got)
	}
}
