package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"

	"github.com/bullpen-run/bullpen/proto"
)

// The part of an output that is printed.
const (
	shownLines = 10
	shownWidth = 200 // characters of a line
)

// formatWebhook returns the text output for a webhook, with the sender's control characters
// removed.
func formatWebhook(h *received) string {
	var b strings.Builder
	row := func(name, value string) {
		_, _ = fmt.Fprintf(&b, "  %-10s  %s\n", name, strings.Map(printable, shorten(value)))
	}
	verdict := "verified"
	if !h.Verified {
		verdict = "NOT VERIFIED"
	}
	event := h.Event
	if event == "" {
		event = "no event"
	}
	_, _ = fmt.Fprintf(&b, "%s  %s, %s\n", h.at.Local().Format(timeLayout),
		strings.Map(printable, shorten(event)), verdict)
	for _, p := range h.Problems {
		row("problem", p)
	}
	if h.WebhookID != "" {
		row("webhook id", h.WebhookID)
	}
	if h.Times > 1 {
		row("duplicate", fmt.Sprintf("this webhook id arrived %d times", h.Times))
	}
	if h.TraceID != "" {
		row("trace", h.TraceID)
	}
	if h.Status != "" {
		row("status", h.Status)
	}
	if h.hook.Result != nil {
		resultRows(row, h.hook.Result)
	}
	for _, name := range slices.Sorted(maps.Keys(h.hook.Metadata)) {
		row("metadata", name+" = "+h.hook.Metadata[name])
	}
	if h.hook.ResultURL != "" {
		row("result url", h.hook.ResultURL)
	}
	b.WriteByte('\n')
	return b.String()
}

// resultRows calls row for each row of a result.
func resultRows(row func(name, value string), r *proto.Result) {
	row("exit code", strconv.Itoa(r.ExitCode))
	if r.Error != nil {
		row("error", *r.Error)
	}
	row("duration", milliseconds(r.DurationMS).String())
	for _, out := range []struct {
		name, text string
		truncated  bool
	}{{"stdout", r.Stdout, r.StdoutTruncated}, {"stderr", r.Stderr, r.StderrTruncated}} {
		name, shown, more := out.name, 0, 0
		for line := range strings.Lines(out.text) {
			if shown == shownLines {
				more++
				continue
			}
			shown++
			row(name, strings.ReplaceAll(strings.TrimSuffix(line, "\n"), "\t", "    "))
			name = ""
		}
		if more > 0 {
			row("", fmt.Sprintf("… %d more lines", more))
		}
		if out.truncated {
			row(name, "… output is truncated")
		}
	}
}

// shorten cuts a text to the width of a line.
func shorten(s string) string {
	n := 0
	for i := range s {
		if n++; n > shownWidth {
			return s[:i] + "…"
		}
	}
	return s
}

// escapeControls escapes characters in a line of JSON that a terminal may interpret.
func escapeControls(line string) string {
	var b strings.Builder
	for _, r := range line {
		switch {
		case unicode.IsPrint(r) && r != unicode.ReplacementChar:
			b.WriteRune(r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			_, _ = fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		default:
			_, _ = fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}
