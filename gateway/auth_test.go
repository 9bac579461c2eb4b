package gateway

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/bullpen-run/bullpen/agent/anthropic"
	"github.com/bullpen-run/bullpen/agent/responses"
	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// access is what a route needs: a scope, or the key of a global administrator. path is that of an
// object of the organisation acme, if the route is about one. Its placeholders are names of
// objects.
type access struct {
	scope   proto.Scope
	orAdmin bool // the scope admin suffices instead
	global  bool
	path    string
	body    string
	endless bool // the answer is a stream that does not end
}

// has reports whether a key with a scope alone may use the route.
func (a access) has(s proto.Scope) bool { return s == a.scope || a.orAdmin && s == proto.ScopeAdmin }

// accessTable has a row for each route that needs an API key. A new route needs a new row.
func accessTable() map[string]access {
	const execute, read, files, admin = proto.ScopeExecute, proto.ScopeRead, proto.ScopeFiles, proto.ScopeAdmin
	const program = `{"code":"echo","language":"bash"}`
	of := func(path string) string { return `{"source":"thread","id":"t"` + path + `}` }
	table := map[string]access{
		"execute":         {scope: execute, body: program},
		"cancelExecution": {scope: execute, path: "/v1/executions/{execution}/cancel"},
		"replayDelivery":  {scope: execute, path: "/v1/executions/{execution}/webhook/replay"},
		"replayFailed":    {scope: execute},
		"enableEndpoint":  {scope: execute, body: `{"url":"https://example.com/hook"}`},
		"createSandbox":   {scope: execute, body: `{}`},
		"listSandboxes":   {scope: read},
		"getSandbox":      {scope: read, path: "/v1/sandboxes/{sandbox}"},
		"extendSandbox":   {scope: execute, path: "/v1/sandboxes/{sandbox}/extend"},
		"pauseSandbox":    {scope: execute, path: "/v1/sandboxes/{sandbox}/pause"},
		"saveSandbox":     {scope: execute, path: "/v1/sandboxes/{sandbox}/save"},
		"createContext":   {scope: execute, path: "/v1/sandboxes/{sandbox}/contexts"},
		"listContexts":    {scope: execute, path: "/v1/sandboxes/{sandbox}/contexts"},
		"getContext":      {scope: execute, path: "/v1/sandboxes/{sandbox}/contexts/python-1-aaaaaaaaaaaaaaaa"},
		"executeCell": {
			scope: execute, path: "/v1/sandboxes/{sandbox}/contexts/python-1-aaaaaaaaaaaaaaaa/execute", body: `{"code":"1"}`,
		},
		"readRun":          {scope: execute, path: "/v1/sandboxes/{sandbox}/contexts/python-1-aaaaaaaaaaaaaaaa/runs/1"},
		"interruptContext": {scope: execute, path: "/v1/sandboxes/{sandbox}/contexts/python-1-aaaaaaaaaaaaaaaa/interrupt"},
		"restartContext":   {scope: execute, path: "/v1/sandboxes/{sandbox}/contexts/python-1-aaaaaaaaaaaaaaaa/restart"},
		"deleteContext":    {scope: execute, path: "/v1/sandboxes/{sandbox}/contexts/python-1-aaaaaaaaaaaaaaaa"},
		"resumeSandbox":    {scope: execute, path: "/v1/sandboxes/{sandbox}/resume"},
		"deleteSandbox":    {scope: execute, path: "/v1/sandboxes/{sandbox}"},
		"readSandboxLogs":  {scope: execute, path: "/v1/sandboxes/{sandbox}/logs"},
		"callGuest":        {scope: execute, path: "/v1/sandboxes/{sandbox}/guest/process.Process/List"},
		"readGuest":        {scope: execute, path: "/v1/sandboxes/{sandbox}/guest/envs"},
		"writeGuest":       {scope: execute, path: "/v1/sandboxes/{sandbox}/guest/files"},
		"createBatch":      {scope: execute, body: `{"items":[` + program + `]}`},
		"deleteBatch":      {scope: execute, path: "/v1/batches/{batch}"},
		"pauseBatch":       {scope: execute, path: "/v1/batches/{batch}/pause"},
		"resumeBatch":      {scope: execute, path: "/v1/batches/{batch}/resume"},
		"cancelBatch":      {scope: execute, path: "/v1/batches/{batch}/cancel"},
		"retryBatch":       {scope: execute, path: "/v1/batches/{batch}/retry"},
		"createSchedule":   {scope: execute, body: `{"name":"n","cron":"* * * * *","request":` + program + `}`},
		"patchSchedule":    {scope: execute, path: "/v1/schedules/{schedule}", body: `{"paused":true}`},
		"deleteSchedule":   {scope: execute, path: "/v1/schedules/{schedule}"},
		"runSchedule":      {scope: execute, path: "/v1/schedules/{schedule}/run"},
		"createPipeline": {
			scope: execute,
			body:  `{"file":"steps:\n  - name: a\n    run: echo\n    artifacts: {out: [out]}\n"}`,
		},
		"cancelPipeline": {scope: execute, path: "/v1/pipelines/{pipeline}/cancel"},

		"listExecutions":     {scope: read},
		"getExecution":       {scope: read, path: "/v1/executions/{execution}"},
		"getRequest":         {scope: read, path: "/v1/executions/{execution}/request"},
		"getOutput":          {scope: read, path: "/v1/executions/{execution}/output"},
		"getStdout":          {scope: read, path: "/v1/executions/{execution}/output/stdout"},
		"getStderr":          {scope: read, path: "/v1/executions/{execution}/output/stderr"},
		"streamURL":          {scope: read, path: "/v1/executions/{execution}/stream_url"},
		"getQueue":           {scope: read},
		"getOverview":        {scope: read},
		"getChanges":         {scope: read, endless: true},
		"getUsage":           {scope: read},
		"getDelivery":        {scope: read, path: "/v1/executions/{execution}/webhook"},
		"getDeliveryBody":    {scope: read, path: "/v1/executions/{execution}/webhook/body"},
		"listDeliveries":     {scope: read},
		"getWebhook":         {scope: read},
		"listEndpoints":      {scope: read},
		"listBatches":        {scope: read},
		"getBatch":           {scope: read, path: "/v1/batches/{batch}"},
		"getBatchResults":    {scope: read, path: "/v1/batches/{batch}/results"},
		"listSchedules":      {scope: read},
		"previewSchedule":    {scope: read},
		"getSchedule":        {scope: read, path: "/v1/schedules/{schedule}"},
		"listPipelines":      {scope: read},
		"getPipelineSchema":  {scope: read},
		"listPipelineCaches": {scope: read},
		"getPipeline":        {scope: read, path: "/v1/pipelines/{pipeline}"},
		"listThreads":        {scope: read},
		"getThread":          {scope: read, path: "/v1/threads/t"},

		"deleteThread":        {scope: files, path: "/v1/threads/t"},
		"forkThread":          {scope: files, path: "/v1/threads/t/fork", body: `{"id":"u"}`},
		"archiveThread":       {scope: files, path: "/v1/threads/t/archive"},
		"unpackThread":        {scope: files, body: "a tar"},
		"getPipelineArtifact": {scope: files, path: "/v1/pipelines/{pipeline}/artifacts?step=a&artifact=out"},
		"listFiles":           {scope: files, body: of("")},
		"deleteFile":          {scope: files, body: of(`,"path":"a"`)},
		"renameFile":          {scope: files, body: of(`,"path":"a","to":"b"`)},
		"compareFiles":        {scope: files, path: "/v1/files/compare", body: of(`,"from":0`)},
		"fileUploadURL":       {scope: files, body: of(`,"path":"a","content_length":1`)},
		"createUpload":        {scope: files, body: of(`,"path":"a","content_length":1`)},
		"fileDownloadURL":     {scope: files, path: "/v1/files/download_url", body: of(`,"path":"a"`)},

		"createKey":  {scope: admin, path: "/v1/admin/keys", body: `{"name":"n","org":"acme","plan":"enterprise"}`},
		"getKey":     {scope: admin, path: "/v1/admin/keys/{key}"},
		"replaceKey": {scope: admin, path: "/v1/admin/keys/{key}", body: `{"name":"n"}`},
		"rotateKey":  {scope: admin, path: "/v1/admin/keys/{key}/rotate"},
		"listOrgs":   {scope: admin},
		"getOrg":     {scope: admin, path: "/v1/admin/orgs/acme"},
		"listPlans":  {scope: admin},
		"createMember": {
			scope: admin, path: "/v1/admin/members",
			body: `{"org":"acme","email":"a@example.com","role":"viewer"}`,
		},
		"listMembers":         {scope: admin, path: "/v1/admin/members?org=acme"},
		"getMember":           {scope: admin, path: "/v1/admin/members/{member}"},
		"replaceMember":       {scope: admin, path: "/v1/admin/members/{member}", body: `{"role":"viewer"}`},
		"removeMember":        {scope: admin, path: "/v1/admin/members/{member}"},
		"listSessions":        {scope: admin, path: "/v1/admin/sessions?org=acme"},
		"endSession":          {scope: admin, path: "/v1/admin/sessions/{session}"},
		"getPlan":             {scope: admin},
		"listProfiles":        {scope: admin},
		"getProfile":          {scope: admin, path: "/v1/admin/profiles/own"},
		"getProfilePreload":   {scope: admin, path: "/v1/admin/profiles/own/preload"},
		"listKeys":            {scope: admin, path: "/v1/admin/keys?org=acme"},
		"revokeKey":           {scope: admin, path: "/v1/admin/keys/{key}"},
		"putSecret":           {scope: admin, path: "/v1/admin/secrets/S?org=acme", body: `{"value":"value"}`},
		"getSecret":           {scope: admin, path: "/v1/admin/secrets/S?org=acme"},
		"listSecrets":         {scope: admin, path: "/v1/admin/secrets?org=acme"},
		"deleteSecret":        {scope: admin, path: "/v1/admin/secrets/S?org=acme"},
		"createConnection":    {scope: admin, path: "/v1/admin/connections?org=acme", body: bucket},
		"listConnections":     {scope: admin, path: "/v1/admin/connections?org=acme"},
		"getConnection":       {scope: admin, path: "/v1/admin/connections/data?org=acme"},
		"replaceConnection":   {scope: admin, path: "/v1/admin/connections/data?org=acme", body: bucket},
		"removeConnection":    {scope: admin, path: "/v1/admin/connections/data?org=acme"},
		"testConnection":      {scope: admin, path: "/v1/admin/connections/data/test?org=acme"},
		"getVolume":           {scope: admin, path: "/v1/admin/connections/work/volume?org=acme"},
		"forkVolume":          {scope: admin, path: "/v1/admin/connections/work/fork?org=acme", body: `{"slug":"fork"}`},
		"archiveVolume":       {scope: admin, path: "/v1/admin/connections/work/archive?org=acme"},
		"getOrgUsage":         {scope: admin, path: "/v1/admin/usage?org=acme"},
		"putWebhook":          {scope: execute, orAdmin: true, body: `{"url":"https://example.com/hook"}`},
		"patchWebhook":        {scope: execute, orAdmin: true, body: `{"max_attempts":2}`},
		"deleteWebhook":       {scope: execute, orAdmin: true},
		"rotateWebhook":       {scope: execute, orAdmin: true},
		"testWebhook":         {scope: execute, orAdmin: true},
		"removePipelineCache": {scope: admin, path: "/v1/admin/caches/deps?org=acme"},
		"listAudit":           {scope: admin, path: "/v1/admin/audit?org=acme"},
	}
	for _, id := range []string{
		"rotateSecretsKey", "createProfile", "replaceProfile", "removeProfile", "listImages", "putImage",
		"removeImage", "getAutoscale", "getOrgQueues", "listWorkers", "listProcesses", "drainWorker", "undrainWorker",
		"listDeadLetters", "getDeadLetter", "deleteDeadLetter", "requeueDeadLetter", "verifyAudit",
		"backup", "collectThreads", "rebuildThreads", "createOrg", "replaceOrg", "deleteOrg", "getOrgData", "createPlan",
		"replacePlan", "removePlan",
	} {
		table[id] = access{scope: admin, global: true}
	}
	vendors := map[proto.Scope]string{
		execute: "anthropicCreateMessage anthropicCountTokens anthropicCreateBatch anthropicListBatches anthropicGetBatch " +
			"anthropicDeleteBatch " +
			"anthropicCancelBatch anthropicGetBatchResults anthropicCreateMessageAtRoot anthropicCountTokensAtRoot " +
			"anthropicCreateBatchAtRoot " +
			"anthropicListBatchesAtRoot anthropicGetBatchAtRoot anthropicDeleteBatchAtRoot anthropicCancelBatchAtRoot " +
			"anthropicGetBatchResultsAtRoot " +
			"anthropicListModels anthropicGetModel openaiListModels openaiGetModel perplexityListModels perplexityGetModel " +
			"openaiCreateResponse openaiGetResponse openaiCancelResponse openaiDeleteResponse openaiListInputItems " +
			"openaiCreateChatCompletion " +
			"perplexityCreateResponse perplexityGetResponse perplexityCancelResponse perplexityCreateChatCompletion " +
			"perplexityAgentCreateResponse perplexityAgentGetResponse perplexityAgentCancelResponse " +
			"rootCreateResponse rootGetResponse rootCancelResponse rootDeleteResponse rootListInputItems " +
			"rootCreateChatCompletion " +
			"rootAgentCreateResponse rootAgentGetResponse rootAgentCancelResponse",
		files: "anthropicUploadFile anthropicListFiles anthropicGetFile anthropicGetFileContent anthropicDeleteFile " +
			"openaiUploadFile openaiListFiles openaiGetFile openaiGetFileContent openaiDeleteFile " +
			"openaiCreateContainer openaiListContainers openaiGetContainer openaiDeleteContainer openaiAddContainerFile " +
			"openaiListContainerFiles openaiGetContainerFile openaiDeleteContainerFile openaiGetContainerFileContent " +
			"perplexityListSharedFiles perplexityGetSharedFile perplexityAgentListSharedFiles perplexityAgentGetSharedFile",
	}
	for scope, ids := range vendors {
		for id := range strings.FieldsSeq(ids) {
			table[id] = access{scope: scope}
		}
	}
	return table
}

// newAccessHarness starts a server with an object of each kind in the organisation acme, and
// returns a function that puts their ids into paths.
func newAccessHarness(t *testing.T) (*harness, *strings.Replacer) {
	h := newHarness(t, withVendors)
	h.server.Schedules, h.server.History, h.server.Queue = new(scheduleStub), &historyStub{}, &queueStub{}
	h.sandboxes.answers(t, func(http.ResponseWriter, *http.Request) {})
	runs := &pipelineStub{stored: map[string]*proto.Pipeline{}, states: map[string]*proto.PipelineState{}}
	h.server.Pipelines = runs
	h.server.Workers, h.server.ImageAdmin = &workerStub{
		proto.Worker{Capabilities: []string{}, Languages: map[proto.Language]string{}},
	}, &imageStub{registry: h.registry}
	h.server.Processes = processes(func() ([]proto.Process, error) { return []proto.Process{}, nil })
	h.server.Backups = backups(func(w io.Writer) error { _, err := io.WriteString(w, "all"); return err })
	h.remount()
	h.stub.finishAtOnce(proto.Exited(0))
	id := func(path, body string) string { return h.do("POST", path, body).want(201, "").json()["id"].(string) }
	table := accessTable()
	execution := string(h.execute(hello).want(200, "").trace())
	victim := h.do("POST", "/v1/admin/keys", `{"name":"victim","org":"acme","plan":"enterprise"}`).want(201, "").json()
	session := h.do("POST", "/v1/session", "", "Authorization", "Bearer "+victim["key"].(string)).want(
		201, "").json()["session"].(map[string]any)
	h.upload("a", "x").want(200, "")
	h.do("POST", profilesPath, `{"name":"own"}`).want(201, "")
	h.bound("own")
	h.do("PUT", "/v1/admin/secrets/S", `{"value":"value"}`).want(200, "")
	h.do("PUT", "/v1/admin/secrets/KEYS", `{"value":"value"}`).want(200, "")
	h.do("POST", "/v1/admin/connections", bucket).want(201, "")
	h.do("POST", "/v1/admin/connections", `{"slug":"work","kind":"volume","bytes":"1GiB"}`).want(201, "")
	run := id("/v1/pipelines", table["createPipeline"].body)
	runs.states["acme"+run].Cells[0].Thread = proto.RunThread(run)
	h.addThread("acme", proto.RunThread(run))
	h.addThread("acme", proto.OwnerCache.Thread("deps"))
	return h, strings.NewReplacer(
		"{execution}", execution, "{key}", victim["id"].(string), "{session}", session["id"].(string), "{member}",
		id("/v1/admin/members", table["createMember"].body),
		"{batch}", id("/v1/batches", table["createBatch"].body), "{schedule}",
		id("/v1/schedules", table["createSchedule"].body),
		"{pipeline}", run, "{sandbox}", id("/v1/sandboxes", "{}"),
	)
}

// withVendors adds the routes of the surfaces of agents, which do nothing, and whose errors have the form of
// this server's own.
func withVendors(s *Server) {
	var rows []web.SurfaceRow
	for _, route := range (&anthropic.Server{}).Routes() {
		rows = append(rows, web.SurfaceRow(route))
	}
	for _, route := range (&responses.Server{}).Routes() {
		rows = append(rows, web.SurfaceRow(route))
	}
	for i := range rows {
		rows[i].Handle = func(w http.ResponseWriter, _ *http.Request) error {
			return web.WriteValue(w, http.StatusOK, struct{}{})
		}
	}
	s.Surfaces = []web.Surface{{Routes: rows, WriteError: func(w http.ResponseWriter, _ *http.Request, e *api.Error) {
		if err := web.WriteValue(w, e.Code.Status(), e); err != nil {
			panic(err)
		}
	}}}
}

// The document of a server with agents has the routes of their vendors and is valid.
func TestDocumentHasRoutesOfVendors(t *testing.T) {
	h := newHarness(t, withVendors)
	doc, err := openapi3.NewLoader().LoadFromData(h.do("GET", "/openapi.json", "").want(200, "").body)
	if err != nil {
		t.Fatal(err)
	}
	if err := doc.Validate(t.Context()); err != nil {
		t.Error(err)
	}
	for _, route := range h.server.SurfaceRoutes() {
		item := doc.Paths.Value(strings.ReplaceAll(route.Path, "*", "{name}"))
		if item == nil || item.GetOperation(route.Method) == nil || item.GetOperation(route.Method).OperationID != route.ID {
			t.Errorf("%s %s is not in the document", route.Method, route.Path)
		}
	}
}

// errorBody is the body of an error.
type errorBody struct {
	Error, Reason string
	Scope         proto.Scope
}

// Every route of the OpenAPI document is asked with a key of each scope, of its own organisation
// and of another.
func TestEveryRouteNeedsItsScope(t *testing.T) {
	shared, ids := newAccessHarness(t)
	document := shared.do("GET", "/openapi.json", "").want(200, "").body
	var operations struct {
		Paths map[string]map[string]struct {
			OperationID string `json:"operationId"`
			Security    *[]map[string][]proto.Scope
			Global      bool `json:"x-global"`
		}
	}
	if err := json.Unmarshal(document, &operations); err != nil {
		t.Fatal(err)
	}
	table := accessTable()
	for path, methods := range operations.Paths {
		for method, operation := range methods {
			switch {
			case operation.Security != nil && len(*operation.Security) == 0: // public
				continue
			// any scope, or that of a tool
			case slices.Contains([]string{"mcp", "getSession", "createSession", "deleteSession"}, operation.OperationID):
				continue
			}
			want, ok := table[operation.OperationID]
			if !ok || operation.Security == nil {
				t.Errorf("%s %s (%s) needs a scope, and a row in accessTable", method, path, operation.OperationID)
				continue
			}
			orAdmin := slices.ContainsFunc(*operation.Security, func(s map[string][]proto.Scope) bool {
				return slices.Equal(s["key"], []proto.Scope{proto.ScopeAdmin})
			})
			if orAdmin != (want.orAdmin || want.scope == proto.ScopeAdmin) {
				t.Errorf("%s %s is open to administrators: %v, want %+v", method, path, orAdmin, want)
			}
			if got := (*operation.Security)[0]["key"]; len(got) != 1 || got[0] != want.scope || operation.Global != want.global {
				t.Errorf("%s %s needs %v, global %v, want %+v", method, path, got, operation.Global, want)
			}
			t.Run(operation.OperationID, func(t *testing.T) {
				h, ids := shared, ids
				if method != "get" { // it may remove its object, and requests for the audit log have a rate
					h, ids = newAccessHarness(t)
				}
				h.in(t).testAccess(strings.ToUpper(method), path, want, ids)
			})
		}
	}
}

// testAccess asks a route with keys that have its scope, and with keys that have not.
func (h *harness) testAccess(method, path string, want access, ids *strings.Replacer) {
	t := h.t
	own := want.path != ""
	if own {
		path = ids.Replace(want.path)
	}
	path = strings.NewReplacer("{id}", "nothing", "{name}", "nothing", "{file}", "nothing").Replace(path)
	ask := func(org string, key proto.Key) (int, errorBody) {
		h.key = h.stub.addKey(org, "enterprise", key)
		if want.endless {
			h.server.Drain() // which ends it
		}
		a := h.do(method, path, want.body)
		var got errorBody
		if a.status >= 400 {
			if err := json.Unmarshal(a.body, &got); err != nil {
				t.Fatalf("%s %.100q: %v", method, a.body, err)
			}
		}
		return a.status, got
	}
	without := slices.DeleteFunc(proto.Scopes(), want.has)
	if status, got := ask("acme", proto.Key{Scopes: without, Global: true}); status != 403 ||
		got != (errorBody{"forbidden", "insufficient_scope", want.scope}) {
		t.Errorf("%s %s without %s: %d %+v", method, path, want.scope, status, got)
	}
	if own {
		if status, got := ask("other", proto.Key{Scopes: proto.Scopes()}); status != 404 || got.Error != "not_found" {
			t.Errorf("%s %s of another organisation: %d %+v", method, path, status, got)
		}
	}
	allowed := func(key proto.Key) {
		// The execution has no webhook, and its key no settings of one.
		if status, got := ask("acme", key); status == 401 || status == 403 || own && status == 404 &&
			!strings.Contains(path, "/webhook") {
			t.Errorf("%s %s with %v: %d %+v", method, path, key.Scopes, status, got)
		}
	}
	for _, scope := range proto.Scopes() {
		if want.has(scope) && !want.global {
			allowed(proto.Key{Scopes: []proto.Scope{scope}})
			continue
		}
		status, got := ask("acme", proto.Key{Scopes: []proto.Scope{scope}})
		switch {
		case !want.has(scope):
			if status != 403 || got.Reason != "insufficient_scope" || got.Scope != want.scope {
				t.Errorf("%s %s with %s alone: %d %+v", method, path, scope, status, got)
			}
		case want.global:
			if status != 403 || got.Reason != "global_admin_required" {
				t.Errorf("%s %s with %s of an organisation: %d %+v", method, path, scope, status, got)
			}
		}
	}
	if want.global {
		allowed(proto.Key{Scopes: []proto.Scope{want.scope}, Global: true})
	}
}

// The administrator of an organisation gives nobody more than the organisation has.
func TestAdministratorOfAnOrganisation(t *testing.T) {
	h := newHarness(t)
	h.do("POST", "/v1/admin/profiles", `{"name":"open","network":{"policy":"unrestricted"}}`).want(201, "")
	other := h.stub.addKey("other", "pro", asUser)
	global := "key_1"
	boss := h.as(h.stub.addKey("acme", "pro", proto.Key{Scopes: []proto.Scope{proto.ScopeAdmin}}))
	create := func(rest string) *reply {
		return boss.do("POST", "/v1/admin/keys", `{"name":"n","plan":"pro",`+rest+`}`)
	}
	create(`"org":"acme"`).want(201, "")
	create(`"org":"other"`).want(404, "not_found")
	create(`"org":"acme","plan":"enterprise"`).want(400, "validation_error", "once")
	boss.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","plan":"unlimited"}`).want(400, "validation_error", "plan",
		"enterprise of the organisation acme")
	boss.do("POST", "/v1/admin/keys", `{"name":"n","org":"new"}`).want(404, "not_found")
	boss.do("GET", "/v1/admin/orgs/other", "").want(404, "not_found")
	if orgs := boss.do("GET", "/v1/admin/orgs", "").want(200, "").json()["orgs"].([]any); len(orgs) != 1 ||
		orgs[0].(map[string]any)["name"] != "acme" {
		t.Errorf("an administrator of acme sees the organisations %v", orgs)
	}
	boss.do("PUT", "/v1/admin/keys/"+global, `{"name":"n"}`).want(403, "forbidden", "global")
	boss.do("POST", "/v1/admin/keys/"+global+"/rotate", "").want(403, "forbidden", "global")
	own := create(`"org":"acme"`).want(201, "").json()["id"].(string)
	boss.do("PUT", "/v1/admin/keys/"+own, `{"name":"n","scopes":["admin"],"global":true}`).want(403, "forbidden", "global")
	boss.do("PUT", "/v1/admin/keys/"+own, `{"name":"n","plan":"unlimited"}`).want(400, "validation_error", "plan")
	boss.do("GET", "/v1/admin/keys/key_2", "").want(404, "not_found")
	boss.do("PUT", "/v1/admin/keys/key_2", `{"name":"n"}`).want(404, "not_found")
	boss.do("POST", "/v1/admin/keys/key_2/rotate", "").want(404, "not_found")
	create(`"org":"acme","scopes":["admin"],"global":true`).want(403, "forbidden", "global")
	create(`"org":"acme","scopes":["read"],"global":true`).want(400, "validation_error", "global")
	create(`"org":"acme","profile":"open"`).want(403, "forbidden", "profile")
	h.do("POST", "/v1/admin/keys", `{"name":"first","org":"acme","plan":"pro","profile":"open"}`).want(201, "")
	create(`"org":"acme","profile":"open"`).want(201, "")
	boss.do("DELETE", "/v1/admin/keys/"+global, "").want(403, "forbidden", "global")
	boss.do("PUT", webhookPath+"?key="+global, `{"url":"https://example.com/"}`).want(403, "forbidden", "global")
	listed := boss.do("GET", "/v1/admin/keys", "").want(200, "")
	if strings.Contains(string(listed.body), proto.KeyHint(other)) || len(listed.json()["keys"].([]any)) != 6 {
		t.Errorf("an administrator of acme sees %s", listed.body)
	}
	boss.do("GET", "/v1/admin/keys?org=other", "").want(404, "not_found")
	if all := h.do("GET", "/v1/admin/keys?org=other", "").want(200, "").json(); len(all["keys"].([]any)) != 1 {
		t.Errorf("a global administrator sees %v", all)
	}
}

// A key that loses a scope loses the URLs for which it needed the scope.
func TestSignedURLsNeedTheScopeOfTheirKey(t *testing.T) {
	h := newHarness(t)
	h.upload("a", "x").want(200, "")
	down := h.sign("download", "a", 0)
	h.get(down).want(200, "")
	h.stub.change("key_1", func(k *proto.Key) { k.Scopes = []proto.Scope{proto.ScopeExecute} })
	h.get(down).want(403, "forbidden")
	g := &grant{
		method: "GET", key: "key_1", org: "acme", source: proto.SourceThread, id: "t", path: "a",
		expiresAt: time.Now().Add(time.Minute),
	}
	h.get(contentPath+g.token(*h.server.URLSecret)).want(403, "forbidden")
}
