package plot_test

import (
	"encoding/xml"
	"math"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto/plot"
)

func TestPercentileIsARealSample(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(i + 1)
	}
	for _, c := range []struct {
		values []float64
		p      float64
		want   float64
	}{
		{nil, 50, 0},
		{[]float64{7}, 50, 7},
		{[]float64{7}, 99, 7},
		{[]float64{1, 2}, 50, 1},
		{[]float64{1, 2, 3}, 50, 2},
		{[]float64{1, 2, 3, 4}, 50, 2},
		{[]float64{1, 2, 3, 4}, 99, 4},
		{hundred, 50, 50},
		{hundred, 99, 99},
		{hundred, 100, 100},
		{append(hundred[:100:100], 101), 99, 100},
	} {
		if got := plot.Percentile(c.values, c.p); got != c.want {
			t.Errorf("percentile %v of %v is %v, want %v", c.p, c.values, got, c.want)
		}
	}
}

func TestPicture(t *testing.T) {
	p := plot.Picture{
		Title: "<title>", Note: "a & b", Columns: 2, Width: 100, Height: 50,
		Panels: []plot.Panel{
			{
				Title: "first", Labels: []plot.Label{{At: 0, Text: "0"}, {At: 1, Text: "1 h"}}, Mark: 30, MarkName: "limit",
				Series: []plot.Series{
					{Name: "x", Color: "#123456", Points: []plot.Point{{X: 0, Y: 1}, {X: .5, Y: math.NaN()}, {X: 1, Y: 2}}},
					{Name: "x", Color: "#123456", Points: []plot.Point{{X: 0, Y: 5}, {X: .25, Y: 5}, {X: .5, Y: 5}, {X: 1, Y: 5}}},
					{Name: "area", Color: "#654321", Area: true, Points: []plot.Point{{X: 0, Y: 10}, {X: 1, Y: 20}}},
				},
			},
			{Title: "empty", Series: []plot.Series{{Name: "none", Color: "#000"}}},
			{Title: "second row"},
		},
	}
	drawing := string(p.SVG())
	if err := xml.Unmarshal([]byte(drawing), new(struct{})); err != nil {
		t.Fatal(err)
	}
	for text, n := range map[string]int{
		"&lt;title&gt;": 1, "a &amp; b": 1, ">x</text>": 1, ">area</text>": 1, ">limit</text>": 1, ">none</text>": 1,
		">1 h</text>":      1,
		`stroke="#123456"`: 3, `class="a"`: 1, "NaN": 0, `viewBox="0 0 360 252"`: 1,
	} {
		if got := strings.Count(drawing, text); got != n {
			t.Errorf("%q is there %d times, want %d:\n%s", text, got, n, drawing)
		}
	}
	if !strings.Contains(drawing, `d="M64.0 `) || strings.Count(drawing, "89.0 ") != 0 {
		t.Errorf("points in the middle of a horizontal part are drawn:\n%s", drawing)
	}
}
