package responses

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/agent"
	"github.com/bullpen-run/bullpen/proto"
)

// The names of this side's tools: their types in requests, and what the model calls.
const (
	interpreterName = "code_interpreter"
	shellName       = "shell"
	sandboxName     = "sandbox"
)

// The statuses of responses and items.
const (
	statusInProgress   = "in_progress"
	statusInterpreting = "interpreting"
	statusCompleted    = "completed"
	statusIncomplete   = "incomplete"
	statusFailed       = "failed"
	statusTimedOut     = "timed_out"
	statusAction       = "requires_action"
	statusQueued       = "queued"
	statusCancelled    = "cancelled"
)

// tool is a tool in a request.
type tool struct {
	Type        string          `json:"type"`
	Name        string          `json:"name"`
	Description string          `json:"description"`
	Parameters  json.RawMessage `json:"parameters"`
	Container   json.RawMessage `json:"container"`   // of the code interpreter: an id or a containerRef
	Environment *containerRef   `json:"environment"` // of the shell
	Format      struct {
		Type       string `json:"type"`
		Syntax     string `json:"syntax"`
		Definition string `json:"definition"`
	} `json:"format"` // of the input of a custom tool
}

// containerRef is where a tool of OpenAI runs programs.
type containerRef struct {
	Type          string            `json:"type"`
	ContainerID   string            `json:"container_id"`
	FileIDs       []string          `json:"file_ids"`
	MemoryLimit   string            `json:"memory_limit"`
	NetworkPolicy *networkPolicy    `json:"network_policy"`
	Skills        []json.RawMessage `json:"skills"`
}

type networkPolicy struct {
	Type string `json:"type"`
}

// toolSet are the tools of a request.
type toolSet struct {
	names     map[string]bool // of all tools
	hosted    []string        // the names of this side's tools
	clients   []agent.Tool
	container string   // the id of the container that the request names
	files     []string // ids of files for the container
	refs      []*containerRef
}

// toolSet returns the tools of a request to a vendor.
func (r *request) toolSet(v vendor) (*toolSet, error) {
	set := &toolSet{names: map[string]bool{}}
	for i, raw := range r.Tools {
		field := fmt.Sprintf("tools[%d]", i)
		var t tool
		if err := json.Unmarshal(raw, &t); err != nil {
			return nil, proto.FieldErrorf(field, "is not a tool: %v", err)
		}
		name := t.Type
		switch {
		case t.Type == "function":
			if t.Name == "" {
				return nil, proto.FieldErrorf(field+".name", "is required")
			}
			schema := t.Parameters
			if !isSet(schema) {
				schema = json.RawMessage(`{"type":"object","properties":{}}`)
			}
			name = t.Name
			set.clients = append(set.clients,
				agent.Tool{Definition: agent.Definition{Name: t.Name, Description: t.Description, Schema: schema}})
		case v == openAI && t.Type == customTool:
			if t.Name == "" {
				return nil, proto.FieldErrorf(field+".name", "is required")
			}
			name = t.Name
			set.clients = append(set.clients, agent.Tool{Definition: t.customDefinition()})
		case r.codex && slices.Contains(serverTools, t.Type):
			continue
		case v == perplexity && t.Type == sandboxName:
		case v == openAI && t.Type == interpreterName:
			ref, err := t.interpreterContainer()
			if err == nil {
				err = set.use(ref)
			}
			if err != nil {
				return nil, proto.FieldErrorf(field+".container", "%s", err.Error())
			}
		case v == openAI && t.Type == shellName:
			if t.Environment == nil {
				t.Environment = &containerRef{Type: "container_auto"}
			}
			if err := set.use(t.Environment); err != nil {
				return nil, proto.FieldErrorf(field+".environment", "%s", err.Error())
			}
		case v == perplexity:
			return nil, proto.FieldErrorf(field+".type", "is %q; this server has %s, and function for tools of the client",
				proto.Shorten(t.Type), sandboxName)
		default:
			return nil, proto.FieldErrorf(field+".type", "is %q; this server has %s, %s, and function for tools of the client",
				proto.Shorten(t.Type), interpreterName, shellName)
		}
		if set.names[name] {
			return nil, proto.FieldErrorf(field, "has the name %q of another tool", proto.Shorten(name))
		}
		if set.names[name] = true; t.Type != "function" && t.Type != customTool {
			set.hosted = append(set.hosted, name)
		}
	}
	return set, nil
}

// interpreterContainer returns where a code interpreter runs programs.
func (t *tool) interpreterContainer() (*containerRef, error) {
	ref := &containerRef{}
	if json.Unmarshal(t.Container, &ref.ContainerID) == nil && ref.ContainerID != "" {
		ref.Type = "container_reference"
		return ref, nil
	}
	if !isSet(t.Container) || json.Unmarshal(t.Container, ref) != nil || ref.Type != "auto" {
		return nil, errors.New(`must be the id of a container, or an object with the type "auto"`)
	}
	return ref, nil
}

// use makes the tools run programs in a container.
func (set *toolSet) use(ref *containerRef) error {
	if len(ref.Skills) > 0 {
		return errors.New("must have no skills: this server has none")
	}
	set.refs = append(set.refs, ref)
	switch ref.Type {
	case "auto", "container_auto":
		set.files = append(set.files, ref.FileIDs...)
		return nil
	case "container_reference":
		if ref.ContainerID == "" || set.container != "" && set.container != ref.ContainerID {
			return errors.New("must name one container, the same for all tools")
		}
		set.container = ref.ContainerID
		return nil
	default:
		return errors.New("must have the type container_auto or container_reference; with others, programs would run at " +
			"the client")
	}
}

// memoryLimits are the memory limits of containers, by their names.
var memoryLimits = map[string]proto.Bytes{
	"": 0, "1g": proto.GiB, "4g": 4 * proto.GiB, "16g": 16 * proto.GiB,
	"64g": 64 * proto.GiB,
}

// check returns an error unless the API key's sandboxes have the memory and network policy that a
// container requests.
func (ref *containerRef) check(ctx context.Context, host agent.RequestHost) error {
	memory, ok := memoryLimits[ref.MemoryLimit]
	if !ok {
		return proto.FieldErrorf("memory_limit", "must be 1g, 4g, 16g or 64g")
	}
	if memory == 0 && ref.NetworkPolicy == nil {
		return nil
	}
	profile, err := host.Profile(ctx)
	switch {
	case err != nil:
		return err
	case memory > profile.Memory:
		return proto.FieldErrorf("memory_limit",
			"is %s, but the sandbox profile of this API key has %s of memory; ask for less, or use a key whose profile has "+
				"as much, "+
				"such as one made with --profile %s, which has %s", ref.MemoryLimit, profile.Memory, proto.AgentsProfileName,
			proto.AgentsProfile(profile).Memory)
	case ref.NetworkPolicy != nil &&
		(ref.NetworkPolicy.Type != "disabled" || profile.Network.Effective() != proto.NetworkBlocked):
		return proto.FieldErrorf("network_policy",
			"must be left out, or disabled if the sandbox profile of this API key has no network: it is what decides")
	}
	return nil
}

const (
	keptFiles = "Each call is a new process in the home directory. Files there are kept for later calls, others are " +
		"not. Print what you need to know."
	schemaStart = `{"type":"object","properties":{`
)

// check refuses containers that the sandbox profile of the API key does not allow.
func (set *toolSet) check(ctx context.Context, host agent.RequestHost) error {
	for _, ref := range set.refs {
		err := ref.check(ctx, host)
		if field, ok := errors.AsType[*proto.FieldError](err); ok {
			err = proto.FieldErrorf("tools", "have a container whose %s", field.Message)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// all returns the tools for the model. Those of this side run programs in a container.
func (set *toolSet) all(c *container) []agent.Tool {
	list := set.clients
	for _, name := range set.hosted {
		switch name {
		case sandboxName:
			list = append(list, c.newTool(
				name, false, "Runs a Python 3 program or a Bash script in a sandbox and returns its output and exit code. "+
					keptFiles,
				`"language":{"type":"string","enum":["python","bash"]},"code":{"type":"string","description":"The program."}},`+
					`"required":["language","code"]}`, c.sandbox, sandboxFailure))
		case interpreterName:
			list = append(list, c.newTool(
				name, true, "Runs Python 3 code in an interpreter, as a cell of a notebook, and returns what it prints, and the "+
					"value of its last expression. Variables, imports and functions are kept for later calls, and so are files in "+
					"the home directory. If variables are lost, the result says so.",
				`"code":{"type":"string","description":"The code."}},"required":["code"]}`, c.interpret, interpreterFailure))
		case shellName:
			list = append(list, c.newTool(
				name, false, "Runs Bash commands in a sandbox, one after another, and returns their outputs and exit codes. "+
					keptFiles,
				`"commands":{"type":"array","items":{"type":"string"},"description":"The commands."},`+
					`"timeout_ms":{"type":"integer","description":"How long each command may run."}},"required":["commands"]}`,
				c.shell, shellFailure))
		}
	}
	return list
}

// newTool returns a tool of this side, whose calls may be cells. fail returns the outcome of a call that was not
// carried out.
func (c *container) newTool(
	name string, cells bool, description, schema string,
	execute func(ctx context.Context, call *agent.Call) (*agent.Outcome, error),
	fail func(message string) *agent.Outcome,
) agent.Tool {
	return c.Placed(agent.Tool{
		Definition: agent.Definition{
			Name: name, Description: description, Schema: json.RawMessage(schemaStart + schema),
		},
		Execute: func(ctx context.Context, call *agent.Call) (*agent.Outcome, error) {
			outcome, err := execute(ctx, call)
			switch {
			case err == nil:
				return outcome, nil
			case ctx.Err() != nil:
				return nil, ctx.Err()
			default:
				return fail(agent.Public(err).Message), nil
			}
		},
		Malformed: func(*agent.Call) *agent.Outcome { return fail("The arguments are not a JSON object.") },
	}, cells)
}

// container is where the calls of a response are carried out. For Perplexity, whose clients request
// files by response id, its id is derived from the response's.
type container struct{ agent.Container }

// maxFileIDs is the number of files that a request puts into a container.
const maxFileIDs = 100

// stage puts files of the organisation into the container.
func (c *container) stage(ctx context.Context, ids []string) error {
	if len(ids) > maxFileIDs {
		return proto.FieldErrorf("tools", "must have at most %d file_ids", maxFileIDs)
	}
	names := agent.Names{}
	for _, id := range ids {
		f, err := c.Host.File(ctx, id)
		if err != nil {
			return err
		}
		if err := c.Upload(ctx, f, names.Of(f)); err != nil {
			return err
		}
	}
	return nil
}

// codeArguments are the arguments of calls with a program.
type codeArguments struct {
	Language string `json:"language,omitempty"` // of the sandbox
	Code     string `json:"code"`
}

func decodeArguments[T any](call *agent.Call) (*T, error) {
	var v T
	if err := json.Unmarshal(call.Arguments, &v); err != nil {
		return nil, proto.FieldErrorf("arguments", "have the wrong types")
	}
	return &v, nil
}

// Parts of items, which are the values of outcomes too.
type (
	sandboxResult struct {
		Stdout     string `json:"stdout"`
		Stderr     string `json:"stderr"`
		ExitCode   int    `json:"exit_code"`
		DurationMS int64  `json:"duration_ms"`
		Status     string `json:"status"`
	}
	interpreterOutput struct {
		Type string  `json:"type"` // logs or image
		Logs *string `json:"logs,omitempty"`
		URL  string  `json:"url,omitempty"` // a data URL
	}
	shellOutput struct {
		Stdout  string       `json:"stdout"`
		Stderr  string       `json:"stderr"`
		Outcome shellOutcome `json:"outcome"`
	}
	shellOutcome struct {
		Type     string `json:"type"` // exit or timeout
		ExitCode *int   `json:"exit_code,omitempty"`
	}
)

// interpreted is the value of an outcome of the code interpreter.
type interpreted struct {
	Status string   `json:"status"`
	Logs   string   `json:"logs"`
	Paths  []string `json:"paths,omitempty"` // of files for the user
}

// shelled is the value of an outcome of the shell.
type shelled struct {
	Status string        `json:"status"`
	Output []shellOutput `json:"output"`
}

func (c *container) sandbox(ctx context.Context, call *agent.Call) (*agent.Outcome, error) {
	in, err := decodeArguments[codeArguments](call)
	if err != nil {
		return nil, err
	}
	var out *agent.Output
	switch in.Language {
	case "python":
		out, err = c.Python(ctx, call.ID, in.Code)
	case "bash":
		out, err = c.Bash(ctx, call.ID, in.Code, 0)
	default:
		err = proto.FieldErrorf("language", "must be python or bash")
	}
	if err != nil {
		return nil, err
	}
	r := newProgram(out)
	return sandboxOutcome(&sandboxResult{r.stdout, r.stderr, r.exitCode, out.Record.Result.DurationMS, r.status}), nil
}

func sandboxOutcome(r *sandboxResult) *agent.Outcome {
	list := []sandboxResult{*r}
	text := sandboxText(list, r.Status)
	return &agent.Outcome{Text: text.Text, Failed: text.Failed, Value: json.RawMessage(text.Text)}
}

// sandboxText returns the result of a call of the sandbox as the model reads it.
func sandboxText(list []sandboxResult, status string) *agent.Result {
	return &agent.Result{Text: encode(list), Failed: status != statusCompleted}
}

func sandboxFailure(message string) *agent.Outcome {
	return sandboxOutcome(&sandboxResult{Stderr: message, ExitCode: -1, Status: statusFailed})
}

func (c *container) interpret(ctx context.Context, call *agent.Call) (*agent.Outcome, error) {
	in, err := decodeArguments[codeArguments](call)
	if err != nil {
		return nil, err
	}
	out, err := c.Cell(ctx, call.ID, in.Code)
	if err != nil {
		return nil, err
	}
	r := newProgram(out)
	status := r.status
	if status == statusTimedOut {
		status = statusIncomplete
	}
	return &agent.Outcome{
		Text:   encode(map[string]any{"stdout": r.stdout, "stderr": r.stderr, "exit_code": r.exitCode}),
		Failed: status != statusCompleted, Pictures: out.Pictures,
		Value: value(&interpreted{status, joined(r.stdout, r.stderr), out.Paths}),
	}, nil
}

func interpreterFailure(message string) *agent.Outcome {
	return &agent.Outcome{Text: message, Failed: true, Value: value(&interpreted{Status: statusFailed, Logs: message})}
}

// maxCommands is the number of commands in one call of the shell.
const maxCommands = 20

// shellArguments are the arguments of calls of the shell, and the action of its items.
type shellArguments struct {
	Commands        []string `json:"commands"`
	TimeoutMS       *int     `json:"timeout_ms"`
	MaxOutputLength *int     `json:"max_output_length"`
}

func (c *container) shell(ctx context.Context, call *agent.Call) (*agent.Outcome, error) {
	in, err := decodeArguments[shellArguments](call)
	if err != nil {
		return nil, err
	}
	timeout := 0
	switch {
	case len(in.Commands) < 1 || len(in.Commands) > maxCommands:
		return nil, proto.FieldErrorf("commands", "must be 1 to %d", maxCommands)
	case in.TimeoutMS != nil && (*in.TimeoutMS < 1 || *in.TimeoutMS > agent.MaxTimeout*1000):
		return nil, proto.FieldErrorf("timeout_ms", "must be 1 to %d", agent.MaxTimeout*1000)
	case in.TimeoutMS != nil:
		timeout = (*in.TimeoutMS + 999) / 1000
	}
	result := &shelled{Status: statusCompleted}
	for _, command := range in.Commands {
		out, err := c.Bash(ctx, call.ID, command, timeout)
		if err != nil && len(result.Output) > 0 && ctx.Err() == nil { // the commands before it were carried out
			for range in.Commands[len(result.Output):] {
				result.Output = append(result.Output, notRun(agent.Public(err).Message))
			}
			result.Status = statusIncomplete
			break
		}
		if err != nil {
			return nil, err
		}
		r := newProgram(out)
		one := shellOutput{r.stdout, r.stderr, shellOutcome{Type: "timeout"}}
		if r.status != statusTimedOut {
			one.Outcome = shellOutcome{"exit", &r.exitCode}
		}
		result.Output = append(result.Output, one)
	}
	return &agent.Outcome{Text: encode(result.Output), Failed: result.Status != statusCompleted, Value: value(result)}, nil
}

func notRun(message string) shellOutput {
	return shellOutput{Stderr: message, Outcome: shellOutcome{"exit", new(-1)}}
}

func shellFailure(message string) *agent.Outcome {
	return &agent.Outcome{
		Text: message, Failed: true,
		Value: value(&shelled{statusIncomplete, []shellOutput{notRun(message)}}),
	}
}

// program is how a program ended.
type program struct {
	stdout, stderr string
	exitCode       int
	status         string // completed, timed_out or failed; a program that fails is completed
}

func newProgram(out *agent.Output) *program {
	r := out.Record.Result
	p := &program{
		agent.Shortened(r.Stdout, r.StdoutTruncated), agent.Shortened(r.Stderr, r.StderrTruncated), r.ExitCode,
		statusCompleted,
	}
	if r.ErrorCode != nil { // the platform ended the program
		if p.status = statusFailed; proto.ErrorCode(*r.ErrorCode) == proto.CodeTimeout {
			p.status = statusTimedOut
		}
		p.stderr = joined(p.stderr, *r.ErrorMessage)
	}
	p.stderr = joined(p.stderr, out.Note)
	return p
}

// joined returns two texts with a line break between them, if both are not empty.
func joined(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return strings.TrimSuffix(a, "\n") + "\n" + b
}

// encode returns the JSON form of a value. Characters of HTML are as they are: models read the text, and
// it counts towards limits.
func encode(v any) string {
	var text strings.Builder
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err) // the types here have only text and numbers
	}
	return strings.TrimSuffix(text.String(), "\n")
}

// value returns the form of a value in an outcome.
func value(v any) json.RawMessage { return json.RawMessage(encode(v)) }

// valueOf returns the value of an outcome.
func valueOf[T any](o *agent.Outcome) *T {
	v := new(T)
	_ = json.Unmarshal(o.Value, v) // the functions here have encoded it
	return v
}

// newCallID returns the id of a call. A code interpreter's call shares it with its item.
func (r *run) newCallID(t *agent.Tool) string {
	if t.Name == interpreterName && t.Execute != nil {
		return "ci_" + strings.TrimPrefix(r.record.ID, responsePrefix) + "_" + newID()
	}
	return "call_" + newID()
}

func newID() string { return strings.ToLower(rand.Text()) }
