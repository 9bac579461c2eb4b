// Package runreport writes reports of runs of pipelines: JSON, JUnit XML and HTML. It fetches
// nothing.
package runreport

import (
	"encoding/json"
	"io"
	"regexp"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
	"github.com/bullpen-run/bullpen/scheduler/pipelines/spec"
)

// maxOutput is how much of a step's output is in a report, in bytes.
const maxOutput = 16 << 10

// Run is a run of a pipeline with the ends of its outputs.
type Run struct {
	api.Pipeline
	Cells []Cell `json:"cells"`

	now time.Time // the end of what has not ended
}

// Cell is a step of a run, or a cell of its matrix.
type Cell struct {
	api.PipelineCell
	DurationMS *int64 `json:"duration_ms"` // nil before the start of the program
	Output     Tail   `json:"output"`
}

// New returns a report, without outputs, of a run's current state.
func New(run *api.WholePipeline, now time.Time) *Run {
	r := &Run{Pipeline: run.Pipeline, Cells: make([]Cell, len(run.Cells)), now: now}
	if run.EndedAt != nil {
		r.now = run.EndedAt.Time
	}
	for i := range run.Cells {
		r.Cells[i].PipelineCell = run.Cells[i]
		if from, to, ok := r.span(&r.Cells[i]); ok {
			r.Cells[i].DurationMS = new(to.Sub(from).Milliseconds())
		}
	}
	return r
}

// span returns when a cell ran. ok is false if its program did not start.
func (r *Run) span(c *Cell) (from, to time.Time, ok bool) {
	if c.StartedAt == nil {
		return from, to, false
	}
	from, to = c.StartedAt.Time, r.now
	if took, ok := Took(&c.PipelineCell); ok {
		to = from.Add(took)
	}
	if to.Before(from) {
		to = from
	}
	return from, to, true
}

// Took returns how long the execution of a cell took, as all reports have it. ok is false if it did not
// start or has not ended.
func Took(c *api.PipelineCell) (took time.Duration, ok bool) {
	if c.StartedAt == nil || c.EndedAt == nil {
		return 0, false
	}
	return max(c.EndedAt.Sub(c.StartedAt.Time), 0).Round(time.Millisecond), true
}

// title returns the name of a run, or its id if it has none.
func (r *Run) title() string {
	if r.Name != nil {
		return *r.Name
	}
	return r.ID
}

func (c *Cell) label() string {
	if c.Cell == nil {
		return c.Step
	}
	return spec.Label(c.Step, *c.Cell)
}

// why returns why a cell did not succeed, or its status.
func (c *Cell) why() string {
	if c.Reason != nil {
		return *c.Reason
	}
	return string(c.Status)
}

// broke reports whether a cell ended badly without an exit code: its program was refused or lost.
func (c *Cell) broke() bool {
	return c.ExitCode == nil && (c.Status == proto.StepFailed || c.Status == proto.StepCancelled && c.StartedAt != nil)
}

// JSON writes the report as JSON.
func (r *Run) JSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// Tail is the end of an output: stdout and stderr in the order of the program.
type Tail struct {
	Text string `json:"end"`
	// Cut is whether there was more before Text. Gone is whether the output is stored no longer.
	Cut  bool `json:"cut"`
	Gone bool `json:"gone"`
}

// Add appends output, and drops the beginning if it is too long.
func (t *Tail) Add(text string) {
	t.Text += text
	if len(t.Text) <= maxOutput {
		return
	}
	begin := len(t.Text) - maxOutput
	for begin < len(t.Text) && !utf8.RuneStart(t.Text[begin]) {
		begin++
	}
	t.Text, t.Cut = strings.Clone(t.Text[begin:]), true
}

// escapes are the sequences with which programs colour their output.
var escapes = regexp.MustCompile("\x1b(\\[[0-9:;<=>?]*[ -/]*[@-~]|\\][^\x07\x1b]*(\x07|\x1b\\\\)|[@-Z\\\\^_])")

// plain returns the output without colours and other control characters.
func (t *Tail) plain() string {
	text := escapes.ReplaceAllLiteralString(strings.ReplaceAll(t.Text, "\r\n", "\n"), "")
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' || r == '\ufffe' || r == '\uffff' {
			return utf8.RuneError
		}
		return r
	}, text)
}

// note returns a note to show before the text, or "".
func (t *Tail) note() string {
	switch {
	case t.Gone:
		return "The output is stored no longer."
	case t.Cut:
		return "The beginning of the output is left out."
	}
	return ""
}
