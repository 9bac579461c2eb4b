package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/processes"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/timer"
	"github.com/bullpen-run/bullpen/storage/blob"
)

const (
	needStore = "store"
	needRedis = "redis"
	// monitorInterval is the pause between checks, and monitorPause the pause after a failed one.
	monitorInterval = 30 * time.Second
	monitorPause    = 2 * time.Second
)

// monitor checks the servers that a process needs besides NATS, and logs when one stops or resumes
// answering. Executions that do not need them run meanwhile.
type monitor struct {
	log    *slog.Logger
	checks map[string]func(ctx context.Context) error // by need
	// storeReady is whether the store has answered once.
	storeReady atomic.Bool

	mu       sync.Mutex
	problems map[string]proto.Problem
}

func (s *system) newMonitor() *monitor {
	m := &monitor{log: s.log, checks: map[string]func(context.Context) error{}, problems: map[string]proto.Problem{}}
	if s.blobs != nil {
		m.checks[needStore] = s.tryStore
	}
	if s.cfg.RedisURL != "" && (s.cfg.Has(RoleWebhook) || s.cfg.Has(RoleGateway)) {
		m.checks[needRedis] = func(ctx context.Context) error {
			_, err := timer.Check(ctx, timer.Config{URL: s.cfg.RedisURL, CA: s.cfg.RedisCA})
			return err
		}
	}
	return m
}

func (m *monitor) run(ctx context.Context) error {
	var all sync.WaitGroup
	for need, check := range m.checks {
		all.Go(func() {
			for {
				pause := monitorInterval
				err := check(ctx)
				if ctx.Err() != nil {
					return
				}
				if m.set(need, err); err != nil {
					pause = monitorPause
				}
				select {
				case <-ctx.Done():
					return
				case <-time.After(pause):
				}
			}
		})
	}
	all.Wait()
	return nil
}

// set stores the result of a check, and logs it if it has changed.
func (m *monitor) set(need string, err error) {
	m.mu.Lock()
	before, was := m.problems[need]
	problem := proto.Problem{Need: need}
	if err == nil {
		delete(m.problems, need)
	} else {
		problem.Message = problemText(need, err)
		m.problems[need] = problem
	}
	m.mu.Unlock()
	switch {
	case err != nil && problem != before:
		m.log.Error(need+" does not work, will retry", "problem", problem.Message)
	case err == nil && was:
		m.log.Info(need + " works again")
	}
	if need == needStore && err == nil {
		m.storeReady.Store(true)
	}
}

// problemText describes a problem and its remedy.
func problemText(need string, err error) string {
	text, advice := err.Error(), "correct --store and --store-key"
	if need == needRedis {
		advice = remedyRedis(err)
	}
	if e, ok := errors.AsType[*blob.Error](err); ok {
		text, advice = e.Problem(), e.Advice()
	}
	return text + ": " + advice
}

// problems returns this process's unmet needs, in the order of the needs.
func (s *system) problems() []proto.Problem {
	problems := []proto.Problem{}
	s.monitor.mu.Lock()
	for _, p := range s.monitor.problems {
		problems = append(problems, p)
	}
	s.monitor.mu.Unlock()
	if why := s.health.reason(); why != "" {
		problems = append(problems, proto.Problem{Need: "worker", Message: why})
	}
	if why := s.disk.full(); why != "" {
		problems = append(problems, proto.Problem{Need: "disk", Message: why})
	}
	slices.SortFunc(problems, func(a, b proto.Problem) int { return cmp.Compare(a.Need, b.Need) })
	return problems
}

// describe answers requests of bullpen doctor --cluster until ctx is done.
func (s *system) describe(ctx context.Context) error {
	started, roles := time.Now().UTC(), []string{}
	for _, r := range s.cfg.Roles {
		roles = append(roles, string(r))
	}
	stop, err := processes.Serve(s.store.Conn, func() proto.Process {
		return proto.Process{
			Name: s.instance, Roles: roles, Version: Version(), StartedAt: started,
			Problems: s.problems(), Missing: s.health.missingCapabilities(), Disk: s.disk.report(),
		}
	})
	if err != nil {
		return err
	}
	<-ctx.Done()
	stop()
	return nil
}

// Processes returns the running processes of the deployment.
func (s *system) Processes(ctx context.Context) ([]proto.Process, error) {
	return processes.Find(ctx, s.store.Conn, findTimeout)
}

// findTimeout is how long Processes waits for answers.
const findTimeout = 3 * time.Second

// Processes returns the running processes that use the NATS servers of c. The error says what to
// correct.
func Processes(ctx context.Context, c *Config) ([]proto.Process, error) {
	if c.Embedded() {
		return nil, errors.New("find processes: --nats names no server: without it, NATS is inside the only process")
	}
	conn, err := store.Dial(c.access("bullpen doctor"), slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, fmt.Errorf("find processes: %w: %s", err, remedyNATS(err))
	}
	defer conn.Close()
	return processes.Find(ctx, conn, findTimeout)
}
