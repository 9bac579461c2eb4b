package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
)

// testMalformed publishes malformed messages on every subject of bullpen. Everything must keep
// working.
func testMalformed(t *testing.T, p *programs) {
	const slots = 2
	sys := newSystem(t, p, topology{separate: true}, slots)
	nc := connect(t, p, sys.broker)
	for _, part := range []struct {
		name string
		test func(*testing.T, *api, *nats.Conn)
	}{{"everywhere", testMalformedEverywhere}, {"jobs", testMalformedJobs}, {"notices", testMalformedNotices}} {
		t.Run(part.name, func(t *testing.T) {
			part.test(t, sys.in(t), nc)
			allSlots(t, sys.in(t), slots)
			for _, proc := range []*process{sys.front, sys.worker} {
				if proc.ended() {
					t.Fatalf("%s has ended:\n%s", proc.name, proc.tail())
				}
			}
		})
	}
	// Malformed output does not stop an execution from ending when its worker is lost.
	t.Run("output of the lost", func(t *testing.T) {
		api, h := sys.in(t), newHold()
		id := api.submit(bash(h.code()))
		h.reached(t, 1)
		publish(t, nc, "bullpen.out.default."+id+".1", "nothing of ours")
		flush(t, nc)
		sys.worker.kill()
		api.ended(id).failed(t, "failed", "worker_lost", "lost")
	})
}

// testMalformedEverywhere publishes messages that cannot be decoded.
func testMalformedEverywhere(t *testing.T, a *api, nc *nats.Conn) {
	h, worker := newHold(), workerName(t, nc)
	id, nobody := a.submit(bash(h.code())), string(proto.NewTraceID())
	h.reached(t, 1)
	for _, subject := range []string{
		"bullpen.ctl.admit", "bullpen.ctl.slots", "bullpen.ctl.stats", "bullpen.ctl.rollcall", "bullpen.ctl.ping.x",
		"bullpen.ctl.nothing",
		"bullpen.worker." + worker + ".assign", "bullpen.worker." + worker + ".cancel", "bullpen.worker.x.assign",
		"bullpen.job.x", "bullpen.job.background.default.key_bootstrap." + nobody,
		"bullpen.job.background.default.key_bootstrap.x",
		"bullpen.job.a.b.c.d.e.f", "bullpen.exec.default." + nobody, "bullpen.exec.default.x", "bullpen.exec.a.b.c",
		"bullpen.out.default." + id + ".1", "bullpen.out.default." + id + ".x", "bullpen.out.default." + nobody + ".1",
		"bullpen.out.x", "bullpen.body.default.x",
		"bullpen.done.default." + nobody, "bullpen.dead.x", "bullpen.dead.letter.-.x",
		"bullpen.dead.letter.default." + nobody, "bullpen.x", "bullpen.x.y.z",
	} {
		for _, data := range []string{"", "\xff\x00not JSON", "{}", "null", "[1]", `{"worker":1,"trace":[],"org":{}}`} {
			publish(t, nc, subject, data)
			publish(t, nc, subject, data, "Bullpen-Meta", "{", "Bullpen-Status", "x", "Bullpen-Attempt", "x",
				"Bullpen-First", "x",
				"Bullpen-Last", "-1", "Bullpen-Body", "bodies.that.are.not", "Nats-Expected-Last-Sequence", "x")
		}
	}
	// These messages can be decoded but are not valid.
	publish(t, nc, "bullpen.ctl.slots", `{"worker":"a.b","slots":1,"free":[1]}`)
	publish(t, nc, "bullpen.ctl.slots", `{"worker":"*","slots":-1,"free":null}`)
	publish(t, nc, "bullpen.worker."+worker+".assign", `{"ticket":1,"org":"default","trace":"x","attempt":1,"revision":0}`)
	publish(t, nc, "bullpen.worker."+worker+".assign",
		fmt.Sprintf(`{"ticket":99999,"org":"default","trace":%q,"attempt":1,"revision":0}`, nobody))
	flush(t, nc)
	h.release(t)
	a.ended(id).succeeded(t, "held\nwoken\n")
	if stdout, _, _ := checkEvents(t, a.output(id, 0), 0); stdout != "held\nwoken\n" {
		t.Errorf("its output: %q", stdout)
	}
}

// testMalformedJobs publishes jobs whose headers and subjects look valid. They are dead-lettered or
// end, and are not retried forever.
func testMalformedJobs(t *testing.T, a *api, nc *nats.Conn) {
	now := time.Now().UTC()
	job := func(id, key, body string) {
		t.Helper()
		meta, err := json.Marshal(proto.Meta{
			TraceID: proto.TraceID(id), Org: "default", Key: key, Mode: proto.ModeAsync, Language: proto.Bash, Timeout: 1,
			MaxAttempts: 1,
			CreatedAt:   now, QueueDeadline: now.Add(time.Hour), Concurrent: 10, MaxQueued: 10,
		})
		if err != nil {
			t.Fatal(err)
		}
		publish(t, nc, "bullpen.job.background.default."+key+"."+id, body, "Bullpen-Meta", string(meta))
	}
	unreadable, bodiless, another := string(proto.NewTraceID()), string(proto.NewTraceID()), string(proto.NewTraceID())
	job(unreadable, "key_bootstrap", "{")
	job(bodiless, "key_bootstrap", "")
	job(another, "key_bootstrap", `{"trace_id":"`+unreadable+`","code":"true"}`)
	job("no-trace-id", "key_bootstrap", "{}")
	job(string(proto.NewTraceID()), "a.b", "{}") // one token more than job subjects have
	flush(t, nc)
	for _, id := range []string{unreadable, bodiless, another} {
		a.ended(id).failed(t, "failed", "sandbox_start_error", "")
	}
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "no job is left", func() (bool, any) {
		s, err := js.Stream(t.Context(), "BULLPEN_JOBS")
		if err != nil {
			return false, err
		}
		info, err := s.Info(t.Context(), jetstream.WithSubjectFilter("bullpen.job.>"))
		if err != nil {
			return false, err
		}
		return info.State.Msgs == 0, info.State.Subjects
	})
}

// testMalformedNotices publishes malformed notices that a running execution has ended.
func testMalformedNotices(t *testing.T, a *api, nc *nats.Conn) {
	h := newHold()
	id := a.submit(bash(h.code()))
	h.reached(t, 1)
	waits, follows := a.begin(http.MethodGet, execution(id)+"?wait=60", nil), a.follow(id, 0)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range 50 { // repeated, so that some arrive during the wait
		<-tick.C
		for _, data := range []string{"", "{}", "null", "[]", "\xff", `{"status":"success"}`} {
			publish(t, nc, "bullpen.done.default."+id, data)
		}
		publish(t, nc, "bullpen.out.default."+id+".1", "{}\n", "Bullpen-First", "1", "Bullpen-Last", "0")
	}
	flush(t, nc)
	if pids := h.pids(t); len(pids) != 1 {
		t.Errorf("the program does not run any more: %v", pids)
	}
	h.release(t)
	a.ended(id).succeeded(t, "held\nwoken\n")
	var rec record
	waits.answer(t).into(t, &rec)
	rec.succeeded(t, "held\nwoken\n")
	if stdout, _, _ := checkEvents(t, follows.answer(t).events(t), 0); stdout != "held\nwoken\n" {
		t.Errorf("who followed it got %q", stdout)
	}
}

// allSlots checks that every slot still runs programs.
func allSlots(t *testing.T, a *api, slots int) {
	t.Helper()
	for range 2 {
		h := newHold()
		var ids []string
		for range slots {
			ids = append(ids, a.submit(bash(h.code())))
		}
		h.reached(t, slots)
		h.release(t)
		for _, id := range ids {
			a.ended(id).succeeded(t, "held\nwoken\n")
		}
	}
}

// publish sends a message. The headers alternate names and values.
func publish(t testing.TB, nc *nats.Conn, subject, data string, headers ...string) {
	t.Helper()
	m := &nats.Msg{Subject: subject, Data: []byte(data), Header: nats.Header{}, Reply: nc.NewRespInbox()}
	for i := 0; i < len(headers); i += 2 {
		m.Header.Set(headers[i], headers[i+1])
	}
	if err := nc.PublishMsg(m); err != nil {
		t.Fatal(err)
	}
}

func flush(t testing.TB, nc *nats.Conn) {
	t.Helper()
	if err := nc.FlushTimeout(patience); err != nil {
		t.Fatal(err)
	}
}

func connect(t testing.TB, p *programs, b *broker) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(b.url, nats.UserInfo(natsUser, natsPassword), nats.RootCAs(p.cert))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// workerName returns the name of the only worker.
func workerName(t testing.TB, nc *nats.Conn) string {
	t.Helper()
	sub, err := nc.SubscribeSync("bullpen.ctl.slots")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	m, err := sub.NextMsg(patience)
	if err != nil {
		t.Fatal(err)
	}
	var a struct{ Worker string }
	if err := json.Unmarshal(m.Data, &a); err != nil || a.Worker == "" || strings.Contains(a.Worker, ".") {
		t.Fatalf("a worker publishes %s: %v", m.Data, err)
	}
	return a.Worker
}
