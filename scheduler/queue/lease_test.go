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
	"github.com/bullpen-run/bullpen/scheduler/stream"
	"github.com/bullpen-run/bullpen/scheduler/streamtest"
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
	set, err := stream.Connect(w.ctx, stream.Access{InProcess: way, Name: t.Name()}, stream.Config{Guest: true}, streamtest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(set.Close)
	h := &host{Slots: &queue.Slots{
		Set: set, Worker: "w", Total: 1, Offers: []string{queue.OfferLanguage(proto.Python)}, Log: streamtest.Log(t),
	}}
	w.background(h.Run)
	w.submit(streamtest.Job("acme", "k", proto.ModeAsync))
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
