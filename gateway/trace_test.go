package gateway

import (
	"context"
	"testing"

	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/bullpen-run/bullpen/proto"
)

// spyTracer records how spans are started.
type spyTracer struct {
	noop.Tracer
	name   string
	id     proto.TraceID
	config trace.SpanConfig
}

func (s *spyTracer) Start(ctx context.Context, name string, options ...trace.SpanStartOption) (context.Context, trace.Span) {
	s.name, s.config = name, trace.NewSpanStartConfig(options...)
	s.id, _ = proto.TraceIDFromContext(ctx)
	return s.Tracer.Start(ctx, name, options...)
}

// The span of an execution starts a new trace, whose id is derived from the execution. It is linked
// to the client's trace.
func TestSpan(t *testing.T) {
	h := newHarness(t)
	spy := &spyTracer{}
	h.server.Tracer = spy
	h.stub.finishAtOnce(proto.Exited(0))
	a := h.execute(hello, "Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	if spy.name != "POST /v1/sandbox/execute" || spy.id != a.trace() || !spy.config.NewRoot() || spy.config.SpanKind() != trace.SpanKindServer {
		t.Errorf("span %q of %s", spy.name, spy.id)
	}
	links := spy.config.Links()
	if len(links) != 1 || links[0].SpanContext.TraceID().String() != "0af7651916cd43dd8448eb211c80319c" {
		t.Errorf("links %v", links)
	}
	h.execute(hello)
	if links := spy.config.Links(); len(links) != 0 {
		t.Errorf("links %v with no traceparent", links)
	}
}
