package main

import (
	"bytes"
	"fmt"
	"io"
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
	// maxStepLine is the length of a line about a step without a terminal.
	maxStepLine = 160
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
// output; otherwise, one line per step and one every linesEvery.
type steps struct {
	streams
	stop  chan struct{} // closed to end the clock
	done  chan struct{} // closed when it has ended
	mu    sync.Mutex
	began time.Time
	shown time.Time // when the last line was printed
	name  string    // of the current step; empty for none
	last  string    // the last line of output
}

// newSteps returns the progress of a build that begins now. Its caller calls close.
func newSteps(to streams) *steps {
	s := &steps{streams: to, began: time.Now(), stop: make(chan struct{}), done: make(chan struct{})}
	go s.clock()
	return s
}

// clock shows the time while a tool prints nothing.
func (s *steps) clock() {
	defer close(s.done)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-tick.C:
			s.mu.Lock()
			s.show()
			s.mu.Unlock()
		}
	}
}

// begin begins a step, and ends the previous one.
func (s *steps) begin(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.name, s.last = name, ""
	if s.terminal {
		s.show()
		return
	}
	s.shown = time.Now()
	s.errorf("%s", name)
}

// close removes the line from a terminal.
func (s *steps) close() {
	close(s.stop)
	<-s.done
	if s.terminal && s.name != "" {
		_, _ = fmt.Fprint(s.err, "\r\x1b[K")
	}
}

// line replaces the last line of the current step's output.
func (s *steps) line(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = text
	s.show()
}

// show shows the current step with the last line of its output.
func (s *steps) show() {
	if s.name == "" {
		return
	}
	text := fmt.Sprintf("%s %s", time.Since(s.began).Round(time.Second), s.name)
	if s.last != "" {
		text += ": " + s.last
	}
	if s.terminal {
		_, _ = fmt.Fprintf(s.err, "\r\x1b[K%.*s", stepWidth, cell(text))
	} else if time.Since(s.shown) >= linesEvery {
		s.shown = time.Now()
		s.errorf("%.*s", maxStepLine, cell(text))
	}
}

// output returns the standard error of a tool that runs as a part of the current step.
func (s *steps) output() *toolOutput { return &toolOutput{steps: s} }

// toolOutput is the output of a tool, by lines.
type toolOutput struct {
	steps *steps
	tail  []string // the last lines
	part  []byte   // an incomplete line
}

// Write takes output of the tool.
func (o *toolOutput) Write(b []byte) (int, error) {
	o.part = append(o.part, b...)
	for {
		line, rest, ok := bytes.Cut(o.part, []byte("\n"))
		if !ok && len(o.part) < maxOutputLine {
			return len(b), nil
		}
		if !ok {
			line, rest = o.part[:maxOutputLine], o.part[maxOutputLine:]
		}
		text := strings.TrimSpace(string(line[:min(len(line), maxOutputLine)]))
		o.part = rest
		if text == "" {
			continue
		}
		if o.tail = append(o.tail, text); len(o.tail) > lastLines {
			o.tail = o.tail[1:]
		}
		o.steps.line(strings.TrimPrefix(text, "I: "))
	}
}

// failed returns the error of the step, with a remedy if one is known, and the end of the tool's output.
func (o *toolOutput) failed(err error) error {
	var text strings.Builder
	for _, line := range append(o.tail, strings.TrimSpace(string(o.part))) {
		if line != "" {
			fmt.Fprintf(&text, "\n  %s", cell(line))
		}
	}
	o.steps.mu.Lock()
	defer o.steps.mu.Unlock()
	for _, r := range remedies() {
		if strings.Contains(text.String(), r[0]) {
			return fmt.Errorf("%s: %w: %s%s", o.steps.name, err, r[1], text.String())
		}
	}
	return fmt.Errorf("%s: %w%s", o.steps.name, err, text.String())
}

// countedReader shows how much of a file has been read.
type countedReader struct {
	from  io.Reader
	size  int64
	steps *steps
	read  int64
}

// Read implements [io.Reader].
func (r *countedReader) Read(b []byte) (int, error) {
	n, err := r.from.Read(b)
	r.read += int64(n)
	r.steps.line(fmt.Sprintf("%s of %s, %d%%", mib(r.read), mib(r.size), r.read*100/max(r.size, 1)))
	return n, err
}
