package proto

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

func text(s string) json.RawMessage { return json.RawMessage(`"` + s + `"`) }

// A display that is too large for an event has only its small parts there, and the event names the others.
func TestAppendDisplayEvent(t *testing.T) {
	picture := text(strings.Repeat("A", maxDisplayEvent))
	d := Display{
		Data:      map[string]json.RawMessage{"text/plain": text("<b>\u2028\u0085"), "image/png": picture},
		Truncated: []string{"columns"},
	}
	line := AppendDisplayEvent([]byte("x"), 7, &d, 42)
	want := `x{"type":"display","index":7,"display":{"data":{"text/plain":"<b>\u2028\u0085"},"truncated":["columns"]},` +
		`"omitted":["image/png"],"seq":42}` + "\n"
	if string(line) != want {
		t.Errorf("%s instead of %s", line, want)
	}
	if string(d.Data["image/png"]) != string(picture) || !slices.Equal(d.Truncated, []string{"columns"}) {
		t.Error("the display itself has changed")
	}
}

func TestDisplayCut(t *testing.T) {
	d := Display{
		Data:     map[string]json.RawMessage{"text/plain": text("abc"), "text/html": text("<p>abc</p>")},
		Metadata: json.RawMessage(`{}`), Chart: json.RawMessage(`{"type":"line"}`),
	}
	if d.Cut(func(int) bool { return false }) {
		t.Error("it fits into nothing")
	}
	if !slices.Equal(d.Truncated, []string{"text/html", "text/plain", "chart", "metadata"}) {
		t.Errorf("the parts went in the order %q", d.Truncated)
	}
}

// Results are part of stored records and of the answers that are written in pieces.
func TestResultsAreKept(t *testing.T) {
	r := Exited(0)
	r.Stdout, r.ResultsTruncated = "out", true
	r.Results = []Display{{Data: map[string]json.RawMessage{"text/html": text("<p>&")}, Result: true}, {Data: nil}}
	body, err := EncodeRecord(&Record{Meta: Meta{TraceID: "trc_aaaaaaaaaaaaaaaaaaaa"}, Status: StatusSuccess, Result: &r})
	if err != nil {
		t.Fatal(err)
	}
	rec, err := DecodeRecord("trc_aaaaaaaaaaaaaaaaaaaa", body)
	if err != nil {
		t.Fatal(err)
	}
	var written bytes.Buffer
	if err := WriteResult(&written, rec.Result); err != nil {
		t.Fatal(err)
	}
	const results = `"stderr":"","results":[{"data":{"text/html":"<p>&"},"result":true},{"data":null}],"exit_code":0,`
	if !strings.Contains(written.String(), results) || !json.Valid(written.Bytes()) {
		t.Errorf("%s lacks %s", &written, results)
	}
	unsaved := r.Unsaved("Why.")
	if len(unsaved.Results) != 2 || !unsaved.ResultsTruncated {
		t.Errorf("unsaved: %v", unsaved)
	}
	summary, err := SummarizeRecord(rec)
	if err != nil || strings.Contains(string(summary), `"results":`) {
		t.Errorf("%v; the summary is %s", err, summary)
	}
}
