package webhook

import (
	"context"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/bullpen-run/bullpen/proto"
)

// traceAttempt adds a span of a delivery's last attempt to the trace of its execution, if any. The
// span only names the server, since the URL's path and query may be secret.
func traceAttempt(ctx context.Context, d *proto.Delivery, a *proto.DeliveryAttempt) {
	if d.Traceparent == "" {
		return
	}
	ctx = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{"traceparent": d.Traceparent})
	_, span := otel.Tracer("bullpen/webhook").Start(ctx, http.MethodPost, trace.WithSpanKind(trace.SpanKindClient),
		trace.WithTimestamp(a.At))
	if span.IsRecording() {
		span.SetAttributes(
			semconv.HTTPRequestMethodPost, attribute.String("bullpen.org", d.Org), attribute.String("bullpen.key", d.Key),
			attribute.String("bullpen.webhook.id", d.ID), attribute.String("bullpen.webhook.delivery", string(d.Status)),
		)
		scheme, server, _ := strings.Cut(proto.Origin(d.URL), "://")
		host, port, _ := net.SplitHostPort(server) // an origin has both
		number, _ := strconv.Atoi(port)
		span.SetAttributes(semconv.URLScheme(scheme), semconv.ServerAddress(host), semconv.ServerPort(number))
		if a.Number > 1 {
			span.SetAttributes(semconv.HTTPRequestResendCount(a.Number - 1))
		}
		if a.Status != 0 {
			span.SetAttributes(semconv.HTTPResponseStatusCode(a.Status))
		}
		switch a.Error {
		case "":
		case proto.DeliveryRejected:
			span.SetAttributes(semconv.ErrorTypeKey.String(strconv.Itoa(a.Status)))
			span.SetStatus(codes.Error, "")
		default:
			span.SetAttributes(semconv.ErrorTypeKey.String(string(a.Error)))
			span.SetStatus(codes.Error, "")
		}
	}
	span.End(trace.WithTimestamp(a.At.Add(time.Duration(a.Timings.Total * float64(time.Millisecond)))))
}
