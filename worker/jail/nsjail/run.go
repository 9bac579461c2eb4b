package nsjail

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// run is the state of one Run.
type run struct {
	*sandbox
	program jail.Program
	copies  sync.WaitGroup
	outputs [2]error
	sent    chan struct{} // closed when the init has been sent the program
	over    chan struct{} // closed at the end of the run
}

func (r *run) run(ctx context.Context) (jail.Outcome, error) {
	defer context.AfterFunc(ctx, func() { r.stop(stopped, context.Cause(ctx)) })()
	select {
	case <-r.program.Cancel:
		r.stop(cancelled, nil) // it has not started
	default:
		go r.awaitCancel()
	}
	defer r.endGrace()
	r.watchOOM()
	r.m.watch.add(r.sandbox)
	defer r.m.watch.remove(r.sandbox)
	var o jail.Outcome
	var err error
	if ctx.Err() == nil {
		o, err = r.converse()
	} else { // too late for the order: nothing of the program runs
		r.stop(stopped, context.Cause(ctx))
	}
	if err != nil {
		// Also if the program runs: an init that violates the protocol is not trusted.
		r.kill()
	}
	r.awaitOutput()
	o, err = r.classify(o, err)
	if r.link != nil { // no process of the jail is alive any more
		report := r.link.Close()
		o.Network = &proto.NetworkUsage{
			Traffic: report.Traffic, BlockedConnections: report.Blocked, BlockedTotal: report.BlockedTotal,
		}
	}
	return o, err
}

// awaitCancel ends the program when it is cancelled.
func (r *run) awaitCancel() {
	select {
	case <-r.program.Cancel:
		r.terminate(cancelled, r.program.CancelGrace)
	case <-r.over:
	}
}

// terminate sends the program SIGTERM, and kills the jail after grace, or immediately if that is 0.
// It does nothing if the program is already being ended.
func (r *run) terminate(why reason, grace time.Duration) {
	r.mu.Lock()
	first := r.why == notEnded
	if first {
		r.why = why
	}
	graceful := first && grace > 0 && !r.ended
	if graceful {
		r.graceful, r.kills = true, time.AfterFunc(grace, r.kill)
	}
	r.mu.Unlock()
	switch {
	case !first:
	case graceful:
		select {
		case <-r.sent:
			// The init passes both on as soon as the program runs. A stopped program gets SIGTERM when it
			// continues. An error means that the jail is dying.
			_, _ = r.conn.Write(append(wire.SignalFrame(uint32(unix.SIGTERM)), wire.SignalFrame(uint32(unix.SIGCONT))...))
		case <-r.over:
		}
	default:
		r.kill()
	}
}

// endGrace is called at the end of the run: neither a cancel nor the end of a grace has an effect from
// then on.
func (r *run) endGrace() {
	close(r.over)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.kills != nil {
		r.kills.Stop()
	}
}

// converse sends the program and reads the init's frames until the program's end. If the stream
// ends before, Kind is empty.
func (r *run) converse() (jail.Outcome, error) {
	if r.program.LowWeight {
		if err := r.group.LowerWeight(); err != nil {
			return jail.Outcome{}, err
		}
	}
	if err := r.send(); err != nil {
		return jail.Outcome{}, ignoreEnd(err)
	}
	close(r.sent)
	typ, payload, err := r.receive()
	if err != nil {
		return jail.Outcome{}, ignoreEnd(err)
	}
	switch typ {
	case wire.Failed:
		if f, ok := wire.ParseFailed(payload); ok {
			return jail.Outcome{Kind: jail.StartFailed, Step: f.Step, Detail: syscall.Errno(f.Errno).Error()}, nil
		}
	case wire.Started:
		return r.awaitEnd()
	}
	return jail.Outcome{}, fmt.Errorf("the init sent an unknown frame %q", typ)
}

// awaitEnd reads how the program ended, and then waits until all other processes have ended.
// Nothing that happens in between, even to the init, changes the outcome.
func (r *run) awaitEnd() (jail.Outcome, error) {
	started := time.Now()
	if r.program.Timeout > 0 {
		clock := time.AfterFunc(r.program.Timeout, func() { r.terminate(timedOut, r.program.TimeoutGrace) })
		defer clock.Stop()
	}
	typ, payload, err := r.receive()
	o := jail.Outcome{Duration: time.Since(started)}
	r.mu.Lock()
	r.ended = true
	r.mu.Unlock()
	r.m.watch.remove(r.sandbox) // which may have paused it
	if err != nil {
		return o, ignoreEnd(err)
	}
	e, ok := wire.ParseExited(payload)
	if typ != wire.Exited || !ok {
		return o, fmt.Errorf("the init sent an unknown frame %q", typ)
	}
	o.MemoryPeak = int64(e.MaxRSSKiB) << 10 // replaced by the control group's value if it has one
	switch {
	case e.BySeccomp:
		o.Kind, o.Signal, o.Detail = jail.Seccomp, int(e.Signal), "the program made a system call that no program may make"
	case e.Signal != 0:
		o.Kind, o.Signal = jail.Signaled, int(e.Signal)
	default:
		o.Kind, o.ExitCode = jail.Exited, int(e.Code)
	}
	if r.frames.Buffered() == 0 {
		// The remaining processes die sooner if they and the init are not throttled.
		if err := r.group.Unthrottle(); err != nil {
			return o, err
		}
	}
	typ, _, err = r.receive()
	switch {
	case err != nil:
		// The init was killed before it was done: by the timeout, by Close, or by the OOM killer.
		return o, errors.Join(ignoreEnd(err), r.awaitDeath())
	case typ != wire.Empty:
		return o, fmt.Errorf("the init sent an unknown frame %q", typ)
	}
	return o, nil
}

// oomKilled reports whether the kernel's OOM killer killed a process of the jail because of the
// jail's limit, or because of the host.
func (s *sandbox) oomKilled() (limit, host bool) {
	if s.group == nil {
		return false, false
	}
	usage, err := s.group.Usage()
	if err != nil {
		return false, false
	}
	if usage.LimitOOMs > 0 || s.oom != nil && s.oom.Reached() {
		return usage.OOMKills > 0, false
	}
	if s.zygote != nil && usage.OOMKills == 0 {
		// A forked jail dies with its zygote.
		if above, err := s.zygote.jail.group.Usage(); err == nil {
			return false, above.OOMKills > 0 && !s.zygote.jail.Alive()
		}
	}
	return false, usage.OOMKills > 0
}

// classify returns the outcome with the resources used. If the kernel's OOM killer killed any
// process in the jail, the outcome is out of memory. A report of the init is always true, since an
// init that the worker has killed cannot send one.
func (r *run) classify(o jail.Outcome, err error) (jail.Outcome, error) {
	if o.Kind == "" {
		// Killed, by the worker or by the kernel: wait until all processes are dead.
		err = errors.Join(err, r.awaitDeath())
	}
	usage, uerr := r.group.Usage()
	limit, host := r.oomKilled()
	o.CPUTime = max(0, usage.CPUTime-r.before.CPUTime)
	// At most the allowance for bullpen's own processes is subtracted. The rest of their peak is
	// page cache, which is reclaimed. The group may report nothing for a small program, since it
	// counts in batches. The init's value also includes pages of the host's files.
	if peak := usage.MemoryPeak - min(r.before.MemoryPeak, r.ownMemory()); peak > 0 {
		o.MemoryPeak = peak
	}
	r.mu.Lock()
	why, cause, uncharged := r.why, r.cause, r.uncharged
	graceful := r.graceful && (o.Kind == jail.Exited || o.Kind == jail.Signaled)
	r.mu.Unlock()
	switch {
	case limit || why == oomEvent:
		o.Kind, o.ExitCode, o.Signal, o.Detail = jail.OutOfMemory, 0, 0, "the memory limit was exceeded"
	case host:
		o.Kind, o.ExitCode, o.Signal, o.Detail = jail.HostOutOfMemory, 0, 0, jail.ErrHostOutOfMemory.Error()
	case o.Kind != "" && !graceful:
	case why == unchargedMemory:
		o.Kind, o.Uncharged, o.Detail = jail.OutOfMemory, uncharged,
			"the host's kernel held memory for it that it was not charged for"
	case why == timedOut:
		o.Kind, o.Graceful, o.Detail = jail.TimedOut, graceful, "timed out after "+r.program.Timeout.String()
	case why == cancelled:
		o.Kind, o.Graceful, o.Detail = jail.Cancelled, graceful, "the program was cancelled"
	case why == stopped:
		o.Kind, o.Detail = jail.Killed, cause.Error()
	case err == nil:
		err = fmt.Errorf("the init died without a report: %s", r.diagnostics())
	}
	if werr := errors.Join(r.outputs[:]...); werr != nil {
		err = errors.Join(err, fmt.Errorf("copy the output: %w", werr))
	}
	return o, errors.Join(err, uerr)
}

// send sends the program to the init. A waiting interpreter continues with it if it can.
func (r *run) send() error {
	if err := r.load(r.program); err != nil {
		return err
	}
	if r.loaded {
		r.copyOutput(r.prewarmed.outputs)
		r.prewarmed = nil
		_, err := r.conn.Write(wire.Frame(wire.Begin, nil))
		return ignoreEnd(err) // a frame that was sent may contain the reason
	}
	frame, err := encode(wire.Start, r.program, r.spec.Guest)
	if err != nil {
		return err
	}
	more := ofGuest(r.program)
	if more != nil {
		executable, err := r.executable()
		if err != nil {
			return err
		}
		more = slices.Insert(more, 1, executable...)
	}
	out, err := r.order(frame, more...)
	if err != nil {
		return err
	}
	r.copyOutput(out)
	return nil
}

// copyOutput starts to copy the program's output.
func (r *run) copyOutput(out outputs) {
	for i, w := range []io.Writer{r.program.Stdout, r.program.Stderr} {
		r.copies.Go(func() { r.outputs[i] = drain(w, out[i]) })
	}
}

// awaitOutput waits until the output is copied. A jail whose init was killed can leave its pipes to
// Unix sockets that are only in each other's queues. The kernel looks for those when any Unix
// socket is closed.
func (r *run) awaitOutput() {
	done := make(chan struct{})
	go func() {
		r.copies.Wait()
		close(done)
	}()
	for tick := time.Tick(20 * time.Millisecond); ; {
		select {
		case <-done:
			return
		case <-tick:
			if fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err == nil {
				_, _ = unix.Close(fds[0]), unix.Close(fds[1])
			}
		}
	}
}

// watchOOM kills the jail when it reaches its memory limit, if the kernel does not do so.
func (r *run) watchOOM() {
	if r.oom == nil {
		return
	}
	go func() {
		if r.oom.Await() {
			r.stop(oomEvent, nil)
		}
	}()
}
