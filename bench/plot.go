package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"strconv"
)

// Dimensions of the drawing, in pixels.
const (
	plotWidth  = 860
	plotLabel  = 230 // for the names on the left
	plotNumber = 150 // for the figures on the right
	plotBar    = 11
	plotRow    = 34
	plotHead   = 56
)

// row is a pair of bars.
type row struct {
	name          string
	bare, bullpen float64 // ms
}

// rows returns the medians of occasional requests.
func (r *report) rows() (all []row) {
	for _, p := range r.Paced {
		if p.Unavailable == "" {
			all = append(all, row{string(p.Language) + ", " + p.Case, p.Bare.P50, p.Bullpen.P50})
		}
	}
	return all
}

// plot draws the latency of occasional requests next to the bare interpreter's, as SVG.
func (r *report) plot() []byte {
	rows := r.rows()
	longest := 0.0
	for _, row := range rows {
		longest = max(longest, row.bare, row.bullpen)
	}
	var b bytes.Buffer
	text := func(x, y int, class, s string) {
		var escaped bytes.Buffer
		_ = xml.EscapeText(&escaped, []byte(s)) // writes to a buffer do not fail
		fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\" class=\"%s\">%s</text>\n", x, y, class, escaped.Bytes())
	}
	bar := func(y int, class string, ms float64) {
		width := ratio(ms, longest) * (plotWidth - plotLabel - plotNumber)
		fmt.Fprintf(&b, "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\" class=\"%s\"/>\n", plotLabel, y, width,
			plotBar, class)
		text(plotLabel+int(width)+6, y+plotBar-1, "n", strconv.FormatFloat(ms, 'f', 1, 64)+" ms")
	}
	fmt.Fprintf(&b, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\">\n",
		plotWidth, plotHead+plotRow*len(rows))
	b.WriteString(
		"<style>text{font-size:13px;fill:#333}.n{font-size:11px;fill:#555}.t{font-size:15px;font-weight:bold}" +
			".bare{fill:#b8bec9}.bullpen{fill:#2f6fde}" +
			"@media(prefers-color-scheme:dark){text{fill:#ddd}.n{fill:#aaa}.bare{fill:#666e7d}}</style>\n")
	text(0, 18, "t", fmt.Sprintf("One request now and then, p50; %s, %d cores, commit %s", r.Machine.CPU,
		r.Machine.Cores, r.Commit))
	fmt.Fprintf(&b, "<rect x=\"0\" y=\"30\" width=\"11\" height=\"11\" class=\"bare\"/>\n<rect x=\"230\" y=\"30\" "+
		"width=\"11\" height=\"11\" class=\"bullpen\"/>\n")
	text(17, 40, "n", "the bare interpreter on the same machine")
	text(247, 40, "n", "bullpen, over HTTP, from the durable queue, in its jail")
	for i, row := range rows {
		y := plotHead + i*plotRow
		text(0, y+plotRow/2, "l", row.name)
		bar(y, "bare", row.bare)
		bar(y+plotBar+1, "bullpen", row.bullpen)
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}
