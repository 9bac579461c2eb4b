// Package plot draws measured values as SVG, and has the one definition of a percentile.
package plot

import (
	"bytes"
	"cmp"
	"fmt"
	"html"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Percentile returns the smallest of the sorted values that at least p percent of them do not exceed, and
// the zero value if there are none.
func Percentile[T cmp.Ordered](sorted []T, p float64) T {
	if len(sorted) == 0 {
		return *new(T)
	}
	rank := int(math.Ceil(p * float64(len(sorted)) / 100))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// Measures, in units of the picture.
const (
	left, right  = 64, 16 // of a panel, beside its plot
	head         = 48     // above the first row of panels
	above, below = 24, 28 // of a panel
	yTicks       = 4
	keyWidth     = 26 // of the line in a legend
	letterWidth  = 7
	// headroom is the part of a scale beyond the largest value.
	headroom = 1.05
)

const style = `text{font-size:12px;fill:#333}.t{font-size:15px;font-weight:bold}.p{font-size:13px;font-weight:bold}` +
	`.n{font-size:11px;fill:#555}.e{text-anchor:end}.m{text-anchor:middle}line{stroke:#ccc}` +
	`path{stroke-width:1.5;fill:none}.a{fill-opacity:.35}.d{stroke:#777;stroke-dasharray:5 4}` +
	`@media(prefers-color-scheme:dark){text{fill:#ddd}.n{fill:#aaa}line{stroke:#555}}`

// Picture is a drawing of panels.
type Picture struct {
	Title, Note string
	Legend      []Series // of all panels together
	Columns     int      // of panels
	// Width and Height are the dimensions of a panel's plot.
	Width, Height int
	Panels        []Panel
}

// Panel has lines over a common axis.
type Panel struct {
	Title  string
	Labels []Label // below the plot
	// Mark, if not 0, is a dashed horizontal line with a name.
	Mark     float64
	MarkName string
	Series   []Series
}

// Label is a text at a share of the width, from 0 to 1.
type Label struct {
	At   float64
	Text string
}

// Series is a line. Series of the same name have one entry in the legend, and those without a name none.
type Series struct {
	Name, Color string
	Area        bool // filled down to 0
	Points      []Point
}

// Point is a value at a share of the width, from 0 to 1.
type Point struct{ X, Y float64 }

// SVG returns the drawing.
func (p *Picture) SVG() []byte {
	d := &drawing{Picture: p}
	rows := (len(p.Panels) + p.Columns - 1) / p.Columns
	width, height := p.Columns*d.panelWidth(), head+rows*d.panelHeight()
	d.printf("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\" font-family=\"sans-serif\">\n",
		width, height)
	d.printf("<style>%s</style>\n", style)
	d.text(left, 20, "t", p.Title)
	d.text(left, 38, "n", p.Note)
	d.legend(p.Legend, width-right, head)
	for i := range p.Panels {
		d.panel(&p.Panels[i], i%p.Columns*d.panelWidth()+left, head+i/p.Columns*d.panelHeight()+above)
	}
	d.printf("</svg>\n")
	return d.Bytes()
}

type drawing struct {
	bytes.Buffer
	*Picture
}

func (d *drawing) panelWidth() int  { return left + d.Width + right }
func (d *drawing) panelHeight() int { return above + d.Height + below }

func (d *drawing) printf(format string, args ...any) { _, _ = fmt.Fprintf(d, format, args...) }

func (d *drawing) text(x, y int, class, text string) {
	if text != "" {
		d.printf("<text x=\"%d\" y=\"%d\" class=\"%s\">%s</text>\n", x, y, class, html.EscapeString(text))
	}
}

// panel draws a panel whose plot begins at x and y.
func (d *drawing) panel(p *Panel, x, y int) {
	top := p.top()
	bottom := y + d.Height
	at := func(v float64) float64 { return float64(bottom) - float64(d.Height)*v/top }
	d.text(x, y-8, "p", p.Title)
	step := Step(top, yTicks)
	for i := 0; float64(i)*step <= top; i++ {
		v := float64(i) * step
		d.printf("<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>\n", x, x+d.Width, at(v), at(v))
		d.text(x-6, int(at(v))+4, "n e", strconv.FormatFloat(v, 'g', 6, 64))
	}
	for _, l := range p.Labels {
		lx := x + int(l.At*float64(d.Width))
		d.printf("<line x1=\"%d\" x2=\"%d\" y1=\"%d\" y2=\"%d\"/>\n", lx, lx, bottom, bottom+4)
		d.text(lx, bottom+17, "n m", l.Text)
	}
	for _, s := range p.Series {
		d.series(&s, x, bottom, at)
	}
	legendEnd := x + d.Width
	if p.Mark > 0 {
		d.printf("<path d=\"M%d %.1fh%d\" class=\"d\"/>\n", x, at(p.Mark), d.Width)
		legendEnd = d.entry(p.MarkName, `class="d"`, legendEnd, y)
	}
	d.legend(p.Series, legendEnd, y)
}

// top returns the value at the upper edge.
func (p *Panel) top() float64 {
	top := p.Mark
	for _, s := range p.Series {
		for _, v := range s.Points {
			if v.Y > top { // NaN never is
				top = v.Y
			}
		}
	}
	return max(top, 1e-3) * headroom
}

// series draws a line, without the points in the middle of horizontal parts.
func (d *drawing) series(s *Series, x, bottom int, at func(float64) float64) {
	points := slices.DeleteFunc(slices.Clone(s.Points), func(p Point) bool { return math.IsNaN(p.Y) })
	if len(points) == 0 {
		return
	}
	heights := make([]string, len(points))
	for i, p := range points {
		heights[i] = strconv.FormatFloat(at(p.Y), 'f', 1, 64)
	}
	var path strings.Builder
	for i, h := range heights {
		if i > 0 && i < len(heights)-1 && h == heights[i-1] && h == heights[i+1] {
			continue
		}
		_, _ = fmt.Fprintf(&path, "%.1f %s ", float64(x)+points[i].X*float64(d.Width), h)
	}
	if !s.Area {
		d.printf("<path stroke=\"%s\" d=\"M%s\"/>\n", s.Color, strings.TrimSpace(path.String()))
		return
	}
	from, to := points[0].X, points[len(points)-1].X
	d.printf("<path class=\"a\" stroke=\"%[1]s\" style=\"fill:%[1]s\" d=\"M%.1[2]f %[3]dL%[4]s%.1[5]f %[3]dZ\"/>\n",
		s.Color, float64(x)+from*float64(d.Width), bottom, path.String(), float64(x)+to*float64(d.Width))
}

// legend draws the names of series above y, from the right edge x on.
func (d *drawing) legend(list []Series, x, y int) {
	drawn := map[string]bool{"": true}
	for _, s := range slices.Backward(list) {
		if !drawn[s.Name] {
			drawn[s.Name] = true
			x = d.entry(s.Name, fmt.Sprintf("stroke=%q", s.Color), x, y)
		}
	}
}

// entry draws an entry of a legend that ends at x, and returns where it begins.
func (d *drawing) entry(name, attributes string, x, y int) int {
	x -= letterWidth*len(name) + keyWidth + 8
	d.printf("<path d=\"M%d %dh%d\" %s/>\n", x, y-12, keyWidth-6, attributes)
	d.text(x+keyWidth, y-8, "n", name)
	return x
}

// Step returns a round distance for at most about that many ticks up to top.
func Step(top float64, ticks int) float64 {
	least := top / float64(ticks)
	power := math.Pow(10, math.Floor(math.Log10(least)))
	for _, factor := range []float64{1, 2, 5} {
		if factor*power >= least {
			return factor * power
		}
	}
	return 10 * power
}
