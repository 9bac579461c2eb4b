// Package queue distributes durable jobs to workers, fairly and at most once per attempt, and
// stores their results. Gateways submit jobs through [Queue], one [Dispatcher] assigns them, and
// workers take them through [Slots]. The package guarantees that an accepted job is durable, ends
// with exactly one terminal record, and is run by one lease holder at a time.
//
// An execution takes three durable writes: the job, the claim and the result. Claim, cancel and
// result are one record on one subject, changed only by compare-and-set. Whoever knows an old
// revision can therefore write none of them.
//
// # Leases
//
// A worker has one lease for all attempts that it has claimed, a message on a subject of its own:
//
//  1. The worker creates the lease. From then on it is in an epoch, and the records of its claims name
//     the epoch.
//  2. It renews the lease every renewEvery: it replaces the message by compare-and-set. When no renewal
//     that it sent in the last holderTimeout was confirmed, the epoch is over. The worker kills its
//     programs and begins another epoch, with another lease.
//  3. The dispatcher follows the leases. When it has learnt of no renewal for leaseTimeout, which is
//     longer, it replaces the last one that it knows with a message that ends the lease. If the worker
//     has renewed it in the meantime, that write fails. If it succeeds, no renewal can follow.
//  4. The dispatcher ends the attempts whose records name the epoch, each by compare-and-set of its
//     record. A claim that arrives now was not acknowledged in time, and the worker checks that before
//     it starts the program.
//
// The slots for live sandboxes have a lease of their own, with longer times.
//
// All times are measured from a moment before what they bound, with monotonic clocks, so that the
// clocks of machines need not agree.
//
// # Early hand-over
//
// If a slot is free when a job is submitted, the worker prepares the sandbox while the job is
// stored:
//
//  1. The dispatcher sends the assignment with the whole job, and with job number 0.
//  2. The worker prepares a sandbox, but does not claim the job yet.
//  3. If the job is stored, the dispatcher sends an ack, and the worker claims the job and starts
//     it.
//  4. If storing failed, the dispatcher sends a nack, and the worker drops the job.
//  5. If neither arrives within ackWait, the worker looks for the job in the stream, and claims it
//     if the job is there.
package queue
