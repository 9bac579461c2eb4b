package deadletters_test

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/deadletters"
	"github.com/bullpen-run/bullpen/scheduler/store"
	"github.com/bullpen-run/bullpen/scheduler/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a store on a server of its own.
type world struct {
	*deadletters.Store
	t   *testing.T
	ctx context.Context
}

func newWorld(t *testing.T) *world {
	t.Parallel()
	return &world{&deadletters.Store{Store: storetest.Open(t, storetest.Server(t))}, t, storetest.Context(t)}
}

// job stores a job and returns its sequence number.
func (w *world) job(job *proto.Job) uint64 {
	w.t.Helper()
	m, err := w.Store.Store.Jobs.Stage(w.ctx, job, nats.Header{})
	if err != nil {
		w.t.Fatal(err)
	}
	seq, err := w.Store.Store.Jobs.Put(w.ctx, m)
	if err != nil {
		w.t.Fatal(err)
	}
	return seq
}

func (w *world) deadLetter(job *proto.Job, seq uint64) {
	w.t.Helper()
	rec := &proto.Record{Meta: job.Meta, Attempt: 1, Lost: []string{"a", "b", "c"}}
	if err := w.AddJob(w.ctx, rec, seq); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) list(after *proto.DeadLetter, limit int) []proto.DeadLetter {
	w.t.Helper()
	list, err := w.List(w.ctx, after, limit, func(err error) { w.t.Error(err) })
	if err != nil {
		w.t.Fatal(err)
	}
	return list
}

func (w *world) get(id string) (*proto.DeadLetter, *proto.DeadContent) {
	w.t.Helper()
	letter, content, err := w.Get(w.ctx, id)
	if err != nil {
		w.t.Fatal(err)
	}
	return letter, content
}

// The object with a large body is removed with its job: the dead letter has its own.
func TestJobIsKeptWithItsBody(t *testing.T) {
	w := newWorld(t)
	added := 0
	w.Added = func(reason proto.DeadReason) {
		if added++; reason != proto.DeadWorkersLost {
			t.Errorf("added %s", reason)
		}
	}
	small, large := storetest.Job("acme", "k", proto.ModeAsync), storetest.Job("acme", "k", proto.ModeAsync)
	large.Code = strings.Repeat("x", 1<<20)
	for _, job := range []*proto.Job{small, large} {
		job.ThreadID, job.Metadata, job.WebhookURL, job.Env = "t", map[string]string{"a": "b"}, "https://example.com",
			map[string]string{"A": "1"}
		seq := w.job(job)
		stored, err := w.Store.Store.Jobs.At(w.ctx, seq)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // the next leader may find it again
			w.deadLetter(job, seq)
		}
		var bodies []string
		if body := store.BodyName(stored.Header); body != "" {
			bodies = append(bodies, body)
		}
		if err := w.Store.Store.Jobs.Remove(w.ctx, store.RemovedJobs{Below: seq + 1, Bodies: bodies}); err != nil {
			t.Fatal(err)
		}
		letter, content := w.get(string(job.TraceID))
		if !reflect.DeepEqual(content.Job, job) || content.Message != nil {
			t.Errorf("%+v is not %+v", content.Job, job)
		}
		if letter.Reason != proto.DeadWorkersLost || letter.Attempt != 2 || len(letter.Workers) != 3 || letter.At.IsZero() ||
			letter.Meta.ThreadID != "t" {
			t.Errorf("%+v", letter)
		}
		w.deadLetter(job, seq) // the job is gone
	}
	if added != 2 {
		t.Errorf("%d dead letters were reported as added", added)
	}
	if list := w.list(nil, 10); len(list) != 2 || list[0].ID != string(large.TraceID) ||
		list[1].ID != string(small.TraceID) {
		t.Errorf("%+v", list)
	}
}

func TestMalformedMessageIsKeptAsItWas(t *testing.T) {
	w := newWorld(t)
	const subject = "bullpen.job.x"
	for _, data := range []string{"", "\xff\x00", strings.Repeat("y", 900<<10)} {
		m := &nats.Msg{
			Subject: subject, Header: nats.Header{"Bullpen-Meta": {"{"}, "Bullpen-Body": {"no.such.object"}},
			Data: []byte(data),
		}
		ack, err := w.Store.Store.JS.PublishMsg(w.ctx, m)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.MoveMessage(w.ctx, ack.Sequence, errors.New("its header is not that of a job")); err != nil {
			t.Fatal(err)
		}
		letter, content := w.get(w.list(nil, 1)[0].ID)
		if letter.Reason != proto.DeadMalformed || letter.Meta != nil ||
			letter.Message != "This message is no job: its header is not that of a job." {
			t.Errorf("%+v", letter)
		}
		if c := content.Message; content.Job != nil || c.Subject != subject || string(c.Data) != data ||
			!reflect.DeepEqual(c.Header, map[string][]string(m.Header)) {
			t.Errorf("%d bytes on %s with %v", len(c.Data), c.Subject, c.Header)
		}
		if err := w.MoveMessage(w.ctx, ack.Sequence, errors.New("again")); err != nil {
			t.Error(err)
		}
	}
	if list := w.list(nil, 10); len(list) != 3 {
		t.Errorf("%+v", list)
	}
	if info, err := w.Store.Store.Jobs.Info(w.ctx); err != nil || info.State.Msgs != 0 {
		t.Errorf("%+v, %v", info, err)
	}
}

// A job is malformed if only its header can be decoded.
func TestLostJobThatCannotBeRead(t *testing.T) {
	w := newWorld(t)
	job := storetest.Job("acme", "k", proto.ModeAsync)
	ack, err := w.Store.Store.JS.PublishMsg(w.ctx, &nats.Msg{Subject: store.JobSubject(&job.Meta), Data: []byte("{")})
	if err != nil {
		t.Fatal(err)
	}
	w.deadLetter(job, ack.Sequence)
	letter, content := w.get(string(job.TraceID))
	if letter.Reason != proto.DeadMalformed || len(letter.Workers) != 3 || string(content.Message.Data) != "{" {
		t.Errorf("%+v, %+v", letter, content.Message)
	}
}

func TestOneOfTwoMarksADeadLetter(t *testing.T) {
	w := newWorld(t)
	job := storetest.Job("acme", "k", proto.ModeAsync)
	job.Code = strings.Repeat("x", 1<<20)
	w.deadLetter(job, w.job(job))
	id := string(job.TraceID)
	first, _ := w.get(id)
	second, _ := w.get(id)
	now := first.At
	first.Requeued, first.RequeuedAt = "trc_aaaaaaaaaaaaaaaaaaaa", &now
	second.Requeued = "trc_bbbbbbbbbbbbbbbbbbbb"
	if err := w.Mark(w.ctx, first); err != nil {
		t.Fatal(err)
	}
	if err := w.Mark(w.ctx, second); !errors.Is(err, proto.ErrConflict) {
		t.Fatalf("the second: %v", err)
	}
	letter, content := w.get(id)
	if letter.Requeued != first.Requeued || !reflect.DeepEqual(letter, first) || content.Job.Code != job.Code {
		t.Errorf("%+v is not %+v", letter, first)
	}
	first.Requeued, first.RequeuedAt = "", nil // with its new revision
	if err := w.Mark(w.ctx, first); err != nil {
		t.Fatal(err)
	}
	if list := w.list(nil, 10); len(list) != 1 || list[0].Requeued != "" {
		t.Errorf("%+v", list)
	}
}

func TestRemovedDeadLetterStaysRemoved(t *testing.T) {
	w := newWorld(t)
	job := storetest.Job("acme", "k", proto.ModeAsync)
	seq := w.job(job)
	w.deadLetter(job, seq)
	id := string(job.TraceID)
	letter, _ := w.get(id)
	if err := w.Remove(w.ctx, id); err != nil {
		t.Fatal(err)
	}
	w.deadLetter(job, seq) // the next leader finds the job again
	if list := w.list(nil, 10); len(list) != 0 {
		t.Errorf("%+v", list)
	}
	_, _, err := w.Get(w.ctx, id)
	for doing, err := range map[string]error{"get": err, "remove": w.Remove(w.ctx, id)} {
		if !errors.Is(err, proto.ErrNotFound) {
			t.Errorf("%s: %v", doing, err)
		}
	}
	if err := w.Mark(w.ctx, letter); !errors.Is(err, proto.ErrConflict) {
		t.Errorf("mark: %v", err)
	}
}

func TestListGoesOnAfterOne(t *testing.T) {
	w := newWorld(t)
	var want []string
	for range 5 {
		job := storetest.Job("acme", "k", proto.ModeAsync)
		w.deadLetter(job, w.job(job))
		want = append([]string{string(job.TraceID)}, want...)
	}
	if _, err := w.Store.Store.JS.Publish(w.ctx, store.DeadLetterSubject("acme", "trc_bad"), nil); err != nil {
		t.Fatal(err)
	}
	bad := &nats.Msg{Subject: store.DeadLetterSubject("", "dead_1"), Header: nats.Header{store.HeaderDead: {"{"}}}
	if _, err := w.Store.Store.JS.PublishMsg(w.ctx, bad); err != nil {
		t.Fatal(err)
	}
	var got []string
	var after *proto.DeadLetter
	wrong := 0
	for {
		page, err := w.List(w.ctx, after, 2, func(error) { wrong++ })
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		for _, l := range page {
			got = append(got, l.ID)
		}
		after = &page[len(page)-1]
	}
	if !reflect.DeepEqual(got, want) || wrong != 4 {
		t.Errorf("%v, want %v; %d malformed", got, want, wrong)
	}
}
