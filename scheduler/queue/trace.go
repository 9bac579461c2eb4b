package queue

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/bullpen-run/bullpen/proto"
)

// startSubmit starts the span of a submission, and stores it in the job as the parent of later
// spans. It does nothing if ctx has no span.
func startSubmit(ctx context.Context, job *proto.Job) (context.Context, trace.Span) {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return ctx, trace.SpanFromContext(ctx)
	}
	ctx, span := otel.Tracer("bullpen/scheduler").Start(ctx, "submit jobs", trace.WithSpanKind(trace.SpanKindProducer))
	if span.IsRecording() {
		span.SetAttributes(
			semconv.MessagingSystemKey.String("nats"), semconv.MessagingDestinationName("jobs"),
			semconv.MessagingOperationName("submit"),
			semconv.MessagingOperationTypeSend, semconv.MessagingMessageID(string(job.TraceID)),
			attribute.String("bullpen.org", job.Org), attribute.String("bullpen.key", job.Key),
			attribute.String("bullpen.class", string(job.Class())),
		)
	}
	header := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, header)
	job.Traceparent = header["traceparent"]
	return ctx, span
}

// endSubmit ends the span of a submission that ended with err.
func endSubmit(span trace.Span, err error) {
	if err != nil && span.IsRecording() {
		kind := semconv.ErrorType(err)
		if rejection, ok := errors.AsType[*proto.Rejection](err); ok {
			kind = semconv.ErrorTypeKey.String(string(rejection.Reason))
		}
		span.SetAttributes(kind)
		span.SetStatus(codes.Error, err.Error())
	}
	span.End()
}
