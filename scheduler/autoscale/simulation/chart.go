package simulation

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"
	"time"
)

// The sizes of a chart, in pixels.
const (
	chartWidth   = 960
	chartLeft    = 70
	chartRight   = 16
	chartHead    = 76
	panelHeight  = 150
	panelGap     = 52
	chartFoot    = 40
	chartColumns = chartWidth - chartLeft - chartRight
	chartHeight  = chartHead + 3*panelHeight + 2*panelGap + chartFoot
)

const chartStyle = `text{font-size:12px;fill:#333}.t{font-size:15px;font-weight:bold}.p{font-size:13px;font-weight:bold}.n{font-size:11px;fill:#555}
.e{text-anchor:end}.m{text-anchor:middle}line{stroke:#ddd}path,.key{stroke-width:1.5;fill:none}.slots{fill:#cfdcf7;stroke:#2f6fde}.running{fill:#8fb98f;stroke:none}
.need{stroke:#d9822b}.queue{fill:#e6cfee;stroke:#8e44ad}.wait{fill:#f6d0cd;stroke:#c0392b}.target{stroke:#333;stroke-dasharray:5 4}
`

// series is a line of a chart.
type series struct {
	name, class string
	area        bool
	value       func(Sample) float64
}

// Chart returns an SVG of the slots, the queue and the waits of an autoscaled pool over time.
func (s *Simulation) Chart(title string, r *Result) []byte {
	c := chart{end: time.Duration(r.Hours * float64(time.Hour))}
	_, _ = fmt.Fprintf(&c, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\">\n<style>%s</style>\n",
		chartWidth, chartHeight, chartWidth, chartHeight, chartStyle)
	_, _ = fmt.Fprintf(&c, "<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n", chartWidth, chartHeight)
	c.text(chartLeft, 22, "t", title)
	c.text(chartLeft, 40, "n", fmt.Sprintf("%d jobs, wait p50 %s, p99 %s, longest %s; %.1f worker hours of %d slots, at most %d workers", r.Jobs,
		seconds(r.Waits.P50), seconds(r.Waits.P99), seconds(r.Waits.Max), r.WorkerHours, s.Policy.SlotsPerWorker, r.PeakWorkers))
	columns := c.columns(r.Samples)
	most := 1.0
	for _, x := range columns {
		most = max(most, float64(x.Demand.Slots))
	}
	c.panel("Slots", most*1.1, columns, 0,
		series{"slots of live workers", "slots", true, func(x Sample) float64 { return float64(x.Demand.Slots) }},
		series{"slots in use", "running", true, func(x Sample) float64 { return float64(x.Demand.Running) }},
		series{"slots that the demand needs", "need", false, func(x Sample) float64 { return float64(x.Need) }})
	c.panel("Waiting jobs", 0, columns, 0, series{"jobs in the queue", "queue", true, func(x Sample) float64 { return float64(x.Demand.Queued) }})
	c.panel("Wait in seconds", 0, columns, time.Duration(s.Policy.TargetWait).Seconds(),
		series{"wait of the oldest job", "wait", true, func(x Sample) float64 { return x.Demand.OldestWait.Seconds() }})
	c.text(chartLeft+chartColumns/2, chartHeight-8, "n m", "hours since the start of the trace")
	c.WriteString("</svg>\n")
	return c.Bytes()
}

// seconds returns a duration for people.
func seconds(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(time.Millisecond * 100).String()
}

type chart struct {
	bytes.Buffer
	end    time.Duration
	panels int
}

func (c *chart) text(x, y int, class, text string) {
	_, _ = fmt.Fprintf(c, "<text x=\"%d\" y=\"%d\" class=\"%s\">%s</text>\n", x, y, class, html.EscapeString(text))
}

// columns returns a sample for each pixel, with the largest figures of its time.
func (c *chart) columns(samples []Sample) []Sample {
	columns := make([]Sample, 0, chartColumns)
	next, x := 0, Sample{}
	for i := range chartColumns {
		until := time.Duration(float64(c.end) * float64(i+1) / chartColumns)
		for first := true; next < len(samples) && samples[next].At < until; next++ {
			if first {
				x, first = samples[next], false
			} else {
				x.merge(samples[next])
			}
		}
		columns = append(columns, x)
	}
	return columns
}

// panel draws a panel with a scale from 0 to top, or to the largest value if top is 0. Larger
// values are cut off. A mark, if not 0, is a dashed line.
func (c *chart) panel(title string, top float64, columns []Sample, mark float64, list ...series) {
	from := chartHead + c.panels*(panelHeight+panelGap)
	c.panels++
	if top == 0 {
		top = max(mark*1.2, 1)
		for _, x := range columns {
			for _, s := range list {
				top = max(top, s.value(x)*1.05)
			}
		}
	}
	step := tick(top, 4)
	bottom := from + panelHeight
	y := func(v float64) float64 { return float64(bottom) - panelHeight*min(v/top, 1) }
	c.text(chartLeft, from-6, "p", title)
	for i := 0; float64(i)*step <= top; i++ {
		at := y(float64(i) * step)
		_, _ = fmt.Fprintf(c, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>\n", chartLeft, chartLeft+chartColumns, at, at)
		c.text(chartLeft-6, int(at)+4, "n e", strconv.FormatFloat(float64(i)*step, 'g', 6, 64))
	}
	hours := max(c.end.Hours(), 1e-9)
	hour := tick(hours, 12)
	for i := 0; float64(i)*hour <= hours; i++ {
		x := chartLeft + int(float64(i)*hour/hours*chartColumns)
		_, _ = fmt.Fprintf(c, "<line x1=\"%d\" x2=\"%d\" y1=\"%d\" y2=\"%d\"/>\n", x, x, from, bottom+4)
		c.text(x, bottom+17, "n m", strconv.FormatFloat(float64(i)*hour, 'g', 4, 64))
	}
	key := chartLeft + chartColumns
	legend := func(name, class string, area bool) {
		key -= 7*len(name) + 36
		c.text(key+24, from-6, "n", name)
		if area {
			_, _ = fmt.Fprintf(c, "<rect x=\"%d\" y=\"%d\" width=\"18\" height=\"9\" class=\"%s\"/>\n", key, from-15, class)
		} else {
			_, _ = fmt.Fprintf(c, "<path d=\"M%d %dh18\" class=\"%s\"/>\n", key, from-10, class)
		}
	}
	for _, s := range list {
		heights := make([]string, len(columns))
		for i, x := range columns {
			heights[i] = strconv.FormatFloat(y(s.value(x)), 'f', 0, 64)
		}
		var path strings.Builder
		if s.area {
			_, _ = fmt.Fprintf(&path, "M%d %dL", chartLeft, bottom)
		} else {
			path.WriteString("M")
		}
		for i, h := range heights {
			if i > 0 && i < len(heights)-1 && h == heights[i-1] && h == heights[i+1] {
				continue // on a horizontal line
			}
			_, _ = fmt.Fprintf(&path, "%d %s ", chartLeft+i, h)
		}
		if s.area {
			_, _ = fmt.Fprintf(&path, "%d %dZ", chartLeft+len(columns)-1, bottom)
		}
		_, _ = fmt.Fprintf(c, "<path d=\"%s\" class=\"%s\"/>\n", path.String(), s.class)
		legend(s.name, s.class, s.area)
	}
	if mark > 0 {
		_, _ = fmt.Fprintf(c, "<path d=\"M%d %.1fh%d\" class=\"target\"/>\n", chartLeft, y(mark), chartColumns)
		legend("target wait", "target", false)
	}
}

// tick returns a round distance for at most about so many ticks.
func tick(top float64, ticks int) float64 {
	least := top / float64(ticks)
	power := math.Pow(10, math.Floor(math.Log10(least)))
	for _, factor := range []float64{1, 2, 5} {
		if factor*power >= least {
			return factor * power
		}
	}
	return 10 * power
}
