package main

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

// testMalformed publishes what is no message on every subject of bullpen, and expects all to go on.
func testMalformed(t *testing.T, p *programs) {
	w := newWorld(t, p, topology{apart: true}, 2)
	nc := connect(t, p, w.broker)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	worker := workerName(t, nc)

	h := newHold()
	id := w.submit(bash(h.code()))
	h.reached(t, 1)
	publish := func(subject string, data []byte, headers ...string) {
		t.Helper()
		m := &nats.Msg{Subject: subject, Data: data, Header: nats.Header{}, Reply: nc.NewRespInbox()}
		for i := 0; i < len(headers); i += 2 {
			m.Header.Set(headers[i], headers[i+1])
		}
		if err := nc.PublishMsg(m); err != nil {
			t.Fatal(err)
		}
	}
	nobody := string(proto.NewTraceID())
	for _, subject := range []string{
		"bullpen.ctl.admit", "bullpen.ctl.slots", "bullpen.ctl.stats", "bullpen.ctl.rollcall", "bullpen.ctl.ping.x", "bullpen.ctl.nothing",
		"bullpen.worker." + worker + ".assign", "bullpen.worker." + worker + ".cancel", "bullpen.worker.x.assign",
		"bullpen.job.x", "bullpen.job.batch.default.key_bootstrap." + nobody, "bullpen.job.batch.default.key_bootstrap.x", "bullpen.job.a.b.c.d.e.f",
		"bullpen.exec." + nobody, "bullpen.exec.x", "bullpen.exec.a.b",
		"bullpen.out." + id + ".1", "bullpen.out." + id + ".x", "bullpen.out." + nobody + ".1", "bullpen.out.x",
		"bullpen.done." + id, "bullpen.done." + nobody, "bullpen.dead.x", "bullpen.x", "bullpen.x.y.z",
	} {
		for _, data := range [][]byte{nil, []byte("\xff\x00not JSON"), []byte("{}"), []byte("null"), []byte("[1]"), []byte(`{"worker":1,"trace":[],"org":{}}`)} {
			publish(subject, data)
			publish(subject, data, "Bullpen-Meta", "{", "Bullpen-Status", "x", "Bullpen-Attempt", "x", "Bullpen-First", "x", "Bullpen-Last", "-1",
				"Bullpen-Body", "bodies.that.are.not", "Nats-Expected-Last-Sequence", "x")
		}
	}
	// These are of the right form, and yet nobody can act on them.
	publish("bullpen.ctl.slots", []byte(`{"worker":"a.b","slots":1,"free":[1]}`))
	publish("bullpen.ctl.slots", []byte(`{"worker":"*","slots":-1,"free":null}`))
	publish("bullpen.worker."+worker+".assign", []byte(`{"ticket":1,"trace":"x","attempt":1,"revision":0}`))
	publish("bullpen.worker."+worker+".assign", fmt.Appendf(nil, `{"ticket":99999,"trace":%q,"attempt":1,"revision":0}`, nobody))
	now := time.Now().UTC()
	meta := func(id, key string) string {
		raw, err := json.Marshal(proto.Meta{
			TraceID: proto.TraceID(id), Org: "default", Key: key, Mode: proto.ModeAsync, Language: proto.Bash, Timeout: 1, MaxAttempts: 1,
			CreatedAt: now, QueueDeadline: now.Add(time.Hour), Concurrent: 10, MaxQueued: 10,
		})
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	unreadable := string(proto.NewTraceID()) // its header is in order, its body is not
	publish("bullpen.job.batch.default.key_bootstrap."+unreadable, []byte("{"), "Bullpen-Meta", meta(unreadable, "key_bootstrap"))
	misnamed := "no-trace-id"
	publish("bullpen.job.batch.default.key_bootstrap."+misnamed, []byte("{}"), "Bullpen-Meta", meta(misnamed, "key_bootstrap"))
	deep := string(proto.NewTraceID())
	publish("bullpen.job.batch.default.a.b."+deep, []byte("{}"), "Bullpen-Meta", meta(deep, "a.b"))
	if err := nc.FlushTimeout(patience); err != nil {
		t.Fatal(err)
	}

	// Whoever waits for the execution is not misled.
	type answer struct {
		reply *reply
		err   error
	}
	waits, follows := make(chan answer, 1), make(chan answer, 1)
	go func() {
		r, err := w.try(t.Context(), http.MethodGet, execution(id)+"?wait=60", nil)
		waits <- answer{r, err}
	}()
	go func() {
		r, err := w.try(t.Context(), http.MethodGet, execution(id, "output"), nil)
		follows <- answer{r, err}
	}()
	notices := time.NewTicker(10 * time.Millisecond)
	defer notices.Stop()
	for range 50 { // also once they have begun to wait
		<-notices.C
		publish("bullpen.done."+id, []byte("{}"))
		publish("bullpen.done."+id, nil)
		publish("bullpen.out."+id+".1", []byte("{}\n"), "Bullpen-First", "1", "Bullpen-Last", "0")
	}
	if err := nc.FlushTimeout(patience); err != nil {
		t.Fatal(err)
	}
	h.release(t)
	wait, follow := <-waits, <-follows
	if wait.err != nil || follow.err != nil {
		t.Fatal(wait.err, follow.err)
	}
	var rec record
	wait.reply.into(t, &rec)
	rec.succeeded(t, "held\nwoken\n")
	if stdout, _, _ := whole(t, follow.reply.events(t), 0); stdout != "held\nwoken\n" {
		t.Errorf("followed: %q", stdout)
	}

	w.ended(unreadable).failed(t, "failed", "sandbox_start_error", "")
	eventually(t, "the jobs that nobody can act on are set aside", func() (bool, any) {
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
	// All slots are still there, and all processes.
	for range 3 {
		both := newHold()
		one, two := w.submit(bash(both.code())), w.submit(bash(both.code()))
		both.reached(t, 2)
		both.release(t)
		w.ended(one).succeeded(t, "held\nwoken\n")
		w.ended(two).succeeded(t, "held\nwoken\n")
	}
	for _, proc := range []*process{w.front, w.worker} {
		if proc.ended() {
			t.Errorf("%s has ended", proc.name)
		}
	}

	// What is not output does not keep an execution from its end when the worker is lost.
	last := newHold()
	id = w.submit(bash(last.code()))
	last.reached(t, 1)
	publish("bullpen.out."+id+".1", []byte("nothing of ours"))
	if err := nc.FlushTimeout(patience); err != nil {
		t.Fatal(err)
	}
	w.worker.kill()
	w.ended(id).failed(t, "failed", "worker_lost", "lost")
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

// workerName hears from the only worker what it is called.
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
		t.Fatalf("a worker says %s: %v", m.Data, err)
	}
	return a.Worker
}
