package process

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/account"
	"github.com/bullpen-run/bullpen/guest/processpb"
)

// Keep-alive intervals that clients may ask for.
const (
	defaultKeepAlive = 90 * time.Second
	minKeepAlive     = time.Second
)

// Service is the service process.Process.
type Service struct{ *Table }

// List returns the running processes in the order in which they were started.
func (s Service) List(
	context.Context, *connect.Request[processpb.ListRequest],
) (*connect.Response[processpb.ListResponse], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	answer := &processpb.ListResponse{}
	for _, p := range s.running {
		info := &processpb.ProcessInfo{Config: p.config, Pid: uint32(p.pid)}
		if p.tag != "" {
			info.Tag = &p.tag
		}
		answer.Processes = append(answer.Processes, info)
	}
	return connect.NewResponse(answer), nil
}

// Start starts a process and streams its events. The deadline of ctx is also the process's.
func (s Service) Start(
	ctx context.Context, r *connect.Request[processpb.StartRequest], out *connect.ServerStream[processpb.StartResponse],
) error {
	user, err := userOf(s.Users, r.Header())
	if err != nil {
		return err
	}
	release, err := s.acquire(&s.streams, maxStreams, "clients connected to processes")
	if err != nil {
		return err
	}
	defer release()
	var timeout time.Duration
	if deadline, ok := ctx.Deadline(); ok {
		timeout = max(time.Until(deadline), time.Nanosecond)
	}
	p, reader, err := s.start(user, r.Msg, timeout)
	if err != nil {
		return err
	}
	defer reader.close()
	e := events{
		pid: p.pid, reader: reader, numbered: r.Msg.GetNumbered(), keepAlive: keepAlive(r.Header()),
		end: func() *processpb.ProcessEvent_EndEvent { <-p.done; return p.event },
		send: func(e *processpb.ProcessEvent) error {
			return out.Send(&processpb.StartResponse{Event: e})
		},
	}
	return e.stream(ctx)
}

// Connect streams the events of a process, also of one that has ended.
func (s Service) Connect(
	ctx context.Context, r *connect.Request[processpb.ConnectRequest],
	out *connect.ServerStream[processpb.ConnectResponse],
) error {
	release, err := s.acquire(&s.streams, maxStreams, "clients connected to processes")
	if err != nil {
		return err
	}
	defer release()
	p, ended, err := s.find(r.Msg.GetProcess())
	if err != nil {
		return err
	}
	e := events{
		numbered: r.Msg.AfterSeq != nil, keepAlive: keepAlive(r.Header()),
		send: func(e *processpb.ProcessEvent) error {
			return out.Send(&processpb.ConnectResponse{Event: e})
		},
	}
	var output *output
	if p != nil {
		e.pid, output = p.pid, p.out
		e.end = func() *processpb.ProcessEvent_EndEvent { <-p.done; return p.event }
	} else {
		e.pid, output = ended.pid, ended.out
		e.end = func() *processpb.ProcessEvent_EndEvent { return ended.event }
	}
	if e.numbered {
		after := r.Msg.GetAfterSeq()
		if last := output.written(); after > last {
			return connect.NewError(connect.CodeOutOfRange,
				fmt.Errorf("after_seq is %d, but process %d has written %d chunks", after, e.pid, last))
		}
		e.reader = output.readAfter(after)
	} else {
		e.reader = output.readAll()
	}
	defer e.reader.close()
	return e.stream(ctx)
}

// events sends the events of a process to a client.
type events struct {
	pid       int
	reader    *reader
	numbered  bool
	keepAlive time.Duration
	end       func() *processpb.ProcessEvent_EndEvent // is called when the output has ended
	send      func(*processpb.ProcessEvent) error
}

// stream sends events until the process ends or ctx does.
func (e *events) stream(ctx context.Context) error {
	start := &processpb.ProcessEvent_StartEvent{Pid: uint32(e.pid)}
	if err := e.send(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Start{Start: start}}); err != nil {
		return err
	}
	timer := time.NewTimer(e.keepAlive)
	defer timer.Stop()
	for {
		if err := ctx.Err(); err != nil {
			return contextError(err)
		}
		c, ok, ended, more := e.reader.read()
		switch {
		case ok:
			if err := e.sendChunk(c); err != nil {
				return err
			}
			timer.Reset(e.keepAlive)
			continue
		case ended:
			return e.send(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_End{End: e.end()}})
		}
		select {
		case <-more:
		case <-ctx.Done():
			return contextError(ctx.Err())
		case <-timer.C:
			alive := &processpb.ProcessEvent_Keepalive{Keepalive: &processpb.ProcessEvent_KeepAlive{}}
			if err := e.send(&processpb.ProcessEvent{Event: alive}); err != nil {
				return err
			}
			timer.Reset(e.keepAlive)
		}
	}
}

// sendChunk sends a chunk. Clients that know no gaps get the error of one: they must not take what they
// have for everything.
func (e *events) sendChunk(c chunk) error {
	if c.gap != nil {
		if !e.numbered {
			return connect.NewError(connect.CodeDataLoss, fmt.Errorf(
				"%d bytes of output were lost (chunks %d to %d): the client has not read for %d seconds",
				c.gap.bytes, c.gap.first, c.gap.last, int(stallAfter.Seconds())))
		}
		event := &processpb.ProcessEvent_GapEvent{
			First: c.gap.first, Last: c.gap.last, Bytes: c.gap.bytes, Total: c.gap.total,
		}
		return e.send(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Gap{Gap: event}})
	}
	data := &processpb.ProcessEvent_DataEvent{}
	switch c.from {
	case stdout:
		data.Output = &processpb.ProcessEvent_DataEvent_Stdout{Stdout: c.data}
	case stderr:
		data.Output = &processpb.ProcessEvent_DataEvent_Stderr{Stderr: c.data}
	case terminal:
		data.Output = &processpb.ProcessEvent_DataEvent_Pty{Pty: c.data}
	}
	if e.numbered {
		data.Seq = c.seq
	}
	return e.send(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Data{Data: data}})
}

// Update changes the size of a terminal.
func (s Service) Update(
	_ context.Context, r *connect.Request[processpb.UpdateRequest],
) (*connect.Response[processpb.UpdateResponse], error) {
	p, err := s.findRunning(r.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if size := r.Msg.GetPty().GetSize(); size != nil {
		if p.pty == nil {
			return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("process %d has no terminal", p.pid))
		}
		if err := resize(p.pty, size); err != nil {
			return nil, connect.NewError(connect.CodeInternal, fmt.Errorf("set the size of the terminal: %w", err))
		}
	}
	return connect.NewResponse(&processpb.UpdateResponse{}), nil
}

// SendInput writes to a process. It returns when the process, or the pipe to it, has taken everything.
func (s Service) SendInput(
	ctx context.Context, r *connect.Request[processpb.SendInputRequest],
) (*connect.Response[processpb.SendInputResponse], error) {
	release, err := s.acquire(&s.inputs, maxInputs, "requests that write to processes")
	if err != nil {
		return nil, err
	}
	defer release()
	p, err := s.findRunning(r.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if err := p.write(ctx, r.Msg.GetInput()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&processpb.SendInputResponse{}), nil
}

// StreamInput writes to a process what messages contain.
func (s Service) StreamInput(
	ctx context.Context, in *connect.ClientStream[processpb.StreamInputRequest],
) (*connect.Response[processpb.StreamInputResponse], error) {
	release, err := s.acquire(&s.inputs, maxInputs, "requests that write to processes")
	if err != nil {
		return nil, err
	}
	defer release()
	var p *running
	for in.Receive() {
		switch e := in.Msg().GetEvent().(type) {
		case *processpb.StreamInputRequest_Start:
			if p, err = s.findRunning(e.Start.GetProcess()); err != nil {
				return nil, err
			}
		case *processpb.StreamInputRequest_Data:
			if p == nil {
				return nil, invalid("the first message must select a process")
			}
			if err := p.write(ctx, e.Data.GetInput()); err != nil {
				return nil, err
			}
		}
	}
	if err := in.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&processpb.StreamInputResponse{}), nil
}

// write writes to the standard input or the terminal of a process.
func (p *running) write(ctx context.Context, i *processpb.ProcessInput) error {
	var data []byte
	switch i := i.GetInput().(type) {
	case *processpb.ProcessInput_Stdin:
		if p.pty != nil {
			return connect.NewError(connect.CodeInternal, fmt.Errorf("process %d has a terminal: send pty", p.pid))
		}
		data = i.Stdin
	case *processpb.ProcessInput_Pty:
		if p.pty == nil {
			return connect.NewError(connect.CodeInternal, fmt.Errorf("process %d has no terminal: send stdin", p.pid))
		}
		data = i.Pty
	default:
		return invalid("input: neither stdin nor pty is given")
	}
	closed := connect.NewError(connect.CodeFailedPrecondition,
		fmt.Errorf("standard input of process %d is closed", p.pid))
	if p.input == nil {
		return closed
	}
	err := p.input.write(ctx, data)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return contextError(ctx.Err())
	case errors.Is(err, unix.EPIPE), errors.Is(err, unix.EIO), errors.Is(err, os.ErrClosed):
		return closed
	}
	return connect.NewError(connect.CodeInternal, fmt.Errorf("write to process %d: %w", p.pid, err))
}

// CloseStdin closes the standard input of a process. Closing it again has no effect.
func (s Service) CloseStdin(
	_ context.Context, r *connect.Request[processpb.CloseStdinRequest],
) (*connect.Response[processpb.CloseStdinResponse], error) {
	p, err := s.findRunning(r.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if p.pty != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition,
			fmt.Errorf("process %d has a terminal, which cannot be closed: send the character for end of file", p.pid))
	}
	if p.input != nil {
		_ = p.input.file.Close()
	}
	return connect.NewResponse(&processpb.CloseStdinResponse{}), nil
}

// SendSignal ends a process and everything that it has started. The leader need not be alive any more.
func (s Service) SendSignal(
	ctx context.Context, r *connect.Request[processpb.SendSignalRequest],
) (*connect.Response[processpb.SendSignalResponse], error) {
	signal := r.Msg.GetSignal()
	if signal != processpb.Signal_SIGNAL_SIGKILL && signal != processpb.Signal_SIGNAL_SIGTERM {
		return nil, connect.NewError(connect.CodeUnimplemented,
			fmt.Errorf("signal %v is not supported, only SIGNAL_SIGKILL and SIGNAL_SIGTERM", signal))
	}
	p, ended, err := s.find(r.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	var g group
	if p != nil {
		g = p.group
		p.markSignalled()
	} else {
		g = ended.group
	}
	// A client that gives up does not stop the killing.
	limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
	defer cancel()
	var found bool
	if signal == processpb.Signal_SIGNAL_SIGTERM {
		found, err = g.terminate(limit, s.view())
	} else {
		found, err = g.kill(limit, s.view())
	}
	if err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	if p != nil && signal == processpb.Signal_SIGNAL_SIGKILL {
		select {
		case <-p.done: // it is no longer listed
		case <-limit.Done():
		}
	}
	if !found && ended != nil {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("process %d has ended", ended.pid))
	}
	return connect.NewResponse(&processpb.SendSignalResponse{}), nil
}

// userOf returns the user of a request.
func userOf(users *account.Users, h http.Header) (account.User, error) {
	user, err := users.Of(h)
	if err != nil {
		return user, connect.NewError(connect.CodeUnauthenticated, err)
	}
	return user, nil
}

// keepAlive returns the interval of keep-alive events that a client asks for.
func keepAlive(h http.Header) time.Duration {
	seconds, err := strconv.Atoi(h.Get("Keepalive-Ping-Interval"))
	if err != nil || seconds <= 0 {
		return defaultKeepAlive
	}
	return max(min(time.Duration(seconds)*time.Second, time.Hour), minKeepAlive)
}

func contextError(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return connect.NewError(connect.CodeDeadlineExceeded, err)
	}
	return connect.NewError(connect.CodeCanceled, err)
}
