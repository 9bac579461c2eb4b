package gateway

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// spyTracer records how spans are started.
type spyTracer struct {
	noop.Tracer
	name   string
	id     proto.TraceID
	parent trace.SpanContext
	config trace.SpanConfig
}

func (s *spyTracer) Start(
	ctx context.Context, name string, options ...trace.SpanStartOption,
) (context.Context, trace.Span) {
	s.name, s.config = name, trace.NewSpanStartConfig(options...)
	s.parent = trace.SpanContextFromContext(ctx)
	s.id, _ = proto.TraceIDFromContext(ctx)
	return s.Tracer.Start(ctx, name, options...)
}

// The span of an execution starts a new trace, whose id is derived from the execution. It is linked
// to the client's trace, or continues that if it is trusted.
func TestSpan(t *testing.T) {
	h := newHarness(t)
	spy := &spyTracer{}
	h.server.Tracer = spy
	h.stub.finishAtOnce(proto.Exited(0))
	a := h.execute(hello, "Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	if spy.name != "POST /v1/sandbox/execute" || spy.id != a.trace() || !spy.config.NewRoot() ||
		spy.config.SpanKind() != trace.SpanKindServer {
		t.Errorf("span %q of %s", spy.name, spy.id)
	}
	links := spy.config.Links()
	if len(links) != 1 || links[0].SpanContext.TraceID().String() != "0af7651916cd43dd8448eb211c80319c" {
		t.Errorf("links %v", links)
	}
	h.server.TrustTraceparent = true
	h.execute(hello, "Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	if parent := spy.parent.SpanID().String(); parent != "b7ad6b7169203331" || spy.config.NewRoot() ||
		len(spy.config.Links()) != 0 {
		t.Errorf("the parent is %s, a new root is started: %v", parent, spy.config.NewRoot())
	}
	h.execute(hello)
	if !spy.config.NewRoot() {
		t.Error("no new root without a traceparent")
	}
	if links := spy.config.Links(); len(links) != 0 {
		t.Errorf("links %v with no traceparent", links)
	}
}

// BenchmarkTracingOff measures what tracing adds to a request when nothing is traced.
func BenchmarkTracingOff(b *testing.B) {
	s := &web.Core{Tracer: noop.NewTracerProvider().Tracer("")}
	r := &web.Request{Request: httptest.NewRequest(http.MethodPost, "/v1/sandbox/execute", nil), Info: &web.Info{}}
	id := proto.NewTraceID()
	b.ReportAllocs()
	for b.Loop() {
		ctx, span := s.StartRequest(r, id, "POST /v1/sandbox/execute")
		web.EndRequest(ctx, r.Info, span, http.StatusOK, nil)
	}
}
