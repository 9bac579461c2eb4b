package storagetest

import (
	"io"
	"net"
	"sync"
)

// relay forwards connections to a Unix socket.
type relay struct {
	net.Listener
	to    string
	group sync.WaitGroup

	mu   sync.Mutex
	open map[net.Conn]bool // nil when closed
}

func (r *relay) run() {
	for {
		in, err := r.Accept()
		if err != nil { // closed
			return
		}
		out, err := net.Dial("unix", r.to)
		if err != nil || !r.track(in, out) {
			_ = in.Close()
			continue
		}
		r.group.Go(func() { r.forward(in, out) })
		r.group.Go(func() { r.forward(out, in) })
	}
}

// forward copies until one side is closed, and closes both.
func (r *relay) forward(from, to net.Conn) {
	_, _ = io.Copy(to, from)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range []net.Conn{from, to} {
		_ = c.Close()
		delete(r.open, c)
	}
}

func (r *relay) track(conns ...net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range conns {
		if r.open == nil {
			_ = c.Close()
			continue
		}
		r.open[c] = true
	}
	return r.open != nil
}

func (r *relay) close() {
	_ = r.Close()
	r.mu.Lock()
	for c := range r.open {
		_ = c.Close()
	}
	r.open = nil
	r.mu.Unlock()
	r.group.Wait()
}
