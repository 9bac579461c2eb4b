package thread

import "io"

const (
	readAheadPiece  = 256 << 10 // bytes
	readAheadPieces = 8
)

// readAhead reads another reader in the background, so that a layer is fetched while it is applied.
type readAhead struct {
	pieces  chan piece
	free    chan []byte
	quit    chan struct{}
	current piece
	left    []byte // unread part of current
}

type piece struct {
	buffer []byte
	n      int
	err    error // after n bytes
}

func newReadAhead(r io.Reader) *readAhead {
	a := &readAhead{
		pieces: make(chan piece, readAheadPieces), free: make(chan []byte, readAheadPieces),
		quit: make(chan struct{}),
	}
	for range readAheadPieces {
		a.free <- make([]byte, readAheadPiece)
	}
	go func() {
		defer close(a.pieces)
		for more := true; more; {
			select {
			case buffer := <-a.free:
				n, err := r.Read(buffer)
				a.pieces <- piece{buffer, n, err} // never blocks: there are as many slots as buffers
				more = err == nil
			case <-a.quit:
				more = false
			}
		}
	}()
	return a
}

// Read implements [io.Reader].
func (a *readAhead) Read(p []byte) (int, error) {
	for len(a.left) == 0 {
		if a.current.err != nil {
			return 0, a.current.err
		}
		if a.current.buffer != nil {
			a.free <- a.current.buffer
		}
		a.current = <-a.pieces
		a.left = a.current.buffer[:a.current.n]
	}
	n := copy(p, a.left)
	a.left = a.left[n:]
	return n, nil
}

// stop waits until the underlying reader is no longer used.
func (a *readAhead) stop() {
	close(a.quit)
	for range a.pieces {
	}
}
