package nsjail

import (
	"cmp"
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
	// fewerIfFast is how many bytes earlier the first search begins if the growth is fast, and by how
	// many the kernel's memory must shrink for a search to end.
	fewerIfFast = 40 << 20
	// further is by how many bytes the kernel's memory must have grown since a search without a
	// result before the next one begins.
	further = 16 << 20
	// most is the growth in bytes, as in watched.held, that no program outlives. It has to leave
	// room for what the kernel takes until the program is dead.
	most = 144 << 20
	// evictEvery is the time that the kernel has to free the memory of an evicted program before the
	// watch evicts another one.
	evictEvery = time.Second
	// suspect is the growth in bytes from which on a program is a suspect: the watch reads its CPU time
	// and may pause it. Programs that began later than the growth are not disturbed.
	suspect = 16 << 20
	// maxRate is how many bytes the kernel takes in a second of a program's CPU time at most. It is
	// about the speed at which a core clears memory.
	maxRate = 4 << 30
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
//
// It searches for the program that causes the growth by a trial. What one search has observed counts
// in the next. A program that no search finds is bounded as well: the program during which the kernel
// grew most is evicted. The growth during a program is never forgotten, except for the part that the
// program did not have the CPU time to cause.
type hostWatch struct {
	m      *Maker
	host   func() (reading, error)
	cancel context.CancelFunc
	ended  chan struct{}

	mu      sync.Mutex
	running map[*sandbox]*watched
	started chan struct{} // receives when running was empty

	// These belong to the goroutine.
	trial      *hostmemory.Trial[*sandbox] // of all programs that run
	searching  bool                        // the trial is being held
	nextQueues time.Time
	nextEvict  time.Time
	previous   reading
	read       time.Time // of previous
}

// reading is the state of the host's memory at a time.
type reading struct {
	hostmemory.Host
	charged int64 // kernel memory that all programs are charged for, in bytes
}

// watched is what the watch knows of a running program. It belongs to the watch's goroutine.
type watched struct {
	known  bool
	before reading // the least since the program began; before.Objects includes what others caused
	// held is by how many bytes the kernel's objects grew during the program, beyond what programs
	// are charged for and what it cannot have caused.
	held     int64
	searchAt int64         // a search begins when held is larger
	cpu      float64       // its cores in a trial; 0 if it has those of its profile
	used     time.Duration // CPU time at the last reading; 0 if it is unknown
	ran      time.Duration // CPU time since the reading before; -1 if it is unknown
}

// readHost reads the host's memory.
func (m *Maker) readHost() (r reading, err error) {
	if r.Host, err = hostmemory.Read(); err != nil {
		return r, err
	}
	r.charged, err = m.tree.Kernel()
	return r, err
}

// watchHost starts a watch that reads the host's memory with host.
func (m *Maker) watchHost(host func() (reading, error)) *hostWatch {
	ctx, cancel := context.WithCancel(context.Background())
	w := &hostWatch{
		m: m, host: host, cancel: cancel, ended: make(chan struct{}), running: map[*sandbox]*watched{}, started: make(chan struct{}, 1),
		trial: hostmemory.New[*sandbox](),
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
	w.running[s] = &watched{searchAt: tolerated}
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

// idle reports whether no program runs. A search ends then.
func (w *hostWatch) idle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.running) > 0 {
		return false
	}
	w.searching = false
	return true
}

// check reads the host's memory and acts on it.
func (w *hostWatch) check() error {
	now, err := w.host()
	if err != nil {
		return err
	}
	growth := int64(0)
	if time.Since(w.read) < previousValid {
		growth = now.Objects - w.previous.Objects
	}
	suspects := w.update(now, growth)
	w.previous, w.read = now, time.Now()
	if len(suspects) > 0 && time.Now().After(w.nextQueues) {
		w.checkQueues(suspects, now)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	begin, goOn := false, false
	for _, p := range w.running {
		excess := p.held - p.searchAt
		fast := growth > hostmemory.Slow && p.searchAt == tolerated
		begin = begin || excess > 0 || fast && excess > -fewerIfFast
		goOn = goOn || excess > -fewerIfFast
	}
	if begin || w.searching && goOn {
		w.search(now, growth)
	} else {
		w.endSearch()
	}
	w.evict(now)
	return nil
}

// update records a reading, and the growth of the kernel's objects since the one before. It returns
// the programs during which the kernel's memory grew by more than is tolerated.
func (w *hostWatch) update(now reading, growth int64) (suspects []*sandbox) {
	w.mu.Lock()
	defer w.mu.Unlock()
	uncharged := growth - max(0, now.charged-w.previous.charged)
	for s, p := range w.running {
		if !p.known {
			p.known, p.before = true, now
			if time.Since(w.read) < previousValid {
				p.before = w.previous
			}
		}
		p.before.Kernel = min(p.before.Kernel, now.Kernel)
		p.before.Objects = min(p.before.Objects, now.Objects)
		p.before.charged = min(p.before.charged, now.charged)
		if now.Kernel-p.before.Kernel > tolerated {
			suspects = append(suspects, s)
		}
		w.attribute(s, p, now, uncharged)
	}
	w.trial.Retain(func(s *sandbox) bool { return w.running[s] != nil })
	return suspects
}

// attribute computes held of a program. Of the growth since the last reading that nobody is charged
// for, others caused what the program had not the CPU time for. w.mu is held.
func (w *hostWatch) attribute(s *sandbox, p *watched, now reading, uncharged int64) {
	p.ran = -1
	if now.Objects-p.before.Objects > suspect {
		used, err := s.group.CPUTime() // fails if the jail is gone
		if err == nil && p.used > 0 {
			p.ran = used - p.used
			p.before.Objects += max(0, uncharged-int64(p.ran.Seconds()*maxRate))
		}
		p.used = used
	} else {
		p.used = 0
	}
	p.held = now.Objects - p.before.Objects - max(0, now.charged-p.before.charged)
}

// checkQueues kills the program in whose sockets most waits, if that is too much.
func (w *hostWatch) checkQueues(suspects []*sandbox, host reading) {
	began := time.Now()
	var worst *sandbox
	waiting := int64(tolerated)
	for _, s := range suspects {
		// An error means that the jail is gone.
		queued, err := hostmemory.Queued(s.initPID)
		if err != nil || queued <= waiting {
			continue
		}
		if charged, err := s.group.Sockets(); err == nil && queued-charged > waiting {
			worst, waiting = s, queued-charged
		}
	}
	w.nextQueues = time.Now().Add(queuesShare * time.Since(began))
	if worst != nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.killFor(worst, waiting, host)
	}
}

// search continues the search for the program that makes the kernel grow, or begins one: it adds the
// tick that ends now, in which the kernel grew by a number of bytes, and begins the next. w.mu is
// held.
func (w *hostWatch) search(now reading, growth int64) {
	if w.searching {
		ran := map[*sandbox]time.Duration{}
		for s, p := range w.running {
			if p.ran >= 0 {
				ran[s] = p.ran
			}
		}
		if len(ran) > 0 {
			w.trial.Observe(growth, ran)
		}
	} else {
		w.searching = true
		w.trial.Begin(growth)
	}
	if guilty, found := w.trial.Verdict(); found && w.running[guilty].held > tolerated {
		w.endSearch()
		w.kill(guilty, now)
		return
	}
	if w.trial.Ticks >= hostmemory.MaxTicks { // none of the programs, as far as can be known by now
		w.m.cfg.Log.Warn("the host's kernel holds more memory, and no program was found to cause it", "available", now.Available)
		for _, p := range w.running {
			p.searchAt = max(p.searchAt, p.held+further)
		}
		w.endSearch()
		return
	}
	for s, p := range w.running {
		switch {
		case p.held <= suspect:
			w.throttle(s, p, 0)
		case rand.Float64() < w.trial.Running(): //nolint:gosec // programs cannot see the numbers
			w.throttle(s, p, max(min(minTrialCPU, s.spec.CPU), w.trial.Share*s.spec.CPU))
		default:
			w.throttle(s, p, pausedCPU)
		}
	}
}

// throttle limits a program to a number of cores, with 0 to those of its profile. It changes the
// limit only if it has to: with each change, the kernel forgets what the program used beyond it.
func (w *hostWatch) throttle(s *sandbox, p *watched, cpu float64) {
	if cpu == p.cpu {
		return
	}
	p.cpu = cpu
	s.throttle(cmp.Or(cpu, s.spec.CPU))
}

// endSearch ends the search, if one is under way. w.mu is held.
func (w *hostWatch) endSearch() {
	if !w.searching {
		return
	}
	w.searching = false
	for s, p := range w.running {
		w.throttle(s, p, 0)
	}
}

// evict ends the likeliest cause of the growth if a program has run while the kernel grew by most.
// w.mu is held.
func (w *hostWatch) evict(now reading) {
	if time.Now().Before(w.nextEvict) {
		return
	}
	var worst *sandbox
	var highest float64
	over := false
	for s, p := range w.running {
		over = over || p.held > most
		score := w.trial.Score(s)
		if p.held > tolerated && (worst == nil || score > highest || score == highest && p.held > w.running[worst].held) {
			worst, highest = s, score
		}
	}
	if !over {
		return
	}
	w.nextEvict = time.Now().Add(evictEvery)
	if highest >= hostmemory.MinScore {
		w.kill(worst, now)
		return
	}
	w.m.cfg.Log.Warn("program evicted because the host's kernel holds more memory, and no program was found to cause it",
		"bytes", w.running[worst].held, "available", now.Available)
	delete(w.running, worst)
	worst.stop(evicted, nil)
}

// kill ends a program that made the kernel hold memory. w.mu is held.
func (w *hostWatch) kill(s *sandbox, host reading) {
	w.killFor(s, w.running[s].held, host)
}

// killFor ends a program that made the kernel hold a number of bytes. w.mu is held.
func (w *hostWatch) killFor(s *sandbox, bytes int64, host reading) {
	w.m.cfg.Log.Warn("program killed for memory of the host that it is not charged for", "bytes", bytes, "available", host.Available)
	delete(w.running, s)
	s.stopForHost(bytes)
}
