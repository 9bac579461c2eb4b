package proto

import "context"

type traceIDKey struct{}

// ContextWithTraceID gives a context that carries the id of the execution that is about to be made, for the generator of
// OpenTelemetry ids: the first span started with it gets the trace id that belongs to the execution.
func ContextWithTraceID(ctx context.Context, id TraceID) context.Context {
	return context.WithValue(ctx, traceIDKey{}, id)
}

// TraceIDFromContext gives the id that [ContextWithTraceID] put into ctx.
func TraceIDFromContext(ctx context.Context) (id TraceID, ok bool) {
	id, ok = ctx.Value(traceIDKey{}).(TraceID)
	return id, ok
}
