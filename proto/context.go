package proto

import "context"

type traceIDKey struct{}

// ContextWithTraceID returns a context with the id of a new execution, for the generator of
// OpenTelemetry ids: the first span started with it gets the trace id of the execution.
func ContextWithTraceID(ctx context.Context, id TraceID) context.Context {
	return context.WithValue(ctx, traceIDKey{}, id)
}

// TraceIDFromContext returns the id that [ContextWithTraceID] added to ctx.
func TraceIDFromContext(ctx context.Context) (id TraceID, ok bool) {
	id, ok = ctx.Value(traceIDKey{}).(TraceID)
	return id, ok
}
