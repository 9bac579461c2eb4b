package worker

import (
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// A job that its gateway does not trace costs the worker nothing.
func TestTracingOff(t *testing.T) {
	job := &proto.Job{Meta: proto.Meta{TraceID: proto.NewTraceID(), Language: proto.Bash}}
	result := proto.Exited(0)
	rec := &proto.Record{Meta: job.Meta, Status: proto.StatusSuccess, Result: &result}
	ctx := t.Context()
	if n := testing.AllocsPerRun(100, func() {
		ctx, spans := startTrace(ctx, job, 1)
		spans.end(ctx, rec, nil)
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
