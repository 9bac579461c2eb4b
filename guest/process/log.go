package process

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/guest/processpb"
)

// Sizes of the log.
const (
	maxLogText    = 8 << 10   // bytes of output in an entry; a longer line has several entries
	maxLogCommand = 1 << 10   // bytes of a command in an entry
	maxLogQueue   = 256 << 10 // bytes of entries that wait for the writer
)

// Log copies what processes print to a writer, as entries: one JSON object a line, so that no process can
// write in the name of another. It never makes a process wait. Entries for which the writer is too slow are
// dropped and counted. A nil Log logs nothing.
type Log struct {
	wake chan struct{}
	done chan struct{}

	mu      sync.Mutex
	left    int    // bytes until the limit; negative once it has been reached
	queue   []byte // encoded entries
	dropped int    // entries since the last one in the queue
	closed  bool
}

// entry is a line of the log.
type entry struct {
	Time time.Time `json:"time"`
	// Type is start, output or end of a process, or dropped or truncated of the log.
	Type     string `json:"type"`
	PID      int    `json:"pid,omitempty"`
	User     string `json:"user,omitempty"`
	Command  string `json:"command,omitempty"`
	Stream   string `json:"stream,omitempty"`
	Text     string `json:"text,omitempty"`
	ExitCode *int32 `json:"exit_code,omitempty"`
	Count    int    `json:"count,omitempty"` // of dropped entries
}

// NewLog returns a log that writes no more than about limit bytes to out, nil if that is 0.
func NewLog(out io.Writer, limit int) *Log {
	if limit == 0 {
		return nil
	}
	l := &Log{wake: make(chan struct{}, 1), done: make(chan struct{}), left: limit}
	go l.run(out)
	return l
}

// run writes entries until Close.
func (l *Log) run(out io.Writer) {
	defer close(l.done)
	for range l.wake {
		l.mu.Lock()
		queue, closed := l.queue, l.closed
		l.queue = nil
		l.mu.Unlock()
		if _, err := out.Write(queue); err != nil || closed {
			return
		}
	}
}

// Close waits until the entries are written, but no longer than timeout.
func (l *Log) Close(timeout time.Duration) {
	if l == nil {
		return
	}
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.notify()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-l.done:
	case <-timer.C:
	}
}

func (l *Log) notify() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// full reports whether the log takes no more entries.
func (l *Log) full() bool {
	if l == nil {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.left < 0
}

// add queues an entry.
func (l *Log) add(e *entry) {
	if l == nil {
		return
	}
	e.Time = time.Now().UTC()
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.left < 0 || l.closed:
		return
	case len(l.queue) > maxLogQueue:
		l.dropped++
		return
	case l.dropped > 0:
		l.queue = appendEntry(l.queue, &entry{Time: e.Time, Type: "dropped", Count: l.dropped})
		l.dropped = 0
	}
	before := len(l.queue)
	l.queue = appendEntry(l.queue, e)
	if l.left -= len(l.queue) - before; l.left < 0 {
		l.queue = appendEntry(l.queue[:before], &entry{Time: e.Time, Type: "truncated"})
	}
	l.notify()
}

// appendEntry appends the line of an entry.
func appendEntry(to []byte, e *entry) []byte {
	b := bytes.NewBuffer(to)
	encoder := json.NewEncoder(b)
	encoder.SetEscapeHTML(false) // secrets are searched as they are
	_ = encoder.Encode(e)
	return b.Bytes()
}

// start logs the start of a process.
func (l *Log) start(pid int, user string, config *processpb.ProcessConfig) {
	if l.full() {
		return
	}
	command := config.GetCmd()
	for _, arg := range config.GetArgs() {
		if len(command) > maxLogCommand {
			break
		}
		command += " " + arg
	}
	l.Start(pid, user, command)
}

// Start logs the start of a process with a command.
func (l *Log) Start(pid int, user, command string) {
	if len(command) > maxLogCommand {
		command = command[:CutText([]byte(command[:maxLogCommand]))] + "…"
	}
	l.add(&entry{Type: "start", PID: pid, User: user, Command: strings.ToValidUTF8(command, "\uFFFD")})
}

// end logs the end of a process.
func (l *Log) end(pid int, event *processpb.ProcessEvent_EndEvent) {
	l.add(&entry{Type: "end", PID: pid, ExitCode: &event.ExitCode})
}

// End logs the end of a process.
func (l *Log) End(pid int, status syscall.WaitStatus) { l.end(pid, endEvent(status)) }

// Output returns what logs an output of a process.
func (l *Log) Output(pid int, fromStderr bool) *Lines {
	from := stdout
	if fromStderr {
		from = stderr
	}
	return &Lines{log: l, pid: pid, from: from}
}

// Lines logs one output of a process by whole lines, as many in an entry as were written at once.
type Lines struct {
	log  *Log
	pid  int
	from stream
	tail []byte // an incomplete line
}

// Add logs the lines in a piece of output.
func (l *Lines) Add(data []byte) {
	for len(data) > 0 && !l.log.full() {
		n := min(len(data), maxLogText-len(l.tail))
		l.tail, data = append(l.tail, data[:n]...), data[n:]
		if end := bytes.LastIndexByte(l.tail, '\n') + 1; end > 0 {
			l.emit(end)
		} else if len(l.tail) == maxLogText {
			l.emit(CutText(l.tail))
		}
	}
}

// Flush logs an incomplete line at the end of the output.
func (l *Lines) Flush() {
	if len(l.tail) > 0 {
		l.emit(len(l.tail))
	}
}

func (l *Lines) emit(n int) {
	text := strings.ToValidUTF8(string(l.tail[:n]), "\uFFFD")
	l.log.add(&entry{Type: "output", PID: l.pid, Stream: l.from.String(), Text: text})
	l.tail = append(l.tail[:0], l.tail[n:]...)
}

// CutText returns the length of b without an incomplete character at its end.
func CutText(b []byte) int {
	for i := len(b) - 1; i >= 0 && i > len(b)-utf8.UTFMax; i-- {
		if utf8.RuneStart(b[i]) {
			if !utf8.FullRune(b[i:]) {
				return i
			}
			break
		}
	}
	return len(b)
}
