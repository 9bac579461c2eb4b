package runreport_test

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/cmd/internal/runreport"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

var update = flag.Bool("update", false, "write the expected reports")

// hostile would end an element, an attribute and a script, and is no XML.
const hostile = "</pre></script><script>alert(1)</script>]]>&amp;\" onload='x'\x00\x1b[31mred\x1b[0m\x08\ufffe"

func at(ms int) *api.Time {
	return &api.Time{Time: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC).Add(time.Duration(ms) * time.Millisecond)}
}

// failingMatrix is a run with each status of a run that has ended.
func failingMatrix() *runreport.Run {
	whole := &api.WholePipeline{
		Pipeline: api.Pipeline{
			ID: "run_abcdefghijklmnopqrstuvwxyz", Name: new("build & test <all>"), Status: proto.PipelineFailed,
			Commit: new("4f2a91c"),
			Branch: new("main\"><img src=x>"), CreatedAt: *at(0), EndedAt: at(9400),
		},
	}
	add := func(step, cell string, status proto.StepStatus, exit, from, to int, reason string) {
		c := api.PipelineCell{
			Step: step, Status: status, Needs: []string{}, Artifacts: []api.PipelineArtifact{},
			EndedAt: at(to),
		}
		if cell != "" {
			c.Cell = &cell
		}
		if reason != "" {
			c.Reason = &reason
		}
		if from >= 0 {
			c.TraceID, c.StartedAt = new(proto.TraceID("trc_0000000000000000000000000"+strconv.Itoa(len(whole.Cells)))), at(from)
		}
		if exit >= 0 {
			c.ExitCode = &exit
		}
		whole.Cells = append(whole.Cells, c)
	}
	add("build", "", proto.StepSuccess, 0, 120, 2300, "")
	whole.Cells[0].Artifacts = []api.PipelineArtifact{{Name: "package", Paths: []string{"*.zip"}}}
	add("test", "python=3.11", proto.StepSuccess, 0, 2500, 6100, "")
	add("test", "python=3.12", proto.StepFailed, 1, 2520, 7900, "the program exited with code 1")
	add("test", "python=3.13,with=\"a long & <wide> value of the matrix\"", proto.StepFailed, -1, 2600, 4000,
		"the worker was lost")
	add("publish", "", proto.StepSkipped, -1, -1, 7900, "a step that it needs did not succeed")
	add("notify", "", proto.StepSuccess, 0, 8000, 8001, "")
	add("slow", "", proto.StepCancelled, -1, 8100, 9400, "")
	add("never", "", proto.StepCancelled, -1, -1, 9400, "")
	r := runreport.New(whole, time.Time{})
	r.Cells[0].Output.Add("compiling\r\ndone ✓\n")
	r.Cells[2].Output.Add("Traceback (most recent call last):\n" + hostile + "\nAssertionError: 1 != 2\n")
	r.Cells[3].Output.Gone = true
	r.Cells[6].Output = runreport.Tail{Text: "still here\n", Cut: true}
	return r
}

func TestGolden(t *testing.T) {
	r := failingMatrix()
	for name, write := range map[string]func(io.Writer) error{
		"report.json": r.JSON, "junit.xml": r.JUnit, "report.html": r.HTML,
	} {
		var b bytes.Buffer
		if err := write(&b); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join("testdata", name)
		if *update {
			if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(b.Bytes(), want) {
			t.Errorf("%s differs; go test ./cmd/internal/runreport -update writes it anew:\n%s", file, b.Bytes())
		}
		if name != "report.json" && bytes.Contains(b.Bytes(), []byte("<script")) ||
			bytes.Contains(b.Bytes(), []byte("<img")) && name == "report.html" {
			t.Errorf("%s has elements of the output", name)
		}
	}
}

// TestJUnitSchema checks the rules of junit-10.xsd, with which Jenkins' plugins validate, for the
// elements that are in the report. It also checks that the counts are right.
func TestJUnitSchema(t *testing.T) {
	type element struct{ required, optional, children []string }
	schema := map[string]element{
		"testsuites": {nil, []string{"name", "time", "tests", "failures", "errors"}, []string{"testsuite"}},
		"testsuite": {
			[]string{"name", "tests", "failures", "errors"},
			[]string{"skipped", "time", "timestamp", "hostname", "id", "package"},
			[]string{"properties", "testcase", "system-out", "system-err"},
		},
		"properties": {nil, nil, []string{"property"}},
		"property":   {[]string{"name", "value"}, nil, nil},
		"testcase": {
			[]string{"name", "classname"},
			[]string{"time", "group"},
			[]string{"skipped", "error", "failure", "system-out", "system-err"},
		},
		"skipped":    {nil, []string{"message", "type"}, nil},
		"error":      {nil, []string{"message", "type"}, nil},
		"failure":    {nil, []string{"message", "type"}, nil},
		"system-out": {},
	}
	type open struct {
		name  string
		attrs map[string]string
		child int // the index of the last child in its schema
		n     map[string]int
	}
	var b bytes.Buffer
	if err := failingMatrix().JUnit(&b); err != nil {
		t.Fatal(err)
	}
	total := map[string]int{}
	stack := []*open{}
	for dec := xml.NewDecoder(&b); ; {
		token, err := dec.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			name := token.Name.Local
			rules, ok := schema[name]
			if !ok {
				t.Fatalf("unknown element %s", name)
			}
			here := &open{name: name, attrs: map[string]string{}, n: map[string]int{}}
			for _, a := range token.Attr {
				if !slices.Contains(append(rules.required, rules.optional...), a.Name.Local) {
					t.Errorf("%s has an unknown attribute %s", name, a.Name.Local)
				}
				here.attrs[a.Name.Local] = a.Value
			}
			for _, a := range rules.required {
				if _, ok := here.attrs[a]; !ok {
					t.Errorf("%s has no attribute %s", name, a)
				}
			}
			if text, ok := here.attrs["time"]; ok {
				if n, err := strconv.ParseFloat(text, 64); err != nil || n < 0 || strings.ContainsAny(text, "eE") {
					t.Errorf("%s has the time %q", name, text)
				}
			}
			if text, ok := here.attrs["timestamp"]; ok {
				if _, err := time.Parse("2006-01-02T15:04:05", text); err != nil {
					t.Error(err)
				}
			}
			if len(stack) > 0 {
				parent := stack[len(stack)-1]
				place := slices.Index(schema[parent.name].children, name)
				if place < parent.child {
					t.Errorf("%s is in %s, or not at its place there", name, parent.name)
				}
				parent.child = place
			}
			stack = append(stack, here)
			for _, x := range stack {
				x.n[name]++
			}
			total[name]++
		case xml.EndElement:
			here := stack[len(stack)-1]
			stack = stack[:len(stack)-1]
			for attr, child := range map[string]string{
				"tests": "testcase", "failures": "failure", "errors": "error",
				"skipped": "skipped",
			} {
				if text, ok := here.attrs[attr]; ok && text != strconv.Itoa(here.n[child]) {
					t.Errorf("%s %s has %s=%s, and %d such elements", here.name, here.attrs["name"], attr, text, here.n[child])
				}
			}
		}
	}
	if total["testsuite"] != 6 || total["testcase"] != 8 || total["failure"] != 1 || total["error"] != 2 ||
		total["skipped"] != 2 {
		t.Errorf("%v", total)
	}
}

func TestReportOfARunThatGoesOn(t *testing.T) {
	whole := &api.WholePipeline{
		Pipeline: api.Pipeline{ID: "run_abcdefghijklmnopqrstuvwxyz", Status: proto.PipelineRunning, CreatedAt: *at(0)},
		Cells: []api.PipelineCell{
			{Step: "a", Status: proto.StepRunning, StartedAt: at(500)}, {Step: "b", Status: proto.StepWaiting},
		},
	}
	r := runreport.New(whole, at(2500).Time)
	if ms := r.Cells[0].DurationMS; ms == nil || *ms != 2000 || r.Cells[1].DurationMS != nil {
		t.Errorf("%v, %v", ms, r.Cells[1].DurationMS)
	}
	var junit, html bytes.Buffer
	if err := r.JUnit(&junit); err != nil || strings.Count(junit.String(), "<skipped") != 2 {
		t.Errorf("%v: %s", err, junit.String())
	}
	if err := r.HTML(&html); err != nil || !strings.Contains(html.String(), "1 running, 1 waiting") {
		t.Errorf("%v: %s", err, html.String())
	}
	var b bytes.Buffer
	if err := r.JSON(&b); err != nil || !json.Valid(b.Bytes()) {
		t.Errorf("%v: %s", err, b.Bytes())
	}
}

func TestTail(t *testing.T) {
	var tail runreport.Tail
	tail.Add(strings.Repeat("a", 16<<10))
	if tail.Cut || len(tail.Text) != 16<<10 {
		t.Errorf("%d bytes, cut %v", len(tail.Text), tail.Cut)
	}
	tail.Add("éé")
	tail.Add(strings.Repeat("b", 16<<10-3))
	if !tail.Cut || !utf8.ValidString(tail.Text) || !strings.HasPrefix(tail.Text, "éb") || len(tail.Text) != 16<<10-1 {
		t.Errorf("%d bytes, cut %v: %.8q", len(tail.Text), tail.Cut, tail.Text)
	}
}
