package app

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
)

// maxUnanswered is how many bytes a client may send over HTTP/2 while the server sends nothing.
// Clients need much less: the server acknowledges settings and pings, allows the next part of a body
// within its window of 1 MiB, and answers requests, of which 250 may be open. Package net/http takes
// any number of frames that need no answer, such as empty CONTINUATION frames, which cost processor
// time.
const maxUnanswered = 2 << 20

// errUnanswered ends a connection with more than maxUnanswered.
var errUnanswered = errors.New("the client sends frames that need no answer")

// preface is the start of the HTTP/2 preface; no HTTP/1 request served here starts like this.
const preface = "PRI "

// countedConn ends an HTTP/2 connection whose client sends frames that need no answer. HTTP/1
// bodies are read only as far as a handler wants them.
type countedConn struct {
	*net.TCPConn
	http2      atomic.Bool
	seen       int          // bytes of the preface seen so far, -1 after any other byte
	unanswered atomic.Int64 // bytes received since the last write
}

// Read implements [net.Conn].
func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.TCPConn.Read(p)
	for i := 0; i < n && c.seen >= 0 && c.seen < len(preface); i++ {
		if p[i] != preface[c.seen] {
			c.seen = -1
		} else if c.seen++; c.seen == len(preface) {
			c.http2.Store(true)
		}
	}
	if c.unanswered.Add(int64(n)) > maxUnanswered && c.http2.Load() {
		return 0, errUnanswered
	}
	return n, err
}

// Write implements [net.Conn].
func (c *countedConn) Write(p []byte) (int, error) {
	c.unanswered.Store(0)
	return c.TCPConn.Write(p)
}

// ReadFrom implements [io.ReaderFrom], for sendfile.
func (c *countedConn) ReadFrom(r io.Reader) (int64, error) {
	c.unanswered.Store(0)
	return c.TCPConn.ReadFrom(r)
}

// countHTTP2 makes connections that negotiate HTTP/2 over TLS end like those without TLS.
func countHTTP2(cfg *tls.Config) {
	cfg.NextProtos = []string{"h2", "http/1.1"}
	base := cfg.Clone()
	cfg.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		conn, ok := hello.Conn.(*countedConn)
		if !ok {
			return nil, nil
		}
		own := base.Clone()
		own.VerifyConnection = func(state tls.ConnectionState) error {
			conn.http2.Store(state.NegotiatedProtocol == "h2")
			return nil
		}
		return own, nil
	}
}

// limitedListener limits the open connections of a server, and reports them through count. It
// answers further connections with 503, so that idle connections cannot fill the memory.
type limitedListener struct {
	net.Listener
	limit int64
	open  atomic.Int64
}

// fullAnswer is HTTP/1.1, since the client has not sent anything yet.
const fullAnswer = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: " +
	"1\r\nConnection: close\r\n\r\n" +
	`{"error":"service_unavailable","message":"too many connections are open here; connect again"}` + "\n"

// Accept waits for the next connection below the limit.
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.open.Load() < l.limit {
			if tcp, ok := conn.(*net.TCPConn); ok {
				conn = &countedConn{TCPConn: tcp}
			}
			return conn, nil
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
