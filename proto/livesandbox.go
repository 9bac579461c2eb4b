package proto

import (
	"crypto/rand"
	"crypto/sha256"
	"slices"
	"strings"
	"time"
)

// Limits of live sandboxes.
const (
	// MaxLiveSandboxes bounds the sandboxes of an organisation that are kept, paused ones included.
	MaxLiveSandboxes = 1000
	// MaxSandboxActs bounds the acts that are kept of a sandbox.
	MaxSandboxActs = 20
	// DefaultSandboxTimeout is the timeout of a sandbox whose request names none.
	DefaultSandboxTimeout = 5 * time.Minute
	// SandboxStopGrace is the time between SIGTERM and SIGKILL when a live sandbox stops.
	SandboxStopGrace = 5 * time.Second
	// MaxSandboxFreeze bounds how long the processes of a sandbox stand still while it is saved.
	MaxSandboxFreeze = 2 * time.Second
	// MaxSandboxLog bounds what is kept of the output of the processes of one start, in bytes with
	// the form of the log. A profile's limit of output may be lower.
	MaxSandboxLog = 4 << 20
	// HeartbeatEvery is the interval of a worker's heartbeat: it writes the time to memory that its
	// guests read.
	HeartbeatEvery = time.Second
	// GuestTimeout is the age of the heartbeat at which a guest ends itself and all processes,
	// because its worker is frozen. The worker's lease expires after 45 seconds, and the worker is
	// declared lost after 60 seconds.
	GuestTimeout = 48 * time.Second
)

// LiveSandbox is a sandbox that outlives a program: processes are started in it until it stops.
// Each time it starts, an execution runs its guest, which ends when the sandbox stops.
type LiveSandbox struct {
	ID       string            `json:"id"`
	Org      string            `json:"org"`
	Key      string            `json:"key"` // the id of the API key under which it runs
	Name     string            `json:"name,omitempty"`
	Profile  string            `json:"profile,omitempty"` // as the request named it; empty for the key's own
	Metadata map[string]string `json:"metadata,omitempty"`
	Env      map[string]string `json:"env,omitempty"` // of the request alone
	SubPaths []string          `json:"sub_paths,omitempty"`
	ThreadID string            `json:"thread_id"` // of its home
	// OwnHome means that the thread was created for the sandbox, and is removed with it.
	OwnHome   bool        `json:"own_home,omitempty"`
	OnTimeout SandboxStop `json:"on_timeout"`
	// AgentSession is the id of the log of the agent session whose programs run in the sandbox; empty for none.
	AgentSession string `json:"agent_session,omitempty"`
	// Agent is the coding agent whose program it has at [AgentDir], or empty. AgentVersion is empty for
	// the newest that its worker has.
	Agent        string `json:"agent,omitempty"`
	AgentVersion string `json:"agent_version,omitempty"`
	// Interpreters means that the interpreters of its thread run in it, which keep their state between calls of
	// tools. Only such a sandbox starts again after it has ended, and it is never paused.
	Interpreters bool `json:"interpreters,omitempty"`
	// PublicPorts means that requests to its ports need no token, as E2B's clients may ask for.
	PublicPorts bool            `json:"public_ports,omitempty"`
	Timeout     Seconds         `json:"timeout"`                // of its last start
	IdleTimeout Seconds         `json:"idle_timeout,omitempty"` // 0 for none
	CreatedAt   time.Time       `json:"created_at"`
	State       SandboxState    `json:"state"`
	Reason      SandboxReason   `json:"reason,omitempty"`  // why it stopped; empty before
	Message     string          `json:"message,omitempty"` // the reason in words
	Starts      int             `json:"starts"`            // how often it was started
	Execution   TraceID         `json:"execution"`         // of its last start
	Worker      string          `json:"worker,omitempty"`  // of that execution, once it runs
	StartedAt   time.Time       `json:"started_at"`
	ExpiresAt   time.Time       `json:"expires_at"`
	StoppedAt   time.Time       `json:"stopped_at,omitzero"`
	Stopping    *SandboxStopped `json:"stopping,omitempty"` // a stop that a client requested; nil for none
	Acts        []SandboxAct    `json:"acts,omitempty"`     // of clients, see [LiveSandbox.AddAct]
}

// Place is where the call of a tool runs if that is no execution of its own: in one start of the live sandbox of its
// thread, and in one interpreter if it is a cell.
type Place struct {
	Start   TraceID `json:"start"`             // the execution of the start
	Context string  `json:"context,omitempty"` // of a cell
	Note    string  `json:"note,omitempty"`    // what the model must know of the interpreter
}

// SandboxAct is a client's action on a live sandbox.
type SandboxAct struct {
	Act       SandboxActName `json:"act"`
	Key       string         `json:"key"` // the id of the API key or the member
	RequestID string         `json:"request_id,omitempty"`
	At        time.Time      `json:"at"`
}

// SandboxActName names an act.
type SandboxActName string

// The acts. The list may only grow.
const (
	SandboxCreateAct SandboxActName = "create"
	SandboxExtendAct SandboxActName = "extend"
	SandboxPauseAct  SandboxActName = "pause"
	SandboxResumeAct SandboxActName = "resume"
	SandboxDeleteAct SandboxActName = "delete"
)

// SandboxActNames returns the names of all acts.
func SandboxActNames() []SandboxActName {
	return []SandboxActName{SandboxCreateAct, SandboxExtendAct, SandboxPauseAct, SandboxResumeAct, SandboxDeleteAct}
}

// AddAct adds an act of a caller. It keeps the first act and the last [MaxSandboxActs]-1. Of
// consecutive extensions by one key it keeps only the last, because clients extend a sandbox every
// few seconds.
func (s *LiveSandbox) AddAct(name SandboxActName, c *Caller) {
	act := SandboxAct{Act: name, Key: c.Key.ID, RequestID: c.RequestID, At: time.Now().UTC()}
	acts := slices.Clone(s.Acts) // records in memory share it
	switch last := len(acts) - 1; {
	case last >= 0 && name == SandboxExtendAct && acts[last].Act == name && acts[last].Key == act.Key:
		acts[last] = act
	case len(acts) == MaxSandboxActs:
		acts = append(slices.Delete(acts, 1, 2), act)
	default:
		acts = append(acts, act)
	}
	s.Acts = acts
}

// SandboxStopped is how a live sandbox stops and why.
type SandboxStopped struct {
	Stop   SandboxStop   `json:"stop"`
	Reason SandboxReason `json:"reason"`
}

// SandboxStop is what a stop leaves of a live sandbox.
type SandboxStop string

// The stops.
const (
	SandboxKill  SandboxStop = "kill"  // it does not start again
	SandboxPause SandboxStop = "pause" // its home is saved, and it can be resumed
)

// SandboxStops returns all stops.
func SandboxStops() []SandboxStop { return []SandboxStop{SandboxKill, SandboxPause} }

// SandboxState is the state of a live sandbox.
type SandboxState string

// The states.
const (
	SandboxStarting SandboxState = "starting"
	SandboxRunning  SandboxState = "running"
	SandboxStopping SandboxState = "stopping" // it was told to stop, and its home is being saved
	SandboxPaused   SandboxState = "paused"
	SandboxEnded    SandboxState = "ended" // for good
)

// SandboxStates returns all states.
func SandboxStates() []SandboxState {
	return []SandboxState{SandboxStarting, SandboxRunning, SandboxStopping, SandboxPaused, SandboxEnded}
}

// Active reports whether an execution of the sandbox has not ended.
func (s SandboxState) Active() bool {
	return s == SandboxStarting || s == SandboxRunning || s == SandboxStopping
}

// SandboxReason is why a live sandbox stopped.
type SandboxReason string

// The reasons. The list may only grow.
const (
	SandboxExpired       SandboxReason = "expired"               // its timeout passed
	SandboxIdle          SandboxReason = "idle"                  // its idle timeout passed
	SandboxKilled        SandboxReason = "killed"                // a client deleted it
	SandboxPausedByUser  SandboxReason = "paused"                // a client paused it
	SandboxWorkerLost    SandboxReason = "worker_lost"           // its worker died or lost its lease
	SandboxWorkerDrained SandboxReason = "worker_drained"        // its worker was shut down
	SandboxMemory        SandboxReason = "memory_limit_exceeded" // it exceeded its memory
	SandboxKeyRevoked    SandboxReason = "key_revoked"           // its API key is no longer valid
	SandboxGuestEnded    SandboxReason = "guest_ended"           // a process in it ended its guest
	SandboxNotStarted    SandboxReason = "not_started"           // no worker was free, or it could not be started
	SandboxNotSaved      SandboxReason = "home_not_saved"        // its home could not be saved when it stopped
	SandboxForbiddenCall SandboxReason = "forbidden_system_call" // a process in it made one
	// SandboxStorageNotSaved means that a volume or a file of a storage connection could not be
	// stored.
	SandboxStorageNotSaved SandboxReason = "storage_not_saved"
)

// SandboxReasons returns all reasons.
func SandboxReasons() []SandboxReason {
	return []SandboxReason{
		SandboxExpired, SandboxIdle, SandboxKilled, SandboxPausedByUser, SandboxWorkerLost, SandboxWorkerDrained,
		SandboxMemory, SandboxKeyRevoked, SandboxGuestEnded, SandboxNotStarted, SandboxNotSaved, SandboxForbiddenCall,
		SandboxStorageNotSaved,
	}
}

// sandboxIDLetters are the letters of sandbox ids. Host names are cut at a hyphen, so there is
// none.
const sandboxIDLetters = "abcdefghijklmnopqrstuvwxyz234567"

// NewSandboxID returns a random id of a live sandbox.
func NewSandboxID() string { return "i" + strings.ToLower(rand.Text()) }

// ValidSandboxID reports whether text has the form of a live sandbox's id.
func ValidSandboxID(text string) bool {
	rest, ok := strings.CutPrefix(text, "i")
	return ok && len(rest) == len(rand.Text()) && strings.Trim(rest, sandboxIDLetters) == ""
}

// Live is what a worker knows of the live sandbox whose guest a job runs.
type Live struct {
	Sandbox string `json:"sandbox"`
	// TicketHash is the SHA-256 of the ticket with which gateways identify themselves to the
	// worker.
	TicketHash  [sha256.Size]byte `json:"ticket_hash"`
	ExpiresAt   time.Time         `json:"expires_at"`
	IdleTimeout Seconds           `json:"idle_timeout,omitempty"` // 0 for none
	Start       int               `json:"start,omitempty"`        // as Starts of the sandbox
}

// NextStop returns what becomes of a live sandbox whose execution has ended with a record.
func (s *LiveSandbox) NextStop(rec *Record) SandboxStopped {
	stopped := SandboxStopped{SandboxKill, SandboxGuestEnded}
	code := ErrorCode("")
	if rec.Result.ErrorCode != nil {
		code = ErrorCode(*rec.Result.ErrorCode)
	}
	switch code {
	case CodeSandboxExpired:
		stopped = SandboxStopped{s.OnTimeout, SandboxExpired}
	case CodeSandboxIdle:
		stopped = SandboxStopped{s.OnTimeout, SandboxIdle}
	case CodeSandboxDrained:
		stopped = SandboxStopped{SandboxPause, SandboxWorkerDrained}
	case CodeWorkerLost:
		stopped = SandboxStopped{s.OnTimeout, SandboxWorkerLost}
	case CodeMemory, CodeHostMemory:
		stopped = SandboxStopped{s.OnTimeout, SandboxMemory}
	case CodeSeccomp:
		stopped.Reason = SandboxForbiddenCall
	case CodeThreadSave:
		stopped = SandboxStopped{s.OnTimeout, SandboxNotSaved}
	case CodeStorageWrite:
		stopped = SandboxStopped{s.OnTimeout, SandboxStorageNotSaved}
	case CodeCancelled:
		if s.Stopping != nil {
			return *s.Stopping
		}
		stopped.Reason = SandboxKilled
	default:
		if rec.Attempt == 0 || code != "" {
			stopped.Reason = SandboxNotStarted
			if s.Starts > 1 {
				stopped.Stop = SandboxPause // as it was before
			}
		}
	}
	switch {
	case s.Stopping == nil:
	case s.Stopping.Stop == SandboxKill:
		return *s.Stopping
	default:
		stopped.Stop = SandboxPause // with the home as it was saved last
	}
	return stopped
}
