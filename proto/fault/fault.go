// Package fault has the points at which tests make bullpen die. The released program has none of
// them: only a build with the tag "faults" reads the variable below, and in any other build [Here]
// is empty.
//
//	BULLPEN_CRASH_AT=POINT[:N]  kills the process the Nth time it passes the point; N is 1 by default
//
// A name that is not among [Points], [BatchPoints], [SchedulePoints], [SandboxPoints],
// [PipelinePoints], [AuditPoints] or [AgentPoints] ends the process when it starts, with exit code 2.
package fault

// Point is a step of an execution at which a process can die. Its name states the last completed
// step and the next one.
type Point string

// Points of executions, in the order in which they are passed. docs/explanation/promises.md describes what
// each leaves behind.
const (
	// AfterJobBeforeReply is in the dispatcher: the job is stored, and the gateway does not know.
	AfterJobBeforeReply Point = "after_job_before_reply"
	// AfterAcceptBeforeAnswer is in the gateway: the execution is accepted, and the client does not
	// know.
	AfterAcceptBeforeAnswer Point = "after_accept_before_answer"
	// AfterAssign is in the dispatcher: a worker was assigned the job. Both the assignment and the
	// job, on its way to the store, may still be lost.
	AfterAssign Point = "after_assign"
	// AfterTakeBeforeClaim is in the worker: it has the job, which is not recorded yet.
	AfterTakeBeforeClaim Point = "after_take_before_claim"
	// AfterClaimBeforeStart is in the worker: the execution is recorded as running, and its program
	// has not started.
	AfterClaimBeforeStart Point = "after_claim_before_start"
	// AfterOutputBeforeResult is in the worker: the program has ended and all its output is
	// published; nothing else of its outcome is recorded.
	AfterOutputBeforeResult Point = "after_output_before_result"
	// AfterSaveBeforePending is in the worker: the home is stored, but no record or head refers to
	// it.
	AfterSaveBeforePending Point = "after_save_before_pending"
	// AfterPendingBeforeCommit is in the worker: the result is pending, and the thread has its old
	// version.
	AfterPendingBeforeCommit Point = "after_pending_before_commit"
	// AfterCommitBeforeResult is in the worker: the thread has its new version, and the result is
	// pending.
	AfterCommitBeforeResult Point = "after_commit_before_result"
	// AfterResultBeforeAck is in the worker: the result is stored, and this process has sent no
	// notification.
	AfterResultBeforeAck Point = "after_result_before_ack"
	// AfterFenceBeforeLost is in the dispatcher: the holder of a thread was fenced off, and its
	// execution is still recorded as running.
	AfterFenceBeforeLost Point = "after_fence_before_lost"
	// AfterResultBeforeDelivery is in the dispatcher: the result is stored, and its webhook is
	// recorded in the job alone.
	AfterResultBeforeDelivery Point = "after_result_before_delivery"
	// AfterDeliveryBeforeJobRemoved is in the dispatcher: the webhook is recorded in the delivery
	// and in the job.
	AfterDeliveryBeforeJobRemoved Point = "after_delivery_before_job_removed"
	// AfterPostBeforeRecord is in the webhook dispatcher: the receiver has answered, and the
	// attempt is not recorded.
	AfterPostBeforeRecord Point = "after_post_before_record"
)

// Points of batches.
const (
	// AfterItemsBeforeBatch is in the gateway: the items of a new batch are stored, the batch is not.
	AfterItemsBeforeBatch Point = "after_items_before_batch"
	// AfterBatchBeforeAnswer is in the gateway: the batch is stored, and the client does not know.
	AfterBatchBeforeAnswer Point = "after_batch_before_answer"
	// AfterReserveBeforeItem is in the engine: the state says that items may have been submitted, and
	// they were not.
	AfterReserveBeforeItem Point = "after_reserve_before_item"
	// AfterItemBeforeState is in the engine: an item is accepted, and the state does not say so.
	AfterItemBeforeState Point = "after_item_before_state"
	// AfterBatchBeforeDelivery is in the engine: the end of the batch is stored, its webhook is not.
	AfterBatchBeforeDelivery Point = "after_batch_before_delivery"
)

// Points of schedules.
const (
	// AfterDueBeforeTick is in the runner: a tick is due, and its execution is not submitted.
	AfterDueBeforeTick Point = "after_due_before_tick"
	// AfterTickBeforeState is in the runner: the execution of a tick is accepted, and the state of the
	// schedule does not say so.
	AfterTickBeforeState Point = "after_tick_before_state"
	// AfterRefusalBeforeState is in the runner: the execution of a tick was refused and its webhook is
	// stored, and the state of the schedule does not say so.
	AfterRefusalBeforeState Point = "after_refusal_before_state"
	// AfterStateBeforeNextTick is in the runner: a tick is handled and the state says so.
	AfterStateBeforeNextTick Point = "after_state_before_next_tick"
)

// AfterChangeBeforeOutcome is in the gateway: an administrative change is made, and the audit log has
// only its intent.
const AfterChangeBeforeOutcome Point = "after_change_before_outcome"

// AuditPoints returns the points of administrative acts.
func AuditPoints() []Point { return []Point{AfterChangeBeforeOutcome} }

// Points of runs of agents.
const (
	// AfterAgentChangeBeforeResult is in the gateway: a call has changed a file, and the log of its run
	// has no result of it.
	AfterAgentChangeBeforeResult Point = "after_agent_change_before_result"
	// AfterAgentEndBeforeWebhook is in the gateway: the end of a run is stored, its webhook is not.
	AfterAgentEndBeforeWebhook Point = "after_agent_end_before_webhook"
	// AfterAgentWebhookBeforeFinish is in the gateway: the end of a run and its webhook are stored, and
	// the run is still listed as active.
	AfterAgentWebhookBeforeFinish Point = "after_agent_webhook_before_finish"
)

// AgentPoints returns the points of runs of agents.
func AgentPoints() []Point {
	return []Point{AfterAgentChangeBeforeResult, AfterAgentEndBeforeWebhook, AfterAgentWebhookBeforeFinish}
}

// Points of live sandboxes, all in the gateway.
const (
	// AfterSandboxBeforeJob: a sandbox is stored as starting, and its execution is not submitted.
	AfterSandboxBeforeJob Point = "after_sandbox_before_job"
	// AfterGuestBeforeRunning: the guest of a sandbox answers, and the sandbox is stored as starting.
	AfterGuestBeforeRunning Point = "after_guest_before_running"
	// AfterStoppingBeforeCancel: a sandbox is stored as stopping, and its execution goes on.
	AfterStoppingBeforeCancel Point = "after_stopping_before_cancel"
)

// SandboxPoints returns the points of live sandboxes.
func SandboxPoints() []Point {
	return []Point{AfterSandboxBeforeJob, AfterGuestBeforeRunning, AfterStoppingBeforeCancel}
}

// Points of pipelines.
const (
	// AfterRunBeforeState is in the gateway: the definition of a new run and its files are stored, and
	// its state says that it is being created.
	AfterRunBeforeState Point = "after_run_before_state"
	// AfterPrepareBeforeStep is in the runner: the workspace of a cell is ready, and its execution is
	// not submitted.
	AfterPrepareBeforeStep Point = "after_prepare_before_step"
	// AfterStepBeforeState is in the runner: the execution of a cell is accepted, and the state of the
	// run does not name it.
	AfterStepBeforeState Point = "after_step_before_state"
	// AfterKeepBeforeState is in the runner: the artifacts and the cache of a cell that has ended are
	// stored, and the state of the run says that it runs.
	AfterKeepBeforeState Point = "after_keep_before_state"
	// AfterEndBeforeForget is in the runner: the state says that the run has ended, and its secrets
	// are still stored.
	AfterEndBeforeForget Point = "after_end_before_forget"
)

// PipelinePoints returns the points of pipelines.
func PipelinePoints() []Point {
	return []Point{
		AfterRunBeforeState, AfterPrepareBeforeStep, AfterStepBeforeState, AfterKeepBeforeState,
		AfterEndBeforeForget,
	}
}

// SchedulePoints returns the points of schedules.
func SchedulePoints() []Point {
	return []Point{AfterDueBeforeTick, AfterTickBeforeState, AfterRefusalBeforeState, AfterStateBeforeNextTick}
}

// BatchPoints returns the points of batches.
func BatchPoints() []Point {
	return []Point{
		AfterItemsBeforeBatch, AfterBatchBeforeAnswer, AfterReserveBeforeItem, AfterItemBeforeState,
		AfterBatchBeforeDelivery,
	}
}

// Points returns the points of executions.
func Points() []Point {
	return []Point{
		AfterJobBeforeReply, AfterAcceptBeforeAnswer, AfterAssign, AfterTakeBeforeClaim, AfterClaimBeforeStart,
		AfterOutputBeforeResult,
		AfterSaveBeforePending, AfterPendingBeforeCommit, AfterCommitBeforeResult, AfterResultBeforeAck, AfterFenceBeforeLost,
		AfterResultBeforeDelivery,
		AfterDeliveryBeforeJobRemoved, AfterPostBeforeRecord,
	}
}
