package inject

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"strings"
	"sync"

	"github.com/bullpen-run/bullpen/proto"
)

var errPeeked = errors.New("the beginning of the handshake is known")

// peek reads the beginning of a connection. If it is TLS, it returns the server's name, or "" if
// there is none that a certificate can have.
func peek(ctx context.Context, conn net.Conn) (name string, isTLS bool, read []byte) {
	recorder := &recordConn{Conn: conn}
	err := tls.Server(recorder, &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			name = strings.ToLower(hello.ServerName)
			return nil, errPeeked
		},
	}).HandshakeContext(ctx)
	if rule, bad := proto.ParseNetworkRule(name); bad != nil || rule.Name != name || strings.HasPrefix(name, "*") {
		name = ""
	}
	_, other := errors.AsType[tls.RecordHeaderError](err)
	return name, !other, recorder.read.Bytes()
}

// recordConn records reads, and discards writes.
type recordConn struct {
	net.Conn
	read bytes.Buffer
}

func (c *recordConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.read.Write(p[:n])
	return n, err
}

func (c *recordConn) Write(p []byte) (int, error) { return len(p), nil }

// replayConn is read from again.
type replayConn struct {
	net.Conn
	rest []byte
}

func (c *replayConn) Read(p []byte) (int, error) {
	if len(c.rest) > 0 {
		n := copy(p, c.rest)
		c.rest = c.rest[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

// oneConn is a listener with one connection. It is closed with the connection.
type oneConn struct {
	conn net.Conn
	once sync.Once
	done chan struct{}
}

func (l *oneConn) Accept() (conn net.Conn, err error) {
	if l.conn != nil {
		conn, l.conn = &closingConn{l.conn, l}, nil
		return conn, nil
	}
	<-l.done
	return nil, net.ErrClosed
}

func (l *oneConn) Close() error { return nil }

func (l *oneConn) Addr() net.Addr { return &net.TCPAddr{} }

type closingConn struct {
	net.Conn
	listener *oneConn
}

func (c *closingConn) Close() error {
	err := c.Conn.Close()
	c.listener.once.Do(func() { close(c.listener.done) })
	return err
}
