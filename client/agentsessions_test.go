package client

import (
	"errors"
	"fmt"
	"iter"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
)

// agentEvent returns an event as a stream of a session has it.
func agentEvent(sequence int, kind string) string {
	return fmt.Sprintf("id: %d\ndata: {\"sequence\":%[1]d,\"type\":%q,\"data\":{}}\n\n", sequence, kind)
}

// agentEvents returns events in short form, and the error at their end.
func agentEvents(stream iter.Seq2[*AgentEvent, error]) (got []string, err error) {
	for e, err := range stream {
		if err != nil {
			return got, err
		}
		got = append(got, fmt.Sprintf("%d %s", e.Sequence, e.Type))
	}
	return got, nil
}

// A message is sent again under its key until there is an event of its turn. Then the rest of the events is read.
func TestAgentTurnResumes(t *testing.T) {
	with(t, []answer{
		{status: 200, body: ": keep-alive\n\n", broken: true},
		{err: errReset},
		{status: 200, body: agentEvent(7, "turn.started") + agentEvent(8, "item.delta")[:20], broken: true},
		{err: errRefused},
		{status: 200, body: agentEvent(8, "item.delta") + agentEvent(9, "error")},
		{status: 200, body: agentEvent(9, "error") + agentEvent(10, "turn.ended") + agentEvent(11, "turn.started")},
	}, func(t *testing.T, c *Client, a *answers) {
		got, err := agentEvents(c.StreamAgentMessage(t.Context(), "a/b", &AgentMessage{Text: "hello"}))
		want := []string{"7 turn.started", "8 item.delta", "9 error", "10 turn.ended"}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("got %q, %v", got, err)
		}
		var requests []string
		for _, r := range a.requests {
			requests = append(requests, r.Method+" "+r.URL.RequestURI())
			if key := r.Header.Get("Idempotency-Key"); r.Method == http.MethodPost && key !=
				a.requests[0].Header.Get("Idempotency-Key") {
				t.Errorf("sent again under %q", key)
			}
		}
		const send, follow = "POST /sandbox-agent/v1/sessions/a%2Fb/messages/stream",
			"GET /sandbox-agent/v1/sessions/a%2Fb/events/sse?offset="
		if want := []string{send, send, send, follow + "7", follow + "7", follow + "9"}; !slices.Equal(requests, want) {
			t.Errorf("requests are %q", requests)
		}
	})
}

// A session that is deleted while it is followed is an error of the server, in its own form.
func TestAgentSessionDeletedWhileFollowed(t *testing.T) {
	with(t, []answer{
		{status: 200, body: agentEvent(4, "item.delta")},
		{status: 404, body: `{"type":"urn:sandbox-agent:error:session_not_found","title":"Session Not Found","status":404,` +
			`"detail":"session not found: s1"}`},
	}, func(t *testing.T, c *Client, _ *answers) {
		got, err := agentEvents(c.FollowAgentSession(t.Context(), "s1", 3))
		refused, ok := errors.AsType[*Error](err)
		if !ok || refused.Code != "session_not_found" || refused.Message != "session not found: s1" || len(got) != 1 {
			t.Errorf("got %q, %v", got, err)
		}
	})
}

// A server that stays away ends the stream with an error that says where it was.
func TestAgentSessionLost(t *testing.T) {
	list := []answer{{status: 200, body: agentEvent(4, "item.delta"), broken: true}}
	for range 40 {
		list = append(list, answer{err: errRefused})
	}
	synctest.Test(t, func(t *testing.T) {
		got, err := agentEvents(newClient(t, &answers{t: t, list: list}).FollowAgentSession(t.Context(), "s1", 0))
		var unreachable *UnreachableError
		if !errors.As(err, &unreachable) || !strings.Contains(err.Error(), "session s1 after event 4") || len(got) != 1 {
			t.Errorf("got %q, %v", got, err)
		}
	})
}
