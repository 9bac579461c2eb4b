package nsjail

import (
	"cmp"
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/worker/jail/hostmemory"
)

const (
	// watchPeriod is how often the host's memory is read while programs run, and the length of a
	// trial's ticks. A reading takes about 0.2 ms. It is also the period in which the kernel
	// enforces CPU limits.
	watchPeriod = 100 * time.Millisecond
	// previousValid is the maximum age of a reading that counts as the state before a program.
	previousValid = time.Second
	// tolerated is how much uncharged memory a program may make the kernel hold, in bytes. If the
	// kernel's memory grows by more while a program runs, the watch looks for the cause.
	tolerated = 64 << 20
	// fewerIfFast is how many bytes below the limit the first search begins if growth is fast. A
	// search ends once the growth falls this far below the limit: the distance keeps it from flapping.
	fewerIfFast = 40 << 20
	// further is the growth in bytes since a search without a result that starts the next one.
	further = 16 << 20
	// most is the growth in bytes from which programs run as little as possible in a search. Such a
	// search lasts until the kernel has not grown for longSearch.
	most       = 112 << 20
	longSearch = time.Minute
	// stopEvery is how long the kernel has to free a stopped program's memory before the watch
	// stops another one.
	stopEvery = time.Second
	// smoothed is of how many readings the least counts before a program is stopped. jump is the growth
	// in bytes since the last reading that is read again, up to rereads times, before programs are
	// paused: a reading is too large for a moment while a virtual machine returns memory to its host.
	smoothed     = 3
	jump         = suspect
	rereads      = 4
	rereadPeriod = 10 * time.Millisecond
	// suspect is the growth in bytes from which a program is a suspect: the watch reads its CPU
	// time and may pause it. Programs that began later than the growth are not disturbed.
	suspect = 16 << 20
	// maxRate is the maximum growth in bytes per second of a program's CPU time. It is about the
	// speed at which a core clears memory.
	maxRate = 4 << 30
	// pausedCPU is a paused program's CPU in cores: the least that the kernel accepts.
	pausedCPU = 0.01
	// minTrialCPU is the minimum CPU of an unpaused program, unless its profile has less.
	minTrialCPU = 0.05
	// queuesShare limits the time spent reading the queues, which is slow on hosts with much
	// memory: to one part in so many.
	queuesShare = 20
	// When the queues have been read and no program had too much in them, they are read again once the
	// kernel holds queuesFurther bytes more than its least since, or after queuesAgain. Many programs that
	// do nothing would otherwise cost the whole share.
	queuesFurther = 16 << 20
	queuesAgain   = 30 * time.Second
)

// hostWatch kills programs that make the host's kernel hold memory which no control group is
// charged for. It does nothing while no program runs.
//
// It searches for the program that causes the growth by a trial. What one search has observed counts
// in the next. No program is stopped without evidence against it, however much the kernel grows: that
// growth may be the host's. The search goes on instead, and paused programs take nothing. The growth
// during a program is never forgotten, except for the part that the program did not have the CPU time
// to cause.
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
	ticks      int                         // since searching changed
	highest    int64                       // of the kernel's uncharged memory, smoothed
	grew       time.Time                   // when it was last higher by further than the time before
	nextQueues time.Time
	// queuesRead is when the queues were read last, and queuesLeast is the least that the kernel and the
	// sockets have held since, in bytes.
	queuesRead  time.Time
	queuesLeast int64
	nextStop    time.Time
	readings    [smoothed + 1]reading // the newest first
	read        time.Time             // of the newest
}

// reading is the state of the host's memory at a time.
type reading struct {
	hostmemory.Host
	charged int64 // kernel memory that all programs are charged for, in bytes
	late    bool  // it is older than the CPU times read with it
}

// uncharged returns the kernel memory that no program is charged for.
func (r reading) uncharged() int64 { return r.Kernel - r.charged }

// watched is the watch's knowledge of a running program. It belongs to the watch's goroutine.
type watched struct {
	known                    bool
	kernel, sockets, charged int64 // the least since the program began
	excused                  int64 // bytes of the growth since that the program cannot have caused
	// growth is the uncharged growth of the kernel's memory during the program, without growth that
	// it cannot have caused, at the last readings, newest first.
	growth   [smoothed]int64
	searchAt int64         // a search begins when the growth is larger
	cpu      float64       // its cores in a trial; 0 for as many as its profile allows
	used     time.Duration // CPU time at the last reading; 0 if it is unknown
	// ran is the CPU time in the last ticks, the newest first; -1 if it is unknown.
	ran [smoothed]time.Duration
	// share is the part of its CPU that the program has in the coming tick, unless it is paused. shares are
	// those of the last ticks, newest first.
	shares [smoothed]float64
	share  float64
}

// grown returns the growth during the program, smoothed.
func (p *watched) grown() int64 { return slices.Min(p.growth[:]) }

// readHost reads the host's memory.
func (m *Maker) readHost() (r reading, err error) {
	if r.Host, err = m.hostMemory.Read(); err != nil {
		return r, err
	}
	r.charged, err = m.tree.Kernel()
	return r, err
}

// watchHost starts a watch that reads the host's memory with host.
func (m *Maker) watchHost(host func() (reading, error)) *hostWatch {
	ctx, cancel := context.WithCancel(context.Background())
	w := &hostWatch{
		m: m, host: host, cancel: cancel, ended: make(chan struct{}), running: map[*sandbox]*watched{},
		started: make(chan struct{}, 1),
		trial:   hostmemory.New[*sandbox](),
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
	w.running[s] = &watched{searchAt: tolerated, ran: [smoothed]time.Duration{-1, -1, -1}}
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
	w.searching, w.ticks = false, 0
	return true
}

// check reads the host's memory and acts on it.
func (w *hostWatch) check() error {
	now, err := w.readSteady()
	if err != nil {
		return err
	}
	if time.Since(w.read) < previousValid {
		copy(w.readings[1:], w.readings[:])
		w.readings[0] = now
	} else {
		w.readings = [smoothed + 1]reading{now, now, now, now}
	}
	w.read = time.Now()
	suspects := w.update()
	if len(suspects) > 0 && w.queuesDue(now.Kernel+now.Sockets) {
		w.checkQueues(suspects)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	growth := now.uncharged() - w.readings[1].uncharged()
	begin, goOn := false, false
	for _, p := range w.running {
		excess := p.growth[0] - p.searchAt
		fast := growth > hostmemory.Slow && p.searchAt == tolerated
		begin = begin || excess > 0 || fast && excess > -fewerIfFast
		goOn = goOn || excess > -fewerIfFast
	}
	w.ticks++
	if begin || w.searching && goOn {
		w.search(growth)
	} else {
		w.endSearch()
	}
	return nil
}

// readSteady reads the host's memory. If the kernel's has jumped since the last reading, it reads again, and
// returns the least reading if that is no jump any more, else the last one.
func (w *hostWatch) readSteady() (reading, error) {
	least, err := w.host()
	last := least
	jumps := func() bool {
		return least.Kernel-w.readings[0].Kernel > jump && time.Since(w.read) < previousValid
	}
	for n := 0; n < rereads && err == nil && jumps(); n++ {
		time.Sleep(rereadPeriod)
		if last, err = w.host(); err == nil && last.Kernel < least.Kernel {
			least = last
		}
	}
	if jumps() {
		return last, err
	}
	least.late = least != last
	return least, err
}

// update records the newest reading for each program. It returns the programs during which the
// kernel's memory, including sockets, grew by more than is tolerated.
func (w *hostWatch) update() (suspects []*sandbox) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now, previous := w.readings[0], w.readings[1]
	if steady := w.steady(0); steady > w.highest+further || steady < w.highest-further {
		if steady > w.highest {
			w.grew = time.Now()
		}
		w.highest = steady
	}
	for s, p := range w.running {
		if !p.known {
			p.known, p.kernel, p.sockets, p.charged = true, previous.Kernel, previous.Sockets, previous.charged
		}
		p.kernel = min(p.kernel, now.Kernel)
		p.sockets = min(p.sockets, now.Sockets)
		p.charged = min(p.charged, now.charged)
		if now.Kernel-p.kernel+now.Sockets-p.sockets > tolerated {
			suspects = append(suspects, s)
		}
		w.attribute(s, p)
	}
	w.trial.Retain(func(s *sandbox) bool { return w.running[s] != nil })
	return suspects
}

// steady returns the smoothed uncharged kernel memory some ticks ago.
func (w *hostWatch) steady(ago int) int64 {
	return slices.MinFunc(w.readings[ago:ago+smoothed], func(a, b reading) int {
		return cmp.Compare(a.uncharged(), b.uncharged())
	}).uncharged()
}

// attribute updates the growth during a program. It attributes uncharged growth to the program up to
// what the program's CPU time allows, and the rest to others. w.mu is held.
func (w *hostWatch) attribute(s *sandbox, p *watched) {
	copy(p.ran[1:], p.ran[:])
	copy(p.shares[1:], p.shares[:])
	p.ran[0], p.shares[0] = -1, p.share
	now := w.readings[0]
	if now.Kernel-p.kernel > suspect {
		used, err := s.group.CPUTime() // fails if the jail is gone
		if err == nil && p.used > 0 {
			p.ran[0] = used - p.used
		}
		p.used = used
	} else {
		p.used = 0
	}
	// Smoothed, growth is that of the oldest tick. What is excused shrinks first, because the kernel
	// may have been freeing it.
	growth := w.steady(0) - w.steady(1)
	if ran := p.ran[smoothed-1]; growth > 0 && ran >= 0 {
		p.excused += max(0, growth-int64(ran.Seconds()*maxRate))
	} else {
		p.excused = max(0, p.excused+min(0, growth))
	}
	p.excused = min(p.excused, now.Kernel-p.kernel)
	copy(p.growth[1:], p.growth[:])
	p.growth[0] = now.Kernel - p.kernel - p.excused - max(0, now.charged-p.charged)
}

// queuesDue reports whether the queues must be read. held is what the kernel and the sockets hold, in bytes.
func (w *hostWatch) queuesDue(held int64) bool {
	w.queuesLeast = min(w.queuesLeast, held)
	if time.Now().Before(w.nextQueues) ||
		held-w.queuesLeast < queuesFurther && time.Since(w.queuesRead) < queuesAgain {
		return false
	}
	w.queuesRead, w.queuesLeast = time.Now(), held
	return true
}

// checkQueues kills the program with the most bytes queued in its sockets, if that is too much.
func (w *hostWatch) checkQueues(suspects []*sandbox) {
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
		w.queuesRead = time.Time{} // another may have too much as well
		w.mu.Lock()
		defer w.mu.Unlock()
		w.killFor(worst, waiting)
	}
}

// search continues the search for the program that makes the kernel grow, or begins one: it adds the
// tick that ends now, in which the kernel grew by a number of bytes, and begins the next. w.mu is
// held.
func (w *hostWatch) search(growth int64) {
	if w.searching {
		w.trial.Adjust(growth)
		w.observe()
	} else {
		w.searching, w.ticks = true, 0
		w.trial.Begin(growth)
	}
	if w.over() { // programs run as little as they can until the verdict
		w.trial.Adjust(math.MaxInt64)
	}
	guilty, found := w.trial.Verdict()
	if p := w.running[guilty]; found && p != nil && p.grown() > tolerated && time.Now().After(w.nextStop) {
		w.kill(guilty)
	}
	if w.trial.Ticks >= hostmemory.MaxTicks && (!w.over() || time.Since(w.grew) >= longSearch) {
		// None of the programs is the cause, as far as is known by now.
		w.m.cfg.Log.Warn("the host's kernel holds more memory, and no program was found to cause it", "available",
			w.readings[0].Available)
		for _, p := range w.running {
			p.searchAt = max(p.searchAt, p.grown()+further)
		}
		w.endSearch()
		return
	}
	for s, p := range w.running {
		cpu := max(min(minTrialCPU, s.spec.CPU), w.trial.Share*s.spec.CPU)
		p.share = cpu / s.spec.CPU
		switch {
		case p.growth[0] <= suspect:
			p.share = 1
			w.throttle(s, p, 0)
		case rand.Float64() < hostmemory.Running: //nolint:gosec // programs cannot see the numbers
			w.throttle(s, p, cpu)
		default:
			w.throttle(s, p, pausedCPU)
		}
	}
}

// observe adds the oldest tick of the readings to the trial, unless it lies before the search, the kernel
// may still free the memory of a stopped program, or its growth and its CPU times were measured at different
// moments: a single such tick outweighs many others. The growth is smoothed: memory that a program holds only
// while it runs would count when it begins to run, and not when it is paused. w.mu is held.
func (w *hostWatch) observe() {
	if w.ticks < smoothed || time.Now().Before(w.nextStop) || w.readings[smoothed].late || w.readings[smoothed-1].late {
		return
	}
	ran := map[*sandbox]hostmemory.Ran{}
	for s, p := range w.running {
		if t, share := p.ran[smoothed-1], p.shares[smoothed-1]; t >= 0 && share > 0 {
			ran[s] = hostmemory.Ran{Time: t, Share: share}
		}
	}
	if len(ran) > 0 {
		w.trial.Observe(w.steady(0)-w.steady(1), ran)
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
	w.searching, w.ticks = false, 0
	for s, p := range w.running {
		p.share = 0
		w.throttle(s, p, 0)
	}
}

// over reports whether a program has run while the kernel grew by most. w.mu is held.
func (w *hostWatch) over() bool {
	for _, p := range w.running {
		if p.growth[0] > most {
			return true
		}
	}
	return false
}

// kill ends a program that made the kernel hold memory. w.mu is held.
func (w *hostWatch) kill(s *sandbox) { w.killFor(s, w.running[s].grown()) }

// killFor kills a program that made the kernel hold a number of bytes. w.mu is held.
func (w *hostWatch) killFor(s *sandbox, bytes int64) {
	w.m.cfg.Log.Warn("program killed for memory of the host that it is not charged for", "bytes", bytes, "available",
		w.readings[0].Available)
	w.nextStop = time.Now().Add(stopEvery)
	delete(w.running, s)
	s.stopForHost(bytes)
}
