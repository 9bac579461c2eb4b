package web

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// Pauses between the interim responses to a client that has closed its side of the connection.
const (
	firstProbe = 100 * time.Millisecond
	laterProbe = 5 * time.Second
)

// interimResponse may be sent any number of times before a response (RFC 9110, 15.2).
const interimResponse = "HTTP/1.1 100 Continue\r\n\r\n"

type connKey struct{}

// ConnContext is for the [http.Server] that calls Handler. Without it, a client that closes its
// side of the connection after the request gets no answer.
func ConnContext(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, conn)
}

// presence distinguishes clients that have left from those that have only closed their side of the
// connection and wait for the answer. In both cases net/http cancels the request's context, and the
// connections look the same until something is sent. Before the response begins, presence sends
// interim responses, which the host of a client that has left rejects.
type presence struct {
	conn   net.Conn
	closed context.Context // done when the client has closed its side of the connection
	ctx    context.Context // of the request; done when the client has left or the request has ended
	gone   context.CancelFunc

	mu    sync.Mutex // held while an interim response is sent
	begun bool       // the response has begun
}

// watchClient returns r with a context that is done when the client has left. The presence is nil
// if the server cannot send interim responses.
func watchClient(r *http.Request) (*http.Request, *presence) {
	conn, ok := r.Context().Value(connKey{}).(net.Conn)
	if !ok || r.ProtoMajor != 1 || r.ProtoMinor == 0 {
		return r, nil
	}
	p := &presence{conn: conn, closed: r.Context()}
	p.ctx, p.gone = context.WithCancel(context.WithoutCancel(r.Context()))
	context.AfterFunc(r.Context(), p.probe)
	return r.WithContext(p.ctx), p
}

// whileConnected returns r with a context that is also done when the client closes its side of the
// connection.
func (p *presence) whileConnected(r *http.Request) (connected *http.Request, release func()) {
	ctx, cancel := context.WithCancel(r.Context())
	if p == nil {
		return r.WithContext(ctx), cancel
	}
	stop := context.AfterFunc(p.closed, cancel)
	return r.WithContext(ctx), func() {
		stop()
		cancel()
	}
}

// begin is called before each write of the response.
func (p *presence) begin() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.begun = true
}

// end is called when the handler has returned.
func (p *presence) end() {
	if p != nil {
		p.begin()
		p.gone()
	}
}

// probe sends interim responses until the client has left or the response begins. From then on,
// writes of the response fail if the client has left; streams write at least their keepalives.
func (p *presence) probe() {
	for pause := firstProbe; p.send(); pause = laterProbe {
		select {
		case <-p.ctx.Done():
		case <-time.After(pause):
		}
	}
}

// send reports whether to continue. An error means that an earlier interim response was rejected.
func (p *presence) send() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.begun {
		return false
	}
	if _, err := io.WriteString(p.conn, interimResponse); err != nil {
		p.gone()
		return false
	}
	return true
}
