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

	"github.com/bullpen-run/bullpen/proto/plot"
)

//go:embed report.html.tmpl
var pageText string

var pageTemplate = template.Must(template.New("load").Parse(pageText))

const (
	intervals  = 100 // of time
	labelCount = 5

	blue, orange, red = "#2f6fde", "#d9822b", "#c23030"
)

type page struct {
	Title, Summary string
	Rows           []Row
	Picture        template.HTML
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
	text := fmt.Sprintf("%.4g executions were due each second for %s; %d were sent",
		r.Config.Rate, r.Config.Duration, len(r.Samples))
	if r.Unsent > 0 {
		text += fmt.Sprintf(", and %d were not, since %d were in flight", r.Unsent, r.Config.InFlight)
	}
	return text + fmt.Sprintf(". The latest was sent %s late.", r.Late.Round(100*time.Microsecond))
}

// HTML writes a report as one page without scripts and links to other files.
func (r *Result) HTML(w io.Writer) error {
	p := page{Title: "Load of " + r.Start.Format(time.DateTime), Summary: r.Summary(), Rows: r.Rows()}
	if len(r.Samples) > 0 {
		panels := []plot.Panel{r.overTime(), r.distribution(), r.flow()}
		picture := plot.Picture{Columns: 1, Width: 820, Height: 210, Panels: panels}
		p.Picture = template.HTML(picture.SVG()) //nolint:gosec // it escapes its texts
	}
	if err := pageTemplate.Execute(w, p); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// overTime has the times of executions by when they were due.
func (r *Result) overTime() plot.Panel {
	took := make([][]time.Duration, intervals)
	for _, s := range r.Samples {
		i := min(intervals-1, int(float64(intervals)*float64(s.Due)/float64(r.Config.Duration)))
		took[i] = append(took[i], s.Took)
	}
	list := []plot.Series{{Name: "p50", Color: blue}, {Name: "p99", Color: orange}, {Name: "longest", Color: red}}
	for i := range took {
		slices.Sort(took[i])
		for j, p := range []float64{50, 99, 100} {
			if len(took[i]) > 0 {
				at := plot.Point{X: (float64(i) + 0.5) / intervals, Y: millis(plot.Percentile(took[i], p))}
				list[j].Points = append(list[j].Points, at)
			}
		}
	}
	return plot.Panel{Title: "Milliseconds, by when executions were due", Labels: seconds(r.Config.Duration), Series: list}
}

// distribution has the times by share of the executions. The right half is the slowest tenth, and so on.
func (r *Result) distribution() plot.Panel {
	var took []time.Duration
	for _, s := range r.Samples {
		if s.Failure != notAnswered {
			took = append(took, s.Took)
		}
	}
	slices.Sort(took)
	nines := math.Max(1, math.Floor(math.Log10(float64(len(took)))))
	s := plot.Series{Name: "all executions", Color: blue}
	for i := range intervals + 1 {
		x := float64(i) / intervals
		s.Points = append(s.Points, plot.Point{X: x, Y: millis(plot.Percentile(took, 100-100*math.Pow(10, -x*nines)))})
	}
	var labels []plot.Label
	for i := range int(nines) + 1 {
		share := strconv.FormatFloat(100*(1-math.Pow(10, -float64(i))), 'g', 6, 64)
		labels = append(labels, plot.Label{At: float64(i) / nines, Text: "p" + share})
	}
	const title = "Milliseconds, by share of the executions that were answered"
	return plot.Panel{Title: title, Labels: labels, Series: []plot.Series{s}}
}

// flow has how many executions were in flight.
func (r *Result) flow() plot.Panel {
	end := r.Config.Duration
	for _, s := range r.Samples {
		end = max(end, s.Due+s.Took)
	}
	s := plot.Series{Name: "in flight", Color: orange}
	for i := range intervals {
		at := time.Duration(float64(end) * (float64(i) + 0.5) / intervals)
		n := 0
		for _, x := range r.Samples {
			if x.Due <= at && at < x.Due+x.Took {
				n++
			}
		}
		s.Points = append(s.Points, plot.Point{X: (float64(i) + 0.5) / intervals, Y: float64(n)})
	}
	return plot.Panel{Title: "Executions in flight", Labels: seconds(end), Series: []plot.Series{s}}
}

// seconds returns the labels of a time axis.
func seconds(end time.Duration) []plot.Label {
	var labels []plot.Label
	for i := range labelCount {
		at := float64(i) / (labelCount - 1)
		labels = append(labels, plot.Label{At: at, Text: fmt.Sprintf("%.3g s", end.Seconds()*at)})
	}
	return labels
}
