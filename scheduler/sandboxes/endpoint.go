package sandboxes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

// endpointTimeout is how long a worker may take to answer with its endpoint.
const endpointTimeout = 2 * time.Second

// Announce answers gateways with the endpoint of a worker until ctx is done.
func Announce(ctx context.Context, st *store.Store, worker string, endpoint proto.WorkerEndpoint) error {
	body, err := json.Marshal(endpoint)
	if err != nil {
		return fmt.Errorf("encode the endpoint of worker %s: %w", worker, err)
	}
	sub, err := st.Conn.Subscribe(store.EndpointSubject(worker), func(m *nats.Msg) { _ = m.Respond(body) })
	if err != nil {
		return fmt.Errorf("announce the endpoint of worker %s: %w", worker, err)
	}
	<-ctx.Done()
	return sub.Unsubscribe()
}

// Endpoints finds the endpoints of workers.
type Endpoints struct{ Store *store.Store }

// Endpoint returns the endpoint of a worker, or [proto.ErrNotFound] if the worker does not answer.
func (e *Endpoints) Endpoint(ctx context.Context, worker string) (found proto.WorkerEndpoint, err error) {
	ctx, cancel := context.WithTimeout(ctx, endpointTimeout)
	defer cancel()
	m, err := e.Store.Conn.RequestWithContext(ctx, store.EndpointSubject(worker), nil)
	switch {
	case errors.Is(err, nats.ErrNoResponders), errors.Is(err, context.DeadlineExceeded):
		return found, fmt.Errorf("find worker %s: %w", worker, proto.ErrNotFound)
	case err != nil:
		return found, fmt.Errorf("find worker %s: %w", worker, err)
	}
	if err := json.Unmarshal(m.Data, &found); err != nil {
		return found, fmt.Errorf("decode the endpoint of worker %s: %w", worker, err)
	}
	return found, nil
}
