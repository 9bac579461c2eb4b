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
	childUIDs []*uidPair // of the jails that are forked from this one; nil where none are
	group     *cgroup.Group
	zygote    *zygote       // the jail was forked from it; nil if nsjail created the jail
	said      func() string // what who was ordered to fork it has said since
	proc      *os.Process   // nsjail
	log       *os.File      // nsjail's
	conn      *net.UnixConn
	frames    *bufio.Reader // of conn, after the first
	oom       *os.File      // see cgroup.WatchOOM
	volumes   []*disk.Volume
	link      *egress.Link // nil where the network is blocked
	spec      jail.Spec
	ahead     *interpreter // nil where none waits
	loaded    bool         // it was told of its program
	before    cgroup.Usage // what nsjail and the init had used when ready
	ready     bool         // the init is there and the limits are in force
	initPID   int
	initFD    int // pidfd; 0 before there is an init, -1 after

	mu    sync.Mutex
	taken bool // by Run or Close
	why   reason
	cause error // of reason cancelled
}

// reason is why the worker killed a jail, if it did.
type reason int

const (
	notKilled reason = iota
	timedOut
	cancelled
	oomEvent
)

var errUsed = errors.New("run in jail: this jail has been used: prepare another")

// markUsed reports whether the jail was unused, and marks it used.
func (s *sandbox) markUsed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	free := !s.taken
	s.taken = true
	return free
}

// Run runs p; see jail.Jail.
func (s *sandbox) Run(ctx context.Context, p jail.Program) (jail.Outcome, error) {
	if !s.markUsed() {
		return jail.Outcome{}, errUsed
	}
	r := run{sandbox: s, program: p}
	o, err := r.run(ctx)
	// What is left is nsjail's own end. Nobody has to wait for it.
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

// Close kills the jail. A Run in progress returns that it was cancelled.
func (s *sandbox) Close() error {
	if !s.markUsed() {
		s.stop(cancelled, errors.New("the jail was closed"))
		return nil
	}
	s.kill()
	return s.release()
}

// stop kills the jail and records why, unless a reason is recorded already.
func (s *sandbox) stop(why reason, cause error) {
	s.mu.Lock()
	if s.why == notKilled {
		s.why, s.cause = why, cause
	}
	s.mu.Unlock()
	s.kill()
}

// kill kills the init, and the kernel all that is in its namespace.
func (s *sandbox) kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.initFD > 0 {
		if s.ready {
			_ = s.group.Unthrottle()
		}
		_ = unix.PidfdSendSignal(s.initFD, unix.SIGKILL, nil, 0)
	} else if s.proc != nil {
		_ = s.proc.Kill()
	}
}

// release waits for nsjail and releases all resources.
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
	if s.group != nil {
		errs = append(errs, s.group.Remove())
	}
	if s.link != nil {
		s.link.Close()
	}
	for _, v := range s.volumes {
		errs = append(errs, v.Close())
	}
	if s.ahead != nil {
		errs = append(errs, s.ahead.outputs.close())
	}
	if s.log != nil {
		errs = append(errs, s.log.Close())
	}
	switch {
	case s.uids == nil:
	case s.zygote != nil:
		s.zygote.release(s.uids, s.ready)
	case s.ready:
		s.m.uids.put(s.uids)
	default:
		// Of a jail that did not come up something may still be dying, and it
		// holds the lock that we let go.
		errs = append(errs, s.uids.lock.Close())
	}
	for _, pair := range s.childUIDs { // many: other workers of the host may want them
		errs = append(errs, pair.lock.Close())
	}
	s.m.forget(s)
	return errors.Join(errs...)
}

// awaitDeath waits until nsjail and the init, and with it all the kernel kills
// with an init, are dead. They are told to die elsewhere.
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
	// Dead already, since nsjail outlives it, unless nsjail itself was killed.
	for {
		_, perr := unix.Poll([]unix.PollFd{{Fd: int32(s.initFD), Events: unix.POLLIN}}, -1)
		if !errors.Is(perr, unix.EINTR) {
			return errors.Join(err, perr)
		}
	}
}

// run is one use of a sandbox.
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
	o, err := r.converse()
	if err != nil {
		// Also when the program runs: an init we do not understand is not trusted.
		r.kill()
	}
	r.copies.Wait()
	o, err = r.classify(o, err)
	if r.link != nil { // nothing of the jail lives any more
		report := r.link.Close()
		o.Network = &proto.NetworkUsage{Traffic: report.Traffic, BlockedConnections: report.Blocked}
	}
	return o, err
}

// converse sends the program and reads the init's frames until the program's
// end. An end of the stream without one leaves Kind empty.
func (r *run) converse() (jail.Outcome, error) {
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

// awaitEnd reads how the program ended, and then waits for the end of all else.
// What happens in between, even to the init, does not change the outcome.
func (r *run) awaitEnd() (jail.Outcome, error) {
	started := time.Now()
	if r.program.Timeout > 0 {
		clock := time.AfterFunc(r.program.Timeout, func() { r.stop(timedOut, nil) })
		defer clock.Stop()
	}
	typ, payload, err := r.receive()
	o := jail.Outcome{Duration: time.Since(started)}
	if err != nil {
		return o, ignoreEnd(err)
	}
	e, ok := wire.ParseExited(payload)
	if typ != wire.Exited || !ok {
		return o, fmt.Errorf("the init sent an unknown frame %q", typ)
	}
	o.MemoryPeak = int64(e.MaxRSSKiB) << 10 // until the control group is asked
	switch {
	case e.BySeccomp:
		o.Kind, o.Signal, o.Detail = jail.Seccomp, int(e.Signal), "the program made a system call that no sandboxed program may make"
	case e.Signal != 0:
		o.Kind, o.Signal = jail.Signaled, int(e.Signal)
	default:
		o.Kind, o.ExitCode = jail.Exited, int(e.Code)
	}
	if r.frames.Buffered() == 0 {
		// What is left dies sooner when it, and the init, need not wait for their share.
		if err := r.group.Unthrottle(); err != nil {
			return o, err
		}
	}
	typ, _, err = r.receive()
	switch {
	case err != nil:
		// The init was killed before it was done: by the clock, by Close, or for memory.
		return o, errors.Join(ignoreEnd(err), r.awaitDeath())
	case typ != wire.Empty:
		return o, fmt.Errorf("the init sent an unknown frame %q", typ)
	}
	return o, nil
}

// classify returns the outcome with the resources used. An oom kill of anything in
// the jail ends it as out of memory; a report of the init is always true, since
// an init that we killed cannot make one.
func (r *run) classify(o jail.Outcome, err error) (jail.Outcome, error) {
	if o.Kind == "" {
		// Killed, by us or by the kernel: wait until nothing is left of it.
		err = errors.Join(err, r.awaitDeath())
	}
	usage, uerr := r.group.Usage()
	o.CPUTime = max(0, usage.CPUTime-r.before.CPUTime)
	// At most what is allowed for ours is taken off: what there was beyond it is page cache, and
	// given up. Of a small program the group may not tell anything, since it counts
	// in batches; what the init tells has pages of the host's files in it, too.
	if peak := usage.MemoryPeak - min(r.before.MemoryPeak, r.own()); peak > 0 {
		o.MemoryPeak = peak
	}
	r.mu.Lock()
	why, cause := r.why, r.cause
	r.mu.Unlock()
	switch {
	case usage.OOMKills > 0 || why == oomEvent:
		o.Kind, o.ExitCode, o.Signal, o.Detail = jail.OutOfMemory, 0, 0, "the memory limit was exceeded"
	case o.Kind != "":
	case why == timedOut:
		o.Kind, o.Detail = jail.TimedOut, "timed out after "+r.program.Timeout.String()
	case why == cancelled:
		o.Kind, o.Detail = jail.Killed, cause.Error()
	case err == nil:
		err = fmt.Errorf("the init died without a report: %s", r.diagnostics())
	}
	if werr := errors.Join(r.outputs[:]...); werr != nil {
		err = errors.Join(err, fmt.Errorf("hand over the output: %w", werr))
	}
	return o, errors.Join(err, uerr)
}

// send sends the program to the init. A waiting interpreter continues with it if it can.
func (r *run) send() error {
	if err := r.load(r.program); err != nil {
		return err
	}
	if r.loaded {
		r.collect(r.ahead.outputs)
		r.ahead = nil
		_, err := r.conn.Write(wire.Frame(wire.Begin, nil))
		return ignoreEnd(err) // there may be something to be read that says why
	}
	frame, err := encode(wire.Start, r.program)
	if err != nil {
		return err
	}
	out, err := r.order(frame)
	if err != nil {
		return err
	}
	r.collect(out)
	return nil
}

// collect starts to copy the program's output.
func (r *run) collect(out outputs) {
	for i, w := range []io.Writer{r.program.Stdout, r.program.Stderr} {
		r.copies.Go(func() { r.outputs[i] = drain(w, out[i]) })
	}
}

// outputs are the worker's ends of the pipes of a stdout and a stderr.
type outputs [2]*os.File

func (o outputs) close() error { return errors.Join(o[0].Close(), o[1].Close()) }

// order sends the init a frame that starts something, with new pipes and what else
// belongs to it. The init gets the pipes with the frame, and nsjail never has them:
// their end is the end of the jail's last process, not of nsjail.
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

// withPipes calls send with the program's ends of new pipes, which are to go to where
// it will be, and are closed here then.
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
		// The program's own, so that it can open /dev/stdout again.
		if err := unix.Fchown(ends[i], s.uids.first+1, s.uids.first+1); err != nil {
			return out, fmt.Errorf("make a pipe: %w", err)
		}
	}
	return out, send(ends)
}

// pipe returns our end, which the runtime polls, and the program's, which must
// block like any other stdout.
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

// receive reads one frame of the init.
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

// ignoreEnd turns the end of the stream into no error: what it means is found
// out from why the jail died.
func ignoreEnd(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return nil
	}
	return err
}

// watchOOM kills the jail when its memory limit is hit, where the kernel does
// not do that by itself.
func (r *run) watchOOM() {
	if r.oom == nil {
		return
	}
	go func() {
		var n [8]byte
		if _, err := r.oom.Read(n[:]); err == nil {
			r.stop(oomEvent, nil)
		}
	}()
}

const (
	// pipeBytes is how much of an output waits in the kernel, in memory that counts as
	// the jail's: a program that prints a lot at once is not held up piece by piece.
	pipeBytes = 1 << 20
	readBytes = 64 << 10
)

// readBuffers are for what is read of outputs, so that an execution makes none.
var readBuffers = sync.Pool{New: func() any { return new([readBytes]byte) }}

// drain copies a pipe to w until its end. If w fails, drain discards the rest, so that the program
// does not block.
func drain(w io.Writer, out *os.File) error {
	defer func() { _ = out.Close() }()
	if w == nil {
		w = io.Discard
	}
	widen(out)
	buffer := readBuffers.Get().(*[readBytes]byte)
	defer readBuffers.Put(buffer)
	// Hidden behind a plain Reader, so that w gets what there is when it is there.
	_, err := io.CopyBuffer(w, struct{ io.Reader }{out}, buffer[:])
	if err != nil {
		_, _ = io.Copy(io.Discard, out)
	}
	return err
}

// widen gives a pipe pipeBytes, where the host allows as much: one that it does not only fills up
// sooner.
func widen(out *os.File) {
	if conn, err := out.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, pipeBytes) })
	}
}

// encode returns the frame of a type with a program.
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
