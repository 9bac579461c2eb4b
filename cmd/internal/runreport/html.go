package runreport

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"strings"
	"time"
)

// The measures of the timeline, in the units of its picture.
const (
	chartWidth  = 1000.0
	labelWidth  = 260.0
	chartMargin = 70.0 // right of the bars, for the last duration
	rowHeight   = 24.0
	axisHeight  = 28.0
	minBar      = 2.0
	maxLabel    = 36 // characters
	maxTicks    = 8
)

//go:embed report.html.tmpl
var pageText string

var pageTemplate = template.Must(template.New("run").Parse(pageText))

// page is what the template shows.
type page struct {
	Title, ID, Status, Reason, Commit, Branch, Created, Took string
	Counts                                                   string
	Chart                                                    chart
	Cells                                                    []pageCell
}

type pageCell struct {
	N                                        int
	Label, Status, Reason, Trace, Exit, Took string
	Artifacts                                string
	Output, Note                             string
	Open                                     bool
	X, Y, Width, TextX, TextY                float64
	Short                                    string
	Ran                                      bool
}

// chart is the timeline.
type chart struct {
	Width, Height, Left, Bottom float64
	Ticks                       []tick
}

type tick struct {
	X    float64
	Text string
}

// HTML writes the report as one page without scripts and external links.
func (r *Run) HTML(w io.Writer) error {
	begin, end := r.CreatedAt.Time, r.now
	total := max(end.Sub(begin), time.Millisecond)
	scale := (chartWidth - labelWidth - chartMargin) / float64(total)
	p := page{
		Title: r.title(), ID: r.ID, Status: string(r.Status), Reason: text(r.Reason), Commit: text(r.Commit),
		Branch:  text(r.Branch),
		Created: begin.UTC().Format("2006-01-02 15:04:05 UTC"), Took: duration(total), Counts: r.counts(),
		Chart: chart{Width: chartWidth, Left: labelWidth, Bottom: rowHeight * float64(len(r.Cells))},
	}
	p.Chart.Height = p.Chart.Bottom + axisHeight
	for step, at := tickStep(total), time.Duration(0); at <= total; at += step {
		p.Chart.Ticks = append(p.Chart.Ticks, tick{labelWidth + float64(at)*scale, at.String()})
	}
	for i := range r.Cells {
		c := &r.Cells[i]
		v := pageCell{
			N: i, Label: c.label(), Status: string(c.Status), Reason: text(c.Reason), Output: c.Output.plain(),
			Note: c.Output.note(),
			Open: c.Reason != nil && c.StartedAt != nil, Y: rowHeight * float64(i), X: labelWidth,
		}
		v.Short, v.TextY = shorten(v.Label), v.Y+rowHeight/2
		if c.TraceID != nil {
			v.Trace = string(*c.TraceID)
		}
		if c.ExitCode != nil {
			v.Exit = fmt.Sprint(*c.ExitCode)
		}
		var names []string
		for _, a := range c.Artifacts {
			names = append(names, a.Name)
		}
		v.Artifacts = strings.Join(names, ", ")
		if from, to, ok := r.span(c); ok {
			v.Ran, v.Took = true, duration(to.Sub(from))
			v.X = labelWidth + min(max(float64(from.Sub(begin)), 0), float64(total))*scale
			v.Width = min(max(float64(to.Sub(from))*scale, minBar), chartWidth-chartMargin-v.X+minBar)
		}
		v.TextX = v.X + v.Width + 6
		p.Cells = append(p.Cells, v)
	}
	return pageTemplate.Execute(w, p)
}

// counts returns how many cells have each status.
func (r *Run) counts() string {
	var order, parts []string
	n := map[string]int{}
	for i := range r.Cells {
		status := string(r.Cells[i].Status)
		if n[status]++; n[status] == 1 {
			order = append(order, status)
		}
	}
	for _, status := range order {
		parts = append(parts, fmt.Sprintf("%d %s", n[status], status))
	}
	return strings.Join(parts, ", ")
}

// tickStep returns the time between two marks of an axis.
func tickStep(total time.Duration) time.Duration {
	for _, ms := range []int64{1, 2, 5, 10, 20, 50, 100, 200, 500} {
		if step := time.Duration(ms) * time.Millisecond; total <= step*maxTicks {
			return step
		}
	}
	for _, s := range []int64{1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800} {
		if step := time.Duration(s) * time.Second; total <= step*maxTicks {
			return step
		}
	}
	return time.Hour
}

func duration(d time.Duration) string { return d.Round(time.Millisecond).String() }

func shorten(label string) string {
	runes := []rune(label)
	if len(runes) <= maxLabel {
		return label
	}
	return string(runes[:maxLabel-1]) + "…"
}

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
