package gateway

import (
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// takesThread reports whether requests of a route name a thread.
func takesThread(route *api.Route) bool {
	if strings.Contains(route.Path, "/threads/{id}") ||
		slices.ContainsFunc(route.Params, func(p api.Param) bool { return p.Name == "thread_id" }) {
		return true
	}
	seen := map[reflect.Type]bool{}
	var named func(t reflect.Type) bool
	named = func(t reflect.Type) bool {
		if t == nil || seen[t] {
			return false
		}
		seen[t] = true
		switch t.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Map, reflect.Array:
			return named(t.Elem())
		case reflect.Struct:
			if t == reflect.TypeFor[api.FileRequest]() {
				return true
			}
			for f := range t.Fields() {
				if f.Tag.Get("format") == "thread-id" || named(f.Type) {
					return true
				}
			}
		}
		return false
	}
	return named(reflect.TypeOf(route.Request))
}

// TestOwnedThreads sends requests with the ids of threads that the server owns to every route that takes a
// thread. None finds, changes or creates one.
func TestOwnedThreads(t *testing.T) {
	h, ids := newAccessHarness(t)
	known, submitted := slices.Sorted(maps.Keys(h.threads.heads)), len(h.stub.submitted)
	const file = `{"source":"thread","id":"ID","path":"a"`
	type owned struct{ body, query string }
	table := map[string]owned{
		"execute":        {body: `{"code":"x","thread_id":"ID"}`},
		"listExecutions": {query: "?thread_id=ID"},
		"createSandbox":  {body: `{"thread_id":"ID"}`},
		"createBatch":    {body: `{"items":[{"code":"x","thread_id":"ID"}]}`},
		"createSchedule": {body: `{"name":"x","cron":"@daily","request":{"code":"x","thread_id":"ID"}}`},
		"patchSchedule":  {body: `{"request":{"code":"x","thread_id":"ID"}}`},
		"createPipeline": {body: pipelineBody("steps: [{name: a, run: x}]", `,"thread_id":"ID"`)},
		"getThread":      {}, "deleteThread": {}, "archiveThread": {},
		"forkThread":      {body: `{"id":"new"}`},
		"forkThread to":   {body: `{"id":"ID"}`},
		"unpackThread":    {body: string(make([]byte, 1024))},
		"listThreads":     {query: "?cursor=ID"},
		"listFiles":       {body: file + `}`},
		"deleteFile":      {body: file + `}`},
		"renameFile":      {body: file + `,"to":"b"}`},
		"compareFiles":    {body: `{"source":"thread","id":"ID","from":0}`},
		"fileDownloadURL": {body: file + `}`},
		"fileUploadURL":   {body: file + `,"content_length":1}`},
		"createUpload":    {body: file + `,"content_length":1}`},
	}
	for tool, arguments := range map[string]string{
		api.ToolExecute: `{"code":"x","thread_id":"ID"}`, api.ToolList: file + `}`,
		api.ToolUpload: file + `,"content_length":1}`, api.ToolDownload: file + `}`,
	} {
		table["mcp "+tool] = owned{body: `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"` + tool +
			`","arguments":` + arguments + `}}`}
	}
	routes, want := map[string]*api.Route{}, map[string]bool{}
	for _, route := range api.Routes() {
		routes[route.ID] = &route
		if takesThread(&route) {
			want[route.ID] = true
		}
	}
	for name := range table {
		id, _, _ := strings.Cut(name, " ")
		if routes[id] == nil {
			t.Fatalf("there is no route %s", id)
		}
		delete(want, id)
	}
	if len(want) > 0 {
		t.Errorf("routes that take a thread and are not in the table: %q", slices.Sorted(maps.Keys(want)))
	}
	for _, owner := range proto.ThreadOwners() {
		id := owner.Thread("one")
		h.addThread("acme", id)
		h.addThread("acme", "mine")
		before := *h.threads.heads["acme/"+id]
		for name, request := range table {
			route, _, _ := strings.Cut(name, " ")
			path, body := routes[route].Path, strings.ReplaceAll(request.body, "ID", id)
			thread := id
			switch name {
			case "forkThread to":
				thread = "mine"
			case "patchSchedule":
				thread = ids.Replace("{schedule}")
			}
			path = strings.ReplaceAll(path, "{id}", thread) + strings.ReplaceAll(request.query, "ID", id)
			headers := []string{"Accept", "application/json, text/event-stream"}
			if route == "mcp" {
				headers = append(headers, "Content-Type", "application/json")
			}
			a := h.do(routes[route].Method, path, body, headers...)
			refused := a.status == http.StatusBadRequest || a.status == http.StatusNotFound
			if route == "mcp" {
				refused = strings.Contains(string(a.body), `"isError":true`)
			}
			if !refused {
				t.Errorf("%s of %s: %d %.300s", name, id, a.status, a.body)
			}
		}
		after := h.threads.heads["acme/"+id]
		if after == nil || !reflect.DeepEqual(*after, before) {
			t.Errorf("%s was changed: %+v", id, after)
		}
		delete(h.threads.heads, "acme/"+id)
		delete(h.threads.heads, "acme/mine")
	}
	if got := slices.Sorted(maps.Keys(h.threads.heads)); !slices.Equal(got, known) || len(h.stub.submitted) != submitted {
		t.Errorf("threads %q, want %q; %d executions were submitted", got, known, len(h.stub.submitted)-submitted)
	}
	for _, owner := range proto.ThreadOwners() {
		h.addThread("acme", owner.Thread("one"))
	}
	for _, path := range []string{"/v1/threads", "/v1/threads?limit=100"} {
		if body := string(h.do(http.MethodGet, path, "").want(http.StatusOK, "").body); strings.Contains(body, "one") {
			t.Errorf("%s lists owned threads: %s", path, body)
		}
	}
}

// Executions in threads that the server owns do not show them.
func TestThreadsOfExecutions(t *testing.T) {
	for id, shown := range map[string]bool{
		"mine": true, proto.RunThread("run_x"): false, proto.OwnerContainer.Thread("cntr_x"): false,
	} {
		record := &proto.Record{}
		record.ThreadID = id
		for _, got := range []*string{
			api.NewExecution(record, "", nil, record.CreatedAt).ThreadID,
			api.NewListedExecution(record, "", nil, record.CreatedAt).ThreadID,
		} {
			if (got != nil) != shown {
				t.Errorf("%s: %v", id, got)
			}
		}
	}
}
