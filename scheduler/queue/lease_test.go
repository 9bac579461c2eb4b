package queue_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// hangingServer connects to the server, and hangs while mu is held, like a network that drops
// packets.
type hangingServer struct {
	nats.InProcessConnProvider
	mu sync.Mutex
}

func (l *hangingServer) InProcessConn() (net.Conn, error) {
	c, err := l.InProcessConnProvider.InProcessConn()
	return &hangingConn{c, l}, err
}

type hangingConn struct {
	net.Conn
	server *hangingServer
}

func (h *hangingConn) Write(p []byte) (int, error) {
	h.server.mu.Lock()
	defer h.server.mu.Unlock()
	return h.Conn.Write(p)
}

func TestProgramIsStoppedWhileARenewalHangs(t *testing.T) {
	w := newWorld(t)
	server := &hangingServer{InProcessConnProvider: w.server}
	st, err := store.Connect(w.ctx, store.Access{InProcess: server, Name: t.Name()}, store.Config{AttachOnly: true}, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(st.Close)
	h := &host{Slots: &queue.Slots{
		Store: st, Worker: "w", Total: 1, Capabilities: []string{queue.CapabilityLanguage(proto.Python)}, Log: storetest.Log(t),
	}}
	w.background(h.Run)
	w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	running := w.claim(w.take(h))
	server.mu.Lock()
	t.Cleanup(server.mu.Unlock)
	select {
	case <-running.Done():
		if cause := context.Cause(running); !errors.Is(cause, proto.ErrLost) {
			t.Fatalf("the context was cancelled with cause %v", cause)
		}
	case <-w.ctx.Done():
		t.Fatal("the program was not stopped")
	}
}
