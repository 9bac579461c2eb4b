package queue

import (
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/streamtest"
)

// A dispatcher that was paused believes that leases ended which were renewed in the meantime.
func TestRenewedLeaseIsNotLost(t *testing.T) {
	set := streamtest.Set(t, streamtest.Server(t))
	ctx := streamtest.Context(t)
	rec := &proto.Record{
		Meta: streamtest.Job("acme", "k", proto.ModeAsync).Meta, Status: proto.StatusRunning, Attempt: 1, Worker: "w", StartedAt: &time.Time{},
	}
	seen, err := set.WriteRecord(ctx, rec, 0)
	if err != nil {
		t.Fatal(err)
	}
	renewed, err := set.WriteRecord(ctx, rec, seen)
	if err != nil {
		t.Fatal(err)
	}
	q := &Queue{Set: set}
	if err := q.lose(ctx, rec, seen); err != nil {
		t.Fatal(err)
	}
	if now, _, err := set.Record(ctx, rec.TraceID); err != nil || now.Status != proto.StatusRunning {
		t.Fatalf("%+v, %v", now, err)
	}
	if err := q.lose(ctx, rec, renewed); err != nil {
		t.Fatal(err)
	}
	if now, _, err := set.Record(ctx, rec.TraceID); err != nil || *now.Result.ErrorCode != string(proto.CodeWorkerLost) {
		t.Fatalf("%+v, %v", now, err)
	}
}
