package api

import (
	"net/http"

	"github.com/bullpen-run/bullpen/proto"
)

// ChangesEvent is an event of the stream of changes.
type ChangesEvent struct {
	Type  ChangesType                   `json:"type"`
	Kinds []proto.ChangeKind            `json:"kinds,omitempty" doc:"The kinds of which objects were created, changed or removed. In the event changes only."`
	IDs   map[proto.ChangeKind][]string `json:"ids,omitempty" doc:"The ids or names of changed objects by kind, at most 50 of each."`
	More  []proto.ChangeKind            `json:"more,omitempty" doc:"The kinds of which more objects have changed than ids has."`
}

// ChangesType is the type of an event of the stream of changes.
type ChangesType string

// The types of events of the stream of changes.
const (
	ChangesReady     ChangesType = "ready"
	ChangesChanges   ChangesType = "changes"
	ChangesKeepalive ChangesType = "keepalive"
)

func changeRoutes() []Route {
	return []Route{{
		Method: http.MethodGet, Path: "/v1/changes", ID: "getChanges", Tag: tagActivity, Scope: proto.ScopeRead,
		Summary: "Follow changes",
		Doc: "Server-sent events that name the changed objects of the organisation, for clients that show lists and read " +
			"them again. Each is a ChangesEvent: ready at once, changes at most four times a second, keepalive after 10 " +
			"seconds without another. Events have no ids and are not repeated: a client that reconnects reads its lists " +
			"again. Keys with the scope admin also follow keys, members, secrets, connections, plans and profiles, and " +
			"global administrators orgs. Executions that expire are not reported. The stream ends when the key is revoked or " +
			"loses a scope, and when the server shuts down. An organisation may have 64 streams at each server.",
		Params: []Param{query("org", "The organisation, for a global administrator. By default all for a global "+
			"administrator, otherwise that of the API key.", text())},
		Responses: []Response{{
			Status: http.StatusOK, Doc: "The events.", Text: map[string]string{
				typeSSE: `data: {"type":"ready"}` + "\n\n" + `data: {"type":"changes","kinds":["executions"],` +
					`"ids":{"executions":["` + exampleTrace + `"]}}` + "\n\n",
			},
		}},
		Errors: []int{http.StatusNotFound, http.StatusTooManyRequests},
	}}
}
