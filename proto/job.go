package proto

import "time"

// Sandbox is what a program runs in and may use, resolved from a [Profile] when the job is accepted: a worker never looks anything up.
type Sandbox struct {
	Image       string    `json:"image,omitempty"`        // as in a [Profile]
	ImageDigest string    `json:"image_digest,omitempty"` // of an image in the registry
	CPU         float64   `json:"cpu"`                    // cores
	Memory      int64     `json:"memory"`                 // bytes
	Pids        int       `json:"pids"`                   // processes and threads
	HomeBytes   int64     `json:"home_bytes"`             // size limit of the home directory
	TmpBytes    int64     `json:"tmp_bytes"`              // size limit of /tmp
	Inodes      int64     `json:"inodes"`                 // in the home directory, and again in /tmp
	Network     Network   `json:"network"`
	OutputBytes int       `json:"output_bytes"`        // per stream, kept in the result
	Isolation   Isolation `json:"isolation,omitempty"` // as in a [Profile]
	Preload     []string  `json:"preload,omitempty"`   // as in a [Profile]
}

// DefaultSandbox is the sandbox of a key that was bound to none, see [DefaultProfile].
func DefaultSandbox() Sandbox {
	p := DefaultProfile()
	return p.Sandbox("")
}

// HomeOnDisk reports whether a home of so many bytes lies on disk. In memory it counts against the sandbox's limit of that, so a home
// that is to hold more than half of it lies on disk: a program shall meet ENOSPC before it is killed for memory.
func HomeOnDisk(home, memory int64) bool { return home > memory/2 }

// TmpOnDisk reports whether a /tmp of so many bytes lies on disk, as [HomeOnDisk] with a quarter of the memory.
func TmpOnDisk(tmp, memory int64) bool { return tmp > memory/4 }

// OnDisk reports whether any of the sandbox's directories lies on disk.
func (s *Sandbox) OnDisk() bool {
	return HomeOnDisk(s.HomeBytes, s.Memory) || TmpOnDisk(s.TmpBytes, s.Memory)
}

// Meta is what is told of an execution besides its program: kept from submission to the end of its retention.
type Meta struct {
	TraceID     TraceID           `json:"trace_id"`
	Org         string            `json:"org"`
	Key         string            `json:"key"` // the API key's id, never the key
	Mode        Mode              `json:"mode"`
	Language    Language          `json:"language"`
	Timeout     int               `json:"timeout"`           // seconds
	Profile     string            `json:"profile,omitempty"` // the name of the sandbox profile that Sandbox was resolved from
	Image       string            `json:"image,omitempty"`   // the one of Sandbox, for whoever sees only this of a job
	Network     NetworkPolicy     `json:"network,omitempty"` // as Image
	Disk        bool              `json:"disk,omitempty"`    // Sandbox.OnDisk, as Image
	Prefer      string            `json:"prefer,omitempty"`  // the worker to run it if that has a free slot: it may have the thread's home
	MaxAttempts int               `json:"max_attempts"`
	Metadata    map[string]string `json:"metadata,omitempty"`
	ThreadID    string            `json:"thread_id,omitempty"`
	WebhookURL  string            `json:"webhook_url,omitempty"`
	RequestID   string            `json:"request_id,omitempty"`
	ClientID    string            `json:"client_id,omitempty"`
	UserAgent   string            `json:"user_agent,omitempty"`
	CreatedAt   time.Time         `json:"created_at"`
	// QueueDeadline is when the job is withdrawn if no worker has started it.
	QueueDeadline time.Time `json:"queue_deadline"`
	// Concurrent and MaxQueued are the plan's limits for the organisation at submission.
	Concurrent int `json:"concurrent"`
	MaxQueued  int `json:"max_queued"`
	// Weight is the plan's, 0 in what was submitted before plans had one: then it counts as 1.
	Weight int `json:"weight,omitempty"`
	// KeyConcurrent is the API key's own limit, 0 where it has none.
	KeyConcurrent int `json:"key_concurrent,omitempty"`
}

// Class gives the class of the job, which follows from its mode.
func (m *Meta) Class() Class { return m.Mode.Class() }

// The largest sizes of a program, of its arguments together, and of its standard input.
const (
	MaxCodeBytes  = 1 << 20
	MaxArgsBytes  = 64 << 10
	MaxStdinBytes = 1 << 20
)

// Job is a program on its way to a worker, with a resolved snapshot of everything it needs.
type Job struct {
	Meta
	Code    string            `json:"code"`
	Env     map[string]string `json:"env,omitempty"`
	Args    []string          `json:"args,omitempty"`
	Stdin   string            `json:"stdin,omitempty"`
	Sandbox Sandbox           `json:"sandbox"`
}

// Record is what is known of an execution: while it is queued and running, and when it has ended.
type Record struct {
	Meta
	Status          Status     `json:"status"`
	Attempt         int        `json:"attempt"` // 1 for the first; 0 while it has not been claimed
	Worker          string     `json:"worker,omitempty"`
	StartedAt       *time.Time `json:"started_at,omitempty"`
	CompletedAt     *time.Time `json:"completed_at,omitempty"`
	Result          *Result    `json:"result,omitempty"` // when Status is terminal
	ResultSeq       int64      `json:"result_seq,omitempty"`
	OutputTruncated bool       `json:"output_truncated,omitempty"` // events were evicted or lost
	Cancelling      bool       `json:"cancelling,omitempty"`       // cancellation was asked for
	// Lost are the workers that died with the execution since its program last ran, each before it started that.
	Lost []string `json:"lost,omitempty"`
	// Usage is what the execution took, for metering.
	Usage *Usage `json:"usage,omitempty"`
	// Pending and Commit are those of a running execution whose program has ended: what its result will be once Commit is made in its
	// thread's head. Whoever finds them may complete both. Nobody is told of them, see Told.
	Pending *Result `json:"pending,omitempty"`
	Commit  *Commit `json:"commit,omitempty"`
}

// Told gives what may be told of r: of a program that has ended nothing, until its result stands.
func (r *Record) Told() *Record {
	if r.Pending == nil {
		return r
	}
	told := *r
	told.Pending, told.Commit, told.Usage, told.OutputTruncated = nil, nil, nil, false
	return &told
}

// Usage is what an execution took of the machine.
type Usage struct {
	CPUMS      int64         `json:"cpu_ms"`
	MemoryPeak int64         `json:"memory_peak"`       // bytes
	Network    *NetworkUsage `json:"network,omitempty"` // nil where the network was blocked
}

// NetworkUsage is what an execution did with its network.
type NetworkUsage struct {
	Traffic
	BlockedConnections []BlockedConnection `json:"blocked_connections"` // the first [MaxBlocked]
}

// MaxEvents is how many output events of an execution are kept for reconnection.
const MaxEvents = 10000
