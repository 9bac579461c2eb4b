package runreport

import (
	"encoding/xml"
	"fmt"
	"io"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// The elements and attributes below are those of Jenkins' schema, junit-10.xsd, in its order.
type junitSuites struct {
	XMLName  xml.Name     `xml:"testsuites"`
	Name     string       `xml:"name,attr"`
	Time     string       `xml:"time,attr"`
	Tests    int          `xml:"tests,attr"`
	Failures int          `xml:"failures,attr"`
	Errors   int          `xml:"errors,attr"`
	Suites   []junitSuite `xml:"testsuite"`
}

type junitSuite struct {
	Name       string          `xml:"name,attr"`
	Tests      int             `xml:"tests,attr"`
	Failures   int             `xml:"failures,attr"`
	Errors     int             `xml:"errors,attr"`
	Skipped    int             `xml:"skipped,attr"`
	Time       string          `xml:"time,attr"`
	Timestamp  string          `xml:"timestamp,attr"`
	Properties []junitProperty `xml:"properties>property"`
	Cases      []junitCase     `xml:"testcase"`

	took time.Duration
}

type junitProperty struct {
	Name  string `xml:"name,attr"`
	Value string `xml:"value,attr"`
}

type junitCase struct {
	Name    string        `xml:"name,attr"`
	Class   string        `xml:"classname,attr"`
	Time    string        `xml:"time,attr"`
	Skipped *junitOutcome `xml:"skipped"`
	Error   *junitOutcome `xml:"error"`
	Failure *junitOutcome `xml:"failure"`
	Output  string        `xml:"system-out,omitempty"`
}

type junitOutcome struct {
	Type    string `xml:"type,attr,omitempty"`
	Message string `xml:"message,attr"`
	Output  string `xml:",chardata"`
}

// JUnit writes the report as JUnit XML: a suite for each step, a case for each of its cells. A
// program that failed is a failure; one that was refused, lost or cancelled is an error.
func (r *Run) JUnit(w io.Writer) error {
	all := junitSuites{Name: r.title()}
	for i := range r.Cells {
		c := &r.Cells[i]
		if i == 0 || r.Cells[i-1].Step != c.Step {
			all.Suites = append(all.Suites, r.suite(c))
		}
		all.Suites[len(all.Suites)-1].add(c)
	}
	var took time.Duration
	for i := range all.Suites {
		s := &all.Suites[i]
		s.Time = seconds(s.took)
		all.Tests, all.Failures, all.Errors, took = all.Tests+s.Tests, all.Failures+s.Failures,
			all.Errors+s.Errors, took+s.took
	}
	all.Time = seconds(took)
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	enc := xml.NewEncoder(w)
	enc.Indent("", "  ")
	if err := enc.Encode(all); err != nil {
		return err
	}
	_, err := io.WriteString(w, "\n")
	return err
}

// suite returns the suite of the step of a cell.
func (r *Run) suite(c *Cell) junitSuite {
	began := r.CreatedAt.Time
	if c.StartedAt != nil {
		began = c.StartedAt.Time
	}
	s := junitSuite{
		Name: c.Step, Timestamp: began.UTC().Format("2006-01-02T15:04:05"),
		Properties: []junitProperty{{"run", r.ID}},
	}
	if r.Commit != nil {
		s.Properties = append(s.Properties, junitProperty{"commit", *r.Commit})
	}
	if r.Branch != nil {
		s.Properties = append(s.Properties, junitProperty{"branch", *r.Branch})
	}
	return s
}

func (s *junitSuite) add(c *Cell) {
	s.Tests++
	x := junitCase{Name: c.Step, Class: c.Step, Time: seconds(0)}
	if c.Cell != nil {
		x.Name = *c.Cell
	}
	if c.TraceID != nil {
		s.Properties = append(s.Properties, junitProperty{"execution of " + x.Name, string(*c.TraceID)})
	}
	if c.DurationMS != nil {
		took := time.Duration(*c.DurationMS) * time.Millisecond
		s.took += took
		x.Time = seconds(took)
	}
	output := c.Output.plain()
	if note := c.Output.note(); note != "" {
		output = note + "\n" + output
	}
	bad := &junitOutcome{Type: string(c.Status), Message: c.why(), Output: output}
	switch {
	case c.Status == proto.StepSuccess:
		x.Output = output
	case c.broke():
		s.Errors++
		x.Error = bad
	case c.Status == proto.StepFailed || c.Status == proto.StepCancelled && c.StartedAt != nil:
		s.Failures++
		x.Failure = bad
	default: // it did not run, or has not ended
		s.Skipped++
		x.Skipped, x.Output = &junitOutcome{Message: c.why()}, output
	}
	s.Cases = append(s.Cases, x)
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.3f", d.Seconds()) }
