package nsjail

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/worker/jail"
)

func TestMain(m *testing.M) {
	if os.Getenv(victimEnv) != "" {
		victim()
		return
	}
	if os.Getenv(bareEnv) != "" {
		bare()
		return
	}
	goleak.VerifyTestMain(m)
}

// nsjailPath returns the nsjail that deploy/nsjail.sh fetched. The test fails if there is none,
// because skipped tests prove nothing.
func nsjailPath(tb testing.TB) string {
	tb.Helper()
	if p := os.Getenv("BULLPEN_NSJAIL"); p != "" {
		return p
	}
	dir, err := os.Getwd()
	if err != nil {
		tb.Fatal(err)
	}
	for dir != "/" {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return filepath.Join(dir, "bin/nsjail/nsjail/bin/nsjail")
		}
		dir = filepath.Dir(dir)
	}
	tb.Fatal("no go.mod above the test: set BULLPEN_NSJAIL")
	return ""
}

func newMaker(tb testing.TB) *Maker {
	tb.Helper()
	m, err := Open(Config{NsjailPath: nsjailPath(tb), RunDir: runDir(tb), Log: slog.New(slog.NewTextHandler(tb.Output(), nil))})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := m.Close(); err != nil {
			tb.Error(err)
		}
	})
	return m
}

// runDir returns a temporary directory that jails can reach. They cannot reach t.TempDir.
func runDir(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("", "bullpen-test-")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		tb.Fatal(err)
	}
	return dir
}

func testSpec() jail.Spec {
	return jail.Spec{CPU: 2, Memory: 512 << 20, Pids: 256, HomeBytes: 64 << 20, TmpBytes: 64 << 20, Inodes: 4096}
}

// result is an outcome and the output of a program.
type result struct {
	jail.Outcome
	stdout, stderr string // only the first part of each
	written        int64  // size of stdout, bytes
}

// beginning keeps the first part of what is written and counts all bytes.
type beginning struct {
	kept    []byte
	written int64
}

func (b *beginning) Write(p []byte) (int, error) {
	const enough = 1 << 20
	b.kept = append(b.kept, p[:min(len(p), enough-len(b.kept))]...)
	b.written += int64(len(p))
	return len(p), nil
}

// patience is the timeout of programs that should end without it.
const patience = 2 * time.Minute

func program(tb testing.TB, language, code string) jail.Program {
	tb.Helper()
	p, err := jail.Source{Language: language, Code: code, TraceID: "trc_test", Home: DefaultHome}.Program()
	if err != nil {
		tb.Fatal(err)
	}
	p.Timeout = patience
	return p
}

func prepare(tb testing.TB, m *Maker, spec jail.Spec) jail.Jail {
	tb.Helper()
	j, err := m.Prepare(tb.Context(), spec)
	if err != nil {
		tb.Fatal(err)
	}
	return j
}

// modes are the ways to start an interpreter.
var modes = [...]string{cold, "ahead", forked} // read only

const (
	cold   = "when it is asked for"
	forked = "forked"
)

// startBy sets the mode in which runProgram starts interpreters in jails of m.
func startBy(m *Maker, mode string) { modeOf.Store(m, mode) }

// modeOf maps a *Maker to its mode. The default is cold.
var modeOf sync.Map

// languages maps an interpreter's command to its language.
var languages = map[string]string{"python3": "python", "node": "node", "bash": "bash"} // read only

// ahead returns the program to prewarm for a language, or nil if it cannot be prewarmed.
func ahead(tb testing.TB, language string) *jail.Program {
	tb.Helper()
	if !jail.CanWait(language) {
		return nil
	}
	p, err := jail.Source{Language: language, Home: DefaultHome}.Ahead()
	if err != nil {
		tb.Fatal(err)
	}
	return &p
}

func runProgram(tb testing.TB, m *Maker, spec jail.Spec, p jail.Program) result {
	tb.Helper()
	language, ok := languages[p.Argv[0]]
	mode := cold
	if by, set := modeOf.Load(m); ok && set {
		mode = by.(string)
	}
	var parent jail.Zygote
	if mode == forked {
		parent = newZygote(tb, m, spec)
		defer closeZygote(tb, parent)
	}
	return runIn(tb, prepareBy(tb, m, parent, mode, spec, language), p)
}

// prepareBy makes a jail for a program whose interpreter is started in a mode. In mode forked, it
// is forked from parent.
func prepareBy(tb testing.TB, m *Maker, parent jail.Zygote, mode string, spec jail.Spec, language string) jail.Jail {
	tb.Helper()
	switch mode {
	case cold:
		return prepare(tb, m, spec)
	case forked:
		return forkFor(tb, parent, spec, language)
	default:
		spec.Ahead = ahead(tb, language)
		return prepare(tb, m, spec)
	}
}

func runCode(tb testing.TB, m *Maker, language, code string) result {
	tb.Helper()
	return runProgram(tb, m, testSpec(), program(tb, language, code))
}

// want checks how a run ended and what it printed, ignoring surrounding spaces.
func (r result) want(tb testing.TB, kind jail.Kind, stdout string) {
	tb.Helper()
	if r.Kind != kind || strings.TrimSpace(r.stdout) != strings.TrimSpace(stdout) {
		tb.Errorf("got %+v\nstdout %q\nstderr %q\nwant %s with stdout %q", r.Outcome, r.stdout, r.stderr, kind, stdout)
	}
}

// runSleeper starts a program that sleeps and returns once it is up. The channel receives the error
// of Run.
func runSleeper(t *testing.T, j jail.Jail) (done <-chan error) {
	t.Helper()
	out := newLines()
	p := program(t, "bash", "echo up; sleep 600")
	p.Stdout = out
	ended := make(chan error, 1)
	go func() {
		_, err := j.Run(t.Context(), p)
		ended <- err
	}()
	out.next(t)
	return ended
}

// lines is a writer that sends each complete line on a channel.
type lines struct {
	c    chan string
	rest []byte
}

func newLines() *lines { return &lines{c: make(chan string, 1000)} }

func (l *lines) Write(p []byte) (int, error) {
	l.rest = append(l.rest, p...)
	for {
		line, rest, ok := bytes.Cut(l.rest, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		l.c <- string(line)
		l.rest = rest
	}
}

// next waits for a line and returns it.
func (l *lines) next(tb testing.TB) string {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	select {
	case s := <-l.c:
		return s
	case <-ctx.Done():
		tb.Fatal("no line from the program")
		return ""
	}
}
