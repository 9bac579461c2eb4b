package main

import (
	"cmp"
	"context"
	"embed"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"
)

// The scripts ask __complete, so they complete what the installed program knows.
//
//go:embed completion
var completionScripts embed.FS

type completionCommand struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

func (*completionCommand) Help() string {
	return `Packages of bullpen install the scripts. Otherwise call it in ~/.bashrc, in ~/.zshrc after compinit, or once
for fish.

The scripts complete commands, flags and values. With BULLPEN_API_KEY they ask the server for names and ids, at most
the first 100.

Examples:

  source <(bullpen completion bash)
  source <(bullpen completion zsh)
  bullpen completion fish >~/.config/fish/completions/bullpen.fish`
}

func (c *completionCommand) Run(s streams) error {
	script, err := completionScripts.ReadFile("completion/bullpen." + c.Shell)
	if err != nil {
		return err
	}
	_, err = s.out.Write(script)
	return err
}

// completeCommand prints the completions of the last word, one per line with a tab and its help. It
// prints nothing where any word is valid, such as a file name.
type completeCommand struct {
	Words []string `arg:"" optional:""`
}

func (c *completeCommand) Run(ctx context.Context, s streams, k *kong.Context) error {
	for _, w := range completions(k.Model.Node, c.Words, func(o *objects) []completion { return o.list(ctx, s) }) {
		if _, err := fmt.Fprintf(s.out, "%s\t%s\n", w.text, w.help); err != nil {
			return err
		}
	}
	return nil
}

// completion is a word of a command line, with help in one line.
type completion struct{ text, help string }

// completions returns the completions of the last of words, which follow the program's name. An =
// between a flag and its value may be a separate word. list returns what a server has.
func completions(node *kong.Node, words []string, list func(*objects) []completion) []completion {
	if len(words) == 0 {
		return nil
	}
	last := words[len(words)-1]
	var flag *kong.Flag // whose value comes next
	position := 0       // of the next argument
	for _, word := range words[:len(words)-1] {
		switch {
		case word == "=":
		case flag != nil:
			flag = nil
		case word == "--":
			return nil
		case strings.HasPrefix(word, "-") && len(word) > 1:
			if f := findFlag(node, word); f != nil && !f.IsBool() && !f.IsCounter() {
				flag = f
			}
		default:
			if child := findChild(node, word); child != nil {
				node, position = child, 0
			} else {
				position++
			}
		}
	}
	// values completes the value of a flag or argument, with assignment in front.
	values := func(v *kong.Value, parameter, assignment, prefix string) (out []completion) {
		found := enum(v)
		if o := findObjects(node, parameter); o != nil && v.Enum == "" {
			found = list(o)
		}
		for _, c := range found {
			if strings.HasPrefix(c.text, prefix) {
				out = append(out, completion{assignment + c.text, c.help})
			}
		}
		return out
	}
	switch name, value, assigned := strings.Cut(last, "="); {
	case flag != nil:
		return values(flag.Value, "--"+flag.Name, "", strings.TrimPrefix(last, "="))
	case assigned && strings.HasPrefix(name, "--"):
		if flag = findFlag(node, name); flag == nil {
			return nil
		}
		return values(flag.Value, "--"+flag.Name, name+"=", value)
	case strings.HasPrefix(last, "-"):
		return flags(node, last)
	case len(node.Children) > 0:
		return children(node, last)
	case len(node.Positional) > 0:
		argument := node.Positional[min(position, len(node.Positional)-1)]
		return values(argument, argument.Name, "", last)
	}
	return nil
}

func findChild(node *kong.Node, name string) *kong.Node {
	for _, child := range node.Children {
		if child.Name == name || slices.Contains(child.Aliases, name) {
			return child
		}
	}
	return nil
}

// findFlag returns the flag of a node or of its parents, or nil if it is unknown or the word
// already includes its value.
func findFlag(node *kong.Node, word string) *kong.Flag {
	for _, group := range node.AllFlags(false) {
		for _, f := range group {
			if word == "--"+f.Name || f.Short != 0 && word == "-"+string(f.Short) {
				return f
			}
		}
	}
	return nil
}

func children(node *kong.Node, prefix string) (out []completion) {
	for _, child := range node.Children {
		if !child.Hidden && strings.HasPrefix(child.Name, prefix) {
			out = append(out, completion{child.Name, child.Help})
		}
	}
	return out
}

func flags(node *kong.Node, prefix string) (out []completion) {
	for _, group := range node.AllFlags(true) {
		for _, f := range group {
			if name := "--" + f.Name; strings.HasPrefix(name, prefix) {
				out = append(out, completion{name, f.Help})
			}
		}
	}
	return out
}

// enum returns the values listed in the definition of a flag or argument.
func enum(v *kong.Value) (out []completion) {
	if v.Enum == "" {
		return nil
	}
	for _, value := range v.EnumSlice() {
		if value != "" {
			out = append(out, completion{value, ""})
		}
	}
	return out
}

// objects are objects of a server that a flag or argument may name.
type objects struct {
	parameter string // an argument such as id, or a flag such as --org
	command   string // which has the parameter, as the first words of its path; all if empty
	path      string // of the list
	field     string // of the answer that has the list
	id, help  string // fields of an object: what is typed, and what is shown beside it
}

// completed are the objects that completion asks a server for. The first match counts.
var completed = []objects{ // read only
	{"trace", "", "/v1/executions", "executions", "trace_id", "status"},
	{"thread", "", "/v1/threads", "threads", "id", ""},
	{"--thread", "", "/v1/threads", "threads", "id", ""},
	{"sandbox", "sandbox", "/v1/sandboxes", "sandboxes", "id", "state"},
	{"schedule", "schedule", "/v1/schedules", "schedules", "id", "name"},
	{"--schedule", "", "/v1/schedules", "schedules", "id", "name"},
	{"run", "ci", "/v1/pipelines", "pipelines", "id", "status"},
	{"id", "batch", "/v1/batches", "batches", "id", "status"},
	{"--batch", "", "/v1/batches", "batches", "id", "status"},
	{"session", "agent", "/sandbox-agent/v1/sessions", "sessions", "sessionId", "agent"},
	{"--session", "agent", "/sandbox-agent/v1/sessions", "sessions", "sessionId", "agent"},
	{"id", "key", "/v1/admin/keys", "keys", "id", "name"},
	{"id", "member", "/v1/admin/members", "members", "id", "email"},
	{"id", "session", "/v1/admin/sessions", "sessions", "id", "name"},
	{"id", "deadletter", "/v1/admin/dead-letters", "dead_letters", "id", "reason"},
	{"name", "org", "/v1/admin/orgs", "orgs", "name", "title"},
	{"--org", "", "/v1/admin/orgs", "orgs", "name", "title"},
	{"name", "plan", "/v1/admin/plans", "plans", "name", "title"},
	{"--plan", "", "/v1/admin/plans", "plans", "name", "title"},
	{"name", "image", "/v1/admin/images", "images", "name", ""},
	{"--image", "", "/v1/admin/images", "images", "name", ""},
	{"name", "profile", "/v1/admin/profiles", "profiles", "name", ""},
	{"--profile", "", "/v1/admin/profiles", "profiles", "name", ""},
	{"name", "secret", "/v1/admin/secrets", "secrets", "name", ""},
	{"slug", "connection", "/v1/admin/connections", "connections", "slug", "kind"},
	{"slug", "volume", "/v1/admin/connections", "connections", "slug", "kind"},
	{"name", "workers", "/v1/admin/workers", "workers", "name", "pool"},
}

// findObjects returns what a parameter of a command may name, or nil if that is not known, such as
// the name of a new object.
func findObjects(command *kong.Node, parameter string) *objects {
	if slices.Contains([]string{"create", "build", "import", "set"}, command.Name) && !strings.HasPrefix(parameter, "-") {
		return nil
	}
	path := command.Path() + " "
	for i, o := range completed {
		if o.parameter == parameter && (o.command == "" || strings.HasPrefix(path, o.command+" ")) {
			return &completed[i]
		}
	}
	return nil
}

var plainID = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._:/@+-]*$`)

// completionTime is how long a person waits for a server at most.
const completionTime = 2 * time.Second

// list returns the first objects of the server that the variables name; none if it does not answer,
// or does not let the key list them.
func (o *objects) list(ctx context.Context, s streams) (out []completion) {
	ctx, cancel := context.WithTimeout(ctx, completionTime)
	defer cancel()
	server := remote{URL: cmp.Or(os.Getenv("BULLPEN_URL"), "http://127.0.0.1:8080"), Key: os.Getenv("BULLPEN_API_KEY")}
	c, err := server.client(s)
	if err != nil {
		return nil
	}
	var answer map[string]json.RawMessage
	if _, err := c.Do(ctx, http.MethodGet, o.path+"?limit=100", nil, nil, &answer); err != nil {
		return nil
	}
	var list []map[string]json.RawMessage
	if err := json.Unmarshal(answer[o.field], &list); err != nil {
		return nil
	}
	for _, object := range list {
		var id, help string
		// A shell takes words as they are: what it would interpret was chosen by another tenant.
		if json.Unmarshal(object[o.id], &id) != nil || !plainID.MatchString(id) {
			continue
		}
		_ = json.Unmarshal(object[o.help], &help) // it may be null
		out = append(out, completion{id, strings.Map(printable, help)})
	}
	return out
}
