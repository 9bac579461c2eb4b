// Package fault has the places at which tests make bullpen die, and the bugs that tests plant in it to see whether they are found.
// Nothing of it is in what people run: only a build with the tag "faults" reads the two variables below, and in any other [Here] and
// [Planted] are compiled to nothing.
//
//	BULLPEN_CRASH_AT=POINT[:N]  the process kills itself the Nth time it passes that point, the first time by default
//	BULLPEN_PLANTED_BUG=BUG     the process has that bug
//
// A name that is not among [Points] or [Bugs] ends the process when it starts, with exit code 2.
package fault

// Point is a moment in the life of an execution at which a process can die, named after what has happened and what has not.
type Point string

// In the order in which an execution passes them. What each leaves behind is told by docs/architecture.md.
const (
	// AfterJobBeforeReply is in the dispatcher: the job is stored, and the gateway does not know.
	AfterJobBeforeReply Point = "after_job_before_reply"
	// AfterAcceptBeforeAnswer is in the gateway: the execution is accepted, and the client does not know.
	AfterAcceptBeforeAnswer Point = "after_accept_before_answer"
	// AfterAssign is in the dispatcher: a worker was given the job. Both that word and the job, on its way to the store, may still be lost.
	AfterAssign Point = "after_assign"
	// AfterTakeBeforeClaim is in the worker: it has the job, and no record says so.
	AfterTakeBeforeClaim Point = "after_take_before_claim"
	// AfterClaimBeforeStart is in the worker: the execution is recorded as running, and its program has not started.
	AfterClaimBeforeStart Point = "after_claim_before_start"
	// AfterOutputBeforeResult is in the worker: the program has ended and all it printed is published; nothing else is known of its end.
	AfterOutputBeforeResult Point = "after_output_before_result"
	// AfterSaveBeforePending is in the worker: the home is stored, and no record or head names what was stored.
	AfterSaveBeforePending Point = "after_save_before_pending"
	// AfterPendingBeforeCommit is in the worker: the result is pending, and the thread has its old version.
	AfterPendingBeforeCommit Point = "after_pending_before_commit"
	// AfterCommitBeforeResult is in the worker: the thread has its new version, and the result is pending.
	AfterCommitBeforeResult Point = "after_commit_before_result"
	// AfterResultBeforeAck is in the worker: the result stands, and nobody was told by this process.
	AfterResultBeforeAck Point = "after_result_before_ack"
	// AfterFenceBeforeLost is in the dispatcher: the holder of a thread was fenced off, and its execution is still recorded as running.
	AfterFenceBeforeLost Point = "after_fence_before_lost"
	// AfterResultBeforeDelivery is in the dispatcher: the result stands, and its webhook is remembered by the job alone.
	AfterResultBeforeDelivery Point = "after_result_before_delivery"
	// AfterDeliveryBeforeJobRemoved is in the dispatcher: the webhook is remembered by the delivery and by the job.
	AfterDeliveryBeforeJobRemoved Point = "after_delivery_before_job_removed"
	// AfterPostBeforeRecord is in the webhook dispatcher: the receiver has answered, and the attempt is not recorded.
	AfterPostBeforeRecord Point = "after_post_before_record"
)

// Points gives all points.
func Points() []Point {
	return []Point{
		AfterJobBeforeReply, AfterAcceptBeforeAnswer, AfterAssign, AfterTakeBeforeClaim, AfterClaimBeforeStart, AfterOutputBeforeResult,
		AfterSaveBeforePending, AfterPendingBeforeCommit, AfterCommitBeforeResult, AfterResultBeforeAck, AfterFenceBeforeLost, AfterResultBeforeDelivery,
		AfterDeliveryBeforeJobRemoved, AfterPostBeforeRecord,
	}
}

// Bug is a way to break a promise of bullpen.
type Bug string

// Each is planted where what keeps it out is, and shows in the history that is told here. Without that history nothing is seen of it.
const (
	// AckBeforeResult has the dispatcher take a job as finished, and remove it, when it is claimed. Nobody looks after the lease then: kill
	// the worker of a program that runs, and the execution is "running" for ever, whichever dispatcher leads.
	AckBeforeResult Bug = "ack_before_result"
	// ResultWithoutCAS has terminal records written over whatever the record is by then. Freeze a worker (SIGSTOP), let a program of its end
	// by itself meanwhile, wait until the execution is worker_lost, 12 s, and wake the worker: it is a success after that. A program that
	// runs on until then is killed, and shows nothing; nor does one whose home has changed, since its result has to be pending first. What is
	// withdrawn or cancelled at the moment of its claim, and a submission whose answer is lost, may also end twice.
	ResultWithoutCAS Bug = "result_without_cas"
	// ClaimAfterStart has the worker write no claim before the program starts; the result is the first to tell of it. Kill the worker of a
	// program that runs: 6 s later, when it counts as silent, the program is started again on another, also where one attempt is all that is
	// allowed.
	ClaimAfterStart Bug = "claim_after_start"
	// LeaseWithoutFencing has a worker that lost its lease go on as if it had not: it does not stop its program, and takes back the record.
	// Its thread is not fenced either. Freeze a worker while a program runs, wait until the execution is worker_lost, and wake the worker:
	// the record is "running" again, and then a success, and the thread has what the lost execution wrote.
	LeaseWithoutFencing Bug = "lease_without_fencing"
	// RetryInMemory has the webhook dispatcher know of pending deliveries by its memory alone. Have a receiver refuse the first attempt, and
	// kill the process that leads before the second is due: the delivery is pending for ever.
	RetryInMemory Bug = "retry_in_memory"
)

// Bugs gives all bugs.
func Bugs() []Bug {
	return []Bug{AckBeforeResult, ResultWithoutCAS, ClaimAfterStart, LeaseWithoutFencing, RetryInMemory}
}
