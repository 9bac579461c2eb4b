package pipelines

import (
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/pipelines/spec"
)

// TestDecide sets how cells have ended, calls decide, and compares the statuses of all cells.
func TestDecide(t *testing.T) {
	const chain = `
steps:
  - {name: a, run: x}
  - {name: b, run: x}
  - {name: c, run: x, when: failure}
  - {name: d, run: x, when: always}
`
	const parallel = `
steps:
  - {name: a, run: x}
  - {name: b, run: x, matrix: {k: [1, 2]}}
  - {name: c, run: x, needs: a}
  - {name: d, run: x, needs: [a], workspace: own}
  - {name: e, run: x, needs: []}
  - {name: f, run: x, needs: [b, c, d]}
`
	type S = proto.StepStatus
	const (
		ok   = proto.StepSuccess
		fail = proto.StepFailed
	)
	for _, test := range []struct {
		name, file string
		ended      map[int]S // in rounds of decisions, once the cell runs
		want       string    // the first letters of the statuses
		status     proto.PipelineStatus
	}{
		{"the first starts", chain, nil, "rwww", proto.PipelineRunning},
		{"one after the other", chain, map[int]S{0: ok}, "srww", proto.PipelineRunning},
		{"a failure skips", chain, map[int]S{0: fail}, "fkrw", proto.PipelineRunning},
		{"all ends after a failure", chain, map[int]S{0: fail, 2: ok, 3: ok}, "fkss", proto.PipelineFailed},
		{"always after success", chain, map[int]S{0: ok, 1: ok, 3: ok}, "ssks", proto.PipelineSuccess},
		{"one in the shared workspace", parallel, nil, "rwwwwww", proto.PipelineRunning},
		{"own workspaces run together", parallel, map[int]S{0: ok}, "srrrrww", proto.PipelineRunning},
		{"the shared workspace is free again", parallel, map[int]S{0: ok, 3: ok}, "srrsrrw", proto.PipelineRunning},
		{"a failing cell", parallel, map[int]S{0: ok, 1: fail, 2: ok, 3: ok, 4: ok, 5: ok}, "sfssssk", proto.PipelineFailed},
		{
			"all succeed", parallel,
			map[int]S{0: ok, 1: ok, 2: ok, 3: ok, 4: ok, 5: ok, 6: ok},
			"sssssss",
			proto.PipelineSuccess,
		},
	} {
		p, err := spec.Parse(test.file)
		if err != nil {
			t.Fatal(err)
		}
		p.CreatedAt = time.Now()
		s := newState(p)
		letters := map[S]string{
			proto.StepWaiting: "w", proto.StepRunning: "r", ok: "s", fail: "f", proto.StepSkipped: "k", proto.StepCancelled: "c",
		}
		for decide(p, s, p.CreatedAt, s.Deadline) {
			for i, status := range test.ended {
				if s.Cells[i].Status == proto.StepRunning {
					s.Cells[i].Status = status
				}
			}
		}
		var got strings.Builder
		for _, c := range s.Cells {
			got.WriteString(letters[c.Status])
		}
		if got.String() != test.want || s.Status != test.status {
			t.Errorf("%s: %s %s, want %s %s", test.name, got.String(), s.Status, test.want, test.status)
		}
	}
}

func TestDecideEnds(t *testing.T) {
	p, err := spec.Parse("timeout: 60\nsteps:\n  - {name: a, run: x}\n  - {name: b, run: x, when: always}\n")
	if err != nil {
		t.Fatal(err)
	}
	p.CreatedAt = time.Now()
	late := p.CreatedAt.Add(time.Minute)
	for name, test := range map[string]struct {
		cancel bool
		at     time.Time
		status proto.PipelineStatus
		reason string
	}{
		"cancelled": {true, p.CreatedAt, proto.PipelineCancelled, ""},
		"timeout":   {false, late, proto.PipelineFailed, "the run did not end within its timeout of 1m0s"},
	} {
		s := newState(p)
		decide(p, s, p.CreatedAt, s.Deadline)
		s.Cancelling = test.cancel
		if !decide(p, s, test.at, s.Deadline) || s.Status != proto.PipelineRunning ||
			s.Cells[1].Status != proto.StepCancelled {
			t.Errorf("%s: %+v", name, s)
		}
		s.Cells[0].Status = proto.StepCancelled
		if !decide(p, s, test.at, s.Deadline) || s.Status != test.status || s.Reason != test.reason ||
			decide(p, s, test.at, s.Deadline) {
			t.Errorf("%s: %+v", name, s)
		}
	}
}
