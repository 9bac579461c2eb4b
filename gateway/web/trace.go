package web

import (
	"cmp"
	"context"
	"net/http"
	"strings"

	"github.com/go-chi/chi/v5"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

var (
	newTrace    = []trace.SpanStartOption{trace.WithNewRoot()}
	serverTrace = []trace.SpanStartOption{trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindServer)}
	serverSpan  = []trace.SpanStartOption{trace.WithSpanKind(trace.SpanKindServer)}
)

// StartRequest starts the span of a request that submits execution id. Its trace is either new,
// with an id derived from the execution and a link to the client's, or the client's own.
func (c *Core) StartRequest(r *Request, id proto.TraceID, name string) (context.Context, trace.Span) {
	ctx, options := proto.ContextWithTraceID(r.Context(), id), serverTrace
	if r.Header.Get("Traceparent") != "" {
		remote := propagation.TraceContext{}.Extract(ctx, propagation.HeaderCarrier(r.Header))
		client := trace.SpanContextFromContext(remote)
		switch {
		case !client.IsValid():
		case c.TrustTraceparent:
			ctx, options = remote, serverSpan
		default:
			options = append(serverTrace[:2:2], trace.WithLinks(trace.Link{SpanContext: client}))
		}
	}
	ctx, span := c.Tracer.Start(ctx, name, options...)
	if span.IsRecording() {
		scheme := "http"
		if r.TLS != nil || c.proxiedTLS(r.Request) {
			scheme = "https"
		}
		span.SetAttributes(
			semconv.HTTPRequestMethodKey.String(r.Method), semconv.HTTPRoute(chi.RouteContext(r.Context()).RoutePattern()),
			semconv.URLPath(r.URL.Path), semconv.URLScheme(scheme),
			semconv.NetworkProtocolVersion(strings.TrimSuffix(strings.TrimPrefix(r.Proto, "HTTP/"), ".0")),
		)
	}
	return ctx, span
}

// EndRequest ends the span of a request; err may be nil. status is the answer's, 0 if it follows
// from err.
func EndRequest(ctx context.Context, i *Info, span trace.Span, status int, err error) {
	if span.IsRecording() {
		if err != nil && ctx.Err() == nil { // otherwise the client is gone
			answer := api.NewError(err)
			status = cmp.Or(status, answer.Code.Status())
			if answer.Code.Status() >= http.StatusInternalServerError { // other errors are the client's
				span.SetAttributes(semconv.ErrorTypeKey.String(string(answer.Code)))
				span.SetStatus(codes.Error, answer.Message)
			}
		}
		if status != 0 {
			span.SetAttributes(semconv.HTTPResponseStatusCode(status))
		}
		if i.Trace != "" {
			span.SetAttributes(attribute.String("bullpen.trace_id", string(i.Trace)))
		}
		span.SetAttributes(attribute.String("bullpen.org", i.Key.Org), attribute.String("bullpen.key", i.Key.ID))
	}
	span.End()
}

// StartBackgroundSpan starts the span of an execution that no request submits. Its trace is a new one.
func (c *Core) StartBackgroundSpan(
	ctx context.Context, id proto.TraceID, name, org, key string,
) (context.Context, trace.Span) {
	ctx, span := c.Tracer.Start(proto.ContextWithTraceID(ctx, id), name, newTrace...)
	if span.IsRecording() {
		span.SetAttributes(attribute.String("bullpen.org", org), attribute.String("bullpen.key", key),
			attribute.String("bullpen.trace_id", string(id)))
	}
	return ctx, span
}

// EndBackgroundSpan ends the span of [Core.StartBackgroundSpan].
func EndBackgroundSpan(span trace.Span, err error) {
	if err != nil && span.IsRecording() {
		span.SetAttributes(semconv.ErrorType(err))
		span.SetStatus(codes.Error, err.Error())
	}
	span.End()
}
