package main

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"time"
)

const (
	// lastLines is how many lines of a failed step's output are shown.
	lastLines = 15
	// maxOutputLine bounds a line of output that is kept, in bytes.
	maxOutputLine = 500
	// stepWidth is the width of the line that shows a step on a terminal.
	stepWidth = 79
)

// steps shows how far a build has come: on a terminal a line that changes, with the last line of
// output, and otherwise a line for each step. It is the standard error of the tools that run.
type steps struct {
	streams
	mu    sync.Mutex
	began time.Time
	name  string
	tail  []string // the last lines of output
	part  []byte   // an incomplete line
}

func newSteps(to streams) *steps { return &steps{streams: to, began: time.Now()} }

// begin begins a step, and ends the one before.
func (s *steps) begin(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.name, s.tail, s.part = name, nil, nil
	if s.terminal {
		s.show("")
	} else {
		s.errorf("%s", name)
	}
}

// end removes the line from a terminal.
func (s *steps) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.terminal && s.name != "" {
		_, _ = fmt.Fprint(s.err, "\r\x1b[K")
	}
	s.name = ""
}

// show shows the step with a line of its output.
func (s *steps) show(line string) {
	text := fmt.Sprintf("%s %s", time.Since(s.began).Round(time.Second), s.name)
	if line = strings.TrimPrefix(line, "I: "); line != "" {
		text += ": " + line
	}
	_, _ = fmt.Fprintf(s.err, "\r\x1b[K%.*s", stepWidth, cell(text))
}

// Write takes output of the step's tool.
func (s *steps) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.part = append(s.part, b...)
	for {
		line, rest, ok := bytes.Cut(s.part, []byte("\n"))
		if !ok && len(s.part) < maxOutputLine {
			return len(b), nil
		}
		if !ok {
			line, rest = s.part[:maxOutputLine], s.part[maxOutputLine:]
		}
		text := strings.TrimSpace(string(line[:min(len(line), maxOutputLine)]))
		s.part = rest
		if text == "" {
			continue
		}
		if s.tail = append(s.tail, text); len(s.tail) > lastLines {
			s.tail = s.tail[1:]
		}
		if s.terminal {
			s.show(text)
		}
	}
}

// failed returns the error of the step, with the end of its output.
func (s *steps) failed(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var text strings.Builder
	for _, line := range append(s.tail, strings.TrimSpace(string(s.part))) {
		if line != "" {
			fmt.Fprintf(&text, "\n  %s", cell(line))
		}
	}
	return fmt.Errorf("%s: %w%s", s.name, err, text.String())
}
