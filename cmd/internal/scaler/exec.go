package scaler

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// commandTimeout bounds a call of the command, commandGrace the time after SIGTERM.
	commandTimeout = time.Minute
	commandGrace   = 5 * time.Second
	// maxCommandOutput is how much of the end of the command's output is logged.
	maxCommandOutput = 4 << 10
)

// Exec is a [Driver] that runs an operator's command, with the name of the pool and the number of
// workers as arguments.
type Exec struct {
	Command string
}

// Scale implements [Driver].
func (e *Exec) Scale(ctx context.Context, p proto.Pool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, commandTimeout, fmt.Errorf("it did not end within %s", commandTimeout))
	defer cancel()
	workers := strconv.Itoa(p.Desired.Workers)
	cmd := exec.CommandContext(ctx, e.Command, p.Name, workers)
	cmd.Env = append(withoutSettings(os.Environ()),
		"BULLPEN_AUTOSCALE_POOL="+p.Name, "BULLPEN_AUTOSCALE_WORKERS="+workers,
		"BULLPEN_AUTOSCALE_SLOTS="+strconv.Itoa(p.Desired.Slots),
		"BULLPEN_AUTOSCALE_LIVE_WORKERS="+strconv.Itoa(p.Workers), "BULLPEN_AUTOSCALE_REASON="+p.Desired.Reason)
	cmd.Cancel, cmd.WaitDelay = func() error { return cmd.Process.Signal(syscall.SIGTERM) }, commandGrace
	output := &tail{}
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Run(); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return fmt.Errorf("run %s %s %s: %w: %s", e.Command, p.Name, workers, err, output)
	}
	return nil
}

// withoutSettings returns the variables except this process's settings, which may be secret.
func withoutSettings(env []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(v string) bool { return strings.HasPrefix(v, "BULLPEN_") })
}

// tail keeps the end of what is written. One goroutine writes.
type tail struct{ text []byte }

// Write implements [io.Writer].
func (t *tail) Write(b []byte) (int, error) {
	t.text = append(t.text, b...)
	if over := len(t.text) - maxCommandOutput; over > 0 {
		t.text = append(t.text[:0], t.text[over:]...)
	}
	return len(b), nil
}

func (t *tail) String() string {
	if len(t.text) == 0 {
		return "no output"
	}
	return strings.TrimSpace(string(t.text))
}
