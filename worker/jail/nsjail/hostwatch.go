package nsjail

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail/hostmemory"
)

const (
	// watchPeriod is how often the host's memory is read while programs run, and the length of a
	// trial's ticks. A reading takes about 0.1 ms. It is also the period in which the kernel
	// enforces CPU limits.
	watchPeriod = 100 * time.Millisecond
	// previousValid is how old a reading may be to be the state before a program.
	previousValid = time.Second
	// tolerated is how much a program may make the kernel hold beyond what it is charged for, in
	// bytes. The watch looks for a cause when the kernel's memory has grown by more while a program
	// ran.
	tolerated = 64 << 20
	// suspicious is for how much the watch looks for a cause if the growth is fast.
	suspicious = 32 << 20
	// pausedCPU is what a program that is paused has, in cores: the least that the kernel accepts.
	pausedCPU = 0.01
	// minTrialCPU is what a program that is not paused has at least, unless its profile has less.
	minTrialCPU = 0.1
	// queuesShare limits the time that reading the queues takes, which are slow to read on hosts with
	// much memory: to one part in so many.
	queuesShare = 20
)

// hostWatch kills programs that make the host's kernel hold memory which no control group is
// charged for. It does nothing while no program runs.
type hostWatch struct {
	m      *Maker
	host   func() (hostmemory.Host, error)
	cancel context.CancelFunc
	ended  chan struct{}

	mu      sync.Mutex
	running map[*sandbox]*watched
	started chan struct{} // receives when running was empty

	// These belong to the goroutine.
	trial      *hostmemory.Trial[*sandbox] // nil if none is held
	nextQueues time.Time
	previous   hostmemory.Host // the last reading
	read       time.Time       // of previous
}

// watched is what the watch knows of a running program. It belongs to the watch's goroutine.
type watched struct {
	known  bool
	before hostmemory.Host // the least since the program began
	cpu    float64         // its cores in a trial; 0 if it has those of its profile
	used   time.Duration   // CPU time when the trial's tick began; 0 if it is unknown
}

// watchHost starts a watch that reads the host's memory with host.
func (m *Maker) watchHost(host func() (hostmemory.Host, error)) *hostWatch {
	ctx, cancel := context.WithCancel(context.Background())
	w := &hostWatch{
		m: m, host: host, cancel: cancel, ended: make(chan struct{}), running: map[*sandbox]*watched{}, started: make(chan struct{}, 1),
	}
	go w.run(ctx)
	return w
}

// close ends the watch.
func (w *hostWatch) close() {
	w.cancel()
	<-w.ended
}

// add watches a jail whose program is about to start, until remove.
func (w *hostWatch) add(s *sandbox) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running[s] = &watched{}
	if len(w.running) == 1 {
		select {
		case w.started <- struct{}{}:
		default:
		}
	}
}

func (w *hostWatch) remove(s *sandbox) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.running, s)
}

func (w *hostWatch) run(ctx context.Context) {
	defer close(w.ended)
	tick := time.NewTicker(watchPeriod)
	defer tick.Stop()
	failing := false
	for {
		if w.idle() {
			select {
			case <-ctx.Done():
				return
			case <-w.started:
			}
			tick.Reset(watchPeriod)
		}
		// Short programs cost no more readings than long ones.
		if failing || time.Since(w.read) < previousValid {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
		err := w.check()
		switch {
		case err != nil && !failing:
			w.m.cfg.Log.Error("host memory not watched, programs can use memory of the host beyond their limits", "error", err)
		case err == nil && failing:
			w.m.cfg.Log.Info("host memory watched again")
		}
		failing = err != nil
	}
}

// idle reports whether no program runs. A trial ends then.
func (w *hostWatch) idle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.running) > 0 {
		return false
	}
	w.trial = nil
	return true
}

// check reads the host's memory and acts on it.
func (w *hostWatch) check() error {
	host, err := w.host()
	if err != nil {
		return err
	}
	suspects, most := w.update(host)
	growth := int64(0)
	if time.Since(w.read) < previousValid {
		growth = host.Objects - w.previous.Objects
	}
	w.previous, w.read = host, time.Now()
	if len(suspects) > 0 && time.Now().After(w.nextQueues) {
		w.checkQueues(suspects, host)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if most > tolerated || most > suspicious && (w.trial != nil || growth > hostmemory.Slow) {
		w.try(host, growth)
	} else {
		w.endTrial()
	}
	return nil
}

// update returns the programs during which the kernel's memory grew by more than is tolerated, and
// the most that its objects grew by during one of them, beyond what that one is charged for.
func (w *hostWatch) update(now hostmemory.Host) (suspects []*sandbox, most int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for s, p := range w.running {
		if !p.known {
			p.known, p.before = true, now
			if time.Since(w.read) < previousValid {
				p.before = w.previous
			}
		}
		p.before.Kernel, p.before.Objects = min(p.before.Kernel, now.Kernel), min(p.before.Objects, now.Objects)
		if now.Kernel-p.before.Kernel > tolerated {
			suspects = append(suspects, s)
		}
		most = max(most, w.uncharged(s, now))
	}
	return suspects, most
}

// uncharged returns by how many bytes the kernel's objects grew during a program, beyond what it is
// charged for. w.mu is held.
func (w *hostWatch) uncharged(s *sandbox, now hostmemory.Host) int64 {
	grown := now.Objects - w.running[s].before.Objects
	if grown <= suspicious {
		return grown
	}
	charged, err := s.group.Kernel()
	if err != nil { // it is gone
		return 0
	}
	return grown - charged
}

// checkQueues kills the program in whose sockets most waits, if that is too much.
func (w *hostWatch) checkQueues(suspects []*sandbox, host hostmemory.Host) {
	began := time.Now()
	var worst *sandbox
	most := int64(tolerated)
	for _, s := range suspects {
		// An error means that the jail is gone.
		queued, err := hostmemory.Queued(s.initPID)
		if err != nil || queued <= most {
			continue
		}
		if charged, err := s.group.Sockets(); err == nil && queued-charged > most {
			worst, most = s, queued-charged
		}
	}
	w.nextQueues = time.Now().Add(queuesShare * time.Since(began))
	if worst != nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.kill(worst, most, host)
	}
}

// try holds a trial of the running programs: it adds the tick that ends now, in which the kernel
// grew by a number of bytes, and begins the next. w.mu is held.
func (w *hostWatch) try(now hostmemory.Host, growth int64) {
	if w.trial == nil {
		w.trial = hostmemory.New[*sandbox](growth)
		for _, p := range w.running {
			p.used = 0
		}
	}
	ran := map[*sandbox]time.Duration{}
	for s, p := range w.running {
		u, err := s.group.Usage()
		if err != nil {
			continue // it is gone
		}
		if p.used > 0 {
			ran[s] = u.CPUTime - p.used
		}
		p.used = u.CPUTime
	}
	if len(ran) > 0 {
		w.trial.Observe(growth, ran)
	}
	if guilty, found := w.trial.Verdict(); found && w.running[guilty] != nil {
		if bytes := w.uncharged(guilty, now); bytes > tolerated {
			w.endTrial()
			w.kill(guilty, bytes, now)
			return
		}
	}
	if w.trial.Ticks >= hostmemory.MaxTicks { // none of the programs, as far as can be known
		w.m.cfg.Log.Warn("the host's kernel holds more memory, and no program was found to cause it", "available", now.Available)
		for _, p := range w.running {
			p.before = now
		}
		w.endTrial()
		return
	}
	for s, p := range w.running {
		cpu := pausedCPU
		if rand.Float64() < w.trial.Running() { //nolint:gosec // programs cannot see the numbers
			cpu = max(min(minTrialCPU, s.spec.CPU), w.trial.Share*s.spec.CPU)
		}
		// With each change of a limit, the kernel forgets what the program used beyond it.
		if cpu != p.cpu {
			p.cpu = cpu
			s.throttle(cpu)
		}
	}
}

// endTrial ends the trial, if one is held. w.mu is held.
func (w *hostWatch) endTrial() {
	if w.trial == nil {
		return
	}
	w.trial = nil
	for s, p := range w.running {
		if p.cpu != 0 {
			p.cpu = 0
			s.throttle(s.spec.CPU)
		}
	}
}

// kill ends a program that made the kernel hold a number of bytes. w.mu is held.
func (w *hostWatch) kill(s *sandbox, bytes int64, host hostmemory.Host) {
	w.m.cfg.Log.Warn("program killed for memory of the host that it is not charged for", "bytes", bytes, "available", host.Available)
	delete(w.running, s)
	s.stopForHost(bytes)
}
