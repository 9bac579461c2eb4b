package stream_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/scheduler/stream"
	"github.com/bullpen-run/bullpen/scheduler/streamtest"
)

func TestNewLeaderOfAStreamIsNews(t *testing.T) {
	t.Parallel()
	set := streamtest.Cluster(t)
	ctx := streamtest.Context(t)
	elected, other := set.News(stream.OfOutput), set.News(stream.OfControl)
	try, cancel := set.Try(ctx, stream.OfOutput, time.Hour)
	defer cancel()
	if _, err := set.Conn.RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN."+stream.OfOutput, nil); err != nil {
		t.Fatal(err)
	}
	for _, over := range []<-chan struct{}{elected, try.Done()} {
		select {
		case <-over:
		case <-ctx.Done():
			t.Fatal("nothing is heard of the new leader")
		}
	}
	select {
	case <-other:
		t.Error("a stream without a new leader has news")
	default:
	}
}

func TestRollCallIsNews(t *testing.T) {
	t.Parallel()
	set := streamtest.Set(t, streamtest.Server(t))
	leads := set.News(stream.OfDispatcher)
	if err := set.Conn.Publish(stream.RollCall, nil); err != nil {
		t.Fatal(err)
	}
	select {
	case <-leads:
	case <-streamtest.Context(t).Done():
		t.Error("it is not heard")
	}
}

// What was on its way when the connection broke gets no answer.
func TestReconnectionIsNews(t *testing.T) {
	t.Parallel()
	s := streamtest.Restartable(t)
	set := streamtest.Set(t, s)
	again := set.News(stream.OfControl)
	s.Restart()
	select {
	case <-again:
	case <-streamtest.Context(t).Done():
		t.Error("it is not heard")
	}
	if set.Conn.Status() != nats.CONNECTED {
		t.Errorf("the connection is %s", set.Conn.Status())
	}
}
