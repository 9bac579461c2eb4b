package proto

// Status is the status of an execution in GET /v1/executions/{id}.
type Status string

// The closed list of statuses. All but the first two are terminal. "blocked" is reserved.
const (
	StatusQueued    Status = "queued"
	StatusRunning   Status = "running"
	StatusSuccess   Status = "success"
	StatusFailed    Status = "failed"
	StatusTimeout   Status = "timeout"
	StatusOOM       Status = "oom"
	StatusSeccomp   Status = "seccomp"
	StatusCancelled Status = "cancelled"
)

// Terminal reports whether the execution has ended.
func (s Status) Terminal() bool { return s != StatusQueued && s != StatusRunning }

// Stream returns the status in event streams, where oom and seccomp are "failed".
func (s Status) Stream() Status {
	if s == StatusOOM || s == StatusSeccomp {
		return StatusFailed
	}
	return s
}

// ErrorCode is why the platform ended an execution. It is part of a [Result].
type ErrorCode string

// The closed list of error codes.
const (
	CodeTimeout            ErrorCode = "timeout"
	CodeCancelled          ErrorCode = "cancelled"
	CodeMemory             ErrorCode = "memory_limit_exceeded"
	CodeHostMemory         ErrorCode = "host_out_of_memory"
	CodeSeccomp            ErrorCode = "security_policy_violation"
	CodeWorkerLost         ErrorCode = "worker_lost"
	CodeSandboxStart       ErrorCode = "sandbox_start_error"
	CodeThreadMount        ErrorCode = "thread_mount_error"
	CodeStorageMount       ErrorCode = "storage_mount_error"
	CodeVolumeMount        ErrorCode = "volume_mount_error"
	CodeCredentialMount    ErrorCode = "credential_mount_error"
	CodeExpiredInQueue     ErrorCode = "expired_in_queue"
	CodeThreadSave         ErrorCode = "thread_save_error"
	CodeStorageWrite       ErrorCode = "storage_write_error"
	CodeSandboxExpired     ErrorCode = "sandbox_expired"
	CodeSandboxIdle        ErrorCode = "sandbox_idle"
	CodeSandboxDrained     ErrorCode = "sandbox_drained"
	errCancelledByUser               = "Cancelled by user"
	errTimedOutAfterFormat           = "execution timed out after %ds"
)

// ErrorCodes returns all error codes.
func ErrorCodes() []ErrorCode {
	return []ErrorCode{
		CodeTimeout, CodeCancelled, CodeMemory, CodeHostMemory, CodeSeccomp, CodeWorkerLost, CodeSandboxStart,
		CodeThreadMount, CodeStorageMount,
		CodeVolumeMount, CodeCredentialMount, CodeExpiredInQueue, CodeThreadSave, CodeStorageWrite,
		CodeSandboxExpired, CodeSandboxIdle, CodeSandboxDrained,
	}
}

// Mode is how a client gets the result; the record shows it as delivery_mode.
type Mode string

// The modes. ModeAsync is "webhook" in the public contract, even without a webhook URL.
const (
	ModeInline    Mode = "inline"
	ModeStreaming Mode = "streaming"
	ModeAsync     Mode = "webhook"
	ModeSandbox   Mode = "sandbox" // the guest of a live sandbox
)

// Class is the urgency of a job: a client waits for interactive jobs.
type Class string

// The classes, in the order in which the dispatcher prefers them.
const (
	ClassInteractive Class = "interactive"
	ClassBackground  Class = "background"
)

// Class returns the class of jobs of mode m.
func (m Mode) Class() Class {
	if m == ModeAsync {
		return ClassBackground
	}
	return ClassInteractive
}
