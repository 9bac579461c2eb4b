package queue_test

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// anEighth reserves an eighth, and at least one of two slots.
func anEighth(slots int) int { return min(max(slots/8, 1), slots-1) }

// aQuarter reserves a quarter, and at least one of two slots.
func aQuarter(slots int) int { return min(max(slots/4, 1), slots-1) }

// holder is a deployment whose programs run until they are ended.
type holder struct {
	*world
	stop    func() // stops the dispatcher
	slots   int
	started chan *holding
	// concurrent and keyConcurrent are the limits of the jobs; 0 is 100 and none.
	concurrent, keyConcurrent int
	running                   map[string][]*holding // by submitter
}

// holding is an execution and the worker that runs it.
type holding struct {
	*queue.Lease
	host *host
}

func newHolder(t *testing.T) *holder {
	w := newLeaderlessWorld(t)
	w.reserved, w.interactive = anEighth, aQuarter
	return &holder{
		world: w, stop: w.dispatcher("first"), started: make(chan *holding, 100),
		running: map[string][]*holding{},
	}
}

// addWorker starts a worker of which some slots take no jobs.
func (h *holder) addWorker(name string, slots, stopped int, languages []proto.Language) {
	h.t.Helper()
	var capabilities []string
	for _, l := range languages {
		capabilities = append(capabilities, queue.CapabilityLanguage(l))
	}
	host := h.run(h.newSlots(h.server, name, slots, capabilities...))
	for range slots - stopped {
		h.addSlot(host)
	}
	h.slots += slots - stopped
	h.settle(nil)
}

func (h *holder) addSlot(host *host) {
	go func() {
		if l, err := host.Take(h.ctx); err == nil {
			h.started <- &holding{l, host}
		}
	}()
}

// settle waits until the dispatcher knows that these executions run, besides those that are known
// here, and that all other slots are free.
func (h *holder) settle(want map[string]int) {
	h.t.Helper()
	running, same := 0, 0
	for _, n := range want {
		running += n
	}
	var st proto.QueueStats
	h.eventually("as many run as should", func() bool {
		var err error
		if st, err = h.queue.Stats(h.ctx); err != nil || st.Running != running || st.FreeSlots != h.slots-running {
			same = 0
		} else {
			same++
		}
		return same == 2 // the dispatcher has assigned what it can since the first answer
	})
}

// arrival is executions that an organisation submits, after some others have ended.
type arrival struct {
	end      map[string]int // by submitter
	org      string         // the submitter of background jobs; with a *, of interactive ones
	language proto.Language
	n        int
	want     map[string]int // that run then, by submitter
}

// submitter returns the organisation of a job, with a * if the job is interactive.
func submitter(j *proto.Job) string {
	if j.Class() == proto.ClassInteractive {
		return j.Org + "*"
	}
	return j.Org
}

func (h *holder) arrive(a arrival) {
	h.t.Helper()
	for org, n := range a.end {
		for _, l := range h.running[org][:n] {
			h.finish(l.Lease)
			h.addSlot(l.host)
		}
		h.running[org] = h.running[org][n:]
	}
	for range a.n {
		org, interactive := strings.CutSuffix(a.org, "*")
		job := storetest.Job(org, "k", proto.ModeAsync)
		if interactive {
			job.Mode = proto.ModeInline
		}
		job.Concurrent, job.KeyConcurrent, job.Language = cmp.Or(h.concurrent, 100), h.keyConcurrent, a.language
		h.submit(job)
	}
	h.settle(a.want)
	got, all := map[string]int{}, 0
	for _, n := range a.want {
		all += n
	}
	for org, running := range h.running {
		got[org] = len(running)
		all -= len(running)
	}
	for range all {
		l := <-h.started
		h.claim(l.Lease)
		who := submitter(l.Job())
		h.running[who] = append(h.running[who], l)
		got[who]++
	}
	if !maps.Equal(got, a.want) {
		h.t.Fatalf("%d executions of %s submitted: %v run, want %v", a.n, a.org, got, a.want)
	}
}

// While another organisation has submitted executions, no organisation has all slots that could run
// them.
func TestNoOrganisationHasAllSlots(t *testing.T) {
	type runs = map[string]int
	const python, node = proto.Python, proto.Node
	type worker struct {
		slots, stopped int
		languages      []proto.Language
	}
	both := []proto.Language{python, node}
	for name, tt := range map[string]struct {
		workers  map[string]worker
		arrivals []arrival
	}{
		"alone": {
			map[string]worker{"w": {8, 0, both}},
			[]arrival{{nil, "loud", python, 30, runs{"loud": 8}}},
		},
		"another one has run something": {
			map[string]worker{"w": {8, 0, both}},
			[]arrival{
				{nil, "quiet", python, 1, runs{"quiet": 1}},
				{runs{"quiet": 1}, "loud", python, 30, runs{"loud": 7, "quiet": 0}},
				{nil, "quiet", python, 1, runs{"loud": 7, "quiet": 1}},
				{runs{"quiet": 1}, "quiet", python, 1, runs{"loud": 7, "quiet": 1}},
			},
		},
		"another one comes late": {
			map[string]worker{"w": {8, 0, both}},
			[]arrival{
				{nil, "loud", python, 30, runs{"loud": 8}},
				{nil, "quiet", python, 1, runs{"loud": 8}},
				{runs{"loud": 1}, "quiet", python, 0, runs{"loud": 7, "quiet": 1}},
				{runs{"quiet": 1, "loud": 1}, "quiet", python, 0, runs{"loud": 7, "quiet": 0}},
			},
		},
		"an eighth of two workers": {
			map[string]worker{"w": {12, 0, both}, "x": {4, 0, both}},
			[]arrival{
				{nil, "quiet", python, 1, runs{"quiet": 1}},
				{nil, "loud", python, 30, runs{"loud": 14, "quiet": 1}},
				{nil, "other", python, 30, runs{"loud": 14, "quiet": 1, "other": 1}},
			},
		},
		"one slot": {
			map[string]worker{"w": {1, 0, both}},
			[]arrival{
				{nil, "quiet", python, 1, runs{"quiet": 1}},
				{runs{"quiet": 1}, "loud", python, 2, runs{"loud": 1, "quiet": 0}},
			},
		},
		"two slots": {
			map[string]worker{"w": {2, 0, both}},
			[]arrival{
				{nil, "quiet", python, 1, runs{"quiet": 1}},
				{runs{"quiet": 1}, "loud", python, 2, runs{"loud": 1, "quiet": 0}},
			},
		},
		"slots that the other one cannot use": {
			map[string]worker{"w": {4, 0, both[:1]}, "x": {4, 0, both}},
			[]arrival{
				{nil, "quiet", node, 1, runs{"quiet": 1}},
				{runs{"quiet": 1}, "loud", python, 30, runs{"loud": 7, "quiet": 0}},
				{nil, "quiet", node, 1, runs{"loud": 7, "quiet": 1}},
			},
		},
		"executions that the other one's slots cannot run": {
			map[string]worker{"w": {4, 0, both[1:]}, "x": {4, 0, both[:1]}},
			[]arrival{
				{nil, "quiet", node, 1, runs{"quiet": 1}},
				{runs{"quiet": 1}, "loud", python, 30, runs{"loud": 4, "quiet": 0}},
			},
		},
		"what nobody can run reserves nothing": {
			map[string]worker{"w": {4, 0, both[:1]}},
			[]arrival{
				{nil, "quiet", node, 1, runs{}},
				{nil, "loud", python, 30, runs{"loud": 4}},
			},
		},
		"a worker that stops": {
			map[string]worker{"w": {4, 4, both}, "x": {4, 0, both}},
			[]arrival{
				{nil, "quiet", python, 1, runs{"quiet": 1}},
				{runs{"quiet": 1}, "loud", python, 30, runs{"loud": 3, "quiet": 0}},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHolder(t)
			for name, w := range tt.workers {
				h.addWorker(name, w.slots, w.stopped, w.languages)
			}
			for _, a := range tt.arrivals {
				h.arrive(a)
			}
		})
	}
}

// While interactive executions are submitted, background jobs have neither all slots nor the whole limit
// of their organisation or key.
func TestBackgroundJobsLeaveRoomForInteractiveOnes(t *testing.T) {
	type runs = map[string]int
	const python, node = proto.Python, proto.Node
	called := func(org string) []arrival { // an interactive execution has run
		return []arrival{
			{nil, org + "*", python, 1, runs{org + "*": 1}},
			{runs{org + "*": 1}, org + "*", python, 0, runs{org + "*": 0}},
		}
	}
	for name, tt := range map[string]struct {
		slots, concurrent, keyConcurrent int
		arrivals                         []arrival
	}{
		"background jobs alone": {8, 0, 0, []arrival{{nil, "a", python, 30, runs{"a": 8}}}},
		"of the same key": {8, 0, 0, append(called("a"),
			arrival{nil, "a", python, 30, runs{"a": 6, "a*": 0}},
			arrival{nil, "a*", python, 2, runs{"a": 6, "a*": 2}},
			arrival{runs{"a*": 2}, "a*", python, 0, runs{"a": 6, "a*": 0}})},
		"that come late": {8, 0, 0, []arrival{
			{nil, "a", python, 30, runs{"a": 8}},
			{nil, "a*", python, 1, runs{"a": 8}},
			{runs{"a": 1}, "a*", python, 0, runs{"a": 7, "a*": 1}},
			{runs{"a": 2}, "a*", python, 0, runs{"a": 6, "a*": 1}},
			{runs{"a*": 1}, "a*", python, 0, runs{"a": 6, "a*": 0}},
		}},
		"of another organisation": {8, 0, 0, append(called("b"),
			arrival{nil, "a", python, 30, runs{"a": 6, "b*": 0}},
			arrival{nil, "c", python, 30, runs{"a": 6, "b*": 0}},
			arrival{nil, "b*", python, 2, runs{"a": 6, "b*": 2}})},
		"within the organisation's share": {16, 0, 0, append(called("a"),
			arrival{nil, "b", python, 1, runs{"b": 1, "a*": 0}},
			arrival{nil, "a", python, 30, runs{"a": 11, "b": 1, "a*": 0}},
			arrival{nil, "a*", python, 9, runs{"a": 11, "b": 1, "a*": 3}},
			arrival{nil, "b*", python, 1, runs{"a": 11, "b": 1, "a*": 3, "b*": 1}})},
		"that no slot can run": {8, 0, 0, []arrival{
			{nil, "a*", node, 1, runs{}},
			{nil, "a", python, 30, runs{"a": 8}},
		}},
		"interactive jobs may have all slots": {4, 0, 0, []arrival{
			{nil, "a", python, 1, runs{"a": 1}},
			{runs{"a": 1}, "a*", python, 9, runs{"a": 0, "a*": 4}},
		}},
		"one slot":  {1, 0, 0, append(called("a"), arrival{nil, "a", python, 2, runs{"a": 1, "a*": 0}})},
		"two slots": {2, 0, 0, append(called("a"), arrival{nil, "a", python, 2, runs{"a": 1, "a*": 0}})},
		"the organisation's limit": {16, 4, 0, append(called("a"),
			arrival{nil, "a", python, 9, runs{"a": 3, "a*": 0}},
			arrival{nil, "a*", python, 1, runs{"a": 3, "a*": 1}})},
		"the organisation's limit, of another one": {16, 4, 0, append(called("b"),
			arrival{nil, "a", python, 9, runs{"a": 4, "b*": 0}})},
		"the key's limit": {16, 9, 2, append(called("a"),
			arrival{nil, "a", python, 9, runs{"a": 1, "a*": 0}},
			arrival{nil, "a*", python, 1, runs{"a": 1, "a*": 1}})},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHolder(t)
			h.concurrent, h.keyConcurrent = tt.concurrent, tt.keyConcurrent
			h.addWorker("w", tt.slots, 0, []proto.Language{python})
			for _, a := range tt.arrivals {
				h.arrive(a)
			}
		})
	}
}

// The next leader knows who has submitted lately, also where nothing of that is queued or runs.
func TestSlotsStayReservedOverAChangeOfLeaders(t *testing.T) {
	h := newHolder(t)
	h.addWorker("w", 8, 0, []proto.Language{proto.Python})
	h.arrive(arrival{org: "quiet", language: proto.Python, n: 1, want: map[string]int{"quiet": 1}})
	h.arrive(arrival{end: map[string]int{"quiet": 1}, want: map[string]int{"quiet": 0}})
	h.eventually("nothing remains of the execution", func() bool {
		info, err := h.store.Jobs.Info(h.ctx)
		return err == nil && info.State.Msgs == 0
	})
	h.stop()
	h.dispatcher("second")
	h.settle(nil)
	h.arrive(arrival{org: "loud", language: proto.Python, n: 30, want: map[string]int{"loud": 7, "quiet": 0}})
}

// The next leader leaves room for interactive jobs too, and does not know which organisations have
// submitted them.
func TestRoomForInteractiveJobsStaysOverAChangeOfLeaders(t *testing.T) {
	h := newHolder(t)
	h.concurrent = 6
	h.addWorker("w", 8, 0, []proto.Language{proto.Python})
	h.arrive(arrival{org: "a*", language: proto.Python, n: 1, want: map[string]int{"a*": 1}})
	h.arrive(arrival{end: map[string]int{"a*": 1}, want: map[string]int{"a*": 0}})
	h.stop()
	h.dispatcher("second")
	h.settle(nil)
	h.arrive(arrival{org: "a", language: proto.Python, n: 30, want: map[string]int{"a": 5, "a*": 0}})
	h.arrive(arrival{org: "b", language: proto.Python, n: 30, want: map[string]int{"a": 5, "b": 1, "a*": 0}})
}

// An organisation whose executions wait while a slot is free for others is reported.
func TestOrganisationAtItsShareIsReported(t *testing.T) {
	h := newHolder(t)
	h.addWorker("w", 8, 0, []proto.Language{proto.Python})
	for _, step := range []struct {
		arrival
		atShare []string
	}{
		{arrival{org: "loud", language: proto.Python, n: 8, want: map[string]int{"loud": 8}}, nil},
		{arrival{org: "quiet", language: proto.Python, n: 1, want: map[string]int{"loud": 8}}, []string{"loud"}},
		{arrival{end: map[string]int{"loud": 1}, want: map[string]int{"loud": 7, "quiet": 1}}, []string{"loud"}},
		{arrival{end: map[string]int{"loud": 1}, want: map[string]int{"loud": 6, "quiet": 1}}, nil},
	} {
		h.arrive(step.arrival)
		if st, err := h.queue.Stats(h.ctx); err != nil || !slices.Equal(st.AtShare, step.atShare) {
			t.Fatalf("%v run: %v are at their share, %v", step.want, st.AtShare, err)
		}
	}
}
