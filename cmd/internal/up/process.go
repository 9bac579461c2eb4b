package up

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v4"
)

const (
	firstPause   = 500 * time.Millisecond // before the first restart
	longestPause = 15 * time.Second
	// steadyAfter is how long a process must have run to reset the pause before its restart.
	steadyAfter = 30 * time.Second
	outputGrace = time.Second // for output that a process has written before its end
)

// process is a process of the deployment, which is restarted when it ends.
type process struct {
	spec
	dir     string // for its files
	args    []string
	env     map[string]string
	network *network
	console *console
}

// run runs the process until stop is done and it has ended. It calls started once, with the process
// id or the error of the first start, which ends it.
func (p *process) run(stop context.Context, started func(pid int, err error)) {
	// The thread stays in the network of the process, so it ends with this goroutine. The kernel kills
	// the process when the thread ends, and with it when this program is killed.
	runtime.LockOSThread()
	err := errors.Join(os.MkdirAll(p.dir, 0o700), p.network.join(p.addr))
	if err != nil {
		started(0, err)
		return
	}
	pause := backoff.NewExponentialBackOff(backoff.WithInitialInterval(firstPause), backoff.WithMaxInterval(longestPause),
		backoff.WithMaxElapsedTime(0))
	for first := true; ; first = false {
		began := time.Now()
		cmd, read, err := p.start(stop)
		switch {
		case first:
			started(pidOf(cmd), err)
			if err != nil {
				return
			}
		case err == nil:
			p.console.printf(p.name, "[up] started again, pid %d", pidOf(cmd))
		}
		if err == nil {
			err = p.wait(cmd, read)
		}
		if stop.Err() != nil {
			p.console.printf(p.name, "[up] stopped: %v", err)
			return
		}
		if time.Since(began) > steadyAfter {
			pause.Reset()
		}
		next := pause.NextBackOff()
		p.console.printf(p.name, "[up] ended: %v; starting again in %s", err, next.Round(time.Millisecond))
		select {
		case <-stop.Done():
			return
		case <-time.After(next):
		}
	}
}

func pidOf(cmd *exec.Cmd) int {
	if cmd == nil {
		return 0
	}
	return cmd.Process.Pid
}

// inherited are the variables that processes have of bullpen up. Others may be credentials.
var inherited = []string{"PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "BULLPEN_NSJAIL"}

// start starts the process. Its output is in the pipe. When stop is done, it gets SIGTERM.
func (p *process) start(stop context.Context) (_ *exec.Cmd, read *os.File, err error) {
	read, write, err := os.Pipe()
	if err != nil {
		return nil, nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	defer func() { _ = write.Close() }() // the process has it
	cmd := exec.CommandContext(stop, p.args[0], p.args[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	for _, name := range inherited {
		if value, ok := os.LookupEnv(name); ok {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.env)) {
		cmd.Env = append(cmd.Env, name+"="+p.env[name])
	}
	if len(p.service.Roles) > 0 {
		cmd.Env = append(cmd.Env, "BULLPEN_INSTANCE="+p.name+"-"+rand.Text()[:8])
	}
	if len(p.service.Command) > 0 {
		cmd.Dir = p.dir
	}
	cmd.Stdout, cmd.Stderr = write, write
	// A separate process group shields the process from Ctrl-C, so that it is stopped in its turn.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		_ = read.Close()
		return nil, nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	return cmd, read, nil
}

// wait prints the process's output until it ends, and returns how it ended. It kills the rest of
// the process group.
func (p *process) wait(cmd *exec.Cmd, read *os.File) error {
	printed := make(chan struct{})
	go func() {
		defer close(printed)
		p.console.copy(p.name, read)
	}()
	_ = cmd.Wait() // the state says more
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	// Children in other groups may keep the pipe open.
	_ = read.SetReadDeadline(time.Now().Add(outputGrace))
	<-printed
	_ = read.Close()
	return errors.New(cmd.ProcessState.String())
}

// command sets the arguments and the environment of a process.
func (p *process) command(t *Topology, self, data, password, key string) {
	p.dir = filepath.Join(data, p.name)
	switch {
	case p.service.Server == serverNATS:
		p.args = []string{
			self, NATSCommand, "--data", p.dir, "--name", p.name, "--host", p.addr.String(), "--peers",
			strings.Join(t.hosts(serverNATS), ","),
		}
		p.env = map[string]string{PasswordVariable: password}
	case p.service.Server == serverRedis:
		p.args = []string{self, RedisCommand, "--host", p.addr.String()}
		p.env = map[string]string{PasswordVariable: password}
	case len(p.service.Roles) > 0:
		p.args = []string{self, "serve"}
		p.env = t.settings(p.spec, data, password, key)
	default:
		p.args, p.env = p.service.Command, map[string]string{}
		t.add(p.env, p.service.Env)
	}
}
