package cell_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const nonce = "0123456789abcdef0123456789abcdef"

type parsedFrame struct {
	Type      string
	Run       int
	Sync      int
	Version   string
	Name      string
	Value     string
	Traceback []string
	Data      map[string]any
	Result    bool
	Truncated []string
	Status    string
	Count     int
	Memory    int64
	Files     []struct {
		Path string
		Size int64
	}
	Dropped int
}

// output is text of the program, or a frame.
type output struct {
	text        string
	parsedFrame *parsedFrame
}

// stream is what a started wrote to stdout or stderr and no test has read yet.
type stream struct {
	mu     sync.Mutex
	more   *sync.Cond
	queue  []output
	closed bool
}

func (s *stream) push(o output) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue = append(s.queue, o)
	s.more.Signal()
}

// next blocks until there is output. It returns false at the end of the stream.
func (s *stream) next() (output, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.queue) == 0 && !s.closed {
		s.more.Wait()
	}
	if len(s.queue) == 0 {
		return output{}, false
	}
	o := s.queue[0]
	s.queue = s.queue[1:]
	return o, true
}

// until reads up to a frame for which last returns true. It returns the text and the frames before it.
func (s *stream) until(last func(*parsedFrame) bool) (text string, frames []parsedFrame, end *parsedFrame) {
	var b strings.Builder
	for {
		o, ok := s.next()
		if !ok {
			return b.String(), frames, nil
		}
		b.WriteString(o.text)
		if o.parsedFrame != nil && last(o.parsedFrame) {
			return b.String(), frames, o.parsedFrame
		}
		if o.parsedFrame != nil {
			frames = append(frames, *o.parsedFrame)
		}
	}
}

// read splits what it reads into text and frames, and joins the chunks of frames.
func (s *stream) read(from io.Reader) {
	defer func() {
		s.mu.Lock()
		s.closed = true
		s.more.Signal()
		s.mu.Unlock()
	}()
	start := []byte("\x1b_" + nonce + ";")
	var data, parts []byte
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		data = append(data, buffer[:n]...)
		for {
			at := bytes.Index(data, start)
			if at < 0 {
				at = len(data)
				// The rest may be the beginning of a frame.
				if i := bytes.LastIndexByte(data, 0x1b); err == nil && i >= 0 && bytes.HasPrefix(start, data[i:]) {
					at = i
				}
			}
			if at > 0 {
				s.push(output{text: string(data[:at])})
				data = data[at:]
			}
			end := bytes.Index(data, []byte("\x1b\\"))
			if end < 0 {
				break
			}
			chunk := data[len(start):end]
			data = data[end+2:]
			parts = append(parts, chunk[2:]...)
			if chunk[0] == '1' {
				continue
			}
			f := &parsedFrame{}
			unprintable := slices.ContainsFunc(parts, func(b byte) bool { return b < 0x20 || b > 0x7e })
			if err := json.Unmarshal(parts, f); err != nil || unprintable || len(chunk) > 4002 {
				s.push(output{text: fmt.Sprintf("BAD FRAME %q: %v", parts, err)})
			}
			parts = nil
			s.push(output{parsedFrame: f})
		}
		if err != nil {
			return
		}
	}
}

// started is a running started.
type started struct {
	t              *testing.T
	cmd            *exec.Cmd
	stdin          io.WriteCloser
	stdout, stderr *stream
	readers        sync.WaitGroup
	encode         func(run int, code string, env []string) string
	runs           int
}

// cellResult is what one run produced. Its end is nil if the process ended first.
type cellResult struct {
	stdout, stderr string
	frames         []parsedFrame
	end            *parsedFrame
}

func startProcess(t *testing.T, encode func(int, string, []string) string, args ...string) *started {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	r := &started{t: t, cmd: exec.CommandContext(ctx, args[0], args[1:]...), encode: encode}
	r.cmd.Dir = t.TempDir()
	r.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + r.cmd.Dir, "LANG=C.UTF-8", "BULLPEN_CELL=" + nonce}
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	r.cmd.Cancel = func() error { return syscall.Kill(-r.cmd.Process.Pid, syscall.SIGKILL) }
	var err error
	r.stdin, err = r.cmd.StdinPipe()
	check(t, err)
	stdout, err := r.cmd.StdoutPipe()
	check(t, err)
	stderr, err := r.cmd.StderrPipe()
	check(t, err)
	check(t, r.cmd.Start())
	open := func(from io.Reader) *stream {
		s := &stream{}
		s.more = sync.NewCond(&s.mu)
		r.readers.Go(func() { s.read(from) })
		return s
	}
	r.stdout, r.stderr = open(stdout), open(stderr)
	_, _, ready := r.stdout.until(func(f *parsedFrame) bool { return f.Type == "ready" })
	if ready == nil || ready.Version == "" || ready.Name == "" {
		t.Fatalf("ready: %+v", ready)
	}
	text, _, sync := r.stderr.until(func(f *parsedFrame) bool { return f.Sync == ready.Sync })
	if text != "" || sync == nil {
		t.Fatalf("stderr before ready: %q", text)
	}
	return r
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// send sends a cell without waiting for its end. env has NAME=VALUE pairs.
func (r *started) send(code string, env ...string) {
	r.t.Helper()
	r.runs++
	_, err := io.WriteString(r.stdin, r.encode(r.runs, code, env))
	check(r.t, err)
}

func (r *started) run(code string, env ...string) cellResult {
	r.t.Helper()
	r.send(code, env...)
	return r.wait()
}

// wait waits for the end of the run that was sent last.
func (r *started) wait() cellResult {
	r.t.Helper()
	var result cellResult
	result.stdout, result.frames, result.end = r.stdout.until(func(f *parsedFrame) bool { return f.Type == "end" })
	result.stderr, _, _ = r.stderr.until(func(f *parsedFrame) bool {
		return result.end != nil && f.Sync == result.end.Sync
	})
	if result.end != nil && result.end.Run != r.runs {
		r.t.Fatalf("end of run %d instead of %d", result.end.Run, r.runs)
	}
	return result
}

// waitFor waits until the run in progress has printed text.
func (r *started) waitFor(text string) {
	r.t.Helper()
	for seen := ""; !strings.Contains(seen, text); {
		o, ok := r.stdout.next()
		if !ok {
			r.t.Fatalf("the process ended after %q", seen)
		}
		seen += o.text
	}
}

func (r *started) interrupt() {
	r.t.Helper()
	check(r.t, syscall.Kill(-r.cmd.Process.Pid, syscall.SIGINT))
}

// exit closes the requests and returns what the process still printed, and its exit code.
func (r *started) exit() (stdout, stderr string, code int) {
	r.t.Helper()
	_ = r.stdin.Close()
	r.readers.Wait()
	_ = r.cmd.Wait()
	never := func(*parsedFrame) bool { return false }
	stdout, _, _ = r.stdout.until(never)
	stderr, _, _ = r.stderr.until(never)
	return stdout, stderr, r.cmd.ProcessState.ExitCode()
}

// String returns everything about a run that a table can name, a line for each thing.
func (c cellResult) String() string {
	var lines []string
	if c.stdout != "" {
		lines = append(lines, fmt.Sprintf("stdout %q", c.stdout))
	}
	if c.stderr != "" {
		lines = append(lines, fmt.Sprintf("stderr %q", c.stderr))
	}
	for _, f := range c.frames {
		switch {
		case f.Type == "error":
			lines = append(lines, fmt.Sprintf("error %s: %s", f.Name, f.Value))
		case f.Result:
			lines = append(lines, fmt.Sprintf("result %v", f.Data["text/plain"]))
		default:
			lines = append(lines, fmt.Sprintf("display %v", f.Data))
		}
	}
	switch {
	case c.end == nil:
		lines = append(lines, "ended")
	case c.end.Status == "interrupted",
		c.end.Status == "error" && !hasError(c.frames), c.end.Status == "ok" && hasError(c.frames):
		lines = append(lines, "status "+c.end.Status)
	}
	return strings.Join(lines, "\n")
}

func hasError(frames []parsedFrame) bool {
	return slices.ContainsFunc(frames, func(f parsedFrame) bool { return f.Type == "error" })
}

// cell is a row of a table: a cell, and what String returns for its run.
type cell struct{ code, want string }

func runTable(t *testing.T, start func(*testing.T) *started, cells []cell) {
	t.Helper()
	r := start(t)
	for _, c := range cells {
		if got := r.run(c.code).String(); got != c.want {
			t.Errorf("%s\ngot:\n%s\nwant:\n%s", c.code, got, c.want)
		}
	}
}
