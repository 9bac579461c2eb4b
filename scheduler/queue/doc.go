// Package queue distributes durable jobs to workers, fairly and at most once per attempt, and
// stores their results. Gateways submit jobs through [Queue], one [Dispatcher] assigns them, and
// workers take them through [Slots]. The package guarantees that an accepted job is durable, ends
// with exactly one terminal record, and is run by one lease holder at a time.
//
// An execution takes three durable writes: the job, the claim and the result. Claim, lease and
// result are one record on one subject, changed only by compare-and-set. A worker that lost the
// lease can therefore write none of them.
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
