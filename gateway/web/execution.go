package web

import (
	"context"
	"fmt"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
)

// recordReader reads the record of an execution, with or without its outputs.
type recordReader = func(ctx context.Context, org string, id proto.TraceID) (*proto.Record, error)

// ExecutionInPath returns read's record of the execution in the request's path, or
// [proto.ErrNotFound] if the organisation has no such execution.
func ExecutionInPath(r *Request, read recordReader) (*proto.Record, error) {
	id, err := proto.ParseTraceID(chi.URLParam(r.Request, "id"))
	if err != nil {
		return nil, proto.ErrNotFound
	}
	return Execution(r, id, read)
}

// Execution is [ExecutionInPath] for the execution of an id.
func Execution(r *Request, id proto.TraceID, read recordReader) (*proto.Record, error) {
	i := r.Info
	record, err := read(r.Context(), i.Key.Org, id)
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", id, err)
	}
	i.Trace = id
	i.AnswerHeader().Set("X-Trace-Id", string(id))
	return record, nil
}
