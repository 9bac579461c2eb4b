package agent_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/agent/agenttest"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// interpreter is a host whose sandboxes can be lost, and which remembers cells by their ids, as guests do.
type interpreter struct {
	*agenttest.Host
	start proto.TraceID
	cells map[proto.TraceID]int // how often each was asked for
}

func (h *interpreter) Place(context.Context, string, bool) (*proto.Place, error) {
	return &proto.Place{Start: h.start, Context: "python-1-a", Note: "the variables are gone"}, nil
}

func (h *interpreter) RunCell(
	_ context.Context, _ string, at *proto.Place, id proto.TraceID, code string,
) (*api.CellResult, error) {
	if at.Start != h.start {
		return nil, api.Errorf(api.CodeContextLost, "its worker was lost")
	}
	h.cells[id]++
	return &api.CellResult{
		Status: "ok", Stdout: code, Files: []api.CellFile{{Path: "gone.txt"}},
		Results: []api.Display{{Data: map[string]json.RawMessage{
			"text/plain": json.RawMessage(`"a figure"`), "image/png": json.RawMessage(`"cG5n"`),
		}}},
	}, nil
}

// A process that continues a run has the logged place of a call: it asks for the same cell again there, and runs it
// nowhere else.
func TestACellRunsOnceAtItsPlace(t *testing.T) {
	host := &interpreter{agenttest.NewHost(), "trc_1", map[proto.TraceID]int{}}
	tool := func() (agent.Tool, *agent.Output) {
		c := &agent.Container{Host: host, ID: "c", Run: "run", Expires: func(at time.Time) time.Time { return at }}
		out := &agent.Output{}
		return c.Placed(agent.Tool{Execute: func(ctx context.Context, call *agent.Call) (*agent.Outcome, error) {
			o, err := c.Cell(ctx, call.ID, "x")
			if err != nil {
				return nil, err
			}
			*out = *o
			return &agent.Outcome{Text: o.Record.Result.Stdout, Pictures: o.Pictures}, nil
		}}, true), out
	}
	call := &agent.Call{ID: "call_1"}
	first, out := tool()
	planned, err := first.Execute(t.Context(), call)
	if err != nil || planned.Change == nil || planned.Change.Place.Start != "trc_1" || len(host.cells) != 0 {
		t.Fatalf("%+v, %v: a cell runs before its place is logged", planned, err)
	}
	o, err := first.Apply(t.Context(), call, planned)
	if err != nil || o.Text != "x\na figure" || len(o.Pictures) != 1 || o.Pictures[0].Base64 != "cG5n" ||
		!strings.Contains(out.Record.Result.Stderr, "the variables are gone") {
		t.Errorf("%+v of %+v, %v", o, out.Record, err)
	}
	second, _ := tool() // of another process
	if _, err := second.Apply(t.Context(), call, planned); err != nil || len(host.cells) != 1 {
		t.Errorf("cells %v, %v", host.cells, err)
	}
	host.start = "trc_2"
	if _, err := second.Apply(t.Context(), call, planned); err != nil || len(host.cells) != 1 {
		t.Errorf("after the sandbox was lost: cells %v, %v", host.cells, err)
	}
	third, out := tool()
	if _, err := third.Apply(t.Context(), call, planned); err != nil || len(host.cells) != 1 ||
		!strings.Contains(out.Record.Result.Stderr, "what the call has done is not known") {
		t.Errorf("after the sandbox was lost: cells %v, %+v, %v", host.cells, out.Record, err)
	}
}
