package worker

import (
	"context"
	"errors"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/fault"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// ended is a program that has ended.
type ended struct {
	outcome        jail.Outcome
	stdout, stderr *collector
	displays       *displays
	lastSeq        int64 // of the last event published
	truncated      bool  // events are missing for readers
	overBudget     bool  // less is kept because the organisation has used up its budget of stored output
}

// runError is why an attempt has no result although it was claimed: its lease was lost, or the host lacked memory and
// the job has further attempts.
type runError struct{ err error }

func (e *runError) Error() string { return e.err.Error() }
func (e *runError) Unwrap() error { return e.err }

// run runs the program in a prepared sandbox. Its error is a [*runError].
func (a *attempt) run(ctx context.Context, c *claim, b *sandbox) (*ended, error) {
	events := a.Open(ctx, a.job, a.lease.Attempt(), c.base)
	e := &ended{
		stdout: newCollector(a.job.Sandbox.OutputBytes, events.Stream(proto.Stdout)),
		stderr: newCollector(a.job.Sandbox.OutputBytes, events.Stream(proto.Stderr)),
	}
	secrets := newMasks(a.job, b.secrets)
	maskedOut, maskedErr := secrets.Writer(e.stdout), secrets.Writer(e.stderr)
	program := a.program
	program.Stdout, program.Stderr, program.Cancel = maskedOut, maskedErr, c.cancelled
	e.displays = &displays{events: events, masks: secrets}
	closeOutputs := func() {}
	if a.nonce != "" {
		program.Stdout, program.Stderr, closeOutputs = richOutputs(a.nonce, maskedOut, maskedErr, e.displays)
	}
	if a.live != nil {
		stop := a.stopLive(c)
		defer stop.release()
		program.Cancel = stop.cancel
		defer a.saveLive(c, b)()
	}
	began := time.Now()
	fault.Here(fault.AfterClaimBeforeStart)
	outcome, err := b.jail.Run(c.running, program)
	a.removeLive(ctx) // before the save: a socket without its guest would accept connections
	a.spent.run = time.Since(began)
	a.spent.steps.Program = a.spent.interval(period{began, a.spent.run})
	closeOutputs()
	maskedOut.Flush()
	maskedErr.Flush()
	e.lastSeq, e.truncated = events.Close()
	e.overBudget = events.OverBudget()
	fault.Here(fault.AfterOutputBeforeResult)
	// A program that exited has a result. Finish decides whether the lease was lost.
	if cause := context.Cause(c.running); errors.Is(cause, proto.ErrLost) && (err != nil || outcome.Kind == jail.Killed) {
		return nil, &runError{cause}
	}
	if err == nil && outcome.Kind == jail.HostOutOfMemory && c.running.Err() == nil && !isClosed(c.cancelled) &&
		a.retriable(jail.ErrHostOutOfMemory) {
		return nil, &runError{jail.ErrHostOutOfMemory}
	}
	if err != nil {
		a.log.ErrorContext(ctx, "sandbox failed", "error", err)
		outcome = jail.Outcome{Kind: jail.StartFailed, Step: "run", Detail: sandboxBroken}
	}
	e.outcome = outcome
	return e, nil
}
