// Package interpreters runs cells in interpreters that keep their state between the calls of a thread. They run in a
// live sandbox whose home the thread is. Any gateway can serve any call: the record of the sandbox and the guest's
// list of contexts are all there is to know.
package interpreters

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/gateway/sandboxes"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// IdleTimeout is the time without a call after which a sandbox of interpreters stops.
	IdleTimeout = 10 * time.Minute
	// startWait is how long a call waits for the sandbox beyond the wait for a worker: for another call that starts it,
	// for its stop, and for an execution that has the thread.
	startWait = 30 * time.Second
	// firstPause and maxPause are the pauses between looks at a sandbox that starts or stops.
	firstPause = 20 * time.Millisecond
	maxPause   = time.Second
	// saveTimeout limits a save of the files.
	saveTimeout = time.Minute
	// sandboxName is the name of sandboxes of interpreters in lists.
	sandboxName = "interpreters"
)

// Service finds, starts and uses the interpreters of threads. It is safe for concurrent use.
type Service struct {
	Live *sandboxes.Service
}

// Caller is who calls: a request of an API key, or a run in the background.
type Caller struct {
	Info *web.Info
	proto.Caller
}

// Request asks for an interpreter.
type Request struct {
	Thread, Language string
	Timeout          time.Duration // of the cell that follows
	// Restart means a new interpreter, without the variables of the one that there is.
	Restart bool
	// Replace means a new interpreter if the memory of the earlier one is gone. Otherwise Open returns a [*LostError]
	// then.
	Replace bool
}

// Interpreter is an interpreter for the next cell.
type Interpreter struct {
	proto.Place
	New  bool   // it has run no cell
	Lost string // why the memory of an earlier interpreter is gone, in words; empty if it is not
}

// LostError means that the memory of an interpreter is gone.
type LostError struct{ Reason string }

func (e *LostError) Error() string {
	return "the interpreter's memory is gone: " + e.Reason + "; its files are kept"
}

// sandboxID returns the id of the sandbox for the interpreters of a thread. There is one for each thread, so that two
// calls cannot start two sandboxes.
func sandboxID(org, thread string) string {
	sum := sha256.Sum256([]byte("interpreters\x00" + org + "\x00" + thread))
	return proto.NewSandboxID()[:1] + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:26]
}

// Open returns the interpreter of a thread for the next cell. It starts the sandbox and the interpreter if necessary.
func (s *Service) Open(ctx context.Context, c Caller, r *Request) (*Interpreter, error) {
	if err := s.Live.Admission.CheckSandboxTimeout(ctx, &c.Entitlement, int(r.Timeout.Seconds())); err != nil {
		return nil, err
	}
	p := &Interpreter{}
	err := s.retry(ctx, func(ctx context.Context) error {
		x, err := s.start(ctx, c, r, p)
		if err != nil {
			return err
		}
		p.Start = x.Execution
		err = s.interpreter(ctx, s.contexts(c.Key.Org, r.Thread), r, p)
		if known, ok := errors.AsType[*api.Error](err); ok && known.Code == api.CodeConflict { // it has begun to stop
			err = fmt.Errorf("%w: %w", errChanging, err)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return p, nil
}

// retry calls f until it returns no error that passes soon, for at most startWait.
func (*Service) retry(ctx context.Context, f func(context.Context) error) error {
	late := time.Now().Add(startWait)
	for pause := firstPause; ; pause = min(2*pause, maxPause) {
		err := f(ctx)
		if err == nil || !passes(err) || time.Now().After(late) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// errChanging means that the sandbox starts or stops.
var errChanging = api.Errorf(api.CodeConflict, "the thread's sandbox starts or stops; try again")

// passes reports whether an error is expected to pass: the sandbox starts, stops or was changed by another call, or an
// execution has the thread.
func passes(err error) bool {
	_, busy := errors.AsType[*proto.BusyError](err)
	_, changed := errors.AsType[*sandboxes.ConflictError](err)
	return busy || changed || errors.Is(err, proto.ErrExists) || errors.Is(err, errChanging)
}

func (s *Service) contexts(org, thread string) *sandboxes.Contexts {
	return &sandboxes.Contexts{Service: s.Live, Org: org, ID: sandboxID(org, thread)}
}

// start returns the running sandbox of a thread. It starts one if there is none.
func (s *Service) start(ctx context.Context, c Caller, r *Request, p *Interpreter) (*proto.LiveSandbox, error) {
	org, id := c.Key.Org, sandboxID(c.Key.Org, r.Thread)
	lifetime := lifetimeFor(c, r.Timeout)
	x, err := s.Live.Store.Get(ctx, org, id)
	switch {
	case errors.Is(err, proto.ErrNotFound):
		x = &proto.LiveSandbox{
			ID: id, Org: org, Key: c.Key.ID, Name: sandboxName, ThreadID: r.Thread, Interpreters: true,
			OnTimeout: proto.SandboxKill, Timeout: proto.Seconds(lifetime), IdleTimeout: proto.Seconds(IdleTimeout),
		}
		return x, s.Live.Create(ctx, c.Info, x, c.Caller)
	case err != nil:
		return nil, err
	case x.State == proto.SandboxRunning:
		return x, s.extend(ctx, c, x, lifetime)
	case x.State == proto.SandboxStarting:
		if err := s.Live.Ping(ctx, org, id); err != nil {
			return nil, fmt.Errorf("%w: %w", errChanging, err)
		}
		return x, nil
	case x.State == proto.SandboxStopping:
		return nil, errChanging
	}
	if x.Reason != proto.SandboxNotStarted {
		p.Lost = reasonOf(x)
	}
	if p.Lost != "" && !r.Restart && !r.Replace {
		return nil, &LostError{p.Lost}
	}
	return s.Live.Restart(ctx, c.Info, id, int(lifetime.Seconds()), c.Caller)
}

// lifetimeFor returns the time until a sandbox ends from the beginning of a cell on: as long as the plan allows, up to
// the end of the cell and of the idle timeout.
func lifetimeFor(c Caller, cell time.Duration) time.Duration {
	most := min(proto.LimitOf(c.Entitlement.MaxTimeout), proto.LimitOf(c.Entitlement.KeyTimeout))
	return min(cell+IdleTimeout, time.Duration(min(most, proto.MaxTimeout))*time.Second)
}

// extend lets a sandbox live on for a time.
func (s *Service) extend(ctx context.Context, c Caller, x *proto.LiveSandbox, lifetime time.Duration) error {
	if time.Until(x.ExpiresAt) > lifetime-lifetime/10 { // each extension is a write
		return nil
	}
	seconds := int(lifetime.Seconds())
	_, err := s.Live.Extend(ctx, x.ID, &seconds, c.Caller)
	return err
}

// reasonOf returns why a sandbox has ended, in words.
func reasonOf(x *proto.LiveSandbox) string {
	switch x.Reason {
	case proto.SandboxIdle, proto.SandboxExpired:
		return "it was not used for too long"
	case proto.SandboxKilled, proto.SandboxPausedByUser:
		return "its sandbox was stopped"
	case proto.SandboxWorkerLost:
		return "its worker was lost, and the files are as they were saved last"
	case proto.SandboxWorkerDrained:
		return "its worker was shut down"
	case proto.SandboxMemory:
		return "its sandbox exceeded the memory limit"
	case proto.SandboxKeyRevoked:
		return "the API key that started it is no longer valid"
	default:
		return "its sandbox has ended (" + string(x.Reason) + ")"
	}
}

// interpreter finds or starts the interpreter of a language in a running sandbox.
func (*Service) interpreter(ctx context.Context, all *sandboxes.Contexts, r *Request, p *Interpreter) error {
	x, err := all.Default(ctx, r.Language)
	if err != nil {
		return err
	}
	lost := x.State == stateLost
	if lost {
		p.Lost = strings.TrimSuffix(x.Message, "; restart the context")
		if !r.Restart && !r.Replace {
			return &LostError{p.Lost}
		}
	}
	if lost || r.Restart && x.Runs > 0 {
		if x, err = all.Restart(ctx, x.ID); err != nil {
			return err
		}
	}
	p.Context, p.New = x.ID, x.Runs == 0
	return nil
}

// stateLost is the state of a context whose interpreter has ended.
const stateLost = "lost"

// Result is the result of a cell.
type Result struct {
	*api.CellResult
	NotSaved string // why the files are not saved yet, in words; empty if they are
}

// Run runs a cell, and saves the files. A cell whose interpreter has ended is a result with the status lost. If the
// place is gone, the error is a [*LostError].
func (s *Service) Run(
	ctx context.Context, org, thread string, p *proto.Place, cell *api.CellRequest,
) (*Result, error) {
	if err := s.check(ctx, org, thread, p); err != nil {
		return nil, err
	}
	result, err := s.contexts(org, thread).Execute(ctx, p.Context, cell)
	if known, ok := errors.AsType[*api.Error](err); ok &&
		(known.Code == api.CodeContextLost || known.Code == api.CodeConflict || known.Code == api.CodeNotFound) {
		return nil, &LostError{known.Message}
	}
	if err != nil {
		return nil, err
	}
	return &Result{result, s.Save(ctx, org, thread)}, nil
}

// Interrupt interrupts what runs in a context.
func (s *Service) Interrupt(ctx context.Context, org, thread string, p *proto.Place) error {
	return s.contexts(org, thread).Interrupt(ctx, p.Context)
}

// check returns a [*LostError] unless the sandbox still runs as it did at a place.
func (s *Service) check(ctx context.Context, org, thread string, p *proto.Place) error {
	x, err := s.Live.Store.Get(ctx, org, sandboxID(org, thread))
	switch {
	case errors.Is(err, proto.ErrNotFound):
		return &LostError{"its sandbox has ended"}
	case err != nil:
		return err
	case !x.State.Active():
		return &LostError{reasonOf(x)}
	case x.Execution != p.Start:
		return &LostError{"its sandbox has been restarted"}
	}
	return nil
}

// Save saves the files of a running sandbox, so that others see them. It returns why they are not saved, in words, and
// "" if they are.
func (s *Service) Save(ctx context.Context, org, thread string) (notSaved string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveTimeout)
	defer cancel()
	id := sandboxID(org, thread)
	_, err := s.Live.Save(ctx, org, id)
	if err == nil {
		return ""
	}
	if refused, ok := errors.AsType[*sandboxes.NotSavedError](err); ok {
		return refused.Error()
	}
	if _, ok := errors.AsType[*sandboxes.ConflictError](err); ok { // it stops, which saves them
		return ""
	}
	s.Live.Log.WarnContext(ctx, "home of interpreters not saved", "sandbox", id, "org", org, "error", err)
	return "the server could not store the files yet"
}
