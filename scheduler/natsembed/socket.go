package natsembed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
)

// maxSocketPath is the length of the longest path of a Unix socket on Linux.
const maxSocketPath = 107

// Listen opens a Unix socket, for processes of the same user on this machine. The caller has locked
// the directory, so an existing socket is stale.
func Listen(path string) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("listen on %s: the path of a socket has at most %d bytes: choose a shorter --data", path,
			maxSocketPath)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove the socket of an earlier process: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen for workers: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("listen for workers: %w", err)
	}
	return l, nil
}

// Serve connects the clients of a listener with the server until ctx is done. It closes the
// listener.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	var open sync.WaitGroup
	defer open.Wait()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		client, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept a connection of a worker: %w", err)
		}
		open.Go(func() { s.relay(ctx, client) })
	}
}

// relay copies between a client and the server until one of them closes its connection.
func (s *Server) relay(ctx context.Context, client net.Conn) {
	server, err := s.InProcessConn()
	if err != nil { // the client tries again
		s.log.Log(ctx, slog.LevelDebug, "connection of a worker refused", "error", err)
		_ = client.Close()
		return
	}
	closeBoth := func() { _, _ = client.Close(), server.Close() }
	stop := context.AfterFunc(ctx, closeBoth)
	defer stop()
	var copies sync.WaitGroup
	for _, pair := range [][2]net.Conn{{client, server}, {server, client}} {
		copies.Go(func() {
			defer closeBoth()
			_, _ = io.Copy(pair[0], pair[1]) // both ends notice
		})
	}
	copies.Wait()
}

// Socket is the path of a socket that a server in another process serves. It is a
// [nats.InProcessConnProvider].
type Socket string

// InProcessConn opens a connection to the server.
func (s Socket) InProcessConn() (net.Conn, error) { return net.Dial("unix", string(s)) }
