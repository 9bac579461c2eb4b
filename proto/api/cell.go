package api

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Picture is a picture that a cell has shown, for models that can see.
type Picture struct {
	Type   string `json:"type"` // image/png or image/jpeg
	Base64 string `json:"base64"`
}

// pictureOf returns the picture of a display. ok is false for a display without one.
func pictureOf(d *Display) (p Picture, ok bool) {
	for _, kind := range []string{"image/png", "image/jpeg"} {
		if json.Unmarshal(d.Data[kind], &p.Base64) == nil && p.Base64 != "" {
			p.Type = kind
			return p, true
		}
	}
	return p, false
}

// CutForModel leaves of the result what a model can read: the first [MaxToolOutput] bytes of each output, and as much
// of the results. What is left out is flagged. It removes the pictures and returns them.
func (r *CellResult) CutForModel() (pictures []Picture) {
	r.Stdout, r.StdoutTruncated = cutOutput(r.Stdout, r.StdoutTruncated)
	r.Stderr, r.StderrTruncated = cutOutput(r.Stderr, r.StderrTruncated)
	left := MaxToolOutput
	for i := range r.Results {
		d := &r.Results[i]
		if p, ok := pictureOf(d); ok {
			pictures = append(pictures, p)
			delete(d.Data, p.Type)
		}
		fits := func(name string, value json.RawMessage) bool {
			if len(value) <= left {
				left -= len(value)
				return true
			}
			d.Truncated = append(d.Truncated, name)
			return false
		}
		kinds := slices.Sorted(maps.Keys(d.Data))
		slices.SortStableFunc(kinds, func(a, b string) int { return rank(a) - rank(b) })
		for _, kind := range kinds {
			if !fits(kind, d.Data[kind]) {
				delete(d.Data, kind)
			}
		}
		if !fits("chart", d.Chart) {
			d.Chart = nil
		}
		if !fits("columns", d.Columns) {
			d.Columns = nil
		}
		d.Metadata = nil // sizes of pictures and the like
	}
	return pictures
}

// rank orders the forms of a display: what every model reads comes first.
func rank(kind string) int {
	if kind == "text/plain" {
		return 0
	}
	return 1
}

// Text returns the result as a model reads it, without pictures.
func (r *CellResult) Text() string {
	var parts []string
	add := func(text string, truncated bool) {
		if text = strings.TrimSuffix(text, "\n"); truncated {
			text += "\n[The rest of the output was cut off.]"
		}
		if text != "" {
			parts = append(parts, text)
		}
	}
	add(r.Stdout, r.StdoutTruncated)
	for i := range r.Results {
		d := &r.Results[i]
		text := ""
		for _, kind := range []string{"text/plain", "text/markdown", "text/html"} {
			if json.Unmarshal(d.Data[kind], &text) == nil && text != "" {
				break
			}
		}
		if text == "" && d.Data["application/json"] != nil {
			text = string(d.Data["application/json"])
		}
		add(text, false)
		if len(d.Truncated) > 0 {
			add(fmt.Sprintf("[Left out because of its size: %s]", strings.Join(d.Truncated, ", ")), false)
		}
	}
	if r.Dropped > 0 {
		add(fmt.Sprintf("[%d more results were left out.]", r.Dropped), false)
	}
	add(r.Stderr, r.StderrTruncated)
	if r.Error != nil {
		text := strings.Join(r.Error.Traceback, "\n")
		if text == "" {
			text = r.Error.Name + ": " + r.Error.Value
		}
		add(text, false)
	}
	switch r.Status {
	case "timeout":
		add("The code was interrupted at its timeout. Variables are kept.", false)
	case "interrupted":
		add("The code was interrupted. Variables are kept.", false)
	case "lost":
		add("The interpreter has ended: "+r.Message, false)
	}
	return strings.Join(parts, "\n")
}
