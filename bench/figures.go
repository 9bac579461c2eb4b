package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// The target figures.
const (
	targetAddedMS      = 1.5
	targetFirstLineMS  = 30
	targetMBPerSecond  = 20
	targetIdleMemoryMB = 60
	targetTimeoutMS    = 50
	targetHooksPerSec  = 1000
	targetHookMS       = 50
	targetDeadPercent  = 20
	targetPendingMB    = 200
	targetResumeMS     = 5000
	targetWarmMS       = 15
	targetChangeMS     = 40
	targetChangeBytes  = 4000
	targetRestoreMB    = 150
	targetForkMS       = 10
	targetLargeMB      = 200

	targetSubmitsPerSec = 1500
	targetStreamsMB     = 100
	targetWaitMS        = 50 // besides the length of a job

	targetBatchS      = 20
	targetBatchMB     = 300
	targetBesideBatch = 1.5

	targetDueS     = 15
	targetDueSmall = 1

	targetHalfRatio = 5
	targetBurstMS   = 400
	targetJailMB    = 12

	targetFirstOutput = 4 // inline executions
	targetCommand     = 1 // inline executions
	targetSandboxMiB  = 16
	targetSandboxCPU  = 1 // percent of a core
	targetSandboxKB   = 1 // per second: what the kernel counts varies by less
	targetCreateMS    = 1000
	targetResume      = 1.5 // downloads

	targetEventMS      = 5
	targetEventsPerSec = 2000
	targetSessionsMB   = 300
)

// figure is a measured value and its target.
type figure struct {
	Name     string   `json:"name"`
	Target   string   `json:"target"`
	Measured *float64 `json:"measured"` // null if not measured
	Unit     string   `json:"unit"`
	Met      *bool    `json:"met"` // null if not measured
	Note     string   `json:"note,omitempty"`
}

func atMost(name string, limit float64, unit string) figure {
	return figure{Name: name, Target: fmt.Sprintf("at most %g %s", limit, unit), Unit: unit}
}

func atLeast(name string, limit float64, unit string) figure {
	return figure{Name: name, Target: fmt.Sprintf("at least %g %s", limit, unit), Unit: unit}
}

func below(name string, limit float64, unit string) figure {
	return figure{Name: name, Target: fmt.Sprintf("under %g %s", limit, unit), Unit: unit}
}

func (f figure) is(measured float64, met bool, note string) figure {
	f.Measured, f.Met, f.Note = &measured, &met, note
	return f
}

func (f figure) unknown(why string) figure {
	f.Note = why
	return f
}

// none marks the figure as not met if all runs failed, and as unknown if there were no runs.
func (f figure) none(s *summary) figure {
	if s.Errors > 0 {
		f.Met = new(bool)
		return f.unknown(fmt.Sprintf("all %d failed, the first: %s", s.Errors, s.FirstError))
	}
	return f.unknown("there were no runs")
}

// withErrors appends the number of failed runs to a note.
func withErrors(note string, s *summary) string {
	if s.Errors > 0 {
		note += fmt.Sprintf("; %d failed", s.Errors)
	}
	return note
}

func (r *report) figures() []figure {
	var all []figure
	added := below("added per execution, p50", targetAddedMS, "ms")
	if len(r.Overhead) == 0 {
		all = append(all, added.unknown(r.OverheadUnknown))
	}
	for _, o := range r.Overhead {
		f := below("added per execution, p50, "+string(o.Language), targetAddedMS, "ms")
		note := fmt.Sprintf("%d samples; jail made in %.1f ms, program run in %.1f ms", o.Added.Runs,
			o.Prepare.P50, o.Run.P50)
		all = append(all, f.is(o.Added.P50, o.Added.P50 < targetAddedMS, note))
	}
	first := below("first streamed line of print(1), p50", targetFirstLineMS, "ms")
	switch {
	case r.FirstLine == nil:
		all = append(all, first.unknown("python is unavailable"))
	case r.FirstLine.Bullpen.Runs == 0:
		all = append(all, first.unknown(r.FirstLine.Bullpen.FirstError))
	default:
		b := r.FirstLine.Bullpen
		note := fmt.Sprintf("%d samples, p99 %.1f ms; bare %.1f ms", b.Runs, b.P99, r.FirstLine.Bare.P50)
		all = append(all, first.is(b.P50, b.P50 < targetFirstLineMS, withErrors(note, b)))
	}
	for _, t := range r.Throughput {
		f := figure{
			Name: "output, nothing lost: " + t.Program, Target: fmt.Sprintf("%d MB/s or more", targetMBPerSecond),
			Unit: "MB/s",
		}
		if t.Bullpen.Runs == 0 {
			all = append(all, f.unknown(t.Bullpen.FirstError))
			continue
		}
		note := fmt.Sprintf("%d samples of 10 MB; bare %.0f MB/s; result after %.0f ms", t.Bullpen.Runs, t.BareMB,
			t.Result.P50)
		if t.RSSPeak > 0 {
			note += fmt.Sprintf("; server's memory %.0f -> %.0f MB at most", t.RSSBefore, t.RSSPeak)
		}
		met := t.BullpenMB >= targetMBPerSecond && t.Bullpen.Errors == 0
		all = append(all, f.is(t.BullpenMB, met, withErrors(note, t.Bullpen)))
	}
	all = append(all, r.timeoutFigure(), r.memoryFigure())
	return slices.Concat(all, r.Webhooks.figures(), r.Threads.figures(), r.Pressure.figures(), r.Fairness.figures(),
		r.Batches.figures(), r.Schedules.figures(), r.Sandboxes.figures(), r.Contexts.figures(), r.AgentSessions.figures())
}

// cellTarget is the target of a cell: for one caller the maximum p50, for more callers the minimum
// number of runs per second.
type cellTarget struct {
	language proto.Language
	callers  int
	limit    float64
	ofBare   bool // relative to the bare interpreter, otherwise ms or runs
}

var cellTargets = []cellTarget{ // read only
	{proto.Python, 1, .35, true},
	{proto.Python, halfCallers, 2.5, true},
	{proto.Bash, 1, 2, false},
	{proto.Bash, halfCallers, 800, false},
	{proto.Node, 1, .45, true},
	{proto.Node, halfCallers, .85, true},
}

// targets returns the most important targets and measurements, for programs that only print.
func (r *report) targets() []figure {
	var all []figure
	for _, t := range cellTargets {
		all = append(all, t.figure(r.Cells))
	}
	for _, h := range r.Half {
		all = append(all, h.target())
	}
	return slices.Concat(all, []figure{r.jailTarget()}, burstTargets(r.Bursts))
}

func (t cellTarget) figure(cells []cell) figure {
	name, unit, limit := fmt.Sprintf("%s, 1 caller, p50", t.language), "ms", atMost
	if t.callers > 1 {
		name, unit, limit = fmt.Sprintf("%s, %d callers, runs in a second", t.language, t.callers), "/s", atLeast
	}
	own := unit
	if t.ofBare {
		unit = "of bare"
	}
	f := limit(name, t.limit, unit)
	c := cellOf(cells, t.language, t.callers)
	switch {
	case c == nil:
		return f.unknown(fmt.Sprintf("%s is unavailable", t.language))
	case c.Bare.Runs == 0:
		return f.unknown("the bare interpreter: " + c.Bare.FirstError)
	case c.Bullpen.Runs == 0:
		return f.none(c.Bullpen)
	}
	bare, bullpen, share := c.Bare.P50, c.Bullpen.P50, c.Ratio.P50
	if t.callers > 1 {
		bare, bullpen, share = c.Bare.PerSecond, c.Bullpen.PerSecond, c.Ratio.PerSecond
	}
	got := bullpen
	if t.ofBare {
		got = share
	}
	met := got <= t.limit
	if t.callers > 1 {
		met = got >= t.limit
	}
	note := fmt.Sprintf("%.1f %s, bare %.1f %s: %.2f of bare; %d samples", bullpen, own, bare, own, share, c.Bullpen.Runs)
	return f.is(got, met && c.Bullpen.Errors == 0, withErrors(note, c.Bullpen))
}

func (r *report) jailTarget() figure {
	f := below("prewarmed python jail, memory that it does not share", targetJailMB, "MB")
	if r.Memory == nil {
		return f.unknown("needs a server that is started here")
	}
	for _, j := range r.Memory.Jails {
		if j.Language == proto.Python {
			return f.is(j.UnsharedMB, j.UnsharedMB < targetJailMB, fmt.Sprintf("%.1f MB resident", j.ResidentMB))
		}
	}
	return f.unknown(cmp.Or(r.Memory.JailsUnknown, "there was none"))
}

// figures returns the figures of fairness. f is nil if it was not measured.
func (f *fairness) figures() []figure {
	orgs := below("queued beside another organisation's backlog, p99 less one job of that", targetWaitMS, "ms")
	keys := below("the same beside another key's of the same organisation", targetWaitMS, "ms")
	if f == nil {
		const why = "needs a server that is started here"
		return []figure{orgs.unknown(why), keys.unknown(why)}
	}
	tell := func(to figure, s *summary) figure {
		more := s.P99 - f.Job.P50
		if s.Runs == 0 || f.Job.Runs == 0 {
			return to.unknown(s.FirstError)
		}
		return to.is(more, more < targetWaitMS && s.Errors == 0,
			withErrors(fmt.Sprintf("%d samples, p50 %.0f ms, p99 %.0f ms; %d jobs of %.0f ms queued for %d slots",
				s.Runs, s.P50, s.P99, f.Backlog, f.Job.P50, f.Slots), s))
	}
	return []figure{tell(orgs, f.Orgs), tell(keys, f.Keys)}
}

// figures returns the figures of webhooks. w is nil if they were not measured.
func (w *webhooks) figures() []figure {
	rate := figure{Name: "webhooks to fast receivers", Target: fmt.Sprintf("%d/s or more", targetHooksPerSec), Unit: "/s"}
	latency := below("webhooks, result to receiver, p99", targetHookMS, "ms")
	dead := below("the same beside an endpoint that never answers, p99 more", targetDeadPercent, "%")
	memory := below("memory of pending webhooks", targetPendingMB, "MB")
	resume := below("start with pending webhooks, until all are resumed", targetResumeMS, "ms")
	if w == nil {
		const why = "needs a server that is started here"
		return []figure{rate.unknown(why), latency.unknown(why), dead.unknown(why), memory.unknown(why), resume.unknown(why)}
	}
	more := (w.DeadOnes.P99/w.Latency.P99 - 1) * 100
	pending := fmt.Sprintf("%d pending", w.Pending)
	return []figure{
		rate.is(w.PerSecond, w.PerSecond >= targetHooksPerSec, fmt.Sprintf("%d to %d endpoints", w.Sent, endpoints)),
		latency.is(w.Latency.P99, w.Latency.P99 < targetHookMS,
			fmt.Sprintf("%d samples at %d/s, p50 %.1f ms", w.Latency.Runs, webhookRate, w.Latency.P50)),
		dead.is(more, more < targetDeadPercent,
			fmt.Sprintf("%d samples, p50 %.1f ms, p99 %.1f ms", w.DeadOnes.Runs, w.DeadOnes.P50, w.DeadOnes.P99)),
		memory.is(w.PendingMB, w.PendingMB < targetPendingMB, pending),
		resume.is(w.ResumeMillis, w.ResumeMillis < targetResumeMS, pending),
	}
}

func (r *report) timeoutFigure() figure {
	f := figure{
		Name:   "after a timeout of 1 s all has ended, worst",
		Target: fmt.Sprintf("within %d ms", targetTimeoutMS), Unit: "ms",
	}
	if r.Timeouts == nil || r.Timeouts.Runs == 0 {
		why := "no program timed out"
		if r.Timeouts != nil && r.Timeouts.FirstError != "" {
			why = r.Timeouts.FirstError
		}
		return f.unknown(why)
	}
	note := fmt.Sprintf("%d samples, p50 %.0f ms", r.Timeouts.Runs, r.Timeouts.P50)
	return f.is(r.Timeouts.Max, r.Timeouts.Min >= 0 && r.Timeouts.Max <= targetTimeoutMS, withErrors(note, r.Timeouts))
}

func (r *report) memoryFigure() figure {
	f := below("idle memory of the server", targetIdleMemoryMB, "MB")
	if r.Memory == nil {
		return f.unknown("only a server started here is known to be idle")
	}
	note := fmt.Sprintf("%s after the start; %.0f MB when idle again after all of this", idleFor, r.Memory.AfterMB)
	return f.is(r.Memory.IdleMB, r.Memory.IdleMB < targetIdleMemoryMB, note)
}

// verdict describes whether the target was met.
func (f figure) verdict() string {
	switch {
	case f.Met == nil:
		return "not measured"
	case *f.Met:
		return "met"
	default:
		return "not met"
	}
}

// value formats the measured value with its unit.
func (f figure) value() string {
	if f.Measured == nil {
		return "-"
	}
	return strings.TrimSpace(fmt.Sprintf("%.2f %s", *f.Measured, f.Unit))
}
