package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	readyWithin = 30 * time.Second
	readyPoll   = 50 * time.Millisecond
	stopWithin  = 40 * time.Second // longer than the server waits for its programs
	logTail     = 4 << 10          // size of the log excerpt shown on failure
	quietFor    = time.Second      // jails are made one at a time, each in much less
	// quietWithin is longer than it takes to fill the pool for the highest rate.
	quietWithin = time.Minute
)

// target is the measured server.
type target struct {
	*api
	// Set only for a server that was started here.
	data, log string // paths
	// profileURL is the base URL of the server's profiles; empty unless --profile is set.
	profileURL string
	noWorker   bool // it runs no programs
	pid        int
	cmd        *exec.Cmd
	exited     chan struct{}
}

// openTarget starts a server with its data below dir, or connects to a running one, and waits until
// it can run programs.
func openTarget(ctx context.Context, o options, dir string) (*target, error) {
	t := &target{api: newAPI(o.url, o.key)}
	if o.url == "" {
		var err error
		var settings []string
		at := ""
		if o.profile != "" {
			if at, err = freeAddress(ctx); err != nil {
				return nil, err
			}
			settings = append(settings, profileSetting+at)
		}
		if t, err = startServer(ctx, o.server, dir, settings...); err != nil {
			return nil, err
		}
		t.profileURL = "http://" + at
	}
	if err := t.ready(ctx); err != nil {
		return nil, errors.Join(err, t.close())
	}
	return t, nil
}

// startServer starts a server with its data in dir, which it makes if it does not exist. The
// settings are additional environment variables.
func startServer(ctx context.Context, program, dir string, settings ...string) (*target, error) {
	address, err := freeAddress(ctx)
	if err != nil {
		return nil, err
	}
	t := &target{
		api:  newAPI("http://"+address, proto.NewKeySecret("local")),
		data: filepath.Join(dir, "data"), log: filepath.Join(dir, "server.log"),
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make a directory for the server: %w", err)
	}
	env := append([]string{"BULLPEN_BOOTSTRAP_KEY=" + t.key}, settings...)
	return t, t.start(ctx, env, program, "serve", "--listen", address, "--data", t.data, "--log-format", "json")
}

// start starts a program with additional environment variables, and appends its output to t.log.
func (t *target) start(ctx context.Context, env []string, program string, args ...string) error {
	log, err := os.OpenFile(t.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("make the log of %s: %w", program, err)
	}
	defer func() { _ = log.Close() }() // the child has its own descriptor
	// ctx must not kill the server: it is stopped by a signal and waited for.
	cmd, exited := exec.CommandContext(context.WithoutCancel(ctx), program, args...), make(chan struct{})
	cmd.Stdout, cmd.Stderr = log, log
	// The environment must not affect the measurement, except for the path of nsjail.
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + filepath.Dir(t.log)}, env...)
	if nsjail, ok := os.LookupEnv("BULLPEN_NSJAIL"); ok {
		cmd.Env = append(cmd.Env, "BULLPEN_NSJAIL="+nsjail)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // the parent-death signal follows the thread that started the child
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // close reads the state
			close(exited)
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start %s: %w: run `make build`, or name the program with --server", program, err)
	}
	t.cmd, t.exited, t.pid = cmd, exited, cmd.Process.Pid
	return nil
}

// freeAddress returns an unused loopback address.
func freeAddress(ctx context.Context) (string, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	if err := listener.Close(); err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	return listener.Addr().String(), nil
}

// ready waits until the server can run programs.
func (t *target) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	for {
		_, err := t.get(ctx, "/readyz")
		if err == nil {
			return nil
		}
		select {
		case <-t.exited:
			return fmt.Errorf("the server ended: `bullpen doctor` lists what is missing on this machine; its log:\n%s", t.tail())
		case <-ctx.Done():
			return fmt.Errorf("the server was not ready within %s: %w%s", readyWithin, err, t.tail())
		case <-time.After(readyPoll):
		}
	}
}

// quiet waits until no process of the server has started or ended for a while. The pool of jails is
// full then.
func (t *target) quiet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, quietWithin)
	defer cancel()
	var before []process
	for since := time.Now(); time.Since(since) < quietFor; {
		all, err := processes()
		if err != nil {
			return err
		}
		if now := descendants(all, t.pid); !slices.Equal(now, before) {
			before, since = now, time.Now()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until the server makes no more jails, %s at most: %w: does somebody else use it?",
				quietWithin, ctx.Err())
		case <-time.After(readyPoll):
		}
	}
	return nil
}

// close stops a server that was started here.
func (t *target) close() error {
	t.http.CloseIdleConnections()
	if t.cmd == nil {
		return nil
	}
	_ = t.cmd.Process.Signal(syscall.SIGTERM) // if it has exited, its state has the cause
	kill := time.AfterFunc(stopWithin, func() { _ = t.cmd.Process.Kill() })
	defer kill.Stop()
	<-t.exited
	if !t.cmd.ProcessState.Success() {
		return fmt.Errorf("the server did not end in order (%s); its log:\n%s", t.cmd.ProcessState, t.tail())
	}
	return nil
}

func (t *target) tail() []byte {
	if t.log == "" {
		return nil
	}
	log, err := os.ReadFile(t.log) //nolint:gosec // in our own directory
	if err != nil {
		return []byte(err.Error())
	}
	return bytes.TrimSpace(log[max(0, len(log)-logTail):])
}
