package app

import (
	"io"
	"net"
	"net/http"
	"sync/atomic"
)

// limitedListener bounds the open connections of a server, which reports them through count. It
// answers further connections with 503, so that idle connections cannot fill the memory.
type limitedListener struct {
	net.Listener
	limit int64
	open  atomic.Int64
}

// fullAnswer is HTTP/1.1, since the client has not sent anything yet.
const fullAnswer = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n\r\n" +
	`{"error":"service_unavailable","message":"too many connections are open here; connect again"}` + "\n"

// Accept waits for the next connection below the limit.
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil || l.open.Load() < l.limit {
			return conn, err
		}
		_, _ = io.WriteString(conn, fullAnswer) // too short to block
		_ = conn.Close()
	}
}

// count is the server's ConnState hook. It counts a new connection before the next is accepted.
func (l *limitedListener) count(_ net.Conn, state http.ConnState) {
	switch state {
	case http.StateNew:
		l.open.Add(1)
	case http.StateClosed, http.StateHijacked:
		l.open.Add(-1)
	}
}
