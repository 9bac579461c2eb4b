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

// line is a way to the server that can be made to hang, as a network does that drops everything.
type line struct {
	nats.InProcessConnProvider
	mu sync.Mutex // held while it hangs
}

func (l *line) InProcessConn() (net.Conn, error) {
	c, err := l.InProcessConnProvider.InProcessConn()
	return &hangs{c, l}, err
}

type hangs struct {
	net.Conn
	line *line
}

func (h *hangs) Write(p []byte) (int, error) {
	h.line.mu.Lock()
	defer h.line.mu.Unlock()
	return h.Conn.Write(p)
}

// A renewal whose call does not even return must not keep the program running.
func TestProgramIsStoppedThoughARenewalHangs(t *testing.T) {
	w := newWorld(t)
	way := &line{InProcessConnProvider: w.server}
	st, err := store.Connect(w.ctx, store.Access{InProcess: way, Name: t.Name()}, store.Config{AttachOnly: true}, storetest.Log(t))
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
	way.mu.Lock()
	t.Cleanup(way.mu.Unlock)
	select {
	case <-running.Done():
		if cause := context.Cause(running); !errors.Is(cause, proto.ErrLost) {
			t.Fatalf("the program is stopped because %v", cause)
		}
	case <-w.ctx.Done():
		t.Fatal("the program runs on")
	}
}
