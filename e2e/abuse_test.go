package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/doctest"
)

// controlAttack is an attack on the control plane. Each runs against its own deployment. The test
// checks that the attack is contained and that later programs run.
type controlAttack struct {
	name, outcome string
	test          func(*testing.T, *programs)
}

// controlAttacks returns the attacks on the control plane. The attacks from inside jails are in
// worker/jail/nsjail.
func controlAttacks() []controlAttack {
	return []controlAttack{
		{
			"messages that are not ours on every subject",
			"dead-lettered, or the job ends as `sandbox_start_error`; others go on", testMalformed,
		},
		{"messages as large as NATS accepts, on every subject", "dead-lettered; others go on", testOversized},
		{"the message of a job sent again, while it runs and after", "nothing runs twice", testReplayed},
		{"a worker killed while programs run", "`worker_lost`", testWorkerKilled},
		{"a gateway killed while clients wait", "executions go on", testFrontKilled},
		{"NATS killed", "503 until it is back, 500 with the id where it is not known whether it was stored; nothing that " +
			"was accepted is lost", testBrokerKilled},
		{"everything killed at once", "queued jobs run, those that ran are `worker_lost`", testKillEverything},
		{"a full disk", "503 for new jobs; those that run end", testFullDisk},
		{"the trace id of another organisation", "404", func(t *testing.T, p *programs) {
			for _, in := range topologies() {
				testOrganisations(t, newSystem(t, p, in, manySlots).in(t))
			}
		}},
	}
}

// testOversized publishes messages of the largest size.
func testOversized(t *testing.T, p *programs) {
	const slots = 2
	sys := newSystem(t, p, topology{separate: true}, slots)
	nc := connect(t, p, sys.broker)
	worker, data := workerName(t, nc), strings.Repeat("{", int(nc.MaxPayload())-1024)
	for _, subject := range []string{
		"bullpen.ctl.admit", "bullpen.ctl.slots", "bullpen.ctl.stats", "bullpen.ctl.rollcall",
		"bullpen.worker." + worker + ".assign",
		"bullpen.worker." + worker + ".cancel", "bullpen.job.background.default.key_bootstrap." + string(proto.NewTraceID()),
		"bullpen.exec.default." + string(proto.NewTraceID()), "bullpen.out.default." + string(proto.NewTraceID()) + ".1",
		"bullpen.done.default." + string(proto.NewTraceID()),
	} {
		publish(t, nc, subject, data)
		publish(t, nc, subject, data, "Bullpen-Meta", "{")
		flush(t, nc)
	}
	allSlots(t, sys.in(t), slots)
}

// testReplayed publishes a job's message a second time, unchanged.
func testReplayed(t *testing.T, p *programs) {
	const slots, times = 2, 5
	sys := newSystem(t, p, topology{separate: true}, slots)
	a, nc, h := sys.in(t), connect(t, p, sys.broker), newHold()
	id := a.submit(bash(h.code()))
	h.reached(t, 1)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), "BULLPEN_JOBS")
	if err != nil {
		t.Fatal(err)
	}
	info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter("bullpen.job.>"))
	if err != nil || len(info.State.Subjects) != 1 {
		t.Fatalf("jobs %+v, %v", info, err)
	}
	var job *jetstream.RawStreamMsg
	for subject := range info.State.Subjects {
		if job, err = stream.GetLastMsgForSubject(t.Context(), subject); err != nil {
			t.Fatal(err)
		}
	}
	again := func() {
		job.Header.Del(nats.MsgIdHdr) // otherwise the store discards it as a duplicate
		for range times {
			if err := nc.PublishMsg(&nats.Msg{Subject: job.Subject, Header: job.Header, Data: job.Data}); err != nil {
				t.Fatal(err)
			}
		}
		flush(t, nc)
	}
	again()
	b := newHold() // occupies the other slot
	other := a.submit(bash(b.code()))
	b.reached(t, 1)
	if pids := h.pids(t); len(pids) != 1 {
		t.Errorf("it runs as %v", pids)
	}
	b.release(t)
	a.ended(other).succeeded(t, "held\nwoken\n")
	h.release(t)
	a.ended(id).succeeded(t, "held\nwoken\n")
	before := a.record(id)
	again()
	eventually(t, "no job is left", func() (bool, any) {
		info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter("bullpen.job.>"))
		if err != nil {
			return false, err
		}
		return info.State.Msgs == 0, info.State.Subjects
	})
	allSlots(t, a, slots)
	if after := a.record(id); fmt.Sprint(after) != fmt.Sprint(before) || len(h.pids(t)) != 0 {
		t.Errorf("the record was %v and is %v", before, after)
	}
}

// TestAbuseTable checks that the table in docs/reference/attacks.md matches the tests. `make docs` rewrites
// it.
func TestAbuseTable(t *testing.T) {
	var want strings.Builder
	want.WriteString("\n| attacks | what happens |\n|---|---|\n")
	for _, a := range controlAttacks() {
		_, _ = fmt.Fprintf(&want, "| %s | %s |\n", a.name, a.outcome)
	}
	want.WriteString("\n**live sandboxes.** Attacks on [live sandboxes](../guides/sandboxes.md), from outside and " +
		"from inside:\n`TestE2E/abuse/live/<attack>`.\n\n| attacks | what happens |\n|---|---|\n")
	for _, a := range liveAttacks() {
		_, _ = fmt.Fprintf(&want, "| %s | %s |\n", a.name, a.outcome)
	}
	want.WriteString("\n")
	doctest.Compare(t, "../docs/reference/attacks.md", "<!-- abuse of the control plane: written by `make docs` -->\n",
		"<!-- end of abuse of the control plane -->\n", want.String())
}
