package nsjail

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
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

// nsjailPath returns the nsjail that deploy/fetch.sh nsjail fetched. The test fails if there is
// none, because skipped tests prove nothing.
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
	m, err := Open(Config{
		NsjailPath: nsjailPath(tb), RunDir: runDir(tb),
		Log: slog.New(slog.NewTextHandler(tb.Output(), nil)),
	})
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

// runDir returns a temporary directory in memory for Config.RunDir, which on most hosts is in
// memory too. Jails can reach it. They cannot reach t.TempDir.
func runDir(tb testing.TB) string {
	tb.Helper()
	return tempDir(tb, "/dev/shm")
}

// tempDir returns a temporary directory below parent that jails can reach.
func tempDir(tb testing.TB, parent string) string {
	tb.Helper()
	dir, err := os.MkdirTemp(parent, "bullpen-test-")
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
	return jail.Spec{
		CPU: 2, Memory: 512 << 20, Pids: 256, OpenFiles: 1024, HomeBytes: 64 << 20, TmpBytes: 64 << 20,
		Inodes: 4096,
	}
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

// repeats returns n, or with -short a tenth of it.
func repeats(n int) int {
	if testing.Short() {
		return n / 10
	}
	return n
}

// modes are the ways to start an interpreter.
var modes = [...]string{cold, "prewarmed", forked} // read only

const (
	cold   = "cold"
	forked = "forked"
)

// setStartMode sets the mode in which runProgram starts interpreters in jails of m. In mode forked,
// all jails of testSpec are forked from one zygote.
func setStartMode(t *testing.T, m *Maker, mode string) {
	t.Helper()
	startModes.Store(m, mode)
	if mode == forked {
		sharedZygotes.Store(m, newZygote(t, m, testSpec()))
		t.Cleanup(func() { closeSharedZygote(t, m) })
	}
}

var (
	startModes    sync.Map // a *Maker to its mode; the default is cold
	sharedZygotes sync.Map // a *Maker to its jail.Zygote for jails of testSpec
)

// closeSharedZygote closes the zygote of setStartMode, if there is one.
func closeSharedZygote(t *testing.T, m *Maker) {
	t.Helper()
	if zygote, ok := sharedZygotes.LoadAndDelete(m); ok {
		closeZygote(t, zygote.(jail.Zygote))
	}
}

// languages maps an interpreter's command to its language.
var languages = map[string]string{"python3": "python", "node": "node", "bash": "bash"} // read only

// prewarmed returns the program to prewarm for a language, or nil if it cannot be prewarmed.
func prewarmed(tb testing.TB, language string) *jail.Program {
	tb.Helper()
	if !jail.CanWait(language) {
		return nil
	}
	p, err := jail.Source{Language: language, Home: DefaultHome}.Prewarm()
	if err != nil {
		tb.Fatal(err)
	}
	return &p
}

func runProgram(tb testing.TB, m *Maker, spec jail.Spec, p jail.Program) result {
	tb.Helper()
	language, ok := languages[p.Argv[0]]
	mode := cold
	if by, set := startModes.Load(m); ok && set {
		mode = by.(string)
	}
	var parent jail.Zygote
	if shared, ok := sharedZygotes.Load(m); ok && reflect.DeepEqual(spec, testSpec()) {
		parent = shared.(jail.Zygote)
	} else if mode == forked {
		parent = newZygote(tb, m, spec)
		defer closeZygote(tb, parent)
	}
	return runIn(tb, prepareMode(tb, m, parent, mode, spec, language), p)
}

// prepareMode makes a jail for a program whose interpreter is started in a mode. In mode forked, it
// is forked from parent.
func prepareMode(tb testing.TB, m *Maker, parent jail.Zygote, mode string, spec jail.Spec, language string) jail.Jail {
	tb.Helper()
	switch mode {
	case cold:
		return prepare(tb, m, spec)
	case forked:
		return forkFor(tb, parent, spec, language)
	default:
		spec.Prewarm = prewarmed(tb, language)
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
	return sleeper(t, j, program(t, "bash", "echo up; sleep 600"))
}

// sleeper starts p, which prints a line and then sleeps.
func sleeper(t *testing.T, j jail.Jail, p jail.Program) (done <-chan error) {
	t.Helper()
	out := newLines()
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
