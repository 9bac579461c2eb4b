package sessions

import (
	"encoding/json"
	"net/url"
	"slices"
	"strings"
	"unicode"
)

// Limits of the scopes granted for a session. Beyond them, the agent asks the user again.
const (
	maxScope  = 1024
	maxScopes = 100
)

// allow grants a permission for the session.
func (s *State) allow(p *Permission) {
	for _, scope := range p.scopes() {
		if !slices.Contains(s.Always, scope) && len(scope) <= maxScope && len(s.Always) < maxScopes {
			s.Always = append(s.Always, scope)
		}
	}
}

// allows reports whether a permission was granted for the session. With wide, a grant covers all commands of
// its tool.
func (s *State) allows(p *Permission, wide bool) bool {
	return slices.ContainsFunc(p.scopes(), func(scope string) bool {
		tool, _, _ := strings.Cut(scope, " ")
		return slices.ContainsFunc(s.Always, func(granted string) bool {
			other, _, _ := strings.Cut(granted, " ")
			return granted == scope || wide && other == tool
		})
	})
}

// scopes returns what a grant of the permission for the session covers: its tool by each of its names, limited
// to a command or the server of a URL if it has one.
func (p *Permission) scopes() (list []string) {
	f := p.fields()
	limit := ""
	switch command := firstOf(f.Command, f.Input.Command); {
	case command != nil:
		limit = " " + commandScope(command)
	case f.Input.URL != "":
		limit = " " + serverOf(f.Input.URL)
	case f.Patterns != nil && !p.isFileChange(): // a grant for a file change covers all files
		limit = " " + commandScope(f.Patterns)
	}
	for _, name := range []string{p.Action, f.Permission, f.Kind, f.Tool, f.ToolName} {
		if name = strings.ReplaceAll(strings.ToLower(name), " ", "_"); name != "" && !slices.Contains(list, name+limit) {
			list = append(list, name+limit)
		}
	}
	return list
}

func firstOf(values ...any) any {
	for _, v := range values {
		if v != nil {
			return v
		}
	}
	return nil
}

// serverOf returns the scheme and the host of a URL.
func serverOf(text string) string {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" {
		return "=" + text
	}
	return u.Scheme + "://" + u.Host
}

// subcommands are the programs whose first argument names what they do, with those arguments that a grant
// may cover whatever the names after them are. Missing are those after which commands follow, as in
// "npm exec" and "git config alias.x", and those that delete or publish.
var subcommands = map[string][]string{
	"bun":   {"add", "build", "install", "test"},
	"cargo": {"bench", "build", "check", "clippy", "doc", "fmt", "test"},
	"git":   {"add", "blame", "commit", "diff", "fetch", "log", "ls-files", "show", "status"},
	"go":    {"build", "doc", "fmt", "get", "list", "test", "vet"},
	"npm":   {"ci", "install", "ls", "outdated", "test"},
	"pip":   {"install", "list", "show"},
	"pip3":  {"install", "list", "show"},
	"pnpm":  {"add", "build", "install", "list", "test"},
	"yarn":  {"add", "build", "install", "list", "test"},
}

// scriptRunners are the programs that run a script of a project: its name follows "run".
var scriptRunners = []string{"bun", "npm", "pnpm", "yarn"}

// commandScope returns what a grant of a command covers: all commands that begin with the same program and
// subcommand and have the same options, or else the command alone. Options are not free, because some run other
// programs or write files, as "go test -exec" and "git log --output" do. A command is covered alone if it has
// options before the subcommand, or characters that make it more than a single simple command.
func commandScope(command any) string {
	text, ok := command.(string)
	if !ok {
		list, _ := json.Marshal(command) // it was decoded from JSON
		return "=" + string(list)
	}
	if strings.ContainsFunc(text, func(r rune) bool { return !isPlain(r) }) {
		return "=" + text
	}
	unquoted := strings.NewReplacer(`"`, "", `'`, "").Replace(text)
	words := strings.FieldsFunc(unquoted, func(r rune) bool { return r == ' ' || r == '\t' })
	var prefix int
	switch {
	case len(words) >= 3 && slices.Contains(scriptRunners, words[0]) && words[1] == "run" && isName(words[2]):
		prefix = 3
	case len(words) >= 2 && slices.Contains(subcommands[words[0]], words[1]):
		prefix = 2
	default:
		return "=" + text
	}
	options := slices.DeleteFunc(slices.Clone(words[prefix:]), isName)
	slices.Sort(options)
	return strings.Join(append(words[:prefix], slices.Compact(options)...), " ")
}

// isPlain reports whether a character has no meaning to a shell but that of a blank or a quote. It names the
// harmless ones, because shells differ.
func isPlain(r rune) bool {
	return unicode.IsLetter(r) || unicode.IsDigit(r) || strings.ContainsRune(" \t'\"-_./:@%+,=~", r)
}

// isName reports whether a word of a command is no option.
func isName(word string) bool { return !strings.HasPrefix(word, "-") }
