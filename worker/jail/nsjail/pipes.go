package nsjail

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/worker/jail"
	"github.com/bullpen-run/bullpen/worker/jail/wire"
)

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
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	n, _, err := to.WriteMsgUnix(frame, rights, nil)
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
		if err := unix.Fchown(ends[i], s.uids.program(), s.uids.program()); err != nil {
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
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.EPIPE) ||
		errors.Is(err, unix.ECONNRESET) {
		return nil
	}
	return err
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

// encode returns a frame of type typ with the program p, which is a guest or not.
func encode(typ byte, p jail.Program, guest bool) ([]byte, error) {
	s := wire.StartFrame{
		Argv: p.Argv, Env: p.Env, Dir: p.Dir, Stdin: wire.NoInput, UID: jail.ProgramID,
		GID: jail.ProgramID,
	}
	if guest {
		s.UID, s.GID = 0, 0
	}
	if guest && typ != wire.Load {
		s.Argv = append([]string{wire.GuestFile}, p.Argv...)
	}
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
