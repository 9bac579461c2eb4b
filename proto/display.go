package proto

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
)

// Limits of the results of an execution. They are also at most as long as an output of its sandbox.
const (
	// MaxDisplays is the number of displays.
	MaxDisplays = 100
	// MaxDisplayBytes is their size in JSON, together.
	MaxDisplayBytes = 4 << 20
	// MaxDisplayForms is the number of forms of a display.
	MaxDisplayForms = 32
)

// Display is something to look at that a cell has shown: a value, a picture, a table.
type Display struct {
	Data      map[string]json.RawMessage `json:"data" doc:"The same thing in several forms, by MIME type, as in Jupyter: strings, which are base64 for binary types, and JSON for JSON types."`
	Metadata  json.RawMessage            `json:"metadata,omitempty" doc:"As in Jupyter."`
	Result    bool                       `json:"result,omitempty" doc:"true for the value of the cell's last expression."`
	Chart     json.RawMessage            `json:"chart,omitempty" doc:"What a figure of matplotlib shows: type, title and elements, in the form of E2B's charts."`
	Columns   json.RawMessage            `json:"columns,omitempty" doc:"A data frame: a list of values for each column."`
	Truncated []string                   `json:"truncated,omitempty" doc:"What is left out because it was too large: MIME types, metadata, chart, columns, or display for everything."`
}

// Size returns the length of the JSON form of d.
func (d *Display) Size() int { return len(d.JSON()) }

// JSON returns the JSON form of d. It has no line breaks, see [AppendJSONString].
func (d *Display) JSON() []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(d); err != nil {
		panic(fmt.Sprintf("encode display: %v", err)) // what was decoded can be encoded
	}
	text := bytes.TrimSuffix(b.Bytes(), []byte("\n"))
	for lineBreak, escaped := range map[string]string{"\u0085": `\u0085`, "\u2028": `\u2028`, "\u2029": `\u2029`} {
		if bytes.Contains(text, []byte(lineBreak)) {
			text = bytes.ReplaceAll(text, []byte(lineBreak), []byte(escaped))
		}
	}
	return text
}

// cutLargest removes the largest part of d and returns its name. It returns false if nothing is left.
func (d *Display) cutLargest() (name string, ok bool) {
	largest := -1
	for kind, value := range d.Data {
		if n := len(kind) + len(value); n > largest || n == largest && kind < name {
			name, largest = kind, n
		}
	}
	var field *json.RawMessage
	for _, f := range []struct {
		name  string
		value *json.RawMessage
	}{{"metadata", &d.Metadata}, {"chart", &d.Chart}, {"columns", &d.Columns}} {
		if len(*f.value) > max(largest, 0) {
			name, largest, field = f.name, len(*f.value), f.value
		}
	}
	switch {
	case largest < 0:
		return "", false
	case field != nil:
		*field = nil
	default:
		delete(d.Data, name)
	}
	return name, true
}

// Cut removes the largest parts of d until fits returns true for its size. Cut adds their names to
// Truncated. It returns false if d does not fit without any part.
func (d *Display) Cut(fits func(size int) bool) bool {
	for !fits(d.Size()) {
		name, ok := d.cutLargest()
		if !ok {
			return false
		}
		if !slices.Contains(d.Truncated, name) {
			d.Truncated = append(d.Truncated, name)
		}
	}
	return true
}

// sizeOf returns the approximate length of displays in JSON. It does not encode them.
func sizeOf(displays []Display) (n int) {
	for i := range displays {
		d := &displays[i]
		for kind, value := range d.Data {
			n += len(kind) + len(value)
		}
		n += len(d.Metadata) + len(d.Chart) + len(d.Columns)
	}
	return n
}

// writeDisplays writes the member results of a JSON object and a comma before it, if there are any results.
func writeDisplays(w io.Writer, displays []Display) error {
	before := `,"results":[`
	for i := range displays {
		if _, err := io.WriteString(w, before); err != nil {
			return err
		}
		if _, err := w.Write(displays[i].JSON()); err != nil {
			return err
		}
		before = ","
	}
	if len(displays) == 0 {
		return nil
	}
	_, err := io.WriteString(w, "]")
	return err
}
