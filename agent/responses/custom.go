package responses

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"

	"github.com/bullpen-run/bullpen/agent"
)

const (
	// customTool is the type of tools of the client whose input is a text. Models get them as functions
	// with the text as their one argument.
	customTool  = "custom"
	customInput = "input"
)

// serverTools are the types of OpenAI's tools which Codex offers, but can do without.
var serverTools = []string{"web_search", "image_generation"}

// customDefinition describes a custom tool to the model.
func (t *tool) customDefinition() agent.Definition {
	d := agent.Definition{
		Name: t.Name, Description: t.Description, Schema: json.RawMessage(schemaStart +
			`"input":{"type":"string","description":"The whole input of the tool, as it is."}},"required":["input"]}`),
	}
	if f := &t.Format; f.Type == "grammar" {
		d.Description += fmt.Sprintf("\n\nThe input must match this grammar (%s):\n%s", f.Syntax, f.Definition)
	}
	return d
}

// customTools returns the names of a request's custom tools.
func (r *request) customTools() map[string]bool {
	names := map[string]bool{}
	for _, raw := range r.Tools {
		var t tool
		if json.Unmarshal(raw, &t) == nil && t.Type == customTool {
			names[t.Name] = true
		}
	}
	return names
}

// inputOf returns the input of a custom tool in the model's arguments. Some models name it otherwise.
func inputOf(arguments string) string {
	var members map[string]json.RawMessage
	if json.Unmarshal([]byte(arguments), &members) != nil {
		return arguments
	}
	raw := members[customInput]
	if len(members) == 1 {
		for _, raw = range members {
		}
	}
	var input string
	if json.Unmarshal(raw, &input) != nil {
		return arguments
	}
	return input
}

// inputReader reads the input of a custom tool in arguments that arrive in parts.
type inputReader struct {
	rest  string // what is not read yet
	begun bool   // the input has begun
	ended bool   // the input is over, or is nowhere
}

// maxBeforeInput is where the input begins at the latest, in bytes.
const maxBeforeInput = 100

// add returns what a part of the arguments adds to the input.
func (r *inputReader) add(part string) string {
	if r.ended {
		return ""
	}
	r.rest += part
	if !r.begun {
		_, after, found := strings.Cut(r.rest, `"`+customInput+`"`)
		after = strings.TrimLeft(after, " \t\r\n")
		value, colon := strings.CutPrefix(after, ":")
		text, quoted := strings.CutPrefix(strings.TrimLeft(value, " \t\r\n"), `"`)
		if !found || !colon || !quoted {
			r.ended = len(r.rest) > maxBeforeInput
			return ""
		}
		r.rest, r.begun = text, true
	}
	var out strings.Builder
	for !r.ended && r.rest != "" {
		text, n := unescape(r.rest)
		if n == 0 { // an escape that is not complete
			break
		}
		out.WriteString(text)
		r.ended = r.rest[0] == '"'
		r.rest = r.rest[n:]
	}
	return out.String()
}

// unescape returns the first character of the rest of a JSON string, and how many bytes that takes; 0 if
// more of the rest must be known. The end of the string is no text.
func unescape(rest string) (text string, n int) {
	switch {
	case rest[0] == '"':
		return "", 1
	case rest[0] != '\\':
		n = strings.IndexAny(rest, `"\`)
		if n < 0 {
			n = len(rest)
		}
		return rest[:n], n
	case len(rest) < 2:
		return "", 0
	case rest[1] != 'u':
		if err := json.Unmarshal([]byte(`"`+rest[:2]+`"`), &text); err != nil {
			text = rest[1:2]
		}
		return text, 2
	case len(rest) < 6:
		return "", 0
	}
	first := hexRune(rest[2:6])
	if !utf16.IsSurrogate(first) {
		return string(first), 6
	}
	if len(rest) < 12 {
		return "", 0
	}
	return string(utf16.DecodeRune(first, hexRune(rest[8:12]))), 12
}

func hexRune(digits string) rune {
	n, err := strconv.ParseUint(digits, 16, 32)
	if err != nil {
		return 0xfffd
	}
	return rune(n)
}

// encodeThought returns what a model has thought for a client that only sends it back.
func encodeThought(thought *agent.Thinking) string {
	return base64.StdEncoding.EncodeToString(value(thought))
}

// decodeThought reads the text of encodeThought. It returns nil for one of another server.
func decodeThought(text string) *agent.Thinking {
	raw, err := base64.StdEncoding.DecodeString(text)
	var thought agent.Thinking
	if err != nil || json.Unmarshal(raw, &thought) != nil || thought == (agent.Thinking{}) {
		return nil
	}
	return &thought
}
