package contexts

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/bullpen-run/bullpen/guest/cell"
	"github.com/bullpen-run/bullpen/guest/mask"
	"github.com/bullpen-run/bullpen/guest/process"
)

// Types of events. Others are those of frames.
const (
	typeStart  = "start"
	typeStdout = "stdout"
	typeStderr = "stderr"
)

// Statuses of a run that has ended, besides those of a cell.
const (
	statusTimeout = "timeout"
	statusLost    = "lost"
)

// insistEvery is how often SIGINT is sent again to interpreters that may miss it. Others miss it only
// before they have read their request.
const insistEvery = 250 * time.Millisecond

// maxEarly is how much of what an interpreter says at its start is kept, in bytes.
const maxEarly = 4 << 10

// base is the beginning of all events.
type base struct {
	Type string `json:"type"`
	Seq  int64  `json:"seq"`
}

type startEvent struct {
	base
	Run int64     `json:"run"`
	At  time.Time `json:"at"`
}

type textEvent struct {
	base
	Text string `json:"text"`
}

type displayEvent struct {
	base
	*cell.Display
}

type errorEvent struct {
	base
	*cell.Failure
}

type endEvent struct {
	base
	cell.End
	Message string `json:"message,omitempty"` // why the run was lost
}

// Execution is a request to run a cell.
type Execution struct {
	Code string            `json:"code"`
	Env  map[string]string `json:"env_vars"`
	// Timeout is in seconds; 0 is no limit.
	Timeout int `json:"timeout"`
	// InterruptOnClose interrupts the cell when the client that has started it leaves.
	InterruptOnClose bool `json:"interrupt_on_close"`
	// Call, if not empty, names the run: the same name again means the same run, as long as its events are kept.
	Call string `json:"call"`
}

// run is the run of a cell.
type run struct {
	context     *Context
	interpreter *interpreter // the one whose state the client knows
	number      int64
	asked       *Execution // nil when it has ended
	call        string     // of asked
	events      *events

	// stop is closed, with the status of the run, when it must end.
	stop     chan struct{}
	stopOnce sync.Once
	status   string
	ended    chan struct{} // closed when the cell's end has arrived
	end      cell.End
	held     [2][]byte // incomplete characters at the ends of standard output and error
}

// interrupt ends the run, with a status.
func (r *run) interrupt(status string) {
	r.stopOnce.Do(func() {
		r.status = status
		close(r.stop)
	})
}

// startRun runs a cell when the runs before it have ended. It returns an earlier run with the same name of the call.
func (c *Context) startRun(asked *Execution) (*run, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.runs {
		if asked.Call != "" && r.call == asked.Call {
			return r, nil
		}
	}
	switch {
	case c.deleted:
		return nil, &Error{http.StatusNotFound, "context_not_found", "the context was deleted"}
	case c.interpreter == nil:
		return nil, lost(c.reason, c.message)
	case c.queued >= maxQueue:
		return nil, &Error{
			http.StatusTooManyRequests, "limit",
			fmt.Sprintf("%d runs of this context wait, the most that can", maxQueue),
		}
	}
	size := len(asked.Code)
	for name, value := range asked.Env {
		size += len(name) + len(value)
	}
	if !c.all.memory.reserve(size) {
		return nil, &Error{
			http.StatusTooManyRequests, "limit",
			"the cells that wait in this sandbox take too much memory; send this one later",
		}
	}
	c.lastRun++
	c.queued++
	r := &run{
		context: c, interpreter: c.interpreter, number: c.lastRun, asked: asked, call: asked.Call,
		events: c.all.memory.newEvents(), stop: make(chan struct{}), ended: make(chan struct{}),
	}
	c.runs = append(c.runs, r)
	if len(c.runs) > maxKept && c.runs[0].over() {
		c.runs[0].events.forget()
		c.runs = slices.Delete(c.runs, 0, 1)
	}
	previous := c.turn
	c.turn = make(chan struct{})
	go func(done chan<- struct{}) {
		defer close(done)
		r.drive(previous)
		r.asked = nil
		c.all.memory.release(size)
	}(c.turn)
	return r, nil
}

// over reports whether all events of the run are known.
func (r *run) over() bool {
	r.events.memory.mu.Lock()
	defer r.events.memory.mu.Unlock()
	return r.events.ended
}

// find returns a run whose events are kept.
func (c *Context) find(number int64) (*run, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.runs {
		if r.number == number {
			return r, nil
		}
	}
	return nil, &Error{
		http.StatusNotFound, "run_not_found",
		fmt.Sprintf("the context keeps no run %d; it keeps the last %d", number, maxKept),
	}
}

// Interrupt interrupts the run in progress, and no other. It reports whether there was one.
func (c *Context) Interrupt() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.runs {
		if !r.over() {
			r.interrupt(cell.Interrupted)
			return true
		}
	}
	return false
}

// drive waits for its turn and runs the cell.
func (r *run) drive(turn <-chan struct{}) {
	c := r.context
	if turn != nil {
		<-turn
	}
	c.mu.Lock()
	c.queued--
	i := c.interpreter
	c.mu.Unlock()
	r.events.add(false, func(seq int64) any { return startEvent{base{typeStart, seq}, r.number, time.Now().UTC()} })
	select {
	case <-r.stop: // while it waited
		r.finish(r.status, "")
		return
	default:
	}
	if i != r.interpreter || !i.begin(r) {
		r.finish(statusLost, r.interpreter.lostError().Message)
		return
	}
	c.setState(stateRunning)
	status, message := r.wait()
	i.finish(r)
	c.setState(stateIdle)
	r.finish(status, message)
}

// setState sets the state of a context that is not lost.
func (c *Context) setState(state string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.interpreter != nil {
		c.state = state
	}
}

// wait sends the cell to the interpreter and waits for its end. It returns the status of the run, and
// why it was lost.
func (r *run) wait() (status, message string) {
	c, i := r.context, r.interpreter
	request := c.language.Encode(&cell.Request{Run: r.number, Code: r.asked.Code, Env: r.asked.Env})
	go func() {
		// An interpreter that does not read is one that does not end the run either.
		_, _ = i.input.Write(request)
	}()
	var timeout, disobeyed, again <-chan time.Time
	if r.asked.Timeout > 0 {
		timer := time.NewTimer(time.Duration(r.asked.Timeout) * time.Second)
		defer timer.Stop()
		timeout = timer.C
	}
	stop := r.stop
	for {
		select {
		case <-r.ended:
			return r.statusOfCell(), ""
		case <-i.over:
			select {
			case <-r.ended: // its last words
				return r.statusOfCell(), ""
			default:
				return statusLost, i.lostError().Message
			}
		case <-timeout:
			r.interrupt(statusTimeout)
		case <-stop:
			stop = nil
			i.child.Interrupt()
			timer := time.NewTimer(obeyTimeout)
			defer timer.Stop()
			disobeyed = timer.C
			every := time.Second
			if c.language.Insist {
				every = insistEvery
			}
			ticker := time.NewTicker(every)
			defer ticker.Stop()
			again = ticker.C
		case <-again:
			i.child.Interrupt()
		case <-disobeyed:
			c.lose(context.Background(), reasonUninterrupted,
				fmt.Sprintf("the cell was interrupted and did not end within %s; restart the context", obeyTimeout))
			return statusLost, i.lostError().Message
		}
	}
}

// statusOfCell returns the status of the run of a cell that has ended.
func (r *run) statusOfCell() string {
	c := r.context
	c.mu.Lock()
	c.count, c.memory = r.end.Count, r.end.Memory
	c.mu.Unlock()
	select {
	case <-r.stop:
		if r.end.Status != cell.OK {
			return r.status
		}
	default:
	}
	return r.end.Status
}

// finish appends the last event.
func (r *run) finish(status, message string) {
	r.flush()
	end := r.end
	end.Status = status
	r.events.add(true, func(seq int64) any { return endEvent{base{cell.TypeEnd, seq}, end, message} })
}

// text appends a piece of output. A character that is not complete waits for the rest.
func (r *run) text(fromStderr bool, piece []byte) {
	n := 0
	if fromStderr {
		n = 1
	}
	piece = append(r.held[n], piece...)
	cut := process.CutText(piece)
	r.held[n] = slices.Clone(piece[cut:])
	r.addText(fromStderr, piece[:cut])
}

func (r *run) addText(fromStderr bool, piece []byte) {
	if len(piece) == 0 {
		return
	}
	text := strings.ToValidUTF8(string(piece), "\uFFFD")
	kind := typeStdout
	if fromStderr {
		kind = typeStderr
	}
	r.events.add(false, func(seq int64) any { return textEvent{base{kind, seq}, text} })
}

// flush appends what is held back.
func (r *run) flush() {
	for n, held := range r.held {
		r.addText(n == 1, held)
		r.held[n] = nil
	}
}

// begin makes a run the one that gets the interpreter's output. It returns false if the interpreter has ended.
func (i *interpreter) begin(r *run) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	select {
	case <-i.drained:
		return false
	default:
	}
	i.run = r
	return true
}

// finish ends what begin has begun.
func (i *interpreter) finish(r *run) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.run == r {
		i.run = nil
	}
}

// follow reads what an interpreter prints, until its end. Output between runs is only logged.
func (c *Context) follow(i *interpreter, nonce string, p *pipes) {
	logs := [2]*process.Lines{c.all.Table.Log.Output(i.child.PID, false), c.all.Table.Log.Output(i.child.PID, true)}
	index := func(fromStderr bool) int {
		if fromStderr {
			return 1
		}
		return 0
	}
	isReady := sync.OnceFunc(func() { close(i.ready) })
	masked := [2]*mask.Writer{c.all.Masks.Writer(text{i, false}), c.all.Masks.Writer(text{i, true})}
	reader := &cell.Reader{
		Nonce: nonce, Reserve: c.all.memory.reserve, Release: c.all.memory.release,
		Text: func(fromStderr bool, piece []byte) error {
			logs[index(fromStderr)].Add(piece)
			i.mu.Lock()
			defer i.mu.Unlock()
			_, err := masked[index(fromStderr)].Write(piece)
			return err
		},
		Frame: func(f cell.Frame) {
			if f.Type == cell.TypeReady {
				c.mu.Lock()
				c.version, c.name = f.Version, f.Name
				c.mu.Unlock()
				isReady()
				return
			}
			i.mu.Lock()
			defer i.mu.Unlock()
			for _, w := range masked {
				w.Flush()
			}
			if i.run == nil || i.run.number != f.Run && f.Type == cell.TypeEnd {
				return
			}
			i.run.frame(&f)
			if f.Type == cell.TypeEnd {
				i.run = nil
			}
		},
	}
	var pumps sync.WaitGroup
	for from, to := range map[*os.File]*cell.Output{p.stdout: reader.Stdout(), p.stderr: reader.Stderr()} {
		pumps.Go(func() {
			process.Copy(to, from)
			_ = to.Close() // Text returns no errors
		})
	}
	ended := make(chan struct{})
	go func() {
		pumps.Wait()
		close(ended)
	}()
	<-i.child.Done
	select {
	case <-ended:
	case <-time.After(drainTime): // what it has started has its outputs, too
		_, _ = p.stdout.SetReadDeadline(time.Now()), p.stderr.SetReadDeadline(time.Now())
		<-ended
	}
	for _, l := range logs {
		l.Flush()
	}
	i.mu.Lock()
	for _, w := range masked {
		w.Flush()
	}
	close(i.drained)
	i.mu.Unlock()
	p.closeParent()
}

// text is an output of an interpreter, without secrets. The interpreter's lock must be held.
type text struct {
	of         *interpreter
	fromStderr bool
}

func (t text) Write(piece []byte) (int, error) {
	i := t.of
	if t.fromStderr && len(i.early) < maxEarly {
		i.early = append(i.early, piece[:min(len(piece), maxEarly-len(i.early))]...)
	}
	if i.run != nil {
		i.run.text(t.fromStderr, piece)
	}
	return len(piece), nil
}

// drainTime is how long outputs are read on after their interpreter has ended.
const drainTime = 100 * time.Millisecond

// frame handles a frame of the interpreter.
func (r *run) frame(f *cell.Frame) {
	r.flush()
	masks := r.context.all.Masks
	switch {
	case f.Display != nil:
		f.Display.Mask(masks)
		r.events.add(false, func(seq int64) any { return displayEvent{base{f.Type, seq}, f.Display} })
	case f.Failure != nil:
		f.Failure.Name, f.Failure.Value = masks.String(f.Failure.Name), masks.String(f.Failure.Value)
		for i, line := range f.Failure.Traceback {
			f.Failure.Traceback[i] = masks.String(line)
		}
		r.events.add(false, func(seq int64) any { return errorEvent{base{f.Type, seq}, f.Failure} })
	case f.End != nil:
		r.end = *f.End
		close(r.ended)
	}
}
