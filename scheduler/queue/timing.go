package queue

import "time"

// timing holds the times by which a worker notices that it is cut off, and a dispatcher that a
// worker is. The zero value means the defaults. Tests shorten all of them in proportion.
type timing struct {
	announceEvery time.Duration // heartbeat of a worker; changes are announced at once
	workerTimeout time.Duration // without an announcement
	claimGrace    time.Duration // between an assignment and an announcement that holds the job
	ackWait       time.Duration // see the package comment
	renewEvery    time.Duration // of a worker's lease
	renewTimeout  time.Duration // of one renewal
	holderTimeout time.Duration // without a confirmed renewal, after which the holder stops the program
	leaseTimeout  time.Duration // without a renewal, after which the dispatcher ends the lease and its attempts
	offerKept     time.Duration // for which a worker like one that has left is expected
}

// defaults returns t, or the defaults if t is zero.
func (t timing) defaults() timing {
	if t != (timing{}) {
		return t
	}
	return timing{
		announceEvery: 2 * time.Second, workerTimeout: 6 * time.Second, claimGrace: 2 * time.Second, ackWait: 2 * time.Second,
		renewEvery: 3 * time.Second, renewTimeout: 2 * time.Second,
		holderTimeout: 10 * time.Second, leaseTimeout: 12 * time.Second, offerKept: time.Minute,
	}
}
