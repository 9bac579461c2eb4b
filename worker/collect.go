package worker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/mount"
)

// collectError is why it is unknown whether all of a program's writes to its storage connections
// are stored.
type collectError struct{ err error }

func (e *collectError) Error() string { return e.err.Error() }
func (e *collectError) Unwrap() error { return e.err }

// message is a sentence for the tenant.
func (e *collectError) message() string {
	if failed, ok := errors.AsType[*mount.WriteError](e.err); ok {
		return failed.Error()
	}
	return "It is not known whether all that the program wrote to its storage connections was stored; " +
		"the cause is in the worker's log."
}

// collect returns the outcome of a program that has ended.
func (a *attempt) collect(e *ended) Outcome {
	r := a.liveResult(resultOf(a.job, e.outcome))
	r.DurationMS = e.outcome.Duration.Milliseconds()
	r.Stdout, r.StdoutTruncated = e.stdout.text()
	r.Stderr, r.StderrTruncated = e.stderr.text()
	r.StdoutInvalidUTF8, r.StderrInvalidUTF8 = !utf8.ValidString(r.Stdout), !utf8.ValidString(r.Stderr)
	r.Results, r.ResultsTruncated = e.displays.kept, e.displays.truncated
	r.OutputBudgetExceeded = e.overBudget
	return Outcome{
		Result: r, LastSeq: e.lastSeq, OutputTruncated: e.truncated, Steps: &a.spent.steps,
		Usage: &proto.Usage{
			CPUMS: e.outcome.CPUTime.Milliseconds(), MemoryPeak: e.outcome.MemoryPeak, Network: e.outcome.Network,
			OutputBytes: int64(r.OutputBytes()),
		},
	}
}

// collectMounts waits until what the program wrote to its storage connections is stored. It returns nil if all is.
func (a *attempt) collectMounts(ctx context.Context, b *sandbox) *collectError {
	if b.mounts == nil {
		return nil
	}
	began := time.Now()
	err := b.mounts.Finish(ctx)
	a.spent.store = time.Since(began)
	a.spent.steps.Mounts = a.spent.interval(period{began, a.spent.store})
	if err != nil {
		return &collectError{err}
	}
	return nil
}

func newCollector(limit int, next Stream) *collector {
	return &collector{limit: limit, kept: new(strings.Builder), next: next}
}

// collector keeps the beginning of an output for the result and passes all of it on. One goroutine
// writes it; it is read after the program has ended.
type collector struct {
	limit int // bytes
	kept  *strings.Builder
	over  bool
	next  Stream
}

func (c *collector) Write(p []byte) (int, error) {
	keep := p[:min(len(p), c.limit-c.kept.Len())]
	keep = keep[:c.next.Keep(len(keep))]
	c.over = c.over || len(keep) < len(p)
	c.grow(len(keep))
	c.kept.Write(keep)
	return c.next.Write(p)
}

// grow doubles the capacity when it is used up, up to the limit. A plain builder may allocate twice
// the limit, or copy many MiB repeatedly.
func (c *collector) grow(n int) {
	if c.kept.Cap()-c.kept.Len() >= n {
		return
	}
	larger := new(strings.Builder)
	larger.Grow(min(max(2*c.kept.Cap(), c.kept.Len()+n), c.limit))
	larger.WriteString(c.kept.String())
	c.kept = larger
}

// text returns the kept output, cut between characters if there was more.
func (c *collector) text() (s string, truncated bool) {
	s = c.kept.String()
	if c.over {
		s = s[:proto.CutUTF8(s)]
	}
	return s, c.over
}

func resultOf(job *proto.Job, o jail.Outcome) proto.Result {
	switch o.Kind {
	case jail.Exited:
		return proto.Exited(o.ExitCode)
	case jail.Signaled:
		return proto.Signaled(o.Signal)
	case jail.TimedOut:
		return withExitCode(proto.TimedOut(job.Timeout), o)
	case jail.Cancelled:
		return withExitCode(proto.Cancelled(), o)
	case jail.OutOfMemory:
		if o.Uncharged > 0 {
			return proto.Failure(proto.CodeMemory, fmt.Sprintf(
				"The program made the kernel of the worker's host hold about %d MiB for it, in addition to what counts towards "+
					"its %d MiB of memory, and was killed.", o.Uncharged>>20, job.Sandbox.Memory>>20))
		}
		return proto.Failure(proto.CodeMemory, fmt.Sprintf(
			"The program used more than its %d MiB of memory and was killed.", job.Sandbox.Memory>>20))
	case jail.HostOutOfMemory:
		return proto.Failure(proto.CodeHostMemory, fmt.Sprintf("The worker's host ran out of memory or was about to, and "+
			"the program was killed. The program had not exceeded its %d MiB.", job.Sandbox.Memory>>20))
	case jail.Seccomp:
		return proto.Failure(proto.CodeSeccomp,
			"The program made a system call that the sandbox forbids and was killed.")
	case jail.Killed:
		return shutdown(o.Duration)
	default:
		return proto.Failure(proto.CodeSandboxStart,
			fmt.Sprintf("The program could not be started: %s: %s", o.Step, o.Detail))
	}
}

// withExitCode returns r with the exit code of a program that exited by itself after SIGTERM.
func withExitCode(r proto.Result, o jail.Outcome) proto.Result {
	if o.Graceful {
		own := proto.Exited(o.ExitCode)
		if o.Signal != 0 {
			own = proto.Signaled(o.Signal)
		}
		r.ProgramExitCode = &own.ExitCode
	}
	return r
}

func shutdown(ran time.Duration) proto.Result {
	return proto.Failure(proto.CodeWorkerLost, fmt.Sprintf(
		"The worker was shut down and did not wait longer; the program had run for %s and was killed.",
		ran.Round(time.Millisecond)))
}
