package api

import (
	"net/http"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/bullpen-run/bullpen/proto"
)

const maxSandboxNameLen = 128 // characters

// SandboxRequest asks for a live sandbox.
type SandboxRequest struct {
	_ struct{} `doc:"null means absent."`

	Name        string            `json:"name,omitempty" maxLength:"128" doc:"For people."`
	Profile     string            `json:"profile,omitempty" pattern:"^([a-z0-9][a-z0-9._-]{0,62})?$" doc:"A sandbox profile that the API key allows; by default the key's own."`
	Timeout     int               `json:"timeout,omitempty" default:"300" minimum:"1" must:"be a whole number of seconds, at least 1" doc:"Seconds until the sandbox stops; it can be extended. Above the plan's maximum: 429."`
	IdleTimeout int               `json:"idle_timeout,omitempty" minimum:"1" maximum:"86400" must:"be a whole number of seconds, from 1 to 86400" doc:"Seconds without a request to the sandbox after which it stops; no limit if absent."`
	OnTimeout   proto.SandboxStop `json:"on_timeout,omitempty" default:"kill" doc:"What the end of a timeout leaves. kill: nothing. pause: the home, so that the sandbox can be resumed."`
	Env         map[string]string `json:"env_vars,omitempty" maxProperties:"50" keyPattern:"^[A-Z][A-Z0-9_]*$" keyMaxLength:"128" valueMaxLength:"4096" doc:"Variables of all processes: at most 65,536 bytes of names plus values. Some names are reserved."`
	Metadata    map[string]string `json:"metadata,omitempty" maxProperties:"10" keyPattern:"^[A-Za-z0-9][A-Za-z0-9_.-]*$" keyMaxLength:"40" valueMaxLength:"256" doc:"For filters and audit; processes do not see it."`
	ThreadID    string            `json:"thread_id,omitempty" format:"thread-id" doc:"The thread whose home directory the sandbox uses, and which it locks while it is active. By default the sandbox has a home of its own, which is removed with it."`
	SubPaths    []string          `json:"sub_paths,omitempty" maxItems:"10" valueMaxLength:"512" valuePattern:"^/data/[^/]+/[^/]" doc:"Narrows storage connections of the API key, as for an execution."`
}

// Validate checks what the tags cannot express.
func (r *SandboxRequest) Validate() error {
	if utf8.RuneCountInString(r.Name) > maxSandboxNameLen || strings.ContainsFunc(r.Name, unicode.IsControl) {
		return proto.FieldErrorf("name", "must be at most %d characters without control characters", maxSandboxNameLen)
	}
	return (&ExecuteRequest{
		Code: ":", Language: proto.Bash, Timeout: r.Timeout, Env: r.Env, Metadata: r.Metadata, ThreadID: r.ThreadID,
		SubPaths: r.SubPaths,
	}).Validate()
}

// SandboxTimeout asks for another timeout of a live sandbox.
type SandboxTimeout struct {
	_ struct{} `doc:"null means absent."`

	Timeout int `json:"timeout,omitempty" minimum:"1" must:"be a whole number of seconds, at least 1" doc:"Seconds from now until the sandbox stops; by default the timeout with which it was started last."`
}

// LiveSandbox is a live sandbox.
type LiveSandbox struct {
	ID          string               `json:"id" pattern:"^i[a-z2-7]{26}$"`
	Name        string               `json:"name"`
	State       proto.SandboxState   `json:"state" doc:"stopping: it was told to stop, and its home is being saved. ended: for good."`
	Reason      *proto.SandboxReason `json:"reason" doc:"Why it stopped last; else null."`
	Message     *string              `json:"message" doc:"The reason in words; else null."`
	Profile     string               `json:"profile" doc:"The sandbox profile that was asked for; empty for the API key's own."`
	KeyID       string               `json:"key_id" doc:"The API key under which it runs."`
	ThreadID    *string              `json:"thread_id" doc:"The thread that holds its home; null for a home of its own."`
	Metadata    map[string]string    `json:"metadata"`
	OnTimeout   proto.SandboxStop    `json:"on_timeout"`
	IdleTimeout *int                 `json:"idle_timeout" doc:"Seconds; null for no limit."`
	Starts      int                  `json:"starts" doc:"How often it was started: once, and again with each resume."`
	TraceID     proto.TraceID        `json:"trace_id" format:"trace-id" doc:"The execution of its last start, with its usage."`
	CreatedAt   Time                 `json:"created_at"`
	StartedAt   Time                 `json:"started_at" doc:"Of the last start."`
	ExpiresAt   Time                 `json:"expires_at" doc:"When its timeout passes, or passed."`
	StoppedAt   *Time                `json:"stopped_at" doc:"When it stopped last; null while it is active."`
	Acts        []SandboxAct         `json:"acts" doc:"Who created, extended, paused, resumed and deleted it: the first act and the last 19. Consecutive extensions by one key are one act. Stops that no client requested are only in reason."`
}

// SandboxSave is a save of a running sandbox.
type SandboxSave struct {
	Version int64 `json:"version" minimum:"0" doc:"The number of the newest version of the home's thread, which has the files; 0 if the home was never changed."`
}

// SandboxAct is a client's action on a live sandbox.
type SandboxAct struct {
	Act       proto.SandboxActName `json:"act"`
	KeyID     string               `json:"key_id" doc:"The API key or the member."`
	RequestID string               `json:"request_id" doc:"As in the response header X-Request-Id and in the server's log."`
	At        Time                 `json:"at"`
}

// LiveSandboxes is a page of live sandboxes.
type LiveSandboxes struct {
	Sandboxes  []LiveSandbox `json:"sandboxes"`
	NextCursor *string       `json:"next_cursor" doc:"The cursor of the next request; null on the last page."`
}

// SandboxLogs is what the processes of a live sandbox have printed.
type SandboxLogs struct {
	TraceID   proto.TraceID     `json:"trace_id" format:"trace-id" doc:"The execution of the sandbox's last start, whose logs these are."`
	Entries   []SandboxLogEntry `json:"entries" doc:"In the order in which the sandbox's guest read them."`
	Truncated bool              `json:"truncated" doc:"Whether entries are missing."`
}

// SandboxLogEntry is an event of a process, or a gap.
type SandboxLogEntry struct {
	Time     Time   `json:"time"`
	Type     string `json:"type" doc:"start, output and end are events of a process that a client has started. dropped: the guest did not write some entries in time. truncated: the log has reached its limit and ends."`
	PID      int    `json:"pid,omitempty" doc:"Of the process."`
	User     string `json:"user,omitempty" doc:"Of start."`
	Command  string `json:"command,omitempty" doc:"Of start, the first 1,024 bytes."`
	Stream   string `json:"stream,omitempty" doc:"Of output: stdout, stderr or terminal."`
	Text     string `json:"text,omitempty" doc:"Of output: lines that were written at once, or a part of a long line. The values of secrets are masked. Bytes that are not UTF-8 are U+FFFD."`
	ExitCode *int   `json:"exit_code,omitempty" doc:"Of end; -1 after a signal."`
	Count    int    `json:"count,omitempty" doc:"Of dropped: how many entries."`
}

// NewLiveSandbox returns the form of a live sandbox.
func NewLiveSandbox(s *proto.LiveSandbox) LiveSandbox {
	form := LiveSandbox{
		ID: s.ID, Name: s.Name, State: s.State, Reason: optional(s.Reason), Message: optional(s.Message),
		Profile: s.Profile, KeyID: s.Key, Metadata: s.Metadata, OnTimeout: s.OnTimeout,
		IdleTimeout: optional(int(time.Duration(s.IdleTimeout).Seconds())), Starts: s.Starts, TraceID: s.Execution,
		CreatedAt: Time{s.CreatedAt}, StartedAt: Time{s.StartedAt}, ExpiresAt: Time{s.ExpiresAt},
	}
	form.ThreadID = optional(proto.UserThread(s.ThreadID))
	if form.Metadata == nil {
		form.Metadata = map[string]string{}
	}
	form.Acts = make([]SandboxAct, len(s.Acts))
	for i, a := range s.Acts {
		form.Acts[i] = SandboxAct{Act: a.Act, KeyID: a.Key, RequestID: a.RequestID, At: Time{a.At}}
	}
	if !s.StoppedAt.IsZero() {
		form.StoppedAt = &Time{s.StoppedAt}
	}
	return form
}

func sandboxRoutes() []Route {
	const example = "iabcdefghijklmnopqrstuvwxyz"
	sandbox := LiveSandbox{
		ID: example, Name: "build", State: proto.SandboxRunning, KeyID: "key_1",
		Metadata: map[string]string{"user": "7"}, OnTimeout: proto.SandboxPause, IdleTimeout: new(600), Starts: 1,
		TraceID: exampleTrace, CreatedAt: Time{exampleTime()}, StartedAt: Time{exampleTime()},
		ExpiresAt: Time{exampleTime().Add(time.Hour)},
		Acts: []SandboxAct{{
			Act: proto.SandboxCreateAct, KeyID: "key_1", RequestID: "req_1", At: Time{exampleTime()},
		}},
	}
	paused := sandbox
	paused.State, paused.Reason = proto.SandboxPaused, new(proto.SandboxPausedByUser)
	paused.StoppedAt = &Time{exampleTime()}
	const path, id = "/v1/sandboxes/{id}", "The sandbox's id."
	notActive := []int{http.StatusNotFound, http.StatusConflict}
	starts := []int{
		http.StatusForbidden, http.StatusNotFound, http.StatusConflict, http.StatusTooManyRequests,
		http.StatusNotImplemented, http.StatusGatewayTimeout,
	}
	routes := []Route{
		{
			Method: http.MethodPost, Path: "/v1/sandboxes", ID: "createSandbox", Scope: proto.ScopeExecute, Starts: true,
			Summary: "Create a sandbox and start it", Traced: true,
			Doc:       "Answers when processes can be started in it.",
			Request:   SandboxRequest{Name: "build", Timeout: 3600, IdleTimeout: 600, OnTimeout: proto.SandboxPause},
			Responses: created("The sandbox.", sandbox), Errors: starts,
		},
		{
			Method: http.MethodGet, Path: "/v1/sandboxes", ID: "listSandboxes", Scope: proto.ScopeRead,
			Summary: "List sandboxes", Doc: "The sandboxes of the organisation, the newest first.",
			Params: append(paging(),
				query("state", "Only sandboxes in this state.", object{"type": "string", "enum": texts(proto.SandboxStates())}),
				query("name", "Only sandboxes of this name.", text())),
			Responses: ok("The sandboxes.", LiveSandboxes{Sandboxes: []LiveSandbox{sandbox}}),
		},
		{
			Method: http.MethodGet, Path: path, ID: "getSandbox", Scope: proto.ScopeRead, Summary: "Show a sandbox",
			Responses: ok("The sandbox.", sandbox), Errors: []int{http.StatusNotFound},
		},
		{
			Method: http.MethodPost, Path: path + "/extend", ID: "extendSandbox", Scope: proto.ScopeExecute,
			Summary: "Set when a running sandbox expires", Request: SandboxTimeout{Timeout: 3600}, OptionalBody: true,
			Responses: ok("The sandbox.", sandbox),
			Errors:    append([]int{http.StatusForbidden, http.StatusTooManyRequests}, notActive...),
		},
		{
			Method: http.MethodPost, Path: path + "/pause", ID: "pauseSandbox", Scope: proto.ScopeExecute,
			Summary: "Stop a sandbox and keep its home", Doc: "Its processes get SIGTERM, and are killed after 5 seconds. " +
				"Answers when the home is saved. Memory is not kept.",
			Responses: ok("The sandbox.", paused), Errors: append([]int{http.StatusGatewayTimeout}, notActive...),
		},
		{
			Method: http.MethodPost, Path: path + "/save", ID: "saveSandbox", Scope: proto.ScopeExecute,
			Summary: "Save the home of a running sandbox",
			Doc: "Stores the files of the home, and no processes: a resume starts with them if the worker is lost. " +
				"The processes stand still for a moment, at most 2 seconds, so that files that belong together fit together, " +
				"and then run on. If nothing has changed, the version stays. 409 says why a home was not saved.",
			Responses: ok("The save.", SandboxSave{Version: 4}),
			Errors:    append([]int{http.StatusGatewayTimeout}, notActive...),
		},
		{
			Method: http.MethodPost, Path: path + "/resume", ID: "resumeSandbox", Scope: proto.ScopeExecute, Starts: true,
			Summary: "Start a paused sandbox again", Request: SandboxTimeout{Timeout: 3600}, OptionalBody: true, Traced: true,
			Doc:       "It starts with its home as it was saved, perhaps on another worker.",
			Responses: ok("The sandbox.", sandbox), Errors: starts,
		},
		{
			Method: http.MethodDelete, Path: path, ID: "deleteSandbox", Scope: proto.ScopeExecute,
			Summary: "End a sandbox for good", Doc: "The thread of its home is removed if it was created for the sandbox. " +
				"The sandbox stays in lists, as ended, for a day.",
			Responses: ok("The sandbox.", sandbox), Errors: append([]int{http.StatusGatewayTimeout}, notActive...),
		},
	}
	logs := SandboxLogs{TraceID: exampleTrace, Entries: []SandboxLogEntry{
		{Time: Time{exampleTime()}, Type: "start", PID: 7, User: "user", Command: "echo hello"},
		{Time: Time{exampleTime()}, Type: "output", PID: 7, Stream: "stdout", Text: "hello\n"},
		{Time: Time{exampleTime()}, Type: "end", PID: 7, ExitCode: new(0)},
	}}
	routes = append(routes, Route{
		Method: http.MethodGet, Path: path + "/logs", ID: "readSandboxLogs", Scope: proto.ScopeExecute,
		Summary: "Read what the processes of a sandbox have printed",
		Doc: "Since its last start; also when it has stopped, for as long as results are kept. A log has the first " +
			"4 MiB, with its form, or less if the profile limits output to less.",
		Responses: ok("The log.", logs), Errors: []int{http.StatusNotFound},
	})
	const guest = path + "/guest"
	call := "The guest is the program in a sandbox that starts processes and handles files. It speaks the protocol of " +
		"E2B's daemon by Connect (connectrpc.com): the services are process.Process and filesystem.Filesystem. "
	user := Param{Name: "Bullpen-User", In: "header", Doc: "The user as whom to act; user by default.", schema: text()}
	answers := []Response{{Status: http.StatusOK, Doc: "What the guest answers, with its status."}}
	routes = append(routes,
		Route{
			Method: http.MethodPost, Path: guest + "/{service}/{method}", ID: "callGuest", Scope: proto.ScopeExecute,
			Summary: "Call a method of a sandbox's guest", Doc: call, Params: []Param{user},
			Upload: "application/json", UploadDoc: "A message, or a stream of messages.", Responses: answers, Errors: notActive,
		},
		Route{
			Method: http.MethodGet, Path: guest + "/{name}", ID: "readGuest", Scope: proto.ScopeExecute,
			Summary: "Read a file of a sandbox, its variables or its metrics", Params: []Param{user},
			Doc: "The names are files (with path=), envs, metrics and health.", Responses: answers, Errors: notActive,
		},
		Route{
			Method: http.MethodPost, Path: guest + "/{name}", ID: "writeGuest", Scope: proto.ScopeExecute,
			Summary: "Write a file of a sandbox", Params: []Param{user}, Doc: "The name is files (with path=).",
			Upload: "application/octet-stream", UploadDoc: "The content.", Responses: answers, Errors: notActive,
		},
	)
	for i := range routes {
		routes[i].Tag = tagSandboxes
		if strings.Contains(routes[i].Path, "{id}") {
			routes[i].PathDoc = id
		}
	}
	return routes
}
