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

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/cmd/internal/app"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	readyTimeout  = 2 * time.Minute // an emulated processor needs more than half a minute
	readyInterval = 50 * time.Millisecond
	stopTimeout   = 15 * time.Second
	// logTail is how many bytes of the server's log are shown when it fails.
	logTail = 4 << 10
)

type quickstartCommand struct{}

func (*quickstartCommand) Help() string {
	return `Starts a server on a free port with its data in a temporary directory, runs a program in each language with
live output, stops the server and removes the directory.`
}

func (c *quickstartCommand) Run(ctx context.Context, s streams) (err error) {
	dir, err := os.MkdirTemp("", "bullpen-quickstart-")
	if err != nil {
		return fmt.Errorf("create the data directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	began := time.Now()
	server, err := startServer(ctx, dir)
	if err != nil {
		return err
	}
	defer func() {
		if stopErr := server.stop(); err == nil {
			err = stopErr // it repeats an earlier error
		}
	}()
	if err := server.ready(ctx); err != nil {
		return err
	}
	_, _ = fmt.Fprintf(s.out, "bullpen %s is ready at %s after %d ms\n", app.Version(), server.url,
		time.Since(began).Milliseconds())
	for _, r := range proto.Runtimes() {
		if err := runSample(ctx, s.out, server.client, r); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(s.out, "\n"+nextSteps, os.Args[0])
	return err
}

const nextSteps = `The server and its data are removed. Next:

  %[1]s serve                                 # a server on 127.0.0.1:8080 with its data in bullpen-data/

  curl http://127.0.0.1:8080/v1/sandbox/execute \
    -H "Authorization: Bearer $(cat bullpen-data/bootstrap.key)" \
    -d '{"language": "python", "code": "print(6 * 7)"}'

  export BULLPEN_API_KEY=$(cat bullpen-data/bootstrap.key)
  echo 'print(6 * 7)' | %[1]s run -     # see %[1]s --help
`

// runSample runs a program and prints each line of output with the time of its arrival.
func runSample(ctx context.Context, w io.Writer, cl *client.Client, r proto.Runtime) error {
	_, _ = fmt.Fprintf(w, "\n%s\n", r.Language)
	if !installed(r) {
		_, err := fmt.Fprintf(w, "           | unavailable: no %s in /usr\n", r.Interpreters[0])
		return err
	}
	began := time.Now()
	sample := api.ExecuteRequest{Code: r.Sample, Language: r.Language, Timeout: 20}
	err := each(cl.Stream(ctx, sample), func(e *client.Event) error {
		switch {
		case e.Type == proto.EventOutput:
			_, err := fmt.Fprintf(w, "  %5d ms | %s\n", time.Since(began).Milliseconds(), strings.TrimRight(e.Data, "\n"))
			return err
		case e.Type != proto.EventResult:
			return nil
		case e.Result.Success:
			_, err := fmt.Fprintf(w, "  %5d ms | done: %s\n", time.Since(began).Milliseconds(), e.TraceID)
			return err
		default:
			return sampleError(r.Language, e.Result)
		}
	})
	if err != nil {
		return fmt.Errorf("%s: %w", r.Language, err)
	}
	return nil
}

// installed reports whether a worker on this host would find r's interpreter.
func installed(r proto.Runtime) bool {
	return slices.ContainsFunc([]string{"/usr/local/bin", "/usr/bin", "/bin"}, func(dir string) bool {
		info, err := os.Stat(filepath.Join(dir, r.Interpreters[0]))
		return err == nil && info.Mode().IsRegular()
	})
}

func sampleError(language proto.Language, r *proto.Result) error {
	if r.ErrorMessage != nil {
		return fmt.Errorf("%s; run `bullpen doctor` to find what is missing", *r.ErrorMessage)
	}
	return fmt.Errorf("the %s program exited with code %d", language, r.ExitCode)
}

// server is a server in a child process.
type server struct {
	client *client.Client
	url    string
	cmd    *exec.Cmd
	log    string // path
	exited chan struct{}
}

// startServer starts this program as a server with its data below dir.
func startServer(ctx context.Context, dir string) (*server, error) {
	address, err := freeAddress(ctx)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	url, key := "http://"+address, proto.NewKeySecret("local")
	cl, err := client.New(client.Config{URL: url, Key: key, UserAgent: "bullpen-quickstart/" + app.Version()})
	if err != nil {
		return nil, err
	}
	s := &server{client: cl, url: url, log: filepath.Join(dir, "server.log"), exited: make(chan struct{})}
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("create the server's log: %w", err)
	}
	defer func() { _ = log.Close() }() // the child has its own descriptor
	// Without ctx, which would kill the server: stop sends SIGTERM and waits.
	s.cmd = exec.CommandContext(context.WithoutCancel(ctx), self, "serve", "--listen", address, "--data",
		filepath.Join(dir, "data"))
	s.cmd.Env = append(slices.DeleteFunc(os.Environ(), isServerSetting), "BULLPEN_BOOTSTRAP_KEY="+key)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	// A separate process group shields the server from Ctrl-C. Pdeathsig is sent when the thread
	// that started the server ends, so that thread is locked.
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

// isServerSetting reports whether an environment variable configures a server, other than where
// nsjail is.
func isServerSetting(variable string) bool {
	return strings.HasPrefix(variable, "BULLPEN_") && !strings.HasPrefix(variable, "BULLPEN_NSJAIL=")
}

// freeAddress returns an address with a free port.
func freeAddress(ctx context.Context) (string, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	return l.Addr().String(), l.Close()
}

// ready blocks until the server can run programs.
func (s *server) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for {
		err := s.client.Ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-s.exited:
			return fmt.Errorf("the server exited with code %d; run `bullpen doctor` to find what is missing. Its log:\n%s",
				s.cmd.ProcessState.ExitCode(), s.tail())
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return context.Canceled
			}
			return fmt.Errorf("the server was not ready within %s: %w; its log:\n%s", readyTimeout, err, s.tail())
		case <-time.After(readyInterval):
		}
	}
}

// stop terminates the server and waits for its end.
func (s *server) stop() error {
	_ = s.cmd.Process.Signal(syscall.SIGTERM) // fails if the server has exited: its exit code is checked below
	kill := time.AfterFunc(stopTimeout, func() { _ = s.cmd.Process.Kill() })
	defer kill.Stop()
	<-s.exited
	if code := s.cmd.ProcessState.ExitCode(); code != 0 {
		return fmt.Errorf("the server did not stop cleanly (%s); its log:\n%s", s.cmd.ProcessState, s.tail())
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
