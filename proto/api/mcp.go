package api

import (
	"cmp"
	"crypto/rand"
	"reflect"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// MCPPath is the path of the endpoint of the Model Context Protocol.
const MCPPath = "/mcp"

// MaxToolOutput is the number of bytes of each output stream that the result of a tool has. More
// helps no model, and is available under the trace id.
const MaxToolOutput = 64 << 10

// MaxToolFiles is the number of entries of a list of files that the result of a tool has.
const MaxToolFiles = 1000

// Tool describes a tool of the Model Context Protocol.
type Tool struct {
	Name, Title, Doc string
	Scope            proto.Scope // that the API key needs
	ReadOnly         bool
	// Request is a value of the type of the arguments: the body of the route that does the same. The
	// arguments do not have the fields in Without.
	Request  any
	Without  []string
	Response any // a value of the type of the result
}

// The names of the tools.
const (
	ToolExecute  = "sandbox_execute"
	ToolContext  = "context_execute"
	ToolList     = "files_list"
	ToolUpload   = "files_upload"
	ToolDownload = "files_download"
)

// Tools returns all tools.
func Tools() []Tool {
	return []Tool{
		{
			Name: ToolExecute, Scope: proto.ScopeExecute, Title: "Run a program",
			Doc: "Runs a Python, Node.js or Bash program in an isolated sandbox and returns its output and exit code. " +
				"Without thread_id nothing is kept. With thread_id, " +
				"the home directory, which is also the working directory, is kept for later calls with the same thread_id; use " +
				"one thread for steps that belong together. " +
				"A program that fails is a result with its exit code, not an error.",
			// A model chooses neither sandbox profiles, paths of volumes nor targets of webhooks. The
			// others are of async executions, of streams, and of clients that cancel.
			Request:  ExecuteRequest{},
			Without:  []string{"profile", "sub_paths", "webhook_url", "run_at", "delay", "stream_partial", "rich", "kill_grace"},
			Response: ToolResult{},
		},
		{
			Name: ToolContext, Scope: proto.ScopeExecute, Title: "Run code in an interpreter that keeps its state",
			Doc: "Runs code in an interpreter, as a cell of a notebook: variables, imports and functions are kept for later " +
				"calls with the same thread_id, and so is the home directory, which is the working directory. The value of " +
				"the last expression is shown, and pictures such as figures of matplotlib are returned. An interpreter ends " +
				"when it was not used for 10 minutes, at its memory limit, or when its machine is lost. Its variables are gone " +
				"then: the next call runs nothing and says so. Call again with restart to go on with the files. Code that " +
				"fails is a result with the error and its traceback.",
			Request: ContextExecuteRequest{}, Response: ToolCell{},
		},
		{
			Name: ToolList, Scope: proto.ScopeFiles, Title: "List files", ReadOnly: true,
			Doc: "Lists the files in the home directory of a thread, or in a storage connection (source volume), which " +
				"programs see at /data/{id}.",
			Request: FileListRequest{}, Response: ToolFiles{},
		},
		{
			Name: ToolUpload, Scope: proto.ScopeFiles, Title: "Get a URL to upload a file to",
			Doc: "Returns a signed URL for one file. Send the file to it with the given method and headers, " +
				"without an API key; it is then in the thread's home directory or the storage connection.",
			Request: FileUploadRequest{}, Response: SignedURL{},
		},
		{
			Name: ToolDownload, Scope: proto.ScopeFiles, Title: "Get a URL to download a file from", ReadOnly: true,
			Doc: "Returns a signed URL of one file in the home directory of a thread, or in a storage connection. It " +
				"needs no API key.",
			Request: FileDownloadRequest{}, Response: SignedURL{},
		},
	}
}

// InputSchema returns the JSON schema of the arguments.
func (t *Tool) InputSchema() map[string]any {
	g := &generator{schemas: object{}}
	schema := g.structSchema(reflect.TypeOf(t.Request), true)
	properties, _ := schema["properties"].(object)
	for _, name := range t.Without {
		delete(properties, name)
	}
	delete(schema, "unevaluatedProperties")
	delete(schema, "description") // of the route's body
	schema["additionalProperties"] = false
	return g.inline(schema)
}

// OutputSchema returns the JSON schema of the result.
func (t *Tool) OutputSchema() map[string]any {
	g := &generator{schemas: object{}}
	return g.inline(g.structSchema(reflect.TypeOf(t.Response), false))
}

// inline replaces the references in a schema by what they refer to, for clients that do not follow
// them.
func (g *generator) inline(schema object) object {
	resolved, _ := g.resolve(schema).(object)
	return resolved
}

func (g *generator) resolve(v any) any {
	switch v := v.(type) {
	case object:
		if target, ok := v["$ref"].(string); ok {
			return g.resolve(g.schemas[target[len("#/components/schemas/"):]])
		}
		all := make(object, len(v))
		for key, value := range v {
			all[key] = g.resolve(value)
		}
		return all
	case []object:
		all := make([]any, len(v))
		for i := range v {
			all[i] = g.resolve(v[i])
		}
		return all
	default:
		return v
	}
}

// DecodeArguments decodes and validates the arguments of a tool whose Request is a T. Unlike in the
// body of the route, unknown names are refused: a model that made one up can correct itself. Errors
// are [*proto.FieldError].
func DecodeArguments[T any](t *Tool, arguments []byte) (*T, error) {
	if typeByte(arguments) == 0 || typeByte(arguments) == 'n' {
		arguments = []byte("{}")
	}
	if err := checkBody(arguments); err != nil {
		return nil, err
	}
	err := eachMember(arguments, func(name string, _ []byte) error {
		if slices.Contains(t.Without, name) {
			return proto.FieldErrorf(name, "is not available to tools")
		}
		return nil
	})
	request := new(T)
	if err == nil {
		err = decodeMembers(request, arguments, true)
	}
	if v, ok := any(request).(validator); ok && err == nil {
		err = v.Validate()
	}
	return request, err
}

// ToolResult is the result of the tool that runs a program.
type ToolResult struct {
	TraceID proto.TraceID `json:"trace_id" format:"trace-id" doc:"The execution, whose whole output is at /v1/executions/{trace_id}."`
	proto.Result
}

// NewToolResult returns the result of an execution with the first MaxToolOutput bytes of its
// output.
func NewToolResult(id proto.TraceID, r *proto.Result) *ToolResult {
	t := &ToolResult{TraceID: id, Result: *r}
	t.Stdout, t.StdoutTruncated = cutOutput(r.Stdout, r.StdoutTruncated)
	t.Stderr, t.StderrTruncated = cutOutput(r.Stderr, r.StderrTruncated)
	return t
}

func cutOutput(text string, truncated bool) (string, bool) {
	if len(text) <= MaxToolOutput {
		return text, truncated
	}
	return text[:proto.CutUTF8(text[:MaxToolOutput])], true
}

// ToolFiles is the result of the tool that lists files.
type ToolFiles struct {
	Files     []File `json:"files"`
	Truncated bool   `json:"truncated" doc:"There are more files: list a directory below."`
}

// ContextExecuteRequest are the arguments of the tool that runs a cell.
type ContextExecuteRequest struct {
	_ struct{} `doc:"null means absent."`

	Code     string `json:"code" minLength:"1" maxLength:"1048576" doc:"At most 1 MiB."`
	Language string `json:"language,omitempty" default:"python" enum:"python,javascript,typescript,bash" doc:"Each language has an interpreter of its own in the thread."`
	ThreadID string `json:"thread_id,omitempty" format:"thread-id" doc:"The thread whose interpreter and home directory are used. By default a new one, whose id is in the result."`
	Restart  bool   `json:"restart,omitempty" doc:"Start a new interpreter first, without the variables of the earlier one."`
	Timeout  int    `json:"timeout,omitempty" default:"60" minimum:"1" maximum:"86400" must:"be a whole number of seconds, from 1 to 86400" doc:"Seconds after which the code is interrupted. Variables are kept. Above the plan's maximum: an error."`
}

// Validate checks what the tags cannot express, and sets defaults.
func (r *ContextExecuteRequest) Validate() error {
	r.Language = cmp.Or(r.Language, "python")
	r.Timeout = cmp.Or(r.Timeout, 60)
	if r.ThreadID == "" {
		r.ThreadID = "cell-" + strings.ToLower(rand.Text())
	}
	return nil
}

// ToolCell is the result of the tool that runs a cell.
type ToolCell struct {
	ThreadID string `json:"thread_id" doc:"Give it to calls that need the variables or the files."`
	New      bool   `json:"new_interpreter" doc:"The interpreter has started with this call: it had no variables."`
	NotSaved string `json:"not_saved,omitempty" doc:"Why the files are not stored yet. Later calls of this tool find them, other tools do not."`
	CellResult
}

// Text returns the result as a model reads it, without pictures.
func (r *ToolCell) Text() string {
	text := r.CellResult.Text() + "\n[thread_id " + r.ThreadID + "]"
	if r.NotSaved != "" {
		text += "\n[" + r.NotSaved + "]"
	}
	return text
}
