package worker

import (
	"context"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/bullpen-run/bullpen/proto"
)

// runTrace has the spans of one attempt. It is nil if the job's gateway does not trace it.
type runTrace struct {
	tracer trace.Tracer
	parent context.Context
	span   trace.Span
}

// startTrace starts the span of an attempt as a child of the submission's.
func startTrace(ctx context.Context, job *proto.Job, attempt int) (context.Context, *runTrace) {
	if job.Traceparent == "" {
		return ctx, nil
	}
	t := &runTrace{tracer: otel.Tracer("bullpen/worker")}
	t.parent = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{"traceparent": job.Traceparent})
	ctx, t.span = t.tracer.Start(t.parent, "process jobs", //nolint:spancheck // end ends it
		trace.WithSpanKind(trace.SpanKindConsumer))
	if t.span.IsRecording() {
		t.span.SetAttributes(
			semconv.MessagingSystemKey.String("nats"), semconv.MessagingDestinationName("jobs"),
			semconv.MessagingOperationName("process"),
			semconv.MessagingOperationTypeProcess, semconv.MessagingMessageID(string(job.TraceID)),
			attribute.String("bullpen.org", job.Org), attribute.String("bullpen.key", job.Key),
			attribute.String("bullpen.language", string(job.Language)), attribute.Int("bullpen.attempt", attempt),
		)
	}
	return ctx, t
}

// end adds the spans of the steps and ends the span of an attempt that ended with a record or err.
func (t *runTrace) end(ctx context.Context, rec *proto.Record, err error) {
	switch {
	case t == nil:
		return
	case !t.span.IsRecording():
	case err != nil:
		t.span.SetAttributes(semconv.ErrorType(err))
		t.span.SetStatus(codes.Error, err.Error())
	default:
		t.span.SetAttributes(attribute.String("bullpen.status", string(rec.Status)))
		if code := rec.Result.ErrorCode; code != nil {
			t.span.SetAttributes(semconv.ErrorTypeKey.String(*code))
			t.span.SetStatus(codes.Error, "")
		}
		t.steps(ctx, rec)
	}
	t.span.End()
}

// steps adds spans of the steps of an attempt.
func (t *runTrace) steps(ctx context.Context, rec *proto.Record) {
	spans := map[proto.StepName]trace.Span{"": t.span}
	for _, step := range rec.Timeline() {
		parent := trace.ContextWithSpan(ctx, spans[step.Within])
		if step.Name == proto.StepDelay || step.Name == proto.StepQueue {
			parent = t.parent
		}
		_, span := t.tracer.Start(parent, string(step.Name), trace.WithTimestamp(step.At))
		spans[step.Name] = span
		switch step.Name {
		case proto.StepJail:
			span.SetAttributes(attribute.String("bullpen.jail.start", rec.Steps.Start))
		case proto.StepProgram:
			span.SetAttributes(semconv.ProcessExitCode(rec.Result.ExitCode))
			if status := rec.Result.Status(); status != proto.StatusSuccess {
				span.SetAttributes(semconv.ErrorTypeKey.String(string(status)))
				span.SetStatus(codes.Error, "")
			}
		}
		span.End(trace.WithTimestamp(step.At.Add(step.Took)))
	}
	if rec.CompletedAt != nil {
		_, span := t.tracer.Start(ctx, "result", trace.WithTimestamp(*rec.CompletedAt))
		span.End()
	}
}

// period is when something began, and how long it took.
type period struct {
	began time.Time
	took  time.Duration
}

// interval returns p as [proto.Steps] have it; zero if p is.
func (s *timings) interval(p period) proto.Interval {
	if p.began.IsZero() {
		return proto.Interval{}
	}
	return s.steps.Interval(p.began, p.began.Add(p.took))
}

// prepared adds the steps of preparing a sandbox.
func (s *timings) prepared(b *sandbox) {
	s.start, s.prepare, s.checkOut = b.start, b.took, b.checkOut
	s.steps.Start, s.steps.Home = string(b.start), s.interval(b.checkedOut)
	s.steps.Jail = s.interval(period{b.began, b.took + b.checkOut})
}
