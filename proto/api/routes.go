package api

import (
	"fmt"
	"maps"
	"net/http"
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
	tagThreads    = "threads"
	tagFiles      = "files"
	tagMCP        = "mcp"
	tagSessions   = "sessions"
	tagAdmin      = "admin"
	tagServer     = "server"
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
	ScopeByTool  bool        // the tool that the body names decides which scope is needed
	AnyScope     bool        // any API key or session may use it
	Global       bool        // needs the key of a global administrator
	Public       bool        // needs no API key
	Traced       bool        // answers have an X-Trace-Id
	Tagged       bool        // answers have an ETag, and a change may have an If-Match
}

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
		{"name": tagWebhooks, "description": "Deliver the results of async executions, and see what became of the deliveries. Each API key has its own settings."},
		{"name": tagBatches, "description": "Run many programs that are accepted together. Batches belong to the organisation; their executions run under the API key that created them."},
		{"name": tagSchedules, "description": "Start executions by the clock. Schedules belong to the organisation; their executions run under the API key that created them."},
		{"name": tagPipelines, "description": "Run steps that need each other. Runs belong to the organisation; their steps are executions under the API key that started them."},
		{"name": tagThreads, "description": "Home directories that outlive an execution. They belong to the organisation. The first execution that names a thread creates it."},
		{"name": tagFiles, "description": "Files in the home of a thread. Their content is transferred through signed URLs."},
		{"name": tagMCP, "description": "The tools of the Model Context Protocol, for language models."},
		{"name": tagSessions, "description": "Sign in with a browser, as a member of an organisation or with an API key. The cookie of a session stands for an API key with the scopes of the member's role, or for the API key itself."},
		{"name": tagAdmin, "description": "API keys, members, sessions and secrets of organisations, which their administrators manage; organisations, plans, sandbox profiles and their images, workers and the store of threads, which global administrators manage."},
		{"name": tagServer, "description": "The server itself."},
	}
}

// Routes returns all routes.
func Routes() []Route {
	var all []Route
	for _, group := range [][]Route{executionRoutes(), webhookRoutes(), batchRoutes(), scheduleRoutes(), pipelineRoutes(), threadRoutes(), fileRoutes(), mcpRoutes(), orgRoutes(), keyRoutes(), sessionRoutes(), memberRoutes(), secretRoutes(), sandboxRoutes(), workerRoutes(), deadLetterRoutes(), storeRoutes(), serverRoutes()} {
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
	return []Response{{Status: http.StatusCreated, Doc: doc, Body: body, Headers: map[string]string{"Location": "Its own path."}}}
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

func paging() []Param {
	return []Param{
		query("limit", "The largest number of entries.", object{"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
		query("cursor", "The next_cursor of the answer before.", text()),
	}
}

// The values of examples.
const (
	exampleTrace  = "trc_AbCdEfGhIjKlMnOpQrSt"
	exampleHook   = "https://example.com/hook"
	exampleSecret = "whsec_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789ABCDcD0="
	exampleStream = `{"type":"status","trace_id":"` + exampleTrace + `","status":"running","seq":1}` + "\n" +
		`{"type":"output","stream":"stdout","data":"hello\n","seq":2}` + "\n" +
		`{"type":"result","trace_id":"` + exampleTrace + `","status":"success","result":{"success":true,"stdout":"hello\n","stderr":"","exit_code":0,` +
		`"error":null,"error_code":null,"error_message":null,"duration_ms":21,"stdout_truncated":false,"stderr_truncated":false},"output_truncated":false,"seq":3}` + "\n"
)

// A batch and a line of its results.
const (
	exampleBatch       = "bat_abcdefghijklmnopqrstuvwxyz"
	exampleBatchResult = `{"index":0,"trace_id":"` + exampleTrace + `","status":"success","exit_code":0,"stdout":"one\n","stderr":"","error":null,"error_code":null,` +
		`"error_message":null,"duration_ms":21,"stdout_truncated":false,"stderr_truncated":false,"metadata":{}}` + "\n"
)

const exampleEventStream = `id: 1` + "\n" + `data: {"type":"status","trace_id":"` + exampleTrace + `","status":"running","seq":1}` + "\n\n"

func exampleTime() time.Time { return time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC) }

func exampleResult() proto.Result {
	r := proto.Exited(0)
	r.Stdout, r.DurationMS = "hello\n", 21
	return r
}

// noMoreEvents stops the EventSource of a browser.
var noMoreEvents = Response{Status: http.StatusNoContent, Doc: "Last-Event-ID is that of the last event of an execution that has ended."}

func executionRoutes() []Route {
	result, start := exampleResult(), exampleTime()
	ended := start.Add(25 * time.Millisecond)
	execution := NewExecution(&proto.Record{
		Meta: proto.Meta{
			TraceID: exampleTrace, Mode: proto.ModeInline, Language: proto.Python, Timeout: 60, CreatedAt: start, Profile: proto.DefaultProfileName,
		},
		Status: proto.StatusSuccess, Attempt: 1, StartedAt: &start, CompletedAt: &ended, Result: &result,
	}, "", ended)
	listed := NewListedExecution(&proto.Record{
		Meta: proto.Meta{
			TraceID: exampleTrace, Key: "key_1", Mode: proto.ModeInline, Language: proto.Python, Timeout: 60, CreatedAt: start, Profile: proto.DefaultProfileName,
		},
		Status: proto.StatusSuccess, Attempt: 1, StartedAt: &start, CompletedAt: &ended, Result: &result,
	}, "", ended)
	traceID := "The execution's trace id."
	place := &proto.QueuePlace{TraceID: exampleTrace, Class: proto.ClassBatch, CreatedAt: start, Position: 12, Wait: new(3.2)}
	queue := NewQueue(&proto.QueueView{
		Key:    proto.QueueCounts{Queued: proto.ClassCounts{Batch: 3}, Running: proto.ClassCounts{Interactive: 1, Batch: 2}},
		Org:    proto.QueueCounts{Queued: proto.ClassCounts{Batch: 40}, Running: proto.ClassCounts{Interactive: 1, Batch: 6}},
		Oldest: place, Places: []proto.QueuePlace{*place},
	}, 0, &proto.Plan{Concurrent: 100, MaxQueued: 1000})
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/sandbox/execute", ID: "execute", Tag: tagExecute, Scope: proto.ScopeExecute, Summary: "Run a program", Traced: true,
			Doc: "Inline by default: the answer is the result. With Accept: application/x-ndjson or text/event-stream the answer is the stream of events; with " +
				"Prefer: respond-async it is 202, and the result is available under the trace id.",
			Params: []Param{
				header("Accept", "application/json (inline), application/x-ndjson or text/event-stream (streaming).", object{"type": "string", "default": typeJSON}),
				header("Prefer", fmt.Sprintf("respond-async has precedence over Accept. wait=N: an inline or streaming execution waits up to N seconds, "+
					"1 to %d, for a free slot; without it up to 30 s (--queue-wait), and no longer than the larger of its timeout and 5 s.", MaxQueueWait),
					object{"type": "string", "examples": []string{"respond-async", "wait=120"}}),
				header("Idempotency-Key", "Kept for 24 hours: the same key with the same body gets the answer of the first execution.",
					object{"type": "string", "minLength": 1, "maxLength": proto.MaxIdempotencyKeyLen}),
			},
			Request: ExecuteRequest{Code: "echo $NAME", Language: proto.Bash, Timeout: 10, Env: map[string]string{"NAME": "bullpen"}},
			Responses: []Response{
				{Status: http.StatusOK, Doc: "The result, or the stream of events: one Event a line; in an event stream the id is the seq.", Body: result, Text: map[string]string{typeNDJSON: exampleStream, typeSSE: exampleEventStream}},
				{
					Status: http.StatusAccepted, Doc: "Accepted, and durable.", Body: Accepted{exampleTrace, "running"},
					Headers: map[string]string{"Location": "The path of the execution.", "Preference-Applied": "respond-async"},
				},
			},
			Errors: []int{http.StatusConflict, http.StatusUnprocessableEntity, http.StatusTooManyRequests, http.StatusNotImplemented, http.StatusGatewayTimeout},
		},
		{
			Method: http.MethodGet, Path: "/v1/executions", ID: "listExecutions", Tag: tagExecutions, Scope: proto.ScopeRead, Summary: "List executions",
			Doc: "The executions of the key's organisation, the newest first, without their output. All filters that are given must match. An unknown parameter is an error. " +
				"Pages do not shift while new executions come.",
			Params:    historyParams(),
			Responses: ok("The executions.", Executions{Executions: []ListedExecution{listed}, Complete: true}),
		},
		{
			Method: http.MethodGet, Path: "/v1/executions/{id}", ID: "getExecution", Tag: tagExecutions, Scope: proto.ScopeRead, Summary: "Look at an execution", PathDoc: traceID, Traced: true,
			Params:    []Param{query("wait", "Seconds to wait for the end of the execution.", object{"type": "integer", "minimum": 0, "maximum": 60, "default": 0})},
			Responses: ok("The execution as it is now.", execution), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodGet, Path: "/v1/executions/{id}/output", ID: "getOutput", Tag: tagExecutions, Scope: proto.ScopeRead, Summary: "Follow the output of an execution", PathDoc: traceID, Traced: true,
			Doc: "The events with a higher seq, then live ones. The result is always the last event, unless follow is false.",
			Params: []Param{
				query("after_seq", "The seq of the last event that the client has.", object{"type": "integer", "minimum": 0, "maximum": MaxWhole, "default": 0}),
				query("follow", "false: only the present events. The stream of an execution that has not ended then ends without a result.", object{"type": "boolean", "default": true}),
				header("Accept", "application/x-ndjson or text/event-stream.", object{"type": "string", "default": typeNDJSON}),
				header("Last-Event-ID", "For event streams; has precedence over after_seq.", object{"type": "integer", "minimum": 0, "maximum": MaxWhole}),
			},
			Responses: []Response{{Status: http.StatusOK, Doc: "The events. In an event stream the id is the seq.", Text: map[string]string{
				typeNDJSON: exampleStream, typeSSE: exampleEventStream,
			}}, noMoreEvents},
			Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodPost, Path: "/v1/executions/{id}/stream_url", ID: "streamURL", Tag: tagExecutions, Scope: proto.ScopeRead, Summary: "Get a URL to follow the output with", PathDoc: traceID, Traced: true,
			Doc: "For EventSource in a browser, which sends no API key. The URL is valid for 15 minutes; a stream that has begun goes on. It ends when the key that asked for it " +
				"is revoked.",
			Responses: ok("The URL.", StreamURL{URL: "https://bullpen.example.com/v1/streams/YnVsbHBlbi4.c2ln", ExpiresAt: Time{ended}}), Errors: []int{http.StatusNotFound, http.StatusBadRequest},
		},
		{
			Method: http.MethodGet, Path: "/v1/streams/{token}", ID: "getStream", Tag: tagExecutions, Summary: "Follow the output of an execution by a signed URL", Public: true,
			PathDoc: "The last part of a signed URL.", Traced: true,
			Params: []Param{
				query("after_seq", "The seq of the last event that the client has.", object{"type": "integer", "minimum": 0, "maximum": MaxWhole, "default": 0}),
				header("Last-Event-ID", "Has precedence over after_seq.", object{"type": "integer", "minimum": 0, "maximum": MaxWhole}),
			},
			Responses: []Response{{Status: http.StatusOK, Doc: "The events. The id is the seq.", Text: map[string]string{typeSSE: exampleEventStream}}, noMoreEvents},
			Errors:    []int{http.StatusForbidden, http.StatusNotFound},
		},
		{
			Method: http.MethodPost, Path: "/v1/executions/{id}/cancel", ID: "cancelExecution", Tag: tagExecutions, Scope: proto.ScopeExecute, Summary: "End an execution", PathDoc: traceID, Traced: true,
			Responses: []Response{
				{Status: http.StatusOK, Doc: "The execution has ended already.", Body: Cancelled{exampleTrace, "success"}},
				{Status: http.StatusAccepted, Doc: "The execution is being ended.", Body: Cancelled{exampleTrace, "cancelling"}},
			},
			Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodGet, Path: "/v1/queue", ID: "getQueue", Tag: tagExecutions, Scope: proto.ScopeRead, Summary: "Show the queue",
			Doc: "What is queued and running, of the API key and of its organisation, and where executions stand in the queue. Items of batches that wait are not in the queue yet. " +
				"The places are up to a fifth of a second old.",
			Params:    []Param{query("trace_id", fmt.Sprintf("The executions of the organisation whose places are wanted: up to %d ids with commas between them. Those that are not queued are left out.", proto.MaxQueuePlaces), text())},
			Responses: ok("The queue.", queue),
		},
	}
}

func exampleDelivery(next time.Duration) Delivery {
	at := exampleTime()
	return NewDelivery(&proto.Delivery{
		TraceID: exampleTrace, ID: proto.DeliveryID(exampleTrace), URL: exampleHook, Status: proto.DeliveryPending,
		CreatedAt: at, NextAt: at.Add(next), Made: 1,
		Attempts: []proto.DeliveryAttempt{exampleAttempt(http.StatusServiceUnavailable, proto.DeliveryRejected, "the receiver answered 503", "HTTP/1.1 503 Service Unavailable\r\n\r\nlater")},
	})
}

func exampleAttempt(status int, class proto.DeliveryError, detail, response string) proto.DeliveryAttempt {
	return proto.DeliveryAttempt{
		Number: 1, At: exampleTime(), Status: status, Error: class, Detail: detail, RemoteAddr: "203.0.113.7:443", Response: response,
		Timings: proto.DeliveryTimings{DNS: 1.2, Connect: 8.1, TLS: 17.4, FirstByte: 21, Total: 48},
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
			Method: http.MethodGet, Path: "/v1/executions/{id}/webhook", ID: "getDelivery", Tag: tagWebhooks, Scope: proto.ScopeRead, Summary: "Look at the webhook of an execution", PathDoc: traceID, Traced: true,
			Doc:       "404 if the execution has no webhook. Until the execution has ended and its delivery is stored, the webhook is pending without attempts.",
			Responses: ok("The webhook with its last 20 attempts.", exampleDelivery(time.Second)), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodPost, Path: "/v1/executions/{id}/webhook/replay", ID: "replayDelivery", Tag: tagWebhooks, Scope: proto.ScopeExecute, Summary: "Send a webhook again", PathDoc: traceID, Traced: true,
			Doc:       "Also a delivered one. It keeps its webhook-id and starts its attempts again. 409 while it is pending, or if its URL is disabled.",
			Responses: []Response{{Status: http.StatusAccepted, Doc: "It is pending again.", Body: exampleDelivery(5 * time.Minute)}},
			Errors:    []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodGet, Path: "/v1/webhook", ID: "getWebhook", Tag: tagWebhooks, Scope: proto.ScopeRead, Summary: "Look at the webhook settings of an API key", Doc: "Without the secret.",
			Params:    ofKey,
			Responses: ok("The settings, complete.", stored), Errors: []int{http.StatusForbidden, http.StatusNotFound},
		},
		{
			Method: http.MethodPut, Path: "/v1/webhook", ID: "putWebhook", Tag: tagWebhooks, Scope: proto.ScopeAdmin, Summary: "Set the webhook of an API key",
			Params: ofKey,
			Doc: "As a whole: absent fields get their defaults. Without a secret the server creates one and shows it in this answer, and never again; a " +
				"previous secret goes on signing for a day. The URL applies to executions that are accepted from then on, the rest to all attempts from then on.",
			Request: WebhookRequest{URL: new(exampleHook)}, Responses: ok("The settings, with a secret that was created.", withSecret), Errors: []int{http.StatusForbidden, http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodPatch, Path: "/v1/webhook", ID: "patchWebhook", Tag: tagWebhooks, Scope: proto.ScopeAdmin, Summary: "Change some of the webhook settings of an API key",
			Params:  ofKey,
			Doc:     "Absent fields stay. A secret that is given replaces the previous one, which goes on signing for a day; none is created.",
			Request: WebhookRequest{MaxAttempts: new(5)}, Responses: ok("The settings as they are now.", stored), Errors: []int{http.StatusForbidden, http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodDelete, Path: "/v1/webhook", ID: "deleteWebhook", Tag: tagWebhooks, Scope: proto.ScopeAdmin, Summary: "Remove the webhook settings of an API key",
			Params:    ofKey,
			Doc:       "All of them, the secrets too: pending deliveries are not signed any more.",
			Responses: empty("They are removed."), Errors: []int{http.StatusForbidden, http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodPost, Path: "/v1/webhook/rotate", ID: "rotateWebhook", Tag: tagWebhooks, Scope: proto.ScopeAdmin, Summary: "Replace the webhook secret of an API key",
			Params:  ofKey,
			Doc:     "Both secrets sign during the overlap. Rotating again during the overlap ends the older secret at once.",
			Request: WebhookRotation{Overlap: new(proto.DefaultOverlap)}, OptionalBody: true,
			Responses: ok("The settings, with the new secret.", withSecret), Errors: []int{http.StatusForbidden, http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodPost, Path: "/v1/webhook/test", ID: "testWebhook", Tag: tagWebhooks, Scope: proto.ScopeAdmin, Summary: "Send a test to an API key's URL",
			Params:    ofKey,
			Doc:       "One attempt with the event webhook.test. The answer comes after the attempt: up to 30 seconds.",
			Responses: ok("The attempt.", NewDeliveryAttempt(&test)), Errors: []int{http.StatusForbidden, http.StatusNotFound},
		},
		{
			Method: http.MethodPost, Path: "/v1/webhook/replay-failed", ID: "replayFailed", Tag: tagWebhooks, Scope: proto.ScopeExecute, Summary: "Send failed webhooks again",
			Doc: "The organisation's deliveries that have failed since a time, at most 100 per request. While next is not null, repeat the request with it as after.",
			Params: []Param{
				{Name: "since", In: "query", Doc: "RFC 3339.", Required: true, schema: object{"type": "string", "format": "date-time"}},
				query("after", "The next of the answer before.", text()),
			},
			Responses: ok("The progress.", Replayed{100, 23, new(proto.TraceID(exampleTrace))}),
		},
		{
			Method: http.MethodGet, Path: "/v1/webhook/endpoints", ID: "listEndpoints", Tag: tagWebhooks, Scope: proto.ScopeRead, Summary: "List URLs at which the organisation's webhooks fail",
			Doc: "From the first failure after the last success on. Nothing is delivered to disabled ones. At most 1,000 are kept.",
			Responses: ok("The URLs, the one that has failed longest first.", Endpoints{[]Endpoint{NewEndpoint(&proto.Endpoint{
				URL: exampleHook, FailingSince: exampleTime().AddDate(0, 0, -5), DisabledAt: exampleTime(), Reason: "every attempt has failed for 5 days",
			})}}),
		},
		{
			Method: http.MethodPost, Path: "/v1/webhook/endpoints/enable", ID: "enableEndpoint", Tag: tagWebhooks, Scope: proto.ScopeExecute, Summary: "Deliver to a disabled URL again",
			Doc:     "Deliveries that failed meanwhile are sent again only if they are replayed.",
			Request: EndpointRequest{URL: exampleHook}, Responses: empty("Deliveries to the URL go on."), Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
	}
}

func batchRoutes() []Route {
	batch := Batch{
		ID: exampleBatch, Status: proto.BatchRunning, Counts: proto.BatchCounts{Total: 3, Queued: 1, Running: 1, Succeeded: 1}, Rate: 1, TimeLeft: new(int64(2)),
		Metadata: map[string]string{}, KeyID: "key_1", CreatedAt: Time{exampleTime()}, StartedAt: &Time{exampleTime()},
	}
	paused, stopping := batch, batch
	paused.Status, stopping.Status = proto.BatchPaused, proto.BatchStopping
	example := BatchRequest{
		BatchSettings{MaxParallel: 8, Request: &BatchItemRequest{Code: "import sys; print(sys.argv[1])"}},
		[]BatchItemRequest{{ExecuteRequest: ExecuteRequest{Args: []string{"one"}}}, {ExecuteRequest: ExecuteRequest{Args: []string{"two"}}}},
	}
	id := "The batch's id."
	one := []int{http.StatusNotFound, http.StatusConflict}
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/batches", ID: "createBatch", Tag: tagBatches, Scope: proto.ScopeExecute, Summary: "Run a batch of programs",
			Doc: "Up to 100,000 async executions in a body of up to 256 MiB, in which no item is larger than 8 MiB. Each item is checked like a request to execute it. If one is wrong, " +
				"the message names it, and nothing is accepted. A body with the media type application/jsonl or application/x-ndjson has an item in each line, and settings in the first line if " +
				"that is an object with the only member batch. With an Idempotency-Key the same request creates one batch, as long as that exists.",
			Params:  []Param{header("Idempotency-Key", "1 to 255 printable ASCII characters.", text())},
			Request: example, Upload: typeJSONL, UploadDoc: "The items, as an object or as JSONL.",
			Responses: created("The batch. It is durable.", batch),
			Errors:    []int{http.StatusForbidden, http.StatusConflict, http.StatusUnprocessableEntity, http.StatusTooManyRequests, http.StatusNotImplemented},
		},
		{
			Method: http.MethodGet, Path: "/v1/batches", ID: "listBatches", Tag: tagBatches, Scope: proto.ScopeRead, Summary: "List batches", Doc: "The batches of the organisation, the newest first.",
			Params: paging(), Responses: ok("The batches.", Batches{Batches: []Batch{batch}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/batches/{id}", ID: "getBatch", Tag: tagBatches, Scope: proto.ScopeRead, Summary: "Show a batch", PathDoc: id,
			Responses: ok("The batch.", batch), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodDelete, Path: "/v1/batches/{id}", ID: "deleteBatch", Tag: tagBatches, Scope: proto.ScopeExecute, Summary: "Remove a batch that has ended", PathDoc: id,
			Doc:       "The records of its executions stay.",
			Responses: empty("It is gone."), Errors: one,
		},
		{
			Method: http.MethodPost, Path: "/v1/batches/{id}/pause", ID: "pauseBatch", Tag: tagBatches, Scope: proto.ScopeExecute, Summary: "Submit no more items of a batch", PathDoc: id,
			Doc: "Items that are in the queue or running go on.", Responses: ok("The batch as it is now.", paused), Errors: one,
		},
		{
			Method: http.MethodPost, Path: "/v1/batches/{id}/resume", ID: "resumeBatch", Tag: tagBatches, Scope: proto.ScopeExecute, Summary: "Go on with a paused batch", PathDoc: id,
			Responses: ok("The batch as it is now.", batch), Errors: one,
		},
		{
			Method: http.MethodPost, Path: "/v1/batches/{id}/cancel", ID: "cancelBatch", Tag: tagBatches, Scope: proto.ScopeExecute, Summary: "Cancel a batch", PathDoc: id,
			Doc: "All its items that have not ended are cancelled, running ones too.", Responses: ok("The batch as it is now.", stopping), Errors: one,
		},
		{
			Method: http.MethodPost, Path: "/v1/batches/{id}/retry", ID: "retryBatch", Tag: tagBatches, Scope: proto.ScopeExecute, Summary: "Run the failed items of a batch again", PathDoc: id,
			Doc:     "The batch must have ended. Each failed item becomes a new execution, which replaces its result.",
			Request: BatchRetryRequest{Cancelled: true}, OptionalBody: true, Responses: ok("The batch as it is now.", batch), Errors: one,
		},
		{
			Method: http.MethodGet, Path: "/v1/batches/{id}/results", ID: "getBatchResults", Tag: tagBatches, Scope: proto.ScopeRead, Summary: "Download the results of a batch", PathDoc: id,
			Doc: "A line for each item, by index. Without follow, the answer ends before the first item that has not ended. The batch is read to its end when the last line has the index counts.total - 1. " +
				"If the answer breaks off, go on with after set to the index of the last complete line. A retry changes lines that were read before.",
			Params: []Param{
				query("after", "The index of the last line that is not wanted.", object{"type": "integer", "minimum": 0, "maximum": proto.MaxBatchItems}),
				query("follow", "Wait for items that have not ended. Empty lines are sent meanwhile.", object{"type": "boolean", "default": false}),
			},
			Responses: []Response{{Status: http.StatusOK, Doc: "The results, see the schema BatchResult.", Text: map[string]string{typeNDJSON: exampleBatchResult}}},
			Errors:    []int{http.StatusNotFound},
		},
	}
}

func scheduleRoutes() []Route {
	whole := WholeSchedule{
		Schedule: Schedule{
			ID: "sch_abcdefghijklmnopqrstuvwxyz", Name: "nightly report", Cron: new("30 2 * * *"), TimeZone: "Europe/Berlin", Overlap: proto.OverlapSkip,
			Missed: proto.MissedLast, KeyID: "key_1", CreatedAt: Time{exampleTime()}, UpdatedAt: Time{exampleTime()}, Next: []Time{{exampleTime().Add(time.Hour)}},
		},
		Request: ExecuteRequest{Code: "echo report", Language: proto.Bash, Timeout: 60, MaxAttempts: 1},
		Runs:    []ScheduleRun{{Tick: Time{exampleTime()}, At: Time{exampleTime()}, Outcome: proto.RunStarted, TraceID: new(proto.TraceID(exampleTrace))}},
	}
	id := "The schedule's id."
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/schedules", ID: "createSchedule", Tag: tagSchedules, Scope: proto.ScopeExecute, Summary: "Create a schedule",
			Doc:       "The execution is checked as if it were submitted now. At most 10,000 schedules for each organisation.",
			Request:   ScheduleRequest{Name: new("nightly report"), Cron: new("30 2 * * *"), TimeZone: new("Europe/Berlin"), Request: &ExecuteRequest{Code: "echo report", Language: proto.Bash}},
			Responses: created("The schedule.", whole), Errors: []int{http.StatusForbidden, http.StatusTooManyRequests, http.StatusNotImplemented},
		},
		{
			Method: http.MethodGet, Path: "/v1/schedules", ID: "listSchedules", Tag: tagSchedules, Scope: proto.ScopeRead, Summary: "List schedules", Doc: "The schedules of the organisation, by id.",
			Params: paging(), Responses: ok("The schedules.", Schedules{Schedules: []Schedule{whole.Schedule}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/schedules/{id}", ID: "getSchedule", Tag: tagSchedules, Scope: proto.ScopeRead, Summary: "Show a schedule", PathDoc: id,
			Responses: ok("The schedule, what it executes, and its last ticks.", whole), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodPatch, Path: "/v1/schedules/{id}", ID: "patchSchedule", Tag: tagSchedules, Scope: proto.ScopeExecute, Summary: "Change, pause or resume a schedule", PathDoc: id,
			Doc:     "Absent fields stay. Ticks before the change that have not started are dropped.",
			Request: ScheduleRequest{Paused: new(true)}, Responses: ok("The schedule as it is now.", whole),
			Errors: []int{http.StatusForbidden, http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests, http.StatusNotImplemented},
		},
		{
			Method: http.MethodDelete, Path: "/v1/schedules/{id}", ID: "deleteSchedule", Tag: tagSchedules, Scope: proto.ScopeExecute, Summary: "Remove a schedule", PathDoc: id,
			Doc:       "Executions that have started go on.",
			Responses: empty("It is gone."), Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodPost, Path: "/v1/schedules/{id}/run", ID: "runSchedule", Tag: tagSchedules, Scope: proto.ScopeExecute, Summary: "Start an execution of a schedule now", PathDoc: id, Traced: true,
			Doc: "Also while it is paused, or its previous execution runs.",
			Responses: []Response{{
				Status: http.StatusAccepted, Doc: "Accepted, and durable.", Body: Accepted{exampleTrace, "running"}, Headers: map[string]string{"Location": "The path of the execution."},
			}},
			Errors: []int{http.StatusForbidden, http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests},
		},
	}
}

func threadRoutes() []Route {
	whole := WholeThread{
		Thread:   Thread{ID: "chat-1", Version: 1, Bytes: 4096, Files: 3, CreatedAt: Time{exampleTime()}, UsedAt: Time{exampleTime()}},
		Versions: []ThreadVersion{{1, Time{exampleTime()}, new(proto.TraceID(exampleTrace)), 4096, 3}},
		Staged:   []StagedFile{{"data/in.csv", 2048, Time{exampleTime()}}},
	}
	id := "The thread's id."
	return []Route{
		{
			Method: http.MethodGet, Path: "/v1/threads", ID: "listThreads", Tag: tagThreads, Scope: proto.ScopeRead, Summary: "List threads", Doc: "The threads of the organisation, by id.",
			Params: paging(), Responses: ok("The threads.", Threads{Threads: []Thread{whole.Thread}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/threads/{id}", ID: "getThread", Tag: tagThreads, Scope: proto.ScopeRead, Summary: "Show a thread", PathDoc: id,
			Responses: ok("The thread, its versions, and its uploaded files that are in no version yet.", whole), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodDelete, Path: "/v1/threads/{id}", ID: "deleteThread", Tag: tagThreads, Scope: proto.ScopeFiles, Summary: "Remove a thread", PathDoc: id,
			Doc:       "With all versions and uploaded files. 409 while an execution holds the thread.",
			Responses: empty("It is gone, and its id is free."), Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodPost, Path: "/v1/threads/{id}/fork", ID: "forkThread", Tag: tagThreads, Scope: proto.ScopeFiles, Summary: "Create a thread from a version of this one", PathDoc: id,
			Doc:     "Nothing is copied, so it takes no time and no space. Without a version, the new thread also gets the uploaded files that are in no version yet.",
			Request: ForkRequest{ID: "chat-1-again", Version: 1}, Responses: created("The new thread.", whole),
			Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodGet, Path: "/v1/threads/{id}/archive", ID: "archiveThread", Tag: tagThreads, Scope: proto.ScopeFiles, Summary: "Get a version of a thread's home as a tar", PathDoc: id,
			Doc:    "Without a version, the home as the next program finds it, with uploaded files that are in no version yet.",
			Params: []Param{query("version", "The number of a version; the newest without it.", object{"type": "integer", "minimum": 1, "maximum": MaxWhole})},
			Responses: []Response{{
				Status: http.StatusOK, Doc: "The archive. An answer that breaks off is incomplete.", Text: map[string]string{"application/x-tar": ""},
				Headers: map[string]string{"Content-Disposition": "attachment, with a file name."},
			}},
			Errors: []int{http.StatusNotFound, http.StatusTooManyRequests},
		},
	}
}

func fileRoutes() []Route {
	file := FileRequest{proto.SourceThread, "chat-1"}
	signed := SignedURL{
		URL: "https://bullpen.example.com/v1/files/content/YnVsbHBlbi4uLg.c2lnbmF0dXJl", Method: http.MethodPut,
		Headers: []Header{{"Content-Length", "2048"}}, ExpiresAt: Time{exampleTime().Add(15 * time.Minute)},
	}
	token := "The signed grant."
	headers := map[string]string{"Content-Disposition": "attachment, with the file's name.", "ETag": "Identifies the content.", "Accept-Ranges": "bytes"}
	partHeaders := maps.Clone(headers)
	partHeaders["Content-Range"] = "The position of the range in the file."
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/files/list", ID: "listFiles", Tag: tagFiles, Scope: proto.ScopeFiles, Summary: "List files",
			Doc: "One complete directory level, or everything below with recursive. The list of a file's path is that file; the list of a path without a " +
				"file, or of an unknown thread, is empty. The list shows the newest version, also while an execution runs, and later uploads. " +
				"Names that are not UTF-8 contain U+FFFD.",
			Request:   FileListRequest{FileRequest: file, Path: "data"},
			Responses: ok("The entries, by path.", Files{[]File{{"in.csv", "data/in.csv", 2048, Time{exampleTime()}, false}}}),
			Errors:    []int{http.StatusNotImplemented},
		},
		{
			Method: http.MethodPost, Path: "/v1/files/upload_url", ID: "fileUploadURL", Tag: tagFiles, Scope: proto.ScopeFiles, Summary: "Get a URL to upload a file to",
			Doc: "The file replaces whatever is at its path, also a directory with its content. Missing directories on its way are created, and replace " +
				"files and links. The file is in lists, downloads and the next execution from the moment the PUT is answered, also if the thread is new or " +
				"in use. The newest version of the home, the staged files in blocks of 4096 bytes, and the upload must fit into the home directory of " +
				"the API key's sandbox, in bytes and in files and directories; a 409 lists the sizes. An upload must begin within 15 minutes. The URL needs " +
				"no API key, but it ends when the key that asked for it is revoked.",
			Request: FileUploadRequest{FileRequest: file, Path: "data/in.csv", ContentLength: 2048}, Responses: ok("The URL, and the headers to send.", signed),
			Errors: []int{http.StatusConflict, http.StatusNotImplemented},
		},
		{
			Method: http.MethodPost, Path: "/v1/files/download_url", ID: "fileDownloadURL", Tag: tagFiles, Scope: proto.ScopeFiles, Summary: "Get a URL to download a file from",
			Doc: "The URL is valid for 15 minutes. It needs no API key, but it ends when the key that asked for it is revoked. It leads to the content at " +
				"the time of the download. Links are not followed.",
			Request:   FileDownloadRequest{FileRequest: file, Path: "data/out.csv"},
			Responses: ok("The URL.", SignedURL{signed.URL, http.MethodGet, []Header{}, signed.ExpiresAt}), Errors: []int{http.StatusNotFound, http.StatusNotImplemented},
		},
		{
			Method: http.MethodGet, Path: "/v1/files/content/{token}", ID: "getContent", Tag: tagFiles, Summary: "Download a file by a signed URL", PathDoc: token, Public: true,
			Doc: "A single range is supported, with If-Range and the ETag; several ranges at once are ignored.",
			Params: []Param{
				header("Range", "A range of bytes.", object{"type": "string", "examples": []string{"bytes=0-1023"}}),
				header("If-Range", "The ETag of the content that the range belongs to. The whole file is sent if it has another.", text()),
			},
			Responses: []Response{
				{Status: http.StatusOK, Doc: "The file.", Text: map[string]string{"application/octet-stream": ""}, Headers: headers},
				{Status: http.StatusPartialContent, Doc: "The range.", Text: map[string]string{"application/octet-stream": ""}, Headers: partHeaders},
			},
			Errors: []int{
				http.StatusBadRequest, http.StatusForbidden, http.StatusNotFound, http.StatusRequestedRangeNotSatisfiable, http.StatusTooManyRequests,
			},
		},
		{
			Method: http.MethodPut, Path: "/v1/files/content/{token}", ID: "putContent", Tag: tagFiles, Summary: "Upload a file by a signed URL", PathDoc: token, Public: true,
			Doc:    "The body may take any time in total, but must not stall for more than 30 seconds.",
			Upload: "application/octet-stream", UploadDoc: "As many bytes as the URL was made for.",
			Responses: ok("The file is stored.", Uploaded{"data/in.csv", 2048}),
			Errors:    []int{http.StatusForbidden, http.StatusConflict, http.StatusLengthRequired, http.StatusTooManyRequests},
		},
	}
}

func orgRoutes() []Route {
	org := Org{Name: "acme", Title: "Acme Inc.", Plan: "pro", CreatedAt: Time{exampleTime()}}
	wanted := OrgRequest{Name: "acme", Title: "Acme Inc.", Plan: "pro"}
	plan, _ := proto.PresetPlan("pro")
	orgName, planName := "The organisation's name.", "The plan's name."
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/admin/orgs", ID: "createOrg", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Create an organisation",
			Request: wanted, Responses: created("The organisation.", org), Errors: []int{http.StatusConflict}, Tagged: true,
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/orgs", ID: "listOrgs", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "List organisations",
			Responses: ok("All organisations by name for a global administrator, otherwise that of the API key.", Orgs{[]Org{org}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/orgs/{name}", ID: "getOrg", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "Look at an organisation", PathDoc: orgName,
			Responses: ok("The organisation.", org), Errors: []int{http.StatusBadRequest, http.StatusNotFound}, Tagged: true,
		},
		{
			Method: http.MethodPut, Path: "/v1/admin/orgs/{name}", ID: "replaceOrg", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Change an organisation", PathDoc: orgName,
			Doc:     "As a whole: absent fields get their defaults. A new plan applies to requests from then on.",
			Request: wanted, Responses: ok("The organisation as it is now.", org), Errors: []int{http.StatusNotFound, http.StatusConflict}, Tagged: true,
		},
		{
			Method: http.MethodPost, Path: "/v1/admin/plans", ID: "createPlan", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Create a plan",
			Request: PlanRequest{Plan: plan}, Responses: created("The plan, complete.", plan), Errors: []int{http.StatusConflict}, Tagged: true,
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/plans", ID: "listPlans", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "List plans",
			Responses: ok("The built-in plans, then the others by name.", Plans{[]proto.Plan{plan}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/plans/{name}", ID: "getPlan", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "Look at a plan", PathDoc: planName,
			Responses: ok("The plan, complete.", plan), Errors: []int{http.StatusBadRequest, http.StatusNotFound}, Tagged: true,
		},
		{
			Method: http.MethodPut, Path: "/v1/admin/plans/{name}", ID: "replacePlan", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Change a plan", PathDoc: planName,
			Doc:     "As a whole: absent fields get their defaults. It applies to requests from then on. A built-in plan can be changed, too.",
			Request: PlanRequest{Plan: plan}, Responses: ok("The plan as it is now.", plan), Errors: []int{http.StatusNotFound, http.StatusConflict}, Tagged: true,
		},
		{
			Method: http.MethodDelete, Path: "/v1/admin/plans/{name}", ID: "removePlan", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Remove a plan", PathDoc: planName,
			Doc:       "A built-in plan that was changed is as it was built in then; one that was not is a 404. 409 while an organisation or an API key that is not revoked has the plan.",
			Responses: ok("The plan as it was.", plan), Errors: []int{http.StatusBadRequest, http.StatusNotFound, http.StatusConflict}, Tagged: true,
		},
	}
}

func keyRoutes() []Route {
	key := Key{
		ID: "key_1", Name: "ci", Org: "acme", Scopes: proto.UserScopes(), Sandbox: proto.DefaultProfileName,
		Hint: "sk-local-AbC…wxyz", CreatedAt: Time{exampleTime()},
	}
	withSecret, revoked := key, key
	withSecret.Secret = "sk-local-AbCdEfGhIjKlMnOpQrStUvWxYz0123456789abcwxyz"
	revoked.RevokedAt = &Time{exampleTime().Add(time.Hour)}
	settings := KeySettings{Name: "ci", Scopes: proto.UserScopes()}
	keyID := "The key's id."
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/admin/keys", ID: "createKey", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "Create an API key",
			Doc:     "The administrator of an organisation creates keys of that organisation, bound to a sandbox profile that a key of the organisation has already.",
			Request: KeyRequest{Org: "acme", KeySettings: settings}, Responses: created("The key, shown once.", withSecret), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/keys", ID: "listKeys", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "List API keys",
			Params:    []Param{query("org", "The organisation. By default all for a global administrator, otherwise that of the API key.", text())},
			Responses: ok("The keys, the revoked ones included.", Keys{[]Key{key}}), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/keys/{id}", ID: "getKey", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "Look at an API key", PathDoc: keyID,
			Responses: ok("The key, without its secret.", key), Errors: []int{http.StatusNotFound}, Tagged: true,
		},
		{
			Method: http.MethodPut, Path: "/v1/admin/keys/{id}", ID: "replaceKey", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "Change an API key", PathDoc: keyID,
			Doc:     "As a whole: absent fields get their defaults. The organisation, the sandbox profile and the secret stay. It applies to requests from then on. 409 for a revoked key, and if no global administrator would be left.",
			Request: settings, Responses: ok("The key as it is now.", key), Errors: []int{http.StatusNotFound, http.StatusConflict}, Tagged: true,
		},
		{
			Method: http.MethodPost, Path: "/v1/admin/keys/{id}/rotate", ID: "rotateKey", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "Replace the secret of an API key", PathDoc: keyID,
			Doc:          "The previous secret works for the overlap, one before it no more. 409 for a revoked key, and for the server's first one.",
			OptionalBody: true, Request: KeyRotation{Overlap: new(proto.Seconds(time.Hour))}, Responses: ok("The key with its new secret, shown once.", withSecret), Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodDelete, Path: "/v1/admin/keys/{id}", ID: "revokeKey", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "Revoke an API key", PathDoc: keyID,
			Doc:       "409 for the last one of a global administrator.",
			Responses: ok("The key, revoked.", revoked), Errors: []int{http.StatusNotFound, http.StatusConflict}, Tagged: true,
		},
	}
}

func sandboxRoutes() []Route {
	profile := proto.DefaultProfile()
	profile.Name, profile.CPU, profile.Memory, profile.Pids = "web", 2, 512*proto.MiB, 128
	profile.Network = proto.Network{Policy: proto.NetworkAllowlist, Allow: []string{"pypi.org:443"}}
	profile.Env = map[string]string{"STAGE": "test"}
	profileName := "The profile's name."
	preloadError := "python3 cannot be a zygote: its stderr: ModuleNotFoundError: No module named 'nump'"
	image := Image{
		Name: "py-3.14", Digest: "sha256:adb423b46835f52cf4e01a0a8d8eea76f122296d8332f46d137e615c3cfd223c", Size: 77594624, UnpackedSize: 239075328,
		Languages: map[string]string{"bash": "/usr/bin/bash", "node": "/usr/local/bin/node", "python": "/usr/bin/python3"},
		Env:       map[string]string{"LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}, CreatedAt: Time{exampleTime()},
	}
	imageName := "The image's name."
	return []Route{
		{
			Method: http.MethodPost, Path: "/v1/admin/sandboxes", ID: "createSandbox", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Create a sandbox profile",
			Doc:     "Absent fields are as in the profile named default; the answer is complete.",
			Request: SandboxRequest{Profile: profile}, Responses: created("The profile, complete.", profile), Errors: []int{http.StatusConflict}, Tagged: true,
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/sandboxes", ID: "listSandboxes", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "List sandbox profiles",
			Responses: ok("All profiles by name, that named default first.", Sandboxes{[]proto.Profile{profile}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/sandboxes/{name}", ID: "getSandbox", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Look at a sandbox profile", PathDoc: profileName,
			Responses: ok("The profile, complete.", profile), Errors: []int{http.StatusNotFound}, Tagged: true,
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/sandboxes/{name}/preload", ID: "getSandboxPreload", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Look at the preloading of a profile", PathDoc: profileName,
			Responses: ok("Whether a worker failed to import the modules.", SandboxPreload{Error: &preloadError, At: &Time{exampleTime()}}), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodPut, Path: "/v1/admin/sandboxes/{name}", ID: "replaceSandbox", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Replace a sandbox profile", PathDoc: profileName,
			Doc:     "As a whole: absent fields are as in the profile named default. It applies to executions that are accepted from then on.",
			Request: SandboxRequest{Profile: profile}, Responses: ok("The profile as it is now.", profile), Errors: []int{http.StatusNotFound, http.StatusConflict}, Tagged: true,
		},
		{
			Method: http.MethodDelete, Path: "/v1/admin/sandboxes/{name}", ID: "removeSandbox", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Remove a sandbox profile", PathDoc: profileName,
			Doc:       "Refused while an API key that is not revoked is bound to it.",
			Responses: ok("The profile as it was.", profile), Errors: []int{http.StatusBadRequest, http.StatusNotFound, http.StatusConflict}, Tagged: true,
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/images", ID: "listImages", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "List sandbox images",
			Responses: ok("All images, by name.", Images{[]Image{image}}),
		},
		{
			Method: http.MethodPut, Path: "/v1/admin/images/{name}", ID: "putImage", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Store a sandbox image", PathDoc: imageName,
			Doc: "Stores an image that `bullpen image` packed under a name, and replaces the previous image of that name. The server reads and checks " +
				"the whole image, and finds its interpreters. An image without a name is kept until no accepted execution can need it.",
			Params: []Param{{
				Name: "digest", In: "query", Doc: "The SHA-256 of the body.", Required: true, schema: object{"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"},
			}},
			Upload: "application/zstd",
			UploadDoc: "The image: a tar in bullpen's normal form, compressed with zstd; at most 4 GiB, and 16 GiB and 1,000,000 entries unpacked. The " +
				"body may take any time in total, but must not stall for more than 30 seconds.",
			Responses: []Response{
				{Status: http.StatusOK, Doc: "The image, which replaced another of that name.", Body: image},
				{Status: http.StatusCreated, Doc: "The image, under a new name.", Body: image},
			},
			Errors: []int{http.StatusConflict},
		},
		{
			Method: http.MethodDelete, Path: "/v1/admin/images/{name}", ID: "removeImage", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Remove a sandbox image", PathDoc: imageName,
			Doc:       "409 while a sandbox profile names it.",
			Responses: ok("The image as it was.", image), Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
	}
}

func secretRoutes() []Route {
	secret := Secret{Org: "acme", Name: "TOKEN", Bytes: 40, Variable: true, CreatedAt: Time{exampleTime()}, UpdatedAt: Time{exampleTime()}}
	ofOrg := []Param{query("org", "The organisation. By default that of the API key.", text())}
	name := "The secret's name: 1 to 63 characters of A-Z, a-z, 0-9, _ and -, the first a letter."
	return []Route{{
		Method: http.MethodPut, Path: "/v1/admin/secrets/{name}", ID: "putSecret", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "Store a secret", PathDoc: name, Params: ofOrg,
		Doc:     "Replaces one of the same name. Executions that were accepted before keep the old value. The value is stored encrypted; no route returns it.",
		Request: SecretRequest{"the-value-itself"}, Responses: ok("The secret, without its value.", secret), Errors: []int{http.StatusConflict, http.StatusNotFound},
	}, {
		Method: http.MethodGet, Path: "/v1/admin/secrets", ID: "listSecrets", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "List secrets", Params: ofOrg,
		Responses: ok("The secrets of the organisation by name, without their values.", Secrets{[]Secret{secret}}), Errors: []int{http.StatusNotFound},
	}, {
		Method: http.MethodGet, Path: "/v1/admin/secrets/{name}", ID: "getSecret", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "Look at a secret", PathDoc: name, Params: ofOrg,
		Responses: ok("The secret, without its value.", secret), Errors: []int{http.StatusNotFound},
	}, {
		Method: http.MethodDelete, Path: "/v1/admin/secrets/{name}", ID: "deleteSecret", Tag: tagAdmin, Scope: proto.ScopeAdmin, Summary: "Remove a secret", PathDoc: name, Params: ofOrg,
		Doc:       "API keys and sandbox profiles that name it execute nothing until there is one again.",
		Responses: []Response{{Status: http.StatusNoContent, Doc: "Removed."}}, Errors: []int{http.StatusNotFound},
	}, {
		Method: http.MethodPost, Path: "/v1/admin/secrets/rotate-key", ID: "rotateSecretsKey", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Rotate the operator's key of secrets",
		Doc: "Wraps the key that encrypts all secrets again, with the keys that are in --secrets-key now, or by --secrets-command. The secrets stay " +
			"as they are. 409 if the server has no such key.",
		Responses: ok("The keys that it is wrapped for.", RotatedKey{"age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"}),
		Errors:    []int{http.StatusConflict},
	}}
}

func workerRoutes() []Route {
	worker := NewWorker(&proto.Worker{
		Name: "node-1-AbCdEfGh", Pool: proto.DefaultPool, Version: "v1.0.0", StartedAt: exampleTime(), Slots: 8, Running: 3,
		Capabilities: []string{"disk", "images", "language:bash", "language:python", "network", "threads"},
		Languages:    map[proto.Language]string{proto.Bash: "GNU bash, version 5.2.15", proto.Python: "Python 3.11.2"}, Images: 2, Threads: 40,
		Machine: proto.Machine{CPUs: 8, CPUsBusy: 2.5, Memory: 32 << 30, MemoryAvailable: 24 << 30},
	})
	draining := worker
	draining.Draining = true
	name := "The worker's name."
	pools := NewAutoscale([]proto.Pool{{
		Name: proto.DefaultPool, Capabilities: worker.Capabilities, WorkerSlots: 8, Workers: 2, Slots: 16, Queued: 120, Running: 16,
		MeanSeconds: 2.5, OldestWait: 12.4, Desired: &proto.DesiredWorkers{Workers: 5, Slots: 40, Reason: "demand"},
	}})
	return []Route{
		{
			Method: http.MethodGet, Path: "/v1/admin/autoscale", ID: "getAutoscale", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Show the demand for workers",
			Doc:       "The demand for the workers of each pool, and how many the autoscaler recommends. At most 32 pools.",
			Responses: ok("The pools, by name.", pools),
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/workers", ID: "listWorkers", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "List workers",
			Doc:       "The live ones, by name. A worker that has died stays in the list for six seconds.",
			Responses: ok("The workers.", Workers{[]Worker{worker}}),
		},
		{
			Method: http.MethodPost, Path: "/v1/admin/workers/{name}/drain", ID: "drainWorker", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Drain a worker", PathDoc: name,
			Doc:       "The worker finishes its executions and gets no others. It goes on running, and takes executions again after undrain or a restart.",
			Responses: ok("The worker, which gets no executions from now on.", draining), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodPost, Path: "/v1/admin/workers/{name}/undrain", ID: "undrainWorker", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "End the draining of a worker", PathDoc: name,
			Responses: ok("The worker, which gets executions again.", worker), Errors: []int{http.StatusNotFound},
		},
	}
}

func deadLetterRoutes() []Route {
	meta := proto.Meta{
		TraceID: exampleTrace, Org: "acme", Key: "key_AbCdEfGhIjKl", Language: proto.Python, Timeout: 60, Mode: proto.ModeAsync, MaxAttempts: 1,
		Metadata: map[string]string{"team": "blue"}, WebhookURL: exampleHook, Profile: proto.DefaultProfileName, RequestID: "req-1",
		CreatedAt: exampleTime().Add(-time.Minute),
	}
	letter := &proto.DeadLetter{
		ID: exampleTrace, Reason: proto.DeadWorkersLost, Message: "3 workers were lost with this job, each before it started the program.",
		At: exampleTime(), Meta: &meta, Attempt: 1, Workers: []string{"w1-1a2b", "w2-3c4d", "w3-5e6f"},
	}
	whole := NewWholeDeadLetter(letter, &proto.DeadContent{Job: &proto.Job{Meta: meta}})
	requeued := NewDeadLetter(letter)
	requeued.RequeuedAs, requeued.RequeuedAt = new(proto.TraceID("trc_UvWxYz0123456789abcd")), &Time{exampleTime().Add(time.Hour)}
	id := "The dead letter's id."
	return []Route{
		{
			Method: http.MethodGet, Path: "/v1/admin/dead-letters", ID: "listDeadLetters", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "List dead letters",
			Doc: "Jobs whose workers were all lost before they started the program, and messages that are no jobs, of all organisations; the newest " +
				"first. They are kept as long as records are.",
			Params: paging(), Responses: ok("The dead letters.", DeadLetters{DeadLetters: []DeadLetter{whole.DeadLetter}}),
		},
		{
			Method: http.MethodGet, Path: "/v1/admin/dead-letters/{id}", ID: "getDeadLetter", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Look at a dead letter", PathDoc: id,
			Doc:       "The program and the environment variables of a job are kept, but not shown. Of a malformed message the first 4,096 bytes are shown.",
			Responses: ok("The dead letter.", whole), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodDelete, Path: "/v1/admin/dead-letters/{id}", ID: "deleteDeadLetter", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Remove a dead letter", PathDoc: id,
			Doc:       "For good, with its job. The record of its execution stays.",
			Responses: empty("It is removed."), Errors: []int{http.StatusNotFound, http.StatusConflict},
		},
		{
			Method: http.MethodPost, Path: "/v1/admin/dead-letters/{id}/requeue", ID: "requeueDeadLetter", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Run the job of a dead letter again", PathDoc: id, Traced: true,
			Doc: "As a new execution, which the dead letter names from then on; the old execution stays as it ended. Program, variables, sandbox, thread, " +
				"metadata, webhook and mode stay; the limits of its API key's present plan apply. The new execution may be queued as long as an " +
				"async one. A repeated request gets the same answer and starts nothing, unless the new execution expired in the queue. A malformed " +
				"message cannot be requeued.",
			Responses: []Response{{
				Status: http.StatusAccepted, Doc: "Accepted, and durable.", Body: requeued, Headers: map[string]string{"Location": "The path of the execution."},
			}},
			Errors: []int{http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests},
		},
	}
}

func storeRoutes() []Route {
	return []Route{
		{
			Method: http.MethodGet, Path: "/v1/admin/backup", ID: "backup", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Back up the content of JetStream",
			Doc: "The server stays in operation. The backup has everything that was accepted before the request, and some of what is accepted meanwhile. " +
				"It contains secrets: the secrets of webhooks, the hashes of API keys, and the key that signs URLs of files. It does not contain the files of " +
				"threads. bullpen backup fetches it and checks that it is complete, bullpen restore restores it.",
			Responses: []Response{{
				Status: http.StatusOK, Doc: "The backup. An answer that breaks off is incomplete.", Text: map[string]string{"application/zstd": ""},
				Headers: map[string]string{"Content-Disposition": "attachment, with a file name."},
			}},
			Errors: []int{http.StatusTooManyRequests},
		},
		{
			Method: http.MethodPost, Path: "/v1/admin/threads/gc", ID: "collectThreads", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Remove garbage from the store of threads",
			Doc: "Blobs of all organisations that no version or uploaded file refers to and that are older than the safe age: a younger one may belong to an " +
				"execution or an upload that is not done. The server also collects garbage by itself now and then.",
			Request: CollectRequest{SafeAge: proto.Seconds(proto.DefaultSafeAge)}, OptionalBody: true,
			Responses: ok("What was removed.", proto.Collected{Layers: proto.Swept{Blobs: 3, Bytes: 4 << 20}, Manifests: proto.Swept{Blobs: 3, Bytes: 1200}}),
		},
		{
			Method: http.MethodPost, Path: "/v1/admin/threads/rebuild", ID: "rebuildThreads", Tag: tagAdmin, Scope: proto.ScopeAdmin, Global: true, Summary: "Rebuild threads from the store",
			Doc: "For all organisations, after the loss of JetStream's data. Existing threads stay as they are. Uploaded files that were in no version " +
				"are lost. No thread may be removed meanwhile.",
			Responses: ok("What was rebuilt.", proto.Rebuilt{Made: 12, Kept: 3}),
		},
	}
}

func serverRoutes() []Route {
	return []Route{
		{
			Method: http.MethodGet, Path: "/healthz", ID: "healthz", Tag: tagServer, Public: true, Summary: "Whether the process is alive",
			Responses: ok("It is alive.", Health{"ok"}),
		},
		{
			Method: http.MethodGet, Path: "/readyz", ID: "readyz", Tag: tagServer, Public: true, Summary: "Whether executions would run",
			Responses: []Response{
				{Status: http.StatusOK, Doc: "They would.", Body: Ready{"ready", 1}},
				{
					Status: http.StatusServiceUnavailable, Doc: "They would not; missing names the cause.",
					Body:    NotReady{CodeServiceUnavailable, "no worker is live", "worker"},
					Headers: map[string]string{"Retry-After": "Seconds."},
				},
			},
		},
		{
			Method: http.MethodGet, Path: "/metrics", ID: "metrics", Tag: tagServer, Public: true, Summary: "Metrics for Prometheus",
			Responses: []Response{{Status: http.StatusOK, Doc: "The metrics.", Text: map[string]string{"text/plain": "bullpen_slots 4\n"}}},
		},
		{
			Method: http.MethodGet, Path: "/openapi.json", ID: "openapi", Tag: tagServer, Public: true, Summary: "This document",
			Responses: []Response{{Status: http.StatusOK, Doc: "OpenAPI 3.1.", Text: map[string]string{typeJSON: ""}}},
		},
		{
			Method: http.MethodGet, Path: "/docs", ID: "docs", Tag: tagServer, Public: true, Summary: "This document, to read and to try",
			Responses: []Response{{Status: http.StatusOK, Doc: "A page.", Text: map[string]string{"text/html": "<!DOCTYPE html>"}}},
		},
	}
}
