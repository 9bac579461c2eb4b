package e2e

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/storage/storagetest"
)

// trouble is a fault of a deployment. inflict injects it and returns the function that repairs it
// and the delay before the repair. It returns nil if the fault is already active.
type trouble struct {
	name    string
	inflict func(l *ledger, r *rand.Rand) (heal func(), after time.Duration)
}

// ill is an active fault.
type ill struct {
	name string
	harm
	heal func()
}

// upTo returns a random duration below most.
func upTo(r *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(r.Int64N(int64(most)))
}

// Durations of faults. A lease expires after 10 s without a renewal, and others take over after 12
// s.
func atOnce(*rand.Rand) time.Duration       { return 0 }
func soon(r *rand.Rand) time.Duration       { return upTo(r, 4*time.Second) }
func beforeLost(r *rand.Rand) time.Duration { return time.Second + upTo(r, 8*time.Second) }
func afterLost(r *rand.Rand) time.Duration {
	return 12500*time.Millisecond + upTo(r, 2500*time.Millisecond)
}

// singleTroubles are the faults of one process, or of one service that the deployment needs, at a
// time. Kills are the most frequent.
func (l *ledger) singleTroubles() []trouble {
	var all []trouble
	for _, m := range l.members {
		all = append(all, slices.Repeat([]trouble{killed(m, atOnce), killed(m, atOnce), killed(m, soon)}, 2)...)
		all = append(all, stopped(m), frozen(m, beforeLost), frozen(m, afterLost))
		if m.line != nil {
			all = append(all,
				cutOff(m, "cut off", soon, true, false, false), cutOff(m, "cut off for long", afterLost, true, false, false),
				cutOff(m, "not heard", beforeLost, false, true, false), cutOff(m, "deaf", beforeLost, false, false, true),
				cutOff(m, "silent for long", afterLost, false, true, true))
		}
	}
	if l.broker != nil {
		all = append(all, l.brokerTroubles()...)
	}
	if l.cluster != nil {
		all = append(all, l.clusterTroubles()...)
	}
	return append(all, serviceTroubles()...)
}

// alone returns a constructor of faults of which only one can be active at a time.
func alone() func(name string, inflict, heal func(), after func(*rand.Rand) time.Duration) trouble {
	harmed := false
	return func(name string, inflict, heal func(), after func(*rand.Rand) time.Duration) trouble {
		return trouble{name, func(_ *ledger, r *rand.Rand) (func(), time.Duration) {
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

// brokerTroubles are the faults of a shared NATS server.
func (l *ledger) brokerTroubles() []trouble {
	only := alone()
	return []trouble{
		only(brokerName+" killed", func() { l.broker.kill() }, func() { l.broker.restart(l.t, l.programs) }, soon),
		only(brokerName+" frozen", func() { l.broker.signal(syscall.SIGSTOP) }, func() { l.broker.signal(syscall.SIGCONT) }, beforeLost),
	}
}

// clusterTroubles are the faults of a cluster's nodes, one at a time, each injected when all
// replicas are current. The node that leads most of the requested streams fails most often.
func (l *ledger) clusterTroubles() []trouble {
	only, c, t := alone(), l.cluster, l.t
	var n *natsNode // the failing node
	var all []trouble
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
		node("not heard", func() { n.mute(t) }, func() { n.heal(t) }, beforeLost)
		node("deaf", func() { n.deafen(t) }, func() { n.heal(t) }, beforeLost)
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
func killed(m *member, after func(*rand.Rand) time.Duration) trouble {
	return trouble{m.name + " killed", func(l *ledger, r *rand.Rand) (func(), time.Duration) {
		if m.harmed {
			return nil, 0
		}
		m.harmed = true
		m.process.kill()
		return func() {
			m.start(l.deployment)
			m.harmed = false
		}, after(r)
	}}
}

// stopped stops a process cleanly and then starts it again.
func stopped(m *member) trouble {
	return trouble{m.name + " stopped", func(l *ledger, r *rand.Rand) (func(), time.Duration) {
		if m.harmed {
			return nil, 0
		}
		m.harmed = true
		m.process.signal(syscall.SIGTERM)
		return func() {
			m.process.exitCode(l.t) // reports what else went wrong meanwhile
			m.start(l.deployment)
			m.harmed = false
		}, soon(r)
	}}
}

// frozen suspends a process and resumes it later.
func frozen(m *member, after func(*rand.Rand) time.Duration) trouble {
	return trouble{m.name + " frozen", func(_ *ledger, r *rand.Rand) (func(), time.Duration) {
		if m.harmed {
			return nil, 0
		}
		m.harmed = true
		m.process.signal(syscall.SIGSTOP)
		return func() {
			m.process.signal(syscall.SIGCONT)
			m.harmed = false
		}, after(r)
	}}
}

// crashes are the crashes of each process at each crash point, if the process reaches it.
func (l *ledger) crashes() []trouble {
	var all []trouble
	for _, point := range fault.Points() {
		for _, m := range l.members {
			all = append(all, crashed(m, point))
		}
	}
	return all
}

// crashed restarts a process with a crash point, and then without.
func crashed(m *member, point fault.Point) trouble {
	return trouble{m.name + " " + string(point), func(l *ledger, r *rand.Rand) (func(), time.Duration) {
		if m.harmed {
			return nil, 0
		}
		m.harmed = true
		m.process.kill()
		m.env = []string{fmt.Sprintf("BULLPEN_CRASH_AT=%s:%d", point, 1+r.IntN(3))}
		m.start(l.deployment)
		m.env = nil
		return func() {
			if m.process.ended() {
				l.did.add("died at " + string(point))
			}
			m.process.kill()
			m.start(l.deployment)
			m.harmed = false
		}, time.Second + soon(r)
	}}
}

// cutOff disturbs a process's line to NATS.
func cutOff(m *member, how string, after func(*rand.Rand) time.Duration, cut, silentTo, silentBack bool) trouble {
	return trouble{m.name + " " + how, func(_ *ledger, r *rand.Rand) (func(), time.Duration) {
		if m.harmed {
			return nil, 0
		}
		m.harmed = true
		m.line.set(cut, silentTo, silentBack)
		return func() {
			m.line.set(false, false, false)
			m.harmed = false
		}, after(r)
	}}
}

// serviceTroubles are the faults of Redis and of the S3 server.
func serviceTroubles() []trouble {
	gone := func(kind storagetest.Fault, name string) trouble {
		return trouble{name, func(l *ledger, r *rand.Rand) (func(), time.Duration) {
			l.store.Set(kind, -1, "", 0)
			return l.store.Clear, time.Second + soon(r)
		}}
	}
	return []trouble{
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

// goWrong injects this many faults, one after another, each after some submissions have ended. It
// repeatedly shuffles all faults and injects them in that order. All are repaired at the end.
func (l *ledger) goWrong(r *rand.Rand, wrong []trouble, cycles int) {
	var ills []ill
	var deck []trouble
	for range cycles {
		if !l.pass(&ills, r) {
			break
		}
		passed := 0 // faults that cannot be injected now
		for inflicted := false; !inflicted; passed++ {
			if passed == 2*len(wrong) {
				l.heal(&ills)
				passed = 0
			}
			if len(deck) == 0 {
				deck = slices.Clone(wrong)
				r.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
			}
			f := deck[0]
			deck = deck[1:]
			if slices.ContainsFunc(ills, func(i ill) bool { return i.name == f.name }) {
				continue
			}
			from := l.log.now()
			heal, after := f.inflict(l, r)
			if inflicted = heal != nil; inflicted {
				l.did.add(f.name)
				l.log.note(troubleSubject, "%s, for %s", f.name, after)
				ills = append(ills, ill{f.name, harm{from, from + after}, heal})
			}
		}
	}
	for len(ills) > 0 {
		l.heal(&ills)
	}
	l.ready()
}

// heal waits until the next repair is due and performs it.
func (l *ledger) heal(ills *[]ill) {
	next := slices.MinFunc(*ills, func(a, b ill) int { return cmp.Compare(a.to, b.to) })
	rest(l.t.Context(), next.to-l.log.now())
	// The next repair may start a process, which needs the shared server. That server is repaired
	// first.
	if i := slices.IndexFunc(*ills, func(i ill) bool { return strings.HasPrefix(i.name, brokerName) }); i >= 0 {
		next = (*ills)[i]
	}
	next.heal()
	next.to = l.log.now()
	l.log.note(troubleSubject, "%s: healed", next.name)
	l.harms = append(l.harms, next.harm)
	*ills = slices.DeleteFunc(*ills, func(i ill) bool { return i.name == next.name })
}

// pass waits until some submissions have ended since the call, and then a random moment longer.
// Meanwhile it repairs what is due. It reports whether enough submissions ended.
func (l *ledger) pass(ills *[]ill, r *rand.Rand) bool {
	l.mu.Lock()
	want := l.done + between
	l.mu.Unlock()
	moment, patient := upTo(r, time.Second), time.NewTimer(patience)
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
		if len(*ills) > 0 {
			next := slices.MinFunc(*ills, func(a, b ill) int { return cmp.Compare(a.to, b.to) })
			due = time.After(next.to - l.log.now())
		}
		select {
		case <-l.moved:
		case <-due:
			l.heal(ills)
		case <-until:
			return true
		case <-patient.C:
			l.violate(troubleSubject, "nothing ends any more")
			return false
		}
		for _, m := range l.members {
			if !m.harmed && m.process.ended() {
				l.violate(troubleSubject, "%s ended by itself:\n%s", m.name, m.process.tail())
				return false
			}
		}
	}
}
