package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// waterfallWidth is the width of the waterfall in characters.
const waterfallWidth = 40

type traceCommand struct {
	remote   `embed:""`
	traceArg `embed:""`
}

func (*traceCommand) Help() string {
	return `Prints the steps of an execution and the attempts of its webhook, from what the server has stored. Nothing
needs to be traced.

While an execution runs, and if its worker was lost, there is one line only.

Example:

  bullpen trace trc_NQnZRv1DhR0GTb1ZlnDc`
}

// waterfall is the answer of the command.
type waterfall struct {
	TraceID   proto.TraceID `json:"trace_id"`
	Status    proto.Status  `json:"status"`
	ErrorCode *string       `json:"error_code"`
	Attempt   int           `json:"attempt"`
	CreatedAt api.Time      `json:"created_at"`
	Spans     []span        `json:"spans"`
}

// span is a line of a waterfall.
type span struct {
	Name       string  `json:"name"`
	Within     string  `json:"within,omitempty"`
	Detail     string  `json:"detail,omitempty"`
	AfterMS    float64 `json:"after_ms"` // since the execution was created
	DurationMS float64 `json:"duration_ms"`
}

func (s *span) end() float64 { return s.AfterMS + s.DurationMS }

func (c *traceCommand) Run(ctx context.Context, s streams) error {
	return compose(s, &c.remote, func(cl *client.Client) (*waterfall, error) {
		e, err := cl.Get(ctx, c.id())
		if err != nil {
			return nil, err
		}
		w := newWaterfall(e)
		if e.WebhookURL != nil {
			d, err := cl.Delivery(ctx, c.id())
			if err != nil {
				return nil, err
			}
			w.addAttempts(d)
		}
		return w, nil
	}, printWaterfall)
}

func newWaterfall(e *api.Execution) *waterfall {
	w := &waterfall{
		TraceID: e.TraceID, Status: e.Status, ErrorCode: e.ErrorCode, Attempt: e.Attempt,
		CreatedAt: e.CreatedAt,
	}
	for _, step := range e.Steps {
		s := span{Name: string(step.Name), AfterMS: step.AfterMS, DurationMS: step.DurationMS}
		if step.Within != nil {
			s.Within = string(*step.Within)
		}
		if step.Start != nil {
			s.Detail = *step.Start
		}
		w.Spans = append(w.Spans, s)
	}
	if len(e.Steps) > 0 {
		return w
	}
	queue := span{Name: string(proto.StepQueue), DurationMS: float64(e.QueuedMS)}
	if e.RunAt != nil {
		queue.AfterMS = millisAfter(e.CreatedAt, e.RunAt.Time)
	}
	w.Spans = append(w.Spans, queue)
	if e.Attempt > 0 {
		w.Spans = append(w.Spans, span{Name: "attempt", AfterMS: queue.end(), DurationMS: float64(e.DurationMS)})
	}
	return w
}

func (w *waterfall) addAttempts(d *api.Delivery) {
	for _, a := range d.Attempts {
		s := span{
			Name: fmt.Sprintf("webhook %d", a.Number), AfterMS: millisAfter(w.CreatedAt, a.At.Time),
			DurationMS: a.Timings.Total,
		}
		switch {
		case a.Status != nil:
			s.Detail = fmt.Sprint(*a.Status)
		case a.Error != nil:
			s.Detail = *a.Error
		}
		w.Spans = append(w.Spans, s)
	}
}

func millisAfter(from api.Time, t time.Time) float64 {
	return float64(t.Sub(from.Time).Microseconds()) / 1000
}

func printWaterfall(p *page, w *waterfall) {
	p.row("trace", w.TraceID)
	p.row("status", w.Status)
	p.optional("error", w.ErrorCode)
	p.row("created", w.CreatedAt)
	p.row("attempt", w.Attempt)
	p.textf("\n")
	p.row("STEP", "AFTER", "TOOK")
	total := w.scale()
	for i := range w.Spans {
		s := &w.Spans[i]
		name := s.Name
		if s.Within != "" {
			name = "  " + name
		}
		if s.Detail != "" {
			name += " (" + s.Detail + ")"
		}
		p.row(name, milli(s.AfterMS), milli(s.DurationMS), drawSpan(s, total))
	}
}

// scale returns the width of the waterfall in milliseconds. Webhook attempts long after the
// program's end would make everything else too narrow.
func (w *waterfall) scale() (total float64) {
	for i := range w.Spans {
		if s := &w.Spans[i]; !strings.HasPrefix(s.Name, "webhook ") || s.AfterMS < 2*total {
			total = max(total, s.end())
		}
	}
	return max(total, 1)
}

func milli(ms float64) string { return fmt.Sprintf("%.1f ms", ms) }

// drawSpan draws a span. One beyond the right margin is ">".
func drawSpan(s *span, total float64) string {
	from, to := int(s.AfterMS/total*waterfallWidth), int(s.end()/total*waterfallWidth+0.5)
	if from > waterfallWidth {
		return strings.Repeat(" ", waterfallWidth) + ">"
	}
	from = min(max(from, 0), waterfallWidth-1)
	return strings.Repeat(" ", from) + strings.Repeat("#", max(1, min(to, waterfallWidth)-from))
}
