package agentsandboxes

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"strconv"
	"sync"

	"github.com/bullpen-run/bullpen/client"
)

const (
	maxLine  = 32 << 20 // bytes of a line of a program
	maxInput = 64 << 20 // bytes that wait for a program to read them
	// maxStderr limits what is kept of the beginning and of the end of the standard error, in bytes each.
	maxStderr = 4 << 10
)

// Process is a program in a sandbox that communicates in lines.
type Process struct {
	cancel context.CancelFunc
	in     *input
	out    *io.PipeReader
	lines  *bufio.Reader
	read   int64 // bytes
	done   chan struct{}

	// Exec sets what follows before done is closed.
	exit   client.Exit
	err    error
	stderr stderr
}

// Start starts a program in the directory of the session, with additional variables of the environment.
func (b *Sandbox) Start(_ context.Context, args []string, env map[string]string) *Process {
	ctx, cancel := context.WithCancel(b.ctx)
	out, write := io.Pipe()
	p := &Process{
		cancel: cancel, in: newInput(), out: out, lines: bufio.NewReaderSize(out, 64<<10), done: make(chan struct{}),
	}
	b.work.Go(func() {
		defer close(p.done)
		defer cancel()
		p.exit, p.err = b.guest.Exec(ctx, &client.Command{
			Args: args, Env: env, Dir: b.dir, Stdin: p.in, Stdout: write, Stderr: &p.stderr,
		})
		p.in.close()
		_ = write.Close() // it never fails
	})
	return p
}

// WriteFile creates or replaces a file of the sandbox, and its parent directories.
func (b *Sandbox) WriteFile(ctx context.Context, path string, content []byte) error {
	return b.guest.Upload(ctx, path, bytes.NewReader(content), int64(len(content)))
}

// errLongLine is returned for a line that is longer than maxLine.
var errLongLine = errors.New("the program has written a line of more than " + strconv.Itoa(maxLine>>20) + " MiB")

// ReadLine returns the next line of standard output, and the number of bytes up to its end as a cursor. It returns
// [io.EOF] when the program has ended.
func (p *Process) ReadLine() (line []byte, cursor string, err error) {
	for {
		part, err := p.lines.ReadSlice('\n')
		line = append(line, part...)
		p.read += int64(len(part))
		switch {
		case err == nil:
			return bytes.TrimSuffix(line, []byte("\n")), strconv.FormatInt(p.read, 10), nil
		case len(line) > maxLine:
			return nil, "", errLongLine
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(line) > 0:
			return line, strconv.FormatInt(p.read, 10), nil
		default:
			<-p.done
			return nil, "", io.EOF
		}
	}
}

// WriteLine writes a line to standard input. It does not wait for the program to read it.
func (p *Process) WriteLine(line []byte) error { return p.in.write(line) }

// Exit is how a program ended.
type Exit struct {
	Code int // -1 if it did not exit
	// Head and Tail are the beginning and the end of its standard error. If Truncated is not set, Head is all.
	Head, Tail string
	Truncated  bool
	Lines      int // of its standard error
}

// Exit returns how the program ended. It must be called only after ReadLine has returned [io.EOF].
func (p *Process) Exit() Exit {
	e := Exit{
		Code: p.exit.Code, Head: string(p.stderr.head), Tail: string(p.stderr.tail), Truncated: p.stderr.truncated,
		Lines: p.stderr.lines,
	}
	if p.err != nil && e.Head == "" {
		e.Head = p.err.Error()
	}
	return e
}

// Close kills the program and its children. It returns when all of them have ended.
func (p *Process) Close() {
	p.cancel()
	_ = p.out.Close() // it never fails
	<-p.done
}

// input queues lines for a program.
type input struct {
	mu     sync.Mutex
	more   sync.Cond
	queue  []byte
	closed bool
}

func newInput() *input {
	i := &input{}
	i.more.L = &i.mu
	return i
}

var (
	errClosed = errors.New("the program has ended")
	errFull   = errors.New("the program does not read its input")
)

func (i *input) write(line []byte) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch {
	case i.closed:
		return errClosed
	case len(i.queue)+len(line) > maxInput:
		return errFull
	}
	i.queue = append(append(i.queue, line...), '\n')
	i.more.Signal()
	return nil
}

func (i *input) close() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.closed = true
	i.more.Broadcast()
}

// Read implements [io.Reader].
func (i *input) Read(p []byte) (int, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for len(i.queue) == 0 && !i.closed {
		i.more.Wait()
	}
	if len(i.queue) == 0 {
		return 0, io.EOF
	}
	n := copy(p, i.queue)
	if i.queue = i.queue[n:]; len(i.queue) == 0 {
		i.queue = nil
	}
	return n, nil
}

// stderr keeps the beginning and the end of a standard error.
type stderr struct {
	head, tail []byte
	truncated  bool
	lines      int
}

// Write implements [io.Writer].
func (s *stderr) Write(p []byte) (int, error) {
	s.lines += bytes.Count(p, []byte("\n"))
	n := min(len(p), maxStderr-len(s.head))
	s.head = append(s.head, p[:n]...)
	s.tail = append(s.tail, p[n:]...)
	if over := len(s.tail) - maxStderr; over > 0 {
		s.truncated = true
		s.tail = append(s.tail[:0], s.tail[over:]...)
	}
	return len(p), nil
}
