package agents

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/gateway/interpreters"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// maxCommand is the size of a program that is started in a sandbox, in bytes: that of an argument.
	maxCommand = 128<<10 - 1
	// maxOutput is how much of each output of such a program is kept, in bytes.
	maxOutput = 1 << 20
)

// timeout returns how long a call may run, in seconds.
func (a *Agent) timeout() int {
	return min(maxTimeout, proto.LimitOf(a.i.Plan.MaxTimeout), proto.LimitOf(a.i.Plan.KeyTimeout))
}

// Place returns where the programs of a container run while its sandbox runs. With cells it returns the Python
// interpreter there, and starts both if necessary. It returns nil if there is none, or if none can be started now.
func (a *Agent) Place(ctx context.Context, thread string, cells bool) (*proto.Place, error) {
	if !cells {
		p, err := a.m.Interpreters.Running(ctx, a.org(), ownThread(thread))
		return p, a.public(err)
	}
	began := time.Now()
	x, err := a.openInterpreter(ctx, thread)
	if withoutSandboxes(err) {
		return nil, nil
	}
	if err != nil {
		return nil, a.public(err)
	}
	a.i.Calls.Store(true)
	place := x.Place
	switch {
	case x.Lost != "":
		place.Note = "The interpreter is a new one, and the variables of earlier calls are gone: " + x.Lost +
			". Files are kept."
	case x.New && a.existed(ctx, thread, began):
		place.Note = "The interpreter is a new one: it has no variables of earlier calls."
	}
	return &place, nil
}

// existed reports whether a container existed before a time.
func (a *Agent) existed(ctx context.Context, thread string, at time.Time) bool {
	t, err := a.m.Threads.Get(ctx, a.org(), ownThread(thread))
	return err == nil && t.CreatedAt.Before(at)
}

func (a *Agent) openInterpreter(ctx context.Context, thread string) (x *interpreters.Interpreter, err error) {
	open := func(c proto.Caller) error {
		x, err = a.m.Interpreters.Open(ctx, interpreters.Caller{Info: a.i, Caller: c}, &interpreters.Request{
			Thread: ownThread(thread), Language: "python", Timeout: time.Duration(a.timeout()) * time.Second, Replace: true,
		})
		return err
	}
	if a.r != nil {
		if a.m.IsDraining() {
			return nil, web.ErrDraining
		}
		return x, open(web.CallerOf(a.r))
	}
	tries := backoff.WithContext(backoff.NewExponentialBackOff(backoff.WithMaxElapsedTime(maxBackgroundTries)), ctx)
	return x, backoff.Retry(func() error {
		key, plan, err := a.validKey(ctx)
		if err == nil {
			err = open(proto.Caller{Key: key, Entitlement: plan, RequestID: a.i.RequestID})
		}
		if withoutSandboxes(err) {
			return backoff.Permanent(err)
		}
		return permanentIfFinal(err)
	}, tries)
}

// withoutSandboxes reports whether an error means that the organisation gets no sandbox now: there is no worker for
// them, or it has as many as it may have.
func withoutSandboxes(err error) bool {
	refused, ok := errors.AsType[*proto.Rejection](err)
	return ok && (refused.Reason == proto.RejectedNoWorker || refused.Reason == proto.RejectedSandboxes)
}

// RunCell runs a cell at a place of a container, and returns its result. If ctx is done first, the cell is interrupted,
// unless the run continues in another process.
func (a *Agent) RunCell(
	ctx context.Context, thread string, at *proto.Place, id proto.TraceID, code string,
) (*api.CellResult, error) {
	result, err := a.m.Interpreters.Run(ctx, a.org(), ownThread(thread), at, &api.CellRequest{
		Code: code, Timeout: a.timeout(), Call: string(id), InterruptOnClose: a.r != nil,
	})
	if err != nil {
		if a.r == nil && over(ctx) {
			stopping, done := web.Detached(ctx)
			defer done()
			err = errors.Join(err, a.m.Interpreters.Interrupt(stopping, a.org(), ownThread(thread), at))
		}
		return nil, a.public(lost(err))
	}
	if err := a.reserveCell(result.CellResult); err != nil {
		return nil, err
	}
	return result.CellResult, nil
}

// lost returns the error for the client if a place is gone.
func lost(err error) error {
	if gone, ok := errors.AsType[*interpreters.LostError](err); ok {
		return api.Errorf(api.CodeContextLost, "%s", gone.Reason)
	}
	return err
}

// reserveCell reserves memory for what a model reads of a result.
func (a *Agent) reserveCell(r *api.CellResult) error {
	size := min(len(r.Stdout), api.MaxToolOutput) + min(len(r.Stderr), api.MaxToolOutput)
	for i := range r.Results {
		for _, data := range r.Results[i].Data {
			size += len(data)
		}
	}
	return a.Reserve(int64(size))
}

// ExecuteAt runs a program at a place of a container, and returns a record of it that is stored nowhere. It does not
// run it again if it was run there with that id. It ends the program as Execute does.
func (a *Agent) ExecuteAt(
	ctx context.Context, at *proto.Place, id proto.TraceID, req *api.ExecuteRequest,
) (*proto.Record, error) {
	record, err := a.executeAt(ctx, at, id, req)
	if err != nil {
		return nil, a.public(lost(err))
	}
	if err := a.m.ReserveOutput(a.i, id, record.Result); err != nil {
		return nil, a.public(err)
	}
	return record, nil
}

// commandsOf are the commands that run programs of languages.
var commandsOf = map[proto.Language][]string{
	proto.Python: {"python3", "-c"}, proto.Node: {"node", "-e"}, proto.Bash: {"bash", "-c"},
}

func (a *Agent) executeAt(
	ctx context.Context, at *proto.Place, id proto.TraceID, req *api.ExecuteRequest,
) (*proto.Record, error) {
	if len(req.Code) > maxCommand {
		return nil, proto.FieldErrorf("code", "must have at most %d bytes; write a program that is longer into a file",
			maxCommand)
	}
	a.i.Calls.Store(true)
	timeout := req.Timeout
	if timeout == 0 {
		timeout = a.timeout()
	}
	var stdout, stderr limitedBuffer
	command := &client.Command{
		Args: append(slices.Clone(commandsOf[req.Language]), req.Code), Env: req.Env, Tag: string(id),
		Stdout: &stdout, Stderr: &stderr, Timeout: time.Duration(timeout) * time.Second,
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	type outcome struct {
		exit client.Exit
		err  error
	}
	ended := make(chan outcome, 1)
	began := time.Now()
	go func() {
		defer stop()
		exit, err := a.m.Interpreters.Exec(running, a.org(), ownThread(req.ThreadID), at, command)
		ended <- outcome{exit, err}
	}()
	var o outcome
	select {
	case o = <-ended:
	case <-ctx.Done():
		if a.r != nil || over(ctx) { // otherwise another process follows it
			stop()
			<-ended
		}
		return nil, ctx.Err()
	}
	if o.err != nil {
		return nil, o.err
	}
	result := proto.Exited(o.exit.Code)
	switch {
	case o.exit.TimedOut:
		result = proto.TimedOut(timeout)
	case o.exit.Signal > 0:
		result = proto.Signaled(o.exit.Signal)
	}
	result.Stdout, result.StdoutTruncated = stdout.text()
	result.Stderr, result.StderrTruncated = stderr.text()
	result.StdoutTruncated = result.StdoutTruncated || o.exit.Lost > 0
	result.DurationMS = time.Since(began).Milliseconds()
	return &proto.Record{Status: result.Status(), StartedAt: &began, Result: &result}, nil
}

// limitedBuffer keeps the beginning of an output.
type limitedBuffer struct {
	kept      []byte
	truncated bool
}

// Write implements [io.Writer].
func (b *limitedBuffer) Write(p []byte) (int, error) {
	n := min(len(p), maxOutput-len(b.kept))
	b.kept = append(b.kept, p[:n]...)
	b.truncated = b.truncated || n < len(p)
	return len(p), nil
}

func (b *limitedBuffer) text() (text string, truncated bool) {
	kept := b.kept
	if b.truncated {
		kept = kept[:proto.CutUTF8(string(kept))]
	}
	return strings.ToValidUTF8(string(kept), "\uFFFD"), b.truncated
}
