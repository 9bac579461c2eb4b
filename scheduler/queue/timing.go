package queue

import "time"

// timing holds the times after which a worker and a dispatcher notice that they are cut off from
// each other. The zero value means the defaults. Tests shorten all of them in proportion.
type timing struct {
	announceEvery time.Duration // heartbeat of a worker; changes are announced at once
	workerTimeout time.Duration // without an announcement
	claimGrace    time.Duration // between an assignment and an announcement that holds the job
	ackWait       time.Duration // see the package comment
	renewEvery    time.Duration // of a worker's lease
	renewTimeout  time.Duration // of one renewal
	holderTimeout time.Duration // the holder stops the program after this long without a confirmed renewal
	leaseTimeout  time.Duration // the dispatcher ends the lease and its attempts after this long without a renewal
	clockSkew     time.Duration // see the constant
	offerKept     time.Duration // how long a replacement for a departed worker is expected
}

// forLive returns the times for live sandboxes, which outlast a failure of half a minute: what is in
// them would be lost.
func (t timing) forLive() timing {
	t.holderTimeout, t.leaseTimeout = 9*t.holderTimeout/2, 5*t.leaseTimeout
	return t
}

// defaults returns t, or the defaults if t is zero.
func (t timing) defaults() timing {
	if t != (timing{}) {
		return t
	}
	return timing{
		announceEvery: 2 * time.Second, workerTimeout: 6 * time.Second, claimGrace: 2 * time.Second, ackWait: 2 * time.Second,
		renewEvery: 3 * time.Second, renewTimeout: 2 * time.Second,
		holderTimeout: 10 * time.Second, leaseTimeout: 12 * time.Second, clockSkew: clockSkew, offerKept: time.Minute,
	}
}
