package process

import (
	"bytes"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newOutputs returns outputs whose writers wait for readers for a second.
func newOutputs(t testing.TB) *outputs {
	a := &outputs{stallAfter: time.Second}
	t.Cleanup(func() {
		for len(a.list) > 0 {
			a.remove(a.list[0])
		}
		if a.total != 0 {
			t.Errorf("%d bytes are not freed", a.total)
		}
	})
	return a
}

// readNext returns the next chunk or gap, or nil if there is none now.
func readNext(r *reader) *chunk {
	if c, ok, _, _ := r.read(); ok {
		return &c
	}
	return nil
}

// TestOutputModel compares an output with a list of all chunks that were written.
func TestOutputModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := &outputs{stallAfter: time.Second}
		o := a.add()
		defer a.remove(o)
		var written []chunk
		readers := map[*reader]*uint64{} // the number of the last chunk that each has seen
		t.Repeat(map[string]func(*rapid.T){
			"write": func(t *rapid.T) {
				// Readers that wait would block the writer.
				a.mu.Lock()
				for r := range readers {
					r.stalled = true
				}
				a.mu.Unlock()
				size := rapid.SampledFrom([]int{1, 10, 1000, 32 << 10}).Draw(t, "size")
				data := bytes.Repeat([]byte{byte(len(written))}, size)
				before := o.written()
				o.write(stdout, data)
				if n := o.written() - before; n != 1 {
					t.Fatalf("%d chunks were written at once", n)
				}
				written = append(written, chunk{from: stdout, data: data})
			},
			"open": func(t *rapid.T) {
				after := rapid.Uint64Range(0, o.written()).Draw(t, "after")
				r := o.readAfter(after)
				readers[r] = &after
			},
			"read": func(t *rapid.T) {
				for r, seen := range readers {
					c := readNext(r)
					switch {
					case c == nil:
						if *seen != o.written() {
							t.Fatalf("nothing after chunk %d of %d", *seen, o.written())
						}
					case c.gap != nil:
						checkGap(t, c.gap, written, *seen)
						*seen = c.gap.last
					default:
						if *seen++; c.seq != *seen || !bytes.Equal(c.data, written[c.seq-1].data) {
							t.Fatalf("chunk %d instead of %d, %d bytes", c.seq, *seen, len(c.data))
						}
					}
				}
			},
			"close": func(*rapid.T) {
				for r := range readers {
					r.close()
					delete(readers, r)
					return
				}
			},
			"shrink": func(*rapid.T) {
				a.mu.Lock()
				defer a.mu.Unlock()
				if len(o.buf) > minBuffer {
					o.resize(len(o.buf) / 2)
				}
			},
			"": func(t *rapid.T) {
				a.mu.Lock()
				defer a.mu.Unlock()
				if len(o.buf) > maxProcessOutput || a.total != len(o.buf) || o.head-o.tail > uint64(len(o.buf)) {
					t.Fatalf("%d bytes, of %d in all, hold %d", len(o.buf), a.total, o.head-o.tail)
				}
			},
		})
	})
}

func checkGap(t *rapid.T, g *gap, written []chunk, seen uint64) {
	var total, missing uint64
	for i := range g.last {
		n := uint64(len(written[i].data))
		total += n
		if i >= seen {
			missing += n
		}
	}
	if g.first != seen+1 || g.last < g.first || g.total != total || g.bytes != missing && g.bytes != 0 {
		t.Fatalf("gap %+v after chunk %d: want %d of %d bytes", *g, seen, missing, total)
	}
}

// TestBackPressure has a writer wait for a reader that reads, but not for one that does not.
func TestBackPressure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newOutputs(t)
		o := a.add()
		slow, dead := o.readAll(), o.readAll()
		const chunks = 200
		var ended sync.WaitGroup
		ended.Go(func() {
			for i := range chunks {
				o.write(stdout, bytes.Repeat([]byte{byte(i)}, pipeChunk))
			}
			o.end()
		})
		synctest.Wait() // the writer waits
		if n := o.written(); n < 20 || n >= 32 {
			t.Fatalf("%d chunks fit", n)
		}
		time.Sleep(2 * time.Second) // of the bubble: both readers stall
		for i := range uint64(chunks) {
			c := readNext(slow)
			for c == nil {
				synctest.Wait()
				c = readNext(slow)
			}
			if c.gap != nil {
				break // it was as slow as the other one at the start
			}
			if c.seq != i+1 {
				t.Fatalf("chunk %d instead of %d", c.seq, i+1)
			}
		}
		ended.Wait()
		if c := readNext(dead); c == nil || c.gap == nil || c.gap.first != 1 {
			t.Fatalf("%+v", c)
		}
		slow.close()
		dead.close()
	})
}

// TestSlowReaderMissesNothing reads a chunk now and then, and always in time.
func TestSlowReaderMissesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newOutputs(t)
		o := a.add()
		r := o.readAll()
		defer r.close()
		const chunks = 300
		var ended sync.WaitGroup
		ended.Go(func() {
			for range chunks {
				o.write(stdout, make([]byte, pipeChunk))
			}
			o.end()
		})
		for i := uint64(1); ; i++ {
			time.Sleep(900 * time.Millisecond) // of the bubble
			synctest.Wait()
			c, ok, end, _ := r.read()
			if end {
				if i != chunks+1 {
					t.Fatalf("%d chunks", i-1)
				}
				break
			}
			if !ok || c.gap != nil || c.seq != i {
				t.Fatalf("%v %+v instead of chunk %d", ok, c, i)
			}
		}
		ended.Wait()
	})
}

// TestReaderThatLeaves frees a writer that waits for it.
func TestReaderThatLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newOutputs(t)
		o := a.add()
		r := o.readAll()
		var ended sync.WaitGroup
		ended.Go(func() { o.write(stdout, make([]byte, 3<<20)) })
		synctest.Wait()
		r.close()
		ended.Wait()
	})
}

// TestDeadProcess keeps what a dead process has left in its pipes, although a reader is slow.
func TestDeadProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newOutputs(t)
		o := a.add()
		r := o.readAll()
		defer r.close()
		var ended sync.WaitGroup
		size := maxProcessOutput + 128<<10
		ended.Go(func() {
			for range size / pipeChunk {
				o.write(stdout, make([]byte, pipeChunk))
			}
			o.end()
		})
		synctest.Wait()
		o.stopWaiting()
		ended.Wait()
		got := 0
		for c := readNext(r); c != nil; c = readNext(r) {
			if c.gap != nil {
				t.Fatalf("%+v", c.gap)
			}
			got += len(c.data)
		}
		if got != size {
			t.Fatalf("%d bytes of %d", got, size)
		}
	})
}

// TestTotal shares the memory of all outputs: processes that have ended give way first, and those that nobody
// reads give a part.
func TestTotal(t *testing.T) {
	a := newOutputs(t)
	fill := func() *output {
		o := a.add()
		for range 64 {
			o.write(stdout, make([]byte, pipeChunk))
		}
		if a.total > maxTotalOutput {
			t.Fatalf("%d bytes", a.total)
		}
		return o
	}
	var all []*output
	for range maxTotalOutput / maxProcessOutput {
		all = append(all, fill())
	}
	all[3].end()
	read := all[0].readAll()
	defer read.close()
	all = append(all, fill())
	if len(all[3].buf) != 0 || len(all[16].buf) != maxProcessOutput {
		t.Fatalf("the ended output has %d bytes, the new one %d", len(all[3].buf), len(all[16].buf))
	}
	for range 30 {
		all = append(all, fill())
	}
	if len(read.out.buf) != maxProcessOutput {
		t.Errorf("an output with a reader was cut to %d bytes", len(read.out.buf))
	}
	for i, o := range all {
		if i != 3 && len(o.buf) < 128<<10 {
			t.Errorf("output %d has %d bytes", i, len(o.buf))
		}
	}
	// Each of many more has the smallest buffer at least.
	for range 1000 {
		o := a.add()
		o.write(stdout, []byte("x"))
		if len(o.buf) == 0 {
			t.Fatal("no buffer")
		}
	}
}
