package api

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

const (
	typeJSON   = "application/json"
	typeNDJSON = "application/x-ndjson"
	typeJSONL  = "application/jsonl"
	typeSSE    = "text/event-stream"

	tagExecute    = "execute"
	tagExecutions = "executions"
	tagWebhooks   = "webhooks"
	tagBatches    = "batches"
	tagSchedules  = "schedules"
	tagPipelines  = "pipelines"
	tagSandboxes  = "sandboxes"
	tagThreads    = "threads"
	tagFiles      = "files"
	tagMCP        = "mcp"
	tagSessions   = "sessions"
	tagAdmin      = "admin"
	tagServer     = "server"
	tagAgents     = "agents"
	tagActivity   = "activity"
)

// MaxQueueWait is the largest N of Prefer: wait=N, in seconds.
const MaxQueueWait = 3600

// Route describes a method of a path.
type Route struct {
	Method, Path string
	ID           string // the operation id
	Tag          string
	Summary      string
	Doc          string
	PathDoc      string // of the parameter in the path
	Params       []Param
	Request      any    // an example of the JSON body; nil for none
	OptionalBody bool   // the body may be left out
	Upload       string // the media type of a body that is not JSON, or of its other form
	UploadDoc    string
	Responses    []Response
	Errors       []int       // the statuses of errors that do not follow from the kind of the route
	Scope        proto.Scope // that an API key needs
	OrAdmin      bool        // the scope admin suffices instead
	ScopeByTool  bool        // the tool that the body names decides which scope is needed
	AnyScope     bool        // any API key or session may use it
	Global       bool        // needs the key of a global administrator
	Audit        string      // the action in the audit log: the kind of the object and a verb; empty for no record
	Public       bool        // needs no API key
	Starts       bool        // starts executions, so that a server that shuts down refuses it
	Traced       bool        // answers have an X-Trace-Id
	Vendor       string      // whose API it is, which documents it; empty for bullpen's own
	Tagged       bool        // answers have an ETag, and a change may have an If-Match
}

// OfServer reports whether the route is about the server itself, as health is.
func (r *Route) OfServer() bool { return r.Tag == tagServer }

// Param describes a parameter in the query or a header.
type Param struct {
	Name, In, Doc string
	Required      bool
	schema        object
}

// Response describes a successful answer.
type Response struct {
	Status  int
	Doc     string
	Body    any               // an example of the JSON body; nil for none
	Text    map[string]string // examples of other bodies by media type; empty for bytes
	Headers map[string]string // descriptions by name
}

func tags() []object {
	return []object{
		{"name": tagExecute, "description": "Run a program."},
		{"name": tagExecutions, "description": "Look at executions and end them."},
		{"name": tagWebhooks, "description": "Deliver the results of async executions, and track the deliveries. " +
			"Each API key has its own settings."},
		{"name": tagBatches, "description": "Submit many programs at once. Batches belong to the organisation; " +
			"their executions run under the API key that created them."},
		{"name": tagSchedules, "description": "Start executions on a schedule. Schedules belong to the " +
			"organisation; their executions run under the API key that created them."},
		{"name": tagPipelines, "description": "Run steps that depend on each other. Runs belong to the " +
			"organisation; their steps are executions under the API key that started them."},
		{"name": tagSandboxes, "description": "Sandboxes that live: start processes in them, come back to them. They " +
			"belong to the organisation, and run under the API key that created them."},
		{"name": tagThreads, "description": "Home directories that outlive an execution. They belong to the organisation. " +
			"The first execution that names a thread creates it."},
		{"name": tagFiles, "description": "Files in the home of a thread or in a storage connection. Their content is " +
			"transferred through signed URLs."},
		{"name": tagActivity, "description": "What is happening, for pages that stay open."},
		{"name": tagMCP, "description": "The tools of the Model Context Protocol, for language models."},
		{"name": tagSessions, "description": "Sign in with a browser, as a member of an organisation or with an API key. " +
			"The cookie of a session stands for an API key with the scopes of the member's role, or for the API key itself."},
		{"name": tagAdmin, "description": "API keys, members, sessions and secrets of organisations, which their " +
			"administrators manage, and the audit log; organisations, plans, sandbox profiles and their images, workers and " +
			"the store of threads, which global administrators manage."},
		{"name": tagAgents, "description": "For programs written for other vendors' APIs, with a model of the " +
			"operator's choice. The vendors document requests, answers and errors. Only servers with " +
			"--agent-upstream have those of Anthropic, OpenAI and Perplexity."},
		{"name": tagServer, "description": "The server itself."},
	}
}

// Routes returns all routes.
func Routes() []Route {
	all := slices.Clone(registered)
	for _, group := range [][]Route{
		executionRoutes(), webhookRoutes(), batchRoutes(), scheduleRoutes(), pipelineRoutes(),
		sandboxRoutes(), contextRoutes(), threadRoutes(), fileRoutes(), uploadRoutes(), mcpRoutes(), usageRoutes(),
		sessionRoutes(),
		secretRoutes(), imageRoutes(), workerRoutes(), deadLetterRoutes(),
		storeRoutes(), auditRoutes(), changeRoutes(), overviewRoutes(), orgQueueRoutes(), serverRoutes(),
	} {
		all = append(all, group...)
	}
	return all
}

// ok is the only successful answer of a route.
func ok(doc string, body any) []Response {
	return []Response{{Status: http.StatusOK, Doc: doc, Body: body}}
}

// created is the answer of a route that creates what it answers with.
func created(doc string, body any) []Response {
	return []Response{{
		Status: http.StatusCreated, Doc: doc, Body: body,
		Headers: map[string]string{"Location": "Its own path."},
	}}
}

// empty is an answer without body.
func empty(doc string) []Response { return []Response{{Status: http.StatusNoContent, Doc: doc}} }

// query describes an optional parameter in the query.
func query(name, doc string, schema object) Param {
	return Param{Name: name, In: "query", Doc: doc, schema: schema}
}

// header describes a header of a request.
func header(name, doc string, schema object) Param {
	return Param{Name: name, In: "header", Doc: doc, schema: schema}
}

// MaxWhole is the largest integer that every JSON implementation represents exactly. It is the
// largest number of events and versions.
const MaxWhole = 1<<53 - 1

func text() object { return object{"type": "string"} }

// filter is the schema of a text that entries of a list must have.
func filter() object { return object{"type": "string", "minLength": 1, "maxLength": 1024} }

func paging() []Param {
	return []Param{
		query("limit", "The largest number of entries.",
			object{"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
		query("cursor", "The next_cursor of the answer before.", text()),
	}
}

// pagesOfOrgs are the parameters of a paged list of organisations' objects.
func pagesOfOrgs() []Param {
	return append(paging(), query(
		"org", "The organisation. By default all for a global administrator, otherwise the API key's.", text()))
}

// The values of examples.
const (
	exampleTrace  = "trc_AbCdEfGhIjKlMnOpQrSt"
	exampleHook   = "https://example.com/hook"
	exampleSecret = "whsec_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789ABCDcD0="
	exampleStream = `{"type":"status","trace_id":"` + exampleTrace + `","status":"running","seq":1}` + "\n" +
		`{"type":"output","stream":"stdout","data":"hello\n","seq":2}` + "\n" +
		`{"type":"result","trace_id":"` + exampleTrace +
		`","status":"success","result":{"success":true,"stdout":"hello\n","stderr":"","exit_code":0,` +
		`"error":null,"error_code":null,"error_message":null,"duration_ms":21,"stdout_truncated":false,` +
		`"stderr_truncated":false},"output_truncated":false,"seq":3}` + "\n"
)

// A batch and a line of its results.
const (
	exampleBatch       = "bat_abcdefghijklmnopqrstuvwxyz"
	exampleBatchResult = `{"index":0,"trace_id":"` + exampleTrace +
		`","status":"success","exit_code":0,"stdout":"one\n","stderr":"","error":null,"error_code":null,` +
		`"error_message":null,"duration_ms":21,"stdout_truncated":false,"stderr_truncated":false,"metadata":{}}` + "\n"
)

const exampleEventStream = `id: 1` + "\n" + `data: {"type":"status","trace_id":"` + exampleTrace +
	`","status":"running","seq":1}` + "\n\n"

func exampleTime() time.Time { return time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC) }

func exampleResult() proto.Result {
	r := proto.Exited(0)
	r.Stdout, r.DurationMS = "hello\n", 21
	return r
}

// noMoreEvents stops the EventSource of a browser.
var noMoreEvents = Response{
	Status: http.StatusNoContent, Doc: "Last-Event-ID is that of the last event of an execution that has ended.",
}

func executionRoutes() []Route {
	result, start := exampleResult(), exampleTime()
	ended := start.Add(25 * time.Millisecond)
	execution := NewExecution(&proto.Record{
		Meta: proto.Meta{
			TraceID: exampleTrace, Mode: proto.ModeInline, Language: proto.Python, Timeout: 60, CreatedAt: start,
			Profile: proto.DefaultProfileName,
		},
		Status: proto.StatusSuccess, Attempt: 1, StartedAt: &start, CompletedAt: &ended, Result: &result,
		Steps: &proto.Steps{
			AssignedAt: start.Add(time.Millisecond), Start: "warm", Jail: proto.Interval{50, 900},
			Program: proto.Interval{2100, 20_000},
		},
	}, "", nil, ended)
	listed := NewListedExecution(&proto.Record{
		Meta: proto.Meta{
			TraceID: exampleTrace, Key: "key_1", Mode: proto.ModeInline, Language: proto.Python, Timeout: 60, CreatedAt: start,
			Profile: proto.DefaultProfileName,
		},
		Status: proto.StatusSuccess, Attempt: 1, StartedAt: &start, CompletedAt: &ended, Result: &result,
	}, "", nil, ended)
	request := NewSubmittedRequest(&proto.Record{
		Meta: proto.Meta{
			TraceID: exampleTrace, Mode: proto.ModeInline, Language: proto.Bash, Timeout: 10, MaxAttempts: 1,
			Profile: proto.DefaultProfileName,
		},
		Request: &proto.Request{Code: "echo $NAME", Requested: proto.Requested{EnvNames: []string{"NAME"}}},
	})
	traceID := "The execution's trace id."
	place := &proto.QueuePlace{
		TraceID: exampleTrace, Class: proto.ClassBackground, CreatedAt: start, Position: 12,
		Wait: new(3.2),
	}
	queue := NewQueue(&proto.QueueView{
		Key: proto.QueueCounts{
			Queued: proto.ClassCounts{Background: 3}, Running: proto.ClassCounts{Interactive: 1, Background: 2},
		},
		Org: proto.QueueCounts{
			Queued: proto.ClassCounts{Background: 40}, Running: proto.ClassCounts{Interactive: 1, Background: 6},
		},
		Oldest: place, Places: []proto.QueuePlace{*place},
	}, 0, &proto.Plan{Concurrent: 100, MaxQueued: 1000})
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/sandbox/execute", ID: "execute", Tag: tagExecute, Starts: true,
			Scope: proto.ScopeExecute, Summary: "Run a program", Traced: true,
			Doc: "Inline by default: the answer is the result. With Accept: application/x-ndjson or text/event-stream the " +
				"answer is the stream of events; with " +
				"Prefer: respond-async it is 202, and the result is available under the trace id.",
			Params: []Param{
				header("Accept", "application/json (inline), application/x-ndjson or text/event-stream (streaming).",
					object{"type": "string", "default": typeJSON}),
				header("Prefer", fmt.Sprintf(
					"respond-async has precedence over Accept. wait=N: an inline or streaming execution waits up to N seconds, "+
						"1 to %d, for a free slot; without it up to 30 s (--queue-wait), and no longer than the larger of its "+
						"timeout and 5 s.", MaxQueueWait),
					object{"type": "string", "examples": []string{"respond-async", "wait=120"}}),
				header("Idempotency-Key",
					"Kept for 24 hours: the same key with the same body gets the answer of the first execution.",
					object{"type": "string", "minLength": 1, "maxLength": proto.MaxIdempotencyKeyLen}),
			},
			Request: ExecuteRequest{
				Code: "echo $NAME", Language: proto.Bash, Timeout: 10,
				Env: map[string]string{"NAME": "bullpen"},
			},
			Responses: []Response{
				{Status: http.StatusOK, Doc: "The result, or the stream of events: one Event a line; in an event stream the id " +
					"is the seq.", Body: result, Text: map[string]string{typeNDJSON: exampleStream, typeSSE: exampleEventStream}},
				{
					Status: http.StatusAccepted, Doc: "Accepted, and durable.", Body: Accepted{exampleTrace, "running"},
					Headers: map[string]string{"Location": "The path of the execution.", "Preference-Applied": "respond-async"},
				},
			},
			Errors: []int{
				http.StatusConflict, http.StatusUnprocessableEntity, http.StatusTooManyRequests,
				http.StatusNotImplemented, http.StatusGatewayTimeout,
			},
		},
		{
			Method: http.MethodGet, Path: "/v1/executions", ID: "listExecutions", Tag: tagExecutions, Scope: proto.ScopeRead,
			Summary: "List executions",
			Doc: "The executions of the key's organisation, newest first, without their output. All given " +
				"filters must match. An unknown parameter is an error. New executions do not shift pages.",
			Params:    historyParams(),
			Responses: ok("The executions.", Executions{Executions: []ListedExecution{listed}, Complete: true}),
		},
		{
			Method: http.MethodGet, Path: "/v1/executions/{id}", ID: "getExecution", Tag: tagExecutions, Scope: proto.ScopeRead,
			Summary: "Look at an execution", PathDoc: traceID, Traced: true,
			Params: []Param{query("wait", "Seconds to wait for the end of the execution.",
				object{"type": "integer", "minimum": 0, "maximum": 60, "default": 0})},
			Responses: ok("The execution as it is now.", execution), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodGet, Path: "/v1/executions/{id}/request", ID: "getRequest", Tag: tagExecutions,
			Scope: proto.ScopeRead, Summary: "Look at the request of an execution", PathDoc: traceID, Traced: true,
			Doc: fmt.Sprintf("The program and everything that was submitted with it, to show it or to run it again. 404 if "+
				"code, args and stdin have more than %d bytes together; for an item of a batch and for a live sandbox; and "+
				"for an execution of a version without this route.", proto.MaxKeptRequest),
			Responses: ok("The request.", request), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodGet, Path: "/v1/executions/{id}/output", ID: "getOutput", Tag: tagExecutions,
			Scope: proto.ScopeRead, Summary: "Follow the output of an execution", PathDoc: traceID, Traced: true,
			Doc: "The events with a higher seq, then live ones. The result is always the last event, unless follow is false.",
			Params: []Param{
				query("after_seq", "The seq of the last event that the client has.",
					object{"type": "integer", "minimum": 0, "maximum": MaxWhole, "default": 0}),
				query("follow", "false: only the current events. The stream of an unfinished execution then ends "+
					"without a result.", object{"type": "boolean", "default": true}),
				header("Accept", "application/x-ndjson or text/event-stream.", object{"type": "string", "default": typeNDJSON}),
				header("Last-Event-ID", "For event streams; has precedence over after_seq.",
					object{"type": "integer", "minimum": 0, "maximum": MaxWhole}),
			},
			Responses: []Response{{
				Status: http.StatusOK, Doc: "The events. In an event stream the id is the seq.",
				Text: map[string]string{
					typeNDJSON: exampleStream, typeSSE: exampleEventStream,
				},
			}, noMoreEvents},
			Errors: []int{http.StatusNotFound},
		},
		rawOutput(proto.Stdout, "getStdout"),
		rawOutput(proto.Stderr, "getStderr"),
		{
			Method: http.MethodPost, Path: "/v1/executions/{id}/stream_url", ID: "streamURL", Tag: tagExecutions,
			Scope: proto.ScopeRead, Summary: "Get a URL to follow the output with", PathDoc: traceID, Traced: true,
			Doc: "For EventSource in a browser, which sends no API key. The URL is valid for 15 minutes; a " +
				"stream that has begun continues. It ends when the key that requested it is revoked.",
			Responses: ok("The URL.", StreamURL{
				URL:       "https://bullpen.example.com/v1/streams/YnVsbHBlbi4.c2ln",
				ExpiresAt: Time{ended},
			}), Errors: []int{http.StatusNotFound, http.StatusBadRequest},
		},
		{
			Method: http.MethodGet, Path: "/v1/streams/{token}", ID: "getStream", Tag: tagExecutions,
			Summary: "Follow the output of an execution by a signed URL", Public: true,
			PathDoc: "The last part of a signed URL.", Traced: true,
			Params: []Param{
				query("after_seq", "The seq of the last event that the client has.",
					object{"type": "integer", "minimum": 0, "maximum": MaxWhole, "default": 0}),
				header("Last-Event-ID", "Has precedence over after_seq.",
					object{"type": "integer", "minimum": 0, "maximum": MaxWhole}),
			},
			Responses: []Response{{
				Status: http.StatusOK, Doc: "The events. The id is the seq.",
				Text: map[string]string{typeSSE: exampleEventStream},
			}, noMoreEvents},
			Errors: []int{http.StatusForbidden, http.StatusNotFound},
		},
		{
			Method: http.MethodPost, Path: "/v1/executions/{id}/cancel", ID: "cancelExecution", Tag: tagExecutions,
			Scope: proto.ScopeExecute, Summary: "End an execution", PathDoc: traceID, Traced: true,
			Responses: []Response{
				{Status: http.StatusOK, Doc: "The execution has ended already.", Body: Cancelled{exampleTrace, "success"}},
				{Status: http.StatusAccepted, Doc: "The execution is being ended.", Body: Cancelled{exampleTrace, "cancelling"}},
			},
			Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodGet, Path: "/v1/queue", ID: "getQueue", Tag: tagExecutions, Scope: proto.ScopeRead,
			Summary: "Show the queue",
			Doc: "Queued and running executions of the API key and its organisation, and queue positions. " +
				"Waiting items of batches are not in the queue yet. The positions are up to a fifth of a second " +
				"old.",
			Params: []Param{query(
				"trace_id", fmt.Sprintf("Executions of the organisation whose queue positions to return: up to "+
					"%d ids, separated by commas. Those that are not queued are omitted.", proto.MaxQueuePlaces), text())},
			Responses: ok("The queue.", queue),
		},
	}
}

// rawOutput returns the route of the exact bytes of an output.
func rawOutput(of proto.Stream, id string) Route {
	return Route{
		Method: http.MethodGet, Path: "/v1/executions/{id}/output/" + string(of), ID: id, Tag: tagExecutions,
		Scope:   proto.ScopeRead,
		Summary: "Download the exact bytes of " + string(of), PathDoc: "The execution's trace id.", Traced: true,
		Doc: "The exact bytes of the output in the result, with *** for secrets. JSON has U+FFFD for bytes that " +
			"are not UTF-8; here they are as the program wrote them. 409 until the execution has ended.",
		Params: []Param{header("Range", "One range of bytes.", text())},
		Responses: []Response{
			{
				Status: http.StatusOK, Doc: "The bytes.", Text: map[string]string{"application/octet-stream": ""},
				Headers: map[string]string{
					"X-Output-Truncated": "true if the program wrote more than the result keeps; otherwise " +
						"absent.",
				},
			},
			{Status: http.StatusPartialContent, Doc: "The range.", Text: map[string]string{"application/octet-stream": ""}},
		},
		Errors: []int{http.StatusNotFound, http.StatusConflict, http.StatusRequestedRangeNotSatisfiable},
	}
}

func exampleDelivery(next time.Duration) Delivery { return NewDelivery(exampleStoredDelivery(next)) }

func exampleStoredDelivery(next time.Duration) *proto.Delivery {
	at := exampleTime()
	return &proto.Delivery{
		TraceID: exampleTrace, ID: proto.DeliveryID(exampleTrace), URL: exampleHook, Status: proto.DeliveryPending,
		CreatedAt: at, NextAt: at.Add(next), Made: 1,
		Attempts: []proto.DeliveryAttempt{
			exampleAttempt(http.StatusServiceUnavailable, proto.DeliveryRejected, "the receiver answered 503",
				"HTTP/1.1 503 Service Unavailable\r\n\r\nlater"),
		},
	}
}

func exampleAttempt(status int, class proto.DeliveryError, detail, response string) proto.DeliveryAttempt {
	return proto.DeliveryAttempt{
		Number: 1, At: exampleTime(), Status: status, Error: class, Detail: detail, RemoteAddr: "203.0.113.7:443",
		Headers: map[string]string{
			"Content-Type": typeJSON, "User-Agent": "bullpen/1.0", "Webhook-Id": proto.DeliveryID(exampleTrace),
			"Webhook-Signature": "[redacted]", "Webhook-Timestamp": "1795176000",
		},
		Response: response,
		Timings:  proto.DeliveryTimings{DNS: 1.2, Connect: 8.1, TLS: 17.4, FirstByte: 21, Total: 48},
	}
}

func webhookRoutes() []Route {
	settings := proto.DefaultWebhook()
	settings.URL, settings.Secret, settings.UpdatedAt = exampleHook, exampleSecret, exampleTime()
	stored, withSecret := NewWebhook(&settings, "", exampleTime()), NewWebhook(&settings, exampleSecret, exampleTime())
	test := exampleAttempt(http.StatusOK, "", "", "HTTP/1.1 200 OK\r\n\r\nok")
	traceID := "The execution's trace id."
	ofKey := []Param{query("key", "The id of another API key. Needs the scope admin.", text())}
	return []Route{
		{
			Method: http.MethodGet, Path: "/v1/executions/{id}/webhook", ID: "getDelivery", Tag: tagWebhooks,
			Scope: proto.ScopeRead, Summary: "Look at the webhook of an execution", PathDoc: traceID, Traced: true,
			Doc: "404 if the execution has no webhook. Until the execution has ended and its delivery is stored, the " +
				"webhook is pending without attempts.",
			Responses: ok("The webhook with its last 20 attempts.", exampleDelivery(time.Second)),
			Errors:    []int{http.StatusNotFound},
		},
		{
			Method: http.MethodGet, Path: "/v1/executions/{id}/webhook/body", ID: "getDeliveryBody", Tag: tagWebhooks,
			Scope: proto.ScopeRead, Summary: "Download the body of a webhook", PathDoc: traceID, Traced: true,
			Doc: "The exact bytes that every attempt sends and that the signatures cover. 409 until the execution has ended.",
			Responses: []Response{{
				Status: http.StatusOK, Doc: "The body.", Text: map[string]string{typeJSON: ""},
			}},
			Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodGet, Path: "/v1/webhook/deliveries", ID: "listDeliveries", Tag: tagWebhooks,
			Scope: proto.ScopeRead, Summary: "List the deliveries of webhooks",
			Doc: "The deliveries of the key's organisation, most recently changed first. An attempt or a replay moves a " +
				"delivery to the front: if that happens while pages are read, later pages may lack it.",
			Params: append([]Param{
				query("status", "Only deliveries with this status.", object{"type": "string", "enum": proto.DeliveryStatuses()}),
			}, paging()...),
			Responses: ok("A page.", Deliveries{
				Deliveries: []ListedDelivery{NewListedDelivery(exampleStoredDelivery(time.Second))},
			}),
		},
		{
			Method: http.MethodPost, Path: "/v1/executions/{id}/webhook/replay", ID: "replayDelivery", Tag: tagWebhooks,
			Scope: proto.ScopeExecute, Summary: "Send a webhook again", PathDoc: traceID, Traced: true,
			Doc: "Works for a delivered one, too. It keeps its webhook-id and restarts its attempts. 409 while " +
				"it is pending, or if its URL is disabled.",
			Responses: []Response{{
				Status: http.StatusAccepted, Doc: "It is pending again.",
				Body: exampleDelivery(5 * time.Minute),
			}},
			Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodGet, Path: "/v1/webhook", ID: "getWebhook", Tag: tagWebhooks, Scope: proto.ScopeRead,
			Summary: "Look at the webhook settings of an API key", Doc: "Without the secret.",
			Params:    ofKey,
			Responses: ok("The settings, complete.", stored), Errors: []int{http.StatusForbidden, http.StatusNotFound},
		},
		{
			Method: http.MethodPut, Path: "/v1/webhook", ID: "putWebhook", Tag: tagWebhooks, Scope: proto.ScopeExecute,
			OrAdmin: true, Audit: "webhook.put", Summary: "Set the webhook of an API key",
			Params: ofKey,
			Doc: "Replaces them as a whole: absent fields get their defaults. Without a secret the server " +
				"creates one and shows it only in this answer; a previous secret keeps signing for a day. The " +
				"URL applies to executions accepted from then on, the rest to all attempts from then on.",
			Request:   WebhookRequest{URL: new(exampleHook)},
			Responses: ok("The settings, with a secret that was created.", withSecret),
			Errors:    []int{http.StatusForbidden, http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodPatch, Path: "/v1/webhook", ID: "patchWebhook", Tag: tagWebhooks, Scope: proto.ScopeExecute,
			OrAdmin: true, Audit: "webhook.patch", Summary: "Change some of the webhook settings of an API key",
			Params: ofKey,
			Doc: "Absent fields stay unchanged. A new secret replaces the previous one, which keeps signing for " +
				"a day; the server creates none.",
			Request: WebhookRequest{MaxAttempts: new(5)}, Responses: ok("The settings as they are now.", stored),
			Errors: []int{http.StatusForbidden, http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodDelete, Path: "/v1/webhook", ID: "deleteWebhook", Tag: tagWebhooks, Scope: proto.ScopeExecute,
			OrAdmin: true, Audit: "webhook.delete", Summary: "Remove the webhook settings of an API key",
			Params:    ofKey,
			Doc:       "Removes all of them, including the secrets: pending deliveries are then sent unsigned.",
			Responses: empty("They are removed."), Errors: []int{http.StatusForbidden, http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodPost, Path: "/v1/webhook/rotate", ID: "rotateWebhook", Tag: tagWebhooks,
			Scope: proto.ScopeExecute, OrAdmin: true, Audit: "webhook.rotate",
			Summary: "Replace the webhook secret of an API key",
			Params:  ofKey,
			Doc: "Both secrets sign during the overlap. Rotating again during the overlap ends the older " +
				"secret immediately.",
			Request: WebhookRotation{Overlap: new(proto.DefaultOverlap)}, OptionalBody: true,
			Responses: ok("The settings, with the new secret.", withSecret),
			Errors:    []int{http.StatusForbidden, http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodPost, Path: "/v1/webhook/test", ID: "testWebhook", Tag: tagWebhooks, Scope: proto.ScopeExecute,
			OrAdmin: true, Audit: "webhook.test", Summary: "Send a test to an API key's URL",
			Params:    ofKey,
			Doc:       "One attempt with the event webhook.test. The answer comes after the attempt: up to 30 seconds.",
			Responses: ok("The attempt.", NewDeliveryAttempt(&test)), Errors: []int{http.StatusForbidden, http.StatusNotFound},
		},
		{
			Method: http.MethodPost, Path: "/v1/webhook/replay-failed", ID: "replayFailed", Tag: tagWebhooks,
			Scope: proto.ScopeExecute, Summary: "Send failed webhooks again",
			Doc: "The organisation's deliveries that have failed since a time, at most 100 per request. While next is not " +
				"null, repeat the request with it as after.",
			Params: []Param{
				{
					Name: "since", In: "query", Doc: "RFC 3339.", Required: true,
					schema: object{"type": "string", "format": "date-time"},
				},
				query("after", "The next of the answer before.", text()),
			},
			Responses: ok("The progress.", Replayed{100, 23, new("q0hYp9sQ2xT7")}),
		},
		{
			Method: http.MethodGet, Path: "/v1/webhook/endpoints", ID: "listEndpoints", Tag: tagWebhooks, Scope: proto.ScopeRead,
			Summary: "List URLs at which the organisation's webhooks fail",
			Doc: "A URL is listed from its first failure after the last success. Nothing is delivered to " +
				"disabled ones. At most 1,000 are kept.",
			Responses: ok("The URLs, the one that has failed longest first.", Endpoints{[]Endpoint{NewEndpoint(&proto.Endpoint{
				URL: exampleHook, FailingSince: exampleTime().AddDate(0, 0, -5), DisabledAt: exampleTime(),
				Reason: "every attempt has failed for 5 days",
			})}}),
		},
		{
			Method: http.MethodPost, Path: "/v1/webhook/endpoints/enable", ID: "enableEndpoint", Tag: tagWebhooks,
			Scope: proto.ScopeExecute, Summary: "Deliver to a disabled URL again",
			Doc:     "Deliveries that failed meanwhile are only resent by a replay.",
			Request: EndpointRequest{URL: exampleHook}, Responses: empty("Deliveries to the URL go on."),
			Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
	}
}

func batchRoutes() []Route {
	batch := Batch{
		ID: exampleBatch, Status: proto.BatchRunning,
		Counts: proto.BatchCounts{Total: 3, Queued: 1, Running: 1, Succeeded: 1}, Rate: 1, TimeLeft: new(int64(2)),
		Metadata: map[string]string{}, KeyID: "key_1", CreatedAt: Time{exampleTime()}, StartedAt: &Time{exampleTime()},
	}
	paused, stopping := batch, batch
	paused.Status, stopping.Status = proto.BatchPaused, proto.BatchStopping
	example := BatchRequest{
		BatchSettings{MaxParallel: 8, Request: &BatchItemRequest{Code: "import sys; print(sys.argv[1])"}},
		[]BatchItemRequest{
			{ExecuteRequest: ExecuteRequest{Args: []string{"one"}}},
			{ExecuteRequest: ExecuteRequest{Args: []string{"two"}}},
		},
	}
	id := "The batch's id."
	one := []int{http.StatusNotFound, http.StatusConflict}
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/batches", ID: "createBatch", Tag: tagBatches, Starts: true,
			Scope: proto.ScopeExecute, Summary: "Run a batch of programs",
			Doc: "Up to 100,000 async executions in a body of up to 256 MiB, with items of up to 8 MiB. Each " +
				"item is checked like a request to execute it. If one is invalid, the message names it, and " +
				"nothing is accepted. A body with the media type application/jsonl or application/x-ndjson has " +
				"one item per line, after an optional first line with settings: an object with the only member " +
				"batch. With an Idempotency-Key, repeating the request creates no second batch while the first " +
				"one exists.",
			Params:  []Param{header("Idempotency-Key", "1 to 255 printable ASCII characters.", text())},
			Request: example, Upload: typeJSONL, UploadDoc: "The items, as an object or as JSONL.",
			Responses: created("The batch. It is durable.", batch),
			Errors: []int{
				http.StatusForbidden, http.StatusConflict, http.StatusUnprocessableEntity,
				http.StatusTooManyRequests, http.StatusNotImplemented,
			},
		},
		{
			Method: http.MethodGet, Path: "/v1/batches", ID: "listBatches", Tag: tagBatches, Scope: proto.ScopeRead,
			Summary: "List batches", Doc: "The batches of the organisation, newest first.",
			Params: paging(), Responses: ok("The batches.", Batches{Batches: []Batch{batch}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/batches/{id}", ID: "getBatch", Tag: tagBatches, Scope: proto.ScopeRead,
			Summary: "Show a batch", PathDoc: id,
			Responses: ok("The batch.", batch), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodDelete, Path: "/v1/batches/{id}", ID: "deleteBatch", Tag: tagBatches, Scope: proto.ScopeExecute,
			Summary: "Remove a batch that has ended", PathDoc: id,
			Doc:       "The records of its executions stay.",
			Responses: empty("It is gone."), Errors: one,
		},
		{
			Method: http.MethodPost, Path: "/v1/batches/{id}/pause", ID: "pauseBatch", Tag: tagBatches,
			Scope: proto.ScopeExecute, Summary: "Submit no more items of a batch", PathDoc: id,
			Doc: "Items that are in the queue or running go on.", Responses: ok("The batch as it is now.", paused), Errors: one,
		},
		{
			Method: http.MethodPost, Path: "/v1/batches/{id}/resume", ID: "resumeBatch", Tag: tagBatches,
			Scope: proto.ScopeExecute, Summary: "Go on with a paused batch", PathDoc: id,
			Responses: ok("The batch as it is now.", batch), Errors: one,
		},
		{
			Method: http.MethodPost, Path: "/v1/batches/{id}/cancel", ID: "cancelBatch", Tag: tagBatches,
			Scope: proto.ScopeExecute, Summary: "Cancel a batch", PathDoc: id,
			Doc:       "Cancels all its unfinished items, including running ones.",
			Responses: ok("The batch as it is now.", stopping), Errors: one,
		},
		{
			Method: http.MethodPost, Path: "/v1/batches/{id}/retry", ID: "retryBatch", Tag: tagBatches,
			Scope: proto.ScopeExecute, Summary: "Run the failed items of a batch again", PathDoc: id,
			Doc:     "The batch must have ended. Each failed item becomes a new execution, which replaces its result.",
			Request: BatchRetryRequest{Cancelled: true}, OptionalBody: true, Responses: ok("The batch as it is now.", batch),
			Errors: one,
		},
		{
			Method: http.MethodGet, Path: "/v1/batches/{id}/results", ID: "getBatchResults", Tag: tagBatches,
			Scope: proto.ScopeRead, Summary: "Download the results of a batch", PathDoc: id,
			Doc: "One line per item, by index. Without follow, the answer ends before the first unfinished item. " +
				"It is complete when the last line has the index counts.total - 1. To resume a broken answer, " +
				"set after to the index of the last complete line. A retry changes lines that were read before.",
			Params: []Param{
				query("after", "The index of the last line that is not wanted.",
					object{"type": "integer", "minimum": 0, "maximum": proto.MaxBatchItems}),
				query("follow", "Wait for unfinished items. Empty lines are sent meanwhile.",
					object{"type": "boolean", "default": false}),
			},
			Responses: []Response{{
				Status: http.StatusOK, Doc: "The results, see the schema BatchResult.",
				Text: map[string]string{typeNDJSON: exampleBatchResult},
			}},
			Errors: []int{http.StatusNotFound},
		},
	}
}

func scheduleRoutes() []Route {
	whole := WholeSchedule{
		Schedule: Schedule{
			ID: "sch_abcdefghijklmnopqrstuvwxyz", Name: "nightly report", Cron: new("30 2 * * *"), TimeZone: "Europe/Berlin",
			Overlap: proto.OverlapSkip,
			Missed:  proto.MissedLast, KeyID: "key_1", CreatedAt: Time{exampleTime()}, UpdatedAt: Time{exampleTime()},
			Next: []Time{{exampleTime().Add(time.Hour)}},
		},
		Request: ExecuteRequest{Code: "echo report", Language: proto.Bash, Timeout: 60, MaxAttempts: 1},
		Runs: []ScheduleRun{{
			Tick: Time{exampleTime()}, At: Time{exampleTime()}, Outcome: proto.RunStarted,
			TraceID: new(proto.TraceID(exampleTrace)),
		}},
	}
	id := "The schedule's id."
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/schedules", ID: "createSchedule", Tag: tagSchedules, Scope: proto.ScopeExecute,
			Summary: "Create a schedule",
			Doc:     "The execution is checked as if it were submitted now. At most 10,000 schedules for each organisation.",
			Request: ScheduleRequest{
				Name: new("nightly report"), Cron: new("30 2 * * *"), TimeZone: new("Europe/Berlin"),
				Request: &ExecuteRequest{Code: "echo report", Language: proto.Bash},
			},
			Responses: created("The schedule.", whole),
			Errors:    []int{http.StatusForbidden, http.StatusTooManyRequests, http.StatusNotImplemented},
		},
		{
			Method: http.MethodGet, Path: "/v1/schedules", ID: "listSchedules", Tag: tagSchedules, Scope: proto.ScopeRead,
			Summary: "List schedules", Doc: "The schedules of the organisation, by id.",
			Params: paging(), Responses: ok("The schedules.", Schedules{Schedules: []Schedule{whole.Schedule}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/schedules/preview", ID: "previewSchedule", Tag: tagSchedules,
			Scope: proto.ScopeRead, Summary: "Show when a schedule would tick",
			Doc: "Checks the timing like creating a schedule, but creates nothing.",
			Params: []Param{
				query("cron", "As of a new schedule.", object{"type": "string", "maxLength": 1024}),
				query("every", "As for a new schedule, instead of cron; counted from the time in from.",
					object{"type": "number", "minimum": 1, "maximum": 31536000}),
				query("time_zone", "As of a new schedule.", object{"type": "string", "default": "UTC"}),
				query("from", "The time, as in RFC 3339, from 1970 to 2999, at or after which the first tick is; now if it "+
					"is absent.", object{"type": "string", "format": "date-time"}),
				query("count", "The number of ticks.", object{"type": "integer", "minimum": 1, "maximum": 100, "default": 5}),
			},
			Responses: ok("The ticks.", SchedulePreview{Ticks: []Time{{exampleTime().Add(time.Hour)}}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/schedules/{id}", ID: "getSchedule", Tag: tagSchedules, Scope: proto.ScopeRead,
			Summary: "Show a schedule", PathDoc: id,
			Responses: ok("The schedule, what it executes, and its last ticks.", whole), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodPatch, Path: "/v1/schedules/{id}", ID: "patchSchedule", Tag: tagSchedules,
			Scope: proto.ScopeExecute, Summary: "Change, pause or resume a schedule", PathDoc: id,
			Doc: "Absent fields stay unchanged. Changing cron, time_zone or every, pausing and resuming drop " +
				"earlier ticks that have not started; other changes keep them.",
			Request: ScheduleRequest{Paused: new(true)}, Responses: ok("The schedule as it is now.", whole),
			Errors: []int{
				http.StatusForbidden, http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests,
				http.StatusNotImplemented,
			},
		},
		{
			Method: http.MethodDelete, Path: "/v1/schedules/{id}", ID: "deleteSchedule", Tag: tagSchedules,
			Scope: proto.ScopeExecute, Summary: "Remove a schedule", PathDoc: id,
			Doc:       "Executions that have started go on.",
			Responses: empty("It is gone."), Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodPost, Path: "/v1/schedules/{id}/run", ID: "runSchedule", Tag: tagSchedules, Starts: true,
			Scope: proto.ScopeExecute, Summary: "Start an execution of a schedule now", PathDoc: id, Traced: true,
			Doc: "Works even while it is paused, or its previous execution is running.",
			Responses: []Response{{
				Status: http.StatusAccepted, Doc: "Accepted, and durable.", Body: Accepted{exampleTrace, "running"},
				Headers: map[string]string{"Location": "The path of the execution."},
			}},
			Errors: []int{http.StatusForbidden, http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests},
		},
	}
}

func threadRoutes() []Route {
	whole := WholeThread{
		Thread: Thread{
			ID: "chat-1", Version: 1, Bytes: 4096, Files: 3, CreatedAt: Time{exampleTime()},
			UsedAt: Time{exampleTime()},
		},
		Versions: []ThreadVersion{{1, Time{exampleTime()}, new(proto.TraceID(exampleTrace)), 4096, 3}},
		Staged:   []StagedFile{{"data/in.csv", 2048, Time{exampleTime()}}},
	}
	id := "The thread's id."
	return []Route{
		{
			Method: http.MethodGet, Path: "/v1/threads", ID: "listThreads", Tag: tagThreads, Scope: proto.ScopeRead,
			Summary: "List threads", Doc: "The threads of the organisation, by id.",
			Params: paging(), Responses: ok("The threads.", Threads{Threads: []Thread{whole.Thread}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/threads/{id}", ID: "getThread", Tag: tagThreads, Scope: proto.ScopeRead,
			Summary: "Show a thread", PathDoc: id,
			Responses: ok("The thread, its versions, and its uploaded files that no version includes yet.", whole),
			Errors:    []int{http.StatusNotFound},
		},
		{
			Method: http.MethodDelete, Path: "/v1/threads/{id}", ID: "deleteThread", Tag: tagThreads, Scope: proto.ScopeFiles,
			Summary: "Remove a thread", PathDoc: id,
			Doc:       "Includes all versions and uploaded files. 409 while an execution holds the thread.",
			Responses: empty("It is gone, and its id is free."), Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodPost, Path: "/v1/threads/{id}/fork", ID: "forkThread", Tag: tagThreads, Scope: proto.ScopeFiles,
			Summary: "Create a thread from a version of this one", PathDoc: id,
			Doc: "Nothing is copied, so it is instant and takes no space. Without a version, the new thread also " +
				"gets the uploaded files that are in no version yet.",
			Request: ForkRequest{ID: "chat-1-again", Version: 1}, Responses: created("The new thread.", whole),
			Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodGet, Path: "/v1/threads/{id}/archive", ID: "archiveThread", Tag: tagThreads,
			Scope: proto.ScopeFiles, Summary: "Get a thread's home or a directory of it as a tar", PathDoc: id,
			Doc: "Without a version, the home as the next program will find it, including uploaded files that no " +
				"version includes yet.",
			Params: []Param{
				query("version", "The number of a version; the newest without it.",
					object{"type": "integer", "minimum": 1, "maximum": MaxWhole}),
				archivePath("The directory to get; the home by default. Names in the tar are relative to it."),
			},
			Responses: []Response{{
				Status: http.StatusOK, Doc: "The archive. An answer that breaks off is incomplete.",
				Text:    map[string]string{"application/x-tar": ""},
				Headers: map[string]string{"Content-Disposition": "attachment, with a file name."},
			}},
			Errors: []int{http.StatusNotFound, http.StatusTooManyRequests},
		},
		{
			Method: http.MethodPut, Path: "/v1/threads/{id}/archive", ID: "unpackThread", Tag: tagThreads,
			Scope: proto.ScopeFiles, Summary: "Unpack a tar into a thread's home", PathDoc: id,
			Doc: "The thread is created if it does not exist. An entry replaces whatever is at its path, except " +
				"that directories are merged. The change is one new version; if an entry is refused, nothing " +
				"changes. The server refuses absolute paths and those with .., devices and FIFOs, set-uid and " +
				"set-gid bits, symlinks that may lead outside the home, hard links to files that are not earlier " +
				"in the tar, and files that exceed the home directory of the API key's sandbox. 409 while an " +
				"execution holds the thread.",
			Params: []Param{
				archivePath("The directory to unpack into; the home by default. It is created if it does not " +
					"exist."),
				header("Content-Encoding", "How the tar is compressed.",
					object{"type": "string", "enum": []string{"gzip", "zstd"}}),
			},
			Upload:    "application/x-tar",
			UploadDoc: "A tar. The body may take any time in total, but must not stall for more than 30 seconds.",
			Responses: ok("It is unpacked.", ChangedFile{"data", 2}), Errors: []int{http.StatusConflict},
		},
	}
}

func archivePath(doc string) Param {
	return query("path", doc, object{"type": "string", "maxLength": proto.MaxFilePathBytes})
}

func fileRoutes() []Route {
	file := FileRequest{proto.SourceThread, "chat-1"}
	signed := SignedURL{
		URL: "https://bullpen.example.com/v1/files/content/YnVsbHBlbi4uLg.c2lnbmF0dXJl", Method: http.MethodPut,
		Headers: []Header{{"Content-Length", "2048"}}, ExpiresAt: Time{exampleTime().Add(15 * time.Minute)},
	}
	token := "The signed grant."
	headers := map[string]string{
		"Content-Disposition": "attachment, or inline as requested for the URL, with the file's name.",
		"ETag":                "Identifies the content.", "Accept-Ranges": "bytes",
	}
	contents := map[string]string{
		"application/octet-stream": "", "application/pdf": "", "audio/*": "", "image/*": "", "text/*": "",
		"video/*": "",
	}
	partHeaders := maps.Clone(headers)
	partHeaders["Content-Range"] = "The position of the range in the file."
	fileErrors := []int{http.StatusNotFound, http.StatusConflict, http.StatusNotImplemented}
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/files/list", ID: "listFiles", Tag: tagFiles, Scope: proto.ScopeFiles,
			Summary: "List files",
			Doc: "One complete directory level, or everything below with recursive. The list of a file's path is that file; " +
				"the list of a path without a " +
				"file, or of an unknown thread, is empty. The list shows the newest version, also while an execution runs, and " +
				"later uploads. With version, it shows that version, 404 if it is not stored. " +
				"Names that are not UTF-8 contain U+FFFD. Of a storage connection, an API key with a prefix sees what is below " +
				"it and the directories " +
				"that lead there; a connection that the key does not have is a 404. Only the entries of threads and volumes are " +
				"in the order of their paths.",
			Request: FileListRequest{FileRequest: file, Path: "data"},
			Responses: ok("The entries, by path.",
				Files{[]File{{"in.csv", "data/in.csv", 2048, Time{exampleTime()}, false, proto.FileRegular, false}}}),
			Errors: fileErrors,
		},
		{
			Method: http.MethodPost, Path: "/v1/files/upload_url", ID: "fileUploadURL", Tag: tagFiles, Scope: proto.ScopeFiles,
			Summary: "Get a URL to upload a file to",
			Doc: "The file replaces whatever is at its path, even a directory with its content. Missing parent " +
				"directories are created, and replace files and links. Once the PUT is answered, lists, " +
				"downloads and the next execution include the file, even if the thread is new or in use. The " +
				"newest version of the home, the staged files in blocks of 4096 bytes, and the upload must fit " +
				"into the home directory of the API key's sandbox, in bytes and in files and directories; a 409 " +
				"lists the sizes. An upload must begin within 15 minutes. The URL needs no API key, but it ends " +
				"when the key that requested it is revoked or loses the storage connection. In a bucket or " +
				"directory, a file does not replace a directory: 409. A connection that is read-only for the key " +
				"is a 403.",
			Request:   FileUploadRequest{FileRequest: file, Path: "data/in.csv", ContentLength: 2048},
			Responses: ok("The URL, and the headers to send.", signed),
			Errors:    fileErrors,
		},
		{
			Method: http.MethodPost, Path: "/v1/files/download_url", ID: "fileDownloadURL", Tag: tagFiles,
			Scope: proto.ScopeFiles, Summary: "Get a URL to download a file from",
			Doc: "The URL is valid for 15 minutes. It needs no API key, but it ends when the key that requested " +
				"it is revoked or loses the storage connection. It returns the content at the time of the " +
				"download, or that of the version. Links are not followed. With inline, pages of this " +
				"server can show the file: the answer has its media type, and a Content-Security-Policy that " +
				"prevents scripts and requests.",
			Request:   FileDownloadRequest{FileRequest: file, Path: "data/out.csv"},
			Responses: ok("The URL.", SignedURL{signed.URL, http.MethodGet, []Header{}, signed.ExpiresAt}), Errors: fileErrors,
		},
		{
			Method: http.MethodPost, Path: "/v1/files/compare", ID: "compareFiles", Tag: tagFiles, Scope: proto.ScopeFiles,
			Summary: "Compare two versions",
			Doc: "What was added, removed or changed between two versions of a thread or a volume: types, permissions, " +
				"contents and the targets of links, but not times. If the path is that of a text file, the answer also has " +
				"its unified diff. 404 if a version is not stored, or if neither has the path. Buckets and directories have " +
				"no versions.",
			Request: FileCompareRequest{FileRequest: file, From: 1, To: 2, Path: "data/in.csv"},
			Responses: ok("The difference.", FileDifference{
				Changes: []FileChange{{
					"data/in.csv", "changed", &FileState{proto.FileRegular, 4, "0644", Time{exampleTime()}},
					&FileState{proto.FileRegular, 8, "0644", Time{exampleTime()}},
				}},
				Diff: &FileDiff{DiffText, "--- version 1\n+++ version 2\n@@ -1,1 +1,2 @@\n 1,2\n+3,4\n"},
			}),
			Errors: []int{http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests, http.StatusNotImplemented},
		},
		{
			Method: http.MethodPost, Path: "/v1/files/delete", ID: "deleteFile", Tag: tagFiles, Scope: proto.ScopeFiles,
			Summary: "Delete a file",
			Doc: "Deletes a file, a link or an empty directory; with recursive also a directory with its content. Links are " +
				"not followed. The change is a " +
				"new version of the home; earlier versions keep their content. 404 if nothing is at the path, 409 while an " +
				"execution holds the thread or volume. " +
				"Buckets and directories have no versions: a deletion is final, and of a large directory a part may remain if " +
				"the request fails.",
			Request:   FileDeleteRequest{FileRequest: file, Path: "data/in.csv"},
			Responses: ok("It is deleted.", ChangedFile{"data/in.csv", 2}),
			Errors:    fileErrors,
		},
		{
			Method: http.MethodPost, Path: "/v1/files/rename", ID: "renameFile", Tag: tagFiles, Scope: proto.ScopeFiles,
			Summary: "Rename a file",
			Doc: "Moves a file, a link or a directory to another path. Links are not followed. The change is a " +
				"new version of the home; earlier versions keep their content. 404 if the path does not exist; " +
				"409 if the new one exists or is below a file or link, or while an execution holds the thread or " +
				"volume. A bucket copies the file and deletes the old one; its directories cannot be renamed.",
			Request:   FileRenameRequest{FileRequest: file, Path: "data/in.csv", To: "data/old.csv"},
			Responses: ok("It is renamed.", ChangedFile{"data/old.csv", 2}),
			Errors:    fileErrors,
		},
		{
			Method: http.MethodGet, Path: "/v1/files/content/{token}", ID: "getContent", Tag: tagFiles,
			Summary: "Download a file by a signed URL", PathDoc: token, Public: true,
			Doc: "A single range is supported, with If-Range and the ETag; several ranges at once are ignored.",
			Params: []Param{
				header("Range", "A range of bytes.", object{"type": "string", "examples": []string{"bytes=0-1023"}}),
				header("If-Range", "The ETag of the content that the range belongs to. If the file has another "+
					"one, the whole file is sent.",
					text()),
			},
			Responses: []Response{
				{
					Status: http.StatusOK, Doc: "The file.", Text: contents, Headers: headers,
				},
				{
					Status: http.StatusPartialContent, Doc: "The range.", Text: contents, Headers: partHeaders,
				},
			},
			Errors: []int{
				http.StatusBadRequest, http.StatusForbidden, http.StatusNotFound, http.StatusConflict,
				http.StatusRequestedRangeNotSatisfiable,
				http.StatusTooManyRequests, http.StatusNotImplemented,
			},
		},
		{
			Method: http.MethodPut, Path: "/v1/files/content/{token}", ID: "putContent", Tag: tagFiles,
			Summary: "Upload a file by a signed URL", PathDoc: token, Public: true,
			Doc:    "The body may take any time in total, but must not stall for more than 30 seconds.",
			Upload: "application/octet-stream", UploadDoc: "As many bytes as the URL was made for.",
			Responses: ok("The file is stored.", Uploaded{"data/in.csv", 2048}),
			Errors: []int{
				http.StatusForbidden, http.StatusNotFound, http.StatusConflict, http.StatusLengthRequired,
				http.StatusTooManyRequests, http.StatusNotImplemented,
			},
		},
	}
}

func uploadRoutes() []Route {
	part := UploadedPart{1, proto.UploadPartBytes}
	begun := PartUpload{
		"https://bullpen.example.com/v1/files/uploads/YnVsbHBlbi4uLg.c2lnbmF0dXJl", proto.UploadPartBytes, 3,
		Time{exampleTime().Add(24 * time.Hour)},
	}
	token := "The signed grant."
	refusals := []int{
		http.StatusForbidden, http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests,
		http.StatusNotImplemented,
	}
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/files/uploads", ID: "createUpload", Tag: tagFiles, Scope: proto.ScopeFiles,
			Summary: "Begin an upload in parts",
			Doc: "For large files: failed parts can be resent, and the upload can be resumed. Send each part " +
				"with PUT to the URL with ?part=NUMBER, in any order and concurrently, and complete the upload " +
				"with POST to the URL. The file appears then. Uploads not completed within 20 hours are removed, " +
				"except in a bucket, whose own rule must remove them. Otherwise as for upload_url. An " +
				"organisation may have 1,000 incomplete uploads of 160 GiB in total.",
			Request: PartUploadRequest{
				FileRequest: FileRequest{proto.SourceVolume, "data"}, Path: "large.bin",
				ContentLength: 20 << 20,
			},
			Responses: ok("The URL.", begun), Errors: []int{http.StatusNotFound, http.StatusConflict, http.StatusNotImplemented},
		},
		{
			Method: http.MethodGet, Path: "/v1/files/uploads/{token}", ID: "getUpload", Tag: tagFiles,
			Summary: "List the parts of an upload", PathDoc: token, Public: true,
			Doc: "To resume an upload, send the parts that are not in the list. 404 once it is complete.",
			Responses: ok("The upload.",
				PartUploadState{"large.bin", 20 << 20, begun.PartSize, begun.Parts, []UploadedPart{part}, begun.ExpiresAt}),
			Errors: refusals,
		},
		{
			Method: http.MethodPut, Path: "/v1/files/uploads/{token}", ID: "putPart", Tag: tagFiles, Summary: "Upload a part",
			PathDoc: token, Public: true,
			Params: []Param{{
				Name: "part", In: "query", Doc: "The number of the part, from 1.", Required: true,
				schema: object{"type": "integer", "minimum": 1},
			}},
			Doc: "Replaces an earlier part with the same number. The body must not stall for more than 30 " +
				"seconds.",
			Upload: "application/octet-stream", UploadDoc: "All bytes of the part.", Responses: ok("The part is stored.", part),
			Errors: append([]int{http.StatusLengthRequired}, refusals...),
		},
		{
			Method: http.MethodPost, Path: "/v1/files/uploads/{token}", ID: "completeUpload", Tag: tagFiles,
			Summary: "Complete an upload", PathDoc: token, Public: true,
			Doc: "Joins the parts into the file; a 409 names missing parts. A bucket's server joins them itself. " +
				"Otherwise this takes seconds per GiB and continues if the client leaves.",
			Responses: ok("The file is stored.", Uploaded{"large.bin", 20 << 20}), Errors: refusals,
		},
		{
			Method: http.MethodDelete, Path: "/v1/files/uploads/{token}", ID: "abortUpload", Tag: tagFiles,
			Summary: "Remove an upload", PathDoc: token, Public: true,
			Doc:       "Removes the parts. A completed upload is not changed.",
			Responses: []Response{{Status: http.StatusNoContent, Doc: "It is removed."}}, Errors: refusals,
		},
	}
}

func serverRoutes() []Route {
	return []Route{
		{
			Method: http.MethodGet, Path: "/healthz", ID: "healthz", Tag: tagServer, Public: true,
			Summary:   "Whether the process is alive",
			Responses: ok("It is alive.", Health{"ok"}),
		},
		{
			Method: http.MethodGet, Path: "/readyz", ID: "readyz", Tag: tagServer, Public: true,
			Summary: "Whether executions would run",
			Responses: []Response{
				{Status: http.StatusOK, Doc: "They would.", Body: Ready{Status: "ready", Workers: 1}},
				{
					Status: http.StatusServiceUnavailable, Doc: "They would not; missing names the cause.",
					Body:    NotReady{CodeServiceUnavailable, "no worker is live", "worker"},
					Headers: map[string]string{"Retry-After": "Seconds."},
				},
			},
		},
		{
			Method: http.MethodGet, Path: "/metrics", ID: "metrics", Tag: tagServer, Public: true,
			Summary: "Metrics for Prometheus",
			Responses: []Response{{
				Status: http.StatusOK, Doc: "The metrics.",
				Text: map[string]string{"text/plain": "bullpen_slots 4\n"},
			}},
		},
		{
			Method: http.MethodGet, Path: "/openapi.json", ID: "openapi", Tag: tagServer, Public: true, Summary: "This document",
			Responses: []Response{{Status: http.StatusOK, Doc: "OpenAPI 3.1.", Text: map[string]string{typeJSON: ""}}},
		},
		{
			Method: http.MethodGet, Path: "/console", ID: "console", Tag: tagServer, Public: true,
			Summary:   "A web page for tenants and operators",
			Responses: []Response{{Status: http.StatusFound, Doc: "Redirects to the page, /console/."}},
		},
		{
			Method: http.MethodGet, Path: "/docs", ID: "docs", Tag: tagServer, Public: true,
			Summary: "This document, to read and to try",
			Responses: []Response{{
				Status: http.StatusOK, Doc: "A page.",
				Text: map[string]string{"text/html": "<!DOCTYPE html>"},
			}},
		},
	}
}
