package process

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/bullpen-run/bullpen/guest/account"
	"github.com/bullpen-run/bullpen/guest/processpb"
)

// Sizes of chunks of output.
const (
	pipeChunk     = 32 << 10
	terminalChunk = 16 << 10
)

// files are the two sides of what connects a process.
type files struct {
	children []*os.File // standard input, output and error
	terminal bool

	input   *os.File // nil if there is none
	pty     *os.File // nil without a terminal
	outputs []source
}

type source struct {
	from  stream
	file  *os.File
	chunk int
}

// openFiles creates the pipes or the terminal of a process.
func openFiles(r *processpb.StartRequest, user account.User) (*files, error) {
	f := &files{}
	err := f.open(r, user)
	if err != nil {
		f.closeChild()
		f.closeParent()
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
			return nil, exhausted("the guest has as many files open as it can have: %v", err)
		}
		return nil, err
	}
	return f, nil
}

func (f *files) open(r *processpb.StartRequest, user account.User) error {
	if r.GetPty() != nil {
		return f.openTerminal(r.GetPty().GetSize(), user)
	}
	if r.Stdin != nil && !r.GetStdin() {
		null, err := os.Open(os.DevNull)
		if err != nil {
			return fmt.Errorf("open standard input: %w", err)
		}
		f.children = append(f.children, null)
	} else {
		read, write, err := os.Pipe()
		if err != nil {
			return fmt.Errorf("create standard input: %w", err)
		}
		f.children, f.input = append(f.children, read), write
	}
	for _, from := range []stream{stdout, stderr} {
		read, write, err := os.Pipe()
		if err != nil {
			return fmt.Errorf("create standard output: %w", err)
		}
		f.children = append(f.children, write)
		f.outputs = append(f.outputs, source{from, read, pipeChunk})
	}
	return nil
}

// openTerminal creates a terminal that belongs to the user.
func (f *files) openTerminal(size *processpb.PTY_Size, user account.User) error {
	fail := func(step string, err error) error {
		if errors.Is(err, unix.ENOSPC) {
			return exhausted("the sandbox has as many terminals as it can have: %s: %v", step, err)
		}
		return connect.NewError(connect.CodeUnavailable, fmt.Errorf("the sandbox has no terminals: %s: %w", step, err))
	}
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return fail("open /dev/ptmx", err)
	}
	f.pty = os.NewFile(uintptr(fd), "/dev/ptmx")
	f.input = f.pty
	f.outputs = []source{{terminal, f.pty, terminalChunk}}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return fail("unlock the terminal", err)
	}
	other, err := openPeer(fd)
	if err != nil {
		return fail("open the other side of the terminal", err)
	}
	f.terminal = true
	f.children = []*os.File{other, other, other}
	if err := resize(f.pty, size); err != nil {
		return fail("set the size", err)
	}
	if !user.Current() {
		if err := other.Chown(int(user.UID), int(user.GID)); err != nil {
			return fail("change the owner", err)
		}
	}
	return nil
}

// openPeer opens the other side of a terminal. It tries its name only if the kernel cannot open it
// directly: the name may mean another terminal.
func openPeer(fd int) (*os.File, error) {
	flags := unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, uintptr(flags))
	if errno == 0 {
		return os.NewFile(peer, "terminal"), nil
	}
	number, err := unix.IoctlGetUint32(fd, unix.TIOCGPTN)
	if err != nil {
		return nil, err
	}
	return os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), flags, 0)
}

// child returns the descriptors of a child.
func (f *files) child() []uintptr {
	fds := make([]uintptr, 0, 3)
	for _, file := range f.children {
		fds = append(fds, file.Fd())
	}
	return fds
}

func (f *files) closeChild() {
	for i, file := range f.children {
		if i == 0 || file != f.children[0] {
			_ = file.Close()
		}
	}
	f.children = nil
}

func (f *files) closeParent() {
	if f.input != nil {
		_ = f.input.Close()
	}
	for _, o := range f.outputs {
		_ = o.file.Close()
	}
}

// buffers are for chunks of output. A process that writes nothing has none.
var buffers = sync.Pool{New: func() any { return new([pipeChunk]byte) }}

// pump keeps and logs output until the other side is closed or the deadline of the file.
func pump(out *output, s source, log *Lines) {
	defer log.Flush()
	read(s.file, s.chunk, func(p []byte) {
		log.Add(p)
		out.write(s.from, p)
	})
}

// Copy copies from a pipe to w until the other side is closed or the deadline of the pipe. It ignores errors of w.
func Copy(w io.Writer, from *os.File) {
	read(from, pipeChunk, func(p []byte) { _, _ = w.Write(p) })
}

// read calls each with what it reads from a file, at most limit bytes at a time, until the other side is closed or the
// deadline of the file. It needs memory only while there is something to read.
func read(file *os.File, limit int, each func(p []byte)) {
	raw, err := file.SyscallConn()
	if err != nil {
		return
	}
	for {
		var buf *[pipeChunk]byte
		var n int
		var readErr error
		err := raw.Read(func(fd uintptr) bool {
			buf, _ = buffers.Get().(*[pipeChunk]byte)
			for {
				n, readErr = unix.Read(int(fd), buf[:limit])
				if !errors.Is(readErr, unix.EINTR) {
					break
				}
			}
			if errors.Is(readErr, unix.EAGAIN) {
				buffers.Put(buf)
				return false
			}
			return true
		})
		if err != nil { // the deadline
			return
		}
		if n > 0 {
			each(buf[:n])
		}
		buffers.Put(buf)
		if n <= 0 { // the end, which is EIO for a terminal
			return
		}
	}
}

// resize sets the size of a terminal.
func resize(pty *os.File, size *processpb.PTY_Size) error {
	raw, err := pty.SyscallConn()
	if err != nil {
		return err
	}
	var resizeErr error
	err = raw.Control(func(fd uintptr) {
		resizeErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{
			Col: uint16(min(size.GetCols(), 0xffff)), Row: uint16(min(size.GetRows(), 0xffff)),
		})
	})
	return errors.Join(err, resizeErr)
}

// input is the standard input or the terminal of a process. Writes take turns.
type input struct {
	file *os.File
	turn chan struct{} // holds one element while somebody writes
}

// write writes all data. A process that does not read makes it wait, until ctx is done.
func (in *input) write(ctx context.Context, data []byte) error {
	select {
	case in.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-in.turn }()
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = in.file.SetWriteDeadline(time.Now())
		close(stopped)
	})
	defer func() {
		if !stop() {
			<-stopped
			_ = in.file.SetWriteDeadline(time.Time{})
		}
	}()
	_, err := in.file.Write(data)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}
