package queue

import "time"

// shortTiming returns the default timing divided by three.
func shortTiming() timing {
	t := timing{}.defaults()
	for _, d := range []*time.Duration{
		&t.announceEvery, &t.workerTimeout, &t.claimGrace, &t.ackWait, &t.renewEvery, &t.renewTimeout, &t.holderTimeout,
		&t.leaseTimeout,
	} {
		*d /= 3
	}
	return t
}

// ShortenTimeouts makes the dispatcher notice lost workers in a third of the time.
func (d *Dispatcher) ShortenTimeouts() { d.timing = shortTiming() }

// ShortenTimeouts makes the worker notice lost leases in a third of the time.
func (s *Slots) ShortenTimeouts() { s.timing = shortTiming() }

// HolderTimeout returns how long after the last confirmed renewal the worker abandons a lease.
func (s *Slots) HolderTimeout() time.Duration { return s.timing.defaults().holderTimeout }

// ExpectWorkersFor makes the dispatcher expect a worker like one that has left for d.
func (d *Dispatcher) ExpectWorkersFor(kept time.Duration) {
	d.timing = d.timing.defaults()
	d.timing.offerKept = kept
}

// TrustClocks makes the dispatcher read no records of before its term, except for those of jobs that are
// not terminal.
func (d *Dispatcher) TrustClocks() {
	d.timing = d.timing.defaults()
	d.timing.clockSkew = 0
}
