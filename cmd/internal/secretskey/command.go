package secretskey

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	// commandTimeout bounds a call of the command, commandGrace the time after SIGTERM.
	commandTimeout = 30 * time.Second
	commandGrace   = 5 * time.Second
	maxComplaint   = 1 << 10 // bytes of what the command writes to standard error, in errors
)

// Command is an operator's program that wraps and unwraps data keys, for example with a key
// management service. It is run with the argument wrap or unwrap, reads standard input and writes
// standard output, both binary.
type Command struct{ Path string }

// Wrap runs the command with the argument wrap.
func (c Command) Wrap(ctx context.Context, dataKey []byte) ([]byte, string, error) {
	wrapped, err := c.run(ctx, "wrap", dataKey)
	if err == nil && (len(wrapped) > maxWrapped || bytes.Contains(wrapped, dataKey)) {
		err = fmt.Errorf("%s wrap: its output must be an encrypted key of at most %d bytes", c.Path, maxWrapped)
	}
	return wrapped, "the command " + c.Path, err
}

// Unwrap runs the command with the argument unwrap.
func (c Command) Unwrap(ctx context.Context, wrapped []byte) ([]byte, error) {
	return c.run(ctx, "unwrap", wrapped)
}

func (c Command) run(ctx context.Context, verb string, input []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, commandTimeout, fmt.Errorf("it did not end within %s", commandTimeout))
	defer cancel()
	cmd := exec.CommandContext(ctx, c.Path, verb)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "BULLPEN_") })
	cmd.Cancel, cmd.WaitDelay = func() error { return cmd.Process.Signal(syscall.SIGTERM) }, commandGrace
	var output, complaint bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &output, &complaint
	err := cmd.Run()
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	if err == nil && output.Len() == 0 {
		err = errors.New("it wrote nothing to standard output")
	}
	if err != nil {
		text := complaint.String()
		return nil, fmt.Errorf("run %s %s: %w: %s", c.Path, verb, err,
			strings.TrimSpace(text[max(0, len(text)-maxComplaint):]))
	}
	return output.Bytes(), nil
}
