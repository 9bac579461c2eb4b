package nsjail

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/cgroup"
	"github.com/bullpen-run/bullpen/worker/jail/disk"
	"github.com/bullpen-run/bullpen/worker/jail/egress"
	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

// sandbox is one jail. One goroutine prepares it, then one uses it.
type sandbox struct {
	m         *Maker
	uids      *uidPair
	childUIDs []*uidPair // of the jails that are forked from this one; nil if there are none
	group     *cgroup.Group
	zygote    *zygote // the jail was forked from it; nil if nsjail created the jail
	// creatorLog returns what the process that forked the jail has logged since the order.
	creatorLog func() string
	proc       *os.Process // nsjail
	log        *os.File    // nsjail's
	conn       *net.UnixConn
	frames     *bufio.Reader    // reads from conn, after the first frame
	oom        *cgroup.OOMWatch // nil on version 2
	volumes    []*disk.Volume
	link       *egress.Link // nil if the network is blocked
	data       jail.Data    // nil if there are no mounts
	spec       jail.Spec
	prewarmed  *interpreter // nil if none waits
	loaded     bool         // the program was sent to prewarmed
	before     cgroup.Usage // what nsjail and the init had used when ready
	ready      bool         // the init is ready and the limits are in force
	initPID    int
	initFD     int // pidfd; 0 before the init exists, -1 after

	mu    sync.Mutex
	used  bool // by Run or Close
	why   reason
	cause error // cause of reason cancelled
	// uncharged is the memory in bytes for which the jail was killed, of reason unchargedMemory.
	uncharged int64
}

// reason is why the worker killed a jail, if it did.
type reason int

const (
	notKilled reason = iota
	timedOut
	cancelled
	oomEvent
	unchargedMemory
	evicted // because the host may run out of memory, whoever caused it
)

var errUsed = errors.New("run in jail: this jail has been used: prepare another")

// markUsed reports whether the jail was unused, and marks it used.
func (s *sandbox) markUsed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	unused := !s.used
	s.used = true
	return unused
}

// Run runs p; see jail.Jail.
func (s *sandbox) Run(ctx context.Context, p jail.Program) (jail.Outcome, error) {
	if !s.markUsed() {
		return jail.Outcome{}, errUsed
	}
	r := run{sandbox: s, program: p}
	o, err := r.run(ctx)
	// Only nsjail's own exit remains. No caller has to wait for it.
	go func() {
		if err := s.release(); err != nil {
			s.m.cfg.Log.Error("jail cleanup failed", "error", err)
		}
	}()
	if err != nil {
		return jail.Outcome{}, fmt.Errorf("run in jail: %w", err)
	}
	return o, nil
}

// Close kills the jail. A concurrent Run returns that it was cancelled.
func (s *sandbox) Close() error {
	if !s.markUsed() {
		s.stop(cancelled, errors.New("the jail was closed"))
		return nil
	}
	s.kill()
	return s.release()
}

// stop kills the jail and records the reason, unless one is recorded already.
func (s *sandbox) stop(why reason, cause error) {
	s.mu.Lock()
	if s.why == notKilled {
		s.why, s.cause = why, cause
	}
	s.mu.Unlock()
	s.kill()
}

// stopForHost kills the jail because it holds a number of bytes of the host's memory that its
// control group is not charged for.
func (s *sandbox) stopForHost(bytes int64) {
	s.mu.Lock()
	s.uncharged = bytes
	s.mu.Unlock()
	s.stop(unchargedMemory, nil)
}

// throttle limits the jail to a number of cores. It does nothing if the jail is being killed.
func (s *sandbox) throttle(cpu float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.why == notKilled && s.initFD > 0 {
		_ = s.group.Throttle(cpu)
	}
}

// kill kills the init. The kernel then kills everything in its namespace. Processes that wait for a
// mount die once it is aborted.
func (s *sandbox) kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.data != nil {
		s.data.Abort()
	}
	if s.initFD > 0 {
		if s.ready {
			_ = s.group.Unthrottle()
		}
		_ = unix.PidfdSendSignal(s.initFD, unix.SIGKILL, nil, 0)
	} else if s.proc != nil {
		_ = s.proc.Kill()
	}
}

// release waits for nsjail to exit and releases all resources.
func (s *sandbox) release() error {
	var errs []error
	if s.conn != nil {
		errs = append(errs, s.conn.Close())
	}
	errs = append(errs, s.awaitDeath())
	s.mu.Lock()
	if s.initFD > 0 {
		errs = append(errs, unix.Close(s.initFD))
	}
	s.initFD = -1
	s.mu.Unlock()
	if s.oom != nil {
		errs = append(errs, s.oom.Close())
	}
	for _, v := range s.volumes { // before the group, which their page cache is charged to
		errs = append(errs, v.Close())
	}
	if s.group != nil {
		errs = append(errs, s.group.Remove())
	}
	if s.link != nil {
		s.link.Close()
	}
	if s.prewarmed != nil {
		errs = append(errs, s.prewarmed.outputs.close())
	}
	if s.log != nil {
		errs = append(errs, s.log.Close())
	}
	switch {
	case s.uids == nil:
	case s.zygote != nil:
		s.zygote.release(s.uids, s.ready)
	case s.ready:
		s.m.uids.release(s.uids)
	default:
		// Processes of a jail that failed to start may still be dying. They hold the lock that is
		// closed here.
		errs = append(errs, s.m.uids.discard(s.uids))
	}
	for _, pair := range s.childUIDs { // not reused: other workers may need so many
		errs = append(errs, s.m.uids.discard(pair))
	}
	s.m.forget(s)
	return errors.Join(errs...)
}

// awaitDeath waits until nsjail, the init and all processes that the kernel kills with the init are
// dead. The caller must already have killed them.
func (s *sandbox) awaitDeath() (err error) {
	if s.proc != nil {
		_, err = s.proc.Wait()
		s.mu.Lock()
		s.proc = nil
		s.mu.Unlock()
	}
	if s.initFD <= 0 {
		return err
	}
	// The init is dead already, since nsjail outlives it, unless nsjail itself was killed.
	for {
		_, perr := unix.Poll([]unix.PollFd{{Fd: int32(s.initFD), Events: unix.POLLIN}}, -1)
		if !errors.Is(perr, unix.EINTR) {
			return errors.Join(err, perr)
		}
	}
}

// run is the state of one Run.
type run struct {
	*sandbox
	program jail.Program
	copies  sync.WaitGroup
	outputs [2]error
}

func (r *run) run(ctx context.Context) (jail.Outcome, error) {
	stopped := context.AfterFunc(ctx, func() { r.stop(cancelled, context.Cause(ctx)) })
	defer stopped()
	r.watchOOM()
	r.m.watch.add(r.sandbox)
	defer r.m.watch.remove(r.sandbox)
	o, err := r.converse()
	if err != nil {
		// Also if the program runs: an init that violates the protocol is not trusted.
		r.kill()
	}
	r.awaitOutput()
	o, err = r.classify(o, err)
	if r.link != nil { // no process of the jail is alive any more
		report := r.link.Close()
		o.Network = &proto.NetworkUsage{Traffic: report.Traffic, BlockedConnections: report.Blocked, BlockedTotal: report.BlockedTotal}
	}
	return o, err
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
		clock := time.AfterFunc(r.program.Timeout, func() { r.stop(timedOut, nil) })
		defer clock.Stop()
	}
	typ, payload, err := r.receive()
	o := jail.Outcome{Duration: time.Since(started)}
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

// oomKilled reports whether the kernel's OOM killer killed a process of the jail, and for what: for
// the limit of the jail, or for the host.
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
	r.mu.Unlock()
	switch {
	case limit || why == oomEvent:
		o.Kind, o.ExitCode, o.Signal, o.Detail = jail.OutOfMemory, 0, 0, "the memory limit was exceeded"
	case host:
		o.Kind, o.ExitCode, o.Signal, o.Detail = jail.HostOutOfMemory, 0, 0, jail.ErrHostOutOfMemory.Error()
	case o.Kind != "":
	case why == unchargedMemory:
		o.Kind, o.Uncharged, o.Detail = jail.OutOfMemory, uncharged, "the host's kernel held memory for it that it was not charged for"
	case why == evicted:
		o.Kind, o.Detail = jail.HostOutOfMemory, "the host's kernel held much memory that nobody is charged for, and it is not known for whom"
	case why == timedOut:
		o.Kind, o.Detail = jail.TimedOut, "timed out after "+r.program.Timeout.String()
	case why == cancelled:
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
	frame, err := encode(wire.Start, r.program)
	if err != nil {
		return err
	}
	out, err := r.order(frame)
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

// outputs are the worker's ends of the stdout and stderr pipes.
type outputs [2]*os.File

func (o outputs) close() error { return errors.Join(o[0].Close(), o[1].Close()) }

// order sends the init a frame that starts a process, with new pipes and other descriptors. The
// init receives the pipes with the frame, and nsjail never has them. They therefore end with the
// jail's last process, not with nsjail.
func (s *sandbox) order(frame []byte, more ...int) (outputs, error) {
	return s.withPipes(func(ends []int) error { return writeFrame(s.conn, frame, append(ends, more...)) })
}

// writeFrame writes a frame with descriptors.
func writeFrame(to *net.UnixConn, frame []byte, fds []int) error {
	n, _, err := to.WriteMsgUnix(frame, unix.UnixRights(fds...), nil)
	if err == nil && n < len(frame) {
		_, err = to.Write(frame[n:])
	}
	return err
}

// withPipes creates pipes and calls send with the program's ends. send passes them on; withPipes
// then closes them in this process.
func (s *sandbox) withPipes(send func(ends []int) error) (out outputs, err error) {
	ends := []int{-1, -1}
	defer func() {
		for i, fd := range ends {
			if fd >= 0 {
				_ = unix.Close(fd)
			}
			if err != nil && out[i] != nil {
				_ = out[i].Close()
			}
		}
	}()
	for i := range ends {
		if out[i], ends[i], err = pipe(); err != nil {
			return out, fmt.Errorf("make a pipe: %w", err)
		}
		// Owned by the program, so that it can reopen /dev/stdout.
		if err := unix.Fchown(ends[i], s.uids.first+1, s.uids.first+1); err != nil {
			return out, fmt.Errorf("make a pipe: %w", err)
		}
	}
	return out, send(ends)
}

// pipe returns the worker's end, which the runtime polls, and the program's end, which blocks like
// any other stdout.
func pipe() (out *os.File, in int, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, -1, err
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return nil, -1, errors.Join(err, unix.Close(fds[0]), unix.Close(fds[1]))
	}
	return os.NewFile(uintptr(fds[0]), "output"), fds[1], nil
}

// receive reads one frame from the init.
func (s *sandbox) receive() (byte, []byte, error) {
	var h [wire.HeaderSize]byte
	if _, err := io.ReadFull(s.frames, h[:]); err != nil {
		return 0, nil, err
	}
	typ, n, ok := wire.ParseHeader(h, wire.MaxToWorker)
	if !ok {
		return 0, nil, errors.New("the init sent a frame of a wrong size")
	}
	payload := make([]byte, n)
	_, err := io.ReadFull(s.frames, payload)
	return typ, payload, err
}

// ignoreEnd returns nil for the end of the stream. Its meaning follows from why the jail died.
func ignoreEnd(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return nil
	}
	return err
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

const (
	// pipeBytes is how much of an output the kernel buffers, in memory charged to the jail. It lets
	// a program print a lot at once without blocking.
	pipeBytes = 1 << 20
	readBytes = 64 << 10
)

// readBuffers holds buffers for reading outputs, so that an execution allocates none.
var readBuffers = sync.Pool{New: func() any { return new([readBytes]byte) }}

// drain copies a pipe to w until its end. If w fails, drain discards the rest, so that the program
// does not block.
func drain(w io.Writer, out *os.File) error {
	defer func() { _ = out.Close() }()
	if w == nil {
		w = io.Discard
	}
	growPipe(out)
	buffer := readBuffers.Get().(*[readBytes]byte)
	defer readBuffers.Put(buffer)
	// Wrapped in a plain Reader, so that w receives data as soon as it arrives.
	_, err := io.CopyBuffer(w, struct{ io.Reader }{out}, buffer[:])
	if err != nil {
		_, _ = io.Copy(io.Discard, out)
	}
	return err
}

// growPipe sets the size of a pipe to pipeBytes, if the host allows it. A smaller pipe only fills
// up sooner.
func growPipe(out *os.File) {
	if conn, err := out.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, pipeBytes) })
	}
}

// encode returns a frame of type typ with the program p.
func encode(typ byte, p jail.Program) ([]byte, error) {
	s := wire.StartFrame{Argv: p.Argv, Env: p.Env, Dir: p.Dir, Stdin: wire.NoInput, UID: jail.ProgramID, GID: jail.ProgramID}
	if len(p.Stdin) > 0 {
		s.Stdin = jail.StdinFile
		s.Files = append(s.Files, wire.File{Path: jail.StdinFile, Mode: 0o644, Owner: wire.OwnerInit, Content: p.Stdin})
	}
	for _, f := range p.Files {
		owner := wire.OwnerProgram
		if f.Owner == jail.OwnerInit {
			owner = wire.OwnerInit
		}
		s.Files = append(s.Files, wire.File{Path: f.Path, Mode: f.Mode, Owner: owner, Content: f.Content})
	}
	frame := s.Encode(typ)
	if len(frame) > wire.MaxToInit {
		return nil, fmt.Errorf("the program is %d bytes, more than the %d that fit", len(frame), wire.MaxToInit)
	}
	if _, ok := wire.ParseOrder(frame[wire.HeaderSize:]); !ok {
		return nil, errors.New("a name, an argument or a variable of the program has a zero byte")
	}
	return frame, nil
}
