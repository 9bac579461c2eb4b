package changes

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// keepalive is how often an idle stream gets an event. A page that gets none is stale.
	keepalive = 10 * time.Second
	// gather is how long changes are collected before they are sent in one event.
	gather = 250 * time.Millisecond
	// maxStreams is the number of streams of an organisation at a time, per process.
	maxStreams = 64
)

var errTooMany = &api.Error{
	Code: api.CodeRateLimited, RetryAfter: 5,
	Message: fmt.Sprintf("this organisation has %d streams of changes open at this server; close one, and send the "+
		"request again", maxStreams),
}

// Routes are the routes of the stream of changes.
type Routes struct {
	*web.Core
	Feed *Feed

	streams web.Transfers
}

// Handlers returns the handlers of the routes.
func (s *Routes) Handlers() []web.Handler {
	return []web.Handler{{ID: "getChanges", Handle: s.get}}
}

// get streams the changes that the caller may see. The stream ends when this gateway begins to shut
// down, or when the caller has lost rights.
func (s *Routes) get(w http.ResponseWriter, r *web.Request) error {
	org, err := web.ListedOrg(r)
	if err != nil {
		return err
	}
	done, err := s.streams.Acquire(r.Context(), r.Key.Org, maxStreams)
	if err != nil {
		if r.Context().Err() == nil {
			err = errTooMany
		}
		return err
	}
	defer done()
	ctx, cancel := s.UntilDrain(r.Context())
	defer cancel()
	changes := s.Feed.subscribe(org, proto.ChangeKinds(&r.Key))
	defer changes.close()
	web.StreamHeader(w.Header(), web.TypeSSE)
	w.WriteHeader(http.StatusOK)
	if r.Method == http.MethodHead {
		return nil
	}
	checked := time.Now()
	for next := (api.ChangesEvent{Type: api.ChangesReady}); ; {
		if err := send(w, &next); err != nil {
			return fmt.Errorf("stream changes: %w", err)
		}
		if next, err = changes.next(ctx, checked.Add(keepalive)); err != nil {
			return nil // the client is gone, or this gateway shuts down: clients reconnect after a clean end
		}
		if time.Since(checked) >= keepalive {
			if s.CheckCaller(r) != nil {
				return nil
			}
			checked = time.Now()
		}
	}
}

// next blocks until there are changes and returns their event, or a keepalive at the deadline. It
// returns ctx.Err() if ctx is done first.
func (s *subscription) next(ctx context.Context, deadline time.Time) (api.ChangesEvent, error) {
	select {
	case <-s.changed:
	case <-time.After(time.Until(deadline)):
		return api.ChangesEvent{Type: api.ChangesKeepalive}, nil
	case <-ctx.Done():
		return api.ChangesEvent{}, ctx.Err()
	}
	select {
	case <-time.After(gather):
		return s.event(), nil
	case <-ctx.Done():
		return api.ChangesEvent{}, ctx.Err()
	}
}

// event returns the pending changes as an event, and removes them.
func (s *subscription) event() api.ChangesEvent {
	changed := s.take()
	e := api.ChangesEvent{Type: api.ChangesChanges, IDs: map[proto.ChangeKind][]string{}}
	for _, kind := range s.kinds {
		o := changed[kind]
		if o == nil {
			continue
		}
		e.Kinds = append(e.Kinds, kind)
		if len(o.ids) > 0 {
			e.IDs[kind] = o.ids
		}
		if o.more {
			e.More = append(e.More, kind)
		}
	}
	return e
}

// send writes an event at once.
func send(w http.ResponseWriter, e *api.ChangesEvent) error {
	body, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("encode event: %w", err)
	}
	if _, err := fmt.Fprintf(w, "data: %s\n\n", body); err != nil {
		return err
	}
	return http.NewResponseController(w).Flush()
}
