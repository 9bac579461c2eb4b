package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto/plot"
)

// plotStep is the time whose samples are one point of the drawing of a soak.
const plotStep = 30 * time.Second

// panels are the metrics that are drawn.
var panels = []string{
	metricRSS, metricHeap, metricGoroutines, metricFiles, metricProcesses, metricCgroups,
	metricMounts, metricDisk,
}

var soakColors = map[string]string{
	"gateway-1": "#2f6fde", "gateway-2": "#7fb0ff", "worker-1": "#d9534f", "worker-2": "#f0a35e",
	"scheduler": "#3a9d5d", "webhook": "#8e5bd0", natsName: "#777", "store": "#b8a100",
}

// plotSoak draws the samples of a soak as SVG.
func plotSoak(points []point, d time.Duration) []byte {
	picture := plot.Picture{Title: fmt.Sprintf("Soak of %.0f minutes", d.Minutes()), Columns: 1, Width: 800, Height: 120}
	for _, node := range slices.Sorted(maps.Keys(soakColors)) {
		picture.Legend = append(picture.Legend, plot.Series{Name: node, Color: soakColors[node]})
	}
	for _, metric := range panels {
		picture.Panels = append(picture.Panels, soakPanel(points, d, metric))
	}
	return picture.SVG()
}

// soakPanel has one metric of all processes, each start of a process as a line of its own.
func soakPanel(points []point, d time.Duration, metric string) plot.Panel {
	panel := plot.Panel{
		Title:  metric,
		Labels: []plot.Label{{At: 0, Text: "0"}, {At: 1, Text: fmt.Sprintf("%.0f min", d.Minutes())}},
	}
	type line struct {
		node  string
		start int
	}
	some := slices.DeleteFunc(slices.Clone(points), func(p point) bool { return p.series.metric != metric })
	lines := groupBy(some, func(p point) line { return line{p.series.node, p.start} })
	for _, l := range slices.SortedFunc(maps.Keys(lines), func(a, b line) int {
		return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.start, b.start))
	}) {
		s := plot.Series{Color: soakColors[l.node]}
		steps := groupBy(lines[l], func(p point) time.Duration { return p.at.Truncate(plotStep) })
		for _, step := range slices.Sorted(maps.Keys(steps)) {
			var values []float64
			for _, p := range steps[step] {
				values = append(values, p.value)
			}
			s.Points = append(s.Points, plot.Point{X: step.Hours() / d.Hours(), Y: median(values)})
		}
		panel.Series = append(panel.Series, s)
	}
	return panel
}
