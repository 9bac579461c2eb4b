package events_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/events"
	"github.com/bullpen-run/bullpen/scheduler/natsembed"
	"github.com/bullpen-run/bullpen/scheduler/queue"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// limit is the part of each output that results hold, in bytes.
const limit = 16 << 20

// execution is a running execution whose events the test writes.
type execution struct {
	t     *testing.T
	ctx   context.Context
	store *store.Store
	log   *events.Log
	rec   proto.Record
	rev   uint64
}

func start(t *testing.T) *execution {
	t.Parallel()
	return begin(t, storetest.Open(t, storetest.Server(t)))
}

func begin(t *testing.T, st *store.Store) *execution {
	t.Helper()
	e := &execution{
		t: t, ctx: storetest.Context(t), store: st,
		log: &events.Log{Store: st, Records: &queue.Queue{Store: st}},
	}
	e.rec = proto.Record{
		Meta:   storetest.Job("acme", "k", proto.ModeStreaming).Meta,
		Status: proto.StatusRunning, Attempt: 1,
	}
	e.write()
	return e
}

func (e *execution) write() {
	e.t.Helper()
	rev, err := e.store.Records.Put(e.ctx, &e.rec, e.rev)
	if err != nil {
		e.t.Fatal(err)
	}
	e.rev = rev
}

func (e *execution) end(w *events.Writer) {
	e.t.Helper()
	last, truncated := w.Close()
	r := proto.Exited(0)
	e.rec.Status, e.rec.Result, e.rec.ResultSeq, e.rec.OutputTruncated = r.Status(), &r, last+1, truncated
	e.write()
}

func TestPendingResultIsPrivate(t *testing.T) {
	e := start(t)
	tail := e.follow(0)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	last, _ := w.Close()
	pending := proto.Exited(0)
	pending.Stdout = "saved"
	e.rec.Pending, e.rec.Commit, e.rec.ResultSeq = &pending, &proto.Commit{}, last
	e.write()
	e.rec.Pending, e.rec.Commit = nil, nil
	result := pending.Unsaved("No room.")
	e.rec.Status, e.rec.Result, e.rec.ResultSeq = result.Status(), &result, last+1
	e.write()
	for {
		b, err := tail.Next(e.ctx)
		if err != nil {
			t.Fatal(err)
		}
		if b.Result == nil {
			continue
		}
		if r := b.Result.Result; *r.ErrorCode != string(proto.CodeThreadSave) || r.Stdout != "saved" {
			t.Errorf("%+v", r)
		}
		return
	}
}

func (e *execution) follow(after int64) *events.Tail {
	e.t.Helper()
	t, err := e.log.Follow(e.ctx, e.rec.Org, e.rec.TraceID, after)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(t.Close)
	return t
}

// event is a decoded line.
type event struct {
	Type, Stream, Data, Status string
	Seq                        int64
	Missing                    struct{ First, Last int64 }
	Truncated                  bool `json:"output_truncated"`
}

func (e *execution) rest(t *events.Tail) []event {
	e.t.Helper()
	var out []event
	for {
		b, err := t.Next(e.ctx)
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			e.t.Fatal(err)
		}
		out = append(out, e.decode(b)...)
	}
}

func (e *execution) decode(b proto.Events) []event {
	e.t.Helper()
	var out []event
	lines := bytes.NewBuffer(b.Lines)
	if b.Result != nil {
		if err := proto.WriteResultEvent(lines, b.Result); err != nil {
			e.t.Fatal(err)
		}
	}
	for line := range bytes.Lines(lines.Bytes()) {
		var ev event
		if err := json.Unmarshal(line, &ev); err != nil {
			e.t.Fatalf("%q: %v", line, err)
		}
		if ev.Seq != b.First+int64(len(out)) {
			e.t.Fatalf("event %d of a batch from %d has number %d", len(out), b.First, ev.Seq)
		}
		out = append(out, ev)
	}
	if len(out) == 0 || out[0].Seq != b.First || out[len(out)-1].Seq != b.Last {
		e.t.Fatalf("a batch of %d to %d contains %+v", b.First, b.Last, out)
	}
	return out
}

// outputs checks that events are complete from number after+1 on, and returns the outputs.
func outputs(t *testing.T, got []event, after int64) (stdout, stderr string) {
	t.Helper()
	var out, errs strings.Builder
	for i, ev := range got {
		if ev.Seq != after+1+int64(i) {
			t.Fatalf("event %d has number %d, want %d", i, ev.Seq, after+1+int64(i))
		}
		switch {
		case ev.Type == "status" && ev.Seq == 1, ev.Type == "result" && i == len(got)-1:
		case ev.Type == "output" && ev.Stream == "stdout":
			out.WriteString(ev.Data)
		case ev.Type == "output" && ev.Stream == "stderr":
			errs.WriteString(ev.Data)
		default:
			t.Fatalf("event %d: %+v", i, ev)
		}
	}
	if len(got) == 0 || got[len(got)-1].Type != "result" {
		t.Fatalf("no result at the end of %d events", len(got))
	}
	return out.String(), errs.String()
}

func TestFollowDuringAndAfterTheExecution(t *testing.T) {
	e := start(t)
	early := e.follow(0)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	out, errs := w.Stream(proto.Stdout), w.Stream(proto.Stderr)
	_, _ = io.WriteString(out, "first\nsec")
	var live []event
	for len(live) < 2 {
		b, err := early.Next(e.ctx)
		if err != nil {
			t.Fatal(err)
		}
		live = append(live, e.decode(b)...)
	}
	if live[0].Type != "status" || live[1].Data != "first\n" {
		t.Fatalf("live: %+v", live)
	}
	_, _ = io.WriteString(errs, "oh\n")
	_, _ = io.WriteString(out, "ond\nthird")
	e.end(w)
	stdout, stderr := outputs(t, append(live, e.rest(early)...), 0)
	if stdout != "first\nsecond\nthird" || stderr != "oh\n" {
		t.Fatalf("%q, %q", stdout, stderr)
	}
	for after := range int64(8) {
		got := e.rest(e.follow(after))
		if after < 6 {
			outputs(t, got, after)
		} else if len(got) != 1 || got[0].Type != "result" || got[0].Seq != 6 {
			t.Fatalf("after %d: %+v", after, got)
		}
	}
}

func TestNextAfterATimeout(t *testing.T) {
	e := start(t)
	tail := e.follow(0)
	short, cancel := context.WithTimeout(e.ctx, time.Millisecond)
	defer cancel()
	if _, err := tail.Next(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	_, _ = io.WriteString(w.Stream(proto.Stdout), "x")
	e.end(w)
	if stdout, _ := outputs(t, e.rest(tail), 0); stdout != "x" {
		t.Fatalf("%q", stdout)
	}
}

func TestSlowReaderGetsAllEvents(t *testing.T) {
	e := start(t)
	slow := e.follow(0)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	out := w.Stream(proto.Stdout)
	var want strings.Builder
	for i := range 9000 { // far more than the buffer of a reader
		line := fmt.Sprintf("%d %s\n", i, strings.Repeat("x", i%300))
		want.WriteString(line)
		_, _ = io.WriteString(out, line)
	}
	e.end(w)
	if stdout, _ := outputs(t, e.rest(slow), 0); stdout != want.String() {
		t.Fatalf("%d bytes, want %d", len(stdout), want.Len())
	}
}

func TestEarlyReaderGetsMoreThanMaxEvents(t *testing.T) {
	e := start(t)
	early := e.follow(0)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	out := w.Stream(proto.Stdout)
	const lines = 3 * proto.MaxEvents
	for i := range lines {
		_, _ = fmt.Fprintf(out, "%099d\n", i)
	}
	e.end(w)
	if w.Evict(e.ctx) {
		t.Error("evicted while somebody reads")
	}
	got := e.rest(early)
	if stdout, _ := outputs(t, got, 0); len(stdout) != 100*lines || got[len(got)-1].Truncated {
		t.Fatalf("%d bytes of %d, truncated %t", len(stdout), 100*lines, got[len(got)-1].Truncated)
	}
}

func TestLateReaderGetsTheLastMaxEvents(t *testing.T) {
	e := start(t)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	out := w.Stream(proto.Stdout)
	const lines = 3*proto.MaxEvents + 17
	for i := range lines {
		_, _ = fmt.Fprintf(out, "%d\n", i)
	}
	e.end(w)
	got := e.rest(e.follow(0))
	if got[0].Type != "status" || got[0].Seq != 1 {
		t.Fatalf("first: %+v", got[0])
	}
	end := got[len(got)-1]
	if end.Type != "result" || !end.Truncated {
		t.Fatalf("last: %+v", end)
	}
	if gone := got[1]; gone.Type != "keepalive" || gone.Seq != 1 || gone.Missing.First != 2 ||
		gone.Missing.Last != lines-proto.MaxEvents+1 {
		t.Fatalf("second: %+v", gone)
	}
	kept := got[2 : len(got)-1]
	if len(kept) != proto.MaxEvents || kept[0].Data != fmt.Sprintf("%d\n", lines-proto.MaxEvents) {
		t.Fatalf("%d events, from %+v", len(kept), kept[0])
	}
	if !w.Evict(e.ctx) {
		t.Fatal("not evicted, and nobody reads")
	}
	if again := e.rest(e.follow(0)); len(again) != len(got) {
		t.Fatalf("%d events after eviction, %d before", len(again), len(got))
	}
	info, err := e.store.Output.Info(e.ctx)
	if err != nil || info.State.Bytes > 2<<20 {
		t.Fatalf("%d bytes are still stored, %v", info.State.Bytes, err)
	}
}

// Progress that a program redraws in one line is followed as it comes.
func TestPartialLinesAreFlushed(t *testing.T) {
	e := start(t)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	w.FlushPartial = true
	tail, out := e.follow(0), w.Stream(proto.Stdout)
	_, _ = io.WriteString(out, "10%\r")
	got := e.until(tail, "10%\r")
	_, _ = io.WriteString(out, "20%\r\xc3") // half a character waits for the other half
	got = append(got, e.until(tail, "20%\r")...)
	_, _ = io.WriteString(out, "\xa9\nend")
	got = append(got, e.until(tail, "end")...)
	e.end(w)
	if stdout, _ := outputs(t, append(got, e.rest(tail)...), 0); stdout != "10%\r20%\ré\nend" {
		t.Errorf("%q", stdout)
	}
}

func TestLongLinesAreSplitBetweenCharacters(t *testing.T) {
	e := start(t)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	out := w.Stream(proto.Stdout)
	text := "a" + strings.Repeat("é", 100_000) + "\n" + strings.Repeat("€", 50_000)
	for rest := text; rest != ""; {
		n := min(len(rest), 70_001)
		_, _ = io.WriteString(out, rest[:n])
		rest = rest[n:]
	}
	e.end(w)
	got := e.rest(e.follow(0))
	for _, ev := range got {
		if len(ev.Data) > 64<<10 || strings.ContainsRune(ev.Data, '\ufffd') {
			t.Fatalf("a piece of %d bytes", len(ev.Data))
		}
	}
	if stdout, _ := outputs(t, got, 0); stdout != text {
		t.Fatalf("%d bytes, want %d", len(stdout), len(text))
	}
}

// Output that is written at once is sent in few messages of bounded size.
func TestMessageSize(t *testing.T) {
	const line, most = 64 << 10, 2 * (64<<10 + 80)
	short, long, expanding := strings.Repeat(strings.Repeat("s", 99)+"\n", 5_000), strings.Repeat("l", 16*line)+"\n",
		strings.Repeat(strings.Repeat("\x01", 1000)+"\n", 100)
	for name, c := range map[string]struct {
		printed  string
		messages uint64 // maximum; the first two may be small
	}{
		"short lines":       {short, 2 + 800_000/most},
		"a long line":       {long, 2 + 9},
		"lines that expand": {expanding, 2 + 600_000/most + 1},
		"all of them":       {short + long + expanding, 2 + 800_000/most + 9 + 600_000/most + 1},
	} {
		t.Run(name, func(t *testing.T) {
			e := start(t)
			w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
			if _, err := io.WriteString(w.Stream(proto.Stdout), c.printed); err != nil {
				t.Fatal(err)
			}
			e.end(w)
			if stdout, _ := outputs(t, e.rest(e.follow(0)), 0); stdout != c.printed {
				t.Errorf("read %d bytes of %d", len(stdout), len(c.printed))
			}
			info, err := e.store.Output.Info(e.ctx)
			if err != nil {
				t.Fatal(err)
			}
			if info.State.Msgs > c.messages {
				t.Errorf("%d messages, want at most %d", info.State.Msgs, c.messages)
			}
			for seq := info.State.FirstSeq; seq <= info.State.LastSeq; seq++ {
				m, err := e.store.Output.GetMsg(e.ctx, seq)
				if err != nil {
					t.Fatal(err)
				}
				if len(m.Data) > most {
					t.Errorf("message %d has %d bytes, want at most %d", seq, len(m.Data), most)
				}
			}
		})
	}
}

func TestSecondAttemptContinuesTheNumbers(t *testing.T) {
	e := start(t)
	first := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	_, _ = io.WriteString(first.Stream(proto.Stdout), "one\n")
	last, _ := first.Close()
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 2, last, limit)
	_, _ = io.WriteString(w.Stream(proto.Stdout), "two\n")
	e.end(w)
	if stdout, _ := outputs(t, e.rest(e.follow(0)), 0); stdout != "one\ntwo\n" {
		t.Fatalf("%q", stdout)
	}
}

// claim records that a later attempt runs. base is the last event that the dispatcher knew of.
func (e *execution) claim(attempt int, base int64) {
	e.t.Helper()
	e.rec.Attempt, e.rec.ResultSeq = attempt, base
	e.write()
}

// until reads events up to the one with the given data.
func (e *execution) until(t *events.Tail, data string) []event {
	e.t.Helper()
	var out []event
	for len(out) == 0 || out[len(out)-1].Data != data {
		b, err := t.Next(e.ctx)
		if err != nil {
			e.t.Fatal(err)
		}
		out = append(out, e.decode(b)...)
	}
	return out
}

// A frozen worker that has lost its lease continues to publish when it wakes.
func TestOutputOfAStaleWorkerIsIgnored(t *testing.T) {
	e := start(t)
	early := e.follow(0)
	stale := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	_, _ = io.WriteString(stale.Stream(proto.Stdout), "one\n")
	live := e.until(early, "one\n")
	e.claim(2, 2)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 2, 2, limit)
	_, _ = io.WriteString(stale.Stream(proto.Stdout), "stale\nstale\nstale\n")
	stale.Close()
	_, _ = io.WriteString(w.Stream(proto.Stdout), "two\nthree\n")
	live = append(live, e.until(early, "three\n")...)
	e.end(w)
	if stdout, _ := outputs(t, append(live, e.rest(early)...), 0); stdout != "one\ntwo\nthree\n" {
		t.Errorf("live: %q", stdout)
	}
	for after, want := range []string{"one\ntwo\nthree\n", "one\ntwo\nthree\n", "two\nthree\n", "three\n", ""} {
		got := e.rest(e.follow(int64(after)))
		if stdout, _ := outputs(t, got, int64(after)); stdout != want {
			t.Errorf("after %d: %q, want %q", after, stdout, want)
		}
		if got[len(got)-1].Truncated {
			t.Errorf("after %d: truncated, but no event is missing", after)
		}
	}
}

// Events that were published after the lease ended, but before the fence, are kept.
func TestFenceFollowsTheLastStoredEvent(t *testing.T) {
	e := start(t)
	stale := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	_, _ = io.WriteString(stale.Stream(proto.Stdout), "one\ntwo\nthree\n")
	stale.Close()
	e.claim(2, 2) // the dispatcher did not know of the later lines
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 2, 2, limit)
	_, _ = io.WriteString(w.Stream(proto.Stdout), "four\n")
	e.end(w)
	if stdout, _ := outputs(t, e.rest(e.follow(0)), 0); stdout != "one\ntwo\nthree\nfour\n" {
		t.Errorf("%q", stdout)
	}
}

// The previous attempt was lost before it published anything.
func TestLaterAttemptBeginsTheOutput(t *testing.T) {
	e := start(t)
	e.claim(2, 0)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 2, 0, limit)
	_, _ = io.WriteString(w.Stream(proto.Stdout), "one\n")
	e.end(w)
	if stdout, _ := outputs(t, e.rest(e.follow(0)), 0); stdout != "one\n" {
		t.Errorf("%q", stdout)
	}
}

func TestThirdAttemptContinuesTheNumbersOfTheSecond(t *testing.T) {
	e := start(t)
	stale := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	_, _ = io.WriteString(stale.Stream(proto.Stdout), "one\n")
	e.until(e.follow(0), "one\n")
	e.claim(2, 2)
	second := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 2, 2, limit)
	_, _ = io.WriteString(second.Stream(proto.Stdout), "two\n")
	second.Close()
	_, _ = io.WriteString(stale.Stream(proto.Stdout), "stale\nstale\nstale\n")
	stale.Close()
	e.claim(3, 5)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 3, 5, limit)
	_, _ = io.WriteString(w.Stream(proto.Stdout), "three\n")
	e.end(w)
	got := e.rest(e.follow(0))
	if stdout, _ := outputs(t, got, 0); stdout != "one\ntwo\nthree\n" || got[len(got)-1].Truncated {
		t.Errorf("%+v", got)
	}
}

func TestOutputAfterTheEndIsIgnored(t *testing.T) {
	e := start(t)
	stale := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	_, _ = io.WriteString(stale.Stream(proto.Stdout), "one\n")
	e.until(e.follow(0), "one\n")
	r := proto.Failure(proto.CodeWorkerLost, "The worker was lost.")
	e.rec.Status, e.rec.Result, e.rec.ResultSeq = r.Status(), &r, 3
	e.write()
	_, _ = io.WriteString(stale.Stream(proto.Stdout), "two\nthree\n")
	stale.Close()
	if stdout, _ := outputs(t, e.rest(e.follow(0)), 0); stdout != "one\n" {
		t.Errorf("%q", stdout)
	}
}

// restartable is a server that can be stopped, and started again with its data.
type restartable struct {
	t   *testing.T
	dir string

	mu  sync.Mutex
	now *natsembed.Server // nil while it is stopped
}

func (r *restartable) start() {
	r.t.Helper()
	s, err := natsembed.Open(r.dir, 1<<20, storetest.Log(r.t))
	if err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	r.now = s
	r.mu.Unlock()
}

func (r *restartable) stop() {
	r.mu.Lock()
	s := r.now
	r.now = nil
	r.mu.Unlock()
	if s != nil {
		s.Close()
	}
}

func (r *restartable) InProcessConn() (net.Conn, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.now == nil {
		return nil, errors.New("the server is stopped")
	}
	return r.now.InProcessConn()
}

func startOn(t *testing.T) (*execution, *restartable) {
	t.Parallel()
	r := &restartable{t: t, dir: t.TempDir()}
	r.start()
	t.Cleanup(r.stop)
	st, err := store.Connect(storetest.Context(t), store.Access{InProcess: r, Name: t.Name()},
		store.Config{Replicas: 1, Retention: time.Hour}, storetest.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(st.Close)
	return begin(t, st), r
}

func TestServerOutage(t *testing.T) {
	e, server := startOn(t)
	early := e.follow(0)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	out := w.Stream(proto.Stdout)
	_, _ = io.WriteString(out, "before\n")
	live := e.until(early, "before\n")
	server.stop()
	_, _ = io.WriteString(out, "meanwhile\n")
	short, cancel := context.WithTimeout(e.ctx, 10*time.Millisecond)
	defer cancel()
	if _, err := early.Next(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("during the outage: %v", err)
	}
	server.start()
	live = append(live, e.until(early, "meanwhile\n")...)
	_, _ = io.WriteString(out, "after\n")
	e.end(w)
	got := append(live, e.rest(early)...)
	if stdout, _ := outputs(t, got, 0); stdout != "before\nmeanwhile\nafter\n" || got[len(got)-1].Truncated {
		t.Errorf("live: %+v", got)
	}
	got = e.rest(e.follow(0))
	if stdout, _ := outputs(t, got, 0); stdout != "before\nmeanwhile\nafter\n" || got[len(got)-1].Truncated {
		t.Errorf("again: %+v", got)
	}
}

func TestReaderWaitsDuringAnOutage(t *testing.T) {
	e, server := startOn(t)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	_, _ = io.WriteString(w.Stream(proto.Stdout), "x\n")
	e.end(w)
	tail := e.follow(0)
	server.stop()
	short, cancel := context.WithTimeout(e.ctx, 10*time.Millisecond)
	defer cancel()
	if _, err := tail.Next(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("during the outage: %v", err)
	}
	server.start()
	if stdout, _ := outputs(t, e.rest(tail), 0); stdout != "x\n" {
		t.Errorf("%q", stdout)
	}
}

func TestFastOutputDuringRestarts(t *testing.T) {
	e, server := startOn(t)
	early := e.follow(0)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	const lines = proto.MaxEvents / 2
	var want strings.Builder
	for i := range lines {
		_, _ = fmt.Fprintf(&want, "%0999d\n", i)
	}
	printed := make(chan struct{})
	go func() {
		defer close(printed)
		_, _ = io.WriteString(w.Stream(proto.Stdout), want.String())
	}()
	var live []event
	for range 3 {
		b, err := early.Next(e.ctx)
		if err != nil {
			t.Fatal(err)
		}
		live = append(live, e.decode(b)...)
		server.stop()
		server.start()
	}
	<-printed
	e.end(w)
	for name, got := range map[string][]event{"live": append(live, e.rest(early)...), "again": e.rest(e.follow(0))} {
		if stdout, _ := outputs(t, got, 0); stdout != want.String() || got[len(got)-1].Truncated {
			t.Errorf("%s: %d bytes of %d, truncated %t", name, len(stdout), want.Len(), got[len(got)-1].Truncated)
		}
	}
}

// lossy loses one output message, as if it was sent to a former stream leader.
type lossy struct {
	jetstream.JetStream
	text string // in the message
	lost chan struct{}
	once sync.Once
}

func (l *lossy) PublishMsgAsync(m *nats.Msg, opts ...jetstream.PublishOpt) (jetstream.PubAckFuture, error) {
	if strings.Contains(string(m.Data), l.text) {
		l.once.Do(func() {
			m = &nats.Msg{Subject: "nowhere", Header: m.Header, Data: m.Data}
			defer close(l.lost)
		})
	}
	return l.JetStream.PublishMsgAsync(m, opts...)
}

// A message that is lost and sent again is not stored after later ones.
func TestLostMessageKeepsTheOrder(t *testing.T) {
	e := start(t)
	// otherwise the server reports that there are no responders
	if _, err := e.store.Conn.SubscribeSync("nowhere"); err != nil {
		t.Fatal(err)
	}
	js := &lossy{JetStream: e.store.JS, text: "two", lost: make(chan struct{})}
	e.store.JS = js
	early := e.follow(0)
	w := events.NewWriter(e.ctx, e.store, e.rec.Org, e.rec.TraceID, 1, 0, limit)
	_, _ = io.WriteString(w.Stream(proto.Stdout), "one\n")
	live := e.until(early, "one\n")
	_, _ = io.WriteString(w.Stream(proto.Stdout), "two\n")
	select {
	case <-js.lost:
	case <-e.ctx.Done():
		t.Fatal("the message was not sent")
	}
	_, _ = io.WriteString(w.Stream(proto.Stdout), "three\n")
	e.end(w)
	for name, got := range map[string][]event{"live": append(live, e.rest(early)...), "again": e.rest(e.follow(0))} {
		if stdout, _ := outputs(t, got, 0); stdout != "one\ntwo\nthree\n" || got[len(got)-1].Truncated {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestOutputThatCannotBeStoredIsTruncated(t *testing.T) {
	e, server := startOn(t)
	w := events.NewWriterWithLimits(e.ctx, e.store, e.rec.Org, e.rec.TraceID, limit, 3*time.Second, 1<<20)
	_, _ = io.WriteString(w.Stream(proto.Stdout), "one\n")
	early := e.follow(0)
	e.until(early, "one\n")
	server.stop()
	_, _ = io.WriteString(w.Stream(proto.Stdout), "two\n")
	last, truncated := w.Close()
	if last != 3 || !truncated {
		t.Errorf("the last event is %d, truncated %t", last, truncated)
	}
}

// A reader that is behind gets everything that the result holds, whatever was printed since. It is
// notified once of the events that are gone.
func TestSlowReaderGetsWhatTheResultHolds(t *testing.T) {
	e := start(t)
	early := e.follow(0)
	const limit, kept, line, lines = 1 << 20, 4 << 20, 16 << 10, 600
	w := events.NewWriterWithLimits(e.ctx, e.store, e.rec.Org, e.rec.TraceID, limit, time.Minute, kept)
	random := rand.NewChaCha8([32]byte{})
	noise := make([]byte, line*3/4)
	for range lines { // 9 MiB that can hardly be compressed
		_, _ = random.Read(noise)
		_, _ = io.WriteString(w.Stream(proto.Stdout), base64.StdEncoding.EncodeToString(noise)+"\n")
	}
	_, _ = io.WriteString(w.Stream(proto.Stderr), "the last words")
	e.end(w)
	const most = limit + kept + kept/4
	if info, err := e.store.Output.Info(e.ctx); err != nil || info.State.Bytes > most+most/8 {
		t.Errorf("%d bytes are stored, %v", info.State.Bytes, err)
	}
	if w.Evict(e.ctx) {
		t.Error("evicted while somebody reads")
	}
	var gone []event
	next := int64(1)
	for _, ev := range e.rest(early) {
		if ev.Type == "keepalive" {
			if gone = append(gone, ev); ev.Seq != next-1 || ev.Missing.First != next {
				t.Errorf("after event %d: %+v", next-1, ev)
			}
			next = ev.Missing.Last + 1
			continue
		}
		if ev.Seq != next {
			t.Fatalf("event %d follows %d", ev.Seq, next-1)
		}
		next++
		if ev.Type == "result" && !ev.Truncated {
			t.Error("the result event does not report that events are missing")
		}
	}
	if len(gone) != 1 || gone[0].Missing.First <= limit/line || next != lines+4 {
		t.Fatalf("the last event is %d, missing are %+v", next-1, gone)
	}
	got := e.rest(e.follow(gone[0].Missing.Last))
	if end := got[len(got)-1]; got[0].Seq != gone[0].Missing.Last+1 || end.Truncated {
		t.Errorf("a reader that misses nothing gets %d to %+v", got[0].Seq, end)
	}
	early.Close()
	if err := e.store.Conn.Flush(); err != nil {
		t.Fatal(err)
	}
	if !w.Evict(e.ctx) {
		t.Error("not evicted when nobody reads")
	}
}

func TestExecutionThatNeverRan(t *testing.T) {
	e := start(t)
	r := proto.Cancelled()
	e.rec.Status, e.rec.Result, e.rec.ResultSeq = r.Status(), &r, 1
	e.write()
	got := e.rest(e.follow(0))
	if len(got) != 1 || got[0].Type != "result" || got[0].Seq != 1 || got[0].Status != "cancelled" {
		t.Fatalf("%+v", got)
	}
	if _, err := e.log.Follow(e.ctx, "acme", proto.NewTraceID(), 0); !errors.Is(err, proto.ErrNotFound) {
		t.Fatalf("an unknown execution: %v", err)
	}
}

func BenchmarkLines(b *testing.B) {
	st := storetest.Open(b, storetest.Server(b))
	line := []byte(strings.Repeat("x", 99) + "\n")
	b.SetBytes(int64(len(line)))
	w := events.NewWriter(b.Context(), st, "acme", proto.NewTraceID(), 1, 0, limit)
	out := w.Stream(proto.Stdout)
	for b.Loop() {
		_, _ = out.Write(line)
	}
	w.Close()
}
