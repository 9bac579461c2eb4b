package store_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestStreamLeaderChangeIsReported(t *testing.T) {
	t.Parallel()
	st := storetest.Cluster(t)
	ctx := storetest.Context(t)
	// The elections of streams that were just created are announced late.
	for attempts := 5; ; attempts-- {
		elected, other := st.Leaders.Changed(store.OutputLeader), st.Leaders.Changed(store.ControlLeader)
		attempt, cancel := st.Leaders.Attempt(ctx, store.OutputLeader, time.Hour)
		defer cancel()
		if _, err := st.Conn.RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN."+store.OutputLeader, nil); err != nil {
			t.Fatal(err)
		}
		for _, over := range []<-chan struct{}{elected, attempt.Done()} {
			select {
			case <-over:
			case <-ctx.Done():
				t.Fatal("the new leader is not reported")
			}
		}
		select {
		case <-other:
			if attempts == 0 {
				t.Fatal("a change is reported for a stream that had none")
			}
		default:
			return
		}
	}
}

func TestDispatcherChangeIsReported(t *testing.T) {
	t.Parallel()
	st := storetest.Open(t, storetest.Server(t))
	changed := st.Leaders.Changed(store.Dispatcher)
	if err := st.Conn.Publish(store.AnnounceSubject, nil); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	case <-storetest.Context(t).Done():
		t.Error("the dispatcher's announcement is not reported")
	}
}

// Requests on their way when the connection broke are never answered.
func TestReconnectionIsReportedAsLeaderChange(t *testing.T) {
	t.Parallel()
	s := storetest.NewRestartable(t)
	st := storetest.Open(t, s)
	again := st.Leaders.Changed(store.ControlLeader)
	s.Restart()
	select {
	case <-again:
	case <-storetest.Context(t).Done():
		t.Error("the reconnection is not reported")
	}
	if st.Conn.Status() != nats.CONNECTED {
		t.Errorf("the connection is %s", st.Conn.Status())
	}
}
