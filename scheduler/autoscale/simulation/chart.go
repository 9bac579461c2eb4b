package simulation

import (
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/bullpen-run/bullpen/proto/plot"
)

const (
	chartColumns = 874 // points of a line
	hourLabels   = 12

	blue, green, orange, violet, red = "#2f6fde", "#5e995e", "#d9822b", "#8e44ad", "#c0392b"
)

// Chart returns an SVG of the slots, the queue and the waits of an autoscaled pool over time.
func (s *Simulation) Chart(title string, r *Result) []byte {
	end := time.Duration(r.Hours * float64(time.Hour))
	columns := columnsOf(r.Samples, end)
	most := mostSlots(columns)
	line := func(name, color string, area bool, value func(Sample) float64) plot.Series {
		l := plot.Series{Name: name, Color: color, Area: area}
		for i, x := range columns {
			l.Points = append(l.Points, plot.Point{X: float64(i) / (chartColumns - 1), Y: value(x)})
		}
		return l
	}
	var hours []plot.Label
	total := max(end.Hours(), 1e-9)
	step := plot.Step(total, hourLabels)
	for i := 0; float64(i)*step <= total; i++ {
		hour := float64(i) * step
		hours = append(hours, plot.Label{At: hour / total, Text: strconv.FormatFloat(hour, 'g', 4, 64) + " h"})
	}
	picture := plot.Picture{
		Title: title, Columns: 1, Width: chartColumns, Height: 150,
		Note: fmt.Sprintf("%d jobs, wait p50 %s, p99 %s, longest %s; %.1f worker hours of %d slots, at most %d workers",
			r.Jobs, seconds(r.Waits.P50), seconds(r.Waits.P99), seconds(r.Waits.Max),
			r.WorkerHours, s.Policy.SlotsPerWorker, r.PeakWorkers),
		Panels: []plot.Panel{
			{Title: "Slots", Labels: hours, Series: []plot.Series{
				line("of live workers", blue, true, func(x Sample) float64 { return float64(x.Demand.Slots) }),
				line("in use", green, true, func(x Sample) float64 { return float64(x.Demand.Running) }),
				// A need beyond the slots is cut off at the largest number of slots.
				line("that the demand needs", orange, false, func(x Sample) float64 { return min(float64(x.Need), most) }),
			}},
			{Title: "Waiting jobs", Labels: hours, Series: []plot.Series{
				line("in the queue", violet, true, func(x Sample) float64 { return float64(x.Demand.Queued) }),
			}},
			{
				Title: "Wait in seconds", Labels: hours,
				Mark: time.Duration(s.Policy.TargetWait).Seconds(), MarkName: "target wait",
				Series: []plot.Series{
					line("of the oldest job", red, true, func(x Sample) float64 { return x.Demand.OldestWait.Seconds() }),
				},
			},
		},
	}
	return picture.SVG()
}

// mostSlots returns the largest number of slots of live workers.
func mostSlots(columns []Sample) float64 {
	most := 1.0
	for _, x := range columns {
		most = math.Max(most, float64(x.Demand.Slots))
	}
	return most
}

// seconds returns a duration for people.
func seconds(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(time.Millisecond * 100).String()
}

// columnsOf returns a sample for each column, with the largest figures of its time.
func columnsOf(samples []Sample, end time.Duration) []Sample {
	columns := make([]Sample, 0, chartColumns)
	next, x := 0, Sample{}
	for i := range chartColumns {
		until := time.Duration(float64(end) * float64(i+1) / chartColumns)
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
