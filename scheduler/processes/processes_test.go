package processes_test

import (
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/processes"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestFind(t *testing.T) {
	server := storetest.Server(t)
	connect := func() *store.Store { return storetest.Open(t, server) }
	stops := map[string]func(){}
	for _, name := range []string{"b", "a"} {
		st := connect()
		stop, err := processes.Serve(st.Conn, func() proto.Process {
			return proto.Process{Name: name, Problems: []proto.Problem{{Need: "store", Message: name}}}
		})
		if err := errors.Join(err, st.Conn.Flush()); err != nil {
			t.Fatal(err)
		}
		stops[name] = stop
	}
	asker := connect()
	// Malformed answers are ignored.
	_, err := asker.Conn.Subscribe(store.ProcessesSubject, func(m *nats.Msg) {
		_ = asker.Conn.Publish(store.ProcessSubject, []byte("{"))
	})
	if err != nil {
		t.Fatal(err)
	}
	find := func() (names string) {
		t.Helper()
		all, err := processes.Find(storetest.Context(t), asker.Conn, 3*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range all {
			if len(p.Problems) != 1 || p.Problems[0].Message != p.Name {
				t.Errorf("%+v", p)
			}
			names += p.Name
		}
		return names
	}
	if got := find(); got != "ab" {
		t.Errorf("found %q", got)
	}
	stops["b"]()
	if got := find(); got != "a" {
		t.Errorf("found %q after one stopped", got)
	}
}
