package queue_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/autoscale"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

// offering is a world whose dispatchers expect workers back for a short time.
type offering struct {
	*world
	cache *queue.OfferCache
}

// newOffering returns a world with a dispatcher that expects workers for as long as they are kept.
func newOffering(t *testing.T, sole bool, kept time.Duration) (o *offering, stop func()) {
	w := newLeaderlessWorld(t)
	cache, err := queue.OpenOffers(w.ctx, w.store, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	w.background(cache.Run)
	o = &offering{w, cache}
	return o, o.lead("first", sole, kept)
}

func (o *offering) lead(name string, sole bool, kept time.Duration) (stop func()) {
	d := o.newDispatcher(name)
	d.SoleWorker = sole
	d.ExpectWorkersFor(kept)
	return o.background(d.Run)
}

func (o *offering) offer(name string, languages ...proto.Language) *host {
	var capabilities []string
	for _, l := range languages {
		capabilities = append(capabilities, queue.CapabilityLanguage(l))
	}
	h := o.run(o.newSlots(o.server, name, 1, capabilities...))
	o.eventually(name+" joins", func() bool {
		for _, w := range o.workers() {
			if w.Name == name {
				return true
			}
		}
		return false
	})
	return h
}

// refusal submits an inline job in a language, and returns what is missing if it is refused. An
// accepted one is cancelled.
func (o *offering) refusal(l proto.Language) *proto.Missing {
	o.t.Helper()
	job := storetest.Job("acme", "k", proto.ModeInline)
	job.Language = l
	err := o.queue.Submit(o.ctx, job)
	if err == nil {
		if _, err := o.queue.Cancel(o.ctx, job.Org, job.TraceID); err != nil {
			o.t.Fatal(err)
		}
		return nil
	}
	rejection, ok := errors.AsType[*proto.Rejection](err)
	if !ok || rejection.Reason != proto.RejectedNoWorker || rejection.Missing == nil {
		o.t.Fatal(err)
	}
	if _, err := o.queue.Lookup(o.ctx, job.Org, job.TraceID); !errors.Is(err, proto.ErrNotFound) {
		o.t.Errorf("something remains of a refused job: %v", err)
	}
	return rejection.Missing
}

// place returns the place of a job in the queue, nil if it is not queued.
func (o *offering) place(id proto.TraceID) *proto.QueuePlace {
	v, err := o.queue.View(o.ctx, &proto.QueueRequest{Org: "acme", Key: "k", Traces: []proto.TraceID{id}})
	if err != nil {
		o.t.Fatal(err)
	}
	if len(v.Places) == 0 {
		return nil
	}
	return &v.Places[0]
}

func (o *offering) submitIn(l proto.Language) (proto.TraceID, *proto.Meta) {
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.Language = l
	return o.submit(job), &job.Meta
}

// What no worker can run is refused if somebody waits for it, and otherwise waits and says for what
// until a worker comes.
func TestJobsThatNoWorkerCanRun(t *testing.T) {
	o, _ := newOffering(t, true, time.Minute)
	if o.refusal("ruby") != nil {
		t.Error("a job was refused before the first worker")
	}
	o.offer("p", proto.Python, proto.Bash)
	if got := o.refusal("ruby"); got == nil || fmt.Sprint(got.Capabilities) != "[language:ruby]" {
		t.Errorf("got %+v", got)
	}
	if o.refusal(proto.Python) != nil {
		t.Error("a job that a worker can run was refused")
	}
	id, meta := o.submitIn("ruby")
	if p := o.place(id); p == nil || p.WaitingFor == nil || p.WaitingFor.Expected {
		t.Errorf("got %+v", p)
	}
	o.eventually("gateways know", func() bool { m := o.cache.Missing(meta); return m != nil && !m.Expected })
	able, meta := o.submitIn(proto.Python)
	if p := o.place(able); p == nil || p.WaitingFor != nil || o.cache.Missing(meta) != nil {
		t.Errorf("a worker can run it: got %+v, %+v", p, o.cache.Missing(meta))
	}
	ruby := o.offer("r", "ruby")
	l := o.take(ruby)
	o.claim(l)
	if l.Job().TraceID != id {
		t.Errorf("%s was assigned", l.Job().TraceID)
	}
	if o.refusal("ruby") != nil || o.place(id) != nil {
		t.Error("the worker is not known yet")
	}
	meta = &l.Job().Meta
	o.eventually("gateways know the worker", func() bool { return o.cache.Missing(meta) == nil })
}

// A worker that left, was killed, or drains is expected back for a while, under the next leader too.
func TestWorkersAreExpectedBack(t *testing.T) {
	for name, leave := range map[string]func(*offering, *host){
		"stopped":  func(_ *offering, h *host) { h.stop() },
		"killed":   func(_ *offering, h *host) { h.die() },
		"draining": func(o *offering, _ *host) { o.drain("r", true) },
	} {
		t.Run(name, func(t *testing.T) {
			o, stop := newOffering(t, true, time.Minute)
			o.offer("p", proto.Python)
			h := o.offer("r", "ruby")
			leave(o, h)
			if name == "killed" {
				o.eventually("the worker is lost", func() bool { return len(o.workers()) == 1 })
			}
			_, meta := o.submitIn("ruby")
			o.eventually("it waits for a worker", func() bool { m := o.cache.Missing(meta); return m != nil && m.Expected })
			if o.refusal("ruby") != nil {
				t.Error("refused under the first leader")
			}
			stop()
			stop = o.lead("second", false, time.Minute)
			o.eventually("the next leader knows the worker", func() bool { return len(o.workers()) > 0 })
			if got := o.refusal("node"); got == nil {
				t.Error("the next leader does not know that it knows all workers")
			}
			if o.refusal("ruby") != nil {
				t.Error("refused under the next leader")
			}
			stop()
			o.lead("third", false, time.Millisecond)
			o.eventually("nobody expects it any more", func() bool { return o.refusal("ruby") != nil })
		})
	}
}

// A leader that cannot know all workers refuses nothing before they had time to connect.
func TestLeaderWithoutKnowledgeRefusesNothing(t *testing.T) {
	o, _ := newOffering(t, false, time.Minute)
	o.offer("p", proto.Python)
	if o.refusal("ruby") != nil {
		t.Error("refused at once")
	}
	s := storetest.Server(t)
	st := storetest.Open(t, s)
	o = &offering{world: &world{t: t, ctx: o.ctx, server: s, store: st, queue: &queue.Queue{Store: st}}}
	o.lead("first", false, 100*time.Millisecond)
	o.offer("p", proto.Python)
	o.eventually("other workers had time to connect", func() bool { return o.refusal("ruby") != nil })
}

// Where workers are started when jobs wait, nothing is refused that a started one may run.
func TestJobsThatStartedWorkersCanRun(t *testing.T) {
	w := newLeaderlessWorld(t)
	o := &offering{world: w}
	d := w.newDispatcher("first")
	d.Autoscaler = &queue.Autoscaler{
		Policy: func(string) autoscale.Policy { return autoscale.DefaultPolicy() },
		Starts: true,
	}
	d.SoleWorker = true
	d.ExpectWorkersFor(time.Millisecond)
	w.background(d.Run)
	if o.refusal("ruby") != nil {
		t.Error("refused before the pool had a worker")
	}
	h := o.offer("r", "ruby")
	if o.refusal(proto.Python) == nil {
		t.Error("the workers of the pool cannot run it")
	}
	h.stop()
	o.eventually("the worker is gone", func() bool { return len(w.workers()) == 0 })
	if o.refusal("ruby") != nil {
		t.Error("a worker of the pool can run it")
	}
}

// Gateways know the versions of agents that live sandboxes can have.
func TestAgentVersions(t *testing.T) {
	o, _ := newOffering(t, true, time.Minute)
	versions := func() string { return fmt.Sprint(o.cache.AgentVersions("claude")) }
	agent := func(version string) string { return queue.CapabilityAgent("claude", version) }
	if got := versions(); got != "[]" {
		t.Errorf("got %s without workers", got)
	}
	o.run(o.newSlots(o.server, "programs", 1, agent(""), agent("3.0.0"))) // it runs no live sandboxes
	old := o.newSlots(o.server, "a", 1, queue.CapabilitySandboxes, agent(""), agent("2.1.9"), agent("2.1.10"))
	old.Live = true
	o.run(old)
	o.eventually("one worker", func() bool { return versions() == "[2.1.10 2.1.9]" })
	other := o.newSlots(o.server, "b", 1, queue.CapabilitySandboxes, agent(""), agent("2.1.10"), agent("2.1.112"),
		queue.CapabilityAgent("claude-code", "9.0.0"))
	other.Live = true
	o.run(other)
	o.eventually("two workers", func() bool { return versions() == "[2.1.112 2.1.10 2.1.9]" })
	if got := o.cache.AgentVersions("codex"); len(got) > 0 {
		t.Errorf("codex has %v", got)
	}
}
