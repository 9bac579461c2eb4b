package process

import (
	"encoding/binary"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Sizes of what is kept of the output of processes. It lies outside of Go's heap.
const (
	maxProcessOutput = 1 << 20
	maxTotalOutput   = 16 << 20
	minBuffer        = 4 << 10
)

// stream is where a chunk of output comes from.
type stream byte

const (
	stdout stream = iota + 1
	stderr
	terminal
)

func (s stream) String() string {
	switch s {
	case stdout:
		return "stdout"
	case stderr:
		return "stderr"
	default:
		return "terminal"
	}
}

// chunkHeader is the size of what precedes each chunk in a buffer: its stream and its length.
const chunkHeader = 5

// outputs holds the last output of all processes. One lock serves all, since memory moves between
// them.
type outputs struct {
	// stallAfter is how long a process that writes waits for a reader that has stopped reading.
	// Beyond that, its output overwrites what the reader has not read.
	stallAfter time.Duration

	mu    sync.Mutex
	total int // bytes of all buffers
	list  []*output
}

// output is a ring buffer with the last output of a process. Positions count its bytes, with headers,
// from the start of the process.
type output struct {
	all *outputs

	// The lock of all guards what follows.
	buf        []byte // its length is a power of two
	head, tail uint64 // positions behind the newest chunk and of the oldest
	first      uint64 // number of the oldest chunk, or of the next if there is none
	next       uint64 // number of the next chunk
	evicted    uint64 // bytes of output before tail
	readers    map[*reader]struct{}
	closing    bool // the process is dead: what it wrote is still kept, but waits for no reader
	ended      bool
	appended   chan struct{} // closed at the next chunk or the end, if anybody waits
	progress   chan struct{} // closed when a reader reads or leaves, if anybody waits
}

// reader reads an output.
type reader struct {
	out     *output
	pos     uint64 // position of the next chunk to read
	seq     uint64 // its number
	bytes   uint64 // bytes of output before it
	unknown bool   // bytes is not known, until the gap that follows
	stalled bool   // the writer no longer waits for this reader
}

// chunk is a piece of output, or a gap.
type chunk struct {
	from stream
	seq  uint64
	data []byte
	gap  *gap
}

// gap is output that a reader has missed.
type gap struct {
	first, last uint64 // numbers of chunks
	bytes       uint64 // 0 if unknown
	total       uint64 // bytes of the process's output up to and including chunk last
}

func (a *outputs) add() *output {
	o := &output{all: a, first: 1, next: 1, readers: map[*reader]struct{}{}}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.list = append(a.list, o)
	return o
}

// remove frees the memory of an output. Its readers miss what they have not read.
func (a *outputs) remove(o *output) {
	a.mu.Lock()
	defer a.mu.Unlock()
	o.resize(0)
	if i := slices.Index(a.list, o); i >= 0 {
		a.list = slices.Delete(a.list, i, i+1)
	}
}

// reclaim takes memory from outputs that nobody reads until n bytes are free or there is no more to
// take: first from processes that have ended, in the order in which they were started, then from those
// that have more than o will have.
func (a *outputs) reclaim(n, size int, o *output) {
	for _, other := range a.list {
		if a.total+n <= maxTotalOutput {
			return
		}
		if other != o && other.ended && len(other.readers) == 0 {
			other.resize(0)
		}
	}
	for a.total+n > maxTotalOutput {
		var largest *output
		for _, other := range a.list {
			if other != o && len(other.readers) == 0 && len(other.buf) > size &&
				(largest == nil || len(other.buf) > len(largest.buf)) {
				largest = other
			}
		}
		if largest == nil {
			return
		}
		if !largest.resize(len(largest.buf) / 2) {
			return
		}
	}
}

// resize changes the size of the buffer, and drops the oldest output if that no longer fits. It
// reports whether there was memory.
func (o *output) resize(size int) bool {
	var buf []byte
	if size > 0 {
		var err error
		buf, err = unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			return false
		}
	}
	for o.head-o.tail > uint64(size) {
		o.evict()
	}
	old := o.buf
	if size > 0 {
		for pos := o.tail; pos < o.head; {
			from := int(pos % uint64(len(old)))
			to := int(pos % uint64(size))
			n := min(len(old)-from, size-to, int(o.head-pos))
			copy(buf[to:], old[from:from+n])
			pos += uint64(n)
		}
	}
	if old != nil {
		_ = unix.Munmap(old)
	}
	o.all.total += size - len(old)
	o.buf = buf
	return true
}

// grow makes the buffer large enough for n bytes, if there may be so much memory. It reports whether
// the buffer has grown.
func (o *output) grow(n uint64) bool {
	size := max(len(o.buf)*2, minBuffer)
	for uint64(size) < n {
		size *= 2
	}
	limit := maxProcessOutput
	if o.closing {
		limit *= 2 // for what is in the pipes
	}
	size = min(size, limit)
	more := size - len(o.buf)
	if more <= 0 {
		return false
	}
	if o.all.total+more > maxTotalOutput {
		o.all.reclaim(more, size, o)
	}
	// Each process may have the smallest buffer, so that none is without.
	if o.all.total+more > maxTotalOutput {
		if len(o.buf) > 0 {
			return false
		}
		size = minBuffer
	}
	return o.resize(size)
}

// evict drops the oldest chunk.
func (o *output) evict() {
	_, n := o.header(o.tail)
	o.tail += chunkHeader + uint64(n)
	o.evicted += uint64(n)
	o.first++
}

// header returns the stream and the length of the chunk at a position.
func (o *output) header(pos uint64) (stream, uint32) {
	var h [chunkHeader]byte
	o.copyOut(h[:], pos)
	return stream(h[0]), binary.LittleEndian.Uint32(h[1:])
}

func (o *output) copyOut(p []byte, pos uint64) {
	n := copy(p, o.buf[pos%uint64(len(o.buf)):])
	copy(p[n:], o.buf)
}

func (o *output) copyIn(p []byte) {
	n := copy(o.buf[o.head%uint64(len(o.buf)):], p)
	copy(o.buf, p[n:])
	o.head += uint64(len(p))
}

// write appends output. While the buffer is full of what a reader has not read, it waits for the
// reader, but not for longer than stallAfter without any progress.
func (o *output) write(from stream, data []byte) {
	o.all.mu.Lock()
	defer o.all.mu.Unlock()
	for len(data) > 0 && !o.ended {
		if len(o.buf) == 0 && !o.grow(uint64(len(data))) {
			// No memory at all: a chunk without content keeps the count right.
			o.evicted += uint64(len(data))
			o.first++
			o.next++
			o.announce()
			return
		}
		n := min(len(data), len(o.buf)/2)
		if n < len(data) && o.grow(2*uint64(len(data))) {
			continue
		}
		if !o.makeRoom(chunkHeader + uint64(n)) {
			continue
		}
		var h [chunkHeader]byte
		h[0] = byte(from)
		binary.LittleEndian.PutUint32(h[1:], uint32(n))
		o.copyIn(h[:])
		o.copyIn(data[:n])
		o.next++
		o.announce()
		data = data[n:]
	}
}

// makeRoom evicts chunks until n bytes are free. It returns false if it had to wait for readers or for
// memory, and the state has changed meanwhile.
func (o *output) makeRoom(n uint64) bool {
	for o.head-o.tail+n > uint64(len(o.buf)) {
		if o.grow(o.head - o.tail + n) {
			continue
		}
		if !o.closing && o.awaited() {
			o.awaitProgress()
			return false
		}
		o.evict()
	}
	return true
}

// awaited reports whether the oldest chunk has a reader that has not read it and has not stalled.
func (o *output) awaited() bool {
	for r := range o.readers {
		if !r.stalled && r.pos <= o.tail {
			return true
		}
	}
	return false
}

// awaitProgress waits, without the lock, until a reader reads or leaves. If none does for stallAfter,
// all that have not read the oldest chunk count as stalled.
func (o *output) awaitProgress() {
	if o.progress == nil {
		o.progress = make(chan struct{})
	}
	progress := o.progress
	o.all.mu.Unlock()
	timer := time.NewTimer(o.all.stallAfter)
	defer timer.Stop()
	var late bool
	select {
	case <-progress:
	case <-timer.C:
		late = true
	}
	o.all.mu.Lock()
	for r := range o.readers {
		if late && r.pos <= o.tail {
			r.stalled = true
		}
	}
}

// announce wakes readers.
func (o *output) announce() {
	if o.appended != nil {
		close(o.appended)
		o.appended = nil
	}
}

func (o *output) progressed() {
	if o.progress != nil {
		close(o.progress)
		o.progress = nil
	}
}

// stopWaiting makes writes wait for readers no more.
func (o *output) stopWaiting() {
	o.all.mu.Lock()
	defer o.all.mu.Unlock()
	o.closing = true
	o.progressed()
}

// end declares that no output follows.
func (o *output) end() {
	o.all.mu.Lock()
	defer o.all.mu.Unlock()
	o.ended = true
	o.announce()
	o.progressed()
}

// written returns the number of the last chunk.
func (o *output) written() uint64 {
	o.all.mu.Lock()
	defer o.all.mu.Unlock()
	return o.next - 1
}

// readAll returns a reader of what is kept and what follows.
func (o *output) readAll() *reader {
	o.all.mu.Lock()
	defer o.all.mu.Unlock()
	r := &reader{out: o, pos: o.tail, seq: o.first, bytes: o.evicted}
	o.readers[r] = struct{}{}
	return r
}

// readAfter returns a reader of what follows the chunk with a number, which must have been written. If
// more than that is no longer kept, the reader begins with a gap.
func (o *output) readAfter(seq uint64) *reader {
	r := o.readAll()
	o.all.mu.Lock()
	defer o.all.mu.Unlock()
	if seq+1 < r.seq {
		// How large single chunks were that are gone is not kept.
		r.pos, r.seq, r.bytes = 0, seq+1, 0
		r.unknown = seq > 0
	}
	for r.seq <= seq && r.pos < o.head {
		_, n := o.header(r.pos)
		r.pos += chunkHeader + uint64(n)
		r.bytes += uint64(n)
		r.seq++
	}
	return r
}

// close ends the reading.
func (r *reader) close() {
	r.out.all.mu.Lock()
	defer r.out.all.mu.Unlock()
	delete(r.out.readers, r)
	r.out.progressed()
}

// read returns the next chunk if there is one. Otherwise it returns whether the output has ended, and
// if not, a channel that is closed when there is more to know.
func (r *reader) read() (c chunk, ok, ended bool, more <-chan struct{}) {
	o := r.out
	o.all.mu.Lock()
	defer o.all.mu.Unlock()
	if r.seq < o.first {
		c.gap = &gap{first: r.seq, last: o.first - 1, bytes: o.evicted - r.bytes, total: o.evicted}
		if r.unknown {
			c.gap.bytes = 0
		}
		r.pos, r.seq, r.bytes, r.unknown, r.stalled = o.tail, o.first, o.evicted, false, false
		o.progressed()
		return c, true, false, nil
	}
	if r.pos == o.head {
		if o.ended {
			return c, false, true, nil
		}
		if o.appended == nil {
			o.appended = make(chan struct{})
		}
		return c, false, false, o.appended
	}
	from, n := o.header(r.pos)
	c = chunk{from: from, seq: r.seq, data: make([]byte, n)}
	o.copyOut(c.data, r.pos+chunkHeader)
	r.pos += chunkHeader + uint64(n)
	r.seq++
	r.bytes += uint64(n)
	r.stalled = false
	o.progressed()
	return c, true, false, nil
}
