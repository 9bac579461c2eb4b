package api

import (
	"encoding/json"
	"net/http"

	"github.com/bullpen-run/bullpen/proto"
)

// ContextRequest asks for a context in a live sandbox.
type ContextRequest struct {
	_ struct{} `doc:"null means absent."`

	Language string `json:"language,omitempty" default:"python" enum:"python,javascript,typescript,bash" doc:"TypeScript needs an image with Node 22.13 or newer."`
	Dir      string `json:"cwd,omitempty" doc:"The directory in which its interpreter starts; the home by default."`
}

// Context is an interpreter in a live sandbox that keeps its state between cells.
type Context struct {
	ID          string `json:"id"`
	Language    string `json:"language"`
	Dir         string `json:"cwd"`
	State       string `json:"state" doc:"starting, idle, running or lost: its interpreter has ended, with all its memory."`
	Reason      string `json:"reason,omitempty" doc:"Of a lost context: exited, killed, not_interruptible or sandbox_stopping."`
	Message     string `json:"message,omitempty" doc:"The reason in words."`
	CreatedAt   Time   `json:"created_at"`
	StartedAt   *Time  `json:"started_at,omitempty" doc:"When its interpreter started."`
	AgeMS       int64  `json:"age_ms" doc:"How long its interpreter has run."`
	Runs        int64  `json:"runs" doc:"How many cells its interpreter has run."`
	Queued      int    `json:"queued" doc:"How many cells wait for the one that runs."`
	Memory      int64  `json:"memory,omitempty" doc:"Bytes that it had for itself after the last cell; absent if that is not known."`
	Version     string `json:"version,omitempty" doc:"Of the language."`
	Interpreter string `json:"interpreter,omitempty" doc:"What runs the cells, such as IPython 9.8.0."`
}

// Contexts are the contexts of a live sandbox.
type Contexts struct {
	Contexts []Context `json:"contexts" doc:"In the order of their creation."`
}

// CellRequest asks for the run of a cell.
type CellRequest struct {
	_ struct{} `doc:"null means absent."`

	Code             string            `json:"code" minLength:"1" maxLength:"1048576" doc:"At most 1 MiB."`
	Env              map[string]string `json:"env_vars,omitempty" maxProperties:"50" keyPattern:"^[A-Za-z_][A-Za-z0-9_]*$" keyMaxLength:"128" valueMaxLength:"4096" doc:"Variables of this run. Afterwards they have their former values."`
	Timeout          int               `json:"timeout,omitempty" minimum:"1" maximum:"604800" must:"be a whole number of seconds, from 1 to 604800" doc:"Seconds after which the cell is interrupted; by default it may run as long as the sandbox."`
	Call             string            `json:"call,omitempty" maxLength:"128" doc:"Names the run. A request that repeats the name of one of the context's last 32 runs gets the events of that run, and runs nothing."`
	InterruptOnClose bool              `json:"interrupt_on_close,omitempty" doc:"Interrupt the cell when this request's connection is closed. By default it runs on, and its events can be read from its run."`
}

// Display is something to look at: a value, a picture, a table.
type Display = proto.Display

// CellError is why a cell failed.
type CellError struct {
	Name      string   `json:"name" doc:"Such as ZeroDivisionError."`
	Value     string   `json:"value"`
	Traceback []string `json:"traceback"`
}

// CellFile is a file that a cell has created or changed.
type CellFile struct {
	Path string `json:"path" doc:"Relative to the directory in which the interpreter has started, or absolute outside of it."`
	Size int64  `json:"size" doc:"Bytes."`
}

// CellResult is the result of the run of a cell.
type CellResult struct {
	Run             int64      `json:"run" doc:"The number of the run in its context."`
	Status          string     `json:"status" doc:"ok; error: the cell failed; interrupted; timeout: it was interrupted by its timeout; lost: the interpreter has ended, and message says why."`
	Message         string     `json:"message,omitempty"`
	Stdout          string     `json:"stdout"`
	Stderr          string     `json:"stderr"`
	StdoutTruncated bool       `json:"stdout_truncated" doc:"There was more than 1 MiB, or the answer was read too slowly. All of it is in the stream of events."`
	StderrTruncated bool       `json:"stderr_truncated"`
	Results         []Display  `json:"results" doc:"What the cell has shown, in order. At most 100 with 4 MiB together."`
	Dropped         int        `json:"dropped,omitempty" doc:"How many were beyond the limit."`
	Error           *CellError `json:"error"`
	Count           int64      `json:"count" doc:"How many cells the interpreter has run, with this one."`
	Memory          int64      `json:"memory,omitempty" doc:"Bytes that the interpreter has for itself."`
	Files           []CellFile `json:"files,omitempty" doc:"Files that the cell has created or changed directly in its working directory; at most 100."`
}

// ContextInterrupt answers an interrupt.
type ContextInterrupt struct {
	Interrupted bool `json:"interrupted" doc:"false: no cell was running."`
}

func contextRoutes() []Route {
	const (
		path    = "/v1/sandboxes/{id}/contexts"
		one     = path + "/{context}"
		pathDoc = "The sandbox's id, the context's id, the number of a run."
	)
	example := Context{
		ID: "python-1-mfrggzdfmztwq2lk", Language: "python", Dir: proto.SandboxHome, State: "idle",
		CreatedAt: Time{exampleTime()}, StartedAt: &Time{exampleTime()}, AgeMS: 1200, Runs: 2, Memory: 9 << 20,
		Version: "3.13.9", Interpreter: "IPython 9.8.0",
	}
	result := CellResult{
		Run: 2, Status: "ok", Stdout: "hello\n", Count: 2, Memory: 9 << 20,
		Results: []Display{{Data: map[string]json.RawMessage{"text/plain": json.RawMessage(`"42"`)}, Result: true}},
	}
	const lines = `{"type":"start","seq":1,"run":2,"at":"2026-07-26T12:00:00Z"}` + "\n" +
		`{"type":"stdout","seq":2,"text":"hello\n"}` + "\n" +
		`{"type":"display","seq":3,"data":{"text/plain":"42"},"result":true}` + "\n" +
		`{"type":"end","seq":4,"status":"ok","count":2}` + "\n"
	const server = "id: 1\ndata: {\"type\":\"start\",\"seq\":1,\"run\":2,\"at\":\"2026-07-26T12:00:00Z\"}\n\n" +
		"id: 2\ndata: {\"type\":\"end\",\"seq\":2,\"status\":\"ok\",\"count\":2}\n\n"
	stream := map[string]string{typeNDJSON: lines, typeSSE: server}
	const events = "Events are start, stdout and stderr (with text), display (a Display), error (a CellError), end (as " +
		"in the result), and gap for events that are no longer kept. They are numbered by seq. "
	errors := []int{http.StatusNotFound, http.StatusConflict}
	lost := append([]int{http.StatusGone, http.StatusTooManyRequests}, errors...)
	routes := []Route{
		{
			Method: http.MethodPost, Path: path, ID: "createContext", Summary: "Start an interpreter that keeps its state",
			Request: ContextRequest{Language: "python"}, OptionalBody: true, Responses: created("The context.", example),
			Errors: append([]int{http.StatusTooManyRequests, http.StatusServiceUnavailable}, errors...),
		},
		{
			Method: http.MethodGet, Path: path, ID: "listContexts", Summary: "List the contexts of a sandbox",
			Responses: ok("The contexts.", Contexts{[]Context{example}}), Errors: errors,
		},
		{
			Method: http.MethodGet, Path: one, ID: "getContext", Summary: "Show a context",
			Responses: ok("The context.", example), Errors: append([]int{http.StatusGone}, errors...),
		},
		{
			Method: http.MethodPost, Path: one + "/execute", ID: "executeCell", Summary: "Run a cell in a context",
			Doc: "Inline by default: the answer is the result. With Accept: application/x-ndjson or text/event-stream the " +
				"answer is the stream of events. " + events + "The cells of a context run one after another. 410 if the memory " +
				"of the context is gone: restart it.",
			Params: []Param{header("Accept", "application/json (inline), application/x-ndjson or text/event-stream (streaming).",
				object{"type": "string", "default": typeJSON})},
			Request: CellRequest{Code: "print('hello')\nx + 1"},
			Responses: []Response{{
				Status: http.StatusOK, Doc: "The result, or the stream of events. In an event stream the id is the seq.",
				Body: result, Text: stream,
			}},
			Errors: lost,
		},
		{
			Method: http.MethodGet, Path: one + "/runs/{run}", ID: "readRun", Summary: "Read the events of a run",
			Doc: "The events with a higher seq, then live ones, up to end. " + events +
				"The events of the last 32 runs of a context are kept, up to 12 MiB for a sandbox.",
			Params: []Param{
				query("after_seq", "The seq of the last event that the client has.",
					object{"type": "integer", "minimum": 0, "maximum": MaxWhole, "default": 0}),
				header("Accept", "application/x-ndjson or text/event-stream.", object{"type": "string", "default": typeNDJSON}),
				header("Last-Event-ID", "For event streams; has precedence over after_seq.",
					object{"type": "integer", "minimum": 0, "maximum": MaxWhole}),
			},
			Responses: []Response{{Status: http.StatusOK, Doc: "The events.", Text: stream}},
			Errors:    append([]int{http.StatusGone}, errors...),
		},
		{
			Method: http.MethodPost, Path: one + "/interrupt", ID: "interruptContext", Summary: "Interrupt the cell that runs",
			Doc:       "By SIGINT; the state is kept. A cell that has not ended after 5 seconds costs the context its memory.",
			Responses: ok("Whether a cell was running.", ContextInterrupt{true}),
			Errors:    append([]int{http.StatusGone}, errors...),
		},
		{
			Method: http.MethodPost, Path: one + "/restart", ID: "restartContext",
			Summary: "Start the interpreter of a context again",
			Doc: "Without its variables, with the files of the home. Also for a context whose sandbox was paused and resumed " +
				"since.",
			Responses: ok("The context.", example), Errors: append([]int{http.StatusServiceUnavailable}, errors...),
		},
		{
			Method: http.MethodDelete, Path: one, ID: "deleteContext", Summary: "End a context",
			Doc:       "Its exit handlers run, unless a cell runs.",
			Responses: []Response{{Status: http.StatusNoContent, Doc: "It has ended."}},
			Errors:    append([]int{http.StatusGone}, errors...),
		},
	}
	for i := range routes {
		routes[i].Scope, routes[i].Tag, routes[i].PathDoc = proto.ScopeExecute, tagSandboxes, pathDoc
	}
	return routes
}
