// Package mcp serves the tools of the Model Context Protocol over Streamable HTTP. It only knows
// the protocol: the gateway authenticates requests, runs programs and reads files.
//
// The server is stateless: any gateway can serve any request. In protocol versions before
// 2026-07-28 a client cancels a call with another request, which contains the call's id. The answer
// to initialize therefore has a session id, which is not stored anywhere: the gateway derives the
// trace id of an execution from the API key, the session id and the call's id. In later versions a
// client cancels a call by closing its connection.
package mcp

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	sessionHeader = "Mcp-Session-Id"
	versionHeader = "Mcp-Protocol-Version"
	// connectionVersion is the first version of the protocol in which a client cancels a call by
	// closing its connection.
	connectionVersion = "2026-07-28"
	// maxSession and maxID are the maximum sizes in bytes of session ids and call ids for calls
	// that a request can cancel.
	maxSession, maxID = 128, 128

	instructions = "Run programs in isolated sandboxes. Give the same thread_id to calls that need the files of " +
		"earlier calls, or with context_execute their variables."
)

// Sandbox carries out the tools. ctx is the context of the call; the HTTP request that it belongs
// to is [Call.HTTP].
type Sandbox interface {
	// Authorize returns an error unless the API key of a call may use a tool.
	Authorize(call *Call, t *api.Tool) error
	// Execute runs a program and returns its result.
	Execute(ctx context.Context, call *Call, req *api.ExecuteRequest) (*api.ToolResult, error)
	// RunCell runs code in an interpreter that keeps its state. It returns the pictures that the code has shown apart.
	RunCell(ctx context.Context, call *Call, req *api.ContextExecuteRequest) (*api.ToolCell, []api.Picture, error)
	// Cancel ends the execution of an earlier call, if it has one that has not ended.
	Cancel(ctx context.Context, call *Call) error
	ListFiles(ctx context.Context, call *Call, req *api.FileListRequest) (*api.ToolFiles, error)
	UploadURL(ctx context.Context, call *Call, req *api.FileUploadRequest) (*api.SignedURL, error)
	DownloadURL(ctx context.Context, call *Call, req *api.FileDownloadRequest) (*api.SignedURL, error)
	// PublicError returns the error that the client sees. It logs the others.
	PublicError(call *Call, err error) *api.Error
}

// Call is a call of a tool.
type Call struct {
	HTTP *http.Request
	// Name identifies the call among all calls of its API key, for [Sandbox.Cancel]. It is empty if
	// the call cannot be named.
	Name string
	// Connected reports that the call is cancelled if the HTTP request ends before its answer.
	Connected bool
	// Progress, if not nil, reports that the call is still running. It returns [context.Canceled]
	// if the client has left.
	Progress func(message string) error

	decoded func() // see [Handler.Serve]
}

// Handler serves the protocol.
type Handler struct {
	sandbox Sandbox
	http    http.Handler
	calls   sync.Map // the IDs of calls that can be cancelled, by the name of the call
}

// NewHandler returns a handler for POST requests. version is the version of the program.
func NewHandler(version string, sandbox Sandbox) *Handler {
	server := sdk.NewServer(&sdk.Implementation{Name: "bullpen", Version: version}, &sdk.ServerOptions{
		Instructions: instructions, Capabilities: &sdk.ServerCapabilities{Tools: &sdk.ToolCapabilities{}},
	})
	h := &Handler{sandbox: sandbox}
	tools := api.Tools()
	for i := range tools {
		t := &tools[i]
		switch t.Name {
		case api.ToolExecute:
			add(h, server, t, sandbox.Execute)
		case api.ToolContext:
			addTool(h, server, t, func(ctx context.Context, call *Call, req *api.ContextExecuteRequest) (*answer, error) {
				return runCell(ctx, sandbox, call, req)
			})
		case api.ToolList:
			add(h, server, t, sandbox.ListFiles)
		case api.ToolUpload:
			add(h, server, t, sandbox.UploadURL)
		case api.ToolDownload:
			add(h, server, t, sandbox.DownloadURL)
		}
	}
	server.AddReceivingMiddleware(refuseListen)
	h.http = sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server { return server }, &sdk.StreamableHTTPOptions{
		Stateless: true, PropagateRequestCancellation: true,
		DisableLocalhostProtection: true, // the gateway checks the origin, also behind a proxy on this machine
		MaxRequestBodyBytes:        -1,   // the body was read
	})
	return h
}

// refuseListen refuses subscriptions: nothing here changes, and their connections would stay open.
func refuseListen(next sdk.MethodHandler) sdk.MethodHandler {
	return func(ctx context.Context, method string, req sdk.Request) (sdk.Result, error) {
		if method == "subscriptions/listen" {
			return nil, &jsonrpc.Error{Code: jsonrpc.CodeMethodNotFound, Message: "this server has no subscriptions"}
		}
		return next(ctx, method, req)
	}
}

// message is the part of a JSON-RPC message that is read before it is handled.
type message struct {
	Method string          `json:"method"`
	ID     json.RawMessage `json:"id"`
	Params struct {
		Name      string          `json:"name"`
		RequestID json.RawMessage `json:"requestId"`
	} `json:"params"`
}

type callKey struct{}

// Check returns an [*api.Error] if a request violates the transport's rules.
func Check(r *http.Request) error {
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return api.Errorf(api.CodeUnsupportedMedia,
			"the body must be a JSON-RPC message: send Content-Type: application/json")
	}
	accepts := strings.Join(r.Header.Values("Accept"), ",")
	for _, kind := range []string{"application/json", "text/event-stream"} {
		major, _, _ := strings.Cut(kind, "/")
		if !strings.Contains(accepts, kind) && !strings.Contains(accepts, major+"/*") && !strings.Contains(accepts, "*/*") {
			return api.Errorf(api.CodeValidation, "Accept must have application/json and text/event-stream")
		}
	}
	return nil
}

// Serve answers a request with that body, or returns an error if it has not answered. It calls
// decoded once the body needs no more processor time: at the latest before a tool begins, and
// before the first byte of the answer.
func (h *Handler) Serve(w http.ResponseWriter, r *http.Request, body []byte, decoded func()) error {
	if bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("[")) {
		return api.Errorf(api.CodeValidation, "the body must be one JSON-RPC message; batches are not supported")
	}
	var m message
	_ = json.Unmarshal(body, &m) // the SDK answers what is malformed
	version := r.Header.Get(versionHeader)
	if version <= connectionVersion { // its own, or one that the SDK refuses by itself
		version = ""
	}
	ids := &IDs{}
	hidden, err := ids.Hide(body, version)
	if err != nil {
		decoded()
		writeInvalid(w)
		return nil
	}
	session := r.Header.Get(sessionHeader)
	call := &Call{HTTP: r, Name: callName(session, m.ID), Connected: Connected(r), decoded: decoded}
	switch m.Method {
	case "initialize":
		w.Header().Set(sessionHeader, rand.Text())
	case "notifications/cancelled":
		if call.Name = callName(session, m.Params.RequestID); call.Name != "" {
			if running, ok := h.calls.Load(callKeyOf(r, call.Name)); ok {
				running.(*IDs).Cancel(compactID(m.Params.RequestID)) //nolint:forcetypeassert // nothing else is stored
			}
			decoded()
			if err := h.sandbox.Cancel(r.Context(), call); err != nil {
				return fmt.Errorf("cancel a call: %w", err)
			}
		}
	default:
		if call.Name != "" {
			name := callKeyOf(r, call.Name)
			h.calls.Store(name, ids)
			defer h.calls.CompareAndDelete(name, ids)
		}
	}
	r = r.WithContext(context.WithValue(r.Context(), callKey{}, call))
	if version != "" && !slices.Contains(sdk.SupportedProtocolVersions(), version) {
		// The SDK checks the version last, and would first refuse headers that clients of that
		// version may lack.
		r.Header = r.Header.Clone()
		r.Header.Set("Mcp-Method", m.Method)
		r.Header.Set("Mcp-Name", m.Params.Name)
	}
	r.Body = io.NopCloser(bytes.NewReader(hidden))
	answer := &responseWriter{ResponseWriter: w, connection: w.Header().Values("Connection"), ids: ids, decoded: decoded}
	h.http.ServeHTTP(answer, r)
	if answer.text != nil {
		return api.Errorf(api.CodeValidation, "%s", bytes.TrimSpace(answer.text.Bytes()))
	}
	return nil
}

// writeInvalid answers a request with an invalid id.
func writeInvalid(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadRequest)
	_, _ = w.Write(InvalidResponse()) // the client may be gone
}

// callKeyOf returns a call's key among all clients of this process; a call's name is only unique
// within an API key.
func callKeyOf(r *http.Request, name string) [sha256.Size]byte {
	return sha256.Sum256([]byte(r.Header.Get("Authorization") + "\n" + name))
}

// compactID returns an id as [IDs] has it.
func compactID(id json.RawMessage) json.RawMessage {
	var compact bytes.Buffer
	if json.Compact(&compact, id) != nil {
		return id
	}
	return compact.Bytes()
}

// responseWriter holds back plain-text errors, which the gateway answers in its own form. It also
// keeps the gateway's Connection header: the SDK sets keep-alive, but a server that shuts down
// closes its connections.
type responseWriter struct {
	http.ResponseWriter
	connection []string
	ids        *IDs
	text       *bytes.Buffer // nil unless the answer is such an error
	decoded    func()        // see [Handler.Serve]
}

// WriteHeader implements [http.ResponseWriter].
func (w *responseWriter) WriteHeader(status int) {
	if status >= http.StatusBadRequest && strings.HasPrefix(w.Header().Get("Content-Type"), "text/plain") {
		w.text = new(bytes.Buffer)
		return
	}
	w.begin()
	w.ResponseWriter.WriteHeader(status)
}

// Write implements [http.ResponseWriter].
func (w *responseWriter) Write(p []byte) (int, error) {
	if w.text != nil {
		return w.text.Write(p)
	}
	w.begin()
	restored := w.ids.Restore(p) // the SDK writes each message at once
	if len(restored) == 0 {
		return len(p), nil
	}
	if _, err := w.ResponseWriter.Write(restored); err != nil {
		return 0, err
	}
	return len(p), nil
}

// FlushError is for [http.ResponseController].
func (w *responseWriter) FlushError() error {
	w.begin()
	return http.NewResponseController(w.ResponseWriter).Flush() //nolint:wrapcheck // as without w
}

// begin prepares for the first byte of the answer, and has no effect later.
func (w *responseWriter) begin() {
	w.decoded()
	if len(w.connection) > 0 {
		w.Header()["Connection"] = w.connection
	}
}

// Unwrap is for [http.ResponseController].
func (w *responseWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Connected reports whether the client cancels the calls of a request by closing its connection.
func Connected(r *http.Request) bool { return r.Header.Get(versionHeader) >= connectionVersion }

// callName names a call of a session by its id. It returns "" if either is missing.
func callName(session string, id json.RawMessage) string {
	var compact bytes.Buffer
	if session == "" || len(session) > maxSession || len(id) == 0 || len(id) > maxID || json.Compact(&compact, id) != nil {
		return ""
	}
	return session + " " + compact.String()
}

// answer is the result of a call.
type answer struct {
	content    []sdk.Content
	structured json.RawMessage
}

// add adds a tool that do carries out. The text of its result is the structured one.
func add[In, Out any](h *Handler, server *sdk.Server, t *api.Tool, do func(context.Context, *Call, *In) (*Out, error)) {
	addTool(h, server, t, func(ctx context.Context, call *Call, in *In) (*answer, error) {
		out, err := do(ctx, call, in)
		if err != nil {
			return nil, err
		}
		text, err := json.Marshal(out)
		if err != nil {
			return nil, fmt.Errorf("encode the result of %s: %w", t.Name, err)
		}
		return &answer{[]sdk.Content{&sdk.TextContent{Text: string(text)}}, text}, nil
	})
}

// runCell returns the result of a cell: its text, its pictures, and the rest as structured content.
func runCell(ctx context.Context, sandbox Sandbox, call *Call, req *api.ContextExecuteRequest) (*answer, error) {
	out, pictures, err := sandbox.RunCell(ctx, call, req)
	if err != nil {
		return nil, err
	}
	structured, err := json.Marshal(out)
	if err != nil {
		return nil, fmt.Errorf("encode the result of a cell: %w", err)
	}
	a := &answer{[]sdk.Content{&sdk.TextContent{Text: out.Text()}}, structured}
	for _, p := range pictures {
		data, err := base64.StdEncoding.DecodeString(p.Base64)
		if err != nil {
			continue // a program has made it up
		}
		a.content = append(a.content, &sdk.ImageContent{MIMEType: p.Type, Data: data})
	}
	return a, nil
}

// addTool adds a tool that do carries out.
func addTool[In any](
	h *Handler, server *sdk.Server, t *api.Tool, do func(context.Context, *Call, *In) (*answer, error),
) {
	closed := false // a tool's world, unless it runs programs
	annotations := &sdk.ToolAnnotations{Title: t.Title, ReadOnlyHint: t.ReadOnly}
	if t.Name != api.ToolExecute && t.Name != api.ToolContext {
		annotations.OpenWorldHint = &closed
	}
	tool := &sdk.Tool{
		Name: t.Name, Title: t.Title, Description: t.Doc, InputSchema: t.InputSchema(), OutputSchema: t.OutputSchema(),
		Annotations: annotations,
	}
	server.AddTool(tool, func(ctx context.Context, req *sdk.CallToolRequest) (*sdk.CallToolResult, error) {
		shared, ok := ctx.Value(callKey{}).(*Call)
		if !ok {
			return nil, fmt.Errorf("tool %s was called without its HTTP request", t.Name)
		}
		call := *shared
		call.Progress = progressOf(ctx, req)
		out, err := func() (*answer, error) {
			if err := h.sandbox.Authorize(&call, t); err != nil {
				return nil, err
			}
			in, err := api.DecodeArguments[In](t, req.Params.Arguments)
			if err != nil {
				return nil, err
			}
			call.decoded()
			return do(ctx, &call, in)
		}()
		if err != nil {
			return toolError(h.sandbox.PublicError(&call, err)), nil
		}
		return &sdk.CallToolResult{Content: out.content, StructuredContent: out.structured}, nil
	})
}

// toolError returns the result of a call that failed. A model reads its text.
func toolError(e *api.Error) *sdk.CallToolResult {
	meta := sdk.Meta{"bullpen.run/error": string(e.Code)}
	if e.RetryAfter > 0 {
		meta["bullpen.run/retry_after"] = e.RetryAfter
	}
	if e.Permanent {
		meta["bullpen.run/permanent"] = true
	}
	if e.Reason != "" {
		meta["bullpen.run/reason"] = string(e.Reason)
	}
	return &sdk.CallToolResult{Meta: meta, IsError: true, Content: []sdk.Content{&sdk.TextContent{Text: e.Message}}}
}

// progressOf returns a function that sends progress notifications, or nil if the client wants none.
func progressOf(ctx context.Context, req *sdk.CallToolRequest) func(string) error {
	token := req.Params.GetProgressToken()
	if token == nil {
		return nil
	}
	sent := 0.0 // it must grow with each notification
	return func(message string) error {
		sent++
		if err := req.Session.NotifyProgress(
			ctx, &sdk.ProgressNotificationParams{ProgressToken: token, Progress: sent, Message: message}); err != nil {
			return fmt.Errorf("%w: send progress: %w", context.Canceled, err)
		}
		return nil
	}
}
