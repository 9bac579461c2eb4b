package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/bullpen-run/bullpen/guest/processpb"
)

const (
	// endGrace is the time between SIGTERM and SIGKILL for a command whose context is done.
	endGrace = 5 * time.Second
	// endTimeout bounds each step of ending a command whose context is done.
	endTimeout = 10 * time.Second
	inputPiece = 32 << 10 // bytes of standard input that are sent at once
)

// Command is a command to run in a live sandbox.
type Command struct {
	Args []string          // the program and its arguments; required
	Env  map[string]string // added to the sandbox's
	Dir  string            // the working directory, absolute or relative to the home; empty for the home
	// Tag, if not empty, names the command. If the sandbox has a command of that name already, Exec starts none: it
	// follows that one from the beginning of the output that the sandbox keeps.
	Tag string
	// Timeout is how long the command may run, together with what it has started; 0 for no limit.
	Timeout time.Duration
	Stdin   io.Reader // nil for none
	Stdout  io.Writer // nil to discard
	Stderr  io.Writer // nil to discard
}

// Exit is how a command ended.
type Exit struct {
	Code     int    // the exit code; -1 if the command did not exit
	Signal   int    // the number of the signal that ended it; 0 for none
	TimedOut bool   // its timeout has passed
	Lost     uint64 // bytes of output that were lost because they were not read in time
}

// Exec runs a command and returns how it ended. It resumes after a broken connection without losing or
// repeating output, as long as the sandbox keeps the output. If ctx is done, or a stream of the command
// fails here, Exec sends SIGTERM to the command and what it has started. It sends SIGKILL
// after 5 seconds, or when the command has ended, to what that has left behind. Then it returns the cause. A
// goroutine may go on reading Stdin until its next Read returns.
func (g *Guest) Exec(ctx context.Context, c *Command) (Exit, error) {
	if len(c.Args) == 0 {
		return Exit{Code: -1}, errors.New("client: the command has no program")
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	streaming, cut := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cut(nil)
	x := &execution{guest: g, command: c, stop: stop, started: make(chan struct{}), exit: Exit{Code: -1}}
	over := make(chan struct{})
	var interrupting sync.WaitGroup
	interrupting.Go(func() {
		select {
		case <-ctx.Done():
			x.interrupt(streaming, over)
			cut(nil)
		case <-over:
		}
	})
	err := x.run(streaming)
	close(over)
	interrupting.Wait()
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return x.exit, err
}

// execution is a command that runs.
type execution struct {
	guest   *Guest
	command *Command
	stop    context.CancelCauseFunc // ends the command
	started chan struct{}           // closed when pid is set
	pid     uint32

	seq      uint64 // of the last chunk of output
	received uint64 // bytes of output, including lost ones
	exit     Exit
	failed   bool // no output can be written
}

// processEvents is a stream of the events of a process.
type processEvents struct {
	next  func() bool
	event func() *processpb.ProcessEvent
	err   func() error
	close func() error
}

// run starts the command and follows it to its end.
func (x *execution) run(ctx context.Context) error {
	var stream *processEvents
	err := x.guest.retry(ctx, func() (err error) {
		if stream, err = x.find(ctx); stream != nil || err != nil {
			return err
		}
		if stream, err = x.start(ctx); err != nil {
			return err
		}
		return x.first(stream)
	})
	if err != nil {
		return err
	}
	if x.command.Stdin != nil {
		go x.sendInput(ctx)
	}
	err = x.follow(stream)
	for err != nil && !final(err) && ctx.Err() == nil && !x.guest.client.cfg.NoRetry {
		x.guest.client.cfg.OnRetry(err)
		if stream, err = x.resume(ctx); err != nil {
			return err
		}
		err = x.follow(stream)
	}
	failed, ok := errors.AsType[*GuestError](err)
	if ok && failed.Code == connect.CodeDeadlineExceeded.String() && x.command.Timeout > 0 {
		x.exit.TimedOut = true
		return nil
	}
	return err
}

// final reports whether an error is an answer, rather than that of a broken connection.
func final(err error) bool {
	_, isGuests := errors.AsType[*GuestError](err)
	_, isServers := errors.AsType[*Error](err)
	return isGuests || isServers
}

// find connects to the process with the command's tag, and returns its events after the first; nil if there is none.
func (x *execution) find(ctx context.Context) (*processEvents, error) {
	if x.command.Tag == "" {
		return nil, nil
	}
	stream, err := x.connect(ctx, &processpb.ProcessSelector{
		Selector: &processpb.ProcessSelector_Tag{Tag: x.command.Tag},
	})
	if err == nil {
		err = x.first(stream)
	}
	failed, ok := errors.AsType[*GuestError](err)
	switch {
	case ok && failed.Code == connect.CodeNotFound.String():
		return nil, nil
	case err != nil:
		return nil, err
	}
	return stream, nil
}

// connect returns the events of a process that runs, or has ended, after the last one received.
func (x *execution) connect(ctx context.Context, to *processpb.ProcessSelector) (*processEvents, error) {
	r := connect.NewRequest(&processpb.ConnectRequest{Process: to, AfterSeq: &x.seq})
	s, err := x.guest.processes.Connect(ctx, r)
	if err != nil {
		return nil, guestError(err)
	}
	return &processEvents{s.Receive, func() *processpb.ProcessEvent { return s.Msg().GetEvent() }, s.Err, s.Close}, nil
}

// start starts the process.
func (x *execution) start(ctx context.Context) (*processEvents, error) {
	c := x.command
	r := connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: c.Args[0], Args: c.Args[1:], Envs: c.Env},
		Stdin:   new(c.Stdin != nil), Numbered: true,
	})
	if c.Tag != "" {
		r.Msg.Tag = &c.Tag
	}
	if c.Dir != "" {
		r.Msg.Process.Cwd = &c.Dir
	}
	if c.Timeout > 0 {
		// The guest's deadline: that of ctx would also break off the stream.
		milliseconds := max(c.Timeout.Milliseconds(), 1)
		r.Header().Set("Connect-Timeout-Ms", strconv.FormatInt(milliseconds, 10))
	}
	s, err := x.guest.processes.Start(ctx, r)
	if err != nil {
		return nil, guestError(err)
	}
	return &processEvents{s.Receive, func() *processpb.ProcessEvent { return s.Msg().GetEvent() }, s.Err, s.Close}, nil
}

// first receives the first event of a started process, which has its id.
func (x *execution) first(stream *processEvents) error {
	if !stream.next() {
		err := stream.broken()
		if _, ok := errors.AsType[*UnreachableError](err); ok || final(err) {
			return err
		}
		return fmt.Errorf("%w; %w", err, ErrUnknownOutcome)
	}
	start := stream.event().GetStart()
	if start == nil {
		_ = stream.close() // it is of no use
		return errors.New("the guest did not say which process it started")
	}
	x.pid = start.GetPid()
	close(x.started)
	return nil
}

// selector selects the process.
func (x *execution) selector() *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: x.pid}}
}

// resume connects to the process again, and returns the events after the last one received.
func (x *execution) resume(ctx context.Context) (*processEvents, error) {
	wait, hint := x.guest.client.newBackOff(), time.Duration(0)
	var last error
	for {
		pause := wait.NextBackOff()
		if pause == wait.Stop {
			return nil, fmt.Errorf("process %d runs on, but the server was lost: %w", x.pid, last)
		}
		select {
		case <-time.After(max(pause, hint)):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		stream, err := x.connect(ctx, x.selector())
		if err == nil {
			if stream.next() { // the start, which comes again
				return stream, nil
			}
			err = stream.broken()
		}
		last, hint = guestError(err), 0
		if refused, ok := errors.AsType[*Error](last); ok && refused.temporary() {
			hint = refused.RetryAfter
		} else if final(last) {
			return nil, last
		}
	}
}

// broken closes a stream that has ended too early and returns why.
func (s *processEvents) broken() error {
	err := s.err()
	_ = s.close() // err has its error
	if err == nil {
		return io.ErrUnexpectedEOF
	}
	return guestError(err)
}

// follow handles events until the end of the process. Without that it returns an error.
func (x *execution) follow(stream *processEvents) error {
	for stream.next() {
		switch e := stream.event().GetEvent().(type) {
		case *processpb.ProcessEvent_Data:
			x.write(e.Data)
		case *processpb.ProcessEvent_Gap:
			x.skip(e.Gap)
		case *processpb.ProcessEvent_End:
			_ = stream.close() // nothing follows
			x.exit.Code = int(e.End.GetExitCode())
			if !e.End.GetExited() {
				x.exit.Code, x.exit.Signal = -1, signalOf(e.End.GetStatus())
			}
			return nil
		}
	}
	return stream.broken()
}

// write writes a chunk of output. An error ends the command.
func (x *execution) write(data *processpb.ProcessEvent_DataEvent) {
	to, chunk := x.command.Stdout, data.GetStdout()
	if e, ok := data.GetOutput().(*processpb.ProcessEvent_DataEvent_Stderr); ok {
		to, chunk = x.command.Stderr, e.Stderr
	}
	x.seq = data.GetSeq()
	x.received += uint64(len(chunk))
	if to == nil || x.failed {
		return
	}
	if _, err := to.Write(chunk); err != nil {
		x.failed = true
		x.stop(fmt.Errorf("write the output of the command: %w", err))
	}
}

// skip notes output that is lost.
func (x *execution) skip(gap *processpb.ProcessEvent_GapEvent) {
	x.seq = gap.GetLast()
	lost := gap.GetBytes()
	if total := gap.GetTotal(); lost == 0 && total > x.received {
		lost = total - x.received
	}
	x.received += lost
	x.exit.Lost += lost
}

// sendInput sends standard input until its end or the command's. An error ends the command.
func (x *execution) sendInput(ctx context.Context) {
	buf := make([]byte, inputPiece)
	for {
		n, err := x.command.Stdin.Read(buf)
		if n > 0 {
			input := &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: buf[:n]}}
			failed := x.guest.retry(ctx, func() error {
				_, err := x.guest.processes.SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{
					Process: x.selector(), Input: input,
				}))
				return guestError(err)
			})
			if failed != nil {
				x.inputFailed(failed)
				return
			}
		}
		switch {
		case err == nil:
			continue
		case !errors.Is(err, io.EOF):
			x.stop(fmt.Errorf("read standard input: %w", err))
			return
		}
		x.inputFailed(x.guest.retry(ctx, func() error {
			_, err := x.guest.processes.CloseStdin(ctx, connect.NewRequest(&processpb.CloseStdinRequest{Process: x.selector()}))
			return guestError(err)
		}))
		return
	}
}

// inputFailed ends the command if it may have missed a part of its standard input.
func (x *execution) inputFailed(err error) {
	if failed, ok := errors.AsType[*GuestError](err); ok {
		switch failed.Code {
		case connect.CodeFailedPrecondition.String(), connect.CodeNotFound.String():
			return // it has closed its standard input, or has ended
		}
	}
	if err != nil {
		x.stop(fmt.Errorf("send standard input to the command: %w", err))
	}
}

// interrupt ends the command, and returns when over is closed or after the last attempt.
func (x *execution) interrupt(ctx context.Context, over <-chan struct{}) {
	select {
	case <-x.started:
	case <-over:
		return
	case <-time.After(endTimeout):
		return
	}
	for _, signal := range []processpb.Signal{processpb.Signal_SIGNAL_SIGTERM, processpb.Signal_SIGNAL_SIGKILL} {
		sending, cancel := context.WithTimeout(ctx, endTimeout)
		// After an error, the next signal is the next attempt.
		_, _ = x.guest.processes.SendSignal(sending, connect.NewRequest(&processpb.SendSignalRequest{
			Process: x.selector(), Signal: signal,
		}))
		cancel()
		select {
		case <-over:
			x.killRest(ctx)
			return
		case <-time.After(endGrace):
		}
	}
}

// killRest kills what the command has started and has left behind.
func (x *execution) killRest(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	// After an error there is nothing left, or no way to it.
	_, _ = x.guest.processes.SendSignal(ctx, connect.NewRequest(&processpb.SendSignalRequest{
		Process: x.selector(), Signal: processpb.Signal_SIGNAL_SIGKILL,
	}))
}

// signalOf returns the number of the signal in the status of a process, 0 if there is none.
func signalOf(status string) int {
	name := strings.TrimSuffix(strings.TrimPrefix(status, "signal: "), " (core dumped)")
	for i, known := range []string{
		"hangup", "interrupt", "quit", "illegal instruction", "trace/breakpoint trap", "aborted", "bus error",
		"floating point exception", "killed", "user defined signal 1", "segmentation fault", "user defined signal 2",
		"broken pipe", "alarm clock", "terminated",
	} {
		if name == known {
			return i + 1
		}
	}
	n, err := strconv.Atoi(strings.TrimPrefix(name, "signal "))
	if err != nil {
		return 0
	}
	return n
}
