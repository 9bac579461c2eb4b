package executions

import (
	"context"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// Principals finds those who ask for signed URLs.
type Principals interface {
	// Principal returns the API key with an id, or the one for the member with that id.
	Principal(id string) (*proto.Key, bool)
}

// Routes are the routes of executions and of the queue.
type Routes struct {
	*Runner
	History    History
	Queue      Queue
	Principals Principals
	// DeliveryStatus returns the status of an execution's webhook, or "".
	DeliveryStatus func(ctx context.Context, r *proto.Record) (proto.DeliveryStatus, error)
	// URLSecret signs the URLs of streams. All gateways have the same random secret.
	URLSecret *[32]byte
}

// Handlers returns the handlers of the routes.
func (s *Routes) Handlers() []web.Handler {
	return []web.Handler{
		{ID: "execute", Handle: s.execute},
		{ID: "getExecution", Handle: s.getExecution},
		{ID: "getRequest", Handle: s.getRequest},
		{ID: "getOutput", Handle: s.getOutput},
		{ID: "getStdout", Handle: s.getRawOutput(proto.Stdout)},
		{ID: "getStderr", Handle: s.getRawOutput(proto.Stderr)},
		{ID: "cancelExecution", Handle: s.cancelExecution},
		{ID: "streamURL", Handle: s.streamURL},
		{ID: "getStream", Handle: s.getStream},
		{ID: "listExecutions", Handle: s.listExecutions},
		{ID: "getQueue", Handle: s.getQueue},
	}
}
