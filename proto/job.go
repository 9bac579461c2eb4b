package proto

import (
	"slices"
	"time"
)

// Sandbox is the environment and the limits of a program, resolved from a [Profile] when the job is
// accepted. Workers look nothing up.
type Sandbox struct {
	Image        string    `json:"image,omitempty"`        // as in a [Profile]
	ImageDigest  string    `json:"image_digest,omitempty"` // of an image in the registry
	Architecture string    `json:"architecture,omitempty"` // of that [Image]
	CPU          float64   `json:"cpu"`                    // cores
	Memory       int64     `json:"memory"`                 // bytes
	Pids         int       `json:"pids"`                   // processes and threads
	HomeBytes    int64     `json:"home_bytes"`             // size limit of the home directory
	TmpBytes     int64     `json:"tmp_bytes"`              // size limit of /tmp
	Inodes       int64     `json:"inodes"`                 // in the home directory, and again in /tmp
	RootBytes    int64     `json:"root_bytes,omitempty"`   // as the root of a [Disk]
	Network      Network   `json:"network"`
	OutputBytes  int       `json:"output_bytes"`           // per stream, kept in the result
	OpenFiles    int       `json:"open_files,omitempty"`   // of each process; 0 is [DefaultOpenFiles]
	Isolation    Isolation `json:"isolation,omitempty"`    // as in a [Profile]
	Preload      []string  `json:"preload,omitempty"`      // as in a [Profile]
	SystemCalls  []string  `json:"system_calls,omitempty"` // as in a [Profile]
	Terminals    int       `json:"terminals,omitempty"`    // pseudo-terminals at a time; 0 is none
}

// DefaultOpenFiles is the default limit of open files in a sandbox.
const DefaultOpenFiles = 1024

// DefaultSandbox returns the sandbox of a key without a profile, see [DefaultProfile].
func DefaultSandbox() Sandbox {
	p := DefaultProfile()
	return p.Sandbox("")
}

// HomeOnDisk reports whether a home of that many bytes is stored on disk. A home in memory counts
// against the memory limit, and a full home must cause ENOSPC before the program is killed for
// memory. So a home larger than half of the limit is on disk.
func HomeOnDisk(home, memory int64) bool { return home > memory/2 }

// TmpOnDisk reports whether a /tmp of that many bytes lies on disk: one larger than a quarter of
// the memory, see [HomeOnDisk].
func TmpOnDisk(tmp, memory int64) bool { return tmp > memory/4 }

// OnDisk reports whether any of the sandbox's directories lies on disk.
func (s *Sandbox) OnDisk() bool {
	return HomeOnDisk(s.HomeBytes, s.Memory) || TmpOnDisk(s.TmpBytes, s.Memory)
}

// Meta describes an execution without its program, from submission to the end of its retention.
type Meta struct {
	TraceID  TraceID       `json:"trace_id"`
	Org      string        `json:"org"`
	Key      string        `json:"key"` // the API key's id, never the key
	Mode     Mode          `json:"mode"`
	Language Language      `json:"language"`
	Timeout  int           `json:"timeout"`           // seconds
	Profile  string        `json:"profile,omitempty"` // the name of the sandbox profile
	Image    string        `json:"image,omitempty"`   // of the job's Sandbox
	Network  NetworkPolicy `json:"network,omitempty"` // of the job's Sandbox
	// NetworkExtended is the result of Network.Extended of the job's Sandbox.
	NetworkExtended bool   `json:"network_extended,omitempty"`
	Disk            bool   `json:"disk,omitempty"`         // the result of Sandbox.OnDisk
	Architecture    string `json:"architecture,omitempty"` // of the job's Sandbox
	// the worker that may have the thread's home cached; it gets the job if it has a free slot
	Prefer      string            `json:"prefer,omitempty"`
	MaxAttempts int               `json:"max_attempts"`
	Metadata    map[string]string `json:"metadata,omitempty"`
	ThreadID    string            `json:"thread_id,omitempty"`
	WebhookURL  string            `json:"webhook_url,omitempty"`
	RequestID   string            `json:"request_id,omitempty"`
	ClientID    string            `json:"client_id,omitempty"`
	UserAgent   string            `json:"user_agent,omitempty"`
	// the span of the submission, as the W3C header has it; empty if nothing is traced
	Traceparent string    `json:"traceparent,omitempty"`
	CreatedAt   time.Time `json:"created_at"`
	// RunAt is when the job enters the queue; zero for at once.
	RunAt time.Time `json:"run_at,omitzero"`
	// QueueDeadline is when the job is withdrawn if no worker has started it.
	QueueDeadline time.Time `json:"queue_deadline"`
	// Concurrent and MaxQueued are the plan's limits for the organisation at submission.
	Concurrent int `json:"concurrent"`
	MaxQueued  int `json:"max_queued"`
	// Weight is the weight of the plan. 0, in jobs of older versions, counts as 1.
	Weight int `json:"weight,omitempty"`
	// KeyConcurrent is the API key's own limit, 0 for none.
	KeyConcurrent int `json:"key_concurrent,omitempty"`
	// HasSecrets is whether the job has encrypted secrets.
	HasSecrets bool `json:"has_secrets,omitempty"`
	// HasInjections is whether the worker adds some of them to requests.
	HasInjections bool `json:"has_injections,omitempty"`
	// HasMounts is whether the job has Mounts.
	HasMounts bool `json:"has_mounts,omitempty"`
	// HasVolumes is whether a mount is a volume. Volumes are the slugs of the writable ones.
	HasVolumes bool     `json:"has_volumes,omitempty"`
	Volumes    []string `json:"volumes,omitempty"`
	// Rich runs the program, which is in Python, as one cell, whose displays become results.
	Rich bool `json:"rich,omitempty"`
	// ScheduleID is the schedule that started the execution; it may be empty.
	ScheduleID string `json:"schedule_id,omitempty"`
	// Batch is the id of the execution's batch, or empty. BatchIndex is the item's index in it,
	// from 0.
	Batch      string `json:"batch,omitempty"`
	BatchIndex int    `json:"batch_index,omitempty"`
	// PipelineID is the run of which the execution is a step, or empty. Step is the step's name,
	// with its cell in parentheses.
	PipelineID string `json:"pipeline_id,omitempty"`
	Step       string `json:"step,omitempty"`
	// SandboxID is the live sandbox whose guest the execution runs, or empty.
	SandboxID string `json:"sandbox_id,omitempty"`
	// SandboxMemory is the memory limit of that sandbox in bytes; 0 for other executions. The
	// sandbox needs a worker with as much memory left for sandboxes.
	SandboxMemory int64 `json:"sandbox_memory,omitempty"`
	// Agent is the coding agent whose program that sandbox has at [AgentDir], or empty. AgentVersion is
	// empty for the worker's newest.
	Agent        string `json:"agent,omitempty"`
	AgentVersion string `json:"agent_version,omitempty"`
}

// QueuedAt returns when the job enters the queue. Its wait for a worker counts from then.
func (m *Meta) QueuedAt() time.Time {
	if m.RunAt.IsZero() {
		return m.CreatedAt
	}
	return m.RunAt
}

// Threads returns the ids of the threads that the execution locks, in ascending order: its own and
// those of its writable volumes.
func (m *Meta) Threads() (ids []string) {
	if m.ThreadID != "" {
		ids = append(ids, m.ThreadID)
	}
	for _, slug := range m.Volumes {
		ids = append(ids, VolumeThread(slug))
	}
	slices.Sort(ids)
	return ids
}

// Class returns the class of the job, which follows from its mode.
func (m *Meta) Class() Class { return m.Mode.Class() }

// The maximum sizes of a program, of all its arguments together, and of its standard input.
const (
	MaxCodeBytes  = 1 << 20
	MaxArgsBytes  = 64 << 10
	MaxStdinBytes = 1 << 20
)

// Paths of jobs with [Job.Container].
const (
	ContainerData = "/mnt/data"
	ContainerTmp  = ".tmp"
)

// SandboxHome is the path of the home in live sandboxes, where E2B's clients expect it.
const SandboxHome = "/home/user"

// The time between SIGTERM and SIGKILL: the default for a cancelled program, and the maximum of a
// request. The maximum is lower if a client waits for the answer.
const (
	DefaultKillGrace    = 2 * time.Second
	MaxKillGrace        = 30 * time.Second
	MaxWaitingKillGrace = 3 * time.Second
)

// Job is a program to run, with a resolved snapshot of everything it needs.
type Job struct {
	Meta
	Code  string            `json:"code"`
	Env   map[string]string `json:"env,omitempty"`
	Args  []string          `json:"args,omitempty"`
	Stdin string            `json:"stdin,omitempty"`
	// Requested is nil in jobs of older versions.
	Requested *Requested `json:"requested,omitempty"`
	// Secrets are names of Env. Their values are *** in the output.
	Secrets []string `json:"secrets,omitempty"`
	// Bound are the secrets that the program gets. Sealed has their values, encrypted for this
	// execution.
	Bound  []SecretBinding `json:"bound,omitempty"`
	Sealed []byte          `json:"sealed,omitempty"`
	// Mounts are the parts of storage connections that the program sees below [MountsDir]. Sealed
	// has their credentials too, which the program never gets.
	Mounts []Mount `json:"mounts,omitempty"`
	// Container gives the home the layout of a vendor's container, which model programs expect: it
	// is also at [ContainerData], and its directory [ContainerTmp] is /tmp.
	Container bool `json:"container,omitempty"`
	// StreamPartial makes incomplete lines events after a moment.
	StreamPartial bool `json:"stream_partial,omitempty"`
	// KillGrace is the requested time between SIGTERM and SIGKILL; nil for none.
	KillGrace *Seconds `json:"kill_grace,omitempty"`
	Sandbox   Sandbox  `json:"sandbox"`
	// Live is the live sandbox whose guest runs instead of a program; nil for a program.
	Live *Live `json:"live,omitempty"`
}

// TimeoutGrace returns how long the program may run after the SIGTERM of its timeout. 0 means no
// SIGTERM.
func (j *Job) TimeoutGrace() time.Duration {
	if j.KillGrace == nil {
		return 0
	}
	return time.Duration(*j.KillGrace)
}

// CancelGrace is TimeoutGrace for a program that is cancelled.
func (j *Job) CancelGrace() time.Duration {
	if j.KillGrace == nil {
		return DefaultKillGrace
	}
	return time.Duration(*j.KillGrace)
}

// SetMounts sets the mounts of a job and the fields of its Meta derived from them.
func (j *Job) SetMounts(mounts []Mount) {
	j.Mounts, j.HasMounts, j.HasVolumes, j.Volumes = mounts, len(mounts) > 0, false, nil
	for _, m := range mounts {
		if m.Kind != MountVolume {
			continue
		}
		j.HasVolumes = true
		if !m.ReadOnly {
			j.Volumes = append(j.Volumes, m.Slug)
		}
	}
}

// Record is the state of an execution, from its submission to the end of its retention.
type Record struct {
	Meta
	Status          Status     `json:"status"`
	Attempt         int        `json:"attempt"` // 1 for the first; 0 before the first claim
	Worker          string     `json:"worker,omitempty"`
	Epoch           string     `json:"epoch,omitempty"` // of the worker's lease under which it runs; empty without one
	StartedAt       *time.Time `json:"started_at,omitempty"`
	CompletedAt     *time.Time `json:"completed_at,omitempty"`
	Result          *Result    `json:"result,omitempty"` // when Status is terminal
	ResultSeq       int64      `json:"result_seq,omitempty"`
	OutputTruncated bool       `json:"output_truncated,omitempty"` // events were evicted or lost
	Cancelling      bool       `json:"cancelling,omitempty"`       // cancellation was requested
	// Lost are the workers lost with the execution since its program last ran, each before it
	// started the program.
	Lost []string `json:"lost,omitempty"`
	// Usage is for metering.
	Usage *Usage `json:"usage,omitempty"`
	// Steps are nil until the attempt has ended, and if its worker was lost.
	Steps *Steps `json:"steps,omitempty"`
	// Pending, Commit and VolumeCommits belong to a running execution whose program has ended.
	// Pending becomes the result once Commit is applied to its thread's head and VolumeCommits to
	// those of its volumes. Any process that finds them may do so. Clients do not see them, see
	// Public.
	Pending       *Result        `json:"pending,omitempty"`
	Commit        *Commit        `json:"commit,omitempty"`
	VolumeCommits []VolumeCommit `json:"volume_commits,omitempty"`
	// Request is nil until the execution has ended, and if [Job.Request] returns nil. Only
	// [EncodeRecord] stores it: summaries and indexes do not have it.
	Request *Request `json:"-"`
}

// Public returns the client-visible part of r: to clients, an execution is running until its result
// is stored.
func (r *Record) Public() *Record {
	if r.Pending == nil {
		return r
	}
	public := *r
	public.Pending, public.Commit, public.VolumeCommits, public.Usage, public.Steps, public.OutputTruncated = nil, nil,
		nil, nil, nil, false
	return &public
}

// Usage is the resource consumption of an execution.
type Usage struct {
	CPUMS       int64         `json:"cpu_ms"`
	MemoryPeak  int64         `json:"memory_peak"`            // bytes
	OutputBytes int64         `json:"output_bytes,omitempty"` // of stdout, stderr and results in the result
	Network     *NetworkUsage `json:"network,omitempty"`      // nil if the network was blocked
}

// NetworkUsage is the network traffic of an execution.
type NetworkUsage struct {
	Traffic
	BlockedConnections []BlockedConnection `json:"blocked_connections"` // the first [MaxBlocked] different ones
	BlockedTotal       int64               `json:"blocked_total"`       // all, listed or not
}

// MaxEvents is the number of output events that an execution keeps for reconnecting clients.
const MaxEvents = 10000
