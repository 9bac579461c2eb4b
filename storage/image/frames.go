package image

import (
	"bufio"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"runtime"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	// minFrame and maxFrame bound the content of a frame, in bytes. Only the last frame of an image
	// may be smaller. Readers of earlier versions accept frames of at most 8 MiB.
	minFrame, maxFrame = 512 << 10, 4 << 20
	// cutMask makes one entry in 32 begin a frame, chosen by its path.
	cutMask = 31
	// maxStoredFrame bounds a frame as it is stored. Incompressible content grows slightly.
	maxStoredFrame = maxFrame + maxFrame/64
	// maxFrames bounds the frames of an image: twice as many as Pack writes for the largest image.
	maxFrames = 2 * proto.MaxImageUnpacked / minFrame
)

// frameWriter compresses a stream into frames that can be decompressed independently. Frames are
// compressed concurrently and written in order. Only one goroutine may use it.
type frameWriter struct {
	encoder *zstd.Encoder
	content []byte
	frames  chan chan []byte
	done    chan struct{} // closed once all frames are written
	err     error         // of the output; valid once done is closed
}

func newFrameWriter(to io.Writer) (*frameWriter, error) {
	n := runtime.GOMAXPROCS(0)
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(n), zstd.WithWindowSize(window))
	if err != nil {
		return nil, err
	}
	w := &frameWriter{encoder: encoder, frames: make(chan chan []byte, n), done: make(chan struct{})}
	go func() {
		defer close(w.done)
		for frame := range w.frames {
			if stored := <-frame; w.err == nil {
				_, w.err = to.Write(stored)
			}
		}
	}()
	return w, nil
}

// Write never returns an error: Close returns the output's.
func (w *frameWriter) Write(b []byte) (int, error) {
	written := len(b)
	for len(b) > 0 {
		n := min(len(b), maxFrame-len(w.content))
		w.content, b = append(w.content, b[:n]...), b[n:]
		if len(w.content) == maxFrame {
			w.cut()
		}
	}
	return written, nil
}

// begin ends a frame if the entry at path, whose content has size bytes, should begin another one.
// The split points depend on few preceding entries, so that images differing in some entries share
// the frames elsewhere.
func (w *frameWriter) begin(path string, size int64) {
	if len(w.content) < minFrame {
		return
	}
	sum := fnv.New32a()
	_, _ = io.WriteString(sum, path)
	if sum.Sum32()&cutMask == 0 || int64(len(w.content))+size > maxFrame {
		w.cut()
	}
}

func (w *frameWriter) cut() {
	content, frame := w.content, make(chan []byte, 1)
	w.content = nil
	w.frames <- frame
	go func() { frame <- w.encoder.EncodeAll(content, nil) }()
}

// Close writes the last frame and waits for all.
func (w *frameWriter) Close() error {
	if len(w.content) > 0 {
		w.cut()
	}
	close(w.frames)
	<-w.done
	return errors.Join(w.err, w.encoder.Close())
}

// frameReader decompresses an image. It reads ahead, and decompresses frames concurrently. An image
// of an earlier version is one large frame, which is decompressed as a stream.
type frameReader struct {
	onFrame func(stored []byte) // nil, or called with each frame in order
	content []byte
	frames  chan chan decodedFrame
	stop    chan struct{}
	running sync.WaitGroup
	decoder *zstd.Decoder
	stream  bool
}

type decodedFrame struct {
	content []byte
	err     error
}

func newFrameReader(from io.Reader, onFrame func([]byte)) (*frameReader, error) {
	in := bufio.NewReaderSize(from, 1<<20)
	begin, err := in.Peek(zstd.HeaderMaxSize)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	var h zstd.Header
	n := runtime.GOMAXPROCS(0)
	r := &frameReader{onFrame: onFrame, stop: make(chan struct{})}
	if h.Decode(begin) != nil || !h.HasFCS || h.FrameContentSize > maxFrame {
		r.stream = true
		r.decoder, err = zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(window))
		return r, err
	}
	r.decoder, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(n), zstd.WithDecoderMaxMemory(maxFrame))
	if err != nil {
		return nil, err
	}
	r.frames = make(chan chan decodedFrame, n+1)
	r.running.Go(func() { r.readAhead(in) })
	return r, nil
}

// readAhead reads frames until the end, an error, or Close.
func (r *frameReader) readAhead(in *bufio.Reader) {
	defer close(r.frames)
	for n := 0; ; n++ {
		stored, err := readFrame(in)
		if errors.Is(err, io.EOF) {
			return
		}
		if err == nil && n == maxFrames {
			err = fmt.Errorf("it has more than %d frames", maxFrames)
		}
		frame := make(chan decodedFrame, 1)
		select {
		case r.frames <- frame:
		case <-r.stop:
			return
		}
		if err != nil {
			frame <- decodedFrame{err: err}
			return
		}
		r.running.Go(func() {
			content, err := r.decoder.DecodeAll(stored, nil)
			frame <- decodedFrame{content, err}
		})
		if r.onFrame != nil {
			r.onFrame(stored)
		}
	}
}

// readFrame reads a stored frame. It returns [io.EOF] if there is none.
func readFrame(in *bufio.Reader) ([]byte, error) {
	begin, err := in.Peek(zstd.HeaderMaxSize)
	if len(begin) == 0 {
		return nil, err
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	var h zstd.Header
	if err := h.Decode(begin); err != nil {
		return nil, err
	}
	if h.Skippable {
		return nil, errors.New("it has a frame without content")
	}
	frame := make([]byte, 0, 64<<10)
	read := func(n int) ([]byte, error) {
		from := len(frame)
		if from+n > maxStoredFrame {
			return nil, fmt.Errorf("a frame is larger than %d bytes", maxStoredFrame)
		}
		frame = append(frame, make([]byte, n)...)
		if _, err := io.ReadFull(in, frame[from:]); errors.Is(err, io.EOF) {
			return nil, io.ErrUnexpectedEOF
		} else if err != nil {
			return nil, err
		}
		return frame[from:], nil
	}
	if _, err := read(h.HeaderSize); err != nil {
		return nil, err
	}
	for last := false; !last; {
		b, err := read(3)
		if err != nil {
			return nil, err
		}
		block := int(b[0]) | int(b[1])<<8 | int(b[2])<<16
		size, kind := block>>3, block>>1&3
		if last = block&1 != 0; kind == 1 {
			size = 1 // one byte that is repeated
		}
		if _, err := read(size); err != nil {
			return nil, err
		}
	}
	if h.HasCheckSum {
		_, err = read(4)
		return frame, err
	}
	return frame, nil
}

// Read implements [io.Reader].
func (r *frameReader) Read(b []byte) (int, error) {
	if r.stream {
		return r.decoder.Read(b)
	}
	for len(r.content) == 0 {
		frame, ok := <-r.frames
		if !ok {
			return 0, io.EOF
		}
		decoded := <-frame
		if decoded.err != nil {
			return 0, decoded.err
		}
		r.content = decoded.content
	}
	n := copy(b, r.content)
	r.content = r.content[n:]
	return n, nil
}

// Close waits for a read of the input that has begun.
func (r *frameReader) Close() {
	close(r.stop)
	r.running.Wait()
	r.decoder.Close()
}
