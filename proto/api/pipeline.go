package api

import (
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	minSecretLen = 4   // bytes: a shorter one would be in many words of the output
	maxRefLen    = 256 // characters
)

// PipelineRequest starts a run of a pipeline.
type PipelineRequest struct {
	_ struct{} `doc:"null means absent."`

	File     string            `json:"file" required:"true" minLength:"1" maxLength:"262144" doc:"The pipeline in YAML. GET /v1/pipelines/schema has its form."`
	ThreadID string            `json:"thread_id,omitempty" format:"thread-id" doc:"The thread whose files the run starts with. The run copies it. Absent: no files."`
	Commit   string            `json:"commit,omitempty" maxLength:"256" doc:"What programs find in CI_COMMIT_SHA."`
	Branch   string            `json:"branch,omitempty" maxLength:"256" doc:"What programs find in CI_COMMIT_BRANCH."`
	Secrets  map[string]string `json:"secrets,omitempty" maxProperties:"50" keyPattern:"^[A-Z][A-Z0-9_]*$" keyMaxLength:"128" valueMaxLength:"4096" doc:"Values for secrets that steps name, each of at least 4 bytes; other names refer to stored secrets bound to the API key or its sandbox. They are stored with the run until it ends, and with the executions as env_vars are."`
}

// Validate checks what can be checked without the steps.
func (r *PipelineRequest) Validate() error {
	for _, ref := range []struct{ field, text string }{{"commit", r.Commit}, {"branch", r.Branch}} {
		if utf8.RuneCountInString(ref.text) > maxRefLen || strings.ContainsFunc(ref.text, unicode.IsControl) {
			return proto.FieldErrorf(ref.field, "must be at most %d characters without control characters", maxRefLen)
		}
	}
	for _, name := range sortedKeys(r.Secrets) {
		if err := proto.CheckEnv("secrets", name, r.Secrets[name]); err != nil {
			return err
		}
		if len(r.Secrets[name]) < minSecretLen {
			return proto.FieldErrorf("secrets",
				"must have at least %d bytes, to be recognised in the output; the value of %s has fewer", minSecretLen, name)
		}
	}
	return nil
}

// Pipeline is a run of a pipeline.
type Pipeline struct {
	ID         string               `json:"id" pattern:"^run_[a-z2-7]{26}$"`
	Name       *string              `json:"name" doc:"null if the file has none."`
	Status     proto.PipelineStatus `json:"status"`
	Cancelling bool                 `json:"cancelling" doc:"What has not ended is being cancelled."`
	Reason     *string              `json:"reason" doc:"Why the run ended, if not because of a step; else null."`
	Commit     *string              `json:"commit"`
	Branch     *string              `json:"branch"`
	CreatedAt  Time                 `json:"created_at"`
	EndedAt    *Time                `json:"ended_at"`
}

// Pipelines is a list of runs.
type Pipelines struct {
	Pipelines  []Pipeline `json:"pipelines"`
	NextCursor *string    `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// WholePipeline is a run with its steps.
type WholePipeline struct {
	Pipeline
	Cells []PipelineCell `json:"cells" doc:"In the order of the file: each step, or each cell of its matrix."`
}

// PipelineCell is a step of a run, or a cell of its matrix.
type PipelineCell struct {
	Step       string             `json:"step"`
	Cell       *string            `json:"cell" doc:"The values of the matrix, such as python=3.12,os=linux; null without a matrix."`
	Needs      []string           `json:"needs"`
	Status     proto.StepStatus   `json:"status"`
	TraceID    *proto.TraceID     `json:"trace_id" doc:"The execution; null before it is accepted."`
	ExitCode   *int               `json:"exit_code"`
	Reason     *string            `json:"reason" doc:"Why it did not succeed; else null."`
	WaitingFor *proto.Missing     `json:"waiting_for,omitempty"`
	StartedAt  *Time              `json:"started_at"`
	EndedAt    *Time              `json:"ended_at"`
	Warnings   []string           `json:"warnings" doc:"Problems that do not count as failures, such as a cache that could not be saved."`
	Artifacts  []PipelineArtifact `json:"artifacts"`
	Kept       bool               `json:"artifacts_kept" doc:"The step has ended, and its artifacts can be downloaded."`
}

// PipelineArtifact is the definition of an artifact.
type PipelineArtifact struct {
	Name  string   `json:"name"`
	Paths []string `json:"paths"`
}

// PipelineCache is a cache of an organisation's pipelines.
type PipelineCache struct {
	Key       string `json:"key"`
	Bytes     int64  `json:"bytes" minimum:"0"`
	Files     int64  `json:"files" minimum:"0" doc:"Files, directories and links."`
	CreatedAt Time   `json:"created_at"`
}

// PipelineCaches is a page of a list of caches.
type PipelineCaches struct {
	Caches     []PipelineCache `json:"caches"`
	NextCursor *string         `json:"next_cursor" doc:"null on the last page."`
}

// NewPipelineCache returns the form of the thread of a cache, whose ID is the key.
func NewPipelineCache(t *proto.ThreadSummary) PipelineCache {
	return PipelineCache{t.ID, t.Bytes, t.Files, Time{t.CreatedAt}}
}

// NewPipeline returns the form of a run in lists.
func NewPipeline(s *proto.PipelineState) Pipeline {
	return Pipeline{
		ID: s.ID, Name: optional(s.Name), Status: s.Status, Cancelling: s.Cancelling, Reason: optional(s.Reason),
		Commit: optional(s.Commit),
		Branch: optional(s.Branch), CreatedAt: Time{s.CreatedAt}, EndedAt: optionalTime(s.EndedAt),
	}
}

// NewWholePipeline returns the form of a run with its steps. waiting has what workers lack to run
// executions of the run.
func NewWholePipeline(
	p *proto.Pipeline, s *proto.PipelineState, waiting map[proto.TraceID]*proto.Missing,
) *WholePipeline {
	whole := &WholePipeline{Pipeline: NewPipeline(s), Cells: []PipelineCell{}}
	for i := range p.Steps {
		step := &p.Steps[i]
		for range step.Cells {
			c := &s.Cells[len(whole.Cells)]
			cell := PipelineCell{
				Step: c.Step, Cell: optional(c.Cell), Needs: append([]string{}, step.Needs...), Status: c.Status,
				TraceID: optional(c.TraceID), ExitCode: c.ExitCode,
				Reason: optional(c.Reason), StartedAt: optionalTime(c.StartedAt), EndedAt: optionalTime(c.EndedAt),
				Warnings: append([]string{}, c.Warnings...), Artifacts: []PipelineArtifact{},
				Kept: c.Thread != "", WaitingFor: waiting[c.TraceID],
			}
			for _, name := range slices.Sorted(maps.Keys(step.Artifacts)) {
				cell.Artifacts = append(cell.Artifacts, PipelineArtifact{name, step.Artifacts[name]})
			}
			whole.Cells = append(whole.Cells, cell)
		}
	}
	return whole
}
