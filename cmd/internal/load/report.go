package load

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

//go:embed report.html.tmpl
var pageText string

var pageTemplate = template.Must(template.New("load").Parse(pageText))

// The measures of charts, in the units of their pictures.
const (
	chartWidth, chartHeight = 900.0, 260.0
	chartLeft, chartTop     = 70.0, 24.0
	chartBottom             = chartHeight - 24
	intervals               = 100 // of time
	tickCount               = 5
)

type page struct {
	Title, Summary string
	Rows           []Row
	Charts         []chart
}

type chart struct {
	Title         string
	Width, Height float64
	Ticks         []tick
	Lines         []line
	Legend        []legend
}

type tick struct {
	X1, X2, Y1, Y2, TextX, TextY float64
	Text, Anchor                 string
}

type line struct{ Class, Name, Points string }

type legend struct {
	Class, Name   string
	X, End, TextX float64
}

// series are values at times, as shares of the width, of which NaN is none.
type series struct {
	class, name string
	at, values  []float64
}

// Failed returns how many failed, by what happened.
func (r *Row) Failed() string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(r.Failures)) {
		all = append(all, fmt.Sprintf("%d %s", r.Failures[name], name))
	}
	return strings.Join(all, ", ")
}

// Summary is a sentence about the load.
func (r *Result) Summary() string {
	text := fmt.Sprintf("%.4g executions were due each second for %s; %d were sent", r.Config.Rate, r.Config.Duration, len(r.Samples))
	if r.Unsent > 0 {
		text += fmt.Sprintf(", and %d were not, since %d were in flight", r.Unsent, r.Config.InFlight)
	}
	return text + fmt.Sprintf(". The latest was sent %s late.", r.Late.Round(100*time.Microsecond))
}

// HTML writes a report as one page without scripts and links to other files.
func (r *Result) HTML(w io.Writer) error {
	p := page{Title: "Load of " + r.Start.Format(time.DateTime), Summary: r.Summary(), Rows: r.Rows()}
	if len(r.Samples) > 0 {
		p.Charts = []chart{r.overTime(), r.distribution(), r.flow()}
	}
	if err := pageTemplate.Execute(w, p); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// overTime draws the times of executions by when they were due.
func (r *Result) overTime() chart {
	took := make([][]time.Duration, intervals)
	for _, s := range r.Samples {
		i := min(intervals-1, int(float64(intervals)*float64(s.Due)/float64(r.Config.Duration)))
		took[i] = append(took[i], s.Took)
	}
	list := []series{{class: "p50", name: "p50"}, {class: "p99", name: "p99"}, {class: "max", name: "longest"}}
	for i := range took {
		slices.Sort(took[i])
		for j, q := range []float64{0.5, 0.99, 1} {
			value := math.NaN()
			if len(took[i]) > 0 {
				value = millis(quantile(took[i], q))
			}
			list[j].at, list[j].values = append(list[j].at, (float64(i)+0.5)/intervals), append(list[j].values, value)
		}
	}
	return draw("Milliseconds, by when executions were due", r.seconds(), list...)
}

// distribution draws which share of executions took how long. The right half is the slowest tenth,
// and so on.
func (r *Result) distribution() chart {
	var took []time.Duration
	for _, s := range r.Samples {
		if s.Failure != notAnswered {
			took = append(took, s.Took)
		}
	}
	slices.Sort(took)
	nines := math.Max(1, math.Floor(math.Log10(float64(len(took)))))
	s := series{class: "p50", name: "all executions"}
	for i := range intervals + 1 {
		at := float64(i) / intervals
		s.at, s.values = append(s.at, at), append(s.values, millis(quantile(took, 1-math.Pow(10, -at*nines))))
	}
	var labels []string
	for i := range int(nines) + 1 {
		labels = append(labels, "p"+strconv.FormatFloat(100*(1-math.Pow(10, -float64(i))), 'g', 6, 64))
	}
	return draw("Milliseconds, by share of the executions that were answered", labels, s)
}

// flow draws how many executions were in flight.
func (r *Result) flow() chart {
	end := r.Config.Duration
	for _, s := range r.Samples {
		end = max(end, s.Due+s.Took)
	}
	s := series{class: "p99", name: "in flight"}
	for i := range intervals {
		at := time.Duration(float64(end) * (float64(i) + 0.5) / intervals)
		n := 0.0
		for _, x := range r.Samples {
			if x.Due <= at && at < x.Due+x.Took {
				n++
			}
		}
		s.at, s.values = append(s.at, (float64(i)+0.5)/intervals), append(s.values, n)
	}
	var labels []string
	for i := range tickCount {
		labels = append(labels, fmt.Sprintf("%.3g s", end.Seconds()*float64(i)/(tickCount-1)))
	}
	return draw("Executions in flight", labels, s)
}

// seconds returns the labels of a time axis.
func (r *Result) seconds() []string {
	var labels []string
	for i := range tickCount {
		labels = append(labels, fmt.Sprintf("%.3g s", r.Config.Duration.Seconds()*float64(i)/(tickCount-1)))
	}
	return labels
}

// draw draws series, with labels at equal distances below.
func draw(title string, labels []string, list ...series) chart {
	top := 0.0
	for _, s := range list {
		for _, v := range s.values {
			if v > top { // NaN never is
				top = v
			}
		}
	}
	top = math.Max(top, 1e-3) * 1.05
	y := func(v float64) float64 { return chartBottom - v/top*(chartBottom-chartTop) }
	x := func(at float64) float64 { return chartLeft + at*(chartWidth-chartLeft-20) }
	c := chart{Title: title, Width: chartWidth, Height: chartHeight}
	for i := range tickCount {
		v := top * float64(i) / (tickCount - 1)
		c.Ticks = append(c.Ticks, tick{X1: chartLeft, X2: chartWidth - 20, Y1: y(v), Y2: y(v), TextX: chartLeft - 6, TextY: y(v) + 4, Text: fmt.Sprintf("%.3g", v), Anchor: "end"})
	}
	for i, label := range labels {
		at := float64(i) / float64(max(1, len(labels)-1))
		c.Ticks = append(c.Ticks, tick{X1: x(at), X2: x(at), Y1: chartBottom, Y2: chartBottom + 4, TextX: x(at), TextY: chartBottom + 18, Text: label, Anchor: "middle"})
	}
	for i, s := range list {
		var points []string
		for j, v := range s.values {
			if !math.IsNaN(v) {
				points = append(points, fmt.Sprintf("%.1f,%.1f", x(s.at[j]), y(v)))
			}
		}
		c.Lines = append(c.Lines, line{s.class, s.name, strings.Join(points, " ")})
		left := chartLeft + 110*float64(i)
		c.Legend = append(c.Legend, legend{s.class, s.name, left, left + 20, left + 26})
	}
	return c
}
