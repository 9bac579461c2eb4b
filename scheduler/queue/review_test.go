package queue

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/stream"
	"github.com/bullpen-run/bullpen/scheduler/streamtest"
)

// A dispatcher that was paused believes that leases ended which were renewed in the meantime.
func TestRenewedLeaseIsNotLost(t *testing.T) {
	set := streamtest.Set(t, streamtest.Server(t))
	ctx := streamtest.Context(t)
	started := time.Now().Add(-time.Hour)
	rec := &proto.Record{
		Meta: streamtest.Job("acme", "k", proto.ModeAsync).Meta, Status: proto.StatusRunning, Attempt: 1, Worker: "w", StartedAt: &started,
	}
	seen, err := set.WriteRecord(ctx, rec, 0)
	if err != nil {
		t.Fatal(err)
	}
	renewed, err := set.WriteRecord(ctx, rec, seen)
	if err != nil {
		t.Fatal(err)
	}
	stored, err := set.Last(ctx, set.Execs, stream.Exec(rec.TraceID))
	if err != nil {
		t.Fatal(err)
	}
	q := &Queue{Set: set}
	if _, _, err := q.lose(ctx, rec, seen); err != nil {
		t.Fatal(err)
	}
	if now, _, err := set.Record(ctx, rec.TraceID); err != nil || now.Status != proto.StatusRunning {
		t.Fatalf("%+v, %v", now, err)
	}
	if _, _, err := q.lose(ctx, rec, renewed); err != nil {
		t.Fatal(err)
	}
	now, _, err := set.Record(ctx, rec.TraceID)
	if err != nil || *now.Result.ErrorCode != string(proto.CodeWorkerLost) {
		t.Fatalf("%+v, %v", now, err)
	}
	// Nothing is known of the program after its lease was last renewed.
	if known := stored.Time.Sub(started); now.Result.DurationMS != known.Milliseconds() ||
		!strings.Contains(*now.Result.ErrorMessage, "known to have run for "+known.Round(time.Millisecond).String()) {
		t.Fatalf("%d ms, %s", now.Result.DurationMS, *now.Result.ErrorMessage)
	}
}

// A record that the rebuild did not see is taken in when it is met.
func TestBookIsPutRightByTheRecord(t *testing.T) {
	set := streamtest.Set(t, streamtest.Server(t))
	ctx := streamtest.Context(t)
	l := &leading{
		Dispatcher: &Dispatcher{Set: set, Instance: "d", Log: streamtest.Log(t)}, book: newBook(), inbox: make(chan func(), 1),
	}
	j := l.book.add(streamtest.Job("acme", "k", proto.ModeAsync).Meta)
	j.seq = 1
	rec := &proto.Record{Meta: j.meta, Status: proto.StatusRunning, Attempt: 2, Worker: "w"}
	claimed, err := set.WriteRecord(ctx, rec, 0)
	if err != nil {
		t.Fatal(err)
	}
	l.withdraw(ctx, j, proto.Cancelled())
	(<-l.inbox)()
	if j.state != running || j.worker != "w" || j.attempt != 2 || j.revision != claimed || j.ending {
		t.Fatalf("%+v", j)
	}
	if _, err := set.WriteRecord(ctx, terminal(rec, proto.Exited(0), time.Now()), claimed); err != nil {
		t.Fatal(err)
	}
	l.end(ctx, j, func(ctx context.Context, q *Queue) (*proto.Record, uint64, error) { return q.lose(ctx, rec, claimed) })
	(<-l.inbox)()
	if len(l.book.jobs) != 0 {
		t.Fatalf("%+v", j)
	}
}
