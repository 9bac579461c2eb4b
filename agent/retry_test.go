package agent_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/agenttest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// silent is a model that says nothing.
type silent struct{}

func (silent) Stream(context.Context, *agent.Turn, func(string) error) (*agent.Reply, error) {
	return &agent.Reply{Finish: agent.FinishDone}, nil
}

// ListModels implements [agent.Upstream].
func (silent) ListModels(context.Context) (names []string, others bool, err error) {
	return nil, true, nil
}

func newSilent() *background {
	return &background{store: agenttest.NewStore(), up: silent{}, calls: map[string]int{}}
}

// failing is an API whose preparation fails as often as before says.
type failing struct {
	*background
	before atomic.Int64 // times that it fails
	fail   func() error
}

func (f *failing) Prepare(
	ctx context.Context, host agent.Host, record *proto.AgentRun, started *agent.Start,
) (*agent.Run, *agent.Start, error) {
	if f.before.Add(-1) >= 0 {
		if err := f.fail(); err != nil {
			return nil, nil, err
		}
	}
	return f.background.Prepare(ctx, host, record, started)
}

// A run that this side cannot begin now is tried again. One that the client is to blame for is not, and
// a panic ends one run.
func TestRunsThatCannotBegin(t *testing.T) {
	for name, c := range map[string]struct {
		times int64
		fail  func() error
		want  string
	}{
		"the store of files is down": {3, func() error { return api.Errorf(api.CodeInternal, "down") }, "done"},
		"no memory":                  {3, func() error { return api.Unavailable(1, "full") }, "done"},
		"it was down for hours":      {1 << 40, func() error { return api.Unavailable(1, "full") }, " failed: full"},
		"no such container": {
			1 << 40, func() error { return api.Errorf(api.CodeNotFound, "gone") },
			" failed: gone",
		},
		"a panic": {1, func() error { panic("oh no") }, " failed: something failed on our side"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newSilent()
				f := &failing{background: b, fail: c.fail}
				f.before.Store(c.times)
				b.api = f
				defer b.start(t)()
				b.create(t, "r", "x")
				time.Sleep(3 * time.Hour)
				if got := b.follow(t, "r"); !strings.HasPrefix(got, c.want) {
					t.Errorf("%q", got)
				}
			})
		})
	}
}

// A process whose messages conflict with another one's does not ask the model without a pause.
func TestConflictsPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newSilent()
		b.create(t, "r", "x")
		var tries atomic.Int64
		b.store.FailAppend = func([]byte) error {
			tries.Add(1)
			return proto.ErrConflict
		}
		stop := b.start(t)
		time.Sleep(10 * time.Second)
		stop()
		if n := tries.Load(); n < 2 || n > 100 {
			t.Errorf("%d tries in ten seconds", n)
		}
	})
}
