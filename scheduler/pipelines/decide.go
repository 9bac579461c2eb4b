package pipelines

import (
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// maxRunning is the number of cells of a run that run at the same time.
const maxRunning = 32

// newState returns the state of a run before anything has started.
func newState(p *proto.Pipeline) *proto.PipelineState {
	s := &proto.PipelineState{
		ID: p.ID, Org: p.Org, Name: p.Name, Commit: p.Commit, Branch: p.Branch, CreatedAt: p.CreatedAt,
		Deadline: p.CreatedAt.Add(time.Duration(p.Timeout)),
		Status:   proto.PipelineRunning, HasSecrets: len(p.Secrets) > 0, Cells: []proto.CellState{},
	}
	for i := range p.Steps {
		for j := range p.Steps[i].Cells {
			s.Cells = append(s.Cells,
				proto.CellState{Step: p.Steps[i].Name, Cell: p.Steps[i].Cells[j].Name, Status: proto.StepWaiting})
		}
	}
	return s
}

// cellIndex is the index of a step in a pipeline, and of a cell in the step.
type cellIndex struct{ step, cell int }

// cellIndexes returns the indexes of all cells, in the order of [proto.PipelineState.Cells].
func cellIndexes(p *proto.Pipeline) (all []cellIndex) {
	for i := range p.Steps {
		for j := range p.Steps[i].Cells {
			all = append(all, cellIndex{i, j})
		}
	}
	return all
}

// decide advances the state of a run: cells that can start become running, others are skipped or
// cancelled, and the run ends once all of them have. From the deadline on, cells are cancelled.
// decide reports whether it changed anything.
func decide(p *proto.Pipeline, s *proto.PipelineState, now, deadline time.Time) (changed bool) {
	if s.Status != proto.PipelineRunning {
		return false
	}
	if !s.Cancelling && !now.Before(deadline) {
		s.Cancelling, changed = true, true
		s.Reason = "the run did not end within its timeout of " + time.Duration(p.Timeout).String()
	}
	at := cellIndexes(p)
	running, shared := 0, false
	for i := range s.Cells {
		if s.Cells[i].Status == proto.StepRunning {
			running++
			shared = shared || !p.Steps[at[i].step].Own
		}
	}
	for again := true; again; { // what is skipped may let others go on
		again = false
		results := stepResults(p, s)
		for i := range s.Cells {
			c, step := &s.Cells[i], &p.Steps[at[i].step]
			if c.Status != proto.StepWaiting {
				continue
			}
			if s.Cancelling {
				c.Status, c.EndedAt, again = proto.StepCancelled, now, true
				continue
			}
			ended, failed := needed(step, results)
			skip := ""
			switch {
			case !ended:
				continue
			case failed && step.When == proto.WhenSuccess:
				skip = "a step that it needs did not succeed"
			case !failed && step.When == proto.WhenFailure:
				skip = "the steps that it needs have succeeded"
			case running == maxRunning || shared && !step.Own:
				continue
			}
			again = true
			if skip != "" {
				c.Status, c.Reason, c.EndedAt = proto.StepSkipped, skip, now
				continue
			}
			c.Status = proto.StepRunning
			running++
			shared = shared || !step.Own
		}
		changed = changed || again
	}
	if slices.ContainsFunc(s.Cells, func(c proto.CellState) bool { return !c.Status.Ended() }) {
		return changed
	}
	s.EndedAt, s.Status = now, proto.PipelineSuccess
	switch {
	case s.Cancelling && s.Reason == "":
		s.Status = proto.PipelineCancelled
	case s.Cancelling || slices.ContainsFunc(s.Cells, func(c proto.CellState) bool {
		return c.Status == proto.StepFailed || c.Status == proto.StepCancelled
	}):
		s.Status = proto.PipelineFailed
	}
	return true
}

// result is what became of a step.
type result struct{ ended, failed bool }

// stepResults returns the results of all steps by name. For dependent steps, a step skipped because
// of a failure counts as failed.
func stepResults(p *proto.Pipeline, s *proto.PipelineState) map[string]result {
	results, at := map[string]result{}, cellIndexes(p)
	for i := range p.Steps {
		results[p.Steps[i].Name] = result{ended: true}
	}
	for i := range s.Cells {
		step := &p.Steps[at[i].step]
		r := results[step.Name]
		switch status := s.Cells[i].Status; status {
		case proto.StepWaiting, proto.StepRunning:
			r.ended = false
		case proto.StepFailed, proto.StepCancelled:
			r.failed = true
		case proto.StepSkipped:
			r.failed = r.failed || step.When == proto.WhenSuccess
		}
		results[step.Name] = r
	}
	return results
}

// needed reports whether all of a step's dependencies have ended, and whether one has failed.
func needed(step *proto.PipelineStep, results map[string]result) (ended, failed bool) {
	ended = true
	for _, name := range step.Needs {
		ended = ended && results[name].ended
		failed = failed || results[name].failed
	}
	return ended, failed
}
