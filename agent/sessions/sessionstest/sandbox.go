package sessionstest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/agent/sessions"
	"github.com/bullpen-run/bullpen/proto"
)

// recordingVariable makes a test program replay a recording instead of running tests.
const recordingVariable = "BULLPEN_TEST_RECORDING"

// Main runs the tests of a package that uses [Sandboxes].
func Main(m *testing.M) {
	if path := os.Getenv(recordingVariable); path != "" {
		os.Exit(replay(path))
	}
	goleak.VerifyTestMain(m)
}

// replay plays a recording of an agent's program. Each of its lines begins with
//
//	args   what the command line must contain
//	env    a variable of the environment, as NAME=VALUE
//	<      a line that is written
//	>      the JSON that the next line read must contain
//	exit   the exit code and what is written to the standard error
func replay(path string) int {
	text, err := os.ReadFile(path) //nolint:gosec // of a test
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 90
	}
	in := bufio.NewReader(os.Stdin)
	for line := range strings.Lines(string(text)) {
		kind, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		switch kind {
		case "args":
			if !strings.Contains(strings.Join(os.Args[1:], " "), rest) {
				fmt.Fprintf(os.Stderr, "the command line is %q, without %q\n", os.Args[1:], rest)
				return 91
			}
		case "env":
			if !slices.Contains(os.Environ(), rest) {
				fmt.Fprintf(os.Stderr, "the environment is %q, without %q\n", os.Environ(), rest)
				return 93
			}
		case "<":
			fmt.Println(rest)
		case ">":
			got, err := in.ReadBytes('\n')
			if err != nil {
				return 0 // the standard input was closed
			}
			if !contains([]byte(rest), got) {
				fmt.Fprintf(os.Stderr, "read %s, which does not contain %s\n", got, rest)
				return 92
			}
		case "exit":
			code, message, _ := strings.Cut(rest, " ")
			fmt.Fprint(os.Stderr, message)
			n, _ := strconv.Atoi(code)
			return n
		}
	}
	_, _ = io.Copy(io.Discard, in)
	return 0
}

// contains reports whether a JSON value has all that another one has.
func contains(part, whole []byte) bool {
	var a, b any
	if json.Unmarshal(part, &a) != nil || json.Unmarshal(whole, &b) != nil {
		return false
	}
	return includes(a, b)
}

func includes(part, whole any) bool {
	fields, isObject := part.(map[string]any)
	if !isObject {
		return fmt.Sprint(part) == fmt.Sprint(whole)
	}
	others, ok := whole.(map[string]any)
	for name, v := range fields {
		if other, has := others[name]; !ok || !has || !includes(v, other) {
			return false
		}
	}
	return ok
}

// Sandboxes are sandboxes in a directory of this machine, without a jail. They implement
// [sessions.Sandboxes].
type Sandboxes struct {
	T *testing.T
	// Recordings are files that are replayed in place of the programs that are started, in their order. The
	// last one is repeated. If there are none, the programs themselves run.
	Recordings []string
	Server     sessions.Models // of all sandboxes
	// Path is the home. The default is a directory of the test.
	Path string

	mu     sync.Mutex
	starts int
}

// Open implements [sessions.Sandboxes].
func (s *Sandboxes) Open(_ context.Context, x *proto.AgentSession) (sessions.Sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Path == "" {
		s.Path = s.T.TempDir()
	}
	b := &sandbox{Sandboxes: s, dir: filepath.Join(s.Path, x.Directory)}
	return b, os.MkdirAll(b.dir, 0o750)
}

// sandbox is one of [Sandboxes].
type sandbox struct {
	*Sandboxes
	dir     string
	mu      sync.Mutex
	running []*process
}

func (b *sandbox) Home() string            { return b.Path }
func (b *sandbox) Dir() string             { return b.dir }
func (b *sandbox) Models() sessions.Models { return b.Server }

func (b *sandbox) Start(ctx context.Context, x *sessions.Program) (sessions.Process, error) {
	args := x.Args
	env := []string{"HOME=" + b.Path, "PATH=" + os.Getenv("PATH")}
	if len(b.Recordings) > 0 {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		args = append([]string{self}, args...)
		b.Sandboxes.mu.Lock()
		path, err := filepath.Abs(b.Recordings[min(b.starts, len(b.Recordings)-1)])
		b.starts++
		b.Sandboxes.mu.Unlock()
		if err != nil {
			return nil, err
		}
		env = append(env, recordingVariable+"="+path)
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	for name, value := range x.Env {
		env = append(env, name+"="+value)
	}
	cmd.Env, cmd.Dir = env, b.dir
	c := &process{cmd: cmd, wait: sync.OnceFunc(func() { _ = cmd.Wait() })}
	cmd.Stderr = &c.stderr
	var err error
	if c.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.out = bufio.NewReader(out)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running = append(b.running, c)
	return c, cmd.Start()
}

func (b *sandbox) Transport(port int) http.RoundTripper {
	return &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		},
	}
}

func (b *sandbox) WriteFile(_ context.Context, path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o600)
}

func (b *sandbox) Save(context.Context) ([]sessions.FileChange, bool, error) { return nil, false, nil }

func (b *sandbox) Lost(context.Context) string { return "" }

func (b *sandbox) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range b.running {
		p.Close()
	}
}

// process is a running program.
type process struct {
	cmd    *exec.Cmd
	wait   func()
	in     io.WriteCloser
	out    *bufio.Reader
	stderr bytes.Buffer
	lines  int
}

func (c *process) ReadLine() ([]byte, string, error) {
	line, err := c.out.ReadBytes('\n')
	if err != nil {
		c.wait()
		return nil, "", io.EOF
	}
	c.lines++
	return bytes.TrimSuffix(line, []byte("\n")), strconv.Itoa(c.lines), nil
}

func (c *process) WriteLine(line []byte) error {
	_, err := c.in.Write(append(slices.Clone(line), '\n'))
	return err
}

func (c *process) Exit() sessions.Exit {
	return sessions.Exit{Code: c.cmd.ProcessState.ExitCode(), Stderr: sessions.Stderr{Head: c.stderr.String()}}
}

func (c *process) Close() {
	_ = c.in.Close()
	_ = c.cmd.Process.Kill()
	c.wait()
}
