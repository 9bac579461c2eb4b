package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/cmd/internal/app"
	"github.com/bullpen-run/bullpen/cmd/internal/client"
	"github.com/bullpen-run/bullpen/proto"
)

const (
	readyWithin = 30 * time.Second
	readyPoll   = 50 * time.Millisecond
	stopWithin  = 15 * time.Second
	// logTail is how much of the server's log is shown when it fails.
	logTail = 4 << 10
)

type quickstartCommand struct{}

// Help tells what --help does not know by itself.
func (*quickstartCommand) Help() string {
	return `Starts this program as a server on a free port with its data in a temporary directory, runs a program in each language with live
output, stops the server and removes the directory.`
}

// sample is a program that shows something.
type sample struct {
	language proto.Language
	code     string
}

func samples() []sample {
	return []sample{
		{proto.Python, `import os, platform, socket, time
print(f"Python {platform.python_version()} as user {os.getuid()} in {os.getcwd()}")
try:
    socket.create_connection(("192.0.2.1", 80), timeout=1)
except OSError as e:
    print(f"the network: {e.strerror or e}")
for n in (3, 2, 1):
    print(f"live output {n}")
    time.sleep(0.25)
`},
		{proto.Node, `console.log("Node " + process.version + " as user " + process.getuid() + " in " + process.cwd());
let n = 3;
const timer = setInterval(() => {
  console.log("live output " + n);
  if (--n === 0) clearInterval(timer);
}, 250);
`},
		{proto.Bash, `echo "Bash $BASH_VERSION as user $UID in $PWD"
ls / | tr '\n' ' '; echo
for n in 3 2 1; do echo "live output $n"; sleep 0.25; done
`},
	}
}

// Run carries the command out.
func (c *quickstartCommand) Run(ctx context.Context, io streams) (err error) {
	dir, err := os.MkdirTemp("", "bullpen-quickstart-")
	if err != nil {
		return fmt.Errorf("make a directory for the server's data: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	say := func(format string, args ...any) { _, _ = fmt.Fprintf(io.out, format, args...) }
	began := time.Now()
	s, err := startServer(ctx, dir)
	if err != nil {
		return err
	}
	defer func() {
		if stopErr := s.stop(); err == nil {
			err = stopErr // after another error it is the same once more
		}
	}()
	if err := s.ready(ctx); err != nil {
		return err
	}
	say("bullpen %s is ready at %s after %d ms\n", app.Version(), s.api.URL, time.Since(began).Milliseconds())
	for _, sample := range samples() {
		if err := show(ctx, io.out, s.api, sample); err != nil {
			return err
		}
	}
	say("\n%s", goOn)
	return nil
}

const goOn = `That was a server with its data in a temporary directory, gone now. To go on:

  make serve                                  # a server on 127.0.0.1:8080, its data in bullpen-data/

  curl http://127.0.0.1:8080/v1/sandbox/execute \
    -H "Authorization: Bearer $(cat bullpen-data/bootstrap.key)" \
    -d '{"language": "python", "code": "print(6 * 7)"}'

  export BULLPEN_API_KEY=$(cat bullpen-data/bootstrap.key)
  echo 'print(6 * 7)' | bin/bullpen run -     # see bin/bullpen --help
`

// show runs a sample and prints its lines as they come, with the time at which they came.
func show(ctx context.Context, w io.Writer, api *client.Client, s sample) error {
	_, _ = fmt.Fprintf(w, "\n%s\n", s.language)
	began := time.Now()
	err := api.Stream(ctx, client.Request{Code: s.code, Language: s.language, Timeout: 20}, func(e *client.Event) error {
		switch {
		case e.Type == proto.EventOutput:
			_, err := fmt.Fprintf(w, "  %5d ms | %s\n", time.Since(began).Milliseconds(), strings.TrimRight(e.Data, "\n"))
			return err
		case e.Type != proto.EventResult:
			return nil
		case e.Result.Success:
			_, err := fmt.Fprintf(w, "  %5d ms | done: %s\n", time.Since(began).Milliseconds(), e.TraceID)
			return err
		case s.language == proto.Node && e.Result.ErrorCode != nil && *e.Result.ErrorCode == string(proto.CodeSandboxStart):
			// What is wrong with the sandbox itself has come out with the language before.
			_, err := fmt.Fprintln(w, "           | unavailable: there is no node in /usr; install nodejs to have it")
			return err
		default:
			return failed(s.language, e.Result)
		}
	})
	if err != nil {
		return fmt.Errorf("%s: %w", s.language, err)
	}
	return nil
}

func failed(language proto.Language, r *proto.Result) error {
	if r.ErrorMessage != nil {
		return fmt.Errorf("%s; `bullpen doctor` says what this machine lacks", *r.ErrorMessage)
	}
	return fmt.Errorf("the %s program ended with exit code %d", language, r.ExitCode)
}

// server is a server that runs as a child of this process.
type server struct {
	api    *client.Client
	cmd    *exec.Cmd
	log    string // path
	exited chan struct{}
}

// startServer starts this program as a server with everything it keeps below dir.
func startServer(ctx context.Context, dir string) (*server, error) {
	address, err := freeAddress(ctx)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	s := &server{
		api: &client.Client{
			URL: "http://" + address, Key: proto.NewKeySecret("local"), Agent: "bullpen-quickstart/" + app.Version(),
		},
		log:    filepath.Join(dir, "server.log"),
		exited: make(chan struct{}),
	}
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make the server's log: %w", err)
	}
	defer func() { _ = log.Close() }() // the child has its own descriptor
	// Not with ctx: the server is to be stopped by a signal, and waited for.
	s.cmd = exec.CommandContext(context.WithoutCancel(ctx), self, "serve", "--listen", address, "--data", filepath.Join(dir, "data"))
	s.cmd.Env = append(slices.DeleteFunc(os.Environ(), isServerSetting), "BULLPEN_BOOTSTRAP_KEY="+s.api.Key)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	// A group of its own keeps Ctrl-C from it, so that it is stopped once. The signal at our death follows the thread that
	// started it, so that thread must stay.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := s.cmd.Start()
		started <- err
		if err == nil {
			_ = s.cmd.Wait() // stop reads the state
			close(s.exited)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start the server: %w", err)
	}
	return s, nil
}

// isServerSetting reports whether an environment variable is for another server than the one shown here. Where nsjail lies is
// the same for all.
func isServerSetting(variable string) bool {
	return strings.HasPrefix(variable, "BULLPEN_") && !strings.HasPrefix(variable, "BULLPEN_NSJAIL=")
}

// freeAddress gives an address that nobody listened on a moment ago.
func freeAddress(ctx context.Context) (string, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	return l.Addr().String(), l.Close()
}

// ready waits until the server can run programs.
func (s *server) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	for {
		err := s.api.Ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-s.exited:
			return fmt.Errorf("the server ended with exit code %d; `bullpen doctor` says what this machine lacks. Its log:\n%s",
				s.cmd.ProcessState.ExitCode(), s.tail())
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return context.Canceled
			}
			return fmt.Errorf("the server was not ready within %s: %w; its log:\n%s", readyWithin, err, s.tail())
		case <-time.After(readyPoll):
		}
	}
}

// stop asks the server to end, and waits until it has.
func (s *server) stop() error {
	_ = s.cmd.Process.Signal(syscall.SIGTERM) // where it is gone already, the exit code tells more
	kill := time.AfterFunc(stopWithin, func() { _ = s.cmd.Process.Kill() })
	defer kill.Stop()
	<-s.exited
	if code := s.cmd.ProcessState.ExitCode(); code != 0 {
		return fmt.Errorf("the server did not end in order (%s); its log:\n%s", s.cmd.ProcessState, s.tail())
	}
	return nil
}

func (s *server) tail() []byte {
	log, err := os.ReadFile(s.log)
	if err != nil {
		return []byte(err.Error())
	}
	if cut := len(log) - logTail; cut > 0 {
		log = log[cut:]
	}
	return bytes.TrimSpace(log)
}
