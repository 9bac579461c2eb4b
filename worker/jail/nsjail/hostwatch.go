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
	// trial's ticks. A reading takes about 0.1 ms. It is also the period in which the kernel
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
	// The CPU time of a suspect that uses less than idleCPU cores is read less and less often, down to
	// once in maxSkipped ticks. In a search it is read in each tick, and otherwise as soon as the
	// host's memory has changed by more than unread bytes since.
	idleCPU    = 0.01
	maxSkipped = 32
	unread     = 2 << 20
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
	// queuesUnread is how many bytes a program may have queued according to its CPU time before its
	// own queues are read again. It is less than is tolerated, since a core may copy faster than it
	// clears memory.
	queuesUnread = tolerated / 2
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
	cpu    func(*sandbox) (time.Duration, error) // CPU time; fails if the jail is gone
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
	used     time.Duration // CPU time when it was read last; 0 if it is unknown
	held     int64         // what the host held then, in bytes
	skipped  int           // ticks since
	period   int           // ticks between two readings of the CPU time
	// spans are those that ended with the last ticks, the newest first.
	spans [smoothed]span
	// attributed is the smoothed uncharged memory up to which growth has been attributed.
	attributed int64
	// queued is how many bytes were in the queues of its sockets when they were read last, and
	// queuedAt its CPU time before; 0 if they have not been read.
	queued   int64
	queuedAt time.Duration
	// share is the part of its CPU that the program has in the coming tick, unless it is paused. shares are
	// those of the last ticks, newest first.
	shares [smoothed]float64
	share  float64
}

// span is the time between two readings of a program's CPU time.
type span struct {
	ticks int           // 0 if the CPU time was not read in the tick
	ran   time.Duration // CPU time; -1 if it is unknown
}

// unknown is a tick in which a program's CPU time is not known.
var unknown = span{ticks: 1, ran: -1} // read only

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
	w := m.newHostWatch(host, func(s *sandbox) (time.Duration, error) { return s.group.CPUTime() })
	w.cancel = cancel
	go w.run(ctx)
	return w
}

// newHostWatch returns a watch that does not run yet.
func (m *Maker) newHostWatch(host func() (reading, error), cpu func(*sandbox) (time.Duration, error)) *hostWatch {
	return &hostWatch{
		m: m, host: host, cpu: cpu, ended: make(chan struct{}), running: map[*sandbox]*watched{},
		started: make(chan struct{}, 1),
		trial:   hostmemory.New[*sandbox](),
	}
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
	w.running[s] = &watched{searchAt: tolerated, spans: [smoothed]span{unknown, unknown, unknown}}
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
	previous := time.Since(w.read) < previousValid
	if previous {
		copy(w.readings[1:], w.readings[:])
		w.readings[0] = now
	} else {
		w.readings = [smoothed + 1]reading{now, now, now, now}
	}
	w.read = time.Now()
	suspects := w.update(!previous)
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

// update records the newest reading for each program. After a gap in the readings, growth before it
// is not attributed any more. update returns the programs during which the kernel's memory,
// including sockets, grew by more than is tolerated.
func (w *hostWatch) update(gap bool) (suspects map[*sandbox]*watched) {
	w.mu.Lock()
	defer w.mu.Unlock()
	suspects = map[*sandbox]*watched{}
	now, previous := w.readings[0], w.readings[1]
	steady := w.steady(0)
	if steady > w.highest+further || steady < w.highest-further {
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
		if gap {
			p.used, p.attributed, p.spans = 0, steady, [smoothed]span{unknown, unknown, unknown}
		}
		w.attribute(s, p, steady)
		if now.Kernel-p.kernel+now.Sockets-p.sockets > tolerated {
			suspects[s] = p
		}
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

// attribute updates the growth during a program. It attributes uncharged growth to the program up
// to what the program's CPU time allows, and the rest to others. steady is the smoothed uncharged
// memory. w.mu is held.
func (w *hostWatch) attribute(s *sandbox, p *watched, steady int64) {
	copy(p.spans[1:], p.spans[:])
	copy(p.shares[1:], p.shares[:])
	p.spans[0], p.shares[0] = w.readCPU(s, p), p.share
	// Smoothed, growth is that until the oldest tick. It is attributed when the CPU time of the same
	// ticks is known. What is excused shrinks first, because the kernel may have been freeing it.
	if last := p.spans[smoothed-1]; last.ticks > 0 {
		growth := steady - p.attributed
		p.attributed = steady
		if growth > 0 && last.ran >= 0 {
			p.excused += max(0, growth-int64(last.ran.Seconds()*maxRate))
		} else {
			p.excused = max(0, p.excused+min(0, growth))
		}
	}
	now := w.readings[0]
	p.excused = min(p.excused, now.Kernel-p.kernel)
	copy(p.growth[1:], p.growth[:])
	p.growth[0] = now.Kernel - p.kernel - p.excused - max(0, now.charged-p.charged)
}

// readCPU returns the span that ends with this tick. It reads the CPU time of a suspect if that is
// due.
func (w *hostWatch) readCPU(s *sandbox, p *watched) span {
	now := w.readings[0]
	p.skipped++
	if now.Kernel-p.kernel+now.Sockets-p.sockets <= suspect {
		p.used = 0
		return unknown
	}
	held := now.uncharged() + now.Sockets
	changed := max(held-p.held, p.held-held)
	if p.used > 0 && !w.searching && p.skipped < p.period && changed <= unread {
		return span{}
	}
	ended := unknown
	used, err := w.cpu(s)
	if err == nil && p.used > 0 {
		ended = span{ticks: p.skipped, ran: used - p.used}
	}
	if ended.ran >= 0 && ended.ran.Seconds() < idleCPU*float64(p.skipped)*watchPeriod.Seconds() {
		p.period = min(2*p.period, maxSkipped)
	} else {
		p.period = 1
	}
	p.used, p.held, p.skipped = used, held, 0
	return ended
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
func (w *hostWatch) checkQueues(suspects map[*sandbox]*watched) {
	began := time.Now()
	var worst *sandbox
	waiting := int64(tolerated)
	for s, p := range suspects {
		if !mayQueue(s, p) {
			continue
		}
		// An error means that the jail is gone.
		queued, err := hostmemory.Queued(s.initPID)
		if err != nil {
			continue
		}
		p.queued, p.queuedAt = queued, p.used
		if queued <= waiting {
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

// mayQueue reports whether a program may have too many bytes in its queues, according to the CPU
// time that it has used since they were read. Others can fill the queues of a program with a
// network.
func mayQueue(s *sandbox, p *watched) bool {
	if s.link != nil || p.used == 0 || p.queuedAt == 0 {
		return true
	}
	return p.queued+int64((p.used-p.queuedAt).Seconds()*maxRate) > queuesUnread
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
		if t, share := p.spans[smoothed-1], p.shares[smoothed-1]; t.ticks == 1 && t.ran >= 0 && share > 0 {
			ran[s] = hostmemory.Ran{Time: t.ran, Share: share}
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
