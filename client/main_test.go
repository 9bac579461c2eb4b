package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
)

// startTimeout bounds the start of the server.
const startTimeout = time.Minute

// TestMain starts a server, against which the examples run.
func TestMain(m *testing.M) {
	stop, err := startServer()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(tests{m}, goleak.Cleanup(func(code int) {
		if err := stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
		os.Exit(code)
	}))
}

// tests leave no idle connections.
type tests struct{ *testing.M }

func (t tests) Run() int {
	defer http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	return t.M.Run()
}

// startServer builds bullpen, starts it, waits until it is ready, and sets the environment variables that
// clients read.
func startServer() (stop func() error, err error) {
	dir, err := os.MkdirTemp("", "bullpen-client-test-")
	if err != nil {
		return nil, err
	}
	if out, err := exec.Command("make", "-s", "-C", "..", "build").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build bullpen: %w: %s", err, out)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	address, key := listener.Addr().String(), proto.NewKeySecret("local")
	if err := listener.Close(); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	server := exec.Command(filepath.Join("..", "bin", "bullpen"), "serve", "--listen", address,
		"--data", filepath.Join(dir, "data"))
	server.Stdout, server.Stderr = log, log
	server.Env = append(os.Environ(), "BULLPEN_BOOTSTRAP_KEY="+key, "BULLPEN_NSJAIL="+nsjail())
	// An example that fails ends this process at once. The signal follows the thread.
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	runtime.LockOSThread()
	if err := server.Start(); err != nil {
		return nil, err
	}
	stop = func() error {
		_ = server.Process.Signal(syscall.SIGTERM) // fails if the server has exited: Wait says how
		return errors.Join(server.Wait(), log.Close(), os.RemoveAll(dir))
	}
	if err := errors.Join(os.Setenv("BULLPEN_URL", "http://"+address), os.Setenv("BULLPEN_API_KEY", key)); err != nil {
		return nil, errors.Join(err, stop())
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := ready(ctx); err != nil {
		text, _ := os.ReadFile(log.Name())
		return nil, errors.Join(fmt.Errorf("%w; run `make build` first; the server's log:\n%s", err, text), stop())
	}
	return stop, nil
}

func nsjail() string {
	if set := os.Getenv("BULLPEN_NSJAIL"); set != "" {
		return set
	}
	path, _ := filepath.Abs("../bin/nsjail/nsjail/bin/nsjail") // fails without a working directory
	return path
}

// ready blocks until the server can run programs.
func ready(ctx context.Context) error {
	c, err := New(Config{URL: os.Getenv("BULLPEN_URL"), Key: os.Getenv("BULLPEN_API_KEY")})
	if err != nil {
		return err
	}
	for {
		err := c.Ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the server is not ready within %s: %w", startTimeout, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
