package client

import (
	"errors"
	"slices"
	"testing"

	"github.com/bullpen-run/bullpen/proto/api"
)

// A stream of changes goes on with ready after a broken connection. A refusal ends it.
func TestChangesReconnect(t *testing.T) {
	const ready = "data: {\"type\":\"ready\"}\n\n"
	with(t, []answer{
		{status: 200, body: ready + "data: {\"type\":\"changes\",\"kinds\":[\"batches\"]}\n\ndata: {\"ty", broken: true},
		{err: errRefused},
		{status: 200, body: ready + "data: {\"type\":\"keepalive\"}\n\n"},
		{status: 401, body: `{"error":"unauthorized","message":"the session has ended"}`},
	}, func(t *testing.T, c *Client, a *answers) {
		var got []api.ChangesType
		var last error
		for e, err := range c.Changes(t.Context(), "acme") {
			if last = err; err == nil {
				got = append(got, e.Type)
			}
		}
		want := []api.ChangesType{api.ChangesReady, api.ChangesChanges, api.ChangesReady}
		refused, ok := errors.AsType[*Error](last)
		if !slices.Equal(got, want) || !ok || refused.Code != "unauthorized" {
			t.Errorf("got %q, %v", got, last)
		}
		if path := a.requests[0].URL.RequestURI(); path != "/v1/changes?org=acme" {
			t.Errorf("the request is for %s", path)
		}
	})
}
