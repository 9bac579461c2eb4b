package main

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Dimensions of the drawing of a soak, in pixels.
const (
	panelWidth, panelHeight = 400, 150
	panelGap, panelHead     = 40, 60
	panelColumns            = 2
	plotStep                = 30 * time.Second // samples within it are one point
)

// panels are the metrics that are drawn.
var panels = []string{metricRSS, metricHeap, metricGoroutines, metricFiles, metricProcesses, metricCgroups, metricMounts, metricDisk}

var soakColors = map[string]string{
	"gateway-1": "#2f6fde", "gateway-2": "#7fb0ff", "worker-1": "#d9534f", "worker-2": "#f0a35e", "scheduler": "#3a9d5d", "webhook": "#8e5bd0", natsName: "#777",
	"store": "#b8a100",
}

// plotSoak draws the samples of a soak as SVG.
func plotSoak(points []point, d time.Duration) []byte {
	var b bytes.Buffer
	rows := (len(panels) + panelColumns - 1) / panelColumns
	width, height := panelColumns*(panelWidth+panelGap), panelHead+rows*(panelHeight+panelGap)
	_, _ = fmt.Fprintf(&b, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\">\n", width, height)
	b.WriteString("<style>text{font-size:12px;fill:#333}.n{font-size:10px;fill:#666}path{fill:none;stroke-width:1.2}.a{stroke:#999;stroke-width:.6}" +
		"@media(prefers-color-scheme:dark){text{fill:#ddd}.n{fill:#aaa}}</style>\n")
	x := panelGap
	for _, name := range []string{"gateway-1", "gateway-2", "worker-1", "worker-2", "scheduler", "webhook", natsName, "store"} {
		_, _ = fmt.Fprintf(&b, "<rect x=\"%d\" y=\"8\" width=\"11\" height=\"11\" fill=\"%s\"/><text x=\"%d\" y=\"18\">%s</text>\n", x, soakColors[name], x+15, name)
		x += 100
	}
	for i, metric := range panels {
		drawPanel(&b, points, d, metric, panelGap+i%panelColumns*(panelWidth+panelGap), panelHead+i/panelColumns*(panelHeight+panelGap))
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// drawPanel draws one metric of all processes, each start of a process as a line of its own.
func drawPanel(b *bytes.Buffer, points []point, d time.Duration, metric string, left, top int) {
	type line struct {
		node  string
		start int
	}
	most := 0.0
	lines := groupBy(slices.DeleteFunc(slices.Clone(points), func(p point) bool {
		drop := p.series.metric != metric
		if !drop {
			most = max(most, p.value)
		}
		return drop
	}), func(p point) line { return line{p.series.node, p.start} })
	_, _ = fmt.Fprintf(b, "<text x=\"%d\" y=\"%d\">%s</text><text x=\"%d\" y=\"%d\" class=\"n\" text-anchor=\"end\">%.0f</text><text x=\"%d\" y=\"%d\" class=\"n\" text-anchor=\"end\">0</text>\n",
		left, top-8, metric, left-4, top+8, most, left-4, top+panelHeight)
	_, _ = fmt.Fprintf(b, "<path class=\"a\" d=\"M%d %dV%dH%d\"/><text x=\"%d\" y=\"%d\" class=\"n\" text-anchor=\"end\">%.0f min</text>\n",
		left, top, top+panelHeight, left+panelWidth-panelGap, left+panelWidth-panelGap, top+panelHeight+12, d.Minutes())
	for _, l := range slices.SortedFunc(maps.Keys(lines), func(a, b line) int {
		return strings.Compare(fmt.Sprintf("%s %4d", a.node, a.start), fmt.Sprintf("%s %4d", b.node, b.start))
	}) {
		_, _ = fmt.Fprintf(b, "<path stroke=\"%s\" d=\"", soakColors[l.node])
		steps := groupBy(lines[l], func(p point) time.Duration { return p.at.Truncate(plotStep) })
		command := "M"
		for _, step := range slices.Sorted(maps.Keys(steps)) {
			var values []float64
			for _, p := range steps[step] {
				values = append(values, p.value)
			}
			x := float64(left) + step.Hours()/d.Hours()*(panelWidth-panelGap)
			y := float64(top) + panelHeight*(1-ratio(median(values), most))
			_, _ = fmt.Fprintf(b, "%s%.1f %.1f", command, x, y)
			command = "L"
		}
		b.WriteString("\"/>\n")
	}
}
