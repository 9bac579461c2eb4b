package proto

import "context"

type traceIDKey struct{}

// ContextWithTraceID returns a context that makes the first OpenTelemetry span started with it use
// the trace id of a new execution.
func ContextWithTraceID(ctx context.Context, id TraceID) context.Context {
	return context.WithValue(ctx, traceIDKey{}, id)
}

// TraceIDFromContext returns the id that [ContextWithTraceID] added to ctx.
func TraceIDFromContext(ctx context.Context) (id TraceID, ok bool) {
	id, ok = ctx.Value(traceIDKey{}).(TraceID)
	return id, ok
}
