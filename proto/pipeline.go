package proto

import (
	"crypto/rand"
	"fmt"
	"strings"
	"time"
)

// Limits of pipelines.
const (
	// MaxPipelineFile bounds the file of a pipeline, in bytes.
	MaxPipelineFile = 256 << 10
	// MaxPipelineSteps bounds the steps of a pipeline.
	MaxPipelineSteps = 64
	// MaxMatrixCells bounds the cells of a step.
	MaxMatrixCells = 64
	// MaxPipelineCells bounds the cells of all steps of a pipeline.
	MaxPipelineCells = 256
	// MaxActivePipelines bounds the runs of an organisation that have not ended.
	MaxActivePipelines = 20
	// MaxPipelines bounds the runs of an organisation that are kept. The oldest ones are removed.
	MaxPipelines = 200
	// MaxPipelineTime bounds the time of a run. It is shorter than idempotency keys are kept.
	MaxPipelineTime = 6 * time.Hour
	// MaxArtifactFiles and MaxArtifactBytes limit what a cell copies from other threads: the
	// artifacts of all other cells, and its cache.
	MaxArtifactFiles = 50_000
	MaxArtifactBytes = int64(GiB)
)

// Pipeline is the definition of a run of a pipeline. It never changes, but Secrets are removed
// at the end.
type Pipeline struct {
	ID     string `json:"id"`
	Org    string `json:"org"`
	Key    string `json:"key"` // the id of the API key under which the steps run
	Name   string `json:"name"`
	Commit string `json:"commit,omitempty"`
	Branch string `json:"branch,omitempty"`
	// Timeout bounds the time of the run.
	Timeout Seconds           `json:"timeout"`
	Env     map[string]string `json:"env,omitempty"`     // of all steps
	Secrets map[string]string `json:"secrets,omitempty"` // variables of the steps that name them
	Steps   []PipelineStep    `json:"steps"`
	// Created is when the run was accepted.
	CreatedAt time.Time `json:"created_at"`
}

// PipelineStep is a step of a pipeline.
type PipelineStep struct {
	Name     string        `json:"name"`
	Language Language      `json:"language"`
	Code     string        `json:"code"`            // with references to the matrix, see [PipelineStep.CellCode]
	Needs    []string      `json:"needs,omitempty"` // names of earlier or later steps
	When     StepCondition `json:"when"`
	Timeout  int           `json:"timeout"` // seconds
	// KillGrace is the grace of the executions; nil for none.
	KillGrace *Seconds          `json:"kill_grace,omitempty"`
	Own       bool              `json:"own,omitempty"` // each cell has a workspace of its own
	Env       map[string]string `json:"env,omitempty"` // with references to the matrix
	Secrets   []string          `json:"secrets,omitempty"`
	// Artifacts are paths in the workspace by the name of the artifact.
	Artifacts map[string][]string `json:"artifacts,omitempty"`
	// Cache are the workspace paths kept from one run to the next.
	Cache []string     `json:"cache,omitempty"`
	Cells []MatrixCell `json:"cells"` // at least one
	// Line and ProfileLine are the lines of the step and of its profile in the file.
	Line        int `json:"line,omitempty"`
	ProfileLine int `json:"profile_line,omitempty"`
}

// MatrixCell is a combination of the values of a step's matrix.
type MatrixCell struct {
	// Name is unique in the step, and empty for a step without a matrix.
	Name   string            `json:"name,omitempty"`
	Values map[string]string `json:"values,omitempty"`
	// Profile is the name of a sandbox profile; if empty, the API key's is used. CacheKey is the
	// key of the step's cache. Matrix values are filled in.
	Profile  string `json:"profile,omitempty"`
	CacheKey string `json:"cache_key,omitempty"`
}

// StepCondition decides whether a step runs once the steps it needs have ended.
type StepCondition string

// The conditions.
const (
	WhenSuccess StepCondition = "success" // all have succeeded
	WhenFailure StepCondition = "failure" // one has failed
	WhenAlways  StepCondition = "always"
)

// StepStatus is the status of a cell of a step.
type StepStatus string

// The statuses.
const (
	StepWaiting   StepStatus = "waiting" // for the steps that it needs, or for the workspace
	StepRunning   StepStatus = "running" // or in the queue
	StepSuccess   StepStatus = "success"
	StepFailed    StepStatus = "failed"
	StepSkipped   StepStatus = "skipped" // because of its condition
	StepCancelled StepStatus = "cancelled"
)

// Ended reports whether the status is final.
func (s StepStatus) Ended() bool { return s != StepWaiting && s != StepRunning }

// PipelineStatus is the status of a run.
type PipelineStatus string

// The statuses.
const (
	PipelineRunning   PipelineStatus = "running"
	PipelineSuccess   PipelineStatus = "success"
	PipelineFailed    PipelineStatus = "failed"
	PipelineCancelled PipelineStatus = "cancelled"
)

// PipelineState is the progress of a run. It is changed by compare-and-set.
type PipelineState struct {
	ID        string         `json:"id"`
	Org       string         `json:"org"`
	Name      string         `json:"name"`
	Commit    string         `json:"commit,omitempty"`
	Branch    string         `json:"branch,omitempty"`
	CreatedAt time.Time      `json:"created_at"`
	Deadline  time.Time      `json:"deadline"` // of the whole run
	Status    PipelineStatus `json:"status"`
	// definition and files are incomplete, and hidden from clients
	Creating   bool        `json:"creating,omitempty"`
	Cancelling bool        `json:"cancelling,omitempty"` // what has not ended is being cancelled
	Reason     string      `json:"reason,omitempty"`     // why a run ended, if not for a step
	EndedAt    time.Time   `json:"ended_at,omitzero"`
	HasSecrets bool        `json:"has_secrets,omitempty"` // the definition has secrets, which are removed at the end
	Cells      []CellState `json:"cells"`                 // in the order of the steps, and of their cells
}

// CellState is the progress of a cell of a step.
type CellState struct {
	Step      string     `json:"step"`
	Cell      string     `json:"cell,omitempty"`
	Status    StepStatus `json:"status"`
	TraceID   TraceID    `json:"trace_id,omitempty"` // empty before the execution is accepted
	ExitCode  *int       `json:"exit_code,omitempty"`
	Reason    string     `json:"reason,omitempty"` // of a status other than success
	StartedAt time.Time  `json:"started_at,omitzero"`
	EndedAt   time.Time  `json:"ended_at,omitzero"`
	// Thread has the artifacts of a cell that has ended, empty if there are none.
	Thread string `json:"thread,omitempty"`
	// Warnings are problems that did not affect the status.
	Warnings []string `json:"warnings,omitempty"`
}

// RunThread returns the id of the thread that the steps of a run share.
func RunThread(run string) string { return OwnerPipeline.Thread(run) }

// CellThread returns the id of a cell's thread: its own workspace, or the artifacts that it keeps
// from a shared workspace.
func CellThread(run string, cell int) string {
	return OwnerPipeline.Thread(fmt.Sprintf("%s-%d", run, cell))
}

const pipelineIDPrefix = "run_"

// NewPipelineID returns a new random id of a run.
func NewPipelineID() string { return pipelineIDPrefix + strings.ToLower(rand.Text()) }

// ValidPipelineID reports whether text has the form of a run's id.
func ValidPipelineID(text string) bool {
	rest, ok := strings.CutPrefix(text, pipelineIDPrefix)
	return ok && len(rest) == len(rand.Text()) && strings.Trim(rest, "abcdefghijklmnopqrstuvwxyz234567") == ""
}
