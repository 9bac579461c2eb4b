package web

import (
	"context"

	"github.com/bullpen-run/bullpen/proto"
)

// Tail is a reader of one execution's events, for one goroutine at a time.
type Tail interface {
	// Next blocks until there are events. It returns [io.EOF] after the result event. It returns
	// ctx.Err() if ctx is done first, and may be called again.
	Next(ctx context.Context) (proto.Events, error)
	// Close releases the tail.
	Close()
}
