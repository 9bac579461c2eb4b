package store_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestNewLeaderOfAStreamIsNews(t *testing.T) {
	t.Parallel()
	st := storetest.Cluster(t)
	ctx := storetest.Context(t)
	elected, other := st.LeaderChanged(store.OutputLeader), st.LeaderChanged(store.ControlLeader)
	try, cancel := st.AttemptContext(ctx, store.OutputLeader, time.Hour)
	defer cancel()
	if _, err := st.Conn.RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN."+store.OutputLeader, nil); err != nil {
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
	st := storetest.Open(t, storetest.Server(t))
	leads := st.LeaderChanged(store.Dispatcher)
	if err := st.Conn.Publish(store.AnnounceSubject, nil); err != nil {
		t.Fatal(err)
	}
	select {
	case <-leads:
	case <-storetest.Context(t).Done():
		t.Error("it is not heard")
	}
}

// What was on its way when the connection broke gets no answer.
func TestReconnectionIsNews(t *testing.T) {
	t.Parallel()
	s := storetest.NewRestartable(t)
	st := storetest.Open(t, s)
	again := st.LeaderChanged(store.ControlLeader)
	s.Restart()
	select {
	case <-again:
	case <-storetest.Context(t).Done():
		t.Error("it is not heard")
	}
	if st.Conn.Status() != nats.CONNECTED {
		t.Errorf("the connection is %s", st.Conn.Status())
	}
}
