package cache

import "io"

const (
	// aheadPiece is how much is read ahead at a time, in bytes, and aheadPieces how many pieces at most.
	aheadPiece  = 256 << 10
	aheadPieces = 8
)

// ahead reads from another reader before it is asked, so that a layer is fetched while what came of it is applied. It must be
// closed, and the other one after it.
type ahead struct {
	pieces chan piece
	free   chan []byte
	quit   chan struct{}
	now    piece
	left   []byte // of now
}

type piece struct {
	buffer []byte
	n      int
	err    error // after these bytes
}

func readAhead(r io.Reader) *ahead {
	a := &ahead{pieces: make(chan piece, aheadPieces), free: make(chan []byte, aheadPieces), quit: make(chan struct{})}
	for range aheadPieces {
		a.free <- make([]byte, aheadPiece)
	}
	go func() {
		defer close(a.pieces)
		for more := true; more; {
			select {
			case buffer := <-a.free:
				n, err := r.Read(buffer)
				a.pieces <- piece{buffer, n, err} // there is room for all there are
				more = err == nil
			case <-a.quit:
				more = false
			}
		}
	}()
	return a
}

func (a *ahead) Read(p []byte) (int, error) {
	for len(a.left) == 0 {
		if a.now.err != nil {
			return 0, a.now.err
		}
		if a.now.buffer != nil {
			a.free <- a.now.buffer
		}
		a.now = <-a.pieces
		a.left = a.now.buffer[:a.now.n]
	}
	n := copy(p, a.left)
	a.left = a.left[n:]
	return n, nil
}

// Close ends the reading, and returns when that has ended.
func (a *ahead) Close() error {
	close(a.quit)
	for range a.pieces {
	}
	return nil
}
