package app

import (
	"io"
	"net"
	"net/http"
	"sync/atomic"
)

// limitedListener accepts connections for a server that tells it, by count, how many are open. Whoever comes while there are too many is
// told to come again, so that nobody fills the memory with connections that say nothing.
type limitedListener struct {
	net.Listener
	most int64
	open atomic.Int64
}

// fullAnswer is HTTP/1.1, whatever the client speaks: it has said nothing yet.
const fullAnswer = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n\r\n" +
	`{"error":"service_unavailable","message":"too many connections are open here; connect again"}` + "\n"

// Accept waits for the next connection that there is room for.
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil || l.open.Load() < l.most {
			return conn, err
		}
		_, _ = io.WriteString(conn, fullAnswer) // so little does not wait for the client
		_ = conn.Close()
	}
}

// count is the server's hook for the states of connections. A new one is counted before the next is accepted.
func (l *limitedListener) count(_ net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		l.open.Add(1)
	case http.StateClosed, http.StateHijacked:
		l.open.Add(-1)
	}
}
