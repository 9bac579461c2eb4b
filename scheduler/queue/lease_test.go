package queue_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
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

// deafServer connects to the server. Nothing that the server sends arrives while mu is held.
type deafServer struct {
	nats.InProcessConnProvider
	mu sync.Mutex
}

func (d *deafServer) InProcessConn() (net.Conn, error) {
	c, err := d.InProcessConnProvider.InProcessConn()
	return &deafConn{c, d}, err
}

type deafConn struct {
	net.Conn
	server *deafServer
}

func (c *deafConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.server.mu.Lock()
	defer c.server.mu.Unlock()
	return n, err
}

// The claim is stored, but its acknowledgement arrives after the lease has run out for the worker.
func TestLateAcknowledgementOfAClaimDoesNotLoseTheLease(t *testing.T) {
	w := newLeaderlessWorld(t)
	w.short = true
	stop := w.dispatcher("d")
	server := &deafServer{InProcessConnProvider: w.server}
	h := w.run(w.newSlots(server, "w", 1, queue.CapabilityLanguage(proto.Python)))
	id := w.submit(storetest.Job("acme", "k", proto.ModeAsync))
	l := w.take(h)
	stop() // nobody ends the lease
	holderTimeout := h.HolderTimeout()
	server.mu.Lock()
	time.AfterFunc(holderTimeout, server.mu.Unlock)
	running := w.claim(l)
	select {
	case <-running.Done():
		t.Fatalf("the program was stopped: %v", context.Cause(running))
	case <-time.After(holderTimeout / 2):
	}
	w.finish(l)
	if rec := w.wait(id); rec.Status != proto.StatusSuccess {
		t.Errorf("%+v", rec)
	}
}

func TestProgramIsStoppedWhileARenewalHangs(t *testing.T) {
	w := newShortWorld(t)
	server := &hangingServer{InProcessConnProvider: w.server}
	h := w.run(w.newSlots(server, "w", 1, queue.CapabilityLanguage(proto.Python)))
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
