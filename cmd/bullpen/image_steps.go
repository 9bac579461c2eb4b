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
	// linesEvery is the minimum time between two lines about a step without a terminal.
	linesEvery = 10 * time.Second
)

// remedies returns texts in the output of a failed step, each with a remedy. The first match
// counts.
func remedies() [][2]string {
	const noNamespace = "run it as root, or let this user make user namespaces: apt-get install uidmap, and a range in " +
		"/etc/subuid and /etc/subgid"
	return [][2]string{
		{"No space left on device", "there is not enough space: set TMPDIR to a directory that has some"},
		{
			"is expired (invalid since",
			"the mirror's index is out of date: accept it with --stale-index, or take another --mirror",
		},
		{"NO_PUBKEY", "the keys of Debian's archive are missing: apt-get install debian-archive-keyring"},
		{"does not have a Release file", "the mirror has no such suite: choose another --suite or --mirror"},
		{
			"Unable to locate package",
			"the suite has no such package: choose another with --package or --python, or another --suite",
		},
		{"fakechroot", noNamespace},
		{"unable to pick chroot mode", noNamespace},
		{"No module named pip", "pip is missing: apt-get install python3-pip"},
		{
			"No matching distribution found",
			"only wheels for the image's Python are installed, no source archives: choose another version, or another --python",
		},
		{"node-linux-", "npm's registry has no such Node: choose another with --node-version, or take one from a file " +
			"with --node-tarball"},
		{"mmdebstrap failed to run", "--mirror, --suite and --stale-index choose where packages come from"},
	}
}

// steps shows the progress of a build: on a terminal, one changing line with the last line of
// output; otherwise, one line per step and one every linesEvery. It is the standard error of the
// tools that run.
type steps struct {
	streams
	mu    sync.Mutex
	began time.Time
	shown time.Time // when the last line was printed
	name  string
	tail  []string // the last lines of output
	part  []byte   // an incomplete line
}

func newSteps(to streams) *steps { return &steps{streams: to, began: time.Now()} }

// begin begins a step, and ends the previous one.
func (s *steps) begin(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.name, s.tail, s.part, s.shown = name, nil, nil, time.Now()
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
	if !s.terminal {
		if time.Since(s.shown) >= linesEvery {
			s.shown = time.Now()
			s.errorf("%s", cell(text))
		}
		return
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
		s.show(text)
	}
}

// failed returns the error of the step, with a remedy if one is known, and the end of its output.
func (s *steps) failed(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var text strings.Builder
	for _, line := range append(s.tail, strings.TrimSpace(string(s.part))) {
		if line != "" {
			fmt.Fprintf(&text, "\n  %s", cell(line))
		}
	}
	for _, r := range remedies() {
		if strings.Contains(text.String(), r[0]) {
			return fmt.Errorf("%s: %w: %s%s", s.name, err, r[1], text.String())
		}
	}
	return fmt.Errorf("%s: %w%s", s.name, err, text.String())
}
