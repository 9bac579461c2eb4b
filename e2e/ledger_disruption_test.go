package e2e

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// disruption is a fault of a deployment. inject injects it and returns the function that repairs it
// and the delay before the repair. It returns nil if the fault is already active.
type disruption struct {
	name   string
	inject func(l *ledger, r *rand.Rand) (heal func(), after time.Duration)
}

// activeDisruption is an active fault.
type activeDisruption struct {
	name string
	outage
	repair func()
}

// randomBelow returns a random duration below most.
func randomBelow(r *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(r.Int64N(int64(most)))
}

// Durations of faults. A lease expires after 10 s without a renewal, and others take over after 12
// s.
func atOnce(*rand.Rand) time.Duration       { return 0 }
func soon(r *rand.Rand) time.Duration       { return randomBelow(r, 4*time.Second) }
func beforeLost(r *rand.Rand) time.Duration { return time.Second + randomBelow(r, 8*time.Second) }
func afterLost(r *rand.Rand) time.Duration {
	return 12500*time.Millisecond + randomBelow(r, 2500*time.Millisecond)
}

// singleDisruptions are the faults of one process, or of one service that the deployment needs, at
// a time. Kills are the most frequent.
func (l *ledger) singleDisruptions() []disruption {
	var all []disruption
	for _, m := range l.members {
		all = append(all, slices.Repeat([]disruption{killed(m, atOnce), killed(m, atOnce), killed(m, soon)}, 2)...)
		all = append(all, stopped(m), frozen(m, beforeLost), frozen(m, afterLost))
		if m.is.gateway {
			all = append(all, withoutIndex(m), withoutIndex(m))
		}
		if m.line != nil {
			all = append(all,
				cutOff(m, "cut off", soon, true, false, false), cutOff(m, "cut off for long", afterLost, true, false, false),
				cutOff(m, "outgoing data dropped", beforeLost, false, true, false),
				cutOff(m, "incoming data dropped", beforeLost, false, false, true),
				cutOff(m, "silent for long", afterLost, false, true, true))
		}
	}
	if l.broker != nil {
		all = append(all, l.brokerDisruptions()...)
	}
	if l.cluster != nil {
		all = append(all, l.clusterDisruptions()...)
	}
	return append(all, serviceDisruptions()...)
}

// alone returns a constructor of faults of which only one can be active at a time.
func alone() func(name string, inflict, heal func(), after func(*rand.Rand) time.Duration) disruption {
	harmed := false
	return func(name string, inflict, heal func(), after func(*rand.Rand) time.Duration) disruption {
		return disruption{name, func(_ *ledger, r *rand.Rand) (func(), time.Duration) {
			if harmed {
				return nil, 0
			}
			harmed = true
			inflict()
			return func() {
				heal()
				harmed = false
			}, after(r)
		}}
	}
}

// brokerName is the name prefix of faults of the shared NATS server.
const brokerName = "NATS"

// brokerDisruptions are the faults of a shared NATS server.
func (l *ledger) brokerDisruptions() []disruption {
	only := alone()
	return []disruption{
		only(brokerName+" killed", func() { l.broker.kill() }, func() { l.broker.restart(l.t, l.programs) }, soon),
		only(brokerName+" frozen", func() { l.broker.signal(syscall.SIGSTOP) }, func() { l.broker.signal(syscall.SIGCONT) },
			beforeLost),
	}
}

// clusterDisruptions are the faults of a cluster's nodes, one at a time, each injected when all
// replicas are current. The node that leads most of the requested streams fails most often.
func (l *ledger) clusterDisruptions() []disruption {
	only, c, t := alone(), l.cluster, l.t
	var n *natsNode // the failing node
	var all []disruption
	for i := range clusterNodes {
		node := func(name string, inflict, heal func(), after func(*rand.Rand) time.Duration) {
			all = append(all, only(fmt.Sprintf("node %d %s", i+1, name), func() {
				c.whole(t)
				n = c.nodes[i]
				if i == 0 {
					n = c.leader(t, "BULLPEN_EXECS")
				}
				inflict()
			}, func() {
				heal()
				c.whole(t)
			}, after))
		}
		node("killed", func() { n.kill() }, func() { n.start(t) }, atOnce)
		node("killed for a while", func() { n.kill() }, func() { n.start(t) }, beforeLost)
		node("stopped", func() { n.stop(t) }, func() { n.start(t) }, atOnce)
		node("frozen", func() { n.freeze() }, func() { n.thaw() }, beforeLost)
		node("cut off", func() { n.cut(t) }, func() { n.heal(t) }, beforeLost)
		node("outgoing data dropped", func() { n.dropOutgoing(t) }, func() { n.heal(t) }, beforeLost)
		node("incoming data dropped", func() { n.dropIncoming(t) }, func() { n.heal(t) }, beforeLost)
		node("out of disk", func() { n.fill(t) }, func() {
			n.free(t)
			n.kill() // it does not retry on its own
			n.start(t)
		}, beforeLost)
		node("replaced", func() { n.replace(t) }, func() {}, atOnce)
	}
	return all
}

// killed kills a process and starts it again.
func killed(m *member, after func(*rand.Rand) time.Duration) disruption {
	return disruption{m.name + " killed", func(l *ledger, r *rand.Rand) (func(), time.Duration) {
		if m.disrupted {
			return nil, 0
		}
		m.disrupted = true
		m.process.kill()
		return func() {
			m.start(l.deployment)
			m.disrupted = false
		}, after(r)
	}}
}

// stopped stops a process cleanly and then starts it again.
func stopped(m *member) disruption {
	return disruption{m.name + " stopped", func(l *ledger, r *rand.Rand) (func(), time.Duration) {
		if m.disrupted {
			return nil, 0
		}
		m.disrupted = true
		m.process.signal(syscall.SIGTERM)
		return func() {
			m.process.exitCode(l.t) // reports what else went wrong meanwhile
			m.start(l.deployment)
			m.disrupted = false
		}, soon(r)
	}}
}

// withoutIndex deletes the index of executions, while its gateway runs or not.
func withoutIndex(m *member) disruption {
	return disruption{m.name + " index deleted", func(l *ledger, _ *rand.Rand) (func(), time.Duration) {
		if err := os.Remove(filepath.Join(m.data, "history.db")); err != nil && !errors.Is(err, os.ErrNotExist) {
			l.t.Error(err)
		}
		return func() {}, 0
	}}
}

// frozen suspends a process and resumes it later.
func frozen(m *member, after func(*rand.Rand) time.Duration) disruption {
	return disruption{m.name + " frozen", func(_ *ledger, r *rand.Rand) (func(), time.Duration) {
		if m.disrupted {
			return nil, 0
		}
		m.disrupted = true
		m.process.signal(syscall.SIGSTOP)
		return func() {
			m.process.signal(syscall.SIGCONT)
			m.disrupted = false
		}, after(r)
	}}
}

// crashes are the crashes of each process at each crash point, if the process reaches it.
func (l *ledger) crashes() []disruption {
	var all []disruption
	for _, point := range fault.Points() {
		for _, m := range l.members {
			all = append(all, crashed(m, point))
		}
	}
	return all
}

// crashed restarts a process with a crash point, and then without.
func crashed(m *member, point fault.Point) disruption {
	return disruption{m.name + " " + string(point), func(l *ledger, r *rand.Rand) (func(), time.Duration) {
		if m.disrupted {
			return nil, 0
		}
		m.disrupted = true
		m.process.kill()
		m.env = []string{fmt.Sprintf("BULLPEN_CRASH_AT=%s:%d", point, 1+r.IntN(3))}
		m.start(l.deployment)
		m.env = nil
		return func() {
			if m.process.ended() {
				l.injected.add("died at " + string(point))
			}
			m.process.kill()
			m.start(l.deployment)
			m.disrupted = false
		}, time.Second + soon(r)
	}}
}

// cutOff disturbs a process's line to NATS.
func cutOff(m *member, how string, after func(*rand.Rand) time.Duration, cut, silentTo, silentBack bool) disruption {
	return disruption{m.name + " " + how, func(_ *ledger, r *rand.Rand) (func(), time.Duration) {
		if m.disrupted {
			return nil, 0
		}
		m.disrupted = true
		m.line.set(cut, silentTo, silentBack)
		return func() {
			m.line.set(false, false, false)
			m.disrupted = false
		}, after(r)
	}}
}

// serviceDisruptions are the faults of Redis and of the S3 server.
func serviceDisruptions() []disruption {
	gone := func(kind storagetest.Fault, name string) disruption {
		return disruption{name, func(l *ledger, r *rand.Rand) (func(), time.Duration) {
			l.store.Set(kind, -1, "", 0)
			return l.store.Clear, time.Second + soon(r)
		}}
	}
	return []disruption{
		{"Redis killed", func(l *ledger, r *rand.Rand) (func(), time.Duration) {
			l.redis.server.Close()
			return func() { l.redis.start(l.t) }, soon(r)
		}},
		{"Redis flushed", func(l *ledger, _ *rand.Rand) (func(), time.Duration) {
			l.redis.server.FlushAll()
			return func() {}, 0
		}},
		{"Redis slow", func(l *ledger, r *rand.Rand) (func(), time.Duration) {
			l.redis.delay.Store(int64(time.Second))
			return func() { l.redis.delay.Store(0) }, soon(r)
		}},
		gone(storagetest.Reset, "S3 gone"), gone(storagetest.Silent, "S3 silent"), gone(storagetest.Broken, "S3 broken"),
	}
}

// between is the number of submissions that end between two faults.
const between = 4

// disrupt injects this many faults, one after another, each after some submissions have ended. It
// repeatedly shuffles all faults and injects them in that order. All are repaired at the end.
func (l *ledger) disrupt(r *rand.Rand, wrong []disruption, cycles int) {
	var active []activeDisruption
	var deck []disruption
	for range cycles {
		if !l.awaitProgress(&active, r) {
			break
		}
		passed := 0 // faults that cannot be injected now
		for injected := false; !injected; passed++ {
			if passed == 2*len(wrong) {
				l.repairNext(&active)
				passed = 0
			}
			if len(deck) == 0 {
				deck = slices.Clone(wrong)
				r.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
			}
			f := deck[0]
			deck = deck[1:]
			if slices.ContainsFunc(active, func(i activeDisruption) bool { return i.name == f.name }) {
				continue
			}
			from := l.log.now()
			heal, after := f.inject(l, r)
			if injected = heal != nil; injected {
				l.injected.add(f.name)
				l.log.note(disruptionSubject, "%s, for %s", f.name, after)
				active = append(active, activeDisruption{f.name, outage{from, from + after}, heal})
			}
		}
	}
	for len(active) > 0 {
		l.repairNext(&active)
	}
	l.ready()
}

// heal waits until the next repair is due and performs it.
func (l *ledger) repairNext(active *[]activeDisruption) {
	next := slices.MinFunc(*active, func(a, b activeDisruption) int { return cmp.Compare(a.to, b.to) })
	sleep(l.t.Context(), next.to-l.log.now())
	// The next repair may start a process, which needs the shared server. That server is repaired
	// first.
	if i := slices.IndexFunc(*active, func(i activeDisruption) bool {
		return strings.HasPrefix(i.name, brokerName)
	}); i >= 0 {
		next = (*active)[i]
	}
	next.repair()
	next.to = l.log.now()
	l.log.note(disruptionSubject, "%s: healed", next.name)
	l.outages = append(l.outages, next.outage)
	*active = slices.DeleteFunc(*active, func(i activeDisruption) bool { return i.name == next.name })
}

// awaitProgress waits until some submissions have ended since the call, and then a random moment
// longer. Meanwhile it repairs what is due. It reports whether enough submissions ended.
func (l *ledger) awaitProgress(active *[]activeDisruption, r *rand.Rand) bool {
	l.mu.Lock()
	want := l.done + between
	l.mu.Unlock()
	moment, patient := randomBelow(r, time.Second), time.NewTimer(patience)
	defer patient.Stop()
	var until <-chan time.Time // fires at the end of the extra moment
	for {
		l.mu.Lock()
		enough := l.done >= want
		l.mu.Unlock()
		if enough && until == nil {
			until = time.After(moment)
		}
		var due <-chan time.Time
		if len(*active) > 0 {
			next := slices.MinFunc(*active, func(a, b activeDisruption) int { return cmp.Compare(a.to, b.to) })
			due = time.After(next.to - l.log.now())
		}
		select {
		case <-l.progressed:
		case <-due:
			l.repairNext(active)
		case <-until:
			return true
		case <-patient.C:
			l.violate(disruptionSubject, "nothing ends any more")
			return false
		}
		for _, m := range l.members {
			if !m.disrupted && m.process.ended() {
				l.violate(disruptionSubject, "%s ended by itself:\n%s", m.name, m.process.tail())
				return false
			}
		}
	}
}
