package main

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto/plot"
)

// Metrics of a process. Those that begin with metricStream and metricMessages end with a stream.
const (
	metricRSS        = "resident memory, MB"
	metricHeap       = "heap at the next collection, MB"
	metricGoroutines = "goroutines"
	metricFiles      = "descriptors"
	metricMounts     = "mounts"
	metricCgroups    = "control groups"
	metricProcesses  = "processes"
	metricDisk       = "disk, MB"
	metricConsumers  = "consumers"
	metricStream     = "MB of "
	metricMessages   = "messages of "

	// bodiesStream keeps bodies of large jobs and records for longer than any soak.
	bodiesStream = "BULLPEN_BODIES"
)

// tolerance is how much a series may grow per hour: a number, and a fraction of its median. A
// worker keeps 64 empty control groups, whose number fluctuates.
type tolerance struct{ number, share float64 }

var tolerances = map[string]tolerance{
	metricRSS: {10, .1}, metricHeap: {4, .1}, metricGoroutines: {10, .05}, metricFiles: {10, .05}, metricMounts: {2, 0},
	metricCgroups:   {64, .05},
	metricProcesses: {4, .05}, metricDisk: {10, .1}, metricConsumers: {4, .05}, metricStream: {1, .1},
	metricMessages: {50, .1},
}

// notFlat are series that grow for longer than an hour, as the documents say, with the reason.
var notFlat = map[seriesName]string{
	{"store", metricDisk}:                             "unused objects are kept for a day",
	{natsName, metricStream + bodiesStream}:           "bodies of large jobs and records are kept for three days",
	{natsName, metricMessages + "KV_bullpen_batches"}: "marks of removed batches are kept for a week",
	{natsName, metricMessages + bodiesStream}:         "bodies of large jobs and records are kept for three days",
}

// seriesName is one metric of one process.
type seriesName struct{ node, metric string }

// point is a sample. start counts the starts of its process.
type point struct {
	series  seriesName
	at, age time.Duration
	start   int
	value   float64
}

// trend is the growth of a series.
type trend struct {
	series        seriesName
	perHour       float64
	median, limit float64 // of the growth
	points        int
	ages          bool // processes were compared at equal ages
	reason        string
}

func (t trend) judged() bool { return t.reason == "" }

func (t trend) grows() bool { return t.judged() && t.perHour > t.limit }

// judge computes the trend of each series. A process that ran through the second half is judged by
// that half. Others are compared at an age between a thirtieth and a fifteenth of the soak, since a
// process that was just started grows.
func judge(points []point, d time.Duration) (trends []trend) {
	all := map[seriesName][]point{}
	for _, p := range points {
		all[p.series] = append(all[p.series], p)
	}
	for _, s := range slices.SortedFunc(maps.Keys(all), func(a, b seriesName) int {
		return cmp.Or(strings.Compare(a.metric, b.metric), strings.Compare(a.node, b.node))
	}) {
		t := trend{series: s, reason: notFlat[s]}
		var at, values []float64
		half := slices.DeleteFunc(slices.Clone(all[s]), func(p point) bool { return p.at < d/2 })
		if len(half) > 0 && half[0].start == half[len(half)-1].start {
			for _, p := range half {
				at, values = append(at, p.at.Hours()), append(values, p.value)
			}
		} else {
			t.ages = true
			at, values = equalAges(all[s], d)
		}
		t.points, t.perHour, t.median = len(values), slope(at, values), median(values)
		metric := s.metric
		for _, prefix := range []string{metricStream, metricMessages} {
			if strings.HasPrefix(metric, prefix) {
				metric = prefix
			}
		}
		t.limit = tolerances[metric].number + tolerances[metric].share*t.median
		switch {
		case d < leastJudged:
			t.reason = "too short to tell"
		case len(values) < 3: //nolint:mnd // one trend of two points is none
			t.reason = "too few points"
		}
		trends = append(trends, t)
	}
	return trends
}

// equalAges returns the start of each process in hours, and its median at the same age. It omits
// processes started in the first sixth, when nothing is steady yet.
func equalAges(points []point, d time.Duration) (at, values []float64) {
	for start, of := range groupBy(points, func(p point) int { return p.start }) {
		var same []float64
		for _, p := range of {
			if p.age >= d/30 && p.age <= d/15 {
				same = append(same, p.value)
			}
		}
		if began := of[0].at - of[0].age; len(same) > 0 && start > 0 && began > d/6 {
			at, values = append(at, began.Hours()), append(values, median(same))
		}
	}
	return at, values
}

func groupBy[K comparable](points []point, key func(point) K) map[K][]point {
	groups := map[K][]point{}
	for _, p := range points {
		groups[key(p)] = append(groups[key(p)], p)
	}
	return groups
}

// slope returns the median of the slopes between all pairs of points (Theil and Sen), which a few
// outliers do not change. It is 0 for less than two points.
func slope(x, y []float64) float64 {
	var slopes []float64
	for i := range x {
		for j := range i {
			if x[i] != x[j] {
				slopes = append(slopes, (y[i]-y[j])/(x[i]-x[j]))
			}
		}
	}
	return median(slopes)
}

// median returns the median of values, 0 if there are none. It keeps their order.
func median(values []float64) float64 {
	return plot.Percentile(slices.Sorted(slices.Values(values)), 50)
} //nolint:mnd // per cent

// printTrends prints the trends of all series that are not 0.
func printTrends(out io.Writer, trends []trend) error {
	var b bytes.Buffer
	_, _ = fmt.Fprintf(&b, "%-42s %-10s %10s %12s %10s\n", "", "", "median", "per hour", "at most")
	for _, t := range trends {
		if t.median == 0 && t.perHour == 0 {
			continue
		}
		verdict := "flat"
		switch {
		case t.grows():
			verdict = "GROWS"
		case !t.judged():
			verdict = "not judged: " + t.reason
		case t.ages:
			verdict = fmt.Sprintf("flat, %d processes at equal ages", t.points)
		}
		_, _ = fmt.Fprintf(&b, "%-42s %-10s %10.1f %+12.2f %10.1f  %s\n", t.series.metric, t.series.node, t.median, t.perHour,
			t.limit, verdict)
	}
	_, err := b.WriteTo(out)
	return err
}

// csvOf returns all samples.
func csvOf(points []point) []byte {
	var b bytes.Buffer
	b.WriteString("seconds,process,start,age_seconds,metric,value\n")
	for _, p := range points {
		_, _ = fmt.Fprintf(&b, "%.0f,%s,%d,%.0f,%q,%.3f\n", p.at.Seconds(), p.series.node, p.start, p.age.Seconds(),
			p.series.metric, p.value)
	}
	return b.Bytes()
}
