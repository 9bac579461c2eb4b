package cell

import (
	"bytes"
	"sync"
	"time"
)

const (
	// maxPart is the size of a chunk's part, and maxFrame of a frame, in bytes. Runners keep displays below 4 MiB.
	maxPart  = 4000
	maxBody  = maxPart + len("1;") + len(chunkEnd) // of a chunk, with its end
	maxFrame = 6 << 20
	// smallFrame is the size of frames for which no memory is reserved. Only displays are larger.
	smallFrame = 256 << 10
	// syncTimeout is how long one output waits for the other, which a program may have closed. After
	// that the reader never waits again: a program could leave many forged frames in its pipes.
	syncTimeout = time.Second
)

// frameStart is how frames begin.
const frameStart = `{"sync":`

const chunkEnd = "\x1b\\"

// Reader splits what a runner prints into text and frames. Its fields must be set before use.
type Reader struct {
	Nonce string
	// Text is called with a piece of a program's output, and Frame with a frame. Calls for standard output and for
	// standard error may overlap. Text must not keep the piece. What Text returns is an error of the write.
	Text  func(fromStderr bool, piece []byte) error
	Frame func(Frame)
	// Reserve, if not nil, is asked for n bytes of memory for a large frame that is being read, and Release frees them.
	// A frame for which there is no memory is passed on as a display without content.
	Reserve func(n int) bool
	Release func(n int)

	mu      sync.Mutex
	synced  uint64        // the last number in standard error
	passed  uint64        // the last number of a frame that was passed on
	apart   bool          // the outputs do not wait for each other any more
	changed chan struct{} // closed when one of these changes, if anybody waits
}

// Stdout returns the writer of standard output. Its Close must be called at the end.
func (r *Reader) Stdout() *Output { return &Output{reader: r, start: r.start()} }

// Stderr returns the writer of standard error. Its Close must be called at the end.
func (r *Reader) Stderr() *Output { return &Output{reader: r, start: r.start(), stderr: true} }

func (r *Reader) start() []byte { return []byte("\x1b_" + r.Nonce + ";") }

// Output reads one output of a runner. It is not safe for concurrent use.
type Output struct {
	reader *Reader
	stderr bool
	start  []byte // of a chunk
	rest   []byte // may be the beginning of a chunk
	frame  []byte // parts of a frame
	lost   bool   // the frame is too large
}

// Write reads a piece of output.
func (o *Output) Write(p []byte) (int, error) {
	data := p
	if len(o.rest) > 0 {
		data = append(o.rest, p...)
		o.rest = nil
	}
	for len(data) > 0 {
		at := bytes.Index(data, o.start)
		if at < 0 {
			at = len(data) - overlap(data, o.start)
			if err := o.text(data[:at]); err != nil {
				return 0, err
			}
			o.rest = bytes.Clone(data[at:])
			break
		}
		if err := o.text(data[:at]); err != nil {
			return 0, err
		}
		data = data[at:]
		body := data[len(o.start):]
		// A part has no escape characters.
		end := bytes.IndexByte(body[:min(len(body), maxBody)], chunkEnd[0])
		switch {
		case end >= 0 && bytes.HasPrefix(body[end:], []byte(chunkEnd)):
			o.chunk(body[:end])
			data = body[end+len(chunkEnd):]
		case end < 0 && len(body) < maxBody || end >= 0 && end == len(body)-1:
			o.rest = bytes.Clone(data)
			data = nil
		default: // no chunk
			if err := o.text(data[:len(o.start)]); err != nil {
				return 0, err
			}
			data = body
		}
	}
	return len(p), nil
}

// overlap returns the length of the longest end of data that is a beginning of start.
func overlap(data, start []byte) int {
	for n := min(len(data), len(start)-1); n > 0; n-- {
		if bytes.HasPrefix(start, data[len(data)-n:]) {
			return n
		}
	}
	return 0
}

func (o *Output) text(piece []byte) error {
	if len(piece) == 0 {
		return nil
	}
	return o.reader.Text(o.stderr, piece)
}

// chunk adds a chunk to the frame.
func (o *Output) chunk(body []byte) {
	if len(body) < 2 || body[1] != ';' {
		return
	}
	more, part := body[0] == '1', body[2:]
	if bytes.HasPrefix(part, []byte(frameStart)) { // an incomplete frame came before
		o.drop()
		o.lost = false
	}
	if !o.lost && !o.add(part) {
		o.lost = true
		o.drop()
	}
	if more {
		return
	}
	f, sync, ok := parse(o.frame)
	if o.lost {
		f, ok = Frame{Type: TypeDisplay, Display: &Display{Truncated: []string{TypeDisplay}}}, true
	}
	o.lost = false
	switch {
	case !ok:
	case o.stderr:
		o.reader.set(&o.reader.synced, sync)
		o.reader.await(&o.reader.passed, sync) // what follows here was printed after the frame
	case f.Type != "":
		o.reader.await(&o.reader.synced, sync)
		o.reader.Frame(f)
		o.reader.set(&o.reader.passed, sync)
	}
	o.drop()
}

// add appends a part to the frame. It reports whether there is memory.
func (o *Output) add(part []byte) bool {
	need := len(o.frame) + len(part)
	if need > maxFrame {
		return false
	}
	if need > cap(o.frame) {
		size := max(need, 2*cap(o.frame), maxPart)
		if !o.reserve(size) {
			return false
		}
		larger := append(make([]byte, 0, size), o.frame...)
		o.release(cap(o.frame))
		o.frame = larger
	}
	o.frame = append(o.frame, part...)
	return true
}

// drop frees the memory of the frame, if that is worth it.
func (o *Output) drop() {
	if cap(o.frame) <= maxPart {
		o.frame = o.frame[:0]
		return
	}
	o.release(cap(o.frame))
	o.frame = nil
}

func (o *Output) reserve(n int) bool {
	return n <= smallFrame || o.reader.Reserve == nil || o.reader.Reserve(n)
}

func (o *Output) release(n int) {
	if n > smallFrame && o.reader.Release != nil {
		o.reader.Release(n)
	}
}

// Close ends the output. An incomplete frame is lost.
func (o *Output) Close() error {
	err := o.text(o.rest)
	o.rest = nil
	o.release(cap(o.frame))
	o.frame = nil
	o.reader.part()
	return err
}

// set records a number that one output has reached.
func (r *Reader) set(reached *uint64, number uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	*reached = max(*reached, number)
	r.notify()
}

// part ends all waits.
func (r *Reader) part() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.apart = true
	r.notify()
}

// notify wakes the output that waits. r.mu must be locked.
func (r *Reader) notify() {
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
}

// await waits until the other output has reached a number.
func (r *Reader) await(reached *uint64, number uint64) {
	var timer *time.Timer
	for {
		r.mu.Lock()
		if *reached >= number || r.apart {
			r.mu.Unlock()
			return
		}
		if r.changed == nil {
			r.changed = make(chan struct{})
		}
		changed := r.changed
		r.mu.Unlock()
		if timer == nil {
			timer = time.NewTimer(syncTimeout)
			defer timer.Stop()
		}
		select {
		case <-changed:
		case <-timer.C:
			r.part()
			return
		}
	}
}
