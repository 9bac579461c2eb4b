package proto

import "time"

// Steps are when the steps of an execution's last attempt happened on its worker.
type Steps struct {
	AssignedAt time.Time `json:"assigned_at"`      // when a slot of the worker got the job
	Start      string    `json:"start,omitempty"`  // how the jail was made: cold, warm or forked
	Jail       Interval  `json:"jail,omitzero"`    // it was prepared
	Home       Interval  `json:"home,omitzero"`    // the thread's home was checked out, a part of Jail
	Program    Interval  `json:"program,omitzero"` // it ran
	Mounts     Interval  `json:"mounts,omitzero"`  // what it wrote to storage connections was stored
	Save       Interval  `json:"save,omitzero"`    // the changes of the home were stored
	Commit     Interval  `json:"commit,omitzero"`  // they became the thread's next version
}

// Interval is a start, in microseconds after [Steps.AssignedAt], and a duration in microseconds. It
// is zero for a step that was skipped.
type Interval [2]int64

// Interval returns the interval from one time to another.
func (s *Steps) Interval(from, to time.Time) Interval {
	return Interval{from.Sub(s.AssignedAt).Microseconds(), max(1, to.Sub(from).Microseconds())}
}

// StepName is the name of a step of an execution.
type StepName string

// The steps of an execution, in the order in which they end.
const (
	StepDelay   StepName = "delay" // until the time at which it was to be queued
	StepQueue   StepName = "queue" // until a slot of a worker got it
	StepHome    StepName = "home"  // see [Steps] for this and the next
	StepJail    StepName = "jail"
	StepProgram StepName = "program"
	StepMounts  StepName = "mounts"
	StepSave    StepName = "save"
	StepCommit  StepName = "commit"
)

// Step is a step of an execution.
type Step struct {
	Name   StepName
	Within StepName // the step that it is a part of; empty for none
	At     time.Time
	Took   time.Duration
}

// Timeline returns the finished steps in the order in which they began. Earlier attempts and lost
// workers leave none.
func (r *Record) Timeline() (steps []Step) {
	queued := r.QueuedAt()
	if queued.After(r.CreatedAt) {
		steps = append(steps, Step{Name: StepDelay, At: r.CreatedAt, Took: queued.Sub(r.CreatedAt)})
	}
	s := r.Steps
	switch {
	case s != nil && r.Attempt == 1:
		steps = append(steps, Step{Name: StepQueue, At: queued, Took: max(0, s.AssignedAt.Sub(queued))})
	case s == nil && r.StartedAt != nil && r.Attempt == 1:
		steps = append(steps, Step{Name: StepQueue, At: queued, Took: max(0, r.StartedAt.Sub(queued))})
	case r.StartedAt == nil && r.CompletedAt != nil:
		steps = append(steps, Step{Name: StepQueue, At: queued, Took: max(0, r.CompletedAt.Sub(queued))})
	}
	if s == nil {
		return steps
	}
	for _, step := range []struct {
		name, within StepName
		Interval
	}{
		{StepJail, "", s.Jail},
		{StepHome, StepJail, s.Home},
		{StepProgram, "", s.Program},
		{StepMounts, "", s.Mounts},
		{StepSave, "", s.Save},
		{StepCommit, "", s.Commit},
	} {
		if step.Interval != (Interval{}) {
			at := s.AssignedAt.Add(time.Duration(step.Interval[0]) * time.Microsecond)
			steps = append(steps, Step{step.name, step.within, at, time.Duration(step.Interval[1]) * time.Microsecond})
		}
	}
	return steps
}
