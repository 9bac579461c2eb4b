package main

import (
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// timeLayout is the format of times in text output.
const timeLayout = "2006-01-02 15:04:05 MST"

// page writes the text output of a command: rows of aligned cells, and text between them.
// The first error of the writer is returned by flush.
type page struct {
	out  io.Writer
	rows *tabwriter.Writer
	err  error
}

func newPage(out io.Writer) *page {
	return &page{out: out, rows: tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)}
}

// row writes a row. Times are local, nil pointers are "-", control characters are replaced.
func (p *page) row(cells ...any) {
	for i, c := range cells {
		if i > 0 {
			_, _ = io.WriteString(p.rows, "\t") // flush returns the error
		}
		_, _ = io.WriteString(p.rows, cell(c))
	}
	_, _ = io.WriteString(p.rows, "\n")
}

// optional writes a row of a name and a value, unless the value is nil.
func (p *page) optional(name string, value any) {
	if !reflect.ValueOf(value).IsNil() {
		p.row(name, value)
	}
}

// waiting writes a row with an execution's missing needs, unless it is nil.
func (p *page) waiting(missing *proto.Missing) {
	if missing != nil {
		p.row("waits", missing.Message)
	}
}

// metadata writes a row for each pair, in the order of the names.
func (p *page) metadata(m map[string]string) {
	for _, key := range slices.Sorted(maps.Keys(m)) {
		p.row("metadata", key+"="+m[key])
	}
}

// textf writes text below the rows so far.
func (p *page) textf(format string, args ...any) {
	if p.flush() == nil {
		_, p.err = fmt.Fprintf(p.out, format, args...)
	}
}

func (p *page) flush() error {
	if p.err == nil {
		p.err = p.rows.Flush()
	}
	return p.err
}

func cell(v any) string {
	switch v := v.(type) {
	case time.Time:
		return v.Local().Format(timeLayout)
	case api.Time:
		return cell(v.Time)
	}
	if pointer := reflect.ValueOf(v); pointer.Kind() == reflect.Pointer {
		if pointer.IsNil() {
			return "-"
		}
		return cell(pointer.Elem().Interface())
	}
	return strings.Map(printable, fmt.Sprint(v))
}

// printable replaces what a terminal may act on: programs and receivers of webhooks choose some of
// the text that is shown.
func printable(r rune) rune {
	if unicode.IsPrint(r) {
		return r
	}
	return unicode.ReplacementChar
}

// printableLine is printable for text of several lines.
func printableLine(r rune) rune {
	if r == '\n' || r == '\t' {
		return r
	}
	return printable(r)
}

func milliseconds(n int64) time.Duration { return time.Duration(n) * time.Millisecond }
